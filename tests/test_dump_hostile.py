"""Dumps that are damaged, made up or cannot be written: one sentence, and never a broken compilation."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

import dsv4_compile
from dsv4_compile.cli.app import app
from dsv4_compile.dump.index import GraphEntry, Index, StageEntry
from dsv4_compile.dump.reader import DumpError, read
from dsv4_compile.dump.typed import built
from dsv4_compile.passes.sites import MhcSite, ProjectionGroup
from tests.spellings import Stack, hf_post, hf_pre

EVIL = "</script><script>alert(1)</script>\x1b[2J\x1b]0;title\x07../../etc"

COMPILES = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
with torch.no_grad():
    out = torch.compile(model, backend="dsv4", options={"compiler": "eager", "dump_dir": sys.argv[1]})(torch.ones(2, 4))
    assert torch.equal(out, model(torch.ones(2, 4)))
import dsv4_compile
print(dsv4_compile.report().graphs[0].notes)
"""

ENDLESS = """
import sys, torch
with torch.no_grad():
    for width in range(4, 1000):
        torch._dynamo.reset()
        model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(8)])
        options = {"compiler": "eager", "dump_dir": sys.argv[1]}
        torch.compile(model, backend="dsv4", options=options)(torch.ones(2, width))
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump with mHC and projections."""
    folder = tmp_path_factory.mktemp("whole")
    model = nn.Sequential(Stack(hf_pre, hf_post, layers=1), nn.Linear(64, 8))
    torch._dynamo.reset()
    with torch.no_grad():
        options = {"compiler": "eager", "dump_dir": str(folder)}
        torch.compile(model, backend="dsv4", options=options)(torch.randn(2, 3, 4, 64))
    return folder


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    """The folder of the one run in a copy."""
    shutil.copytree(whole, tmp_path / "copy")
    return next((tmp_path / "copy").iterdir())


# ------------------------------------------------------------------------------------------------------ damaged dumps


