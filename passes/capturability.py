"""Which operators of a functional graph a CUDA graph may hold, and why the others may not.

A CUDA graph is recorded for one token count and replayed with new contents at the same addresses. So an operator can be
in one when every size that it sees is fixed or follows the token count, when it runs on the device without asking the
host, and when what it writes is the graph's own or stays where it is.

The token count is what the rows of products with parameters are: the symbols in `[rows, K] x [K, features]`. Other
symbols (the length of a cache, above all) change from call to call.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from dsv4_compile.passes.extraction import symbols_of
from dsv4_compile.passes.region import operator_of
from dsv4_compile.passes.sites import source_line

__all__ = ["Tokens", "met", "named", "obstacles", "tokens_of"]

aten = torch.ops.aten
# Products and the position of their activation among the arguments.
_PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1, aten._scaled_mm.default: 0, aten.embedding.default: 1}
_COLLECTIVES = ("_c10d_functional", "c10d_functional", "c10d", "symm_mem")
# Operators of others that ask the host inside, which no tag says: experts of transformers that are not bfloat16.
_WAITING = ("transformers::grouped_mm_fallback",)


@dataclass(frozen=True)
class Tokens:
    """`symbols` that the token count is made of, and the count."""

    symbols: frozenset[sympy.Symbol] = frozenset()
    count: int | sympy.Expr | None = None


def tokens_of(graph: Graph, static: Collection[Node]) -> Tokens:
    """The token count of a graph.

    Args:
        static: placeholders of parameters and whatever else keeps its address.
    """
    symbols: set[sympy.Symbol] = set()
    count: int | sympy.Expr | None = None
    for node in graph.nodes:
        activation = _activation(node, static)
        if activation is not None:
            rows = _rows(activation)
            symbols.update(getattr(rows, "free_symbols", ()))
            count = rows if count is None else count
    return Tokens(frozenset(symbols), _first_size(graph, static) if count is None else count)


def _first_size(graph: Graph, static: Collection[Node]) -> int | sympy.Expr | None:
    """Of a graph without products: the first size of the first input that is no parameter."""
    for node in graph.nodes:
        value = node.meta.get("val") if node.op == "placeholder" and node not in static else None
        if isinstance(value, torch.Tensor) and value.dim():
            size = value.shape[0]
            return size.node.expr if isinstance(size, torch.SymInt) else int(size)
    return None


def _activation(node: Node, static: Collection[Node]) -> Node | None:
    """What a product of `node` multiplies with a parameter."""
    if (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace == "dsv4"
        and "linear" in str(node.target)
    ):
        position = 0
    elif node.target in _PRODUCTS:
        position = _PRODUCTS[node.target]
    else:
        return None
    activation = node.args[position] if len(node.args) > position else None
    if not isinstance(activation, Node) or not isinstance(activation.meta.get("val"), torch.Tensor):
        return None
    others = [n for n in node.all_input_nodes if n is not activation]
    return activation if any(_origin(n) in static for n in others) else None


def _origin(node: Node) -> Node:
    """What `node` is a view or a cast of."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


def _rows(activation: Node) -> int | sympy.Expr:
    shape = activation.meta["val"].shape
    dims = shape if activation.meta["val"].dtype in (torch.int64, torch.int32) else shape[:-1]
    rows: int | sympy.Expr = 1
    for dim in dims:
        rows = rows * (dim.node.expr if isinstance(dim, torch.SymInt) else int(dim))
    return rows


def obstacles(graph: Graph, static: Collection[Node], tokens: Tokens, device: torch.device) -> dict[Node, str]:
    """For each operator that no CUDA graph may hold the reason, with the line of the user's code.

    Args:
        static: placeholders whose address does not change.
        tokens: as `tokens_of` gives them.
        device: the one to capture on.
    """
    found = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        reason = (
            _asks_the_host(node)
            or _of_the_process(node)
            or _elsewhere(node, device)
            or _writes(node, static)
            or _follows(node, tokens)
        )
        if reason is not None:
            found[node] = _sentence(node, reason)
    return found


def named(graph: Graph, split_ops: Collection[str]) -> dict[Node, str]:
    """The operators that somebody wants left out, as `obstacles` has them.

    Args:
        split_ops: qualified names, with or without an overload (`aten::sum`, `aten::sum.dim_IntList`).
    """
    calls = (node for node in graph.nodes if not _names(node).isdisjoint(split_ops))
    return {node: _sentence(node, "it is one of split_ops") for node in calls}


def met(graph: Graph, split_ops: Sequence[str]) -> list[str]:
    """Those of `split_ops` that the graph has an operator for."""
    found = {name for node in graph.nodes for name in _names(node)} if split_ops else set()
    return [name for name in split_ops if name in found]


def _sentence(node: Node, reason: str) -> str:
    line = source_line(node)
    return f"{_name(node)}: {reason}" + (f" ({line})" if line else "")


def _names(node: Node) -> set[str]:
    """The qualified name of a call's operator, without its overload and with it."""
    operator = operator_of(node)
    if node.op != "call_function" or not isinstance(operator, torch._ops.OpOverload):
        return set()
    return {_name(node), f"{_name(node)}.{operator._overloadname}"}


def _name(node: Node) -> str:
    operator = operator_of(node)
    return str(operator._schema.name) if isinstance(operator, torch._ops.OpOverload) else node.name


def _asks_the_host(node: Node) -> str | None:
    # An index that is a mask makes a size that depends on data; graphs with such sizes are not cut at all.
    if torch.Tag.data_dependent_output in getattr(operator_of(node), "tags", ()):
        return "the host waits for its result"
    if _name(node) in _WAITING and any(value.device.type != "cpu" for value in _tensors(node)):
        return "the host waits for one of its inputs"
    return None


def _of_the_process(node: Node) -> str | None:
    operator = operator_of(node)
    if torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ()) or "inductor_seed" in str(operator):
        return "it draws random numbers, whose state is not the graph's own"
    if getattr(operator, "namespace", "") in _COLLECTIVES:
        return "it is a collective, in which other processes take part"
    return None


def _tensors(node: Node) -> list[torch.Tensor]:
    """The results and the inputs of `node`."""
    values = (value for one in (node, *node.all_input_nodes) for value in tree_leaves(one.meta.get("val")))
    return [value for value in values if isinstance(value, torch.Tensor)]


def _elsewhere(node: Node, device: torch.device) -> str | None:
    return next((f"it has a tensor on {value.device}" for value in _tensors(node) if value.device != device), None)


def _writes(node: Node, static: Collection[Node]) -> str | None:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return None
    target = node.args[0] if node.target is aten.copy_.default else None
    if isinstance(target, Node) and target in static:
        return None
    return "it writes memory that the graph does not own and that may move"


def _follows(node: Node, tokens: Tokens) -> str | None:
    for one in (node, *node.all_input_nodes):
        for value in tree_leaves(one.meta.get("val")):
            strange = [symbol for symbol in symbols_of(value) if symbol not in tokens.symbols]
            if strange:
                size = tuple(value.shape) if isinstance(value, torch.Tensor) else value
                return f"a size follows something other than the token count ({strange[0]} in {size})"
    return None
