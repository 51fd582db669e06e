"""Cuts a functional graph into pieces that are compiled, and maybe captured, one by one.

    placeholders │ embedding, rope │ mhc_pre, projections ║ attention over the cache ║ mhc_post_pre, experts │ ...
                                     └─ key a                └─ key c                  └─ key b

Where operators cannot be captured (`passes/capturability.py`) the graph is cut (║). Nodes are dealt out to levels,
which take turns in being captured or not: a node goes to the first level of its kind behind all that it needs, so what
does not depend on a cut is done before it, wherever the source has it. What needs no activation goes to its first
reader.

Within a level, a cut (│) before each boundary between sublayers (an mHC operator; in a model without mHC the first node
of each layer, which is an index in the module path) makes pieces that are alike (`passes/keys.py`).

Results of one operator stay in its piece, and so does the write of a graph input with the value that is written, where
nobody needs the old one later. Views of a graph input do not cross: each piece makes its own, because Inductor has to
see what a write changes. Sizes belong to no piece; whoever needs one is given it.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from dsv4_compile.passes.extraction import attribute, is_size, shares_memory, symbols_of
from dsv4_compile.passes.sites import module_path

__all__ = ["Cut", "cut", "has_effect", "obstacle"]

MIN_NODES = 4
"""Of a piece: less is not worth a call of its own."""
MIN_CAPTURED = 3
"""Operators between two cuts: less is not worth a launch of a graph and the copies into it."""
_BOUNDARIES = ("dsv4::mhc_pre", "dsv4::mhc_post_pre", "dsv4::mhc_post", "dsv4::mhc_head")


@dataclass(frozen=True)
class Cut:
    """A piece: its nodes in order, and why it cannot be captured (empty when it can)."""

    nodes: tuple[Node, ...]
    apart: str = ""


def obstacle(gm: GraphModule) -> str | None:
    """Why `gm` cannot be cut, or None."""
    for node in gm.graph.nodes:
        if node.op == "get_attr" and not isinstance(attribute(gm, node.target), torch.Tensor):
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
            if any(_is_unbacked(symbol) for symbol in symbols_of(leaf)):
                return f"a size of {node.name} depends on data"
            if not all(symbol.is_integer for symbol in symbols_of(leaf)):
                return f"{node.name} depends on a number that is not an integer"
            if isinstance(leaf, torch.SymBool):
                return f"{node.name} is a condition on sizes"
    return None


def _is_unbacked(symbol: object) -> bool:
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    return bool(symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)))


def cut(graph: Graph, static: Collection[Node] = (), apart: Mapping[Node, str] | None = None) -> list[Cut]:
    """The pieces, in an order in which they can run; placeholders, constants, sizes and the output belong to none.

    Args:
        static: placeholders of parameters.
        apart: nodes that cannot be captured, with the reason of each.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function" and not is_size(node)]
    reasons = dict(apart or {})
    levels = _Levels(nodes, reasons, static).settled()
    ordered = sorted(nodes, key=levels.__getitem__)  # stable: within a level the order of the graph
    starts = {node for node in nodes if _qualified(node) in _BOUNDARIES} or set(_layer_starts(nodes))
    left = Counter(levels.values())
    pieces: list[list[Node]] = []
    for i, node in enumerate(ordered):
        new_level = i == 0 or levels[node] != levels[ordered[i - 1]]
        if new_level or (node in starts and len(pieces[-1]) >= MIN_NODES and left[levels[node]] >= MIN_NODES):
            pieces.append([])
        pieces[-1].append(node)
        left[levels[node]] -= 1
    return [Cut(tuple(piece), _reason(piece, reasons)) for piece in _together(ordered, pieces, levels) if piece]


def _reason(piece: Sequence[Node], reasons: Mapping[Node, str]) -> str:
    found = list(dict.fromkeys(reasons[node] for node in piece if node in reasons))
    return found[0] + (f", and {len(found) - 1} more" if len(found) > 1 else "") if found else ""


# --------------------------------------------------------------------------------------------------------------- levels


