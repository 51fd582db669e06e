"""Value classes: the nodes of a region that carry one known value, under any view and any cast.

Evaluation in float64 does not see roundings. `settled` reads them off the dtypes, and keeps of a class the nodes that
an operator's result may take the place of: those on which the value is rounded in one and the same way. What the author
computes from them, the value rounded further, or in part, or by way of arithmetic, goes on being computed as written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from dsv4_compile.passes.region import Region, is_floating, is_moved, shape, value

__all__ = [
    "Carriers",
    "Rounding",
    "behind_roundings",
    "carriers",
    "close",
    "inexact",
    "rows",
    "settled",
    "start",
    "step",
]

# The dtypes that a number is rounded to, one after the other; those that hold it exactly are left out.
Rounding = tuple[torch.dtype, ...]

_RTOL, _ATOL = 1e-7, 1e-13  # a constant rounded to float32 is the constant
_GLANCE = 1e-3  # one element decides most comparisons; looser than the tolerance by far


def rows(tensor: Any, tokens: int, features: int) -> torch.Tensor | None:
    """`tensor` as `[tokens, features]` when its size allows it."""
    if not isinstance(tensor, torch.Tensor) or tensor.numel() != tokens * features:
        return None
    return tensor.reshape(tokens, features)


def close(actual: torch.Tensor | None, expected: torch.Tensor) -> bool:
    """Equal to float64 rounding, row by row (rows differ in magnitude on purpose)."""
    if actual is None or actual.shape != expected.shape:
        return False
    first, want = float(actual[0, 0]), float(expected[0, 0])
    if abs(first - want) > _GLANCE * (abs(want) + 1e-6 * float(expected[0].abs().max())):
        return False
    floor = _ATOL * expected.abs().amax(dim=-1, keepdim=True)
    return bool(((actual - expected).abs() <= _RTOL * expected.abs() + floor).all())


@dataclass(frozen=True)
class Carriers:
    """Region positions of the nodes that carry a value; `flipped` ones carry the transposed matrix.

    Once they are settled, `rounding` is what happened to the value on all of them, at most one dtype, and `others` are
    the nodes on which something else happened to it.
    """

    plain: frozenset[int]
    flipped: frozenset[int] = frozenset()
    rounding: Rounding = ()
    others: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.plain or self.flipped)

    def __and__(self, other: Carriers) -> Carriers:
        return Carriers(self.plain & other.plain, self.flipped & other.flipped)

    def nodes(self, region: Region) -> list[Node]:
        """The carriers in topological order."""
        return [region.nodes[i] for i in sorted(self.plain | self.flipped)]

    def everywhere(self, region: Region) -> list[Node]:
        """The carriers and the `others`, in topological order."""
        return [region.nodes[i] for i in sorted(self.plain | self.flipped | self.others)]


def carriers(
    region: Region, env: dict[Node, Any], expected: torch.Tensor, among: Iterable[int] | None = None, matrix: int = 0
) -> Carriers:
    """Positions of the nodes whose value is `expected` `[tokens, features]`; `matrix` = n also looks for the
    transposed `[n, n]` layout."""
    tokens, features = expected.shape
    plain, flipped = set(), set()
    turned = expected.reshape(tokens, matrix, matrix).transpose(1, 2).reshape(tokens, features) if matrix else None
    for i in range(len(region.nodes)) if among is None else among:
        node = region.nodes[i]
        if node not in env or node in region.seeds or not is_floating(node):
            continue
        actual = rows(env[node], tokens, features)
        if close(actual, expected):
            plain.add(i)
        elif turned is not None and close(actual, turned):
            flipped.add(i)
    return Carriers(frozenset(plain), frozenset(flipped))


def leaving(region: Region, members: Sequence[Node]) -> list[Node]:
    """Members with a reader that is not a member itself."""
    inside = set(members)
    return [m for m in members if any(u not in inside for u in m.users)]


def start(node: Node) -> Rounding:
    """How `node` is rounded when an operator computes its value: if it has 16 bits it is, for the operator has more."""
    dtype = value(node).dtype
    return (dtype,) if dtype.itemsize == 2 else ()


def step(rounding: Rounding, source: Node, node: Node) -> Rounding:
    """How `node` is rounded, which is `source` moved or cast."""
    if not is_floating(node) or not is_floating(source):  # the parts of a split come as one value
        return rounding
    held, own = rounding[-1] if rounding else value(source).dtype, value(node).dtype
    return rounding if own == held or own.itemsize > held.itemsize else (*rounding, own)


def inexact(region: Region, origins: Collection[Node], products: Collection[Node] = ()) -> set[Node]:
    """What is computed from `origins`, the residual (seed 0) or parameters, through a rounding to 16 bits.

    Nothing when the residual itself has 16 bits, and not on the way to `products`, for autocast runs them in 16 bits:
    there the operators are nearer to the formula.
    """
    return set() if start(region.seeds[0]) else behind_roundings(region, origins, products)


def behind_roundings(region: Region, origins: Collection[Node], apart_from: Collection[Node] = ()) -> set[Node]:
    """What is computed from one of `origins` through a rounding to 16 bits that is not on the way to `apart_from`."""
    below, found = set(origins), set[Node]()
    for node in region.nodes:
        sources = below.intersection(node.all_input_nodes)
        if sources:
            below.add(node)
        rounded = any(step((), source, node) and start(node) for source in sources)
        if node not in apart_from and (rounded or not found.isdisjoint(sources)):
            found.add(node)
    return found


def settled(region: Region, found: Carriers, without: Collection[Node] = ()) -> Carriers:
    """The carriers that an operator's result, rounded in one way, may take the place of.

    That way is the one that every reader of the class asks for, and no rounding when they ask for different ones. No
    carrier when the value is first computed by nodes of `without`.
    """
    ways = _ways(region, set(found.nodes(region)), without)
    if not ways:
        return Carriers(frozenset(), others=found.plain | found.flipped)
    members = list(ways)
    firsts = {ways[m][:1] for m in leaving(region, members) or members[-1:]}
    common = firsts.pop() if len(firsts) == 1 else ()
    rounding = common if common in ways.values() else ways[members[0]]
    kept = frozenset(region.index[m] for m, way in ways.items() if way == rounding)
    return Carriers(found.plain & kept, found.flipped & kept, rounding, (found.plain | found.flipped) - kept)


def _ways(region: Region, members: set[Node], without: Collection[Node]) -> dict[Node, Rounding]:
    """How each of `members` is rounded that is a root of the class, moved and cast; a root is computed from no member.

    Arithmetic on a member may give the value again. Whether it gives the rounded value for the rounded member nobody
    has proved, nor that of a tensor of parts that are rounded in different ways.
    """
    known: dict[Node, Rounding | None] = {}
    for node in region.nodes:
        sources = [n for n in node.all_input_nodes if not isinstance(value(n), torch.SymInt)]
        inside = [n for n in sources if n in known]
        if inside:
            ways = {None if (way := known[n]) is None else step(way, n, node) for n in inside}
            known[node] = ways.pop() if is_moved(node) and inside == sources and len(ways) == 1 else None
        elif node in members:
            known[node] = None if node in without else start(node)
    return {node: way for node, way in known.items() if way is not None and node in members}


def precision(region: Region, outputs: Carriers) -> torch.dtype:
    """The dtype an output has to be computed in."""
    return outputs.rounding[-1] if outputs.rounding else value(outputs.nodes(region)[0]).dtype


def is_wider(region: Region, residual: Node, *outputs: Carriers) -> bool:
    """Whether an output is wanted in float64 of a residual that is not: the operators would compute it in float32."""
    wide = any(precision(region, output) is torch.float64 for output in outputs)
    return wide and value(residual).dtype is not torch.float64


def same_shape(node: Node, dims: Sequence[int | torch.SymInt]) -> bool:
    """Whether the shape of `node` is `dims`, symbol by symbol."""
    own = shape(node)
    return own is not None and len(own) == len(dims) and all(_same(a, b) for a, b in zip(own, dims, strict=True))


def _same(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    left = a if isinstance(a, int) else a.node.expr
    right = b if isinstance(b, int) else b.node.expr
    return bool(left == right)
