"""How long each way to run linear layers of one input takes, one beside the other (`choice/replays.py`).

The launches of a graph go round sets of weights, inputs and outputs that together are larger than the L2 cache, as
those of a model's layers are. All of it is the driver's own memory, and the stream is one that nobody else uses. It
runs in a thread of its own: what the caller's thread has in force (a memory pool of a CUDA graph, `serial()`, autocast,
dispatch modes) does not reach it. What stays is the workspace of cuBLAS for this stream and for the side streams.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4_compile.kernels.choice import replays
from dsv4_compile.kernels.driver import bindings, check
from dsv4_compile.kernels.linear import skinny, strategies
from dsv4_compile.kernels.linear.products import FLOAT8, Scaled
from dsv4_compile.kernels.linear.strategies import Plan, Problem

__all__ = ["measure"]

MEMORY = 2 << 30  # bytes at most, and half of what is free
FEW_LAUNCHES = 4  # in a graph of more than `MANY_TOKENS`, each of which takes long
MANY_TOKENS = 1024
ALIGNMENT = 256


def measure(problem: Problem, counts: range, index: int) -> dict[str, float]:
    """Microseconds of each way that is legal for all of `counts` on CUDA device `index`.

    With the largest of `counts` that memory has room for.

    Raises:
        RuntimeError: memory is short, or torch or the driver reports an error.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_measure, problem, counts, index).result()


