"""The skinny product's kernel compiled for the CPU: its threads, copies and tensor-core instructions, in turn.

`emulated.h` is written after the PTX manual. A launch there has to be right whatever the order of blocks, and whether
copies arrive at once or as late as its waits allow; a thread that waits for ever is a failure, and so is shared memory
that is read before it was written (it is NaN).
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dsv4_compile.kernels.linear import grouped, skinny
from dsv4_compile.kernels.linear.products import Scaled
from dsv4_compile.kernels.linear.skinny.plans import PLANS, Plan, Variant, fitted

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")

HERE = Path(__file__).parent
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@functools.cache
def library(variant: Variant, folder: Path) -> ctypes.CDLL:
    macros = [f"-D{name}={value}" for name, value in variant.macros.items()]
    target = folder / f"{abs(hash(variant))}.so"
    options = ["-std=c++17", "-O1", "-U_FORTIFY_SOURCE", "-shared", "-fPIC", f"-I{skinny.SOURCE.parent}"]
    done = subprocess.run(
        ["g++", *options, *macros, "-o", str(target), str(HERE / "emulated.cpp")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded = ctypes.CDLL(str(target))
    loaded.emulate.restype = ctypes.c_char_p
    return loaded


def run(
    variant: Variant,
    folder: Path,
    rows: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    outputs: Sequence[Tensor],
    scaled: Sequence[Scaled] = (),
    late: bool = True,
    backwards: bool = False,
) -> None:
    groups = skinny.groups_of(variant, weights, scaled)
    workspace = torch.full((groups * variant.partials + 1,), torch.nan)
    counters = torch.zeros(groups, dtype=torch.int32)
    given = rows, weights, biases, outputs, workspace.data_ptr(), counters.data_ptr()
    packed = skinny.pack_mixed(variant, *given, scaled) if variant.low else skinny.pack_arguments(*given)
    fault = library(variant, folder).emulate(packed, groups, variant.shared_bytes, late, backwards)
    assert fault is None, fault.decode()
    assert not counters.any()
    assert workspace[-1].isnan()


def aligned(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Numbers with something that is no number around them, each row at a multiple of 16 bytes."""
    memory = torch.full((rows + 2, columns + 16), torch.nan, dtype=dtype)
    inner = memory[1:-1, 8:-8]
    inner.copy_(torch.randn(rows, columns) / 4)
    assert skinny.is_aligned(inner)
    return inner


def check(
    variant: Variant,
    folder: Path,
    tokens: int,
    features: Sequence[int],
    columns: int,
    wide: Sequence[int] = (),
    biased: Sequence[int] = (),
    late: bool = True,
    backwards: bool = False,
) -> list[Tensor]:
    """Numbers against float64, and nothing written beside the outputs."""
    dtype = {"bf16": BF16, "f16": F16}[variant.type]
    rows, weights = aligned(tokens, columns, dtype), [aligned(count, columns, dtype) for count in features]
    biases = [torch.randn(count).to(dtype) if i in biased else None for i, count in enumerate(features)]
    around = [
        torch.full((tokens + 2, count + 6), 77.0, dtype=F32 if i in wide else dtype) for i, count in enumerate(features)
    ]
    outputs = [whole[1:-1, 3:-3] for whole in around]
    run(variant, folder, rows, weights, biases, outputs, late=late, backwards=backwards)
    for weight, bias, output, whole in zip(weights, biases, outputs, around, strict=True):
        exact = functional.linear(rows.double(), weight.double(), None if bias is None else bias.double())
        size = rows.double().abs() @ weight.double().abs().t() + (0 if bias is None else bias.double().abs())
        room = 2**-20 * size + (0 if output.dtype is F32 else torch.finfo(dtype).eps / 2 * exact.abs())
        assert ((output.double() - exact).abs() <= room).all()
        inside = torch.zeros_like(whole, dtype=torch.bool)
        inside[1:-1, 3:-3] = True
        assert (whole[~inside] == 77.0).all()
    return outputs


EIGHT = (40, 17, 1, 16, 9, 33, 5, 24)
CASES = [
    ("whole", 6, "bf16", 8, (1, 7, 8)),
    ("whole, early", 6, "f16", 16, (9, 16)),
    ("pairs", 6, "bf16", 8, (1, 8)),
    ("pairs", 6, "f16", 64, (33, 64)),
    ("pairs, two", 4, "bf16", 32, (31, 32)),
    ("fours", 16, "bf16", 16, (9, 16)),
    ("apart", 6, "bf16", 8, (1, 7)),
    ("apart", 12, "bf16", 64, (33, 64)),
    ("apart, early", 6, "f16", 16, (9, 16)),
    ("apart, wide", 12, "bf16", 32, (8, 31)),
    ("parts", 12, "bf16", 8, (1, 7)),
    ("parts", 6, "f16", 64, (63,)),
]


