"""mHC on CUDA in two Triton launches.

1. `mix_kernel`, a group of tokens times a slice of the hidden axis: computes and writes the new residual (`post`) and,
   from the rows still in registers, the slice's part of the dot products with `fn` and of the sum of squares. The parts
   go to a workspace; nothing is zeroed and nothing is added atomically, so results are deterministic.
2. `finish_kernel`, two kinds of program side by side: one adds up the parts and computes `post` and `comb` (Sinkhorn in
   registers), the other adds up the parts again, computes `pre`, collapses a token's streams and normalises the row.

`mhc_post` is the first launch alone; `mhc_pre` is both, without writing a residual. `fn` is the traffic that matters at
few tokens (1.6 MB at hidden 4096): up to `GROUP` tokens are in one block, so it is read once for all of them, and the
hidden axis is cut into enough slices to bring it in through 64 to 128 multiprocessors.

Numbers: float32 throughout. The dot products run on tensor cores as `tf32x3`: both operands are split into two tf32
parts and three of the four products added, an error of about 2^-22 of each product, as good as float32 for these sums;
bfloat16 and float16 rows are exact in their first part. A row's result depends on the other rows only through
`splits`, which steps at the token counts named in `PLANS`: every other tile size that could change the order of a sum
is a function of the split count and the hidden size.

Serves float32, bfloat16 and float16 residuals of 2 to 8 streams and up to `MAX_HIDDEN` columns on CUDA, and on the CPU
when Triton's interpreter is on (`TRITON_INTERPRET=1` when this module is imported). Shapes and formulas:
`reference.py`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_compile.kernels.mhc.triton_kernels import finish_kernel, mix_kernel

__all__ = ["mhc_post", "mhc_post_pre", "mhc_pre", "refusal", "splits"]

STREAMS = range(2, 9)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What `post` and `comb` can be rounded to; any other dtype to mix in changes no float32 number.
ROUNDED = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# One program of `finish_kernel` holds a whole row in registers: 64 values a thread at this width.
MAX_HIDDEN = 16384

# Tokens in a block of `mix_kernel`: the rows of one tensor-core instruction, so fewer would cost the same.
GROUP = 16
# Columns of a slice handled at a time. At 64 the unrolled streams no longer fit the registers (600 bytes of spills).
WIDTH = 32
WIDTH_WIDE = 16  # with more streams than UNROLLED
# Up to so many streams Sinkhorn is unrolled in the registers of one lane: at eight, that compiled for 30 seconds.
UNROLLED = 4
# Up to so many tokens, at most so many slices of the hidden axis: about 128 to 512 blocks.
PLANS = ((16, 128), (64, 32), (256, 16), (2048, 8), (math.inf, 2))
# The token count whose plan serves all of them where a row's result must not depend on the other rows.
DETERMINISTIC = 64
# Parts (tokens times slices) that one program of `finish_kernel` loads at a time.
CELLS = 32
MIX_WARPS = 4
MIX_STAGES = 2
_INT32 = 2**31 - 1

INTERPRETED = not isinstance(mix_kernel, triton.JITFunction)


def refusal(device: torch.device, n: int, hidden: int, dtype: torch.dtype) -> str | None:
    """Why this family cannot serve a `[..., n, hidden]` residual of `dtype` on `device`, or None when it can."""
    if device.type != "cuda" and not (INTERPRETED and device.type == "cpu"):
        return f"it runs on CUDA and the tensors are on {device.type}"
    if dtype not in DTYPES:
        return f"it computes in float32 and the residual is {dtype}"
    if n not in STREAMS:
        return f"it is written for {STREAMS.start} to {STREAMS.stop - 1} streams and there are {n}"
    if not 1 <= hidden <= MAX_HIDDEN:
        return f"it is written for hidden sizes up to {MAX_HIDDEN} and this one is {hidden}"
    return None


@dataclass(frozen=True)
class Plan:
    """How one call is cut up: `splits` slices of `steps` times `width` columns."""

    width: int
    steps: int
    splits: int


@functools.lru_cache(maxsize=1024)
def _plan(tokens: int, n: int, hidden: int) -> Plan:
    most = next(most for limit, most in PLANS if tokens <= limit)
    width = WIDTH if n <= UNROLLED else WIDTH_WIDE
    chunks = math.ceil(hidden / width)
    steps = math.ceil(chunks / most)
    return Plan(width, steps, math.ceil(chunks / steps))


def splits(tokens: int, hidden: int, n: int = 4) -> int:
    """Slices of the hidden axis for `tokens` rows; as a function of `tokens` it steps only at the limits in `PLANS`."""
    return _plan(tokens, n, hidden).splits


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


def _ready(tensor: Tensor) -> Tensor:
    """`tensor` contiguous and on a 16-byte boundary, so that each kernel is compiled for one alignment only."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _device(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()


_compiled: dict[tuple[object, ...], Any] = {}

# x, post, comb, the new residual, which is filled, and the dtype that post and comb are rounded to.
_Mixing = tuple[Tensor, Tensor, Tensor, Tensor, torch.dtype | None]


def _launch(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any], **how: int
) -> None:
    """`kernel[grid](*arguments, **constants)`; from the second call of its kind on without Triton's binder.

    The binder takes several times longer than these kernels run. What it would look at is in the key: dtypes, which
    tensors are absent, the constants and the device; addresses are on 16-byte boundaries (`_ready`), and the only
    integer, the token count, is not specialised beyond its width. `constants` are in the order of the signature.
    """
    kinds = tuple(a.dtype if isinstance(a, Tensor) else (a is None or type(a)) for a in arguments)
    wide = any(isinstance(a, int) and a > _INT32 for a in arguments)
    key = (kernel, 0 if INTERPRETED else torch.cuda.current_device(), kinds, wide, *constants.values())
    known = _compiled.get(key)
    if known is not None:
        known[grid](*arguments, *constants.values())
        return
    made = kernel[grid](*arguments, **constants, **how)
    if not INTERPRETED:
        _compiled[key] = made


