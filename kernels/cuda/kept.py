"""Device memory that every launch leaves as it found it.

Blocks that wait for each other need counters that start at zero, or sums that start absent, and that no other launch
touches while theirs runs. The kernel puts them back. Launches on one stream follow each other, and so do those captured
from one stream into one graph; each stream, and each stream of each capture, has words of its own. (Graphs may be
replayed on any stream, beside any other launch, but a graph is never replayed beside itself.)

The words come from arenas that the driver allocates and that live as long as the process: torch's allocator might be
routed to the memory pool of a CUDA graph, or be a fake one, at the moment.
"""

from __future__ import annotations

import threading

import torch

from dsv4_compile.kernels.driver import bindings, check

__all__ = ["ABSENT", "COUNTERS", "SUMS", "Arena", "Kept"]

ABSENT = 0xFFFFDEAD  # as in launch.cuh
PER_THREAD_STREAM = 2  # the one handle that stands for another stream in every thread


class Arena:
    """Words of one device, given out from the first to the last.

    Args:
        size: how many.
        address: of the first.
    """

    def __init__(self, size: int, address: int):
        self.size, self.address, self.used = size, address, 0

    def take(self, count: int) -> int | None:
        """The address of `count` words that nobody has been given, or None when there are too few left."""
        if self.used + count > self.size:
            return None
        start = self.address + 4 * self.used
        self.used += count
        return start


class Kept:
    """Words of four bytes that are `fill` between launches, on all devices.

    Args:
        fill: their content.
        arena: how many are allocated at a time, at least.
        least: how many a stream gets, at least.
    """

    def __init__(self, fill: int, arena: int, least: int):
        self.fill, self.arena, self.least = fill, arena, least
        self.arenas: dict[int, list[Arena]] = {}
        self._of_stream: dict[tuple[int, int, int, int], tuple[int, int]] = {}
        self._lock = threading.Lock()

    def take(self, count: int, index: int) -> int:
        """The address of `count` words for one launch on the current stream of CUDA device `index`.

        Raises:
            RuntimeError: there is no memory left.
        """
        stream = torch._C._cuda_getCurrentRawStream(index)
        capture = _capture(stream) if torch.cuda.is_current_stream_capturing() else 0
        key = (index, stream, threading.get_ident() if stream == PER_THREAD_STREAM else 0, capture)
        known = self._of_stream.get(key)
        if known is None or known[1] < count:
            # Powers of two, because a stream that wants more gets new ones. A capture has one size, as a rule.
            size = count if capture else max(self.least, 1 << (count - 1).bit_length())
            with self._lock:
                known = self._of_stream[key] = (self._from_arena(size, index), size)
        return known[0]

    def _from_arena(self, count: int, index: int) -> int:
        arenas = self.arenas.setdefault(index, [])
        address = arenas[-1].take(count) if arenas else None
        if address is None:
            arenas.append(_allocate(index, max(self.arena, count), self.fill))
            address = arenas[-1].take(count)
        assert address is not None
        return address


COUNTERS = Kept(fill=0, arena=1 << 20, least=256)
SUMS = Kept(fill=ABSENT, arena=1 << 22, least=1 << 15)


def _capture(stream: int) -> int:
    """Which capture `stream` is part of."""
    driver, _ = bindings()
    return int(check(driver.cuStreamGetCaptureInfo(stream))[1])


def _allocate(index: int, size: int, fill: int) -> Arena:
    """In the middle of a capture as well."""
    driver, _ = bindings()
    with torch.cuda.device(index):
        torch.cuda.is_current_stream_capturing()  # makes the device's context current in a thread that has none yet
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        mode = check(driver.cuThreadExchangeStreamCaptureMode(relaxed))
        try:
            address = check(driver.cuMemAlloc(4 * size))
            stream = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
            check(driver.cuMemsetD32Async(address, fill, size, stream))
            check(driver.cuStreamSynchronize(stream))  # every stream will use them
            check(driver.cuStreamDestroy(stream))
        finally:
            check(driver.cuThreadExchangeStreamCaptureMode(mode))
    return Arena(size, int(address))
