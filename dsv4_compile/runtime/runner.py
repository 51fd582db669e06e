"""Calls of a compiled graph: which token counts are recorded, when, and what happens when they cannot be."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsv4_compile.passes.capturability import Tokens
from dsv4_compile.report import CudaGraphs
from dsv4_compile.runtime.entries import Segment
from dsv4_compile.runtime.program import Program, begin, run_steps
from dsv4_compile.runtime.recorder import Recorder
from dsv4_compile.runtime.tape import Tape, observe, record
from dsv4_compile.verification import difference

__all__ = ["Ahead", "Policy", "Runner", "plain"]

logger = logging.getLogger("dsv4_compile")

MAX_TOKENS = 512
"""Recorded when first seen; above, the host is not what a call waits for."""
MAX_SIZES = 64
"""Token counts of one graph that are recorded when first seen."""
MAX_MOVES = 8
"""Times that a token count is recorded again because a parameter has another address."""


@dataclass(frozen=True)
class Ahead:
    """How calls of a token count are made up: `inputs(n)` are the graph's with None for parameters, or None if the
    graph is not good for `n`."""

    inputs: Callable[[int], list[Any] | None]


@dataclass(frozen=True)
class Policy:
    """What is recorded.

    Attributes:
        sizes: the token counts, or None for each that is seen.
        budget: bytes that all graphs of the process may take, or None.
        verify: replays of a token count that are compared with the same pieces run one by one. So many calls of the
            graph go by before anything is recorded, because those are compared as a whole, on copies of the inputs.
        strict: raise where something is not recorded or differs.
        whole: a call is one graph or none.
        ahead: how the `sizes` are called before the first call, or why they are not.
    """

    sizes: tuple[int, ...] | None = None
    budget: int | None = None
    verify: int = 0
    strict: bool = False
    whole: bool = False
    ahead: Ahead | str = "none were asked for"

    def takes(self, tokens: Tokens) -> bool:
        """Whether a graph of so many tokens is recorded, or may be where the count is not fixed."""
        if tokens.symbols or tokens.count is None:
            return True
        return tokens.count <= MAX_TOKENS if self.sizes is None else tokens.count in self.sizes


class CaptureError(RuntimeError):
    """Under `strict`: something that should be replayed is not, or gives another result."""


def plain(program: Program, inputs: list[Any]) -> list[Any]:
    """One call, piece by piece."""
    return run_steps(program, begin(program, inputs))


_total = 0
_counting = threading.Lock()


def total_bytes() -> int:
    """What all graphs of the process take."""
    return _total


def _add(size: int) -> None:
    global _total
    with _counting:
        _total += size


class Runner:
    """Calls of one graph. `changed(name, kind, reason)` is told what becomes of a piece."""

    def __init__(
        self,
        program: Program,
        recorder: Recorder,
        policy: Policy,
        report: CudaGraphs,
        changed: Callable[[str, str, str], None] = lambda *_: None,
    ):
        self.program, self.recorder, self.policy = program, recorder, policy
        self.report, self.changed = report, changed
        self.tapes: dict[tuple[Any, ...], Tape | None] = {}
        """By the sizes that the token count is made of; None for one that is not recorded."""
        self.moves: dict[tuple[Any, ...], int] = {}
        self.unverified: dict[tuple[Any, ...], int] = {}
        self._ahead_done = policy.sizes is None
        self._passing = policy.verify
        self._boxed_call = True  # AOTAutograd hands over a list then, to be emptied

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # `sys` may be gone already
            self._forget(list(self.tapes))

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """One call of the graph; empties `inputs`."""
        program, recorder = self.program, self.recorder
        values = begin(program, inputs)
        key = tuple(values[i] for i in program.tokens)
        with recorder.lock:
            # The caller may record us, or be a graph of ours that calls an operator: our graphs have no place in that.
            if self._passing or not recorder.enter():
                self._passing = max(0, self._passing - 1)
                return run_steps(program, values)
            if self._ahead_done and self.tapes.get(key, self) is None:
                return run_steps(program, values)
            recorder.is_busy = True
            try:
                return self._call(key, values)
            finally:
                recorder.is_busy = False

    def _call(self, key: tuple[Any, ...], values: list[Any]) -> list[Any]:
        if not self._ahead_done:
            self._record_ahead(values)
        if key not in self.tapes:
            return self._first(key, values)
        tape = self.tapes[key]
        if tape is None:
            return run_steps(self.program, values)
        if not self.recorder.unmoved(values, tape.addresses, tape.guarded):
            return self._moved(key, values)
        self.report.replays += 1
        if self.unverified.get(key, 0):
            return self._verified(key, tape, values)
        return tape.play(self.program, values)

    # ------------------------------------------------------------------------------------------------------ recording

    def _first(self, key: tuple[Any, ...], values: list[Any]) -> list[Any]:
        """A token count that has not been seen: the call runs piece by piece, and is recorded behind it."""
        count = self.program.count(key)
        refusal = self._refusal(count)
        if refusal is not None:
            self.tapes[key] = None
            self._note(refusal, count)
            return run_steps(self.program, values)
        return self._record(key, values)

    def _refusal(self, count: int) -> str | None:
        recorded = sum(tape is not None for tape in self.tapes.values())
        if self.policy.sizes is not None:
            return None if count in self.policy.sizes else "it is not one of capture_sizes"
        if count > MAX_TOKENS:
            return f"above {MAX_TOKENS} tokens only capture_sizes are recorded"
        if recorded >= MAX_SIZES:
            return f"{MAX_SIZES} token counts are recorded already; name those that matter in capture_sizes"
        if self.policy.budget is not None and total_bytes() >= self.policy.budget:
            return f"the graphs of the process take {total_bytes()} bytes, and the budget is {self.policy.budget}"
        return None

    def _record(self, key: tuple[Any, ...], values: list[Any]) -> list[Any]:
        table = list(values)
        results, seen = observe(self.program, values)
        with self.recorder.session():
            tape = record(self.program, table, seen, self.recorder, self.policy.whole)
        count = self.program.count(key)
        for steps, reason in tape.failures:
            for step in steps:
                self.changed(step.name, "compiled", reason)
            self._fell_back(reason, count, steps[0].name)
        for segment in tape.segments:
            for step in segment.steps:
                self.changed(step.name, "captured", "")
        self._keep(key, tape if tape.segments else None)
        return results

    def _keep(self, key: tuple[Any, ...], tape: Tape | None) -> None:
        over = tape is not None and self.policy.budget is not None and total_bytes() + tape.bytes > self.policy.budget
        if over:
            assert tape is not None
            self._fell_back(
                f"its graphs take {tape.bytes} bytes, with which the budget of {self.policy.budget} would be exceeded",
                self.program.count(key),
            )
            tape = None
        self.tapes[key] = tape
        if tape is not None:
            _add(tape.bytes)
            self.unverified[key] = self.policy.verify
            self.report.bytes += tape.bytes
            self.report.sizes = sorted({*self.report.sizes, self.program.count(key)})

    def _forget(self, keys: Sequence[tuple[Any, ...]]) -> None:
        for key in keys:
            tape = self.tapes.pop(key, None)
            if tape is not None:
                _add(-tape.bytes)
                self.report.bytes -= tape.bytes

    def _moved(self, key: tuple[Any, ...], values: list[Any]) -> list[Any]:
        """A parameter has another address: the graphs read the old one."""
        self._forget([key])
        self.moves[key] = self.moves.get(key, 0) + 1
        if self.moves[key] > MAX_MOVES:
            self.tapes[key] = None
            self._fell_back(f"parameters have moved {self.moves[key]} times", self.program.count(key))
            return run_steps(self.program, values)
        return self._record(key, values)

    def _record_ahead(self, values: list[Any]) -> None:
        """Records `capture_sizes`, the largest first, so that the others fit into its memory."""
        self._ahead_done = True
        ahead = self.policy.ahead
        if isinstance(ahead, str):
            self._note(f"capture_sizes are recorded when they are first seen: {ahead}", None)
            return
        static = set(self.program.static)
        written = {i for step in self.program.steps for i in step.writes if i in static}
        for count in sorted(self.policy.sizes or (), reverse=True):
            made = ahead.inputs(count)
            if made is None:
                self._note("this graph does not take so many tokens", count)
                continue
            kept = {i: values[i].clone() for i in written}
            inputs = [values[i] if i in static else one for i, one in enumerate(made)]
            table = begin(self.program, inputs)
            key = tuple(table[i] for i in self.program.tokens)
            if key not in self.tapes:
                with torch.random.fork_rng():
                    self._record(key, table)
            for i, value in kept.items():
                values[i].copy_(value)

    # -------------------------------------------------------------------------------------------------------- checking

    def _verified(self, key: tuple[Any, ...], tape: Tape, values: list[Any]) -> list[Any]:
        """As `Tape.play`, with each segment compared with the same steps without a graph."""
        self.unverified[key] -= 1
        for entry in tape.entries:
            if isinstance(entry, Segment) and not entry.off:
                problem = _compare(entry, values, set(self.program.static))
                if problem is not None:
                    tape.turn_off(entry)
                    reason = f"its graph gave another result than its code: {problem}"
                    for step in entry.steps:
                        self.changed(step.name, "compiled", reason)
                    self._fell_back(reason, self.program.count(key), entry.steps[0].name)
                    entry(values)
            else:
                entry(values)
        return tape.results(self.program, values)

    def _fell_back(self, reason: str, tokens: int | None, piece: str = "") -> None:
        self._note(reason, tokens, piece)
        if self.policy.strict:
            raise CaptureError(f"{piece or 'A call'} of {tokens} tokens is not replayed: {reason}.")

    def _note(self, reason: str, tokens: int | None, piece: str = "") -> None:
        if len(self.report.fallbacks) < 4 * MAX_SIZES:
            known = {"reason": reason, "piece": piece, "tokens": "" if tokens is None else str(tokens)}
            self.report.fallbacks.append(known)
        logger.info("Not replayed%s: %s.", f" at {tokens} tokens" if tokens is not None else "", reason)


def _compare(segment: Segment, values: list[Any], static: set[int]) -> str | None:
    """Replays `segment`, and runs it on the same inputs; what it writes is written once in the end."""
    written = sorted({i for step in segment.steps for i in step.writes if i in static})
    before = {i: values[i].clone() for i in written}
    segment(values)
    after = {i: values[i].clone() for i in written}
    for i, value in before.items():
        values[i].copy_(value)
    actual = {place: value.clone() if isinstance(value, torch.Tensor) else value for place, value in segment.made}
    segment.entrance.fill(values)  # the graph may not have done it
    expected = segment.run(values)
    problem = difference([*actual.values(), *after.values()], [*expected.values(), *(values[i] for i in written)])
    if problem is not None:
        for i, value in before.items():
            values[i].copy_(value)
    return problem
