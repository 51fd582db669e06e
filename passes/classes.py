"""Value classes: the nodes of a region that carry one known value, under any view and any cast."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from dsv4_compile.passes.region import CAST, LAYOUT, VIEW, Region, is_floating, packet, shape, value

__all__ = ["Carriers", "carriers", "close", "rows"]

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
    """Region positions of the nodes that carry a value; `flipped` ones carry the transposed matrix."""

    plain: frozenset[int]
    flipped: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.plain or self.flipped)

    def __and__(self, other: Carriers) -> Carriers:
        return Carriers(self.plain & other.plain, self.flipped & other.flipped)

    def nodes(self, region: Region) -> list[Node]:
        """The carriers in topological order."""
        return [region.nodes[i] for i in sorted(self.plain | self.flipped)]


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


def narrowest(node: Node, members: set[Node]) -> torch.dtype:
    """The dtype that bounds the precision of `node`: the narrowest on its way through the class."""
    best = value(node).dtype
    while packet(node) in CAST | VIEW | LAYOUT and node.args and node.args[0] in members:
        node = node.args[0]
        if torch.finfo(value(node).dtype).bits < torch.finfo(best).bits:
            best = value(node).dtype
    return best


def precision(region: Region, outputs: Carriers) -> torch.dtype:
    """The dtype an output has to be computed in: the most precise that leaves its class."""
    members = outputs.nodes(region)
    exits = leaving(region, members) or members[-1:]
    return max((narrowest(e, set(members)) for e in exits), key=lambda d: torch.finfo(d).bits)


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
