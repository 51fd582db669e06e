"""The dump: what is in it, also when a compilation fails, a process dies or several write at once; and reading it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsv4_compile
from dsv4_compile.dump import writer
from dsv4_compile.dump.reader import DumpedGraph, DumpError, NoSuchError, read
from dsv4_compile.dump.schema import SCHEMA, NodeRecord, printable
from dsv4_compile.options import OptionError
from dsv4_compile.passes.attention import AttentionPass
from dsv4_compile.passes.mhc import MhcPass
from dsv4_compile.passes.projections import ProjectionsPass
from tests.spellings import Stack, hf_post, hf_pre

HOSTILE = "<script>alert(1)</script>\x1b[31m[red]\u202e"

KILLED = """
import os, sys, torch
from dsv4_compile.passes.projections import ProjectionsPass
ProjectionsPass.__call__ = lambda self, graph: os._exit(9)
model = torch.nn.Linear(4, 4)
with torch.no_grad():
    torch.compile(model, backend="dsv4", options={"compiler": "eager", "dump_dir": sys.argv[1]})(torch.randn(2, 4))
"""

SEVERAL = """
import sys, torch
model = torch.nn.Linear(4, 4)
with torch.no_grad():
    torch.compile(model, backend="dsv4", options={"compiler": "eager", "dump_dir": sys.argv[1]})(torch.randn(2, 4))
"""


class Branches(nn.Module):
    """Two linears of one activation."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, 8, bias=False), nn.Linear(width, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.a(x), self.b(x)), -1)


def dump_of(model: nn.Module, x: Tensor, folder: Path, **options: Any) -> list[DumpedGraph]:
    chosen = {"compiler": "eager", "dump_dir": str(folder), **options}
    dynamic = chosen.pop("dynamic", None)
    with torch.no_grad():
        torch.compile(model, backend="dsv4", options=chosen, dynamic=dynamic)(x)
    return read(folder).graphs


def stack_and_branches() -> nn.Module:
    return nn.Sequential(Stack(hf_pre, hf_post, layers=1), Branches(64))


# ------------------------------------------------------------------------------------------------------- what is in it


def test_every_stage_is_there_as_text_and_as_data_with_its_operators_and_bytes(tmp_path):
    (graph,) = dump_of(stack_and_branches(), torch.randn(2, 3, 4, 64), tmp_path, projections="serial")
    stages = [stage.name for stage in graph.entry.stages]
    assert stages == ["dynamo", "before", "mhc", "projections", "attention"]
    texts = {name: graph.listing(name) for name in stages}
    assert "<- dsv4" not in texts["before"].partition("def forward")[2]
    assert "dsv4.mhc_pre.default(" in texts["mhc"] and "dsv4.parallel_linear" not in texts["mhc"]
    assert "dsv4.parallel_linear.default(" in texts["projections"]
    for name in stages:
        compile(texts[name].replace("return (", "return ("), name, "exec")
        nodes, stage = graph.nodes(name), graph.stage(name)
        assert len(nodes) == stage.nodes
        assert sum(stage.ops.values()) == sum(node.op.startswith("call_") for node in nodes)
        assert stage.input_bytes > 0 and stage.result_bytes > 0
    product = next(node for node in graph.nodes("before") if node.target == "aten.mm.default")
    assert product.module and "spellings.py:" in product.source and product.dtype == "float32"
    assert product.inputs and set(product.inputs) <= {node.name for node in graph.nodes("before")}
    assert graph.report == dsv4_compile.report().to_dict()["graphs"][0]
    assert graph.entry.state == "compiled" and {"mhc", "projections", "eager", "dump"} <= set(graph.entry.seconds)


def test_listing_groups_by_module_and_has_shapes_in_the_margin(tmp_path):
    (graph,) = dump_of(Branches(), torch.randn(3, 16), tmp_path, projections="serial")
    text = graph.listing("projections")
    assert "    # ---- a  " in text and "test_dump.py:" in text
    (line,) = [line for line in text.splitlines() if "dsv4.parallel_linear" in line]
    margin = line.partition("# ")[2]
    assert margin.startswith("(float32[3, 8], float32[3, 12])  ") and margin.endswith("  <- dsv4")
    assert all(re.search(rf"arg\d_1 = {name}\b", margin) for name in ("a.weight", "b.weight", "x"))


