"""Which kernel family serves a call, and what happens when one cannot.

A family is a module with functions of `reference.py` (not all have `mhc_head`) and `refusal(device, n, hidden,
dtype)`, a sentence saying why it cannot serve such a residual, or None. Families are tried in order, the wished one
first, then those that suit the device, and `reference` serves everything. What was passed over, and why, is logged
once per cause on the logger `dsv4_compile.kernels`; it is never an exception.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dsv4_compile.kernels.mhc import reference

__all__ = ["FAMILIES", "WISHES", "choices", "forget", "resolve", "run", "warmup"]

logger = logging.getLogger("dsv4_compile.kernels")

FAMILIES = ("tilelang", "triton", "cuda", "cpp", "reference")
WISHES = ("auto", *FAMILIES)
# Families whose order of summation follows the token count, unless they are told otherwise. (`mhc_post` has no sum that
# could be cut up.)
PLANNED = ("cuda", "tilelang", "triton")
# Those whose kernels are compiled when they are first called, at the latest by `warmup`, and for each operator how many
# dimensions its arguments have without those of the tokens; the arguments behind them are the same for all tokens.
COMPILED_WHEN_CALLED = ("triton", "tilelang")
OF_A_TOKEN = {"mhc_pre": (2,), "mhc_head": (2,), "mhc_post": (1, 2, 1, 2), "mhc_post_pre": (1, 2, 1, 2)}
BEST = {"cuda": ("cuda", "triton", "reference"), "cpu": ("cpp", "reference")}

# (wish, device, n, hidden, dtype) decide, so a call looks its family up instead of working it out.
Key = tuple[str, torch.device, int, int, torch.dtype]
_chosen: dict[Key, tuple[str, str | None, ModuleType]] = {}
_failures: dict[tuple[str, str, int, int, torch.dtype], str] = {}
_warned: set[str] = set()
# Calls that `warmup` makes again, in order: family, operator, deterministic, and the arguments without their tokens.
_remembered: dict[tuple[Any, ...], None] = {}
_lock = threading.RLock()


def resolve(kernel: str, device: torch.device, n: int, hidden: int, dtype: torch.dtype) -> tuple[str, str | None]:
    """The family that will serve a `[..., n, hidden]` residual of `dtype`, and why it is not the wished one.

    `kernel` is one of `WISHES`; "auto" wishes for the best family of the device. The reason is None when the wish is
    met. The answer is exact: it imports the family and compiles what can be compiled ahead, and knows of earlier
    failures. Raises ValueError for another `kernel`.
    """
    family, reason, _ = _choice((kernel, device, n, hidden, dtype))
    return family, reason


def _choice(key: Key) -> tuple[str, str | None, ModuleType]:
    if (choice := _chosen.get(key)) is None:
        with _lock:
            family, reason = _choose(key)
            choice = _chosen[key] = (family, reason, _module(family))
    return choice


def _choose(key: Key) -> tuple[str, str | None]:
    kernel, device, n, hidden, dtype = key
    if kernel not in WISHES:
        raise ValueError(f"mhc has no kernel family {kernel!r}; there are {', '.join(WISHES)}.")
    best = BEST.get(device.type, ("reference",))
    order = best if kernel == "auto" else tuple(dict.fromkeys((kernel, *best)))
    reasons: list[str] = []
    for family in order:
        refusal = _failures.get((family, device.type, n, hidden, dtype)) or _refusal(family, device, n, hidden, dtype)
        if refusal is None:
            return family, "; ".join(reasons) or None
        reasons.append(f"{family} cannot serve this call: {refusal}")
    raise AssertionError("the reference serves every call")


def _refusal(family: str, device: torch.device, n: int, hidden: int, dtype: torch.dtype) -> str | None:
    if family == "reference":
        return None
    try:
        module = _module(family)
    except Exception as error:
        return f"its module could not be imported ({_brief(error)})"
    return module.refusal(device, n, hidden, dtype)


def _module(family: str) -> ModuleType:
    if family == "reference":
        return reference
    return importlib.import_module(f"dsv4_compile.kernels.mhc.{family}")


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def run(
    operator: str,
    kernel: str,
    residual: Tensor,
    arguments: tuple[Any, ...],
    wide: bool = False,
    deterministic: bool = False,
) -> Any:
    """Call `operator` (a function name of `reference.py`) with `arguments` in the family chosen for `residual`.

    Where the family has no such function the reference serves the call. `wide` says that another tensor or an output
    makes the arithmetic float64; `deterministic` asks a family whose plan follows the token count for one that does
    not. A family that raises is passed over from then on for residuals of that kind, and the call is served by the
    next; running out of memory is raised.
    """
    n, hidden = residual.shape[-2:]
    key = (kernel, residual.device, n, hidden, torch.float64 if wide else residual.dtype)
    while True:
        family, reason, module = _choice(key)
        if reason is not None:
            _warn(reason)
        try:
            function = getattr(module, operator, getattr(reference, operator))
            planned = family in PLANNED and operator != "mhc_post" and function.__module__ == module.__name__
            if family in COMPILED_WHEN_CALLED:
                _remember(family, operator, arguments, deterministic)
            if deterministic and planned:
                return function(*arguments, deterministic=True)
            return function(*arguments)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if family == "reference":
                raise
            _record(family, key, f"it raised {_brief(error)}")


def _record(family: str, key: Key, reason: str) -> None:
    _, device, n, hidden, dtype = key
    with _lock:
        _failures[family, device.type, n, hidden, dtype] = reason
        _chosen.clear()


def _remember(family: str, operator: str, arguments: tuple[Any, ...], deterministic: bool) -> None:
    """Keep what it takes to make such a call with another token count."""
    lengths = OF_A_TOKEN[operator]
    key = []
    for i, argument in enumerate(arguments):
        if isinstance(argument, Tensor):
            shape = argument.shape[-lengths[i] :] if i < len(lengths) else argument.shape
            argument = (shape, argument.dtype, argument.device)
        key.append(argument)
    _remembered[family, operator, deterministic, *key] = None


def _call_again(family: str, operator: str, deterministic: bool, key: tuple[Any, ...], tokens: int) -> None:
    arguments = list(key)
    for i, argument in enumerate(key):
        if isinstance(argument, tuple):
            shape, dtype, device = argument
            lead = (tokens,) if i < len(OF_A_TOKEN[operator]) else ()
            arguments[i] = torch.zeros((*lead, *shape), dtype=dtype, device=device)
    residual = arguments[1 if operator in ("mhc_post", "mhc_post_pre") else 0]
    wide = any(value is torch.float64 for value in arguments)
    run(operator, family, residual, tuple(arguments), wide, deterministic)


def warmup(max_tokens: int) -> int:
    """Choose and compile the kernels for every token count from 1 to `max_tokens`, so that serving compiles nothing.

    What else a kernel depends on (widths, dtypes, constants) is taken from the calls so far: call this after one
    forward pass. Kernels of Triton and TileLang are compiled by calls on zeros, one for each plan. Returns how many
    kernels (of the family `cuda`) and calls were made ready. Not to be used while a stream is being captured.
    """
    count = int(_module("cuda").warmup(max_tokens)) if "dsv4_compile.kernels.mhc.cuda" in sys.modules else 0
    for family, operator, deterministic, *key in list(_remembered):
        for tokens in [1, *(int(limit) + 1 for limit, _ in _module(family).PLANS if limit < max_tokens)]:
            _call_again(family, operator, deterministic, tuple(key), tokens)
            count += 1
    return count


def choices() -> list[dict[str, Any]]:
    """The plans that the family `cuda` runs with and where they come from, see `cuda/tuning.py`. Fit for JSON."""
    return list(_module("cuda").choices()) if "dsv4_compile.kernels.mhc.cuda" in sys.modules else []


def forget() -> None:
    """Try every family again and warn again: after a compiler was installed, and between tests."""
    with _lock:
        _chosen.clear()
        _failures.clear()
        _warned.clear()
        _remembered.clear()


def _warn(reason: str) -> None:
    if reason in _warned:
        return
    with _lock:
        if reason not in _warned:
            _warned.add(reason)
            logger.warning("%s. The numbers are the same, the speed is not.", reason)
