"""`pieces`: cuts and their reasons, keys, sharing, what is captured and what it costs; of reports made by hand."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

from dsv4_compile.cli.app import app
from dsv4_compile.cli.pieces import _letter

CUT = "aten.nonzero cannot be captured, model.py:12"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def piece(number: int, key: str, kind: str = "captured", reason: str = "between two boundaries") -> dict[str, Any]:
    return {
        "name": f"piece_{number}",
        "key": key,
        "shared_with": 1,
        "kind": kind,
        "reason": reason,
        "nodes": 10 + number,
    }


PIECES = [
    piece(0, "k0"),
    piece(1, "k1", "eager", CUT),
    piece(2, "k0"),
    piece(3, "k2", "compiled", "larger than every captured size"),
]
CAPTURED = {
    "mode": "piecewise",
    "sizes": [1, 64],
    "replays": 7,
    "bytes": 2_500_000,
    "fallbacks": [{"reason": "an input lies at another address", "piece": "piece_2"}],
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    torch._dynamo.reset()
    with torch.no_grad():
        options = {"compiler": "eager", "dump_dir": str(folder)}
        torch.compile(nn.Linear(4, 4), backend="dsv4", options=options)(torch.randn(2, 4))
    return folder


@pytest.fixture
def cut(plain: Path, tmp_path: Path) -> Path:
    """A dump whose report has pieces of every kind."""
    shutil.copytree(plain, tmp_path / "cut")
    (path,) = (tmp_path / "cut").glob("*/report_0.json")
    report = json.loads(path.read_text())
    report["graphs"][0] |= {"pieces": PIECES, "cudagraphs": CAPTURED}
    path.write_text(json.dumps(report))
    return tmp_path / "cut"


def test_cuts_keys_sharing_and_kinds_are_there(cut):
    done = run("pieces", cut)
    assert done.exit_code == 0, done.output
    assert "Graph 0/0: 4 pieces, 3 distinct; 2 captured, 1 compiled, 1 eager" in done.stdout
    assert "  [a] (b) [a] c\n" in done.stdout
    assert re.search(rf"eager +b +piece_1 +11 +{re.escape(CUT)}", done.stdout)
    assert re.search(r"^ a +k0 +captured +2 +10", done.stdout, re.MULTILINE)


def test_memory_replays_and_fallbacks_are_there(cut):
    done = run("pieces", cut)
    assert "CUDA graphs: piecewise, 7 replays, sizes 1, 64, 2.5 MB of memory" in done.stdout
    assert "not captured: an input lies at another address (piece piece_2)" in done.stdout


def test_data_of_pieces_has_everything(cut):
    (graph,) = json.loads(run("pieces", cut, "--json").stdout)
    assert [{name: one[name] for name in PIECES[0]} for one in graph["pieces"]] == PIECES
    assert [one["letter"] for one in graph["pieces"]] == ["a", "b", "a", "c"]
    assert graph["cudagraphs"] == CAPTURED
    assert [program["pieces"] for program in graph["programs"]] == [["piece_0", "piece_2"], ["piece_1"], ["piece_3"]]


def test_one_piece_is_told_without_tables(plain):
    done = run("pieces", plain)
    assert "Graph 0/0: 1 piece, 1 distinct; 1 eager" in done.stdout and "Programs" not in done.stdout


@pytest.mark.parametrize(("state", "end"), [("failed", "failed"), ("compiling", "was not finished")])
def test_a_graph_without_pieces_says_why(state, end, cut):
    (path,) = cut.glob("*/report_0.json")
    report = json.loads(path.read_text())
    report["graphs"][0]["pieces"] = []
    path.write_text(json.dumps(report))
    (path,) = cut.glob("*/index.json")
    path.write_text(path.read_text().replace('"state": "compiled"', f'"state": "{state}"'))
    assert f"Graph 0/0 has no pieces: its compilation {end}." in run("pieces", cut).stdout


def test_compare_tells_a_capture_that_was_lost(plain, cut):
    done = run("compare", cut, plain)
    assert done.exit_code == 1 and re.search(r"4, 2 captured +1 ", done.stdout)
    assert run("compare", plain, cut).exit_code == 0
    (graph,) = json.loads(run("compare", plain, cut, "--json").stdout)["graphs"]
    assert graph["pieces"] == [[1, 0], [4, 2]]


def test_letters_go_on_behind_z():
    assert [_letter(number) for number in (0, 25, 26, 27, 26 * 26)] == ["a", "z", "ba", "bb", "baa"]
