"""One launch of a compiled kernel, and what it is given (`launch.cuh`)."""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import Any

import torch

from dsv4_compile.kernels.driver import bindings, check
from dsv4_compile.kernels.mhc.cuda.compilation import Variant, kernel
from dsv4_compile.kernels.mhc.cuda.plans import WARPS

__all__ = ["ARGUMENTS", "enqueue"]

# `struct Arguments` of launch.cuh.
ARGUMENTS = struct.Struct("=14q q 5f 4x")


def enqueue(variant: Variant, device: int, stream: int, blocks: int, arguments: bytes) -> None:
    """Launch `variant` on the CUDA stream with handle `stream` of the current device, which is number `device`.

    The blocks may start while the launch before ends, and wait for that themselves.
    """
    driver, _ = bindings()
    torch.cuda.is_current_stream_capturing()  # makes the device's context current in a thread that has none yet
    buffer = ctypes.create_string_buffer(arguments, len(arguments))
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
    config = _config(device, blocks, variant.shared_bytes, stream)
    check(driver.cuLaunchKernelEx(config, kernel(variant, device), ctypes.addressof(parameters), 0))


@functools.lru_cache(maxsize=1024)
def _config(device: int, blocks: int, shared_bytes: int, stream: int) -> Any:
    driver, _ = bindings()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = WARPS * 32, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = stream
    if torch.cuda.get_device_capability(device) >= (9, 0):
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs = [attribute]
        config.numAttrs = 1
    else:
        config.numAttrs = 0
    return config
