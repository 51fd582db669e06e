"""Which plan serves a bucket of token counts: measured ahead, found before, or the fastest of a search.

A problem that is not `shipped` gets a search for each bucket: at the first call there, or all of them in `warmup`.
`DSV4_TUNE=1` also searches where plans are shipped; `DSV4_TUNE=0` neither searches nor reads what was found before.
Nothing is timed while the stream is being captured: the default plan serves, and a later call makes up for the search.
Where a search is impossible the default serves for good, and the reason is logged once. Nothing here raises.

A caller may have queued a collective that another thread or process must join first. So it waits for its own stream
before it takes a lock, looks again and again whether what it wants has been found, and does not wait for ever.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from filelock import Timeout

from dsv4_compile.kernels.mhc.cuda import cache, timing
from dsv4_compile.kernels.mhc.cuda.compilation import Variant
from dsv4_compile.kernels.mhc.cuda.plans import Plan, Problem, bucket_of, candidates, counts_of, plan_for, shipped

__all__ = ["Choice", "choice", "choices", "forget", "settle"]

logger = logging.getLogger("dsv4_compile.kernels")

PATIENCE = 60.0  # seconds that a caller waits for the searches of others
AGAIN = 60.0  # seconds after which it tries again
SLICE = 0.1  # seconds between two looks at what has been found


@dataclass(frozen=True)
class Choice:
    """A plan, where it comes from ("shipped", "searched", "cached" or "default: ..."), and how long a call took.

    One that is not settled may still be replaced, by a call at `again` (`time.monotonic()`) or later.
    """

    plan: Plan
    source: str
    microseconds: float | None = None
    settled: bool = True
    again: float = 0.0


_locks: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)  # of a search, by device
_choices: dict[tuple[Problem, float], Choice] = {}
_told: set[str] = set()


def choice(problem: Problem, tokens: int) -> Choice:
    """What is in force for `tokens` rows."""
    known = _choices.get((problem, bucket_of(tokens)))
    return known or Choice(plan_for(tokens, problem), "default: nothing was asked for yet", settled=False)


def settle(problem: Problem, tokens: int, make: Callable[[Plan], Variant], index: int | None) -> bool:
    """Choose the plan for `tokens` rows for good, unless it has been.

    Args:
        make: the kernel of a plan, for a search.
        index: of the CUDA device to search on.

    Returns:
        False when the choice has to wait; `choice` has what serves meanwhile.
    """
    key = problem, bucket_of(tokens)
    known = _choices.get(key)
    if known is not None and (known.settled or time.monotonic() < known.again):
        return known.settled
    if (found := _known_ahead(*key, index)) is not None:
        _choices[key] = found
        return True
    assert index is not None
    if _capturing(index):
        waiting = Choice(plan_for(tokens, problem), "default: the stream is being captured", settled=False)
        return _choices.setdefault(key, waiting).settled
    found = _choices[key] = _searched(*key, make, index)
    return found.settled


def _known_ahead(problem: Problem, bucket: float, index: int | None) -> Choice | None:
    """The choice that needs no search."""
    mode = _mode()
    if shipped(problem) and mode != "1":
        return Choice(_default_plan(problem, bucket), "shipped")
    if mode == "0":
        return Choice(_default_plan(problem, bucket), "default: DSV4_TUNE is 0")
    if index is None:
        return Choice(_default_plan(problem, bucket), "default: there is no card to search on")
    return _kept(problem, bucket)


def _kept(problem: Problem, bucket: float) -> Choice | None:
    found = cache.read(problem, _warn).get(bucket)
    return None if found is None else Choice(found.plan, "cached", found.microseconds)


def _searched(problem: Problem, bucket: float, make: Callable[[Plan], Variant], index: int) -> Choice:
    """The fastest of a few plans; what another thread or process has found while this one waited; or the default."""
    _drain(index)
    deadline = time.monotonic() + PATIENCE
    while True:
        known = _choices.get((problem, bucket))
        found = known if known is not None and known.settled else _kept(problem, bucket)
        if found is not None:
            return found
        with contextlib.ExitStack() as held:
            try:
                if _locked(held, problem, index):
                    return _kept(problem, bucket) or _search(problem, bucket, make, index)
            except (OSError, NotImplementedError) as error:
                return _default(problem, bucket, f"what a search finds cannot be kept ({_brief(error)})")
        if time.monotonic() >= deadline:
            waiting = _default(problem, bucket, f"others have been searching for {PATIENCE:.0f} seconds")
            return dataclasses.replace(waiting, settled=False, again=time.monotonic() + AGAIN)


def _locked(held: contextlib.ExitStack, problem: Problem, index: int) -> bool:
    """Takes the locks of the device and of the card's file, unless others have one of them."""
    if not _locks[index].acquire(timeout=SLICE):
        return False
    held.callback(_locks[index].release)
    try:
        held.enter_context(cache.lock(problem.card).acquire(timeout=SLICE))
    except Timeout:
        return False
    return True


def _search(problem: Problem, bucket: float, make: Callable[[Plan], Variant], index: int) -> Choice:
    """Times a few plans and keeps the fastest. By the holder of the locks."""
    start = time.monotonic()
    counts = counts_of(bucket)
    try:
        variants = list(dict.fromkeys(make(plan) for plan in candidates(counts[-1], problem)))
        times = timing.measure(variants, counts, index)
        best = min(times, key=times.__getitem__)
    except Exception as error:
        return _default(problem, bucket, f"the search failed ({_brief(error)})")
    found = cache.Found(best.plan, times[best])
    logger.info(
        "mHC, %s, up to %s tokens: %s takes %.1f us; %d plans were timed in %.1f s",
        *(cache.label(problem), bucket, found.plan, found.microseconds, len(times), time.monotonic() - start),
    )
    try:
        cache.write(problem, bucket, found)
    except OSError as error:
        _warn(f"What a search finds cannot be kept ({_brief(error)})")
    return Choice(found.plan, "searched", found.microseconds)


def _default_plan(problem: Problem, bucket: float) -> Plan:
    return plan_for(counts_of(bucket)[0], problem)


def _default(problem: Problem, bucket: float, reason: str) -> Choice:
    _warn(f"mHC runs with a plan that was not measured here: {reason}")
    return Choice(_default_plan(problem, bucket), f"default: {reason}")


def _mode() -> str:
    mode = os.environ.get("DSV4_TUNE") or "auto"
    if mode not in ("0", "1", "auto"):
        _warn(f"DSV4_TUNE is {mode!r}; it can be 0, 1 or auto, and auto is used")
        return "auto"
    return mode


def _capturing(index: int) -> bool:
    with torch.cuda.device(index):
        return torch.cuda.is_current_stream_capturing()


def _drain(index: int) -> None:
    """Waits for what the caller has queued."""
    torch.cuda.current_stream(index).synchronize()


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def _warn(reason: str) -> None:
    if reason not in _told:
        _told.add(reason)
        logger.warning("%s.", reason)


def choices() -> list[dict[str, Any]]:
    """For every problem that was asked for: each bucket, its plan, where that comes from. Fit for JSON.

    `tokens` is the largest count of the bucket, None for the last one; `microseconds` None where nothing was measured.
    """
    return [
        {
            **dataclasses.asdict(problem),
            "tokens": None if bucket == math.inf else int(bucket),
            "plan": dataclasses.asdict(known.plan),
            "source": known.source,
            "microseconds": known.microseconds,
        }
        for (problem, bucket), known in list(_choices.items())
    ]


def forget() -> None:
    """Choose again and warn again; what is on disk stays. For tests: kernels chosen before are remembered elsewhere."""
    _choices.clear()
    _told.clear()
