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
from torch._C._dynamo.guards import assert_size_stride

from dsv4_compile.runtime.direct import bound
from dsv4_compile.runtime.program import Program, Step, finish, run_step
from dsv4_compile.runtime.recorder import Inlets, Layout, Recorder, Recording, RecordingError, addresses

__all__ = ["Entrance", "Observed", "Segment", "Tape", "observe", "record"]


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
class Entrance:
    """How inputs get to where a graph reads them: `inlets` copies contiguous ones as its first node.

    Attributes:
        fed: what it copies, as place, number of elements, and buffer.
        copies: what is copied before, as place and buffer.
    """

    inlets: Inlets | None = None
    fed: tuple[tuple[int, int, torch.Tensor], ...] = ()
    copies: tuple[tuple[int, torch.Tensor], ...] = ()

    def open(self, values: Sequence[Any]) -> list[torch.Tensor]:
        """Names the sources of the next replay; returns what has to be kept until it is launched."""
        kept: list[torch.Tensor] = []
        for place, buffer in self.copies:
            _fill(buffer, values[place])
        if self.inlets is not None:
            sources = []
            for place, count, buffer in self.fed:
                source = values[place]
                if not source.is_contiguous() or source.numel() != count:
                    source = _filled(buffer, source)
                    kept.append(source)
                sources.append(source.data_ptr())
            self.inlets.point(sources)
        return kept

    def fill(self, values: Sequence[Any]) -> None:
        """Copies now, for steps that run without the graph."""
        for place, buffer in (*self.copies, *((place, buffer) for place, _, buffer in self.fed)):
            _fill(buffer, values[place])


@dataclass
class Segment:
    """A recorded run of steps.

    Attributes:
        made: what it leaves, as place and value; tensors are borrowed from the pool.
        reads: what its steps read from elsewhere, by place, but for parameters.
    """

    steps: tuple[Step, ...]
    recording: Recording
    entrance: Entrance
    made: tuple[tuple[int, Any], ...]
    reads: dict[int, Any]
    off: bool = False

    def __call__(self, values: list[Any]) -> None:
        """Replays it."""
        if self.off:
            self.entrance.fill(values)
            self._run(values)
        else:
            kept = self.entrance.open(values)
            self.recording.replay()
            del kept
        for place, value in self.made:
            values[place] = value

    def run(self, values: Sequence[Any]) -> dict[int, Any]:
        """What the steps make of the same inputs, which `entrance` has copied, without the graph, by place."""
        table = {**dict(enumerate(values)), **self.reads}
        for step in self.steps:
            outputs = step.code.run([table[i] for i in step.inputs])
            table.update(zip(step.outputs, outputs, strict=True))
        return {place: table[place] for place, _ in self.made}

    def _run(self, values: Sequence[Any]) -> None:
        # Segments behind this one have the addresses of its results in them.
        fresh = self.run(values)
        for place, value in self.made:
            if isinstance(value, torch.Tensor):
                value.copy_(fresh[place])


def _fill(buffer: torch.Tensor, source: torch.Tensor) -> None:
    buffer.copy_(source if source.shape == buffer.shape else _once(source, buffer))


