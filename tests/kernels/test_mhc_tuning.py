"""Which plan the CUDA family of mHC runs with: shipped, searched, kept on disk. Without a GPU the times are made up."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import math
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4_compile.kernels.choice import chooser
from dsv4_compile.kernels.mhc import choices, cuda, families, warmup
from dsv4_compile.kernels.mhc.cuda import cache, compilation, plans, timing, tuning
from dsv4_compile.kernels.mhc.cuda.compilation import Variant, token_bytes
from dsv4_compile.kernels.mhc.cuda.plans import BUCKETS, Card, Plan, Problem, candidates, counts_of, fitting, illegal
from tests.kernels.test_mhc import assert_close, make, oracle
from tests.kernels.test_mhc_gpu import first_rows

H100 = cuda.HOPPER
ADA = Card("NVIDIA L40S", 142, 101_376)
BF16 = (torch.bfloat16,) * 3 + (torch.float32,) * 2 + (torch.bfloat16,) * 2 + (torch.float32,)


def clear() -> None:
    tuning.forget()
    cuda._variant.cache_clear()
    cuda._seen.clear()


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing chosen yet, an empty folder, searches on."""
    clear()
    monkeypatch.setenv("DSV4_TUNE", "auto")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    yield
    clear()


class Timer:
    """In place of `timing.measure`: the plan with most steps is the fastest."""

    def __init__(self) -> None:
        self.calls: list[range] = []
        self.before: Callable[[], None] = lambda: None

    def __call__(self, variants: list[Variant], counts: range, index: int) -> dict[Variant, float]:
        self.calls.append(counts)
        self.before()
        return {variant: 100.0 / variant.plan.steps + number for number, variant in enumerate(variants)}


def pretend(card: Card, patch: pytest.MonkeyPatch) -> Timer:
    """A device 0 that is a `card`, and a clock."""
    timer = Timer()
    patch.setattr(cuda, "_card", lambda index: card)
    patch.setattr(cache, "version", lambda: "test")
    patch.setattr(chooser, "capturing", lambda index: False)
    patch.setattr(chooser, "drain", lambda index: None)
    patch.setattr(timing, "measure", timer)
    return timer


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Timer:
    return pretend(ADA, monkeypatch)


def variant(tokens: int, n: int = 4, hidden: int = 4096, **others: Any) -> Variant:
    """What a call on device 0 asks for."""
    dtypes, has_post = others.get("dtypes", BF16), others.get("has_post", True)
    arguments = (tokens, None, n, hidden, (2 + n) * n, 20, dtypes, has_post, True, False, 0)
    try:
        return cuda._variant(*arguments)
    except cuda.Provisional as default:
        return default.variant


def sources() -> set[str]:
    return {entry["source"] for entry in choices()}


def file(folder: Path) -> Path:
    (path,) = (folder / "dsv4").glob("*.json")
    return path


# ------------------------------------------------------------------------------------------------- plans and buckets


def test_every_token_count_is_in_one_bucket() -> None:
    covered = [tokens for bucket in BUCKETS for tokens in counts_of(bucket)]
    assert covered == list(range(1, plans.MANY + 1))
    assert all(plans.bucket_of(tokens) == bucket for bucket in BUCKETS for tokens in counts_of(bucket))
    assert plans.bucket_of(10**9) == math.inf


def test_shipped_tables_step_at_limits_of_buckets_and_are_legal() -> None:
    for table in plans.SHIPPED.values():
        assert [limit for limit, _ in table] == sorted({limit for limit, _ in table}) and table[-1][0] == math.inf
        assert {limit for limit, _ in table} <= set(BUCKETS)
        assert all(illegal(plan) is None for _, plan in table)


def test_every_field_of_a_plan_has_a_range() -> None:
    """Without one it must have its default."""
    assert set(plans.RANGES) == {field.name for field in dataclasses.fields(Plan)}


