"""Operators of somebody else that multiply by quantised weights, as checkpoints and serving engines bring them.

Each is plain PyTorch inside, in float64 where it adds up, so that its bits do not depend on how it is called.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 16
"""Rows and columns of the weight that share a scale (128 in DeepSeek's checkpoints)."""

FLOAT8, BF16 = torch.float8_e4m3fn, torch.bfloat16

started: list[str] = []
"""Names of the operators in the order in which they ran."""


def spread(scale: Tensor, rows: int, columns: int) -> Tensor:
    """`[rows, columns]` of a scale for each block of `BLOCK` columns, and of rows too where it has fewer."""
    if scale.shape[0] != rows:
        scale = scale.repeat_interleave(BLOCK, 0)[:rows]
    return scale.repeat_interleave(BLOCK, 1)[:, :columns].double()


def product(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.double() @ weight.double().t()).to(dtype)


@torch.library.custom_op("quantised::fp8_linear", mutates_args=())
def fp8_linear(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, block: list[int], dtype: torch.dtype
) -> Tensor:
    """`[N, M]` of `[N, K]` in float8 with a scale for each row and block, weight `[M, K]` with one for each block."""
    started.append("fp8_linear")
    assert block == [BLOCK, BLOCK]
    assert x.shape[0] == 1 or x_scale.stride() == (1, x.shape[0]), "scales lie one column behind the other"
    rows = x.double() * spread(x_scale, *x.shape)
    return product(rows, weight.double() * spread(scale, *weight.shape), dtype)


@fp8_linear.register_fake
def _(x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, block: list[int], dtype: torch.dtype) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)


@torch.library.custom_op("quantised::int8_linear", mutates_args=())
def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, gain: float = 1.0) -> Tensor:
    """`[..., M]` of `[..., K]` and a weight `[M, K]` in int8 with a scale for each row."""
    started.append("int8_linear")
    made = product(x, weight.double() * scale.double()[:, None] * gain, torch.float64)
    return (made if bias is None else made + bias).to(x.dtype)


@int8_linear.register_fake
def _(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, gain: float = 1.0) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.custom_op("quantised::packed_pair", mutates_args=())
def packed_pair(x: Tensor, weight: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """`[rows, M]`, by columns, and `[rows]`, of a weight `[M, K / 2]` with two numbers of four bits in a byte."""
    started.append("packed_pair")
    low, high = (weight & 15).double() - 8, (weight >> 4).double() - 8
    made = product(x.reshape(rows, -1), torch.stack([low, high], -1).flatten(1), x.dtype)
    return made.t().contiguous().t(), made.sum(-1)


@packed_pair.register_fake
def _(x: Tensor, weight: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    return x.new_empty((weight.shape[0], rows)).t(), x.new_empty((rows,))


@torch.library.custom_op("quantised::wide_linear", mutates_args=())
def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """An operator whose weight may have any number of bytes."""
    started.append("wide_linear")
    return product(x, weight, x.dtype)


@wide_linear.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.custom_op("quantised::writing_linear", mutates_args=("scratch",))
def writing_linear(x: Tensor, weight: Tensor, scratch: Tensor) -> Tensor:
    """An operator that writes an argument."""
    scratch.add_(1)
    return product(x, weight, x.dtype)


@writing_linear.register_fake
def _(x: Tensor, weight: Tensor, scratch: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _define(name: str, schema: str, tags: tuple[torch.Tag, ...] = ()) -> None:
    torch.library.define(f"quantised::{name}", schema, tags=tags)

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return x.view(x.shape) if "(a)" in schema else product(x, weight, x.dtype)

    def fake(x: Tensor, weight: Tensor) -> Tensor:
        return x.view(x.shape) if "(a)" in schema else x.new_empty((*x.shape[:-1], weight.shape[0]))

    torch.library.impl(f"quantised::{name}", "CompositeExplicitAutograd")(run)
    torch.library.register_fake(f"quantised::{name}")(fake)


_define("view_linear", "(Tensor(a) x, Tensor weight) -> Tensor(a)")
_define("random_linear", "(Tensor x, Tensor weight) -> Tensor", (torch.Tag.nondeterministic_seeded,))
_define("doubtful_linear", "(Tensor x, Tensor weight) -> Tensor", (torch.Tag.maybe_aliasing_or_mutating,))
_define("confined_linear", "(Tensor x, Tensor weight) -> Tensor")
