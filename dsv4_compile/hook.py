"""Our passes in a hook of Inductor that may already be taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from dsv4_compile.passes.pipeline import GraphPasses

__all__ = ["HOOK", "Chain", "chained"]

HOOK = "joint_custom_pre_pass"
"""The first hook that sees the functional ATen graph: Inductor then neither optimises nor lowers what we replace."""


class Chain(CustomGraphPass):
    """Runs several custom passes in one hook, in order."""

    def __init__(self, passes: tuple[Callable[[Graph], Any], ...]):
        self.passes = passes

    def __call__(self, graph: Graph) -> None:
        for graph_pass in self.passes:
            graph_pass(graph)

    def uuid(self) -> Any:
        """None (which keeps Inductor from caching) when one of the passes has no identity."""
        found = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.passes]
        return None if any(u is None for u in found) else tuple(found)


def chained(passes: GraphPasses, patches: Mapping[str, Any]) -> Any:
    """Ours after the pass that the user has set, by `options["inductor"]` or in Inductor's configuration."""
    before = patches.get(HOOK, getattr(config, HOOK))
    if before is None:
        return passes
    return Chain((*(before if isinstance(before, list | tuple) else (before,)), passes))
