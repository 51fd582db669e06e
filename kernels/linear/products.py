"""What the operators of linear layers are made of: rows, products, joined biases, and checks of the arguments."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "FLOAT8",
    "Scaled",
    "check",
    "check_dtypes",
    "check_scaled",
    "check_streams",
    "check_wide",
    "joined",
    "linear",
    "linear_wide",
    "multiply",
    "multiply_scaled",
    "multiply_scaled_together",
    "multiply_wide",
    "rows_of",
]

FLOAT8 = torch.float8_e4m3fn


def rows_of(x: Tensor) -> Tensor:
    """`[..., K]` as `[N, K]`, without a copy if possible."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def multiply(rows: Tensor, turned: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """`[N, M] = rows[N, K] @ turned[K, M] + bias[M]`, into `out` if given, which may be columns of a wider matrix."""
    if bias is None:
        return torch.mm(rows, turned, out=out)
    return torch.addmm(bias, rows, turned, out=out)


def multiply_wide(rows: Tensor, turned: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """`multiply` in bfloat16 or float16 into `out` in float32, in which the sums are not rounded."""
    if not rows.is_cuda:
        torch.mm(rows.float(), turned.float(), out=out)
    elif out.is_contiguous():
        torch.ops.aten.mm.dtype_out(rows, turned, torch.float32, out=out)
    else:
        out.copy_(torch.mm(rows, turned, out_dtype=torch.float32))
    return out if bias is None else out.add_(bias)


def linear_wide(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` with a result in float32."""
    rows = rows_of(x).to(weight.dtype).float()
    made = torch.nn.functional.linear(rows, weight.float(), None if bias is None else bias.float())
    return made.view(*x.shape[:-1], weight.shape[0])


@dataclass(frozen=True)
class Scaled:
    """What a float8 weight `[M, K]` is multiplied by, as `torch._scaled_mm` takes it.

    rows: `[N, K]`, float8, contiguous by rows. of_rows, of_weight: float32 scales, one number each, or `[N, 1]` and
    `[1, M]`. dtype: of the result. fast: whether the tensor cores may add up with fewer bits.
    """

    rows: Tensor
    of_rows: Tensor
    of_weight: Tensor
    dtype: torch.dtype
    fast: bool = False


