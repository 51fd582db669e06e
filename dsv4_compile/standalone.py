"""The passes on their own, for a hook of Inductor's configuration or vLLM's: `dsv4_compile.post_grad_pass`.

There is no `options=` here. Of `DSV4_OPTIONS` it is `dump_dir` that counts.
"""

from __future__ import annotations

import functools
import logging
import uuid

from torch.fx import Graph

import dsv4_compile
from dsv4_compile.dump.writer import observe, recording
from dsv4_compile.options import OptionError, Options
from dsv4_compile.passes.mhc import MhcPass
from dsv4_compile.passes.pipeline import Collected, GraphPasses, collecting, is_collecting
from dsv4_compile.passes.projections import ProjectionsPass
from dsv4_compile.report import CompileReport, GraphReport, new_report

__all__ = ["post_grad_pass"]

logger = logging.getLogger("dsv4_compile")

_NO_CODE = "the pass on its own sees a graph and not what Inductor makes of it: Inductor's code is not in this dump"
_this_process = uuid.uuid4().hex


class _Standalone(GraphPasses):
    """The passes with the version of the package in their identity, as the backend has it. Every graph that comes
    without the backend gets a report of its own, and a dump where `DSV4_OPTIONS` names a `dump_dir`."""

    def __call__(self, graph: Graph) -> None:
        if is_collecting():
            super().__call__(graph)
            return
        folder = _dump_dir()
        asked = {**Options().to_dict(), "dump_dir": folder}
        report, made = new_report("cpu", asked, dict(asked)), GraphReport(id="0", nodes=len(graph.nodes))
        report.graphs.append(made)
        with recording(folder, report, made) as dump, collecting() as collected:
            try:
                super().__call__(graph)
            finally:
                _take_up(report, made, collected)
            if dump is not None:
                dump.note(_NO_CODE)
                made.seconds["dump"] = dump.seconds
                if dump.problem is not None:
                    made.notes.append(dump.problem)

    def uuid(self) -> str:
        # A graph out of a cache passes through no pass: with a dump no process takes one that another has left.
        dump = "" if _dump_dir() is None else f"dump {_this_process}/"
        return f"{dump}standalone/{dsv4_compile.__version__}/{super().uuid()}"


def _take_up(report: CompileReport, graph: GraphReport, collected: Collected) -> None:
    report.device = collected.device
    graph.nodes, graph.dynamic, graph.seconds = collected.nodes, collected.dynamic, collected.seconds
    for result in collected.results:
        graph.add(result)
        report.fell_back(result)


def _dump_dir() -> str | None:
    """What `DSV4_OPTIONS` says. Here nobody can be told by an exception that it cannot be read: it is logged."""
    try:
        return Options.resolve().dump_dir
    except OptionError as error:
        _warn(str(error))
        return None


@functools.cache
def _warn(problem: str) -> None:
    logger.warning("There is no dump: %s", problem)


# Nobody packs parameters here (the hook sees a graph, not its parameters), so linears are spread over streams or left.
post_grad_pass = _Standalone((MhcPass(), ProjectionsPass("auto", pack=False)), observe=observe)
"""One `CustomGraphPass`: set it as `torch._inductor.config.post_grad_custom_post_pass`."""
