"""Finds `hc_post` by meaning.

    out[k] = post[k] * x + sum_j comb[j, k] * residual[j]

Anchor: a matrix `comb` `[.., n, n]` that meets `n*D` features, in a product or in a broadcast multiplication; the sum
that follows names the other operands. The region between them is run in float64 on random inputs against the formula,
with `comb` as it is and transposed. It does not matter where `post` and `comb` come from: a proved `hc_pre`, a
near miss that was left alone, or (behind a graph break) a graph input.

Float64 does not see roundings, so how the author rounds the operands before the mix is read off the dtypes of the nodes
between them and their products. Where that is not one way for all products, or where it is not the operand itself that
is rounded but what has been computed from it, these operands are not the ones; others, further down, may be.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from dsv4_compile.kernels.mhc import reference
from dsv4_compile.passes.axes import TokenAxes, Unsupported
from dsv4_compile.passes.classes import Carriers, Rounding, carriers, is_wider, same_shape, settled, start, step
from dsv4_compile.passes.mhc_pre import STREAMS, OnStreams, PreMatch
from dsv4_compile.passes.region import (
    ANALYTIC,
    PASSIVE,
    VIEW,
    Region,
    aten,
    evaluate,
    grow,
    has_leaf_factor,
    is_cast_up,
    is_floating,
    is_moved,
    packet,
    shape,
)

__all__ = ["PostMatch", "find"]

_MOVES = VIEW | {aten.permute, aten.transpose, aten.t, aten.clone, aten.expand}
_DRAWS = 2
_ROUNDED = (
    "hc_post rounds what it multiplies in one way for some products and in another for others, or behind further "
    "arithmetic, so only this hc_pre was replaced"
)


@dataclass(frozen=True)
class PostMatch(OnStreams):
    """One proved `hc_post`. `transposed` = the author sums over the second index of `comb`. `roundings` = how x,
    residual, post and comb are rounded before they are multiplied."""

    x: Node
    residual: Node
    post: Node
    comb: Node
    transposed: bool
    roundings: tuple[Rounding, ...]
    n: int
    hidden: int
    region: Region
    out: Carriers


def find(graph: Graph, order: dict[Node, int], pres: Sequence[PreMatch]) -> tuple[list[PostMatch], dict[Node, str]]:
    """All `hc_post` sites of `graph`, in order, and why a `post` that comes into the formula is that of no site.

    `pres` are its proved `hc_pre` sites.
    """
    matches: list[PostMatch] = []
    refused: dict[Node, str] = {}
    taken: set[Node] = set()
    held = {node: w.rounding for pre in pres for w in (pre.post, pre.comb) for node in w.nodes(pre.region)}
    for candidate in itertools.chain(*(_after(pre) for pre in pres), _loose(graph)):
        if candidate.total is not None and candidate.total in taken:
            continue
        match = _match(candidate, order, held)
        if isinstance(match, str):
            refused[candidate.post] = match
        elif match is not None and taken.isdisjoint(match.out.everywhere(match.region)):
            taken.update(match.out.everywhere(match.region))
            matches.append(match)
    return sorted(matches, key=lambda m: order[m.out.nodes(m.region)[0]]), refused


@dataclass(frozen=True)
class _Candidate:
    """Operands that may belong together; `total` is the sum to be reached when the anchor names one."""

    x: Node
    residual: Node
    post: Node
    comb: Node
    total: Node | None = None


def _after(pre: PreMatch) -> Iterator[_Candidate]:
    """What reads the `post` and `comb` of a proved `hc_pre`, however the sum is spelled."""
    nodes = pre.region.nodes
    post, comb = nodes[min(pre.post.plain)], nodes[min(pre.comb.plain | pre.comb.flipped)]
    lead = (shape(pre.residual) or ())[: -1 if pre.flat else -2]
    pending, seen, found = [post], {post}, set()
    while pending:
        node = pending.pop(0)
        for user in node.users:
            if user in seen or user.op != "call_function":
                continue
            seen.add(user)
            if packet(user) in ANALYTIC and len(user.all_input_nodes) == 1:
                pending.append(user)
                continue
            for other in user.all_input_nodes:
                x = _with_shape(other, (*lead, pre.hidden))
                if other is not node and x is not None and x not in found:
                    found.add(x)
                    yield _Candidate(x, pre.residual, post, comb)


def _loose(graph: Graph) -> Iterator[_Candidate]:
    """Operands around every product or broadcast of a matrix `[.., n, n]` with `[.., n, D]`."""
    for node in graph.nodes:
        op = packet(node)
        if op not in (aten.bmm, aten.baddbmm, aten.mul) or not all(isinstance(a, Node) for a in node.args[-2:]):
            continue
        for first, second in (node.args[-2:], node.args[-2:][::-1]):
            for comb, residual in _pairs(first, second):
                for total, other in _sums(node):
                    for post, x in _outer(total, other, shape(residual) or ()):
                        yield _Candidate(x, residual, post, comb, total)


def _pairs(first: Node, second: Node) -> Iterator[tuple[Node, Node]]:
    """(comb, residual) with equal leading axes among the views above two operands, topmost first."""
    combs = list(_chain(first))
    for residual in reversed(list(_chain(second))):
        dims = shape(residual) or ()
        # Only sizes that are ints already: to compare a symbol would put a guard on it.
        if len(dims) < 2 or not all(isinstance(d, int) for d in dims[-2:]) or dims[-2] not in STREAMS or dims[-1] < 2:
            continue
        want = (*dims[:-1], dims[-2])
        comb = next((c for c in reversed(combs) if same_shape(c, want)), None)
        if comb is not None and comb is not residual:
            yield comb, residual


def _chain(node: Node) -> Iterator[Node]:
    """`node` and the floating tensors above it that hold the same values, moved or repeated."""
    while is_floating(node):
        yield node
        if node.op != "call_function" or not (packet(node) in _MOVES or is_cast_up(node)):
            return
        node = node.args[0]


def _with_shape(node: Node, dims: Sequence[int | torch.SymInt]) -> Node | None:
    """The topmost of the nodes above `node` with shape `dims`."""
    found = None
    for above in _chain(node):
        if same_shape(above, dims):
            found = above
    return found


def _sums(mix: Node) -> Iterator[tuple[Node, Node]]:
    """(sum, the summand that is not the mix), following the mix through reductions, views and casts."""
    if packet(mix) is aten.baddbmm and isinstance(mix.args[0], Node):
        yield mix, mix.args[0]
    pending, seen = [mix], {mix}
    while pending:
        node = pending.pop(0)
        for user in node.users:
            if user in seen or user.op != "call_function":
                continue
            seen.add(user)
            op = packet(user)
            if op is aten.add and isinstance(user.args[1], Node):
                yield user, user.args[1] if user.args[0] is node else user.args[0]
            elif op is aten.addcmul and user.args[0] is node:
                yield user, user
            elif op in PASSIVE or op in (aten.sum, aten.mean):
                pending.append(user)


def _outer(total: Node, other: Node, dims: Sequence[int | torch.SymInt]) -> Iterator[tuple[Node, Node]]:
    """(post, x) whose outer product may be `other`, for a residual of shape `dims`."""
    for product in [total] if other is total else list(_chain(other)):
        op = packet(product)
        if op is aten.addcmul:
            pair = product.args[1:3]
        elif op in (aten.mul, aten.bmm):
            pair = product.args[:2]
        else:
            continue
        if not all(isinstance(a, Node) for a in pair):
            continue
        for a, b in (pair, pair[::-1]):
            post, x = _with_shape(a, dims[:-1]), _with_shape(b, (*dims[:-2], dims[-1]))
            if post is not None and x is not None:
                yield post, x


def _match(candidate: _Candidate, order: dict[Node, int], held: dict[Node, Rounding]) -> PostMatch | str | None:
    """A match, why the operands of the formula are none, or None when the formula has other ones."""
    roles = (candidate.x, candidate.residual, candidate.post, candidate.comb)
    dims = shape(candidate.residual) or ()
    n, hidden = (shape(candidate.comb) or (0,))[-1], (shape(candidate.x) or (0,))[-1]
    if not (isinstance(n, int) and isinstance(hidden, int) and isinstance((dims or (None,))[-1], int)):
        return None  # to compare a symbol would fix it
    if n == 0 or len(set(roles)) < 4:
        return None
    flat = dims[-1] != hidden
    lead = dims[: -1 if flat else -2]
    axes = TokenAxes(lead)
    if axes.rows == 0:
        return None
    region = grow(sorted(roles, key=order.__getitem__), order, allow=lambda node: not has_leaf_factor(node, roles))
    found = _prove(region, axes, tuple(region.index[s] for s in roles), n)
    if found is None:
        return None
    out, transposed = settled(region, found[0]), found[1]
    if is_wider(region, candidate.residual, out):
        return None
    roundings = _roundings(region, out, roles, held)
    if roundings is None:
        return _ROUNDED
    return PostMatch(*roles, transposed, roundings, n, hidden, region, out)


def _roundings(
    region: Region, out: Carriers, operands: Sequence[Node], held: dict[Node, Rounding]
) -> tuple[Rounding, ...] | None:
    """How each of the operands is rounded on its ways to the products that `out` is made of.

    `held` has the roundings of nodes that an operator's result will take the place of. None when an operand is rounded
    in one way for some products and in another for others, or what is computed from it is: that is not the formula. (In
    a model in 16 bits the products are rounded as well; that the operator does not is nearer to the formula.)
    """
    needed: set[Node] = set()
    pending = out.nodes(region)
    while pending:
        node = pending.pop()
        if node in region.index and node not in region.seeds and node not in needed:
            needed.add(node)
            pending += node.all_input_nodes
    mixed = _below(region, operands[:2]) & _below(region, operands[2:])
    if not start(operands[1]) and _rounds_products(mixed & needed - set(out.everywhere(region))):
        return None
    found: list[Rounding] = []
    for operand in operands:
        ways = _arrivals(operand, held.get(operand, start(operand)), needed, mixed)
        way = ways.pop() if ways else ()
        if ways or way is None:
            return None
        found.append(way)
    return tuple(found)


def _below(region: Region, seeds: Sequence[Node]) -> set[Node]:
    """The nodes that are computed from one of `seeds`."""
    found = set(seeds)
    for node in region.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _rounds_products(nodes: set[Node]) -> bool:
    return any(step((), source, n) and start(n) for n in nodes for source in nodes.intersection(n.all_input_nodes))


def _arrivals(operand: Node, rounding: Rounding, needed: set[Node], mixed: set[Node]) -> set[Rounding | None]:
    """What happens to `operand` on each way to where it meets the other factor among the nodes `needed`.

    None stands for a rounding of what has been computed from it.
    """
    pending = [(operand, rounding, False)]
    found: set[Rounding | None] = set()
    seen = set()
    while pending:
        state = pending.pop()
        if state in seen:
            continue
        seen.add(state)
        node, rounding, computed = state
        for user in needed.intersection(node.users):
            if is_moved(user):
                if computed and step((), node, user):
                    found.add(None)
                pending.append((user, step(rounding, node, user), computed))
            elif user in mixed:
                found.add(rounding)
            elif start(user):
                found.add(None)
            else:
                pending.append((user, rounding, True))
    return found


@functools.lru_cache(maxsize=1024)
def _proved(signature: str) -> list[tuple[Carriers, bool] | None]:
    """One-slot memo per signature (filled by `_prove`)."""
    return []


def _prove(region: Region, axes: TokenAxes, roles: tuple[int, ...], n: int) -> tuple[Carriers, bool] | None:
    memo = _proved(f"{roles} {n} {region.digest()}")
    if not memo:
        memo.append(_search(region, axes, roles, n))
    return memo[0]


def _search(region: Region, axes: TokenAxes, roles: tuple[int, ...], n: int) -> tuple[Carriers, bool] | None:
    """Nodes that carry the formula's result on every draw, and the orientation of `comb`."""
    found: dict[bool, Carriers] = {}
    hidden = int((shape(region.nodes[roles[0]]) or (0,))[-1])
    flat = (shape(region.nodes[roles[1]]) or ())[-1] != hidden
    for seed in range(_DRAWS):
        generator = torch.Generator().manual_seed(seed + 101)

        def normal(*dims: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(dims, generator=generator, dtype=torch.float64, device="cpu")

        t = axes.rows
        x, residual, post, comb = normal(t, hidden), normal(t, n, hidden), normal(t, n), normal(t, n, n)
        given = {}
        for role, tensor, features in zip(roles, (x, residual, post, comb), (1, 1 if flat else 2, 1, 2), strict=True):
            node = region.nodes[role]
            try:
                given[node] = tensor.reshape(axes.seed_shape(shape(node) or (), features))
            except (RuntimeError, Unsupported):
                return None
        for leaf in region.leaves:
            given.setdefault(leaf, normal(*axes.real(shape(leaf) or ())))
        env = evaluate(region, axes, given)
        for transposed in (False, True):
            mixer = comb.transpose(1, 2) if transposed else comb
            want = reference.mhc_post(x, residual, post, mixer, residual_dtype=torch.float64).flatten(1)
            seen = carriers(region, env, want)
            found[transposed] = seen if seed == 0 else found[transposed] & seen
    return next(((out, transposed) for transposed, out in found.items() if out), None)
