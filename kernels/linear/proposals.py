"""A packed product with an algorithm that cuBLASLt proposes and `torch.mm` does not take.

`torch.mm` takes the first proposal for its shape. Others may be faster: for 64 tokens, K = 7168 and M = 4672 one of
them took 20.6 us where `torch.mm` took 26.3 (H200, bfloat16). So some are timed beside the other ways.

They are asked for once for each bucket of token counts, at its limit, so that a number means one algorithm throughout
the bucket. They need no workspace: nothing is allocated but the result, and a capture has nothing to keep. Each number
of a result is one float32 sum in one order, so results do not depend on the run, as
`torch.use_deterministic_algorithms` asks for. What they cannot do (`multiply`) is made by `torch.mm`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsv4_compile.kernels.choice import replays
from dsv4_compile.kernels.choice.chooser import warn
from dsv4_compile.kernels.linear import cublaslt, products
from dsv4_compile.kernels.linear.buckets import bucket_of
from dsv4_compile.kernels.linear.cublaslt import ALIGNMENT, TYPES, Algorithm, Launch, Product
from dsv4_compile.kernels.linear.skinny.prepared import empty_strided_cuda

if TYPE_CHECKING:
    from dsv4_compile.kernels.linear.strategies import Card, Problem

__all__ = ["MOST", "Kept", "forget", "keep", "multiply", "serves", "unavailable"]

MOST = 4
"""Proposals that are ways of their own, for each bucket."""

MOST_TOKENS = 512
"""With more, all proposals take as long as the arithmetic."""

ASKED = 16
WORKSPACE = 32 << 20  # bytes; what torch gives cuBLAS on Hopper
OLDEST = 80  # compute capability
STEP = ALIGNMENT // 2  # elements of a row come in multiples of it

_lock = threading.RLock()
_handles: dict[int, int] = {}
_known: dict[tuple[Card, torch.dtype, int, int, float], tuple[Algorithm, ...]] = {}
_failures: list[str] = []
_HERE = contextlib.nullcontext()


def unavailable() -> str | None:
    """What failed first, as a sentence, or None."""
    return _failures[0] if _failures else None


def forget() -> None:
    """Ask again. For tests."""
    cublaslt.load.cache_clear()
    cublaslt._operation.cache_clear()
    _launch.cache_clear()
    for known in (_handles, _known, _failures):
        known.clear()


def serves(which: int, problem: Problem, tokens: float) -> bool:
    """Whether there is a proposal number `which`, from 0 on, for `problem` with up to `tokens` rows."""
    if tokens > MOST_TOKENS or not _fits(problem):
        return False
    return which < len(_algorithms(problem.card, problem.x, problem.columns, sum(problem.features), bucket_of(tokens)))


def _fits(problem: Problem) -> bool:
    """Whether it is one product of 16-bit numbers, every row of which begins at a multiple of 16 bytes."""
    return (
        problem.card.capability >= OLDEST
        and problem.x in TYPES
        and set(problem.dtypes) == {problem.x}
        and len(problem.runs) == 1
        and not any(problem.biased)
        and not any(problem.wide)
        and problem.aligned
        and problem.contiguous
        and _are_even(problem.columns, sum(problem.features))
    )


def _are_even(*sizes: int) -> bool:
    return all(size > 0 and size % STEP == 0 for size in sizes)


def multiply(which: int, rows: Tensor, turned: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """`products.multiply` with proposal number `which` for the bucket of N.

    By `torch.mm` where there is a bias, no such proposal, one that does not take these strides, another dtype, no row,
    or an address that is not a multiple of 16 bytes.
    """
    launch = None
    index = rows.get_device()
    if (
        bias is None
        and rows.is_cuda
        and rows.dtype == turned.dtype
        and turned.get_device() == index
        and (out is None or _takes(out, rows, turned))
    ):
        strides = rows.stride(), turned.stride(), None if out is None else out.stride()
        launch = _launch(which, index, rows.dtype, rows.shape, turned.shape, *strides)
    if launch is None:
        return products.multiply(rows, turned, bias, out)
    if out is None:
        out = rows.new_empty((rows.shape[0], turned.shape[1]))
    weight, start, result = turned.data_ptr(), rows.data_ptr(), out.data_ptr()
    if (weight | start | result) % ALIGNMENT:
        return products.multiply(rows, turned, None, out)
    with _HERE if torch._C._cuda_getDevice() == index else torch.cuda.device(index):
        torch.cuda.is_current_stream_capturing()  # makes the device's context current in a thread that has none yet
        status = launch(weight, start, result, torch._C._cuda_getCurrentRawStream(index))
    if status:
        warn(f"A product is made by torch.mm: cublasLtMatmul returned {status}")
        return products.multiply(rows, turned, None, out)
    return out


class Kept:
    """A call that was made, for the next ones: a weight that lies where it lay, and an input of one layout."""

    def __init__(self, launch: Launch, weight: int, shape: tuple[int, ...], dtype: torch.dtype, index: int) -> None:
        self.launch, self.weight, self.dtype, self.index = launch, weight, dtype, index
        self.shape, self.stride = shape, torch.empty(shape, device="meta").stride()

    def __call__(self, x: Tensor) -> list[Tensor] | None:
        """The result, or None where it needs the longer way: not aligned, not on the current device, or a failure."""
        start = x.data_ptr()
        if start % ALIGNMENT or not (x.get_device() == self.index == torch._C._cuda_getDevice()):
            return None
        torch.cuda.is_current_stream_capturing()  # makes the device's context current in a thread that has none yet
        out = empty_strided_cuda(self.shape, self.stride, self.dtype)
        if self.launch(self.weight, start, out.data_ptr(), torch._C._cuda_getCurrentRawStream(self.index)):
            return None
        return [out]


def keep(which: int, x: Tensor, rows: Tensor, turned: Tensor) -> Kept | None:
    """`multiply(which, rows, turned, None)`, `rows` being `x` as a matrix, as a call with further inputs like `x`.

    None where a later call may be one that is torch's.
    """
    weight, index = turned.data_ptr(), rows.get_device()
    if empty_strided_cuda is None or not rows.is_cuda or rows.data_ptr() != x.data_ptr() or weight % ALIGNMENT:
        return None
    launch = _launch(which, index, rows.dtype, rows.shape, turned.shape, rows.stride(), turned.stride(), None)
    return None if launch is None else Kept(launch, weight, (*x.shape[:-1], turned.shape[1]), rows.dtype, index)


def _takes(out: Tensor, rows: Tensor, turned: Tensor) -> bool:
    same = out.dtype == rows.dtype and out.get_device() == rows.get_device()
    return same and out.shape == (rows.shape[0], turned.shape[1])


@functools.lru_cache(maxsize=4096)
def _launch(
    which: int,
    index: int,
    dtype: torch.dtype,
    rows: tuple[int, int],
    turned: tuple[int, int],
    of_rows: tuple[int, int],
    of_turned: tuple[int, int],
    of_out: tuple[int, int] | None,
) -> Launch | None:
    """The product of shapes `[N, K]` and `[K, M]` with these strides on CUDA device `index`, None where it is torch's.

    `of_out` None: it is contiguous.
    """
    from dsv4_compile.kernels.linear.tuning import card_of

    (tokens, columns), features = rows, turned[1]
    if dtype not in TYPES or not 0 < tokens <= MOST_TOKENS or turned[0] != columns or not _are_even(columns, features):
        return None
    steps = of_turned[0], of_rows[1], 1 if of_out is None else of_out[1]
    # The stride of a single row can be anything.
    of_one = tokens == 1
    strides = (
        of_turned[1],
        columns if of_one else of_rows[0],
        features if of_one or of_out is None else of_out[0],
    )
    if steps != (1, 1, 1) or not _are_even(*strides) or min(strides[:2]) < columns or strides[2] < features:
        return None
    algorithms = _algorithms(card_of(index), dtype, columns, features, bucket_of(tokens))
    if which >= len(algorithms):
        return None
    try:
        with _on(index) as handle:
            return Product(dtype, tokens, columns, features, strides).launch(handle, algorithms[which])
    except Exception as error:
        _fail(error)
        return None


# ------------------------------------------------------------------------------------------------------ what there is


def _algorithms(card: Card, dtype: torch.dtype, columns: int, features: int, bucket: float) -> tuple[Algorithm, ...]:
    """The proposals for `bucket` rows `[K]` and weights `[M, K]` on such a card, without what `torch.mm` takes."""
    key = card, dtype, columns, features, bucket
    known = _known.get(key)
    if known is not None:
        return known
    with _lock:
        if key not in _known:
            try:
                index = _device_of(card)
                if index is None:
                    return ()
                with _on(index) as handle:
                    _known[key] = _asked(Product(dtype, int(bucket), columns, features), handle)
            except Exception as error:
                _fail(error)
                _known[key] = ()
        return _known[key]


def _asked(product: Product, handle: int) -> tuple[Algorithm, ...]:
    taken = product.proposals(handle, WORKSPACE, 1)
    different = {algorithm.configuration: algorithm for algorithm in taken}
    for algorithm in product.proposals(handle, 0, ASKED):
        if algorithm.is_whole:
            different.setdefault(algorithm.configuration, algorithm)
    return tuple(different.values())[len(taken) :][:MOST]


def _device_of(card: Card) -> int | None:
    """A CUDA device that is such a card and is in use, the current one first: asking must not put others in use."""
    from dsv4_compile.kernels.linear.tuning import card_of

    if not torch.cuda.is_available():
        return None
    for index in (torch.cuda.current_device(), *range(torch.cuda.device_count())):
        used = torch._C._cuda_hasPrimaryContext(index)  # type: ignore[attr-defined]
        if used and card_of(index) == card:
            return index
    return None


@contextlib.contextmanager
def _on(index: int) -> Iterator[int]:
    """The handle of device `index`, which is the current one meanwhile. Spoils no capture."""
    with _lock, contextlib.ExitStack() as stack:
        stack.enter_context(torch.cuda.device(index))
        torch.cuda.is_current_stream_capturing()  # makes the device's context current in this thread
        replays.beside_captures(stack)
        if index not in _handles:
            _handles[index] = cublaslt.create("cublasLtCreate")
        yield _handles[index]


def _fail(error: Exception) -> None:
    reason = f"cuBLASLt could not be asked ({type(error).__name__}: {error})"
    _failures.append(reason)
    warn(f"Packed products are those of torch.mm: {reason}")
