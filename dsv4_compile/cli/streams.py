"""`streams`: which linear of a group runs on which stream, where they fork and join, and which stream decides the time.

The work of a linear is what it reads of its weight, `out_features * columns` numbers of its dtype: that is what takes
the time when tokens are few, and then streams are used. It is no measurement.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dsv4_compile.cli import output
from dsv4_compile.dump.reader import DumpedGraph
from dsv4_compile.dump.typed import built
from dsv4_compile.passes.sites import LinearInfo, ProjectionGroup

__all__ = ["Fork", "Lane", "forks", "picture", "print_forks"]

_BAR = 40


@dataclass(frozen=True)
class Lane:
    """What one stream runs of a group, between fork and join. `share` is its part of the group's work."""

    stream: int
    linears: tuple[str, ...]
    share: float


@dataclass(frozen=True)
class Fork:
    """A group of projections. With one lane nothing leaves the main stream. `critical` is the stream with most work,
    after which the group is joined, and `bound` how many times faster than in turn the group can be at most."""

    graph: str
    site: str
    strategy: str
    reason: str
    lanes: tuple[Lane, ...]
    critical: int
    bound: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {**vars(self), "lanes": [{**vars(lane), "linears": list(lane.linears)} for lane in self.lanes]}


def forks(graph: DumpedGraph) -> list[Fork]:
    """The groups of a graph, in program order."""
    with graph.run.reading(graph.entry.report):
        groups = [built(ProjectionGroup, record) for record in graph.report["projections"]]
        return [_fork(graph.label, group) for group in groups if group.linears]


def _fork(label: str, group: ProjectionGroup) -> Fork:
    total = sum(map(_bits, group.linears)) or 1
    lanes = []
    for stream in sorted({_stream(group, i) for i in range(len(group.linears))}):
        members = [linear for i, linear in enumerate(group.linears) if _stream(group, i) == stream]
        share = sum(map(_bits, members)) / total
        lanes.append(Lane(stream, tuple(f"{linear.name}:{linear.out_features}" for linear in members), share))
    heaviest = max(lanes, key=lambda lane: lane.share)
    bound = 1 / heaviest.share if heaviest.share else 1.0
    return Fork(label, group.site, group.strategy, group.reason, tuple(lanes), heaviest.stream, bound)


def _bits(linear: LinearInfo) -> int:
    """Of a column of its weight; the name of a dtype has those of a number."""
    found = re.search(r"\d+", linear.dtype)
    return linear.out_features * (int(found.group()) if found else 8)


def _stream(group: ProjectionGroup, i: int) -> int:
    return group.linears[i].stream if group.strategy in ("streams", "measured") else 0


def print_forks(found: Sequence[Fork], device: str) -> None:
    """Prints the groups as lanes between a fork (●) and a join (○)."""
    for fork in found:
        output.line(f"{fork.site or '(root)'} (graph {fork.graph}): {fork.strategy}, {fork.reason}", "bold")
        for lane in fork.lanes:
            name = "main" if lane.stream == 0 else f"side {lane.stream}"
            bar = "━" * max(1, round(_BAR * lane.share))
            ends = ("●", "○") if len(fork.lanes) > 1 else (" ", " ")
            critical = "  <- critical" if len(fork.lanes) > 1 and lane.stream == fork.critical else ""
            output.line(f"  {name:7}{ends[0]}{bar:<{_BAR}}{ends[1]} {', '.join(lane.linears)}{critical}")
    several = [fork for fork in found if len(fork.lanes) > 1]
    output.line()
    why = "" if device.startswith("cuda") else f" (on {device} there are no streams, so all run in turn)"
    counts = f"{len(found)} groups of projections, {len(several)} of them on several streams"
    output.line(f"{counts}; everything else is on the main stream{why}.")
    if several:
        output.line("A bar is the part of the group's weights that a stream reads: an estimate of its time.")


def picture(found: Sequence[Fork]) -> dict[str, Any]:
    """The lanes in units of a drawing, for the template `streams.svg`."""
    rows: list[dict[str, Any]] = []
    top = 0
    for fork in found:
        lanes = [{"lane": lane, "y": top + 24 + 22 * i, "width": 360 * lane.share} for i, lane in enumerate(fork.lanes)]
        rows.append({"fork": fork, "y": top, "lanes": lanes, "bottom": top + 24 + 22 * len(lanes)})
        top += 40 + 22 * len(lanes)
    return {"rows": rows, "height": max(top, 20)}
