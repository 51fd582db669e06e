"""`bench --plot`: pictures of results, those that are measured now and those in a file; and bars on a terminal only."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dsv4_compile.cli import bench, output, plot
from dsv4_compile.cli.app import app

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"

DATA: dict[str, Any] = {
    "mhc": {
        "rows": {"64/1": {"copy": [1.0, 2.0], "cuda": [3.0, 4.0], "cuda error": 1.0}, "pre/64/8": {"copy": [1, 2]}}
    },
    "projections": {"rows": {"flash/1": {"ours": 2.0, "floor": 1.0}, "flash/64": {"ours": 3.0, "floor": 1.0}}},
    "model": {"model": "tiny", "rows": {"decode-1": {"eager": {"ms": 2.0}, "dsv4": {"ms": 1.0}}}},
    "compile-time": {"rows": {"layers/4": {"inductor": {"seconds": 9.0}, "dsv4": {"seconds": 8.0}}}},
    "decode": {"rows": {"batch 1": {"dsv4": {"tokens_per_s": 90.0, "steady_ms": 9.0}, "inductor": {"error": "no"}}}},
    "replay": {"rows": {"host": {"call": 9.0, "bare": 5.0, "cuts": 2.0}, "memory": {"all": 3, "largest": 2}}},
    "vllm-engine": {
        "rows": {"qwen3_next batch 8": {"vllm": {"ms": 3.0, "kernel_us": 900.0}, "dsv4": {"ms": 2.0, "mhc_us": 0.0}}},
        "starts": {"qwen3_next": {"vllm": {"compile_seconds": 9.0}}, "deepseek_v4": {"replay": {"start_seconds": 1.0}}},
        "replay": {"1": {"replay": {"microseconds": {"vllm": 24.0, "dsv4": 6.0}}}},
    },
    "dump": {"layers": 2, "seconds": {"dsv4": {"total": 2.0, "passes": 1.0}, "dsv4 with a dump": {"total": 3.0}}},
}

BENCHMARK = """
import json, sys
json.dump({data!r}, open(sys.argv[sys.argv.index("--json") + 1], "w"))
print("a table")
"""

TRACK = """
import sys, time
from dsv4_compile.cli.output import track
for number in track(range(3), "Counting [red]", delay={delay}):
    print("item", number, flush=True)
    time.sleep(0.2)
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


# ------------------------------------------------------------------------------------------------------------ pictures


def test_what_is_drawn_are_the_numbers_of_the_file():
    hidden, pre = plot.panels("mhc", DATA["mhc"])
    assert hidden.series == {"copy hot": {1: 1.0}, "copy cold": {1: 2.0}, "cuda hot": {1: 3.0}, "cuda cold": {1: 4.0}}
    assert (hidden.title, pre.title) == ("post_pre, hidden size 64", "pre, hidden size 64") and hidden.has_lines
    (flash,) = plot.panels("projections", DATA["projections"])
    assert flash.series == {"ours": {1: 2.0, 64: 3.0}, "floor": {1: 1.0, 64: 1.0}}
    (model,) = plot.panels("model", DATA["model"])
    assert model.series == {"eager": {"decode-1": 2.0}, "dsv4": {"decode-1": 1.0}} and not model.has_lines
    token, kernels, compiled, boundary = plot.panels("vllm-engine", DATA["vllm-engine"])
    assert token.series == {"vllm": {"qwen3_next batch 8": 3.0}, "dsv4": {"qwen3_next batch 8": 2.0}}
    assert kernels.series == {"vllm": {"qwen3_next batch 8": 900.0}}
    assert compiled.series == {"vllm": {"qwen3_next": 9.0}}
    assert boundary.series == {"vllm": {1: 24.0}, "dsv4": {1: 6.0}} and boundary.has_lines
    (dump,) = plot.panels("dump", DATA["dump"])
    assert dump.series["total"] == {"dsv4": 2.0, "dsv4 with a dump": 3.0}


