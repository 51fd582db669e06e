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


@pytest.mark.parametrize("draws", [0, 4])
def test_behind_its_first_replay_the_driver_launches_a_graph_that_draws_nothing(
    monkeypatch: pytest.MonkeyPatch, generator: Generator, draws: int
) -> None:
    """One that does is replayed by torch, which tells it which numbers, each time."""
    made, launched = recorder(monkeypatch)
    graph = Graph(generator, draws)
    replay = made._replay(graph, "executable")
    for _ in range(4):
        replay()
    by_torch = 4 if draws else 1
    assert graph.replays == by_torch and launched == (4 - by_torch) * [("executable", "stream")]
    assert generator.offset == 4 * draws
    made.is_here = False  # another device is current: torch switches
    replay()
    assert graph.replays == by_torch + 1 and len(launched) == 4 - by_torch


def test_a_launch_that_fails_raises(monkeypatch: pytest.MonkeyPatch, generator: Generator) -> None:
    class Status(int):
        name = "CUDA_ERROR_LAUNCH_FAILED"

    made, _ = recorder(monkeypatch, Status(1))
    replay = made._replay(Graph(generator, 0), "executable")
    replay()
    with pytest.raises(RuntimeError, match="CUDA_ERROR_LAUNCH_FAILED"):
        replay()
