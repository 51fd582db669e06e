"""CUDA graphs of one device: recorded on one stream, into one memory pool, which all graphs of the process share.

Graphs that share a pool use the same memory for what does not outlive them. So they must not run at the same time, and
nothing that lies in the pool is handed to a caller.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dsv4_compile.kernels.cuda import inlets
from dsv4_compile.kernels.cuda.kept import PER_THREAD_STREAM
from dsv4_compile.kernels.driver import bindings, check

__all__ = [
    "CudaRecorder",
    "Inlets",
    "Layout",
    "NothingLaunchedError",
    "Recorder",
    "Recording",
    "RecordingError",
    "addresses",
    "recorder_of",
]

logger = logging.getLogger("dsv4_compile")


class RecordingError(RuntimeError):
    """Nothing was recorded; the message says why."""


class NothingLaunchedError(RecordingError):
    """A graph of it would do nothing."""

    def __init__(self) -> None:
        super().__init__("it launches nothing, so a graph of it would do nothing")


@dataclass(frozen=True)
class Layout:
    """What a tensor is besides its content. Sizes and strides in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """That of `tensor`."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    def buffer(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A tensor like this with memory of its own, and the part of it that holds each element once.

        Raises:
            RecordingError: elements share memory in another way than by being expanded.
        """
        once = tuple(1 if stride == 0 else size for size, stride in zip(self.shape, self.stride, strict=True))
        reach = 1
        for stride, size in sorted((t, n) for t, n in zip(self.stride, once, strict=True) if n != 1):
            if stride < reach:
                raise RecordingError("an input has elements that share memory")
            reach = stride * size
        base = torch.empty_strided(once, self.stride, dtype=self.dtype, device=self.device)
        return base if once == self.shape else base.expand(self.shape), base


@dataclass(frozen=True)
class Recording:
    """A graph that can be replayed, and the bytes by which the memory of the process grew for it."""

    replay: Callable[[], None]
    bytes: int
    graph: Any = None


class Inlets(Protocol):
    """Copies at the start of a graph (`kernels/cuda/inlets.py`)."""

    def point(self, sources: list[int]) -> None:
        """The next replay copies from these addresses."""


class Recorder(Protocol):
    """What records and replays; `CudaRecorder` does, tests have one of their own."""

    device: torch.device
    """Of the graphs."""
    lock: threading.RLock
    """Held while a graph is recorded or replayed."""
    is_busy: bool
    """A call is under way that replays or records. Between two of its graphs its values lie in the pool, so what is
    called from there must not replay others."""

    def record(self, body: Callable[[], None]) -> Recording:
        """Runs `body`, whose launches become a graph; tensors made in it lie in the pool."""

    def borrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor at the address of `tensor` that does not keep its memory."""

    def unmoved(self, values: list[Any], addresses: list[int | None], places: list[int]) -> bool:
        """Whether the tensors at `places` have the addresses given there."""

    def inlets(self, buffers: Sequence[torch.Tensor]) -> Inlets | None:
        """In `record`, before the first launch: lets the graph copy contiguous tensors into `buffers`; None when it
        cannot."""

    @property
    def is_here(self) -> bool:
        """Whether the caller's current device is the one of the graphs, since `enter`."""

    def enter(self) -> bool:
        """Orders what follows behind earlier replays; False when nothing can be replayed now."""

    def session(self) -> contextlib.AbstractContextManager[None]:
        """Around the recordings of one call."""


