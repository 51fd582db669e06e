"""`report`: a dump as one page of HTML that needs no network. Jinja escapes whatever the dump contains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from dsv4_compile.cli import output
from dsv4_compile.cli.explain import LEFT_ALONE, file_name, findings, unfinished
from dsv4_compile.cli.pieces import KINDS, pieces, summary
from dsv4_compile.cli.show import overview
from dsv4_compile.cli.streams import forks, picture
from dsv4_compile.dump.reader import Dump, DumpedGraph, DumpError
from dsv4_compile.dump.schema import printable

__all__ = ["page", "streams_picture"]

_WIDTH = 640
"""Of the timeline, in the units of its drawing."""


def page(dump: Dump, max_lines: int) -> str:
    """The page. Listings end after `max_lines` lines of all graphs together; the page then says where the rest is."""
    graphs = dump.graphs
    cut = [{**one, "summary": summary(one)} for one in pieces(graphs) if one["pieces"]]
    kinds = [piece["kind"] for one in cut for piece in one["pieces"]]
    return (
        _environment()
        .get_template("page.html")
        .render(
            overview=overview(dump),
            reports=_reports(graphs),
            findings=findings(graphs),
            left_alone=LEFT_ALONE,
            unfinished=[unfinished(graph) for graph in graphs if graph.entry.state == "compiling"],
            timelines=[_timeline(graph) for graph in graphs],
            picture=picture([fork for graph in graphs for fork in forks(graph)]),
            pieces=cut,
            captured={"count": kinds.count("captured"), "of": len(kinds)},
            kinds=KINDS,
            listings=list(_listings(graphs, max_lines)),
            folder=str(dump.path),
        )
    )


def streams_picture(graphs: list[DumpedGraph]) -> str:
    """The lanes of the streams as SVG."""
    found = [fork for graph in graphs for fork in forks(graph)]
    return _environment().get_template("streams.svg").render(picture=picture(found))


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Whatever is printed goes through here: a control character is no more welcome in a page than in a terminal.
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    environment.filters["size"] = output.size
    environment.filters["file"] = file_name
    return environment


def _reports(graphs: list[DumpedGraph]) -> list[dict[str, Any]]:
    """Each compile report once, with what was asked for and what runs in its stead."""
    reports = {(graph.run.path, graph.entry.report): graph.compile_report for graph in graphs}
    return [
        {**report, "options": [_option(name, value, report) for name, value in report["requested"].items()]}
        for report in reports.values()
    ]


def _option(name: str, asked: Any, report: dict[str, Any]) -> dict[str, Any]:
    runs = report["effective"].get(name, asked)
    differs = isinstance(runs, dict) and set(runs) == {"value", "reason"}
    return {
        "name": name,
        "asked": asked,
        "runs": runs["value"] if differs else runs,
        "reason": runs["reason"] if differs else "",
        "differs": differs,
    }


def _timeline(graph: DumpedGraph) -> dict[str, Any]:
    total = sum(graph.entry.seconds.values())
    left, bars = 0.0, []
    for i, (name, seconds) in enumerate(graph.entry.seconds.items()):
        width = _WIDTH * seconds / total if total else 0.0
        bars.append({"name": name, "seconds": seconds, "x": left, "width": width, "colour": i % 6})
        left += width
    return {"graph": graph.label, "state": graph.entry.state, "total": total, "bars": bars}


def _listings(graphs: list[DumpedGraph], max_lines: int) -> Iterator[dict[str, Any]]:
    left = max_lines
    stages = [(graph, stage) for graph in graphs for stage in graph.entry.stages]
    for graph, stage in output.track(stages, "Writing graphs"):
        path = str(graph.run.path / stage.text) if stage.text else ""
        text, why = "", ""
        try:
            text = graph.listing(stage.name)
        except DumpError as error:
            why = str(error)
        count = text.count("\n")
        if count > left:
            text, why = "", f"{count} lines are too many for this page (--max-lines); they are in {path}."
        else:
            left -= count
        yield {"graph": graph.label, "stage": stage, "text": text, "why": why}
