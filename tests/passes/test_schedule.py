"""Schedules: every kind of race is found, every order that events give is accepted, and an oracle agrees."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_compile.passes.schedule import MAIN, Record, Schedule, Wait, Work, prove

Action = Work | Record | Wait


def work(name: str, stream: int = MAIN, reads: str = "", writes: str = "", confined: str = "") -> Work:
    """Work with storages of one letter each."""
    return Work(name, stream, frozenset(reads), frozenset(writes), confined=confined)


def kinds(*actions: Action, inputs: str = "x") -> list[tuple[str, str]]:
    return [(v.kind, v.node) for v in prove(Schedule(actions, frozenset(inputs)))]


FORK, WAIT_FORK = Record("fork"), Wait("fork", 1)
JOIN = (Record("join", 1), Wait("join"))


def test_fork_and_join_are_safe():
    main, side = work("main", reads="x", writes="m"), work("side", 1, reads="x", writes="s")
    assert kinds(FORK, main, WAIT_FORK, side, *JOIN, work("end", reads="ms")) == []


def test_read_on_another_stream_without_wait():
    made, read = work("made", writes="a"), work("read", 1, reads="a")
    assert kinds(made, FORK, WAIT_FORK, read, *JOIN) == []
    assert kinds(FORK, made, WAIT_FORK, read, *JOIN) == [("read-after-write", "read")]
    assert kinds(FORK, WAIT_FORK, work("made", 1, writes="a"), work("read", reads="a"), *JOIN) == [
        ("read-after-write", "read")
    ]


def test_write_after_read_on_another_stream():
    read, write = work("read", 1, reads="x"), work("write", writes="x")
    assert kinds(FORK, WAIT_FORK, read, *JOIN, write) == []
    assert kinds(FORK, WAIT_FORK, read, write, *JOIN) == [("write-after-read", "write")]


def test_write_after_write_on_another_stream():
    first, second = work("first", 1, writes="a"), work("second", writes="a")
    assert kinds(FORK, WAIT_FORK, first, *JOIN, second) == []
    assert kinds(FORK, WAIT_FORK, first, second, *JOIN) == [("write-after-write", "second")]


def test_input_is_as_old_as_the_fork():
    side = work("side", 1, reads="x")
    assert kinds(side, *JOIN) == [("unforked", "side"), ("read-after-write", "side")]


def test_side_stream_without_fork():
    assert kinds(work("side", 1, writes="s"), *JOIN) == [("unforked", "side")]


def test_branch_that_is_not_joined():
    side = work("side", 1, writes="s")
    assert kinds(FORK, WAIT_FORK, side) == [("unjoined", "side")]
    assert kinds(FORK, WAIT_FORK, side, *JOIN, work("late", 1, writes="t")) == [("unjoined", "late")]


def test_event_that_is_waited_for_before_it_is_recorded():
    side = work("side", 1, writes="s")
    assert kinds(FORK, WAIT_FORK, side, Wait("join"), Record("join", 1)) == [
        ("unrecorded", "join"),
        ("unjoined", "side"),
    ]


def test_wait_takes_the_latest_record():
    """A record after the wait does not make it wait longer, and a second record replaces the first."""
    made, read = work("made", writes="a"), work("read", 1, reads="a")
    assert kinds(FORK, WAIT_FORK, made, FORK, read, *JOIN) == [("read-after-write", "read")]
    assert kinds(FORK, made, FORK, WAIT_FORK, read, *JOIN) == []


def test_read_of_what_nothing_wrote():
    assert kinds(work("read", reads="a")) == [("undefined", "read")]
    assert kinds(work("made", writes="a"), work("read", reads="a")) == []


def test_confined_work_on_a_side_stream():
    assert kinds(work("reduce", reads="x", confined="is a collective")) == []
    side = work("reduce", 1, reads="x", confined="is a collective")
    assert kinds(FORK, WAIT_FORK, side, *JOIN) == [("confined", "reduce")]


def test_diamond_is_safe_and_its_sides_may_not_share():
    def diamond(left: str, right: str) -> list[tuple[str, str]]:
        sides = [work("left", 1, "a", left), work("right", 2, "a", right)]
        return kinds(
            work("top", writes="a"),
            FORK,
            WAIT_FORK,
            Wait("fork", 2),
            *sides,
            *JOIN,
            Record("other", 2),
            Wait("other"),
            work("bottom", reads=left + right),
        )

    assert diamond("l", "r") == []
    assert diamond("l", "l") == [("write-after-write", "right")]


def test_order_through_a_third_stream():
    chain = (work("made", 1, writes="a"), Record("one", 1), Wait("one", 2), Record("two", 2), Wait("two"))
    assert kinds(FORK, WAIT_FORK, *chain, work("read", reads="a")) == []
    assert kinds(FORK, WAIT_FORK, *chain[:-1], work("read", reads="a")) == [
        ("read-after-write", "read"),
        ("unjoined", "made"),
    ]


def test_violation_says_where_and_what():
    side = Work("mm", 1, frozenset("a"), site="layers.3.attn")
    (found,) = prove(
        Schedule((work("add", writes="a"), Record("e"), work("mul", writes="a"), Wait("e", 1), side, *JOIN))
    )
    assert str(found) == (
        "read-after-write at layers.3.attn: mm on stream 1 is not ordered after mul on stream 0, "
        "and both access storage a"
    )


# ------------------------------------------------------------------------------------------------------- the oracle


def reachable(actions: Sequence[Action]) -> set[frozenset[int]]:
    """Every set of actions that may be done at some moment: each stream runs its own in order, a wait blocks until the
    record that was launched last before it is done. Action 0 is the beginning and belongs to the main stream."""
    queues: dict[object, list[int]] = {}
    awaited: dict[int, int] = {}
    for i, action in enumerate(actions):
        queues.setdefault(action.stream, []).append(i)
        if isinstance(action, Wait):
            earlier = [j for j in range(i) if isinstance(actions[j], Record) and actions[j].event == action.event]
            awaited |= {i: earlier[-1]} if earlier else {}
    seen: set[frozenset[int]] = set()
    todo: list[frozenset[int]] = [frozenset()]
    while todo:
        done = todo.pop()
        if done in seen:
            continue
        seen.add(done)
        for queue in queues.values():
            head = next((i for i in queue if i not in done), None)
            if head is not None and awaited.get(head, head) in done | {head}:
                todo.append(done | {head})
    return seen


def oracle(schedule: Schedule) -> set[tuple[str, str]]:
    """What `prove` has to report, by running the schedule in every way in which it can run."""
    actions = (Work("the beginning", writes=schedule.inputs), *schedule.actions)
    states = reachable(actions)
    works = [i for i, action in enumerate(actions) if isinstance(action, Work)]
    main = {i for i, action in enumerate(actions) if action.stream == MAIN}

    def may_precede(later: int, earlier: int) -> bool:
        return any(later in done and earlier not in done for done in states)

    found = set()
    for i, j in itertools.combinations(works, 2):
        first, second = actions[i], actions[j]
        if may_precede(j, i):
            found |= {("read-after-write", second.name)} if first.writes & second.reads else set()
            found |= {("write-after-read", second.name)} if first.reads & second.writes else set()
            found |= {("write-after-write", second.name)} if first.writes & second.writes else set()
    for j in works:
        before = frozenset().union(*(actions[i].writes for i in works if i < j))
        found |= {("undefined", actions[j].name)} if actions[j].reads - before else set()
    for stream in {actions[i].stream for i in works} - {MAIN}:
        own = [i for i in works if actions[i].stream == stream]
        found |= {("unforked", actions[own[0]].name)} if may_precede(own[0], 0) else set()
        late = any(main <= done and own[-1] not in done for done in states)
        found |= {("unjoined", actions[own[-1]].name)} if late else set()
    for j, action in enumerate(actions):
        if isinstance(action, Wait) and not any(isinstance(a, Record) and a.event == action.event for a in actions[:j]):
            found.add(("unrecorded", str(action.event)))
    return found


STREAMS, STORAGES = st.integers(0, 2), st.frozensets(st.sampled_from("abx"), max_size=2)


@st.composite
def wild(draw: st.DrawFn) -> tuple[Action, ...]:
    """Any actions at all; nearly all of these race."""
    length = draw(st.integers(1, 14))
    kind, event = st.sampled_from(["work", "record", "wait"]), st.sampled_from("ef")
    made: list[Action] = []
    for i in range(length):
        chosen, stream = draw(kind), draw(STREAMS)
        if chosen == "work":
            made.append(Work(f"w{i}", stream, draw(STORAGES), draw(STORAGES)))
        else:
            made.append((Record if chosen == "record" else Wait)(draw(event), stream))
    return tuple(made)


@st.composite
def tame(draw: st.DrawFn) -> tuple[Action, ...]:
    """Forks and joins in which every work is ordered after the conflicting ones; sometimes one action is then lost."""
    made: list[Action] = [Record("begin")]
    works: list[Work] = []
    seen = {0}
    for i in range(draw(st.integers(1, 6))):
        stream = draw(STREAMS)
        new = Work(f"w{i}", stream, draw(STORAGES), draw(STORAGES))
        if stream not in seen:
            made.append(Wait("begin", stream))
            seen.add(stream)
        made.extend(
            Wait(old.name, stream)
            for old in works
            if old.stream != stream and (old.writes & (new.reads | new.writes) or old.reads & new.writes)
        )
        works.append(new)
        made += [new, Record(new.name, stream)]
    made.extend(Wait(old.name) for old in works if old.stream != MAIN)
    lost = draw(st.none() | st.integers(0, len(made) - 1))
    return tuple(action for i, action in enumerate(made) if i != lost)


@pytest.mark.parametrize("strategy", [wild(), tame()], ids=["wild", "tame"])
def test_proof_agrees_with_every_interleaving(strategy):
    verdicts: list[bool] = []

    @settings(max_examples=400, deadline=None, derandomize=True, database=None)
    @given(strategy)
    def agrees(actions: tuple[Action, ...]) -> None:
        schedule = Schedule(actions, frozenset("abx"))
        found = {(v.kind, v.node) for v in prove(schedule)}
        assert found == oracle(schedule)
        verdicts.append(not found)

    agrees()
    assert 10 < sum(verdicts) < len(verdicts) - 10, "both verdicts are to be met"


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(wild())
def test_proof_agrees_without_inputs(actions):
    schedule = Schedule(actions)
    assert {(v.kind, v.node) for v in prove(schedule)} == oracle(schedule)
