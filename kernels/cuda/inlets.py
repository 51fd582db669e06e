"""Copies at the start of a CUDA graph whose sources are named before each replay.

A graph reads its inputs at addresses of its own. To copy them there in front of each replay costs the host a launch for
each, more than the replay itself. Here the copies are the first node of the graph, one kernel for all of them, and what
the host does before a replay is to compare addresses: the allocator mostly gives the same ones again. Where one is
another, the node gets new parameters (`cuGraphExecKernelNodeSetParams`), which replays still under way do not see.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4_compile.kernels.cuda.code import loaded, machine_code, texts
from dsv4_compile.kernels.driver import bindings, check

__all__ = ["MOST", "SOURCE", "Inlets", "packed", "prepare"]

SOURCE = Path(__file__).parent / "inlets.cu"
MOST = 32
"""Tensors of one node."""
THREADS = 256
BYTES_OF_A_BLOCK = THREADS * 16 * 4
MOST_BLOCKS = 256
"""For one tensor; with two or more of 256 threads on each multiprocessor a copy is as fast as memory allows."""
# `struct Copies` of inlets.cu.
COPIES = struct.Struct(f"={3 * MOST}q")


def packed(sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int]) -> bytes:
    """`struct Copies`: addresses, and the bytes that are copied from each source."""
    return COPIES.pack(*(value for part in (sources, targets, sizes) for value in (*part, *[0] * (MOST - len(part)))))


class Inlets:
    """The copies into `targets`, contiguous tensors on the current device, at most `MOST`."""

    def __init__(self, targets: Sequence[Tensor]):
        self._targets = [target.data_ptr() for target in targets]
        self._sizes = [target.numel() * target.element_size() for target in targets]
        self.sources = list(self._targets)
        """Addresses that the next replay copies from."""
        self._buffer = ctypes.create_string_buffer(packed(self.sources, self._targets, self._sizes), COPIES.size)
        self._beginning = struct.Struct(f"={len(targets)}q")  # the sources
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._buffer))
        self._index = -1
        self._node: Any = None
        self._graph: Any = None
        self._parameters: Any = None

    def enqueue(self, index: int) -> None:
        """Adds the node to the graph that the current stream of device `index` is being captured into.

        `prepare` has to have been called.
        """
        driver, _ = bindings()
        self._index = index
        stream = torch._C._cuda_getCurrentRawStream(index)
        blocks = min(MOST_BLOCKS, max(1, -(-max(self._sizes) // BYTES_OF_A_BLOCK)))
        function = prepare(index)
        grid = (blocks, len(self._sizes), 1)
        check(driver.cuLaunchKernel(function, *grid, THREADS, 1, 1, 0, stream, ctypes.addressof(self._pointers), 0))
        (self._node,) = check(driver.cuStreamGetCaptureInfo(stream))[3]
        parameters = driver.CUDA_KERNEL_NODE_PARAMS()
        parameters.func = function
        parameters.gridDimX, parameters.gridDimY, parameters.gridDimZ = grid
        parameters.blockDimX, parameters.blockDimY, parameters.blockDimZ = THREADS, 1, 1
        parameters.kernelParams = ctypes.addressof(self._pointers)
        self._parameters = parameters

    def bind(self, executable: Any) -> None:
        """Names the instantiated graph (`CUgraphExec`) that `point` changes."""
        self._graph = executable

    def point(self, sources: list[int]) -> None:
        """The next replay copies from these addresses."""
        if sources != self.sources:
            driver, _ = bindings()
            self._beginning.pack_into(self._buffer, 0, *sources)
            with torch.cuda.device(self._index):
                check(driver.cuGraphExecKernelNodeSetParams(self._graph, self._node, self._parameters))
            self.sources = sources


_lock = threading.Lock()


def prepare(index: int) -> Any:
    """Loads the kernel onto device `index`, which a capture is no place for; returns its handle.

    Raises:
        Exception: there is no NVRTC, or it cannot compile the kernel.
    """
    with _lock:
        return _loaded(index)


@functools.cache
def _loaded(index: int) -> Any:
    with torch.cuda.device(index):
        torch.cuda.is_current_stream_capturing()  # makes the device's context current in a thread that has none yet
        code = machine_code("inlets", texts(SOURCE), {"MOST": MOST}, torch.cuda.get_device_capability(index))
        return loaded(code, "inlets", 0)
