"""A tape as one function: what its entries do in turn, written out, so that the host does little but launch.

    values[7] = value = operator_3(values[5], values[1])
    values[5] = None
    source = values[7]
    if not is_like(source, buffer_4): source = filled(buffer_4, source)   (without the call of `is_like`)
    inlets_4.point([source.data_ptr()])
    replay_4()
    values[8] = made_4_8
    ...

A value leaves the table behind its last reader, so that the allocator gives its memory to the next one: the addresses
that graphs read are then mostly those of the call before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch._C._dynamo.guards import assert_size_stride

from dsv4_compile.runtime.direct import call_text
from dsv4_compile.runtime.entries import Direct, Segment, fill, filled, owned
from dsv4_compile.runtime.program import Program

__all__ = ["straight"]

Entry = Callable[[list[Any]], None]


def straight(program: Program, entries: Sequence[Entry], lent: Iterable[int]) -> Callable[[list[Any]], list[Any]]:
    """A function of the table that does what `entries` do and returns the results of the graph.

    Args:
        lent: places of results that are copied for the caller.
    """
    writer = _Writer({"fill": fill, "filled": filled, "owned": owned, "check": assert_size_stride})
    checked = _needing_a_check(program, entries)
    for number, entry in enumerate(entries):
        if isinstance(entry, Segment) and not entry.off:
            writer.segment(number, entry)
        elif isinstance(entry, Direct):
            writer.direct(number, entry, checked)
        else:
            writer.add(f"{writer.name(f'entry_{number}', entry)}(values)")
    for place in lent:
        writer.add(f"values[{place}] = owned(values[{place}])")
    results = (
        f"values[{place}]" if place is not None else writer.name(f"constant_{i}", constant)
        for i, (place, constant) in enumerate(program.results)
    )
    writer.add(f"return [{', '.join(results)}]")
    return writer.function()


def _needing_a_check(program: Program, entries: Sequence[Entry]) -> set[int]:
    """Results of operators that somebody reads who does not look how they lie, as copies into a graph do."""
    copied: set[tuple[str, int]] = set()
    for entry in entries:
        if isinstance(entry, Segment) and not entry.off:
            copied |= {(step.name, place) for step in entry.steps for place, _ in entry.entrance.fed}
    readers = {(step.name, place) for step in program.steps for place in step.inputs}
    return {place for _, place in readers - copied} | {place for place, _ in program.results if place is not None}


class _Writer:
    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names
        self.lines: list[str] = []

    def add(self, *lines: str) -> None:
        self.lines += lines

    def name(self, name: str, value: Any) -> str:
        """The name of a value that the function is given once and for all."""
        self.names[name] = value
        return name

    def segment(self, number: int, segment: Segment) -> None:
        entrance = segment.entrance
        for place, buffer in entrance.copies:
            self.add(f"fill({self.name(f'buffer_{number}_{place}', buffer)}, values[{place}])")
        addresses = []
        for i, (place, buffer) in enumerate(entrance.fed):
            source, into = f"source_{i}", self.name(f"buffer_{number}_{place}", buffer)
            shape = self.name(f"shape_{number}_{place}", buffer.shape)
            dtype = self.name(f"dtype_{number}_{place}", buffer.dtype)
            self.add(
                f"{source} = values[{place}]",
                # `is_like`
                f"if not ({source}.shape == {shape} and {source}.dtype is {dtype} and {source}.is_contiguous()"
                f" and {source}.get_device() == {buffer.get_device()} and not {source}.is_neg()):",
                f"    {source} = filled({into}, {source})",
            )
            addresses.append(f"{source}.data_ptr()")
        if addresses:
            inlets = self.name(f"inlets_{number}", entrance.inlets)
            self.add(f"{inlets}.point([{', '.join(addresses)}])")
        self.add(f"{self.name(f'replay_{number}', segment.recording.replay)}()")
        for place, value in segment.made:
            self.add(f"values[{place}] = {self.name(f'made_{number}_{place}', value)}")
        done = {place for step in segment.steps for place in step.done}
        read = [place for place, _ in (*entrance.fed, *entrance.copies)]
        self.drop([place for place in read if place in done], len(addresses))

    def direct(self, number: int, entry: Direct, checked: set[int]) -> None:
        step = entry.step
        call = call_text(entry.call, step.inputs, lambda name, value: self.name(f"{name}_{number}", value))
        single = entry.call.results == (None,)
        target = f"values[{step.outputs[0]}] = value" if single else "made"
        self.add(f"{target} = {call}")
        for place, part, (shape, stride) in zip(step.outputs, entry.call.results, entry.layouts, strict=True):
            if not single:
                self.add(f"values[{place}] = value = made" + ("" if part is None else f"[{part}]"))
            if place in checked and entry.call.checked:
                self.add(f"check(value, {shape!r}, {stride!r})")
        self.add("made = value = None" if not single else "value = None")
        self.drop(step.done)

    def drop(self, places: Sequence[int], sources: int = 0) -> None:
        """Lets go of what nobody reads any more."""
        names = [f"values[{place}]" for place in places] + [f"source_{i}" for i in range(sources)]
        if names:
            self.add(" = ".join([*names, "None"]))

    def function(self) -> Callable[[list[Any]], list[Any]]:
        text = "def play(values):\n" + "".join(f"    {line}\n" for line in self.lines)
        exec(compile(text, "<dsv4 tape>", "exec"), self.names)
        made: Callable[[list[Any]], list[Any]] = self.names.pop("play")  # or it would keep itself, and the graphs
        return made
