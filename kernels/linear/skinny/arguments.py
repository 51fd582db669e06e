"""What a launch of the skinny product is given: the structures of `skinny.cuh`, and what may be put into them."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4_compile.kernels.linear.products import Scaled
from dsv4_compile.kernels.linear.skinny.plans import MOST_LINEARS, Variant, tiles_of

__all__ = ["ARGUMENTS", "LOWS", "aligned", "by_input", "groups_of", "is_aligned", "pack_arguments", "pack_mixed"]

# `struct Arguments` of skinny.cuh.
ARGUMENTS = struct.Struct("=" + MOST_LINEARS * "5q 3i 4x" + "4q 4i")
_NOWHERE = (0, 0, 0, 0, 0, 0, 2**31 - 1, 0)
# What `struct MixedArguments` has besides.
LOWS = struct.Struct("=" + MOST_LINEARS * "4q 2i")
_NOT_LOW = (0, 0, 0, 0, 0, 0)
_ALIGNMENT = 16  # bytes of a copy


def is_aligned(matrix: Tensor) -> bool:
    """Whether each row of `[M, K]` is contiguous and begins at a multiple of 16 bytes."""
    rows, columns = matrix.shape
    size = matrix.element_size()
    return (
        (columns <= 1 or matrix.stride(1) == 1)
        and (rows <= 1 or matrix.stride(0) * size % _ALIGNMENT == 0)
        and matrix.data_ptr() % _ALIGNMENT == 0
    )


def by_input(features: Sequence[int], scaled: Sequence[Scaled]) -> list[list[int]]:
    """The float8 weights that have rows, together those of one input."""
    found: dict[tuple[int, int], list[int]] = {}
    for i, given in enumerate(scaled, len(features) - len(scaled)):
        if features[i]:
            found.setdefault((given.rows.data_ptr(), given.rows.stride(0)), []).append(i)
    return list(found.values())


def aligned(scaled: Sequence[Scaled]) -> list[Scaled]:
    """The same inputs, those that the kernel cannot read as a copy; contiguous scales."""
    copies: dict[tuple[int, int], Tensor] = {}
    found = []
    for given in scaled:
        rows = given.rows
        if not is_aligned(rows):
            key = rows.data_ptr(), rows.stride(0)
            if key not in copies:
                copies[key] = rows.clone(memory_format=torch.contiguous_format)
            rows = copies[key]
        of_rows, of_weight = given.of_rows.contiguous(), given.of_weight.contiguous()
        found.append(dataclasses.replace(given, rows=rows, of_rows=of_rows, of_weight=of_weight))
    return found


def groups_of(variant: Variant, weights: Sequence[Tensor], scaled: Sequence[Scaled] = ()) -> int:
    """Groups of blocks of a launch: a group has rows that are multiplied by one input."""
    features = [weight.shape[0] for weight in weights]
    plain = features[: len(features) - len(scaled)]
    inputs = [plain, *([features[i] for i in members] for members in by_input(features, scaled))]
    return sum(variant.groups(tiles_of(rows)) for rows in inputs)


def pack_arguments(
    rows: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    outputs: Tensor | Sequence[Tensor],
    workspace: int,
    counters: int,
) -> bytes:
    """`struct Arguments` for these tensors; see `multiply`. Weights without rows are left out."""
    values: list[int] = []
    tiles = count = 0
    together = isinstance(outputs, Tensor)
    one = outputs if isinstance(outputs, Tensor) else outputs[0]
    place, stride, size = one.data_ptr(), one.stride(0), one.element_size()
    wide = one.dtype is not rows.dtype
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        features = weight.shape[0]
        if not together:
            one = outputs[i]
            place, stride, wide = one.data_ptr(), one.stride(0), one.dtype is not rows.dtype
        if features:
            values += (
                weight.data_ptr(), 0 if bias is None else bias.data_ptr(), place, weight.stride(0), stride, features,
                tiles, wide,
            )  # fmt: skip
            tiles += -(-features // 16)
            count += 1
        place += size * features
    values += _NOWHERE * (MOST_LINEARS - count)
    tokens, columns = rows.shape
    return ARGUMENTS.pack(*values, rows.data_ptr(), rows.stride(0), workspace, counters, tokens, columns, tiles, 1)


def pack_mixed(
    variant: Variant,
    rows: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    outputs: Sequence[Tensor],
    workspace: int,
    counters: int,
    scaled: Sequence[Scaled],
) -> bytes:
    """`struct MixedArguments` for these tensors; see `multiply`. float8 matrices are matrices of pairs."""
    features = [weight.shape[0] for weight in weights]
    plain = len(weights) - len(scaled)
    values: list[int] = []
    lows: list[int] = []
    tiles = 0
    for members in ([i for i in range(plain) if features[i]], *by_input(features, scaled)):
        tiles = -(-tiles // variant.block_tiles) * variant.block_tiles  # another input, another group
        for i in members:
            weight, bias, out, pairs = weights[i], biases[i], outputs[i], 1 + (i >= plain)
            values += (
                weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(), weight.stride(0) // pairs,
                out.stride(0), features[i], tiles, out.dtype is not rows.dtype,
            )  # fmt: skip
            tiles += -(-features[i] // 16)
            lows += _NOT_LOW if i < plain else _low(scaled[i - plain])
    count = len(lows) // len(_NOT_LOW)
    values += _NOWHERE * (MOST_LINEARS - count)
    lows += _NOT_LOW * (MOST_LINEARS - count)
    tokens, columns = rows.shape
    stride = _stride(-(-tiles // variant.block_tiles))
    given = rows.data_ptr(), rows.stride(0), workspace, counters, tokens, columns, tiles, stride
    return ARGUMENTS.pack(*values, *given) + LOWS.pack(*lows)


def _low(given: Scaled) -> tuple[int, ...]:
    """`struct Low`."""
    return (
        given.rows.data_ptr(),
        given.rows.stride(0) // 2,
        given.of_rows.data_ptr(),
        given.of_weight.data_ptr(),
        given.of_rows.numel() > 1,
        given.of_weight.numel() > 1,
    )


def _stride(groups: int) -> int:
    """From a group of blocks to the one that starts after it, so that groups of all kinds start, and end, together.

    About the golden section of their count, which spreads any range of them evenly; all are reached.
    """
    near = round(groups * 0.618)
    return next((stride for stride in range(near, groups) if math.gcd(stride, groups) == 1), 1)
