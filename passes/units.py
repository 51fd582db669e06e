"""A piece as a graph of operators with their costs: each operator with the views of its results is a unit.

What several units cost as one program depends on which of them Inductor writes into one kernel. It is guessed so:
kernels are made of neighbours that are fusable, and have reductions of one kind (the same elements to the same
results), as a norm or a softmax has. What is between two units of a kernel moves no bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from dsv4_compile.passes.extraction import is_size
from dsv4_compile.passes.pieces import has_effect
from dsv4_compile.passes.roofline import (
    LAUNCH,
    Cost,
    Reduction,
    bytes_of,
    is_free,
    is_fusable,
    product_us,
    reduction_of,
)
from dsv4_compile.passes.storages import Storages
from dsv4_compile.passes.verify import branch_obstacle, is_main_only

__all__ = ["Unit", "Units", "bits"]


@dataclass
class Unit:
    """An operator with the views of its results, and what is known of it. Sets of units are the bits of an int."""

    nodes: list[Node]
    position: int
    barred: bool
    """Whether it may be on no branch."""
    main_only: bool
    needs: int = 0
    readers: int = 0
    leaves: bool = False
    reads: list[tuple[int, int]] = field(default_factory=list)
    """The bytes of each input, and the position of the unit that makes it, -1 where it comes from outside."""
    writes: int = 0
    fusable: bool = False
    reduces: Reduction | None = None
    products: float = 0.0


class Units:
    """The units of a graph in order, `outside` the sets of those that read an input of the piece."""

    def __init__(self, graph: Graph):
        self.calls = [node for node in graph.nodes if node.op == "call_function" and not is_size(node)]
        self.rest: list[Node] = []
        """Views of inputs."""
        self.all: list[Unit] = []
        self.of: dict[Node, int] = {}
        self.outside: dict[Node, int] = {}
        for node in self.calls:
            self._place(node)
        for unit in self.all:
            self._connect(unit)
        for unit in self.all:
            unit.barred |= not unit.readers and not unit.leaves  # a branch has results
        self._order(graph)
        self.after: dict[int, int] = {}
        """For each unit all that needs it, at whatever distance."""
        for unit in reversed(self.all):
            self.after[unit.position] = unit.readers | self.needing(unit.readers)

    def _place(self, node: Node) -> None:
        made = [n for n in node.all_input_nodes if n in self.of]
        if is_free(node) and len(made) <= 1:
            if made:
                self.of[node] = self.of[made[0]]
                self.all[self.of[node]].nodes.append(node)
            else:
                self.rest.append(node)
            return
        self.of[node] = len(self.all)
        unit = Unit([node], len(self.all), bool(branch_obstacle(node)), bool(is_main_only(node)))
        unit.writes, unit.products = bytes_of(node), product_us(node)
        unit.fusable = is_fusable(node)
        unit.reduces = reduction_of(node) if unit.fusable else None
        self.all.append(unit)

    def _connect(self, unit: Unit) -> None:
        for needed in unit.nodes[0].all_input_nodes:
            if is_size(needed) or not isinstance(needed.meta.get("val"), torch.Tensor):
                continue
            maker = self.of.get(needed, -1)
            unit.reads.append((bytes_of(needed), maker))
            if maker >= 0:
                self._edge(maker, unit.position)
            elif needed.op != "get_attr":
                source = _root(needed)
                self.outside[source] = self.outside.get(source, 0) | 1 << unit.position
        unit.leaves = any(user.op == "output" for node in unit.nodes for user in node.users)

    def _edge(self, first: int, second: int) -> None:
        self.all[second].needs |= 1 << first
        self.all[first].readers |= 1 << second

    def _order(self, graph: Graph) -> None:
        """What has effects keeps its order, and so do a write and the reads of what it writes."""
        storages = Storages()
        touched: dict[object, list[tuple[int, bool]]] = {}
        last: int | None = None
        for node in graph.nodes:
            access = storages.visit(node)
            if node.op != "call_function" or node not in self.of:
                continue
            at = self.of[node]
            if has_effect(node):
                if last is not None and last != at:
                    self._edge(last, at)
                last = at
            for storage in access.reads | access.writes:
                is_write = storage in access.writes
                known = touched.setdefault(storage, [])
                for other, wrote in known:
                    if other != at and (wrote or is_write):
                        self._edge(other, at)
                known.append((at, is_write))

    def needing(self, part: int) -> int:
        """What needs one of these units."""
        found = 0
        for one in bits(part):
            found |= self.after[one]
        return found

    def cost(self, part: int) -> Cost:
        """Of these units as one program."""
        kernels = self._kernels(part)
        count = len(set(kernels.values()))
        total = Cost(us=LAUNCH * count, launches=count)
        for position, kernel in kernels.items():
            unit = self.all[position]
            moved = sum(size for size, maker in unit.reads if kernels.get(maker) != kernel)
            if unit.leaves or any(kernels.get(reader) != kernel for reader in bits(unit.readers)):
                moved += unit.writes
            total += Cost.of(moved, unit.products)
        return total

    def _kernels(self, part: int) -> dict[int, int]:
        """For each of these units the number of its kernel: neighbours of one stage that are fusable."""
        stages = self._stages(part)
        kernels: dict[int, int] = {}
        for position, (stage, _) in stages.items():
            unit = self.all[position]
            near = [m for _, m in unit.reads if unit.fusable and m in kernels and self.all[m].fusable]
            own = {kernels[maker] for maker in near if stages[maker][0] == stage}
            kernels[position] = min(own, default=position)
            if len(own) > 1:
                kernels.update({one: kernels[position] for one, kernel in kernels.items() if kernel in own})
        return kernels

    def _stages(self, part: int) -> dict[int, tuple[int, Reduction | None]]:
        """For each of these units when it runs, and the kind of the reductions that its kernel has.

        A unit runs with what it needs, but behind it where one of the two is not fusable or their reductions are of two
        kinds. What is no reduction, nor behind one, waits for its readers.
        """
        stages: dict[int, tuple[int, Reduction | None]] = {}
        for position in bits(part):
            stages[position] = self._stage(self.all[position], stages)
        for position in reversed(list(stages)):
            unit = self.all[position]
            readers = [stages.get(reader) for reader in bits(unit.readers)]
            if stages[position][1] is None and unit.fusable and readers and not unit.leaves and None not in readers:
                stages[position] = min(one[0] for one in readers if one is not None), None
        return stages

    def _stage(self, unit: Unit, stages: dict[int, tuple[int, Reduction | None]]) -> tuple[int, Reduction | None]:
        stage, kind = 0, None
        for maker in (maker for _, maker in unit.reads if maker in stages):
            fused = unit.fusable and self.all[maker].fusable
            at, other = stages[maker] if fused else (stages[maker][0] + 1, None)
            if at == stage and None not in (kind, other) and kind != other:
                stage, kind = stage + 1, None
            elif at > stage or (at == stage and kind is None):
                stage, kind = at, other
        if unit.reduces is None:
            return stage, kind
        return stage + (kind not in (None, unit.reduces)), unit.reduces

    def nodes(self, part: int) -> tuple[Node, ...]:
        """The nodes of these units, in the order of the graph."""
        return tuple(node for node in self.calls if node in self.of and part >> self.of[node] & 1)


def _root(node: Node) -> Node:
    while node.op == "call_function" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def bits(part: int) -> Iterator[int]:
    """The positions of the units in a set, ascending."""
    while part:
        lowest = part & -part
        yield lowest.bit_length() - 1
        part ^= lowest
