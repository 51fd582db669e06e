"""mHC on the CPU by one C++ call: `mhc.cpp`, compiled at first use.

Inductor's `CppCodeCache` compiles the source once per machine and number of streams (about two seconds) and keeps the
library in Inductor's cache folder. It is a plain C function on pointers, called through ctypes, which releases the GIL.

Serves float32, bfloat16 and float16 tensors on the CPU (float16 is converted to float32 around the call) with 2 to 8
streams. Shapes and formulas: `reference.py`. The functions raise what the compiler or the loader raises when no library
can be had; `families.py` turns that into a reason and the next family.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

try:  # What Inductor's generated code allocates with: a quarter of the time of torch.empty, which counts in one call.
    from torch._C._dynamo.guards import _empty_strided_cpu  # type: ignore[attr-defined]
except ImportError:
    _empty_strided_cpu = None

__all__ = ["mhc_post", "mhc_post_pre", "mhc_pre", "refusal"]

STREAMS = range(2, 9)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# `enum Dtype` of mhc.cpp: what the library reads and writes by itself.
NATIVE = {torch.float32: 0, torch.bfloat16: 1}
# Elements of residual from which more threads pay. An element takes about 2 ns and waking a thread about 10 us. Where
# another process has the second core each of the three barriers costs a time slice (8 ms seen), so not for short calls.
PARALLEL_ELEMENTS = 512 * 1024
# Inductor turns these off for its own kernels, whose numbers follow eager mode bit by bit.
COMPILER_FLAGS = ("-ffp-contract=fast",)
# `struct Call` of mhc.cpp.
CALL = struct.Struct("=12q 5q 4q 5d")

_compiling = threading.Lock()


@functools.cache
def _compiled(n: int) -> Callable[[bytes], None]:
    from torch._inductor.codecache import CppCodeCache

    source = f"#define STREAMS {n}\n" + Path(__file__).with_name("mhc.cpp").read_text(encoding="utf-8")
    library = CppCodeCache.load(source, device_type="cpu", extra_flags=COMPILER_FLAGS)
    function = library.mhc
    function.argtypes = [ctypes.c_char_p]
    function.restype = None
    return function


def library(n: int) -> Callable[[bytes], None]:
    """The C function for `n` streams, which takes one packed `struct Call`; compiled if this machine has not yet."""
    with _compiling:
        return _compiled(n)


def refusal(device: torch.device, n: int, hidden: int, dtype: torch.dtype) -> str | None:
    """Why this family cannot serve a `[..., n, hidden]` residual of `dtype` on `device`, or None when it can.

    Answering may compile the library, since whether there is a working compiler is known only then.
    """
    if device.type != "cpu":
        return f"it runs on the CPU and the tensors are on {device.type}"
    if dtype not in DTYPES:
        return f"it computes in float32 and the residual is {dtype}"
    if n not in STREAMS:
        return f"it is written for {STREAMS.start} to {STREAMS.stop - 1} streams and there are {n}"
    try:
        library(n)
    except Exception as error:
        return f"its C++ source could not be compiled ({type(error).__name__}: {_first_line(error)})"
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0]


def _dense(tensor: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """`tensor` contiguous in `dtype`; itself when it already is, without calling an operator."""
    if tensor.dtype is not dtype:
        tensor = tensor.to(dtype)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _streams(tensor: Tensor) -> Tensor:
    """`tensor` contiguous in a dtype the library reads."""
    return _dense(tensor, tensor.dtype if tensor.dtype in NATIVE else torch.float32)


@functools.lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A contiguous tensor on the CPU, in float32 where the library cannot write `dtype`."""
    if dtype not in NATIVE:
        dtype = torch.float32
    if _empty_strided_cpu is None:
        return torch.empty(shape, dtype=dtype)
    return _empty_strided_cpu(shape, _strides(shape), dtype)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def _call(
    residual: Tensor,
    post: tuple[Tensor, Tensor, Tensor, Tensor, torch.dtype] | None,
    pre: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor] | None,
    iters: int = 0,
    constants: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0),
) -> None:
    """Fill the outputs of one call; every tensor is contiguous and in a dtype the library reads.

    `post`: x, post, comb, new_residual and what post and comb are rounded to. `pre`: fn, scale, base, norm_weight,
    layer_input, post, comb.
    """
    n, hidden = residual.shape[-2:]
    tokens = residual.numel() // (n * hidden)
    if tokens == 0:
        return
    x, old_post, old_comb, new_residual, mixing = post or (None, None, None, None, torch.float32)
    fn, scale, base, norm_weight, layer_input, new_post, new_comb = pre or (None,) * 7
    addresses = [
        0 if tensor is None else tensor.data_ptr()
        for tensor in (
            x,
            residual,
            old_post,
            old_comb,
            fn,
            scale,
            base,
            norm_weight,
            new_residual,
            layer_input,
            new_post,
            new_comb,
        )
    ]
    dtypes = [0 if tensor is None else NATIVE[tensor.dtype] for tensor in (x, residual, new_residual, layer_input)]
    dtypes.append(NATIVE[mixing])
    threads = torch.get_num_threads() if residual.numel() >= PARALLEL_ELEMENTS else 1
    _compiled(n)(CALL.pack(*addresses, *dtypes, tokens, hidden, iters, threads, *constants))