def test_symbolic_shapes_are_text_and_their_bytes_unknown(tmp_path):
    (graph,) = dump_of(Branches(), torch.randn(3, 16), tmp_path, dynamic=True)
    nodes = graph.nodes("before")
    shapes = [node.shape for node in nodes if node.shape and any(isinstance(size, str) for size in node.shape)]
    assert shapes
    assert any(node.bytes is None for node in nodes)


def test_code_of_inductor_is_there_and_the_passes_run_although_the_cache_is_warm(tmp_path):
    model, x = Branches(), torch.randn(3, 16)
    for name in ("first", "second"):
        torch._dynamo.reset()
        (graph,) = dump_of(model, x, tmp_path / name, compiler="inductor", projections="serial")
        assert "dsv4.parallel_linear" in graph.listing("projections")
        (code,) = graph.entry.code
        assert "parallel_linear" in graph.run.text(code)


def test_nothing_in_a_dump_is_anything_but_text_of_known_kinds(tmp_path):
    dump_of(Branches(), torch.randn(3, 16), tmp_path)
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} <= {".py", ".json"}


def test_records_survive_json():
    node = NodeRecord("a", "call_function", "aten.mm.default", ("b", "[1, 2]"), {"x": "1"}, ("b",), shape=(), bytes=0)
    assert NodeRecord.from_dict(json.loads(node.to_json())) == node


def test_a_new_shape_is_another_graph_of_the_same_run(tmp_path):
    model = torch.compile(Branches(), backend="dsv4", options={"compiler": "eager", "dump_dir": str(tmp_path)})
    with torch.no_grad():
        model(torch.randn(3, 16))
        model(torch.randn(5, 16))
    dump = read(tmp_path)
    assert len(dump.runs) == 1 and len(dump.graphs) == 2
    assert len({graph.label for graph in dump.graphs}) == 2
    assert len({graph.entry.report for graph in dump.graphs}) == 1


def test_equal_ids_have_other_labels(tmp_path):
    for _ in range(2):
        torch._dynamo.reset()
        dump_of(Branches(), torch.randn(3, 16), tmp_path)
    dump = read(tmp_path)
    assert len({graph.label for graph in dump.graphs}) == len(dump.graphs) == 2
    assert len({graph.entry.folder for graph in dump.graphs}) == 2


# ---------------------------------------------------------------------------------------------- when something is wrong


def test_a_failed_compilation_leaves_its_graphs_its_findings_and_the_error(tmp_path, monkeypatch):
    def fail(self: ProjectionsPass, graph: torch.fx.Graph) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(ProjectionsPass, "__call__", fail)
    with pytest.raises(Exception, match="out of order"):
        dump_of(stack_and_branches(), torch.randn(2, 3, 4, 64), tmp_path, strict=True)
    (graph,) = read(tmp_path).graphs
    assert graph.entry.state == "failed"
    assert graph.entry.error == "PassError: The pass projections failed: out of order"
    assert [stage.name for stage in graph.entry.stages] == ["dynamo", "before", "mhc"]
    assert [site["form"] for site in graph.report["mhc"]] == ["pre", "post"]


def test_a_strict_error_is_in_the_index(tmp_path):
    with pytest.raises(Exception, match="matched nothing"):
        dump_of(nn.Linear(4, 4), torch.randn(2, 4), tmp_path, strict=True)
    (graph,) = read(tmp_path).graphs
    assert graph.entry.state == "failed" and graph.entry.error.startswith("StrictError: ")


def test_a_node_that_cannot_be_described_breaks_nothing(tmp_path, monkeypatch):
    def fail(graph: torch.fx.Graph, names: list[str]) -> None:
        raise ValueError("no words")

    monkeypatch.setattr(writer, "records", fail)
    (graph,) = dump_of(Branches(), torch.randn(3, 16), tmp_path)
    assert graph.entry.state == "compiled"
    assert any("no words" in note for note in graph.run.index.notes)


def test_a_killed_process_leaves_a_readable_dump(tmp_path):
    done = child(KILLED, tmp_path)
    assert done.wait() == 9
    (graph,) = read(tmp_path).graphs
    assert graph.entry.state == "compiling" and not graph.run.index.ended
    assert "mhc" in [stage.name for stage in graph.entry.stages]


