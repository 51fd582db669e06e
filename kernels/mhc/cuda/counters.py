"""Counters in device memory that are zero between launches.

Blocks that wait for each other need counters that start at zero and that no other launch touches while theirs runs; the
kernel leaves them at zero. Launches on one stream follow each other, so each stream has counters of its own. A launch
that is being captured gets counters that nobody else is ever given, because its graph may be replayed on any stream,
beside any other launch. (A graph is never replayed beside itself.)

They come from arenas that the driver allocates and that live as long as the process: torch's allocator might be routed
to the memory pool of a CUDA graph, or be a fake one, at the moment.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from dsv4_compile.kernels.driver import bindings, check

__all__ = ["Arena", "prepare", "take"]

# Counters in an arena, 4 MiB: a captured call of 8192 tokens takes 256 of them.
ARENA = 1 << 20
PER_THREAD_STREAM = 2  # the one handle that stands for another stream in every thread


class Arena:
    """Counters of one device, given out from the first to the last.

    Args:
        size: how many.
        address: of the first.
    """

    def __init__(self, size: int, address: int):
        self.size, self.address, self.used = size, address, 0

    def take(self, count: int) -> int | None:
        """The address of `count` counters that nobody has been given, or None when there are too few left."""
        if self.used + count > self.size:
            return None
        start = self.address + 4 * self.used
        self.used += count
        return start


_lock = threading.Lock()
_arenas: dict[int, list[Arena]] = {}
_of_stream: dict[tuple[int, int, int], tuple[int, int]] = {}


def prepare(device: torch.device) -> None:
    """Make the first arena of the CUDA `device`, unless there is one or a capture is going on.

    For a first capture to find one. Another kind of device needs none.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    with _lock:
        if not _arenas.get(index):
            _allocate(index, ARENA)


def take(count: int, index: int) -> tuple[int, Tensor | None]:
    """The address of `count` counters (int32, all zero) for one launch on the current stream of CUDA device `index`.

    The tensor, when there is one, holds them and must live until the launch.
    """
    if torch.cuda.is_current_stream_capturing():
        with _lock:
            address = _from_last_arena(count, index)
        if address is not None:
            return address, None
        cleared = torch.zeros(count, dtype=torch.int32, device=f"cuda:{index}")  # by a node of the graph
        return cleared.data_ptr(), cleared
    stream = torch._C._cuda_getCurrentRawStream(index)
    key = (index, stream, threading.get_ident() if stream == PER_THREAD_STREAM else 0)
    known = _of_stream.get(key)
    if known is None or known[1] < count:
        size = max(256, 1 << (count - 1).bit_length())
        with _lock:
            address = _from_last_arena(size, index)
            if address is None:
                address = _allocate(index, max(ARENA, size)).take(size)
        assert address is not None
        known = _of_stream[key] = (address, size)
    return known[0], None


def _from_last_arena(count: int, index: int) -> int | None:
    arenas = _arenas.get(index)
    return arenas[-1].take(count) if arenas else None


def _allocate(index: int, size: int) -> Arena:
    driver, _ = bindings()
    with torch.cuda.device(index):
        torch.cuda.synchronize(index)  # also makes the context of the device current in this thread
        address = check(driver.cuMemAlloc(4 * size))
        check(driver.cuMemsetD32(address, 0, size))
        torch.cuda.synchronize(index)  # other streams will use them
    arena = Arena(size, int(address))
    _arenas.setdefault(index, []).append(arena)
    return arena
