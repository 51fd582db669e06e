"""How long graphs of launches take, one beside the other.

The graphs are replayed in turns. Memory and graphs are the driver's own: torch's allocator (which might be routed to
the memory pool of a CUDA graph) and its random numbers are left alone, and a capture of another thread is not spoilt.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from dsv4_compile.kernels.driver import bindings, check

__all__ = ["LAUNCHES", "allocate", "beside_captures", "budget", "captured", "medians", "sets_beyond_cache"]

LAUNCHES = 20  # in a graph, or once round the buffers
ROUNDS = 15
WARM_UP = 0.03  # seconds, for the clocks to rise

K = TypeVar("K", bound=Hashable)


def beside_captures(stack: contextlib.ExitStack) -> None:
    """Until `stack` closes, what this thread loads and allocates spoils no capture of another thread."""
    driver, _ = bindings()
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    mode = check(driver.cuThreadExchangeStreamCaptureMode(relaxed))
    stack.callback(driver.cuThreadExchangeStreamCaptureMode, mode)


def budget(most: int) -> int:
    """Bytes that may be allocated on the current device: `most`, and half of what is free."""
    driver, _ = bindings()
    free, _ = check(driver.cuMemGetInfo())
    return min(most, free // 2)


def sets_beyond_cache(bytes_of_set: int, room: int, index: int) -> int:
    """How many sets of buffers are together larger than twice the L2 cache, or fill `room`."""
    wanted = 2 * torch.cuda.get_device_properties(index).L2_cache_size // bytes_of_set + 1
    return min(wanted, room // bytes_of_set)


def allocate(size: int, stack: contextlib.ExitStack) -> int:
    """The address of `size` bytes on the current device, freed when `stack` closes."""
    driver, _ = bindings()
    memory = check(driver.cuMemAlloc(size))
    stack.callback(driver.cuMemFree, memory)
    return int(memory)


def captured(launch: Callable[[], None], stream: Any, stack: contextlib.ExitStack) -> Any:
    """A graph of what `launch` puts on `stream`, destroyed when `stack` closes."""
    driver, _ = bindings()
    check(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    try:
        launch()
    finally:
        graph = check(driver.cuStreamEndCapture(stream))
    try:
        made = check(driver.cuGraphInstantiate(graph, 0))
    finally:
        driver.cuGraphDestroy(graph)
    stack.callback(driver.cuGraphExecDestroy, made)
    return made


def medians(graphs: dict[K, Any], launches: int, stream: Any) -> dict[K, float]:
    """Microseconds of one of the `launches` in each graph: the median of rounds in which the graphs take turns."""
    driver, _ = bindings()
    with contextlib.ExitStack() as stack:
        start, end = (check(driver.cuEventCreate(0)) for _ in range(2))
        for event in (start, end):
            stack.callback(driver.cuEventDestroy, event)

        def replay(graph: Any) -> float:
            check(driver.cuEventRecord(start, stream))
            check(driver.cuGraphLaunch(graph, stream))
            check(driver.cuEventRecord(end, stream))
            check(driver.cuEventSynchronize(end))
            return 1e3 * check(driver.cuEventElapsedTime(start, end)) / launches

        warm = time.monotonic() + WARM_UP
        while True:
            for graph in graphs.values():
                replay(graph)
            if time.monotonic() > warm:
                break
        rounds = [[replay(graph) for graph in graphs.values()] for _ in range(ROUNDS)]
        return dict(zip(graphs, map(statistics.median, zip(*rounds, strict=True)), strict=True))
