"""What a recorded call consists of: replays of graphs, and calls of what could not be recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsv4_compile.runtime.direct import OperatorCall
from dsv4_compile.runtime.program import Step, run_step
from dsv4_compile.runtime.recorder import Inlets, Layout, Recording, RecordingError

__all__ = ["Call", "Direct", "Entrance", "Segment", "fill", "filled", "is_like", "owned"]


_SPARSE = 2
"""How much longer than its content the memory of a result may be."""


@dataclass
class Entrance:
    """How inputs get to where a graph reads them: `inlets` copies contiguous ones as its first node.

    Attributes:
        fed: what it copies, as place and buffer.
        copies: what is copied before, as place and buffer.
    """

    inlets: Inlets | None = None
    fed: tuple[tuple[int, torch.Tensor], ...] = ()
    copies: tuple[tuple[int, torch.Tensor], ...] = ()

    def open(self, values: Sequence[Any]) -> list[torch.Tensor]:
        """Names the sources of the next replay; returns what has to be kept until it is launched."""
        kept: list[torch.Tensor] = []
        for place, buffer in self.copies:
            fill(buffer, values[place])
        if self.inlets is not None:
            sources = []
            for place, buffer in self.fed:
                source = values[place]
                if not is_like(source, buffer):
                    source = filled(buffer, source)
                    kept.append(source)
                sources.append(source.data_ptr())
            self.inlets.point(sources)
        return kept

    def fill(self, values: Sequence[Any]) -> None:
        """Copies now, for steps that run without the graph."""
        for place, buffer in (*self.copies, *self.fed):
            fill(buffer, values[place])


@dataclass
class Segment:
    """A recorded run of steps.

    Attributes:
        made: what it leaves, as place and value; tensors are borrowed from the pool.
        reads: what its steps read from elsewhere, by place, but for parameters.
    """

    steps: tuple[Step, ...]
    recording: Recording
    entrance: Entrance
    made: tuple[tuple[int, Any], ...]
    reads: dict[int, Any]
    off: bool = False

    def __call__(self, values: list[Any]) -> None:
        """Replays it."""
        if self.off:
            self.entrance.fill(values)
            self._run(values)
        else:
            kept = self.entrance.open(values)
            self.recording.replay()
            del kept
        for place, value in self.made:
            values[place] = value

    def run(self, values: Sequence[Any]) -> dict[int, Any]:
        """What the steps make of the same inputs, which `entrance` has copied, without the graph, by place."""
        table = {**dict(enumerate(values)), **self.reads}
        for step in self.steps:
            outputs = step.code.run([table[i] for i in step.inputs])
            table.update(zip(step.outputs, outputs, strict=True))
        return {place: table[place] for place, _ in self.made}

    def _run(self, values: Sequence[Any]) -> None:
        # Segments behind this one have the addresses of its results in them.
        fresh = self.run(values)
        for place, value in self.made:
            if isinstance(value, torch.Tensor):
                once = _without_repetitions(value)
                once.copy_(_once(fresh[place], once))


def is_like(source: torch.Tensor, buffer: torch.Tensor) -> bool:
    """Whether the bytes of `source` are what `buffer`, which is contiguous, is to hold."""
    return (
        source.shape == buffer.shape
        and source.dtype is buffer.dtype
        and source.is_contiguous()
        and source.get_device() == buffer.get_device()
        and not source.is_neg()
    )


def fill(buffer: torch.Tensor, source: torch.Tensor) -> None:
    """Copies `source`, of which one repetition is enough where it was expanded when the graph was recorded."""
    buffer.copy_(source if source.shape == buffer.shape else _once(source, buffer))


def filled(buffer: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The content of `source` in a new tensor that lies like `buffer`."""
    made = torch.empty_like(buffer)
    fill(made, source)
    return made


def owned(result: torch.Tensor) -> torch.Tensor:
    """`result` in memory of its own, with its strides: who looks at them, as Dynamo's guards do, sees no replay.

    A small part of a long tensor becomes contiguous, for it would hold all that memory.
    """
    if result.is_contiguous():
        made = result.clone()
        if made.stride() == result.stride():  # those of axes of one element may be anything
            return made
    span = sum((size - 1) * stride for size, stride in zip(result.shape, result.stride(), strict=True))
    if span >= _SPARSE * result.numel():
        return result.clone()
    try:
        made, once = Layout.of(result).buffer()
    except RecordingError:  # no tensor of its own lies like this
        return result.clone()
    once.copy_(_once(result, once))
    return made


def _without_repetitions(tensor: torch.Tensor) -> torch.Tensor:
    """One repetition of axes along which `tensor` is expanded."""
    for axis, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[axis] > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def _once(source: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """`source` without the repetitions of axes along which it is expanded.

    Raises:
        ValueError: it is not expanded, as it was when the graph was recorded.
    """
    for axis, size in enumerate(buffer.shape):
        if source.shape[axis] != size:
            if source.stride(axis) != 0:
                raise ValueError("An input that was expanded when its graph was recorded is not any more.")
            source = source.narrow(axis, 0, 1)
    return source


@dataclass(frozen=True)
class Call:
    """A step that is not recorded."""

    step: Step

    def __call__(self, values: list[Any]) -> None:
        run_step(self.step, values)


@dataclass(frozen=True)
class Direct(Call):
    """One that is the call of an operator, which `straight` writes out. In the call that was recorded the results lay
    as `layouts` says."""

    call: OperatorCall
    layouts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
