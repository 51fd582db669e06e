"""Finds `hc_head`, the last collapse of the streams, by meaning.

    mixes = (flat @ fn.T) * rsqrt(mean(flat^2) + rms_eps)
    out   = sum_i (sigmoid(mixes * scale + base) + pre_eps)[i] * residual[i]      (then RMSNorm with a weight)

Anchor: a leaf `fn` of shape `[n, n*D]` (or its transpose) in a product with an activation of `n*D` features. Such a
shape is nothing special, so a lookalike is not reported. The rest is as for `hc_pre`: the region below the residual is
run in float64 on random inputs, the constants are searched among the numbers written in it, and what agrees on every
draw with the operator's reference is the output.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from dsv4_compile.kernels.mhc import reference
from dsv4_compile.passes.axes import TokenAxes, Unsupported
from dsv4_compile.passes.classes import Carriers, carriers, inexact, is_wider, settled
from dsv4_compile.passes.mhc_pre import STREAMS, OnStreams, is_inside, products, residuals
from dsv4_compile.passes.mhc_proof import DRAWS, Case, Draw, draw_inputs
from dsv4_compile.passes.region import Region, are, count, grow, is_floating, is_leaf, shape
from dsv4_compile.passes.sites import module_path

__all__ = ["HeadMatch", "HeadProof", "find"]


@dataclass(frozen=True)
class HeadProof:
    """Constants, and positions in a region, valid for every region with the same signature."""

    rms_eps: float
    pre_eps: float
    norm_eps: float
    scale: int
    base: int
    norm_weight: int | None
    collapsed: Carriers
    normed: Carriers


@dataclass(frozen=True)
class HeadMatch(OnStreams):
    """One proved `hc_head`: parameters as graph nodes, outputs as the nodes that carry them."""

    residual: Node
    fn: Node
    transposed_fn: bool
    scale: Node
    base: Node
    norm_weight: Node | None
    n: int
    hidden: int
    proof: HeadProof
    region: Region
    collapsed: Carriers
    normed: Carriers
    site: str


def find(graph: Graph, order: dict[Node, int]) -> list[HeadMatch]:
    """All `hc_head` sites of `graph`."""
    matches = []
    for fn, n, hidden, turned in _anchors(graph):
        for product in products(fn):
            match = _match(product, fn, n, hidden, turned, order)
            if match is not None:
                matches.append(match)
                break
    return matches


def _anchors(graph: Graph) -> Iterator[tuple[Node, int, int, bool]]:
    """(fn, n, D, whether it is stored transposed)"""
    for node in graph.nodes:
        dims = shape(node) if is_leaf(node) and is_floating(node) else None
        sizes = [d for d in dims or () if isinstance(d, int)]
        if dims is None or len(dims) != 2 or len(sizes) != 2:
            continue
        for (n, features), turned in ((sizes, False), (sizes[::-1], True)):
            if n in STREAMS and features % n == 0 and features // n > 1:
                yield node, n, features // n, turned
                break


def _match(product: Node, fn: Node, n: int, hidden: int, turned: bool, order: dict[Node, int]) -> HeadMatch | None:
    for residual in residuals(product, fn, n, hidden):
        dims = shape(residual) or ()
        axes = TokenAxes(dims[: len(dims) - (1 if are(dims[-1:], [n * hidden]) else 2)])
        if axes.rows == 0 or not all(isinstance(d, int) for d in dims[axes.rank :]):
            continue
        region = grow([residual], order, allow=functools.partial(is_inside, (residual, fn)))
        if fn not in region.index:
            continue
        proof = _prove(Case(region, axes, region.index[fn], n, hidden, turned, head=True))
        if proof is None:
            continue
        scale, base = region.nodes[proof.scale], region.nodes[proof.base]
        weight = None if proof.norm_weight is None else region.nodes[proof.norm_weight]
        collapsed = settled(region, proof.collapsed, inexact(region, (residual, scale, base), products(fn)))
        if collapsed and not is_wider(region, residual, collapsed):
            normed = settled(region, proof.normed, inexact(region, () if weight is None else (weight,)))
            site = module_path(product)
            return HeadMatch(
                residual, fn, turned, scale, base, weight, n, hidden, proof, region, collapsed, normed, site
            )
    return None


@functools.lru_cache(maxsize=1024)
def _proved(signature: str) -> list[HeadProof | None]:
    """One-slot memo per signature (filled by `_prove`)."""
    return []


def _prove(case: Case) -> HeadProof | None:
    memo = _proved(f"{case.fn} {case.n} {case.hidden} {case.turned} {case.region.digest()}")
    if not memo:
        memo.append(_search(case))
    return memo[0]


def _search(case: Case) -> HeadProof | None:
    """Finds the constants on the first draw, then demands equality on all of them."""
    try:
        draws = [draw_inputs(case, seed) for seed in range(len(DRAWS))]
    except Unsupported:
        return None
    small = [*(c for c in case.region.constants() if 0 < c < 0.1), 0.0]
    leaves = {size: _leaves(case.region, size) for size in (1, case.n, case.hidden)}
    for scale, base in itertools.islice(itertools.product(leaves[1], leaves[case.n]), 9):
        for rms_eps, pre_eps in itertools.product(small, small):
            plain = HeadProof(rms_eps, pre_eps, 0.0, scale, base, None, Carriers(frozenset()), Carriers(frozenset()))
            collapsed = _agreeing(case, draws, plain)
            if not collapsed:
                continue
            for weight, norm_eps in itertools.product(leaves[case.hidden], small):
                full = HeadProof(rms_eps, pre_eps, norm_eps, scale, base, weight, collapsed, Carriers(frozenset()))
                normed = _agreeing(case, draws, full)
                if normed:
                    return HeadProof(rms_eps, pre_eps, norm_eps, scale, base, weight, collapsed, normed)
            return HeadProof(rms_eps, pre_eps, 0.0, scale, base, None, collapsed, Carriers(frozenset()))
    return None


def _leaves(region: Region, size: int) -> list[int]:
    return [region.index[x] for x in region.leaves if count(shape(x) or ()) == size]


def _agreeing(case: Case, draws: list[Draw], proof: HeadProof) -> Carriers:
    """The nodes that carry the formula's result on every draw."""
    found: Carriers | None = None
    for draw in draws:
        scale, base = (draw.env[case.region.nodes[i]].reshape(-1) for i in (proof.scale, proof.base))
        weight = None if proof.norm_weight is None else draw.env[case.region.nodes[proof.norm_weight]].reshape(-1)
        want = reference.mhc_head(
            draw.residual, draw.fn, scale, base, weight, proof.rms_eps, proof.pre_eps, proof.norm_eps, torch.float64
        )
        among = None if found is None else sorted(found.plain | found.flipped)
        seen = carriers(case.region, draw.env, want, among)
        found = seen if found is None else found & seen
        if not found:
            break
    assert found is not None
    return found