def mhc_pre(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor | None,
    iters: int,
    rms_eps: float,
    pre_eps: float,
    sinkhorn_eps: float,
    post_mult: float,
    norm_eps: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.mhc_pre`; outputs contiguous."""
    residual = _streams(residual)
    *lead, n, hidden = residual.shape
    layer_input = _empty((*lead, hidden), out_dtype)
    post = _empty((*lead, n), torch.float32)
    comb = _empty((*lead, n, n), torch.float32)
    weight = None if norm_weight is None else _dense(norm_weight)
    _call(
        residual,
        None,
        (_dense(fn), _dense(scale), _dense(base), weight, layer_input, post, comb),
        iters,
        (rms_eps, pre_eps, sinkhorn_eps, post_mult, norm_eps),
    )
    return _cast(layer_input, out_dtype), post, comb


def _mixing(
    x: Tensor, post: Tensor, comb: Tensor, new_residual: Tensor, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, torch.dtype]:
    """The argument `post` of `_call`."""
    if dtype is torch.float16:  # the library cannot round to it
        post, comb = post.to(dtype), comb.to(dtype)
    rounded = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    return _streams(x), _dense(post), _dense(comb), new_residual, rounded


def mhc_post(
    x: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    residual_dtype: torch.dtype,
    mixing_dtype: torch.dtype | None = None,
) -> Tensor:
    """`reference.mhc_post`; output contiguous."""
    residual = _streams(residual)
    new_residual = _empty(tuple(residual.shape), residual_dtype)
    _call(residual, _mixing(x, post, comb, new_residual, mixing_dtype), None)
    return _cast(new_residual, residual_dtype)


def mhc_post_pre(
    x: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor | None,
    iters: int,
    rms_eps: float,
    pre_eps: float,
    sinkhorn_eps: float,
    post_mult: float,
    norm_eps: float,
    residual_dtype: torch.dtype,
    out_dtype: torch.dtype,
    mixing_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.mhc_post_pre`; outputs contiguous."""
    constants = (rms_eps, pre_eps, sinkhorn_eps, post_mult, norm_eps)
    if residual_dtype not in NATIVE:
        # `pre` must see the residual as rounded, and the library cannot round to this dtype.
        new_residual = mhc_post(x, residual, post, comb, residual_dtype, mixing_dtype)
        return new_residual, *mhc_pre(new_residual, fn, scale, base, norm_weight, iters, *constants, out_dtype)
    residual = _streams(residual)
    *lead, n, hidden = residual.shape
    new_residual = _empty(tuple(residual.shape), residual_dtype)
    layer_input = _empty((*lead, hidden), out_dtype)
    new_post = _empty((*lead, n), torch.float32)
    new_comb = _empty((*lead, n, n), torch.float32)
    weight = None if norm_weight is None else _dense(norm_weight)
    _call(
        residual,
        _mixing(x, post, comb, new_residual, mixing_dtype),
        (_dense(fn), _dense(scale), _dense(base), weight, layer_input, new_post, new_comb),
        iters,
        constants,
    )
    return new_residual, _cast(layer_input, out_dtype), new_post, new_comb
