"""The passes on their own, for a hook of Inductor's configuration or vLLM's: `dsv4_compile.post_grad_pass`."""

from __future__ import annotations

import dsv4_compile
from dsv4_compile.options import Options
from dsv4_compile.passes.mhc import MhcPass
from dsv4_compile.passes.pipeline import Collected, GraphPasses
from dsv4_compile.passes.projections import ProjectionsPass
from dsv4_compile.report import GraphReport, new_report

__all__ = ["post_grad_pass"]


def _report(collected: Collected) -> None:
    """Every graph that came without the backend gets a report of its own."""
    asked = Options().to_dict()
    report = new_report(collected.device, asked, dict(asked))
    graph = GraphReport(id="0", nodes=collected.nodes, dynamic=collected.dynamic, seconds=collected.seconds)
    for result in collected.results:
        graph.add(result)
        report.fell_back(result)
    report.graphs.append(graph)


class _Standalone(GraphPasses):
    """The passes with the version of the package in their identity, as the backend has it."""

    def uuid(self) -> str:
        return f"standalone/{dsv4_compile.__version__}/{super().uuid()}"


# Nobody packs parameters here (the hook sees a graph, not its parameters), so linears are spread over streams or left.
post_grad_pass = _Standalone((MhcPass(), ProjectionsPass("auto", pack=False)), unreported=_report)
"""One `CustomGraphPass`: set it as `torch._inductor.config.post_grad_custom_post_pass`."""
