"""Copies a piece out of its graph, as a module that Inductor compiles like any other."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

__all__ = ["HIDDEN_VIEWS", "Extract", "attribute", "extract", "is_size", "shares_memory", "symbol_of", "symbols_of"]

# Results that share memory with their input although the schema does not say so.
HIDDEN_VIEWS = {torch.ops.aten._unsafe_view.default, torch.ops.aten._reshape_alias.default}


@dataclass(frozen=True)
class Extract:
    """A piece as a module of its own.

    `inputs` and `outputs` are nodes of the whole graph, `symbols` further inputs behind them: sizes that shapes of the
    piece are made of. `writes` are the positions of inputs that it writes in place.
    """

    module: GraphModule
    inputs: tuple[Node, ...]
    symbols: tuple[sympy.Symbol, ...]
    outputs: tuple[Node, ...]
    writes: tuple[int, ...] = ()


def extract(gm: GraphModule, piece: Sequence[Node], sizes: Callable[[sympy.Symbol], torch.SymInt]) -> Extract:
    """Copies `piece` out of `gm`.

    Args:
        sizes: the size that stands for a symbol.
    """
    inner = set(piece)
    outputs = [
        node
        for node in piece
        if any(
            user not in inner and not is_size(user) and (user.op == "output" or _chain(node) is None)
            for user in node.users
        )
    ]
    piece = _with_views(piece)
    own = set(piece)
    read = dict.fromkeys(n for node in piece for n in node.all_input_nodes if n not in own)
    fixed = {n: n.meta["val"] for n in read if is_size(n) and isinstance(n.meta["val"], int)}
    inputs = [n for n in read if n.op != "get_attr" and n not in fixed]
    _check_writes(piece, inputs)
    symbols = _missing_symbols(piece, inputs)
    graph = Graph()
    copies: dict[Node, Any] = dict(fixed)
    for position, node in enumerate(inputs):
        copies[node] = graph.placeholder(f"input_{position}")
        copies[node].meta["val"] = _renewed(node.meta["val"])
    for position, symbol in enumerate(symbols):
        graph.placeholder(f"size_{position}").meta["val"] = _renewed(sizes(symbol))
    attributes: dict[str, Any] = {}
    for constant in (n for n in read if n.op == "get_attr"):
        name = f"constant_{len(attributes)}"
        attributes[name] = attribute(gm, constant.target)
        copies[constant] = graph.get_attr(name)
        copies[constant].meta.update(constant.meta)
    _copy(piece, graph, copies)
    result = graph.output(tuple(copies[node] for node in outputs))
    result.meta["user_visible_output_idxs"] = list(range(len(outputs)))  # the next piece relies on their strides
    module = GraphModule(attributes, graph)
    module.meta.update(gm.meta)
    written = {n.args[0] for n in piece if n.target is torch.ops.aten.copy_.default}
    writes = tuple(i for i, node in enumerate(inputs) if node in written)
    return Extract(module, tuple(inputs), tuple(symbols), tuple(outputs), writes)


def _renewed(value: Any) -> Any:
    """A size under the name that its symbol has now: Inductor declares a size that is an input by its first name, and
    reads it by the one with which it was found equal since."""
    if not isinstance(value, torch.SymInt) or value.node.expr is value.node._expr:
        return value
    return value.node.shape_env.create_symintnode(value.node.expr, hint=value.node.hint)


def _copy(piece: Sequence[Node], graph: Graph, copies: dict[Node, Any]) -> None:
    for node in piece:
        copies[node] = graph.create_node(
            "call_function",
            node.target,
            torch.fx.map_arg(node.args, copies.__getitem__),
            torch.fx.map_arg(node.kwargs, copies.__getitem__),
            name=f"node_{len(copies)}",
        )
        copies[node].meta.update(node.meta)


def _chain(node: Node) -> list[Node] | None:
    """The views from a graph input down to `node`, or None when it is no view of one."""
    chain: list[Node] = []
    while node.op == "call_function":
        if not (node.args and isinstance(node.args[0], Node)):
            return None
        if not (node.target is operator.getitem or node.target in HIDDEN_VIEWS or _is_view(node)):
            return None
        chain.insert(0, node)
        node = node.args[0]
    return chain if node.op == "placeholder" and chain else None


def _is_view(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and not schema.is_mutable and shares_memory(node, node)


def _with_views(piece: Sequence[Node]) -> list[Node]:
    """`piece`, with views of graph inputs that it takes from other pieces before it."""
    own = set(piece)
    views: dict[Node, None] = {}
    for node in piece:
        for needed in node.all_input_nodes:
            if needed not in own:
                views.update(dict.fromkeys(n for n in _chain(needed) or () if n not in own))
    return [*views, *piece]


def _check_writes(piece: Sequence[Node], inputs: Sequence[Node]) -> None:
    """Inductor takes its inputs for memory of their own.

    Raises:
        ValueError: the piece writes one that shares memory with another.
    """
    storages = {node: _storage(node) for node in inputs}
    for node in piece:
        target = node.args[0] if node.target is torch.ops.aten.copy_.default else None
        if isinstance(target, Node) and any(
            one is not target and storage is not None and storage == storages.get(target)
            for one, storage in storages.items()
        ):
            raise ValueError(f"{node.name} writes memory that another input of its piece has as well")


def _storage(node: Node) -> int | None:
    value = node.meta.get("val")
    try:
        return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
    except NotImplementedError:
        return None


def _missing_symbols(piece: Sequence[Node], inputs: Sequence[Node]) -> list[sympy.Symbol]:
    """Symbols of the piece's shapes, in order, that are not inputs of their own."""
    given = {symbol_of(node.meta["val"]) for node in inputs}
    seen: dict[sympy.Symbol, None] = {}
    for node in (*inputs, *piece):
        for leaf in tree_leaves(node.meta.get("val")):
            seen.update(dict.fromkeys(symbols_of(leaf)))
    return [symbol for symbol in seen if symbol not in given]


def shares_memory(user: Node, source: Node) -> bool:
    """Whether the result of `user` may be a view of `source`."""
    if user.target in HIDDEN_VIEWS:
        return True
    schema = getattr(user.target, "_schema", None)
    if schema is None:
        return True  # a function of Python, such as getitem: assume the worst
    return any(result.alias_info is not None for result in schema.returns)


def is_size(node: Node) -> bool:
    """Whether `node` computes a size."""
    return node.op == "call_function" and isinstance(node.meta.get("val"), int | torch.SymInt)


def symbol_of(value: Any) -> sympy.Symbol | None:
    """The symbol that a size is, if it is one and not made of some."""
    expression = value.node.expr if isinstance(value, torch.SymInt) else None
    return expression if isinstance(expression, sympy.Symbol) else None


def symbols_of(value: Any) -> list[sympy.Symbol]:
    """Symbols in a size or in the shape and strides of a tensor, in order of appearance."""
    if isinstance(value, torch.Tensor):
        parts: tuple[Any, ...] = (*value.shape, *value.stride(), value.storage_offset())
    else:
        parts = (value,)
    found: dict[sympy.Symbol, None] = {}
    for part in parts:
        if isinstance(part, torch.SymInt | torch.SymFloat | torch.SymBool):
            found.update(dict.fromkeys(sorted(part.node.expr.free_symbols, key=str)))
    return list(found)


def attribute(module: GraphModule, target: str) -> Any:
    """What the name of a `get_attr` node stands for."""
    value: Any = module
    for name in target.split("."):
        value = getattr(value, name)
    return value
