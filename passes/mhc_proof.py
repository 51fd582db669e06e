"""Proves that a region computes `hc_pre`, and finds the constants it computes it with.

The region is run in float64 at a few tokens, on random inputs of several magnitudes, against

    mixes = (flat @ fn.T) * rsqrt(mean(flat^2) + rms_eps)
    pre   = sigmoid(mixes[:n] * scale[0] + base[:n]) + pre_eps
    post  = post_mult * sigmoid(mixes[n:2n] * scale[1] + base[n:2n])
    comb  = sinkhorn(softmax(mixes[2n:] * scale[2] + base[2n:]) + sinkhorn_eps)
    out   = sum_i pre[i] * residual[i]      (then RMSNorm with a weight, when the model has one there)

whose constants are searched among the numbers written in the region. What agrees on every draw with the operator's
reference is a carrier of that output. Identical regions (same structure, shapes and constants) are proved once per
process.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from dsv4_compile.kernels.mhc import reference
from dsv4_compile.passes.axes import TokenAxes, Unsupported
from dsv4_compile.passes.classes import Carriers, behind_roundings, carriers, close, rows
from dsv4_compile.passes.region import POINTWISE, REDUCTION, Region, count, evaluate, is_floating, packet, shape

__all__ = ["DRAWS", "Case", "Constants", "Draw", "Proof", "draw_inputs", "prove"]

# Magnitudes of the residual rows and gains of the mixing logits in the draws: small rows make the epsilons weigh,
# large logits keep the Sinkhorn iteration from converging, so that its length shows.
DRAWS = ((1.0, 1.0), (1e-3, 6.0), (30.0, 3.0), (1e-9, 1.0))
_MAX_ITERS = 64
# The outputs that no node carries, in the order in which they are looked for.
_NO_VALUE = (
    "no value equals post = m * sigmoid(mixes * scale[1] + base) with the RMS of the residual",
    "no value equals comb, softmax then rows and columns normalised in turn (columns first)",
    "no value equals the collapse, sum over streams of (sigmoid(mixes * scale[0] + base) + eps) * residual",
)
_RTOL = 1e-7


@dataclass(frozen=True)
class Case:
    """A region that may be `hc_pre`, or `hc_head`: seed 0 is the residual, `fn` the position of the mixing weight."""

    region: Region
    axes: TokenAxes
    fn: int
    n: int
    hidden: int
    turned: bool
    head: bool = False

    @property
    def logits(self) -> int:
        """Rows of the mixing weight."""
        return self.n if self.head else (2 + self.n) * self.n


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
class Proof:
    """Positions in a region, valid for every region with the same signature."""

    constants: Constants
    scale: int
    base: int
    post: Carriers
    comb: Carriers
    collapsed: Carriers
    norm_weight: int | None
    normed: Carriers


@functools.lru_cache(maxsize=1024)
def _proved(signature: str) -> list[Proof | str]:
    """One-slot memo per signature (filled by `prove`)."""
    return []


def prove(case: Case) -> Proof | str:
    """The proof that the region of `case` computes `hc_pre`, or the first output that no node carries."""
    memo = _proved(f"{case.fn} {case.n} {case.hidden} {case.turned} {case.region.digest()}")
    if not memo:
        memo.append(_search(case))
    return memo[0]


@dataclass
class Draw:
    """Random inputs and the values of the region on them."""

    residual: torch.Tensor
    fn: torch.Tensor
    env: dict[Node, Any]


def draw_inputs(case: Case, seed: int) -> Draw:
    """Number `seed` of `DRAWS`, evaluated.

    Raises:
        Unsupported: the region has an operation that cannot be run on it.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    magnitude, gain = DRAWS[seed]

    def normal(*dims: int) -> torch.Tensor:
        return torch.randn(dims, generator=generator, dtype=torch.float64, device="cpu")

    def signed(*dims: int) -> torch.Tensor:
        """Away from zero, of both signs: so that a root or a norm of a parameter does not pass for the parameter."""
        drawn = normal(*dims)
        sign = torch.where(torch.arange(drawn.numel()).reshape(drawn.shape) % 2 == seed % 2, -1.0, 1.0)
        return (drawn.abs() + 0.25) * sign

    region, axes, n, hidden = case.region, case.axes, case.n, case.hidden
    residual = normal(axes.rows, n, hidden) * magnitude * torch.exp(normal(axes.rows, 1, 1))
    weight = normal(case.logits, n * hidden) * (gain / (n * hidden) ** 0.5)
    dims = shape(region.seeds[0]) or ()
    features = 1 if dims[-1] == n * hidden else 2
    given = {
        region.seeds[0]: residual.reshape(axes.seed_shape(dims, features)),
        region.nodes[case.fn]: weight.t().contiguous() if case.turned else weight,
    }
    for leaf in region.leaves:
        if leaf not in given:
            given[leaf] = signed(*axes.real(shape(leaf) or ()))
    return Draw(residual, weight, evaluate(region, axes, given))


