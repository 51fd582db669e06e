"""float8 weights beside others, on a card: every plan of the kernel, packed products, captures, the choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels import linear, streams
from dsv4_compile.kernels.linear import mixed, packing, skinny, strategies, tuning
from dsv4_compile.kernels.linear.products import FLOAT8, Scaled
from dsv4_compile.kernels.linear.skinny.plans import PLANS, Plan, fitted
from tests.kernels.test_float8 import (
    BF16,
    CHECKS,
    F32,
    QUERY_AND_KEY,
    REST,
    Case,
    assert_close,
    case,
    joined,
    with_one_scale,
)
from tests.kernels.test_skinny import SKINNY

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_choices")]


@pytest.fixture
def runs_here() -> Iterator[None]:
    """Torch does not stand in for the kernel."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the card has no float8")
    yield
    assert skinny.unavailable() is None


def plans_for(tokens: int, features: Sequence[int], low: Sequence[Sequence[int]], columns: int) -> dict[str, Plan]:
    card = tuning.card_of(torch.cuda.current_device())
    found = {
        name: plan
        for name, plan in PLANS.items()
        if fitted(plan, "bf16", tokens, features, columns, card.capability, card.multiprocessors, low) is not None
    }
    assert found
    return found


def launched(plan: Plan, one: Case) -> list[Tensor]:
    """One launch; all that it does not write is NaN."""
    every, biases = one.every()
    dtypes = [BF16] * len(one.weights) + [given.dtype for given in one.scaled]
    outputs = [
        one.x.new_full((one.x.shape[0], weight.shape[0]), torch.nan, dtype=dtype)
        for weight, dtype in zip(every, dtypes, strict=True)
    ]
    skinny.multiply(plan, one.x, every, biases, outputs, scaled=one.scaled)
    return outputs


def assert_no_farther_than_torch(one: Case, made: Sequence[Tensor]) -> None:
    """From float64 than `torch._scaled_mm` and cuBLAS are."""
    plain, *low = one.exact_layers()
    for exact, ours, weight, bias in zip(
        plain.split([weight.shape[0] for weight in one.weights], 1), made, one.weights, one.biases, strict=False
    ):
        torchs = torch.nn.functional.linear(one.x, weight, bias)
        assert (ours - exact).norm() <= 1.02 * (torchs - exact).norm() + 1e-7 * exact.norm()
    for exact, ours, torchs in zip(low, made[len(one.weights) :], one.torchs(), strict=True):
        error, theirs = (ours - exact).norm(), (torchs - exact).norm()
        assert error <= 1.02 * theirs + 1e-7 * exact.norm(), (error / exact.norm(), theirs / exact.norm())


@pytest.mark.usefixtures("runs_here")
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 16, 31, 33, 64])
@pytest.mark.parametrize(("columns", "low"), [(4096, (1024, 512)), (7168, (1536, 512))])
def test_every_plan_is_as_exact_as_torch(columns: int, low: tuple[int, ...], tokens: int, by_row: bool) -> None:
    one = case(tokens, columns, REST, low, by_row, biased=tokens % 2 == 0, device="cuda")
    for plan in plans_for(tokens, REST, [low], columns).values():
        assert_no_farther_than_torch(one, launched(plan, one))


@pytest.mark.usefixtures("runs_here")
@pytest.mark.parametrize("scales", ["one", "apart", "by row"])
@pytest.mark.parametrize("tokens", [1, 7, 64, 65, 256, 1025])
def test_packed_float8_weights_are_as_exact_as_torch(tokens: int, scales: str) -> None:
    """Their results are columns of one matrix."""
    one = joined(case(tokens, 4096, REST, QUERY_AND_KEY, scales == "by row", device="cuda"))
    one = with_one_scale(one) if scales == "one" else one
    assert packing.pack(one.weights).packed
    apart = one.torchs()
    for name in ("pack", "pack+streams", "serial", "streams"):
        made = mixed.run_as(name, one.x, *one.every(), [0, 0, 1, 1, 2, 3, 3], one.scaled)
        assert_close(made, one.exact())
        for exact, ours, torchs in zip(one.exact_layers()[1:], made[1].split(QUERY_AND_KEY, 1), apart, strict=True):
            assert (ours - exact).norm() <= 1.02 * (torchs - exact).norm() + 1e-7 * exact.norm()


