"""vLLM's own mHC operators become ours, where ours are faster.

    vllm::mhc_pre, vllm::mhc_pre_tilelang, _C::hc_pre_fused_cpu           ->  dsv4::mhc_pre
    vllm::mhc_post, vllm::mhc_post_tilelang, _C::hc_post_fused_cpu        ->  dsv4::mhc_post
    one of the second line, read by one of the first                      ->  dsv4::mhc_post_pre
    vllm::mhc_fused_post_pre, vllm::mhc_fused_post_pre_tilelang           ->  dsv4::mhc_post_pre
    ... and the vllm_ir::rms_norm that is the only reader of the row      ->  fused

What these operators compute is in `vllm_calls.py`. vLLM's fused kernels round the collapsed row before the RMSNorm
multiplies it; ours do not, which is nearer to the exact result.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.fx import Graph, Node

from dsv4_compile.kernels.environment import word
from dsv4_compile.kernels.mhc import families
from dsv4_compile.passes.emission import call, cast, item
from dsv4_compile.passes.region import VIEW, are, aten, packet, shape, value
from dsv4_compile.passes.sites import MhcSite, Missed, PassResult, module_path, source_location
from dsv4_compile.passes.vllm_calls import Call, arguments_of, head_of, name_of, parse

__all__ = ["VARIABLE", "VllmMhcPass", "find"]

VARIABLE = "DSV4_VLLM_MHC"
"""The environment variable that says whether vLLM's operators are replaced."""
_RULE = "vLLM's operators are replaced only where ours were measured to be faster"
_LEFT = "vllm"
"""What the report calls the family of an operator that stays vLLM's."""
_MEASURED = (9, 0)
"""The compute capability on which ours were measured against vLLM's (benchmarks/results/mhc-h100.json)."""


@dataclass(frozen=True)
class _Found:
    """One replacement: a call, or a `post` and the `pre` that reads it, and the norm behind them."""

    post: Call | None
    pre: Call | None
    norm: Node | None = None

    @property
    def head(self) -> Call:
        """The call at whose place the replacement stands."""
        head = self.post or self.pre
        assert head is not None
        return head

    @property
    def first(self) -> Node:
        return self.head.node

    @property
    def form(self) -> Literal["pre", "post", "post_pre"]:
        if self.pre is None:
            return "post"
        return "post_pre" if self.post is not None else "pre"


@dataclass
class VllmMhcPass:
    """Replaces vLLM's mHC operators.

    With `DSV4_VLLM_MHC=auto`, the default, they are replaced where ours were measured to be faster (on CUDA devices of
    compute capability 9.0) and where the option `mhc` names a family; with `always` everywhere, with `never` nowhere.

    Args:
        kernel: value of the option `mhc`.
        deterministic: value of the option.
    """

    kernel: str = "auto"
    deterministic: bool = False
    name: str = field(default="vllm_mhc", init=False)

    def __call__(self, graph: Graph) -> PassResult:
        found, missed = find(graph)
        done = [_head(node, residual) for node, residual in heads(graph)]
        effective: list[tuple[str, str, str]] = []
        seconds = 0.0
        for site in found:
            start = time.perf_counter()
            family, reason = self._family(site)
            seconds += time.perf_counter() - start
            if reason is not None:
                effective.append(("mhc", family, reason))
            done.append(_report(site, family))
            if family != _LEFT:
                _rewrite(graph, site, (self.kernel, True) if self.deterministic else (self.kernel,))
        return PassResult(
            mhc=tuple(done),
            missed=tuple(missed),
            effective=tuple(dict.fromkeys(effective)),
            kernel_seconds=seconds,
        )

    def uuid(self) -> str:
        return f"{self.name}:{self.kernel}:{self.deterministic}:{_wish()}"

    def _family(self, site: _Found) -> tuple[str, str | None]:
        """The family that runs here, or `_LEFT`; and why it is not what was asked for."""
        residual = value(site.head.arguments["residual"])
        n, hidden = residual.shape[-2:]
        if (why := self._left(residual.device)) is not None:
            return _LEFT, why
        family, reason = families.resolve(self.kernel, residual.device, int(n), int(hidden), residual.dtype)
        if family != "cuda" and self.kernel == "auto" and _wish() == "auto":
            return _LEFT, f"{_RULE}, which was in CUDA C++, and {reason}"
        return family, reason

    def _left(self, device: torch.device) -> str | None:
        """Why vLLM's operators stay on this device, or None."""
        wish = _wish()
        if wish == "never":
            return f"{VARIABLE} is 'never'"
        if wish == "always" or self.kernel != "auto":
            return None
        if device.type == "cpu":
            return f"{_RULE}, and on a CPU vLLM's are, for few tokens; {VARIABLE}=always replaces them all the same"
        if device.type != "cuda" or torch.version.hip is not None:
            return f"{_RULE}, and nothing was measured on this device; {VARIABLE}=always replaces them all the same"
        capability = torch.cuda.get_device_capability(device)
        if capability == _MEASURED:
            return None
        found = ".".join(map(str, capability))
        return f"{_RULE}, which was on compute capability 9.0, and this is {found}; {VARIABLE}=always replaces them"


