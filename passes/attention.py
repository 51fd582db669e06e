"""Batched products whose second operand is repeated along the batch, as keys and values of multi-query attention are.

    kv [B, L, D] ──► expand to H heads ──► copy [B*H, D, L] ──► bmm(q [B*H, S, D])
    kv [B, L, D] ──► permute ─────────────────────────────────► bmm(q [B, H*S, D])

The copy, H times as large as what is in it, goes away, and with one token a sequence the second form is a product of
matrices where the first is one of vectors. Every entry is the same sum of the same products. Keys and values of groups
of heads (grouped-query attention) and matrices repeated for each sequence are the same case.

What repeats is read off the chain of views, copies and casts between the operand and where its numbers were made: each
axis is followed as a list of factors, and those that an `expand` adds hold the same numbers over and over.

Two products with a scale and a softmax between them and no more are what Inductor makes flash attention of, if they are
written in one of its ways. They are left to it where it comes later. (Masks and sinks keep it from that.)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

from dsv4_compile.passes.emission import call, size_of
from dsv4_compile.passes.hoisting import may_write
from dsv4_compile.passes.region import CAST, POINTWISE, REDUCTION, RESHAPE, VIEW, aten, packet, packets, shape, value
from dsv4_compile.passes.sites import Missed, PassResult, SharedOperand, module_path, source_location

__all__ = ["AttentionPass"]

Size = int | torch.SymInt

_SAME = packets("clone alias detach lift_fresh_copy") | CAST
_FOLLOWED = _SAME | RESHAPE | packets("permute transpose t expand unsqueeze squeeze")
_SOFTMAX = packets("exp _softmax _safe_softmax softmax")
_BETWEEN = POINTWISE | REDUCTION | VIEW | CAST | packets("clone expand permute transpose")
_LEFT = "left to Inductor, which may make flash attention of two products with only a softmax between them"
_DATA = "its sizes depend on data, and Inductor multiplies such matrices where they are contiguous only"
_WRITTEN = "something may be written between the copy and the product"
_MOST_STEPS = 64


@dataclass(frozen=True)
class _Factor:
    """A factor of an axis: an axis of the source, or, where that is None, a repetition."""

    size: Size
    axis: int | None


Axes = list[list[_Factor]]


class AttentionPass:
    """Multiplies what heads or sequences share once for all of them. See the module.

    Args:
        before_inductor: whether Inductor's passes come later.
    """

    name = "attention"

    def __init__(self, before_inductor: bool = False) -> None:
        self.before_inductor = before_inductor

    def __call__(self, graph: Graph) -> PassResult:
        order = {node: i for i, node in enumerate(graph.nodes)}
        writes = [order[node] for node in graph.nodes if _may_write(node)]
        of_inductor = _pairs(graph) if self.before_inductor else set()
        sizes = _Sizes(graph, order)
        found: dict[tuple[str, int, str], list[Node]] = {}
        missed: dict[Missed, None] = {}
        for product in graph.find_nodes(op="call_function", target=aten.bmm.default):
            shared = _shared(product)
            if shared is None:
                continue
            site = module_path(product)
            shapes = (*(shape(shared.source) or ()), *(shape(product) or ()))
            reason = _DATA if free_unbacked_symbols(shapes) else ""
            if any(order[shared.source] < at < order[product] for at in writes):
                reason = _WRITTEN
            if reason:
                missed[Missed("attention", site, reason, source_location(product))] = None
            elif product in of_inductor:
                found.setdefault((site, shared.times, _LEFT), []).append(product)
            else:
                found.setdefault((site, shared.times, ""), []).append(_rewrite(graph, product, shared, sizes))
        places = (
            SharedOperand(site, times, len(products), reason, source_location(products[0]))
            for (site, times, reason), products in found.items()
        )
        return PassResult(attention=tuple(places), missed=tuple(missed))

    def uuid(self) -> str:
        return f"{self.name}/{self.before_inductor}"


@dataclass(frozen=True)
class _Shared:
    """The second operand of a product: `[rows of the batch, K, N]` of `source`, each `times` times in a row.

    `batch`, `rows` and `columns` are axes of the source, `casts` the dtypes that its numbers take on the way.
    """

    source: Node
    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    casts: tuple[torch.dtype, ...]
    times: int


def _may_write(node: Node) -> bool:
    return may_write(node) or isinstance(node.target, torch._ops.HigherOrderOperator)


def _pairs(graph: Graph) -> set[Node]:
    """Products whose scores go through a softmax, and through nothing that reads anything else, into another."""
    found: set[Node] = set()
    for product in graph.find_nodes(op="call_function", target=aten.bmm.default):
        seen, rest, is_softmax = {product}, [product], False
        while rest and len(seen) < _MOST_STEPS:
            node = rest.pop()
            is_softmax |= packet(node) in _SOFTMAX
            for user in node.users:
                if packet(user) is aten.bmm and user.args[0] in seen:
                    found |= {product, user} if is_softmax else set()
                elif user not in seen and packet(user) in _BETWEEN and seen.issuperset(_tensors(user)):
                    seen.add(user)
                    rest.append(user)
    return found


def _tensors(node: Node) -> list[Node]:
    return [argument for argument in node.all_input_nodes if isinstance(value(argument), torch.Tensor)]


def _shared(product: Node) -> _Shared | None:
    operand = product.args[1] if len(product.args) == 2 else None
    if not isinstance(operand, Node) or not isinstance(value(operand), torch.Tensor):
        return None
    above, *chain = reversed(list(_chain(operand)))
    axes, source = _axes(above), above
    casts: list[torch.dtype] = []
    for node in chain:
        followed = _followed(node, axes)
        if followed is None:  # what is above has no part in it
            axes, source, casts = _axes(node), node, []
            continue
        axes = followed
        if packet(node) in CAST:
            casts.append(value(node).dtype)
    batch, rows, columns = axes
    own = [factor for factor in batch if factor.axis is not None]
    repeated = [factor.size for factor in batch if factor.axis is None]
    if any(factor.axis is None for factor in (*batch[: len(own)], *rows, *columns)):
        return None  # repetitions come last: each matrix `times` times in a row
    times = math.prod(size for size in repeated if isinstance(size, int))
    if times < 2 or not all(isinstance(size, int) for size in repeated):
        return None
    return _Shared(source, _numbers(own), _numbers(rows), _numbers(columns), tuple(casts), times)


def _axes(source: Node) -> Axes:
    sizes = shape(source) or ()
    return [[] if _is_one(size) else [_Factor(size, axis)] for axis, size in enumerate(sizes)]


def _numbers(factors: Sequence[_Factor]) -> tuple[int, ...]:
    return tuple(factor.axis for factor in factors if factor.axis is not None)


def _chain(node: Node) -> Iterator[Node]:
    """From an operand up to where its numbers were made."""
    while True:
        yield node
        above = node.args[0] if node.args else None
        if packet(node) not in _FOLLOWED or not isinstance(above, Node) or not isinstance(value(above), torch.Tensor):
            return
        if node.target is aten.view.dtype:  # other numbers
            return
        if value(node).device != value(above).device:
            return
        node = above


def _is_one(size: Size) -> bool:
    return isinstance(size, int) and size == 1


def _followed(node: Node, axes: Axes) -> Axes | None:
    """The axes of `node`, given those of what it reads; None where a reshape goes through the middle of a factor."""
    target = packet(node)
    if target in _SAME:
        return axes
    after = shape(node) or ()
    if target in (aten.permute, aten.transpose, aten.t):
        return [axes[i] for i in _permutation(node, len(axes))]
    if target is aten.expand:
        wider: Axes = [[] for _ in range(len(after) - len(axes))] + axes
        return [
            [_Factor(size, None)] if not factors and not _is_one(size) else factors
            for factors, size in zip(wider, after, strict=True)
        ]
    return _regrouped([factor for factors in axes for factor in factors], after)


def _permutation(node: Node, rank: int) -> list[int]:
    """Where each axis of a permuted tensor was."""
    given: list[Any] = [*node.args[1:], *node.kwargs.values()]
    order = list(range(rank))
    if packet(node) is aten.permute:
        return [order[axis] for axis in given[0]]
    first, second = given or (0, -1)  # `t` of one axis or none changes nothing
    if rank:
        order[first], order[second] = order[second], order[first]
    return order


def _regrouped(factors: list[_Factor], after: Sequence[Size]) -> Axes | None:
    """The factors, in order, as axes of the sizes `after`."""
    axes: Axes = []
    rest = factors[::-1]
    for size in after:
        taken: list[_Factor] = []
        product: Size = 1
        while not statically_known_true(product == size):
            if not rest:
                return None
            taken.append(rest.pop())
            product = product * taken[-1].size
        axes.append(taken)
    return None if rest else axes


# ------------------------------------------------------------------------------------------------------------ writing


def _rewrite(graph: Graph, product: Node, shared: _Shared, sizes: _Sizes) -> Node:
    """What takes the place of `product`."""
    left, source = product.args[0], shared.source
    assert isinstance(left, Node)
    with graph.inserting_before(product):
        sizes.place = sizes.order[product]
        count, rows, inner = (sizes.of(left, axis) for axis in range(3))
        batch, depth, width = (sizes.over(source, part) for part in (shared.batch, shared.rows, shared.columns))
        right = _matrices(graph, product, shared, [batch, depth, width])
        for dtype in shared.casts:
            right = call(graph, torch.ops.prims.convert_element_type.default, (right, dtype), like=product)
        folded = [batch, sizes.times(rows, shared.times), inner]
        rows_of_all = call(graph, aten.reshape.default, (left, folded), like=product)
        made = call(graph, aten.bmm.default, (rows_of_all, right), like=product)
        result = call(graph, aten.view.default, (made, [count, rows, width]), like=product)
    sizes.order |= dict.fromkeys((right, rows_of_all, made, result), sizes.place)
    chain = list(_chain(product.args[1]))
    chain = chain[: chain.index(source) + 1]
    product.replace_all_uses_with(result)
    graph.erase_node(product)
    for node in chain[:-1]:
        if not node.users:
            graph.erase_node(node)
    return result


def _matrices(graph: Graph, product: Node, shared: _Shared, sizes: list[Any]) -> Node:
    """The source as `[batch, K, N]`; by views alone where each of these is one axis of it or none."""
    parts = (shared.batch, shared.rows, shared.columns)
    kept = [axis for part in parts for axis in part]
    rank = len(shape(shared.source) or ())
    ones = [axis for axis in range(rank) if axis not in kept]
    node = call(graph, aten.permute.default, (shared.source, [*kept, *ones]), like=product)
    if any(len(part) > 1 for part in parts):
        return call(graph, aten.reshape.default, (node, sizes), like=product)
    if ones:
        node = call(graph, aten.squeeze.dims, (node, [*range(len(kept), rank)]), like=product)
    for axis, part in enumerate(parts):
        if not part:
            node = call(graph, aten.unsqueeze.default, (node, axis), like=product)
    return node


class _Sizes:
    """Sizes as arguments: numbers, values that the graph has before `place`, or new ones at the insertion point."""

    def __init__(self, graph: Graph, order: dict[Node, int]) -> None:
        self.graph, self.order, self.place = graph, order, 0
        self.known: dict[Any, Node] = {}
        """The first node of each size."""
        for node in graph.nodes:
            if isinstance(value(node), torch.SymInt):
                self.known.setdefault(value(node).node.expr, node)

    def of(self, node: Node, axis: int) -> int | Node:
        """Size of an axis."""
        size = (shape(node) or ())[axis]
        return size if isinstance(size, int) else self._value(size, aten.sym_size.int, (node, axis))

    def over(self, node: Node, axes: Sequence[int]) -> int | Node:
        """Product of the sizes of axes."""
        product: int | Node = 1
        for axis in axes:
            product = self.times(product, self.of(node, axis))
        return product

    def times(self, a: int | Node, b: int | Node) -> int | Node:
        """Product of two sizes."""
        if isinstance(a, int) and isinstance(b, int):
            return a * b
        if a == 1 or b == 1:
            return b if a == 1 else a
        size = _number(a) * _number(b)
        return self._value(size, operator.mul, (a, b))

    def _value(self, size: Any, target: Any, arguments: tuple[Any, ...]) -> Node:
        """A node whose value is `size`, which a call of `target` is."""
        known = self.known.get(size.node.expr)
        if known is not None and self.order[known] <= self.place:
            return known
        made = self.known[size.node.expr] = size_of(self.graph, size, target, arguments)
        self.order[made] = self.place
        return made


def _number(size: int | Node) -> Any:
    return size if isinstance(size, int) else value(size)
