"""The passes on a graph that came without the backend: its report, and its dump where one is asked for."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from torch.fx import Graph

from dsv4_compile.dump.writer import recording
from dsv4_compile.passes.pipeline import Collected, collecting
from dsv4_compile.report import CompileReport, GraphReport

__all__ = ["IDENTITY", "run_alone"]

IDENTITY = f"dump {uuid.uuid4().hex}/"
"""Begins the identity of a pass that writes a dump: a graph out of a cache passes through no pass, so no process is to
take one that another has left."""

_NO_CODE = "the pass on its own sees a graph and not what Inductor makes of it: Inductor's code is not in this dump"


def run_alone(run: Callable[[Graph], None], graph: Graph, report: CompileReport, folder: str | None) -> GraphReport:
    """Runs `run`, whose passes must have `dump.writer.observe` for an observer, and takes up what they did.

    Args:
        report: gets the graph, and its device.
        folder: where a dump goes; None for none.
    """
    made = GraphReport(id="0", nodes=len(graph.nodes))
    report.graphs.append(made)
    with recording(folder, report, made) as dump, collecting() as collected:
        try:
            run(graph)
        finally:
            _take_up(report, made, collected)
        if dump is not None:
            dump.note(_NO_CODE)
            made.seconds["dump"] = dump.seconds
            if dump.problem is not None:
                made.notes.append(dump.problem)
    return made


def _take_up(report: CompileReport, graph: GraphReport, collected: Collected) -> None:
    report.device = collected.device
    graph.nodes, graph.dynamic, graph.seconds = collected.nodes, collected.dynamic, collected.seconds
    for result in collected.results:
        graph.add(result)
        report.fell_back(result)
