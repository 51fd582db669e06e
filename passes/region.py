"""Regions: a cut-out part of a functional ATen graph that can be run on its own, in float64, at a few tokens.

A region is closed over operations whose result is an analytic function of the inputs (`ANALYTIC`): if two such
functions agree to rounding on random inputs they agree everywhere, so running the region is a proof by evaluation.
A clamp, a comparison or an unknown operator ends the region; what lies behind it is not looked at.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

from dsv4_compile.passes.axes import TokenAxes, Unsupported
from dsv4_compile.passes.sites import source_line

__all__ = [
    "Region",
    "are",
    "count",
    "evaluate",
    "grow",
    "has_leaf_factor",
    "is_floating",
    "is_functionalised",
    "is_leaf",
    "is_moved",
    "leaf_of",
    "operator_of",
    "shape",
    "strip",
    "turns",
    "undisturbed",
    "value",
]

aten, prims = torch.ops.aten, torch.ops.prims


def packets(names: str, namespace: Any = aten) -> set[Any]:
    """The operators of these names that this torch has."""
    return {getattr(namespace, n) for n in names.split() if hasattr(namespace, n)}


CAST = packets("_to_copy") | packets("convert_element_type", prims)
RESHAPE = packets("view reshape _unsafe_view")
VIEW = RESHAPE | packets("unsqueeze squeeze alias detach lift_fresh_copy")
LAYOUT = packets("permute transpose t expand select slice split split_with_sizes unbind cat stack clone")
POINTWISE = packets(
    "add sub rsub mul div neg reciprocal rsqrt sqrt exp exp2 log sigmoid tanh pow square addcmul addcdiv scalar_tensor"
)
REDUCTION = packets("sum mean amax _softmax _log_softmax logsumexp linalg_vector_norm var")
CUT = packets("select slice split split_with_sizes unbind")
PRODUCT = packets("mm bmm addmm baddbmm mv dot")
PASSIVE = VIEW | CAST | LAYOUT  # numbers are moved and cast, not computed
ANALYTIC = PASSIVE | POINTWISE | REDUCTION | PRODUCT

_WIDE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_REGION_LIMIT = 4000


def packet(node: Node) -> Any:
    """The operator of `node` without its overload, `operator.getitem`, or None."""
    if node.op != "call_function":
        return None
    return getattr(node.target, "overloadpacket", node.target)


def is_functionalised(node: Node) -> bool:
    """Whether it is the wrapper in which a functional graph has an operator that writes its arguments."""
    return str(node.target).startswith("auto_functionalized") and bool(node.args)


def operator_of(node: Node) -> Any:
    """What is called, of a wrapper the operator within."""
    return node.args[0] if is_functionalised(node) else node.target


def value(node: Node) -> Any:
    """The fake value of `node` (post-grad and AOT graphs keep it in `meta["val"]`)."""
    return node.meta.get("val")


def shape(node: Node) -> tuple[int | torch.SymInt, ...] | None:
    """Shape of a tensor node, else None. A size that the graph's guards have fixed is an int."""
    val = value(node)
    return tuple(map(_settled, val.shape)) if isinstance(val, torch.Tensor) else None


def are(dims: Sequence[int | torch.SymInt], wanted: Sequence[int]) -> bool:
    """Whether sizes are known to be these. To compare a symbol with `==` would add a guard and a recompilation."""
    return len(dims) == len(wanted) and all(isinstance(d, int) and d == w for d, w in zip(dims, wanted, strict=True))


def count(dims: Sequence[int | torch.SymInt]) -> int | None:
    """Elements of a tensor with these sizes, or None when one is a symbol."""
    return math.prod(d for d in dims if isinstance(d, int)) if all(isinstance(d, int) for d in dims) else None


def _is_unsettled(node: Node) -> bool:
    val = value(node)
    return isinstance(val, torch.SymInt | torch.SymFloat) and val.node.maybe_as_int() is None


