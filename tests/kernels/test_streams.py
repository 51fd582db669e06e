"""Auxiliary streams: the order of a fork and join, what runs serially, errors, and on a GPU whose memory is whose."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from dsv4_compile.kernels import streams

GPU = pytest.mark.gpu
MEGABYTES_16 = (1024, 4096)
"""Shape of 16 MiB in float32."""


# ------------------------------------------------------------------------------------------------------ without a GPU


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces CUDA by one that notes what is asked of it, in order, and empties the registry before and after."""
    notes: list[str] = []
    state: dict[str, object] = {"current": "main", "capturing": set()}

    class Stream:
        made = 0

        def __init__(self, device: int = 0) -> None:
            # Two of each handle in a row: PyTorch's pool comes round again as well.
            self.cuda_stream = 1 + Stream.made // 2
            Stream.made += 1

        def __str__(self) -> str:
            return f"side {self.cuda_stream}"

        def wait_event(self, event: "Event") -> None:
            notes.append(f"{self} waits for {event.recorded}")

    class Main(Stream):
        def __init__(self) -> None:
            self.cuda_stream = 0

        def __str__(self) -> str:
            return "main"

    class Event:
        made = 0
        recorded = "nothing"

        def __init__(self) -> None:
            Event.made += 1

        def record(self, stream: Stream) -> None:
            self.recorded = f"event of {stream}"
            notes.append(f"{stream} records")

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, state["current"] = state["current"], str(stream)
        try:
            yield
        finally:
            state["current"] = before

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: Main())
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["current"] in state["capturing"])
    monkeypatch.setattr(streams, "_devices", {})
    Log.state, Log.event, Log.notes = state, Event, notes
    return notes


class Log:
    """What the replaced CUDA is up to."""

    state: dict[str, object]
    event: type
    notes: list[str]


def work(name: str, result: object = None) -> Callable[[], object]:
    def run() -> object:
        Log.notes.append(f"{name} on {Log.state['current']}")
        return result if result is not None else name

    return run


def test_side_work_is_recorded_after_the_main_work_and_before_its_join(log: list[str]) -> None:
    result = streams.execute_in_parallel(work("a"), [work("b"), None, work("c")], "cuda")
    assert result == ("a", ["b", None, "c"])
    assert log == [
        "main records",
        "a on main",
        "side 1 waits for event of main",
        "b on side 1",
        "side 1 records",
        "main waits for event of side 1",
        "side 3 waits for event of main",
        "c on side 3",
        "side 3 records",
        "main waits for event of side 3",
    ]


def test_failing_side_is_joined_before_the_error_goes_on(log: list[str]) -> None:
    def fail() -> None:
        raise ValueError("no such weight")

    with pytest.raises(ValueError, match="no such weight"):
        streams.execute_in_parallel(work("a"), [fail, work("c")], "cuda")
    assert log[-2:] == ["side 1 records", "main waits for event of side 1"]
    assert streams.execute_in_parallel(work("a"), [work("b")], "cuda") == ("a", ["b"])


