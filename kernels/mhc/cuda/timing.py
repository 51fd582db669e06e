"""How long a launch takes, one plan beside the other (`choice/replays.py`).

The launches of a graph go round sets of buffers that together are larger than the L2 cache, as those of a model's
layers are. Buffers, stream and graphs are the driver's own.
"""

from __future__ import annotations

import bisect
import concurrent.futures
import contextlib
import functools
import itertools
import os
from typing import Any

import torch

from dsv4_compile.kernels.choice import replays
from dsv4_compile.kernels.choice.replays import LAUNCHES
from dsv4_compile.kernels.cuda.kept import ABSENT
from dsv4_compile.kernels.driver import bindings, check
from dsv4_compile.kernels.mhc.cuda.compilation import BYTES, Variant, cubin, kernel
from dsv4_compile.kernels.mhc.cuda.launch import ARGUMENTS, enqueue

__all__ = ["measure"]

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
        replays.beside_captures(stack)
        torch.cuda.current_stream(index).synchronize()  # also makes the device's context current in this thread
        variants = _compiled(variants, index)
        tokens, sets = _room(variants, counts, index)
        stream = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        stack.callback(driver.cuStreamDestroy, stream)
        size = sum(_shared(variants, tokens)) + sets * _bytes_of_set(variants[0], tokens)
        memory = replays.allocate(size, stack)
        check(driver.cuMemsetD32Async(memory, FILL, size // 4, stream))
        graphs = {}
        for variant in variants:
            arguments = _arguments(variant, tokens, sets, memory, _shared(variants, tokens))
            launch = functools.partial(_launch, variant, tokens, arguments, index, stream)
            graphs[variant] = replays.captured(launch, stream, stack)
        # Counters and sums that are to be absent come first. A launch leaves them so.
        counters, absent, _ = _shared(variants, tokens)
        check(driver.cuMemsetD32Async(memory, 0, counters // 4, stream))
        check(driver.cuMemsetD32Async(memory + counters, ABSENT, absent // 4, stream))
        return replays.medians(graphs, len(arguments), stream)


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
    counters = absent = others = 0
    for variant in variants:
        _, tiles, sums = variant.sizes(tokens)
        counters = max(counters, tiles)
        if variant.plan.signal:
            absent = max(absent, sums)
        else:
            others = max(others, sums)
    return _aligned(4 * counters), _aligned(4 * absent), _aligned(4 * others)


def _room(variants: list[Variant], counts: range, index: int) -> tuple[int, int]:
    """The token count and the number of sets of buffers."""
    budget = replays.budget(MEMORY)

    def needed(tokens: int) -> int:
        return sum(_shared(variants, tokens)) + _bytes_of_set(variants[0], tokens)

    fitting = bisect.bisect_right(counts, budget, key=needed)
    if fitting == 0:
        raise RuntimeError(f"it takes {needed(counts[0]) >> 20} MiB, and {budget >> 20} can be had")
    tokens = counts[fitting - 1]
    of_set = _bytes_of_set(variants[0], tokens)
    return tokens, replays.sets_beyond_cache(of_set, budget - sum(_shared(variants, tokens)), index)


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


def _launch(variant: Variant, tokens: int, arguments: list[bytes], index: int, stream: Any) -> None:
    for packed in arguments:
        enqueue(variant, index, int(stream), variant.sizes(tokens)[0], packed)
