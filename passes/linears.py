"""The linears that read one activation: what the projections pass works on.

        x ──► view ─► mm(W_0)
        ├──► view ─► mm(W_1)         a group of x
        └──► cast ─► mm(W_2)

A linear is a product with a weight that is a graph input (or a view or cast of one). Members of a group are found by
the activation at the top of their views, permutes and casts; they cannot depend on each other, because all they read
is that activation and weights. Names play no part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from dsv4_compile.passes import float8, hoisting, opaque
from dsv4_compile.passes.float8 import ScaledProduct
from dsv4_compile.passes.opaque import OpaqueProduct
from dsv4_compile.passes.region import (
    CAST,
    VIEW,
    are,
    aten,
    is_cast_up,
    is_floating,
    is_leaf,
    leaf_of,
    packet,
    shape,
    turns,
    value,
)
from dsv4_compile.passes.sites import Missed, module_path, source_location
from dsv4_compile.passes.storages import Storages
from dsv4_compile.passes.vllm_calls import own_product

__all__ = ["Group", "Linear", "find", "left_alone", "operands"]


@dataclass(frozen=True)
class Linear:
    """One product. `chain` are the nodes from the shared activation down to it, nearest to the activation first."""

    node: Node
    weight: Node
    bias: Node | None
    chain: tuple[Node, ...]

    @property
    def features(self) -> int:
        return int((shape(self.node) or (0,))[-1])

    @property
    def wide(self) -> bool:
        """Whether the result is float32 although the weight is not: `torch.mm(..., out_dtype=torch.float32)`."""
        return value(self.node).dtype != value(self.weight).dtype

    @property
    def owner(self) -> str:
        """Path of the module that owns the linear."""
        return module_path(self.node).rpartition(".")[0]


@dataclass(frozen=True)
class Group:
    """Linears of one activation, in program order, and float8 products of what it was quantised to.

    `side` are the quantised products of other people's operators, which run beside the others on a side stream, and
    `refused` what the report is to say of those that cannot, where others could.
    """

    x: Node
    linears: tuple[Linear, ...]
    low: tuple[ScaledProduct, ...] = ()
    side: tuple[OpaqueProduct, ...] = ()
    refused: tuple[Missed, ...] = ()

    @property
    def columns(self) -> int:
        """Width of the activation."""
        return int((shape(self.linears[0].weight) or (1,))[-1])

    @property
    def products(self) -> list[Linear | ScaledProduct]:
        """Those that ours compute, the float8 products last."""
        return [*self.linears, *self.low]

    @property
    def members(self) -> list[Linear | ScaledProduct | OpaqueProduct]:
        """All of them, those of `side` last."""
        return [*self.products, *self.side]

    @property
    def site(self) -> str:
        """The deepest module that contains all products of ours; operators are called in all kinds of places."""
        parts = [member.owner.split(".") for member in self.products]
        common = []
        for names in zip(*parts, strict=False):
            if len(set(names)) > 1:
                break
            common.append(names[0])
        return ".".join(common)


def find(graph: Graph, apart: Collection[str] = ()) -> tuple[list[Group], list[Missed]]:
    """Groups of two or more layers with one activation, in program order, and lookalikes with their reasons.

    Each has a linear; the others may be float8 products, and other people's operators but those named in `apart`.
    """
    by_activation: dict[Node, list[Linear]] = defaultdict(list)
    storages, read, late = Storages(), set[Hashable](), set[Hashable]()
    # `late`: storages that a linear has read before something that may have written them
    refused: dict[Node, list[tuple[Node, str]]] = defaultdict(list)
    for node in graph.nodes:
        access = storages.visit(node)
        if hoisting.may_write(node):
            late |= access.writes & read
        parsed = _parse(node)
        if isinstance(parsed, Linear):
            top = parsed.chain[0] if parsed.chain else None
            x = top.args[0] if top is not None else operands(node)[1]
            if storages.of(x) & late:
                refused[x].append((node, "its activation may have been written since the first of them"))
            else:
                read |= storages.of(x)
                by_activation[x].append(parsed)
        elif parsed is not None:
            x, why = parsed
            refused[x].append((node, why))
    readers = {x: [linear.node for linear in linears] for x, linears in by_activation.items()}
    low, alone = float8.beside(graph, readers)
    side, unfit = opaque.beside(graph, readers, low, apart)
    groups = [Group(x, tuple(v), tuple(low.get(x, ())), tuple(side.get(x, ()))) for x, v in by_activation.items()]
    groups = [group for group in groups if len(group.members) > 1]
    taken = {product.node for group in groups for product in group.side}
    alone += [
        (node, why)
        for x, nodes in refused.items()
        if len(nodes) + len(by_activation.get(x, ())) > 1
        for node, why in nodes
    ]
    known = dict(alone)
    missed = [left_alone(node, why) for node, why in known.items() if node not in taken]
    others: dict[Node, list[Missed]] = defaultdict(list)
    for x, node, why in unfit:
        if node not in known:
            others[x].append(left_alone(node, why))
    return [replace(group, refused=tuple(others[group.x])) for group in groups], missed


def left_alone(node: Node, why: str) -> Missed:
    """What the report says of a product that is in no group."""
    return Missed("projections", module_path(node), why, source_location(node))


_READ = {aten.mm.default, aten.addmm.default, *([aten.mm.dtype] if hasattr(aten.mm, "dtype") else [])}


def operands(node: Node) -> tuple[Node | None, Node, Node]:
    """(bias, activation, weight) of a product."""
    if packet(node) is aten.addmm:
        return node.args[0], node.args[1], node.args[2]
    return None, node.args[0], node.args[1]


def _parse(node: Node) -> Linear | tuple[Node, str] | None:
    """A linear, or (activation, why it is left alone), or None when it is no linear at all."""
    op = packet(node)
    if (opaque := own_product(node)) is not None:
        name, activation = opaque
        return _trace(activation, None)[0], f"a product of vLLM's ({name}) keeps its own kernel and its packed weight"
    if op not in (aten.mm, aten.addmm) or not is_floating(node):
        return None
    if node.target not in _READ:
        return _trace(operands(node)[1], None)[0], f"{node.target} is a product of another kind"
    bias, activation, weight = operands(node)
    inner = (shape(weight) or (0,))[0]
    if not isinstance(inner, int):
        return None  # a product of activations, whose sizes are not to be asked for: that would fix them
    x, chain = _trace(activation, inner)
    if leaf_of(weight) is None:
        return (x, "its weight is computed, not a parameter") if _from_parameters(weight) else None
    if op is aten.addmm and (node.kwargs or not is_leaf(bias) or len(shape(bias) or ()) != 1):
        return x, "its bias is scaled or computed"
    outputs = (shape(weight) or (0,))[-1]
    if op is aten.addmm and not (isinstance(outputs, int) and are(shape(bias) or (), (outputs,))):
        return x, "its bias is one number for all outputs"
    if (
        any(packet(n) in CAST and not is_cast_up(n) for n in chain[:-1])
        or value(activation).dtype != value(weight).dtype
    ):
        return x, "its input is rounded on the way"
    if value(node).dtype not in (value(weight).dtype, torch.float32):
        return x, f"its result is {value(node).dtype}"
    return Linear(node, _stored(weight), bias, tuple(chain))


def _from_parameters(node: Node, depth: int = 8) -> bool:
    """Whether `node` is made of graph inputs of static shape only (a weight that is dequantised, say)."""
    if node.op in ("placeholder", "get_attr"):
        return all(isinstance(d, int) for d in shape(node) or (None,))
    return depth > 0 and all(_from_parameters(p, depth - 1) for p in node.all_input_nodes)


def _stored(weight: Node) -> Node:
    """The weight as `[out_features, K]`: the node under a final transpose, or the operand itself."""
    return weight.args[0] if turns(weight) else weight


def _trace(node: Node, inner: int | None) -> tuple[Node, list[Node]]:
    """The activation at the top of views, permutes and casts that keep the last axis (of size `inner`)."""
    chain: list[Node] = []
    while node.op == "call_function" and node.args and isinstance(node.args[0], Node):
        op, parent = packet(node), node.args[0]
        ends = [(shape(one) or ())[-1:] for one in (parent, node)]
        keeps = inner is None or all(are(end, (inner,)) for end in ends)
        keeps_last = op is aten.permute and node.args[1][-1] in (len(node.args[1]) - 1, -1)
        if op in CAST and not is_cast_up(node) and len(node.users) > 1:
            break  # several read the rounded value: that is the activation
        if not (keeps and is_floating(parent) and (op in VIEW | CAST or keeps_last or op is aten.clone)):
            break
        chain.insert(0, node)
        node = parent
    return node, chain
