"""A launch of the skinny product that is kept from call to call.

Of all that a launch is given only addresses change: of the input, of the outputs, of the workspace. The rest (which
kernel, how it is cut up, where the weights lie, the structure of arguments) depends on the weights and on the layout of
the input, which `grouped.run` has looked at. So the structure is made once, and a call writes some numbers into it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4_compile.kernels.cuda.kept import COUNTERS
from dsv4_compile.kernels.cuda.launch import configuration
from dsv4_compile.kernels.driver import bindings
from dsv4_compile.kernels.linear.skinny.arguments import ARGUMENTS, is_aligned, pack_arguments
from dsv4_compile.kernels.linear.skinny.plans import MOST_LINEARS, WARPS, Variant, tiles_of

try:  # What Inductor's generated code allocates with: a third of the time of torch.empty.
    from torch._C._dynamo.guards import _empty_strided_cuda as empty_strided_cuda  # type: ignore[attr-defined]
except ImportError:  # pragma: no cover
    empty_strided_cuda = None

__all__ = ["Made", "Prepared", "empty_strided_cuda", "keep"]

# `struct Arguments` in words of eight bytes: seven for each weight, of which the third is the address of its output;
# then the addresses of the input, its stride, the addresses of the workspace and of the counters.
WORDS = ARGUMENTS.size // 8
OF_A_WEIGHT, OUTPUT = 7, 2
INPUT, WORKSPACE, COUNTING = (MOST_LINEARS * OF_A_WEIGHT + i for i in (0, 2, 3))
_Words = ctypes.c_int64 * WORDS
_Pointer = ctypes.c_void_p * 1


@dataclass(frozen=True)
class _Output:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    words: tuple[tuple[int, int], ...]
    """Where in the structure an address in it belongs, and how many bytes behind its first."""


class Prepared:
    """The launch for weights that lie where they lay, and an input of one layout."""

    def __init__(
        self, variant: Variant, function: Any, groups: int, index: int, template: bytes, outputs: list[_Output]
    ) -> None:
        self.function, self.groups, self.index = function, groups, index
        self.template, self.outputs = template, outputs
        self.partials = groups * variant.partials
        self._shape = (
            groups * variant.splits, 32 * WARPS, variant.shared_bytes, variant.splits if variant.plan.cluster else 1
        )  # fmt: skip
        self._configurations: dict[int, Any] = {}
        self._idle: list[tuple[Any, Any, int]] = []
        """Structures that no call is using: threads must not share one."""
        self._launch = bindings()[0].cuLaunchKernelEx

    def __call__(self, x: Tensor) -> list[Tensor] | None:
        """The outputs, or None where an input needs the longer way: not aligned, or not on the current device."""
        address = x.data_ptr()
        if address % 16 or not (x.get_device() == self.index == torch._C._cuda_getDevice()):
            return None
        torch.cuda.is_current_stream_capturing()  # makes the device's context current in a thread that has none yet
        made = [empty_strided_cuda(one.shape, one.stride, one.dtype) for one in self.outputs]
        try:
            words, pointer, place = self._idle.pop()
        except IndexError:
            words, pointer, place = self._structure()
        words[INPUT] = address
        for output, tensor in zip(self.outputs, made, strict=True):
            start = tensor.data_ptr()
            for word, offset in output.words:
                words[word] = start + offset
        if self.partials:
            workspace = empty_strided_cuda((self.partials,), (1,), torch.float32)
            words[WORKSPACE], words[COUNTING] = workspace.data_ptr(), COUNTERS.take(self.groups, self.index)
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        config = self._configurations.get(stream) or self._configured(stream)
        (status,) = self._launch(config, self.function, place, 0)
        self._idle.append((words, pointer, place))
        if status:
            raise RuntimeError(f"CUDA returned {status.name}")
        return made

    def _structure(self) -> tuple[Any, Any, int]:
        words = _Words.from_buffer_copy(self.template)
        pointer = _Pointer(ctypes.addressof(words))
        return words, pointer, ctypes.addressof(pointer)

    def _configured(self, stream: int) -> Any:
        config = self._configurations[stream] = configuration(self.index, *self._shape, stream)
        return config


@dataclass(frozen=True)
class Made:
    """A call that has been made, without biases.

    x: the input as it was given, and `rows` the same as a matrix, of the dtype of the weights. outputs: `[N, M]`,
    contiguous. parts: for each weight its output, and the first and last column there.
    """

    x: Tensor
    rows: Tensor
    weights: Sequence[Tensor]
    outputs: Sequence[Tensor]
    parts: Sequence[tuple[int, int, int]]


def keep(variant: Variant, function: Any, call: Made) -> Prepared | None:
    """The launch of `call` for the next ones like it: of the kernel `variant`, whose handle is `function`.

    None when a later call needs more than other addresses.
    """
    x, rows, weights, outputs = call.x, call.rows, call.weights, call.outputs
    if empty_strided_cuda is None or rows.data_ptr() != x.data_ptr() or not is_aligned(rows):
        return None
    views = [outputs[i][:, start:stop] for i, start, stop in call.parts]
    template = pack_arguments(rows, weights, [None] * len(weights), views, 0, 0)
    groups = variant.groups(tiles_of([weight.shape[0] for weight in weights]))
    words: list[list[tuple[int, int]]] = [[] for _ in outputs]
    having_rows = [i for i, weight in enumerate(weights) if weight.shape[0]]
    for position, i in enumerate(having_rows):
        output = call.parts[i][0]
        offset = views[i].data_ptr() - outputs[output].data_ptr()
        words[output].append((position * OF_A_WEIGHT + OUTPUT, offset))
    lead = x.shape[:-1]
    made = [
        _Output((*lead, output.shape[1]), output.view(*lead, output.shape[1]).stride(), output.dtype, tuple(of_output))
        for output, of_output in zip(outputs, words, strict=True)
    ]
    return Prepared(variant, function, groups, rows.get_device(), template, made)
