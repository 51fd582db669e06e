"""Cuts a functional graph into pieces, and says which of them are the same.

    placeholders │ embedding, rope │ mhc_pre, attention │ mhc_post_pre, experts │ mhc_post_pre, attention │ ... │ head
                                     └─ key a            └─ key b               └─ key a

A piece is a run of nodes, so that the order of the graph stays. A cut is made before each boundary between sublayers
(an mHC operator); in a model without mHC before the first node of each layer, which is an index in the module path.
What crosses a cut are tensors and sizes. Results of one operator stay in its piece, and so does the write of a graph
input with the value that is written, where nobody needs the old one later. Views of a graph input do not cross: each
piece makes its own, because Inductor has to see what a write changes.

Two pieces with one key are the same program: nodes, constants, shapes and layouts agree, whatever layer they are of.
Symbols of sizes are counted in the order in which they appear.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from dsv4_compile.passes.sites import module_path

__all__ = ["Extract", "Key", "cut", "extract", "key_of", "obstacle", "symbol_of"]

MIN_NODES = 4  # of a piece: less is not worth a call of its own
_BOUNDARIES = ("dsv4::mhc_pre", "dsv4::mhc_post_pre", "dsv4::mhc_post", "dsv4::mhc_head")
# Results that share memory with their input although the schema does not say so.
_HIDDEN_VIEWS = {torch.ops.aten._unsafe_view.default, torch.ops.aten._reshape_alias.default}


def obstacle(gm: GraphModule) -> str | None:
    """Why `gm` cannot be cut, or None."""
    for node in gm.graph.nodes:
        if node.op == "get_attr" and not isinstance(_attribute(gm, node.target), torch.Tensor):
            return f"{node.target} is a graph within the graph"
        if node.op in ("call_module", "call_method"):
            return f"{node.name} calls a module or a method"
        if node.op == "call_function" and "val" not in node.meta:
            return f"the shape of {node.name} is not known"
        if node.op == "call_function" and "effects" in str(node.target):
            return f"{node.name} is ordered by tokens"
        if node.op == "call_function" and "triton_kernel_wrapper" in str(node.target):
            return f"{node.name} is a Triton kernel of the user, known by a number only"
        for leaf in tree_leaves(node.meta.get("val")):
            if any(_is_unbacked(symbol) for symbol in _symbols(leaf)):
                return f"a size of {node.name} depends on data"
            if not all(symbol.is_integer for symbol in _symbols(leaf)):
                return f"{node.name} depends on a number that is not an integer"
    return None


def cut(graph: Graph) -> list[list[Node]]:
    """The nodes of each piece, in order; placeholders and the output belong to none."""
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    starts = {node for node in nodes if _qualified(node) in _BOUNDARIES} or set(_layer_starts(nodes))
    pieces: list[list[Node]] = [[]]
    for i, node in enumerate(nodes):
        if node in starts and len(pieces[-1]) >= MIN_NODES and len(nodes) - i >= MIN_NODES:
            pieces.append([])
        pieces[-1].append(node)
    number = {node: i for i, piece in enumerate(pieces) for node in piece}
    for node in nodes:
        if node.target is operator.getitem and isinstance(node.args[0], Node) and node.args[0] in number:
            number[node] = number[node.args[0]]
    for node in nodes:
        if (earlier := _piece_of_write(node, number)) is not None:
            number[node] = earlier
    result: list[list[Node]] = [[] for _ in pieces]
    for node in nodes:
        result[number[node]].append(node)
    return [piece for piece in result if piece]


def _layer_starts(nodes: Sequence[Node]) -> Iterator[Node]:
    """The first node of each layer: the module path has an index that none before it had."""
    highest = -1
    for node in nodes:
        if found := re.search(r"(?:^|\.)(\d+)(?:\.|$)", module_path(node)):
            index = int(found.group(1))
            if index > highest:
                highest = index
                yield node


def _piece_of_write(node: Node, number: dict[Node, int]) -> int | None:
    """The piece that makes the value which `node` writes into a graph input, if nobody reads the old one after it."""
    if node.target is not torch.ops.aten.copy_.default or node.users:
        return None
    target, value = node.args[:2]
    if not (isinstance(target, Node) and target.op == "placeholder" and isinstance(value, Node) and value in number):
        return None
    made = number[value]
    readers = [user for alias in _aliases(target) for user in alias.users if user is not node]
    return made if all(user.op != "output" and number[user] <= made for user in readers) else None


def _aliases(node: Node) -> list[Node]:
    """`node` and what shares memory with it."""
    found = [node]
    for one in found:
        found += [user for user in one.users if _shares(user, one) and user not in found]
    return found


def _shares(user: Node, source: Node) -> bool:
    if user.target in _HIDDEN_VIEWS:
        return True
    schema = getattr(user.target, "_schema", None)
    if schema is None:
        return True  # a function of Python, such as getitem: assume the worst
    return any(result.alias_info is not None for result in schema.returns)


# ----------------------------------------------------------------------------------------------------------- extraction


@dataclass(frozen=True)
class Extract:
    """A piece as a module of its own.

    `inputs` and `outputs` are nodes of the whole graph, `symbols` further inputs behind them: sizes that shapes of the
    piece are made of.
    """

    module: GraphModule
    inputs: tuple[Node, ...]
    symbols: tuple[sympy.Symbol, ...]
    outputs: tuple[Node, ...]


def extract(gm: GraphModule, piece: Sequence[Node], sizes: Callable[[sympy.Symbol], torch.SymInt]) -> Extract:
    """Copies `piece` out of `gm`.

    Args:
        sizes: the size that stands for a symbol.
    """
    inner = set(piece)
    outputs = [
        node
        for node in piece
        if any(user not in inner and (user.op == "output" or _chain(node) is None) for user in node.users)
    ]
    piece = _with_views(piece)
    own = set(piece)
    inputs = [*dict.fromkeys(n for node in piece for n in node.all_input_nodes if n not in own and n.op != "get_attr")]
    _check_writes(piece, inputs)
    symbols = _missing_symbols(piece, inputs)
    graph = Graph()
    copies: dict[Node, Node] = {}
    for position, node in enumerate(inputs):
        copies[node] = graph.placeholder(f"input_{position}")
        copies[node].meta["val"] = node.meta["val"]
    for position, symbol in enumerate(symbols):
        graph.placeholder(f"size_{position}").meta["val"] = sizes(symbol)
    attributes: dict[str, Any] = {}
    for node in piece:
        for needed in node.all_input_nodes:
            if needed.op == "get_attr" and needed not in copies:
                name = f"constant_{len(attributes)}"
                attributes[name] = _attribute(gm, needed.target)
                copies[needed] = graph.get_attr(name)
                copies[needed].meta.update(needed.meta)
        copies[node] = graph.create_node(
            "call_function",
            node.target,
            torch.fx.map_arg(node.args, copies.__getitem__),
            torch.fx.map_arg(node.kwargs, copies.__getitem__),
            name=f"node_{len(copies)}",
        )
        copies[node].meta.update(node.meta)
    result = graph.output(tuple(copies[node] for node in outputs))
    result.meta["user_visible_output_idxs"] = list(range(len(outputs)))  # the next piece relies on their strides
    module = GraphModule(attributes, graph)
    module.meta.update(gm.meta)
    return Extract(module, tuple(inputs), tuple(symbols), tuple(outputs))


def _chain(node: Node) -> list[Node] | None:
    """The views from a graph input down to `node`, or None when it is no view of one."""
    chain: list[Node] = []
    while node.op == "call_function":
        if not (node.args and isinstance(node.args[0], Node)):
            return None
        if not (node.target is operator.getitem or node.target in _HIDDEN_VIEWS or _is_view(node)):
            return None
        chain.insert(0, node)
        node = node.args[0]
    return chain if node.op == "placeholder" and chain else None


def _is_view(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and not schema.is_mutable and _shares(node, node)


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
            seen.update(dict.fromkeys(_symbols(leaf)))
    return [symbol for symbol in seen if symbol not in given]


def symbol_of(value: Any) -> sympy.Symbol | None:
    """The symbol that a size is, if it is one and not made of some."""
    expression = value.node.expr if isinstance(value, torch.SymInt) else None
    return expression if isinstance(expression, sympy.Symbol) else None


def _symbols(value: Any) -> list[sympy.Symbol]:
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


def _is_unbacked(symbol: sympy.Symbol) -> bool:
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    return symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT))


# ----------------------------------------------------------------------------------------------------------------- keys


@dataclass
class Key:
    """What makes a piece the program it is. `symbols` are those of its sizes, in order of appearance."""

    text: str
    symbols: tuple[sympy.Symbol, ...]
    hash: str = field(init=False)

    def __post_init__(self) -> None:
        self.hash = hashlib.sha256(self.text.encode()).hexdigest()


def key_of(module: GraphModule, static: Sequence[bool]) -> Key:
    """The key of an extracted piece.

    Args:
        static: for each input whether it is a parameter, whose address does not change.
    """
    return _Describer(module).key(static)


class _Describer:
    """Writes a piece as text in which only what matters has a name."""

    def __init__(self, module: GraphModule):
        self.module = module
        self.numbers: dict[Node, int] = {}
        self.symbols: dict[sympy.Symbol, sympy.Symbol] = {}

    def key(self, static: Sequence[bool]) -> Key:
        lines = []
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                fixed = static[len(self.numbers)] if len(self.numbers) < len(static) else False
                lines.append(f"in {self.describe(node.meta['val'])} {fixed}")
            elif node.op == "get_attr":
                lines.append(f"constant {_content(_attribute(self.module, node.target))}")
            elif node.op == "call_function":
                arguments = f"{self.describe(node.args)} {self.describe(node.kwargs)}"
                eager = self.describe(node.meta.get("eager_input_vals"))
                lines.append(f"{_name(node.target)} {arguments} {self.describe(node.meta['val'])} {eager}")
            else:
                lines.append(f"out {self.describe(node.args)}")
            self.numbers[node] = len(self.numbers)
        return Key("\n".join(lines), tuple(self.symbols))

    def describe(self, value: Any) -> str:
        """An argument or the value of a node."""
        if isinstance(value, Node):
            return f"%{self.numbers[value]}"
        if isinstance(value, torch.Tensor):
            sizes = [self.size(one) for one in (*value.shape, -1, *value.stride(), value.storage_offset())]
            return f"{value.dtype} {value.device} {value.layout} {' '.join(sizes)}"
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self.describe, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{name}: {self.describe(one)}' for name, one in sorted(value.items()))}}}"
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return self.size(value)
        return f"{type(value).__name__} {value!r}"

    def size(self, size: Any) -> str:
        if not isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
            return str(size)
        return str(renamed(size.node.expr, self._canonical(size.node.expr)))

    def _canonical(self, expression: sympy.Basic) -> dict[sympy.Symbol, sympy.Symbol]:
        for symbol in sorted(expression.free_symbols, key=str):
            if symbol not in self.symbols:
                self.symbols[symbol] = canonical(len(self.symbols))
        return self.symbols


def canonical(number: int) -> sympy.Symbol:
    """The symbol that stands for the one which appears at place `number` in a key."""
    return sympy.Symbol(f"size{number}", integer=True)


def renamed(expression: sympy.Basic, names: dict[sympy.Symbol, sympy.Symbol]) -> sympy.Basic:
    """`expression` in other symbols."""
    return expression.xreplace(names)


_objects = itertools.count()


def _content(value: torch.Tensor) -> str:
    """What a constant is, by its content; one that has none at hand is like no other."""
    if type(value) is not torch.Tensor or value.is_meta or value.layout is not torch.strided:
        return f"object {next(_objects)}"
    with unset_fake_temporarily():
        digest = hashlib.sha256(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return f"{value.dtype} {value.device} {tuple(value.shape)} {value.stride()} {digest.hexdigest()}"


def _name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


def _qualified(node: Node) -> str:
    target = node.target
    return target._schema.name if isinstance(target, torch._ops.OpOverload) else ""


def _attribute(module: GraphModule, target: str) -> Any:
    value: Any = module
    for name in target.split("."):
        value = getattr(value, name)
    return value
