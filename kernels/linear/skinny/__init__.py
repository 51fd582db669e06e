"""Linear layers of one input with at most 64 tokens, in one launch that reads weights wherever they lie.

    y_i[N, M_i] = x[N, K] @ W_i[M_i, K]^T + b_i        N <= 64, up to 8 weights of bfloat16 or float16
    y_j[N, M_j] = s_j * t_j * (x_j[N, K] @ W_j[M_j, K]^T) + b_j      of them float8 (e4m3) with inputs of their own

Such a product takes as long as its weights take to come from memory, so everything serves that (`skinny.cuh`):

- The rows of all weights are cut into tiles of 16, and groups of tiles and parts of the columns are dealt out so that
  every block has the same work and all blocks run at once (`plans.fitted`).
- A block keeps several stages of columns under way from memory to shared memory (`cp.async`), of its rows of the
  weights and of the tokens; tensor cores multiply what has arrived: 16 rows of weights by 8 tokens at a time.
- Blocks that share their rows add up through each other's shared memory, if they are a cluster, else the last of them
  to finish adds up what all have written. Nobody waits for a block that may not be running.
- The next launch begins while the one before ends: the first stage of its weights is brought into L2 by then, and read
  when all that was to write them has ended.

- float8 weights are copied as they are, and become float16, which has all their numbers, in front of the tensor cores.
  That is what Hopper does with `mma` of float8 as well, once for each product instead of once for each fragment.

Numbers: float32 sums, always in the same order: results of one plan do not depend on the run, nor on the other tokens.
Which plan is the fastest, and whether one is faster than cuBLAS, is measured (`linear/tuning.py`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsv4_compile.kernels.choice import replays
from dsv4_compile.kernels.choice.chooser import warn
from dsv4_compile.kernels.cuda.code import loaded, machine_code, texts
from dsv4_compile.kernels.cuda.kept import COUNTERS
from dsv4_compile.kernels.cuda.launch import enqueue
from dsv4_compile.kernels.driver import bindings
from dsv4_compile.kernels.linear import products
from dsv4_compile.kernels.linear.products import Scaled
from dsv4_compile.kernels.linear.skinny.arguments import (
    ARGUMENTS,
    LOWS,
    aligned,
    by_input,
    groups_of,
    is_aligned,
    pack_arguments,
    pack_mixed,
)
from dsv4_compile.kernels.linear.skinny.plans import (
    FLOAT8,
    MOST_LINEARS,
    MOST_TOKENS,
    PLANS,
    WARPS,
    Plan,
    Variant,
    fitted,
)
from dsv4_compile.kernels.linear.skinny.prepared import Made, Prepared, keep

if TYPE_CHECKING:
    from dsv4_compile.kernels.linear.strategies import Card, Problem

__all__ = [
    "ARGUMENTS",
    "FLOAT8",
    "LOWS",
    "PLANS",
    "SOURCE",
    "TYPES",
    "Made",
    "Plan",
    "Prepared",
    "groups_of",
    "is_aligned",
    "joined_type",
    "keep_launch",
    "multiply",
    "pack_arguments",
    "pack_mixed",
    "prepare",
    "serves",
    "takes",
    "unavailable",
]

SOURCE = Path(__file__).parent / "skinny.cu"
TYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}


def takes(dtype: torch.dtype) -> bool:
    """Whether weights of `dtype` are multiplied here."""
    return dtype in TYPES


def joined_type(problem: Problem, member: int) -> torch.dtype | None:
    """The dtype of the launch that multiplies the weight of `member`, None where it is left to torch.

    A float8 weight joins the first of `TYPES` among the others, if its result is of that dtype or float32.
    """
    beside = member - problem.plain
    if beside < 0:
        return problem.dtypes[member] if takes(problem.dtypes[member]) else None
    first = next(filter(takes, problem.dtypes[: problem.plain]), None)
    dtype = problem.scaled[beside].dtype
    if problem.card.capability < FLOAT8 or problem.columns % 16 or first is None:
        return None
    return first if dtype == first or (dtype == torch.float32 and not problem.biased[member]) else None


def serves(plan: Plan, problem: Problem, tokens: float) -> bool:
    """Whether `plan` can run `problem` with up to `tokens` rows: the members whose dtype it `takes`, in one launch."""
    return bool(problem.card.capability) and unavailable() is None and _can(plan, problem, tokens)


@functools.lru_cache(maxsize=4096)
def _can(plan: Plan, problem: Problem, tokens: float) -> bool:
    if not problem.aligned or problem.columns % 8:
        return False
    needed = _variants(plan, problem, tokens)
    return bool(needed) and None not in needed


def _variants(plan: Plan, problem: Problem, tokens: float) -> list[Variant | None]:
    """The kernel for the weights of each dtype, or None where there is none."""
    found = []
    types = [joined_type(problem, i) for i in range(len(problem.features))]
    for dtype in dict.fromkeys(one for one in types if one is not None):
        members = [i for i, one in enumerate(types) if one == dtype and problem.features[i]]
        if not members:
            continue
        counts = tuple(problem.features[i] for i in members if i < problem.plain)
        inputs: dict[int, list[int]] = {}
        for i in members:
            if i >= problem.plain:
                inputs.setdefault(problem.scaled[i - problem.plain].input, []).append(problem.features[i])
        low = tuple(map(tuple, inputs.values()))
        fits = len(members) <= MOST_LINEARS and bool(counts)
        found.append(_variant(plan, dtype, tokens, counts, problem.columns, problem.card, low) if fits else None)
    return found


def _variant(
    plan: Plan,
    dtype: torch.dtype,
    tokens: float,
    features: tuple[int, ...],
    columns: int,
    card: Card,
    low: tuple[tuple[int, ...], ...] = (),
) -> Variant | None:
    return fitted(plan, TYPES[dtype], tokens, features, columns, card.capability, card.multiprocessors, low)


def prepare(problem: Problem, tokens: float, capability: tuple[int, int]) -> None:
    """Compiles every kernel that a measurement of `problem` needs, several at once. Failures show in use."""
    wanted = [
        variant
        for plan in PLANS.values()
        if serves(plan, problem, tokens)
        for variant in _variants(plan, problem, tokens)
    ]

    def attempt(variant: Variant | None) -> None:
        if variant is not None:
            with contextlib.suppress(Exception):
                machine_code("skinny", sources(), variant.macros, capability)

    if wanted:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(attempt, dict.fromkeys(wanted)))


# What the family was found to be unable to do here, as a sentence.
_broken: list[str] = []


@functools.cache
def _bindings_missing() -> str | None:
    if torch.version.hip is not None:
        return "it is CUDA C++ and this torch is built for ROCm"
    try:
        bindings()
    except Exception as error:
        return f"NVRTC could not be loaded ({type(error).__name__}: {error})"
    return None


def unavailable() -> str | None:
    """Why nothing runs here, or None."""
    return _broken[0] if _broken else _bindings_missing()


def multiply(
    plan: Plan,
    rows: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    outputs: Tensor | Sequence[Tensor],
    known: bool = False,
    scaled: Sequence[Scaled] = (),
) -> None:
    """`outputs[i][N, M_i] = rows[N, K] @ weights[i][M_i, K]^T + biases[i]`, in one launch where that is possible.

    Args:
        rows: of the dtype of the weights, any strides.
        weights: of one dtype, which is one of `TYPES`; contiguous by rows at addresses that are multiples of 16 bytes.
        biases: `[M_i]` in the dtype of the weights, or None.
        outputs: of the dtype of the weights or float32, contiguous by rows. They may be columns of a wider matrix. Or
            one matrix `[N, sum M_i]`, in which they lie side by side: that costs the host less.
        known: the weights are as they must be, which need not be looked at again (`Problem.aligned`).
        scaled: what the last weights, which are float8, are multiplied by instead of `rows`; `outputs` is a sequence
            then.
    """
    tokens, columns = rows.shape
    features = tuple(weight.shape[0] for weight in weights)
    count = len(features) - features.count(0)
    if tokens == 0 or count == 0:
        return
    parts = [outputs] if isinstance(outputs, Tensor) else outputs
    reason = _refusal(rows, count, [] if known else weights, parts, scaled)
    if reason is None:
        index = rows.device.index
        low = tuple(tuple(features[i] for i in members) for members in by_input(features, scaled))
        variant = _chosen(plan, rows.dtype, tokens, features[: len(features) - len(scaled)], columns, index, low)
        function = None if variant is None else _kernel(variant, index)
        if variant is not None and function is not None:
            _launch(variant, function, rows, weights, biases, outputs, scaled)
            return
        reason = unavailable()
    warn(f"The skinny product is made by torch: {reason or 'no plan fits these shapes on this card'}")
    parts = outputs.split(features, dim=1) if isinstance(outputs, Tensor) else outputs
    _by_torch(rows, weights, biases, parts, scaled)


def _by_torch(
    rows: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    outputs: Sequence[Tensor],
    scaled: Sequence[Scaled],
) -> None:
    given = [*[None] * (len(weights) - len(scaled)), *scaled]
    for weight, bias, output, beside in zip(weights, biases, outputs, given, strict=True):
        if beside is not None:
            products.multiply_scaled(beside, weight.t(), bias, output)
        elif output.dtype == weight.dtype:
            products.multiply(rows, weight.t(), bias, output)
        else:
            output.copy_(products.multiply(rows.to(output.dtype), weight.to(output.dtype).t(), None))
            if bias is not None:
                output.add_(bias)


def _refusal(
    rows: Tensor, count: int, weights: Sequence[Tensor], outputs: Sequence[Tensor], scaled: Sequence[Scaled] = ()
) -> str | None:
    """Why the kernel must not be given these tensors (`count` weights that have rows), or None."""
    if not rows.is_cuda:
        return f"it runs on CUDA and the tensors are on {rows.device.type}"
    if rows.dtype not in TYPES or rows.shape[1] % 8 or rows.shape[0] > MOST_TOKENS or count > MOST_LINEARS:
        return f"it is not written for {count} weights of {rows.dtype} and an input {list(rows.shape)}"
    if scaled and rows.shape[1] % 16:
        return f"it is not written for float8 weights of {rows.shape[1]} columns"
    for i, weight in enumerate(weights, len(scaled) - len(weights)):
        if weight.dtype != (rows.dtype if i < 0 else products.FLOAT8) or not is_aligned(weight):
            return "a weight is of another dtype, not contiguous by rows or does not begin at a multiple of 16 bytes"
    for output in outputs:
        if output.dtype not in (rows.dtype, torch.float32) or (output.stride(1) != 1 and output.shape[1] > 1):
            return "an output is of another dtype or not contiguous by rows"
    return None


@functools.lru_cache(maxsize=4096)
def _chosen(
    plan: Plan,
    dtype: torch.dtype,
    tokens: int,
    features: tuple[int, ...],
    columns: int,
    index: int,
    low: tuple[tuple[int, ...], ...] = (),
) -> Variant | None:
    from dsv4_compile.kernels.linear.tuning import card_of

    return _variant(plan, dtype, tokens, tuple(count for count in features if count), columns, card_of(index), low)


def keep_launch(plan: Plan, call: Made) -> Prepared | None:
    """A call that `multiply` has made, as a launch for the next ones like it; None where there is none."""
    rows, features = call.rows, tuple(weight.shape[0] for weight in call.weights)
    if not rows.is_cuda or unavailable() is not None or not any(features) or not rows.shape[0]:
        return None
    index = rows.device.index
    variant = _chosen(plan, rows.dtype, rows.shape[0], features, rows.shape[1], index)
    function = None if variant is None else _kernel(variant, index)
    return None if variant is None or function is None else keep(variant, function, call)


# -------------------------------------------------------------------------------------------------------- the kernel

_lock = threading.Lock()
_kernels: dict[tuple[Variant, int], Any] = {}


@functools.cache
def sources() -> dict[str, bytes]:
    """skinny.cu and the files it includes, by name."""
    return texts(SOURCE)


def _kernel(variant: Variant, device: int) -> Any:
    """The handle to launch `variant` on CUDA device number `device`, or None where there can be none."""
    key = variant, device
    known = _kernels.get(key)
    if known is not None or unavailable() is not None:
        return known
    with _lock, contextlib.ExitStack() as stack:
        known = _kernels.get(key)
        if known is None:
            try:
                code = machine_code("skinny", sources(), variant.macros, torch.cuda.get_device_capability(device))
                stack.enter_context(torch.cuda.device(device))
                torch.cuda.is_current_stream_capturing()  # makes the device's context current in this thread
                replays.beside_captures(stack)
                known = _kernels[key] = loaded(code, "skinny", variant.shared_bytes)
            except Exception as error:
                _broken.append(f"its kernel could not be made ({type(error).__name__}: {error})")
    return known


def _launch(
    variant: Variant,
    function: Any,
    rows: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    outputs: Tensor | Sequence[Tensor],
    scaled: Sequence[Scaled],
) -> None:
    if not is_aligned(rows):
        rows = rows.clone(memory_format=torch.contiguous_format)
    if scaled:
        scaled = aligned(scaled)
    index = rows.device.index
    groups = groups_of(variant, weights, scaled)
    with torch.cuda.device(index):
        workspace = counters = 0
        partials = None
        if variant.partials:
            partials = torch.empty(groups * variant.partials, dtype=torch.float32, device=rows.device)
            workspace, counters = partials.data_ptr(), COUNTERS.take(groups, index)
        if scaled:
            assert not isinstance(outputs, Tensor)
            arguments = pack_mixed(variant, rows, weights, biases, outputs, workspace, counters, scaled)
        else:
            arguments = pack_arguments(rows, weights, biases, outputs, workspace, counters)
        stream = torch._C._cuda_getCurrentRawStream(index)
        cluster = variant.splits if variant.plan.cluster else 1
        blocks = groups * variant.splits
        enqueue(function, index, stream, arguments, blocks, 32 * WARPS, variant.shared_bytes, cluster)
