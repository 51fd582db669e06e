"""mHC on NVIDIA GPUs in one launch of CUDA C++: `mhc.cu`, compiled by NVRTC for each plan that is used.

The blocks of a launch come in tiles of 16 tokens or more. For each tile there are

- producers, one for each slice of the hidden axis. They mix the slice's columns (`post`), and from the rows still in
  registers compute the slice's part of the dot products with `fn` and of the sum of squares, which go to a workspace;
- consumers, which wait until the producers of their tile have arrived at a counter. One for each token collapses the
  streams and normalises the row; one for a few tokens computes `post` and `comb` (Sinkhorn in the registers of one
  thread), which the collapse does not need.

Producers never wait and have the lower block numbers, so consumers cannot keep them from running; where a block is a
producer first and a consumer then (`combined`), it waits for blocks with lower numbers only. A counter is left as it
was found, at zero (`share_of` in launch.cuh says how): no launch clears anything, and nothing is added atomically but
arrivals, so results are deterministic.

Few tokens: `fn` (1.6 MB at hidden 4096) is read once for 16 of them, through all multiprocessors, and a collapsing
block mixes its token's streams itself before it waits (`ahead`), so that only the sums are left to do afterwards. These
say themselves that they are there, and no counter is needed (`signal`; launch.cuh). Many
tokens: producers write the new residual, and the consumers of `lag` tiles before read it from L2, so that about
`20 * D` bytes a token go through memory.

Numbers: float32 throughout. The dot products run on tensor cores in tf32, where a bfloat16 or float16 residual is exact
and `fn` is the sum of two tf32 numbers: an error of about 2^-22 of each product. A float32 residual is such a sum as
well, and three of the four products are added. A row's result depends on the other rows only through the plan, which
follows the token count (`tuning.py`); with one plan for all (`deterministic`) it does not depend on them at all.

Serves float32, bfloat16 and float16 residuals of 2 to 8 streams whose hidden size is a multiple of 8 and at most
`MAX_HIDDEN`, on compute capability 8.0 and newer. Shapes and formulas: `reference.py`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from dsv4_compile.kernels.cuda.kept import COUNTERS, SUMS
from dsv4_compile.kernels.driver import bindings, check
from dsv4_compile.kernels.mhc.cuda import tuning
from dsv4_compile.kernels.mhc.cuda.compilation import NORMAL_EPS, TYPES, Variant, kernel, token_bytes
from dsv4_compile.kernels.mhc.cuda.launch import ARGUMENTS, enqueue
from dsv4_compile.kernels.mhc.cuda.plans import (
    BUCKETS,
    DETERMINISTIC,
    HOPPER_SHARED_BYTES,
    PLANS,
    WARPS,
    Card,
    Plan,
    Problem,
    counts_of,
    fitting,
)
from dsv4_compile.kernels.mhc.cuda.tuning import choices
from dsv4_compile.kernels.mhc.reference import rounded_dtype

__all__ = [
    "PLANS",
    "Plan",
    "choices",
    "mhc_head",
    "mhc_post",
    "mhc_post_pre",
    "mhc_pre",
    "reachable",
    "refusal",
    "warmup",
]

STREAMS = range(2, 9)
# A consumer holds a row of each stream in registers.
MAX_HIDDEN = 8192
CAPABILITY = (8, 0)  # tf32


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
        return "it is CUDA C++ and this torch is built for ROCm"
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} has no tf32 tensor cores"
    try:
        bindings()
    except Exception as error:
        return f"NVRTC could not be loaded ({type(error).__name__}: {error})"
    return None


def _ready(tensor: Tensor, types: tuple[torch.dtype, ...] = tuple(TYPES)) -> Tensor:
    """`tensor` contiguous, on a 16-byte boundary and in one of `types`."""
    if tensor.dtype not in types:
        tensor = tensor.to(torch.float32)
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


_FLOAT = (torch.float32,)


# Where no device is named, as when kernels are compiled without one.
HOPPER = Card("NVIDIA H100 80GB HBM3", 132, HOPPER_SHARED_BYTES)


@functools.cache
def _card(index: int | None) -> Card:
    """CUDA device `index`, or an H100."""
    if index is None:
        return HOPPER
    driver, _ = bindings()
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    shared_bytes = check(driver.cuDeviceGetAttribute(attribute, check(driver.cuDeviceGet(index))))
    properties = torch.cuda.get_device_properties(index)
    return Card(properties.name, properties.multi_processor_count, shared_bytes)


# What the calls so far had in common with calls of other token counts: all arguments of `_variant` but the first.
_seen: set[tuple[Any, ...]] = set()


class Provisional(Exception):
    """The plan is not chosen for good, because the stream is being captured; `variant` serves meanwhile."""

    def __init__(self, variant: Variant):
        super().__init__(variant)
        self.variant = variant


@functools.lru_cache(maxsize=16384)
def _variant(tokens: int, *common: Any) -> Variant:
    """The kernel for `tokens` rows, after a search if need be; see `_chosen` for the other arguments.

    What is remembered stays right: a plan that is chosen for good does not change, another one raises Provisional.
    """
    _seen.add(common)
    settled = _settle(tokens, *common)
    variant = _chosen(tokens, *common)
    if not settled:
        raise Provisional(variant)
    return variant


def _settle(tokens: int, plan: Plan | None, *common: Any) -> bool:
    """Choose the plan for `tokens` rows, unless it is given. False where that has to wait."""
    if plan is not None:
        return True
    return tuning.settle(_problem(*common), tokens, lambda plan: _fitted(plan, *common), common[-1])


def _chosen(tokens: int, plan: Plan | None, *common: Any) -> Variant:
    """The kernel for `tokens` rows with the plans now in force; see `_fitted` for the other arguments."""
    return _fitted(plan or tuning.plan(_problem(*common), tokens), *common)


def _problem(
    n: int,
    hidden: int,
    logits: int,
    iters: int,
    dtypes: tuple[torch.dtype, ...],
    has_post: bool,
    has_norm: bool,
    denormal: bool,
    index: int | None,
) -> Problem:
    in_memory = tuple(TYPES[dtype] for dtype in dtypes[:-1])  # what the weights are rounded to costs nothing
    return Problem(_card(index), n, hidden, logits, in_memory, has_post)


def _fitted(
    plan: Plan,
    n: int,
    hidden: int,
    logits: int,
    iters: int,
    dtypes: tuple[torch.dtype, ...],
    has_post: bool,
    has_norm: bool,
    denormal: bool,
    index: int | None,
) -> Variant:
    types = tuple(TYPES[dtype] for dtype in dtypes)
    plan = fitting(plan, n, hidden, logits, token_bytes(n, types, has_post), _card(index).shared_bytes)
    return Variant(plan, n, hidden, logits, iters, types, has_post, has_norm, denormal)


def _counts(max_tokens: int) -> list[int]:
    """A token count of every bucket up to `max_tokens`."""
    return [counts_of(limit)[0] for limit in BUCKETS if counts_of(limit)[0] <= max(max_tokens, 1)]


def reachable(max_tokens: int) -> list[tuple[Variant, int]]:
    """Every kernel, with the device's index, that calls like those so far can ask for with 1 to `max_tokens` tokens."""
    counts = _counts(max_tokens)
    return list(dict.fromkeys((_chosen(count, *common), common[-1]) for common in list(_seen) for count in counts))


