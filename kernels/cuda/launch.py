"""One launch of a loaded kernel that takes one structure."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from dsv4_compile.kernels.driver import bindings, check

__all__ = ["configuration", "enqueue"]


def enqueue(
    function: Any,
    device: int,
    stream: int,
    arguments: bytes,
    blocks: int,
    threads: int,
    shared_bytes: int = 0,
    cluster: int = 1,
) -> None:
    """Launch `function` on the CUDA stream with handle `stream` of the current device, which is number `device`.

    From compute capability 9.0 on the blocks may start while the launch before ends, and wait for that themselves.

    Args:
        arguments: the structure, as the kernel reads it.
        threads: of a block.
        shared_bytes: dynamic shared memory of a block.
        cluster: blocks of a cluster, from compute capability 9.0 on.
    """
    driver, _ = bindings()
    torch.cuda.is_current_stream_capturing()  # makes the device's context current in a thread that has none yet
    buffer = ctypes.create_string_buffer(arguments, len(arguments))
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
    config = configuration(device, blocks, threads, shared_bytes, cluster, stream)
    check(driver.cuLaunchKernelEx(config, function, ctypes.addressof(parameters), 0))


@functools.lru_cache(maxsize=1024)
def configuration(device: int, blocks: int, threads: int, shared_bytes: int, cluster: int, stream: int) -> Any:
    """A `CUlaunchConfig`; see `enqueue`."""
    driver, _ = bindings()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = stream
    attributes = []
    if torch.cuda.get_device_capability(device) >= (9, 0):
        early = driver.CUlaunchAttribute()
        early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        attributes.append(early)
        if cluster > 1:
            together = driver.CUlaunchAttribute()
            together.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            together.value.clusterDim.x, together.value.clusterDim.y, together.value.clusterDim.z = cluster, 1, 1
            attributes.append(together)
    if attributes:
        config.attrs = attributes
    config.numAttrs = len(attributes)
    return config
