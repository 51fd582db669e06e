"""vLLM's mHC operators: each is replaced by one of ours that computes the same, or left with the reason."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.fx.experimental.proxy_tensor import make_fx

import dsv4_compile
from dsv4_compile.passes import vllm_calls
from dsv4_compile.passes.projections import ProjectionsPass
from dsv4_compile.passes.sites import PassResult
from dsv4_compile.passes.vllm_mhc import VllmMhcPass, find
from tests.passes import vllm_operators

vllm_operators.register()
ARGUMENTS_OF = vllm_calls.arguments_of
N, D = 4, 64
EPS = (3e-3, 2e-2, 5e-3)  # rms, pre, sinkhorn: none like another
NORM_EPS = 7e-3


@dataclasses.dataclass
class Weights:
    """Parameters of one sublayer; `comb` logits far from symmetric."""

    fn: Tensor
    scale: Tensor
    base: Tensor
    norm: Tensor

    @staticmethod
    def make(seed: int, norm_dtype: torch.dtype = torch.bfloat16) -> Weights:
        generator = torch.Generator().manual_seed(seed)

        def draw(*dims: int) -> Tensor:
            return torch.randn(dims, generator=generator)

        fn = draw((2 + N) * N, N * D) / (N * D) ** 0.5
        return Weights(fn, draw(3).abs() + 0.5, draw((2 + N) * N), (draw(D) * 0.2 + 1).to(norm_dtype))


Layer = Callable[[Tensor, Weights, Weights], tuple[Tensor, ...]]


def layer_of_0_20(residual, one, two, repeat=20):
    """Separate operators, and vLLM's RMSNorm behind each."""
    ops = torch.ops.vllm

    def pre(r, w):
        post, comb, row = ops.mhc_pre(r, w.fn, w.scale, w.base, *EPS, 1.5, repeat)
        return post, comb, torch.ops.vllm_ir.rms_norm(row, w.norm, NORM_EPS)

    post, comb, x = pre(residual, one)
    residual = ops.mhc_post(x * 2, residual, post, comb)
    post, comb, x = pre(residual, two)
    return x, ops.mhc_post(x * 3, residual, post, comb)


def layer_of_0_21(residual, one, two, repeat=20):
    ops = torch.ops.vllm
    post, comb, x = ops.mhc_pre(residual, one.fn, one.scale, one.base, *EPS, 1.5, repeat)
    x = torch.ops.vllm_ir.rms_norm(x, one.norm, NORM_EPS)
    fused = ops.mhc_fused_post_pre(x * 2, residual, post, comb, two.fn, two.scale, two.base, *EPS, 1.5, repeat)
    residual, post, comb, x = fused
    x = torch.ops.vllm_ir.rms_norm(x, two.norm, NORM_EPS)
    return x, ops.mhc_post(x * 3, residual, post, comb)


def layer_of_0_22(residual, one, two, repeat=20):
    """The norm is an argument of the fused operators."""
    ops = torch.ops.vllm
    norm = (one.norm, NORM_EPS)
    post, comb, x = ops.mhc_pre_tilelang(residual, one.fn, one.scale, one.base, *EPS, 1.5, repeat, 1, *norm)
    weights = (two.fn, two.scale, two.base, *EPS, 1.5, repeat, 1, 1, two.norm, NORM_EPS)
    residual, post, comb, x = ops.mhc_fused_post_pre_tilelang(x * 2, residual, post, comb, *weights)
    return x, ops.mhc_post_tilelang(x * 3, residual, post, comb)


def layer_of_0_32_cpu(residual, one, two, repeat=20):
    """Views between a post and the pre that reads it, one epsilon for two, no norm."""
    ops = torch.ops._C

    def pre(r, w):
        row, post, comb = ops.hc_pre_fused_cpu(r.reshape(-1, N, D), w.fn, w.scale, w.base, N, repeat, EPS[0], EPS[1])
        return post.view(*r.shape[:-2], N, 1), comb.view(*r.shape[:-2], N, N), row.view(*r.shape[:-2], D)

    def post_(x, r, post, comb):
        flat = (x.reshape(-1, D), r.reshape(-1, N, D), post.reshape(-1, N), comb.reshape(-1, N, N))
        return ops.hc_post_fused_cpu(*flat).view(r.shape)

    post, comb, x = pre(residual, one)
    residual = post_(x * 2, residual, post, comb)
    post, comb, x = pre(residual, two)
    return x, post_(x * 3, residual, post, comb)


