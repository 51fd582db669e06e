"""Auxiliary CUDA streams of the process, and running work on them beside the main stream.

There is one list of streams per device, shared by every compiled graph and every model: a second model (an MTP head, a
draft) runs on the same streams as the first. Streams are taken from here at run time and never stored in a graph, so
that a cached graph holds no stream.

What a fork looks like, recorded in this order:

    current   ──●─── main work ────────────○──────○──   ● fork event   ○ join: wait for a side's event
    side 1      └──────────── side work 1 ─┘      │
    side 2      └──────────── side work 2 ────────┘

The fork event comes before the main work, so no side waits for it. A side is recorded after the main work and right
before its join: recorded earlier, a captured CUDA graph replays over dozens of hidden streams (sglang#30460, #32770).
"""

import contextlib
import contextvars
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["auxiliary_streams", "execute_in_parallel", "leased_events", "serial", "stream_count", "stream_counts"]

_POOL_SIZE = 32
"""PyTorch makes this many streams per device and priority and hands them out in turn."""

_LOCK_SECONDS = 1.0
"""How long a thread waits for the side streams of a device before it does without them."""


class _Device:
    """The side streams and the idle events of one device.

    The lock is held for a whole fork and join. A stream that has been forked from a capture records into that capture
    until it ends, so work that another thread put there in between would become a part of the wrong graph.
    """

    def __init__(self) -> None:
        self.streams: list[torch.cuda.Stream] = []
        self.events: list[torch.cuda.Event] = []
        self.lock = threading.RLock()
        self.capture_thread: int | None = None
        """The thread that last forked under capture; `None` when no side stream can be capturing."""


_devices: dict[int, _Device] = {}
_devices_lock = threading.Lock()
_serial: contextvars.ContextVar[bool] = contextvars.ContextVar("dsv4_serial", default=False)


def _forget_after_fork() -> None:
    # A child process has neither the CUDA context of its parent nor the thread that may have held a lock.
    global _devices_lock
    _devices.clear()
    _devices_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)


def auxiliary_streams(device: torch.device | int | str, count: int) -> list[torch.cuda.Stream]:
    """The first `count` auxiliary streams of `device`, the same ones on every call.

    Streams are made when they are first asked for and kept for the life of the process. No two of the list are the
    same CUDA stream.

    Args:
        device: a CUDA device, by index, name or object; without an index it is the current one.
        count: how many.

    Returns:
        `count` streams, or none where there is no CUDA.
    """
    index = _index(device)
    if index is None or count <= 0:
        return []
    entry = _entry(index)
    with entry.lock:
        while len(entry.streams) < count:
            entry.streams.append(_new_stream(index, entry.streams))
        return entry.streams[:count]


def stream_count(device: torch.device | int | str) -> int:
    """How many auxiliary streams `device` has by now; makes none."""
    index = _index(device)
    entry = _devices.get(index) if index is not None else None
    return len(entry.streams) if entry is not None else 0


def stream_counts() -> dict[str, int]:
    """How many auxiliary streams each device has by now (`{"cuda:0": 3}`), those with none left out; makes none."""
    return {f"cuda:{index}": len(entry.streams) for index, entry in sorted(_devices.items()) if entry.streams}


@contextlib.contextmanager
def leased_events(device: torch.device | int | str, count: int) -> Iterator[list[torch.cuda.Event]]:
    """`count` events of `device` that nobody else records during the `with` block.

    They may be given back while the GPU is still on its way to them: recording an event again does not change what an
    earlier wait for it waits for.

    Raises:
        RuntimeError: there is no such CUDA device.
    """
    index = _index(device)
    if index is None:
        raise RuntimeError(f"Events were asked for on {device}, and there is no CUDA device of that name.")
    entry = _entry(index)
    with entry.lock:
        events = [entry.events.pop() if entry.events else torch.cuda.Event() for _ in range(count)]
    try:
        yield events
    finally:
        with entry.lock:
            entry.events.extend(events)


@contextlib.contextmanager
def serial() -> Iterator[None]:
    """Within the `with` block nothing of this thread leaves its current stream."""
    token = _serial.set(True)
    try:
        yield
    finally:
        _serial.reset(token)


