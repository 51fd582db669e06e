"""`compare`: two dumps side by side: options, versions, sites, operators, times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from dsv4_compile.cli import output
from dsv4_compile.cli.explain import LEFT_ALONE, findings
from dsv4_compile.dump.reader import Dump, DumpedGraph

__all__ = ["compared", "is_worse", "print_comparison"]


def compared(first: Dump, second: Dump) -> dict[str, Any]:
    """What differs.

    Each entry of `settings` and `ops` is a pair, None where a side has none; `sites` has those with another outcome,
    `gone` the kinds of sites that only the first has; graphs are paired by their place in the dump. `pieces` of
    a graph are how many it has, and how many of them are captured.
    """
    a, b = first.graphs, second.graphs
    settings = _differing(_settings(first), _settings(second))
    outcomes = _outcomes(a), _outcomes(b)
    kinds = [{kind for _, kind in found} for found in outcomes]
    sites = _differing(*outcomes)
    pairs = zip([*a, *[None] * (len(b) - len(a))], [*b, *[None] * (len(a) - len(b))], strict=True)
    return {
        "settings": {name: list(pair) for name, pair in settings.items()},
        "sites": [{"site": s, "kind": k, "before": x, "after": y} for (s, k), (x, y) in sites.items()],
        "gone": sorted(kinds[0] - kinds[1]),
        "graphs": [_graphs(x, y) for x, y in pairs],
        "ops": {op: list(pair) for op, pair in _differing(_ops(a), _ops(b)).items()},
    }


def _differing(a: dict[Any, Any], b: dict[Any, Any]) -> dict[Any, tuple[Any, Any]]:
    return {key: (a.get(key), b.get(key)) for key in {**a, **b} if a.get(key) != b.get(key)}


def _settings(dump: Dump) -> dict[str, Any]:
    """Versions and what runs for each option, of the last compilation."""
    if not dump.graphs:
        return {}
    graph = dump.graphs[-1]
    report = graph.compile_report
    values = {name: report[name] for name in ("version", "torch", "device")}
    for option, value in report["effective"].items():
        if option != "dump_dir":
            values[option] = value["value"] if isinstance(value, dict) and set(value) == {"value", "reason"} else value
    return values


def _outcomes(graphs: list[DumpedGraph]) -> dict[tuple[str, str], str]:
    """What happened at each site: an outcome, the detail and how often."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for found in findings(graphs):
        kind = found.kind.partition(" ")[0]
        counts[found.site, kind, f"{found.kind} {found.outcome}: {found.detail}"] += 1
    outcomes: dict[tuple[str, str], list[str]] = {}
    for site, kind, text in sorted(counts):
        outcomes.setdefault((site, kind), []).append(text)
    return {key: "\n".join(texts) for key, texts in outcomes.items()}


def _ops(graphs: list[DumpedGraph]) -> dict[str, int]:
    """Operators behind the last pass, of all graphs together."""
    counts: Counter[str] = Counter()
    for graph in graphs:
        if graph.entry.main:
            counts.update(graph.entry.main[-1].ops)
    return dict(counts)


def _graphs(a: DumpedGraph | None, b: DumpedGraph | None) -> dict[str, Any]:
    return {name: [None if graph is None else value(graph) for graph in (a, b)] for name, value in _COLUMNS.items()}


def _nodes(graph: DumpedGraph) -> int | None:
    return graph.entry.main[-1].nodes if graph.entry.main else None


def _pieces(graph: DumpedGraph) -> list[int]:
    """How many pieces the graph has, and how many of them are captured."""
    with graph.run.reading(graph.entry.report):
        kinds = [piece["kind"] for piece in graph.report["pieces"]]
    return [len(kinds), kinds.count("captured")]


_COLUMNS: dict[str, Callable[[DumpedGraph], Any]] = {
    "graph": lambda graph: graph.label,
    "state": lambda graph: graph.entry.state,
    "nodes": _nodes,
    "pieces": _pieces,
    "seconds": lambda graph: round(sum(graph.entry.seconds.values()), 3),
}


def is_worse(data: dict[str, Any]) -> bool:
    """Whether the second dump leaves a site alone that the first did not, has nothing of a kind of sites that the first
    has, fails where the first compiled, or captures nothing of a graph of which the first captured something."""
    alone = any(LEFT_ALONE in (s["after"] or "") and LEFT_ALONE not in (s["before"] or "") for s in data["sites"])
    failed = any(graph["state"] == ["compiled", "failed"] for graph in data["graphs"])
    return alone or failed or bool(data["gone"]) or any(_lost_capture(graph["pieces"]) for graph in data["graphs"])


def _lost_capture(pieces: list[list[int] | None]) -> bool:
    before, after = pieces
    return before is not None and after is not None and before[1] > 0 and after[1] == 0


def print_comparison(data: dict[str, Any], names: tuple[str, str]) -> None:
    """Prints what differs; graphs always."""
    for kind in data["gone"]:
        output.line(f"{names[1]} has nothing of {kind}.", "red")
    output.table("Settings that differ", ("", *names), ((name, *pair) for name, pair in data["settings"].items()))
    output.table("Sites that differ", ("site", "what", *names), _site_rows(data))
    rows = [tuple(_cell(value) for pair in graph.values() for value in pair) for graph in data["graphs"]]
    headings = [f"{name} {side}" for name in _COLUMNS for side in ("A", "B")]
    output.table(f"Graphs: A is {names[0]}, B is {names[1]}", headings, rows, right=range(4, len(headings)))
    ops = [(op, old or 0, new or 0, f"{(new or 0) - (old or 0):+d}") for op, (old, new) in data["ops"].items()]
    ops.sort(key=lambda row: (not row[0].startswith("dsv4"), -abs(row[1] - row[2]), row[0]))
    output.table("Operators behind the last pass", ("operator", "A", "B", "change"), ops, right=(1, 2, 3))
    differ = any(graph[name][0] != graph[name][1] for graph in data["graphs"] for name in ("state", "nodes", "pieces"))
    if not (data["settings"] or data["sites"] or data["ops"] or differ):
        output.line("Nothing differs but times.")


def _cell(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return f"{value[0]}, {value[1]} captured" if value[1] else str(value[0])


def _site_rows(data: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for site in data["sites"]:
        yield site["site"] or "(root)", site["kind"], site["before"] or "nothing", site["after"] or "nothing"
