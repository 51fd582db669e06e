"""A program recorded for one token count: CUDA graphs of what can be captured, calls of what cannot.

Recording needs one call that ran piece by piece (`observe`): it is the warm-up, and it says what the values look like.
Then each run of capturable steps is recorded. What such a segment reads is a parameter (at its address), a result of a
segment before it (at its address in the pool), or anything else: that is copied into a buffer in the pool first.
A value keeps its memory until its last reader has been recorded, and whoever shares it counts; then later recordings
use it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dsv4_compile.runtime.entries import Call, Direct, Entrance, Segment, owned
from dsv4_compile.runtime.program import Program, Step, finish, run_step
from dsv4_compile.runtime.recorder import (
    Inlets,
    Layout,
    NothingLaunchedError,
    Recorder,
    RecordingError,
    addresses,
)
from dsv4_compile.runtime.straight import straight

__all__ = ["Observed", "Tape", "observe", "record"]


@dataclass
class Observed:
    """What one call showed: the layout of each tensor by place, and whose memory a step's result shares."""

    layouts: dict[int, Layout] = field(default_factory=dict)
    shares: dict[int, int] = field(default_factory=dict)


def observe(program: Program, values: list[Any]) -> tuple[list[Any], Observed]:
    """Runs the steps one by one; returns the results and what was seen."""
    seen = Observed()
    seen.layouts.update((i, Layout.of(v)) for i, v in enumerate(values) if isinstance(v, torch.Tensor))
    for step in program.steps:
        given = {values[i].untyped_storage().data_ptr(): i for i in step.inputs if isinstance(values[i], torch.Tensor)}
        run_step(step, values)
        for place in step.outputs:
            value = values[place]
            if isinstance(value, torch.Tensor):
                seen.layouts[place] = Layout.of(value)
                # An empty view counts, too: it may hold something in the next call.
                storage = value.untyped_storage()
                source = given.get(storage.data_ptr()) if storage.nbytes() else None
                if source is not None:
                    seen.shares[place] = seen.shares.get(source, source)
    return finish(program, values), seen


@dataclass
class Tape:
    """Everything that a call of this token count does, in order.

    Attributes:
        guarded: places whose tensors have to be at `addresses`.
        lent: places of results that lie in the pool and are copied for the caller.
        failures: steps that could not be recorded, with the reason.
    """

    recorder: Recorder
    entries: list[Callable[[list[Any]], None]] = field(default_factory=list)
    addresses: list[int | None] = field(default_factory=list)
    guarded: list[int] = field(default_factory=list)
    lent: frozenset[int] = frozenset()
    failures: list[tuple[tuple[Step, ...], str]] = field(default_factory=list)
    _function: Callable[[list[Any]], list[Any]] | None = None

    @property
    def segments(self) -> list[Segment]:
        """Those that were recorded."""
        return [entry for entry in self.entries if isinstance(entry, Segment)]

    @property
    def bytes(self) -> int:
        """By which the memory of the process grew."""
        return sum(segment.recording.bytes for segment in self.segments)

    def play(self, program: Program, values: list[Any]) -> list[Any]:
        """One call; returns the results."""
        if not self.recorder.is_here:
            for entry in self.entries:
                entry(values)
            return self.results(program, values)
        if self._function is None:
            self._function = straight(program, self.entries, self.lent)
        return self._function(values)

    def turn_off(self, segment: Segment) -> None:
        """Its graph is not replayed any more."""
        segment.off, self._function = True, None

    def results(self, program: Program, values: list[Any]) -> list[Any]:
        """Those of a call whose entries have run; none of them lies in the pool."""
        for place in self.lent:
            values[place] = owned(values[place])
        return finish(program, values)


def record(program: Program, values: Sequence[Any], seen: Observed, recorder: Recorder, whole: bool = False) -> Tape:
    """The tape of a program.

    Args:
        values: the table as `begin` made it; parameters are taken from it.
        whole: what cannot be recorded together is not recorded; else it is halved until what stands in the way is
            alone.
    """
    return _Taping(program, values, seen, recorder, whole).tape()