@pytest.mark.parametrize("card", [H100, ADA, Card("NVIDIA A100-SXM4-80GB", 108, 166_912)], ids=lambda card: card.name)
@pytest.mark.parametrize("kind", ["bf16", "float"])
def test_candidates_are_a_few_legal_plans_that_fit_and_begin_with_the_default(card: Card, kind: str) -> None:
    for n in range(2, 9):
        for hidden in (8, 1000, 4096, 7168, 8192):
            problem = Problem(card, n, hidden, (2 + n) * n, (kind,) * 7, True)
            column = token_bytes(n, problem.types, True)
            for bucket in BUCKETS:
                counts = counts_of(bucket)
                found = candidates(counts[-1], problem)
                assert 4 <= len(found) <= 8 and found[0] == plans.plan_for(counts[0], problem)
                for plan in found:
                    fitted = fitting(plan, n, hidden, problem.logits, column, card.shared_bytes)
                    assert illegal(plan) is None and illegal(fitted) is None
                    assert fitting(fitted, n, hidden, problem.logits, column, card.shared_bytes) == fitted
                    sums = 4 * 8 * 16 * (problem.logits + 1)
                    assert fitted.staged_bytes(column) + sums <= card.shared_bytes


@pytest.mark.parametrize(
    "change",
    [
        {"combined": True, "lag": 0},
        {"groups": 3},
        {"groups": 2, "whole": False, "combined": False},
        {"vec": 6},
        {"steps": 0},
        {"steps": 2.0},
        {"steps": True},
        {"together": 3},
        {"lag": -1},
        {"stages": 10**6},
        {"ahead": 1},
        {"combined": "no"},
    ],
    ids=str,
)
def test_a_plan_that_could_hang_or_was_never_meant_is_illegal(change: dict[str, Any]) -> None:
    assert illegal(dataclasses.replace(plans.DETERMINISTIC, **change)) is not None
    assert illegal(plans.DETERMINISTIC) is None


# ---------------------------------------------------------------------------------------------- shipped and searched


def test_an_h100_runs_with_the_shipped_plans_and_searches_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    timer = pretend(H100, monkeypatch)
    for hidden, table in zip((4096, 7168), plans.SHIPPED.values(), strict=True):
        for tokens in (1, 33, 100, 1000, 5000):
            wanted = next(plan for limit, plan in table if tokens <= limit)
            got = variant(tokens, hidden=hidden).plan
            assert got == dataclasses.replace(wanted, tokens=got.tokens)
    assert sources() == {"shipped"} and timer.calls == [] and not (tmp_path / "dsv4").exists()