RELEASES = {
    "0.20": layer_of_0_20,
    "0.21": layer_of_0_21,
    "0.22": layer_of_0_22,
    "0.32 cpu": layer_of_0_32_cpu,
}


def traced(layer: Layer, *inputs: Any) -> torch.fx.GraphModule:
    """The layer as a functional graph, its parameters inputs of the graph."""
    tensors = [inputs[0], *(t for w in inputs[1:] for t in (w.fn, w.scale, w.base, w.norm))]

    def function(residual: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        return layer(residual, Weights(*parameters[:4]), Weights(*parameters[4:]))

    module = make_fx(function, tracing_mode="fake")(*tensors)
    module.graph.eliminate_dead_code()
    return module


def run(module: torch.fx.GraphModule, residual: Tensor, one: Weights, two: Weights) -> tuple[Tensor, ...]:
    return module(residual, *(t for w in (one, two) for t in (w.fn, w.scale, w.base, w.norm)))


def rewritten(module: torch.fx.GraphModule, kernel: str = "reference") -> tuple[torch.fx.GraphModule, PassResult]:
    after = copy.deepcopy(module)
    result = VllmMhcPass(kernel)(after.graph)
    after.graph.lint()
    after.recompile()
    return after, result


def names(module: torch.fx.GraphModule) -> list[str]:
    targets = (n.target for n in module.graph.nodes if isinstance(n.target, torch._ops.OpOverload))
    return [t._schema.name for t in targets if t.namespace in ("vllm", "_C", "vllm_ir", "dsv4")]


def wide(weights: Weights) -> Weights:
    return Weights(weights.fn.double(), weights.scale.double(), weights.base.double(), weights.norm)


def exact(release: str, residual: Tensor, one: Weights, two: Weights, repeat: int = 20) -> tuple[Tensor, ...]:
    """The layer in float64, nothing rounded on the way."""
    eps = (EPS[0], EPS[1], EPS[1], 2.0) if release == "0.32 cpu" else (*EPS, 1.5)

    def norm(row: Tensor, w: Weights) -> Tensor:
        if release == "0.32 cpu":
            return row
        return row * torch.rsqrt(row.square().mean(-1, keepdim=True) + NORM_EPS) * w.norm.double()

    def pre(r: Tensor, w: Weights) -> tuple[Tensor, Tensor, Tensor]:
        post, comb, row = vllm_operators._pre(r, w.fn, w.scale, w.base, *eps, repeat)
        return post, comb, norm(row, w)

    residual, one, two = residual.double(), wide(one), wide(two)
    post, comb, x = pre(residual, one)
    residual = vllm_operators._post(x * 2, residual, post, comb)
    post, comb, x = pre(residual, two)
    return x, vllm_operators._post(x * 3, residual, post, comb)


def error(found: Tensor, oracle: Tensor) -> float:
    return float((found.double() - oracle).norm() / oracle.norm())


def example(tokens: int = 5) -> Tensor:
    return torch.randn(tokens, N, D, generator=torch.Generator().manual_seed(5)).bfloat16()


@pytest.mark.parametrize("kernel", ["reference", "cpp"])
@pytest.mark.parametrize("repeat", [1, 2, 20])
@pytest.mark.parametrize("release", RELEASES)
def test_operators_are_replaced_by_ours_and_as_near_to_float64(release, repeat, kernel):
    residual, one, two = example(), Weights.make(1), Weights.make(2)

    def layer(*inputs):
        return RELEASES[release](*inputs, repeat=repeat)

    before = traced(layer, residual, one, two)
    after, result = rewritten(before, kernel)
    assert names(after) == ["dsv4::mhc_pre", "dsv4::mhc_post_pre", "dsv4::mhc_post"]
    assert [s.form for s in result.mhc] == ["pre", "post_pre", "post"]
    assert {s.kernel for s in result.mhc} == {kernel} and not result.missed
    oracle = exact(release, residual, one, two, repeat)
    theirs, ours = run(before, residual, one, two), run(after, residual, one, two)
    for a, b, o in zip(theirs, ours, oracle, strict=True):
        assert a.dtype == b.dtype == torch.bfloat16 and a.shape == b.shape
        assert error(b, o) <= error(a, o) * 1.05


@pytest.mark.parametrize("release", RELEASES)
def test_constants_and_norm_are_in_the_report(release):
    _, result = rewritten(traced(RELEASES[release], example(), Weights.make(1), Weights.make(2)))
    expected = dict(zip(("rms", "pre", "sinkhorn"), EPS, strict=True)) | {"norm": NORM_EPS}
    if release == "0.32 cpu":
        expected = {"rms": EPS[0], "pre": EPS[1], "sinkhorn": EPS[1]}
    assert [dict(s.eps) for s in result.mhc] == [expected, expected, {}]
    assert [s.norm_fused for s in result.mhc] == ["norm" in expected, "norm" in expected, False]
    assert [s.iters for s in result.mhc] == [20, 20, None]
    assert {(s.streams, s.hidden) for s in result.mhc} == {(N, D)}


def test_the_pass_is_idempotent():
    once, _ = rewritten(traced(layer_of_0_22, example(), Weights.make(1), Weights.make(2)))
    twice, result = rewritten(once)
    assert result.mhc == () and names(twice) == names(once)


def test_a_norm_weight_in_float32_is_read_as_vllm_reads_it():
    residual = example()
    one, two = Weights.make(1, torch.float32), Weights.make(2, torch.float32)
    before = traced(layer_of_0_22, residual, one, two)
    after, _ = rewritten(before)
    rounded = [Weights(w.fn, w.scale, w.base, w.norm.bfloat16()) for w in (one, two)]
    oracle = exact("0.22", residual, *rounded)
    for a, b, o in zip(run(before, residual, one, two), run(after, residual, one, two), oracle, strict=True):
        assert error(b, o) <= error(a, o) * 1.05


def test_the_residual_between_a_post_and_its_pre_may_have_other_readers():
    def layer(residual, one, two):
        ops = torch.ops.vllm
        post, comb, x = ops.mhc_pre(residual, one.fn, one.scale, one.base, *EPS, 1.5, 20)
        middle = ops.mhc_post(x, residual, post, comb)
        post, comb, x = ops.mhc_pre(middle, two.fn, two.scale, two.base, *EPS, 1.5, 20)
        return middle + 1, ops.mhc_post(x, middle, post, comb), post, comb

    inputs = (example(), Weights.make(1), Weights.make(2))
    before = traced(layer, *inputs)
    after, result = rewritten(before)
    assert [s.form for s in result.mhc] == ["pre", "post_pre", "post"]
    for a, b in zip(run(before, *inputs), run(after, *inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
        assert a.shape == b.shape


def test_a_pre_whose_weight_is_made_after_the_post_is_replaced_apart():
    def layer(residual, one, two):
        ops = torch.ops.vllm
        post, comb, x = ops.mhc_pre(residual, one.fn, one.scale, one.base, *EPS, 1.5, 20)
        middle = ops.mhc_post(x, residual, post, comb)
        scale = two.scale * middle.float().mean()
        return ops.mhc_pre(middle, two.fn, scale, two.base, *EPS, 1.5, 20)

    inputs = (example(), Weights.make(1), Weights.make(2))
    before = traced(layer, *inputs)
    after, result = rewritten(before)
    assert sorted(s.form for s in result.mhc) == ["post", "pre", "pre"]
    for a, b in zip(run(before, *inputs), run(after, *inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_a_norm_with_another_reader_of_the_row_stays():
    def layer(residual, one, two):
        post, comb, row = torch.ops.vllm.mhc_pre(residual, one.fn, one.scale, one.base, *EPS, 1.5, 20)
        return torch.ops.vllm_ir.rms_norm(row, one.norm, NORM_EPS), row, post, comb

    after, result = rewritten(traced(layer, example(), Weights.make(1), Weights.make(2)))
    assert names(after) == ["dsv4::mhc_pre", "vllm_ir::rms_norm"]
    assert not result.mhc[0].norm_fused


def test_by_default_a_cpu_keeps_vllms_operators_and_says_why():
    before = traced(layer_of_0_22, example(), Weights.make(1), Weights.make(2))
    after, result = rewritten(before, "auto")
    assert names(after) == names(before)
    assert {s.kernel for s in result.mhc} == {"vllm"} and len(result.mhc) == 3
    assert len(result.effective) == 1 and "only where ours were measured to be faster" in result.effective[0][2]


def test_the_environment_decides_over_the_rule(monkeypatch):
    module = traced(layer_of_0_22, example(), Weights.make(1), Weights.make(2))
    for kernel, wish, family in (("auto", "always", "cpp"), ("reference", "never", "vllm"), ("auto", "often", "vllm")):
        monkeypatch.setenv("DSV4_VLLM_MHC", wish)
        _, result = rewritten(module, kernel)
        assert {s.kernel for s in result.mhc} == {family}


def test_what_the_environment_wants_is_part_of_the_identity(monkeypatch):
    found = {VllmMhcPass().uuid()}
    for wish in ("always", "never"):
        monkeypatch.setenv("DSV4_VLLM_MHC", wish)
        found.add(VllmMhcPass().uuid())
    assert len(found) == 3


@pytest.mark.parametrize(
    ("capability", "family", "sentence"),
    [((9, 0), "cuda", None), ((9, 0), "triton", "no compiler"), ((10, 0), "cuda", "this is 10.0")],
)
def test_on_cuda_they_are_replaced_where_that_was_measured(monkeypatch, capability, family, sentence):
    from dsv4_compile.kernels.mhc import families

    module = traced(layer_of_0_22, example(), Weights.make(1), Weights.make(2))
    residual = next(n for n in module.graph.nodes if n.op == "placeholder")
    (site, *_), _ = find(module.graph)
    with torch._subclasses.FakeTensorMode():
        residual.meta["val"] = torch.empty(5, N, D, dtype=torch.bfloat16, device="cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(families, "resolve", lambda *_: (family, None if family == "cuda" else "no compiler"))
    family, reason = VllmMhcPass()._family(site)
    assert (family, reason) == ("cuda", None) if sentence is None else family == "vllm" and sentence in reason


def test_a_lookalike_with_another_formula_is_left_with_the_reason():
    def layer(residual, one, two):
        return torch.ops.vllm.mhc_pre_delayed_tilelang(residual, one.fn, one.scale, one.base, *EPS, 1.5, 20)

    after, result = rewritten(traced(layer, example(), Weights.make(1), Weights.make(2)))
    assert names(after) == ["vllm::mhc_pre_delayed_tilelang"]
    assert "not an operator whose formula" in result.missed[0].reason


def functionalised(function: Callable[..., Any], v2: bool, *inputs: Tensor) -> torch.fx.GraphModule:
    """The graph that Inductor would see: operators that write their result are wrapped in one of two ways."""
    graphs = []

    def backend(gm, inputs):
        def compiler(module, _):
            graphs.append(module)
            return make_boxed_func(module.forward)

        return aot_autograd(fw_compiler=compiler)(gm, inputs)

    settings = {"enable_auto_functionalized_v2": v2}
    with torch.inference_mode(), torch._inductor.config.patch(settings):
        torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    wrapper = "auto_functionalized_v2" if v2 else "auto_functionalized"
    assert wrapper in {str(n.target) for n in graphs[0].graph.nodes}
    return graphs[0]


BOTH = pytest.mark.parametrize("v2", [False, True], ids=["auto_functionalized", "auto_functionalized_v2"])


@BOTH
def test_the_final_collapse_stays_vllms_and_is_listed(v2):
    def function(residual, fn, scale, base):
        out = residual.new_empty(residual.shape[0], D)
        torch.ops.vllm.hc_head_fused_kernel_tilelang(residual, fn, scale, base, out, D, 1e-6, 1e-6, N)
        return out + 1

    weights = (torch.randn(N, N * D), torch.randn(1), torch.randn(N))
    result = VllmMhcPass("reference")(functionalised(function, v2, example(), *weights).graph)
    assert [(s.form, s.kernel, s.streams, s.hidden) for s in result.mhc] == [("head", "vllm", N, D)]


@BOTH
def test_products_of_vllm_that_read_one_activation_are_left_and_named(v2):
    def function(x, one, two):
        outs = [x.new_empty(x.shape[0], w.shape[0]) for w in (one, two)]
        for out, weight in zip(outs, (one, two), strict=True):
            torch.ops._C.weight_packed_linear(out, x, weight, None, True)
        return outs

    module = functionalised(function, v2, torch.randn(3, D), torch.randn(8, D), torch.randn(16, D))
    result = ProjectionsPass("serial")(module.graph)
    assert not result.projections and len(result.missed) == 2
    assert {m.reason for m in result.missed} == {
        "a product of vLLM's (_C::weight_packed_linear) keeps its own kernel and its packed weight"
    }


def test_an_argument_that_is_no_number_is_left_with_the_reason():
    module = traced(layer_of_0_22, example(), Weights.make(1), Weights.make(2))
    node = next(n for n in module.graph.nodes if "mhc_pre_tilelang" in str(n.target))
    node.args = (*node.args[:4], "far", *node.args[5:])
    _, result = rewritten(module)
    assert any("rms_eps far, which is not a number" in m.reason for m in result.missed)


def test_parameters_of_another_shape_are_left_with_the_reason():
    module = traced(layer_of_0_22, example(), Weights.make(1), Weights.make(2))
    fn = next(n for n in module.graph.nodes if n.op == "placeholder" and n.meta["val"].shape == ((2 + N) * N, N * D))
    fn.meta["val"] = fn.meta["val"].new_empty((N, N * D))
    after, result = rewritten(module)
    assert any("fn of shape" in m.reason for m in result.missed)
    assert "vllm::mhc_pre_tilelang" in names(after)


def test_dynamic_token_counts_stay_dynamic_and_are_compiled_once(monkeypatch):
    """Through the backend, as vLLM's modes 1 and 2 use it."""
    monkeypatch.setenv("DSV4_VLLM_MHC", "always")
    parameters = [t for w in (Weights.make(1), Weights.make(2)) for t in (w.fn, w.scale, w.base, w.norm)]

    def function(residual, *p):
        return layer_of_0_22(residual, Weights(*p[:4]), Weights(*p[4:]))

    compiled = torch.compile(function, backend="dsv4", options={"compiler": "eager"}, fullgraph=True)
    with torch.inference_mode():
        for tokens in (6, 1, 17):
            residual = example(tokens)
            torch._dynamo.decorators.mark_unbacked(residual, 0)
            for a, b in zip(function(residual, *parameters), compiled(residual, *parameters), strict=True):
                torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2)
    (graph,) = dsv4_compile.report().graphs
    assert graph.dynamic and [s.form for s in graph.mhc] == ["pre", "post_pre", "post"]
    assert {s.kernel for s in graph.mhc} == {"cpp"}


def test_many_layers_take_time_in_proportion_to_their_number(monkeypatch):
    """Every call is looked at a fixed number of times."""
    counts = []
    for depth in (2, 4, 8):
        seen: list[str | None] = []

        def layer(residual, one, two, depth=depth):
            x = residual[:, 0]
            for _ in range(depth):
                x, residual = layer_of_0_22(residual, one, two)
            return x, residual

        def counting(node, seen=seen):
            seen.append(vllm_calls.name_of(node))
            return ARGUMENTS_OF(node)

        module = traced(layer, example(), Weights.make(1), Weights.make(2))
        monkeypatch.setattr(vllm_calls, "arguments_of", counting)
        assert len(rewritten(module)[1].mhc) == 2 * depth + 1
        counts.append(len(seen))
    assert counts[2] - counts[1] == 2 * (counts[1] - counts[0])
