"""Storages: which memory each node of a graph reads and writes, looking through views.

A tensor is followed to the storages it may lie in, from what the schema of each operator says of aliases and writes.
Where nothing is said (an unknown callable), the result may lie in any argument, and all arguments may be written.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef

from dsv4_compile.passes.region import aten, value

__all__ = ["Access", "Storages", "arguments", "nodes_in", "stream_calls"]

Storage = Hashable
_Name = Mapping[Storage, int]
"""The storages that a tensor may lie in, and how often each had been written when the tensor was named."""

_METADATA = {"sym_size", "sym_stride", "sym_numel", "sym_storage_offset"}
_VIEWS_WITHOUT_ANNOTATION = {aten._unsafe_view.default}


@dataclass(frozen=True)
class Access:
    """Storages that a node reads and writes when it runs. A view touches nothing."""

    reads: frozenset[Storage] = frozenset()
    writes: frozenset[Storage] = frozenset()


class Storages:
    """Follows the tensors of a graph; `visit` takes the nodes in order.

    Graph inputs that share a storage in their fake values are one storage; others are taken for different ones, for
    which AOTAutograd has put guards. A higher-order operator is taken to be functional unless its name says
    `mutation`, as torch demands of them; Inductor may still make it write its arguments, so it counts as a write of
    them towards other streams, but not as one that makes their names stale.
    """

    def __init__(self) -> None:
        self.inputs: set[Storage] = set()
        self._names: dict[Node, list[_Name]] = {}
        self._memory: dict[StorageWeakRef, str] = {}
        self._writers: dict[Storage, list[Node]] = {}

    def of(self, node: Node, element: int | None = None) -> frozenset[Storage]:
        """Storages that `node`, or an element of its result, may lie in."""
        names = self._names.get(node, [])
        chosen = names if element is None or not 0 <= element < len(names) else [names[element]]
        return frozenset(storage for name in chosen for storage in name)

    def written_since(self, node: Node) -> Node | None:
        """The first node that has written a storage of `node` since `node` was made, through another name."""
        for name in self._names.get(node, []):
            for storage, version in name.items():
                later = self._writers.get(storage, [])[version:]
                if later:
                    return later[0]
        return None

    def visit(self, node: Node) -> Access:
        """What the node reads and writes; its result has a name afterwards."""
        if node.op in ("placeholder", "get_attr"):
            storages = self._input(node)
            self.inputs.update(storages)
            return self._bind(node, [self._named(storages)])
        if node.op == "output":
            return Access(reads=self._all(node.all_input_nodes))
        if node.target is operator.getitem:
            return self._bind(node, [self._now_as(node.args[0], node.args[1])])
        if isinstance(node.target, torch._ops.OpOverload):
            return self._operator(node, node.target)
        if list(stream_calls(node)):
            passed = [self._joint([n]) if isinstance(n, Node) else {} for n in node.args[2:]]
            return self._bind(node, [{}, *passed])
        return self._unknown(node, mutates="mutation" in str(node.target))

    def _input(self, node: Node) -> list[Storage]:
        """The storage of a graph input or constant, by the name of the first that lies in it; none of a number."""
        fake = value(node)
        if fake is None and node.op == "get_attr" and node.graph.owning_module is not None:
            fake = getattr(node.graph.owning_module, str(node.target), None)
        if isinstance(fake, GraphModule | int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool):
            return []
        if isinstance(fake, torch.Tensor) and fake.layout is torch.strided:
            try:
                return [self._memory.setdefault(StorageWeakRef(fake.untyped_storage()), node.name)]
            except NotImplementedError:  # a wrapper subclass has no storage of its own
                pass
        return [node.name]

    def _operator(self, node: Node, target: torch._ops.OpOverload) -> Access:
        given = arguments(node)
        tensors = {name: nodes for name, arg in given.items() if (nodes := nodes_in(arg))}
        if target._schema.name.removeprefix("aten::") in _METADATA:
            return self._bind(node, [{}])
        if torch.Tag.maybe_aliasing_or_mutating in target.tags:
            return self._unknown(node, mutates=True)
        annotated = {a.name: a.alias_info for a in target._schema.arguments if a.alias_info is not None}
        written = [n for name, info in annotated.items() if info.is_write for n in tensors.get(name, [])]
        writes = self._all(written)
        for storage in writes:
            self._writers.setdefault(storage, []).append(node)
        if target in _VIEWS_WITHOUT_ANNOTATION:
            return self._bind(node, [self._joint(node.all_input_nodes[:1])])
        may_copy = torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")
        names: list[_Name] = []
        fresh: list[Storage] = []
        for result, made in zip(target._schema.returns, _results(node, len(target._schema.returns)), strict=False):
            info = result.alias_info
            labels = set() if info is None else info.before_set
            bases = (
                []
                if info is None
                else [
                    n
                    for name, a in annotated.items()
                    if a.before_set & labels or not labels
                    for n in tensors.get(name, [])
                ]
            )
            lies_in = self._named(self._all(bases)) if info is not None and info.is_write else self._joint(bases)
            for _ in range(made):
                new = [f"{node.name}[{len(names)}]"] if info is None or may_copy else []
                fresh.extend(new)
                names.append({**lies_in, **self._named(new)})
        is_view = bool(names) and not fresh and not writes
        self._bind(node, names)
        return Access() if is_view else Access(self._all(node.all_input_nodes), writes | frozenset(fresh))

    def _unknown(self, node: Node, mutates: bool) -> Access:
        touched = self._all(node.all_input_nodes)
        if not touched:
            return self._bind(node, [{}])
        if mutates:
            for storage in touched:
                self._writers.setdefault(storage, []).append(node)
        (made,) = _results(node, 1)
        fresh = [f"{node.name}[{i}]" for i in range(made)]
        inherited = self._named(touched)
        return self._bind(
            node, [{**inherited, **self._named([new])} for new in fresh], Access(touched, touched | frozenset(fresh))
        )

    def _bind(self, node: Node, names: list[_Name], access: Access | None = None) -> Access:
        self._names[node] = names
        return access or Access()

    def _all(self, nodes: Iterable[Node]) -> frozenset[Storage]:
        return frozenset().union(*(self.of(n) for n in nodes))

    def _joint(self, nodes: Iterable[Node]) -> _Name:
        """A name that lies where `nodes` do, and is as old as the oldest of them."""
        joint: dict[Storage, int] = {}
        for name in (name for n in nodes for name in self._names.get(n, [])):
            for storage, version in name.items():
                joint[storage] = min(version, joint.get(storage, version))
        return joint

    def _now_as(self, node: Any, index: Any) -> _Name:
        names = self._names.get(node, [])
        return names[index] if isinstance(index, int) and 0 <= index < len(names) else self._joint([node])

    def _named(self, storages: Iterable[Storage]) -> _Name:
        return {storage: len(self._writers.get(storage, [])) for storage in storages}


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of an operator call by the names of its schema."""
    return dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False)) | node.kwargs


def nodes_in(argument: Any) -> list[Node]:
    """The nodes of an argument and of the lists and dicts in it."""
    found: list[Node] = []
    torch.fx.node.map_arg(argument, found.append)
    return found


def stream_calls(node: Node) -> Iterable[tuple[str, dict[str, Any]]]:
    """Operators of torch's namespace `streams` that the node runs, with their arguments by name.

    AOTAutograd wraps them in the higher-order operator `control_deps`, which runs a graph of one operator.
    """
    if node.op != "call_function":
        return
    if isinstance(node.target, torch._ops.OpOverload):
        if node.target.namespace == "streams":
            yield node.target._schema.name.removeprefix("streams::"), arguments(node)
    elif str(node.target) == "control_deps":
        inner = getattr(node.graph.owning_module, str(node.args[1].target), None)
        for wrapped in inner.graph.nodes if inner is not None else ():
            yield from stream_calls(wrapped)


def _results(node: Node, returns: int) -> list[int]:
    """How many tensors each return of the schema holds: one, or as many as the list has."""
    val = value(node)
    if returns != 1:
        return [1] * returns
    return [max(1, len(val))] if isinstance(val, list | tuple) else [1]
