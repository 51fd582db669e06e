"""mHC on Hopper and newer in two TileLang launches.

1. `mix_kernel`, a group of tokens times a slice of the hidden axis: computes and writes the new residual (`post`) and,
   from the rows still in registers, the slice's part of the dot products with `fn` and of the sum of squares. The next
   columns of a slice come in by `cp.async` while the dot products of the last ones are computed.
2. `finish_kernel`: the first blocks add up the parts of some tokens and compute `post` and `comb` (Sinkhorn in the
   registers of one thread), each other one adds them up for one token, collapses its streams and normalises the row.

`mhc_post` is the first launch alone; `mhc_pre` and `mhc_head` are both, without writing a residual. The parts go to a
workspace that nothing has to clear, and nothing is added atomically: results are deterministic.

Numbers: float32 throughout. The dot products run on bfloat16 tensor cores: `fn` in float32 is the sum of three bfloat16
numbers, a residual is the sum of one (bfloat16), two (float16) or three (float32), and every product of parts above
2^-24 of the whole is added. The chains of sums inside the tensor cores are a few hundred products long; what they give
is added in float32. A row's result depends on the other rows only through the plan, which steps at the token counts in
`PLANS`; with one plan for all (`deterministic`) it does not depend on them at all.

The token count and the number of slices are symbols of the programs. For each combination of shapes and dtypes two
programs of the first kind and a few of the second are compiled, in some seconds each, when they are first called, with
`nvcc`; TileLang keeps them on disk. The package `tilelang` is imported when it is first asked whether this family can
serve a tensor on such a device.

Serves float32, bfloat16 and float16 residuals of 2 to 8 streams whose hidden size is a multiple of 8 and at most
`MAX_HIDDEN`, on compute capability 9.0 and newer. Shapes and formulas: `reference.py`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsv4_compile.kernels.mhc.reference import rounded_dtype

if TYPE_CHECKING:
    from dsv4_compile.kernels.mhc.tilelang_kernels import Finish, Mix

__all__ = ["PLANS", "Plan", "mhc_head", "mhc_post", "mhc_post_pre", "mhc_pre", "plan_for", "refusal"]

STREAMS = range(2, 9)
TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
CAPABILITY = (9, 0)
# A block of `finish_kernel` holds a row in registers.
MAX_HIDDEN = 16384


@dataclass(frozen=True)
class Plan:
    """`group` tokens and at most `most` slices of the hidden axis for blocks of `threads`."""

    group: int
    most: int
    threads: int


# Up to so many tokens: about 128 to 512 blocks, and 16 tokens are the rows of one tensor-core instruction.
FEW = Plan(16, 128, 128)
SOME = Plan(16, 32, 128)
PLANS: tuple[tuple[float, Plan], ...] = (
    (16, FEW),
    (64, SOME),
    (256, Plan(64, 32, 256)),
    (1024, Plan(64, 16, 256)),
    (4096, Plan(64, 8, 256)),
    (math.inf, Plan(64, 4, 256)),
)
# Serves all token counts where a row's result must not depend on the other rows.
DETERMINISTIC = SOME
# Columns handled at a time, and with more streams than NARROW, whose tiles would not fit the shared memory.
WIDTH, WIDTH_NARROW = 32, 16
NARROW = 4
# Numbers that a block of `finish_kernel` adds up at a time for `post` and `comb`, and the most tokens it does so for.
CELLS = 4096
TOGETHER = 16

# What TileLang would choose by itself where it can: TMA with warp specialisation and wgmma for tiles this small, and
# shared memory used twice, which takes no notice of copies that are still in flight.
PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_wgmma": True,
    "tl.disable_shared_memory_reuse": True,
}


def plan_for(tokens: int) -> Plan:
    """The entry of `PLANS` for a token count."""
    return next(plan for limit, plan in PLANS if tokens <= limit)


def refusal(device: torch.device, n: int, hidden: int, dtype: torch.dtype) -> str | None:
    """Why this family cannot serve a `[..., n, hidden]` residual of `dtype` on `device`, or None when it can."""
    if device.type != "cuda":
        return f"it runs on CUDA and the tensors are on {device.type}"
    if dtype not in TYPES:
        return f"it computes in float32 and the residual is {dtype}"
    if n not in STREAMS:
        return f"it is written for {STREAMS.start} to {STREAMS.stop - 1} streams and there are {n}"
    if hidden % 8 or not 8 <= hidden <= MAX_HIDDEN:
        return f"it is written for hidden sizes that are multiples of 8 up to {MAX_HIDDEN} and this one is {hidden}"
    if not torch.cuda.is_available():
        return "this torch finds no CUDA device"
    if torch.version.hip is not None:
        return "it is written for NVIDIA GPUs and this torch is built for ROCm"
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older than Hopper"
    try:
        importlib.import_module("tilelang")
    except Exception as error:
        return f"the package tilelang could not be imported ({type(error).__name__}: {error})"
    return None


# --------------------------------------------------------------------------------------------------------- compilation

_compiled: dict[tuple[Mix | Finish, tuple[int, int]], Any] = {}
_compiling = threading.Lock()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """TileLang reports each compilation on its own logger; errors are raised all the same."""
    logger = logging.getLogger("tilelang")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _kernel(variant: Mix | Finish, device: int) -> Any:
    """The compiled program of `variant` for CUDA device `device`, which is the current one."""
    key = (variant, torch.cuda.get_device_capability(device))
    if (kernel := _compiled.get(key)) is None:
        with _compiling:
            if (kernel := _compiled.get(key)) is None:
                kernel = _compiled[key] = _compile(variant)
    return kernel


def _compile(variant: Mix | Finish) -> Any:
    import tilelang

    from dsv4_compile.kernels.mhc import tilelang_kernels as kernels

    with _quiet():
        program = kernels.mix_kernel(variant) if isinstance(variant, kernels.Mix) else kernels.finish_kernel(variant)
        return tilelang.compile(program, target="cuda", execution_backend="tvm_ffi", pass_configs=PASS_CONFIGS)


@functools.lru_cache(maxsize=4096)
def _mix_variant(
    plan: Plan, n: int, hidden: int, logits: int, types: tuple[str, str, str, str, str], has_post: bool
) -> Mix:
    """`types`: of the residual, the new one, x, fn, and of post and comb as they are multiplied."""
    from dsv4_compile.kernels.mhc.tilelang_kernels import Mix

    if n > NARROW:
        plan = Plan(FEW.group, plan.most, FEW.threads)
    width = WIDTH if n <= NARROW else WIDTH_NARROW
    return Mix(n, hidden, logits, plan.group, width, plan.threads, *types, has_post)


@functools.lru_cache(maxsize=4096)
def _finish_variant(n: int, hidden: int, logits: int, splits: int, types: tuple[str, str, str, str, str]) -> Finish:
    """`types`: of the streams, scale, base, the norm weight ("" for none) and the row."""
    from dsv4_compile.kernels.mhc.tilelang_kernels import Finish, power_of_two

    parts = power_of_two(splits)
    together = max(1, min(TOGETHER, CELLS // (parts * power_of_two(logits))))
    threads = 128 if hidden <= MAX_HIDDEN // 2 else 256
    return Finish(n, hidden, logits, parts, together, threads, *types)


# -------------------------------------------------------------------------------------------------------------- calls


def _ready(tensor: Tensor, types: tuple[torch.dtype, ...] = tuple(TYPES)) -> Tensor:
    """`tensor` contiguous, on a 16-byte boundary and in one of `types`."""
    if tensor.dtype not in types:
        tensor = tensor.to(torch.float32)
    tensor = tensor.detach().contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


_FLOAT = (torch.float32,)
_WEIGHTS = (torch.float32, torch.bfloat16)


def _mix(
    residual: Tensor,
    mixing: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    mixing_dtype: torch.dtype | None,
    fn: Tensor | None,
    plan: Plan,
) -> tuple[Tensor, Tensor] | None:
    """Launch `mix_kernel`; returns the parts of the dot products and of the sums of squares when there is `fn`.

    `residual` `[tokens, n, hidden]` and all others are ready. `mixing`: x, post, comb, new_residual, which is filled.
    """
    tokens, n, hidden = residual.shape
    logits = 0 if fn is None else fn.shape[0]
    x, post, comb, new_residual = mixing or (residual, None, None, residual)
    dtypes = [t.dtype for t in (residual, new_residual, x, residual if fn is None else fn)]
    dtypes.append(rounded_dtype(mixing_dtype))
    types = tuple(TYPES[dtype] for dtype in dtypes)
    variant = _mix_variant(plan, n, hidden, logits, types, mixing is not None)
    kernel = _kernel(variant, residual.device.index)
    streams = (residual,) if mixing is None else (x, residual, post, comb, new_residual)
    steps = -(-variant.chunks // plan.most)
    if fn is None:
        kernel(steps, *streams)
        return None
    splits = -(-variant.chunks // steps)
    dots = torch.empty((splits, tokens, logits), dtype=torch.float32, device=residual.device)
    squares = torch.empty((splits, tokens), dtype=torch.float32, device=residual.device)
    kernel(steps, *streams, fn.view(logits, n, hidden), dots, squares)
    return dots, squares


def _run(
    residual: Tensor,
    mixing: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    weights: tuple[Tensor, Tensor, Tensor, Tensor | None],
    iters: int,
    constants: tuple[float, float, float, float, float],
    out_dtype: torch.dtype,
    deterministic: bool,
    mixing_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`pre` of the streams that `post` makes of `residual`, or of `residual` itself.

    `mixing`: x, post, comb and the new residual, which is filled. `weights`: fn, scale, base, norm weight.
    """
    *lead, n, hidden = residual.shape
    device = residual.device
    logits = weights[2].numel()
    head = logits == n
    layer_input = torch.empty((*lead, hidden), dtype=out_dtype, device=device)
    new_post = torch.empty((0,) if head else (*lead, n), dtype=torch.float32, device=device)
    new_comb = torch.empty((0,) if head else (*lead, n, n), dtype=torch.float32, device=device)
    tokens = math.prod(lead)
    if tokens == 0:
        return layer_input, new_post, new_comb
    plan = DETERMINISTIC if deterministic else plan_for(tokens)
    with torch.cuda.device(device):
        residual = _ready(residual).view(tokens, n, hidden)
        fn, scale, base = (_ready(weight, _WEIGHTS) for weight in weights[:3])
        norm_weight = base if weights[3] is None else _ready(weights[3])
        if mixing is not None:
            mixing = _flat(mixing, tokens)
        parts = _mix(residual, mixing, mixing_dtype, fn, plan)
        assert parts is not None
        norm_type = "" if weights[3] is None else TYPES[norm_weight.dtype]
        types = (*(TYPES[t.dtype] for t in (mixing[3] if mixing else residual, scale, base)), norm_type)
        variant = _finish_variant(n, hidden, logits, parts[0].shape[0], (*types, TYPES[out_dtype]))
        outputs: tuple[Tensor, ...] = (layer_input.view(tokens, hidden),)
        if not head:
            outputs += (new_post.view(tokens, n), new_comb.view(tokens, n, n))
        numbers = (constants[0], constants[1], constants[4]) if head else (iters, *constants)
        _kernel(variant, device.index)(
            mixing[3] if mixing else residual, *parts, scale, base, norm_weight, *outputs, *numbers
        )
    return layer_input, new_post, new_comb