def _wish() -> str:
    """What the environment wants."""
    return word(VARIABLE)


def find(graph: Graph) -> tuple[list[_Found], list[Missed]]:
    """Calls that can be replaced, in program order, and those that look like them with the reason why not."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    calls: list[Call] = []
    missed: list[Missed] = []
    for node in order:
        parsed = parse(node)
        if isinstance(parsed, Call):
            calls.append(parsed)
        elif parsed is not None:
            missed.append(Missed("mhc", module_path(node), parsed, source_location(node)))
    posts = {c.node: c for c in calls if c.kind.form == "post"}
    found = []
    for c in calls:
        if c.kind.form == "post_pre":
            found.append(_Found(c, c, _norm_of(c, c.node, order)))
        elif c.kind.form == "pre":
            source = _same(c.arguments["residual"])
            is_joined = source in posts and all(
                _is_early(n, order, source) for n in c.node.all_input_nodes if n is not c.arguments["residual"]
            )
            post = posts.pop(source) if is_joined else None
            found.append(_Found(post, c, _norm_of(c, source if is_joined else c.node, order)))
    found += [_Found(c, None) for c in posts.values()]
    return sorted(found, key=lambda f: order[f.first]), missed


def heads(graph: Graph) -> list[tuple[Node, Node]]:
    """vLLM's collapse behind the last layer, once a model, and its residual: it keeps its kernel, and is listed."""
    found = ((node, head_of(node)) for node in graph.nodes if node.op == "call_function")
    return [(node, head[1]) for node, head in found if head is not None]


def _head(node: Node, residual: Node) -> MhcSite:
    n, hidden = ([d if isinstance(d, int) else 0 for d in shape(residual) or ()])[-2:]
    source = source_location(node)
    return MhcSite(module_path(node), "head", False, _LEFT, n, hidden, source=source)


def _same(node: Node) -> Node:
    """`node` above views that end where they began, or itself."""
    top = node
    while top.op == "call_function" and packet(top) in VIEW and isinstance(top.args[0], Node):
        top = top.args[0]
    own, other = shape(node), shape(top)
    alike = own is not None and other is not None and len(own) == len(other) and str(own) == str(other)
    return top if alike else node


def _is_early(node: Node, order: Mapping[Node, int], limit: Node) -> bool:
    """Whether `node` is there before `limit`, or can be moved there."""
    return order[node] < order[limit] or node.op in ("placeholder", "get_attr")


def _norm_of(c: Call, first: Node, order: Mapping[Node, int]) -> Node | None:
    """The `vllm_ir::rms_norm` that alone reads the row, if the operator has no norm of its own."""
    rows = c.output("row")
    readers = {u for r in rows for u in r.users}
    if c.arguments.get("norm_weight") is not None or len(rows) != 1 or len(readers) != 1:
        return None
    (norm,) = readers
    if name_of(norm) != "vllm_ir::rms_norm":
        return None
    named = arguments_of(norm)
    weight = named.get("weight")
    is_plain = named.get("x") is rows[0] and named.get("variance_size") is None
    if not is_plain or not isinstance(weight, Node) or not isinstance(named.get("epsilon"), float):
        return None
    row = value(rows[0])
    fits = are(shape(weight) or (), tuple(row.shape[-1:])) and value(norm).dtype == row.dtype
    return norm if fits and _is_early(weight, order, first) else None