class _Levels:
    """Deals nodes out to levels: even ones can be captured, odd ones cannot."""

    def __init__(self, nodes: Sequence[Node], reasons: dict[Node, str], static: Collection[Node]):
        self.nodes, self.reasons, self.static = nodes, reasons, static
        self.needs = {node: _needs(node) for node in nodes}
        self.in_order: set[Node] = set()
        """What has effects, and what reads memory that is written: it cannot be done at any time."""
        self._order_effects()
        for node in nodes:
            parent = _parent(node)
            if parent in reasons:
                reasons.setdefault(node, reasons[parent])

    def _order_effects(self) -> None:
        """What writes or draws random numbers keeps its order, and old values are read before they are written."""
        position = {node: i for i, node in enumerate(self.nodes)}
        last = None
        for node in self.nodes:
            if not has_effect(node):
                continue
            if last is not None:
                self.needs[node].append(last)
            last = node
            self.in_order.add(node)
            for alias in {alias for target in _written(node) for alias in _aliases(_root(target))}:
                for user in alias.users:
                    if user in position and user is not node:
                        self.in_order.add(user)
                        before = position[user] < position[node]
                        self.needs[node if before else user].append(user if before else node)

    def settled(self) -> dict[Node, int]:
        """The level of each node; what stands alone between two cuts joins them, with a reason."""
        while True:
            levels = self._sink(self._earliest())
            slivers = self._slivers(levels)
            if not slivers:
                return levels
            for node in slivers:
                self.reasons[node] = f"fewer than {MIN_CAPTURED} operators stand between two cuts here"

    def _earliest(self) -> dict[Node, int]:
        levels: dict[Node, int] = {}
        for node in self.nodes:
            own = node in self.reasons
            needed = (levels[n] + ((n in self.reasons) != own) for n in self.needs[node] if n in levels)
            levels[node] = max((int(own), *needed))
        return levels

    def _sink(self, levels: dict[Node, int]) -> dict[Node, int]:
        """What needs parameters only waits for its first reader, or all layers' casts would be made up front."""
        active: set[Node] = set()
        for node in self.nodes:
            if node in self.in_order or any(n in active or self._is_activation(n) for n in node.all_input_nodes):
                active.add(node)
        for node in reversed(self.nodes):
            if node in active or any(user not in levels for user in node.users) or not node.users:
                continue
            own = node in self.reasons
            latest = min(levels[user] - ((user in self.reasons) != own) for user in node.users)
            levels[node] = max(levels[node], latest)
        return levels

    def _is_activation(self, node: Node) -> bool:
        return node.op == "placeholder" and node not in self.static and isinstance(node.meta.get("val"), torch.Tensor)

    def _slivers(self, levels: dict[Node, int]) -> list[Node]:
        if not self.reasons:
            return []
        work = Counter(level for node, level in levels.items() if not _is_free(node))
        small = {level for level in set(levels.values()) if level % 2 == 0 and work[level] < MIN_CAPTURED}
        return [node for node in self.nodes if levels[node] in small]


def _needs(node: Node) -> list[Node]:
    return [n for n in node.all_input_nodes if n.op == "call_function" and not is_size(n)]


def _parent(node: Node) -> Node | None:
    """The operator with several results of which `node` is one."""
    source = node.args[0] if node.target is operator.getitem and node.args else None
    return source if isinstance(source, Node) and source.op == "call_function" else None


def has_effect(node: Node) -> bool:
    """Whether `node` writes, or draws random numbers: it keeps its place among those that do."""
    schema = getattr(node.target, "_schema", None)
    tags = getattr(node.target, "tags", ())
    mutable = schema is not None and (schema.is_mutable or not schema.returns)
    return mutable or torch.Tag.nondeterministic_seeded in tags or "inductor_seed" in str(node.target)


def _written(node: Node) -> list[Node]:
    """The arguments that `node` writes."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    given = {argument.name: value for argument, value in zip(schema.arguments, node.args, strict=False)}
    given.update(node.kwargs)
    names = [argument.name for argument in schema.arguments if argument.is_write]
    return [n for name in names for n in tree_leaves(given.get(name)) if isinstance(n, Node)]


def _is_free(node: Node) -> bool:
    """Whether it costs no launch."""
    return node.target is operator.getitem or (shares_memory(node, node) and not has_effect(node))


def _root(node: Node) -> Node:
    while node.op == "call_function" and shares_memory(node, node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


# --------------------------------------------------------------------------------------------------------------- pieces


def _together(nodes: Sequence[Node], pieces: Sequence[Sequence[Node]], levels: Mapping[Node, int]) -> list[list[Node]]:
    """Results go to their operator, writes to the value that is written."""
    number = {node: i for i, piece in enumerate(pieces) for node in piece}
    for node in nodes:
        parent = _parent(node)
        if parent is not None and parent in number:
            number[node] = number[parent]
    for node in nodes:
        earlier = _piece_of_write(node, number)
        if earlier is not None and levels[pieces[earlier][0]] == levels[node]:
            number[node] = earlier
    result: list[list[Node]] = [[] for _ in pieces]
    for node in nodes:
        result[number[node]].append(node)
    return result


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
    return made if all(user.op != "output" and number.get(user, made) <= made for user in readers) else None


def _aliases(node: Node) -> list[Node]:
    """`node` and what shares memory with it."""
    found = [node]
    for one in found:
        found += [user for user in one.users if shares_memory(user, one) and user not in found]
    return found


def _qualified(node: Node) -> str:
    target = node.target
    return target._schema.name if isinstance(target, torch._ops.OpOverload) else ""
