"""Which pieces run as branches on several streams, and what the report says of it.

A piece that pays (`passes/branches.py`) and is proved to be safe (`passes/verify.py`) becomes up to three: what is in
front of the fork, the branches, and what is behind the join. Each branch is a piece with a key of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from dsv4_compile.options import Options
from dsv4_compile.passes import branches, verify
from dsv4_compile.passes.branches import Declined, Split
from dsv4_compile.passes.capturability import Tokens
from dsv4_compile.passes.keys import Key
from dsv4_compile.passes.pieces import Cut
from dsv4_compile.passes.sites import Branch, BranchSite, module_path
from dsv4_compile.report import CompileReport, GraphReport

__all__ = ["Brancher", "Branching", "refusal", "settle"]


@dataclass(frozen=True)
class Branching:
    """As the options say: side streams, and the token count above which nothing leaves the main one."""

    streams: int
    max_tokens: int


def refusal(options: Options, in_pieces: bool, device: str) -> str | None:
    """Why `branches` does nothing on a type of device, or None.

    Args:
        in_pieces: whether graphs are cut.
    """
    if device != "cuda":
        return f"there are no streams on {device}"
    if options.num_streams == 0:
        return "num_streams is 0"
    if options.stream_max_tokens == 0:
        return "stream_max_tokens is 0"
    return None if in_pieces else "graphs are not cut into pieces (cudagraphs is off, and DSV4_PIECES is not 1)"


def settle(report: CompileReport, graph: GraphReport, refused: str | None) -> None:
    """Says in the report whether any of its graphs has branches by now, and if not, why the last one has none."""
    graph.streams = max([graph.streams, *(len(site.branches) - 1 for site in graph.branches)])
    if any(site.branches for one in report.graphs for site in one.branches):
        report.effective["branches"] = True
        return
    reasons = [refused, *(site.reason for site in graph.branches), *graph.notes, "the graph has no pieces"]
    report.effective["branches"] = {"value": False, "reason": next(reason for reason in reasons if reason)}


@dataclass(frozen=True)
class _Division:
    """How the pieces of one key are divided: the place in the report, and the operators of each step by position."""

    place: int
    steps: tuple[tuple[tuple[int, ...], ...], ...]


@dataclass
class Brancher:
    """Divides the pieces of one graph.

    Attributes:
        captures: whether something captures the pieces that can be.
        sites: for the report.
        device: whose streams the branches run on.
    """

    branching: Branching
    tokens: Tokens
    captures: bool
    sites: list[BranchSite]
    device: torch.device
    _known: dict[tuple[str, int, bool], _Division] = field(default_factory=dict)

    def divide(self, one: Cut, graph: Graph, key: Key) -> list[tuple[Cut, ...]]:
        """The steps of a piece: each a piece, or the branches of a fork.

        Args:
            graph: the piece as a graph of its own.
            key: that of the whole piece.
        """
        captured = self.captures and not one.apart
        # Views that a piece takes from another come first, so the last nodes are its own.
        identity = (key.hash, len(one.nodes), captured)
        if identity not in self._known:
            self._known[identity] = self._divided(graph, len(one.nodes), captured)
        division = self._known[identity]
        steps = [tuple(Cut(tuple(one.nodes[i] for i in part), one.apart) for part in step) for step in division.steps]
        site = self.sites[division.place]
        self.sites[division.place] = replace(site, count=site.count + 1)
        return steps or [(one,)]

    def _divided(self, graph: Graph, own: int, captured: bool) -> _Division:
        split = self._proved(graph, captured)
        place = len(self.sites)
        if isinstance(split, Declined):
            self.sites.append(BranchSite(_path(graph), reason=split.reason))
            return _Division(place, ())
        sides = [
            Branch(stream, us, len(part))
            for stream, (us, part) in enumerate(zip(split.us, split.branches, strict=True))
        ]
        reason = f"{split.serial - split.forked:.1f} us fewer than in turn"
        self.sites.append(BranchSite(_path(graph), tuple(sides), split.serial, split.forked, reason))
        calls = [node for node in graph.nodes if node.op == "call_function"]
        position = {node: i for i, node in enumerate(calls[len(calls) - own :])}
        steps = [[split.prefix], split.branches, [split.suffix]]
        placed = [tuple(_positions(part, position) for part in step) for step in steps]
        return _Division(place, tuple(step for step in placed if any(step)))

    def _proved(self, graph: Graph, captured: bool) -> Split | Declined:
        """The branches of a piece, if they pay and are safe."""
        obstacle = self._obstacle(graph)
        if obstacle:
            return Declined(obstacle)
        split = branches.find(graph, self.branching.streams, captured)
        if isinstance(split, Split):
            faults = verify.check_fork(graph, split.prefix, split.branches, split.suffix)
            if faults:
                return Declined(f"it is not proved to be safe: {faults[0]}")
        return split

    def _obstacle(self, graph: Graph) -> str:
        """Why no piece like this one has branches, or an empty string."""
        count, limit = self.tokens.count, self.branching.max_tokens
        if count is None:
            return "the token count of the graph is not known"
        if not self.tokens.symbols and int(count) > limit:
            return f"it has {count} tokens, and above {limit} (stream_max_tokens) nothing leaves the main stream"
        values = [x for node in graph.nodes for x in tree_leaves(node.meta.get("val")) if isinstance(x, torch.Tensor)]
        devices = sorted({str(x.device) for x in values})
        return f"it is on {' and '.join(devices)}" if {*devices} - {str(self.device)} else ""


def _positions(part: Sequence[Node], position: dict[Node, int]) -> tuple[int, ...]:
    return tuple(position[node] for node in part if node in position)


def _path(graph: Graph) -> str:
    """The module that most operators are of, without what is inside of it."""
    paths = [path for node in graph.nodes if node.op == "call_function" and (path := module_path(node))]
    return max(set(paths), key=lambda path: (paths.count(path), path), default="")
