"""Gradients of an operator by running its reference again: nothing but the inputs is kept between the two passes.

The kernel made here is what `torch.library.register_autograd` would make, with one short cut: a call that needs no
gradient and has only the device's own kernel left to dispatch to goes there directly. One pass through the dispatcher
into Python costs more than the arithmetic of a few tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

__all__ = ["kernel"]

DEVICE_KEYS = (DispatchKey.CPU, DispatchKey.CUDA)


def kernel(
    operator: torch._ops.OpOverload, implementation: Callable[..., Any], reference: Callable[..., Any]
) -> Callable[..., Any]:
    """The kernel to register for `operator` under "Autograd", with its keyset.

    `implementation` is what the device's key runs. `reference` is a differentiable function of the operator's
    arguments; tensors come first among them, None standing for an absent one.
    """

    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: DispatchKeySet, *arguments: Any) -> Any:
            tensors = list(itertools.takewhile(lambda v: v is None or isinstance(v, Tensor), arguments))
            ctx.save_for_backward(*tensors)
            ctx.constants = arguments[len(tensors) :]
            ctx.set_materialize_grads(False)
            with torch._C._AutoDispatchBelowAutograd():
                return operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            _, *needed = ctx.needs_input_grad
            return None, *_differentiate(reference, ctx.saved_tensors, ctx.constants, needed, grads)

    def dispatch(keyset: DispatchKeySet, *arguments: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(v, Tensor) and v.requires_grad for v in arguments):
            return Recompute.apply(keyset, *arguments)
        below = keyset & torch._C._after_autograd_keyset
        with torch._C._AutoDispatchBelowAutograd():
            if below.highestPriorityTypeId() in DEVICE_KEYS:
                return implementation(*arguments)
            return operator.redispatch(below, *arguments)

    return dispatch


def _differentiate(
    reference: Callable[..., Any],
    tensors: tuple[Tensor | None, ...],
    constants: tuple[Any, ...],
    needed: list[bool],
    grads: tuple[Tensor | None, ...],
) -> list[Tensor | None]:
    """The gradients of `reference(*tensors, *constants)`, one for each entry of `needed`."""
    again = torch.is_grad_enabled()  # true under create_graph: the gradients must then be differentiable too
    with torch.enable_grad():
        # Views, so that an input computed from another one does not pass its gradient on to it here.
        inputs = [
            value.view_as(value) if value is not None and wanted else value
            for value, wanted in zip(tensors, needed, strict=False)
        ]
        outputs = reference(*inputs, *constants)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    sources = {index: value for index, value in enumerate(inputs) if value is not None and needed[index]}
    pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None]
    result: list[Tensor | None] = [None] * len(needed)
    if pairs and sources:
        found = torch.autograd.grad(
            [output for output, _ in pairs],
            list(sources.values()),
            [grad for _, grad in pairs],
            create_graph=again,
            allow_unused=True,
        )
        for index, gradient in zip(sources, found, strict=True):
            result[index] = gradient
    return result
