"""Finds `hc_pre` by meaning.

Anchor: a leaf `fn` of shape `[(2+n)*n, n*D]` (or its transpose) in a product with an activation of `n*D` features.
From there the residual is looked for upwards, the region grown downwards, and the region given to `mhc_proof`, which
decides. The nearest residual with which the region is `hc_pre` is the one. It makes no difference whether the author
divides the row by its RMS before the product (transformers) or the logits after it (DeepSeek).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from dsv4_compile.passes.axes import TokenAxes
from dsv4_compile.passes.classes import Carriers, inexact, is_wider, settled
from dsv4_compile.passes.mhc_proof import Case, Constants, Proof, prove
from dsv4_compile.passes.region import (
    PRODUCT,
    Region,
    are,
    grow,
    has_leaf_factor,
    is_floating,
    is_leaf,
    leaf_of,
    packet,
    shape,
    strip,
)
from dsv4_compile.passes.sites import Missed, module_path, source_location

__all__ = ["STREAMS", "OnStreams", "PreMatch", "find", "is_inside", "is_mixing_shape", "products", "residuals"]

STREAMS = range(2, 9)
MORE_STREAMS = range(9, 17)
"""Numbers of streams that are looked for to say that they are not done."""


class OnStreams:
    """A match whose `residual` holds `n` streams of `hidden` columns."""

    residual: Node
    n: int
    hidden: int

    @property
    def flat(self) -> bool:
        """Whether the model keeps the residual as `[..., n*D]`."""
        return (shape(self.residual) or ())[-1] == self.n * self.hidden


@dataclass(frozen=True)
class PreMatch(OnStreams):
    """One proved `hc_pre`: parameters as graph nodes, outputs as the nodes that carry them."""

    residual: Node
    fn: Node
    transposed_fn: bool
    scale: Node
    base: Node
    norm_weight: Node | None
    n: int
    hidden: int
    constants: Constants
    region: Region
    post: Carriers
    comb: Carriers
    collapsed: Carriers
    normed: Carriers
    site: str


def find(graph: Graph, order: dict[Node, int]) -> tuple[list[PreMatch], list[Missed]]:
    """All `hc_pre` sites of `graph`, and the places that looked like one."""
    matches: list[PreMatch] = []
    missed: list[Missed] = []
    seen: set[Node] = set()
    for fn, n, hidden, turned in _anchors(graph):
        for product in products(fn):
            if any(m.fn is fn and product in m.region.index for m in matches):
                continue
            found = _match(product, fn, n, hidden, turned, order)
            if isinstance(found, PreMatch):
                matches.append(found)
            elif found is not None and fn not in seen:
                seen.add(fn)
                missed.append(Missed("mhc", module_path(product), found, source_location(product)))
    missed += _with_more_streams(graph)
    matches.sort(key=lambda m: order[m.region.nodes[min(m.post.plain)]])
    return matches, missed


def _with_more_streams(graph: Graph) -> Iterator[Missed]:
    """Places that look like `hc_pre` of more streams than the kernels have."""
    for fn, n, hidden, _ in _anchors(graph, MORE_STREAMS):
        for product in products(fn):
            streams = (shape(one) or () for one in residuals(product, fn, n, hidden))
            if any(are(dims[-2:], (n, hidden)) for dims in streams) and _is_scaled_and_shifted(product, n):
                reason = f"it mixes {n} streams, and {STREAMS[0]} to {STREAMS[-1]} are what is replaced"
                yield Missed("mhc", module_path(product), reason, source_location(product))
                break


def _anchors(graph: Graph, streams: Sequence[int] = STREAMS) -> Iterator[tuple[Node, int, int, bool]]:
    """(fn, n, D, whether it is stored transposed)"""
    for node in graph.nodes:
        dims = shape(node) if is_leaf(node) and is_floating(node) else None
        found = None if dims is None else is_mixing_shape(dims, streams)
        if found:
            yield node, *found


def is_mixing_shape(dims: Sequence[Any], streams: Sequence[int] = STREAMS) -> tuple[int, int, bool] | None:
    """(n, D, whether transposed) when `dims` can be the shape of `fn` for one of the numbers of streams."""
    if len(dims) != 2 or not all(isinstance(d, int) for d in dims):
        return None
    for (mixes, features), turned in ((dims, False), (dims[::-1], True)):
        n = next((n for n in streams if (2 + n) * n == mixes), None)
        if n is not None and features % n == 0 and features // n > 1:
            return n, features // n, turned
    return None


def products(fn: Node) -> list[Node]:
    """Products that read `fn` through views, permutes and casts."""
    found, pending, seen = [], [fn], {fn}
    while pending:
        for user in pending.pop().users:
            if user in seen or user.op != "call_function":
                continue
            seen.add(user)
            if packet(user) in PRODUCT:
                found.append(user)
            elif len(user.all_input_nodes) == 1:
                pending.append(user)
    return found


def _match(product: Node, fn: Node, n: int, hidden: int, turned: bool, order: dict[Node, int]) -> PreMatch | str | None:
    """A match, a reason why a lookalike is none, or None when it does not even look like a site."""
    reason: str | None = None
    of_joined: str | None = None  # for a residual whose streams lie one behind the other: many tensors look like that
    for residual in residuals(product, fn, n, hidden):
        dims = shape(residual) or ()
        features = 1 if are(dims[-1:], [n * hidden]) else 2
        axes = TokenAxes(dims[: len(dims) - features])
        if axes.rows == 0 or not all(isinstance(d, int) for d in dims[axes.rank :]):
            continue
        region = grow([residual], order, allow=functools.partial(is_inside, (residual, fn)))
        if fn not in region.index:
            if features == 2 and reason is None:
                reason = f"the product is not computed from the residual alone; {region.stopped_by()}".rstrip("; ")
            continue
        case = Case(region, axes, region.index[fn], n, hidden, turned)
        proof = prove(case)
        if isinstance(proof, Proof):
            match = _proved_match(proof, case, product)
            if isinstance(match, PreMatch):
                return match
            reason = match
        elif features == 2:
            reason = reason or _why(proof, region)
        else:
            of_joined = of_joined or _why(proof, region)
    return reason or (of_joined if _is_scaled_and_shifted(product, n) else None)


def _why(difference: str, region: Region) -> str:
    stop = region.stopped_by()
    return difference + (f"; {stop}" if stop else "")


_REACH = 40
"""Operators behind a product in which its scale and base are looked for."""


def _is_scaled_and_shifted(product: Node, n: int) -> bool:
    """Whether parameters of the shapes of scale and base, `[3]` and `[(2+n)*n]`, come in behind `product`."""
    wanted = {(3,), ((2 + n) * n,)}
    pending, seen = [product], {product}
    while pending and len(seen) < _REACH:
        for user in pending.pop(0).users:
            if user in seen or user.op != "call_function":
                continue
            seen.add(user)
            pending.append(user)
            wanted -= {tuple(shape(leaf) or ()) for leaf in map(leaf_of, user.all_input_nodes) if leaf is not None}
    return not wanted


def _proved_match(proof: Proof, case: Case, product: Node) -> PreMatch | str:
    """The match of a region that is the formula, or the reason why the operators' arithmetic is not the author's."""
    region, at = case.region, case.region.nodes
    residual, fn, scale, base = region.seeds[0], *(at[i] for i in (case.fn, proof.scale, proof.base))
    weight = None if proof.norm_weight is None else at[proof.norm_weight]
    rounded = inexact(region, (residual, scale, base), products(fn))
    post, comb, collapsed = (settled(region, x, rounded) for x in (proof.post, proof.comb, proof.collapsed))
    if not (post and comb and collapsed):
        return "it rounds to 16 bits on the way from the product with fn, scale or base to post, comb or the collapse"
    if is_wider(region, residual, post, comb, collapsed):
        return "its arithmetic is float64 and the residual is not"
    normed = settled(region, proof.normed, inexact(region, () if weight is None else (weight,)))
    return PreMatch(
        residual, fn, case.turned, scale, base, weight, case.n, case.hidden, proof.constants,
        region, post, comb, collapsed, normed, module_path(product),
    )  # fmt: skip


def is_inside(known: tuple[Node, ...], product: Node) -> bool:
    """Whether `product` may lie in the region of a site with the leaves `known`: it has no other parameter."""
    return not has_leaf_factor(product, apart_from=known)


def residuals(product: Node, fn: Node, n: int, hidden: int) -> list[Node]:
    """Candidates for the residual, nearest to the product first."""
    start = [p for p in product.all_input_nodes if leaf_of(p) is not fn]
    found: list[Node] = []
    pending, seen = list(start), set()
    while pending and len(found) < 6:
        node = strip(pending.pop(0))
        if node in seen:
            continue
        seen.add(node)
        dims = shape(node) or ()
        if are(dims[-2:], (n, hidden)) or are(dims[-1:], (n * hidden,)):
            found.append(node)
        if node.op == "call_function":
            pending.extend(p for p in node.all_input_nodes if is_floating(p) and _features(p, n * hidden))
    return found


def _features(node: Node, width: int) -> bool:
    dims = shape(node) or ()
    tail = 1
    for d in reversed(dims):
        if not isinstance(d, int):
            break
        tail *= d
        if tail % width == 0:
            return True
    return False
