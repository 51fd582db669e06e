"""The mHC pass: every spelling is found and right, a near miss is left alone and right."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import dsv4_compile
from tests.spellings import (
    NEAR_MISSES,
    SPELLINGS,
    TOKEN_DEPENDENT,
    Constants,
    Site,
    Stack,
    deepseek_post,
    deepseek_pre,
    hf_post,
    hf_pre,
    raised_post_pre,
    sinkhorn,
)


def run(module: nn.Module, *inputs: Tensor, **options: object) -> tuple[Tensor, dsv4_compile.GraphReport]:
    """Result and graph report under `compiler="eager"`."""
    options = {"compiler": "eager", "mhc": "auto", "projections": "off"} | options
    with torch.no_grad():
        out = torch.compile(module, backend="dsv4", options=options)(*inputs)
    return out, dsv4_compile.report().graphs[-1]


def error(out: Tensor, oracle: Tensor) -> float:
    return float((out.double() - oracle).norm() / oracle.norm())


def oracle_of(module: nn.Module, *inputs: Tensor) -> Tensor:
    """The module in float64 (its `.float()` calls made `.double()`)."""
    wide = copy.deepcopy(module).double()
    with torch.no_grad(), FloatIsDouble():
        return wide(*(x.double() for x in inputs))


class FloatIsDouble(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            return args[0].double()
        return func(*args, **(kwargs or {}))


def residual(seed: int, *dims: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dims, generator=generator).to(dtype)


def forms(graph: dsv4_compile.GraphReport) -> list[str]:
    return [site.form for site in graph.mhc]


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no_norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling_is_fused_and_as_close_to_float64_as_eager(name, dtype, norm):
    torch.manual_seed(0)
    module = Stack(*SPELLINGS[name], dtype=dtype, norm=norm)
    x = residual(1, 2, 5, 4, 64, dtype=dtype)
    with torch.no_grad():
        eager = module(x)
    out, graph = run(module, x)
    assert forms(graph) == ["pre", "post_pre", "post"], graph.missed
    assert [s.norm_fused for s in graph.mhc] == [norm, norm, False]
    assert graph.missed == []
    oracle = oracle_of(module, x)
    assert out.dtype == eager.dtype
    assert error(out, oracle) <= max(error(eager, oracle) * 1.05, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_norm_before_and_after_the_product_are_the_same_operator(dtype):
    """transformers normalises the row and multiplies it with `fn`, DeepSeek multiplies and scales the logits."""
    x, found = residual(1, 2, 5, 4, 64, dtype=dtype), []
    for pre in (hf_pre, deepseek_pre):
        torch.manual_seed(0)
        torch._dynamo.reset()
        found.append(run(Stack(pre, deepseek_post, dtype=dtype), x))
    (before, one), (after, other) = found
    assert one.mhc == other.mhc and len(one.mhc) == 3
    assert torch.equal(before, after)


def test_constants_are_read_off_the_region():
    c = Constants(n=3, rms_eps=3e-6, hc_eps=2e-5, norm_eps=5e-3, iters=7, post_mult=1.5)
    _, graph = run(Stack(hf_pre, hf_post, constants=c, hidden=40), residual(0, 1, 6, 3, 40))
    assert [s.iters for s in graph.mhc] == [7, 7, None]
    eps = graph.mhc[1].eps
    assert eps == pytest.approx({"rms": 3e-6, "pre": 2e-5, "sinkhorn": 2e-5, "norm": 5e-3})
    assert (graph.mhc[1].streams, graph.mhc[1].hidden) == (3, 40)


@pytest.mark.parametrize("iters", [1, 2, 20])
@pytest.mark.parametrize("n", [2, 4, 8])
def test_streams_and_iterations(n, iters):
    torch.manual_seed(n)
    module = Stack(hf_pre, hf_post, constants=Constants(n=n, iters=iters))
    x = residual(n, 1, 7, n, 64)
    out, graph = run(module, x)
    assert forms(graph) == ["pre", "post_pre", "post"]
    assert [s.iters for s in graph.mhc[:2]] == [iters, iters]
    assert error(out, oracle_of(module, x)) < 1e-6


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss_is_not_fused_and_says_why(name):
    torch.manual_seed(0)
    module = Stack(NEAR_MISSES[name], deepseek_post)
    x = residual(2, 2, 5, 4, 64) * 3
    out, graph = run(module, x)
    assert set(forms(graph)) <= {"post"}, "only the hc_post, which is exactly the formula, may be replaced"
    assert graph.missed
    assert all(m.kind == "mhc" and m.reason for m in graph.missed)
    assert error(out, oracle_of(module, x)) < 1e-6


def test_change_of_post_between_pre_and_post_is_kept():
    torch.manual_seed(0)
    module = Stack(raised_post_pre, deepseek_post)
    x = residual(2, 2, 5, 4, 64)
    out, _ = run(module, x)
    assert error(out, oracle_of(module, x)) < 1e-6


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (4, 4), (4, 1), (3, 17), (64, 4)])
def test_token_counts_that_look_like_other_sizes(shape):
    torch.manual_seed(0)
    module = Stack(hf_pre, hf_post)
    x = residual(3, *shape, 4, 64)
    out, graph = run(module, x)
    assert forms(graph) == ["pre", "post_pre", "post"]
    assert error(out, oracle_of(module, x)) < 1e-6


def test_zero_tokens():
    out, _ = run(Stack(hf_pre, hf_post), torch.zeros(1, 0, 4, 64))
    assert out.shape == (1, 0, 4, 64)


@pytest.mark.parametrize("name", ["hf", "deepseek", "einsum", "sum_over_size"])
def test_symbolic_shapes(name):
    torch.manual_seed(0)
    module = Stack(*SPELLINGS[name])
    options = {"compiler": "eager", "mhc": "auto"}
    compiled = torch.compile(module, backend="dsv4", options=options, dynamic=True)
    for shape in [(2, 5), (3, 9), (1, 6)]:
        x = residual(4, *shape, 4, 64)
        with torch.no_grad():
            out = compiled(x)
        assert error(out, oracle_of(module, x)) < 1e-6
    graphs = dsv4_compile.report().graphs
    assert graphs[0].dynamic
    assert [forms(g) for g in graphs] == [["pre", "post_pre", "post"]] * len(graphs), graphs


GAIN = 1.5


def test_a_global_float_that_changes_is_no_constant_with_symbolic_shapes(monkeypatch):
    """A guard on its value would mean a compilation for each."""

    class Scaled(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * GAIN

    torch.manual_seed(0)
    module = Scaled(hf_pre, hf_post)
    compiled = torch.compile(module, backend="dsv4", options={"compiler": "eager"}, dynamic=True)
    for gain in (1.5, 1.0, 2.25):
        monkeypatch.setitem(Scaled.forward.__globals__, "GAIN", gain)
        x = residual(4, 2, 5, 4, 64)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-4)
    assert [forms(graph) for graph in dsv4_compile.report().graphs] == [["pre", "post_pre", "post"]]


@pytest.mark.parametrize("name", TOKEN_DEPENDENT)
def test_what_follows_the_token_count_is_kept(name):
    def pre(x: Tensor, p: object) -> tuple[Tensor, Tensor, Tensor]:
        y, post, comb = hf_pre(x, p)
        return y, TOKEN_DEPENDENT[name](post), comb

    torch.manual_seed(0)
    module = Stack(pre, hf_post)
    compiled = torch.compile(module, backend="dsv4", options={"compiler": "eager"}, dynamic=True)
    for shape in [(2, 7), (3, 9), (5, 6)]:
        x = residual(4, *shape, 4, 64)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-4)


def test_epsilon_that_was_rounded_to_float32_is_the_epsilon():
    """`F.rms_norm` writes its epsilon as a float32."""

    class Mixed(Stack):
        def forward(self, x: Tensor) -> Tensor:
            y, post, comb = self.pre(x, self.sites[0])
            y = torch.nn.functional.rms_norm(y, (64,), self.sites[0].norm_weight, 1e-5)
            return self.post(self.layers[0](y), x, post, comb)

    torch.manual_seed(0)
    module = Mixed(hf_pre, hf_post, constants=Constants(rms_eps=1e-5))
    x = residual(4, 2, 5, 4, 64)
    out, graph = run(module, x)
    assert [(s.form, s.norm_fused) for s in graph.mhc] == [("pre", True), ("post", False)]
    with torch.no_grad():
        torch.testing.assert_close(out, module(x), rtol=1e-4, atol=1e-5)


def test_post_behind_an_unknown_pre_is_replaced_alone_and_said():
    class Split(Stack):
        def forward(self, x: Tensor) -> Tensor:
            flat = x.flatten(2)
            mixes = torch.cat([torch.nn.functional.linear(flat, w * 2) for w in self.sites[0].fn.chunk(24)], -1)
            return self.post(x[..., 0, :], x, mixes[..., :4].sigmoid(), mixes[..., 8:].unflatten(-1, (4, 4)))

    torch.manual_seed(0)
    module = Split(hf_pre, hf_post)
    x = residual(4, 2, 5, 4, 64)
    out, graph = run(module, x)
    assert forms(graph) == ["post"]
    assert graph.missed
    with torch.no_grad():
        torch.testing.assert_close(out, module(x), rtol=1e-4, atol=1e-5)


def test_residual_between_post_and_pre_may_have_other_readers():
    class Tapped(Stack):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            taps = []
            for site, layer in zip(self.sites, self.layers, strict=True):
                y, post, comb = self.pre(x, site)
                x = self.post(layer(y), x, post, comb)
                taps.append(x * 2)
            return x, taps[0], taps[1].sum(-1)

    torch.manual_seed(0)
    module = Tapped(hf_pre, hf_post)
    x = residual(5, 1, 9, 4, 64)
    with torch.no_grad():
        eager = module(x)
    out, graph = run(module, x)
    assert forms(graph) == ["pre", "post_pre", "post"]
    for a, b in zip(out, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_every_intermediate_may_be_an_output():
    class Open(Stack):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            y, post, comb = self.pre(x, self.sites[0])
            out = self.post(self.layers[0](y), x, post, comb)
            z, post2, comb2 = self.pre(out, self.sites[1])
            return y, post, comb, out, z, post2.transpose(1, 2), comb2.mT

    torch.manual_seed(0)
    module = Open(hf_pre, hf_post, norm=False)
    x = residual(5, 1, 9, 4, 64)
    with torch.no_grad():
        eager = module(x)
    out, graph = run(module, x)
    assert forms(graph) == ["pre", "post_pre"]
    for a, b in zip(out, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_number_of_layers(layers):
    torch.manual_seed(0)
    module = Stack(hf_pre, hf_post, layers=layers)
    x = residual(6, 1, 5, 4, 64)
    out, graph = run(nn.Sequential(module, nn.Linear(64, 64)), x)
    assert forms(graph) == (["pre"] + ["post_pre"] * (layers - 1) + ["post"] if layers else [])
    assert out.shape == x.shape


def test_model_cut_at_a_layer_boundary_equals_the_uncut_one():
    torch.manual_seed(0)
    whole = Stack(hf_pre, hf_post, layers=4)
    first, second = copy.deepcopy(whole), copy.deepcopy(whole)
    first.sites, first.layers = whole.sites[:2], whole.layers[:2]
    second.sites, second.layers = whole.sites[2:], whole.layers[2:]
    x = residual(7, 1, 5, 4, 64)
    expected, _ = run(whole, x)
    half, _ = run(first, x)
    out, graph = run(second, half)
    assert forms(graph) == ["pre", "post_pre", "post"]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_graph_break_inside_a_site():
    class Broken(Stack):
        def forward(self, x: Tensor) -> Tensor:
            y, post, comb = self.pre(x, self.sites[0])
            torch._dynamo.graph_break()
            return self.post(self.layers[0](y), x, post, comb)

    torch.manual_seed(0)
    module = Broken(hf_pre, hf_post)
    x = residual(8, 1, 5, 4, 64)
    with torch.no_grad():
        eager = module(x)
    out, _ = run(module, x)
    assert [forms(g) for g in dsv4_compile.report().graphs] == [["pre"], ["post"]]
    torch.testing.assert_close(out, eager, rtol=1e-5, atol=1e-5)


def test_low_precision_parameters():
    torch.manual_seed(0)
    module = Stack(hf_pre, hf_post, dtype=torch.bfloat16)
    for site in module.sites:
        for name in ("fn", "base", "scale"):
            setattr(site, name, nn.Parameter(getattr(site, name).bfloat16()))
    x = residual(9, 1, 5, 4, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        eager = module(x)
    out, graph = run(module, x)
    oracle = oracle_of(module, x)
    assert error(out, oracle) <= error(eager, oracle) * 1.05
    if forms(graph) != ["pre", "post_pre", "post"]:
        assert graph.missed


def traced(module: nn.Module, x: Tensor) -> torch.fx.GraphModule:
    """The decomposed graph of `module`, whose parameters are inputs."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    names = [name for name, _ in module.named_parameters()]

    def call(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (x,))

    with torch.no_grad():
        return make_fx(call, select_decomp_table(), tracing_mode="fake")(x, *module.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "name", [name for name in SPELLINGS if not name.startswith("rms_norm")]
)  # has its own operator
def test_nothing_of_the_authors_arithmetic_is_left(name, dtype):
    from dsv4_compile.passes.mhc import MhcPass

    gm = traced(Stack(*SPELLINGS[name], dtype=dtype), residual(1, 2, 5, 4, 64, dtype=dtype))
    assert len(MhcPass("reference")(gm.graph).mhc) == 3
    left = {str(node.target) for node in gm.graph.nodes if node.op == "call_function"}
    assert left.isdisjoint({"aten.bmm.default", "aten.add.Tensor", "aten.sum.dim_IntList", "aten.div.Tensor"})