def multiply_scaled(given: Scaled, turned: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """`[N, M] = of_rows * of_weight * (rows[N, K] @ turned[K, M]) + bias[M]`, into `out`, contiguous by rows."""
    if out.numel() == 0:
        return out
    product = functools.partial(
        torch._scaled_mm, given.rows, turned, scale_a=given.of_rows, scale_b=given.of_weight, bias=bias,
        out_dtype=given.dtype, use_fast_accum=given.fast,
    )  # fmt: skip
    by_row = given.of_rows.numel() > 1 or given.of_weight.numel() > 1
    if by_row and not out.is_contiguous() and not _cublas_scales_rows(out.get_device()):
        return out.copy_(product())
    return product(out=out)


def multiply_scaled_together(given: Sequence[Scaled], turned: Tensor, out: Tensor) -> Tensor:
    """`multiply_scaled` of weights that lie one behind the other, `turned[K, sum M_i]`, on one input, without biases.

    They have one scale together, or one for each of their rows.
    """
    first = given[0]
    if first.of_weight.numel() > 1:
        first = dataclasses.replace(first, of_weight=torch.cat([one.of_weight for one in given], dim=1))
    return multiply_scaled(first, turned, None, out)


@functools.cache
def _cublas_scales_rows(index: int) -> bool:
    """Whether `torch._scaled_mm` with a scale for each row is cuBLAS's on CUDA device `index` (-1: a CPU), which writes
    columns of a wider matrix; the kernel that it is elsewhere may not."""
    cuda = torch.version.cuda
    if index < 0 or cuda is None or tuple(map(int, cuda.split(".")[:2])) < (12, 9):
        return False
    return torch.cuda.get_device_capability(index)[0] == 9


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`[..., M]`: a linear layer that has gradients, of `x` cast to the dtype of the weight `[M, K]`."""
    rows = torch.nn.functional.linear(rows_of(x).to(weight.dtype), weight, bias)
    return rows.view(*x.shape[:-1], weight.shape[0])


def joined(biases: Sequence[Tensor | None], weights: Sequence[Tensor]) -> Tensor | None:
    """One bias `[sum M_i]` for all, with zeros where there is none; None where there is none at all.

    Added within the product and not to its result, which would round a low-precision sum twice.
    """
    if all(bias is None for bias in biases):
        return None
    missing = max((weight.shape[0] for weight, bias in zip(weights, biases, strict=True) if bias is None), default=0)
    zeros = weights[0].new_zeros(missing) if missing else None
    parts = []
    for weight, bias in zip(weights, biases, strict=True):
        if bias is not None:
            parts.append(bias)
        elif zeros is not None:
            parts.append(zeros[: weight.shape[0]])
    return torch.cat(parts)


def check(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
    """Raises RuntimeError where the lists differ in length or a shape or dtype does not fit."""
    if len(weights) != len(biases) or not weights:
        raise RuntimeError(
            f"A linear layer needs a weight, and a bias or None for it, and there were {len(weights)} weights "
            f"and {len(biases)} biases."
        )
    features = x.shape[-1] if x.dim() > 0 else None
    for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        shape = weight.shape
        if len(shape) != 2 or features is None or shape[1] != features:
            raise RuntimeError(
                f"Layer {layer} needs x [..., K] and a weight [M, K], and their shapes are {list(x.shape)} "
                f"and {list(weight.shape)}."
            )
        if bias is not None and (bias.dtype != weight.dtype or bias.dim() != 1 or bias.shape[0] != shape[0]):
            raise RuntimeError(
                f"The bias of layer {layer} must be [{shape[0]}] in {weight.dtype}, and it is "
                f"{list(bias.shape)} in {bias.dtype}."
            )


def check_streams(weights: Sequence[Tensor], streams: Sequence[int]) -> None:
    """Raises RuntimeError where a weight has no stream, or one that cannot be."""
    if len(streams) != len(weights) or min(streams) < 0:
        raise RuntimeError(
            f"Each of the {len(weights)} weights needs a stream of 0 or more, and the streams are {list(streams)}."
        )


def check_dtypes(weights: Sequence[Tensor]) -> None:
    """Raises RuntimeError where the weights differ in dtype."""
    dtypes = sorted({str(weight.dtype) for weight in weights})
    if len(dtypes) > 1:
        raise RuntimeError(f"Packed linear layers need weights of one dtype, and theirs are {', '.join(dtypes)}.")


def check_scaled(x: Tensor, given: Scaled, weight: Tensor, bias: Tensor | None) -> None:
    """Raises RuntimeError where `torch._scaled_mm` would not take this float8 weight `[M, K]` beside the input `x`."""
    rows, columns, features = math.prod(x.shape[:-1]), x.shape[-1], weight.shape[0]
    if weight.dim() != 2 or weight.shape[1] != columns or given.rows.shape != (rows, columns):
        raise RuntimeError(
            f"A float8 layer needs an input [{rows}, {columns}] and a weight [M, {columns}], and their shapes are "
            f"{list(given.rows.shape)} and {list(weight.shape)}."
        )
    if given.rows.dtype != FLOAT8 or weight.dtype != FLOAT8:
        raise RuntimeError(f"Input and weight must be {FLOAT8}, and they are {given.rows.dtype} and {weight.dtype}.")
    scales = given.of_rows, given.of_weight
    if any(scale.dtype != torch.float32 for scale in scales) or not (
        all(scale.numel() == 1 for scale in scales)
        or (given.of_rows.shape == (rows, 1) and given.of_weight.shape == (1, features))
    ):
        raise RuntimeError(
            f"Scales must be float32, one number each or [{rows}, 1] and [1, {features}], and they are "
            f"{list(given.of_rows.shape)} in {given.of_rows.dtype} and {list(given.of_weight.shape)} in "
            f"{given.of_weight.dtype}."
        )
    if not given.dtype.is_floating_point:
        raise RuntimeError(
            f"The result of a float8 layer must be a floating-point number, and {given.dtype} was asked for."
        )
    if bias is not None and (bias.dtype != given.dtype or bias.shape != (features,)):
        raise RuntimeError(
            f"The bias must be [{features}] in {given.dtype}, and it is {list(bias.shape)} in {bias.dtype}."
        )


def check_wide(weights: Sequence[Tensor], wide: Sequence[bool]) -> None:
    """Raises RuntimeError where `wide`, if there is one, does not fit the weights."""
    if wide and len(wide) != len(weights):
        raise RuntimeError(f"There are {len(weights)} weights, and {len(wide)} say whether their result is float32.")
    for weight, is_wide in zip(weights, wide, strict=False):
        if is_wide and weight.dtype not in (torch.bfloat16, torch.float16):
            raise RuntimeError(f"A result in float32 needs a weight in bfloat16 or float16, and one is {weight.dtype}.")
