"""Which plan serves a bucket of token counts: measured ahead, found before, or the fastest of a search.

A problem that is not `shipped` gets a search for each bucket: at the first call there, or all of them in `warmup`.
`choice/chooser.py` says when there is none, and what serves meanwhile. Where a search is impossible the default plan
serves for good, and the reason is logged once.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from filelock import BaseFileLock

from dsv4_compile.kernels.choice.chooser import Chooser, warn
from dsv4_compile.kernels.choice.store import label
from dsv4_compile.kernels.mhc.cuda import cache, timing
from dsv4_compile.kernels.mhc.cuda.cache import Found
from dsv4_compile.kernels.mhc.cuda.compilation import Variant
from dsv4_compile.kernels.mhc.cuda.plans import Plan, Problem, bucket_of, candidates, counts_of, plan_for, shipped

__all__ = ["choices", "forget", "plan", "settle"]

logger = logging.getLogger("dsv4_compile.kernels")


class _Plans(Chooser[Problem, Found]):
    unmeasured = "mHC runs with a plan that was not measured here"

    def default(self, problem: Problem, bucket: float) -> Found:
        return Found(plan_for(counts_of(bucket)[0], problem))

    def shipped(self, problem: Problem, bucket: float) -> Found | None:
        return self.default(problem, bucket) if shipped(problem) else None

    def lock(self, problem: Problem) -> BaseFileLock:
        return cache.lock(problem.card)

    def read(self, problem: Problem) -> dict[float, Found]:
        return cache.read(problem, warn)

    def write(self, problem: Problem, bucket: float, found: Found) -> None:
        cache.write(problem, bucket, found)


_plans = _Plans()


def plan(problem: Problem, tokens: int) -> Plan:
    """The plan in force for `tokens` rows."""
    known = _plans.known.get((problem, bucket_of(tokens)))
    return plan_for(tokens, problem) if known is None else known.found.plan


def settle(problem: Problem, tokens: int, make: Callable[[Plan], Variant], index: int | None) -> bool:
    """Choose the plan for `tokens` rows for good, unless it has been.

    Args:
        make: the kernel of a plan, for a search.
        index: of the CUDA device to search on.

    Returns:
        False when the choice has to wait; `plan` has what serves meanwhile.
    """
    bucket = bucket_of(tokens)

    def search() -> Found:
        assert index is not None
        return _search(problem, bucket, make, index)

    return _plans.settle(problem, bucket, index, search).settled


def _search(problem: Problem, bucket: float, make: Callable[[Plan], Variant], index: int) -> Found:
    """Times a few plans."""
    start = time.monotonic()
    counts = counts_of(bucket)
    variants = list(dict.fromkeys(make(plan) for plan in candidates(counts[-1], problem)))
    times = timing.measure(variants, counts, index)
    best = min(times, key=times.__getitem__)
    logger.info(
        "mHC, %s, up to %s tokens: %s takes %.1f us; %d plans were timed in %.1f s",
        *(label(problem), bucket, best.plan, times[best], len(times), time.monotonic() - start),
    )
    return Found(best.plan, times[best])


def choices() -> list[dict[str, Any]]:
    """For every problem that was asked for: each bucket, its plan, where that comes from. Fit for JSON.

    `tokens` is the largest count of the bucket, None for the last one; `microseconds` None where nothing was measured.
    """
    return [
        {
            **dataclasses.asdict(problem),
            "tokens": None if bucket == math.inf else int(bucket),
            "plan": dataclasses.asdict(known.found.plan),
            "source": known.source,
            "microseconds": known.found.microseconds,
        }
        for (problem, bucket), known in list(_plans.known.items())
    ]


def forget() -> None:
    """Choose again and warn again; what is on disk stays. For tests: kernels chosen before are remembered elsewhere."""
    _plans.forget()
