"""A stand-in for cuBLASLt on a CPU, called as C functions are, which remembers what it is given and multiplies."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from ctypes import c_float, c_int, c_int32, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

DTYPES = {2: torch.float16, 14: torch.bfloat16}
OK, INVALID, NOT_SUPPORTED = 0, 7, 15

P = c_void_p
# As cublasLt.h declares them.
DECLARED: dict[str, tuple[Any, ...]] = {
    "cublasLtCreate": (P,),
    "cublasLtMatmulDescCreate": (P, c_int, c_int),
    "cublasLtMatmulDescSetAttribute": (P, c_int, P, c_size_t),
    "cublasLtMatrixLayoutCreate": (P, c_int, c_uint64, c_uint64, c_int64),
    "cublasLtMatrixLayoutDestroy": (P,),
    "cublasLtMatmulPreferenceCreate": (P,),
    "cublasLtMatmulPreferenceDestroy": (P,),
    "cublasLtMatmulPreferenceSetAttribute": (P, c_int, P, c_size_t),
    "cublasLtMatmulAlgoGetHeuristic": (P, P, P, P, P, P, P, c_int, P, P),
    "cublasLtMatmulAlgoConfigGetAttribute": (P, c_int, P, c_size_t, P),
    "cublasLtMatmulAlgoCheck": (P, P, P, P, P, P, P, P),
    "cublasLtMatmul": (P, P, P, P, P, P, P, P, P, P, P, P, P, P, c_size_t, P),
}


class Result(ctypes.Structure):
    _fields_ = (
        ("algo", c_uint64 * 8), ("workspaceSize", c_size_t), ("state", c_int), ("wavesCount", c_float),
        ("reserved", c_int * 4),
    )  # fmt: skip


@dataclass(frozen=True)
class Proposed:
    """What the heuristics return: a configuration, the workspace it takes, a status."""

    tile: int
    parts: int = 1
    workspace: int = 0
    state: int = 0
    cluster: int = 4

    @property
    def configuration(self) -> tuple[int, ...]:
        return 66, self.tile, self.parts, 0, 0, 0, 35, 0, self.cluster


@dataclass(frozen=True)
class Layout:
    dtype: torch.dtype
    rows: int
    columns: int
    step: int


@dataclass(frozen=True)
class Call:
    """A product: on which device and stream, with which algorithm, of which layouts."""

    handle: int
    device: int
    stream: int
    algorithm: Proposed
    layouts: tuple[Layout, Layout, Layout]


def proposed(tokens: int, workspace: int) -> list[Proposed]:
    """The first one is what `torch.mm` takes; the tiles say for how many tokens they are."""
    return [Proposed(10 * tokens + i) for i in range(4)]


class _Function(ctypes._CFuncPtr):
    _flags_ = ctypes._FUNCFLAG_CDECL
    _restype_ = c_int


@dataclass
class Standin:
    """The library. `device` is the current one; `proposed` says what there is for so many tokens and bytes."""

    device: int = 0
    proposed: Callable[[int, int], list[Proposed]] = proposed
    checked: Callable[[Proposed, tuple[Layout, ...]], tuple[int, int]] = lambda algorithm, layouts: (OK, 0)
    status: int = OK
    create: int = OK
    asked: list[tuple[int, int, dict[int, int]]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    handles: dict[int, int] = field(default_factory=dict)
    errors: list[Exception] = field(default_factory=list)
    things: dict[int, Any] = field(default_factory=dict)
    algorithms: list[Proposed] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._numbers: Iterator[int] = iter(range(1 << 40, 1 << 41))
        self._kept = []
        for name, types in DECLARED.items():
            function = ctypes.CFUNCTYPE(c_int, *types)(self._guarded(getattr(self, f"_{name[8:]}")))
            self._kept.append(function)
            # As it is found in a library: who calls it must say what it takes.
            setattr(self, name, _Function(ctypes.cast(function, P).value))

    def _guarded(self, function: Callable[..., int]) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            try:
                return function(*arguments)
            except Exception as error:
                self.errors.append(error)
                return 99

        return call

    def of(self, kind: type) -> list[Any]:
        return [thing for thing in self.things.values() if type(thing) is kind]

    def _made(self, place: int, thing: Any) -> int:
        number = next(self._numbers)
        self.things[number] = thing
        P.from_address(place).value = number
        return OK

    def _Create(self, place: int) -> int:
        if self.create:
            return self.create
        self._made(place, self)
        self.handles[P.from_address(place).value or 0] = self.device
        return OK

    def _MatmulDescCreate(self, place: int, compute: int, scale: int) -> int:
        assert (compute, scale) == (68, 0)
        return self._made(place, {"turned": 0})

    def _MatmulDescSetAttribute(self, operation: int, attribute: int, value: int, size: int) -> int:
        assert attribute == 3 and size == 4
        self.things[operation]["turned"] = c_int32.from_address(value).value
        return OK

    def _MatrixLayoutCreate(self, place: int, dtype: int, rows: int, columns: int, step: int) -> int:
        assert step >= rows > 0 and columns > 0
        return self._made(place, Layout(DTYPES[dtype], rows, columns, step))

    def _MatrixLayoutDestroy(self, layout: int) -> int:
        assert isinstance(self.things.pop(layout), Layout)
        return OK

    def _MatmulPreferenceCreate(self, place: int) -> int:
        return self._made(place, [])

    def _MatmulPreferenceDestroy(self, preference: int) -> int:
        assert isinstance(self.things.pop(preference), list)
        return OK

    def _MatmulPreferenceSetAttribute(self, preference: int, attribute: int, value: int, size: int) -> int:
        assert size == (8 if attribute == 1 else 4)
        number = (c_uint64 if size == 8 else c_uint32).from_address(value).value
        self.things[preference].append((attribute, number))
        return OK

    def _layouts(self, operation: int, *layouts: int) -> tuple[Layout, Layout, Layout]:
        assert self.things[operation] == {"turned": 1}
        a, b, c, d = (self.things[layout] for layout in layouts)
        assert a.rows == b.rows and c == d and (d.rows, d.columns) == (a.columns, b.columns)
        return a, b, d

    def _on_its_device(self, handle: int) -> None:
        assert self.handles[handle] == self.device

    def _algorithm(self, place: int) -> Proposed:
        return self.algorithms[(c_uint64 * 8).from_address(place)[7] - 1]

    def _MatmulAlgoGetHeuristic(
        self, handle: int, operation: int, a: int, b: int, c: int, d: int, preference: int, most: int, place: int,
        count: int,
    ) -> int:  # fmt: skip
        self._on_its_device(handle)
        _, rows, _ = self._layouts(operation, a, b, c, d)
        wanted = dict(self.things[preference])
        self.asked.append((rows.columns, most, wanted))
        found = self.proposed(rows.columns, wanted[1])[:most]
        results = (Result * most).from_address(place)
        for result, one in zip(results, found, strict=False):
            self.algorithms.append(one)
            result.algo[7], result.workspaceSize, result.state = len(self.algorithms), one.workspace, one.state
        c_int.from_address(count).value = len(found)
        return OK if found else NOT_SUPPORTED

    def _MatmulAlgoConfigGetAttribute(self, algo: int, attribute: int, value: int, size: int, written: int) -> int:
        kind = c_uint16 if attribute in (7, 8) else c_uint32
        if size != ctypes.sizeof(kind):
            return INVALID
        kind.from_address(value).value = self._algorithm(algo).configuration[attribute]
        c_size_t.from_address(written).value = size
        return OK

    def _MatmulAlgoCheck(
        self, handle: int, operation: int, a: int, b: int, c: int, d: int, algo: int, result: int
    ) -> int:
        self._on_its_device(handle)
        status, workspace = self.checked(self._algorithm(algo), self._layouts(operation, a, b, c, d))
        Result.from_address(result).workspaceSize = workspace
        return status

    def _Matmul(
        self, handle: int, operation: int, alpha: int, weight: int, a: int, rows: int, b: int, beta: int, before: int,
        c: int, output: int, d: int, algo: int, workspace: int | None, size: int, stream: int,
    ) -> int:  # fmt: skip
        self._on_its_device(handle)
        assert (c_float.from_address(alpha).value, c_float.from_address(beta).value) == (1, 0)
        assert workspace is None and size == 0 and before == output
        layouts = self._layouts(operation, a, b, c, d)
        self.calls.append(Call(handle, self.device, stream, self._algorithm(algo), layouts))
        if self.status:
            return self.status
        of_weight, of_rows, of_output = map(_seen, (weight, rows, output), layouts)
        of_output.copy_(of_rows.float() @ of_weight.float().t())
        return OK


def _seen(address: int, layout: Layout) -> Tensor:
    """What lies there, each column as a row."""
    size = ((layout.columns - 1) * layout.step + layout.rows) * layout.dtype.itemsize
    flat = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=layout.dtype)
    return flat.as_strided((layout.columns, layout.rows), (layout.step, 1))
