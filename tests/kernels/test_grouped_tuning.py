"""Which way linears of one input run: measured once for a bucket, kept on disk. Without a GPU the times are made up."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import math
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4_compile.kernels import linear
from dsv4_compile.kernels.choice import chooser
from dsv4_compile.kernels.linear import strategies, timing, tuning
from dsv4_compile.kernels.linear.buckets import LIMITS, MANY, bucket_of, counts_of
from dsv4_compile.kernels.linear.strategies import Card, Problem

CARD = Card("NVIDIA H100 80GB HBM3", 132)
BF16, F32 = torch.bfloat16, torch.float32
MIXED = Problem(
    CARD, 4096, (1024, 512, 64), (BF16, BF16, F32), (False,) * 3, ((0, 1), (2,)), (0, 1, 2), BF16, True
)  # fmt: skip


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing chosen yet, an empty folder, measurements on."""
    tuning.forget()
    monkeypatch.setenv("DSV4_TUNE", "auto")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    yield
    tuning.forget()


class Timer:
    """In place of `timing.measure`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Problem, range]] = []
        self.times = {"serial": 40.0, "streams": 20.0, "pack": 30.0, "pack+streams": 10.0}
        self.before: Callable[[], None] = lambda: None

    def __call__(self, problem: Problem, counts: range, index: int) -> dict[str, float]:
        self.calls.append((problem, counts))
        self.before()
        return {name: self.times[name] + counts[-1] for name in strategies.legal(problem, counts[-1])}


def pretend(patch: pytest.MonkeyPatch) -> Timer:
    """A device 0, and a clock."""
    timer = Timer()
    patch.setattr(chooser, "capturing", lambda index: False)
    patch.setattr(chooser, "drain", lambda index: None)
    patch.setattr(timing, "measure", timer)
    return timer


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Timer:
    return pretend(monkeypatch)


def way(tokens: int, problem: Problem = MIXED, max_tokens: int = 1024) -> str:
    """What a call on device 0 runs."""
    return tuning.strategy(problem, tokens, max_tokens, 0)[0]


def sources() -> set[str]:
    return {entry["source"] for entry in linear.choices()}


def file(folder: Path) -> Path:
    (path,) = (folder / "dsv4").glob("*.json")
    return path


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# ----------------------------------------------------------------------------------------------------------- choices


def test_every_token_count_is_in_one_bucket() -> None:
    covered = [tokens for bucket in LIMITS for tokens in counts_of(bucket)]
    assert covered == list(range(1, MANY + 1))
    assert all(bucket_of(tokens) == bucket for bucket in LIMITS for tokens in counts_of(bucket))
    assert bucket_of(10**9) == math.inf and bucket_of(0) == 8


def test_a_bucket_is_measured_once_and_the_fastest_runs(timer: Timer) -> None:
    assert [way(tokens) for tokens in (1, 8, 3, 9, 16)] == ["pack+streams"] * 5
    assert [counts for _, counts in timer.calls] == [counts_of(8), counts_of(16)]
    assert sources() == {"searched"}


def test_choices_list_the_times_of_every_candidate_and_are_fit_for_json(timer: Timer) -> None:
    way(5)
    (entry,) = json.loads(json.dumps(linear.choices()))
    assert entry["strategy"] == "pack+streams" and entry["tokens"] == 8 and entry["source"] == "searched"
    assert entry["microseconds"] == {"serial": 48.0, "streams": 28.0, "pack": 38.0, "pack+streams": 18.0}
    assert entry["dtypes"] == ["bfloat16", "bfloat16", "float32"] and entry["card"]["name"] == CARD.name
    way(10**6)
    assert linear.choices()[-1]["tokens"] is None


def test_another_process_reads_what_was_measured(timer: Timer, tmp_path: Path) -> None:
    asked = [(tokens, problem) for tokens in (1, 100, 5000) for problem in (MIXED, other(contiguous=False))]
    found = [way(*one) for one in asked]
    before = linear.choices()
    tuning.forget()
    assert [way(*one) for one in asked] == found and len(timer.calls) == len(asked)
    assert sources() == {"cached"}
    assert [entry["microseconds"] for entry in linear.choices()] == [entry["microseconds"] for entry in before]
    content = json.loads(file(tmp_path).read_text())
    assert content["card"] == {"name": CARD.name, "multiprocessors": 132, "capability": 0}
    assert {"torch", "cuda", "cublas", "operators"} <= set(content)


def other(**changes: Any) -> Problem:
    return dataclasses.replace(MIXED, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"columns": 2048},
        {"features": (1024, 512, 65)},
        {"dtypes": (BF16, BF16, BF16)},
        {"biased": (True, False, False)},
        {"runs": ((0,), (1,), (2,))},
        {"streams": (0, 1, 1)},
        {"x": F32},
        {"contiguous": False},
        {"aligned": False},
    ],
    ids=str,
)
def test_what_differs_in_anything_is_measured_by_itself(changes: dict[str, Any], timer: Timer) -> None:
    way(1)
    way(1, other(**changes))
    tuning.forget()
    way(1)
    way(1, other(**changes))
    assert len(timer.calls) == 2 and sources() == {"cached"}


def test_a_group_with_one_way_only_is_not_measured(timer: Timer) -> None:
    lonely = other(runs=((0,), (1,), (2,)), streams=(0, 0, 0))
    assert way(5, lonely) == "serial" and timer.calls == []


def test_above_the_threshold_ways_with_streams_are_neither_measured_nor_taken(timer: Timer) -> None:
    assert [way(tokens, max_tokens=100) for tokens in (99, 100, 101)] == ["pack+streams", "pack+streams", "pack"]
    assert [strategies.legal(problem, counts[-1]) for problem, counts in timer.calls] == [
        tuple(timer.times),
        ("serial", "pack"),
    ]
    assert way(1, max_tokens=0) == "pack"


def test_no_tokens_are_not_measured(timer: Timer) -> None:
    assert way(0) == "pack" and timer.calls == []


def test_switched_off_the_default_serves(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    way(1)
    tuning.forget()
    monkeypatch.setenv("DSV4_TUNE", "0")
    assert [way(1), way(4096), way(5000)] == ["pack", "pack", "serial"]
    assert sources() == {"default: DSV4_TUNE is 0"} and len(timer.calls) == 1


def test_during_a_capture_the_default_serves_and_a_later_call_measures(
    timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chooser, "capturing", lambda index: True)
    name, _, settled = tuning.strategy(MIXED, 3, 1024, 0)
    assert (name, settled) == ("pack", False) and timer.calls == []
    assert sources() == {"default: the stream is being captured"}
    monkeypatch.setattr(chooser, "capturing", lambda index: False)
    assert way(3) == "pack+streams" and len(timer.calls) == 1
    monkeypatch.setattr(chooser, "capturing", lambda index: True)
    assert way(3) == "pack+streams"


def test_after_warmup_no_token_count_is_measured(timer: Timer) -> None:
    way(1, max_tokens=100)
    assert linear.warmup(2000) == len(timer.calls) == len(linear.choices())
    before = len(timer.calls)
    for tokens in range(1, 2001):
        way(tokens, max_tokens=100)
    assert len(timer.calls) == before == sum(counts_of(bucket)[0] <= 2000 for bucket in LIMITS) + 1


def test_warmup_before_any_call_has_nothing_to_do() -> None:
    assert linear.warmup(100) == 0


@pytest.mark.parametrize("error", [RuntimeError("no memory for it"), torch.OutOfMemoryError("full")], ids=repr)
def test_a_measurement_that_fails_is_one_reason_and_is_made_again_later(
    error: Exception, timer: Timer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error

    timer.before = fail
    assert [way(1), way(2), way(10)] == ["pack"] * 3
    assert len(timer.calls) == 2  # once for each bucket
    reason = f"the search failed ({type(error).__name__}: {error})"
    assert warnings(caplog) == [f"Projections run in a way that was not measured here: {reason}."]
    assert sources() == {f"default: {reason}"}
    timer.before = lambda: None
    monkeypatch.setattr(chooser.time, "monotonic", lambda now=time.monotonic: now() + chooser.AGAIN)
    assert way(1) == "pack+streams" and sources() == {"searched", f"default: {reason}"}


def test_threads_that_call_at_once_measure_once(timer: Timer) -> None:
    barrier, got = threading.Barrier(8), []
    timer.before = lambda: time.sleep(0.2)

    def call() -> None:
        barrier.wait()
        got.append(way(300))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(timer.calls) == 1 and got == ["pack+streams"] * 8


# ---------------------------------------------------------------------------------------------------------- the file


def edited(text: str, change: Callable[[dict[str, Any]], Any]) -> str:
    content = json.loads(text)
    change(content)
    return json.dumps(content)


def entry(content: dict[str, Any]) -> dict[str, Any]:
    (of_problem,) = content["choices"].values()
    return of_problem["512"]


DAMAGES: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "truncated": lambda text: text[: len(text) // 2],
    "another type": lambda text: "[1, 2]",
    "another card": lambda text: edited(text, lambda c: c["card"].update(name="NVIDIA A100-SXM4-80GB")),
    "another torch": lambda text: edited(text, lambda c: c.update(torch="2.0.0")),
    "another cuBLAS": lambda text: edited(text, lambda c: c.update(cublas="11.0.0")),
    "other operators": lambda text: edited(text, lambda c: c.update(operators="0")),
    "choices are a list": lambda text: edited(text, lambda c: c.update(choices=[])),
    "entry is a number": lambda text: edited(text, lambda c: next(iter(c["choices"].values())).update({"512": 3})),
    "a way is missing": lambda text: edited(text, lambda c: entry(c)["microseconds"].pop("pack")),
    "an unknown way": lambda text: edited(text, lambda c: entry(c)["microseconds"].update(magic=1.0)),
    "a wrong type": lambda text: edited(text, lambda c: entry(c)["microseconds"].update(pack="2")),
    "no time": lambda text: edited(text, lambda c: entry(c)["microseconds"].update(pack=math.nan)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_passed_over_with_one_reason_and_replaced(
    damage: Callable[[str], str], timer: Timer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    way(300)
    path = file(tmp_path)
    good = path.read_text()
    path.write_text(damage(good))
    tuning.forget()
    assert way(300) == way(301) == "pack+streams"
    assert len(timer.calls) == 2 and sources() == {"searched"}
    (reason,) = warnings(caplog)
    assert "not used" in reason and path.name in reason
    assert path.read_text() == good


def test_a_folder_that_cannot_be_written_is_one_reason_and_the_measurement_counts(
    timer: Timer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a read-only folder; permissions do not stop root."""
    (tmp_path / "dsv4").write_text("a file")
    assert [way(1), way(2), way(100)] == ["pack+streams"] * 3
    assert len(timer.calls) == 2 and sources() == {"searched"}
    assert all("cannot be kept" in reason for reason in warnings(caplog)) and len(warnings(caplog)) <= 2


