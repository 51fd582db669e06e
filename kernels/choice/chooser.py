"""Which of several ways serves a problem and a bucket of token counts: shipped, found before, searched, or a default.

A search times the candidates, once for each bucket: at the first call there, or ahead. `DSV4_TUNE=1` also searches
where a choice is shipped; `DSV4_TUNE=0` neither searches nor reads what was found before. Nothing is timed while the
stream is being captured: the default serves, and a later call makes up for the search. Nothing here raises.

A caller may have queued a collective that another thread or process must join first. So it waits for its own stream
before it takes a lock, looks again and again whether what it wants has been found, and does not wait for ever.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch
from filelock import BaseFileLock, Timeout

from dsv4_compile.kernels.environment import word

__all__ = ["Choice", "Chooser", "warn"]

logger = logging.getLogger("dsv4_compile.kernels")

PATIENCE = 60.0  # seconds that a caller waits for the searches of others
AGAIN = 60.0  # seconds after which it tries again
SLICE = 0.1  # seconds between two looks at what has been found

Problem = TypeVar("Problem", bound=Hashable)
Found = TypeVar("Found")

_locks: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)  # of a search of any kind, by device
_told: set[str] = set()


@dataclass(frozen=True)
class Choice(Generic[Found]):
    """What serves, and where it comes from ("shipped", "searched", "cached" or "default: ...").

    One that is not settled may still be replaced, by a call at `again` (`time.monotonic()`) or later.
    """

    found: Found
    source: str
    settled: bool = True
    again: float = 0.0


class Chooser(abc.ABC, Generic[Problem, Found]):
    """The choices of one kind. A subclass says what serves without a search, and where searches are kept."""

    unmeasured: ClassVar[str]
    """The sentence that a warning begins with when the default has to serve."""
    cheap: ClassVar[bool] = False
    """Searches are so short that one is also made where it cannot be kept, and made again when it has failed."""

    def __init__(self) -> None:
        self.known: dict[tuple[Problem, float], Choice[Found]] = {}

    @abc.abstractmethod
    def default(self, problem: Problem, bucket: float) -> Found:
        """What serves where nothing was measured."""

    def shipped(self, problem: Problem, bucket: float) -> Found | None:
        """What was measured ahead, for everybody."""
        return None

    @abc.abstractmethod
    def lock(self, problem: Problem) -> BaseFileLock:
        """What a search holds, to be acquired. May raise OSError."""

    @abc.abstractmethod
    def read(self, problem: Problem) -> Mapping[float, Found]:
        """What was found before, by bucket."""

    @abc.abstractmethod
    def write(self, problem: Problem, bucket: float, found: Found) -> None:
        """Keeps what was found. May raise OSError."""

    def settle(self, problem: Problem, bucket: float, index: int | None, search: Callable[[], Found]) -> Choice[Found]:
        """Choose for good, unless it has been done or has to wait.

        Args:
            index: of the CUDA device to search on.
            search: times the candidates; may raise anything.

        Returns:
            What is in force now.
        """
        key = problem, bucket
        known = self.known.get(key)
        if known is not None and (known.settled or time.monotonic() < known.again):
            return known
        if (ahead := self._known_ahead(*key, index)) is not None:
            self.known[key] = ahead
            return ahead
        assert index is not None
        if capturing(index):
            default = self.default(problem, bucket)
            return self.known.setdefault(key, Choice(default, "default: the stream is being captured", settled=False))
        found = self.known[key] = self._searched(*key, index, search)
        return found

    def forget(self) -> None:
        """Choose again and warn again; what is on disk stays. For tests."""
        self.known.clear()
        _told.clear()

    def _known_ahead(self, problem: Problem, bucket: float, index: int | None) -> Choice[Found] | None:
        """The choice that needs no search."""
        mode = word("DSV4_TUNE")
        shipped = self.shipped(problem, bucket)
        if shipped is not None and mode != "1":
            return Choice(shipped, "shipped")
        if mode == "0":
            return Choice(self.default(problem, bucket), "default: DSV4_TUNE is 0")
        if index is None:
            return Choice(self.default(problem, bucket), "default: there is no card to search on")
        return self._kept(problem, bucket)

    def _kept(self, problem: Problem, bucket: float) -> Choice[Found] | None:
        found = self.read(problem).get(bucket)
        return None if found is None else Choice(found, "cached")

    def _searched(self, problem: Problem, bucket: float, index: int, search: Callable[[], Found]) -> Choice[Found]:
        """The outcome of a search; what another thread or process has found while this one waited; or the default."""
        drain(index)
        deadline = time.monotonic() + PATIENCE
        while True:
            known = self.known.get((problem, bucket))
            found = known if known is not None and known.settled else self._kept(problem, bucket)
            if found is not None:
                return found
            with contextlib.ExitStack() as held:
                try:
                    if self._locked(held, problem, index):
                        return self._kept(problem, bucket) or self._search(problem, bucket, search)
                except (OSError, NotImplementedError) as error:
                    return self._default(problem, bucket, f"what a search finds cannot be kept ({_brief(error)})")
            if time.monotonic() >= deadline:
                waiting = self._default(problem, bucket, f"others have been searching for {PATIENCE:.0f} seconds")
                return dataclasses.replace(waiting, settled=False, again=time.monotonic() + AGAIN)

    def _locked(self, held: contextlib.ExitStack, problem: Problem, index: int) -> bool:
        """Takes the locks of the device and of the file, unless others have one of them."""
        if not _locks[index].acquire(timeout=SLICE):
            return False
        held.callback(_locks[index].release)
        try:
            held.enter_context(self.lock(problem).acquire(timeout=SLICE))
        except Timeout:
            return False
        except (OSError, NotImplementedError) as error:
            if not self.cheap:
                raise
            warn(f"What a search finds cannot be kept ({_brief(error)})")
        return True

    def _search(self, problem: Problem, bucket: float, search: Callable[[], Found]) -> Choice[Found]:
        """By the holder of the locks."""
        try:
            found = search()
        except Exception as error:
            failed = self._default(problem, bucket, f"the search failed ({_brief(error)})")
            return dataclasses.replace(failed, settled=not self.cheap, again=time.monotonic() + AGAIN)
        try:
            self.write(problem, bucket, found)
        except OSError as error:
            warn(f"What a search finds cannot be kept ({_brief(error)})")
        return Choice(found, "searched")

    def _default(self, problem: Problem, bucket: float, reason: str) -> Choice[Found]:
        warn(f"{self.unmeasured}: {reason}")
        return Choice(self.default(problem, bucket), f"default: {reason}")


def capturing(index: int) -> bool:
    """Whether the current stream of CUDA device `index` is being captured."""
    with torch.cuda.device(index):
        return torch.cuda.is_current_stream_capturing()


def drain(index: int) -> None:
    """Waits for what the caller has queued."""
    torch.cuda.current_stream(index).synchronize()


def warn(reason: str) -> None:
    """Logs a reason, once."""
    if reason not in _told:
        _told.add(reason)
        logger.warning("%s.", reason)


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
