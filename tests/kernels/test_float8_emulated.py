"""float8 weights in the skinny product's kernel, which is compiled for the CPU as in `test_skinny_emulated.py`."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.linear import grouped, mixed, skinny, tuning
from dsv4_compile.kernels.linear.products import FLOAT8, Scaled
from dsv4_compile.kernels.linear.skinny.plans import PLANS, Variant, fitted
from dsv4_compile.kernels.linear.strategies import Card
from tests.kernels.test_skinny_emulated import BF16, F16, F32, aligned, run

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@dataclass(frozen=True)
class Low:
    """A float8 weight of a case: its rows, which of the inputs it is multiplied by, and what else it has."""

    rows: int
    input: int = 0
    by_row: bool = False
    biased: bool = False
    wide: bool = False


def aligned_bytes(rows: int, columns: int) -> Tensor:
    """float8 numbers of all sizes with NaN around them, each row at a multiple of 16 bytes."""
    memory = torch.full((rows + 2, columns + 32), torch.nan).to(FLOAT8)
    inner = memory[1:-1, 16:-16]
    inner.copy_((torch.randn(rows, columns) * 2.0 ** torch.randint(-9, 6, (rows, columns))).to(FLOAT8))
    assert skinny.is_aligned(inner)
    return inner


def exact_product(given: Scaled, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """In float64, and what rounding is relative to: the same of absolute values."""
    scale = given.of_rows.double() * given.of_weight.double()
    left, right, shift = given.rows.double(), weight.double(), 0 if bias is None else bias.double()
    return scale * (left @ right.t()) + shift, scale * (left.abs() @ right.abs().t()) + abs(shift)


def check(
    variant: Variant,
    folder: Path,
    tokens: int,
    plain: Sequence[int],
    low: Sequence[Low],
    columns: int,
    late: bool = True,
    backwards: bool = False,
) -> None:
    """Numbers against float64, and nothing written beside the outputs. Every other plain weight has a bias."""
    dtype = {"bf16": BF16, "f16": F16}[variant.type]
    x = aligned(tokens, columns, dtype)
    inputs = [aligned_bytes(tokens, columns) for _ in range(1 + max(one.input for one in low))]
    scaled = []
    for one in low:
        shapes = ((tokens, 1), (1, one.rows)) if one.by_row else ((), ())
        of_rows, of_weight = (2.0 ** -torch.rand(shape) / 7 for shape in shapes)
        scaled.append(Scaled(inputs[one.input], of_rows, of_weight, F32 if one.wide else dtype))
    weights = [aligned(count, columns, dtype) for count in plain] + [aligned_bytes(one.rows, columns) for one in low]
    biased = [i % 2 == 0 for i in range(len(plain))] + [one.biased for one in low]
    biases = [torch.randn(w.shape[0]).to(dtype) if has else None for w, has in zip(weights, biased, strict=True)]
    dtypes = [dtype] * len(plain) + [given.dtype for given in scaled]
    around = [torch.full((tokens + 2, w.shape[0] + 6), 77.0, dtype=d) for w, d in zip(weights, dtypes, strict=True)]
    outputs = [whole[1:-1, 3:-3] for whole in around]
    run(variant, folder, x, weights, biases, outputs, scaled, late, backwards)
    one = torch.ones(())
    for weight, bias, output, whole, given in zip(
        weights, biases, outputs, around, [Scaled(x, one, one, dtype)] * len(plain) + scaled, strict=True
    ):
        exact, size = exact_product(given, weight, bias)
        room = 2**-20 * size + (0 if output.dtype is F32 else torch.finfo(dtype).eps / 2 * exact.abs())
        if dtype is F16:
            room = room + 2**-25  # half of the least number
        assert ((output.double() - exact).abs() <= room).all()
        inside = torch.zeros_like(whole, dtype=torch.bool)
        inside[1:-1, 3:-3] = True
        assert (whole[~inside] == 77.0).all()


PLAIN = (40, 1, 16, 9)
LOW = (Low(33, by_row=True, biased=True), Low(24, wide=True), Low(5, 1, biased=True), Low(17, 1, by_row=True))
CASES = [
    ("whole", 6, "bf16", 8, (1, 7, 8)),
    ("whole, early", 6, "f16", 16, (9, 16)),
    ("pairs", 8, "bf16", 8, (1, 8)),
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
    """Two float8 inputs beside the common one, scales of both kinds, biases, odd rows, columns that fill no stage."""
    rows = [[low.rows for low in LOW if low.input == number] for number in (0, 1)]
    variant = fitted(PLANS[name], dtype, most, PLAIN, 1040, 90, multiprocessors, rows)
    assert variant is not None
    variant = dataclasses.replace(variant, stages=3 + variant.plan.apart)
    for turn, tokens in enumerate(counts):
        check(variant, folder, tokens, PLAIN, LOW, 1040, late=turn % 2 == 0, backwards=turn % 2 == 1)
    check(variant, folder, counts[-1], (20,), (Low(100, biased=True),), 16 * 65, late=False)


@pytest.mark.parametrize("plain", [(), (3,), (48, 16)])
@pytest.mark.parametrize("low", [(Low(16),), (Low(1, 1), Low(50, 0, by_row=True)), (Low(7, 0), Low(7, 1), Low(7, 0))])
def test_all_mixtures(plain: tuple[int, ...], low: tuple[Low, ...], folder: Path) -> None:
    variant = fitted(PLANS["whole"], "bf16", 8, (48, 16), 272, 90, 9, ((50,), (16,)))
    assert variant is not None
    for tokens in (1, 5, 8):
        check(variant, folder, tokens, plain, low, 272)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("tokens", [8, 64])
def test_the_kernels_for_flash_are_right(name: str, tokens: int, folder: Path) -> None:
    """As they are compiled for an H100, on fewer rows and columns."""
    variant = fitted(PLANS[name], "bf16", tokens, (1024, 1024, 256, 256, 64), 4096, 90, 132, ((1024, 512),))
    if variant is None:
        assert PLANS[name].early or PLANS[name].columns > 256  # has too little shared memory
        return
    columns = 2 * variant.plan.columns + 16
    check(variant, folder, tokens - 1, (variant.rows, 3), (Low(variant.rows + 1), Low(9)), columns, late=tokens == 8)


def test_every_float8_number_is_itself(folder: Path) -> None:
    """Times one, for all 256 of them; NaN stays NaN."""
    variant = fitted(PLANS["whole"], "bf16", 8, (16,), 16, 90, 4, ((256,),))
    assert variant is not None
    numbers = torch.arange(256, dtype=torch.uint8).view(FLOAT8)
    weight, rows = torch.zeros(256, 16, dtype=torch.uint8).view(FLOAT8), torch.zeros(16, 16)
    for i in range(256):
        weight.view(torch.uint8)[i, i % 16] = i
    outputs = [torch.empty(8, 16, dtype=BF16), torch.empty(8, 256)]
    plain, one = torch.zeros(16, 16, dtype=BF16), torch.ones(())
    got = torch.empty(256)
    for half in (0, 1):
        rows = torch.eye(16)[8 * half : 8 * half + 8].to(FLOAT8)
        scaled = [Scaled(rows, one, one, F32)]
        run(variant, folder, torch.zeros(8, 16, dtype=BF16), [plain, weight], [None, None], outputs, scaled)
        for i in range(256):
            if i % 16 // 8 == half:
                got[i] = outputs[1][i % 8, i]
    assert got.nan_to_num(999.0).equal(numbers.float().nan_to_num(999.0))


def test_results_do_not_depend_on_the_other_tokens(folder: Path) -> None:
    variant = fitted(PLANS["pairs"], "bf16", 16, (20,), 1040, 90, 6, ((60,),))
    assert variant is not None
    x, rows, weights = (
        aligned(16, 1040, BF16),
        aligned_bytes(16, 1040),
        [aligned(20, 1040, BF16), aligned_bytes(60, 1040)],
    )
    scales = torch.rand(16, 1), torch.rand(1, 60)
    whole = [torch.empty(16, count, dtype=BF16) for count in (20, 60)]
    alone = [torch.empty(1, count, dtype=BF16) for count in (20, 60)]
    run(variant, folder, x, weights, [None, None], whole, [Scaled(rows, *scales, BF16)])
    run(variant, folder, x[5:6], weights, [None, None], alone, [Scaled(rows[5:6], scales[0][5:6], scales[1], BF16)])
    for one, all_of_them in zip(alone, whole, strict=True):
        assert one.equal(all_of_them[5:6])


@pytest.mark.parametrize("wide", [(), (True, False, False, False), (False, False, True, True)])
def test_the_operators_launch_gets_each_result_where_it_belongs(
    wide: tuple[bool, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of the operator, with the launches emulated; what is not for the kernel is torch's product."""
    launched: list[tuple[torch.dtype, int, int]] = []

    def chosen(plan: Any, dtype: Any, tokens: int, features: Any, columns: int, _: object, low: Any) -> Variant | None:
        return fitted(plan, skinny.TYPES[dtype], tokens, [f for f in features if f], columns, 90, 9, low)

    def launch(variant: Variant, _: object, rows: Tensor, weights: list[Tensor], *rest: Any) -> None:
        launched.append((rows.dtype, len(weights), len(rest[-1])))
        run(variant, folder, rows, weights, *rest)

    for name, instead in {
        "_refusal": lambda *_: None,
        "unavailable": lambda: None,
        "_chosen": chosen,
        "_kernel": lambda variant, _: variant,
        "_launch": launch,
    }.items():
        monkeypatch.setattr(skinny, name, instead)
    monkeypatch.setattr(tuning, "card_of", lambda _: Card("H100", 132, 90))
    dtypes = (BF16, F32, BF16, F16)
    weights = [torch.randn(count, 144).to(dtype) for count, dtype in zip((20, 3, 0, 17), dtypes, strict=True)]
    weights += [torch.randn(count, 144).to(FLOAT8) for count in (9, 16, 24, 0)]
    x = torch.randn(2, 3, 144).to(BF16)
    first, second = x.view(6, 144).to(FLOAT8), (x.view(6, 144) / 2).to(FLOAT8)
    one, half = torch.ones(()), torch.tensor(0.5)
    scaled = [
        Scaled(first, one, half, BF16),
        Scaled(second, one, one, F16),
        Scaled(second, torch.rand(6, 1), torch.rand(1, 24), BF16),
        Scaled(first, one, one, BF16),
    ]
    result_dtypes = [*dtypes, *(given.dtype for given in scaled)]
    biases = [
        torch.randn(weight.shape[0]).to(dtype) if i % 2 == 0 else None
        for i, (weight, dtype) in enumerate(zip(weights, result_dtypes, strict=True))
    ]
    outputs = mixed.run_as("skinny: whole", x, weights, biases, [0] * 8, scaled, wide)
    plain = grouped.run_as("serial", x, weights[:4], biases[:4], [0] * 4, wide)
    count = len(plain)
    assert [output.shape[2] for output in plain] == ([20, 3, 0, 17] if any(wide) else [20, 3, 17])
    torch.testing.assert_close(outputs[:count], plain, rtol=1e-2, atol=1e-2)
    assert [output.dtype for output in plain].count(F32) == 1 + sum(wide)
    of_bf16, of_f16 = outputs[count:]
    low = [of_bf16[..., :9], of_f16, of_bf16[..., 9:33], of_bf16[..., 33:]]
    for given, weight, bias, output in zip(scaled, weights[4:], biases[4:], low, strict=True):
        exact, _ = exact_product(given, weight, bias)
        assert output.dtype == given.dtype and output.shape == (2, 3, weight.shape[0])
        torch.testing.assert_close(output.reshape(exact.shape).double(), exact, rtol=1e-2, atol=1e-2)
    assert launched == [(BF16, 5, 3), (F16, 1, 0)]
