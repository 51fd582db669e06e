"""Operands that a batched product has copies of: found however they are repeated, and nothing else taken for one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as some
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import dsv4_compile
from dsv4_compile.cli.explain import findings
from dsv4_compile.dump.reader import read
from dsv4_compile.passes.attention import AttentionPass
from dsv4_compile.passes.sites import PassResult, SharedOperand
from tests.models import CSA, SLIDING, deepseek

HEADS = 4
bmm = torch.ops.aten.bmm.default


def traced(run: Callable[..., Any], *inputs: Tensor, sizes: str = "fake") -> GraphModule:
    return make_fx(run, tracing_mode=sizes)(*inputs)


def rewritten_only(
    run: Callable[..., Any], *inputs: Tensor, before_inductor: bool = False
) -> tuple[GraphModule, PassResult]:
    gm = traced(run, *inputs)
    return gm, AttentionPass(before_inductor)(gm.graph)


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
    return [tuple([int(size) for size in argument.meta["val"].shape] for argument in node.args) for node in found]


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype)


def repeat_kv(kv: Tensor, times: int) -> Tensor:
    """As transformers has it."""
    batch, heads, length, width = kv.shape
    return kv[:, :, None].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)


def weights(scores: Tensor) -> Tensor:
    """With a sink, as DeepSeek-V4 has it: an entry more, which takes a share and gives nothing."""
    return torch.cat([scores, torch.ones_like(scores[..., :1])], -1).softmax(-1)[..., :-1]


def of_transformers(q: Tensor, kv: Tensor) -> Tensor:
    times = q.shape[1] // kv.shape[1]
    return weights(torch.matmul(q, repeat_kv(kv, times).transpose(2, 3))) @ repeat_kv(kv, times)


def by_broadcasting(q: Tensor, kv: Tensor) -> Tensor:
    """One head of keys, no repetition written."""
    return weights(torch.matmul(q, kv.mT)) @ kv


def by_bmm(q: Tensor, kv: Tensor) -> Tensor:
    batch, heads, rows, width = q.shape
    k = kv.expand(-1, heads, -1, -1).contiguous().view(batch * heads, -1, width)
    return torch.bmm(weights(torch.bmm(q.reshape(-1, rows, width), k.permute(0, 2, 1))), k).view(q.shape)


def cast_behind(q: Tensor, kv: Tensor) -> Tensor:
    k = kv.to(torch.float32).expand(-1, q.shape[1], -1, -1).to(torch.float64)
    return torch.matmul(weights(torch.matmul(q, k.transpose(-1, -2))), k)


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
    folded = HEADS * rows
    assert products(gm) == [([batch, folded, 6], [batch, 6, 5]), ([batch, folded, 5], [batch, 5, 6])]


def test_groups_of_heads_keep_a_head_of_keys_each() -> None:
    gm, result = rewritten(of_transformers, normal(2, 6, 3, 8), normal(2, 2, 5, 8))
    assert [(site.times, site.products) for site in result.attention] == [(3, 2)]
    assert products(gm) == [([4, 9, 8], [4, 8, 5]), ([4, 9, 5], [4, 5, 8])]


def test_groups_of_heads_where_every_size_is_a_symbol() -> None:
    """The sizes of the new products are none that the graph has."""

    def run(q: Tensor, kv: Tensor) -> Tensor:
        batch, _, rows, width = q.shape
        length = kv.shape[2]
        k = kv.view(batch, 2, 1, length, width).expand(batch, 2, 3, length, width).reshape(batch, 6, length, width)
        return torch.matmul(q.view(batch, 6, rows, width), k.mT)

    gm, result = rewritten(run, normal(3, 6, 5, 7), normal(3, 2, 11, 7), sizes="symbolic")
    assert [site.times for site in result.attention] == [3]
    for batch, rows, length in ((2, 1, 4), (1, 3, 2), (5, 0, 3), (2, 3, 0)):
        q, kv = normal(batch, 6, rows, 7), normal(batch, 2, length, 7)
        assert torch.allclose(gm(q, kv), run(q, kv))


def test_keys_whose_number_depends_on_data_are_left() -> None:
    def run(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        return torch.matmul(q, k.index_select(2, mask.nonzero()[:, 0]).mT)

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        compiled = torch.compile(run, backend="dsv4", options={"compiler": "eager"})
        q, k = normal(2, 4, 3, 6), normal(2, 1, 5, 6)
        for mask in (torch.ones(5), torch.tensor([0, 1, 0, 0, 1.0]), torch.zeros(5)):
            assert torch.allclose(compiled(q, k, mask), run(q, k, mask))
    (graph,) = dsv4_compile.report().graphs
    assert not graph.attention and "sizes depend on data" in graph.missed[0].reason


@pytest.mark.parametrize("attention", ["auto", "off"])
def test_no_graph_more_for_other_sizes(attention: str) -> None:
    """Neither where it rewrites nor where it looks and does not: a weight for each head."""
    torch._dynamo.reset()
    per_head = normal(4, 8, 5)
    compiled = torch.compile(
        lambda x, kv: (torch.matmul(x, per_head), torch.matmul(x, kv.mT)),
        backend="dsv4",
        options={"compiler": "eager", "attention": attention},
        dynamic=True,
    )
    with torch.no_grad():
        for batch, length in ((2, 9), (4, 7), (3, 5), (5, 6)):
            x, kv = normal(batch, 4, 3, 8), normal(batch, 1, length, 8)
            for got, expected in zip(compiled(x, kv), (torch.matmul(x, per_head), torch.matmul(x, kv.mT)), strict=True):
                assert torch.allclose(got, expected)
    assert len(dsv4_compile.report().graphs) == 1


@pytest.mark.parametrize("stored", [torch.uint8, torch.int16])
def test_bits_read_as_other_numbers_are_no_cast(stored: torch.dtype) -> None:
    numbers = torch.float8_e4m3fn if stored is torch.uint8 else torch.bfloat16

    def run(q: Tensor, bits: Tensor) -> Tensor:
        return torch.matmul(q, bits.view(numbers).to(torch.float64).mT)

    _, result = rewritten(run, normal(2, 4, 3, 6), torch.randn(2, 1, 5, 6).to(numbers).view(stored))
    assert [site.times for site in result.attention] == [4]


def without_sinks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, repeat_kv(k, 4).transpose(-2, -1)).div(2.0)
    return torch.matmul(scores.softmax(dim=-1), repeat_kv(v, 4))


def with_a_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, repeat_kv(k, 4).transpose(-2, -1)).div(2.0) + torch.ones(3, 5, dtype=q.dtype).tril()
    return torch.matmul(scores.softmax(dim=-1), repeat_kv(v, 4))


def test_what_inductor_makes_flash_attention_of_is_left_to_it() -> None:
    inputs = normal(2, 4, 3, 6), normal(2, 1, 5, 6), normal(2, 1, 5, 6)
    gm, result = rewritten_only(without_sinks, *inputs, before_inductor=True)
    ((times, count, reason),) = [(site.times, site.products, site.reason) for site in result.attention]
    assert (times, count) == (4, 2) and "flash attention" in reason
    assert products(gm)[0][1] == [8, 6, 5] and not result.missed
    for run, before_inductor in ((without_sinks, False), (with_a_mask, True)):
        gm, result = rewritten_only(run, *inputs, before_inductor=before_inductor)
        assert [(site.products, site.reason) for site in result.attention] == [(2, "")]
        assert products(gm)[0][1] == [2, 6, 5]


def test_and_inductor_does_so() -> None:
    """Where it would not, nothing would be gained by leaving it."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        inputs = [normal(2, heads, 33, 16, dtype=torch.float32) for heads in (8, 2, 2)]
        compiled = torch.compile(without_sinks, backend="dsv4")
        assert torch.allclose(compiled(*inputs), without_sinks(*inputs), atol=1e-5)
    assert counters["inductor"]["fuse_attention"] == 1
    assert "left to Inductor" in str(dsv4_compile.report())


