"""The passes as one Inductor custom pass: fixed order, timed, and unable to break a compilation.

The same object serves `torch._inductor.config.joint_custom_pre_pass`, `post_grad_custom_post_pass` and vLLM's
`inductor_compile_config`. It holds settings only (no graphs, streams or events), so it can be pickled and copied.
"""

from __future__ import annotations

import contextvars
import functools
import hashlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch.fx import Graph, Node

from dsv4_compile.kernels.lowering import call_directly
from dsv4_compile.passes import verify
from dsv4_compile.passes.projections import ProjectionsPass
from dsv4_compile.passes.sites import Missed, PassResult

__all__ = ["Collected", "GraphPass", "GraphPasses", "PassError", "collecting", "is_collecting", "source_hash"]

logger = logging.getLogger("dsv4_compile.passes")


class GraphPass(Protocol):
    """Graph in, graph out: rewrites in place, idempotent, keeps `graph.lint()` true."""

    name: str

    def __call__(self, graph: Graph) -> PassResult: ...

    def uuid(self) -> str: ...


class PassError(RuntimeError):
    """A pass failed on a graph (raised under `strict` only; otherwise the pass is skipped and reported)."""


@dataclass
class Collected:
    """What the passes did to one graph while `collecting()` was open."""

    nodes: int = 0
    dynamic: bool = False
    device: str = "cpu"
    seconds: dict[str, float] = field(default_factory=dict)
    results: list[PassResult] = field(default_factory=list)
    ran: bool = False


_current: contextvars.ContextVar[Collected | None] = contextvars.ContextVar("dsv4_collected", default=None)


@contextmanager
def collecting() -> Iterator[Collected]:
    """Gathers the results of every pass that runs inside, in this thread."""
    collected = Collected()
    token = _current.set(collected)
    try:
        yield collected
    finally:
        _current.reset(token)


def is_collecting() -> bool:
    """Whether `collecting()` is open in this thread."""
    return _current.get() is not None


@functools.cache
def source_hash() -> str:
    """Hash of the source of the passes and kernels: code that changes makes other cache keys."""
    digest = hashlib.sha256()
    from dsv4_compile.kernels import linear

    folders = (Path(__file__).parent, Path(linear.__file__).parent.parent)
    for path in sorted(
        p for folder in folders for p in folder.rglob("*") if p.suffix in (".py", ".cpp", ".cu", ".cuh")
    ):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


# Where vLLM's class of passes lives.
_VLLM_MODULES = ("vllm.compilation.passes.inductor_pass", "vllm.compilation.inductor_pass")


