"""Quantised products of other people's operators beside the linears of a group.

        x ──┬──► mm(W_0)                                   x ──► dsv4.accompanied_linear(x, ...) ──► slices, items
            ├──► mm(W_1)                             ──►         current stream: grouped_linear(x, [W_0, W_1])
            └──► quantise ──► hf.fp8_linear(V_0, s)              side stream:    hf.fp8_linear(x8, V_0, s)

Nothing is known of such an operator but its schema. It may join when that says that it neither writes nor returns an
argument, when it reads the activation, or what is made from it, and a parameter of one byte a number (float8, int8,
uint8), and when its results are tensors of the same device. What is of torch's core set (`mul`, `embedding`, `bmm`) is
arithmetic that Inductor compiles, and no such operator. Names play no part.

Such operators may have workspaces that all their calls share. So all of them run on one and the same side stream, in
their order, and nothing else than products of cuBLAS and of ours runs meanwhile.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from dsv4_compile.kernels.linear import calls
from dsv4_compile.passes import hoisting
from dsv4_compile.passes.emission import call, item
from dsv4_compile.passes.hoisting import MOST_STEPS, Joining
from dsv4_compile.passes.region import is_functionalised, leaf_of, operator_of, packet, value
from dsv4_compile.passes.sites import module_path
from dsv4_compile.passes.verify import confinement

__all__ = ["MOST", "STREAM", "OpaqueProduct", "beside", "emit", "left", "parse", "put", "wanted_apart"]

STREAM = 1
"""The side stream of all such operators, in every group: one that keeps a workspace never meets itself."""

MOST = 8
"""Operators beside a group, at most: their inputs and results are all there at the same time."""

_FAR = 8 * MOST_STEPS
"""Nodes that are looked through for an activation that is too far away, so that the report has it."""


@dataclass(frozen=True)
class OpaqueProduct:
    """A call of an operator; `weight` is the largest of its parameters of one byte a number, as the graph input."""

    node: Node
    weight: Node

    @property
    def bias(self) -> None:
        return None

    @property
    def name(self) -> str:
        """Qualified name of the operator."""
        return str(self.node.target._schema.name)

    @property
    def operands(self) -> tuple[Node, ...]:
        """All nodes that it reads now: what makes them may have been replaced since it was found."""
        return tuple(self.node.all_input_nodes)

    @property
    def results(self) -> list[torch.Tensor]:
        """Its results, as fake values."""
        return tree_leaves(value(self.node))

    @property
    def features(self) -> int:
        """Width of its first result, 0 if that is no number."""
        last = (0, *self.results[0].shape)[-1]
        return last if isinstance(last, int) else 0

    @property
    def bytes(self) -> int:
        """Bytes of all parameters that it reads."""
        leaves = {leaf for operand in self.operands if (leaf := leaf_of(operand)) is not None}
        return sum(value(leaf).numel() * value(leaf).element_size() for leaf in leaves)

    @property
    def owner(self) -> str:
        """Path of the module that owns the call."""
        return module_path(self.node).rpartition(".")[0]


# ----------------------------------------------------------------------------------------------------------- finding


def beside(
    graph: Graph,
    linears: Mapping[Node, Sequence[Node]],
    low: Mapping[Node, Sequence[Joining]],
    apart: Collection[str] = (),
) -> tuple[dict[Node, list[OpaqueProduct]], list[tuple[Node, Node, str]]]:
    """The operators beside each activation; and those that are left alone, as (activation, node, reason).

    Args:
        linears: for each activation the products that read it itself.
        low: the float8 products that have joined them.
        apart: qualified names of operators that somebody wants to see in the graph.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    joined = {product.node for products in low.values() for product in products}
    found: dict[Node, list[OpaqueProduct]] = {}
    refused = []
    for node in graph.nodes:
        if node in joined or _weight(node) is None:
            continue
        x = hoisting.activation(node.all_input_nodes, linears, _is_product)
        far = hoisting.activation(node.all_input_nodes, linears, _is_product, _FAR) if x is None else None
        if far is not None:
            refused.append(
                (far, node, left(node, f"more than {MOST_STEPS} operators lie between it and the activation"))
            )
        if x is None:
            continue
        product = parse(node, apart)
        reason = product if isinstance(product, str) else None
        if isinstance(product, OpaqueProduct):
            reason = hoisting.obstacle([*low.get(x, ()), *found.get(x, ()), product], x, linears[x], order)
            if reason is None and len(found.get(x, ())) == MOST:
                reason = f"{MOST} others run beside the group already"
            if reason is None:
                found.setdefault(x, []).append(product)
        if reason is not None:
            refused.append((x, node, left(node, reason)))
    return found, refused