def _settled(size: int | torch.SymInt) -> int | torch.SymInt:
    if isinstance(size, int):
        return size
    known = size.node.maybe_as_int()
    return size if known is None else int(known)


def is_floating(node: Node) -> bool:
    """Whether `node` is a floating-point tensor in one of the plain dtypes."""
    val = value(node)
    return isinstance(val, torch.Tensor) and val.dtype in _WIDE


def is_leaf(node: Node) -> bool:
    """A graph input or constant with a static shape: a parameter, as far as the graph can tell."""
    dims = shape(node)
    return node.op in ("placeholder", "get_attr") and dims is not None and all(isinstance(d, int) for d in dims)


def is_cast_up(node: Node) -> bool:
    """A cast that loses nothing."""
    if packet(node) not in CAST or not is_floating(node) or not is_floating(node.args[0]):
        return False
    source, target = value(node.args[0]).dtype, value(node).dtype
    return torch.promote_types(source, target) == target


def is_moved(node: Node) -> bool:
    """Whether the numbers of `node` are those of its inputs, moved or cast."""
    return packet(node) in PASSIVE or packet(node) is operator.getitem


def strip(node: Node) -> Node:
    """Walks up through views and lossless casts to where the value was made."""
    while node.op == "call_function" and (packet(node) in VIEW or is_cast_up(node)):
        parent = node.args[0]
        if not isinstance(parent, Node) or not is_floating(parent):
            break
        node = parent
    return node


def turns(node: Node) -> bool:
    """Whether `node` is the transpose of a matrix (and not a permute that changes nothing)."""
    op = packet(node)
    if op is aten.permute:
        return [d % 2 for d in node.args[1]] == [1, 0]
    return op is aten.t or (op is aten.transpose and (node.args[1] - node.args[2]) % 2 == 1)


def leaf_of(node: Node, apart_from: Collection[Node] = ()) -> Node | None:
    """The leaf behind a chain of one-input operations; None when there is none or the chain meets `apart_from`."""
    while node not in apart_from and node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node if is_leaf(node) and node not in apart_from else None


def has_leaf_factor(node: Node, apart_from: Collection[Node]) -> bool:
    """Whether an operand of a product is a weight (none of `apart_from`): there the next layer begins."""
    return any(leaf_of(p, apart_from) is not None for p in node.all_input_nodes)


@dataclass
class Region:
    """Nodes in topological order; `seeds` are given values, everything else is computed.

    `edges` says where the region ended: the first node outside it that reads one of its values, and why.
    """

    seeds: tuple[Node, ...]
    nodes: list[Node] = field(default_factory=list)
    leaves: list[Node] = field(default_factory=list)
    edges: list[tuple[Node, str]] = field(default_factory=list)
    index: dict[Node, int] = field(default_factory=dict)

    def add(self, node: Node) -> None:
        self.index[node] = len(self.index)
        self.nodes.append(node)

    def constants(self) -> list[float]:
        """Every number written in the region, each once."""
        found: dict[float, None] = {}
        for node in self.nodes:
            for arg in (*node.args, *node.kwargs.values()):
                if isinstance(arg, int | float) and not isinstance(arg, bool):
                    found[float(arg)] = None
        return list(found)

    def stopped_by(self) -> str:
        """A clause for the report on what ended the region first, empty when nothing noteworthy did."""
        for node, why in self.edges:
            if why:
                line = source_line(node)
                return f"the region ends at {node.target} ({why}{', ' + line if line else ''})"
        return ""

    def digest(self) -> str:
        """Equal for regions with equal structure, shapes, dtypes and constants, whatever their names and weights."""
        return hashlib.sha256(self._text().encode()).hexdigest()

    def _text(self) -> str:
        symbols: dict[str, str] = {}

        def size(d: int | torch.SymInt) -> str:
            if isinstance(d, int):
                return str(d)
            return "s" + symbols.setdefault(str(d.node.expr), str(len(symbols)))

        def describe(node: Node) -> str:
            vals = value(node)
            vals = vals if isinstance(vals, list | tuple) else (vals,)
            return ";".join(
                f"{v.dtype}{[size(_settled(d)) for d in v.shape]}" if isinstance(v, torch.Tensor) else str(type(v))
                for v in vals
            )

        def argument(arg: Any) -> str:
            if isinstance(arg, Node):
                return f"%{self.index[arg]}" if arg in self.index else f"sym {describe(arg)}"
            if isinstance(arg, list | tuple):
                return "[" + ",".join(argument(a) for a in arg) + "]"
            return size(arg) if isinstance(arg, torch.SymInt) else repr(arg)

        lines = [f"seed {describe(n)}" for n in self.seeds]
        for node in self.nodes:
            if node in self.seeds:
                continue
            args = ", ".join([*map(argument, node.args), *(f"{k}={argument(v)}" for k, v in node.kwargs.items())])
            lines.append(f"{node.op} {node.target if node.op == 'call_function' else ''}({args}) {describe(node)}")
        return "\n".join(lines)


