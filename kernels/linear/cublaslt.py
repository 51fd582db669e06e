"""What of cuBLASLt a product with a named algorithm takes, by ctypes (`cublasLt.h`).

    y[N, M] = x[N, K] @ W[M, K]^T        is for cuBLASLt, which counts by columns,        D = A^T B

with A = W (K rows, M columns), B = x (K rows, N columns) and D = y (M rows, N columns); the stride of a row in torch is
that of a column there. bfloat16 or float16, float32 sums, no bias, no workspace.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Sequence
from ctypes import c_int, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["TYPES", "Algorithm", "Launch", "Product", "create", "load"]

TYPES = {torch.float16: 2, torch.bfloat16: 14}  # cudaDataType
SUMS, FLOAT32, TRANSPOSED, OF_A = 68, 0, 1, 3  # CUBLAS_COMPUTE_32F, CUDA_R_32F, CUBLAS_OP_T, ..._DESC_TRANSA
WORKSPACE, ALIGNMENTS = 1, (5, 6, 7, 8)  # CUBLASLT_MATMUL_PREF_...
NOT_SUPPORTED = 15  # CUBLAS_STATUS_...
CONFIGURATION = (4, 4, 4, 4, 4, 4, 4, 2, 2)  # bytes of CUBLASLT_ALGO_CONFIG_ID, TILE_ID, SPLITK_NUM, ...
PARTS = 2  # CUBLASLT_ALGO_CONFIG_SPLITK_NUM
ALIGNMENT = 16  # bytes, of addresses and rows

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cublasLtCreate": (c_void_p,),
    "cublasLtMatmulDescCreate": (c_void_p, c_int, c_int),
    "cublasLtMatmulDescSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatrixLayoutCreate": (c_void_p, c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
    "cublasLtMatrixLayoutDestroy": (c_void_p,),
    "cublasLtMatmulPreferenceCreate": (c_void_p,),
    "cublasLtMatmulPreferenceDestroy": (c_void_p,),
    "cublasLtMatmulPreferenceSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatmulAlgoGetHeuristic": (*(c_void_p,) * 7, c_int, c_void_p, c_void_p),
    "cublasLtMatmulAlgoConfigGetAttribute": (c_void_p, c_int, c_void_p, c_size_t, c_void_p),
    "cublasLtMatmulAlgoCheck": (c_void_p,) * 8,
    "cublasLtMatmul": (*(c_void_p,) * 14, c_size_t, c_void_p),
}


class _Heuristic(ctypes.Structure):
    """`cublasLtMatmulHeuristicResult_t`."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", ctypes.c_float),
        ("reserved", c_int * 4),
    )


@functools.cache
def load() -> Any:
    """The cuBLASLt of this torch.

    Raises:
        OSError: there is none.
        AttributeError: it lacks a function.
    """
    if torch.version.cuda is None:
        raise OSError("this torch is built without CUDA")
    library = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")
    for name, types in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, c_int
    return library


def _check(status: int, name: str) -> None:
    if status:
        raise RuntimeError(f"{name} returned {status}")


def create(name: str, *arguments: int) -> int:
    """What the function `name` of the library creates: a handle, which belongs to the current device, or a description.

    Raises:
        RuntimeError: it creates nothing.
    """
    made = c_void_p()
    _check(getattr(load(), name)(ctypes.byref(made), *arguments), name)
    assert made.value is not None
    return made.value


@functools.cache
def _operation() -> int:
    """D = A^T B with float32 sums."""
    made = create("cublasLtMatmulDescCreate", SUMS, FLOAT32)
    turn = ctypes.c_int32(TRANSPOSED)
    _check(load().cublasLtMatmulDescSetAttribute(made, OF_A, ctypes.byref(turn), 4), "cublasLtMatmulDescSetAttribute")
    return made


@dataclass(frozen=True)
class Algorithm:
    """One way of cuBLASLt to make a product. `words` are the library's own; equal configurations are one algorithm."""

    words: tuple[int, ...]
    configuration: tuple[int | None, ...]

    @property
    def is_whole(self) -> bool:
        """Whether each number of the result is one sum, and not a sum of partial ones."""
        return self.configuration[PARTS] in (0, 1)