def _filled(buffer: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The content of `source` in a new tensor that lies like `buffer`."""
    made = torch.empty_like(buffer)
    _fill(made, source)
    return made


def _once(source: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """`source` without the repetitions of axes along which it is expanded.

    Raises:
        ValueError: it is not expanded, as it was when the graph was recorded.
    """
    for axis, size in enumerate(buffer.shape):
        if source.shape[axis] != size:
            if source.stride(axis) != 0:
                raise ValueError("An input that was expanded when its graph was recorded is not any more.")
            source = source.narrow(axis, 0, 1)
    return source


@dataclass
class Tape:
    """Everything that a call of this token count does, in order.

    Attributes:
        guarded: places whose tensors have to be at `addresses`.
        lent: places of results that lie in the pool and are copied for the caller.
        failures: steps that could not be recorded, with the reason.
    """

    entries: list[Callable[[list[Any]], None]] = field(default_factory=list)
    addresses: list[int | None] = field(default_factory=list)
    guarded: list[int] = field(default_factory=list)
    lent: frozenset[int] = frozenset()
    failures: list[tuple[tuple[Step, ...], str]] = field(default_factory=list)

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
        for entry in self.entries:
            entry(values)
        return self.results(program, values)

    def results(self, program: Program, values: list[Any]) -> list[Any]:
        """Those of a call whose entries have run; none of them lies in the pool."""
        for place in self.lent:
            values[place] = values[place].clone()
        return finish(program, values)


def record(program: Program, values: Sequence[Any], seen: Observed, recorder: Recorder) -> Tape:
    """The tape of a program.

    Args:
        values: the table as `begin` made it; parameters are taken from it.
    """
    return _Taping(program, values, seen, recorder).tape()


class _Taping:
    def __init__(self, program: Program, values: Sequence[Any], seen: Observed, recorder: Recorder):
        self.program, self.values, self.seen, self.recorder = program, values, seen, recorder
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
        tape = Tape()
        number = 0
        for capturable, group in itertools.groupby(self.program.steps, key=lambda step: not step.apart):
            steps = tuple(group)
            number += len(steps)
            recorded = self._try(steps, tape, number) if capturable else None
            if recorded is not None:
                tape.entries.append(recorded)
            else:
                tape.entries += [self._called(step) for step in steps]
            for place in [p for p in self.fixed if self.last.get(p, 0) < number]:
                del self.fixed[place]
        read = {i for segment in tape.segments for step in segment.steps for i in step.inputs}
        tape.guarded = [i for i in self.program.static if i in read]
        tape.addresses = addresses(self.values, tape.guarded)
        tape.lent = frozenset(self._lent(tape))
        return tape

    def _called(self, step: Step) -> Callable[[list[Any]], None]:
        """A step that is not recorded."""
        layouts = [self.seen.layouts.get(place) for place in step.outputs]
        if step.code.call is None or not step.is_fixed or None in layouts:
            return _Call(step)
        checked = tuple((one.shape, one.stride) for one in layouts if one is not None)
        run = bound(step.code.call, step.inputs)
        return _Direct(step, run, step.code.call.results, checked, self.recorder)

    def _lent(self, tape: Tape) -> Iterator[int]:
        """Results in the pool: made there, or views of what was."""
        inside = {
            place for segment in tape.segments for place, value in segment.made if isinstance(value, torch.Tensor)
        }
        for place, _ in self.program.results:
            if place is not None and (place in inside or self.seen.shares.get(place) in inside):
                yield place

    def _try(self, steps: tuple[Step, ...], tape: Tape, after: int) -> Segment | None:
        before = dict(self.fixed)
        try:
            return self._segment(steps, after)
        except RecordingError as error:
            self.fixed = before
            tape.failures.append((steps, str(error)))
            return None

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
            tuple((place, buffer.numel(), self.recorder.borrowed(buffer)) for place, buffer in fed.items()),
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


@dataclass(frozen=True)
class _Call:
    """A step that is not recorded."""

    step: Step

    def __call__(self, values: list[Any]) -> None:
        run_step(self.step, values)


@dataclass(frozen=True)
class _Direct:
    """A step that is not recorded and is one call of an operator, whose results have to lie as `layouts` says."""

    step: Step
    run: Callable[[list[Any]], Any]
    results: tuple[int | None, ...]
    layouts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    recorder: Recorder

    def __call__(self, values: list[Any]) -> None:
        step = self.step
        if not self.recorder.is_here:  # Inductor's code switches to the device
            run_step(step, values)
            return
        made = self.run(values)
        for place, part, (shape, stride) in zip(step.outputs, self.results, self.layouts, strict=True):
            value = made if part is None else made[part]
            assert_size_stride(value, shape, stride)
            values[place] = value
        for i in step.done:
            values[i] = None