@pytest.mark.parametrize(("name", "multiprocessors", "dtype", "most", "counts"), CASES)
def test_every_row_and_token_is_multiplied_once(
    name: str, multiprocessors: int, dtype: str, most: int, counts: tuple[int, ...], folder: Path
) -> None:
    """Odd numbers of rows, eight weights, columns that fill no stage, biases, outputs of two dtypes.

    The card is small, so that a block has several tiles, and there are few stages, so that they are used again.
    """
    variant = fitted(PLANS[name], dtype, most, EIGHT, 1032, 90, multiprocessors)
    assert variant is not None
    variant = dataclasses.replace(variant, stages=3 + variant.plan.apart)
    for turn, tokens in enumerate(counts):
        check(variant, folder, tokens, EIGHT, 1032, (1, 5), (0, 1, 6), late=turn % 2 == 0, backwards=turn % 2 == 1)
    check(variant, folder, counts[-1], (100,), 8 * 130, late=False)


FLASH = (1024, 512, 1024, 1024, 256, 256, 64)
PRO = (1536, *FLASH[1:])


@pytest.mark.parametrize(
    ("name", "features", "columns", "tokens"),
    [(name, FLASH, 4096, 64) for name in PLANS]
    + [(name, PRO, 7168, 16) for name in ("whole", "pairs, early", "parts")],
)
def test_the_kernels_for_the_models_are_right(
    name: str, features: tuple[int, ...], columns: int, tokens: int, folder: Path
) -> None:
    """As they are compiled for an H100, on fewer rows and columns: parts of the columns have none."""
    variant = fitted(PLANS[name], "bf16", tokens, features, columns, 90, 132)
    if variant is None:
        assert PLANS[name].early or PLANS[name].columns > 256  # has too little shared memory
        return
    check(variant, folder, tokens - 1, (variant.rows, 3), 3 * variant.plan.columns + 8, late=variant.tiles % 2 == 0)


def test_results_do_not_depend_on_the_other_tokens(folder: Path) -> None:
    variant = fitted(PLANS["pairs"], "bf16", 16, EIGHT, 1032, 90, 6)
    assert variant is not None
    rows, weight = aligned(16, 1032, BF16), aligned(60, 1032, BF16)
    whole, alone = torch.empty(16, 60, dtype=BF16), torch.empty(1, 60, dtype=BF16)
    run(variant, folder, rows, [weight], [None], [whole])
    run(variant, folder, rows[5:6], [weight], [None], [alone])
    assert alone.equal(whole[5:6])


def test_a_group_of_several_dtypes_gets_each_result_in_its_columns(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of the operator, with the launches emulated: what is not for the kernel is torch's product."""
    launched: list[tuple[torch.dtype, int]] = []

    def chosen(
        plan: Plan, dtype: torch.dtype, tokens: int, features: tuple[int, ...], columns: int, _: object, low: object
    ) -> Variant | None:
        counts = [count for count in features if count]
        return fitted(plan, skinny.TYPES[dtype], tokens, counts, columns, 90, 6)

    def launch(variant: Variant, _: object, rows: Tensor, weights: list[Tensor], *rest: Any) -> None:
        launched.append((rows.dtype, len(weights)))
        run(variant, folder, rows, weights, *rest)

    for name, instead in {
        "_refusal": lambda *_: None,
        "unavailable": lambda: None,
        "_chosen": chosen,
        "_kernel": lambda variant, _: variant,
        "_launch": launch,
    }.items():
        monkeypatch.setattr(skinny, name, instead)
    dtypes = (BF16, F32, BF16, F16, BF16, F32)
    weights = [torch.randn(count, 136).to(dtype) for count, dtype in zip((20, 3, 0, 17, 9, 4), dtypes, strict=True)]
    biases = [torch.randn(weight.shape[0]).to(weight.dtype) if i % 2 == 0 else None for i, weight in enumerate(weights)]
    x = torch.randn(2, 3, 136).to(BF16)
    outputs = grouped.run_as("skinny: whole", x, weights, biases, [0] * 6)
    expected = grouped.run_as("serial", x, weights, biases, [0] * 6)
    torch.testing.assert_close(outputs, expected, rtol=1e-2, atol=1e-2)
    assert launched == [(BF16, 3), (F16, 1)]