def _search(case: Case) -> Proof | str:
    """Finds the constants on the first draw, then demands equality on all of them."""
    try:
        draw = draw_inputs(case, 0)
    except Unsupported as problem:
        return f"{problem} between the residual and the mixing parameters"
    written = [c for c in case.region.constants() if 0 < c < 0.1]
    small = [*written, 0.0]
    reasons = []
    for scale, base in _parameters(case.region, case.n):
        for rms_eps in small:
            found = _constants(case, draw, rms_eps, scale, base, small)
            if isinstance(found, str):
                reasons.append(found)
                continue
            return _confirm(case, _norm(case, draw, found, scale, base, small), draw)
    if not reasons:
        return "no parameters of shape [3] and [(2+n)*n] scale and shift the product"
    return max(reasons, key=_NO_VALUE.index)  # of the constants that go furthest


def _parameters(region: Region, n: int) -> Iterator[tuple[int, int]]:
    def leaves(size: int) -> list[int]:
        return [region.index[x] for x in region.leaves if count(shape(x) or ()) == size]

    return itertools.islice(itertools.product(leaves(3), leaves((2 + n) * n)), 9)


@dataclass
class _Found:
    """Constants, the collapsed row of the draw `[T, D]`, and the position of the last Sinkhorn step."""

    constants: Constants
    collapsed: torch.Tensor
    last_step: int


def _constants(case: Case, draw: Draw, rms_eps: float, scale: int, base: int, small: Sequence[float]) -> _Found | str:
    """Constants up to the collapsed row; or which output has no node."""
    region, n = case.region, case.n
    s, b = (draw.env[region.nodes[i]].reshape(-1) for i in (scale, base))
    flat = draw.residual.flatten(1)
    mixes = (flat @ draw.fn.t()) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)
    gate = torch.sigmoid(mixes[:, n : 2 * n] * s[1] + b[n : 2 * n])
    post_mult = _ratio(region, draw, gate)
    if post_mult is None:
        return _NO_VALUE[0]
    logits = (mixes[:, 2 * n :] * s[2] + b[2 * n :]).view(-1, n, n)
    chain = _sinkhorn_length(region, draw, logits, small)
    if chain is None:
        return _NO_VALUE[1]
    iters, sinkhorn_eps, last = chain
    gate = torch.sigmoid(mixes[:, :n] * s[0] + b[:n])
    for pre_eps in small:
        collapsed = torch.einsum("tn,tnd->td", gate + pre_eps, draw.residual)
        if carriers(region, draw.env, collapsed):
            return _Found(Constants(rms_eps, pre_eps, sinkhorn_eps, post_mult, iters), collapsed, last)
    return _NO_VALUE[2]


def _ratio(region: Region, draw: Draw, gate: torch.Tensor) -> float | None:
    """The multiplier of the last node that is a constant multiple of `gate` and has a reader of another kind.

    A multiple of a rounded multiple is computed as it is written.
    """
    found: dict[int, float] = {}
    for i, node in enumerate(region.nodes):
        actual = rows(draw.env.get(node), *gate.shape) if node not in region.seeds and is_floating(node) else None
        if actual is None:
            continue
        ratio = float(actual[0, 0] / gate[0, 0])
        if ratio != 0.0 and close(actual, gate * ratio):
            found[i] = ratio
    inside = {region.nodes[i] for i in found}
    inside -= behind_roundings(region, inside)
    last = [i for i in found if (x := region.nodes[i]) in inside and any(u not in inside for u in x.users)]
    if not last:
        return None
    ratio = found[max(last)]
    return next((c for c in [1.0, *region.constants()] if c and abs(c - ratio) <= 1e-9 * abs(c)), ratio)


def _sinkhorn_length(
    region: Region, draw: Draw, logits: torch.Tensor, small: Sequence[float]
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


def _norm(case: Case, draw: Draw, found: _Found, scale: int, base: int, small: Sequence[float]) -> Proof:
    """Adds the RMSNorm behind the collapse, when there is one."""
    region, constants, collapsed = case.region, found.constants, found.collapsed
    none, late = Carriers(frozenset()), Carriers(frozenset(range(found.last_step, len(region.nodes))))
    for leaf in region.leaves:
        if shape(leaf) != (case.hidden,):
            continue
        for eps in small:
            scaled = collapsed * torch.rsqrt(collapsed.square().mean(-1, keepdim=True) + eps)
            if carriers(region, draw.env, scaled * draw.env[leaf]):
                full = Constants(**{**constants.__dict__, "norm_eps": eps})
                return Proof(full, scale, base, none, late, none, region.index[leaf], none)
    return Proof(constants, scale, base, none, late, none, None, none)


def _confirm(case: Case, proof: Proof, first: Draw) -> Proof | str:
    """Compares every draw with the operator's own definition; keeps the nodes that agree on all of them."""
    region = case.region
    classes: list[Carriers] | None = None
    for seed in range(len(DRAWS)):
        draw = first if seed == 0 else draw_inputs(case, seed)
        among = None if classes is None else sorted(set().union(*(c.plain | c.flipped for c in classes)))
        seen = _outputs(case, draw, proof, among)
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
    return Proof(proof.constants, proof.scale, proof.base, post, comb, collapsed, weight, normed)


def _outputs(case: Case, draw: Draw, proof: Proof, among: Sequence[int] | None) -> list[Carriers]:
    region = case.region
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
        carriers(region, draw.env, comb.flatten(1), among, matrix=case.n),
        carriers(region, draw.env, collapsed, among),
        carriers(region, draw.env, normed, among) if weight is not None else Carriers(frozenset()),
    ]
