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
    const int stages = (a.bytes + STAGE - 1) / STAGE;
    const int first = (long long)stages * blockIdx.x / gridDim.x;
    const int end = (long long)stages * (blockIdx.x + 1) / gridDim.x;
    const unsigned to = (unsigned)__cvta_generic_to_shared(memory) + threadIdx.x * 16;
    auto bring = [&](int stage, int slot) {
        if (stage < end) {
            const char* at = a.from + min((long long)stage * STAGE, a.bytes - STAGE) + threadIdx.x * 16;
#pragma unroll
            for (int i = 0; i < STAGE; i += 256 * 16)
                asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;"
                             :: "r"(to + slot * STAGE + i), "l"(at + i) : "memory");
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) bring(first + i, i);
    for (int stage = first, slot = STAGES - 1; stage < end; stage++) {
        asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 2) : "memory");
        bring(stage + STAGES - 1, slot);
        slot = slot == STAGES - 1 ? 0 : slot + 1;
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
    """One launch that reads all of `tensor`: contiguous, from a multiple of 16 bytes on, no smaller than a stage."""
    index = tensor.device.index
    blocks = torch.cuda.get_device_properties(index).multi_processor_count
    arguments = struct.pack("=2q", tensor.data_ptr(), tensor.nbytes)
    enqueue(_kernel(index), index, torch.cuda.current_stream().cuda_stream, arguments, blocks, 256, STAGES * STAGE)