class _Taping:
    def __init__(self, program: Program, values: Sequence[Any], seen: Observed, recorder: Recorder, whole: bool):
        self.program, self.values, self.seen, self.recorder = program, values, seen, recorder
        self.whole = whole
        self.static = set(program.static)
        self.fixed: dict[int, Any] = {}
        """Values with an address that stays, by place; they keep their memory as long as they are here."""
        self.last = self._last_readers()

    def _last_readers(self) -> dict[int, int]:
        """The number of the last step that reads a place or something that shares its memory."""
        last: dict[int, int] = {}
        for number, step in enumerate(self.program.steps):
            for place in (*step.inputs, *step.outputs):
                for owner in (place, self.seen.shares.get(place, place)):
                    last[owner] = number
        for result, _ in self.program.results:
            if result is not None:
                last[result] = last[self.seen.shares.get(result, result)] = len(self.program.steps)
        return last

    def tape(self) -> Tape:
        tape = Tape(self.recorder)
        number = 0
        for capturable, group in itertools.groupby(self.program.steps, key=lambda step: not step.apart):
            steps = tuple(group)
            number += len(steps)
            if capturable:
                self._take(steps, tape, number)
            else:
                tape.entries += [self._called(step) for step in steps]
                self._release(number)
        read = {i for segment in tape.segments for step in segment.steps for i in step.inputs}
        tape.guarded = [i for i in self.program.static if i in read]
        tape.addresses = addresses(self.values, tape.guarded)
        tape.lent = frozenset(self._lent(tape))
        return tape

    def _take(self, steps: tuple[Step, ...], tape: Tape, after: int) -> None:
        """Records steps; where they cannot be recorded together, each half by itself."""
        try:
            tape.entries.append(self._try(steps, after))
        except RecordingError as error:  # its frames hold tensors of the pool, so nothing is recorded in here
            reason, launched = str(error), not isinstance(error, NothingLaunchedError)
        else:
            self._release(after)
            return
        if launched and len(steps) > 1 and not self.whole:
            half = len(steps) // 2
            self._take(steps[:half], tape, after - len(steps) + half)
            self._take(steps[half:], tape, after)
            return
        tape.failures.append((steps, reason))
        tape.entries += [self._called(step) for step in steps]
        self._release(after)

    def _release(self, number: int) -> None:
        """Lets go of values that no step from `number` on reads."""
        for place in [p for p in self.fixed if self.last.get(p, 0) < number]:
            del self.fixed[place]

    def _called(self, step: Step) -> Callable[[list[Any]], None]:
        """A step that is not recorded."""
        layouts = [self.seen.layouts.get(place) for place in step.outputs]
        call = step.code.call
        if call is None or not step.is_fixed or None in layouts or call.device != self.recorder.device:
            return Call(step)
        known = tuple((one.shape, one.stride) for one in layouts if one is not None)
        return Direct(step, call, known)

    def _lent(self, tape: Tape) -> Iterator[int]:
        """Results in the pool: made there, or views of what was."""
        inside = {
            place for segment in tape.segments for place, value in segment.made if isinstance(value, torch.Tensor)
        }
        for place, _ in self.program.results:
            if place is not None and (place in inside or self.seen.shares.get(place) in inside):
                yield place

    def _try(self, steps: tuple[Step, ...], after: int) -> Segment:
        before = dict(self.fixed)
        try:
            return self._segment(steps, after)
        except RecordingError:
            self.fixed = before
            raise

    def _segment(self, steps: tuple[Step, ...], after: int) -> Segment:
        copies: dict[int, torch.Tensor] = {}
        fed: dict[int, torch.Tensor] = {}
        reads: dict[int, Any] = {}
        inlets: Inlets | None = None

        def body() -> None:
            nonlocal inlets
            # All buffers before the first launch: they are filled before the rest runs, when nothing of it is there.
            inside = {place for step in steps for place in step.outputs}
            for place in dict.fromkeys(i for step in steps for i in step.inputs):
                if place not in inside and place not in self.static:
                    reads[place] = self._given(place, copies)
            fed.update((place, buffer) for place, buffer in copies.items() if self._is_fed(place, buffer))
            inlets = self.recorder.inlets(list(fed.values())) if fed else None
            for number, step in enumerate(steps, after - len(steps)):
                outputs = step.code.run([self.values[i] if i in self.static else self.fixed[i] for i in step.inputs])
                self.fixed.update(zip(step.outputs, outputs, strict=True))
                for place in [p for p in inside.intersection(self.fixed) if self.last[p] <= number]:
                    del self.fixed[place]

        recording = self.recorder.record(body)
        produced = [place for step in steps for place in step.outputs if place in self.fixed]
        if inlets is None:
            fed.clear()
        entrance = Entrance(
            inlets,
            tuple((place, self.recorder.borrowed(buffer)) for place, buffer in fed.items()),
            tuple((place, self.recorder.borrowed(buffer)) for place, buffer in copies.items() if place not in fed),
        )
        return Segment(
            steps,
            recording,
            entrance,
            tuple((place, self._lasting(self.fixed[place])) for place in produced),
            {place: self._lasting(value) for place, value in reads.items()},
        )

    def _is_fed(self, place: int, buffer: torch.Tensor) -> bool:
        """Whether bytes may be copied as they are: no element is repeated, and none means another number (`conj`)."""
        return (
            0 < buffer.numel() == math.prod(self.seen.layouts[place].shape)
            and buffer.is_contiguous()
            and not buffer.is_complex()
        )

    def _given(self, place: int, copies: dict[int, torch.Tensor]) -> Any:
        """What the steps are to read at `place`, and a buffer in `copies` when it is one."""
        if place not in self.fixed:
            layout = self.seen.layouts.get(place)
            if layout is None:  # a size of the token count: the same at each replay
                self.fixed[place] = self.values[place]
            else:
                self.fixed[place], copies[place] = layout.buffer()
        return self.fixed[place]

    def _lasting(self, value: Any) -> Any:
        return self.recorder.borrowed(value) if isinstance(value, torch.Tensor) else value
