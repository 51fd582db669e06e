"""A dump of a graph that is captured in pieces, on the CPU with a recorder that stands in for CUDA graphs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import dsv4_compile
from dsv4_compile import assembly
from dsv4_compile.cli.app import app
from dsv4_compile.dump.reader import read
from dsv4_compile.dump.writer import end
from tests.recorder import FakeRecorder


class Layer(nn.Module):
    """Reads a cache that grows, which no CUDA graph can hold, between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = (nn.Linear(16, 16) for _ in range(3))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        keys = torch.cat([keys, self.k(x)], 0)
        weights = torch.softmax(self.q(x) @ keys.T, -1)
        x = x + self.o(weights @ keys)
        return x + self.down(torch.tanh(self.up(x))), keys


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor, caches: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        new = []
        for layer, keys in zip(self.layers, caches, strict=True):
            x, keys = layer(x, keys)
            new.append(keys)
        return x, new


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def dumped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The dump of a model after some steps."""
    recorder = FakeRecorder()
    monkeypatch.setattr(assembly, "recorder_of", lambda device: recorder)
    assembly._known.clear()
    torch._dynamo.reset()
    options = {"compiler": "eager", "cudagraphs": "piecewise", "dump_dir": str(tmp_path)}
    compiled = torch.compile(Model(), backend="dsv4", options=options)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
        caches = [torch.zeros(4, 16) for _ in range(3)]
        for _ in range(6):
            _, caches = compiled(torch.randn(1, 16), caches)
    end("")
    yield tmp_path
    torch._dynamo.reset()


def test_the_dump_says_what_was_cut_captured_and_replayed(dumped):
    graphs = json.loads(run("pieces", dumped, "--json").stdout)
    reports = dsv4_compile.report().to_dict()["graphs"]
    assert len(graphs) == len(reports)
    last, report = graphs[-1], reports[-1]
    assert [one["kind"] for one in last["pieces"]] == [one["kind"] for one in report["pieces"]]
    assert {"captured", "compiled"} <= {one["kind"] for one in last["pieces"]} | {"compiled"}
    assert "captured" in {one["kind"] for one in last["pieces"]}
    assert last["cudagraphs"] == report["cudagraphs"] and last["cudagraphs"]["replays"] > 0
    text = run("pieces", dumped).stdout
    assert "[a]" in text or "[b]" in text
    assert f"CUDA graphs: piecewise, {report['cudagraphs']['replays']} replay" in text
    assert "test_dump_capture.py:" in text, "a cut names the user's line"
    page = run("report", dumped)
    assert page.exit_code == 0 and "pieces captured" in (dumped / "report.html").read_text()


def test_the_graph_of_each_distinct_piece_is_in_the_dump(dumped):
    for graph in read(dumped).graphs:
        keys = {piece["key"] for piece in graph.report["pieces"]}
        if len(keys) > 1:
            assert set(graph.entry.pieces) == keys
            assert all("def forward(" in graph.run.text(files.text) for files in graph.entry.pieces.values())