def execute_in_parallel(
    main: Callable[[], Any],
    sides: Sequence[Callable[[], Any] | None],
    device: torch.device | int | str,
    enabled: bool = True,
    inputs: Sequence[torch.Tensor] = (),
) -> tuple[Any, list[Any]]:
    """Runs `main` on the current stream and each of `sides` on an auxiliary stream, and joins.

    When it returns, work that is then put on the current stream comes after all of it. Everything runs on the current
    stream, `main` first, when there is nothing for the sides, no CUDA, `enabled` is false, `serial()` is active, the
    side streams belong to a capture that the current stream is not part of, or another thread keeps them busy.

    Memory. Outside capture every tensor in a side's result is marked as used by the current stream, and `inputs` as
    used by the sides, so the caching allocator reuses neither too early. Under capture nothing is marked: it would
    delay every free to the end of the capture. There the caller must not drop the last reference to the result of an
    earlier side from within `main`. Results that are allocated before the call, on the current stream, need no care.

    Args:
        main: work for the current stream.
        sides: work for side stream 1, 2, ...; `None` leaves one out. They may neither use collectives, nor write what
            `main` or another of them reads or writes, nor wait for another thread that calls this function.
        device: where the work runs.
        enabled: false runs everything on the current stream.
        inputs: tensors that the sides read and that may be freed soon after the call.

    Returns:
        The result of `main`, and a list with the result of each side, `None` where there was no work.

    Raises:
        Whatever a callable raises, after the sides that were started have been joined; later sides do not run.
    """
    wanted = enabled and not _serial.get() and any(side is not None for side in sides)
    index = _index(device) if wanted else None
    if index is None:
        return _execute_serially(main, sides)
    entry = _entry(index)
    if not entry.lock.acquire(timeout=_LOCK_SECONDS):
        return _execute_serially(main, sides)
    try:
        with torch.cuda.device(index):
            capturing = torch.cuda.is_current_stream_capturing()
            if not _may_fork(entry, capturing):
                return _execute_serially(main, sides)
            return _fork_and_join(main, sides, index, () if capturing else inputs, mark=not capturing)
    finally:
        entry.lock.release()


def _execute_serially(main: Callable[[], Any], sides: Sequence[Callable[[], Any] | None]) -> tuple[Any, list[Any]]:
    result = main()
    return result, [None if side is None else side() for side in sides]


def _fork_and_join(
    main: Callable[[], Any],
    sides: Sequence[Callable[[], Any] | None],
    index: int,
    inputs: Sequence[torch.Tensor],
    mark: bool,
) -> tuple[Any, list[Any]]:
    current = torch.cuda.current_stream(index)
    streams = auxiliary_streams(index, len(sides))
    results: list[Any] = [None] * len(sides)
    with leased_events(index, 1 + len(sides)) as (fork, *joins):
        fork.record(current)
        result = main()
        for slot, (side, stream, join) in enumerate(zip(sides, streams, joins, strict=True)):
            if side is None:
                continue
            stream.wait_event(fork)
            try:
                with torch.cuda.stream(stream):
                    results[slot] = side()
            finally:
                join.record(stream)
                current.wait_event(join)
            if mark:
                _mark_used(inputs, stream)
                _mark_used(results[slot], current)
    return result, results


def _mark_used(tree: Any, stream: torch.cuda.Stream) -> None:
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
            leaf.record_stream(stream)


def _may_fork(entry: _Device, capturing: bool) -> bool:
    """Whether the side streams are free of any capture but the one of the current stream; notes that it uses them."""
    thread = threading.get_ident()
    if entry.capture_thread is not None and not (capturing and entry.capture_thread == thread):
        if any(_is_capturing(stream) for stream in entry.streams):
            return False
        entry.capture_thread = None
    if capturing:
        entry.capture_thread = thread
    return True


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def _index(device: torch.device | int | str) -> int | None:
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type != "cuda" or not (torch.cuda.is_initialized() or torch.cuda.is_available()):
        return None
    return torch.cuda.current_device() if device.index is None else device.index


def _entry(index: int) -> _Device:
    entry = _devices.get(index)
    if entry is None:
        with _devices_lock:
            entry = _devices.setdefault(index, _Device())
    return entry


def _new_stream(index: int, taken: Sequence[torch.cuda.Stream]) -> torch.cuda.Stream:
    handles = {stream.cuda_stream for stream in taken}
    stream = torch.cuda.Stream(device=index)
    for _ in range(_POOL_SIZE):
        if stream.cuda_stream not in handles:
            break
        stream = torch.cuda.Stream(device=index)
    return stream