def left(node: Node, reason: str) -> str:
    """What the report says of a call that is left alone."""
    called = operator_of(node)
    name = getattr(getattr(called, "_schema", None), "name", str(called)).removeprefix("aten::")
    return f"a quantised product ({name}) keeps its own kernel: {reason}"


def wanted_apart() -> list[str]:
    """The operators that Inductor is told to partition a graph at, by which vLLM keeps some out of CUDA graphs."""
    from torch._inductor import config

    return [str(name) for name in getattr(config, "custom_should_partition_ops", ())]


def parse(node: Node, apart: Collection[str] = ()) -> OpaqueProduct | str:
    """The call, or why it must stay where it is, as the end of a sentence."""
    weight = _weight(node)
    if weight is None:
        return "none of its parameters has one byte a number"
    target: Any = node.target
    if is_functionalised(node):
        return "the operator writes its arguments"
    if not isinstance(target, torch._ops.OpOverload):
        return f"{target} is no operator with a schema of its own"
    name = target._schema.name
    if not {name, f"{name}.{target._overloadname}"}.isdisjoint(apart):
        return "it is one of the operators that a graph is to be cut at"
    return _refusal(node, target) or OpaqueProduct(node, weight)


def _refusal(node: Node, target: torch._ops.OpOverload) -> str:
    """Why the schema or the values of a call forbid that it runs on another stream; empty when they do not."""
    if target._schema.is_mutable:
        return "the operator writes its arguments"
    if any(made.alias_info is not None for made in target._schema.returns):
        return "the operator returns a view of an argument"
    if torch.Tag.maybe_aliasing_or_mutating in target.tags:
        return "the operator may write its arguments"
    if reason := confinement(target):
        return f"the operator {reason}"
    if _is_lowered(target):
        return "Inductor has code of its own for it"
    made = value(node)
    results = [made] if isinstance(made, torch.Tensor) else made
    if not isinstance(results, list | tuple) or not results or not all(isinstance(t, torch.Tensor) for t in results):
        return "it returns something else than tensors"
    if results is made and not all(user.target is operator.getitem for user in node.users):
        return "its results are read as a whole"
    near = [leaf for one in (node, *node.all_input_nodes) for leaf in tree_leaves(value(one))]
    if torch.Tag.dynamic_output_shape in target.tags or any(map(_depends_on_data, near)):
        return "a size depends on data"
    devices = {leaf.device for leaf in near if isinstance(leaf, torch.Tensor)}
    if len(devices) > 1:
        return f"it has tensors on {' and '.join(sorted(map(str, devices)))}"
    try:
        calls.write(node.args, node.kwargs, _Places().of)
    except ValueError as error:
        return str(error)
    return ""


def _depends_on_data(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | torch.SymInt) and bool(free_unbacked_symbols(leaf))


def _is_product(node: Node) -> bool:
    return packet(node) in hoisting.PRODUCTS or _weight(node) is not None


def _weight(node: Node) -> Node | None:
    """The largest parameter of one byte a number that an operator of somebody else reads; None if it has none."""
    if node.op != "call_function" or not _is_foreign(node.target):
        return None
    leaves = [leaf for one in node.all_input_nodes if _is_small(one) and (leaf := leaf_of(one)) is not None]
    weights = [leaf for leaf in leaves if _is_small(leaf) and value(leaf).dim() > 1]
    return max(weights, key=lambda leaf: value(leaf).numel(), default=None)


def _is_foreign(target: Any) -> bool:
    """Whether Inductor has no code of its own for an operator and it is not ours."""
    if not isinstance(target, torch._ops.OpOverload):
        return isinstance(target, torch._ops.HigherOrderOperator)
    if target.namespace == "aten":
        return not target._schema.is_mutable and not {torch.Tag.core, torch.Tag.pointwise} & {*target.tags}
    return target.namespace not in ("prims", "dsv4")


def _is_lowered(target: torch._ops.OpOverload) -> bool:
    """Whether Inductor does something else with it than to call it. Products with scales it calls, as a rule."""
    from torch._inductor.lowering import lowerings

    if target.namespace == "aten" and target._schema.name.startswith("aten::_scaled_mm"):
        return False
    handler: Any = lowerings.get(target)
    return handler is not None and not getattr(handler, "_is_fallback_handler", False)


