"""The report of a compilation: what was asked for, what was done, what was not, and why.

Importing this brings no torch: the command line tool reads reports, too.
"""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dsv4_compile.options import DISABLE_VARIABLE, OptionError, disabled
from dsv4_compile.passes.sites import (
    BranchSite,
    LinearInfo,
    MeasuredChoice,
    MhcSite,
    Missed,
    PassResult,
    ProjectionGroup,
    SharedOperand,
)

__all__ = [
    "TAKEN_OVER",
    "CompileReport",
    "CudaGraphs",
    "GraphReport",
    "Piece",
    "branch_text",
    "capture_lines",
    "choice_text",
    "form_text",
    "group_text",
    "mhc_text",
    "new_report",
    "report",
    "reports",
    "shared_text",
    "summary",
]

_KEEP = 64
"""Reports kept; the oldest go first."""
TAKEN_OVER = "taken over from another graph"
"""The end of the reason of a piece whose code was there already."""
_UNSEEN = ("compiled without replacements", "left as it is", "loaded from Inductor's cache; what the passes did")
"""How notes begin that say why it is not known what could have matched."""


@dataclass(frozen=True)
class Piece:
    """A subgraph with one key."""

    name: str
    key: str
    shared_with: int
    kind: str
    reason: str
    nodes: int


@dataclass
class CudaGraphs:
    """Capture and replay of one graph.

    `mode` is `full` when one CUDA graph holds a call, `piecewise` when several do, else `off`. `sizes` are the token
    counts that are captured, `bytes` what they take, `fallbacks` what is not replayed: the `reason`, the first `piece`
    and the number of `tokens` where one is meant.
    """

    mode: str = "off"
    sizes: list[int] = field(default_factory=list)
    replays: int = 0
    bytes: int = 0
    fallbacks: list[dict[str, str]] = field(default_factory=list)


@dataclass
class GraphReport:
    """One graph that Dynamo handed over.

    `seconds` are those of each pass, of the kernel families as `kernels`, and of the compiler with AOTAutograd, which
    is apart for a graph in pieces.

    `pieces` and `cudagraphs` describe capture, and change while the graph runs; Inductor's own CUDA graphs
    (`mode="reduce-overhead"`) are not counted here. `streams` is how many auxiliary streams the graph asks
    for, at most the option `num_streams`; on a device without streams it asks and gets none. `split_ops` are those of
    the option that the graph has. `branches` are the pieces that the option `branches` was about.
    """

    id: str
    nodes: int = 0
    dynamic: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    projections: list[ProjectionGroup] = field(default_factory=list)
    mhc: list[MhcSite] = field(default_factory=list)
    attention: list[SharedOperand] = field(default_factory=list)
    missed: list[Missed] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    branches: list[BranchSite] = field(default_factory=list)
    cudagraphs: CudaGraphs = field(default_factory=CudaGraphs)
    streams: int = 0
    split_ops: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def measured(self) -> list[ProjectionGroup]:
        """`projections` with what has been chosen for each of them by now, which is known once the graph has run."""
        from dsv4_compile.kernels import linear

        choices = linear.choices()
        return [dataclasses.replace(group, measured=_choices_of(group, choices)) for group in self.projections]

    def add(self, result: PassResult) -> None:
        """Takes up what one pass did."""
        self.mhc += result.mhc
        self.projections += result.projections
        self.attention += result.attention
        self.missed += result.missed
        self.streams = max([self.streams, *(linear.stream for g in result.projections for linear in g.linears)])


@dataclass
class CompileReport:
    """All graphs of one `torch.compile(...)`; graphs are added as Dynamo meets new shapes."""

    version: str
    torch: str
    device: str
    requested: dict[str, Any]
    effective: dict[str, Any]
    graphs: list[GraphReport] = field(default_factory=list)

    def fell_back(self, result: PassResult) -> None:
        """Takes up where something else runs than was asked for."""
        for option, value, reason in result.effective:
            self.effective[option] = {"value": value, "reason": reason}

    @property
    def streams(self) -> dict[str, int]:
        """Auxiliary streams that exist in this process now, by device: those of every model, as they share them."""
        from dsv4_compile.kernels.streams import stream_counts

        return stream_counts()

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe. `effective` maps an option to its value, or to {"value", "reason"} where it differs."""
        known = dataclasses.replace(
            self, graphs=[dataclasses.replace(graph, projections=graph.measured()) for graph in self.graphs]
        )
        plain: dict[str, Any] = json.loads(json.dumps({**dataclasses.asdict(known), "streams": self.streams}))
        return plain

    def to_json(self) -> str:
        """`to_dict()` as text."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        lines = [f"dsv4_compile {self.version}, torch {self.torch}, {self.device}"]
        for option, value in self.effective.items():
            if isinstance(value, Mapping) and set(value) == {"value", "reason"}:
                lines.append(f"  {option}: {self.requested[option]} -> {value['value']} ({value['reason']})")
        for device, count in self.streams.items():
            lines.append(f"  auxiliary streams of {device}: {count}, shared by every model of the process")
        for graph in self.graphs:
            lines += _graph_lines(graph)
        return "\n".join(lines)