def test_failing_main_work_starts_no_side(log: list[str]) -> None:
    with pytest.raises(ZeroDivisionError):
        streams.execute_in_parallel(lambda: 1 // 0, [work("b")], "cuda")
    assert log == ["main records"]


def test_streams_are_distinct_shared_and_made_on_demand(log: list[str]) -> None:
    assert streams.stream_count("cuda") == 0
    two = streams.auxiliary_streams("cuda:0", 2)
    three = streams.auxiliary_streams(0, 3)
    assert three[:2] == two and len({stream.cuda_stream for stream in three}) == 3
    assert streams.auxiliary_streams(torch.device("cuda"), 1) == two[:1]
    assert streams.auxiliary_streams("cuda", 0) == []
    assert (streams.stream_count("cuda"), streams.stream_count(1)) == (3, 0)


def test_events_are_reused_and_never_shared_at_a_time(log: list[str]) -> None:
    with streams.leased_events("cuda", 2) as first, streams.leased_events("cuda", 2) as second:
        assert len({id(event) for event in first + second}) == 4
    for _ in range(100):
        streams.execute_in_parallel(work("a"), [work("b"), work("c")], "cuda")
    assert Log.event.made == 4  # type: ignore[attr-defined]


def test_nested_call_keeps_its_own_events(log: list[str]) -> None:
    def nested() -> object:
        return streams.execute_in_parallel(work("b"), [work("c")], "cuda")

    assert streams.execute_in_parallel(work("a"), [nested], "cuda") == ("a", [("b", ["c"])])


def test_streams_in_another_capture_are_not_used(log: list[str]) -> None:
    Log.state["capturing"] = {"main", "side 1"}
    streams.execute_in_parallel(work("a"), [work("b")], "cuda")
    assert "b on side 1" in log
    # The capture goes on, and this thread runs something on a stream that is no part of it.
    Log.state["capturing"] = {"side 1"}
    log.clear()
    assert streams.execute_in_parallel(work("a"), [work("b")], "cuda") == ("a", ["b"])
    assert log == ["a on main", "b on main"]
    Log.state["capturing"] = set()
    log.clear()
    streams.execute_in_parallel(work("a"), [work("b")], "cuda")
    assert "b on side 1" in log


def test_streams_in_the_capture_of_another_thread_are_not_used(log: list[str]) -> None:
    Log.state["capturing"] = {"main", "side 1"}
    thread = threading.Thread(target=streams.execute_in_parallel, args=(work("a"), [work("b")], "cuda"))
    thread.start()
    thread.join()
    log.clear()
    streams.execute_in_parallel(work("a"), [work("b")], "cuda")
    assert log == ["a on main", "b on main"]


def test_thread_that_finds_the_streams_busy_goes_without(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_LOCK_SECONDS", 0.01)
    inside, done = threading.Event(), threading.Event()

    def long_work() -> None:
        inside.set()
        done.wait(10)

    thread = threading.Thread(target=streams.execute_in_parallel, args=(long_work, [work("x")], "cuda"))
    thread.start()
    inside.wait(10)
    log.clear()
    assert streams.execute_in_parallel(work("a"), [work("b")], "cuda") == ("a", ["b"])
    assert log == ["a on main", "b on main"]
    done.set()
    thread.join()


@pytest.mark.parametrize("how", ["enabled", "serial", "no sides", "empty sides", "cpu"])
def test_serial_execution_forks_nothing(how: str, log: list[str]) -> None:
    sides = {"no sides": [], "empty sides": [None, None]}.get(how, [work("b"), None])
    device = "cpu" if how == "cpu" else "cuda"
    with streams.serial() if how == "serial" else contextlib.nullcontext():
        result = streams.execute_in_parallel(work("a"), sides, device, enabled=how != "enabled")
    assert result == ("a", [side and "b" for side in sides])
    assert log == ["a on main"] + ["b on main"] * any(sides)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_cuda_everything_is_serial() -> None:
    assert streams.auxiliary_streams("cuda", 3) == []
    assert streams.auxiliary_streams(0, 3) == []
    assert streams.stream_count("cuda") == 0
    order: list[int] = []
    streams.execute_in_parallel(
        lambda: order.append(0), [lambda: order.append(1), None, lambda: order.append(2)], "cuda"
    )
    assert order == [0, 1, 2]
    with pytest.raises(RuntimeError, match="no CUDA device"), streams.leased_events("cuda", 1):
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_process_starts_with_an_empty_registry_and_a_free_lock(log: list[str]) -> None:
    streams.auxiliary_streams("cuda", 2)
    entry = streams._devices[0]
    with entry.lock, streams._devices_lock:
        child = os.fork()
        if child == 0:
            wrong = 1
            try:
                wrong = streams.stream_count("cuda") or len(streams.auxiliary_streams("cuda", 1)) - 1
            finally:
                os._exit(wrong)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert streams.stream_count("cuda") == 2


def test_import_does_not_touch_cuda() -> None:
    code = (
        "import torch; torch.cuda.is_available = torch.cuda._lazy_init = torch.cuda.Stream = None;"
        "import dsv4_compile.kernels.linear; assert not torch.cuda.is_initialized()"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environ, check=True)


# -------------------------------------------------------------------------------------------------------- with a GPU


def late(tensor: torch.Tensor, cycles: int = 200_000) -> torch.Tensor:
    """`tensor * 2`, computed after a delay on the stream of the caller."""
    torch.cuda._sleep(cycles)
    return tensor * 2


@GPU
@pytest.mark.parametrize("own_stream", [False, True])
def test_delayed_sides_equal_eager_1000_times(own_stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    wrong = torch.zeros((), device="cuda")
    monkeypatch.setattr(streams, "_devices", {})
    torch.cuda.synchronize()
    with torch.cuda.stream(caller):
        wrong.zero_()
        for step in range(1000):
            x = torch.full((4096,), float(step), device="cuda")
            main, sides = streams.execute_in_parallel(
                lambda x=x: x + 1, [lambda x=x: late(x), None, lambda x=x: late(x, 1000)], "cuda", inputs=(x,)
            )
            del x
            wrong += (main != step + 1).sum() + (sides[0] != 2 * step).sum() + (sides[2] != 2 * step).sum()
    torch.cuda.synchronize()
    assert wrong.item() == 0
    assert streams.stream_count("cuda") == 3


def read_late_outputs(rounds: int, empty_cache: bool) -> None:
    """Reads a 16 MiB result of a side late, when every stream has allocated and filled as much again."""
    for step in range(rounds):
        x = torch.full(MEGABYTES_16, float(step), device="cuda")
        _, (side,) = streams.execute_in_parallel(lambda: None, [lambda x=x: late(x)], "cuda", inputs=(x,))
        del x
        torch.cuda._sleep(20_000_000)
        wrong = (side != 2 * step).sum()
        del side
        if empty_cache:
            torch.cuda.empty_cache()
        for stream in [torch.cuda.current_stream(), *streams.auxiliary_streams("cuda", 1)]:
            with torch.cuda.stream(stream):
                for _ in range(3):
                    torch.full(MEGABYTES_16, -1.0, device="cuda")
        # The next fork waits for nothing of this: its side may allocate while the main stream still reads.
        assert wrong.item() == 0, f"A side's result was overwritten in round {step}."


@GPU
@pytest.mark.parametrize("empty_cache", [False, True])
def test_output_read_late_keeps_its_value(empty_cache: bool) -> None:
    read_late_outputs(20, empty_cache)


@GPU
def test_output_read_late_keeps_its_value_with_expandable_segments() -> None:
    code = f"import runpy; runpy.run_path({__file__!r})['read_late_outputs'](10, True)"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environ["PYTORCH_CUDA_ALLOC_CONF"] = environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@GPU
def test_output_freed_within_the_main_work_is_not_overwritten_by_the_next_side() -> None:
    for step in range(20):
        _, held = streams.execute_in_parallel(
            lambda: None, [lambda step=step: torch.full(MEGABYTES_16, float(step), device="cuda")], "cuda"
        )

        def read_and_free(held: list[torch.Tensor] = held) -> torch.Tensor:
            torch.cuda._sleep(10_000_000)
            return held.pop() + 0

        found, _ = streams.execute_in_parallel(
            read_and_free, [lambda: torch.full(MEGABYTES_16, -1.0, device="cuda")], "cuda"
        )
        assert (found == step).all()


@GPU
@pytest.mark.parametrize("own_stream", [False, True])
def test_captured_fork_replays_like_eager(own_stream: bool) -> None:
    x = torch.zeros(4096, device="cuda")

    def step() -> list[torch.Tensor]:
        value, kept = x, []
        for _ in range(4):
            main, sides = streams.execute_in_parallel(
                lambda value=value: value + 1, [lambda value=value: late(value), lambda value=value: value - 3], "cuda"
            )
            value = main + sides[0] + sides[1]
            kept += [main, *sides, value]
        return kept

    graph = torch.cuda.CUDAGraph()
    step()
    count = streams.stream_count("cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream() if own_stream else None):
        outputs = step()
    for number in range(100):
        x.fill_(float(number))
        graph.replay()
        expected = step()
        assert all(one.equal(other) for one, other in zip(outputs, expected, strict=True))
    assert streams.stream_count("cuda") == count >= 2


@GPU
def test_capture_allocates_no_more_when_it_is_repeated() -> None:
    def capture(forks: int) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(forks):
                x = torch.zeros(MEGABYTES_16, device="cuda")
                streams.execute_in_parallel(lambda x=x: x + 1, [lambda x=x: x + 2], "cuda", inputs=(x,))
        return torch.cuda.memory_reserved() - before

    capture(1)
    assert capture(32) < 32 * 3 * 16 * 2**20


@GPU
def test_side_memory_stays_in_bounds_over_many_calls() -> None:
    x = torch.zeros(MEGABYTES_16, device="cuda")
    peaks = []
    for _ in range(6):
        torch.cuda.reset_peak_memory_stats()
        for _ in range(50):
            streams.execute_in_parallel(lambda: x + 1, [lambda: x + 2, lambda: x + 3], "cuda", inputs=(x,))
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_reserved())
    # How far the host runs ahead decides how many of the 150 buffers of a round are in use at once.
    assert peaks[-1] < peaks[0] + 50 * 16 * 2**20


@GPU
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_another_device_than_the_current_one() -> None:
    x = torch.ones(4096, device="cuda:1")
    main, (side,) = streams.execute_in_parallel(lambda: x + 1, [lambda: late(x)], x.device, inputs=(x,))
    assert (main == 2).all() and (side == 2).all()
    assert streams.stream_count(1) >= 1 and torch.cuda.current_device() == 0
