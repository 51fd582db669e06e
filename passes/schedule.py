"""Schedules: work on several streams, ordered by events, and the proof that nothing in one races.

A schedule is the list of what the host launches, in the order in which it does:

    Work(a, 0)  Record(e, 0)  Work(b, 0)  Wait(e, 1)  Work(c, 1)  Record(f, 1)  Wait(f, 0)  Work(d, 0)

    stream 0   ──a──●e──b───────○f──d──        a happens before b, c and d; b and c are concurrent; both before d
    stream 1        ○e──c──●f

Happens-before is the order of the work on each stream, and from the record of an event to what comes after a wait for
it. A wait takes the record that was launched last before it, as `cudaStreamWaitEvent` does; nothing else orders two
streams, and the order of the host least of all. It is kept as vector clocks (Mattern, 1989), and races are found as in
FastTrack (Flanagan and Freund, 2009): for every storage the last read and the last write of each stream are enough.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

__all__ = ["MAIN", "Record", "Schedule", "Violation", "Wait", "Work", "prove"]

MAIN = 0
"""The stream of the caller: a piece begins and ends on it."""


@dataclass(frozen=True)
class Violation:
    """Something that is not proved to be safe.

    `node` names the work at fault, and `site` is its module path. `kind` is one of those of `prove` or
    of `passes.verify.check`; `sentence` says what was found.
    """

    node: str
    site: str
    kind: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.kind} at {self.site or 'an unknown module'}: {self.sentence}"


@dataclass(frozen=True)
class Work:
    """One launch. `reads` and `writes` are storages, not tensors: two views of one storage are the same thing.

    `confined` is why it must stay on the main stream, empty when it need not.
    """

    name: str
    stream: Hashable = MAIN
    reads: frozenset[Hashable] = frozenset()
    writes: frozenset[Hashable] = frozenset()
    site: str = ""
    confined: str = ""


@dataclass(frozen=True)
class Record:
    """The event stands for all work launched on the stream so far."""

    event: Hashable
    stream: Hashable = MAIN


@dataclass(frozen=True)
class Wait:
    """Work launched on the stream from now on comes after the event."""

    event: Hashable
    stream: Hashable = MAIN


@dataclass(frozen=True)
class Schedule:
    """What the host launches, in order. `inputs` are storages that were written before, on the main stream."""

    actions: tuple[Work | Record | Wait, ...]
    inputs: frozenset[Hashable] = frozenset()


def prove(schedule: Schedule) -> list[Violation]:
    """What keeps the schedule from being free of data races; nothing when it is.

    No violation means: for every way in which the streams may overtake each other, each read sees what it sees when
    everything runs in the order of the list, and the main stream ends after all work. Reported are

    - `read-after-write`, `write-after-read`, `write-after-write`: two accesses of a storage on two streams, the second
      without order after the first; one for each work, storage and other stream;
    - `undefined`: a read of a storage that nothing has written;
    - `unforked`: work on a side stream that does not come after the beginning of the main stream;
    - `unjoined`: a side stream whose work the main stream does not come after at the end;
    - `unrecorded`: a wait for an event that has not been recorded, which waits for nothing;
    - `confined`: work on a side stream that must stay on the main one.

    Not proved: that the reads and writes are all there are, and that memory of a tensor is not used again for another
    one too early, which is the allocator's concern (`kernels.streams` tells it).

    The time is linear in the actions for a fixed number of streams.
    """
    proof = _Proof(schedule.inputs)
    for action in schedule.actions:
        proof.add(action)
    proof.end()
    return proof.found


_Clock = dict[Hashable, int]
"""How much work of each stream has happened before."""


class _Proof:
    def __init__(self, inputs: frozenset[Hashable]) -> None:
        self.found: list[Violation] = []
        self._inputs = inputs
        # The first tick of the main stream is the beginning, at which the inputs were written.
        self._clocks: dict[Hashable, _Clock] = {MAIN: {MAIN: 1}}
        self._events: dict[Hashable, _Clock] = {}
        # Storage -> stream -> (tick, name) of the last access there.
        self._written: dict[Hashable, dict[Hashable, tuple[int, str]]] = {}
        self._read: dict[Hashable, dict[Hashable, tuple[int, str]]] = {}
        self._last: dict[Hashable, Work] = {}

    def add(self, action: Work | Record | Wait) -> None:
        clock = self._clocks.setdefault(action.stream, {})
        if isinstance(action, Record):
            self._events[action.event] = dict(clock)
        elif isinstance(action, Work):
            self._work(action, clock)
        elif action.event in self._events:
            for stream, tick in self._events[action.event].items():
                clock[stream] = max(tick, clock.get(stream, 0))
        else:
            sentence = f"stream {action.stream} waits for event {action.event}, which has not been recorded before"
            self.found.append(Violation(str(action.event), "", "unrecorded", sentence))

    def end(self) -> None:
        main = self._clocks[MAIN]
        for stream, work in self._last.items():
            if main.get(stream, 0) < self._clocks[stream][stream]:
                self._fault(work, "unjoined", f"{work.name} on stream {stream} is not waited for by the main stream")

    def _work(self, work: Work, clock: _Clock) -> None:
        if work.stream != MAIN:
            if clock.get(MAIN, 0) < 1 and work.stream not in self._last:
                self._fault(work, "unforked", f"{work.name} on stream {work.stream} is not forked from the main one")
            if work.confined:
                self._fault(work, "confined", f"{work.name} is on stream {work.stream}, and it {work.confined}")
        clock[work.stream] = clock.get(work.stream, 0) + 1
        for storage in work.reads:
            if storage not in self._written and storage not in self._inputs:
                self._fault(work, "undefined", f"{work.name} reads {storage}, which nothing has written before")
            self._compare(work, clock, "read-after-write", storage, self._writes_of(storage))
        for storage in work.writes:
            self._compare(work, clock, "write-after-read", storage, self._read.get(storage, {}))
            self._compare(work, clock, "write-after-write", storage, self._writes_of(storage))
        now = (clock[work.stream], work.name)
        for storage in work.reads:
            self._read.setdefault(storage, {})[work.stream] = now
        for storage in work.writes:
            self._written.setdefault(storage, self._writes_of(storage))[work.stream] = now
        self._last[work.stream] = work

    def _writes_of(self, storage: Hashable) -> dict[Hashable, tuple[int, str]]:
        known = self._written.get(storage)
        if known is None:
            return {MAIN: (1, "the beginning")} if storage in self._inputs else {}
        return known

    def _compare(
        self, work: Work, clock: _Clock, kind: str, storage: Hashable, earlier: dict[Hashable, tuple[int, str]]
    ) -> None:
        for stream, (tick, name) in earlier.items():
            if clock.get(stream, 0) < tick:
                sentence = f"{work.name} on stream {work.stream} is not ordered after {name} on stream {stream}"
                self._fault(work, kind, f"{sentence}, and both access storage {storage}")

    def _fault(self, work: Work, kind: str, sentence: str) -> None:
        self.found.append(Violation(work.name, work.site, kind, sentence))
