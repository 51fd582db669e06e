"""`pieces`: where graphs are cut and why, which pieces are the same, what is captured, and the memory that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsv4_compile.cli import output
from dsv4_compile.dump.reader import DumpedGraph

__all__ = ["KINDS", "pieces", "print_pieces", "summary"]

KINDS = ("captured", "compiled", "eager")

_COLOURS = {"captured": "green", "compiled": "", "eager": "yellow"}
_MARKS = {"captured": "[{}]", "compiled": "{}", "eager": "({})"}


def pieces(graphs: list[DumpedGraph]) -> list[dict[str, Any]]:
    """The pieces of each graph and its CUDA graphs, as the report has them.

    `programs` are the distinct pieces: their letter in the map, how many pieces each is and, in a dump that has them,
    the files of its graph and of its code.
    """
    return [_of(graph) for graph in output.track(graphs, "Reading reports")]


def _of(graph: DumpedGraph) -> dict[str, Any]:
    with graph.run.reading(graph.entry.report):
        report = graph.report
        found = [_piece(record) for record in report["pieces"]]
        captured = _captured(report.get("cudagraphs", {}))
    programs: dict[tuple[str, str], dict[str, Any]] = {}
    for piece in found:
        program = programs.setdefault((piece["key"], piece["kind"]), {**_program(piece, graph), "pieces": []})
        program["pieces"].append(piece["name"])
    for i, program in enumerate(programs.values()):
        program["letter"] = _letter(i)
    letters = [programs[piece["key"], piece["kind"]]["letter"] for piece in found]
    return {
        "graph": graph.label,
        "state": graph.entry.state,
        "folder": str(graph.run.path),
        "pieces": [{**piece, "letter": letter} for piece, letter in zip(found, letters, strict=True)],
        "programs": list(programs.values()),
        "cudagraphs": captured,
    }


def _piece(record: dict[str, Any]) -> dict[str, Any]:
    texts = {name: str(record.get(name, "")) for name in ("name", "key", "kind", "reason")}
    numbers = {name: int(record.get(name, 0)) for name in ("shared_with", "nodes")}
    return {**record, **texts, **numbers}


def _captured(record: dict[str, Any]) -> dict[str, Any]:
    """With what a graph that was not finished lacks."""
    made = {"mode": "off", "sizes": [], "replays": 0, "bytes": 0, "fallbacks": [], **record}
    numbers = {name: int(made[name]) for name in ("replays", "bytes")}
    lists = {
        "sizes": list(made["sizes"]),
        "fallbacks": [{"reason": "", **dict(fallback)} for fallback in made["fallbacks"]],
    }
    return {**made, **numbers, **lists}


def _program(piece: dict[str, Any], graph: DumpedGraph) -> dict[str, Any]:
    files = graph.entry.pieces.get(piece["key"])
    names = {"text": files.text, "code": files.code} if files is not None else {"text": "", "code": ""}
    return {"key": piece["key"], "kind": piece["kind"], "nodes": piece["nodes"], **names}


def _letter(number: int) -> str:
    """a, b, ... z, ba, bb, ...: digits of base 26, for programs in the order in which they come."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    text = letters[number % 26]
    while number := number // 26:
        text = letters[number % 26] + text
    return text


def summary(one: dict[str, Any]) -> str:
    """A graph's pieces in a sentence."""
    made = one["pieces"]
    counts = {kind: sum(piece["kind"] == kind for piece in made) for kind in (*KINDS, *(p["kind"] for p in made))}
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    plural = "" if len(made) == 1 else "s"
    return f"Graph {one['graph']}: {len(made)} piece{plural}, {len(one['programs'])} distinct; {kinds}"


def print_pieces(found: list[dict[str, Any]]) -> None:
    """Prints for each graph its map, its pieces, the distinct ones among them, and what is captured."""
    for one in found:
        if not one["pieces"]:
            output.line(f"Graph {one['graph']} has no pieces: its compilation {_end(one['state'])}.", "yellow")
            continue
        output.line(summary(one), "bold")
        if len(one["pieces"]) == 1 and not any(p["text"] or p["code"] for p in one["programs"]):
            output.line(f"  why: {one['pieces'][0]['reason']}, {one['pieces'][0]['nodes']} nodes")
            _print_captured(one["cudagraphs"])
            continue
        output.line(f"  {_map(one['pieces'])}")
        rows = [
            (output.coloured(p["kind"], _COLOURS.get(p["kind"], "")), p["letter"], p["name"], p["nodes"], p["reason"])
            for p in one["pieces"]
        ]
        output.table("", ("kind", "program", "piece", "nodes", "why"), rows, right=(3,))
        output.table("Programs", ("program", "key", "kind", "pieces", "nodes", "file"), _rows(one), right=(3, 4))
        _print_captured(one["cudagraphs"])
    if any(len(one["pieces"]) > 1 for one in found):
        output.line("In the line below a graph's name a letter is a program, [a] captured, a compiled, (a) eager.")


def _end(state: str) -> str:
    return "failed" if state == "failed" else "was not finished"


def _map(made: Sequence[dict[str, Any]]) -> str:
    return " ".join(_MARKS.get(piece["kind"], "{}").format(piece["letter"]) for piece in made)


def _rows(one: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (p["letter"], p["key"], p["kind"], len(p["pieces"]), p["nodes"], p["code"] or p["text"])
        for p in one["programs"]
    ]


def _print_captured(captured: dict[str, Any]) -> None:
    sizes = f", sizes {', '.join(map(str, captured['sizes']))}" if captured["sizes"] else ""
    memory = f", {output.size(captured['bytes'])} of memory" if captured["bytes"] else ""
    replays = f"{captured['replays']} replay{'' if captured['replays'] == 1 else 's'}"
    output.line(f"CUDA graphs: {captured['mode']}, {replays}{sizes}{memory}")
    for fallback in captured["fallbacks"]:
        rest = ", ".join(f"{name} {value}" for name, value in fallback.items() if name != "reason" and value)
        output.line(f"  not captured: {fallback['reason']}{f' ({rest})' if rest else ''}", "yellow")
    output.line()