def _graph_lines(graph: GraphReport) -> list[str]:
    shapes = "dynamic" if graph.dynamic else "static"
    times = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in graph.seconds.items())
    lines = [f"graph {graph.id}: {graph.nodes} nodes, {shapes} shapes" + (f" ({times})" if times else "")]
    if _nothing_matched(graph):
        lines.append("  nothing matched")
    lines += [f"  note: {note}" for note in graph.notes]
    lines += [f"  mhc {form_text(s)} at {s.site or '(unknown module)'}: {mhc_text(s)}" for s in graph.mhc]
    for group in graph.measured():
        lines.append(f"  projections at {group.site or '(root)'}: {group_text(group)}")
        lines += [f"    {choice_text(choice, group)}" for choice in group.measured]
    for shared in graph.attention:
        lines.append(f"  shared operands at {shared.site or '(root)'}: {shared_text(shared)}")
    lines += [f"  {branch_text(site)}" for site in graph.branches]
    lines += _pieces_lines(graph)
    lines += capture_lines(graph)
    lines += [f"  missed {m.kind} at {_place(m)}: {m.reason}" for m in graph.missed]
    return lines


def _place(missed: Missed) -> str:
    """The module, and the line where it is known."""
    line = missed.source.rpartition("/")[2]
    return (missed.site or "(unknown module)") + (f" ({line})" if line else "")


def _nothing_matched(graph: GraphReport) -> bool:
    """Whether the passes have looked and found nothing, not even a place that looked like a site."""
    is_unseen = any(note.startswith(_UNSEEN) for note in graph.notes)
    return not (graph.mhc or graph.projections or graph.attention or graph.missed or is_unseen)


def _pieces_lines(graph: GraphReport) -> list[str]:
    """How many pieces there are, of which kind, and which of them needed no compilation."""
    if not graph.pieces:
        return []
    kinds = ", ".join(f"{n} {kind}" for kind, n in _counts(piece.kind for piece in graph.pieces))
    distinct = len({piece.key for piece in graph.pieces})
    taken = len({piece.key for piece in graph.pieces if piece.reason.endswith(TAKEN_OVER)})
    programs = f"; {distinct} distinct" if len(graph.pieces) > 1 else ""
    return [f"  pieces: {kinds}{programs}" + (f", {taken} of them {TAKEN_OVER}" if taken else "")]


def capture_lines(graph: GraphReport) -> list[str]:
    """What is captured, and what is not and why."""
    known = graph.cudagraphs
    lines = []
    if known.mode != "off":
        captured = sum(piece.kind == "captured" for piece in graph.pieces)
        sizes = ", ".join(map(str, known.sizes)) or "no size yet"
        lines.append(
            f"  cuda graphs: {known.mode}, {captured} of {len(graph.pieces)} pieces at {sizes} tokens; "
            f"{known.replays} replays, {known.bytes / 2**20:.1f} MiB"
        )
    for reason in dict.fromkeys(one["reason"] for one in known.fallbacks):
        at = sorted({one["tokens"] for one in known.fallbacks if one["reason"] == reason} - {""}, key=int)
        where = f" at {', '.join(at)} tokens" if at else ""
        lines.append(f"  not captured{where}: {reason}")
    return lines


def summary(graph: GraphReport) -> str:
    """What was done to a graph, in one line for a log."""
    what = [
        f"{n} x mhc {form} ({kernel})" for (form, kernel), n in _counts((form_text(s), s.kernel) for s in graph.mhc)
    ]
    what += [f"{n} x projections ({strategy})" for strategy, n in _counts(g.strategy for g in graph.projections)]
    shared = sum(site.products for site in graph.attention if not site.reason)
    what += [f"{shared} x shared operands"] * bool(shared)
    what += [f"{n} missed ({reason})" for reason, n in _counts(m.reason for m in graph.missed)]
    what += ["nothing matched"] * _nothing_matched(graph)
    return f"graph of {graph.nodes} nodes: {', '.join([*what, *graph.notes])}"


def _counts(found: Iterable[Any]) -> list[tuple[Any, int]]:
    return list(Counter(found).items())


def form_text(site: MhcSite) -> str:
    """What a site is, in a word: `post+pre+norm`."""
    return site.form.replace("_", "+") + ("+norm" if site.norm_fused else "")


