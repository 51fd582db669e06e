"""Moving what a product reads in front of the group that it joins.

        x ──┬──► mm(W_0)                            x ──┬──► quantise ──┐
            └──► quantise ──► product(V_0)    ──►       └──► group(x, [W_0], ..., V_0)

A product that is no linear of its activation itself may read something that is made from it. How does not matter: the
nodes between are moved in front of the group as they are, if they are such that they can be.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.fx import Graph, Node

from dsv4_compile.passes.pieces import has_effect
from dsv4_compile.passes.region import aten, value
from dsv4_compile.passes.verify import confinement

__all__ = ["MOST_STEPS", "PRODUCTS", "Joining", "activation", "alike", "hoist", "lost", "may_write", "obstacle"]

MOST_STEPS = 64
"""Nodes between an activation and what a product of the group reads, at most."""
PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten._scaled_mm}


class Joining(Protocol):
    """A product that is to join a group, and all that it reads now."""

    @property
    def node(self) -> Node: ...

    @property
    def operands(self) -> tuple[Node, ...]: ...


def activation(
    starts: Iterable[Node], known: Collection[Node], is_product: Callable[[Node], bool], steps: int = MOST_STEPS
) -> Node | None:
    """The nearest of `known` that `starts` are made from, without a product and fewer than `steps` nodes between."""
    rest = deque(starts)
    seen = set(rest)
    while rest and len(seen) < steps:
        node = rest.popleft()
        if node in known:
            return node
        if is_product(node):
            continue
        for parent in node.all_input_nodes:
            if parent not in seen:
                seen.add(parent)
                rest.append(parent)
    return None


def obstacle(products: Sequence[Joining], x: Node, linears: Sequence[Node], order: Mapping[Node, int]) -> str | None:
    """Why `products` cannot run where the first of them and of the linears of `x` is, or None."""
    between = _between((operand for product in products for operand in product.operands), order[x], order)
    members = {*linears, *(product.node for product in products)}
    if members & between:
        return "its input depends on another product of the activation"
    first = min(map(order.__getitem__, members))
    late = [node for node in between if order[node] > first]
    last = max(order[node] for node in (*late, *(product.node for product in products)))
    for node, position in order.items():
        if first < position < last and may_write(node):
            return f"{node.name} writes between the first of them and what it reads"
    for node in late:
        if reason := _immovable(node):
            return f"its input is made by {node.name}, which {reason}"
    return None


def lost(graph: Graph, products: Sequence[Joining], linears: Sequence[Node]) -> str | None:
    """Why what `products` read cannot be made before all of them, now that other groups are rewritten; or None."""
    if not products:
        return None
    order = {node: i for i, node in enumerate(graph.nodes)}
    members = {*linears, *(product.node for product in products)}
    operands = [operand for product in products for operand in product.operands]
    # The first of them counts, too.
    if members & _between(operands, min(map(order.__getitem__, members)) - 1, order):
        return "its input depends on a group that depends on this one"
    return None


def hoist(graph: Graph, first: Node, products: Sequence[Joining]) -> None:
    """Moves what `products` read in front of `first`."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    needed = _between([operand for product in products for operand in product.operands], order[first], order)
    for node in sorted(needed, key=order.__getitem__):
        if node.op != "placeholder":
            first.prepend(node)


def alike(nodes: Iterable[Node], x: Node) -> dict[Node, Node]:
    """For each of `nodes` the first that computes the same from `x`, by the same operators."""
    order = {node: i for i, node in enumerate(x.graph.nodes)}
    first: dict[Hashable, Node] = {}
    known: dict[Node, Node] = {}

    def same(node: Node) -> Node:
        if node not in known:
            known[node] = node
            varies = node.op != "call_function" or _immovable(node) or has_effect(node)
            if order[node] > order[x] and not varies and not any(map(may_write, node.users)):
                key = node.target, _frozen(node.args, same), _frozen(node.kwargs, same)
                known[node] = first.setdefault(key, node)
        return known[node]

    return {node: same(node) for node in nodes}


def _frozen(argument: Any, same: Callable[[Node], Node]) -> Hashable:
    """An argument of a call as something to compare: equal numbers of two types are not the same."""
    if isinstance(argument, Node):
        return same(argument)
    if isinstance(argument, Mapping):
        return tuple((name, _frozen(one, same)) for name, one in sorted(argument.items()))
    if isinstance(argument, list | tuple):
        return tuple(_frozen(one, same) for one in argument)
    return type(argument), repr(argument)


def _between(nodes: Iterable[Node], since: int, order: Mapping[Node, int]) -> set[Node]:
    """`nodes` and all that they are made from, as far as it comes after position `since`."""
    rest, found = list(nodes), set()
    while rest:
        node = rest.pop()
        if node not in found and order[node] > since:
            found.add(node)
            rest += node.all_input_nodes
    return found


def may_write(node: Node) -> bool:
    """Whether it writes, as far as anybody knows."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target._schema.is_mutable or torch.Tag.maybe_aliasing_or_mutating in target.tags


def _immovable(node: Node) -> str:
    """Why a node must stay where it is; empty when it need not."""
    if node.op in ("placeholder", "get_attr"):
        return ""
    if may_write(node):
        return "writes"
    if isinstance(value(node), torch.SymInt | int):
        return ""  # arithmetic of sizes, which are functions of Python in a graph
    plain = isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
    return confinement(node.target) if plain else "is no operator of torch's kind"
