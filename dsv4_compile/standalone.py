"""The passes on their own, for a hook of Inductor's configuration or vLLM's: `dsv4_compile.post_grad_pass`."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from typing import Any

import dsv4_compile
from dsv4_compile.alone import IDENTITY, run_alone
from dsv4_compile.dump.limit import limit
from dsv4_compile.dump.writer import observe
from dsv4_compile.options import OptionError, Options, disabled
from dsv4_compile.passes.attention import AttentionPass
from dsv4_compile.passes.mhc import MhcPass
from dsv4_compile.passes.pipeline import GraphPass, GraphPasses, is_collecting
from dsv4_compile.passes.projections import ProjectionsPass
from dsv4_compile.passes.vllm_mhc import VllmMhcPass
from dsv4_compile.report import CompileReport, GraphReport, new_report
from dsv4_compile.vllm.log import announce

__all__ = ["MAX_TOKENS_VARIABLE", "StandalonePass", "graph_pass", "post_grad_pass", "token_limit"]

MAX_TOKENS_VARIABLE = "DSV4_VLLM_MAX_TOKENS"
"""Most tokens of the ranges that vLLM compiles with the pass."""

_OF_THE_BACKEND = (
    "cudagraphs",
    "capture_sizes",
    "capture_memory",
    "split_ops",
    "branches",
    "verify",
    "compiler",
    "inductor",
)
"""Options that say how a graph is compiled and run, which somebody else does here."""

# A name below vLLM's: its logging prints those, and an operator reads them beside vLLM's own lines.
logger = logging.getLogger("vllm.dsv4_compile")


class StandalonePass(GraphPasses):
    """The passes of `options`, with a report of its own for each graph, and a dump where a `dump_dir` is named.

    It holds settings only, so it can be copied and pickled, and it is picklable into a process that has not imported
    this package: the operators are then registered by unpickling it.

    Args:
        options: what to do; those of compiling and capturing (`compiler`, `cudagraphs`, ...) mean nothing, and the
            report says so.
        max_tokens: the largest token count of a range that vLLM may use it for, or None.
        idle: why it does nothing at all, or None.
    """

    def __init__(self, options: Options, max_tokens: int | None = None, idle: str | None = None):
        self.options, self.max_tokens, self.idle = options, max_tokens, idle
        settings = f"{options.fingerprint()}/{max_tokens}/{idle is not None}"
        passes = () if idle else _passes(options)
        super().__init__(passes, settings, strict=options.strict, observe=observe)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.options, self.max_tokens, self.idle)

    def __call__(self, graph: Any) -> None:
        if self.idle is not None:
            self._note(f"left as it is: {self.idle}")
            return
        if is_collecting():
            super().__call__(graph)
            return
        announce(run_alone(super().__call__, graph, self._report(), self._dump_dir()))

    def uuid(self) -> str:
        dump = "" if self._dump_dir() is None else IDENTITY
        return f"{dump}standalone/{dsv4_compile.__version__}/{super().uuid()}"

    def _dump_dir(self) -> str | None:
        return self.options.dump_dir or _dump_dir()

    def is_applicable_for_range(self, compile_range: Any) -> bool:
        """vLLM's question whether to run on a graph for token counts from `compile_range.start` to `.end`."""
        end = getattr(compile_range, "end", None)
        if self.max_tokens is None or end is None or end <= self.max_tokens:
            return True
        self._note(
            f"left as it is: vLLM compiles it for {compile_range.start} to {end} tokens, and {MAX_TOKENS_VARIABLE} "
            f"allows {self.max_tokens}"
        )
        return False

    def _report(self) -> CompileReport:
        asked = {**self.options.to_dict(), "dump_dir": self._dump_dir()}
        instead = Options(cudagraphs="off").to_dict()
        unused = [n for n in _OF_THE_BACKEND if n in self.options.explicit and asked[n] not in ("auto", instead[n])]
        reason = "the backend does that, and a pass on its own does not"
        effective = asked | {name: {"value": instead[name], "reason": reason} for name in unused}
        return new_report("cpu", asked, effective)

    def _note(self, text: str) -> None:
        graph = GraphReport(id="0", notes=[text])
        self._report().graphs.append(graph)
        announce(graph)


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


def _passes(options: Options) -> tuple[GraphPass, ...]:
    passes: list[GraphPass] = []
    if options.mhc != "off":
        passes += [MhcPass(options.mhc, options.deterministic), VllmMhcPass(options.mhc, options.deterministic)]
    if options.projections != "off":
        # Nobody packs parameters here (the hook sees a graph, not its parameters): linears are spread or left.
        settings = (options.projections, options.num_streams, options.stream_max_tokens)
        passes.append(ProjectionsPass(*settings, pack=False, apart=options.split_ops))
    if options.attention != "off":
        passes.append(AttentionPass())
    return tuple(passes)


def graph_pass(options: Mapping[str, Any] | None = None, max_tokens: int | None = None) -> StandalonePass:
    """A pass for `inductor_compile_config={"post_grad_custom_post_pass": ...}` of vLLM, or Inductor's configuration.

    Args:
        options: as `options=` of `torch.compile`; `DSV4_OPTIONS` in the environment overrides.
        max_tokens: as `StandalonePass`.

    Raises:
        OptionError: an option or its value is not known, or two contradict each other.
    """
    return StandalonePass(Options.resolve(options), max_tokens, "DSV4_DISABLE is set" if disabled() else None)


def _from_environment() -> StandalonePass:
    """The pass that is looked up by name. What is wrong in the environment must not keep an engine from starting."""
    try:
        return graph_pass(max_tokens=token_limit())
    except OptionError as error:
        logger.warning("dsv4: nothing is replaced: %s", error)
        return StandalonePass(Options(), None, str(error).removesuffix("."))


def token_limit() -> int | None:
    """What `DSV4_VLLM_MAX_TOKENS` says, None where it is not set.

    Raises:
        OptionError: it is no number.
    """
    text = os.environ.get(MAX_TOKENS_VARIABLE, "").strip()
    if text and not text.isdecimal():
        raise OptionError(f"{MAX_TOKENS_VARIABLE} must be a number of tokens, and it is {text!r}.")
    return int(text) if text else None


post_grad_pass = _from_environment()
"""One `CustomGraphPass` with the options of the environment as they were at import: set it as
`torch._inductor.config.post_grad_custom_post_pass`, or name it in vLLM's `inductor_passes`."""
