"""The plans that searches have found, on disk: a JSON file for each card and version of the kernels.

It lies beside the machine code, is replaced as a whole, and is written by whoever holds the lock beside it. What is
read from it is checked: a file may be damaged, foreign or edited, and a bad plan could wait for ever.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock

from dsv4_compile.kernels.mhc.cuda.compilation import FOLDER, cache_folder, sources
from dsv4_compile.kernels.mhc.cuda.driver import bindings
from dsv4_compile.kernels.mhc.cuda.plans import BUCKETS, Card, Plan, Problem, illegal

__all__ = ["Found", "label", "lock", "read", "write"]

SCHEMA = 1


@dataclass(frozen=True)
class Found:
    """The fastest plan of a search, and how long a call took."""

    plan: Plan
    microseconds: float


def label(problem: Problem) -> str:
    """All of `problem` but the card, in words."""
    parts = {field.name: getattr(problem, field.name) for field in dataclasses.fields(problem) if field.name != "card"}
    return ", ".join(
        f"{name} {' '.join(value) if isinstance(value, tuple) else value}" for name, value in parts.items()
    )


def lock(card: Card) -> BaseFileLock:
    """The lock of the file of `card`, which is to be acquired.

    Raises:
        OSError: there can be no such file.
    """
    path = _path(card)
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(f"{path}.lock")


def read(problem: Problem, passed_over: Callable[[str], None]) -> dict[float, Found]:
    """What was found for `problem`, by the limit of the bucket. `passed_over` is told what cannot be used, and why."""
    of_problem = _of(problem, _choices(problem.card, passed_over))
    found = {}
    for bucket in BUCKETS:
        if (entry := of_problem.get(str(bucket))) is None:
            continue
        try:
            found[bucket] = _parsed(entry)
        except Exception as error:
            where = f"{_path(problem.card)}: {label(problem)}, up to {bucket} tokens"
            passed_over(f"{where}: the plan is not used ({_brief(error)})")
    return found


def write(problem: Problem, bucket: float, found: Found) -> None:
    """Add what was found. By the holder of the lock.

    Raises:
        OSError: the file cannot be written.
    """
    from torch._inductor.codecache import write_atomic

    choices = _choices(problem.card, lambda reason: None)
    choices[label(problem)] = {**_of(problem, choices), str(bucket): dataclasses.asdict(found)}
    text = json.dumps({**_header(problem.card), "choices": choices}, indent=1)
    write_atomic(str(_path(problem.card)), text.encode(), make_dirs=True)


def _choices(card: Card, passed_over: Callable[[str], None]) -> dict[str, Any]:
    """The content of the file: by problem, by bucket; not looked at yet."""
    try:
        text = _path(card).read_bytes()
    except (FileNotFoundError, NotADirectoryError, FileExistsError):
        return {}  # where there can be no such folder, `lock` will say so
    except OSError as error:
        passed_over(f"The plans found before cannot be read ({_brief(error)})")
        return {}
    try:
        content = json.loads(text)
        choices = content.pop("choices")
        if content == _header(card) and isinstance(choices, dict):
            return choices
        reason = "it is of another card, version or form"
    except Exception as error:
        reason = _brief(error)
    passed_over(f"{_path(card)} is not used ({reason})")
    return {}


def _of(problem: Problem, choices: dict[str, Any]) -> dict[str, Any]:
    of_problem = choices.get(label(problem))
    return of_problem if isinstance(of_problem, dict) else {}


def _parsed(entry: dict[str, Any]) -> Found:
    found = Found(Plan(**entry["plan"]), entry["microseconds"])
    if (reason := illegal(found.plan)) is not None:
        raise ValueError(reason)
    if type(found.microseconds) is not float or not 0 < found.microseconds < math.inf:
        raise ValueError(f"microseconds is {found.microseconds!r}")
    return found


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _header(card: Card) -> dict[str, Any]:
    return {"schema": SCHEMA, "card": dataclasses.asdict(card), "kernels": version()}


def _path(card: Card) -> Path:
    name = hashlib.sha256(json.dumps(_header(card)).encode()).hexdigest()[:16]
    return cache_folder() / f"mhc-plans-{name}.json"


@functools.cache
def version() -> str:
    """A hash of what can make another plan the fastest: the kernels, the plans there are, the compiler."""
    _, nvrtc = bindings()
    python = [(FOLDER / name).read_bytes() for name in ("plans.py", "compilation.py", "launch.py", "timing.py")]
    parts = [*sources().values(), *python, repr(nvrtc.nvrtcVersion()).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()
