"""The passes on their own, for a hook of Inductor's configuration or vLLM's: `dsv4_compile.post_grad_pass`.

There is no `options=` here. Of `DSV4_OPTIONS` it is `dump_dir` that counts.
"""

from __future__ import annotations

import functools
import logging

from torch.fx import Graph

import dsv4_compile
from dsv4_compile.alone import IDENTITY, run_alone
from dsv4_compile.dump.limit import limit
from dsv4_compile.dump.writer import observe
from dsv4_compile.options import OptionError, Options
from dsv4_compile.passes.mhc import MhcPass
from dsv4_compile.passes.pipeline import GraphPasses, is_collecting
from dsv4_compile.passes.projections import ProjectionsPass
from dsv4_compile.report import new_report

__all__ = ["post_grad_pass"]

logger = logging.getLogger("dsv4_compile")


class _Standalone(GraphPasses):
    """The passes with the version of the package in their identity, as the backend has it. Every graph that comes
    without the backend gets a report of its own, and a dump where `DSV4_OPTIONS` names a `dump_dir`."""

    def __call__(self, graph: Graph) -> None:
        if is_collecting():
            super().__call__(graph)
            return
        folder = _dump_dir()
        asked = {**Options().to_dict(), "dump_dir": folder}
        run_alone(super().__call__, graph, new_report("cpu", asked, dict(asked)), folder)

    def uuid(self) -> str:
        dump = "" if _dump_dir() is None else IDENTITY
        return f"{dump}standalone/{dsv4_compile.__version__}/{super().uuid()}"


def _dump_dir() -> str | None:
    """What `DSV4_OPTIONS` says. Here nobody can be told by an exception that it cannot be read: it is logged."""
    try:
        limit()
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
