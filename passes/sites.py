"""What a pass found: frozen records that travel from the passes to the compile report."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch.fx import Node  # the command line tool reads these records and does not wait for torch

__all__ = [
    "Branch",
    "BranchSite",
    "LinearInfo",
    "MeasuredChoice",
    "MhcSite",
    "Missed",
    "PassResult",
    "ProjectionGroup",
    "SharedOperand",
    "module_path",
    "source_line",
    "source_location",
]


@dataclass(frozen=True)
class LinearInfo:
    """One linear of a group. `stream` is 0 for the main stream, 1.. for an auxiliary one: where it runs, or where it
    may if the strategy is "measured". `operator` is the qualified name of somebody else's operator that it is, empty
    for products of ours: it has no part in what is measured."""

    name: str
    out_features: int
    dtype: str
    stream: int = 0
    operator: str = ""


@dataclass(frozen=True)
class MeasuredChoice:
    """What runs for a range of token counts: those up to `tokens` (None: all) and above the range before.

    `runs` says which linears are read as one weight where that is the choice. `microseconds` has each strategy that was
    timed, none where `source` is a default.
    """

    tokens: int | None
    strategy: str
    source: str
    microseconds: Mapping[str, float]
    runs: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class ProjectionGroup:
    """Linears that read one activation, and how they run.

    Where `strategy` is "measured" the choice is made when the graph runs; `measured` is what it is so far, filled in
    when the report is read. `packs` is how many stretches of memory the weights of such a group are to be laid into.
    `columns` is the width of the activation, `biased` which linears have a bias. `source` is the user's line of the
    first linear, `file.py:123` with the whole path.
    """

    site: str
    input: str
    linears: tuple[LinearInfo, ...]
    strategy: str
    reason: str
    columns: int = 0
    biased: tuple[bool, ...] = ()
    packs: int = 0
    measured: tuple[MeasuredChoice, ...] = ()
    source: str = field(default="", compare=False)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> ProjectionGroup:
        """The group that `dataclasses.asdict` made `record` of, also when it has been JSON in between."""
        lists = {
            "linears": tuple(LinearInfo(**linear) for linear in record["linears"]),
            "biased": tuple(record["biased"]),
            "measured": tuple(
                MeasuredChoice(**{**choice, "runs": tuple(map(tuple, choice["runs"]))}) for choice in record["measured"]
            ),
        }
        return cls(**{**record, **lists})


@dataclass(frozen=True)
class Branch:
    """A chain of operators on a stream: 0 for that of the caller, 1.. for an auxiliary one. `microseconds` is an
    estimate."""

    stream: int
    microseconds: float
    nodes: int


@dataclass(frozen=True)
class BranchSite:
    """Pieces that are alike (`count` of them), and the branches that each was divided into; none where `reason` says
    why not.

    `serial` and `forked` are estimates of what such a piece takes without and with branches, in microseconds. `site`
    is the module path of most operators of the first one.
    """

    site: str
    branches: tuple[Branch, ...] = ()
    serial: float = 0.0
    forked: float = 0.0
    reason: str = ""
    count: int = 0


@dataclass(frozen=True)
class SharedOperand:
    """Batched products of a module that read each matrix once where it was copied `times` times: for heads that share
    it, or for sequences. `products` is how many, `source` the user's line of the first. `reason`: why they are left."""

    site: str
    times: int
    products: int
    reason: str = ""
    source: str = field(default="", compare=False)


@dataclass(frozen=True)
class MhcSite:
    """One piece of mHC arithmetic. `kernel` is the family that runs it; "inductor" where it was left as it is.
    `mixing` is the dtype that `post` and `comb` are rounded to before they are multiplied: "float32" (or "float64" of a
    float64 residual) where they are not, "bfloat16/float32" where only `post` is; None without `hc_post`.
    `source` is the user's line of its first result, `file.py:123` with the whole path."""

    site: str
    form: Literal["pre", "post", "post_pre", "head"]
    norm_fused: bool
    kernel: str
    streams: int
    hidden: int
    iters: int | None = None
    eps: Mapping[str, float] = field(default_factory=dict)
    mixing: str | None = None
    source: str = field(default="", compare=False)


@dataclass(frozen=True)
class Missed:
    """A place that looked like a site and was left alone, and the first thing that stopped it.

    `source` is the user's line that made the place's first node, `file.py:123` with the whole path, empty when unknown.
    """

    kind: Literal["mhc", "projections", "attention"]
    site: str
    reason: str
    source: str = field(default="", compare=False)


@dataclass(frozen=True)
class PassResult:
    """What one pass did to one graph."""

    mhc: tuple[MhcSite, ...] = ()
    projections: tuple[ProjectionGroup, ...] = ()
    attention: tuple[SharedOperand, ...] = ()
    missed: tuple[Missed, ...] = ()
    effective: tuple[tuple[str, str, str], ...] = ()
    """(option, value, reason) where something else runs than was asked for."""
    packs: tuple[tuple[int, ...], ...] = ()
    """Positions of the graph inputs that are to lie one behind the other in memory: those of `projections` in order."""
    kernel_seconds: float = 0.0
    """Time spent on importing and compiling a kernel family, within the pass."""


def module_path(node: Node) -> str:
    """Module path of `node` as the model's owner writes it (`model.layers.3.self_attn`), empty when unknown."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    return _module_path(list(stack.values())[-1][0])


@functools.lru_cache(maxsize=4096)
def _module_path(path: str) -> str:
    path = re.sub(r"^L\[['\"](\w+)['\"]\]", r"\1", path)
    path = re.sub(r"\._modules\[['\"]([^'\"]+)['\"]\]", r".\1", path)
    path = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", path)
    return path.removeprefix("self.") if path != "self" else ""


def source_line(node: Node) -> str:
    """`file.py:123` of the user's code that made `node`, empty when unknown."""
    return source_location(node).rpartition("/")[2]


def source_location(node: Node) -> str:
    """As `source_line`, with the whole path of the file."""
    trace = node.meta.get("stack_trace") or ""
    innermost = re.match(r'File "([^"]+)", line (\d+)', trace[max(0, trace.rfind('File "')) :])
    return f"{innermost[1]}:{innermost[2]}" if innermost else ""
