"""`projections="auto"` as on a CUDA device: one operator that chooses when it runs. On a CPU the default serves."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import dsv4_compile
from dsv4_compile import memory
from dsv4_compile.kernels import linear
from dsv4_compile.kernels.choice import chooser
from dsv4_compile.kernels.linear import packing, timing, tuning
from dsv4_compile.passes import projections
from dsv4_compile.passes.sites import PassResult, ProjectionGroup
from tests.passes.test_projections import Chains, Linears, Odd, names, run

pytestmark = pytest.mark.usefixtures("as_on_cuda")


class Mixed(nn.Module):
    """Linears of two dtypes on one input, in turn."""

    def __init__(self) -> None:
        super().__init__()
        low, wide = {"dtype": torch.bfloat16, "bias": False}, {"bias": True}
        self.a, self.c, self.e = (nn.Linear(16, rows, **low) for rows in (8, 4, 2))
        self.b, self.d = (nn.Linear(16, rows, **wide) for rows in (3, 5))

    def forward(self, x: Tensor) -> list[Tensor]:
        wide = x.float()
        return [self.a(x) * 2, self.b(wide), self.c(x), self.d(wide).view(-1), self.e(x) + 1]


def auto(module: nn.Module, *inputs: Tensor, **options: object) -> tuple[object, dsv4_compile.GraphReport]:
    return run(module, *inputs, projections="auto", **options)


def assert_like_eager(out: object, module: nn.Module, *inputs: Tensor) -> None:
    with torch.no_grad():
        for ours, eager in zip(out, module(*inputs), strict=True):
            low = ours.dtype is torch.bfloat16
            torch.testing.assert_close(ours, eager, **({"rtol": 2e-2, "atol": 2e-2} if low else {}))


def adjacent(*linears: nn.Linear) -> bool:
    return packing.already_packed([linear.weight for linear in linears])


@pytest.mark.parametrize("shape", [(1, 1, 32), (2, 7, 32), (5, 32), (0, 32), (32,)])
def test_a_group_is_one_operator_over_packed_weights(shape: tuple[int, ...]) -> None:
    module, x = Linears(), torch.randn(shape)
    out, graph = auto(module, x)
    assert_like_eager(out, module, x)
    if x.numel():
        assert names(graph) == [["a", "b", "c"]] and adjacent(module.a, module.b, module.c)
        (group,) = graph.projections
        assert (group.strategy, group.columns, group.packs) == ("measured", 32, 1)
        assert group.biased == (False, True, False)


def test_dtypes_are_packed_apart_and_run_as_one_operator() -> None:
    module, x = Mixed(), torch.randn(5, 16).bfloat16()
    out, graph = auto(module, x)
    assert_like_eager(out, module, x)
    assert adjacent(module.a, module.c, module.e) and adjacent(module.b, module.d)
    assert names(graph) == [["a", "b", "c", "d", "e"]] and graph.projections[0].packs == 2
    assert [entry["runs"] for entry in linear.choices()] == [((0, 2, 4), (1, 3))]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("module", [Chains, Mixed], ids=lambda kind: kind.__name__)
def test_static_and_dynamic_shapes(module: type[nn.Module], dynamic: bool) -> None:
    model = module()
    options = {"compiler": "eager", "mhc": "off"}
    compiled = torch.compile(model, backend="dsv4", options=options, dynamic=dynamic)
    for tokens in (3, 4, 6):
        x = torch.randn(tokens, 5, 16) if module is Chains else torch.randn(tokens, 16).bfloat16()
        with torch.no_grad():
            assert_like_eager(compiled(x), model, x)
    assert {g.strategy for graph in dsv4_compile.report().graphs for g in graph.projections} == {"measured"}
    assert len(dsv4_compile.report().graphs) == (1 if dynamic else 3)


@pytest.mark.parametrize("dynamic", [False, True])
def test_with_inductor(dynamic: bool) -> None:
    model = Mixed()
    with torch._inductor.config.patch(force_disable_caches=True), torch.no_grad():
        compiled = torch.compile(model, backend="dsv4", dynamic=dynamic)
        for tokens in (5, 6):
            x = torch.randn(tokens, 16).bfloat16()
            assert_like_eager(compiled(x), model, x)
    assert adjacent(model.a, model.c, model.e)
    assert dsv4_compile.report().graphs[-1].projections[0].strategy == "measured"


def test_odd_weights_are_right_and_the_reason_says_why_they_stay_apart() -> None:
    module, x = Odd(), torch.randn(5, 16)
    out, graph = auto(module, x)
    assert_like_eager(out, module, x)
    (group,) = graph.projections
    assert group.strategy == "measured" and group.packs == 0 and "not packed: a weight is" in group.reason


def test_weights_shared_with_another_model_stay_apart_with_a_note() -> None:
    first, second, x = Linears(), Linears(), torch.randn(5, 32)
    second.a, second.c = first.c, first.a
    auto(first, x)
    out, graph = auto(second, x)
    assert_like_eager(out, second, x)
    assert any("stay apart" in note for note in graph.notes)
    assert graph.projections[0].strategy == "measured" and "larger storage" in graph.projections[0].reason


def test_two_groups_of_one_graph_pack_their_own_weights() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd, self.mixed, self.plain = Odd(), Mixed(), Linears(16)

        def forward(self, x: Tensor) -> list[Tensor]:
            return [*self.odd(x * 1), *self.mixed((x * 2).bfloat16()), *self.plain(x * 3)]

    module, x = Two(), torch.randn(5, 16)
    out, graph = auto(module, x)
    with torch.no_grad():
        for ours, eager in zip(out, module(x), strict=True):
            torch.testing.assert_close(ours, eager, rtol=2e-2, atol=2e-2)
    assert sorted(group.packs for group in graph.projections) == [0, 1, 2]
    mixed, plain = module.mixed, module.plain
    assert adjacent(mixed.a, mixed.c, mixed.e) and adjacent(mixed.b, mixed.d) and adjacent(plain.a, plain.b, plain.c)


def test_values_are_never_stale() -> None:
    module, x = Linears(), torch.randn(5, 32)
    compiled = torch.compile(module, backend="dsv4", options={"compiler": "eager"})
    with torch.no_grad():
        assert_like_eager(compiled(x), module, x)
        module.load_state_dict({name: torch.randn_like(v) for name, v in module.state_dict().items()})
        assert_like_eager(compiled(x), module, x)
        module.b.weight.data = torch.randn(8, 32)
        assert_like_eager(compiled(x), module, x)
        module.load_state_dict({name: torch.randn_like(v) for name, v in module.state_dict().items()}, assign=True)
        assert_like_eager(compiled(x), module, x)
        module.double()
        assert_like_eager(compiled(x.double()), module, x.double())


def test_the_other_values_of_the_option_are_what_they_were() -> None:
    module, x = Linears(), torch.randn(5, 32)
    for strategy in ("serial", "streams", "pack"):
        torch._dynamo.reset()
        out, graph = run(module, x, projections=strategy)
        assert_like_eager(out, module, x)
        assert [group.strategy for group in graph.projections] == [strategy]
    assert linear.choices() == []


def test_findings_survive_the_cache_on_disk() -> None:
    made = projections.ProjectionsPass("auto")
    results: list[PassResult] = []

    def backend(graph: torch.fx.GraphModule, examples: list[Tensor]) -> object:
        results.append(made(graph.graph))
        graph.recompile()
        return graph

    with torch.no_grad():
        compiler = aot_autograd(fw_compiler=backend)
        torch.compile(Mixed(), backend=compiler)(torch.randn(5, 16).bfloat16())
    (result,) = results
    assert len(result.packs) == result.projections[0].packs == 2
    assert memory._result(json.loads(json.dumps(dataclasses.asdict(result)))) == result


def test_a_hook_without_parameters_packs_nothing() -> None:
    made = projections.ProjectionsPass("auto", pack=False)
    seen: list[ProjectionGroup] = []

    def backend(graph: torch.fx.GraphModule, examples: list[Tensor]) -> object:
        result = made(graph.graph)
        seen.extend(result.projections)
        assert result.packs == ()
        graph.recompile()
        return graph

    module, x = Linears(), torch.randn(5, 32)
    with torch.no_grad():
        out = torch.compile(module, backend=aot_autograd(fw_compiler=backend))(x)
    assert_like_eager(out, module, x)
    assert [group.strategy for group in seen] == ["measured"] and "not at hand" in seen[0].reason


# -------------------------------------------------------------------------------------------------------- the report


def test_the_report_says_that_the_choice_is_measured_and_then_what_was() -> None:
    module = Linears()
    auto(module, torch.randn(5, 32))
    report = dsv4_compile.report()
    assert "measured for each range of token counts" in report.to_dict()["graphs"][-1]["projections"][0]["reason"]
    assert "up to 8 tokens: pack of a+b+c (default: DSV4_TUNE is 0)" in str(report)
    assert report.effective["projections"]["value"] == "measured"


def test_the_report_has_the_times_of_every_bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("DSV4_TUNE", "auto")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(chooser, "capturing", lambda index: False)
    monkeypatch.setattr(chooser, "drain", lambda index: None)
    monkeypatch.setattr(timing, "measure", lambda *_: {"serial": 34.6, "streams": 19.0, "pack": 15.0})
    real = tuning.strategy
    monkeypatch.setattr(tuning, "strategy", lambda problem, tokens, most, index: real(problem, tokens, most, 0))
    module = Linears()
    compiled = torch.compile(module, backend="dsv4", options={"compiler": "eager"}, dynamic=True)
    with torch.no_grad():
        for tokens in (5000, 3, 20):
            compiled(torch.randn(tokens, 32))
    (group,) = dsv4_compile.report().to_dict()["graphs"][0]["projections"]
    assert [one["tokens"] for one in group["measured"]] == [8, 32, None]
    assert group["measured"][0]["microseconds"] == {"serial": 34.6, "streams": 19.0, "pack": 15.0}
    text = str(dsv4_compile.report())
    assert "up to 8 tokens: pack of a+b+c (searched: pack 15.0 us, streams 19.0 us, serial 34.6 us)" in text
    assert "more tokens: pack" in text
