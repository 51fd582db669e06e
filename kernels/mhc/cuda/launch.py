"""One launch of a compiled kernel, and what it is given (`launch.cuh`)."""

from __future__ import annotations

import struct

from dsv4_compile.kernels.cuda import launch
from dsv4_compile.kernels.mhc.cuda.compilation import Variant, kernel
from dsv4_compile.kernels.mhc.cuda.plans import WARPS

__all__ = ["ARGUMENTS", "enqueue"]

# `struct Arguments` of launch.cuh.
ARGUMENTS = struct.Struct("=14q q 5f 4x")


def enqueue(variant: Variant, device: int, stream: int, blocks: int, arguments: bytes) -> None:
    """Launch `variant` on the CUDA stream with handle `stream` of the current device, which is number `device`."""
    launch.enqueue(kernel(variant, device), device, stream, arguments, blocks, WARPS * 32, variant.shared_bytes)
