"""What the operators of linear layers are made of: rows, products, joined biases, and checks of the arguments."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["check", "check_dtypes", "check_streams", "joined", "linear", "multiply", "rows_of"]


def rows_of(x: Tensor) -> Tensor:
    """`[..., K]` as `[N, K]`, without a copy if possible."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def multiply(rows: Tensor, turned: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """`[N, M] = rows[N, K] @ turned[K, M] + bias[M]`, into `out` if given, which may be columns of a wider matrix."""
    if bias is None:
        return torch.mm(rows, turned, out=out)
    return torch.addmm(bias, rows, turned, out=out)


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