def _measure(problem: Problem, counts: range, index: int) -> dict[str, float]:
    skinny.prepare(problem, counts[-1], torch.cuda.get_device_capability(index))
    with torch.no_grad(), torch.cuda.device(index), contextlib.ExitStack() as stack:
        torch.cuda.current_stream(index).synchronize()  # makes the device's context current in this thread
        replays.beside_captures(stack)
        stream = _stream(index)
        room = replays.budget(MEMORY)
        tokens = _tokens(problem, counts, room)
        of_set = _bytes_of_set(problem, tokens)
        size = of_set * replays.sets_beyond_cache(of_set, room, index)
        memory = _as_tensor(replays.allocate(size, stack), size, torch.device("cuda", index))
        with torch.cuda.stream(stream):
            sets = _sets(memory, problem, tokens)
            _fill(sets)
            most = replays.LAUNCHES if tokens <= MANY_TOKENS else FEW_LAUNCHES
            launches = sets * max(1, most // len(sets))
            graphs = {}
            for name in strategies.legal(problem, counts[-1]):
                plan = strategies.plan_of(name, problem)
                # cuBLAS allocates its workspace and loads kernels before the capture.
                _launch(plan, sets[:1])
                stream.synchronize()
                launch = functools.partial(_launch, plan, launches)
                graphs[name] = replays.captured(launch, stream.cuda_stream, stack)
            times = replays.medians(graphs, len(launches), stream.cuda_stream)
            stream.synchronize()
        return times


@functools.cache
def _stream(index: int) -> torch.cuda.Stream:
    """The stream of all measurements on a device. One of torch's pool might be in use by somebody else."""
    driver, _ = bindings()
    made = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    return torch.cuda.ExternalStream(int(made), device=index)


def _tokens(problem: Problem, counts: range, room: int) -> int:
    """The largest of `counts` with which a set of buffers fits into `room` bytes."""
    fitting = bisect.bisect_right(counts, room, key=functools.partial(_bytes_of_set, problem))
    if fitting == 0:
        raise RuntimeError(f"it takes {_bytes_of_set(problem, counts[0]) >> 20} MiB, and {room >> 20} can be had")
    return counts[fitting - 1]


# ------------------------------------------------------------------------------------------------------------ buffers


@dataclass(frozen=True)
class _Set:
    """The tensors of one call."""

    rows: Tensor
    weights: list[Tensor]
    biases: list[Tensor | None]
    outputs: list[Tensor]
    casts: dict[torch.dtype, Tensor]
    scaled: list[Scaled]


class _Cursor:
    """Takes tensors from memory, one behind the other."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.at = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        start, size = self.at, math.prod(shape) * dtype.itemsize
        self.at = start + -(-size // ALIGNMENT) * ALIGNMENT
        return self.memory[start : start + size].view(dtype).view(shape)


def _take_set(cursor: _Cursor, problem: Problem, tokens: int) -> _Set:
    columns = problem.columns
    gap = 1 if problem.contiguous else 2
    rows = cursor.take((tokens, gap * columns), problem.x)[:, :columns]
    weights: dict[int, Tensor] = {}
    for run in problem.runs:
        features = [problem.features[i] for i in run]
        whole = cursor.take((sum(features), columns), problem.dtypes[run[0]])
        weights |= dict(zip(run, whole.split(features), strict=True))
    dtypes = (*problem.dtypes[: problem.plain], *(low.dtype for low in problem.scaled))
    biases = [
        cursor.take((features,), dtype) if biased else None
        for features, dtype, biased in zip(problem.features, dtypes, problem.biased, strict=True)
    ]
    plan = strategies.plan_of("serial", problem)
    outputs = [cursor.take((tokens, width), dtype) for dtype, width in plan.outputs]
    casts = {dtype: cursor.take((tokens, columns), dtype) for dtype in plan.casts}
    scaled = _take_scaled(cursor, problem, tokens)
    return _Set(rows, [weights[i] for i in range(len(weights))], biases, outputs, casts, scaled)


def _take_scaled(cursor: _Cursor, problem: Problem, tokens: int) -> list[Scaled]:
    taken: dict[tuple[str, int, tuple[int, ...]], Tensor] = {}

    def take(what: str, number: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        if (what, number, shape) not in taken:
            taken[what, number, shape] = cursor.take(shape, dtype)
        return taken[what, number, shape]

    found = []
    for low, features in zip(problem.scaled, problem.features[problem.plain :], strict=True):
        rows = take("input", low.input, (tokens, problem.columns), FLOAT8)
        shapes = ((tokens, 1), (1, features)) if low.by_row else ((), ())
        of_rows, of_weight = take("of_rows", low.of_rows, shapes[0]), take("of_weight", low.of_weight, shapes[1])
        found.append(Scaled(rows, of_rows, of_weight, low.dtype, low.fast))
    return found


@functools.lru_cache(maxsize=1024)
def _bytes_of_set(problem: Problem, tokens: int) -> int:
    cursor = _Cursor(torch.empty(1 << 50, dtype=torch.uint8, device="meta"))
    _take_set(cursor, problem, tokens)
    return cursor.at


def _sets(memory: Tensor, problem: Problem, tokens: int) -> list[_Set]:
    """As many as `memory` has room for."""
    cursor = _Cursor(memory)
    return [_take_set(cursor, problem, tokens) for _ in range(memory.numel() // _bytes_of_set(problem, tokens))]


def _fill(sets: list[_Set]) -> None:
    """Random numbers, because a card is faster with equal ones; not from the generator that others use."""
    generator = torch.Generator(sets[0].rows.device).manual_seed(0)
    for one in sets:
        low = [tensor for given in one.scaled for tensor in (given.rows, given.of_rows, given.of_weight)]
        for tensor in (one.rows, *one.weights, *one.biases, *low):
            if tensor is not None and tensor.dtype == FLOAT8:
                # All numbers below 2: there is no random generator for these.
                tensor.view(torch.uint8).random_(0, 256, generator=generator).bitwise_and_(0xBF)
            elif tensor is not None:
                tensor.uniform_(-1, 1, generator=generator)


def _launch(plan: Plan, sets: list[_Set]) -> None:
    for one in sets:
        operands = plan.operands(one.weights)
        strategies.execute(plan, one.rows, operands, one.weights, one.biases, one.outputs, one.casts, one.scaled)


def _as_tensor(address: int, size: int, device: torch.device) -> Tensor:
    """`size` bytes of memory that is not torch's; to be used while they are allocated."""
    storage: Any = torch._C._construct_storage_from_data_pointer(address, device, size)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (size,), (1,))
