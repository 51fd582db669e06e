"""The checker of streams: on a graph, nothing that leaves the main stream can race with anything.

      x ──► dsv4.parallel_linear(x, [W_0, W_1], streams=[0, 1])          Record(fork, main)
                                                                         Work(linear 0, main: reads x, W_0)
      is taken apart into what `kernels.streams` launches,  ──►          Wait(fork, side 1)
      the nodes around it are work on the main stream, and               Work(linear 1, side 1: reads x, W_1)
      the whole graph is one schedule, see `passes.schedule`             Record(join, side 1), Wait(join, main)

`DSV4_CHECK=1` runs it before the passes and after each of them, and raises `UnsafeGraphError`. A piece with branches
(`passes.branches`) is checked always, by `check_fork`.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from dsv4_compile.kernels import linear  # noqa: F401  (registers the operators)
from dsv4_compile.kernels.environment import word
from dsv4_compile.kernels.linear.calls import read as read_call
from dsv4_compile.passes.pieces import has_effect
from dsv4_compile.passes.region import aten, value
from dsv4_compile.passes.schedule import MAIN, Record, Schedule, Violation, Wait, Work, prove
from dsv4_compile.passes.sites import module_path
from dsv4_compile.passes.storages import Storages, arguments, nodes_in, stream_calls

__all__ = [
    "CHECK_VARIABLE",
    "MAIN_STREAM_ONLY",
    "UnsafeGraphError",
    "branch_obstacle",
    "check",
    "check_fork",
    "enforce",
    "is_main_only",
    "schedule_of",
    "wanted",
]

CHECK_VARIABLE = "DSV4_CHECK"

MAIN_STREAM_ONLY: dict[str, str] = {
    f"vllm::{name}": "is a collective" for name in ("all_reduce", "all_gather", "reduce_scatter")
}
"""Qualified names of operators that must stay on the main stream, and why ("uses one workspace for all calls"). torch
has no tag for a global workspace, so who registers such an operator puts its name here."""

JOINT = {torch.ops.dsv4.grouped_linear.default, torch.ops.dsv4.mixed_linear.default}
"""Those whose results share outputs: each linear writes columns of the output of its dtype."""

LEAVING = {torch.ops.dsv4.parallel_linear.default, *JOINT}
"""Operators of ours that put work on side streams. They have the arguments of `parallel_linear`, and `mixed_linear` has
lists of float8 layers besides, of which the streams come after those of the others."""

ACCOMPANIED = torch.ops.dsv4.accompanied_linear.default
"""Runs one of `LEAVING` and beside it, on one side stream, operators that are named in its arguments."""

_LOW = ("inputs", "low_weights", "low_biases", "input_scales", "weight_scales")

_MOVED = LEAVING | {
    ACCOMPANIED,
    torch.ops.dsv4.packed_linear.default,
    aten.mm.default,
    aten.addmm.default,
    aten._scaled_mm.default,
}
"""Operators that the projections pass moves to an earlier place, or has moved."""

_COLLECTIVES = {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor"}
_TAGS = {
    torch.Tag.nondeterministic_seeded: "draws from the random generator, which all streams share",
    torch.Tag.data_dependent_output: "waits for the device",
    torch.Tag.cudagraph_unsafe: "is tagged cudagraph_unsafe",
}


class UnsafeGraphError(AssertionError):
    """The checker could not prove that a graph is free of races."""


def wanted() -> bool:
    """Whether `DSV4_CHECK` asks for the checker."""
    return word(CHECK_VARIABLE) == "1"


def enforce(graph: Graph, when: str, num_streams: int | None = None) -> None:
    """Checks the graph.

    Raises:
        UnsafeGraphError: with every violation, and `when` it was found.
    """
    found = check(graph, num_streams)
    if found:
        raise UnsafeGraphError(f"The graph is not safe {when}: {'; '.join(map(str, found))}.")


def check(graph: Graph, num_streams: int | None = None) -> list[Violation]:
    """What keeps the graph from being safe on several streams; nothing when it is.

    Proved is, given that the schemas of all operators are true and that `kernels.streams` launches what is drawn above:

    - the schedule of the graph has no violation of `passes.schedule.prove`: every edge between streams is ordered,
      every fork is joined before the graph ends, no storage is written on one stream while another accesses it, and
      nothing that must stay on the main stream (collectives, `MAIN_STREAM_ONLY`, `confinement`) is elsewhere;
    - `schema`: an operator that leaves the main stream writes no argument and returns no alias of one, nor do those
      that `accompanied_linear` runs;
    - `arguments`: it has as many biases and streams as weights, and at least one;
    - `stream`: its stream numbers are in 0..`num_streams`, and something is left for the main stream;
    - `stale`: no linear reads a tensor whose storage has been written since the tensor was made. Checked before and
      after a pass, it shows that a linear could be moved to where the first of its group was.

    Streams of the graph itself (torch's operators `streams::*` and the annotation `custom["stream"]`) are part of the
    schedule; stream 0 is the caller's. A host that waits for the device is not taken for an order.

    Args:
        graph: a functional ATen graph; writes into inputs at its end are all right.
        num_streams: auxiliary streams there are; `None` leaves the upper bound out.
    """
    schedule, found = schedule_of(graph, num_streams)
    return found + prove(schedule)


def schedule_of(graph: Graph, num_streams: int | None = None) -> tuple[Schedule, list[Violation]]:
    """The graph as a schedule, and what `check` finds on single nodes."""
    reader = _Reader(num_streams)
    for node in graph.nodes:
        reader.read(node)
    return Schedule(tuple(reader.actions), frozenset(reader.storages.inputs)), reader.found


def check_fork(
    graph: Graph, prefix: Sequence[Node], branches: Sequence[Sequence[Node]], suffix: Sequence[Node]
) -> list[Violation]:
    """What keeps a piece from running as `prefix`, then `branches` beside each other, then `suffix`; nothing when it
    may.

    Proved is, with the assumptions of `check`:

    - the schedule has no violation of `passes.schedule.prove`. `branches[0]` is on the stream of the caller and all of
      it is launched before the others, which are on an auxiliary stream each, as `kernels.streams` does it;
    - `parts`: each operator is in one part, once;
    - `order`: of what is written in place, each access is behind the same writes and before the same writes as in the
      graph. So is each operator with an effect among those with one;
    - `confined`: no branch has an operator of `branch_obstacle`, nor one but the first an operator of `is_main_only`.

    Args:
        graph: the piece as a graph of its own; its inputs are placeholders.
        prefix, branches, suffix: its operators.
    """
    reader = _Reader(None)
    found = list(_parted(graph, [prefix, *branches, suffix]))
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            reader.read(node)
    reader.read_all(prefix, MAIN)
    reader.actions.append(Record("fork"))
    reader.read_all(branches[0] if branches else (), MAIN)
    for side, branch in enumerate(branches[1:], 1):
        stream = ("auxiliary", side)
        reader.actions.append(Wait("fork", stream))
        reader.read_all(branch, stream)
        reader.actions += [Record(("join", side), stream), Wait(("join", side))]
    reader.read_all(suffix, MAIN)
    reader.read_all([node for node in graph.nodes if node.op == "output"], MAIN)
    for side, branch in enumerate(branches):
        found += _confined(branch, side)
    schedule = Schedule(tuple(reader.actions), frozenset(reader.storages.inputs))
    return found + reader.found + _reordered(schedule_of(graph)[0], schedule, graph) + prove(schedule)


def _parted(graph: Graph, parts: Sequence[Sequence[Node]]) -> Iterator[Violation]:
    """Operators that are in no part, or in more than one."""
    counts = Counter(node for part in parts for node in part)
    for node in graph.nodes:
        if node.op == "call_function" and counts[node] != 1:
            yield Violation(node.name, module_path(node), "parts", f"{node.name} is in {counts[node]} parts")


def _confined(branch: Sequence[Node], side: int) -> Iterator[Violation]:
    for node in branch:
        reason = branch_obstacle(node) or (is_main_only(node) if side else "")
        if reason:
            sentence = f"{node.name} is on branch {side}, and it {reason}"
            yield Violation(node.name, module_path(node), "confined", sentence)


def _reordered(graph: Schedule, fork: Schedule, nodes: Graph) -> list[Violation]:
    """Accesses and effects that come behind other writes and effects than in the graph."""
    effects = {node.name for node in nodes.nodes if node.op == "call_function" and has_effect(node)}
    before, after = _behind(graph, effects), _behind(fork, effects)
    return [
        Violation(name, "", "order", f"{name} comes behind other writes or effects than in the graph")
        for name in before
        if before[name] != after.get(name)
    ]


def _behind(schedule: Schedule, effects: set[str]) -> dict[str, frozenset[tuple[str, str]]]:
    """For each work the writes, of storages that it accesses, and the effects that are launched before it."""
    written: dict[Hashable, list[str]] = {}
    done: list[str] = []
    found: dict[str, frozenset[tuple[str, str]]] = {}
    for work in schedule.actions:
        if not isinstance(work, Work):
            continue
        behind = {(str(storage), name) for storage in work.reads | work.writes for name in written.get(storage, ())}
        if work.name in effects:
            behind |= {("effects", name) for name in done}
            done.append(work.name)
        found[work.name] = frozenset(behind)
        for storage in work.writes:
            written.setdefault(storage, []).append(work.name)
    return found


class _Reader:
    def __init__(self, num_streams: int | None) -> None:
        self.actions: list[Work | Record | Wait] = []
        self.found: list[Violation] = []
        self.storages = Storages()
        self._num_streams = num_streams
        self._current: Hashable = MAIN

    def read(self, node: Node) -> None:
        if node.target in _MOVED:
            self._refuse_stale(node)
        access = self.storages.visit(node)
        if node.target in LEAVING and self._is_sound(node, node.target, arguments(node)):
            self.actions.extend(self._branches(node))
            return
        if node.target is ACCOMPANIED and self._is_sound_beside(node):
            self.actions.extend(self._beside(node))
            return
        calls = list(stream_calls(node))
        for name, given in calls:
            self._synchronise(node, name, given)
        if calls:
            return
        if node.op == "output" and self._current != MAIN:
            sentence = f"the graph ends on stream {self._current}, and not on the one it began on"
            self.found.append(Violation(node.name, module_path(node), "unjoined", sentence))
        reason = confinement(node.target)
        if access.reads or access.writes or reason:
            stream, site = self._stream(node), module_path(node)
            self.actions.append(Work(node.name, stream, access.reads, access.writes, site, reason))

    def read_all(self, nodes: Sequence[Node], stream: Hashable) -> None:
        """Reads `nodes` as work on a stream."""
        self._current = stream
        for node in nodes:
            self.read(node)

    def _stream(self, node: Node) -> Hashable:
        return (node.meta.get("custom") or {}).get("stream", self._current)

    def _branches(self, node: Node) -> Iterator[Work | Record | Wait]:
        """What one operator of `LEAVING` launches."""
        return self._fork(node, node.target, arguments(node), len(value(node) or ()))

    def _fork(self, node: Node, target: Any, given: dict[str, Any], count: int) -> Iterator[Work | Record | Wait]:
        """What `kernels.streams.execute_in_parallel` launches for `target`, whose are the first `count` results.

        Those of `JOINT` are taken for each layer on the stream it is given, of all they may do that with most streams:
        packed, what shares an output runs in one product or in turn. Columns of an output are storages of their own
        here, until the output is whole: that comes after all of them.
        """
        main, site = self._stream(node), module_path(node)
        joint = target in JOINT
        members = _members(given)
        works: dict[int, list[Work]] = {0: []}
        for i, slot in enumerate(given["streams"]):
            stream = main if slot == 0 else ("auxiliary", slot)
            written = frozenset({(node.name, "columns", i)}) if joint else self.storages.of(node, i)
            work = Work(f"{node.name}[{i}]", stream, self._read_by(members[i]), written, site)
            works.setdefault(slot, []).append(work)
        yield Record((node.name, "fork"), main)
        yield from works.pop(0)
        for slot, branch in sorted(works.items()):
            yield Wait((node.name, "fork"), ("auxiliary", slot))
            yield from branch
            yield Record((node.name, slot), ("auxiliary", slot))
            yield Wait((node.name, slot), main)
        if joint:
            columns = frozenset((node.name, "columns", i) for i in range(len(members)))
            whole = frozenset(storage for i in range(count) for storage in self.storages.of(node, i))
            yield Work(node.name, main, columns, whole, site)

    def _beside(self, node: Node) -> Iterator[Work | Record | Wait]:
        """What `accompanied_linear` launches: its first operator, and meanwhile the others, in turn on one stream."""
        given, main, site = arguments(node), self._stream(node), module_path(node)
        (target, group), *others = _calls(given)
        slot = given.get("stream", 1)
        stream = ("auxiliary", slot) if slot else main
        yield Record((node.name, "beside"), main)
        yield from self._fork(node, target, group, given["results"][0])
        yield Wait((node.name, "beside"), stream)
        position = given["results"][0]
        for (beside, named), count in zip(others, given["results"][1:], strict=True):
            made = range(position, position + count)
            written = frozenset(storage for i in made for storage in self.storages.of(node, i))
            what = f"{node.name}: {beside}"
            yield Work(what, stream, self._read_by(list(named.values())), written, site, confinement(beside))
            position += count
        yield Record((node.name, "joined"), stream)
        yield Wait((node.name, "joined"), main)

    def _read_by(self, operands: Any) -> frozenset[Hashable]:
        return frozenset(storage for operand in nodes_in(operands) for storage in self.storages.of(operand))

    def _synchronise(self, node: Node, name: str, given: dict[str, Any]) -> None:
        """An operator of torch's namespace `streams`; those that are not named here order no two streams."""
        if name in ("fork", "join"):
            self._current = given["to_index"]
        elif name == "record_event":
            self.actions.append(Record(given["event_index"], given["stream_index"]))
        elif name == "wait_event":
            self.actions.append(Wait(given["event_index"], given["stream_index"]))
        elif name == "sync_dealloc":
            self.actions.append(Wait(given["wait_event_index"], given["src_stream_index"]))
        elif name == "wait_stream":
            self.actions.append(Record((node.name, "wait_stream"), given["waited_on_stream_index"]))
            self.actions.append(Wait((node.name, "wait_stream"), given["waiting_stream_index"]))

    def _refuse_stale(self, node: Node) -> None:
        for operand in node.all_input_nodes:
            writer = self.storages.written_since(operand)
            if writer is not None:
                sentence = f"{node.name} reads {operand.name}, whose storage {writer.name} has written since"
                self._refuse(node, "stale", sentence)

    def _is_sound(self, node: Node, target: Any, given: dict[str, Any]) -> bool:
        """Whether the call of `target` is such that it can be taken apart; otherwise the node is refused."""
        known = len(self.found)
        self._refuse_writer(node, target)
        weights, biases, streams = (given.get(name) or [] for name in ("weights", "biases", "streams"))
        low = [len(given.get(name) or []) for name in _LOW]
        if not weights or len(weights) != len(biases) or len(streams) != len(weights) + low[0] or len(set(low)) > 1:
            counts = f"{len(weights)} weights, {len(biases)} biases and {len(streams)} streams"
            self._refuse(node, "arguments", f"{node.name} has {counts}")
        self._refuse_streams(node, streams)
        if streams and 0 not in streams and len(self.found) == known:
            self._refuse(node, "stream", f"{node.name} leaves nothing for the main stream: {list(streams)}")
        return len(self.found) == known

    def _is_sound_beside(self, node: Node) -> bool:
        """`_is_sound` for `accompanied_linear` and all that it runs."""
        known = len(self.found)
        given = arguments(node)
        try:
            (target, group), *others = _calls(given)
        except (RuntimeError, ValueError, LookupError) as error:
            self._refuse(node, "arguments", f"{node.name} cannot be read: {error}")
            return False
        if sum(given["results"]) != len(value(node) or ()):
            self._refuse(node, "arguments", f"{node.name} has other results than {list(given['results'])}")
        if target not in LEAVING:
            self._refuse(node, "arguments", f"{node.name} runs {target} on the main stream")
        for beside, _ in others:
            self._refuse_writer(node, beside)
        self._refuse_streams(node, [given.get("stream", 1)])
        return len(self.found) == known and self._is_sound(node, target, group)

    def _refuse_writer(self, node: Node, target: Any) -> None:
        schema = target._schema
        if any(a.alias_info is not None for a in [*schema.arguments, *schema.returns]):
            self._refuse(node, "schema", f"{schema.name} leaves the main stream and writes or returns an argument")

    def _refuse_streams(self, node: Node, streams: list[int]) -> None:
        highest = max(streams, default=0) if self._num_streams is None else self._num_streams
        if any(not 0 <= stream <= highest for stream in streams):
            self._refuse(node, "stream", f"{node.name} uses streams {list(streams)}, and there are 0 to {highest}")

    def _refuse(self, node: Node, kind: str, sentence: str) -> None:
        self.found.append(Violation(node.name, module_path(node), kind, sentence))


def _members(given: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What each layer of an operator with these arguments reads."""
    plain = [(given["x"], *own) for own in zip(given["weights"], given["biases"], strict=True)]
    return plain + list(zip(*(given.get(name) or [] for name in _LOW), strict=True))


def _calls(given: dict[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """The operators that `accompanied_linear` runs with these arguments, and what each is given, by name."""
    tensors, sizes = [given["x"], *given["tensors"]], given["sizes"]
    texts = zip(given["operators"], given["arguments"], given["results"], strict=True)
    found = []
    for name, text, _ in texts:
        call = read_call(name, text)
        args, named = call.given(tensors, sizes)
        names = [argument.name for argument in call.operator._schema.arguments]
        found.append((call.operator, dict(zip(names, args, strict=False)) | named))
    if not found:
        raise ValueError("it runs nothing")
    return found


def confinement(target: Any) -> str:
    """Why an operator must stay on the main stream; empty when it need not."""
    if not isinstance(target, torch._ops.OpOverload):
        return ""
    if target.namespace in _COLLECTIVES:
        return "is a collective"
    if target._schema.name in MAIN_STREAM_ONLY:
        return MAIN_STREAM_ONLY[target._schema.name]
    return next((reason for tag, reason in _TAGS.items() if tag in target.tags), "")


def branch_obstacle(node: Node) -> str:
    """Why an operator must be on no branch of a piece, the first included; empty when it may be."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return "is no operator, so nothing is known of what it writes" if node.target is not operator.getitem else ""
    if torch.Tag.maybe_aliasing_or_mutating in node.target.tags:
        return "may write what it is given, or return it"
    if has_effect(node):
        return "writes memory or draws random numbers"
    if node.target is ACCOMPANIED:
        # In a capture a result that the main branch drops is memory of side stream 1 again, for a branch to write.
        return "has results in the memory of a side stream"
    devices = {x.device for n in (node, *node.all_input_nodes) for x in _tensors(n)}
    if len(devices) > 1:
        return f"has tensors on {' and '.join(sorted(map(str, devices)))}"
    return confinement(node.target)


def is_main_only(node: Node) -> str:
    """Why an operator must be on no other branch than the first; empty when it may be.

    torch's own operators keep their workspaces by stream. Of others nobody knows; ours do not all, and may fork.
    """
    if node.target is operator.getitem or getattr(node.target, "namespace", "") in ("aten", "prims"):
        return ""
    return "is not torch's own, so it may keep a workspace for all streams"


def _tensors(node: Node) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]