@pytest.mark.usefixtures("runs_here")
@pytest.mark.parametrize("columns", [1040, 528, 4096])
def test_odd_rows_two_inputs_and_wide_results(columns: int) -> None:
    """Features that `_scaled_mm` does not take, against float64."""
    for dtype in (BF16, F32):
        one = case(13, columns, (40, 1, 333), (17, 9, 100, 8), by_row=True, inputs=2, dtype=dtype, device="cuda")
        plain, *low = one.exact_layers()
        for plan in plans_for(13, (40, 1, 333), [(17, 100), (9, 8)], columns).values():
            made = launched(plan, one)
            torch.testing.assert_close(torch.cat(made[:3], 1).double(), plain, rtol=8e-3, atol=1e-4)
            tight = {"rtol": 1e-5, "atol": 1e-5} if dtype is F32 else {"rtol": 8e-3, "atol": 1e-4}
            for ours, exact in zip(made[3:], low, strict=True):
                torch.testing.assert_close(ours.double(), exact, **tight)


@pytest.mark.usefixtures("runs_here")
def test_all_float8_numbers_are_themselves() -> None:
    """Among them NaN: each is the only one of its row that is not zero, times one."""
    numbers = torch.arange(256, dtype=torch.uint8, device="cuda").view(FLOAT8)
    weight = torch.diag(numbers.view(torch.uint8))
    unit, x = torch.ones((), device="cuda"), torch.zeros(64, 256, dtype=BF16, device="cuda")
    plain = torch.zeros(16, 256, dtype=BF16, device="cuda")
    for start in range(0, 256, 64):
        rows = torch.eye(256, device="cuda")[start : start + 64].to(FLOAT8)
        one = Case(x, [plain], [None], [Scaled(rows, unit, unit, F32)], [weight.view(FLOAT8)], [None])
        for plan in plans_for(64, (16,), [(256,)], 256).values():
            got = launched(plan, one)[1].diagonal(start)
            wanted = numbers[start : start + 64].float()
            assert got.nan_to_num(999.0).equal(wanted.nan_to_num(999.0))


@pytest.mark.usefixtures("runs_here")
@pytest.mark.parametrize("name", PLANS)
def test_the_same_bits_every_time_and_whatever_the_other_tokens(name: str) -> None:
    plan = plans_for(16, REST, [QUERY_AND_KEY], 4096).get(name)
    if plan is None:
        pytest.skip("the card has no such plan")
    one = case(16, 4096, REST, QUERY_AND_KEY, by_row=True, device="cuda")
    first = launched(plan, one)
    for _ in range(1000):
        assert all(map(torch.equal, launched(plan, one), first))
    few = dataclasses.replace(
        one,
        x=one.x[:9],
        scaled=[dataclasses.replace(given, rows=given.rows[:9], of_rows=given.of_rows[:9]) for given in one.scaled],
    )
    for output, fewer in zip(first, launched(plan, few), strict=True):
        assert output[:9].equal(fewer)


