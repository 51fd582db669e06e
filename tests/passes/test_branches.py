"""Branches of a piece: which chains are found, that they are independent, what they are worth, what is left alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from dsv4_compile.passes import branches, roofline
from dsv4_compile.passes.branches import Declined, Split, find
from dsv4_compile.passes.roofline import BANDWIDTH, LAUNCH, RATES, Cost, bytes_of, is_free, product_us
from dsv4_compile.passes.units import Units
from dsv4_compile.passes.verify import check_fork

aten = torch.ops.aten
TOKENS, WIDTH = 8, 64


def graph_of(function: Callable[..., Any], *inputs: Tensor, symbolic: bool = False) -> Graph:
    """Its functional ATen graph."""
    with torch.no_grad():
        return make_fx(function, tracing_mode="symbolic" if symbolic else "fake")(*inputs).graph


def x_and_weights(count: int, width: int = WIDTH) -> list[Tensor]:
    return [torch.randn(TOKENS, width), *(torch.randn(width, width) for _ in range(count))]


def chain(x: Tensor, *weights: Tensor) -> Tensor:
    """A norm and a product for each of the weights."""
    for weight in weights:
        x = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) @ weight
    return x


def split_of(graph: Graph, sides: int = 3, captured: bool = True) -> Split:
    found = find(graph, sides, captured)
    assert isinstance(found, Split), found
    assert check_fork(graph, found.prefix, found.branches, found.suffix) == []
    return found


def products(part: Sequence[Node]) -> int:
    return sum(node.target is aten.mm.default for node in part)


# ------------------------------------------------------------------------------------------------------ what is found


def three_chains(x: Tensor, shared: Tensor, a: Tensor, b: Tensor, c: Tensor, last: Tensor) -> Tensor:
    h = x @ shared
    return (chain(h, a, a, a) + chain(h, b, b) * chain(h, c)) @ last


def test_chains_behind_one_value_are_branches_up_to_where_they_meet() -> None:
    found = split_of(graph_of(three_chains, *x_and_weights(5)))
    assert [products(part) for part in found.branches] == [3, 3]  # two side streams would save nothing
    assert products(found.prefix) == products(found.suffix) == 1
    assert found.prefix[-1].target is aten.mm.default
    # A norm and a product are two launches; the fork and one side take 2 microseconds.
    assert found.us == pytest.approx([6 * LAUNCH] * 2, abs=0.2)
    assert found.serial - found.forked == pytest.approx(6 * LAUNCH - branches.fork_us(1), abs=0.2)


def test_as_many_side_streams_are_used_as_pay() -> None:
    def four(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return chain(x, a, a) + chain(x, b, b) + chain(x, c, c) + chain(x, d, d)

    graph = graph_of(four, *x_and_weights(4))
    streams = {sides: [products(part) for part in split_of(graph, sides).branches] for sides in (1, 2, 3, 8)}
    assert streams == {1: [4, 4], 2: [4, 4], 3: [2, 2, 2, 2], 8: [2, 2, 2, 2]}


def test_the_longest_chain_stays_on_the_main_stream() -> None:
    def uneven(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return chain(x, a, a) + chain(x, b, b, b, b)

    found = split_of(graph_of(uneven, *x_and_weights(2)))
    assert [products(part) for part in found.branches] == [4, 2] and found.us[0] > found.us[1]


def test_what_one_branch_alone_reads_is_made_on_it() -> None:
    def tables(x: Tensor, a: Tensor, b: Tensor, angles: Tensor) -> Tensor:
        return chain(x, a, a) * angles.cos()[:1] + chain(x, b, b) * (angles @ angles).sin()[:1]

    found = split_of(graph_of(tables, *x_and_weights(2), torch.randn(WIDTH, WIDTH)))
    where = {node.target: i for i, part in enumerate((*found.branches, found.suffix)) for node in part}
    assert {where[aten.cos.default], where[aten.sin.default]} == {0, 1}
    assert not any(node.target in (aten.cos.default, aten.sin.default, aten.mm.default) for node in found.prefix)


def test_two_results_of_one_operator_may_go_to_two_branches() -> None:
    def halves(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        top, bottom = (x @ w).sort(dim=0)
        return chain(top, a, a, a), chain(bottom.float(), b, b, b)

    found = split_of(graph_of(halves, *x_and_weights(3)))
    assert [products(part) for part in found.branches] == [3, 3] and not found.suffix
    assert sum(node.target is aten.sort.default for node in found.prefix) == 1


# --------------------------------------------------------------------------------------------------------- near misses


def declined(graph: Graph, sides: int = 3, captured: bool = True) -> str:
    found = find(graph, sides, captured)
    assert isinstance(found, Declined), found
    return found.reason


def test_chains_that_depend_through_one_node_are_none() -> None:
    def dependent(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        first = chain(x, a, a)
        return first + chain(x + first[0, 0], b, b)

    def independent(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        first = chain(x, a, a)
        return first + chain(x + x[0, 0], b, b)

    assert isinstance(find(graph_of(independent, *x_and_weights(2)), 3), Split)
    assert "independent" in declined(graph_of(dependent, *x_and_weights(2)))


def test_too_little_to_win_is_said_with_the_numbers() -> None:
    def small(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return x @ a + x @ b

    reason = declined(graph_of(small, *x_and_weights(2)))
    assert "branches of 2.0 + 2.0 us" in reason and "2.0 us have to be won" in reason


def test_one_chain_is_none() -> None:
    assert declined(graph_of(chain, *x_and_weights(4))) == "no chains in it are independent of each other"


def test_views_are_no_branch() -> None:
    def views(x: Tensor, a: Tensor) -> tuple[Tensor, ...]:
        h = x @ a
        return chain(h, a, a, a, a), h.t(), h.view(-1, 16)[1:], h[:, 3]

    assert declined(graph_of(views, *x_and_weights(1))) == "no chains in it are independent of each other"


def test_without_a_cuda_graph_the_host_has_to_launch_all_of_it() -> None:
    def small(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return chain(x, a, a, a) + chain(x, b, b, b)

    graph = graph_of(small, *x_and_weights(2))
    assert isinstance(find(graph, 3), Split)
    assert "have to be won" in declined(graph, captured=False)


def test_two_chains_that_fill_the_memory_bus_are_not_faster_together() -> None:
    def heavy(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return x @ a + x @ b

    graph = graph_of(heavy, torch.empty(1, 4096), torch.empty(4096, 65536), torch.empty(4096, 65536))
    assert "would take" in declined(graph)
    assert roofline.bytes_of(next(n for n in graph.nodes if n.name == "a_1")) / BANDWIDTH > 300


@torch.library.custom_op("dsv4_test_branches::own", mutates_args=())
def own(x: Tensor) -> Tensor:
    return x + 1


@own.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize(
    "operator",
    [lambda x: x.add_(1), lambda x: torch.rand_like(x), lambda x: x.bernoulli()],
    ids=["in place", "random", "bernoulli"],
)
def test_effects_are_on_no_branch(operator: Callable[[Tensor], Any]) -> None:
    def effect(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        left, right = chain(x, a, a, a), chain(x, b, b, b)
        return operator(left) @ a + right

    graph = graph_of(effect, *x_and_weights(2))
    found = split_of(graph)
    assert [products(part) for part in found.branches] == [3, 3]
    behind = [str(node.target) for node in found.suffix]
    assert any(word in name for name in behind for word in ("add_", "rand_like", "bernoulli"))


def write_in_the_end(x: Tensor, state: Tensor, a: Tensor, b: Tensor) -> Tensor:
    result = chain(x + state, a, a, a) + chain(x * state, b, b, b)
    state.copy_(x)
    return result


def test_a_write_to_what_both_chains_read_stays_where_it_was() -> None:
    """The old value is read by one chain, the new one by the other."""

    def write(x: Tensor, state: Tensor, a: Tensor, b: Tensor) -> Tensor:
        old = chain(x + state, a, a, a)
        state.copy_(x)
        return old + chain(x + state, b, b, b)

    graph = graph_of(write, torch.randn(TOKENS, WIDTH), *x_and_weights(2))
    assert "independent" in declined(graph)  # the write stands between them
    graph = graph_of(write_in_the_end, torch.randn(TOKENS, WIDTH), *x_and_weights(2))
    found = split_of(graph)
    assert [products(part) for part in found.branches] == [3, 3]
    assert found.suffix[-1].target is aten.copy_.default
    early = [node for node in found.suffix if node.target is not aten.copy_.default]
    faults = check_fork(graph, [*found.prefix, found.suffix[-1]], found.branches, early)
    assert {fault.kind for fault in faults} == {"order"}


def test_a_read_behind_a_write_is_not_moved_before_it_whatever_the_name() -> None:
    def aliased(x: Tensor, state: Tensor, a: Tensor, b: Tensor) -> Tensor:
        other = state.view(-1)
        old = chain(x + state, a, a, a)
        state.copy_(x)
        return old + chain(x + other.view(TOKENS, WIDTH), b, b, b)

    inputs = [torch.randn(TOKENS, WIDTH), *x_and_weights(2)]
    assert "independent" in declined(graph_of(aliased, *inputs))


def test_random_numbers_are_drawn_in_the_order_of_the_graph() -> None:
    def drawn(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        left = chain(x, a, a, a)
        first = torch.bernoulli(left.sigmoid())
        second = torch.rand_like(a)  # needs nothing of the chains
        return left * first + chain(x, b, b, b) * second[:TOKENS]

    found = split_of(graph_of(drawn, *x_and_weights(2)))
    assert [products(part) for part in found.branches] == [3, 3]
    targets = [node.target for node in found.suffix]
    assert targets.index(aten.bernoulli.default) < targets.index(aten.rand_like.default)


def test_a_chain_that_nobody_needs_is_no_branch() -> None:
    def two(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return chain(x, a, a, a), chain(x, b, b, b)

    graph = graph_of(two, *x_and_weights(2))
    assert isinstance(find(graph, 3), Split)
    (output,) = (node for node in graph.nodes if node.op == "output")
    output.args = (output.args[0][:1],)
    found = find(graph, 3)
    last = [node for node in graph.nodes if not node.users and node.op == "call_function"]
    assert isinstance(found, Declined) or not any(node in part for node in last for part in found.branches)


def test_operators_that_are_not_torchs_stay_on_the_main_stream() -> None:
    def custom(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return own(chain(x, a, a)) + chain(x, b, b, b, b)

    found = split_of(graph_of(custom, *x_and_weights(2)))
    on_main = [node.target for node in found.branches[0]]
    assert torch.ops.dsv4_test_branches.own.default in on_main and products(found.branches[0]) == 2

    def two(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return own(chain(x, a, a)) + own(chain(x, b, b, b, b))

    graph = graph_of(two, *x_and_weights(2))
    found = split_of(graph)
    where = [node.target for node in (*found.prefix, *found.branches[0], *found.suffix)]
    assert where.count(torch.ops.dsv4_test_branches.own.default) == 2


# -------------------------------------------------------------------------------------------------------- random graphs


def random_function(seed: int) -> Callable[..., tuple[Tensor, ...]]:
    def function(x: Tensor, y: Tensor, w: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        choose = random.Random(seed)
        values, recent, alias = [x, y], 0, state.view(-1)
        for _ in range(choose.randrange(6, 40)):
            recent = len(values) - 1 if choose.random() < 0.5 else choose.randrange(len(values))
            one, other = values[recent], choose.choice(values)
            kind = choose.randrange(9)
            if kind < 3:
                values.append(torch.mm(one, choose.choice([w, v])))
            elif kind == 3:
                values += [part.repeat(1, 2) for part in one.split(WIDTH // 2, 1)]
            elif kind == 4:
                values.append(one.t().contiguous().t())
            elif kind == 5:
                values.append(torch.cat([one[:2], other[2:]]))
            elif kind == 6:
                values.append((one + choose.choice([state, alias.view(TOKENS, WIDTH)])).tanh())
            elif kind == 7 and choose.random() < 0.3:
                state.copy_(one * 0.5)
            else:
                values.append(torch.softmax(one, -1) + choose.choice([0.3, 0.5]) * other)
        return tuple(choose.sample(values[2:], min(3, len(values) - 2)))

    return function


def reaches(first: Node, second: Node) -> bool:
    seen, front = {first}, [first]
    while front:
        node = front.pop()
        if node is second:
            return True
        fresh = [user for user in node.users if user not in seen]
        seen.update(fresh)
        front += fresh
    return False


def rearranged(graph: Graph, order: Sequence[Node]) -> GraphModule:
    """The graph with its operators in another order."""
    made, copies = Graph(), {}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    output = [node for node in graph.nodes if node.op == "output"]
    for node in (*inputs, *order, *output):
        copies[node] = made.node_copy(node, copies.__getitem__)
    return GraphModule(torch.nn.Module(), made)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), sides=st.integers(1, 4))
def test_branches_of_random_graphs_are_independent_and_change_no_number(seed: int, sides: int) -> None:
    torch.manual_seed(seed)
    inputs = [
        torch.randn(TOKENS, WIDTH),
        torch.randn(TOKENS, WIDTH),
        *(torch.randn(WIDTH, WIDTH) * 0.1 for _ in range(2)),
    ]
    inputs.append(torch.randn(TOKENS, WIDTH))
    graph = graph_of(random_function(seed), *inputs)
    graph.eliminate_dead_code()
    found = find(graph, sides)
    if isinstance(found, Declined):
        return
    assert check_fork(graph, found.prefix, found.branches, found.suffix) == []
    assert 2 <= len(found.branches) <= 1 + sides and all(found.branches)
    parts = [found.prefix, *found.branches, found.suffix]
    calls = [node for node in graph.nodes if node.op == "call_function"]
    assert sorted(map(calls.index, (node for part in parts for node in part))) == list(range(len(calls)))
    for i, part in enumerate(found.branches):
        assert not any(
            reaches(node, other) for node in part for j, q in enumerate(found.branches) if i != j for other in q
        )
        assert not any(reaches(node, other) for node in (*part, *found.suffix) for other in found.prefix)
        assert not any(reaches(node, other) for node in found.suffix for other in part)
    for order in (found.branches, found.branches[::-1]):
        module = rearranged(graph, [*found.prefix, *(node for part in order for node in part), *found.suffix])
        one, other = [x.clone() for x in inputs], [x.clone() for x in inputs]
        torch.testing.assert_close(
            module(*one), GraphModule(torch.nn.Module(), graph)(*other), rtol=0, atol=0, equal_nan=True
        )
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_random_graphs_do_have_branches() -> None:
    found = 0
    for seed in range(40):
        inputs = [
            torch.randn(TOKENS, WIDTH),
            torch.randn(TOKENS, WIDTH),
            *(torch.randn(WIDTH, WIDTH) for _ in range(2)),
        ]
        graph = graph_of(random_function(seed), *inputs, torch.randn(TOKENS, WIDTH))
        graph.eliminate_dead_code()
        found += isinstance(find(graph, 3), Split)
    assert found >= 10


# --------------------------------------------------------------------------------------------------------------- costs


def nodes_by_target(graph: Graph, target: Any) -> list[Node]:
    return [node for node in graph.nodes if node.target is target]


def test_the_time_of_a_product_is_its_bytes_or_its_operations() -> None:
    graph = graph_of(torch.mm, torch.empty(4, 1024), torch.empty(1024, 4096))
    units = Units(graph)
    moved = 4 * (4 * 1024 + 1024 * 4096 + 4 * 4096)
    assert units.cost(1) == Cost(moved / BANDWIDTH + LAUNCH, moved / BANDWIDTH, 2 * 4 * 1024 * 4096 / RATES[4], 1)
    graph = graph_of(
        torch.mm, torch.empty(4096, 4096, dtype=torch.bfloat16), torch.empty(4096, 4096, dtype=torch.bfloat16)
    )
    assert Units(graph).cost(1).us == 2 * 4096**3 / RATES[2] + LAUNCH


def test_a_run_of_pointwise_operators_and_one_reduction_is_one_kernel_of_its_ends() -> None:
    def norm(x: Tensor) -> Tensor:
        return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).tanh() * 2

    units = Units(graph_of(norm, torch.empty(32, 4096)))
    cost = units.cost((1 << len(units.all)) - 1)
    # Its input is read twice as far as is known here, once for the mean and once to be scaled.
    assert cost.launches == 1 and cost.memory == pytest.approx(3 * 4 * 32 * 4096 / BANDWIDTH)

    def two(x: Tensor) -> Tensor:
        return norm(norm(x).sum(0)[None])

    assert (
        Units(graph_of(two, torch.empty(32, 4096)))
        .cost(2**64 - 1 & (1 << len(Units(graph_of(two, torch.empty(32, 4096))).all)) - 1)
        .launches
        == 3
    )


def test_views_cost_nothing_and_what_is_expanded_counts_once() -> None:
    def views(x: Tensor) -> Tensor:
        return x.t().view(-1)[None].expand(100, -1)

    graph = graph_of(views, torch.empty(64, 64).t())
    assert all(is_free(node) for node in graph.nodes if node.op == "call_function")
    assert not Units(graph).all
    assert bytes_of(nodes_by_target(graph, aten.expand.default)[0]) == 4 * 64 * 64


def test_a_symbolic_size_counts_as_it_is_now_and_is_not_guarded() -> None:
    graph = graph_of(torch.mm, torch.empty(48, 64), torch.empty(64, 32), symbolic=True)
    (product,) = nodes_by_target(graph, aten.mm.default)
    value = product.meta["val"]
    before = len(value.shape[0].node.shape_env.guards)
    assert bytes_of(product) == 4 * 48 * 32 and product_us(product) == 2 * 48 * 64 * 32 / RATES[4]
    find(graph, 3)
    assert len(value.shape[0].node.shape_env.guards) == before


def test_a_formula_that_fails_is_no_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    def takes_tensors(a: Any, b: Any, out_val: Any) -> Any:
        return a.size(0)

    def returns_no_number(a: Any, b: Any, out_val: Any) -> Any:
        return 1, 2

    def takes_nothing() -> int:
        return 1

    (product,) = nodes_by_target(graph_of(torch.mm, torch.empty(48, 64), torch.empty(64, 32)), aten.mm.default)
    assert product_us(product) > 0
    for formula in (takes_tensors, returns_no_number, takes_nothing):
        monkeypatch.setattr(roofline, "_formulas", dict(((aten.mm, formula),)).copy)
        assert product_us(product) == 0.0
