"""`diff`: what the passes did to a graph. Nodes keep their names, so what was added, removed or moved is exact."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dsv4_compile.cli import output
from dsv4_compile.cli.show import is_below, selected
from dsv4_compile.dump.reader import DumpedGraph, DumpError, NoSuchError
from dsv4_compile.dump.schema import FIRST_STAGES, NodeRecord

__all__ = ["GraphDiff", "between", "compared", "print_diff"]


@dataclass(frozen=True)
class GraphDiff:
    """Two stages of one graph. `changed` are pairs of a node that reads something else, or does something else, now;
    `ops` has the operators whose count differs: (before, after)."""

    before: str
    after: str
    added: tuple[NodeRecord, ...]
    removed: tuple[NodeRecord, ...]
    moved: tuple[NodeRecord, ...]
    changed: tuple[tuple[NodeRecord, NodeRecord], ...]
    ops: dict[str, tuple[int, int]]

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {
            "before": self.before,
            "after": self.after,
            **{name: [vars(node) for node in getattr(self, name)] for name in ("added", "removed", "moved")},
            "changed": [[vars(old), vars(new)] for old, new in self.changed],
            "ops": self.ops,
        }


def between(graph: DumpedGraph, name: str | None) -> tuple[str, str]:
    """The stages before and after the pass `name`, or before and after all passes.

    Raises:
        NoSuchError: no such pass.
        DumpError: the graph has not got as far as its passes.
    """
    every = [stage.name for stage in graph.entry.stages if stage.name != "dynamo"]
    within = (name or "").rpartition("/")[0]
    stages = [stage for stage in every if stage.rpartition("/")[0] == within]
    if within and not stages:
        raise NoSuchError(f"Graph {graph.label} has no pass {name!r}; it has {', '.join(_passes(every))}.")
    if len(stages) < 2:
        state = f"it is {graph.entry.state}" + (f" ({graph.entry.error.splitlines()[0]})" if graph.entry.error else "")
        raise DumpError(f"No pass ran on graph {graph.label}, so there is nothing to compare: {state}.")
    if name is None:
        return stages[0], stages[-1]
    if name not in _passes(stages):
        raise NoSuchError(f"Graph {graph.label} has no pass {name!r}; it has {', '.join(_passes(every))}.")
    return stages[stages.index(name) - 1], name


def _passes(stages: Sequence[str]) -> list[str]:
    return [stage for stage in stages if stage.rpartition("/")[2] not in FIRST_STAGES]


def compared(
    before: Sequence[NodeRecord], after: Sequence[NodeRecord], names: tuple[str, str], module: str
) -> GraphDiff:
    """The difference of two stages, of nodes in `module`.

    Raises:
        NoSuchError: neither has such nodes.
    """
    selected([*before, *after], module)
    old, new = ({(node.graph, node.name): node for node in nodes} for nodes in (before, after))
    kept = [key for key in new if key in old]
    place = {key: i for i, key in enumerate(old)}
    stayed = _longest_rising([place[key] for key in kept])
    moved = [new[key] for key in kept if place[key] not in stayed]
    changed = [(old[key], new[key]) for key in kept if _does(old[key]) != _does(new[key])]
    counts = [Counter(n.target for n in nodes if _counts(n, module)) for nodes in (before, after)]
    ops = {op: (counts[0][op], counts[1][op]) for op in sorted(counts[0] | counts[1]) if counts[0][op] != counts[1][op]}
    return GraphDiff(
        *names,
        added=tuple(node for key, node in new.items() if key not in old and is_below(node.module, module)),
        removed=tuple(node for key, node in old.items() if key not in new and is_below(node.module, module)),
        moved=tuple(node for node in moved if is_below(node.module, module)),
        changed=tuple(pair for pair in changed if is_below(pair[1].module, module)),
        ops=ops,
    )


def _counts(node: NodeRecord, module: str) -> bool:
    return node.op.startswith("call_") and is_below(node.module, module)


def _does(node: NodeRecord) -> tuple[Any, ...]:
    return node.target, node.args, node.kwargs


def _longest_rising(values: Sequence[int]) -> set[int]:
    """The members of a longest rising subsequence: those that need not have moved."""
    ends: list[int] = []
    at: list[int] = []
    previous: list[int] = []
    for i, value in enumerate(values):
        slot = bisect_left(ends, value)
        previous.append(at[slot - 1] if slot else -1)
        if slot == len(ends):
            ends.append(value)
            at.append(i)
        else:
            ends[slot], at[slot] = value, i
    found, i = set(), at[-1] if at else -1
    while i >= 0:
        found.add(values[i])
        i = previous[i]
    return found


def print_diff(diff: GraphDiff, label: str) -> None:
    """Prints the operators that became more or fewer, then the nodes module by module."""
    counts = (
        f"{len(diff.added)} added, {len(diff.removed)} removed, {len(diff.moved)} moved, {len(diff.changed)} changed"
    )
    output.line(f"Graph {label}, {diff.before} -> {diff.after}: {counts}", "bold")
    rows = [(op, old, new, f"{new - old:+d}") for op, (old, new) in diff.ops.items()]
    rows.sort(key=lambda row: (not row[0].startswith("dsv4"), row[1] <= row[2], row[1] - row[2], row[0]))
    output.table("Operators", ("operator", diff.before, diff.after, "change"), rows, right=(1, 2, 3))
    output.lines(_lines(diff))


def _lines(diff: GraphDiff) -> Iterator[tuple[str, str]]:
    by_module: dict[str, list[tuple[str, str]]] = {}
    for node in diff.removed:
        by_module.setdefault(node.module, []).append((f"  - {_call(node)}", "red"))
    for node in diff.added:
        by_module.setdefault(node.module, []).append((f"  + {_call(node)}", "green"))
    for node in diff.moved:
        by_module.setdefault(node.module, []).append((f"  > {_call(node)}", "yellow"))
    for old, new in diff.changed:
        by_module.setdefault(new.module, []).append((f"  ~ {_call(old)}  ->  {_call(new)}", "blue"))
    for module, found in by_module.items():
        yield module or "(no module)", "cyan"
        yield from found


def _call(node: NodeRecord) -> str:
    arguments = ", ".join([*node.args, *(f"{name}={value}" for name, value in node.kwargs.items())])
    margin = f"  # {node.margin}" if node.margin else ""
    return f"{node.name} = {node.target}({arguments}){margin}"
