"""Processes that start beside each other and then measure in turns. For the benchmarks beside it.

Some starts take minutes of one processor: an engine of vLLM, the graphs of a generation. So all of them start together,
and the one that measures is told to, by a line on its standard input, when all have started.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Part", "say"]

LINE = "RESULT "


def say(result: dict[str, Any]) -> None:
    """Of a part: hands a result to the process that started it."""
    print(LINE + json.dumps(result), flush=True)


class Part:
    """A process whose results are what it says (`say`); everything else that it prints goes to the file `log`.

    Attributes:
        failed: why there are no more results from it; empty as long as there are.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name, self.log = name, log
        self.failed = ""
        self.begun = time.monotonic()
        self.results: queue.Queue[dict[str, Any] | None] = queue.Queue()
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("a"),
            env=os.environ | environment,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.log.open("a") as log:
            for line in self.process.stdout:
                log.write(line)
                log.flush()
                if line.startswith(LINE):
                    with contextlib.suppress(ValueError):  # the log has it
                        self.results.put(json.loads(line.removeprefix(LINE)))
        self.results.put(None)

    def ask(self, what: str, seconds: float) -> dict[str, Any]:
        """What it answers to that line; empty where it failed."""
        if self.failed:
            return {}
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, which `next` reports
            print(what, file=self.process.stdin, flush=True)
        return self.next(seconds)

    def next(self, seconds: float) -> dict[str, Any]:
        """The next result; empty where it failed or none comes in time, and then the process is ended."""
        try:
            found = self.results.get(timeout=max(0.0, seconds))
        except queue.Empty:
            found, why = None, "ran out of time"
        else:
            why = "ended"
        if found is None:
            if why == "ended":
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(10)
                why = f"ended ({self.process.returncode}): {self._error()}"
            self.close()
            self.failed = f"after {time.monotonic() - self.begun:.0f} s it {why}"
        return found or {}

    def _error(self) -> str:
        """The last line of its log that names an error."""
        lines = self.log.read_text(errors="replace").splitlines()
        errors = [line.strip() for line in lines if "rror" in line and "WARNING" not in line]
        return (errors or ["no error in its log"])[-1][-300:]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
