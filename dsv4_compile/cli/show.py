"""`show`: the graphs of a dump, the stages of one, or a stage as text."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from dsv4_compile.cli import output
from dsv4_compile.dump.listing import MARK, inputs_of, listing
from dsv4_compile.dump.reader import Dump, DumpedGraph, NoSuchError
from dsv4_compile.dump.schema import NodeRecord

__all__ = ["is_below", "nearest", "overview", "print_graph", "print_listing", "print_overview", "selected", "stages"]


def overview(dump: Dump) -> dict[str, Any]:
    """Every run and every graph, in a few numbers."""
    runs = [{"folder": run.path.name, **_run(run.index)} for run in dump.runs]
    graphs = [_graph(graph) for graph in output.track(dump.graphs, "Reading graphs")]
    return {"runs": runs, "problems": list(dump.problems), "graphs": graphs}


def _run(index: Any) -> dict[str, Any]:
    names = ("script", "version", "torch", "host", "process", "rank", "started", "ended", "error", "bytes", "left_out")
    return {name: getattr(index, name) for name in (*names, "notes")}


def _graph(graph: DumpedGraph) -> dict[str, Any]:
    report, entry = graph.report, graph.entry
    nodes = [stage.nodes for stage in entry.main if stage.name != "dynamo"]
    return {
        "graph": graph.label,
        "state": entry.state,
        "error": entry.error,
        "nodes": nodes,
        "dynamic": report.get("dynamic", False),
        **{name: len(report.get(name, ())) for name in ("mhc", "projections", "attention", "missed", "pieces")},
        "seconds": entry.seconds,
        "notes": [str(note) for note in report["notes"]],
    }


def print_overview(data: dict[str, Any]) -> None:
    """Prints what `overview` found."""
    for run in data["runs"]:
        rank = f", rank {run['rank']}" if run["rank"] else ""
        output.line(f"{run['folder']}: {run['script'] or 'python'}{rank}, {run['started']}", "bold")
        output.line(f"  dsv4_compile {run['version']}, torch {run['torch']}, {output.size(run['bytes'])}")
        if run["error"]:
            output.line(f"  the script ended with {run['error']}", "red")
        elif not run["ended"]:
            output.line("  the process is still running, or was killed", "yellow")
        for note in [*run["notes"], *(f"left out for the limit: {name}" for name in run["left_out"])]:
            output.line(f"  note: {note}")
    rows = [
        (
            g["graph"],
            g["state"],
            " -> ".join(map(str, dict.fromkeys(g["nodes"]))),
            "dynamic" if g["dynamic"] else "static",
            g["mhc"],
            g["projections"],
            g["missed"],
            sum(g["seconds"].values()),
        )
        for g in data["graphs"]
    ]
    headings = ("graph", "state", "nodes", "shapes", "mhc", "projections", "missed", "seconds")
    output.table("Graphs", headings, rows, right=(4, 5, 6, 7))
    for graph in data["graphs"]:
        if graph["error"]:
            output.line(f"{graph['graph']} failed: {graph['error'].splitlines()[0]}", "red")
        elif graph["state"] == "compiling":
            output.line(f"{graph['graph']} was not finished: the process is still running, or was killed", "yellow")


def stages(graph: DumpedGraph) -> dict[str, Any]:
    """The stages of a graph, with their operators, times and bytes."""
    entry = graph.entry
    ordered = [*entry.main, *(stage for stage in entry.stages if stage not in entry.main)]
    found = [{**vars(stage), "file": stage.text} for stage in ordered]
    for stage in found:
        del stage["text"]
    pieces = {key: vars(files) for key, files in entry.pieces.items()}
    files = {"code": entry.code, "piece_files": pieces, "bytecode": entry.bytecode, "folder": str(graph.run.path)}
    return {**_graph(graph), "stages": found, **files}


def print_graph(data: dict[str, Any]) -> None:
    """Prints what `stages` found."""
    rows = [
        (s["name"], s["nodes"], s["seconds"], output.size(s["input_bytes"]), output.size(s["result_bytes"]), s["file"])
        for s in data["stages"]
    ]
    headings = ("stage", "nodes", "seconds", "inputs", "all results", f"file in {data['folder']}")
    output.table(f"Graph {data['graph']}: {data['state']}", headings, rows, right=(1, 2, 3, 4))
    if data["stages"]:
        ops = {s["name"]: s["ops"] for s in data["stages"] if "/" not in s["name"]}
        names = [name for name in ops if name != "dynamo"] or ["dynamo"]
        last = ops[names[-1]]
        every = {op for name in names for op in ops[name]}
        ordered = sorted(every, key=lambda op: (not op.startswith("dsv4"), -last.get(op, 0), op))
        table = [(op, *(ops[name].get(op, "") for name in names)) for op in ordered]
        output.table("Operators", ("operator", *names), table, right=range(1, len(names) + 1))
    pieces = [name for files in data["piece_files"].values() for name in files.values()]
    for name in filter(None, [*data["code"], *pieces, data["bytecode"]]):
        output.line(f"{data['folder']}/{name}")
    for note in data["notes"]:
        output.line(f"note: {note}")
    if data["error"]:
        output.line(f"failed: {data['error']}", "red")


def is_below(module: str, path: str) -> bool:
    """Whether `module` is `path` or inside it."""
    return not path or module == path or module.startswith(f"{path}.")


def selected(nodes: Sequence[NodeRecord], module: str) -> list[NodeRecord]:
    """The nodes of a module and of what is inside it.

    Raises:
        NoSuchError: there are none.
    """
    found = [node for node in nodes if is_below(node.module, module)]
    if not found and module:
        raise NoSuchError(f"The graph has no nodes of a module {module}{nearest(module, nodes)}.")
    return found


def nearest(module: str, nodes: Iterable[NodeRecord]) -> str:
    """What was probably meant, as the end of a sentence; empty where nothing is near."""
    paths = {path for found in {node.module for node in nodes} for path in _and_above(found)}
    near = difflib.get_close_matches(module, sorted(paths), n=3, cutoff=0.5)
    return f"; the nearest are {', '.join(near)}" if near else ""


def _and_above(module: str) -> list[str]:
    parts = module.split(".") if module else []
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def print_listing(graph: DumpedGraph, stage: str, module: str) -> None:
    """Prints a stage as text, all of it or one module's part."""
    if module:
        every = graph.nodes(stage)
        nodes = selected(every, module)
        title = f"graph {graph.label}, {stage}: {len(nodes)} nodes of {module}"
        text = listing(nodes, title, inputs_of(every))
    else:
        text = graph.listing(stage)
    output.lines((line, _colour(line)) for line in text.splitlines())


def _colour(line: str) -> str:
    if line.endswith(MARK):
        return "green"
    return "cyan" if line.lstrip().startswith("# ----") else ""
