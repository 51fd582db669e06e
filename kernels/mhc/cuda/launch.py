"""One launch of a compiled kernel, and what it is given (`launch.cuh`)."""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import Any

import torch

from dsv4_compile.kernels.mhc.cuda.compilation import Variant, kernel
from dsv4_compile.kernels.mhc.cuda.driver import bindings, check

__all__ = ["ARGUMENTS", "enqueue"]

# `struct Arguments` of launch.cuh.
ARGUMENTS = struct.Struct("=14q q 5f 4x")


def enqueue(variant: Variant, device: int, stream: int, blocks: int, arguments: bytes) -> None:
    """Launch `variant` on the CUDA stream with handle `stream` of the current device, which is number `device`.

    The blocks may start while the launch before ends, and wait for that themselves. Clusters do one tile after the
    other, so there are no more of them than run at a time.
    """
    driver, _ = bindings()
    torch.cuda.is_current_stream_capturing()  # makes the device's context current in a thread that has none yet
    function = kernel(variant, device)
    if variant.plan.clusters:
        blocks = min(blocks, variant.cluster * _active_clusters(variant, device))
    buffer = ctypes.create_string_buffer(arguments, len(arguments))
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
    config = _config(device, blocks, variant.threads, variant.cluster, variant.shared_bytes, stream)
    check(driver.cuLaunchKernelEx(config, function, ctypes.addressof(parameters), 0))


@functools.lru_cache(maxsize=1024)
def _config(device: int, blocks: int, threads: int, cluster: int, shared_bytes: int, stream: int) -> Any:
    driver, _ = bindings()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = stream
    attributes = []
    if torch.cuda.get_device_capability(device) >= (9, 0):
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = cluster, 1, 1
        attributes.append(attribute)
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


@functools.lru_cache(maxsize=1024)
def _active_clusters(variant: Variant, device: int) -> int:
    """Clusters of `variant` that CUDA device number `device` has room for at a time."""
    driver, _ = bindings()
    config = _config(device, variant.cluster, variant.threads, variant.cluster, variant.shared_bytes, 0)
    return int(check(driver.cuOccupancyMaxActiveClusters(kernel(variant, device), config)))