def test_second_run_of_the_pass_changes_nothing():
    from dsv4_compile.passes.mhc import MhcPass

    torch.manual_seed(0)
    gm = traced(Stack(hf_pre, hf_post), residual(1, 2, 5, 4, 64))
    first = MhcPass("reference")(gm.graph)
    text = str(gm.graph)
    second = MhcPass("reference")(gm.graph)
    assert len(first.mhc) == 3
    assert second.mhc == ()
    assert str(gm.graph) == text


def test_time_of_the_pass_is_linear_in_layers():
    """Counted in region evaluations, not seconds: equal layers are proved once."""
    from dsv4_compile.passes import mhc_post, mhc_proof

    torch.manual_seed(0)
    counts = []
    for layers in (3, 12):
        mhc_proof._proved.cache_clear()
        mhc_post._proved.cache_clear()
        _, graph = run(Stack(hf_pre, hf_post, layers=layers), residual(1, 1, 5, 4, 64))
        assert len(graph.mhc) == layers + 1
        counts.append(mhc_proof._proved.cache_info().currsize + mhc_post._proved.cache_info().currsize)
    assert counts[1] <= counts[0] + 2


def test_deterministic_reaches_the_operators_and_strict_accepts_it():
    """On the CPU every family but the reference keeps rows apart by itself."""
    module, x = Stack(*SPELLINGS["hf"], hidden=64, layers=2), torch.randn(2, 5, 4, 64)
    out, graph = run(module, x, deterministic=True, strict=True)
    assert {site.kernel for site in graph.mhc} == {"cpp"}
    assert error(out, oracle_of(module, x)) < 1e-6
    run(module, x, deterministic=True, mhc="reference")
    effective = dsv4_compile.report().effective["deterministic"]
    assert effective["value"] == "False" and "reference" in effective["reason"]