def mhc_text(site: MhcSite) -> str:
    """What runs at a site, and the constants that were found there."""
    iters = "" if site.iters is None else f", {site.iters} Sinkhorn iterations"
    eps = ", ".join(f"{role} {value:g}" for role, value in site.eps.items())
    rounded = f", post and comb rounded to {site.mixing}" if site.mixing not in (None, "float32", "float64") else ""
    detail = f"{site.streams} streams x {site.hidden}{rounded}{iters}" + (f", eps: {eps}" if eps else "")
    return f"kernel {site.kernel} ({detail})"


def group_text(group: ProjectionGroup) -> str:
    """How the linears of a group run, and why."""
    members = ", ".join(_linear(linear, group.strategy) for linear in group.linears)
    return f"{group.strategy} [{members}] ({group.reason})"


def shared_text(site: SharedOperand) -> str:
    """What a module's batched products no longer copy."""
    if site.reason:
        return f"{site.products} batched products with {site.times} copies are {site.reason}"
    products = "a batched product reads" if site.products == 1 else f"{site.products} batched products read"
    return f"{products} in place what was copied {site.times} times"


def branch_text(site: BranchSite) -> str:
    """Which branches run on which stream, or why there are none."""
    where = f"at {site.site or '(unknown module)'}" + (f" and {site.count - 1} like it" if site.count > 1 else "")
    if not site.branches:
        return f"no branches {where}: {site.reason}"
    streams = ", ".join(
        f"{f'side stream {one.stream}' if one.stream else 'main'} {one.microseconds:.1f} us" for one in site.branches
    )
    return f"branches {where}: {streams}; {site.forked:.1f} us for {site.serial:.1f} us in turn, estimated"


def _choices_of(group: ProjectionGroup, choices: list[dict[str, Any]]) -> tuple[MeasuredChoice, ...]:
    """What is in force for a group that is measured when it runs, by token count."""
    if group.strategy != "measured":
        return ()
    linears = [linear for linear in group.linears if not linear.operator]
    own = [
        MeasuredChoice(c["tokens"], c["strategy"], c["source"], c["microseconds"], c["runs"])
        for c in choices
        if c["columns"] == group.columns
        and list(c["features"]) == [linear.out_features for linear in linears]
        and c["dtypes"] == [linear.dtype for linear in linears]
        and list(c["biased"]) == list(group.biased[: len(linears)])
        and (not any(c["streams"]) or list(c["streams"]) == [linear.stream for linear in linears])
    ]
    return tuple(sorted(own, key=lambda choice: choice.tokens or math.inf))


def choice_text(choice: MeasuredChoice, group: ProjectionGroup) -> str:
    """What was chosen for a range of token counts, and the times that decided it."""
    upto = "more tokens" if choice.tokens is None else f"up to {choice.tokens} tokens"
    packed = ["+".join(group.linears[i].name for i in run) for run in choice.runs if len(run) > 1]
    of = f" of {', '.join(packed)}" if packed and "pack" in choice.strategy else ""
    times = ", ".join(f"{name} {us:.1f} us" for name, us in sorted(choice.microseconds.items(), key=lambda t: t[1]))
    return f"{upto}: {choice.strategy}{of} ({choice.source}{f': {times}' if times else ''})"


def _linear(linear: LinearInfo, strategy: str) -> str:
    # Where products of ours run if they are measured is known when they have run.
    stream = f" on stream {linear.stream}" if linear.stream and (strategy == "streams" or linear.operator) else ""
    return f"{linear.name}:{linear.out_features}{f' by {linear.operator}' if linear.operator else ''}{stream}"


_reports: list[CompileReport] = []
_lock = threading.Lock()


def new_report(device: str, requested: dict[str, Any], effective: dict[str, Any]) -> CompileReport:
    """Opens a report and makes it the last one."""
    import torch

    from dsv4_compile import __version__

    made = CompileReport(__version__, torch.__version__, device, requested, effective)
    with _lock:
        _reports.append(made)
        del _reports[:-_KEEP]
    return made


def report() -> CompileReport:
    """The report of the last compilation.

    Raises:
        LookupError: nothing has been compiled in this process yet, or `DSV4_DISABLE` keeps reports from being made.
    """
    with _lock:
        if not _reports and _is_off():
            raise LookupError(
                f"There is no report, because {DISABLE_VARIABLE} is set in the environment: the dsv4 backend is plain "
                "Inductor then."
            )
        if not _reports:
            raise LookupError(
                "Nothing has been compiled with the dsv4 backend in this process yet: torch.compile compiles at the "
                "first call of the model."
            )
        return _reports[-1]


def _is_off() -> bool:
    try:
        return disabled()
    except OptionError:  # a compilation says so
        return False


def reports() -> list[CompileReport]:
    """The reports of all compilations of this process, oldest first (the last 64 are kept)."""
    with _lock:
        return list(_reports)
