"""The skinny product: its plans, what it serves, what the compiler says, and its numbers on a card.

`test_skinny_emulated.py` runs the kernel itself, on a CPU.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dsv4_compile.kernels import linear
from dsv4_compile.kernels.cuda import kept
from dsv4_compile.kernels.driver import bindings, check
from dsv4_compile.kernels.linear import grouped, packing, skinny, strategies, tuning
from dsv4_compile.kernels.linear.skinny import plans
from dsv4_compile.kernels.linear.skinny.plans import PLANS, SHARED_BYTES, TOKENS, WARPS, Plan, Variant, fitted, tiles_of
from dsv4_compile.kernels.linear.strategies import STRATEGIES, Card, Problem

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FLASH, PRO = (1024, 512, 1024, 1024, 256, 256, 64), (1536, 512, 1024, 1024, 256, 256, 64)
SHAPES = {"flash": (FLASH, 4096), "pro": (PRO, 7168)}
SKINNY = [name for name, strategy in STRATEGIES.items() if strategy.gather is not None]
HOPPER = Card("NVIDIA H100 80GB HBM3", 132, 90)


pytestmark = pytest.mark.usefixtures("fresh_choices")


def problem(**changes: Any) -> Problem:
    of_flash = Problem(
        HOPPER, 4096, FLASH, (BF16,) * 7, (False,) * 7, tuple((i,) for i in range(7)), (0,) * 7, BF16, True
    )
    return dataclasses.replace(of_flash, **changes)


def variants(capability: int, multiprocessors: int, tokens: Sequence[int] = TOKENS) -> list[Variant]:
    found = [
        fitted(plan, "bf16", count, features, columns, capability, multiprocessors)
        for plan in PLANS.values()
        for features, columns in SHAPES.values()
        for count in tokens
    ]
    return list(dict.fromkeys(variant for variant in found if variant is not None))


# -------------------------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_one_wave_does_all_on_an_h100(tokens: int, shape: str) -> None:
    features, columns = SHAPES[shape]
    served = 0
    for plan in PLANS.values():
        variant = fitted(plan, "bf16", tokens, features, columns, 90, 132)
        if variant is None:
            continue
        served += 1
        groups = variant.groups(tiles_of(features))
        assert groups * variant.splits <= 132 * plan.blocks
        assert groups <= plans.groups_at_once(plan, variant.splits, 132)
        assert (groups - 1) * variant.rows < 16 * tiles_of(features) <= groups * variant.rows
    assert served >= 5


def test_the_work_of_flash_is_even() -> None:
    """130 of 132 multiprocessors have the same number of rows and columns, and nothing is padded."""
    for name in ("whole", "pairs"):
        variant = fitted(PLANS[name], "bf16", 8, FLASH, 4096, 90, 132)
        assert variant is not None
        assert variant.groups(tiles_of(FLASH)) * variant.splits == 130
        assert variant.groups(tiles_of(FLASH)) * variant.rows == sum(FLASH)


@pytest.mark.parametrize(("capability", "multiprocessors"), [(80, 108), (86, 84), (89, 128), (90, 132), (100, 148)])
def test_every_kernel_fits_a_card(capability: int, multiprocessors: int) -> None:
    whole, of_block = SHARED_BYTES[capability]
    found = variants(capability, multiprocessors)
    assert found
    for variant in found:
        assert variant.shared_bytes <= of_block
        assert variant.plan.fitting * (variant.shared_bytes + plans.SYSTEM_BYTES) <= whole
        assert variant.shared_bytes >= variant.stages * variant.stage_bytes and variant.stages >= 3
        assert variant.plan.columns % (16 * WARPS // variant.row_warps) == 0
        assert capability >= 90 or not variant.plan.cluster


def test_tokens_up_to_the_next_size_are_one_kernel() -> None:
    for most, before in zip(TOKENS, (0, *TOKENS[:-1]), strict=True):
        assert len({fitted(PLANS["pairs"], "bf16", n, FLASH, 4096, 90, 132) for n in range(before + 1, most + 1)}) == 1


@pytest.mark.parametrize("tokens", [0, 65, float("inf")])
def test_other_token_counts_have_no_kernel(tokens: float) -> None:
    assert all(fitted(plan, "bf16", tokens, FLASH, 4096, 90, 132) is None for plan in PLANS.values())


def test_the_arguments_are_packed_as_the_kernel_reads_them() -> None:
    text = (skinny.SOURCE.parent / "skinny.cuh").read_text()
    sizes = []
    for name in ("Linear", "Arguments"):
        members = re.sub(r"//.*", "", re.search(rf"struct {name} \{{(.*?)\n\}};", text, re.S).group(1))
        declared = [part for part in members.split(";") if part.strip()]
        wide = sum("*" in part or "i64" in part for part in declared)
        narrow = sum(part.split()[0] == "int" for part in declared)
        sizes.append(8 * wide + 4 * narrow)
        assert wide + narrow == len(declared) - (name == "Arguments")
    assert f"MOST_LINEARS = {plans.MOST_LINEARS};" in text
    assert skinny.ARGUMENTS.size == plans.MOST_LINEARS * sizes[0] + sizes[1]


# ------------------------------------------------------------------------------------------------------ what it serves


def ways(of: Problem, tokens: float = 8) -> set[str]:
    return {name for name in strategies.legal(of, tokens) if name in SKINNY}


@pytest.fixture
def with_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny, "_bindings_missing", lambda: None)


@pytest.mark.usefixtures("with_nvrtc")
def test_served_where_the_weights_fit() -> None:
    assert ways(problem()) == set(SKINNY)
    assert ways(problem(), 64) and not ways(problem(), 128)
    assert ways(problem(dtypes=(F16,) * 7)) == set(SKINNY)
    assert ways(problem(x=F32, contiguous=False)) == set(SKINNY)
    assert ways(problem(dtypes=(*(BF16,) * 6, F32))) == set(SKINNY)
    assert not ways(problem(dtypes=(F32,) * 7))
    assert not ways(problem(aligned=False))
    assert not ways(problem(columns=4100))
    assert not ways(problem(card=Card("a card of another maker", 132)))
    assert not ways(problem(card=Card("Tesla V100", 80, 70)))
    nine = dataclasses.replace(
        problem(), features=(64,) * 9, dtypes=(BF16,) * 9, biased=(False,) * 9, streams=(0,) * 9, runs=((0,),) * 9
    )
    assert not ways(nine)


def test_not_served_where_nvrtc_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'cuda'")

    skinny._bindings_missing.cache_clear()
    monkeypatch.setattr(skinny, "bindings", missing)
    assert not ways(problem())
    assert "ModuleNotFoundError" in (skinny.unavailable() or "")
    skinny._bindings_missing.cache_clear()


def test_the_weights_of_a_dtype_are_one_product_wherever_they_lie() -> None:
    mixed = problem(dtypes=(BF16, F32, BF16, F16, BF16, F32, F16))
    ((*made,),) = strategies.plan_of(SKINNY[0], mixed).slots
    assert [(product.members, product.gathered) for product in made] == [
        ((0, 2, 4), True),
        ((1,), False),
        ((3, 6), True),
        ((5,), False),
    ]


def test_on_a_cpu_torch_makes_the_same_product_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    rows, weights = torch.randn(3, 64).to(BF16), [torch.randn(count, 64).to(BF16) for count in (5, 9)]
    outputs = [torch.empty(3, 5, dtype=BF16), torch.empty(3, 9)]
    bias = torch.randn(9).to(BF16)
    skinny.multiply(PLANS["whole"], rows, weights, [None, bias], outputs)
    torch.testing.assert_close(outputs[0], functional.linear(rows, weights[0]))
    torch.testing.assert_close(outputs[1], functional.linear(rows.float(), weights[1].float(), bias.float()))
    assert any("runs on CUDA" in record.message for record in caplog.records)


def test_weights_that_are_not_aligned_are_never_given_to_the_kernel() -> None:
    x, weight = torch.zeros(2, 64, dtype=BF16), torch.zeros(64, 3, dtype=BF16).t()
    with pytest.raises(RuntimeError, match="contiguous and begins at 16 bytes"):
        grouped.run_as(SKINNY[0], x, [weight], [None], [0])


def test_whether_rows_are_aligned() -> None:
    whole = torch.zeros(4, 64, dtype=BF16)
    for fine in (whole, whole[1:], whole[:, 8:40], whole[:0], torch.zeros(1, 24, dtype=BF16), whole[:1].expand(4, 64)):
        assert skinny.is_aligned(fine)
    for unfit in (whole[:, 1:], whole[:, ::2], whole.t(), torch.zeros(4, 60, dtype=BF16)):
        assert not skinny.is_aligned(unfit)


# ------------------------------------------------------------------------------------------------------- the compiler


def compiled_by_nvcc(variant: Variant, architecture: str, folder: Path) -> str:
    """What the compiler says about registers."""
    macros = [f"-D{name}={value}" for name, value in variant.macros.items()]
    target = folder / f"{architecture}-{abs(hash(variant))}.cubin"
    command = ["nvcc", "-cubin", "-std=c++17", f"-arch={architecture}", "-Xptxas", "-v", *macros]
    done = subprocess.run(
        [*command, "-o", str(target), str(skinny.SOURCE)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
@pytest.mark.parametrize(("architecture", "capability", "multiprocessors"), [("sm_90a", 90, 132), ("sm_80", 80, 108)])
def test_every_plan_compiles_and_spills_nothing(
    architecture: str, capability: int, multiprocessors: int, tmp_path: Path
) -> None:
    found = variants(capability, multiprocessors, (8, 64))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(lambda one: compiled_by_nvcc(one, architecture, tmp_path), found))
    for variant, text in zip(found, texts, strict=True):
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in text, (variant, text)
        registers = int(re.search(r"Used (\d+) registers", text).group(1))
        assert registers * 32 * WARPS * variant.plan.fitting <= 65536


# --------------------------------------------------------------------------------------------------------- on a GPU


def aligned(rows: int, columns: int, dtype: torch.dtype, device: str = "cuda") -> Tensor:
    return (torch.randn(rows, columns, device=device) / columns**0.5).to(dtype)


def assert_no_farther_than_torch(rows: Tensor, weights: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """From float64, than cuBLAS with float32 sums is; half a unit in the last place more where values are rounded."""
    for weight, output in zip(weights, outputs, strict=True):
        exact = rows.double() @ weight.double().t()
        torchs = torch.mm(rows, weight.t())
        error, theirs = (output - exact).norm(), (torchs - exact).norm()
        assert error <= 1.02 * theirs + 1e-7 * exact.norm(), (error / exact.norm(), theirs / exact.norm())


def called(
    plan: Plan, rows: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None
) -> list[Tensor]:
    outputs = [rows.new_full((rows.shape[0], weight.shape[0]), torch.nan) for weight in weights]
    skinny.multiply(plan, rows, weights, biases or [None] * len(weights), outputs)
    return outputs


@pytest.fixture
def runs_here() -> Iterator[None]:
    """Torch does not stand in for the kernel."""
    yield
    assert skinny.unavailable() is None


def plans_for(tokens: int, features: Sequence[int], columns: int) -> dict[str, Plan]:
    card = tuning.card_of(torch.cuda.current_device())
    found = {
        name: plan
        for name, plan in PLANS.items()
        if fitted(plan, "bf16", tokens, features, columns, card.capability, card.multiprocessors) is not None
    }
    assert found
    return found


@pytest.mark.gpu
@pytest.mark.usefixtures("runs_here")
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 16, 31, 33, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_plan_is_as_exact_as_torch(shape: str, tokens: int, dtype: torch.dtype) -> None:
    features, columns = SHAPES[shape]
    rows, weights = aligned(tokens, columns, dtype), [aligned(count, columns, dtype) for count in features]
    for plan in plans_for(tokens, features, columns).values():
        assert_no_farther_than_torch(rows, weights, called(plan, rows, weights))


@pytest.mark.gpu
@pytest.mark.usefixtures("runs_here")
@pytest.mark.parametrize("columns", [1032, 520, 4096])
def test_odd_rows_biases_and_wide_outputs(columns: int) -> None:
    features = (40, 0, 17, 1, 16, 9, 333, 24)
    rows, weights = aligned(13, columns, BF16), [aligned(count, columns, BF16) for count in features]
    biases = [torch.randn(count, device="cuda").to(BF16) if i % 2 else None for i, count in enumerate(features)]
    for plan in plans_for(13, [count for count in features if count], columns).values():
        around = [torch.full((15, count + 6), 77.0, device="cuda", dtype=F32) for count in features]
        skinny.multiply(plan, rows, weights, biases, [whole[1:-1, 3:-3] for whole in around])
        for weight, bias, whole in zip(weights, biases, around, strict=True):
            exact = functional.linear(rows.double(), weight.double(), None if bias is None else bias.double())
            torch.testing.assert_close(whole[1:-1, 3:-3].double(), exact, rtol=1e-5, atol=1e-5)
            whole[1:-1, 3:-3] = 77.0
            assert (whole == 77.0).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("runs_here")
def test_inputs_of_any_strides() -> None:
    features, columns = (300, 64), 1024
    weights = [aligned(count, columns, BF16) for count in features]
    wide = aligned(9, 2 * columns + 8, BF16)
    odd = aligned(9, columns + 1, BF16)
    inputs = [
        wide[:, 8 : columns + 8],
        wide[:, : 2 * columns : 2],
        odd[:, 1:],
        aligned(columns, 9, BF16).t(),
        aligned(1, columns, BF16).expand(9, columns),
    ]
    for plan in plans_for(9, features, columns).values():
        for rows in inputs:
            assert_no_farther_than_torch(rows, weights, called(plan, rows, weights))


@pytest.mark.gpu
@pytest.mark.usefixtures("runs_here")
@pytest.mark.parametrize("name", PLANS)
def test_the_same_bits_every_time_and_whatever_the_other_tokens(name: str) -> None:
    plan = plans_for(16, FLASH, 4096).get(name)
    if plan is None:
        pytest.skip("the card has no such plan")
    rows, weights = aligned(16, 4096, BF16), [aligned(count, 4096, BF16) for count in FLASH]
    first = called(plan, rows, weights)
    for _ in range(1000):
        assert all(map(torch.equal, called(plan, rows, weights), first))
    others = rows.clone()
    others[:5] = 3.0
    others[6:] = torch.nan
    for output, other in zip(first, called(plan, others, weights), strict=True):
        assert output[5].equal(other[5])
    for output, fewer in zip(first, called(plan, rows[:9], weights), strict=True):
        assert output[:9].equal(fewer)


@pytest.mark.gpu
@pytest.mark.usefixtures("runs_here")
@pytest.mark.parametrize("name", PLANS)
def test_captured_and_on_other_streams_side_by_side(name: str) -> None:
    plan = plans_for(8, FLASH, 4096).get(name)
    if plan is None:
        pytest.skip("the card has no such plan")
    rows, weights = aligned(8, 4096, BF16), [aligned(count, 4096, BF16) for count in FLASH]
    side = [torch.cuda.Stream() for _ in range(3)]
    called(plan, rows, weights)
    torch.cuda.synchronize()
    graphs, outputs = [], []
    for stream in side:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outputs.append([called(plan, rows, weights) for _ in range(5)])
        graphs.append(graph)
    for _ in range(20):
        rows.copy_(torch.randn_like(rows))
        weights[1].copy_(torch.randn_like(weights[1]) / 64)
        wanted = called(plan, rows, weights)
        torch.cuda.synchronize()
        for stream, graph in zip(side, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert all(all(map(torch.equal, one, wanted)) for of_graph in outputs for one in of_graph)


@pytest.mark.gpu
@pytest.mark.usefixtures("runs_here")
def test_a_write_of_the_launch_before_is_seen() -> None:
    """Blocks start, and bring weights near, before that launch has ended."""
    for name, plan in plans_for(8, FLASH, 4096).items():
        rows, weights = aligned(8, 4096, BF16), [aligned(count, 4096, BF16) for count in FLASH]
        news = [[torch.randn_like(weight) / 64 for weight in weights] for _ in range(10)]
        wanted = [called(plan, rows, new) for new in news]
        got = []
        for new in news:
            for weight, values in zip(weights, new, strict=True):
                weight.copy_(values)
            got.append(called(plan, rows, weights))
        for one, other in zip(got, wanted, strict=True):
            assert all(map(torch.equal, one, other)), name


@pytest.mark.gpu
@pytest.mark.usefixtures("runs_here")
def test_counters_are_left_as_they_were() -> None:
    rows, weights = aligned(64, 4096, BF16), [aligned(count, 4096, BF16) for count in FLASH]
    for plan in plans_for(64, FLASH, 4096).values():
        for _ in range(50):
            called(plan, rows, weights)
    torch.cuda.synchronize()
    driver, _ = bindings()
    for arena in (arena for arenas in kept.COUNTERS.arenas.values() for arena in arenas):
        content = bytearray(4 * arena.size)
        check(driver.cuMemcpyDtoH(content, arena.address, len(content)))
        assert not any(content)


@pytest.mark.gpu
@pytest.mark.usefixtures("runs_here")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one device")
def test_on_another_device_than_the_current_one() -> None:
    rows, weights = aligned(8, 4096, BF16, "cuda:1"), [aligned(count, 4096, BF16, "cuda:1") for count in FLASH]
    with torch.cuda.device(0):
        for plan in plans_for(8, FLASH, 4096).values():
            assert_no_farther_than_torch(rows, weights, called(plan, rows, weights))


@pytest.mark.gpu
@pytest.mark.usefixtures("runs_here")
@pytest.mark.parametrize("packed", [False, True])
def test_the_operator_may_choose_it(packed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is timed beside the others, and a way that is chosen is right."""
    monkeypatch.setenv("DSV4_TUNE", "auto")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    weights = [aligned(count, 4096, BF16) for count in FLASH]
    assert not packed or packing.pack(weights).packed
    rows = aligned(8, 4096, BF16)
    for name in (None, *SKINNY):
        if name is None:
            (output,) = linear.grouped_linear(rows, weights, [None] * 7, [0] * 7)
        else:
            (output,) = grouped.run_as(name, rows, weights, [None] * 7, [0] * 7)
        assert_no_farther_than_torch(rows, weights, output.split(FLASH, 1))
    (entry,) = linear.choices()
    assert set(plans_for(8, FLASH, 4096)) == {name.removeprefix("skinny: ") for name in entry["microseconds"]} & set(
        PLANS
    )
