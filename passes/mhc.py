"""The mHC pass: `hc_post` and the next `hc_pre` (and RMSNorm) become one operator.

    post, comb, x = hc_pre(residual); y = layer(x)
    residual = hc_post(y, residual, post, comb)          ->   residual, x, post, comb = dsv4.mhc_post_pre(...)
    post, comb, x = norm(hc_pre(residual))

The first `hc_pre` and the last `hc_post` become `dsv4::mhc_pre` and `dsv4::mhc_post`, the final `hc_head` with its
RMSNorm becomes `dsv4::mhc_head`.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.fx import Graph, Node

from dsv4_compile.kernels.mhc import families, reference
from dsv4_compile.passes import mhc_head, mhc_post, mhc_pre
from dsv4_compile.passes.classes import Carriers, leaving, precision, same_shape
from dsv4_compile.passes.emission import call, cast, item, reshape_rows, transpose
from dsv4_compile.passes.mhc_head import HeadMatch
from dsv4_compile.passes.mhc_post import PostMatch
from dsv4_compile.passes.mhc_pre import OnStreams, PreMatch
from dsv4_compile.passes.region import ANALYTIC, PASSIVE, Region, aten, is_floating, packet, shape, undisturbed, value
from dsv4_compile.passes.sites import MhcSite, Missed, PassResult, module_path, source_location

__all__ = ["MhcPass"]


@dataclass
class _Outputs:
    """Nodes that carry `post` and `comb` after the rewrite, by the match that made them."""

    post: Node
    comb: Node
    match: PreMatch


@dataclass
class MhcPass:
    """Replaces mHC arithmetic in a functional ATen graph.

    Args:
        kernel: value of the option `mhc`: "auto", "tilelang", "triton" or "reference".
        deterministic: value of the option.
    """

    kernel: str = "auto"
    deterministic: bool = False
    name: str = field(default="mhc", init=False)

    def __call__(self, graph: Graph) -> PassResult:
        order = {node: i for i, node in enumerate(graph.nodes)}
        with undisturbed():
            pres, missed = mhc_pre.find(graph, order)
            posts, refused = mhc_post.find(graph, order, pres)
            heads = mhc_head.find(graph, order)
        # Where a lookalike of hc_pre has been reported already, one reason is enough.
        alone = [] if missed else _unled(pres, posts)
        unposted = _unposted(pres, posts, refused)  # of the graph as it came: afterwards the readers are the operators'
        rewrite = _Rewrite(graph, order, self.kernel, self.deterministic, [*pres, *heads])
        for post, pre in _sites(pres, posts, order):
            rewrite.apply(post, pre)
        for head in heads:
            rewrite.head(head)
        rewrite.clean([*(m.region for m in pres), *(m.region for m in posts), *(m.region for m in heads)])
        missed = [*missed, *alone, *unposted]
        return PassResult(
            mhc=tuple(rewrite.done),
            missed=tuple(missed),
            effective=tuple(rewrite.effective),
            kernel_seconds=rewrite.kernel_seconds,
        )

    def uuid(self) -> str:
        return f"{self.name}:{self.kernel}:{self.deterministic}"


def _sites(
    pres: Sequence[PreMatch], posts: Sequence[PostMatch], order: dict[Node, int]
) -> list[tuple[PostMatch | None, PreMatch | None]]:
    """Pairs each `hc_post` with the `hc_pre` that reads its result, in program order."""
    free = list(pres)
    sites: list[tuple[int, tuple[PostMatch | None, PreMatch | None]]] = []
    for post in posts:
        results = set(post.out.nodes(post.region))
        pre = next((p for p in free if p.residual in results), None)
        if pre is not None:
            free.remove(pre)
        sites.append((order[post.out.nodes(post.region)[0]], (post, pre)))
    sites += [(order[p.region.nodes[min(p.post.plain)]], (None, p)) for p in free]
    return [site for _, site in sorted(sites, key=lambda s: s[0])]


def _unled(pres: Sequence[PreMatch], posts: Sequence[PostMatch]) -> list[Missed]:
    """`hc_post` sites whose `post` and `comb` this graph computes in a way that is not a known `hc_pre`."""
    known = {n for pre in pres for n in (*pre.post.everywhere(pre.region), *pre.comb.everywhere(pre.region))}
    why = "hc_post was replaced alone: what computes its post and comb is not hc_pre with one fn of [(2+n)*n, n*D]"
    return [
        Missed("mhc", module_path(out), why, source_location(out))
        for post, out in ((post, post.out.nodes(post.region)[0]) for post in posts)
        if post.comb not in known and _origin(post.comb).op == "call_function"
    ]


def _origin(node: Node) -> Node:
    """What `node` is, moved or cast."""
    moves = PASSIVE | {operator.getitem}
    while node.op == "call_function" and packet(node) in moves and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


def _unposted(pres: Sequence[PreMatch], posts: Sequence[PostMatch], refused: dict[Node, str]) -> list[Missed]:
    """Sites whose `post` and `comb` are read by something that is not the formula of `hc_post`."""
    used = {p.post for p in posts} | {p.comb for p in posts}
    missed = []
    for pre in pres:
        members = {*pre.post.everywhere(pre.region), *pre.comb.everywhere(pre.region)}
        readers = {u for m in members for u in m.users} - members
        if members.isdisjoint(used) and any(r.op != "output" for r in readers):
            why = "no post * x + comb^T @ residual in the residual's layout behind it, so only this hc_pre was replaced"
            why = next((refused[m] for m in members if m in refused), why)
            missed.append(Missed("mhc", pre.site, why, source_location(pre.post.everywhere(pre.region)[0])))
    return missed


class _Rewrite:
    """Puts the operators into the graph, one site after the other."""

    def __init__(
        self,
        graph: Graph,
        order: dict[Node, int],
        kernel: str,
        deterministic: bool,
        collapses: Sequence[PreMatch | HeadMatch],
    ):
        self.graph, self.order, self.kernel, self.deterministic = graph, order, kernel, deterministic
        # Decided on the graph as it came: later readers are the rewrite's own.
        self._normed = {id(match) for match in collapses if _norm_is_fused(match)}
        self.done: list[MhcSite] = []
        self.effective: list[tuple[str, str, str]] = []
        self.kernel_seconds = 0.0
        self._new: dict[Node, Node] = {}
        self._weights: list[_Outputs] = []
        self._residuals: dict[Node, Node] = {}  # what carried the result of an hc_post, and the operator's result

    def apply(self, post: PostMatch | None, pre: PreMatch | None) -> None:
        """Rewrites one site: `hc_post`, `hc_pre`, or the one followed by the other."""
        match = post if post is not None else pre
        assert match is not None
        family = self._family(match)
        if post is not None:
            self._post(post, pre)
        elif pre is not None:
            self._pre(pre)
        self.done.append(self._site(post, pre, family))

    def head(self, match: HeadMatch) -> None:
        """Rewrites one `hc_head`, where a kernel is made for it; otherwise it stays with Inductor, and is listed."""
        family = self._family(match)
        if family != "cuda" and self.kernel != "reference":  # the others have no kernel for it
            self.done.append(self._head_site(match, "inductor"))
            if self.deterministic:
                why = "hc_head stays with Inductor, whose matrix product promises nothing about a row in another batch"
                self.effective.append(("deterministic", "False", why))
            return
        fused = id(match) in self._normed
        outputs, weight = (match.normed, match.norm_weight) if fused else (match.collapsed, None)
        first = match.collapsed.nodes(match.region)[0]
        with self.graph.inserting_before(first):
            residual = self._streams(match)
            fn, scale, base = self._weights_of(match, weight, first)
            proof = match.proof
            numbers = (proof.rms_eps, proof.pre_eps, proof.norm_eps)
            arguments = (residual, fn, scale, base, weight, *numbers, precision(match.region, outputs), *self._how())
            made = call(self.graph, torch.ops.dsv4.mhc_head.default, arguments, like=first)
        self._replace(match.region, outputs, made)
        self.done.append(self._head_site(match, family))

    def _how(self, mixing: torch.dtype | None = None) -> tuple[Any, ...]:
        """The operators' last arguments; defaults at their end are not written."""
        if mixing is not None:
            return (self.kernel, self.deterministic, mixing)
        return (self.kernel, True) if self.deterministic else (self.kernel,)

    def _head_site(self, match: HeadMatch, kernel: str) -> MhcSite:
        proof, fused = match.proof, id(match) in self._normed
        eps = {"rms": proof.rms_eps, "pre": proof.pre_eps} | ({"norm": proof.norm_eps} if fused else {})
        source = source_location(match.collapsed.nodes(match.region)[0])
        return MhcSite(match.site, "head", fused, kernel, match.n, match.hidden, None, eps, source=source)

    def _streams(self, match: OnStreams) -> Node:
        """The residual as `[..., n, D]`."""
        lead = (shape(match.residual) or ())[: -1 if match.flat else -2]
        if match.residual in self._residuals:
            return self._with_lead(self._residuals[match.residual], lead, 2)
        residual = self._now(match.residual)
        return reshape_rows(self.graph, residual, (*lead, match.n, match.hidden)) if match.flat else residual

    def _weights_of(
        self, match: PreMatch | HeadMatch, norm_weight: Node | None, before: Node
    ) -> tuple[Node, Node, Node]:
        """`fn`, `scale` and `base` as the operators take them, above the node `before`."""
        for leaf in (match.fn, match.scale, match.base, norm_weight):
            if leaf is not None and leaf.op == "get_attr" and self.order[leaf] > self.order[before]:
                before.prepend(leaf)
        fn = transpose(self.graph, match.fn) if match.transposed_fn else match.fn
        return fn, self._vector(match.scale), self._vector(match.base)

    def _family(self, match: OnStreams) -> str:
        """The family that runs here, for the report. The graph keeps the wish: its code may be cached for a process
        in which another family works."""
        start = time.perf_counter()
        val = value(match.residual)
        family, reason = families.resolve(self.kernel, val.device, match.n, match.hidden, val.dtype)
        self.kernel_seconds += time.perf_counter() - start
        if reason is not None:
            self.effective.append(("mhc", family, reason))
        if self.deterministic and family == "reference":
            why = "the matrix product of the family reference promises nothing about a row in another batch"
            self.effective.append(("deterministic", "False", why))
        return family

    def _site(self, post: PostMatch | None, pre: PreMatch | None, family: str) -> MhcSite:
        mixing = None
        if post is not None:
            plain = reference.compute_dtype(value(post.residual).dtype)
            dtypes = [rounding[-1] if rounding else plain for rounding in post.roundings[2:]]
            mixing = "/".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes))
        if pre is None:
            assert post is not None
            out = post.out.nodes(post.region)[0]
            where, source = module_path(out), source_location(out)
            return MhcSite(where, "post", False, family, post.n, post.hidden, mixing=mixing, source=source)
        c, fused = pre.constants, id(pre) in self._normed
        eps = {"rms": c.rms_eps, "pre": c.pre_eps, "sinkhorn": c.sinkhorn_eps} | ({"norm": c.norm_eps} if fused else {})
        form: Literal["pre", "post_pre"] = "pre" if post is None else "post_pre"
        source = source_location(pre.collapsed.nodes(pre.region)[0])
        return MhcSite(pre.site, form, fused, family, pre.n, pre.hidden, c.iters, eps, mixing, source)

    def _pre(self, pre: PreMatch) -> None:
        first = self._first(pre.region, pre.post, pre.comb, pre.collapsed)
        with self.graph.inserting_before(first):
            residual = self._streams(pre)
            arguments, out_dtype = self._parameters(pre, first)
            arguments = (residual, *arguments, out_dtype, *self._how())
            made = call(self.graph, torch.ops.dsv4.mhc_pre.default, arguments, like=first)
            x, post, comb = (item(self.graph, made, i) for i in range(3))
        self._put(pre, x, post, comb)

    def _post(self, match: PostMatch, pre: PreMatch | None) -> None:
        dtype = precision(match.region, match.out)
        first = match.out.nodes(match.region)[0]
        with self.graph.inserting_before(first):
            inputs, mixing = self._post_inputs(match)
            if pre is None:
                target = torch.ops.dsv4.mhc_post.default
                made = call(self.graph, target, (*inputs, dtype, *self._how(mixing)), like=first)
                residual = made
            else:
                arguments, out_dtype = self._parameters(pre, first)
                target = torch.ops.dsv4.mhc_post_pre.default
                arguments = (*inputs, *arguments, dtype, out_dtype, *self._how(mixing))
                made = call(self.graph, target, arguments, like=first)
                residual, x, post, comb = (item(self.graph, made, i) for i in range(4))
        self._replace(match.region, match.out, residual)
        same = [node for node in match.out.nodes(match.region) if value(node).dtype == dtype]
        self._residuals |= dict.fromkeys(same, residual)
        if pre is not None:
            self._put(pre, x, post, comb)

    def _post_inputs(self, match: PostMatch) -> tuple[list[Node], torch.dtype | None]:
        """The operator's first arguments, and what it is to round `post` and `comb` to."""
        dims = shape(match.residual) or ()
        lead = dims[: -1 if match.flat else -2]
        post, comb, turned = self._now(match.post), self._now(match.comb), match.transposed
        for made in self._weights:
            region = made.match.region
            if match.post in made.match.post.nodes(region):
                post = self._with_lead(made.post, lead, 1)
            if match.comb in made.match.comb.nodes(region):
                comb = self._with_lead(made.comb, lead, 2)
                turned ^= region.index[match.comb] in made.match.comb.flipped
        mixing = None
        of_x, of_residual, of_post, of_comb = match.roundings
        if of_post == of_comb and len(of_post) < 2:
            mixing = next(iter(of_post), None)
        else:  # the operator rounds both to one dtype, or neither
            post, comb = self._rounded(post, of_post), self._rounded(comb, of_comb)
        comb = transpose(self.graph, comb) if turned else comb
        x, residual = self._rounded(self._now(match.x), of_x), self._rounded(self._streams(match), of_residual)
        if value(match.residual).dtype is torch.float64:  # it says what the operator computes in
            residual = cast(self.graph, residual, torch.float64)
        return [x, residual, post, comb], mixing

    def _rounded(self, node: Node, rounding: Sequence[torch.dtype]) -> Node:
        for dtype in rounding:
            node = cast(self.graph, node, dtype)
        return node

    def _with_lead(self, node: Node, lead: Sequence[int | torch.SymInt], features: int) -> Node:
        """`node` with the leading axes `lead`: the same rows, counted in another way."""
        dims = shape(node) or ()
        want = (*lead, *dims[len(dims) - features :])
        return node if same_shape(node, want) else reshape_rows(self.graph, node, want)

    def _parameters(self, pre: PreMatch, before: Node) -> tuple[tuple[Any, ...], torch.dtype]:
        """The operator's arguments from `fn` to `norm_eps`, and the dtype of the layer's input."""
        fused = id(pre) in self._normed
        dtype = precision(pre.region, pre.normed if fused else pre.collapsed)
        weight = pre.norm_weight if fused else None
        fn, scale, base = self._weights_of(pre, weight, before)
        c = pre.constants
        numbers = (c.iters, c.rms_eps, c.pre_eps, c.sinkhorn_eps, c.post_mult, c.norm_eps)
        return (fn, scale, base, weight, *numbers), dtype

    def _vector(self, leaf: Node) -> Node:
        return leaf if len(shape(leaf) or ()) == 1 else reshape_rows(self.graph, leaf, (-1,))

    def _put(self, pre: PreMatch, x: Node, post: Node, comb: Node) -> None:
        self._weights.append(_Outputs(post, comb, pre))
        self._replace(pre.region, pre.normed if id(pre) in self._normed else pre.collapsed, x)
        self._replace(pre.region, pre.post, post)
        self._replace(pre.region, pre.comb, comb)

    def _now(self, node: Node) -> Node:
        return self._new.get(node, node)

    def _first(self, region: Region, *classes: Carriers) -> Node:
        return min((c.nodes(region)[0] for c in classes), key=self.order.__getitem__)

    def _replace(self, region: Region, outputs: Carriers, made: Node) -> None:
        """Gives the readers of a class `made` (moved, rounded and cast as they expect it)."""
        members = outputs.nodes(region)
        inside = set(members)
        for leaver in leaving(region, members):
            target = _nearest_of_shape(leaver, inside, shape(made) or ())
            if target in self._new:
                continue
            flipped = region.index[target] in outputs.flipped
            with self.graph.inserting_before(target):
                new = self._rounded(made, outputs.rounding)
                if flipped:
                    new = transpose(self.graph, new)
                if not same_shape(target, shape(made) or ()):
                    new = reshape_rows(self.graph, new, shape(target) or ())
                new = cast(self.graph, new, value(target).dtype)
            target.replace_all_uses_with(new)
            self._new[target] = new

    def clean(self, regions: Sequence[Region]) -> None:
        """Erases what nothing reads any more, region by region, last node first."""
        dead = {n for region in regions for n in region.nodes if n.op == "call_function"}
        for node in sorted(dead, key=self.order.__getitem__, reverse=True):
            if not node.users and (packet(node) in ANALYTIC or packet(node) is operator.getitem):
                self.graph.erase_node(node)
        for node in reversed(list(self.graph.nodes)):
            if not node.users and node.meta.get("dsv4_helper"):
                self.graph.erase_node(node)


def _nearest_of_shape(node: Node, inside: set[Node], dims: Sequence[int | torch.SymInt]) -> Node:
    """The node itself or the nearest one above it in its class that already has the operator's shape.

    Not above a clone: it is there for the strides that its readers need, and a transposed result does not have them.
    """
    above: Node | None = node
    while above is not None and not same_shape(above, dims):
        parent = above.args[0] if above.args else None
        above = parent if isinstance(parent, Node) and parent in inside and packet(parent) is not aten.clone else None
    return above if above is not None else node


def _norm_is_fused(pre: PreMatch | HeadMatch) -> bool:
    """The norm goes into the kernel when nothing else reads the row before it, and nothing rounds the row below the
    precision of the normed one."""
    if not pre.normed or pre.norm_weight is None:
        return False
    stop = set(pre.normed.nodes(pre.region))
    coarsest = torch.finfo(precision(pre.region, pre.normed)).eps
    pending, seen = list(pre.collapsed.nodes(pre.region)), set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if is_floating(node) and torch.finfo(value(node).dtype).eps > coarsest:
            return False
        for user in node.users:
            if user in stop:
                continue
            if user not in pre.region.index:
                return False
            pending.append(user)
    return True
