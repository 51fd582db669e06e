"""Inductor's calls of our operators, without the dispatcher.

Inductor lowers an operator it does not know to `torch.ops.dsv4.mhc_pre.default(...)` in the code it writes. For
operators implemented in Python the dispatcher then costs more than all else the host does for them (30 us of 60; the
kernels of a decode step run for 5). So the written code calls the implementation: the attribute `direct` of the
operator, put there where the operator is registered, so code that Inductor loads from its cache finds it as well.

Compiled code has no use for what is left out: its shapes are those the fake kernels have checked, gradients are not
asked for in it. The C++ wrapper cannot call Python functions and keeps the operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["call_directly", "directly"]


def directly(operator: Any, function: Callable[..., Any]) -> None:
    """Let compiled code call `function` for `operator`; a profiler still sees the operator's name."""
    name = operator.name()

    def call(*arguments: Any) -> Any:
        if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            return function(*arguments)
        with torch.profiler.record_function(name):
            return function(*arguments)

    operator.direct = call


@functools.cache
def call_directly() -> None:
    """Make Inductor, which must be imported, call every `dsv4` operator with an attribute `direct` by that."""
    from dsv4_compile.kernels import linear, mhc  # noqa: F401  (registers them)

    namespace = torch.ops.dsv4
    for name in dir(namespace):
        overload = getattr(getattr(namespace, name), "default", None)
        if hasattr(overload, "direct"):
            _lower(overload, f"torch.ops.dsv4.{name}.default.direct")


def _lower(operator: Any, function: str) -> None:
    from torch._inductor import ir
    from torch._inductor.lowering import lowerings, make_fallback
    from torch._inductor.virtualized import V

    if operator not in lowerings:
        make_fallback(operator, warn=False)
    fall_back = lowerings[operator]

    def lower(*args: Any, **kwargs: Any) -> Any:
        known = len(V.graph.operations)
        result = fall_back(*args, **kwargs)
        for made in V.graph.operations[known:]:
            if isinstance(made, ir.FallbackKernel) and made.op_overload is operator and not V.graph.cpp_wrapper:
                made.python_kernel_name = function
        return result

    lower._is_fallback_handler = True  # type: ignore[attr-defined]
    lowerings[operator] = lower
