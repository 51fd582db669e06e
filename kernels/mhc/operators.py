"""The operators `dsv4::mhc_pre`, `mhc_post`, `mhc_post_pre` and `mhc_head`, registered at import.

They are functional: all outputs are fresh, contiguous tensors. Arguments, shapes and formulas are those of the
functions of the same name in `reference.py`, with two more arguments behind what those cannot do without: `kernel`,
the wished family (`families.WISHES`), and `deterministic`: a row's result depends on no other row, bit for bit (but in
the family `reference`, whose matrix product promises nothing). `mixing_dtype` comes last. `post` and `comb` come out in
float64 when the residual they are computed from is float64, otherwise in float32. Gradients are those of the reference,
recomputed from the inputs.

Wrong shapes, devices or mixing dtypes raise ValueError; a family that cannot serve a call does not raise, see
`families.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4_compile.kernels.lowering import directly
from dsv4_compile.kernels.mhc import families, gradients, reference

__all__ = ["NAMES"]

SCHEMAS = {
    "mhc_pre": """(
        Tensor residual, Tensor fn, Tensor scale, Tensor base, Tensor? norm_weight,
        int iters, float rms_eps, float pre_eps, float sinkhorn_eps, float post_mult, float norm_eps,
        ScalarType out_dtype, str kernel, bool deterministic=False
    ) -> (Tensor layer_input, Tensor post, Tensor comb)""",
    "mhc_post": """(
        Tensor x, Tensor residual, Tensor post, Tensor comb,
        ScalarType residual_dtype, str kernel, bool deterministic=False, ScalarType? mixing_dtype=None
    ) -> Tensor""",
    "mhc_post_pre": """(
        Tensor x, Tensor residual, Tensor post, Tensor comb,
        Tensor fn, Tensor scale, Tensor base, Tensor? norm_weight,
        int iters, float rms_eps, float pre_eps, float sinkhorn_eps, float post_mult, float norm_eps,
        ScalarType residual_dtype, ScalarType out_dtype, str kernel, bool deterministic=False,
        ScalarType? mixing_dtype=None
    ) -> (Tensor new_residual, Tensor layer_input, Tensor post, Tensor comb)""",
    "mhc_head": """(
        Tensor residual, Tensor fn, Tensor scale, Tensor base, Tensor? norm_weight,
        float rms_eps, float pre_eps, float norm_eps, ScalarType out_dtype, str kernel, bool deterministic=False
    ) -> Tensor""",
}
NAMES = tuple(SCHEMAS)
MIXING_DTYPES = (None, torch.bfloat16, torch.float16, torch.float32, torch.float64)


Expected = tuple[str, Tensor | None, tuple[int, ...]]


def _require(residual: Tensor, *expected: Expected) -> None:
    device, on_cpu = residual.device, residual.is_cpu  # the flag is read in a fraction of the time of the device
    for name, tensor, shape in expected:
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ValueError(
                f"mhc: {name} has shape {tuple(tensor.shape)}; with a residual of shape {tuple(residual.shape)} "
                f"it must have shape {tuple(shape)}."
            )
        if tensor.is_cpu != on_cpu or not (on_cpu or tensor.device == device):
            raise ValueError(f"mhc: {name} is on {tensor.device} and the residual on {device}; they must be on one.")


def _require_streams(residual: Tensor) -> None:
    if residual.dim() < 2:
        raise ValueError(f"mhc: the residual must have shape [..., n, D], not {tuple(residual.shape)}.")


def _require_pre(residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor | None) -> None:
    _require_streams(residual)
    n, hidden = residual.shape[-2:]
    logits = (2 + n) * n
    _require(
        residual,
        ("fn", fn, (logits, n * hidden)),
        ("scale", scale, (3,)),
        ("base", base, (logits,)),
        ("norm_weight", norm_weight, (hidden,)),
    )


def _require_head(residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor | None) -> None:
    _require_streams(residual)
    n, hidden = residual.shape[-2:]
    _require(
        residual,
        ("fn", fn, (n, n * hidden)),
        ("scale", scale, (1,)),
        ("base", base, (n,)),
        ("norm_weight", norm_weight, (hidden,)),
    )


def _require_post(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> None:
    _require_streams(residual)
    *lead, n, hidden = residual.shape
    _require(residual, ("x", x, (*lead, hidden)), ("post", post, (*lead, n)), ("comb", comb, (*lead, n, n)))


def _require_mixing(dtype: torch.dtype | None) -> None:
    if dtype not in MIXING_DTYPES:
        raise ValueError(f"mhc: mixing_dtype is {dtype}; it must be None or a float dtype of 16, 32 or 64 bits.")


def _check_pre(residual: Tensor, *arguments: Any) -> None:
    _require_pre(residual, *arguments[:4])


def _check_head(residual: Tensor, *arguments: Any) -> None:
    _require_head(residual, *arguments[:4])


def _check_post(x: Tensor, residual: Tensor, *arguments: Any) -> None:
    _require_post(x, residual, *arguments[:2])
    _require_mixing(split(arguments).mixing_dtype)


def _check_post_pre(x: Tensor, residual: Tensor, *arguments: Any) -> None:
    _require_post(x, residual, *arguments[:2])
    _require_mixing(split(arguments).mixing_dtype)
    _require_pre(residual, *arguments[2:6])


def _run(operator: str, *arguments: Any) -> Any:
    """The operator without its checks: for compiled code, whose shapes have been checked when it was traced."""
    call = split(arguments)
    residual = arguments[1 if operator in ("mhc_post", "mhc_post_pre") else 0]
    wide = any(value is torch.float64 for value in call.required[-2:])  # the dtypes of the outputs
    return families.run(operator, call.kernel, residual, call.of_function, wide, call.deterministic)


def _reference(operator: str, *arguments: Any) -> Any:
    return getattr(reference, operator)(*split(arguments).of_function)


class Call(NamedTuple):
    """The arguments of an operator, taken apart."""

    required: tuple[Any, ...]  # those of the function in `reference.py` that have no default
    kernel: str
    deterministic: bool = False
    mixing_dtype: torch.dtype | None = None

    @property
    def of_function(self) -> tuple[Any, ...]:
        return self.required if self.mixing_dtype is None else (*self.required, self.mixing_dtype)


def split(arguments: tuple[Any, ...]) -> Call:
    """`arguments` at the only string among them; behind it defaults are left out by whoever calls."""
    at = len(arguments) - 1
    while not isinstance(arguments[at], str):
        at -= 1
    return Call(arguments[:at], *arguments[at:])


def _empty_pre(residual: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, out_dtype = split(arguments).required
    *lead, n, hidden = residual.shape
    compute = reference.compute_dtype(residual.dtype)
    return (
        residual.new_empty((*lead, hidden), dtype=out_dtype),
        residual.new_empty((*lead, n), dtype=compute),
        residual.new_empty((*lead, n, n), dtype=compute),
    )


def _empty_post(x: Tensor, residual: Tensor, *arguments: Any) -> Tensor:
    *_, residual_dtype = split(arguments).required
    return residual.new_empty(residual.shape, dtype=residual_dtype)


def _empty_post_pre(x: Tensor, residual: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = split(arguments)
    *_, residual_dtype, out_dtype = call.required
    new_residual = _empty_post(x, residual, residual_dtype, call.kernel)
    return (new_residual, *_empty_pre(new_residual, out_dtype, call.kernel))


def _empty_head(residual: Tensor, *arguments: Any) -> Tensor:
    return _empty_pre(residual, *arguments)[0]


_Function = Callable[..., Any]
# What raises for wrong arguments, and the empty outputs for right ones.
_PARTS: dict[str, tuple[_Function, _Function]] = {
    "mhc_pre": (_check_pre, _empty_pre),
    "mhc_post": (_check_post, _empty_post),
    "mhc_post_pre": (_check_post_pre, _empty_post_pre),
    "mhc_head": (_check_head, _empty_head),
}


def _checked(check: _Function, function: _Function) -> _Function:
    def call(*arguments: Any) -> Any:
        check(*arguments)
        return function(*arguments)

    return call


def _register() -> torch.library.Library:
    """Define the operators that are not there yet: a second import of this module finds them all and adds nothing."""
    library = torch.library.Library("dsv4", "FRAGMENT")
    for name, schema in SCHEMAS.items():
        if hasattr(torch.ops.dsv4, name):
            continue
        check, empty = _PARTS[name]
        direct = functools.partial(_run, name)
        implementation = _checked(check, direct)
        # flexible_layout: the kernels take any strides, so Inductor need not copy an input into its eager layout.
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
        library.impl(name, implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(f"dsv4::{name}", _checked(check, empty), lib=library)
        again = functools.partial(_reference, name)
        recompute = gradients.kernel(getattr(torch.ops.dsv4, name).default, implementation, again)
        library.impl(name, recompute, "Autograd", with_keyset=True)
        directly(getattr(torch.ops.dsv4, name).default, direct)
    return library


# The registrations live as long as this object. Under importlib.reload the first one is kept.
_LIBRARY: torch.library.Library = globals().get("_LIBRARY") or _register()
