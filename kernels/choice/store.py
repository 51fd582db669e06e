"""What was measured before, on disk: a JSON file for each kind of choice, card and version.

It lies in Inductor's cache folder, is replaced as a whole, and is written by whoever holds the lock beside it. What is
read from it is checked: a file may be damaged, foreign or edited.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from filelock import BaseFileLock, FileLock

__all__ = ["Store", "cache_folder", "label"]

T = TypeVar("T")


def cache_folder() -> Path:
    """Where machine code and choices are kept: beside what Inductor keeps."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "dsv4"


def label(problem: Any) -> str:
    """All fields of the dataclass `problem` but the card, in words."""
    parts = {field.name: getattr(problem, field.name) for field in dataclasses.fields(problem) if field.name != "card"}
    return ", ".join(
        f"{name} {' '.join(map(str, value)) if isinstance(value, tuple) else value}" for name, value in parts.items()
    )


@dataclass(frozen=True)
class Store:
    """One file. `kind` begins its name; `header` (JSON) must be in it as it is here, or nothing in it is used."""

    kind: str
    header: dict[str, Any]

    @property
    def path(self) -> Path:
        """Where it is, or would be."""
        name = hashlib.sha256(json.dumps(self.header).encode()).hexdigest()[:16]
        return cache_folder() / f"{self.kind}-{name}.json"

    def lock(self) -> BaseFileLock:
        """The lock of the file, which is to be acquired.

        Raises:
            OSError: there can be no such file.
        """
        path = self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(f"{path}.lock")

    def read(
        self,
        problem: str,
        buckets: Iterable[float],
        parse: Callable[[float, Any], T],
        passed_over: Callable[[str], None],
    ) -> dict[float, T]:
        """What was found for `problem`, by the limit of the bucket.

        Args:
            parse: makes it of the limit of the bucket and what is in the file; may raise anything.
            passed_over: is told what cannot be used, and why.
        """
        of_problem = _of(problem, self._choices(passed_over))
        found = {}
        for bucket in buckets:
            if (entry := of_problem.get(str(bucket))) is None:
                continue
            try:
                found[bucket] = parse(bucket, entry)
            except Exception as error:
                where = f"{self.path}: {problem}, up to {bucket} tokens"
                passed_over(f"{where}: the entry is not used ({_brief(error)})")
        return found

    def write(self, problem: str, bucket: float, entry: dict[str, Any]) -> None:
        """Add what was found. By the holder of the lock.

        Raises:
            OSError: the file cannot be written.
        """
        from torch._inductor.codecache import write_atomic

        choices = self._choices(lambda reason: None)
        choices[problem] = {**_of(problem, choices), str(bucket): entry}
        text = json.dumps({**self.header, "choices": choices}, indent=1)
        write_atomic(str(self.path), text.encode(), make_dirs=True)

    def _choices(self, passed_over: Callable[[str], None]) -> dict[str, Any]:
        """The content of the file: by problem, by bucket; not looked at yet."""
        try:
            text = self.path.read_bytes()
        except (FileNotFoundError, NotADirectoryError, FileExistsError):
            return {}  # where there can be no such folder, `lock` will say so
        except OSError as error:
            passed_over(f"What was measured before cannot be read ({_brief(error)})")
            return {}
        try:
            content = json.loads(text)
            choices = content.pop("choices")
            if content == self.header and isinstance(choices, dict):
                return choices
            reason = "it is of another card, version or form"
        except Exception as error:
            reason = _brief(error)
        passed_over(f"{self.path} is not used ({reason})")
        return {}


def _of(problem: str, choices: dict[str, Any]) -> dict[str, Any]:
    of_problem = choices.get(problem)
    return of_problem if isinstance(of_problem, dict) else {}


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
