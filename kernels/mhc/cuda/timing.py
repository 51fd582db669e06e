"""How long a launch takes, one plan beside the other.

Graphs of launches are replayed in turns. The launches of a graph go round sets of buffers that together are larger
than the L2 cache, as those of a model's layers are. Buffers, stream and graphs are the driver's own: torch's allocator
(which might be routed to the memory pool of a CUDA graph), its streams and its random numbers are left alone.
"""

from __future__ import annotations

import bisect
import concurrent.futures
import contextlib
import itertools
import os
import statistics
import time
from typing import Any

import torch

from dsv4_compile.kernels.mhc.cuda.compilation import BYTES, Variant, cubin, kernel
from dsv4_compile.kernels.mhc.cuda.driver import bindings, check
from dsv4_compile.kernels.mhc.cuda.kept import ABSENT
from dsv4_compile.kernels.mhc.cuda.launch import ARGUMENTS, enqueue

__all__ = ["measure"]

LAUNCHES = 20  # in a graph, or once round the buffers
ROUNDS = 15
WARM_UP = 0.03  # seconds, for the clocks to rise
MEMORY = 1 << 30  # bytes at most, and half of what is free
FILL = 0x3F003F00  # 0.5 in float32 and bfloat16, 1.75 in float16
CONSTANTS = (1e-6, 1e-6, 1e-6, 2.0, 1e-6)


