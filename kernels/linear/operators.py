"""Operators for linear layers on one input: `dsv4::grouped_linear`, `dsv4::mixed_linear`, `dsv4::parallel_linear` and
`dsv4::packed_linear`.

All are functional, and all read the weights as they are when called; the results are those of
`torch.nn.functional.linear`, of float8 weights those of `torch._scaled_mm`. `grouped_linear` and `mixed_linear` choose
by measurement how they run. The others run as they are named, which is the choice of whoever writes the graph.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4_compile.kernels import streams as auxiliary
from dsv4_compile.kernels.linear import grouped, mixed, packing
from dsv4_compile.kernels.linear.products import check, check_dtypes, check_streams, joined, linear, multiply, rows_of
from dsv4_compile.kernels.lowering import directly

__all__ = ["grouped_linear", "mixed_linear", "packed_linear", "parallel_linear"]

_library = torch.library.Library("dsv4", "FRAGMENT")
# flexible_layout: any strides will do, so Inductor need not copy an input into its eager layout.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
_library.define(
    "grouped_linear(Tensor x, Tensor[] weights, Tensor?[] biases, int[] streams, int max_tokens=1024, bool pack=True,"
    " bool[] wide=[]) -> Tensor[]",
    tags=_TAGS,
)
_library.define(
    "mixed_linear(Tensor x, Tensor[] weights, Tensor?[] biases, int[] streams, Tensor[] inputs, Tensor[] low_weights,"
    " Tensor?[] low_biases, Tensor[] input_scales, Tensor[] weight_scales, ScalarType dtype, bool fast=False,"
    " int max_tokens=1024, bool pack=True, bool[] wide=[]) -> Tensor[]",
    tags=_TAGS,
)
_library.define(
    "parallel_linear(Tensor x, Tensor[] weights, Tensor?[] biases, int[] streams, int max_tokens=1024) -> Tensor[]",
    tags=_TAGS,
)
_library.define(
    "packed_linear(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor",
    tags=_TAGS,
)


def grouped_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    streams: Sequence[int],
    max_tokens: int = 1024,
    pack: bool = True,
    wide: Sequence[bool] = (),
) -> list[Tensor]:
    """Linear layers on one input, in the way that is the fastest for their shapes and the number of rows.

    The ways (`strategies.STRATEGIES`): one product for each weight, in turn or on several streams; one product for each
    run of weights of one dtype that lie one behind the other in memory (`packing.pack`), in turn or on several streams;
    up to 512 tokens on CUDA, if that is one product, other algorithms for it than that of `torch.mm` (`proposals`); up
    to 64 tokens on CUDA a kernel that reads the weights of a dtype wherever they lie (`skinny`).
    Which one runs is measured once on the card for each range of row counts and kept (`tuning.py`). Where nothing is
    measured - a CPU, a capture, `DSV4_TUNE=0` - it is `strategies.default`. Where the weights lie is looked up in every
    call.

    Args:
        x: `[..., K]`, any strides and any dtype; it is cast to the dtype of each weight.
        weights: `[M_i, K]` each, any strides, dtypes may differ.
        biases: `[M_i]` in the dtype of the weight, or `None`, one for each weight.
        streams: where each runs if the layers run on several streams: 0 is the current stream, `s` the auxiliary stream
            `s` of the device. All 0: nothing leaves the current stream.
        max_tokens: with more rows than this in `x` nothing leaves the current stream.
        pack: whether weights that lie one behind the other may be read as one.
        wide: for each weight whether its result is float32 although the weight is bfloat16 or float16, as that of
            `torch.mm(..., out_dtype=torch.float32)`; empty: none is.

    Returns:
        `[..., sum M_i]` for each dtype among the weights, in order of first appearance: the results of the weights of
        that dtype side by side, in their order; contiguous. Wide ones of a dtype are an output of their own.

    Raises:
        RuntimeError: the lists differ in length, a stream is negative, or a shape does not fit.
    """
    return torch.ops.dsv4.grouped_linear(x, weights, biases, streams, max_tokens, pack, wide)


def mixed_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    streams: Sequence[int],
    inputs: Sequence[Tensor],
    low_weights: Sequence[Tensor],
    low_biases: Sequence[Tensor | None],
    input_scales: Sequence[Tensor],
    weight_scales: Sequence[Tensor],
    dtype: torch.dtype,
    fast: bool = False,
    max_tokens: int = 1024,
    pack: bool = True,
    wide: Sequence[bool] = (),
) -> list[Tensor]:
    """`grouped_linear`, and beside it float8 layers, whose input is mostly that input, quantised.

        y_j = input_scales_j * weight_scales_j * (inputs_j @ low_weights_j^T) + low_biases_j        as torch._scaled_mm

    It runs in the way that is the fastest for all of them together; up to 64 tokens on CUDA from compute capability 8.9
    that may be one launch for all (`skinny`), which rounds no less exactly than `torch._scaled_mm`.

    Args:
        x, weights, biases, max_tokens, pack, wide: as in `grouped_linear`; there is at least one weight.
        streams: for each of `weights`, then for each of `low_weights`.
        inputs: `[N, K]` each, float8_e4m3fn; N is the number of rows of `x`. Several may be the same tensor.
        low_weights: `[M_j, K]` each, float8_e4m3fn, contiguous by rows.
        low_biases: `[M_j]` in the dtype of the result, or `None`.
        input_scales, weight_scales: float32, one number each, or `[N, 1]` and `[1, M_j]`.
        dtype: of the results.
        fast: `use_fast_accum` where `torch._scaled_mm` makes the product.

    Returns:
        The results of `grouped_linear`, then `[..., sum M_j]` of all `low_weights`, without gradients; contiguous.

    Raises:
        RuntimeError: lists differ in length, a stream is negative, or a shape or dtype does not fit.
    """
    return torch.ops.dsv4.mixed_linear(
        x, weights, biases, streams, inputs, low_weights, low_biases, input_scales, weight_scales, dtype, fast,
        max_tokens, pack, wide,
    )  # fmt: skip


def parallel_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    streams: Sequence[int],
    max_tokens: int = 1024,
) -> list[Tensor]:
    """Linear layers on one input, on several streams at once, joined before the call returns.

    Args:
        x: `[..., K]`, any strides and any dtype; it is cast to the dtype of each weight.
        weights: `[M_i, K]` each, any strides, dtypes may differ.
        biases: `[M_i]` in the dtype of the weight, or `None`, one for each weight.
        streams: where each runs: 0 is the current stream, `s` the auxiliary stream `s` of the device. Layers of one
            number run one after another. On a device without streams everything runs in order.
        max_tokens: with more rows than this in `x` everything runs in order on the current stream.

    Returns:
        `[..., M_i]` in the dtype of the weight, for each weight; contiguous.

    Raises:
        RuntimeError: the lists differ in length, a stream is negative, or a shape does not fit.
    """
    return torch.ops.dsv4.parallel_linear(x, weights, biases, streams, max_tokens)


def packed_linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    """Linear layers on one input as one product, `cat([linear(x, w, b), ...], -1)`.

    One matrix product when the weights lie one behind the other in memory (`packing.pack`), which is looked up in every
    call; otherwise one product for each weight, and `packing.fallbacks()` has the cause.

    Args:
        x: `[..., K]`, any strides; it is cast to the dtype of the weights.
        weights: `[M_i, K]` each, of one dtype.
        biases: `[M_i]` in that dtype, or `None`, one for each weight.

    Returns:
        `[..., sum M_i]` in the dtype of the weights; contiguous.

    Raises:
        RuntimeError: the lists differ in length, the weights differ in dtype, or a shape does not fit.
    """
    return torch.ops.dsv4.packed_linear(x, weights, biases)


# -------------------------------------------------------------------------------------------------- parallel_linear


def _parallel(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], streams: list[int], max_tokens: int = 1024
) -> list[Tensor]:
    check(x, weights, biases)
    check_streams(weights, streams)
    rows = rows_of(x)
    # Allocated here, before the fork and on the current stream: the caching allocator then knows them as tensors of
    # that stream, in a capture as well, and a late reader cannot meet them reused by a side stream.
    outputs = [x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=weight.dtype) for weight in weights]
    slots: list[list[_Layer]] = [[] for _ in range(1 + max(streams))]
    for weight, bias, output, stream in zip(weights, biases, outputs, streams, strict=True):
        slots[stream].append((weight, bias, output.view(rows.shape[0], weight.shape[0])))
    main, *sides = slots
    auxiliary.execute_in_parallel(
        functools.partial(_multiply_all, rows, main),
        [functools.partial(_multiply_all, rows, layers) if layers else None for layers in sides],
        x.device,
        enabled=rows.shape[0] <= max_tokens,
        inputs=(rows,),
    )
    return outputs


def _parallel_fake(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], streams: list[int], max_tokens: int = 1024
) -> list[Tensor]:
    check(x, weights, biases)
    check_streams(weights, streams)
    return [x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=weight.dtype) for weight in weights]


def _parallel_composed(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], streams: list[int], max_tokens: int = 1024
) -> list[Tensor]:
    check(x, weights, biases)
    check_streams(weights, streams)
    return [linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


_Layer = tuple[Tensor, Tensor | None, Tensor]
"""Weight `[M, K]`, bias `[M]` and output `[N, M]` of one layer."""


def _multiply_all(rows: Tensor, layers: Sequence[_Layer]) -> None:
    casts: dict[torch.dtype, Tensor] = {}
    for weight, bias, out in layers:
        if weight.dtype not in casts:
            casts[weight.dtype] = rows.to(weight.dtype)
        multiply(casts[weight.dtype], weight.t(), bias, out)


# ---------------------------------------------------------------------------------------------------- packed_linear


def _packed(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> Tensor:
    if x.dtype is weights[0].dtype and all(bias is None for bias in biases) and packing.separation(weights) is None:
        # What serving does in every layer, with as little on the host as can be.
        whole = packing.packed_view(weights)
        return torch.mm(rows_of(x), whole.t()).view(*x.shape[:-1], whole.shape[0])
    check(x, weights, biases)
    reason = packing.separation(weights)
    if reason is not None:
        check_dtypes(weights)
    rows = rows_of(x).to(weights[0].dtype)
    if reason is None:
        product = multiply(rows, packing.packed_view(weights).t(), joined(biases, weights))
    else:
        packing.record_fallback(reason)
        sizes = [weight.shape[0] for weight in weights]
        product = rows.new_empty((rows.shape[0], sum(sizes)))
        for weight, bias, part in zip(weights, biases, product.split(sizes, dim=1), strict=True):
            multiply(rows, weight.t(), bias, part)
    return product if x.dim() == 2 else product.view(*x.shape[:-1], product.shape[1])


def _packed_fake(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> Tensor:
    check(x, weights, biases)
    check_dtypes(weights)
    return x.new_empty((*x.shape[:-1], sum(weight.shape[0] for weight in weights)), dtype=weights[0].dtype)


def _packed_composed(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> Tensor:
    check(x, weights, biases)
    check_dtypes(weights)
    return torch.cat([linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)], dim=-1)


# ----------------------------------------------------------------------------------------------------- registration


def _with_autograd(operator: Any, composed: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel above the real one: where a gradient is asked for it is plain `linear` calls, which have one.

    `torch.library.register_autograd` takes a list in which some biases are `None` for no list of tensors, and their
    gradients would be lost.
    """

    def kernel(keys: Any, x: Tensor, weights: list[Tensor], biases: list[Tensor | None], *rest: Any) -> Any:
        tensors = (x, *weights, *biases)
        if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
            return composed(x, weights, biases, *rest)
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keys & torch._C._after_autograd_keyset, x, weights, biases, *rest)

    return kernel


for _name, _run, _fake, _composed in (
    ("grouped_linear", grouped.run, grouped.fake, grouped.composed),
    ("mixed_linear", mixed.run, mixed.fake, mixed.composed),
    ("parallel_linear", _parallel, _parallel_fake, _parallel_composed),
    ("packed_linear", _packed, _packed_fake, _packed_composed),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dsv4::{_name}", _fake, lib=_library)
    _operator = getattr(torch.ops.dsv4, _name).default
    _library.impl(_name, _with_autograd(_operator, _composed), "Autograd", with_keyset=True)
    directly(_operator, _run)