@pytest.mark.parametrize(
    ("card", "n", "hidden", "dtypes"),
    [
        (ADA, 4, 4096, BF16),
        (Card("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 16, H100.shared_bytes), 4, 4096, BF16),
        (H100, 3, 4096, BF16),
        (H100, 4, 8192, BF16),
        (H100, 4, 4096, (torch.float32,) * 8),
    ],
    ids=["another card", "a slice", "three streams", "a wider row", "float32"],
)
def test_what_was_not_measured_is_searched_once_for_each_bucket(
    card: Card, n: int, hidden: int, dtypes: tuple[torch.dtype, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = pretend(card, monkeypatch)
    for tokens in (5, 8, 9, 6, 100_000):
        variant(tokens, n, hidden, dtypes=dtypes)
    assert timer.calls == [counts_of(8), counts_of(16), counts_of(math.inf)]
    assert sources() == {"searched"}


def test_the_fastest_is_taken_and_another_process_reads_it(timer: Timer, tmp_path: Path) -> None:
    chosen = variant(300)
    problem = Problem(ADA, 4, 4096, 24, tuple(compilation.TYPES[d] for d in BF16), True)
    most = max(plan.steps for plan in candidates(512, problem))
    assert chosen.plan.steps == most > plans.plan_for(300, problem).steps
    (first,) = choices()
    assert json.loads(json.dumps(choices())) == [{**first, "types": list(first["types"])}]
    clear()
    assert variant(400) == chosen and len(timer.calls) == 1
    (second,) = choices()
    assert (first["source"], second["source"]) == ("searched", "cached")
    assert (second["microseconds"], second["tokens"]) == (first["microseconds"], 512)
    assert json.loads(file(tmp_path).read_text())["card"]["name"] == ADA.name


def test_other_problems_and_buckets_are_kept_in_the_same_file(timer: Timer) -> None:
    asked = [(tokens, n, post) for tokens in (1, 100, 3000) for n in (2, 4) for post in (True, False)]
    found = [variant(tokens, n, has_post=post) for tokens, n, post in asked]
    clear()
    assert [variant(tokens, n, has_post=post) for tokens, n, post in asked] == found
    assert len(timer.calls) == len(asked) and sources() == {"cached"}


def test_after_warmup_no_token_count_reaches_another_kernel(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other streams, hidden size and card than those of the shipped plans."""
    loaded: list[Variant] = []
    monkeypatch.setattr(cuda, "kernel", lambda one, index: loaded.append(one))
    monkeypatch.setattr(torch.cuda, "device", lambda index: threading.Lock())
    for n, post in ((3, True), (3, False)):
        variant(1, n, 1000, has_post=post)
    assert warmup(2000) == len(loaded) == len(set(loaded))
    searches = len(timer.calls)
    assert searches == 2 * sum(counts_of(bucket)[0] <= 2000 for bucket in BUCKETS)
    asked = {variant(tokens, 3, 1000, has_post=post) for tokens in range(1, 2001) for post in (True, False)}
    assert asked == set(loaded) and len(timer.calls) == searches


def test_deterministic_calls_are_not_searched(timer: Timer) -> None:
    got = cuda._variant(5, plans.DETERMINISTIC, 4, 4096, 24, 20, BF16, True, True, False, 0)
    assert got.plan == plans.DETERMINISTIC and timer.calls == [] and choices() == []


def test_switched_off_nothing_is_searched_or_read(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    searched = variant(300)
    clear()
    monkeypatch.setenv("DSV4_TUNE", "0")
    assert variant(300) != searched
    assert sources() == {"default: DSV4_TUNE is 0"} and len(timer.calls) == 1


def test_switched_on_shipped_problems_are_searched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = pretend(H100, monkeypatch)
    monkeypatch.setenv("DSV4_TUNE", "1")
    variant(1)
    assert len(timer.calls) == 1 and sources() == {"searched"}


def test_an_unknown_switch_is_told_and_means_auto(
    timer: Timer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DSV4_TUNE", "yes")
    variant(1)
    variant(10)
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "DSV4_TUNE is 'yes'; it can be 0, 1 or auto, and auto is used."
    ]
    assert sources() == {"searched"}


def test_during_a_capture_the_default_serves_and_the_search_is_made_up_for(
    timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chooser, "capturing", lambda index: True)
    default = variant(300)
    assert variant(300) == default and timer.calls == []
    assert sources() == {"default: the stream is being captured"}
    monkeypatch.setattr(chooser, "capturing", lambda index: False)
    searched = variant(300)
    assert searched != default and len(timer.calls) == 1 and sources() == {"searched"}
    monkeypatch.setattr(chooser, "capturing", lambda index: True)
    assert variant(300) == searched


def test_what_was_found_before_serves_a_capture(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    searched = variant(300)
    clear()
    monkeypatch.setattr(chooser, "capturing", lambda index: True)
    assert variant(300) == searched and sources() == {"cached"}


def test_a_fake_tensor_starts_no_search(timer: Timer) -> None:
    case = make((2, 3), 64, dtype=torch.bfloat16)
    with FakeTensorMode():
        fake = case.map(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda"))
        torch.ops.dsv4.mhc_post_pre(*fake, "cuda")
    assert timer.calls == [] and choices() == []


def test_threads_that_call_at_once_search_once(timer: Timer) -> None:
    barrier, got = threading.Barrier(8), []
    timer.before = lambda: time.sleep(0.2)

    def call() -> None:
        barrier.wait()
        got.append(variant(300))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(timer.calls) == 1 and len(got) == 8 and len(set(got)) == 1


@pytest.mark.parametrize("error", [RuntimeError("no memory for it"), torch.OutOfMemoryError("full")], ids=repr)
def test_a_search_that_fails_is_one_reason_and_the_default_serves(
    error: Exception, timer: Timer, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error

    timer.before = fail
    for tokens in (2, 3, 10, 100):
        variant(tokens)
    assert len(timer.calls) == 3  # once for each bucket
    assert [record.getMessage() for record in caplog.records] == [
        f"mHC runs with a plan that was not measured here: the search failed ({type(error).__name__}: {error})."
    ]
    (source,) = sources()
    assert source == f"default: the search failed ({type(error).__name__}: {error})"


def test_families_know_of_no_choice_before_the_family_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dsv4_compile.kernels.mhc.cuda")
    assert families.choices() == []


# ------------------------------------------------------------------------------------------------------ the file


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
    "not JSON": lambda text: "plans = 3",
    "another type": lambda text: "[1, 2]",
    "deep": lambda text: "[" * 100_000,
    "another schema": lambda text: edited(text, lambda c: c.update(schema=0)),
    "another card": lambda text: edited(text, lambda c: c["card"].update(name="NVIDIA A100-SXM4-80GB")),
    "other kernels": lambda text: edited(text, lambda c: c.update(kernels="0")),
    "choices are a list": lambda text: edited(text, lambda c: c.update(choices=[])),
    "entry is a number": lambda text: edited(text, lambda c: next(iter(c["choices"].values())).update({"512": 3})),
    "a field is missing": lambda text: edited(text, lambda c: entry(c)["plan"].pop("groups")),
    "a field too many": lambda text: edited(text, lambda c: entry(c)["plan"].update(color=3)),
    "a wrong type": lambda text: edited(text, lambda c: entry(c)["plan"].update(steps="2")),
    "waits for ever": lambda text: edited(text, lambda c: entry(c)["plan"].update(combined=True, lag=0)),
    "too much shared memory": lambda text: edited(text, lambda c: entry(c)["plan"].update(stages=64)),
    "no time": lambda text: edited(text, lambda c: entry(c).update(microseconds=math.nan)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_passed_over_with_one_reason_and_replaced(
    damage: Callable[[str], str], timer: Timer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = variant(300)
    path = file(tmp_path)
    good = path.read_text()
    path.write_text(damage(good))
    clear()
    assert variant(300) == variant(301) == chosen
    assert len(timer.calls) == 2 and sources() == {"searched"}
    assert len(caplog.records) == 1 and "not used" in caplog.text and path.name in caplog.text
    assert path.read_text() == good


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_does_no_harm_where_no_search_is_possible(
    damage: Callable[[str], str], timer: Timer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = variant(300)
    path = file(tmp_path)
    path.write_text(damage(path.read_text()))
    clear()
    monkeypatch.setenv("DSV4_TUNE", "0")
    default = variant(300)
    clear()
    monkeypatch.setenv("DSV4_TUNE", "auto")
    monkeypatch.setattr(chooser, "capturing", lambda index: True)
    assert variant(300) == default != searched
    assert sources() == {"default: the stream is being captured"}


def test_one_bad_entry_does_not_spoil_the_others(timer: Timer, tmp_path: Path) -> None:
    for tokens in (1, 300, 5000):
        variant(tokens)
    path = file(tmp_path)
    path.write_text(DAMAGES["waits for ever"](path.read_text()))
    clear()
    for tokens in (1, 300, 5000):
        variant(tokens)
    assert [one["source"] for one in choices()] == ["cached", "searched", "cached"]


def test_a_folder_that_cannot_be_is_one_reason_and_the_default_serves(
    timer: Timer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a folder that cannot be written; permissions do not stop root."""
    (tmp_path / "dsv4").write_text("a file")
    for tokens in (1, 2, 100):
        variant(tokens)
    assert timer.calls == [] and len(caplog.records) == 1
    assert all(source.startswith("default: what a search finds cannot be kept (") for source in sources())


def test_a_file_that_cannot_be_replaced_is_one_reason_and_the_search_counts(
    timer: Timer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(cache, "write", full)
    assert variant(2) == variant(3)
    variant(100)
    assert len(timer.calls) == 2 and sources() == {"searched"} and len(caplog.records) == 1


def test_a_lock_that_is_not_released_is_waited_for_in_vain_and_tried_again_later(
    timer: Timer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(chooser, "PATIENCE", 0.2)
    with cache.lock(ADA):
        default = variant(1)
    (entry,) = choices()
    assert timer.calls == [] and "others have been searching" in entry["source"] and len(caplog.records) == 1
    assert variant(1) == default and timer.calls == []  # at once: it waits a while before it tries again
    monkeypatch.setattr(chooser.time, "monotonic", lambda now=chooser.time.monotonic: now() + chooser.AGAIN)
    assert variant(1) != default and len(timer.calls) == 1 and sources() == {"searched"}


def test_what_a_busy_neighbour_has_found_is_used_while_it_goes_on_searching(timer: Timer, tmp_path: Path) -> None:
    variant(1)
    kept = file(tmp_path)
    content = kept.read_text()
    kept.unlink()
    clear()
    with cache.lock(ADA):
        late = threading.Timer(0.4, kept.write_text, [content])
        late.start()
        start = time.monotonic()
        variant(1)
        late.join()
    assert sources() == {"cached"} and len(timer.calls) == 1 and time.monotonic() - start < chooser.PATIENCE / 2


def test_what_was_queued_is_waited_for_before_a_lock_is_held(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a collective, for which another thread or process is needed that waits for the same lock."""
    free: list[bool] = []

    def drain(index: int) -> None:
        with cache.lock(ADA).acquire(timeout=0):
            free.append(not chooser._locks[index].locked())

    monkeypatch.setattr(chooser, "drain", drain)
    variant(1)
    variant(100)
    assert free == [True, True] and len(timer.calls) == 2


def search_in_a_process(notes: Path, number: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        timer = pretend(ADA, patch)

        def note() -> None:
            (notes / f"search-{timer.calls[-1][-1]}-{number}").touch()
            time.sleep(0.2)

        timer.before = note
        found = [str(variant(tokens).plan) for tokens in (2, 20, 300)]
        (notes / f"found-{number}").write_text("\n".join(found))


def test_processes_on_one_cold_folder_search_once_and_agree(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    context = multiprocessing.get_context("fork")  # others would import torch eight times
    running = [context.Process(target=search_in_a_process, args=(notes, number)) for number in range(8)]
    for process in running:
        process.start()
    for process in running:
        process.join(60)
    assert [process.exitcode for process in running] == [0] * 8
    assert len({path.read_text() for path in notes.glob("found-*")}) == 1
    assert sorted(int(path.name.split("-")[1]) for path in notes.glob("search-*")) == [8, 32, 512]
    assert len(next(iter(json.loads(file(tmp_path).read_text())["choices"].values()))) == 3


# ----------------------------------------------------------------------------------------------------- the buffers


@pytest.mark.parametrize("has_post", [True, False])
@pytest.mark.parametrize("logits", [24, 4], ids=["pre", "head"])
def test_the_buffers_of_the_launches_lie_side_by_side(has_post: bool, logits: int) -> None:
    common = (4, 1000, logits, 20, ("bf16", "bf16", "bf16", "float", "float", "bf16", "float"), has_post, True, False)
    found = [Variant(plan, *common) for _, plan in plans.PLANS]
    tokens, sets, memory = 100, 3, 1 << 40
    shared = timing._shared(found, tokens)
    end = memory + sum(shared) + sets * timing._bytes_of_set(found[0], tokens)
    for one in found:
        _, tiles, sums = one.sizes(tokens)
        packed = timing._arguments(one, tokens, sets, memory, shared)
        assert len(packed) >= timing.LAUNCHES - sets and packed[:sets] == packed[sets : 2 * sets]
        spans = [(memory, 4 * tiles), (cuda.ARGUMENTS.unpack(packed[0])[12], 4 * sums)]
        for values in map(cuda.ARGUMENTS.unpack, packed[:sets]):
            lengths = timing._lengths(one, tokens)
            assert [address == 0 for address in values[:12]] == [length == 0 for length in lengths]
            assert values[13:15] == (memory, tokens)
            spans += [(start, length) for start, length in zip(values[:12], lengths, strict=True) if length]
        spans.sort()
        assert all(start % 256 == 0 for start, _ in spans)
        assert all(start + length <= after for (start, length), (after, _) in itertools.pairwise(spans))
        assert spans[-1][0] + spans[-1][1] <= end


# --------------------------------------------------------------------------------------------------------- on a GPU


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> list[range]:
    """The searches made, each of them real."""
    families.forget()
    searches: list[range] = []
    real = timing.measure

    def measure(variants: list[Variant], counts: range, index: int) -> dict[Variant, float]:
        searches.append(counts)
        return real(variants, counts, index)

    monkeypatch.setattr(timing, "measure", measure)
    return searches


@pytest.mark.gpu
def test_a_search_on_the_card_finds_a_plan_and_disturbs_nothing(cold: list[range]) -> None:
    case = make((300,), 1000, 3, device="cuda")
    wanted = oracle(case)
    torch.cuda.synchronize()
    seed, memory, stream = torch.cuda.get_rng_state(), torch.cuda.memory_allocated(), torch.cuda.current_stream()
    for tokens in (2, 20, 300):
        got = torch.ops.dsv4.mhc_post_pre(*first_rows(case, tokens), "cuda")
        assert_close(got, tuple(rows[:tokens] for rows in wanted))
    del got
    assert sources() == {"searched"} and cold == [counts_of(8), counts_of(32), counts_of(512)]
    assert all(0.5 < one["microseconds"] < 1000 for one in choices())
    assert torch.equal(torch.cuda.get_rng_state(), seed) and torch.cuda.current_stream() == stream
    assert torch.cuda.memory_allocated() == memory
    assert families.resolve("cuda", case.x.device, 3, 1000, torch.float32) == ("cuda", None)


@pytest.mark.gpu
def test_every_candidate_of_another_shape_is_right(cold: list[range]) -> None:
    for n, hidden, tokens in ((3, 1000, 7), (3, 1000, 100), (8, 520, 40), (2, 4096, 2100)):
        case = make((tokens,), hidden, n, device="cuda")
        problem = Problem(cuda._card(0), n, hidden, (2 + n) * n, ("float",) * 7, True)
        wanted = oracle(case)
        for plan in candidates(tokens, problem):
            assert_close(cuda.mhc_post_pre(*case, plan=plan), wanted)
    assert cold == []


@pytest.mark.gpu
def test_after_warmup_on_the_card_nothing_is_searched_or_compiled(cold: list[range]) -> None:
    case = make((600,), 1000, 3, dtype=torch.bfloat16, device="cuda")
    torch.ops.dsv4.mhc_post_pre(*first_rows(case, 1), "cuda")
    warmup(600)
    before, searches = len(compilation._kernels), len(cold)
    for tokens in range(1, 601):
        torch.ops.dsv4.mhc_post_pre(*first_rows(case, tokens), "cuda")
    assert (len(compilation._kernels), len(cold)) == (before, searches)
    assert searches == sum(counts_of(bucket)[0] <= 600 for bucket in BUCKETS)


@pytest.mark.gpu
def test_a_capture_on_the_card_is_not_searched_and_a_later_call_is(cold: list[range]) -> None:
    case = make((20,), 1000, 3, device="cuda")
    torch.ops.dsv4.mhc_post_pre(*first_rows(case, 2), "cuda")
    assert cold == [counts_of(8)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.ops.dsv4.mhc_post_pre(*case, "cuda")
    assert len(cold) == 1
    graph.replay()
    assert_close(captured, oracle(case))
    assert_close(torch.ops.dsv4.mhc_post_pre(*case, "cuda"), oracle(case))
    assert cold == [counts_of(8), counts_of(32)]


@pytest.mark.gpu
def test_a_search_may_happen_in_the_warm_up_of_inductors_cuda_graphs(cold: list[range]) -> None:
    case = make((20,), 1000, 3, device="cuda")
    compiled = torch.compile(lambda *a: torch.ops.dsv4.mhc_post_pre(*a, "cuda"), mode="reduce-overhead")
    with torch.inference_mode():
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            got = tuple(v.clone() for v in compiled(*case))
            assert_close(got, oracle(case))
    assert cold == [counts_of(32)]


@pytest.mark.gpu
def test_short_memory_is_a_reason(
    cold: list[range], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(timing, "MEMORY", 1 << 20)
    case = make((3000,), 1000, 3, device="cuda")
    assert_close(torch.ops.dsv4.mhc_post_pre(*case, "cuda"), oracle(case))
    assert "MiB" in caplog.text and len(caplog.records) == 1