class CudaRecorder:
    """The graphs of CUDA device `index`."""

    def __init__(self, index: int):
        self.index = index
        self.device = torch.device("cuda", index)
        self.lock = threading.RLock()
        self.stream = torch.cuda.Stream(index)
        self.is_here = self.is_busy = False
        self._pool: Any = None
        self._alive = 0
        self._last: torch.cuda.Stream | None = None
        self._raw = -1
        """The handle of `_last`."""
        self._stream: Any = None
        """The same for the driver."""
        self._made: list[inlets.Inlets] = []
        """By the recording that is going on."""

    def record(self, body: Callable[[], None]) -> Recording:
        """As `Recorder.record`.

        Raises:
            RecordingError: `body` did something that cannot be captured, or launched nothing.
        """
        before = torch.cuda.memory_reserved(self.index)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self._handle(), capture_error_mode="thread_local")
            try:
                body()
                graph.capture_end()
                empty = self._is_empty(graph, len(self._made))
                if not empty:
                    graph.instantiate()
                    executable = self._bind(graph)
            except BaseException as error:
                self._made.clear()
                self._abandon(graph)
                if not isinstance(error, Exception):
                    raise
                logger.debug("Recording failed", exc_info=True)
                raise RecordingError(_sentence(error)) from error
        self._made.clear()
        if empty:
            raise NothingLaunchedError
        self._alive += 1
        weakref.finalize(graph, self._gone)
        replay = self._replay(graph, executable)
        return Recording(replay, torch.cuda.memory_reserved(self.index) - before, graph)

    def _bind(self, graph: torch.cuda.CUDAGraph) -> Any:
        driver, _ = bindings()
        executable = driver.CUgraphExec(graph.raw_cuda_graph_exec())
        for one in self._made:
            one.bind(executable)
        return executable

    def _replay(self, graph: torch.cuda.CUDAGraph, executable: Any) -> Callable[[], None]:
        """As `graph.replay`, which looks up the device, the stream and the random numbers that the graph draws; here
        `enter` has found the first two, and the first replay shows whether there are any of the third."""
        driver, _ = bindings()
        launch = driver.cuGraphLaunch
        draws: bool | None = None

        def replay() -> None:
            nonlocal draws
            if draws is not False or not self.is_here:
                generator = torch.cuda.default_generators[self.index]
                before = generator.get_offset()
                graph.replay()
                draws = generator.get_offset() != before
                return
            (status,) = launch(executable, self._stream)
            if status:
                raise RuntimeError(f"A CUDA graph could not be launched: CUDA returned {status.name}.")

        return replay

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends a capture that failed. The allocator would go on serving it, and later captures from its pool."""
        with contextlib.suppress(Exception):
            graph.capture_end()
        with contextlib.suppress(Exception):
            torch._C._cuda_endAllocateToPool(self.index, self._pool)
        self._pool = None
        torch.cuda.synchronize(self.index)

    def _handle(self) -> Any:
        """The pool; a new one when no graph of the old one is left."""
        if self._pool is None or self._alive == 0:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def _gone(self) -> None:
        self._alive -= 1

    @staticmethod
    def _is_empty(graph: torch.cuda.CUDAGraph, copies: int) -> bool:
        driver, _ = bindings()
        return int(check(driver.cuGraphGetNodes(driver.CUgraph(graph.raw_cuda_graph()), 0))[1]) <= copies

    def inlets(self, buffers: Sequence[torch.Tensor]) -> Inlets | None:
        """As `Recorder.inlets`."""
        if not self._has_inlets or len(buffers) > inlets.MOST:
            return None
        made = inlets.Inlets(buffers)
        made.enqueue(self.index)
        self._made.append(made)
        return made

    @functools.cached_property
    def _has_inlets(self) -> bool:
        try:
            inlets.prepare(self.index)
        except Exception as error:
            logger.warning(
                "Inputs of CUDA graphs are copied one by one: the kernel for it could not be made (%s: %s).",
                type(error).__name__,
                error,
            )
            return False
        return True

    def borrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `Recorder.borrowed`."""
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, size)
        metadata = {
            "nbytes": size,
            "data_ptr": storage.data_ptr(),
            "size": tensor.shape,
            "stride": tensor.stride(),
            "dtype": tensor.dtype,
            "device": tensor.device,
            "storage_offset": tensor.storage_offset(),
        }
        made = torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(metadata, memory)
        made = made.conj() if tensor.is_conj() else made  # these bits say how to read what lies there
        return torch._neg_view(made) if tensor.is_neg() else made

    def unmoved(self, values: list[Any], addresses: list[int | None], places: list[int]) -> bool:
        """As `Recorder.unmoved`."""
        return bool(torch._C._tensors_data_ptrs_at_indices_equal(values, addresses, places))

    def enter(self) -> bool:
        """As `Recorder.enter`."""
        if self.is_busy or torch.cuda.is_current_stream_capturing():
            return False
        self.is_here = torch._C._cuda_getDevice() == self.index
        raw = torch._C._cuda_getCurrentRawStream(self.index)
        if raw != self._raw or raw == PER_THREAD_STREAM:
            self._move(raw)
        return True

    def _move(self, raw: int) -> None:
        """The current stream is another than at the last replay."""
        current = torch.cuda.current_stream(self.index)
        if self._last is not None and current != self._last:
            current.wait_stream(self._last)
        self._last, self._raw, self._stream = current, raw, bindings()[0].CUstream(raw)

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """As `Recorder.session`. Graphs get workspaces of cuBLAS of their own, which lie in the pool."""
        gc.collect()  # nothing that is freed by it has a place in a capture
        enabled = gc.isenabled()
        gc.disable()
        torch.cuda.synchronize(self.index)
        _ = self._has_inlets  # loads the kernel
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with torch.cuda.device(self.index):
                yield
        finally:
            torch._C._cuda_clearCublasWorkspaces()
            if enabled:
                gc.enable()


def _sentence(error: BaseException) -> str:
    brief = (str(error) or "no message").strip().splitlines()[0]
    return f"it cannot be captured ({type(error).__name__}: {brief})"


@functools.cache
def cuda_recorder(index: int) -> CudaRecorder:
    """The one recorder of a device."""
    return CudaRecorder(index)


def recorder_of(device: torch.device) -> Recorder | None:
    """What captures on `device`, or None."""
    if device.type != "cuda":
        return None
    return cuda_recorder(torch.cuda.current_device() if device.index is None else device.index)


def addresses(values: Sequence[Any], places: Sequence[int]) -> list[int | None]:
    """A list as long as `values` with the addresses of those at `places`."""
    wanted = set(places)
    return [value.data_ptr() if i in wanted else None for i, value in enumerate(values)]
