"""Storages: which memory each node of a graph reads and writes, looking through views.

A tensor is followed to the storages it may lie in, from what the schema of each operator says of aliases and writes.
Where nothing is said (an unknown callable), the result may lie in any argument, and all arguments may be written.
"""

from __future__ import annotations

import functools
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
            return [self._memory.setdefault(StorageWeakRef(fake.untyped_storage()), node.name)]
        return [node.name]

    def _operator(self, node: Node, target: torch._ops.OpOverload) -> Access:
        signature = _signature(target)
        if signature.reads_metadata:
            return self._bind(node, [{}])
        if signature.says_nothing:
            return self._unknown(node, mutates=True)
        given = arguments(node)
        writes = self._all(n for name in signature.written for n in nodes_in(given.get(name)))
        for storage in writes:
            self._writers.setdefault(storage, []).append(node)
        names: list[_Name] = []
        fresh: list[Storage] = []
        for result, made in zip(signature.results, _results(node, len(signature.results)), strict=True):
            bases = [n for name in result.lies_in for n in nodes_in(given.get(name))]
            inherited = self._named(self._all(bases)) if result.is_written else self._joint(bases)
            for _ in range(made):
                new = [f"{node.name}[{len(names)}]"] if result.is_fresh else []
                fresh.extend(new)
                names.append({**inherited, **self._named(new)})
        is_view = bool(names) and not fresh and not writes
        return self._bind(
            node, names, None if is_view else Access(self._all(node.all_input_nodes), writes.union(fresh))
        )

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


@dataclass(frozen=True)
class _Result:
    """One return of an operator: the arguments it may lie in, and whether it may have memory of its own."""

    lies_in: tuple[str, ...]
    is_fresh: bool
    is_written: bool


@dataclass(frozen=True)
class _Signature:
    """What the schema of an operator says of memory."""

    arguments: tuple[str, ...]
    written: tuple[str, ...]
    results: tuple[_Result, ...]
    reads_metadata: bool
    says_nothing: bool


@functools.cache
def _signature(target: torch._ops.OpOverload) -> _Signature:
    schema = target._schema
    annotated = {a.name: a.alias_info for a in schema.arguments if a.alias_info is not None}
    # `reshape`, `contiguous`, `to`: composed of others, and a view or a copy as the strides ask.
    may_copy = torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")
    results = []
    for made in schema.returns:
        info = made.alias_info
        if target in _VIEWS_WITHOUT_ANNOTATION:
            results.append(_Result((schema.arguments[0].name,), is_fresh=False, is_written=False))
        elif info is None:
            results.append(_Result((), is_fresh=True, is_written=False))
        else:
            # A list of views has no label of its own: `split(Tensor(a -> *) self, ...) -> Tensor(a)[]`.
            bases = [name for name, a in annotated.items() if not info.before_set or a.before_set & info.before_set]
            results.append(_Result(tuple(bases), is_fresh=may_copy, is_written=info.is_write))
    return _Signature(
        arguments=tuple(a.name for a in schema.arguments),
        written=tuple(name for name, a in annotated.items() if a.is_write),
        results=tuple(results),
        reads_metadata=schema.name.removeprefix("aten::") in _METADATA,
        says_nothing=torch.Tag.maybe_aliasing_or_mutating in target.tags,
    )


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of an operator call by the names of its schema."""
    return dict(zip(_signature(node.target).arguments, node.args, strict=False)) | node.kwargs


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
