"""The checker of streams on `dsv4::accompanied_linear`: what it launches, and each kind of fault in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from dsv4_compile.passes import verify
from dsv4_compile.passes.projections import ProjectionsPass
from dsv4_compile.passes.schedule import MAIN, Wait, Work
from tests.passes.test_opaque import asked_for  # noqa: F401  (a fixture)
from tests.passes.test_opaque_graphs import attention, tensors, traced
from tests.passes.test_verify import called, kinds

ops = torch.ops.quantised

pytestmark = pytest.mark.usefixtures("as_on_cuda", "asked_for")


def rewritten(strategy: str = "streams", function: Any = attention) -> tuple[GraphModule, Node]:
    gm = traced(function, *tensors())
    ProjectionsPass(strategy, pack=False)(gm.graph)
    return gm, called(gm, "accompanied_linear")


@pytest.mark.parametrize("strategy", ["streams", "auto"])
def test_what_it_launches(strategy: str) -> None:
    gm, node = rewritten(strategy)
    schedule, found = verify.schedule_of(gm.graph)
    assert not found and not verify.check(gm.graph, 3)
    work = [one for one in schedule.actions if isinstance(one, Work) and one.name.startswith(node.name)]
    side = [one for one in work if one.stream != MAIN]
    assert {one.stream for one in side} == {("auxiliary", 1), ("auxiliary", 2)}
    (opaque,) = (one for one in side if "int8_linear" in one.name)
    last = f"{node.name}[{len(node.meta['val']) - 1}]"
    assert opaque.stream == ("auxiliary", 1) and opaque.writes == frozenset({last})
    assert len(opaque.reads) == 3, "the activation, the weight and its scale"
    linears = [one for one in work if one is not opaque]
    assert all(not one.writes & opaque.writes for one in linears)


def test_a_missing_join_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor, *rest: Tensor) -> list[Tensor]:
        return [one.relu() for one in attention(x, *rest)]

    gm, _ = rewritten(function=function)
    beside = verify._Reader._beside

    def without(self: Any, node: Node) -> Any:
        actions = list(beside(self, node))
        assert isinstance(actions[-1], Wait)
        return actions[:-1]

    monkeypatch.setattr(verify._Reader, "_beside", without)
    assert [kind for kind, _ in kinds(gm)] == ["read-after-write", "unjoined"]


def test_a_fork_that_does_not_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor, *rest: Tensor) -> list[Tensor]:
        return attention(x * 2, *rest)

    gm, _ = rewritten(function=function)
    beside = verify._Reader._beside

    def without(self: Any, node: Node) -> Any:
        waits = Wait((node.name, "beside"), ("auxiliary", 1))
        actions = list(beside(self, node))
        assert waits in actions
        return [action for action in actions if action != waits]

    monkeypatch.setattr(verify._Reader, "_beside", without)
    assert "read-after-write" in {kind for kind, _ in kinds(gm)}


def changed(node: Node, **changes: Any) -> None:
    names = [argument.name for argument in node.target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | changes
    node.args = tuple(given[name] for name in names if name in given)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"stream": 4}, "stream"),
        ({"stream": -1}, "stream"),
        ({"results": [2, 2]}, "arguments"),
        ({"results": [2]}, "arguments"),
        ({"operators": ["dsv4::parallel_linear.default", "quantised::nobody.default"]}, "arguments"),
        ({"operators": ["quantised::int8_linear.default"] * 2}, "arguments"),
        ({"operators": [], "arguments": [], "results": []}, "arguments"),
        ({"operators": ["dsv4::parallel_linear.default", "quantised::writing_linear.default"]}, "schema"),
        ({"operators": ["dsv4::parallel_linear.default", "quantised::random_linear.default"]}, "confined"),
        ({"stream": 0}, None),
        ({"stream": 3}, None),
    ],
)
def test_faults(changes: dict[str, Any], fault: str | None) -> None:
    gm, node = rewritten()
    changed(node, **changes)
    found = verify.check(gm.graph, 3)
    assert {one.kind for one in found} == ({fault} if fault else set()), found


def test_a_linear_that_has_no_stream_is_found_within_it() -> None:
    gm, node = rewritten()
    first, *others = node.args[4]
    changed(node, arguments=[first.replace("[0,2]", "[2,2]").replace("[2,0]", "[2,2]"), *others])
    assert node.args[4][0] != first
    assert kinds(gm, 3) == [("stream", node.name)]


def test_an_operand_that_has_been_written_since_is_found() -> None:
    def function(x: Tensor, gate: Tensor, state: Tensor, small: Tensor, scale: Tensor) -> list[Tensor]:
        own = scale + 1
        name = own.view(-1)
        own.mul_(2)
        return attention(x, gate, state, small, name)

    gm = traced(function, *tensors())
    ProjectionsPass("streams", pack=False)(gm.graph)
    assert ("stale", called(gm, "accompanied_linear").name) in kinds(gm)