@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_keys_that_come_straight_from_a_linear(batch: int, heads: int) -> None:
    """Above their axes is the one of the product, which is all of them in one."""

    def run(q: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        k = torch.nn.functional.linear(x, weight).view(batch, -1, heads, 6).transpose(1, 2)
        return torch.matmul(q, repeat_kv(k, 4).mT)

    _, result = rewritten(run, normal(batch, 4 * heads, 3, 6), normal(batch, 7, 10), normal(6 * heads, 10))
    assert [(site.times, site.products) for site in result.attention] == [(4, 1)]


def test_what_has_no_value_is_left() -> None:
    gm = traced(lambda x, w: torch.bmm(x, w.expand(3, -1, -1)), normal(3, 4, 5), normal(5, 2))
    (product,) = gm.graph.find_nodes(op="call_function", target=bmm)
    del product.args[1].meta["val"]
    assert AttentionPass()(gm.graph) == PassResult()


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

    gm, result = rewritten_only(run, normal(2, 4, 3, 6), normal(2, 1, 5, 6))
    assert not result.attention and products(gm) == [([8, 3, 6], [8, 6, 5])]
    assert [one.reason for one in result.missed] == ["something may be written between the copy and the product"]


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


def test_strict_wants_it_to_find_something_where_it_is_named() -> None:
    def compiled(run: Callable[..., Any]) -> Callable[..., Any]:
        torch._dynamo.reset()
        options = {"compiler": "eager", "strict": True, "attention": "auto", "mhc": "off", "projections": "off"}
        return torch.compile(run, backend="dsv4", options=options)

    x = normal(2, 4, 3, 6)
    with torch.no_grad():
        assert compiled(lambda x: x @ x[:, :1].mT)(x).shape == (2, 4, 3, 3)
        assert "nothing matched" not in str(dsv4_compile.report())
        with pytest.raises(Exception, match="attention matched nothing"):
            compiled(lambda x: x @ x.mT)(x)


def test_explain_has_the_place_and_the_line(tmp_path: Path) -> None:
    torch._dynamo.reset()
    options = {"compiler": "eager", "dump_dir": str(tmp_path)}
    with torch.no_grad():
        torch.compile(by_broadcasting, backend="dsv4", options=options)(normal(2, 4, 3, 6), normal(2, 1, 5, 6))
    (found,) = findings(read(tmp_path).graphs)
    assert (found.kind, found.outcome) == ("attention", "in place") and "test_attention.py:" in found.source
    assert "2 batched products read in place what was copied 4 times" in found.detail


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