def _read(words: Any) -> Algorithm:
    get = load().cublasLtMatmulAlgoConfigGetAttribute
    configuration = []
    for attribute, size in enumerate(CONFIGURATION):
        value, written = c_uint32(), c_size_t()
        status = get(ctypes.byref(words), attribute, ctypes.byref(value), size, ctypes.byref(written))
        configuration.append(None if status else value.value)
    return Algorithm(tuple(words), tuple(configuration))


class Product:
    """The shapes of one product. `strides` are those of the rows of W, x and y, in elements."""

    def __init__(
        self, dtype: torch.dtype, tokens: int, columns: int, features: int, strides: Sequence[int] = ()
    ) -> None:
        shapes = ((columns, features), (columns, tokens), (features, tokens))
        of_rows = strides or (columns, columns, features)
        self.layouts = [
            create("cublasLtMatrixLayoutCreate", TYPES[dtype], *shape, stride)
            for shape, stride in zip(shapes, of_rows, strict=True)
        ]
        for layout in self.layouts:
            weakref.finalize(self, load().cublasLtMatrixLayoutDestroy, layout).atexit = False
        weight, rows, output = self.layouts
        self.arguments = _operation(), weight, rows, output, output

    def proposals(self, handle: int, workspace: int, most: int) -> list[Algorithm]:
        """The algorithms that need at most `workspace` bytes, the one that should be the fastest first.

        Raises:
            RuntimeError: the library reports an error.
        """
        library = load()
        preference = create("cublasLtMatmulPreferenceCreate")
        try:
            for attribute, value in (
                (WORKSPACE, ctypes.c_uint64(workspace)),
                *((attribute, c_uint32(ALIGNMENT)) for attribute in ALIGNMENTS),
            ):
                name = "cublasLtMatmulPreferenceSetAttribute"
                _check(getattr(library, name)(preference, attribute, ctypes.byref(value), ctypes.sizeof(value)), name)
            results, count = (_Heuristic * most)(), c_int()
            name = "cublasLtMatmulAlgoGetHeuristic"
            status = getattr(library, name)(handle, *self.arguments, preference, most, results, ctypes.byref(count))
        finally:
            library.cublasLtMatmulPreferenceDestroy(preference)
        if status == NOT_SUPPORTED:
            return []
        _check(status, name)
        fine = [result for result in results[: count.value] if result.state == 0 and result.workspace <= workspace]
        return [_read(result.algorithm) for result in fine]

    def launch(self, handle: int, algorithm: Algorithm) -> Launch | None:
        """The product with `algorithm`, or None where that cannot make it without a workspace."""
        words, result = (ctypes.c_uint64 * 8)(*algorithm.words), _Heuristic()
        status = load().cublasLtMatmulAlgoCheck(handle, *self.arguments, ctypes.byref(words), ctypes.byref(result))
        return None if status or result.workspace else Launch(self, handle, words)


_ONE, _ZERO = ctypes.c_float(1), ctypes.c_float(0)


class Launch:
    """A product of which only the addresses and the stream are missing."""

    def __init__(self, product: Product, handle: int, words: Any) -> None:
        self._kept = product, words  # what the addresses below belong to
        self._matmul, self._handle = load().cublasLtMatmul, handle
        self._operation, self._of_weight, self._of_rows, self._of_output, _ = product.arguments
        self._algorithm = ctypes.addressof(words)
        self._one, self._zero = ctypes.addressof(_ONE), ctypes.addressof(_ZERO)

    def __call__(self, weight: int, rows: int, output: int, stream: int) -> int:
        """The status of cuBLAS, 0 for success. The device of the handle must be the current one."""
        status: int = self._matmul(
            self._handle, self._operation, self._one, weight, self._of_weight, rows, self._of_rows, self._zero,
            output, self._of_output, output, self._of_output, self._algorithm, None, 0, stream,
        )  # fmt: skip
        return status
