"""`pieces`: where graphs are cut, which pieces are the same, what is captured, and what that holds in memory."""

from __future__ import annotations

from typing import Any

from dsv4_compile.cli import output
from dsv4_compile.dump.reader import DumpedGraph

__all__ = ["pieces", "print_pieces"]


def pieces(graphs: list[DumpedGraph]) -> list[dict[str, Any]]:
    """The pieces of each graph and its CUDA graphs, as the report has them."""
    return [
        {"graph": graph.label, "pieces": report.get("pieces", []), "cudagraphs": report.get("cudagraphs", {})}
        for graph, report in ((graph, graph.report) for graph in graphs)
    ]


def print_pieces(found: list[dict[str, Any]]) -> None:
    """Prints a table of the pieces, and a line on the CUDA graphs of each graph."""
    rows = [
        (one["graph"], p["name"], p["key"], p["shared_with"] or "", p["kind"], p["nodes"], p["reason"])
        for one in found
        for p in one["pieces"]
    ]
    headings = ("graph", "piece", "key", "shared with", "kind", "nodes", "why")
    output.table("Pieces", headings, rows, right=(3, 5))
    for one in found:
        captured = one["cudagraphs"]
        if not one["pieces"]:
            output.line(f"Graph {one['graph']} has no pieces: its compilation was not finished.", "yellow")
            continue
        sizes = f", sizes {', '.join(map(str, captured['sizes']))}" if captured["sizes"] else ""
        memory = f", {output.size(captured['bytes'])}" if captured["bytes"] else ""
        output.line(
            f"Graph {one['graph']}: CUDA graphs {captured['mode']}, {captured['replays']} replays{sizes}{memory}"
        )
        for fallback in captured["fallbacks"]:
            output.line(f"  not captured: {fallback['reason']}", "yellow")