def measure(variants: list[Variant], counts: range, index: int) -> dict[Variant, float]:
    """Microseconds of a launch of each of `variants`, which differ in their plans only, on CUDA device `index`.

    With the largest of the token counts `counts` that memory has room for. What cannot be compiled is left out.

    Raises:
        RuntimeError: none can be compiled, memory is short, or the driver reports an error.
    """
    with torch.cuda.device(index), contextlib.ExitStack() as stack:
        driver, _ = bindings()
        # A capture of another thread is not to be spoilt by what is loaded and allocated here.
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        mode = check(driver.cuThreadExchangeStreamCaptureMode(relaxed))
        stack.callback(driver.cuThreadExchangeStreamCaptureMode, mode)
        torch.cuda.current_stream(index).synchronize()  # also makes the device's context current in this thread
        variants = _compiled(variants, index)
        tokens, sets = _room(variants, counts, index)
        stream = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        stack.callback(driver.cuStreamDestroy, stream)
        size = sum(_shared(variants, tokens)) + sets * _bytes_of_set(variants[0], tokens)
        memory = check(driver.cuMemAlloc(size))
        stack.callback(driver.cuMemFree, memory)
        check(driver.cuMemsetD32Async(memory, FILL, size // 4, stream))
        graphs = {}
        for variant in variants:
            arguments = _arguments(variant, tokens, sets, int(memory), _shared(variants, tokens))
            graphs[variant] = _graph(variant, tokens, arguments, index, stream)
            stack.callback(driver.cuGraphExecDestroy, graphs[variant])
        # Counters and sums that are to be absent come first. A launch leaves them so.
        counters, absent, _ = _shared(variants, tokens)
        check(driver.cuMemsetD32Async(memory, 0, counters // 4, stream))
        check(driver.cuMemsetD32Async(int(memory) + counters, ABSENT, absent // 4, stream))
        return _replayed(graphs, len(arguments), stream)


def _compiled(variants: list[Variant], index: int) -> list[Variant]:
    """Those that can be compiled, loaded; NVRTC works on several at once."""
    capability = torch.cuda.get_device_capability(index)

    def attempt(variant: Variant) -> RuntimeError | None:
        try:
            cubin(variant, capability)
        except RuntimeError as error:
            return error
        return None

    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        errors = list(pool.map(attempt, variants))
    compiled = [variant for variant, error in zip(variants, errors, strict=True) if error is None]
    if not compiled:
        raise next(error for error in errors if error is not None)
    for variant in compiled:
        kernel(variant, index)
    return compiled


def _lengths(variant: Variant, tokens: int) -> tuple[int, ...]:
    """Bytes of the arguments of a launch in their order, down to `new_comb`; 0 where there is none."""
    n, hidden, logits = variant.n, variant.hidden, variant.logits
    post, expands = variant.has_post, logits != n
    residual, new, x, fn, parameter, norm, out = (BYTES[name] for name in variant.types[:7])
    return (
        post * tokens * hidden * x,
        tokens * n * hidden * residual,
        post * tokens * n * 4,
        post * tokens * n * n * 4,
        logits * n * hidden * fn,
        3 * parameter,
        logits * parameter,
        variant.has_norm * hidden * norm,
        post * tokens * n * hidden * new,
        tokens * hidden * out,
        expands * tokens * n * 4,
        expands * tokens * n * n * 4,
    )


def _aligned(size: int) -> int:
    return -(-size // 256) * 256


def _bytes_of_set(variant: Variant, tokens: int) -> int:
    return sum(_aligned(length) for length in _lengths(variant, tokens))


def _shared(variants: list[Variant], tokens: int) -> tuple[int, int, int]:
    """Bytes that all launches have in common: counters, the workspaces of plans with `signal`, those of the others."""
    sums = [(variant.plan.signal, variant.sizes(tokens)[2]) for variant in variants]
    of_kind = (max((size for signal, size in sums if signal is kind), default=0) for kind in (True, False))
    counters = max(variant.sizes(tokens)[1] for variant in variants)
    return _aligned(4 * counters), *(_aligned(4 * size) for size in of_kind)


def _room(variants: list[Variant], counts: range, index: int) -> tuple[int, int]:
    """The token count and the number of sets of buffers."""
    driver, _ = bindings()
    free, _ = check(driver.cuMemGetInfo())
    budget = min(MEMORY, free // 2)

    def needed(tokens: int) -> int:
        return sum(_shared(variants, tokens)) + _bytes_of_set(variants[0], tokens)

    fitting = bisect.bisect_right(counts, budget, key=needed)
    if fitting == 0:
        raise RuntimeError(f"it takes {needed(counts[0]) >> 20} MiB, and {budget >> 20} can be had")
    tokens = counts[fitting - 1]
    of_set = _bytes_of_set(variants[0], tokens)
    wanted = 2 * torch.cuda.get_device_properties(index).L2_cache_size // of_set + 1
    return tokens, min(wanted, (budget - sum(_shared(variants, tokens))) // of_set)


def _arguments(variant: Variant, tokens: int, sets: int, memory: int, shared: tuple[int, int, int]) -> list[bytes]:
    """Of each launch of a graph."""
    lengths = _lengths(variant, tokens)
    offsets = list(itertools.accumulate((_aligned(length) for length in lengths), initial=0))
    workspace = memory + shared[0] + (0 if variant.plan.signal else shared[1])
    packed = []
    for number in range(sets):
        start = memory + sum(shared) + number * offsets[-1]
        addresses = [start + offset if length else 0 for offset, length in zip(offsets[:-1], lengths, strict=True)]
        packed.append(ARGUMENTS.pack(*addresses, workspace, memory, tokens, *CONSTANTS))
    return packed * max(1, LAUNCHES // sets)


def _graph(variant: Variant, tokens: int, arguments: list[bytes], index: int, stream: Any) -> Any:
    driver, _ = bindings()
    check(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    try:
        for packed in arguments:
            enqueue(variant, index, int(stream), variant.sizes(tokens)[0], packed)
    finally:
        graph = check(driver.cuStreamEndCapture(stream))
    try:
        return check(driver.cuGraphInstantiate(graph, 0))
    finally:
        driver.cuGraphDestroy(graph)


def _replayed(graphs: dict[Variant, Any], launches: int, stream: Any) -> dict[Variant, float]:
    """The median over the rounds; the plans take turns in each."""
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
