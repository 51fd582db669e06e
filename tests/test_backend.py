"""The backend as a user of `torch.compile` meets it: options, contexts, reports, failures, and graphs of every kind.

`compiler="eager"` wherever Inductor is not the point: the same passes, without the time of a C++ compiler.
"""

from __future__ import annotations

import copy
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

import dsv4_compile
from dsv4_compile.kernels.linear import packing
from dsv4_compile.passes.mhc import MhcPass
from dsv4_compile.report import summary
from tests.passes.test_mhc import error, oracle_of, residual
from tests.spellings import NEAR_MISSES, SPELLINGS, Stack, deepseek_post, hf_post, hf_pre

pytestmark = pytest.mark.usefixtures("no_reports")

FORMS = ["pre", "post_pre", "post"]
STRATEGIES = ["streams", "pack", "serial"]


class Branches(nn.Module):
    """Three linears on one input."""

    def __init__(self, width: int = 16, bias: bool = True):
        super().__init__()
        self.a = nn.Linear(width, 8, bias=bias)
        self.b = nn.Linear(width, 12, bias=bias)
        self.c = nn.Linear(width, 4, bias=bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.a(x).tanh(), self.b(x), self.c(x) * 2


class Plain(nn.Module):
    """An ordinary MLP: one linear per input."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.up, self.down = nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def compiled(module: Callable[..., Any], *, dynamic: bool | None = None, **options: Any) -> Callable[..., Any]:
    return torch.compile(module, backend="dsv4", options={"compiler": "eager"} | options, dynamic=dynamic)


def forms() -> list[str]:
    return [site.form for graph in dsv4_compile.report().graphs for site in graph.mhc]


def strategies() -> list[str]:
    return [group.strategy for graph in dsv4_compile.report().graphs for group in graph.projections]


def notes() -> str:
    return "; ".join(note for graph in dsv4_compile.report().graphs for note in graph.notes)


def stack(**changes: Any) -> Stack:
    return Stack(hf_pre, hf_post, **changes)


def without_grad(module: Callable[..., Any], *inputs: Any) -> Any:
    with torch.no_grad():
        return module(*inputs)


# ------------------------------------------------------------------------------------------------ options and modes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"projection": "pack"}, "'projections'"),
        ({"mhc": "tritton"}, "'triton'"),
        ({"projections": "streams", "num_streams": 0}, "contradict each other"),
        ({"inductor": {"max_autotun": True}}, "'max_autotun', which torch._inductor.config has not; .* 'max_autotune'"),
        ({"inductor": {"nosuch": 1}}, "Option 'inductor' has 'nosuch', which torch._inductor.config has not"),
        ({"split_ops": ["aten::sofmax"]}, "'aten::sofmax', and there is no such operator; .*'aten::softmax'"),
        ({"split_ops": ["aten::sum.dim_List"]}, "no such operator; .*'aten::sum'"),
    ],
)
def test_message_of_a_wrong_option_reaches_the_caller(options, message):
    with pytest.raises(Exception, match=message) as raised:
        torch.compile(Plain(), backend="dsv4", options=options)(torch.randn(2, 16))
    cause = getattr(raised.value, "inner_exception", None) or raised.value.__cause__ or raised.value
    assert isinstance(cause, dsv4_compile.OptionError)


def test_environment_overrides_the_call(monkeypatch):
    monkeypatch.setenv("DSV4_OPTIONS", '{"projections": "serial", "mhc": "off"}')
    without_grad(compiled(stack(), projections="off"), residual(0, 1, 3, 4, 64))
    report = dsv4_compile.report()
    assert (report.requested["projections"], report.requested["mhc"]) == ("serial", "off")
    assert report.requested["compiler"] == "eager"
    assert forms() == []


def test_wrong_environment_is_named(monkeypatch):
    monkeypatch.setenv("DSV4_OPTIONS", '{"mhc": "tritton"}')
    with pytest.raises(Exception, match="tritton"):
        compiled(Plain())(torch.randn(2, 16))


def test_disabled_backend_is_inductor_and_makes_no_report(monkeypatch):
    module, x = Plain(), torch.randn(3, 16)
    without_grad(compiled(Branches()), x)
    before = (len(dsv4_compile.reports()), dsv4_compile.report().to_dict())
    monkeypatch.setenv("DSV4_DISABLE", "1")
    out = without_grad(torch.compile(module, backend="dsv4"), x)
    torch.testing.assert_close(out, without_grad(module, x), rtol=1e-5, atol=1e-6)
    assert (len(dsv4_compile.reports()), dsv4_compile.report().to_dict()) == before


@pytest.fixture
def inductor_calls(monkeypatch):
    """Settings that reach Inductor, which is replaced by the plain graph."""
    calls: list[dict[str, Any]] = []

    def compile_fx(gm: torch.fx.GraphModule, inputs: Any, *, config_patches: Any = None, **_: Any) -> Any:
        calls.append(dict(config_patches or {}))
        return gm.forward

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    return calls


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_mode_keeps_its_meaning_for_inductor(mode, inductor_calls):
    without_grad(torch.compile(Branches(), backend="dsv4", mode=mode), torch.randn(3, 16))
    expected = {} if mode == "default" else torch._inductor.list_mode_options(mode)
    assert expected.items() <= inductor_calls[0].items()
    assert set(inductor_calls[0]) == {*expected, "joint_custom_pre_pass"}


def test_unknown_mode_is_named():
    with pytest.raises(Exception, match="maximal"):
        without_grad(torch.compile(Branches(), backend="dsv4", mode="maximal"), torch.randn(3, 16))


def test_inductor_settings_are_passed_on(inductor_calls):
    options = {"inductor": {"max_fusion_size": 3, "epilogue_fusion": False}}
    without_grad(torch.compile(Branches(), backend="dsv4", options=options), torch.randn(3, 16))
    assert options["inductor"].items() <= inductor_calls[0].items()


# ------------------------------------------------------------------------------------------------------------ shapes


@pytest.mark.parametrize("dynamic", [True, False, None])
@pytest.mark.parametrize("projections", STRATEGIES)
def test_dynamic_and_fullgraph(dynamic, projections):
    module = nn.Sequential(stack(layers=1), Branches(64))
    options = {"compiler": "eager", "projections": projections}
    run = torch.compile(module, backend="dsv4", options=options, dynamic=dynamic, fullgraph=True)
    for rows in (5, 3, 9):
        x = residual(rows, 2, rows, 4, 64)
        for got, want in zip(without_grad(run, x), without_grad(module, x), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    graphs = dsv4_compile.report().graphs
    assert [g.dynamic for g in graphs] == {True: [True], False: [False] * 3, None: [False, True]}[dynamic]
    assert all([s.form for s in g.mhc] == ["pre", "post"] for g in graphs)
    assert {group.strategy for g in graphs for group in g.projections} == {projections}


@pytest.mark.parametrize("projections", STRATEGIES)
def test_zero_tokens(projections):
    out = without_grad(compiled(Branches(), projections=projections), torch.zeros(0, 16))
    assert [tuple(t.shape) for t in out] == [(0, 8), (0, 12), (0, 4)]


# ----------------------------------------------------------------------------------------------- what did not match


def test_report_of_another_model_says_that_nothing_matched():
    module, x = Plain(), torch.randn(3, 16)
    torch.testing.assert_close(without_grad(compiled(module), x), without_grad(module, x))
    (graph,) = dsv4_compile.report().graphs
    assert (graph.mhc, graph.projections, graph.missed, graph.notes) == ([], [], [], [])
    assert "nothing matched" in str(dsv4_compile.report())
    assert "\n  pieces: 1 eager" in str(dsv4_compile.report())


def test_notes_do_not_hide_that_nothing_matched(tmp_path):
    (tmp_path / "file").write_text("in the way")
    run, x = compiled(Plain(), verify=1, dump_dir=str(tmp_path / "file")), torch.randn(3, 16)
    without_grad(run, x)
    assert "verify: 1 of" in notes() and "dump could not" in notes()
    assert "  nothing matched\n" in str(dsv4_compile.report())
    assert ": nothing matched, the dump could" in summary(dsv4_compile.report().graphs[0])
    torch._dynamo.reset()
    compiled(Plain())(x)
    assert "needs gradients" in notes() and "nothing matched" not in str(dsv4_compile.report())
    assert "nothing matched" not in summary(dsv4_compile.report().graphs[0])


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (lambda: Plain(), {}, "mhc and projections matched nothing"),
        (lambda: Branches(), {"mhc": "auto"}, "mhc matched nothing"),
        (lambda: stack(), {"projections": "serial"}, "projections matched nothing"),
        (lambda: Stack(NEAR_MISSES["clamped_logits"], deepseek_post), {"mhc": "auto"}, "mhc at .* was left alone"),
        (lambda: stack(), {"mhc": "tilelang"}, "mhc='tilelang' was asked for"),
    ],
    ids=["nothing", "no_mhc", "no_projections", "near_miss", "other_kernel"],
)
def test_strict_raises(module, options, message):
    made = module()
    x = residual(0, 1, 3, 4, 64) if isinstance(made, Stack) else torch.randn(3, 16)
    with pytest.raises(Exception, match=message):
        without_grad(compiled(made, strict=True, **options), x)


class TwoDtypes(nn.Module):
    """A group whose weights cannot be packed, and one whose weights can."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.rest = nn.Linear(64, 8), nn.Linear(64, 12).double(), Branches(64)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.a(x), self.b(x.double()), *self.rest(x.tanh()))


@pytest.mark.parametrize(
    ("projections", "make", "sentence"),
    [
        ("pack", TwoDtypes, "'pack, serial' runs: cannot be packed: their dtypes differ"),
        ("streams", lambda: Branches(64), "'serial' runs: there are no streams on cpu"),
    ],
)
def test_strict_raises_where_a_group_does_not_run_as_named(projections, make, sentence):
    module, x = make(), torch.randn(3, 64)
    with pytest.raises(Exception, match=f"projections='{projections}' was asked for and {sentence}"):
        without_grad(compiled(module, strict=True, projections=projections, mhc="off"), x)
    torch._dynamo.reset()
    without_grad(compiled(module, projections=projections), x)
    value, reason = sentence.split("' runs: ")
    assert dsv4_compile.report().effective["projections"] == {"value": value[1:], "reason": reason}


def test_strict_raises_where_weights_of_the_caller_cannot_be_packed():
    def run(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return x @ w.t(), x @ v.t()

    inputs = torch.randn(3, 16), torch.randn(8, 16), torch.randn(4, 16)
    with pytest.raises(Exception, match="'pack' was asked for and 'serial' runs: not packed: A weight is no"):
        without_grad(compiled(run, strict=True, projections="pack", mhc="off"), *inputs)


@pytest.mark.parametrize("projections", ["auto", "serial"])
def test_strict_leaves_the_way_to_run_a_group_open_where_none_is_named(projections):
    without_grad(compiled(TwoDtypes(), strict=True, projections=projections, mhc="off"), torch.randn(3, 64))
    assert strategies() == ["serial", "serial"]


def test_deterministic_without_the_kernels_it_is_about_is_told_and_strict_raises():
    run, x = compiled(Branches(), deterministic=True, mhc="off"), torch.randn(3, 16)
    without_grad(run, x)
    assert "deterministic: True -> False (it is about the kernels for mHC" in str(dsv4_compile.report())
    torch._dynamo.reset()
    with pytest.raises(Exception, match="deterministic=True was asked for and has no effect"):
        without_grad(compiled(Branches(), deterministic=True, mhc="off", strict=True), x)


def test_strict_is_content_with_packed_groups():
    without_grad(compiled(Branches(), strict=True, projections="pack", mhc="off"), torch.randn(3, 16))
    assert strategies() == ["pack"]


def test_strict_raises_when_gradients_are_needed():
    with pytest.raises(Exception, match="without replacements"):
        compiled(stack(), strict=True)(residual(0, 1, 3, 4, 64))


def test_strict_is_content_with_what_matches():
    x = residual(0, 1, 3, 4, 64)
    without_grad(compiled(stack(), strict=True), x)
    assert forms() == FORMS


# ---------------------------------------------------------------------------------------------- gradients, contexts


@pytest.mark.parametrize("make", [stack, lambda: nn.Sequential(nn.Tanh(), Branches(64))], ids=["mhc", "projections"])
def test_training_is_compiled_without_replacements(make):
    eager = make().train()
    module = copy.deepcopy(eager)
    x, y = residual(0, 2, 3, 4, 64).requires_grad_(), residual(0, 2, 3, 4, 64).requires_grad_()

    def loss(out: Tensor | tuple[Tensor, ...]) -> Tensor:
        return sum((t.square().sum() for t in ([out] if isinstance(out, Tensor) else out)), torch.zeros(()))

    loss(compiled(module, projections="pack")(x)).backward()
    loss(eager(y)).backward()
    assert error(x.grad, y.grad) < 1e-5
    for got, want in zip(module.parameters(), eager.parameters(), strict=True):
        assert error(got.grad, want.grad) < 1e-5
    assert (forms(), strategies()) == ([], [])
    assert "needs gradients" in notes()
    assert "needs gradients" in str(dsv4_compile.report())
    assert all(graph.nodes > 0 for graph in dsv4_compile.report().graphs)


def test_frozen_parameters_need_no_context():
    module = stack().requires_grad_(False)
    x = residual(0, 2, 3, 4, 64)
    assert error(compiled(module)(x), oracle_of(module, x)) < 1e-6
    assert forms() == FORMS


def test_gradient_of_an_input_through_frozen_parameters():
    module = stack().requires_grad_(False)
    x, y = residual(0, 2, 3, 4, 64).requires_grad_(), residual(0, 2, 3, 4, 64).requires_grad_()
    compiled(module)(x).square().sum().backward()
    module(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)


def test_no_grad_inside_the_compiled_function():
    module = stack()

    def call(x: Tensor) -> Tensor:
        with torch.no_grad():
            return module(x)

    x = residual(0, 2, 3, 4, 64)
    out = compiled(call)(x)
    assert error(out, oracle_of(module, x)) < 1e-6
    assert not out.requires_grad
    assert forms() == FORMS or notes()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("projections", STRATEGIES)
def test_contexts_without_gradients(context, projections):
    module = nn.Sequential(stack(), Branches(64))
    x = residual(0, 2, 3, 4, 64)
    with context():
        want = module(x)
        got = compiled(module, projections=projections)(x)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert a.is_inference() == b.is_inference()
    assert forms() == FORMS
    assert strategies() == [projections]
    assert not notes()


def test_one_compiled_module_in_and_out_of_no_grad():
    module = stack()
    x = residual(0, 2, 3, 4, 64)
    run = compiled(module)
    with torch.no_grad():
        run(x)
    run(x).sum().backward()
    assert all(p.grad is not None for p in module.layers.parameters())
    first, second = dsv4_compile.report().graphs
    assert first.mhc and not first.notes
    assert second.notes and not second.mhc


def test_model_made_in_inference_mode_is_right_and_not_packed():
    with torch.inference_mode():
        module, x = Branches(), torch.randn(3, 16)
        want = module(x)
        got = compiled(module, projections="pack")(x)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    assert "inference mode" in notes()


def test_autocast_is_as_close_to_float64_as_eager():
    module = nn.Sequential(stack(), Branches(64))
    x = residual(0, 2, 64, 4, 64)  # of few tokens the two errors differ by chance
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want = module(x)
        got = compiled(module, projections="serial")(x)
    oracle = oracle_of(module, x)
    for a, b, wide in zip(got, want, oracle, strict=True):
        assert a.dtype == b.dtype == torch.bfloat16
        assert error(a, wide) <= error(b, wide) * 1.05
    graph = dsv4_compile.report().graphs[0]
    assert forms() == FORMS or graph.missed
    assert {linear.dtype for group in graph.projections for linear in group.linears} <= {"bfloat16"}


# ------------------------------------------------------------------------------------------------------ Inductor hooks


class Recorder(CustomGraphPass):
    """A user's pass: notes whether it saw our operators."""

    def __init__(self) -> None:
        self.saw: list[bool] = []

    def __call__(self, graph: Graph) -> None:
        self.saw.append(any(str(node.target).startswith("dsv4.") for node in graph.nodes))

    def uuid(self) -> str:
        return "recorder"


@pytest.mark.parametrize("by_option", [True, False], ids=["options", "configuration"])
def test_pass_of_the_user_runs_before_ours_and_stays(by_option, cold):
    mine, after = Recorder(), Recorder()
    hook = {"joint_custom_pre_pass": mine}
    options = {"projections": "serial", "inductor": {"joint_custom_post_pass": after, **(hook if by_option else {})}}
    module, x = Branches(), torch.randn(3, 16)
    with inductor_config.patch({} if by_option else hook):
        before = inductor_config.joint_custom_pre_pass
        got = without_grad(torch.compile(module, backend="dsv4", options=options), x)
        assert inductor_config.joint_custom_pre_pass is before
    torch.testing.assert_close(got, without_grad(module, x), rtol=1e-5, atol=1e-6)
    assert (mine.saw, after.saw) == ([False], [True])
    assert strategies() == ["serial"]


def test_ours_is_not_left_behind_for_inductor(cold):
    assert inductor_config.joint_custom_pre_pass is None
    module, x = Branches(), torch.randn(3, 16)
    without_grad(torch.compile(module, backend="dsv4", options={"projections": "serial"}), x)
    assert inductor_config.joint_custom_pre_pass is None
    torch._dynamo.reset()
    reports, after = len(dsv4_compile.reports()), Recorder()
    with inductor_config.patch(joint_custom_post_pass=after):
        without_grad(torch.compile(module), x)
    assert after.saw == [False]
    assert len(dsv4_compile.reports()) == reports


def test_post_grad_pass_is_an_inductor_pass_of_its_own(cold):
    assert isinstance(dsv4_compile.post_grad_pass, CustomGraphPass)
    module, x = stack(), residual(0, 2, 3, 4, 64)
    reports = len(dsv4_compile.reports())
    with inductor_config.patch(post_grad_custom_post_pass=dsv4_compile.post_grad_pass):
        out = without_grad(torch.compile(module, backend="inductor"), x)
    assert error(out, oracle_of(module, x)) < 1e-6
    assert len(dsv4_compile.reports()) == reports + 1
    assert forms() == FORMS
    assert json.loads(json.dumps(dsv4_compile.report().to_dict()))["graphs"][0]["nodes"] > 0


def test_pass_on_its_own_reports_options_that_are_the_backends(cold):
    ours = dsv4_compile.graph_pass({"cudagraphs": "full", "verify": 2, "split_ops": ["aten::sin"], "mhc": "off"})
    with inductor_config.patch(post_grad_custom_post_pass=ours):
        without_grad(torch.compile(Branches(), backend="inductor"), torch.randn(3, 16))
    effective = dsv4_compile.report().effective
    differing = {name: found["value"] for name, found in effective.items() if isinstance(found, dict) and found}
    assert differing == {"cudagraphs": "off", "verify": 0, "split_ops": []}
    assert "cudagraphs: full -> off (the backend does that, and a pass on its own does not)" in str(
        dsv4_compile.report()
    )


# -------------------------------------------------------------------------------------------------- passes that fail


def break_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mHC pass takes the graph apart and then fails."""

    def fail(self: MhcPass, graph: Graph) -> None:
        for node in reversed(list(graph.nodes)):
            node.meta.clear()
            if node.op == "output":
                node.args = ((),)
        for node in reversed(list(graph.nodes)):
            if not node.users and node.op == "call_function":
                graph.erase_node(node)
        raise KeyError("no such residual")

    monkeypatch.setattr(MhcPass, "__call__", fail)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_pass_that_fails_is_skipped_and_reported(compiler, monkeypatch, cold):
    break_pass(monkeypatch)
    module = nn.Sequential(nn.Tanh(), Branches(64))
    if compiler == "eager":
        module.insert(0, stack(layers=1))
    x = residual(0, 2, 3, 4, 64)
    got = without_grad(compiled(module, compiler=compiler, projections="serial"), x)
    for a, b in zip(got, without_grad(module, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    (graph,) = dsv4_compile.report().graphs
    assert [m.kind for m in graph.missed] == ["mhc"]
    assert "skipped" in graph.missed[0].reason and "no such residual" in graph.missed[0].reason
    assert strategies() == ["serial"], "the other pass still runs"


def test_pass_that_fails_raises_under_strict(monkeypatch):
    break_pass(monkeypatch)
    with pytest.raises(Exception, match="no such residual"):
        without_grad(compiled(stack(), strict=True), residual(0, 1, 3, 4, 64))


# ------------------------------------------------------------------------------------------------------ reports, dumps


def test_dump_that_cannot_be_written_breaks_nothing_and_is_told_once(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    module, x = Branches(), torch.randn(3, 16)
    with caplog.at_level(logging.WARNING, "dsv4_compile"):
        got = without_grad(compiled(module, dump_dir=str(tmp_path / "file")), x)
    for a, b in zip(got, without_grad(module, x), strict=True):
        torch.testing.assert_close(a, b)
    assert sum("could not be written" in record.getMessage() for record in caplog.records) == 1
    assert notes().startswith("the dump could not be written: ")


def test_each_torch_compile_has_its_report():
    first, second = compiled(Branches()), compiled(stack())
    before = len(dsv4_compile.reports())
    without_grad(first, torch.randn(3, 16))
    one = dsv4_compile.report()
    without_grad(second, residual(0, 1, 3, 4, 64))
    two = dsv4_compile.report()
    assert len(dsv4_compile.reports()) == before + 2
    assert one is not two
    assert [len(r.graphs) for r in (one, two)] == [1, 1]
    without_grad(first, torch.randn(7, 16))
    assert len(dsv4_compile.reports()) == before + 2, "a new shape is a new graph of the same report"
    assert len(one.graphs) == 2
    assert one.graphs[0].id != one.graphs[1].id


class Interrupted(nn.Module):
    """A graph break between two groups of linears."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Branches(), Branches(12)

    def forward(self, x: Tensor) -> Tensor:
        y = sum(t.mean() for t in self.first(x)) + self.first.b(x)
        torch._dynamo.graph_break()
        return torch.cat(self.second(y), -1)


@pytest.mark.parametrize("projections", STRATEGIES)
def test_graph_break_makes_graphs_of_one_report(projections):
    module, x = Interrupted(), torch.randn(3, 16)
    before = len(dsv4_compile.reports())
    torch.testing.assert_close(
        without_grad(compiled(module, projections=projections), x), without_grad(module, x), rtol=1e-5, atol=1e-6
    )
    report = dsv4_compile.report()
    assert len(dsv4_compile.reports()) == before + 1
    assert [len(g.projections) for g in report.graphs] == [1, 1]
    assert len({g.id for g in report.graphs}) == 2


def test_report_before_any_compilation(tmp_path):
    code = "import dsv4_compile\ntry:\n    dsv4_compile.report()\nexcept LookupError as e:\n    print('said', e)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.startswith("said Nothing has been compiled"), done.stderr


def test_report_says_that_the_backend_is_off(monkeypatch, no_reports):
    monkeypatch.setenv("DSV4_DISABLE", "1")
    with pytest.raises(LookupError, match="because DSV4_DISABLE is set in the environment"):
        dsv4_compile.report()
    monkeypatch.setenv("DSV4_DISABLE", "perhaps")
    with pytest.raises(LookupError, match="Nothing has been compiled"):
        dsv4_compile.report()


def test_report_survives_json():
    module = nn.Sequential(stack(), Branches(64))
    options = {"projections": "streams", "dump_dir": None, "split_ops": ["aten::mm"], "capture_sizes": [4, 8]}
    without_grad(compiled(module, **options), residual(0, 2, 3, 4, 64))
    report = dsv4_compile.report().to_dict()
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert json.loads(dsv4_compile.report().to_json()) == report
    graph = report["graphs"][0]
    assert set(report) == {"version", "torch", "device", "requested", "effective", "graphs", "streams"}
    assert {
        "id",
        "nodes",
        "dynamic",
        "seconds",
        "projections",
        "mhc",
        "missed",
        "pieces",
        "cudagraphs",
        "streams",
    } <= set(graph)
    assert graph["projections"][0]["linears"][0].keys() == {"name", "out_features", "dtype", "stream", "operator"}
    assert graph["mhc"][0].keys() >= {"site", "form", "norm_fused", "kernel", "streams", "hidden", "iters", "eps"}
    assert report["effective"]["capture_sizes"]["reason"]


# -------------------------------------------------------------------------------------------------- graphs of any kind


@pytest.mark.parametrize("projections", STRATEGIES)
def test_outputs_that_are_no_tensors(projections):
    class Assorted(Branches):
        def forward(self, x: Tensor, flag: bool = True, *, scale: float = 2.0) -> dict[str, Any]:
            a, b, c = super().forward(x)
            return {"a": a, "none": None, "rows": x.shape[0], "pair": (b, [c * scale]), "flag": flag, "text": "t"}

    module, x = Assorted(), torch.randn(3, 16)
    with torch.no_grad():
        want = module(x, False, scale=0.5)
        got = compiled(module, projections=projections)(x, False, scale=0.5)
    assert got.keys() == want.keys()
    assert (got["none"], got["rows"], got["flag"], got["text"]) == (None, 3, False, "t")
    torch.testing.assert_close((got["a"], got["pair"]), (want["a"], want["pair"]))


@pytest.mark.parametrize("projections", STRATEGIES)
def test_outputs_that_alias(projections):
    class Aliases(Branches):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            a, b, _ = super().forward(x)
            return x.view(-1), x[1:], a, a.t(), b

    module, x = Aliases(), torch.randn(3, 16)
    flat, rest, a, turned, b = without_grad(compiled(module, projections=projections), x)
    expected = without_grad(module, x)
    torch.testing.assert_close((flat, rest, a, turned, b), expected)
    with torch.no_grad():
        a.zero_()
        assert not turned.any(), "two views of one result"
        assert torch.equal(b, expected[4]), "another result"
        x.fill_(7)
    assert (flat == 7).all() and (rest == 7).all(), "views of the input"


@pytest.mark.parametrize("projections", STRATEGIES)
def test_results_of_one_call_outlive_the_next(projections):
    module = Branches()
    run = compiled(module, projections=projections)
    x, y = torch.randn(3, 16), torch.randn(3, 16)
    first = without_grad(run, x)
    without_grad(run, y)
    torch.testing.assert_close(first, without_grad(module, x))


@pytest.mark.parametrize("projections", STRATEGIES)
def test_meta_device(projections):
    with torch.device("meta"):
        module, x = nn.Sequential(stack(layers=1), Branches(64)), torch.empty(2, 3, 4, 64)
    out = without_grad(compiled(module, projections=projections), x)
    assert [(tuple(t.shape), t.device.type) for t in out] == [((2, 3, 4, f), "meta") for f in (8, 12, 4)]


class Writing(nn.Module):
    """Two branches read `x`, one of them writes it, or a view of it, in place."""

    def __init__(self, view: bool, write_first: bool, intermediate: bool):
        super().__init__()
        self.a, self.b = nn.Linear(16, 8), nn.Linear(16, 8)
        self.view, self.write_first, self.intermediate = view, write_first, intermediate

    def writing(self, x: Tensor) -> Tensor:
        y = self.a(x)
        (x.view(-1)[:24] if self.view else x).mul_(3)
        return y + self.a(x)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.intermediate:
            x = x * 1.5
        if self.write_first:
            return self.writing(x), self.b(x), x.clone()
        b = self.b(x)
        return self.writing(x), b, x.clone()


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("projections", STRATEGIES)
def test_branch_that_writes_the_shared_input(projections, compiler):
    cases = [(v, w, i) for v in (False, True) for w in (False, True) for i in (False, True)]
    for case in cases if compiler == "eager" else [(True, True, False)]:
        module, x = Writing(*case), torch.randn(3, 16)
        y = x.clone()
        got = without_grad(compiled(module, compiler=compiler, projections=projections), x)
        torch.testing.assert_close(got, without_grad(module, y), rtol=1e-5, atol=1e-5, msg=str(case))
        assert torch.equal(x, y), case


@pytest.mark.parametrize("projections", STRATEGIES)
def test_inputs_that_share_memory_and_are_written(projections):
    class Shared(Branches):
        def forward(self, x: Tensor, row: Tensor) -> tuple[Tensor, ...]:
            before = super().forward(x)
            row.add_(1)
            return (*before, *super().forward(x))

    module, x = Shared(bias=False), torch.randn(3, 16)
    y = x.clone()
    got = without_grad(compiled(module, projections=projections), x, x[1])
    torch.testing.assert_close(got, without_grad(module, y, y[1]))
    assert torch.equal(x, y)
    if projections == "pack":
        assert packing.already_packed([module.a.weight, module.b.weight, module.c.weight]), notes()


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("projections", STRATEGIES)
def test_linears_inside_a_control_flow_branch(projections, compiler):
    """Graphs inside the graph have inputs of their own."""

    class Conditional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Branches(bias=False), Branches(bias=False)

        def forward(self, x: Tensor) -> Tensor:
            def yes(t: Tensor) -> Tensor:
                return torch.cat(self.one(t), -1)

            def no(t: Tensor) -> Tensor:
                return torch.cat(self.two(t), -1)

            return torch.cond(x.sum() > 0, yes, no, (x,))

    module = Conditional()
    run = compiled(module, compiler=compiler, projections=projections)
    for x in (torch.rand(3, 16), -torch.rand(3, 16)):
        torch.testing.assert_close(without_grad(run, x), without_grad(module, x), rtol=1e-5, atol=1e-6)


def test_functions_and_lambdas_are_compiled():
    w, v = torch.randn(8, 16), torch.randn(4, 16)
    out = without_grad(compiled(lambda x: (x @ w.t(), x @ v.t()), projections="serial"), x := torch.randn(3, 16))
    torch.testing.assert_close(out, (x @ w.t(), x @ v.t()))


def test_package_needs_no_import_of_the_user(tmp_path: Path):
    code = (
        "import sys, torch\n"
        "f = torch.compile(lambda x: x.sin(), backend='dsv4', options={'compiler': 'eager'})\n"
        "print(f(torch.zeros(3)).tolist(), 'transformers' in sys.modules, 'vllm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == ["[0.0,", "0.0,", "0.0]", "False", "False"], done.stderr


def test_inductors_code_calls_the_operators_without_the_dispatcher():
    from torch._inductor.utils import run_and_get_code

    module = Stack(*SPELLINGS["hf"], hidden=64, layers=1)
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        compiled = torch.compile(module, backend="dsv4")
        out, (code,) = run_and_get_code(compiled, x := torch.randn(1, 3, 4, 64))
        torch.testing.assert_close(out, module(x))
    assert code.count("torch.ops.dsv4.mhc_pre.default.direct(") == 1
    assert "torch.ops.dsv4.mhc_pre.default(" not in code
