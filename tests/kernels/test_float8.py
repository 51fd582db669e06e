"""float8 weights beside others: what is served, `dsv4::mixed_linear`, and what the compiler says.

`test_float8_emulated.py` runs the kernel itself, on a CPU; `test_float8_gpu.py` has numbers on a card;
`passes/test_float8.py` finds the layers in a model.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels import linear
from dsv4_compile.kernels.linear import grouped, mixed, packing, products, skinny, strategies, timing, tuning
from dsv4_compile.kernels.linear.products import FLOAT8, Scaled
from dsv4_compile.kernels.linear.skinny import arguments
from dsv4_compile.kernels.linear.skinny.plans import MOST_LINEARS, PLANS, TOKENS, WARPS, Variant, fitted
from dsv4_compile.kernels.linear.strategies import Card, Low, Problem
from tests.kernels.test_skinny import HOPPER, SKINNY, compiled_by_nvcc

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
REST, QUERY_AND_KEY = (1024, 1024, 256, 256, 64), (1024, 512)
LOW = (Low(BF16, False, 0, False),) * 2


pytestmark = pytest.mark.usefixtures("fresh_choices")


def problem(**changes: Any) -> Problem:
    of_flash = Problem(
        HOPPER,
        4096,
        (*REST, *QUERY_AND_KEY),
        (BF16,) * 5 + (FLOAT8,) * 2,
        (False,) * 7,
        tuple((i,) for i in range(7)),
        (0, 0, 1, 1, 2, 3, 3),
        BF16,
        True,
        scaled=LOW,
    )
    return dataclasses.replace(of_flash, **changes)


# ------------------------------------------------------------------------------------------------------------ the ways


def products_of(name: str, of: Problem) -> list[list[tuple[tuple[int, ...], bool]]]:
    return [[(p.members, p.gathered) for p in slot] for slot in strategies.plan_of(name, of).slots]


def test_float8_weights_join_the_launch_of_the_others() -> None:
    assert products_of("skinny: whole", problem()) == [[((0, 1, 2, 3, 4, 5, 6), True)]]
    assert strategies.plan_of("skinny: whole", problem()).outputs == ((BF16, 2624), (BF16, 1536))


@pytest.mark.parametrize(
    "changes",
    [
        {"card": Card("NVIDIA A100", 108, 80)},
        {"columns": 4104},
        {"scaled": (Low(F16, False, 0, False),) * 2},
        {"scaled": (Low(F32, False, 0, False),) * 2, "biased": (False,) * 5 + (True,) * 2},
    ],
    ids=["card", "columns", "dtype", "wide with a bias"],
)
def test_elsewhere_float8_weights_are_products_of_torchs_beside_the_launch(changes: dict[str, Any]) -> None:
    assert products_of("skinny: whole", problem(**changes)) == [[((0, 1, 2, 3, 4), True), ((5,), False), ((6,), False)]]


def test_float8_weights_that_lie_one_behind_the_other_are_one_product() -> None:
    of = problem(runs=((0, 1, 2, 3, 4), (5, 6)))
    assert products_of("pack", of) == [[((0, 1, 2, 3, 4), False), ((5, 6), False)]]
    assert products_of("pack+streams", of) == [[((0, 1, 2, 3, 4), False)], [((5, 6), False)], [], []]
    ((plain, low),) = strategies.plan_of("pack", of).slots
    assert (plain.output, plain.start, plain.stop) == (0, 0, 2624) and (low.output, low.start, low.stop) == (1, 0, 1536)


def test_other_ways_have_a_product_for_each_float8_weight() -> None:
    runs = ((0, 1, 2, 3, 4), (5,), (6,))
    of = problem(runs=runs)
    assert products_of("serial", of) == [[((i,), False) for i in range(7)]]
    assert products_of("pack", of) == [[((0, 1, 2, 3, 4), False), ((5,), False), ((6,), False)]]
    assert [[members for members, _ in slot] for slot in products_of("pack+streams", of)] == [
        [runs[0]],
        [(5,)],
        [(6,)],
        [],
    ]
    assert [sorted(m for m, _ in slot) for slot in products_of("streams", of)] == [
        [(0,), (1,)],
        [(2,), (3,)],
        [(4,)],
        [(5,), (6,)],
    ]


def test_served_where_one_launch_has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny, "_bindings_missing", lambda: None)

    def served(of: Problem, tokens: float = 8) -> set[str]:
        return {name for name in strategies.legal(of, tokens) if name in SKINNY}

    assert served(problem()) == set(SKINNY)
    assert served(problem(), 64) and not served(problem(), 128)
    assert not served(problem(aligned=False))
    nine = problem(
        features=(64,) * 9, dtypes=(BF16,) * 7 + (FLOAT8,) * 2, biased=(False,) * 9, runs=((0,),) * 9, streams=(0,) * 9
    )
    assert not served(nine)


def variants(capability: int, multiprocessors: int, tokens: Sequence[int] = TOKENS) -> list[Variant]:
    found = [
        fitted(plan, "bf16", count, REST, columns, capability, multiprocessors, [low])
        for plan in PLANS.values()
        for columns, low in ((4096, QUERY_AND_KEY), (7168, (1536, 512)))
        for count in tokens
    ]
    return list(dict.fromkeys(variant for variant in found if variant is not None))


def test_one_wave_does_all_on_an_h100() -> None:
    weights = [torch.empty(count, 0) for count in (*REST, *QUERY_AND_KEY)]
    x = torch.empty(1, 0, dtype=FLOAT8)
    for plan in PLANS.values():
        variant = fitted(plan, "bf16", 8, REST, 4096, 90, 132, [QUERY_AND_KEY])
        assert variant is not None and variant.low
        groups = arguments.groups_of(variant, weights, [Scaled(x, x, x, BF16)] * 2)
        assert 100 <= groups * variant.splits <= 132 * plan.blocks


def test_no_plan_below_compute_capability_8_9_nor_for_odd_columns() -> None:
    plan = PLANS["whole"]
    assert fitted(plan, "bf16", 8, REST, 4096, 80, 108, [QUERY_AND_KEY]) is None
    assert fitted(plan, "bf16", 8, REST, 4104, 90, 132, [QUERY_AND_KEY]) is None
    assert fitted(plan, "bf16", 8, REST, 4096, 89, 142, [QUERY_AND_KEY]) is not None


def test_the_arguments_are_packed_as_the_kernel_reads_them() -> None:
    text = (skinny.SOURCE.parent / "skinny.cuh").read_text()
    members = re.sub(r"//.*", "", re.search(r"struct Low \{(.*?)\n\};", text, re.S).group(1))
    declared = [part for part in members.split(";") if part.strip()]
    wide = sum("*" in part or "i64" in part for part in declared)
    assert arguments.LOWS.size == MOST_LINEARS * (8 * wide + 4 * (len(declared) - wide))
    assert arguments.ARGUMENTS.size % 8 == 0


def test_a_measurement_has_buffers_for_float8() -> None:
    of = problem(
        columns=32, features=(16,) * 7, biased=(False, True) * 3 + (True,), scaled=(LOW[0], Low(BF16, True, 1, True))
    )
    one = timing._sets(torch.empty(1 << 16, dtype=torch.uint8), of, 5)[0]
    timing._fill([one])
    first, second = one.scaled
    assert first.rows.shape == second.rows.shape == (5, 32) and first.rows.data_ptr() != second.rows.data_ptr()
    assert (first.of_rows.shape, second.of_rows.shape, second.of_weight.shape) == ((), (5, 1), (1, 16))
    assert (
        one.weights[5].dtype == FLOAT8 and one.weights[5].float().abs().max() < 2 and one.weights[5].float().std() > 0
    )
    assert one.biases[5].dtype == BF16 and [output.shape for output in one.outputs] == [(5, 80), (5, 32)]


# -------------------------------------------------------------------------------------------------------- the operator


def quantised(rows: int, columns: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """A random matrix as float8 and its scale by row."""
    whole = torch.randn(rows, columns, device=device) / columns**0.5
    scale = whole.abs().amax(1, keepdim=True) / 448
    return (whole / scale).to(FLOAT8), scale


@dataclasses.dataclass
class Case:
    """The arguments of `mixed_linear`, and what it must be close to."""

    x: Tensor
    weights: list[Tensor]
    biases: list[Tensor | None]
    scaled: list[Scaled]
    low_weights: list[Tensor]
    low_biases: list[Tensor | None]

    def arguments(self, streams: list[int]) -> tuple[Any, ...]:
        scales = [one.of_rows for one in self.scaled], [one.of_weight for one in self.scaled]
        low = [one.rows for one in self.scaled], self.low_weights, self.low_biases, *scales, self.scaled[0].dtype
        return (self.x, self.weights, self.biases, streams, *low)

    def every(self) -> tuple[list[Tensor], list[Tensor | None]]:
        return [*self.weights, *self.low_weights], [*self.biases, *self.low_biases]

    def exact(self) -> list[Tensor]:
        """In float64: the others side by side, then the float8 layers."""
        plain, *low = self.exact_layers()
        return [plain, torch.cat(low, -1)]

    def exact_layers(self) -> list[Tensor]:
        """In float64: the others side by side, then each float8 layer."""
        rows = self.x.reshape(-1, self.x.shape[-1]).double()

        def plus(product: Tensor, bias: Tensor | None) -> Tensor:
            return product if bias is None else product + bias.double()

        plain = [plus(rows @ w.double().t(), b) for w, b in zip(self.weights, self.biases, strict=True)]
        low = [
            plus(s.of_rows.double() * s.of_weight.double() * (s.rows.double() @ w.double().t()), b)
            for s, w, b in zip(self.scaled, self.low_weights, self.low_biases, strict=True)
        ]
        return [torch.cat(plain, -1), *low]

    def torchs(self) -> list[Tensor]:
        """The float8 layers by torch."""
        made = []
        for one, weight, bias in zip(self.scaled, self.low_weights, self.low_biases, strict=True):
            out = weight.new_empty((one.rows.shape[0], weight.shape[0]), dtype=one.dtype)
            made.append(products.multiply_scaled(one, weight.t(), bias, out))
        return made


def case(
    tokens: int,
    columns: int,
    features: Sequence[int],
    low: Sequence[int],
    by_row: bool = False,
    biased: bool = False,
    inputs: int = 1,
    dtype: torch.dtype = BF16,
    device: str = "cpu",
) -> Case:
    x = (torch.randn(tokens, columns, device=device) / 8).to(BF16)
    weights = [(torch.randn(count, columns, device=device) / columns**0.5).to(BF16) for count in features]
    given = [quantised(tokens, columns, device) for _ in range(inputs)]
    if not by_row:
        given = [(rows, scale.amax() if tokens else scale.new_ones(())) for rows, scale in given]
    scaled, low_weights = [], []
    for i, count in enumerate(low):
        weight, of_weight = quantised(count, columns, device)
        rows, of_rows = given[i % inputs]
        scales = of_rows, of_weight.t().contiguous() if by_row else of_weight.amax()
        scaled.append(Scaled(rows, *scales, dtype))
        low_weights.append(weight)
    biases = [torch.randn(count, device=device).to(BF16) if biased else None for count in (*features, *low)]
    return Case(x, weights, biases[: len(features)], scaled, low_weights, biases[len(features) :])


@functools.cache
def scales_rows_on_a_cpu() -> bool:
    """Whether this torch's `_scaled_mm` takes scales by row on a CPU; 2.11 does not."""
    try:
        case(3, 64, (), (16,), by_row=True).torchs()
    except (RuntimeError, ValueError):
        return False
    return True


