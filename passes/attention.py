"""Batched products whose second operand is repeated along the batch, as keys and values of multi-query attention are.

    kv [B, L, D] ──► expand to H heads ──► copy [B*H, D, L] ──► bmm(q [B*H, S, D])
    kv [B, L, D] ──► permute ─────────────────────────────────► bmm(q [B, H*S, D])

The copy, H times as large as what is in it, goes away, and with one token a sequence the second form is a product of
matrices where the first is one of vectors. Every entry is the same sum of the same products. Keys and values of groups
of heads (grouped-query attention) and matrices repeated for each sequence are the same case.

What repeats is read off the chain of views, copies and casts between the operand and where its numbers were made: each
axis is followed as a list of factors, and those that an `expand` adds hold the same numbers over and over.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from dsv4_compile.passes.emission import call
from dsv4_compile.passes.hoisting import may_write
from dsv4_compile.passes.region import CAST, RESHAPE, aten, packet, packets, shape, value
from dsv4_compile.passes.sites import PassResult, SharedOperand, module_path

__all__ = ["AttentionPass"]

Size = int | torch.SymInt

_SAME = packets("clone alias detach lift_fresh_copy") | CAST
_FOLLOWED = _SAME | RESHAPE | packets("permute transpose t expand unsqueeze squeeze")


@dataclass(frozen=True)
class _Factor:
    """A factor of an axis: an axis of the source, or, where that is None, a repetition."""

    size: Size
    axis: int | None


Axes = list[list[_Factor]]


class AttentionPass:
    """Multiplies what heads or sequences share once for all of them. See the module."""

    name = "attention"

    def __call__(self, graph: Graph) -> PassResult:
        order = {node: i for i, node in enumerate(graph.nodes)}
        writes = [order[node] for node in graph.nodes if may_write(node)]
        found: Counter[tuple[str, int]] = Counter()
        for product in graph.find_nodes(op="call_function", target=aten.bmm.default):
            shared = _shared(product)
            if shared is None or any(order[shared.source] < at < order[product] for at in writes):
                continue
            if _rewrite(graph, product, shared, order):
                found[module_path(product), shared.times] += 1
        return PassResult(attention=tuple(SharedOperand(site, times, count) for (site, times), count in found.items()))

    def uuid(self) -> str:
        return self.name


@dataclass(frozen=True)
class _Shared:
    """The second operand of a product: `[rows of the batch, K, N]` of `source`, each `times` times in a row.

    `axes` are those of the source behind its batch, rows and columns; `casts` what is made of it on the way.
    """

    source: Node
    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    casts: tuple[torch.dtype, ...]
    times: int


def _shared(product: Node) -> _Shared | None:
    operand = product.args[1]
    assert isinstance(operand, Node)
    chain = list(_chain(operand))
    source = chain[-1]
    dims = shape(source)
    if dims is None:
        return None
    axes: Axes | None = [[] if _is_one(size) else [_Factor(size, axis)] for axis, size in enumerate(dims)]
    for node in reversed(chain[:-1]):
        axes = _followed(node, axes) if axes is not None else None
    if axes is None:
        return None
    batch, rows, columns = axes
    own = [factor for factor in batch if factor.axis is not None]
    repeated = [factor.size for factor in batch if factor.axis is None]
    if batch[: len(own)] != own or any(factor.axis is None for factor in (*rows, *columns)):
        return None  # repetitions come last: each matrix `times` times in a row
    times = math.prod(size for size in repeated if isinstance(size, int))
    if times < 2 or not all(isinstance(size, int) for size in repeated):
        return None
    dtypes = [value(node).dtype for node in reversed(chain)]
    casts = tuple(after for before, after in itertools.pairwise(dtypes) if after != before)
    return _Shared(source, _numbers(own), _numbers(rows), _numbers(columns), casts, times)


def _numbers(factors: Sequence[_Factor]) -> tuple[int, ...]:
    return tuple(factor.axis for factor in factors if factor.axis is not None)


def _chain(node: Node) -> Iterator[Node]:
    """From an operand up to where its numbers were made."""
    while True:
        yield node
        above = node.args[0] if node.args else None
        if packet(node) not in _FOLLOWED or not isinstance(above, Node) or not isinstance(value(above), torch.Tensor):
            return
        if value(node).device != value(above).device:
            return
        node = above


def _is_one(size: Size) -> bool:
    return isinstance(size, int) and size == 1


def _followed(node: Node, axes: Axes) -> Axes | None:
    """The axes of `node`, given those of what it reads; None where a reshape goes through the middle of a factor."""
    operator = packet(node)
    if operator in _SAME:
        return axes
    after = shape(node) or ()
    if operator in (aten.permute, aten.transpose, aten.t):
        return [axes[i] for i in _permutation(node, len(axes))]
    if operator is aten.expand:
        wider: Axes = [[] for _ in range(len(after) - len(axes))] + axes
        return [
            [_Factor(size, None)] if not factors and not _is_one(size) else factors
            for factors, size in zip(wider, after, strict=True)
        ]
    return _regrouped([factor for factors in axes for factor in factors], after)


def _permutation(node: Node, rank: int) -> list[int]:
    """Where each axis of a permuted tensor was."""
    order = torch.empty((1,) * rank, device="meta")
    order = order.as_strided((1,) * rank, tuple(range(rank)))  # the strides say which axis is where
    target: Any = node.target
    return list(target(order, *node.args[1:], **node.kwargs).stride())


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


def _rewrite(graph: Graph, product: Node, shared: _Shared, order: dict[Node, int]) -> bool:
    """Replaces `product`; False where a size that it takes is no value of the graph."""
    left = product.args[0]
    assert isinstance(left, Node)
    sizes = shape(shared.source) or ()
    count, rows, inner = shape(left) or ()
    width = (shape(product) or ())[2]
    batch = _product([sizes[axis] for axis in shared.batch])
    known = _Sizes(graph, order, product)
    to_left = known.all_but_one((batch, shared.times * rows, inner))
    to_right = known.all_but_one((batch, inner, width))
    back = known.all_but_one((count, rows, width))
    if to_left is None or to_right is None or back is None:
        return False
    with graph.inserting_before(product):
        kept = (*shared.batch, *shared.rows, *shared.columns)
        ones = tuple(axis for axis in range(len(sizes)) if axis not in kept)
        right = call(graph, aten.permute.default, (shared.source, [*kept, *ones]), like=product)
        right = call(graph, aten.reshape.default, (right, to_right), like=product)
        for dtype in shared.casts:
            right = call(graph, torch.ops.prims.convert_element_type.default, (right, dtype), like=product)
        folded = call(graph, aten.reshape.default, (left, to_left), like=product)
        made = call(graph, aten.bmm.default, (folded, right), like=product)
        result = call(graph, aten.view.default, (made, back), like=product)
    order |= dict.fromkeys((right, folded, made, result), order[product])
    chain = list(_chain(product.args[1]))
    product.replace_all_uses_with(result)
    graph.erase_node(product)
    for node in chain[:-1]:
        if not node.users:
            graph.erase_node(node)
    return True


def _product(sizes: Sequence[Size]) -> Size:
    product: Size = 1
    for size in sizes:
        product = product * size
    return product


class _Sizes:
    """Sizes as arguments: numbers, or values that the graph has before `product`."""

    def __init__(self, graph: Graph, order: dict[Node, int], product: Node) -> None:
        self.values = [
            node
            for node in graph.nodes
            if isinstance(value(node), torch.SymInt) and order.get(node, len(order)) < order[product]
        ]

    def all_but_one(self, sizes: Sequence[Size]) -> list[int | Node] | None:
        """The sizes of a shape; one that the graph does not have is -1."""
        found: list[int | Node] = []
        for size in sizes:
            there = size if isinstance(size, int) else self._value(size)
            if there is None and -1 in found:
                return None
            found.append(-1 if there is None else there)
        return found

    def _value(self, size: torch.SymInt) -> Node | None:
        return next((node for node in self.values if statically_known_true(value(node) == size)), None)
