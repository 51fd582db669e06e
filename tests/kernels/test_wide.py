"""Results in float32 of bfloat16 weights (`torch.mm(..., out_dtype=torch.float32)`), beside results in bfloat16."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dsv4_compile.kernels import linear
from dsv4_compile.kernels.linear import grouped, packing, skinny, strategies, tuning
from dsv4_compile.passes.projections import ProjectionsPass
from dsv4_compile.passes.verify import check

BF16, F32 = torch.bfloat16, torch.float32
WIDE = (False, True, True, False)
OF_TORCH = [name for name, strategy in strategies.STRATEGIES.items() if strategy.gather is None]


@pytest.fixture(autouse=True)
def fresh() -> None:
    tuning.forget()


def group(columns: int, features: Sequence[int], device: str = "cpu") -> tuple[list[Tensor], list[Tensor | None]]:
    weights = [(torch.randn(count, columns, device=device) / columns**0.5).to(BF16) for count in features]
    biases = [torch.randn(count, device=device).to(BF16) if i % 2 else None for i, count in enumerate(features)]
    return weights, biases


def assert_right(made: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
    """Narrow ones 0 and 3, wide ones 1 and 2; these are not rounded to bfloat16."""
    rows = x.reshape(-1, x.shape[-1]).double()
    exact = [
        rows @ weight.double().t() + (0 if bias is None else bias.double())
        for weight, bias in zip(weights, biases, strict=True)
    ]
    narrow, wide = made
    assert (narrow.dtype, wide.dtype) == (BF16, F32) and narrow.shape[:-1] == x.shape[:-1]
    wanted = torch.cat([exact[0], exact[3]], 1)
    torch.testing.assert_close(narrow.reshape(wanted.shape).double(), wanted, rtol=8e-3, atol=1e-3)
    wanted = torch.cat(exact[1:3], 1)
    torch.testing.assert_close(wide.reshape(wanted.shape).double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("packed", [False, True])
def test_every_way_of_torch(packed: bool) -> None:
    weights, biases = group(64, (32, 8, 16, 24))
    assert not packed or packing.pack(weights).packed
    x = torch.randn(2, 3, 64).to(BF16)
    assert_right(linear.grouped_linear(x, weights, biases, [0, 1, 1, 2], wide=WIDE), x, weights, biases)
    for name in OF_TORCH if packed else ["serial", "streams"]:
        assert_right(grouped.run_as(name, x, weights, biases, [0, 1, 1, 2], WIDE), x, weights, biases)
    assert linear.choices()[0]["runs"] == (((0,), (1, 2), (3,)) if packed else ((0,), (1,), (2,), (3,)))


def test_opcheck_gradients_and_errors() -> None:
    weights, biases = group(64, (32, 8, 16, 24))
    x = torch.randn(5, 64).to(BF16)
    torch.library.opcheck(
        torch.ops.dsv4.grouped_linear.default, (x, weights, biases, [0, 1, 1, 2], 1024, True, list(WIDE))
    )
    weights[1].requires_grad_()
    made = linear.grouped_linear(x, weights, biases, [0] * 4, wide=WIDE)
    made[1].sum().backward()
    assert weights[1].grad is not None
    assert_right([one.detach() for one in made], x, [weight.detach() for weight in weights], biases)
    with pytest.raises(RuntimeError, match="say whether"):
        linear.grouped_linear(x, weights, biases, [0] * 4, wide=WIDE[:3])
    with pytest.raises(RuntimeError, match="needs a weight in"):
        linear.grouped_linear(x.float(), [weights[0].float()], [None], [0], wide=[True])


def graph_of(strategy: str) -> tuple[torch.fx.Graph, object]:
    def layers(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        x = x * 2
        score = torch.mm(x, b.t(), out_dtype=F32)
        return x @ a.t(), score.softmax(-1), x @ c.t()

    with FakeTensorMode():
        sizes = (5, 64), (32, 64), (16, 64), (8, 64)
        module = make_fx(layers)(*(torch.empty(size, dtype=BF16, device="cuda") for size in sizes))
        result = ProjectionsPass(strategy)(module.graph)
    module.graph.lint()
    return module.graph, result


def test_the_pass_keeps_the_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_MEASURE", "1")
    graph, result = graph_of("auto")
    (node,) = [node for node in graph.nodes if node.target is torch.ops.dsv4.grouped_linear.default]
    assert sorted(node.args[-1]) == [False, False, True]
    assert [(value.dtype, tuple(value.shape)) for value in node.meta["val"]] in (
        [(BF16, (5, 40)), (F32, (5, 16))],
        [(F32, (5, 16)), (BF16, (5, 40))],
    )
    (softmax,) = [node for node in graph.nodes if "softmax" in str(node.target)]
    assert softmax.args[0].meta["val"].dtype == F32 and softmax.args[0].meta["val"].shape == (5, 16)
    assert not check(graph, 3)
    assert [len(found.linears) for found in result.projections] == [3]


@pytest.mark.parametrize("strategy", ["pack", "streams", "serial"])
def test_other_strategies_leave_it_alone(strategy: str) -> None:
    graph, result = graph_of(strategy)
    assert any(node.target is torch.ops.aten.mm.dtype for node in graph.nodes)
    assert [len(found.linears) for found in result.projections] == [2]
    assert ["float32" in missed.reason for missed in result.missed] == ([] if strategy == "serial" else [True])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 64, 100])
def test_every_way_on_a_card(tokens: int) -> None:
    weights, biases = group(4096, (1024, 256, 64, 512), "cuda")
    assert packing.pack(weights).packed
    x = torch.randn(tokens, 4096, device="cuda").to(BF16)
    for name, strategy in strategies.STRATEGIES.items():
        if strategy.gather is not None and tokens > 64:
            continue

        def run(name: str = name) -> list[Tensor]:
            return grouped.run_as(name, x, weights, biases, [0, 1, 1, 2], WIDE)

        assert_right(run(), x, weights, biases)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            made = run()
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert_right(made, x, weights, biases)
    assert skinny.unavailable() is None


@pytest.mark.gpu
def test_a_compiled_function_on_a_card() -> None:
    (a, b, c), _ = group(1024, (256, 64, 128), "cuda")

    def layers(x: Tensor) -> tuple[Tensor, ...]:
        x = x * 2
        return x @ a.t(), torch.mm(x, b.t(), out_dtype=F32).softmax(-1), x @ c.t()

    x = torch.randn(8, 1024, device="cuda").to(BF16)
    with torch.inference_mode():
        made = torch.compile(layers, backend="dsv4", options={"mhc": "off"})(x)
        for ours, eager in zip(made, layers(x), strict=True):
            assert ours.dtype == eager.dtype
            torch.testing.assert_close(ours, eager, rtol=2e-2, atol=2e-2)