def skip_unless_torch_scales_rows() -> None:
    if not scales_rows_on_a_cpu():
        pytest.skip("torch has no scales by row on a CPU")


def assert_close(made: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for one, exact in zip(made, wanted, strict=True):
        torch.testing.assert_close(one.reshape(exact.shape).double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [1, 5])
def test_the_operator_on_a_cpu(tokens: int, biased: bool, by_row: bool) -> None:
    if by_row:
        skip_unless_torch_scales_rows()
    one = case(tokens, 64, (32, 8), (16, 48), by_row, biased, inputs=2)
    made = linear.mixed_linear(*one.arguments([0, 1, 2, 2]))
    assert [tuple(output.shape) for output in made] == [(tokens, 40), (tokens, 64)]
    assert_close(made, one.exact())
    assert packing.pack(one.weights).packed
    for name in ("serial", "streams", "pack", "pack+streams"):
        assert_close(mixed.run_as(name, one.x, *one.every(), [0, 1, 2, 2], one.scaled), one.exact())


def joined(one: Case) -> Case:
    """The same with its float8 weights one behind the other."""
    whole = torch.cat([weight.view(torch.uint8) for weight in one.low_weights]).view(FLOAT8)
    parts = whole.split([weight.shape[0] for weight in one.low_weights])
    return dataclasses.replace(one, low_weights=list(parts))


def of_hopper(_: int | None) -> Card:
    return HOPPER


def joint_products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each product of several of them has, from now on."""
    counts: list[int] = []
    real = products.multiply_scaled_together

    def counted(given: Sequence[Scaled], *rest: Any) -> Tensor:
        counts.append(len(given))
        return real(given, *rest)

    monkeypatch.setattr(products, "multiply_scaled_together", counted)
    return counts


def with_one_scale(one: Case) -> Case:
    """The same with one scale for all float8 weights."""
    return dataclasses.replace(
        one, scaled=[dataclasses.replace(given, of_weight=one.scaled[0].of_weight) for given in one.scaled]
    )


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_one_product_of_float8_weights(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, by this torch's product on a CPU: each layer has its columns and its scales."""
    monkeypatch.setattr(tuning, "card_of", of_hopper)
    calls = joint_products(monkeypatch)
    kinds = [with_one_scale(joined(case(tokens, 64, (32, 8), (16, 48, 16))))]
    if scales_rows_on_a_cpu() and tokens:
        kinds.append(joined(case(tokens, 64, (32, 8), (16, 48, 16), by_row=True)))
    apart = joined(case(tokens, 64, (32, 8), (16, 48, 16)))
    for one in (*kinds, apart):
        assert packing.pack(one.weights).packed
        for name in ("pack", "pack+streams", "serial"):
            assert_close(mixed.run_as(name, one.x, *one.every(), [0, 1, 2, 2, 2], one.scaled), one.exact())
    assert calls == [3] * 2 * len(kinds)


@pytest.mark.parametrize(
    ("changes", "runs"),
    [
        ({}, ((0,), (1, 2, 3))),
        ({"biased": (False, False, True, False)}, ((0,), (1,), (2,), (3,))),
        ({"biased": (True, False, False, False)}, ((0,), (1, 2, 3))),
        ({"scaled": [Low(BF16, False, 0, False), *[Low(BF16, False, 1, False)] * 2]}, ((0,), (1,), (2, 3))),
        ({"scaled": [*[Low(BF16, False, 0, False)] * 2, Low(BF16, False, 0, False, of_rows=1)]}, ((0,), (1, 2), (3,))),
        ({"scaled": [Low(BF16, True, 0, False, of_weight=i) for i in range(3)]}, ((0,), (1, 2, 3))),
        ({"scaled": [Low(BF16, False, 0, False, of_weight=i // 2) for i in range(3)]}, ((0,), (1, 2), (3,))),
        ({"scaled": [Low(F32, False, 0, False)] * 3}, ((0,), (1,), (2,), (3,))),
        ({"card": Card("cpu", 0)}, ((0,), (1,), (2,), (3,))),
    ],
    ids=["alike", "bias", "bias elsewhere", "input", "scale of the input", "by row", "scales", "float32", "no card"],
)
def test_which_float8_weights_one_product_takes(changes: dict[str, Any], runs: tuple[tuple[int, ...], ...]) -> None:
    given = {"scaled": [Low(BF16, False, 0, False)] * 3, "biased": (False,) * 4, "card": HOPPER, **changes}
    assert grouped._parted(((0,), (1, 2, 3)), (), 1, given["scaled"], given["biased"], given["card"]) == runs


def test_scales_by_row_on_a_cpu_with_a_torch_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_unless_torch_scales_rows()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    products._cublas_scales_rows.cache_clear()
    one = case(5, 64, (32, 8), (16, 48), by_row=True)
    assert_close(linear.mixed_linear(*one.arguments([0, 0, 0, 0])), one.exact())
    products._cublas_scales_rows.cache_clear()


def test_float8_weights_alone_are_no_reason_to_pack() -> None:
    together = ((0,), (1,), (2,), (3,), (4,), (5, 6))
    assert strategies.default(problem(runs=together), 128) == "streams"
    assert strategies.default(problem(runs=together, streams=(0,) * 7), 128) == "serial"
    assert strategies.default(problem(runs=((0, 1, 2, 3, 4), (5, 6))), 128) == "pack"


def test_no_rows_and_several_axes() -> None:
    one = case(6, 64, (32,), (16,))
    flat = one.arguments([0, 0])
    made = linear.mixed_linear(flat[0].view(2, 3, 64), *flat[1:])
    assert [tuple(output.shape) for output in made] == [(2, 3, 32), (2, 3, 16)]
    assert_close(made, one.exact())
    empty = dataclasses.replace(
        one, x=one.x[:0], scaled=[dataclasses.replace(one.scaled[0], rows=one.scaled[0].rows[:0])]
    )
    assert [tuple(output.shape) for output in linear.mixed_linear(*empty.arguments([0, 0]))] == [(0, 32), (0, 16)]


def test_inputs_of_other_strides_are_copied_for_torch() -> None:
    skip_unless_torch_scales_rows()
    one = case(5, 64, (32,), (16, 16), by_row=True)
    turned = one.scaled[0].rows.t().contiguous().t()
    scale = torch.empty_strided((5, 1), (1, 5)).copy_(one.scaled[0].of_rows)
    one.scaled = [dataclasses.replace(given, rows=turned, of_rows=scale) for given in one.scaled]
    assert_close(linear.mixed_linear(*one.arguments([0, 0, 0])), one.exact())


def test_scales_that_are_columns_of_a_wider_matrix() -> None:
    skip_unless_torch_scales_rows()
    one = case(5, 64, (32,), (16, 16), by_row=True)
    wider = torch.cat([one.scaled[0].of_rows, torch.ones(5, 7)], 1)
    one.scaled = [dataclasses.replace(given, of_rows=wider[:, :1]) for given in one.scaled]
    assert_close(linear.mixed_linear(*one.arguments([0, 0, 0])), one.exact())


def test_weights_of_other_storages_at_the_addresses_of_a_run() -> None:
    one = case(5, 64, (8, 24), (16,))
    memory = bytearray(2 * 32 * 64)
    whole = torch.frombuffer(memory, dtype=BF16).view(32, 64)
    apart = [
        torch.frombuffer(memory, dtype=BF16, count=64 * m, offset=128 * at).view(m, 64) for at, m in [(0, 8), (8, 24)]
    ]
    whole.copy_(torch.cat(one.weights))
    for weights in ([whole[:8], whole[8:]], apart, [whole[:8], whole[8:]]):
        one.weights = list(weights)
        assert_close(linear.mixed_linear(*one.arguments([0, 0, 0])), one.exact())


def wrong(one: Case, **changes: Any) -> tuple[Any, ...]:
    names = (
        "x",
        "weights",
        "biases",
        "streams",
        "inputs",
        "low_weights",
        "low_biases",
        "of_rows",
        "of_weight",
        "dtype",
    )
    return tuple((dict(zip(names, one.arguments([0, 0]), strict=True)) | changes).values())


def test_what_does_not_fit_is_an_error() -> None:
    one = case(5, 64, (32,), (16,))
    for changes, sentence in (
        ({"streams": [0]}, "needs a stream"),
        ({"of_rows": []}, "needs a scale"),
        ({"low_biases": []}, "a bias or None"),
        ({"inputs": [one.scaled[0].rows[:3]]}, "needs an input"),
        ({"inputs": [one.scaled[0].rows.to(torch.float8_e5m2)]}, "must be"),
        ({"of_rows": [torch.ones(5, 1)]}, "Scales must be"),
        ({"of_weight": [torch.ones((), dtype=torch.float64)]}, "Scales must be"),
        ({"low_biases": [torch.ones(16)]}, "The bias must be"),
        ({"dtype": torch.int32}, "must be a floating-point number"),
    ):
        with pytest.raises(RuntimeError, match=sentence):
            linear.mixed_linear(*wrong(one, **changes))


CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")  # the others multiply float8


@pytest.mark.parametrize("by_row", [False, True])
def test_opcheck(by_row: bool) -> None:
    if by_row:
        skip_unless_torch_scales_rows()
    one = case(5, 64, (32, 16), (16, 32), by_row, biased=True)
    torch.library.opcheck(torch.ops.dsv4.mixed_linear.default, one.arguments([0, 0, 1, 1]), test_utils=CHECKS)


def test_the_other_layers_have_gradients() -> None:
    one = case(5, 64, (32, 16), (16,), biased=True)
    one.x.requires_grad_(), one.weights[0].requires_grad_()
    made = linear.mixed_linear(*one.arguments([0, 0, 0]))
    assert made[0].requires_grad and not made[1].requires_grad
    made[0].sum().backward()
    assert one.x.grad is not None and one.weights[0].grad is not None
    assert_close([output.detach() for output in made], [exact.detach() for exact in one.exact()])


# -------------------------------------------------------------------------------------------------------- the compiler


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_every_plan_compiles_and_spills_nothing(tmp_path: Path) -> None:
    found = variants(90, 132, (8, 64))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(lambda one: compiled_by_nvcc(one, "sm_90a", tmp_path), found))
    for variant, text in zip(found, texts, strict=True):
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in text, (variant, text)
        registers = int(re.search(r"Used (\d+) registers", text).group(1))
        assert registers * 32 * WARPS * variant.plan.fitting <= 65536
