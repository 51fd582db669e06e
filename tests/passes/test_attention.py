"""Operands that a batched product has copies of: found however they are repeated, and nothing else taken for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as some
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import dsv4_compile
from dsv4_compile.passes.attention import AttentionPass
from dsv4_compile.passes.sites import PassResult, SharedOperand
from tests.models import CSA, SLIDING, deepseek

HEADS = 4
bmm = torch.ops.aten.bmm.default


def traced(run: Callable[..., Any], *inputs: Tensor, sizes: str = "fake") -> GraphModule:
    return make_fx(run, tracing_mode=sizes)(*inputs)


def rewritten(run: Callable[..., Any], *inputs: Tensor, sizes: str = "fake") -> tuple[GraphModule, PassResult]:
    """The graph behind the pass, with the results of `run`."""
    gm = traced(run, *inputs, sizes=sizes)
    result = AttentionPass()(gm.graph)
    gm.graph.lint()
    gm.recompile()
    got, expected = gm(*inputs), run(*inputs)
    assert got.shape == expected.shape and got.dtype == expected.dtype and got.stride() == expected.stride()
    assert torch.allclose(got, expected, rtol=1e-12 if got.dtype == torch.float64 else 1e-5, atol=1e-12)
    assert AttentionPass()(gm.graph) == PassResult()
    return gm, result


def products(gm: GraphModule) -> list[tuple[list[int], ...]]:
    """The shapes that each batched product reads."""
    found = gm.graph.find_nodes(op="call_function", target=bmm)
    return [tuple(list(argument.meta["val"].shape) for argument in node.args) for node in found]


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype)


def repeat_kv(kv: Tensor, times: int) -> Tensor:
    """As transformers has it."""
    batch, heads, length, width = kv.shape
    return kv[:, :, None].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)


def of_transformers(q: Tensor, kv: Tensor) -> Tensor:
    times = q.shape[1] // kv.shape[1]
    return torch.matmul(q, repeat_kv(kv, times).transpose(2, 3)).softmax(-1) @ repeat_kv(kv, times)


def by_broadcasting(q: Tensor, kv: Tensor) -> Tensor:
    """One head of keys, no repetition written."""
    return torch.matmul(q, kv.mT).softmax(-1) @ kv


def by_bmm(q: Tensor, kv: Tensor) -> Tensor:
    batch, heads, rows, width = q.shape
    k = kv.expand(-1, heads, -1, -1).contiguous().view(batch * heads, -1, width)
    return torch.bmm(torch.bmm(q.reshape(-1, rows, width), k.permute(0, 2, 1)).softmax(-1), k).view(q.shape)


def cast_behind(q: Tensor, kv: Tensor) -> Tensor:
    k = kv.to(torch.float32).expand(-1, q.shape[1], -1, -1).to(torch.float64)
    return torch.matmul(torch.matmul(q, k.transpose(-1, -2)).softmax(-1), k)


@pytest.mark.parametrize("sizes", ["fake", "symbolic"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("attention", [of_transformers, by_broadcasting, by_bmm, cast_behind])
def test_one_head_of_keys_is_not_copied(attention: Callable[..., Tensor], batch: int, rows: int, sizes: str) -> None:
    q, kv = normal(batch, HEADS, rows, 6), normal(batch, 1, 5, 6)

    def run(q: Tensor, kv: Tensor) -> Tensor:
        return attention(q.view(batch, HEADS, rows, 6), kv)  # the heads are a number, the length may be a symbol

    gm, result = rewritten(run, q, kv, sizes=sizes)
    assert [(site.times, site.products) for site in result.attention] == [(HEADS, 2)]
    if sizes == "fake":
        folded = HEADS * rows
        assert products(gm) == [([batch, folded, 6], [batch, 6, 5]), ([batch, folded, 5], [batch, 5, 6])]
    assert not gm.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)


def test_groups_of_heads_keep_a_head_of_keys_each() -> None:
    gm, result = rewritten(of_transformers, normal(2, 6, 3, 8), normal(2, 2, 5, 8))
    assert [(site.times, site.products) for site in result.attention] == [(3, 2)]
    assert products(gm) == [([4, 9, 8], [4, 8, 5]), ([4, 9, 5], [4, 5, 8])]


def test_a_matrix_repeated_for_each_sequence_is_not_copied() -> None:
    gm, result = rewritten(lambda x, w: torch.bmm(x, w.expand(3, -1, -1)), normal(3, 4, 5), normal(5, 2))
    assert products(gm) == [([1, 12, 5], [1, 5, 2])]
    assert [site.times for site in result.attention] == [3]


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(lambda q, kv: q.flatten(0, 1) @ kv.expand(-1, 4, -1, -1).flatten(0, 1).mT, id="found"),
        pytest.param(
            lambda q, kv: q.flatten(0, 1) @ kv.expand(2, 4, 5, 6).transpose(0, 1).flatten(0, 1).mT, id="turned"
        ),
        pytest.param(lambda q, kv: q[:, 0] @ kv[:, 0, :1].expand(-1, 7, -1).mT, id="columns repeated"),
        pytest.param(lambda q, kv: q[:, 0, :, :1].expand(-1, -1, 6) @ kv[:, 0].mT, id="first operand"),
        pytest.param(lambda q, kv: q.flatten(0, 1) @ kv[:, :, :1, :1].expand(2, 4, 6, 5).flatten(0, 1), id="a number"),
        pytest.param(lambda q, kv: q[:, 0] @ kv[:, 0].mT, id="nothing repeated"),
    ],
)
def test_only_repetitions_that_come_last_in_the_batch_count(run: Callable[..., Tensor], request: Any) -> None:
    _, result = rewritten(run, normal(2, 4, 3, 6), normal(2, 1, 5, 6))
    assert bool(result.attention) == (request.node.callspec.id == "found")


def test_what_is_written_meanwhile_is_left() -> None:
    def run(q: Tensor, kv: Tensor) -> Tensor:
        kv = kv * 1
        copied = kv.expand(-1, 4, -1, -1).flatten(0, 1).clone()
        kv.add_(1)
        return torch.bmm(q.flatten(0, 1), copied.mT)

    _, result = rewritten(run, normal(2, 4, 3, 6), normal(2, 1, 5, 6))
    assert result == PassResult()


def test_no_tokens_and_no_keys() -> None:
    for q, kv in ((normal(2, 4, 0, 6), normal(2, 1, 5, 6)), (normal(2, 4, 3, 6), normal(2, 1, 0, 6))):
        _, result = rewritten(lambda q, kv: torch.matmul(q, kv.mT), q, kv)
        assert len(result.attention) == 1


Step = tuple[str, int, int]
STEPS = some.tuples(
    some.sampled_from(["unsqueeze", "expand", "permute", "clone", "flatten", "squeeze"]),
    some.integers(0, 5),
    some.integers(0, 5),
)


def moved(x: Tensor, steps: list[Step]) -> Tensor:
    """`x` through random views, as a batch of matrices."""
    for step, a, b in steps:
        if step == "unsqueeze" and x.dim() < 6:
            x = x.unsqueeze(a % (x.dim() + 1))
        elif step == "expand":
            sizes = [2 + b % 2 if size == 1 and i >= a % x.dim() else -1 for i, size in enumerate(x.shape)]
            x = x.expand(sizes) if x.numel() < 500 else x
        elif step == "permute":
            x = x.transpose(a % x.dim(), b % x.dim())
        elif step == "clone":
            x = x.clone(memory_format=torch.contiguous_format)
        elif step == "flatten" and x.dim() > 3:
            x = x.flatten(a % (x.dim() - 1), a % (x.dim() - 1) + 1)
        elif step == "squeeze" and x.dim() > 3:
            x = x.squeeze(a % x.dim())
    while x.dim() < 3:
        x = x.unsqueeze(0)
    return x.flatten(0, -3)


@settings(deadline=None, max_examples=150)
@given(
    some.lists(some.integers(1, 3), min_size=2, max_size=4), some.lists(STEPS, max_size=8), some.sampled_from([1, 2])
)
def test_random_views_of_an_operand(sizes: list[int], steps: list[Step], rows: int) -> None:
    source = normal(*sizes)
    operand = moved(source, steps)
    left = normal(operand.shape[0], rows, operand.shape[1])
    gm, result = rewritten(lambda left, source: torch.bmm(left, moved(source, steps)), left, source)
    for site in result.attention:
        assert site.times > 1 and products(gm)[0][1][0] * site.times == operand.shape[0]


def test_random_views_do_find_repetitions() -> None:
    """The test above would pass if nothing were ever found."""
    steps = [("unsqueeze", 1, 0), ("expand", 1, 1), ("clone", 0, 0)]
    _, result = rewritten(lambda left, x: torch.bmm(left, moved(x, steps)), normal(6, 2, 4), normal(2, 4, 5))
    assert result == PassResult(attention=(SharedOperand("", 3, 1),))


@pytest.mark.parametrize("attention", ["auto", "off"])
def test_the_real_model(attention: str) -> None:
    model = deepseek()
    model.config._attn_implementation = "eager"
    ids = torch.randint(0, 128, (2, 21), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = model(ids).logits
        compiled = torch.compile(model, backend="dsv4", options={"compiler": "eager", "attention": attention})
        got = compiled(ids).logits
    assert torch.allclose(got, expected, atol=1e-5)
    report = dsv4_compile.report()
    (graph,) = report.graphs
    per_layer = {site.site: (site.times, site.products) for site in graph.attention if site.site.endswith("self_attn")}
    layers = [f"model.layers.{i}.self_attn" for i in range(3)]
    assert per_layer == ({} if attention == "off" else dict.fromkeys(layers, (4, 2)))
    told = "shared operands at model.layers.0.self_attn: 2 batched products read in place what was copied 4 times"
    assert (told in str(report)) == (attention == "auto")
    assert len(report.to_dict()["graphs"][0]["attention"]) == len(graph.attention)


def test_a_grown_cache_under_inductor() -> None:
    from transformers import DynamicCache

    model = deepseek((SLIDING, CSA))
    ids = torch.randint(0, 128, (3, 30), generator=torch.Generator().manual_seed(4))

    def tokens(step: Callable[..., Any]) -> list[Tensor]:
        cache = DynamicCache(config=model.config)
        logits = [step(ids, past_key_values=cache).logits]
        logits += [step(ids[:, i : i + 1], past_key_values=cache).logits for i in range(4)]
        return logits

    with torch.no_grad():
        expected = tokens(model)
        got = tokens(torch.compile(model, backend="dsv4"))
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    assert all(graph.attention for graph in dsv4_compile.report().graphs)
