"""The checker on a piece with branches: whatever is wrong with the parts is found."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

from dsv4_compile.kernels import linear
from dsv4_compile.passes.projections import ProjectionsPass
from dsv4_compile.passes.verify import branch_obstacle, check_fork
from tests.passes.test_branches import TOKENS, WIDTH, chain, graph_of, own, split_of, x_and_weights
from tests.passes.test_opaque_graphs import attention, tensors, traced

aten = torch.ops.aten
Parts = tuple[list[Node], list[list[Node]], list[Node]]


def two_chains(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    h = x @ w
    return chain(h, a, a, a) + chain(h, b, b, b)


def parts_of(graph: Graph) -> Parts:
    split = split_of(graph)
    return list(split.prefix), [list(part) for part in split.branches], list(split.suffix)


def kinds(graph: Graph, parts: Parts) -> set[str]:
    return {fault.kind for fault in check_fork(graph, *parts)}


@pytest.fixture
def graph() -> Graph:
    return graph_of(two_chains, *x_and_weights(3))


def test_the_parts_that_are_found_are_safe(graph: Graph) -> None:
    assert kinds(graph, parts_of(graph)) == set()


def test_a_chain_that_is_cut_between_two_streams_is_not(graph: Graph) -> None:
    prefix, (main, side), suffix = parts_of(graph)
    assert "read-after-write" in kinds(graph, (prefix, [main[:3], [*main[3:], *side]], suffix))
    assert "order" in kinds(graph, (prefix, [main[3:], [*main[:3], *side]], suffix))


def test_a_join_before_the_end_of_a_branch_is_not(graph: Graph) -> None:
    prefix, (main, side), suffix = parts_of(graph)
    assert "order" in kinds(graph, ([*prefix, *suffix], [main, side], []))
    assert "order" in kinds(graph, ([*prefix, side[-1]], [main, side[:-1]], suffix))


def test_each_operator_is_in_one_part(graph: Graph) -> None:
    prefix, (main, side), suffix = parts_of(graph)
    assert "parts" in kinds(graph, (prefix, [main, side], []))
    assert "parts" in kinds(graph, (prefix, [main, side], [suffix[0], *suffix]))
    assert "parts" in kinds(graph, (prefix, [[*main, side[0]], side], suffix))


@pytest.mark.parametrize("operator", [torch.rand_like, torch.bernoulli], ids=["rand_like", "bernoulli"])
@pytest.mark.parametrize("branch", [0, 1])
def test_random_numbers_are_on_no_branch(operator: object, branch: int) -> None:
    def drawn(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return chain(x, a, a, a) @ operator(a) + chain(x, b, b, b)  # type: ignore[operator]

    graph = graph_of(drawn, *x_and_weights(2))
    prefix, branches, suffix = parts_of(graph)
    (node,) = (n for n in (*prefix, *suffix) if n.target in (aten.rand_like.default, aten.bernoulli.default))
    moved = [[n for n in part if n is not node] for part in (prefix, suffix)]
    branches[branch].append(node)
    assert "confined" in kinds(graph, (moved[0], branches, moved[1]))


def test_two_random_operators_keep_their_order() -> None:
    def drawn(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        first, second = torch.rand_like(x), torch.rand_like(x)
        return chain(x, a, a, a) * first + chain(x, b, b, b) * second

    graph = graph_of(drawn, *x_and_weights(2))
    prefix, branches, suffix = parts_of(graph)
    both = [n for n in graph.nodes if n.target is aten.rand_like.default]
    rest = [[n for n in part if n not in both] for part in (prefix, suffix)]
    assert kinds(graph, ([*both, *rest[0]], branches, rest[1])) == set()
    assert kinds(graph, ([*both[::-1], *rest[0]], branches, rest[1])) == {"order"}


def test_an_operator_that_is_not_torchs_is_on_the_main_branch_only() -> None:
    def custom(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return own(chain(x, a, a, a)) + chain(x, b, b, b)

    graph = graph_of(custom, *x_and_weights(2))
    prefix, branches, suffix = parts_of(graph)
    (node,) = (n for n in graph.nodes if n.target is torch.ops.dsv4_test_branches.own.default)
    if node in branches[0]:
        assert kinds(graph, (prefix, branches[::-1], suffix)) == {"confined"}
    else:
        at = next(i for i, part in enumerate(branches) if node.args[0] in part)
        order = [branches[1 - at], [*branches[at], node]]
        assert kinds(graph, (prefix, order, [n for n in suffix if n is not node])) == {"confined"}


def forking(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    first, second = linear.parallel_linear(x, [a, b], [None, None], [0, 1])
    return chain(first, a, a, a) + second + chain(x, c, c, c)


def test_a_fork_of_the_main_branch_is_taken_apart_too() -> None:
    graph = graph_of(forking, *x_and_weights(3))
    calls = [n for n in graph.nodes if n.op == "call_function"]
    (fork,) = (n for n in calls if n.target is torch.ops.dsv4.parallel_linear.default)
    own_chain = _needing(fork)
    other = [n for n in calls if n not in own_chain and n is not fork]
    joins = [n for n in own_chain if n in _needing(other[0])]
    main = [fork, *(n for n in own_chain if n not in joins)]
    assert kinds(graph, ([], [main, other], joins)) == set()
    assert kinds(graph, ([], [other, main], joins)) == {"confined"}


def _needing(node: Node) -> list[Node]:
    found = set(node.users)
    for one in node.graph.nodes:
        if any(needed in found for needed in one.all_input_nodes) and one.op == "call_function":
            found.add(one)
    return [one for one in node.graph.nodes if one in found and one.op == "call_function"]


def test_a_branch_may_not_write_what_another_reads() -> None:
    def writing(x: Tensor, state: Tensor, a: Tensor, b: Tensor) -> Tensor:
        first, second = chain(x + state, a, a, a), chain(x * state, b, b, b)
        state.copy_(x)
        return first + second

    graph = graph_of(writing, torch.randn(TOKENS, WIDTH), *x_and_weights(2))
    prefix, branches, suffix = parts_of(graph)
    (write,) = (n for n in suffix if n.target is aten.copy_.default)
    branches[0].append(write)
    found = kinds(graph, (prefix, branches, _without(suffix, write)))
    assert {"confined", "read-after-write"} <= found or {"confined", "order"} <= found


def _without(part: Sequence[Node], node: Node) -> list[Node]:
    return [one for one in part if one is not node]


def test_what_has_results_of_a_side_stream_is_on_no_branch() -> None:
    gm = traced(attention, *tensors())
    ProjectionsPass("streams")(gm.graph)
    (node,) = (n for n in gm.graph.nodes if n.target is torch.ops.dsv4.accompanied_linear.default)
    assert "memory of a side stream" in branch_obstacle(node)
