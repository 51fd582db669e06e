"""NVIDIA's Python bindings of the driver and of NVRTC."""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["bindings", "check"]


@functools.cache
def bindings() -> tuple[Any, Any]:
    """NVIDIA's bindings of the driver and of NVRTC, on which the CUDA builds of torch depend."""
    from cuda.bindings import driver, nvrtc

    check(nvrtc.nvrtcVersion())
    return driver, nvrtc


def check(result: tuple[Any, ...]) -> Any:
    """What a call of the bindings returned besides its status.

    Raises:
        RuntimeError: the status is an error.
    """
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA returned {status.name}")
    return values[0] if len(values) == 1 else tuple(values)