def grow(seeds: Sequence[Node], order: dict[Node, int], allow: Callable[[Node], bool] | None = None) -> Region:
    """Everything that can be computed from `seeds`, leaves and constants by analytic operations.

    Args:
        seeds: nodes whose value is given (activations, and the roots of value classes).
        order: position of every node of the graph.
        allow: extra condition on products, so that a region does not run on into the next layer.
    """
    region = Region(tuple(seeds))
    for seed in seeds:
        region.add(seed)
    seen = {user for seed in seeds for user in seed.users}
    pending = [(order[user], user) for user in seen]
    heapq.heapify(pending)
    while pending and len(region.nodes) < _REGION_LIMIT:
        _, node = heapq.heappop(pending)
        if node in region.index:
            continue
        why = _refusal(node, region, allow)
        if why is not None:
            region.edges.append((node, why))
            continue
        for parent in node.all_input_nodes:
            _include_leaf_chain(parent, region)
        region.add(node)
        for user in node.users:
            if user not in seen:
                seen.add(user)
                heapq.heappush(pending, (order[user], user))
    return region


def _refusal(node: Node, region: Region, allow: Callable[[Node], bool] | None) -> str | None:
    if node.op == "output":
        return ""
    why = _unfit(node)
    if why is not None:
        return why
    for parent in node.all_input_nodes:
        if parent in region.index or isinstance(value(parent), torch.SymInt) or _is_leaf_chain(parent):
            continue
        return ""
    if packet(node) in PRODUCT and allow is not None and not allow(node):
        return ""
    return None


def _unfit(node: Node) -> str | None:
    """Why the operation of `node` is not analytic, whether it works on activations or on parameters."""
    op = packet(node)
    if op is operator.getitem:
        return None
    if op not in ANALYTIC:
        return "not an operation the arithmetic of mHC uses"
    if node.target is aten.view.dtype:
        return "a view of the bits as another kind of number"
    if isinstance(value(node), torch.Tensor) and not is_floating(node):
        return "a cast to another kind of number"
    if "rounding_mode" in node.kwargs:
        return "a division that rounds"
    if op is aten.amax and not all(packet(u) is aten.sub and u.args == (node.args[0], node) for u in node.users):
        return "a maximum that is not just subtracted from its own operand"
    if op is aten.linalg_vector_norm and node.args[1:2] not in ((), (2,), (2.0,)):
        return "another norm than the Euclidean one"
    if op not in (aten.expand, *RESHAPE) and any(_is_unsettled(p) for p in node.all_input_nodes):
        return "a number that follows the token count"
    return None


def _is_leaf_chain(node: Node, depth: int = 8) -> bool:
    if is_leaf(node):
        return is_floating(node)
    if depth == 0 or node.op != "call_function" or packet(node) in PRODUCT or _unfit(node) is not None:
        return False
    return all(_is_leaf_chain(p, depth - 1) for p in node.all_input_nodes)


