"""Counters in device memory that are zero between launches.

A kernel whose programs wait for each other needs counters that start at zero and that no other launch touches while it
runs; ours leave them at zero. Launches on one stream follow each other, so each stream has counters of its own. A
launch that is being captured gets counters that nobody else is ever given, because its graph may be replayed on any
stream, beside any other launch. (A graph is never replayed beside itself.)

Counters come from arenas, which live as long as the process: `prepare` makes the first one, outside of the memory pools
in which Inductor warms up and captures.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

__all__ = ["prepare", "zeros"]

# Counters in an arena, 4 MiB: a captured call of 8192 tokens takes 256 of them.
ARENA = 1 << 20

_lock = threading.Lock()
_arenas: dict[int, list[Tensor]] = {}
_used: dict[int, int] = {}
_of_stream: dict[tuple[int, int], Tensor] = {}


def prepare(device: torch.device) -> None:
    """Make the first arena of the CUDA `device`, which costs 4 MiB; nothing for another kind of device.

    To be called outside of captures, and before the first capture.
    """
    if device.type == "cuda" and _index(device) not in _arenas:
        with _lock:
            _take(_index(device), 0)


def zeros(count: int, device: torch.device) -> Tensor:
    """`count` counters, int32, all zero, for one launch on the current stream, which must leave them at zero."""
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32)
    index = _index(device)
    if torch.cuda.is_current_stream_capturing():
        with _lock:
            if _arenas.get(index) and _used[index] + count <= ARENA:
                return _take(index, count)
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = (index, torch.cuda.current_stream(index).cuda_stream)
    known = _of_stream.get(key)
    if known is None or known.numel() < count:
        with _lock:
            known = _of_stream[key] = _take(index, max(256, 1 << (count - 1).bit_length()))
    return known


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _take(index: int, count: int) -> Tensor:
    """`count` counters that nobody has been given, from a new arena where the last one has too few left."""
    arenas = _arenas.setdefault(index, [])
    if not arenas or _used[index] + count > arenas[-1].numel():
        arenas.append(torch.zeros(max(ARENA, count), dtype=torch.int32, device=f"cuda:{index}"))
        torch.cuda.current_stream(index).synchronize()  # other streams will use them
        _used[index] = 0
    start = _used[index]
    _used[index] = start + count
    return arenas[-1][start : start + count]
