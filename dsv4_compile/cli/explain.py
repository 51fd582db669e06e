"""`explain`: what happened at each place of the model, and where nothing did, the first thing that stopped it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dsv4_compile.cli import output
from dsv4_compile.cli.show import is_below, nearest
from dsv4_compile.dump.reader import Dump, DumpedGraph, NoSuchError
from dsv4_compile.dump.schema import FIRST_STAGES, NodeRecord
from dsv4_compile.dump.typed import built
from dsv4_compile.passes.sites import MhcSite, Missed, ProjectionGroup, SharedOperand
from dsv4_compile.report import choice_text, form_text, group_text, mhc_text, shared_text

__all__ = [
    "LEFT_ALONE",
    "Finding",
    "file_name",
    "findings",
    "nothing_there",
    "print_findings",
    "to_dicts",
    "unfinished",
]

LEFT_ALONE = "left alone"

_SIGNS = {
    "mhc": "product with an fn of [(2+n)*n, n*D] in mHC's manner",
    "projections": "two linears that read one activation",
}
"""What a pass looks for."""


@dataclass(frozen=True)
class Finding:
    """What happened at one place, `count` times in `graphs`; `source` is the user's line, `members` are linears."""

    site: str
    kind: str
    outcome: str
    detail: str
    source: str
    graphs: tuple[str, ...]
    members: tuple[str, ...] = ()
    count: int = 1

    def concerns(self, path: str) -> bool:
        """Whether it is at the module `path`, inside it, or has a linear there."""
        return is_below(self.site, path) or any(is_below(member, path) for member in self.members)


def findings(graphs: list[DumpedGraph], site: str = "") -> list[Finding]:
    """What happened at `site` and inside it, what was left alone first; equal in several graphs is said once."""
    merged: dict[Finding, list[str]] = {}
    for graph in output.track(graphs, "Reading reports"):
        for found in findings_of(graph):
            if found.concerns(site):
                merged.setdefault(replace(found, graphs=()), []).append(graph.label)
    made = [replace(f, graphs=tuple(dict.fromkeys(labels)), count=len(labels)) for f, labels in merged.items()]
    return sorted(made, key=lambda found: found.outcome != LEFT_ALONE)


def findings_of(graph: DumpedGraph) -> Iterator[Finding]:
    """What the report of one graph says about places."""
    with graph.run.reading(graph.entry.report):
        yield from _findings_in(graph.report, graph.label)


def _findings_in(report: Mapping[str, Any], label: str) -> Iterator[Finding]:
    labels = (label,)
    for record in report["missed"]:
        missed = built(Missed, record)
        yield Finding(missed.site, missed.kind, LEFT_ALONE, missed.reason, missed.source, labels)
    for record in report["mhc"]:
        site = built(MhcSite, record)
        outcome = "recognised" if site.kernel == "inductor" else "replaced"
        yield Finding(site.site, f"mhc {form_text(site)}", outcome, mhc_text(site), site.source, labels)
    for record in report["projections"]:
        group = built(ProjectionGroup, record)
        detail = "; ".join([group_text(group), *(choice_text(choice, group) for choice in group.measured)])
        members = tuple(f"{group.site}.{linear.name}".removeprefix(".") for linear in group.linears)
        yield Finding(group.site, "projections", "together", detail, group.source, labels, members)
    for record in report.get("attention", ()):  # dumps of before have none
        shared = built(SharedOperand, record)
        outcome = "left to Inductor" if shared.reason else "in place"
        yield Finding(shared.site, "attention", outcome, shared_text(shared), shared.source, labels)


def nothing_there(dump: Dump, graphs: list[DumpedGraph], site: str) -> str:
    """Why there is no finding at `site`: it looked like nothing, as a sentence.

    Raises:
        NoSuchError: no graph has nodes of such a module.
    """
    every: list[NodeRecord] = []
    for graph in output.track(graphs, "Reading graphs"):
        stages = [stage.name for stage in graph.entry.main if stage.name in FIRST_STAGES]
        nodes = graph.nodes(stages[-1]) if stages else []
        every += nodes
        inside = [node for node in nodes if is_below(node.module, site)]
        if inside:
            return _nothing_in(graph, inside, site)
    raise NoSuchError(f"No graph of {dump.path} has nodes of a module {site}{nearest(site, every)}.")


def _nothing_in(graph: DumpedGraph, inside: list[NodeRecord], site: str) -> str:
    if graph.entry.state == "compiling":
        return unfinished(graph)
    off = [name for name in _SIGNS if name not in graph.passes]
    if len(off) == len(_SIGNS):
        why = [*graph.report["notes"], *graph.entry.error.splitlines()[:1], "both are off"][0]
        return f"Nothing was looked for at {site}: no pass ran on graph {graph.label} ({why})."
    source = next((node.source for node in inside if node.source), "an unknown line")
    signs = " nor ".join(sign for name, sign in _SIGNS.items() if name not in off)
    rest = f" The pass {off[0]} was off." if off else ""
    return (
        f"Nothing at {site} looked like a site: its {len(inside)} nodes, from {source} on, have "
        f"{'no' if off else 'neither'} {signs}.{rest}"
    )


def unfinished(graph: DumpedGraph) -> str:
    """What is to be said of a graph whose process lives, or was killed, as a sentence."""
    return (
        f"Graph {graph.label} was not finished (its process lives, or was killed): what its passes found is not known."
    )


def print_findings(found: list[Finding], graphs: list[DumpedGraph], is_detailed: bool) -> None:
    """Prints what was found: a table, or with `is_detailed` a paragraph for each."""
    for graph in graphs:
        for note in graph.report["notes"]:
            output.line(f"graph {graph.label}: {note}", "yellow")
        if graph.entry.error:
            output.line(f"graph {graph.label} failed: {graph.entry.error.splitlines()[0]}", "red")
        if graph.entry.state == "compiling":
            output.line(unfinished(graph), "yellow")
    if not is_detailed:
        rows = [(f.site or "(root)", f.kind, f"{f.outcome}{_times(f)}", f.detail, file_name(f.source)) for f in found]
        output.table("What happened where", ("site", "what", "outcome", "how, or what stopped it", "source"), rows)
        return
    for one in found:
        is_alone = one.outcome == LEFT_ALONE
        output.line(f"{one.site or '(root)'}: {one.kind} {one.outcome}{_times(one)}", "red" if is_alone else "green")
        output.line(f"  {'because' if is_alone else 'how'}: {one.detail}")
        if one.source:
            output.line(f"  source: {one.source}")
        output.line(f"  in graph{'s' if len(one.graphs) > 1 else ''} {', '.join(one.graphs)}")


def _times(found: Finding) -> str:
    return f", {found.count} times" if found.count > 1 else ""


def file_name(source: str) -> str:
    """A user's line without the folders of its file."""
    return source.replace("\\", "/").rpartition("/")[2]


def to_dicts(found: list[Finding]) -> list[dict[str, Any]]:
    """JSON-safe."""
    return [{**vars(one), "graphs": list(one.graphs), "members": list(one.members)} for one in found]