@pytest.mark.parametrize("name", list(bench.NAMES))
def test_every_benchmark_can_be_drawn(name, tmp_path):
    pytest.importorskip("matplotlib")
    source, picture = tmp_path / "results.json", tmp_path / "out" / "picture.svg"
    source.write_text(json.dumps(DATA[name]))
    done = run("bench", name, "--plot", picture, "--from", source)
    assert done.exit_code == 0, done.output
    assert xml.etree.ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert f"Written: {picture}" in done.stderr


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_the_results_of_the_repository_can_be_drawn(path, tmp_path):
    pytest.importorskip("matplotlib")
    name = path.stem.rpartition("-")[0].replace("_", "-")
    assert run("bench", "--plot", tmp_path / "a.png", "--from", path, name).exit_code == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_measured_now_is_drawn_and_its_table_printed(tmp_path, monkeypatch, capfd):
    pytest.importorskip("matplotlib")
    script = tmp_path / "mine.py"
    script.write_text(BENCHMARK.format(data=DATA["mhc"]))
    monkeypatch.setattr(bench, "script", lambda name: script)
    with pytest.raises(SystemExit) as stop:
        app(["bench", "mhc", f"--plot={tmp_path / 'a.svg'}", "--tokens", "1"])
    assert stop.value.code == 0 and (tmp_path / "a.svg").exists()
    assert capfd.readouterr().out == "a table\n"
    with pytest.raises(SystemExit):
        app(["bench", "--json", "mhc", "--plot", str(tmp_path / "b.svg")])
    assert json.loads(capfd.readouterr().out) == DATA["mhc"] and (tmp_path / "b.svg").exists()


def test_the_benchmarks_own_file_is_written_as_well(tmp_path, monkeypatch, capfd):
    script = tmp_path / "mine.py"
    script.write_text(BENCHMARK.format(data=DATA["mhc"]))
    monkeypatch.setattr(bench, "script", lambda name: script)
    with pytest.raises(SystemExit):
        app(["bench", "--json", "mhc", "--json", str(tmp_path / "own.json")])
    assert json.loads(capfd.readouterr().out) == json.loads((tmp_path / "own.json").read_text()) == DATA["mhc"]


def test_without_matplotlib_it_is_one_sentence_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(bench, "script", lambda name: pytest.fail("it was measured"))
    done = run("bench", "mhc", "--plot", tmp_path / "a.svg")
    assert done.exit_code == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("--plot needs matplotlib: pip install 'dsv4_compile[plot]'")


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["mhc", "--plot"], 2, "--plot takes the name of a file"),
        (["mhc", "--from", "a.json"], 2, "give it with --plot FILE"),
        (["mhc", "--plot", "a.svg", "--from", "none.json"], 2, "There is no file none.json"),
        (["mhc", "--plot", "a.svg", "--from", "none.json", "--tokens", "1"], 2, "--tokens 1 has no meaning"),
        (["mhc", "--plot", "a.doc"], 1, "a.doc says no kind of picture"),
        (["mhc", "--plot", "a.svg", "--from", str(RESULTS / "model-h100.json")], 1, "There are no results"),
        (["mhc", "--plot", "a.svg", "--from", __file__], 1, "is no JSON"),
    ],
)
def test_what_cannot_be_drawn_is_one_sentence(arguments, status, sentence, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    done = run("bench", *arguments)
    assert done.exit_code == status and sentence in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_names_in_results_are_no_formulas(tmp_path):
    pytest.importorskip("matplotlib")
    data = {"model": "$\\frac{$", "rows": {"$x^": {"a$b$\x1b": {"ms": 1.0}}}}
    plot.plot("model", data, tmp_path / "a.svg")
    assert (tmp_path / "a.svg").exists()


# ---------------------------------------------------------------------------------------------------------------- bars


def test_a_bar_is_drawn_on_a_terminal_and_items_get_through():
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", TRACK.format(delay=0)], stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    drawn = b""
    while True:
        try:
            chunk = os.read(ours, 1024)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        drawn += chunk
    assert process.stdout is not None and process.stdout.read() == b"item 0\nitem 1\nitem 2\n"
    assert process.wait() == 0
    os.close(ours)
    assert b"Counting [red]" in drawn and b"/3" in drawn


@pytest.mark.parametrize("delay", [0, 60])
def test_no_bar_without_a_terminal(delay):
    done = subprocess.run([sys.executable, "-c", TRACK.format(delay=delay)], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("item 0\nitem 1\nitem 2\n", "")


def test_track_hands_on_what_is_raised():
    with pytest.raises(ValueError, match="in the loop"):
        for _ in output.track([1, 2], "Counting"):
            raise ValueError("in the loop")