def _include_leaf_chain(node: Node, region: Region) -> None:
    if node in region.index or isinstance(value(node), torch.SymInt):
        return
    for parent in node.all_input_nodes:
        _include_leaf_chain(parent, region)
    region.add(node)
    if node.op in ("placeholder", "get_attr"):
        region.leaves.append(node)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Real tensors on the CPU, whatever mode the compilation runs in: fake tensors, autocast, a default device."""
    with (
        _disable_current_modes(),
        torch._C._DisableAutocast(),
        torch.no_grad(),
        torch._C.DisableTorchFunctionSubclass(),
    ):
        yield


def evaluate(region: Region, axes: TokenAxes, given: dict[Node, torch.Tensor]) -> dict[Node, Any]:
    """Runs the region in float64 on `given` (seeds and leaves). Nodes that cannot be run have no value.

    Returns:
        The value of every node that could be computed, at the small sizes of `axes`.
    """
    env: dict[Node, Any] = dict(given)
    for node in region.nodes:
        if node in env:
            continue
        if any(p not in env and not isinstance(value(p), torch.SymInt) for p in node.all_input_nodes):
            continue
        try:
            env[node] = _run(node, env, axes)
        except (Unsupported, RuntimeError, IndexError, TypeError, ValueError):
            continue
    return env


def _run(node: Node, env: dict[Node, Any], axes: TokenAxes) -> Any:
    op = packet(node)
    args = map_arg(node.args, lambda n: env[n] if n in env else axes.integer(value(n)))
    if op is operator.getitem:
        return args[0][args[1]]
    if op in CAST:
        return args[0]
    if op in (aten.expand, *RESHAPE):
        source, target = axes.real(shape(node.args[0]) or ()), axes.real(shape(node) or ())
        small = tuple(args[0].shape)
        if op is aten.expand:
            return args[0].expand(axes.expanded(small, source, target))
        return args[0].reshape(axes.reshaped(small, source, target))
    if op is aten.scalar_tensor:
        return torch.tensor(args[0], dtype=torch.float64, device="cpu")
    _check_axes(node, op, args, axes)
    kwargs = {k: v for k, v in node.kwargs.items() if k not in ("dtype", "memory_format", "layout", "device")}
    if op in (aten._softmax, aten._log_softmax):
        args = (*args[:2], False)
    return node.target(*args, **kwargs)


def _check_axes(node: Node, op: Any, args: Sequence[Any], axes: TokenAxes) -> None:
    """Refuses an operation that works along a token axis: then a few rows would not stand for all of them."""
    if op in REDUCTION:
        dims = node.kwargs.get("dim", args[1] if len(args) > 1 and op is not aten.linalg_vector_norm else None)
        if op is aten.linalg_vector_norm and len(args) > 2:
            dims = args[2]
        _refuse_token_axes(node.args[0], args[0], dims, axes)
    elif op in CUT:
        position = {aten.select: 1, aten.slice: 1, aten.unbind: 1}.get(op, 2)
        dim = node.kwargs.get("dim", args[position] if len(args) > position else 0)
        _refuse_token_axes(node.args[0], args[0], dim, axes)
    elif op is aten.cat:
        dim = node.kwargs.get("dim", args[1] if len(args) > 1 else 0)
        for source, small in zip(node.args[0], args[0], strict=True):
            _refuse_token_axes(source, small, dim, axes)
    elif op in PRODUCT:
        first = 1 if op in (aten.addmm, aten.baddbmm) else 0
        _refuse_token_axes(node.args[first], args[first], -1, axes)


def _refuse_token_axes(source: Node, small: torch.Tensor, dims: Any, axes: TokenAxes) -> None:
    dims_of_source = shape(source) or ()
    real = axes.real(dims_of_source)
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        dims = range(len(real))
    for d in dims if isinstance(dims, Iterable) else (dims,):
        if small.shape[d] != real[d] or not isinstance(dims_of_source[d], int):
            raise Unsupported("an operation along the token axes")
