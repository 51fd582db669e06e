"""The plans that searches have found, on disk: a JSON file for each card and version of the kernels.

What is read from it is checked, because a bad plan could wait for ever.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from filelock import BaseFileLock

from dsv4_compile.kernels.choice.store import Store, label
from dsv4_compile.kernels.driver import bindings
from dsv4_compile.kernels.mhc.cuda.compilation import FOLDER, sources
from dsv4_compile.kernels.mhc.cuda.plans import BUCKETS, Card, Plan, Problem, illegal

__all__ = ["Found", "lock", "read", "write"]

SCHEMA = 1


@dataclass(frozen=True)
class Found:
    """The fastest plan of a search and how long a call took, or a plan that was not timed here."""

    plan: Plan
    microseconds: float | None = None


def lock(card: Card) -> BaseFileLock:
    """The lock of the file of `card`, which is to be acquired.

    Raises:
        OSError: there can be no such file.
    """
    return _store(card).lock()


def read(problem: Problem, passed_over: Callable[[str], None]) -> dict[float, Found]:
    """What was found for `problem`, by the limit of the bucket. `passed_over` is told what cannot be used, and why."""
    return _store(problem.card).read(label(problem), BUCKETS, _parsed, passed_over)


def write(problem: Problem, bucket: float, found: Found) -> None:
    """Add what was found. By the holder of the lock.

    Raises:
        OSError: the file cannot be written.
    """
    _store(problem.card).write(label(problem), bucket, dataclasses.asdict(found))


def _parsed(bucket: float, entry: dict[str, Any]) -> Found:
    found = Found(Plan(**entry["plan"]), entry["microseconds"])
    if (reason := illegal(found.plan)) is not None:
        raise ValueError(reason)
    if type(found.microseconds) is not float or not 0 < found.microseconds < math.inf:
        raise ValueError(f"microseconds is {found.microseconds!r}")
    return found


def _store(card: Card) -> Store:
    return Store("mhc-plans", {"schema": SCHEMA, "card": dataclasses.asdict(card), "kernels": version()})


@functools.cache
def version() -> str:
    """A hash of what can make another plan the fastest: the kernels, the plans there are, the compiler."""
    _, nvrtc = bindings()
    python = [(FOLDER / name).read_bytes() for name in ("plans.py", "compilation.py", "launch.py", "timing.py")]
    parts = [*sources().values(), *python, repr(nvrtc.nvrtcVersion()).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()
