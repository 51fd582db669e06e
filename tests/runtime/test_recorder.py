"""How a recorded graph is launched, with stand-ins for the driver and for the graph."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from dsv4_compile.runtime import recorder as module
from dsv4_compile.runtime.recorder import CudaRecorder


class Generator:
    offset = 0

    def get_offset(self) -> int:
        return self.offset


class Graph:
    def __init__(self, generator: Generator, draws: int) -> None:
        self.generator, self.draws, self.replays = generator, draws, 0

    def replay(self) -> None:
        self.replays += 1
        self.generator.offset += self.draws


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> Generator:
    made = Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", (made,))
    return made


def recorder(monkeypatch: pytest.MonkeyPatch, status: Any = 0) -> tuple[CudaRecorder, list[tuple[Any, Any]]]:
    launched: list[tuple[Any, Any]] = []

    def launch(executable: Any, stream: Any) -> tuple[Any]:
        launched.append((executable, stream))
        return (status,)

    monkeypatch.setattr(module, "bindings", lambda: (types.SimpleNamespace(cuGraphLaunch=launch), None))
    made = CudaRecorder.__new__(CudaRecorder)
    made.index, made.is_here, made._stream = 0, True, "stream"
    return made, launched


def test_a_graph_is_launched_by_the_driver_behind_its_first_replay(
    monkeypatch: pytest.MonkeyPatch, generator: Generator
) -> None:
    made, launched = recorder(monkeypatch)
    graph = Graph(generator, 0)
    replay = made._replay(graph, "executable")
    for _ in range(4):
        replay()
    assert graph.replays == 1 and launched == 3 * [("executable", "stream")]
    made.is_here = False  # another device is current: torch switches
    replay()
    assert graph.replays == 2 and len(launched) == 3


def test_a_graph_that_draws_random_numbers_is_replayed_by_torch(
    monkeypatch: pytest.MonkeyPatch, generator: Generator
) -> None:
    """Which tells it which ones, each time."""
    made, launched = recorder(monkeypatch)
    graph = Graph(generator, 4)
    replay = made._replay(graph, "executable")
    for _ in range(4):
        replay()
    assert graph.replays == 4 and not launched and generator.offset == 16


def test_a_launch_that_fails_raises(monkeypatch: pytest.MonkeyPatch, generator: Generator) -> None:
    class Status(int):
        name = "CUDA_ERROR_LAUNCH_FAILED"

    made, _ = recorder(monkeypatch, Status(1))
    replay = made._replay(Graph(generator, 0), "executable")
    replay()
    with pytest.raises(RuntimeError, match="CUDA_ERROR_LAUNCH_FAILED"):
        replay()