def test_several_processes_share_a_folder(tmp_path):
    children = [child(SEVERAL, tmp_path) for _ in range(3)]
    assert [one.wait() for one in children] == [0, 0, 0]
    dump = read(tmp_path)
    assert len(dump.runs) == 3 and not dump.problems
    assert all(run.index.ended for run in dump.runs)
    assert len({graph.label for graph in dump.graphs}) == 3
    assert not list(tmp_path.rglob("*.part"))


def child(code: str, folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code, str(folder)], stderr=subprocess.DEVNULL)


def test_the_limit_keeps_files_out_and_says_which(tmp_path, monkeypatch):
    monkeypatch.setenv("DSV4_DUMP_LIMIT", "9K")
    (graph,) = dump_of(Branches(), torch.randn(3, 16), tmp_path)
    assert graph.run.index.bytes <= 9000
    assert any(name.startswith("graph_0_0/projections.json") for name in graph.run.index.left_out)
    assert graph.entry.state == "compiled" and graph.report["id"] == "0/0"
    with pytest.raises(DumpError, match="left out of this dump: the limit is 9000 bytes"):
        graph.nodes("projections")


def test_a_limit_that_is_none_is_told_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("DSV4_DUMP_LIMIT", "plenty")
    with pytest.raises(Exception) as caught:
        dump_of(Branches(), torch.randn(3, 16), tmp_path)
    assert isinstance(getattr(caught.value, "inner_exception", caught.value), OptionError)
    assert "such as 200M or 2G, and it is 'plenty'" in str(caught.value)


# --------------------------------------------------------------------------------------------------------------- depyf


def test_bytecode_is_decompiled_where_depyf_works(tmp_path):
    pytest.importorskip("depyf")
    (graph,) = dump_of(Branches(), torch.randn(3, 16), tmp_path)
    assert graph.entry.bytecode or any("depyf" in note for note in graph.run.index.notes)
    if graph.entry.bytecode:
        assert "__compiled_fn" in graph.run.text(graph.entry.bytecode)


def test_without_depyf_the_dump_is_complete_and_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "depyf", None)
    (graph,) = dump_of(Branches(), torch.randn(3, 16), tmp_path)
    assert_complete_without_bytecode(graph, "pip install 'dsv4_compile[depyf]'")


def test_with_a_depyf_that_raises_the_dump_is_complete_and_says_what_is_missing(tmp_path, monkeypatch):
    depyf = pytest.importorskip("depyf")

    def fail(code: object) -> str:
        raise NotImplementedError("opcode 999")

    monkeypatch.setattr(depyf, "decompile", fail)
    (graph,) = dump_of(Branches(), torch.randn(3, 16), tmp_path)
    assert_complete_without_bytecode(graph, "NotImplementedError: opcode 999")


def assert_complete_without_bytecode(graph: DumpedGraph, note: str) -> None:
    assert not graph.entry.bytecode
    assert [known for known in graph.run.index.notes if note in known]
    assert graph.entry.state == "compiled"
    for stage in graph.entry.stages:
        assert graph.nodes(stage.name) and graph.listing(stage.name)