def warmup(max_tokens: int) -> int:
    """Choose the plans up to `max_tokens`, by a search if need be, then compile and load what `reachable` lists.

    After that serving neither searches nor compiles. To be called after one forward pass.

    Returns the number of kernels.
    """
    for common in list(_seen):
        for count in _counts(max_tokens):
            _settle(count, *common)
    kernels = reachable(max_tokens)
    for variant, index in kernels:
        with torch.cuda.device(index):
            kernel(variant, index)
    return len(kernels)


def _run(
    residual: Tensor,
    mixing: tuple[Tensor, Tensor, Tensor, Tensor, torch.dtype | None] | None,
    weights: tuple[Tensor, Tensor, Tensor, Tensor | None],
    iters: int,
    constants: tuple[float, float, float, float, float],
    out_dtype: torch.dtype,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`pre` of the streams that `post` makes of `residual`, or of `residual` itself.

    `mixing`: x, post, comb, the new residual, which is filled, and the dtype that post and comb are rounded to.
    `weights`: fn, scale, base, norm weight.
    """
    *lead, n, hidden = residual.shape
    device = residual.device
    fn, scale, base, norm_weight = weights
    logits = base.numel()
    head = logits == n  # nothing expands the row again: no `post`, no `comb`
    layer_input = torch.empty((*lead, hidden), dtype=out_dtype, device=device)
    new_post = torch.empty((0,) if head else (*lead, n), dtype=torch.float32, device=device)
    new_comb = torch.empty((0,) if head else (*lead, n, n), dtype=torch.float32, device=device)
    tokens = math.prod(lead)
    if tokens == 0:
        return layer_input, new_post, new_comb
    residual, fn = _ready(residual), _ready(fn)
    scale, base = _ready(scale), _ready(base)
    if scale.dtype is not base.dtype:
        scale, base = scale.float(), base.float()
    norm_weight = None if norm_weight is None else _ready(norm_weight)
    x = old_post = old_comb = new_residual = mixing_dtype = None
    if mixing is not None:
        x, old_post, old_comb, new_residual, mixing_dtype = mixing
        x, old_post, old_comb = _ready(x), _ready(old_post, _FLOAT), _ready(old_comb, _FLOAT)
    dtypes = (
        residual.dtype,
        residual.dtype if new_residual is None else new_residual.dtype,
        residual.dtype if x is None else x.dtype,
        fn.dtype,
        base.dtype,
        torch.float32 if norm_weight is None else norm_weight.dtype,
        out_dtype,
        rounded_dtype(mixing_dtype),
    )
    denormal = constants[2] < NORMAL_EPS
    index, has_norm = device.index, norm_weight is not None
    try:
        variant = _variant(tokens, plan, n, hidden, logits, iters, dtypes, x is not None, has_norm, denormal, index)
    except Provisional as default:
        variant = default.variant
    blocks, tiles, sums = variant.sizes(tokens)
    with torch.cuda.device(index):
        if variant.plan.signal:
            workspace, counter = SUMS.take(sums, index), 0
        else:
            partials = torch.empty(sums, dtype=torch.float32, device=device)
            workspace, counter = partials.data_ptr(), COUNTERS.take(tiles, index)
        tensors = (
            x, residual, old_post, old_comb, fn, scale, base, norm_weight, new_residual, layer_input, new_post,
            new_comb,
        )  # fmt: skip
        addresses = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
        packed = ARGUMENTS.pack(*addresses, workspace, counter, tokens, *constants)
        enqueue(variant, index, torch._C._cuda_getCurrentRawStream(index), blocks, packed)
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
    constants = (rms_eps, pre_eps, sinkhorn_eps, post_mult, norm_eps)
    plan = DETERMINISTIC if deterministic else None
    return _run(residual, None, (fn, scale, base, norm_weight), iters, constants, out_dtype, plan)


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
    plan = DETERMINISTIC if deterministic else None
    return _run(residual, None, weights, 0, (rms_eps, pre_eps, 1.0, 0.0, norm_eps), out_dtype, plan)[0]


def mhc_post(
    x: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    residual_dtype: torch.dtype,
    mixing_dtype: torch.dtype | None = None,
) -> Tensor:
    """`reference.mhc_post`; output contiguous."""
    n, hidden = residual.shape[-2:]
    new_residual = torch.empty(residual.shape, dtype=residual_dtype, device=residual.device)
    tokens = math.prod(residual.shape[:-2])
    if tokens == 0:
        return new_residual
    x, residual = _ready(x), _ready(residual)
    post, comb = _ready(post, _FLOAT), _ready(comb, _FLOAT)
    dtypes = (residual.dtype, residual_dtype, x.dtype, *_FLOAT * 4, rounded_dtype(mixing_dtype))
    types = tuple(TYPES[dtype] for dtype in dtypes)
    variant = Variant(PLANS[0][1], n, hidden, n, 0, types, True, False, False, "mhc_post")
    index = residual.device.index
    tensors: list[Tensor | None] = [None] * 14  # without counters
    tensors[:4] = x, residual, post, comb
    tensors[8] = new_residual
    addresses = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    blocks = tokens * -(-hidden // (WARPS * 32 * 8))
    with torch.cuda.device(index):
        stream = torch._C._cuda_getCurrentRawStream(index)
        enqueue(variant, index, stream, blocks, ARGUMENTS.pack(*addresses, tokens, *[0.0] * 5))
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
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.mhc_post_pre`; outputs contiguous. `plan` is for measurements and tests."""
    plan = DETERMINISTIC if deterministic else plan
    new_residual = torch.empty(residual.shape, dtype=residual_dtype, device=residual.device)
    constants = (rms_eps, pre_eps, sinkhorn_eps, post_mult, norm_eps)
    weights = (fn, scale, base, norm_weight)
    mixing = (x, post, comb, new_residual, mixing_dtype)
    return new_residual, *_run(residual, mixing, weights, iters, constants, out_dtype, plan)
