"""What `dsv4::mixed_linear` does in a call: `grouped.py` for a group that has float8 weights besides.

The weights of the group are those of `dsv4::grouped_linear`, then the float8 ones: so the ways, their measurement and
what is remembered are the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4_compile.kernels.linear import grouped, products
from dsv4_compile.kernels.linear.buckets import LIMITS
from dsv4_compile.kernels.linear.products import Scaled
from dsv4_compile.kernels.linear.strategies import Low, Plan

__all__ = ["composed", "fake", "run", "run_as"]


def run(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    streams: list[int],
    inputs: list[Tensor],
    low_weights: list[Tensor],
    low_biases: list[Tensor | None],
    input_scales: list[Tensor],
    weight_scales: list[Tensor],
    dtype: torch.dtype,
    fast: bool = False,
    max_tokens: int = 1024,
    pack: bool = True,
    wide: Sequence[bool] = (),
) -> list[Tensor]:
    """The operator, see `operators.mixed_linear`."""
    scaled = _scaled(inputs, input_scales, weight_scales, dtype, fast)
    every, all_biases = [*weights, *low_weights], [*biases, *low_biases]
    _check(x, weights, biases, streams, scaled, low_weights, low_biases)
    rows, lows = products.rows_of(x), _lows(scaled)
    tokens = rows.shape[0]
    key = (
        bisect_left(LIMITS, tokens), tokens <= max_tokens, rows.dtype, rows.is_contiguous(), pack, *streams, None,
        *(bias is None for bias in all_biases), lows, *wide,
    )  # fmt: skip

    def chosen(group: grouped.Group) -> Plan:
        known = group.plans.get(key)
        if known is not None:
            return known
        products.check_wide(weights, wide)
        return grouped.choose(group, key, rows, all_biases, streams, max_tokens, pack, wide, lows)

    plan = chosen(grouped.known_as(every))
    try:
        operands = plan.operands(every)
    except RuntimeError:
        # The addresses are those of a run, and other storages lie there now.
        plan = chosen(grouped.known_as(every, anew=True))
        operands = plan.operands(every)
    return grouped.run_plan(plan, operands, x, rows, every, all_biases, scaled)


def run_as(
    name: str,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    streams: Sequence[int],
    scaled: Sequence[Scaled],
    wide: Sequence[bool] = (),
) -> list[Tensor]:
    """`grouped.run_as` with the float8 weights last."""
    return grouped.run_as(name, x, list(weights), list(biases), list(streams), wide, scaled, _lows(scaled))


def fake(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    streams: list[int],
    inputs: list[Tensor],
    low_weights: list[Tensor],
    low_biases: list[Tensor | None],
    input_scales: list[Tensor],
    weight_scales: list[Tensor],
    dtype: torch.dtype,
    fast: bool = False,
    max_tokens: int = 1024,
    pack: bool = True,
    wide: Sequence[bool] = (),
) -> list[Tensor]:
    """Outputs without values."""
    scaled = _scaled(inputs, input_scales, weight_scales, dtype, fast)
    _check(x, weights, biases, streams, scaled, low_weights, low_biases)
    plain = grouped.fake(x, weights, biases, streams[: len(weights)], wide=wide)
    features = sum(weight.shape[0] for weight in low_weights)
    return plain + [x.new_empty((*x.shape[:-1], features), dtype=dtype)] * bool(low_weights)


def composed(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    streams: list[int],
    inputs: list[Tensor],
    low_weights: list[Tensor],
    low_biases: list[Tensor | None],
    input_scales: list[Tensor],
    weight_scales: list[Tensor],
    dtype: torch.dtype,
    fast: bool = False,
    max_tokens: int = 1024,
    pack: bool = True,
    wide: Sequence[bool] = (),
) -> list[Tensor]:
    """Outputs of which that of the float8 weights has no gradient."""
    scaled = _scaled(inputs, input_scales, weight_scales, dtype, fast)
    _check(x, weights, biases, streams, scaled, low_weights, low_biases)
    plain = grouped.composed(x, weights, biases, streams[: len(weights)], wide=wide)
    if not low_weights:
        return plain
    features = [weight.shape[0] for weight in low_weights]
    with torch.no_grad():
        low = x.new_empty((scaled[0].rows.shape[0], sum(features)), dtype=dtype)
        outs = low.split(features, dim=1)
        for given, weight, bias, out in zip(scaled, low_weights, low_biases, outs, strict=True):
            products.multiply_scaled(given, weight.t(), bias, out)
    return [*plain, low.view(*x.shape[:-1], sum(features))]


def _scaled(
    inputs: Sequence[Tensor],
    input_scales: Sequence[Tensor],
    weight_scales: Sequence[Tensor],
    dtype: torch.dtype,
    fast: bool,
) -> list[Scaled]:
    if not len(inputs) == len(input_scales) == len(weight_scales):
        raise RuntimeError(
            f"Each of the {len(inputs)} float8 inputs needs a scale, and so does its weight, and there were "
            f"{len(input_scales)} and {len(weight_scales)} scales."
        )
    plain: dict[int, Tensor] = {}
    found = []
    for rows, of_rows, of_weight in zip(inputs, input_scales, weight_scales, strict=True):
        if rows.dim() == 2 and rows.stride(1) != 1:
            if id(rows) not in plain:
                plain[id(rows)] = rows.contiguous()
            rows = plain[id(rows)]
        found.append(Scaled(rows, _side_by_side(of_rows), _side_by_side(of_weight), dtype, fast))
    return found


def _side_by_side(scale: Tensor) -> Tensor:
    """The same numbers, with the strides that `torch._scaled_mm` asks for also along an axis of length 1."""
    return scale.reshape(-1).contiguous().view(scale.shape) if scale.dim() == 2 else scale


def _lows(scaled: Sequence[Scaled]) -> tuple[Low, ...]:
    inputs: dict[tuple[int, int], int] = {}
    of_rows: dict[int, int] = {}
    of_weights: dict[int, int] = {}
    found = []
    for given in scaled:
        by_row = given.of_rows.numel() > 1 or given.of_weight.numel() > 1
        numbers = (
            inputs.setdefault((given.rows.data_ptr(), given.rows.stride(0)), len(inputs)),
            given.fast,
            of_rows.setdefault(given.of_rows.data_ptr(), len(of_rows)),
            of_weights.setdefault(given.of_weight.data_ptr(), len(of_weights)),
        )
        found.append(Low(given.dtype, by_row, *numbers))
    return tuple(found)


def _check(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    streams: Sequence[int],
    scaled: Sequence[Scaled],
    low_weights: Sequence[Tensor],
    low_biases: Sequence[Tensor | None],
) -> None:
    """Raises RuntimeError where the lists differ in length or a shape or dtype does not fit."""
    products.check(x, weights, biases)
    products.check_streams([*weights, *low_weights], streams)
    if not len(scaled) == len(low_weights) == len(low_biases):
        raise RuntimeError(
            f"A float8 layer needs an input, a weight, and a bias or None, and there were {len(scaled)} inputs, "
            f"{len(low_weights)} weights and {len(low_biases)} biases."
        )
    for given, weight, bias in zip(scaled, low_weights, low_biases, strict=True):
        products.check_scaled(x, given, weight, bias)