def _is_small(node: Node) -> bool:
    val = value(node)
    return isinstance(val, torch.Tensor) and val.dtype.itemsize == 1 and val.dtype != torch.bool


# ---------------------------------------------------------------------------------------------------------- rewriting


class _Places:
    """The tensors and sizes that calls read, each once, and the strides that the tensors are to have."""

    def __init__(self) -> None:
        self.tensors: list[Node] = []
        self.wanted: list[torch.Tensor] = []
        self.sizes: list[Node] = []
        self._eager: Mapping[Node, Any] = {}

    def of(self, argument: Any) -> dict[str, int] | None:
        """Where an argument is; None for a constant.

        Raises:
            ValueError: it is no constant, and neither a tensor nor a size.
        """
        if not isinstance(argument, Node):
            return None
        val = value(argument)
        if isinstance(val, torch.Tensor):
            return {"tensor": self._tensor(argument, self._eager.get(argument, val))}
        if not isinstance(val, torch.SymInt | int):
            raise ValueError(f"its argument {argument.name} is neither a tensor nor a size")
        if argument not in self.sizes:
            self.sizes.append(argument)
        return {"size": self.sizes.index(argument)}

    def write(self, node: Node) -> str:
        """The arguments of a call that is in the graph."""
        self._eager = _eager_values(node)
        text = calls.write(node.args, node.kwargs, self.of)
        self._eager = {}
        return text

    def _tensor(self, node: Node, wanted: torch.Tensor) -> int:
        for i, known in enumerate(self.tensors):
            if known is node and str(self.wanted[i].stride()) == str(wanted.stride()):
                return i
        self.tensors.append(node)
        self.wanted.append(wanted)
        return len(self.tensors) - 1


def _eager_values(node: Node) -> dict[Node, Any]:
    """What a call's tensors were when it was traced. Inductor gives an operator the strides that these have."""
    given = node.meta.get("eager_input_vals")
    now, then = tree_leaves((node.args, node.kwargs)), tree_leaves(given)
    if given is None or len(now) != len(then):
        return {}
    return {a: b for a, b in zip(now, then, strict=True) if isinstance(a, Node) and isinstance(b, torch.Tensor)}


def emit(
    graph: Graph,
    target: torch._ops.OpOverload,
    args: tuple[Any, ...],
    count: int,
    products: Sequence[OpaqueProduct],
    max_tokens: int,
    like: Node,
) -> Node:
    """A call of `target` with the operators beside it, at the insertion point; the results of these are the last ones.

    Args:
        target: the operator for the linears, with the activation as its first argument.
        count: how many results it has.
        like: whose origin it gets.
    """
    if not products:
        return call(graph, target, args, like=like)
    places = _Places()
    places.of(args[0])
    texts = [calls.write(args, {}, places.of), *(places.write(product.node) for product in products)]
    names = [calls.name_of(one) for one in (target, *(product.node.target for product in products))]
    counts = [count, *(len(product.results) for product in products)]
    x, *tensors = places.tensors
    given = (x, tensors, places.sizes, names, texts, counts, STREAM, max_tokens)
    made = call(graph, torch.ops.dsv4.accompanied_linear.default, given, like=like)
    # Where this is absent Inductor takes whatever strides it likes for what a pass has put into the graph.
    eager = [value(size) for size in places.sizes]
    made.meta["eager_input_vals"] = ((places.wanted[0], places.wanted[1:], eager, *given[3:]), {})
    return made


def put(graph: Graph, made: Node, products: Sequence[OpaqueProduct]) -> dict[Node, Node]:
    """Lets the last results of `made` stand for those of `products`; returns what stands for what."""
    moved: dict[Node, Node] = {}
    position = len(value(made)) - sum(len(product.results) for product in products)
    with graph.inserting_after(made):
        for product in products:
            whole = isinstance(value(product.node), torch.Tensor)
            for i in range(len(product.results)):
                users = [product.node] if whole else [u for u in product.node.users if u.args[1] == i]
                moved |= {user: item(graph, made, position + i) for user in users}
            position += len(product.results)
    for old, new in moved.items():
        new.meta.update({k: v for k, v in old.meta.items() if k not in ("val", "eager_input_vals")})
        old.replace_all_uses_with(new)
        graph.erase_node(old)
    for product in products:
        if product.node not in moved:
            graph.erase_node(product.node)
    return moved