def _rewrite(graph: Graph, site: _Found, how: tuple[Any, ...]) -> None:
    first = site.first
    needed = [*site.pre.node.all_input_nodes] if site.pre is not None else []
    for node in [*needed, *(site.norm.all_input_nodes if site.norm is not None else ())]:
        if node.op == "get_attr":
            first.prepend(node)
    with graph.inserting_before(first):
        made = _emit(graph, site, how)
        if site.pre is not None and site.pre.kind.column:
            made["post"] = call(graph, aten.unsqueeze.default, (made["post"], -1))
    _replace(graph, site, made)


def _emit(graph: Graph, site: _Found, how: tuple[Any, ...]) -> dict[str, Node]:
    """Our operator; its results by name."""
    ops, first = torch.ops.dsv4, site.first
    if site.post is None:
        assert site.pre is not None
        inputs = (site.pre.arguments["residual"], *_pre_arguments(graph, site), site.pre.dtype("row"), *how)
        return _items(graph, call(graph, ops.mhc_pre.default, inputs, like=first), ("row", "post", "comb"))
    of_post, dtype = _post_inputs(graph, site.post), site.post.dtype("residual")
    if site.pre is None:
        return {"residual": call(graph, ops.mhc_post.default, (*of_post, dtype, *how), like=first)}
    inputs = (*of_post, *_pre_arguments(graph, site), dtype, site.pre.dtype("row"), *how)
    whole = call(graph, ops.mhc_post_pre.default, inputs, like=first)
    return _items(graph, whole, ("residual", "row", "post", "comb"))


def _items(graph: Graph, whole: Node, names: Sequence[str]) -> dict[str, Node]:
    return {name: item(graph, whole, i) for i, name in enumerate(names)}


def _post_inputs(graph: Graph, post: Call) -> list[Node]:
    a = post.arguments
    weights = a["post"]
    if len(shape(weights) or ()) == len(shape(a["residual"]) or ()):
        weights = call(graph, aten.squeeze.dim, (weights, -1))
    return [a["x"], a["residual"], weights, a["comb"]]


def _pre_arguments(graph: Graph, site: _Found) -> tuple[Any, ...]:
    """`fn` to `norm_eps`, as `dsv4::mhc_pre` has them."""
    assert site.pre is not None
    a = site.pre.arguments
    weight, norm_eps = a.get("norm_weight"), a.get("norm_eps") or 0.0
    if site.norm is not None:
        of_norm = arguments_of(site.norm)
        weight, norm_eps = of_norm["weight"], of_norm["epsilon"]
    elif weight is not None:
        weight = cast(graph, weight, torch.bfloat16)  # as vLLM's operators read it
    iters = max(1, a["iters"])  # the first normalisation is always made
    eps = (a["rms_eps"], a["pre_eps"], a["sinkhorn_eps"])
    return (a["fn"], a["scale"], a["base"], weight, iters, *eps, a["post_mult"], norm_eps)


def _replace(graph: Graph, site: _Found, made: Mapping[str, Node]) -> None:
    """Hands the results on and takes vLLM's calls out of the graph."""
    if site.norm is not None:
        site.norm.replace_all_uses_with(made["row"])
        graph.erase_node(site.norm)
    calls: Sequence[Call] = list({c.node: c for c in (site.pre, site.post) if c is not None}.values())
    for c in calls:
        names = ("residual",) if c.kind.outputs is None else tuple(c.kind.outputs)
        for name in names:
            for node in c.output(name):
                node.replace_all_uses_with(made[name])
                if node is not c.node:
                    graph.erase_node(node)
        above = c.arguments["residual"]
        graph.erase_node(c.node)
        while not above.users and packet(above) in VIEW:  # what led from a post to its pre
            dead, above = above, above.args[0]
            graph.erase_node(dead)


def _report(site: _Found, family: str) -> MhcSite:
    n, hidden = (int(d) for d in (shape(site.head.arguments["residual"]) or ())[-2:])
    eps: dict[str, float] = {}
    iters = None
    if site.pre is not None:
        a = site.pre.arguments
        eps = {"rms": a["rms_eps"], "pre": a["pre_eps"], "sinkhorn": a["sinkhorn_eps"]}
        iters = max(1, a["iters"])
        if site.norm is not None or a.get("norm_weight") is not None:
            eps["norm"] = arguments_of(site.norm)["epsilon"] if site.norm is not None else a["norm_eps"]
    mixing = None if site.post is None else "float32"
    where, source = module_path(site.first), source_location(site.first)
    return MhcSite(where, site.form, "norm" in eps, family, n, hidden, iters, eps, mixing, source)