def _mix(
    residual: Tensor,
    post: _Mixing | None,
    fn: Tensor | None,
    tokens: int,
    deterministic: bool = False,
) -> Tensor | None:
    """Launch `mix_kernel`; returns the partials when there is `fn`."""
    n, hidden = residual.shape[-2:]
    logits = (2 + n) * n
    plan = _plan(DETERMINISTIC if deterministic else tokens, n, hidden)
    partials = None
    if fn is not None:
        partials = torch.empty((plan.splits, tokens, logits + 1), dtype=torch.float32, device=residual.device)
    x, weights, matrix, new_residual, mixing_dtype = post or (None,) * 5
    constants = {
        "HIDDEN": hidden,
        "N": n,
        "COLUMNS": max(16, _power_of_two(logits + 1)),
        "STEPS": plan.steps,
        "WIDTH": plan.width,
        "GROUP": GROUP,
        "HAS_POST": post is not None,
        "HAS_PRE": fn is not None,
        "MIXING": tl.float32 if mixing_dtype is None else ROUNDED.get(mixing_dtype, tl.float32),
    }
    grid = (triton.cdiv(tokens, GROUP), plan.splits, 1)
    arguments = (x, residual, weights, matrix, fn, new_residual, partials, tokens)
    _launch(mix_kernel, grid, arguments, constants, num_warps=MIX_WARPS, num_stages=MIX_STAGES)
    return partials


def _finish(
    streams: Tensor,
    partials: Tensor,
    weights: tuple[Tensor, Tensor, Tensor | None],
    iters: int,
    constants: tuple[float, float, float, float, float],
    outputs: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Launch `finish_kernel`. `weights`: scale, base, norm_weight. `outputs`, filled: layer_input, post, comb."""
    n, hidden = streams.shape[-2:]
    count, tokens, columns = partials.shape
    chunk = min(CELLS, _power_of_two(count))
    wide = n > UNROLLED
    group = 1 if wide else CELLS // chunk
    row = _power_of_two(hidden)
    sizes = {
        "ITERS": iters,
        "HIDDEN": hidden,
        "N": n,
        "COLUMNS": _power_of_two(columns),
        "SPLITS": count,
        "CHUNK": chunk,
        "GROUP": group,
        "ROW": row,
        "SIDE": _power_of_two(n) if wide else 0,
    }
    grid = (triton.cdiv(tokens, group) + tokens, 1, 1)
    arguments = (streams, partials, *weights, *outputs, tokens, *(float(value) for value in constants))
    _launch(finish_kernel, grid, arguments, sizes, num_warps=8 if row >= 4096 else 4)


def _run(
    residual: Tensor,
    post: _Mixing | None,
    weights: tuple[Tensor, Tensor, Tensor, Tensor | None],
    iters: int,
    constants: tuple[float, float, float, float, float],
    out_dtype: torch.dtype,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`pre` of the streams that `post` makes of `residual`, or of `residual` itself; all tensors are ready."""
    *lead, n, hidden = residual.shape
    layer_input = torch.empty((*lead, hidden), dtype=out_dtype, device=residual.device)
    new_post = torch.empty((*lead, n), dtype=torch.float32, device=residual.device)
    new_comb = torch.empty((*lead, n, n), dtype=torch.float32, device=residual.device)
    if (tokens := math.prod(lead)) > 0:
        fn, scale, base, norm_weight = weights
        with _device(residual):
            partials = _mix(residual, post, fn, tokens, deterministic)
            assert partials is not None
            _finish(
                residual if post is None else post[3],
                partials,
                (scale, base, norm_weight),
                iters,
                constants,
                (layer_input, new_post, new_comb),
            )
    return layer_input, new_post, new_comb


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
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.mhc_pre`; outputs contiguous."""
    weights = (_ready(fn), _ready(scale), _ready(base), None if norm_weight is None else _ready(norm_weight))
    constants = (rms_eps, pre_eps, sinkhorn_eps, post_mult, norm_eps)
    return _run(_ready(residual), None, weights, iters, constants, out_dtype, deterministic)


def mhc_post(
    x: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    residual_dtype: torch.dtype,
    mixing_dtype: torch.dtype | None = None,
) -> Tensor:
    """`reference.mhc_post`; output contiguous."""
    new_residual = torch.empty(residual.shape, dtype=residual_dtype, device=residual.device)
    if (tokens := math.prod(residual.shape[:-2])) > 0:
        with _device(residual):
            streams = (_ready(x), _ready(post), _ready(comb), new_residual, mixing_dtype)
            _mix(_ready(residual), streams, None, tokens)
    return new_residual


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
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.mhc_post_pre`; outputs contiguous."""
    new_residual = torch.empty(residual.shape, dtype=residual_dtype, device=residual.device)
    streams = (_ready(x), _ready(post), _ready(comb), new_residual, mixing_dtype)
    weights = (_ready(fn), _ready(scale), _ready(base), None if norm_weight is None else _ready(norm_weight))
    constants = (rms_eps, pre_eps, sinkhorn_eps, post_mult, norm_eps)
    return new_residual, *_run(_ready(residual), streams, weights, iters, constants, out_dtype, deterministic)
