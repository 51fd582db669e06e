"""What a dump shows of a graph: graphs within it, the names behind its inputs, its pieces, and the pass on its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch._inductor import config as inductor_config
from typer.testing import CliRunner, Result

import dsv4_compile
from dsv4_compile.cli.app import app
from dsv4_compile.dump.order import Order
from dsv4_compile.dump.reader import DumpedGraph, read
from tests.spellings import Stack, hf_post, hf_pre


class Forked(nn.Module):
    """A condition whose branches are graphs within the graph; a parameter, a buffer and inputs in a dict and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor, more: dict[str, Tensor], *, extra: list[Tensor]) -> Tensor:
        out = torch.cond(x.sum() > 0, lambda t: self.layers[0](t), lambda t: t.cos() + self.shift, (x,))
        return out * more["scale"] + extra[0]


class Two(nn.Module):
    """A linear, and something outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).relu()


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def dump_of(folder: Path, **options: Any) -> DumpedGraph:
    chosen = {"dump_dir": str(folder), **options}
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(Forked(), backend="dsv4", options=chosen)
        compiled(torch.randn(3, 4), {"scale": torch.randn(4)}, extra=[torch.randn(4)])
    (graph,) = read(folder).graphs
    return graph


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> DumpedGraph:
    """Compiled with Inductor, which runs the passes on the branches as well."""
    return dump_of(tmp_path_factory.mktemp("forked"))


# ------------------------------------------------------------------------------------------------- graphs within graphs


def test_branches_of_a_condition_are_functions_of_their_own(forked):
    text = forked.listing("before")
    assert "\ndef true_graph_0(\n" in text and "\ndef false_graph_0(\n" in text
    compile(text, "before", "exec")
    nodes = forked.nodes("before")
    assert {node.graph for node in nodes} == {"", "true_graph_0", "false_graph_0"}
    assert [node.target for node in nodes if node.graph == "false_graph_0" and node.op == "call_function"] == [
        "aten.cos.default",
        "aten.add.Tensor",
    ]
    assert forked.stage("before").ops["aten.cos.default"] == 1
    assert "\ndef cond_true_0(\n" in forked.listing("dynamo")


def test_stages_of_a_branch_have_its_name_and_do_not_replace_those_of_the_graph(forked):
    names = [stage.name for stage in forked.entry.stages]
    assert len(set(names)) == len(names)
    assert {"true_graph_0/before", "true_graph_0/mhc", "false_graph_0/projections"} < set(names)
    assert forked.passes == ["mhc", "projections", "attention"]
    assert len({stage.text for stage in forked.entry.stages}) == len(names)
    assert not any(node.graph for node in forked.nodes("true_graph_0/mhc"))
    assert any(node.target == "cond" for node in forked.nodes("projections"))


def test_commands_know_the_passes_of_a_branch(forked):
    folder = forked.run.path
    assert run("show", folder, "--pass", "true_graph_0/mhc").stdout == forked.listing("true_graph_0/mhc")
    done = run("diff", folder, "--pass", "true_graph_0/mhc")
    assert done.exit_code == 0 and "true_graph_0/before -> true_graph_0/mhc" in done.stdout
    assert "before -> attention" in run("diff", folder).stdout
    wrong = run("diff", folder, "--pass", "other/mhc")
    assert wrong.exit_code == 2 and "it has true_graph_0/mhc, " in wrong.stderr
    assert run("diff", folder, "--pass", "true_graph_0/before").exit_code == 2
    (overview,) = json.loads(run("show", folder, "--json").stdout)["graphs"]
    assert overview["nodes"] == [stage.nodes for stage in forked.entry.main[1:]]


def test_without_inductor_the_branches_are_there_too(tmp_path):
    graph = dump_of(tmp_path, compiler="eager")
    assert [stage.name for stage in graph.entry.stages] == ["dynamo", "before", "mhc", "projections", "attention"]
    assert {node.graph for node in graph.nodes("mhc")} == {"", "true_graph_0", "false_graph_0"}


class Looped(nn.Module):
    """A loop, and a condition within a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        def again(i: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
            return i + 1, self.inner(t).cos()

        def choose(t: Tensor) -> Tensor:
            return torch.cond(t.sum() > 1, lambda u: u.sin(), lambda u: u.tan(), (t,))

        _, out = while_loop(lambda i, t: i < 3, again, (torch.tensor(0), x))
        return torch.cond(out.mean() > 0, choose, lambda t: t + 1, (out,))


def test_loops_and_graphs_within_graphs_within_graphs_are_there(tmp_path):
    torch._dynamo.reset()
    with torch.no_grad():
        options = {"compiler": "eager", "dump_dir": str(tmp_path)}
        torch.compile(Looped(), backend="dsv4", options=options)(torch.randn(3, 4))
    (graph,) = read(tmp_path).graphs
    ops = {name: set() for name in {node.graph for node in graph.nodes("before")}}
    for node in graph.nodes("before"):
        ops[node.graph].add(node.target)
    assert "aten.cos.default" in ops["while_loop_body_graph_0"] and "aten.lt.Scalar" in ops["while_loop_cond_graph_0"]
    assert "aten.sin.default" in ops["true_graph_0.true_graph_0"] and "cond" in ops["true_graph_0"]
    text = graph.listing("before")
    assert "\ndef true_graph_0__true_graph_0(\n" in text
    compile(text, "before", "exec")


def test_a_graph_that_comes_twice_has_two_names():
    order, stages = Order(), []
    graph = torch.fx.symbolic_trace(lambda x: x + 1).graph
    order.begin(graph, stages)
    assert order.name("mhc") == "mhc"
    order.begin(graph, stages)
    assert order.name("mhc") == "again_2/mhc"


# ------------------------------------------------------------------------------------------------------ names of inputs


def test_inputs_have_the_names_of_parameters_buffers_and_arguments(forked):
    named = {node.behind for node in forked.nodes("before") if node.op == "placeholder" and not node.graph}
    assert named == {"x", "layers.0.weight", "layers.0.bias", "shift", "more['scale']", "extra[0]"}
    assert {node.behind for node in forked.nodes("dynamo") if node.op == "placeholder" and not node.graph} == named


def test_a_line_that_reads_an_input_says_which_it_is(forked):
    text = forked.listing("projections")
    (weight,) = [n.name for n in forked.nodes("projections") if n.behind == "layers.0.weight"]
    line = next(line for line in text.splitlines() if line.startswith(f"    {weight},"))
    assert line.endswith("# float32[4, 4]  = layers.0.weight")
    (call,) = [line for line in text.splitlines() if "= cond(" in line]
    assert f"{weight} = layers.0.weight" in call.partition("#")[2]


def test_the_part_of_a_module_has_the_names_as_well(tmp_path):
    model = Two()
    torch._dynamo.reset()
    with torch.no_grad():
        options = {"compiler": "eager", "dump_dir": str(tmp_path)}
        torch.compile(model, backend="dsv4", options=options)(torch.randn(2, 4))
    done = run("show", tmp_path, "--pass", "before", "--module", "first")
    assert "= first.weight" in done.stdout and "aten.relu" not in done.stdout
    for command in ("show", "diff"):
        wrong = run(command, tmp_path, "--module", "frist")
        assert wrong.exit_code == 2 and "no nodes of a module frist; the nearest are first" in wrong.stderr


# --------------------------------------------------------------------------------------------------------------- pieces


PIECES = """
import sys, torch
from tests.models import SLIDING, deepseek
with torch.no_grad():
    model = deepseek((SLIDING, SLIDING, SLIDING), hash_layers=3)
    torch.compile(model, backend="dsv4", options={"dump_dir": sys.argv[1]})(torch.randint(0, 128, (1, 16)))
"""


@pytest.mark.slow
def test_a_dump_has_the_code_and_the_graph_of_each_distinct_piece(tmp_path):
    pytest.importorskip("transformers")
    environment = os.environ | {"DSV4_PIECES": "1"}
    done = subprocess.run([sys.executable, "-c", PIECES, tmp_path], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    (graph,) = read(tmp_path).graphs
    made = graph.report["pieces"]
    assert len({piece["key"] for piece in made}) < len(made)
    assert set(graph.entry.pieces) == {piece["key"] for piece in made}
    for files in graph.entry.pieces.values():
        assert "def call(" in graph.run.text(files.code) and "def forward(" in graph.run.text(files.text)
    shown = run("pieces", tmp_path)
    assert shown.exit_code == 0
    assert f"{len(made)} pieces, {len(graph.entry.pieces)} distinct" in shown.stdout
    assert all(files.code in shown.stdout for files in graph.entry.pieces.values())


# -------------------------------------------------------------------------------------------------- the pass on its own


def with_the_pass(model: nn.Module, x: Tensor) -> Tensor:
    torch._dynamo.reset()
    with torch.no_grad(), inductor_config.patch(post_grad_custom_post_pass=dsv4_compile.post_grad_pass):
        return torch.compile(model, backend="inductor")(x)


def test_the_pass_on_its_own_writes_a_dump_that_the_environment_asks_for(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model, x = Stack(hf_pre, hf_post, layers=1), torch.randn(2, 3, 4, 64)
    without = dsv4_compile.post_grad_pass.uuid()
    with_the_pass(model, x)  # Inductor's cache has it now
    monkeypatch.setenv("DSV4_OPTIONS", json.dumps({"dump_dir": str(tmp_path)}))
    assert dsv4_compile.post_grad_pass.uuid() not in (without, "")
    torch.testing.assert_close(with_the_pass(model, x), model(x).detach(), rtol=1e-4, atol=1e-4)
    (graph,) = read(tmp_path).graphs
    assert [stage.name for stage in graph.entry.stages] == ["before", "mhc", "vllm_mhc", "projections", "attention"]
    assert "dsv4.mhc_pre.default(" in graph.listing("mhc") and "<- dsv4" in graph.listing("mhc")
    assert graph.report == dsv4_compile.report().to_dict()["graphs"][0] and graph.report["mhc"]
    assert graph.compile_report["requested"]["dump_dir"] == str(tmp_path)
    assert "Inductor's code is not in this dump" in run("show", tmp_path).stdout
    assert run("explain", tmp_path).exit_code == 0


def test_the_pass_on_its_own_outlives_options_that_are_none(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("DSV4_OPTIONS", '{"dump_dri": "x"}')
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    torch.testing.assert_close(with_the_pass(model, x), model(x).detach())
    assert "There is no dump: DSV4_OPTIONS has the unknown option 'dump_dri'" in caplog.text
    monkeypatch.setenv("DSV4_OPTIONS", json.dumps({"dump_dir": str(tmp_path)}))
    monkeypatch.setenv("DSV4_DUMP_LIMIT", "much")
    torch.testing.assert_close(with_the_pass(model, x), model(x).detach())
    assert "There is no dump: DSV4_DUMP_LIMIT must be a number of bytes" in caplog.text
    assert not list(tmp_path.iterdir())