def test_an_unknown_post_behind_a_known_pre_is_reported():
    def cut(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        added = [torch.relu(post[..., k, None] * x) for k in range(4)]
        mixed = [sum(comb[..., j, k, None] * residual[..., j, :] for j in range(4)) for k in range(4)]
        return torch.stack([torch.relu(m) + a for m, a in zip(mixed, added, strict=True)], -2)

    module, x = Stack(hf_pre, cut, layers=1), torch.randn(2, 5, 4, 64)
    out, graph = run(module, x)
    assert error(out, oracle_of(module, x)) < 1e-6
    assert [site.form for site in graph.mhc] == ["pre"]
    assert ["only this hc_pre was replaced" in missed.reason for missed in graph.missed] == [True]


def test_the_reason_is_that_of_the_constants_which_go_furthest():
    """Everything up to the collapse is the formula; with another epsilon not even `post` is."""

    def averaged(residual: Tensor, site: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        _, post, comb = hf_pre(residual, site)
        return residual.mean(-2), post, comb

    _, graph = run(Stack(averaged, hf_post, layers=1), torch.randn(2, 5, 4, 64))
    assert any("no value equals the collapse" in missed.reason for missed in graph.missed), graph.missed


def test_a_site_without_a_tensor_of_all_streams_is_reported():
    """The streams are tensors of their own, joined for the product and again for the collapse."""

    class Joined(Site):
        def forward(self, *streams: Tensor) -> Tensor:
            flat, x = torch.cat(streams, -1), torch.stack(streams, -2)
            logits = (flat @ self.fn.T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)
            pre, post, comb = sinkhorn(logits, self.scale, self.base, self.c)
            return (pre.unsqueeze(-1) * x).sum(-2) + post.sum(-1, keepdim=True) + comb.sum((-2, -1)).unsqueeze(-1)

    module, streams = Joined(64, Constants(), torch.float32), torch.randn(4, 2, 5, 64).unbind()
    out, graph = run(module, *streams)
    assert error(out, oracle_of(module, *streams)) < 1e-6
    assert forms(graph) == [] and [m.kind for m in graph.missed] == ["mhc"]
    # A linear of as many outputs is nothing like it.
    _, graph = run(nn.Sequential(nn.Linear(256, 24), nn.Tanh()), torch.randn(5, 256))
    assert graph.missed == []


def test_more_streams_than_the_kernels_have_are_reported():
    module, x = Stack(hf_pre, hf_post, hidden=16, layers=1, constants=Constants(n=9)), torch.randn(2, 3, 9, 16)
    out, graph = run(module, x)
    assert error(out, oracle_of(module, x)) < 1e-6
    assert forms(graph) == [] and [m.reason.partition(",")[0] for m in graph.missed] == ["it mixes 9 streams"]
    assert "spellings.py" in graph.missed[0].source and "(spellings.py:" in str(dsv4_compile.report())
    # Linears of as many outputs are nothing like it, whatever is behind them.
    linears = nn.Sequential(nn.Linear(144, 99), nn.ReLU(), nn.LayerNorm(99), nn.Linear(99, 3))
    assert run(linears, torch.randn(5, 144))[1].missed == []
