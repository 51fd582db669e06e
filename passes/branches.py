"""Branches: chains of a piece that do not need each other, and whether running them on several streams pays.

    prefix ──● fork ── main branch ─────────○── suffix         prefix: what does not come from the fork's value, and it
              ├────── branch 1 ─────────────┤                  suffix: what needs more than one branch
              └────── branch 2 ─────────────┘

Behind the projections of a DeepSeek-V4 layer these are the queries (norm, product, norm, rope), the keys and values,
the compressor's chain and that of the indexer. Nothing is known of them here: any value is a fork that has two readers,
any operator a join that needs two.

For a fork, each of its readers is a group of its own at first. What comes from one group only may be on a branch, what
needs two is behind the join; so with few groups less is behind it, and with many there is more to be divided. Pairs of
groups become one until one is left, always the pair with the shortest critical path, and the best state is taken. What
only one branch or the suffix reads moves there from the prefix. Chains that do not touch go to the streams, the longest
first, each to the one with the least work.

The time of a stream is that of its operators (`passes.roofline`), and never are two streams faster than the memory and
the multipliers that they share. So what is won is that the launches and the ramps of one branch pass beside another.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from dsv4_compile.passes.roofline import LAUNCH, Cost
from dsv4_compile.passes.units import Units, bits

__all__ = ["Declined", "Split", "find", "fork_us"]

MARGIN = 2.0
"""Microseconds to be won; less is within the error of the estimate."""
FORK, SIDE = 1.5, 0.5
"""Microseconds of a fork and join in a CUDA graph, and of each side stream in it; as measured on an H100."""
EVENT, HOST_LAUNCH = 1.7, 5.0
"""Microseconds of the host for an event, recorded or waited for, and for a launch, where nothing is captured."""
MOST_READERS = 16
"""Of a value that is taken for a fork: the pairs of groups are a cube of them."""
MOST_TRIALS = 1500
"""Divisions of a piece that are looked at, so that a large one takes some seconds at most."""


@dataclass(frozen=True)
class Split:
    """A piece with branches. `branches[0]` stays on the stream of the caller, the others go to side stream 1, 2, ...

    Together the parts are the nodes of the piece, each once and in their order. `us` has the estimate of each branch;
    `serial` and `forked` are those of the whole piece, without and with branches.
    """

    prefix: tuple[Node, ...]
    branches: tuple[tuple[Node, ...], ...]
    suffix: tuple[Node, ...]
    us: tuple[float, ...]
    serial: float
    forked: float


@dataclass(frozen=True)
class Declined:
    """Why a piece is left in one."""

    reason: str


def fork_us(sides: int, captured: bool = True) -> float:
    """Microseconds of a fork and join with so many side streams."""
    return FORK + SIDE * sides if captured else EVENT * (1 + 3 * sides)


def find(graph: Graph, sides: int, captured: bool = True) -> Split | Declined:
    """The branches of a piece.

    Args:
        graph: the piece, as `extraction.extract` makes it: functional, its inputs are placeholders.
        sides: side streams that there are, at least 1.
        captured: whether it will be part of a CUDA graph; else the time of the host counts as well.
    """
    return _Search(Units(graph), sides, captured).split()


def _twice(parts: Sequence[int]) -> int:
    """What is in more than one of the parts."""
    once = twice = 0
    for part in parts:
        twice |= once & part
        once |= part
    return twice


def _merged(parts: Sequence[int], pairs: Iterable[tuple[int, int]]) -> Iterator[list[int]]:
    """The parts with one pair of them as one, for each pair."""
    for first, second in pairs:
        yield [part for i, part in enumerate(parts) if i not in (first, second)] + [parts[first] | parts[second]]


@dataclass(frozen=True)
class _Trial:
    """A way to take a piece apart: the units of each stream, what they cost, and what the whole piece takes then."""

    prefix: int
    streams: tuple[int, ...]
    suffix: int
    costs: tuple[Cost, ...]
    forked: float


class _Search:
    def __init__(self, units: Units, sides: int, captured: bool):
        self.units, self.sides, self.captured = units, sides, captured
        self.every = (1 << len(units.all)) - 1
        self.barred = sum(1 << unit.position for unit in units.all if unit.barred)
        self.main_only = sum(1 << unit.position for unit in units.all if unit.main_only)
        self.whole = units.cost(self.every)
        self.serial = self._elapsed(self.whole.us, self.whole.launches)
        self.trials = 0
        self.alone: dict[int, Cost] = {}
        self.small = False
        """Whether a fork was passed over because all that it divides takes less than it costs."""

    def _elapsed(self, device: float, launches: int, events: float = 0.0) -> float:
        """What goes by: without a CUDA graph no less than the host takes."""
        return device if self.captured else max(device, HOST_LAUNCH * launches + events)

    def split(self) -> Split | Declined:
        best: _Trial | None = None
        kept_out = dict.fromkeys((self.barred, self.barred | self.main_only))
        for readers, barred in itertools.product(self._forks(), kept_out):
            if self.trials >= MOST_TRIALS:
                break
            found = self._improved(readers, barred, self.serial if best is None else best.forked)
            if found is not None and (best is None or found.forked < best.forked):
                best = found
        if best is None:
            few = f"{self.serial:.1f} us of work are too few for a fork"
            return Declined(few if self.small else "no chains in it are independent of each other")
        if self.serial - best.forked < MARGIN:
            return Declined(self._too_little(best))
        return self._made(best)

    def _too_little(self, best: _Trial) -> str:
        times = " + ".join(f"{cost.us:.1f}" for cost in best.costs)
        return (
            f"it would take {best.forked:.1f} us with branches of {times} us and {self.serial:.1f} us without, "
            f"and {MARGIN:.1f} us have to be won"
        )

    def _made(self, best: _Trial) -> Split:
        units = self.units
        first = set(units.rest) | set(units.nodes(best.prefix))
        return Split(
            tuple(node for node in units.calls if node in first),
            tuple(units.nodes(part) for part in best.streams),
            units.nodes(best.suffix),
            tuple(cost.us for cost in best.costs),
            self.serial,
            best.forked,
        )

    def _forks(self) -> list[int]:
        """The readers of each value that has at least two, those with the most work behind them first."""
        units = self.units
        every = dict.fromkeys((*units.outside.values(), *(unit.readers for unit in units.all)))
        found = [readers for readers in every if 2 <= readers.bit_count() <= MOST_READERS]
        return sorted(found, key=lambda readers: -(readers | units.needing(readers)).bit_count())

    def _improved(self, readers: int, barred: int, limit: float) -> _Trial | None:
        """The best trial behind one fork with nothing that is `barred` on a branch, None where there is none or where
        none can be below `limit` microseconds."""
        below = readers | self.units.needing(readers)
        free = below & ~(barred | self.units.needing(below & barred))
        if self._bound(self.every & ~below | free) > limit:
            self.small = True
            return None
        reached = [1 << one | self.units.after[one] for one in bits(readers)]
        best = self._trial(below, free & ~_twice(reached))
        while len(reached) > 2 and self.trials < MOST_TRIALS:
            pairs = itertools.combinations(range(len(reached)), 2)
            tried = [(self._trial(below, free & ~_twice(merged)), merged) for merged in _merged(reached, pairs)]
            reached = min(tried, key=lambda one: one[0].forked if one[0] else math.inf)[1]
            best = min([best, *(trial for trial, _ in tried)], key=lambda one: one.forked if one else math.inf)
        return best

    def _bound(self, part: int) -> float:
        """Below which no trial is that divides nothing but `part`."""
        work = sum(self._alone(one).us for one in bits(part))
        return self.serial - work * (1 - 1 / (1 + self.sides)) + fork_us(1, self.captured)

    def _alone(self, position: int) -> Cost:
        if position not in self.alone:
            self.alone[position] = self.units.cost(1 << position)
        return self.alone[position]

    def _trial(self, below: int, middle: int) -> _Trial | None:
        """The components of `middle` on streams, or None when there is only one."""
        self.trials += 1
        parts = self._joined(list(self._components(middle)))
        if len(parts) < 2:
            return None
        parts, prefix, suffix = self._moved(parts, self.every & ~below, below & ~middle)
        costs = {part: self.units.cost(part) for part in parts}
        around = self.units.cost(prefix) + self.units.cost(suffix)
        trials = (
            self._on(sides, costs, prefix, suffix, around) for sides in range(1, min(self.sides, len(parts) - 1) + 1)
        )
        return min(trials, key=lambda trial: trial.forked)

    def _components(self, middle: int) -> Iterator[int]:
        while middle:
            part = front = middle & -middle
            while front:
                reached = 0
                for one in bits(front):
                    reached |= self.units.all[one].needs | self.units.all[one].readers
                front = reached & middle & ~part
                part |= front
            yield part
            middle &= ~part

    def _joined(self, parts: list[int]) -> list[int]:
        """Those that have to stay on the main stream as one."""
        main = [part for part in parts if part & self.main_only]
        joined = 0
        for part in main:
            joined |= part
        return [part for part in parts if part not in main] + [joined] * bool(joined)

    def _moved(self, parts: list[int], prefix: int, suffix: int) -> tuple[list[int], int, int]:
        """With what only one of the parts, or only the suffix, reads: there it is one kernel with its reader."""
        for position in reversed(list(bits(prefix))):
            unit = self.units.all[position]
            if not unit.readers or unit.leaves or unit.barred or unit.main_only:
                continue
            owner = next((i for i, part in enumerate(parts) if not unit.readers & ~part), None)
            if owner is not None:
                parts[owner] |= 1 << position
            elif not unit.readers & ~suffix:
                suffix |= 1 << position
            else:
                continue
            prefix &= ~(1 << position)
        return parts, prefix, suffix

    def _on(self, sides: int, costs: dict[int, Cost], prefix: int, suffix: int, around: Cost) -> _Trial:
        """On so many side streams."""
        streams, loads = [0] * (1 + sides), [Cost()] * (1 + sides)
        for part, cost in sorted(costs.items(), key=lambda item: -item[1].us):
            least = min(range(1 + sides), key=lambda i: loads[i].us)
            streams[least] |= part
            loads[least] = loads[least] + cost
        main = max(range(1 + sides), key=lambda i: (bool(streams[i] & self.main_only), loads[i].us))
        order = [main, *sorted((i for i in range(1 + sides) if i != main), key=lambda i: -loads[i].us)]
        total = sum(loads, Cost())
        critical = max(max(load.us for load in loads), LAUNCH + max(total.memory, total.products))
        events = fork_us(sides, self.captured)
        forked = self._elapsed(around.us + critical + events, around.launches + total.launches, events)
        chosen = tuple(streams[i] for i in order)
        return _Trial(prefix, chosen, suffix, tuple(loads[i] for i in order), forked)