# ------------------------------------------------------------------------------------------------------------- reading


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump to be damaged in copies."""
    torch._dynamo.reset()
    folder = tmp_path_factory.mktemp("dump")
    dump_of(Branches(), torch.randn(3, 16), folder)
    return folder


@pytest.fixture
def copied(written: Path, tmp_path: Path) -> Path:
    """The folder of the only run in a copy of the dump."""
    shutil.copytree(written, tmp_path / "dump")
    (run,) = (tmp_path / "dump").iterdir()
    return run


def test_the_folder_of_one_run_is_a_dump_as_well(copied):
    assert [graph.label for graph in read(copied).graphs] == [graph.label for graph in read(copied.parent).graphs]


def test_no_folder_a_file_and_an_empty_folder(tmp_path):
    with pytest.raises(NoSuchError, match="There is no folder"):
        read(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(NoSuchError, match="is a file"):
        read(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DumpError, match="is empty: nothing was compiled"):
        read(tmp_path / "empty")


def test_a_folder_of_something_else(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(DumpError, match=r"holds no dump that can be read; it has notes\.txt"):
        read(tmp_path)


def test_folders_of_somebody_else_are_no_dump_and_no_problem(copied, tmp_path):
    (copied / "notes").mkdir()
    assert not read(copied).problems
    (tmp_path / "other" / "folder").mkdir(parents=True)
    with pytest.raises(DumpError, match=r"other holds no dump that can be read; it has folder\.$"):
        read(tmp_path / "other")


def test_an_index_that_ends_in_the_middle(copied):
    text = (copied / "index.json").read_text()
    (copied / "index.json").write_text(text[: len(text) // 2])
    with pytest.raises(DumpError, match=r"is not complete .*: it was copied or written halfway"):
        read(copied)


def test_a_run_without_an_index_beside_a_good_one_is_a_problem_of_its_own(copied):
    (copied.parent / "20260101-000000-1").mkdir()
    dump = read(copied.parent)
    assert len(dump.runs) == 1 and "is not there" in dump.problems[0]


def test_another_version_of_the_format(copied):
    index = json.loads((copied / "index.json").read_text())
    (copied / "index.json").write_text(json.dumps({**index, "schema": SCHEMA + 1, "version": "9.9"}))
    with pytest.raises(DumpError, match=f"has format {SCHEMA + 1}, written by dsv4_compile 9.9, .* format {SCHEMA}"):
        read(copied)


@pytest.mark.parametrize("index", ["[]", "3", "{}", '{"schema": 1}', '{"schema": 1, "graphs": 5}', "[" * 100_000])
def test_an_index_of_another_kind(copied, index):
    (copied / "index.json").write_text(index)
    with pytest.raises(DumpError):
        read(copied)


def test_a_file_that_is_not_there_or_damaged(copied):
    (graph,) = read(copied).graphs
    data = copied / graph.stage("before").data
    data.write_text('{"nodes": [{"name": "x"}]}')
    with pytest.raises(DumpError, match="is damaged"):
        graph.nodes("before")
    data.unlink()
    with pytest.raises(DumpError, match="is not there: the dump was copied or written halfway"):
        graph.nodes("before")


def test_no_file_outside_the_folder_is_read(copied):
    (copied.parent / "secret.py").write_text("secret")
    path = copied / "index.json"
    path.write_text(path.read_text().replace("graph_0_0/before.py", "../secret.py"))
    (graph,) = read(copied).graphs
    with pytest.raises(DumpError, match="outside its folder: not read"):
        graph.listing("before")


def test_a_folder_without_rights(copied, monkeypatch):
    """The one who runs the tests may be root, whom nothing is forbidden."""

    def forbid(path: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", forbid)
    with pytest.raises(DumpError, match="cannot be read: Permission denied"):
        read(copied)


def test_graphs_that_are_not_there(copied):
    dump = read(copied)
    with pytest.raises(NoSuchError, match=r"There is no graph '7/7' in .*; there are 0/0"):
        dump.graph("7/7")
    with pytest.raises(NoSuchError, match="has no stage 'mch'; it has dynamo, before, mhc, projections"):
        dump.graph(None).stage("mch")


# --------------------------------------------------------------------------------------------------------------- names


def test_control_characters_of_a_name_get_into_no_text(tmp_path):
    model = nn.Sequential()
    model.add_module(HOSTILE, Branches())
    (graph,) = dump_of(model, torch.randn(3, 16), tmp_path)
    assert any("<script>" in node.module for node in graph.nodes("before"))
    for path in tmp_path.rglob("*.*"):
        if path.is_file():
            text = path.read_text()
            assert "\x1b" not in text and "\u202e" not in text, path.name


def test_printable_spells_out_what_moves_the_cursor():
    assert printable("a\x1b[2J\r\x9b\u202e\tb\n") == "a\\x1b[2J\\x0d\\x9b\\u202e\tb\n"


def test_the_order_of_the_passes_is_that_of_the_stages(tmp_path):
    (graph,) = dump_of(Branches(), torch.randn(3, 16), tmp_path)
    assert graph.passes == [MhcPass().name, ProjectionsPass().name, AttentionPass().name]
