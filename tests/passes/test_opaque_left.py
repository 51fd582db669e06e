"""When operators of other people run beside a group, and when they are left where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsv4_compile.passes import opaque, verify
from dsv4_compile.passes.projections import ProjectionsPass
from tests.kernels.quantised_operators import BF16
from tests.passes.test_opaque import Attention, Int8, assert_like_eager, plain
from tests.passes.test_opaque_graphs import tensors, traced
from tests.passes.test_projections import names, run

ops = torch.ops.quantised

pytestmark = pytest.mark.usefixtures("as_on_cuda")

LEFT = ["gate", "state"]
JOINED = ["gate", "state", "q", "index", "kv"]


def compiled(**options: object) -> Any:
    module, x = Attention(), torch.randn(5, 64).to(BF16)
    out, graph = run(module, x, **options)  # type: ignore[arg-type]
    assert_like_eager(out, module, x, exact=False)
    return graph


def test_by_itself_auto_leaves_them_and_nobody_misses_them() -> None:
    graph = compiled(projections="auto", strict=True)
    assert [sorted(group) for group in names(graph)] == [sorted(LEFT)] and not graph.missed


@pytest.mark.parametrize("way", ["streams", "variable"])
def test_they_join_where_it_is_asked_for(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "variable":
        monkeypatch.setenv("DSV4_BESIDE", "1")
    graph = compiled(projections="streams" if way == "streams" else "auto")
    assert [sorted(group) for group in names(graph)] == [sorted(JOINED)]


@pytest.mark.parametrize("name", ["quantised::int8_linear", "quantised::int8_linear.default"])
def test_what_a_graph_is_to_be_cut_at_stays_in_it(name: str) -> None:
    by_option = compiled(projections="streams", split_ops=[name])
    with torch._inductor.config.patch(custom_should_partition_ops=[name]):
        by_inductor = compiled(projections="streams")
    for graph in (by_option, by_inductor):
        assert [sorted(group) for group in names(graph)] == [sorted(set(JOINED) - {"kv"})]
        (missed,) = graph.missed
        assert "quantised::int8_linear" in missed.reason and "is to be cut at" in missed.reason


def test_what_makes_another_graph_makes_another_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {ProjectionsPass().uuid(), ProjectionsPass(apart=("a::b",)).uuid()}
    with torch._inductor.config.patch(custom_should_partition_ops=["a::b"]):
        found.add(ProjectionsPass().uuid())
    with monkeypatch.context() as patch:
        patch.setitem(verify.MAIN_STREAM_ONLY, "a::b", "keeps one workspace")
        found.add(ProjectionsPass().uuid())
    monkeypatch.setenv("DSV4_BESIDE", "1")
    found.add(ProjectionsPass().uuid())
    assert len(found) == 5


@pytest.mark.parametrize(("tokens", "joined"), [(4, JOINED), (5, LEFT)])
def test_above_the_limit_nothing_is_gathered_for_a_side_stream(tokens: int, joined: list[str]) -> None:
    module, x = Attention(), torch.randn(tokens, 64).to(BF16)
    out, graph = run(module, x, projections="streams", stream_max_tokens=4)
    assert_like_eager(out, module, x, exact=False)
    assert [sorted(group) for group in names(graph)] == [sorted(joined)] and not graph.missed


class Many(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate, self.up = plain(16), plain(8)
        self.others = nn.ModuleList(Int8(4 + i) for i in range(count))

    def forward(self, x: Tensor) -> list[Tensor]:
        x = x * 2
        return [self.gate(x), self.up(x), *(other(x) for other in self.others)]


def test_no_more_than_a_few_run_beside_one_group() -> None:
    module, x = Many(opaque.MOST + 2), torch.randn(5, 64).to(BF16)
    out, graph = run(module, x, projections="streams")
    assert_like_eager(out, module, x, exact=False)
    assert len(graph.projections[0].linears) == 2 + opaque.MOST
    assert [f"{opaque.MOST} others run beside" in missed.reason for missed in graph.missed] == [True, True]


class Lowered(nn.Module):
    """An operator of torch's with a weight in int8 that Inductor has code for."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.q = plain(16), plain(8), Int8(48)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = x * 2
        low = torch.ops.aten._weight_int8pack_mm(x, self.q.weight, self.q.scale.to(BF16))
        return [self.gate(x), low, self.up(x)]


def test_what_inductor_has_code_for_stays_with_it() -> None:
    module, x = Lowered(), torch.randn(5, 64).to(BF16)
    out, graph = run(module, x, projections="streams")
    assert_like_eager(out, module, x, exact=False)
    assert names(graph) == [["gate", "up"]]
    (missed,) = graph.missed
    assert "Inductor has code of its own" in missed.reason


class Nothing(nn.Module):
    """A linear without columns."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.q = plain(16, 0), Int8(8, 0)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = x * 2
        return [self.gate(x), self.q(x)]


def test_an_activation_without_columns_breaks_no_pass() -> None:
    module, x = Nothing(), torch.randn(5, 0).to(BF16)
    out, graph = run(module, x, projections="streams")
    assert_like_eager(out, module, x)
    assert len(graph.projections[0].linears) == 2 and not graph.missed


touched = torch.library.Library("touched", "DEF")
touched.define("touch(Tensor x) -> Tensor", tags=(torch.Tag.maybe_aliasing_or_mutating,))
touched.impl("touch", lambda x: x.add_(1).clone(), "CompositeExplicitAutograd")
torch.library.register_fake("touched::touch", torch.empty_like, lib=touched)


def test_nothing_moves_across_what_may_write() -> None:
    def function(x: Tensor, gate: Tensor, state: Tensor, small: Tensor, scale: Tensor) -> list[Tensor]:
        first = torch.mm(x, gate.t())
        other = torch.ops.touched.touch(x)
        return [first, other, ops.int8_linear(x, small, scale), torch.mm(x, state.t())]

    assert_nothing_moves(function)


def test_nothing_moves_across_what_may_write_a_part_of_the_same_memory() -> None:
    def function(x: Tensor, gate: Tensor, state: Tensor, small: Tensor, scale: Tensor) -> list[Tensor]:
        lower = x[:4]
        first = torch.mm(lower, gate.t())
        other = torch.ops.touched.touch(x[2:])
        return [first, other, torch.mm(lower, state.t())]

    assert_nothing_moves(function)


def assert_nothing_moves(function: Callable[..., list[Tensor]]) -> None:
    inputs = tensors()
    gm = traced(function, *inputs)
    result = ProjectionsPass("streams")(gm.graph)
    gm.recompile()
    for ours, eager in zip(gm(*(one.clone() for one in inputs)), function(*inputs), strict=True):
        torch.testing.assert_close(ours, eager)
    assert not result.projections
    assert ["may have been written since" in missed.reason for missed in result.missed] == [True]
