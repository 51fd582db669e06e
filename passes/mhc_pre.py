"""Finds `hc_pre` by meaning.

Anchor: a leaf `fn` of shape `[(2+n)*n, n*D]` (or its transpose) in a product with an activation of `n*D` features.
From there the residual is looked for upwards, the region grown downwards, and the region run in float64 against

    mixes = (flat @ fn.T) * rsqrt(mean(flat^2) + rms_eps)
    pre   = sigmoid(mixes[:n] * scale[0] + base[:n]) + pre_eps
    post  = post_mult * sigmoid(mixes[n:2n] * scale[1] + base[n:2n])
    comb  = sinkhorn(softmax(mixes[2n:] * scale[2] + base[2n:]) + sinkhorn_eps)
    out   = sum_i pre[i] * residual[i]      (then RMSNorm with a weight, when the model has one there)

whose constants are searched among the numbers written in the region. A match is a proof for that region; identical
regions (same structure, shapes and constants) are proved once per process.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from dsv4_compile.kernels.mhc import reference
from dsv4_compile.passes.axes import TokenAxes, Unsupported
from dsv4_compile.passes.classes import Carriers, carriers, close, rows
from dsv4_compile.passes.region import (
    POINTWISE,
    PRODUCT,
    REDUCTION,
    Region,
    evaluate,
    grow,
    has_leaf_factor,
    is_floating,
    is_leaf,
    leaf_of,
    packet,
    shape,
    strip,
)
from dsv4_compile.passes.sites import Missed, module_path

__all__ = ["Constants", "PreMatch", "find", "is_mixing_shape"]

STREAMS = range(2, 9)
# Magnitudes of the residual rows and gains of the mixing logits in the draws: small rows make the epsilons weigh,
# large logits keep the Sinkhorn iteration from converging, so that its length shows.
_DRAWS = ((1.0, 1.0), (1e-3, 6.0), (30.0, 3.0))
_MAX_ITERS = 64
_RTOL = 1e-8


@dataclass(frozen=True)
class Constants:
    """What the author wrote into the formula."""

    rms_eps: float
    pre_eps: float
    sinkhorn_eps: float
    post_mult: float
    iters: int
    norm_eps: float = 0.0


@dataclass(frozen=True)
class _Proof:
    """Positions in a region, valid for every region with the same signature."""

    constants: Constants
    scale: int
    base: int
    post: Carriers
    comb: Carriers
    collapsed: Carriers
    norm_weight: int | None
    normed: Carriers


@dataclass(frozen=True)
class PreMatch:
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

    @property
    def flat(self) -> bool:
        """Whether the model keeps the residual as `[..., n*D]`."""
        return (shape(self.residual) or ())[-1] == self.n * self.hidden


def find(graph: Graph, order: dict[Node, int]) -> tuple[list[PreMatch], list[Missed]]:
    """All `hc_pre` sites of `graph`, and the places that looked like one."""
    matches: list[PreMatch] = []
    missed: list[Missed] = []
    seen: set[Node] = set()
    for fn, n, hidden, turned in _anchors(graph):
        for product in _products(fn):
            if any(m.fn is fn and product in m.region.index for m in matches):
                continue
            found = _match(product, fn, n, hidden, turned, order)
            if isinstance(found, PreMatch):
                matches.append(found)
            elif found is not None and fn not in seen:
                seen.add(fn)
                missed.append(Missed("mhc", module_path(product), found))
    matches.sort(key=lambda m: order[m.region.nodes[min(m.post.plain)]])
    return matches, missed


def _anchors(graph: Graph) -> Iterator[tuple[Node, int, int, bool]]:
    """(fn, n, D, whether it is stored transposed)"""
    for node in graph.nodes:
        dims = shape(node) if is_leaf(node) and is_floating(node) else None
        found = None if dims is None else is_mixing_shape(dims)
        if found:
            yield node, *found


def is_mixing_shape(dims: Sequence[Any]) -> tuple[int, int, bool] | None:
    """(n, D, whether transposed) when `dims` can be the shape of `fn`."""
    if len(dims) != 2 or not all(isinstance(d, int) for d in dims):
        return None
    for (mixes, features), turned in ((dims, False), (dims[::-1], True)):
        n = next((n for n in STREAMS if (2 + n) * n == mixes), None)
        if n is not None and features % n == 0 and features // n > 1:
            return n, features // n, turned
    return None


def _products(fn: Node) -> list[Node]:
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
    reason = None
    for residual in _residuals(product, fn, n, hidden):
        dims = shape(residual) or ()
        features = 1 if dims[-1] == n * hidden else 2
        axes = TokenAxes(dims[: len(dims) - features])
        if axes.rows == 0:
            continue
        region = grow([residual], order, allow=functools.partial(_is_inside, (residual, fn)))
        if fn not in region.index:
            if features == 2 and reason is None:
                reason = f"the product is not computed from the residual alone; {region.stopped_by()}".rstrip("; ")
            continue
        proof = _prove(region, axes, region.index[fn], n, hidden, turned)
        if isinstance(proof, _Proof):
            at = region.nodes
            weight = None if proof.norm_weight is None else at[proof.norm_weight]
            return PreMatch(
                residual, fn, turned, at[proof.scale], at[proof.base], weight, n, hidden, proof.constants,
                region, proof.post, proof.comb, proof.collapsed, proof.normed, module_path(product),
            )  # fmt: skip
        if features == 2 and reason is None:
            stop = region.stopped_by()
            reason = proof + (f"; {stop}" if stop else "")
    return reason


def _is_inside(known: tuple[Node, ...], product: Node) -> bool:
    return not has_leaf_factor(product, apart_from=known)


def _residuals(product: Node, fn: Node, n: int, hidden: int) -> list[Node]:
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
        if dims[-2:] == (n, hidden) or dims[-1:] == (n * hidden,):
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


@functools.lru_cache(maxsize=1024)
def _proved(signature: str) -> list[_Proof | str]:
    """One-slot memo per signature (filled by `_prove`)."""
    return []


def _prove(region: Region, axes: TokenAxes, fn: int, n: int, hidden: int, turned: bool) -> _Proof | str:
    memo = _proved(f"{fn} {n} {hidden} {turned} {region.digest()}")
    if not memo:
        memo.append(_search(region, axes, fn, n, hidden, turned))
    return memo[0]


@dataclass
class _Draw:
    """Random inputs and the values of the region on them."""

    residual: torch.Tensor
    fn: torch.Tensor
    env: dict[Node, Any]


def _draw(region: Region, axes: TokenAxes, fn: int, n: int, hidden: int, turned: bool, seed: int) -> _Draw:
    generator = torch.Generator().manual_seed(seed + 1)
    magnitude, gain = _DRAWS[seed]

    def normal(*dims: int) -> torch.Tensor:
        return torch.randn(dims, generator=generator, dtype=torch.float64, device="cpu")

    residual = normal(axes.rows, n, hidden) * magnitude * torch.exp(normal(axes.rows, 1, 1))
    weight = normal((2 + n) * n, n * hidden) * (gain / (n * hidden) ** 0.5)
    dims = shape(region.seeds[0]) or ()
    features = 1 if dims[-1] == n * hidden else 2
    given = {
        region.seeds[0]: residual.reshape(axes.seed_shape(dims, features)),
        region.nodes[fn]: weight.t().contiguous() if turned else weight,
    }
    for leaf in region.leaves:
        if leaf not in given:
            given[leaf] = normal(*axes.real(shape(leaf) or ())).abs() + 0.25
    return _Draw(residual, weight, evaluate(region, axes, given))


def _search(region: Region, axes: TokenAxes, fn: int, n: int, hidden: int, turned: bool) -> _Proof | str:
    """Finds the constants on the first draw, then demands equality on all of them."""
    try:
        draw = _draw(region, axes, fn, n, hidden, turned, 0)
    except Unsupported as problem:
        return f"{problem} between the residual and the mixing parameters"
    written = [c for c in region.constants() if 0 < c < 0.1]
    small = [*written, 0.0]
    reason = "no parameters of shape [3] and [(2+n)*n] scale and shift the product"
    for scale, base in _parameters(region, n):
        for rms_eps in small:
            found = _constants(region, draw, n, rms_eps, scale, base, small)
            if isinstance(found, str):
                reason = found
                continue
            candidate = _norm(region, draw, found, scale, base, n, hidden, small)
            return _confirm(region, axes, fn, n, hidden, turned, candidate, draw)
    return reason


def _parameters(region: Region, n: int) -> Iterator[tuple[int, int]]:
    def leaves(size: int) -> list[int]:
        return [region.index[x] for x in region.leaves if math.prod(shape(x) or ()) == size]

    return itertools.islice(itertools.product(leaves(3), leaves((2 + n) * n)), 9)


@dataclass
class _Found:
    """Constants, the collapsed row of the draw `[T, D]`, and the position of the last Sinkhorn step."""

    constants: Constants
    collapsed: torch.Tensor
    last_step: int


def _constants(
    region: Region, draw: _Draw, n: int, rms_eps: float, scale: int, base: int, small: Sequence[float]
) -> _Found | str:
    """Constants up to the collapsed row; or which output has no node."""
    s, b = (draw.env[region.nodes[i]].reshape(-1) for i in (scale, base))
    flat = draw.residual.flatten(1)
    mixes = (flat @ draw.fn.t()) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)
    gate = torch.sigmoid(mixes[:, n : 2 * n] * s[1] + b[n : 2 * n])
    post_mult = _ratio(region, draw, gate)
    if post_mult is None:
        return "no value equals post = m * sigmoid(mixes * scale[1] + base) with the RMS of the residual"
    logits = (mixes[:, 2 * n :] * s[2] + b[2 * n :]).view(-1, n, n)
    chain = _sinkhorn_length(region, draw, logits, small)
    if chain is None:
        return "no value equals comb, softmax then rows and columns normalised in turn (columns first)"
    iters, sinkhorn_eps, last = chain
    gate = torch.sigmoid(mixes[:, :n] * s[0] + b[:n])
    for pre_eps in small:
        collapsed = torch.einsum("tn,tnd->td", gate + pre_eps, draw.residual)
        if carriers(region, draw.env, collapsed):
            return _Found(Constants(rms_eps, pre_eps, sinkhorn_eps, post_mult, iters), collapsed, last)
    return "no value equals the collapse, sum over streams of (sigmoid(mixes * scale[0] + base) + eps) * residual"


def _ratio(region: Region, draw: _Draw, gate: torch.Tensor) -> float | None:
    """The multiplier of the last node that is a constant multiple of `gate` and has a reader of another kind."""
    found: dict[int, float] = {}
    for i, node in enumerate(region.nodes):
        actual = rows(draw.env.get(node), *gate.shape) if node not in region.seeds and is_floating(node) else None
        if actual is None:
            continue
        ratio = float(actual[0, 0] / gate[0, 0])
        if ratio != 0.0 and close(actual, gate * ratio):
            found[i] = ratio
    inside = {region.nodes[i] for i in found}
    last = [i for i in found if any(u not in inside for u in region.nodes[i].users)]
    if not last:
        return None
    ratio = found[max(last)]
    return next((c for c in [1.0, *region.constants()] if c and abs(c - ratio) <= 1e-9 * abs(c)), ratio)


def _sinkhorn_length(
    region: Region, draw: _Draw, logits: torch.Tensor, small: Sequence[float]
) -> tuple[int, float, int] | None:
    """(iterations, epsilon, position) of the furthest step of the chain that some node carries.

    Each step has to be a later node than the step before: once the iteration has converged the values alone do not
    tell the steps apart.
    """
    n = logits.shape[-1]
    size = n * n
    nodes = [x for x in region.nodes if packet(x) in POINTWISE | REDUCTION and is_floating(x)]
    found = [(x, v) for x in nodes if (v := rows(draw.env.get(x), len(logits), size)) is not None]
    if not found:
        return None
    stacked = torch.stack([v for _, v in found])
    turned = stacked.reshape(-1, len(logits), n, n).transpose(2, 3).reshape(-1, len(logits), size)

    def following(comb: torch.Tensor, after: int) -> int | None:
        """The first value behind `after` that is `comb`, in either layout."""
        want = comb.reshape(len(logits), size)
        near = ((v - want).abs() <= _RTOL * want.abs() for v in (stacked[after + 1 :], turned[after + 1 :]))
        hits = torch.stack([x.flatten(1).all(1) for x in near]).any(0).nonzero()
        return after + 1 + int(hits[0]) if len(hits) else None

    for eps in small:
        comb = torch.softmax(logits, -1) + eps
        iters, at = 0, following(comb, -1)
        if at is None:
            continue
        while iters < _MAX_ITERS:
            step: int | None = at
            if iters:
                comb = comb / (comb.sum(-1, keepdim=True) + eps)
                step = following(comb, at)
            comb = comb / (comb.sum(-2, keepdim=True) + eps)
            step = following(comb, step) if step is not None else None
            if step is None:
                break
            iters, at = iters + 1, step
        return iters, eps, region.index[found[at][0]]
    return None


def _norm(
    region: Region, draw: _Draw, found: _Found, scale: int, base: int, n: int, hidden: int,
    small: Sequence[float],
) -> _Proof:  # fmt: skip
    """Adds the RMSNorm behind the collapse, when there is one."""
    constants, collapsed = found.constants, found.collapsed
    none, late = Carriers(frozenset()), Carriers(frozenset(range(found.last_step, len(region.nodes))))
    for leaf in region.leaves:
        if shape(leaf) != (hidden,):
            continue
        for eps in small:
            scaled = collapsed * torch.rsqrt(collapsed.square().mean(-1, keepdim=True) + eps)
            if carriers(region, draw.env, scaled * draw.env[leaf]):
                full = Constants(**{**constants.__dict__, "norm_eps": eps})
                return _Proof(full, scale, base, none, late, none, region.index[leaf], none)
    return _Proof(constants, scale, base, none, late, none, None, none)


def _confirm(
    region: Region, axes: TokenAxes, fn: int, n: int, hidden: int, turned: bool, proof: _Proof, first: _Draw
) -> _Proof | str:
    """Compares every draw with the operator's own definition; keeps the nodes that agree on all of them."""
    classes: list[Carriers] | None = None
    for seed in range(len(_DRAWS)):
        draw = first if seed == 0 else _draw(region, axes, fn, n, hidden, turned, seed)
        among = None if classes is None else sorted(set().union(*(c.plain | c.flipped for c in classes)))
        seen = _outputs(region, draw, proof, n, among)
        classes = seen if classes is None else [a & b for a, b in zip(classes, seen, strict=True)]
    assert classes is not None
    post, comb, collapsed, normed = classes
    # Where the iteration has converged its earlier steps carry the same values, and have readers of their own.
    comb = Carriers(comb.plain & proof.comb.plain, comb.flipped & proof.comb.plain)
    for name, output in (("post", post), ("comb", comb), ("the collapse", collapsed)):
        if not output:
            return (
                f"{name} equals the formula on some inputs but not on others (a clamp, or an epsilon in another role)"
            )
    if any(packet(u) in REDUCTION for x in comb.nodes(region) for u in x.users if u in region.index):
        return f"the normalisation of comb goes on in another way after {proof.constants.iters} iterations"
    weight = proof.norm_weight if normed else None
    return _Proof(proof.constants, proof.scale, proof.base, post, comb, collapsed, weight, normed)


def _outputs(region: Region, draw: _Draw, proof: _Proof, n: int, among: Sequence[int] | None) -> list[Carriers]:
    c = proof.constants
    s, b = (draw.env[region.nodes[i]].reshape(-1) for i in (proof.scale, proof.base))
    weight = None if proof.norm_weight is None else draw.env[region.nodes[proof.norm_weight]]
    call = functools.partial(
        reference.mhc_pre, draw.residual, draw.fn, s, b,
        iters=c.iters, rms_eps=c.rms_eps, pre_eps=c.pre_eps, sinkhorn_eps=c.sinkhorn_eps, post_mult=c.post_mult,
        norm_eps=c.norm_eps, out_dtype=torch.float64,
    )  # fmt: skip
    collapsed, post, comb = call(norm_weight=None)
    normed = collapsed if weight is None else call(norm_weight=weight)[0]
    return [
        carriers(region, draw.env, post, among),
        carriers(region, draw.env, comb.flatten(1), among, matrix=n),
        carriers(region, draw.env, collapsed, among),
        carriers(region, draw.env, normed, among) if weight is not None else Carriers(frozenset()),
    ]