def _flat(mixing: tuple[Tensor, Tensor, Tensor, Tensor], tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, post, comb and the new residual ready for a kernel, with one dimension for the tokens."""
    x, post, comb, new_residual = mixing
    n, hidden = new_residual.shape[-2:]
    return (
        _ready(x).view(tokens, hidden),
        _ready(post, _FLOAT).view(tokens, n),
        _ready(comb, _FLOAT).view(tokens, n, n),
        new_residual.view(tokens, n, hidden),
    )


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
    constants = (rms_eps, pre_eps, sinkhorn_eps, post_mult, norm_eps)
    return _run(residual, None, (fn, scale, base, norm_weight), iters, constants, out_dtype, deterministic)


def mhc_head(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor | None,
    rms_eps: float,
    pre_eps: float,
    norm_eps: float,
    out_dtype: torch.dtype,
    deterministic: bool = False,
) -> Tensor:
    """`reference.mhc_head`; output contiguous."""
    weights = (fn, scale, base, norm_weight)
    return _run(residual, None, weights, 0, (rms_eps, pre_eps, 0.0, 0.0, norm_eps), out_dtype, deterministic)[0]


def mhc_post(
    x: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    residual_dtype: torch.dtype,
    mixing_dtype: torch.dtype | None = None,
) -> Tensor:
    """`reference.mhc_post`; output contiguous."""
    *lead, n, hidden = residual.shape
    new_residual = torch.empty(residual.shape, dtype=residual_dtype, device=residual.device)
    if (tokens := math.prod(lead)) > 0:
        with torch.cuda.device(residual.device):
            mixing = _flat((x, post, comb, new_residual), tokens)
            _mix(_ready(residual).view(tokens, n, hidden), mixing, mixing_dtype, None, plan_for(tokens))
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
    weights = (fn, scale, base, norm_weight)
    constants = (rms_eps, pre_eps, sinkhorn_eps, post_mult, norm_eps)
    mixing = (x, post, comb, new_residual)
    return new_residual, *_run(residual, mixing, weights, iters, constants, out_dtype, deterministic, mixing_dtype)