@pytest.mark.usefixtures("runs_here")
@pytest.mark.parametrize("name", PLANS)
def test_captured_side_by_side_with_new_values(name: str) -> None:
    plan = plans_for(8, REST, [QUERY_AND_KEY], 4096).get(name)
    if plan is None:
        pytest.skip("the card has no such plan")
    one = case(8, 4096, REST, QUERY_AND_KEY, device="cuda")
    launched(plan, one)
    torch.cuda.synchronize()
    graphs, outputs, side = [], [], [torch.cuda.Stream() for _ in range(3)]
    for stream in side:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outputs.append([launched(plan, one) for _ in range(5)])
        graphs.append(graph)
    for turn in range(20):
        new = case(8, 4096, REST, QUERY_AND_KEY, device="cuda")
        one.x.copy_(new.x)
        one.scaled[0].rows.copy_(new.scaled[0].rows)
        one.scaled[0].of_rows.fill_(0.5 + turn)
        one.scaled[1].of_weight.fill_(1.5 + turn)
        one.low_weights[1].copy_(new.low_weights[1])
        wanted = launched(plan, one)
        assert_close([torch.cat(wanted[:5], 1), *(low / (1 + turn) for low in wanted[5:])], _divided(one, 1 + turn))
        torch.cuda.synchronize()
        for stream, graph in zip(side, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert all(all(map(torch.equal, made, wanted)) for of_graph in outputs for made in of_graph)


def _divided(one: Case, by: int) -> list[Tensor]:
    plain, *low = one.exact_layers()
    return [plain, *(exact / by for exact in low)]


@pytest.mark.usefixtures("runs_here")
def test_a_write_of_the_launch_before_is_seen() -> None:
    """Blocks start, and bring weights near, before that launch has ended; scales are written by it as well."""
    for name, plan in plans_for(8, REST, [QUERY_AND_KEY], 4096).items():
        one = case(8, 4096, REST, QUERY_AND_KEY, device="cuda")
        news = [case(8, 4096, REST, QUERY_AND_KEY, device="cuda") for _ in range(10)]
        wanted = [launched(plan, new) for new in news]
        got = []
        for new in news:
            one.x.copy_(new.x)
            one.scaled[0].rows.copy_(new.scaled[0].rows)
            for to, source in zip([*one.weights, *one.low_weights], [*new.weights, *new.low_weights], strict=True):
                to.copy_(source)
            for to, source in zip(one.scaled, new.scaled, strict=True):
                to.of_weight.copy_(source.of_weight)
                to.of_rows.copy_(source.of_rows)
            got.append(launched(plan, one))
        for made, other in zip(got, wanted, strict=True):
            assert all(map(torch.equal, made, other)), name


@pytest.mark.usefixtures("runs_here")
@pytest.mark.parametrize("by_row", [False, True])
def test_opcheck_on_the_card(by_row: bool) -> None:
    one = case(5, 1024, (128, 64), (64, 32), by_row, biased=True, device="cuda")
    torch.library.opcheck(torch.ops.dsv4.mixed_linear.default, one.arguments([0, 0, 1, 1]), test_utils=CHECKS)


@pytest.mark.usefixtures("runs_here")
@pytest.mark.parametrize("name", strategies.STRATEGIES)
@pytest.mark.parametrize("by_row", [False, True])
def test_every_way_is_right_outside_and_inside_a_capture_and_on_another_stream(by_row: bool, name: str) -> None:
    one = case(64, 1024, (512, 256, 64), (256, 128), by_row, biased=True, device="cuda")
    assert packing.pack(one.weights).packed
    every, biases = one.every()

    def run() -> list[Tensor]:
        return mixed.run_as(name, one.x, every, biases, [0, 1, 2, 3, 3], one.scaled)

    made = run()
    assert_close(made, one.exact())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        made = run()
    torch.cuda.current_stream().wait_stream(side)
    assert_close(made, one.exact())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        made = run()
    for _ in range(5):
        new = case(64, 1024, (512, 256, 64), (256, 128), by_row, biased=True, device="cuda")
        one.x.copy_(new.x)
        one.scaled[0].rows.copy_(new.scaled[0].rows)
        one.low_weights[0].copy_(new.low_weights[0])
        graph.replay()
        assert_close(made, one.exact())
    assert streams.stream_count("cuda") <= 3


@pytest.mark.usefixtures("runs_here")
def test_the_operator_chooses_by_measurement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All ways are timed for the whole group, the choice is the fastest, and what is chosen is right and captured."""
    monkeypatch.setenv("DSV4_TUNE", "auto")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    one = case(8, 4096, REST, QUERY_AND_KEY, device="cuda")
    given = one.arguments([0, 0, 1, 1, 2, 3, 3])
    assert_close(linear.mixed_linear(*given), one.exact())
    (entry,) = linear.choices()
    assert entry["source"] == "searched" and entry["dtypes"][-1] == "float8_e4m3fn"
    times = entry["microseconds"]
    plans = plans_for(8, REST, [QUERY_AND_KEY], 4096)
    assert set(times) == {"serial", "streams", *(f"skinny: {name}" for name in plans)}
    assert entry["strategy"] == strategies.fastest(times)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = linear.mixed_linear(*given)
    for _ in range(3):
        one.x.copy_(torch.randn_like(one.x) / 8)
        graph.replay()
        assert_close(made, one.exact())
    more = case(100, 4096, REST, QUERY_AND_KEY, device="cuda")
    more.weights, more.low_weights = one.weights, one.low_weights
    assert_close(linear.mixed_linear(*more.arguments([0, 0, 1, 1, 2, 3, 3])), more.exact())
    assert not any(name in SKINNY for name in linear.choices()[-1]["microseconds"])
