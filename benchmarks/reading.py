"""Launches that only bring bytes from memory into shared memory: what no kernel that reads as many can fall below.

Each launch waits for the end of the one before, as one that needs its result does. For the benchmarks beside it.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import torch
from torch import Tensor

from dsv4_compile.kernels.cuda.code import loaded, machine_code
from dsv4_compile.kernels.cuda.launch import enqueue

__all__ = ["read"]

STAGE = 16 << 10  # bytes that a block copies at once
STAGES = 6  # of a block, so that the blocks of the next launch fit beside it
SOURCE = rb"""
struct Arguments { const char* from; long long bytes; };

extern "C" __global__ void __launch_bounds__(256) reading(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) char memory[];
    const long long stages = (a.bytes + STAGE - 1) / STAGE;
    const long long first = stages * blockIdx.x / gridDim.x, end = stages * (blockIdx.x + 1) / gridDim.x;
    auto bring = [&](long long stage) {
        for (int i = threadIdx.x * 16; i < STAGE; i += 256 * 16) {
            const long long at = stage * STAGE + i;
            const unsigned to = (unsigned)__cvta_generic_to_shared(memory + (stage - first) % STAGES * STAGE + i);
            if (stage < end && at < a.bytes)
                asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;"
                             :: "r"(to), "l"(a.from + at) : "memory");
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    for (int i = 0; i < STAGES - 1; i++) bring(first + i);
    for (long long stage = first; stage < end; stage++) {
        asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 2) : "memory");
        bring(stage + STAGES - 1);
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
}
"""


@functools.cache
def _kernel(index: int) -> Any:
    macros = {"STAGE": STAGE, "STAGES": STAGES}
    code = machine_code("reading", {"reading.cu": SOURCE}, macros, torch.cuda.get_device_capability(index))
    torch.cuda.current_stream(index).synchronize()  # makes the device's context current in this thread
    return loaded(code, "reading", STAGES * STAGE)


def read(tensor: Tensor) -> None:
    """One launch that reads all of `tensor`, which is contiguous and begins at a multiple of 16 bytes."""
    index = tensor.device.index
    blocks = torch.cuda.get_device_properties(index).multi_processor_count
    arguments = struct.pack("=2q", tensor.data_ptr(), tensor.nbytes)
    enqueue(_kernel(index), index, torch.cuda.current_stream().cuda_stream, arguments, blocks, 256, STAGES * STAGE)