def test_a_read_only_file_is_read_and_what_is_new_counts_for_this_process(
    timer: Timer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    way(1)
    tuning.forget()

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("torch._inductor.codecache.write_atomic", read_only)
    assert [way(1), way(100)] == ["pack+streams"] * 2
    assert [one["source"] for one in linear.choices()] == ["cached", "searched"]
    assert len(warnings(caplog)) == 1 and "Read-only" in warnings(caplog)[0]


def test_a_lock_that_is_not_released_is_waited_for_in_vain_and_tried_again_later(
    timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chooser, "PATIENCE", 0.2)
    with tuning._store(CARD).lock():
        assert way(1) == "pack"
    assert timer.calls == [] and "others have been searching" in sources().pop()
    monkeypatch.setattr(chooser.time, "monotonic", lambda now=time.monotonic: now() + chooser.AGAIN)
    assert way(1) == "pack+streams"


def test_what_was_queued_is_waited_for_before_a_lock_is_held(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    free: list[bool] = []

    def drain(index: int) -> None:
        with tuning._store(CARD).lock().acquire(timeout=0):
            free.append(not chooser._locks[index].locked())

    monkeypatch.setattr(chooser, "drain", drain)
    way(1)
    way(100)
    assert free == [True, True] and len(timer.calls) == 2


def measure_in_a_process(notes: Path, number: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        timer = pretend(patch)

        def note() -> None:
            (notes / f"search-{timer.calls[-1][1][-1]}-{number}").touch()
            time.sleep(0.2)

        timer.before = note
        (notes / f"found-{number}").write_text(" ".join(way(tokens) for tokens in (1, 20, 300)))


def test_processes_on_one_cold_folder_measure_once_and_agree(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    context = multiprocessing.get_context("fork")  # others would import torch eight times
    running = [context.Process(target=measure_in_a_process, args=(notes, number)) for number in range(8)]
    for process in running:
        process.start()
    for process in running:
        process.join(60)
    assert [process.exitcode for process in running] == [0] * 8
    assert {path.read_text() for path in notes.glob("found-*")} == {"pack+streams pack+streams pack+streams"}
    assert sorted(int(path.name.split("-")[1]) for path in notes.glob("search-*")) == [8, 32, 512]


# ------------------------------------------------------------------------------------------------------- the buffers


@pytest.mark.parametrize("contiguous", [True, False])
def test_the_tensors_of_the_launches_lie_side_by_side_and_runs_are_runs(contiguous: bool) -> None:
    problem = other(columns=64, biased=(True, False, True), contiguous=contiguous, features=(10, 3, 5))
    size = 3 * timing._bytes_of_set(problem, 9)
    memory = torch.zeros(size + 100, dtype=torch.uint8)
    sets = timing._sets(memory, problem, 9)
    assert len(sets) == 3
    spans = []
    for one in sets:
        assert one.rows.shape == (9, 64) and one.rows.is_contiguous() is contiguous
        assert strategies.plan_of("serial", problem).casts == (F32,) == tuple(one.casts)
        assert one.weights[1].data_ptr() == one.weights[0].data_ptr() + one.weights[0].nbytes
        tensors = [one.rows, *one.weights, *(b for b in one.biases if b is not None), *one.outputs, *one.casts.values()]
        for tensor in tensors:
            last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
            spans.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()))
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert memory.data_ptr() <= spans[0][0] and spans[-1][1] <= memory.data_ptr() + size


def test_every_way_runs_on_these_tensors() -> None:
    problem = other(columns=64, biased=(True, False, True), features=(10, 3, 5))
    sets = timing._sets(torch.zeros(2 * timing._bytes_of_set(problem, 9), dtype=torch.uint8), problem, 9)
    timing._fill(sets)
    found = []
    for name in strategies.legal(problem, 9):
        timing._launch(strategies.plan_of(name, problem), sets)
        found.append([output.clone() for one in sets for output in one.outputs])
    assert all(output.abs().sum() > 0 for output in found[0])
    for outputs in found[1:]:
        for ours, serial in zip(outputs, found[0], strict=True):
            torch.testing.assert_close(ours, serial, rtol=2e-2, atol=2e-2)


def test_memory_that_is_not_torchs_can_be_a_tensor() -> None:
    owner = torch.arange(8, dtype=torch.uint8)
    borrowed = timing._as_tensor(owner.data_ptr(), 8, torch.device("cpu"))
    assert borrowed.equal(owner) and borrowed.data_ptr() == owner.data_ptr()
    borrowed[3] = 9
    assert owner[3] == 9


def test_short_memory_means_fewer_tokens_or_a_reason() -> None:
    one = timing._bytes_of_set(MIXED, 1)
    assert timing._tokens(MIXED, range(1, 9), 2 * one) >= 1
    assert timing._tokens(MIXED, range(4097, 8193), 1 << 40) == 8192
    with pytest.raises(RuntimeError, match=r"it takes \d+ MiB, and \d+ can be had"):
        timing._tokens(MIXED, range(1, 9), one - 1)
