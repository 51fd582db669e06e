"""`dsv4::accompanied_linear`: linear layers of one input, and beside them operators that nothing is known of.

    current   ──●── grouped_linear, mixed_linear or parallel_linear ──○──   ● fork   ○ join
    side s      └── hf::fp8_linear(...), vllm::..., in turn ──────────┘

The operators may keep a workspace that all their calls share, so all of them run on one side stream, in their order. On
the current stream and on other side streams there are only products of cuBLAS and of ours meanwhile.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4_compile.kernels import streams as auxiliary
from dsv4_compile.kernels.linear import operators as _groups  # noqa: F401  (registers what runs on the current stream)
from dsv4_compile.kernels.linear.calls import Call, flattened, read
from dsv4_compile.kernels.lowering import directly

__all__ = ["accompanied_linear"]

_library = torch.library.Library("dsv4", "FRAGMENT")
_library.define(
    "accompanied_linear(Tensor x, Tensor[] tensors, SymInt[] sizes, str[] operators, str[] arguments, int[] results,"
    " int stream=1, int max_tokens=1024) -> Tensor[]",
    # The operators may read their inputs in whatever way they like: they get the strides that they had.
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)


def accompanied_linear(
    x: Tensor,
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
    operators: Sequence[str],
    arguments: Sequence[str],
    results: Sequence[int],
    stream: int = 1,
    max_tokens: int = 1024,
) -> list[Tensor]:
    """Linear layers on the current stream, and beside them other operators on a side stream, joined before it returns.

    Args:
        x: `[..., K]`, the input of the linear layers. In `arguments` it is tensor 0.
        tensors: all else that the operators read; tensor 1, 2, ... in `arguments`.
        sizes: numbers that are known only when it is called.
        operators: qualified names with overload (`"hf::fp8_linear.default"`). The first is the one for the current
            stream. None may write an argument or return an alias of one.
        arguments: for each of them, as `calls.write` makes them.
        results: how many tensors each of them returns.
        stream: the side stream of all operators but the first; 0 is the current stream.
        max_tokens: with more rows than this in `x` everything runs in turn on the current stream.

    Returns:
        What the operators return, one behind the other, with the strides that they give it.

    Raises:
        RuntimeError: the lists differ in length, an operator is not registered, the stream is negative, or the number
            of results is another one; and whatever the operators raise.
    """
    return torch.ops.dsv4.accompanied_linear(x, tensors, sizes, operators, arguments, results, stream, max_tokens)


def _run(
    x: Tensor,
    tensors: list[Tensor],
    sizes: list[int],
    operators: list[str],
    arguments: list[str],
    results: list[int],
    stream: int = 1,
    max_tokens: int = 1024,
) -> list[Tensor]:
    first, *others = _calls(operators, arguments, results, stream)
    work = functools.partial(_all, others, x, tensors, sizes, results[1:])
    if not stream:
        return _one(first, x, tensors, sizes, results[0]) + work()
    everything = [x, *tensors]
    read = frozenset().union(*(call.reads for call in others))
    made, sides = auxiliary.execute_in_parallel(
        functools.partial(_one, first, x, tensors, sizes, results[0]),
        [*[None] * (stream - 1), work],
        x.device,
        enabled=math.prod(x.shape[:-1]) <= max_tokens,
        inputs=[everything[i] for i in read],
    )
    return made + sides[-1]


def _in_turn(
    x: Tensor,
    tensors: list[Tensor],
    sizes: list[int],
    operators: list[str],
    arguments: list[str],
    results: list[int],
    stream: int = 1,
    max_tokens: int = 1024,
) -> list[Tensor]:
    """Results without values from tensors without values, results with gradients from tensors that ask for them."""
    return _all(_calls(operators, arguments, results, stream), x, tensors, sizes, results)


def _calls(operators: Sequence[str], arguments: Sequence[str], results: Sequence[int], stream: int) -> list[Call]:
    if not operators or not len(operators) == len(arguments) == len(results):
        raise RuntimeError(
            f"There must be at least one operator, and arguments and a number of results for each, and there are "
            f"{len(operators)} operators, {len(arguments)} arguments and {len(results)} numbers."
        )
    if stream < 0:
        raise RuntimeError(f"The side stream must be 0 or more, and it is {stream}.")
    return [read(*call) for call in zip(operators, arguments, strict=True)]


def _all(
    calls: Sequence[Call], x: Tensor, tensors: Sequence[Tensor], sizes: Sequence[int], results: Sequence[int]
) -> list[Tensor]:
    made: list[Tensor] = []
    for call, count in zip(calls, results, strict=True):
        made += _one(call, x, tensors, sizes, count)
    return made


def _one(call: Call, x: Tensor, tensors: Sequence[Tensor], sizes: Sequence[int], count: int) -> list[Tensor]:
    args, named = call.given([x, *tensors], sizes)
    made = flattened(call.operator(*args, **named))
    if len(made) != count:
        raise RuntimeError(f"{call.operator} returned {len(made)} tensors, and {count} were expected.")
    return made


def _with_autograd(keys: Any, x: Tensor, tensors: list[Tensor], *rest: Any) -> list[Tensor]:
    """Where a gradient is asked for, calls in turn, which have what gradients the operators have."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *tensors)):
        return _in_turn(x, tensors, *rest)
    with torch._C._AutoDispatchBelowAutograd():
        return _operator.redispatch(keys & torch._C._after_autograd_keyset, x, tensors, *rest)


_operator = torch.ops.dsv4.accompanied_linear.default
_library.impl("accompanied_linear", _run, "CompositeExplicitAutograd")
torch.library.register_fake("dsv4::accompanied_linear", _in_turn, lib=_library)
_library.impl("accompanied_linear", _with_autograd, "Autograd", with_keyset=True)
directly(_operator, _run)
