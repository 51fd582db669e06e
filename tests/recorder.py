"""CUDA graphs on the CPU: operators are recorded with the addresses they read and write, and replayed on those.

What a recording allocates lies in one arena, from which later recordings take what has been freed, as they do from the
memory pool of CUDA graphs. So a value that is read after its memory went to somebody else is wrong here, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dsv4_compile.runtime.recorder import NothingLaunchedError, Recording, RecordingError

ALIGNMENT = 64
_ALLOCATING = ("aten::empty", "aten::empty_strided", "aten::new_empty", "aten::empty_like")


class Arena:
    """Bytes that are given out first fit."""

    def __init__(self, size: int = 1 << 24) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8)
        self.used: list[tuple[int, int]] = []

    def take(self, size: int) -> Block:
        size = -(-max(size, 1) // ALIGNMENT) * ALIGNMENT
        start = 0
        for begin, end in sorted(self.used):
            if begin - start >= size:
                break
            start = end
        assert start + size <= self.memory.numel(), "the arena is full"
        self.used.append((start, start + size))
        return Block(self, start, start + size)

    @property
    def peak(self) -> int:
        return max((end for _, end in self.used), default=0)


class Block:
    """Memory that goes back when nothing refers to it."""

    def __init__(self, arena: Arena, start: int, end: int) -> None:
        self.arena, self.start, self.end = arena, start, end

    def __del__(self) -> None:
        self.arena.used.remove((self.start, self.end))

    def tensor(self, like: Tensor) -> Tensor:
        """A tensor of this memory with the layout of `like`, which keeps it."""
        made = torch.empty(0, dtype=like.dtype)
        offset = self.start // like.element_size()
        made.set_(self.arena.memory.untyped_storage(), offset, like.shape, like.stride())
        made.block = self
        return made


def reach(tensor: Tensor) -> int:
    """Bytes from its first element to behind its last."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def borrowed(tensor: Tensor) -> Tensor:
    """At the same address, without keeping the block."""
    made = torch.empty(0, dtype=tensor.dtype)
    made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    made = made.conj() if tensor.is_conj() else made
    return torch._neg_view(made) if tensor.is_neg() else made


class _Taker(TorchDispatchMode):
    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.arena = arena
        self.launches: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        if func is torch.ops.aten.copy_.default:  # nothing runs while it is recorded
            self.launches.append((func, tree_map(self._address, args), kwargs, []))
            return args[0]
        result = func(*args, **kwargs)
        given = {x.untyped_storage().data_ptr(): x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        in_arena = self.arena.memory.untyped_storage().data_ptr()
        own: list[Tensor] = []

        def placed(out: Any) -> Any:
            if not isinstance(out, Tensor):
                return out
            pointer = out.untyped_storage().data_ptr()
            if pointer in given and out.numel():
                if pointer == in_arena:
                    at = out.storage_offset() * out.element_size()
                    blocks = [x.block for x in tree_leaves((args, kwargs)) if hasattr(x, "block")]
                    out.block = next(block for block in blocks if block.start <= at < block.end)
                return out
            made = self.arena.take(reach(out)).tensor(out)
            made.copy_(torch.full_like(out, float("nan")) if out.is_floating_point() else torch.zeros_like(out))
            own.append(borrowed(made))
            return made

        result = tree_map(placed, result)
        if own and func._schema.name not in _ALLOCATING:
            self.launches.append((func, tree_map(self._address, args), tree_map(self._address, kwargs), own))
        return result

    @staticmethod
    def _address(value: Any) -> Any:
        return borrowed(value) if isinstance(value, Tensor) else value


class Inlets:
    """Copies bytes from addresses, as the first node of a graph does; nothing is known of the tensors there."""

    def __init__(self, recorder: FakeRecorder, buffers: list[Tensor]) -> None:
        self.recorder = recorder
        self.targets = [(buffer.data_ptr(), reach(buffer)) for buffer in buffers]
        self.sources: list[int] = []

    def point(self, sources: list[int]) -> None:
        assert len(sources) == len(self.targets)
        self.recorder.pointed += sources != self.sources
        self.sources = sources

    def copy(self) -> None:
        for source, (target, size) in zip(self.sources, self.targets, strict=True):
            ctypes.memmove(target, source, size)


class FakeRecorder:
    """As `CudaRecorder`. `fail` is asked for a reason before each recording."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.arena = Arena()
        self.recorded: list[int] = []
        self.fail: Callable[[int], str | None] = lambda number: None
        self.available = True
        self.device = torch.device("cpu")
        self.is_here, self.is_busy = True, False
        self.is_recording = False
        self.feeds = True
        self.pointed = 0
        """How often a copy got another source."""
        self._taker: _Taker | None = None

    def record(self, body: Callable[[], None]) -> Recording:
        number = len(self.recorded)
        self.recorded.append(0)
        if reason := self.fail(number):
            raise RecordingError(reason)
        before = self.arena.peak
        with _Taker(self.arena) as taker:
            self._taker, self.is_recording = taker, True
            try:
                body()
            except RecordingError:
                raise
            except Exception as error:
                raise RecordingError(f"it cannot be captured ({error})") from error
            finally:
                self.is_recording = False
        if all(func is Inlets.copy for func, *_ in taker.launches):
            raise NothingLaunchedError
        self.recorded[number] = len(taker.launches)

        def replay() -> None:
            for func, args, kwargs, outputs in taker.launches:
                made = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
                if outputs:
                    for out, value in zip(outputs, made[-len(outputs) :], strict=True):
                        out.copy_(value)

        return Recording(replay, max(0, self.arena.peak - before))

    def borrowed(self, tensor: Tensor) -> Tensor:
        return borrowed(tensor)

    def inlets(self, buffers: list[Tensor]) -> Inlets | None:
        assert self._taker is not None
        made = Inlets(self, buffers) if self.feeds else None
        if made is not None:
            self._taker.launches.append((Inlets.copy, (made,), {}, []))
        return made

    def unmoved(self, values: list[Any], addresses: list[int | None], places: list[int]) -> bool:
        return all(values[i].data_ptr() == addresses[i] for i in places)

    def enter(self) -> bool:
        return self.available and not self.is_busy

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        yield