def every_path(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = data.items() if isinstance(data, dict) else enumerate(data[:2]) if isinstance(data, list) else ()
    for key, value in items:
        yield from every_path(value, (*path, key))


def changed(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    made = copy.deepcopy(data)
    place = made
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return made


@pytest.mark.parametrize("file", ["index.json", "report_0.json", "graph_0_0/mhc.json"])
def test_values_of_other_types_are_a_sentence_or_make_no_difference(file, copied):
    text = (copied / file).read_text()
    data = json.loads(text)
    generator = random.Random(0)
    cases = [(path, value) for path in every_path(data) for value in (None, "x", -1, [], {}, [1], {"a": 1}, ...)]
    commands = [("show",), ("show", "0/0"), ("show", "--pass", "mhc", "--module", "0"), ("diff",), ("explain",)]
    commands += [("streams",), ("pieces",), ("report",)]
    for path, value in generator.sample(cases, 60):
        (copied / file).write_text(json.dumps(changed(data, path, value)))
        command = generator.choice(commands)
        done = run(command[0], copied, *command[1:])
        assert isinstance(done.exception, SystemExit | None), (path, value, command, done.exception)
        assert done.exit_code in (0, 1, 2) and "Traceback" not in done.output


@pytest.mark.parametrize("file", ["index.json", "report_0.json", "graph_0_0/mhc.json"])
@pytest.mark.parametrize("part", [0.0, 0.3, 0.99])
def test_a_file_that_was_cut_off_is_a_sentence(file, part, copied):
    text = (copied / file).read_text()
    (copied / file).write_text(text[: int(len(text) * part)])
    done = run("diff", copied, "--pass", "mhc") if "mhc" in file else run("explain", copied)
    assert done.exit_code == 1 and done.stdout == ""
    assert re.fullmatch(r".* is not complete \(.*\): it was copied or written halfway\.\n", done.stderr)


def test_types_are_checked_to_the_bottom():
    stage = {"name": "mhc", "nodes": 1, "ops": {"aten.mm.default": 2}, "seconds": 1}
    graph = {"id": "0", "folder": "g", "report": "r", "stages": [stage]}
    assert built(Index, {"graphs": [graph]}).graphs == [GraphEntry("0", "g", "r", stages=[StageEntry(**stage)])]
    for wrong in ({"ops": {"a": "2"}}, {"nodes": True}, {"nodes": None}, {"seconds": "1"}, {"more": 1}, {"ops": [1]}):
        with pytest.raises(TypeError):
            built(Index, {"graphs": [{**graph, "stages": [{**stage, **wrong}]}]})
    with pytest.raises(TypeError, match=r"MhcSite\.form is 'pro'"):
        built(MhcSite, {"site": "", "form": "pro", "norm_fused": True, "kernel": "", "streams": 4, "hidden": 8})


def test_records_of_the_report_are_what_they_were(whole):
    (graph,) = read(whole).graphs
    assert [built(MhcSite, record) for record in graph.report["mhc"]] == dsv4_compile.report().graphs[0].mhc
    record = {"site": "a", "input": "x", "linears": [], "strategy": "serial", "reason": "", "packs": 0}
    record |= {
        "measured": [{"tokens": None, "strategy": "s", "source": "", "microseconds": {"s": 1.5}, "runs": [[0, 1]]}]
    }
    assert built(ProjectionGroup, record).measured[0].runs == ((0, 1),)


# ---------------------------------------------------------------------------------------------------------- evil names


def test_evil_names_stay_text_and_inside_the_folder(tmp_path):
    model = nn.Module()
    model.add_module("inner", nn.Linear(4, 4))
    outer = nn.ModuleDict()
    outer[EVIL.replace(".", "_")] = model.inner

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = outer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return next(iter(self.held.values()))(x)

    torch._dynamo.reset()
    with torch.no_grad():
        options = {"compiler": "eager", "dump_dir": str(tmp_path / "dump")}
        torch.compile(Holder(), backend="dsv4", options=options)(torch.randn(2, 4))
    assert [path.name for path in tmp_path.iterdir()] == ["dump"]
    assert run("report", tmp_path / "dump").exit_code == 0
    page = (tmp_path / "dump" / "report.html").read_text()
    assert page.count("<script>") == 1 and page.count("</script>") == 1
    assert "\x1b" not in page and "\x07" not in page and "alert(1)" in page
    shown = run("show", tmp_path / "dump", "--pass", "before").stdout
    assert "alert(1)" in shown and not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", shown)


def test_evil_pieces_and_fallbacks_are_only_text(copied):
    path = copied / "report_0.json"
    report = json.loads(path.read_text())
    piece = {"name": EVIL, "key": EVIL, "shared_with": 0, "kind": "captured", "reason": EVIL, "nodes": 3}
    report["graphs"][0]["pieces"] = [piece, {**piece, "kind": EVIL}]
    report["graphs"][0]["cudagraphs"] = {
        **{"mode": EVIL, "sizes": [1], "replays": 1, "bytes": 1},
        "fallbacks": [{"reason": EVIL, EVIL: EVIL}],
    }
    path.write_text(json.dumps(report))
    done = run("pieces", copied)
    assert done.exit_code == 0 and "\x1b" not in done.stdout and "alert(1)" in done.stdout
    assert run("report", copied).exit_code == 0
    page = (copied / "report.html").read_text()
    assert page.count("<script>") == 1 and "\x1b" not in page


def test_halves_of_characters_can_be_printed(copied):
    for path in (copied / "index.json", copied / "report_0.json"):
        path.write_text(re.sub(r'"(site|name)": "', r'"\1": "\\ud800', path.read_text()))
    environment = os.environ | {"PYTHONIOENCODING": "utf-8"}
    for command in ("show", "explain", "streams", "pieces", "report"):
        words = [sys.executable, "-m", "dsv4_compile", command, str(copied)]
        done = subprocess.run(words, capture_output=True, text=True, env=environment)
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert "\\ud800" in run("explain", copied).stdout


def test_a_pipe_in_a_dump_is_not_waited_for(copied):
    (copied / "index.json").unlink()
    os.mkfifo(copied / "index.json")
    done = run("show", copied)
    assert done.exit_code == 1 and done.stderr.endswith(" is no file.\n")


@pytest.mark.parametrize("name", ["../../outside", "/etc/hostname", "graph_0_0/../../../outside"])
def test_no_file_outside_the_folder_is_opened(name, copied):
    (copied.parent.parent / "outside").write_text("secret")
    path = copied / "index.json"
    index = json.loads(path.read_text())
    index["graphs"][0]["stages"][-1]["text"] = name
    path.write_text(json.dumps(index))
    done = run("show", copied, "--pass", "attention")
    assert done.exit_code == 1 and "outside its folder: not read." in done.stderr and "secret" not in done.output


# ------------------------------------------------------------------------------------------- writing that is in trouble


def start(code: str, folder: Path, **keywords: Any) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(folder)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **keywords
    )


def test_a_folder_that_cannot_be_made_does_not_break_the_compilation(tmp_path):
    (tmp_path / "file").write_text("")
    process = start(COMPILES, tmp_path / "file" / "dump")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "the dump could not be written" in out and err.count("The dump could not be written") == 1


def test_a_folder_that_becomes_read_only_does_not_break_the_compilation(tmp_path, monkeypatch):
    from dsv4_compile.dump import writer

    write, written = writer.write_atomically, []

    def until_full(path: Path, content: str) -> None:
        written.append(path)
        if len(written) > 4:
            raise OSError(30, "Read-only file system")
        write(path, content)

    monkeypatch.setattr(writer, "write_atomically", until_full)
    torch._dynamo.reset()
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    with torch.no_grad():
        options = {"compiler": "eager", "dump_dir": str(tmp_path)}
        out = torch.compile(model, backend="dsv4", options=options)(x)
    torch.testing.assert_close(out, model(x).detach())
    (note,) = dsv4_compile.report().graphs[0].notes
    assert note.startswith("the dump could not be written") and "Read-only file system" in note
    assert read(tmp_path).graphs[0].entry.state == "compiling"
    assert run("show", tmp_path).exit_code == 0


def test_a_dump_stays_where_it_began_when_the_script_changes_its_folder(tmp_path, monkeypatch):
    from dsv4_compile.dump.writer import end

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    with torch.no_grad():
        options = {"compiler": "eager", "dump_dir": "dump"}
        torch.compile(nn.Linear(4, 4), backend="dsv4", options=options)(torch.randn(2, 4))
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert str(read(tmp_path / "dump").runs[0].path) in end("")
    assert not list((tmp_path / "elsewhere").iterdir())
    assert read(tmp_path / "dump").runs[0].index.ended


def test_a_report_that_cannot_be_described_does_not_break_the_compilation(tmp_path, monkeypatch):
    """As when another thread changes it at that moment."""
    from dsv4_compile.dump import writer

    write, count = writer._Run.write_report, iter(range(9))

    def fail(self: Any, report: Any) -> str:
        if next(count):
            raise RuntimeError("dictionary changed size during iteration")
        return write(self, report)

    monkeypatch.setattr(writer._Run, "write_report", fail)
    torch._dynamo.reset()
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    with torch.no_grad():
        options = {"compiler": "eager", "dump_dir": str(tmp_path)}
        out = torch.compile(model, backend="dsv4", options=options)(x)
    torch.testing.assert_close(out, model(x).detach())
    assert any("dictionary changed size" in note for note in read(tmp_path).runs[0].index.notes)


def test_a_writer_that_is_killed_leaves_what_can_be_read(tmp_path):
    process = start(ENDLESS, tmp_path)
    deadline = time.monotonic() + 240
    while len(list(tmp_path.glob("*/graph_*"))) < 3 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    graphs = read(tmp_path).graphs
    assert len(graphs) >= 2
    for graph in graphs:
        for stage in graph.entry.stages:
            assert graph.nodes(stage.name) and graph.listing(stage.name)
    done = run("show", tmp_path)
    assert done.exit_code == 0 and "still running, or was killed" in done.stdout
    assert run("report", tmp_path).exit_code == 0


def test_two_processes_in_one_folder_leave_two_whole_dumps(tmp_path):
    processes = [start(COMPILES, tmp_path) for _ in range(2)]
    for process in processes:
        _, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
    dump = read(tmp_path)
    assert len(dump.runs) == 2 and not dump.problems
    assert all(graph.entry.state == "compiled" and graph.listing("mhc") for graph in dump.graphs)
    assert not list(tmp_path.rglob("*.part"))


def test_a_graph_that_inductor_cannot_compile_is_in_the_dump_with_its_error(tmp_path, monkeypatch):
    from torch._inductor import compile_fx

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no code today\nand a second line")

    monkeypatch.setattr(compile_fx, "compile_fx_inner", fail)
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match="no code today"):
        torch.compile(nn.Linear(4, 4), backend="dsv4", options={"dump_dir": str(tmp_path)})(torch.randn(2, 4))
    (graph,) = read(tmp_path).graphs
    assert graph.entry.state == "failed" and "no code today" in graph.entry.error
    done = run("show", tmp_path)
    assert done.exit_code == 1 and "0/0 failed: " in done.stdout and "no code today" in done.stdout
    assert run("report", tmp_path).exit_code == 0


def test_a_dump_of_a_later_release_says_so(copied):
    path = copied / "index.json"
    path.write_text(json.dumps({"schema": 99, "version": "9.0", "graphs": "another way"}))
    with pytest.raises(DumpError, match=r"has format 99, written by dsv4_compile 9\.0, and this version reads format"):
        read(copied)
