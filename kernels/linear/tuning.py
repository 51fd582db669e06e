"""Which way linear layers of one input run, for each problem and bucket of token counts: measured, kept, or a default.

The first call in a bucket times every way that is right, unless it was done before on such a card with these versions.
That takes a fraction of a second, and up to 64 tokens some seconds for compiling. `choice/chooser.py` says when nothing
is timed: `strategies.default` serves then. A search that failed is made again later; one that cannot be kept on disk
counts for this process.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import logging
import math
import time
from pathlib import Path
from typing import Any

import torch
from filelock import BaseFileLock

from dsv4_compile.kernels.choice.chooser import Chooser, warn
from dsv4_compile.kernels.choice.store import Store, label
from dsv4_compile.kernels.linear import strategies, timing
from dsv4_compile.kernels.linear.buckets import LIMITS, bucket_of, counts_of
from dsv4_compile.kernels.linear.strategies import Card, Problem

__all__ = ["card_of", "choices", "forget", "strategy", "warmup"]

logger = logging.getLogger("dsv4_compile.kernels")

SCHEMA = 1

Times = dict[str, float]
"""Microseconds of each way; empty where nothing was measured."""


class _Ways(Chooser[Problem, Times]):
    unmeasured = "Projections run in a way that was not measured here"
    cheap = True

    def default(self, problem: Problem, bucket: float) -> Times:
        return {}

    def lock(self, problem: Problem) -> BaseFileLock:
        return _store(problem.card).lock()

    def read(self, problem: Problem) -> dict[float, Times]:
        return _store(problem.card).read(label(problem), LIMITS, functools.partial(_parsed, problem), warn)

    def write(self, problem: Problem, bucket: float, found: Times) -> None:
        _store(problem.card).write(label(problem), bucket, {"microseconds": found})


_ways = _Ways()
# What the calls so far had in common with calls of other token counts: problem with its streams, `max_tokens`, device.
_seen: dict[tuple[Problem, int, int], None] = {}


def strategy(problem: Problem, tokens: int, max_tokens: int, index: int | None) -> tuple[str, Problem, bool]:
    """The way for `tokens` rows.

    Args:
        problem: with the streams that the layers may run on.
        max_tokens: with more rows than this nothing leaves the current stream.
        index: of the CUDA device, None for a CPU.

    Returns:
        The name, the problem it solves (without streams above `max_tokens`), and whether it is chosen for good.
    """
    if index is not None:
        _seen[problem, max_tokens, index] = None
    if tokens > max_tokens:
        problem = dataclasses.replace(problem, streams=(0,) * len(problem.streams))
    bucket = bucket_of(tokens)
    names = strategies.legal(problem, bucket)
    if len(names) == 1:
        return names[0], problem, True
    if tokens == 0:
        return strategies.default(problem, bucket), problem, False

    def search() -> Times:
        assert index is not None
        return _search(problem, bucket, index)

    choice = _ways.settle(problem, bucket, index, search)
    return _name(problem, bucket, choice.found), problem, choice.settled


def _name(problem: Problem, bucket: float, times: Times) -> str:
    return strategies.fastest(times) if times else strategies.default(problem, bucket)


def _search(problem: Problem, bucket: float, index: int) -> Times:
    """Times every way."""
    start = time.monotonic()
    times = timing.measure(problem, counts_of(bucket), index)
    logger.info(
        "Projections, %s, up to %s tokens: %s; timed in %.2f s",
        *(label(problem), bucket, _listed(times), time.monotonic() - start),
    )
    return times


def _listed(times: Times) -> str:
    return ", ".join(f"{name} {took:.1f} us" for name, took in sorted(times.items(), key=lambda item: item[1]))


def warmup(max_tokens: int) -> int:
    """Choose for every token count from 1 to `max_tokens`, by a search if need be, so that serving searches nothing.

    What else a choice depends on is taken from the calls so far: to be called after one forward pass, and not while a
    stream is being captured. Returns how many choices are in force for good.
    """
    settled: dict[tuple[Problem, float], bool] = {}
    for problem, threshold, index in list(_seen):
        for bucket in LIMITS:
            counts = counts_of(bucket)
            if counts[0] <= max(max_tokens, 1):
                # A threshold within the bucket makes two problems of it.
                for tokens in {counts[0], min(counts[-1], max(max_tokens, 1))}:
                    _, solved, done = strategy(problem, tokens, threshold, index)
                    settled[solved, bucket] = done
    return sum(settled.values())


def choices() -> list[dict[str, Any]]:
    """For every problem that was asked for: each bucket, its way, where that comes from, what was measured. For JSON.

    `tokens` is the largest count of the bucket, None for the last one; `microseconds` has every way that was timed.
    """
    return [
        {
            **dataclasses.asdict(problem),
            "dtypes": [_brief(dtype) for dtype in problem.dtypes],
            "x": _brief(problem.x),
            "scaled": [{**dataclasses.asdict(low), "dtype": _brief(low.dtype)} for low in problem.scaled],
            "tokens": None if bucket == math.inf else int(bucket),
            "strategy": _name(problem, bucket, known.found),
            "source": known.source,
            "microseconds": dict(known.found),
        }
        for (problem, bucket), known in list(_ways.known.items())
    ]


def forget() -> None:
    """Choose again and warn again; what is on disk stays. For tests."""
    from dsv4_compile.kernels.linear import grouped

    _ways.forget()
    _seen.clear()
    grouped._groups.clear()


def _brief(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------------------------------------ on disk


@functools.cache
def card_of(index: int | None) -> Card:
    """CUDA device `index`, or the CPU."""
    if index is None:
        return Card("cpu", 0)
    properties = torch.cuda.get_device_properties(index)
    capability = 0 if torch.version.hip is not None else 10 * properties.major + properties.minor
    return Card(properties.name, properties.multi_processor_count, capability)


def _store(card: Card) -> Store:
    return Store("projections", {"schema": SCHEMA, "card": dataclasses.asdict(card), **versions()})


@functools.cache
def versions() -> dict[str, str | None]:
    """What can make another way the fastest: torch, CUDA, cuBLAS, and the source of the ways here."""
    here = Path(__file__).parent
    sources = [path.read_bytes() for path in sorted(here.rglob("*")) if path.suffix in (".py", ".cu", ".cuh")]
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cublas": cublas_version(),
        "operators": hashlib.sha256(b"\0".join(sources)).hexdigest(),
    }


def cublas_version() -> str | None:
    """Of the cuBLAS that torch has loaded, as "13.1.0"; None where it does not say."""
    if torch.version.cuda is None:
        return None
    try:
        library = ctypes.CDLL(f"libcublas.so.{torch.version.cuda.partition('.')[0]}")
        number = ctypes.c_int()
        parts = []
        for which in range(3):  # MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL
            if library.cublasGetProperty(which, ctypes.byref(number)):
                return None
            parts.append(str(number.value))
        return ".".join(parts)
    except (OSError, AttributeError):
        return None


def _parsed(problem: Problem, bucket: float, entry: dict[str, Any]) -> Times:
    times = entry["microseconds"]
    names = strategies.legal(problem, bucket)
    if set(times) != set(names):
        raise ValueError(f"it has times of {', '.join(map(str, times))}")
    for took in times.values():
        if type(took) is not float or not 0 < took < math.inf:
            raise ValueError(f"a time is {took!r}")
    return {name: times[name] for name in names}
