"""Which graph the passes are at: Inductor runs them on graphs within the graph as well, mostly before it."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Graph

from dsv4_compile.dump.index import StageEntry
from dsv4_compile.dump.nodes import nested

__all__ = ["Order"]


class Order:
    """Names of stages: `mhc`, and `true_graph_0/mhc` for that of a graph within the graph.

    The name of such a graph is known when the graph around it comes; till then it is a number: `inner_1/mhc`.

    Args:
        graph: that of Dynamo, where there is one.
    """

    def __init__(self, graph: Graph | None = None) -> None:
        self._has_inner = graph is not None and any(True for _ in nested(graph))
        self._begun: list[tuple[str, Graph]] = []

    def begin(self, graph: Graph, stages: Sequence[StageEntry]) -> None:
        """The passes begin with `graph`. The stages of those before that turn out to be within it get its name."""
        within = {id(inner): path for path, inner in nested(graph)}
        for number, (prefix, earlier) in enumerate(self._begun):
            path = within.get(id(earlier))
            if path is None or not prefix or any(known == f"{path}/" for known, _ in self._begun):
                continue
            for stage in stages:
                if stage.name.startswith(prefix):
                    stage.name = f"{path}/{stage.name.removeprefix(prefix)}"
            self._begun[number] = (f"{path}/", earlier)
        self._begun.append((self._prefix(graph), graph))

    def name(self, stage: str) -> str:
        """The name of a stage of the graph that the passes are at."""
        return self._begun[-1][0] + stage if self._begun else stage

    def _prefix(self, graph: Graph) -> str:
        # AOTAutograd describes the inputs of the graph that it makes, and not those of graphs within it.
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        is_inner = self._has_inner and bool(inputs) and not any("desc" in node.meta for node in inputs)
        number = len(self._begun) + 1
        if is_inner:
            return f"inner_{number}/"
        return f"again_{number}/" if any(not prefix for prefix, _ in self._begun) else ""