def _inductor_class() -> type:
    """What Inductor takes a pass with an identity for; in a process with vLLM, what vLLM takes for one.

    Asked anew each time, because vLLM may be imported after the pass. Inductor's module imports Triton, so it is
    imported when asked for.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass

    found = (getattr(sys.modules.get(name), "InductorPass", None) for name in _VLLM_MODULES)
    base = next((c for c in found if isinstance(c, type)), CustomGraphPass)
    return _class_on((base,) if issubclass(base, CustomGraphPass) else (base, CustomGraphPass))


@functools.cache
def _class_on(bases: tuple[type, ...]) -> type:
    return type("GraphPasses", bases, {"__call__": GraphPasses.__call__, "uuid": GraphPasses.uuid})


class GraphPasses:
    """Runs `passes` in order. To `isinstance` it is a `torch._inductor.custom_graph_pass.CustomGraphPass`, and where
    vLLM has been imported its `InductorPass`, too: this package imports neither.

    With `DSV4_CHECK=1` the graph is checked before the first pass and after each of them, and `verify.UnsafeGraphError`
    is raised for what is not proved safe on several streams.

    Args:
        passes: the passes.
        settings: what else makes one set of passes another, for the identity (options, version).
        strict: raise `PassError` when a pass fails, instead of leaving the graph as it was before that pass.
        observe: called with ("before" or a pass name, graph) at the start and after each pass; not part of the
            identity. Must be picklable when set.
    """

    def __init__(
        self,
        passes: tuple[GraphPass, ...],
        settings: str = "",
        strict: bool = False,
        observe: Callable[[str, Graph], None] | None = None,
    ):
        self.passes = passes
        self.settings = settings
        self.strict = strict
        self.observe = observe

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return _inductor_class()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.passes, self.settings, self.strict, self.observe)

    def __call__(self, graph: Graph) -> None:
        self._run(graph, _current.get() or Collected())

    def uuid(self) -> str:
        """Equal across processes for equal settings and sources."""
        return "/".join(["dsv4", self.settings, source_hash(), *(p.uuid() for p in self.passes)])

    def _run(self, graph: Graph, collected: Collected) -> None:
        collected.ran = True
        collected.nodes = max(collected.nodes, len(graph.nodes))
        collected.dynamic |= any(_is_symbolic(n) for n in graph.nodes if n.op == "placeholder")
        collected.device = next((_device(n) for n in graph.nodes if _device(n) not in ("", "cpu")), "cpu")
        if "torch._inductor.lowering" in sys.modules:
            call_directly()
        if self.observe is not None:
            self.observe("before", graph)
        self._check(graph, "before the passes")
        for graph_pass in self.passes:
            start = time.perf_counter()
            result = self._guarded(graph_pass, graph)
            seconds = time.perf_counter() - start - result.kernel_seconds
            if result.kernel_seconds:
                collected.seconds["kernels"] = collected.seconds.get("kernels", 0.0) + result.kernel_seconds
            collected.seconds[graph_pass.name] = collected.seconds.get(graph_pass.name, 0.0) + seconds
            collected.results.append(result)
            if self.observe is not None:
                self.observe(graph_pass.name, graph)
            self._check(graph, f"after the pass {graph_pass.name}")

    def _check(self, graph: Graph, when: str) -> None:
        if verify.wanted():
            own = [p.num_streams for p in self.passes if isinstance(p, ProjectionsPass)]
            verify.enforce(graph, when, max(own, default=None))

    def _guarded(self, graph_pass: GraphPass, graph: Graph) -> PassResult:
        """The pass's result; on failure the graph as it was and the reason."""
        before = _snapshot(graph)
        try:
            result = graph_pass(graph)
            graph.lint()
            return result
        except Exception as error:
            if self.strict:
                raise PassError(f"The pass {graph_pass.name} failed: {error}") from error
            brief = f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"
            logger.warning("The pass %s was skipped: %s", graph_pass.name, brief)
            logger.debug("The pass %s failed", graph_pass.name, exc_info=True)
            _restore(graph, before)
            return PassResult(missed=(Missed(_kind(graph_pass.name), "", f"the pass failed and was skipped: {brief}"),))


def _kind(name: str) -> Literal["mhc", "projections", "attention"]:
    """What the pass of this name looks for."""
    return "projections" if name == "projections" else "attention" if name == "attention" else "mhc"


def _is_symbolic(node: Node) -> bool:
    val = node.meta.get("val")
    if isinstance(val, torch.SymInt):
        return True
    return isinstance(val, torch.Tensor) and any(isinstance(d, torch.SymInt) for d in val.shape)


def _device(node: Node) -> str:
    val = node.meta.get("val")
    return str(val.device) if isinstance(val, torch.Tensor) else ""


def _snapshot(graph: Graph) -> tuple[Graph, Any, dict[str, Any]]:
    copy = Graph()
    seen: dict[Node, Node] = {}
    result = copy.graph_copy(graph, seen)
    last = next(iter(reversed(graph.nodes)))
    return copy, result, dict(last.meta)


def _restore(graph: Graph, snapshot: tuple[Graph, Any, dict[str, Any]]) -> None:
    copy, result, meta = snapshot
    for node in reversed(list(graph.nodes)):
        node.args, node.kwargs = (), {}
    for node in reversed(list(graph.nodes)):
        graph.erase_node(node)
    seen: dict[Node, Node] = {}
    graph.graph_copy(copy, seen)
    graph.output(torch.fx.node.map_arg(result, lambda n: seen[n]))
    next(iter(reversed(graph.nodes))).meta.update(meta)
