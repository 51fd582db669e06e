"""Packed products with other algorithms of cuBLASLt, on a card: right, on any stream, in graphs, and measured."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels import linear
from dsv4_compile.kernels.linear import grouped, packing, products, proposals, strategies, timing, tuning
from dsv4_compile.kernels.linear.strategies import STRATEGIES, Problem

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_choices")]

BF16, F16 = torch.bfloat16, torch.float16
SHAPES = [(7168, 4672), (1024, 1040)]
TOKENS = (1, 33, 63, 64, 65, 256, 512)


def names(of: Problem, tokens: float = 64) -> list[str]:
    return [name for name in strategies.legal(of, tokens) if "proposal" in name]


def on_card(
    columns: int, features: int, dtype: torch.dtype = BF16, device: str = "cuda"
) -> tuple[list[Tensor], Problem]:
    """Two packed weights, and what they are as a problem."""
    sizes = features // 2 - 8, features - features // 2 + 8
    weights = [torch.randn(count, columns, device=device).mul_(columns**-0.5).to(dtype) for count in sizes]
    assert packing.pack(weights).packed
    x = torch.zeros(1, columns, device=device, dtype=dtype)
    return weights, grouped.Group(weights).problem(x, [None] * 2, [0] * 2, True)


@pytest.fixture
def never_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proposal may be replaced by `torch.mm`."""

    def refuse(*arguments: Any) -> Tensor:
        raise AssertionError("torch.mm was taken")

    monkeypatch.setattr(products, "multiply", refuse)


def assert_exact(made: Tensor, x: Tensor, weights: list[Tensor]) -> None:
    """Not farther from float64 than twice what `torch.mm` is, and half a unit in the last place."""
    whole = torch.cat(weights)
    exact = x.double() @ whole.double().t()
    room = 2 * (torch.mm(x, whole.t()) - exact).abs().max() + torch.finfo(x.dtype).eps / 2 * exact.abs()
    assert made.shape == exact.shape and made.dtype == x.dtype
    assert ((made - exact).abs() <= room).all()


def test_there_are_proposals_on_a_card() -> None:
    _, of = on_card(*SHAPES[0])
    found = {tokens: names(of, tokens) for tokens in (8, 16, 32, 64, 128, 256, 512)}
    print(found, {key[-1]: [one.configuration for one in known] for key, known in proposals._known.items()})
    assert proposals.unavailable() is None and found[64] and found[256]
    assert names(of, 1024) == []


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_proposal_on_a_card(never_torch: None, shape: tuple[int, int], tokens: int, dtype: torch.dtype) -> None:
    weights, of = on_card(*shape, dtype)
    x = torch.randn(tokens, shape[0], device="cuda", dtype=dtype)
    side = torch.cuda.Stream()
    assert names(of, tokens) or shape != SHAPES[0]
    for name in names(of, tokens):
        (made,) = grouped.run_as(name, x, weights, [None] * 2, [0] * 2)
        assert_exact(made, x, weights)
        # Columns of a wider matrix; its others stay.
        turned = weights[0].as_strided((shape[0], shape[1]), (1, shape[0]))
        whole = torch.full((tokens, shape[1] + 24), 7, device="cuda", dtype=dtype)
        STRATEGIES[name].multiply(x, turned, None, whole[:, 8:-16])
        assert_exact(whole[:, 8:-16], x, weights)
        assert (whole[:, :8] == 7).all() and (whole[:, -16:] == 7).all()
        # On another stream, behind what it has to wait for.
        late = torch.zeros_like(x)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)
            late.copy_(x)
            (there,) = grouped.run_as(name, late, weights, [None] * 2, [0] * 2)
        side.synchronize()
        assert torch.equal(there, made)


@pytest.mark.parametrize("tokens", [1, 33, 64, 256])
@pytest.mark.parametrize("cold", [False, True])
def test_a_graph_of_every_proposal_on_a_card(never_torch: None, cold: bool, tokens: int) -> None:
    """`cold`: what is asked and made ready is so during the capture."""
    weights, of = on_card(*SHAPES[0])
    x = torch.randn(tokens, SHAPES[0][0], device="cuda", dtype=BF16)
    torch.mm(x, weights[0].t())
    for name in names(of, tokens):
        if cold:
            proposals.forget()
        else:
            grouped.run_as(name, x, weights, [None] * 2, [0] * 2)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            (made,) = grouped.run_as(name, x, weights, [None] * 2, [0] * 2)
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            weights[1].copy_(torch.randn_like(weights[1]) * SHAPES[0][0] ** -0.5)
            graph.replay()
            assert_exact(made, x, weights)
    assert proposals.unavailable() is None


def test_results_of_a_proposal_do_not_depend_on_the_run() -> None:
    weights, of = on_card(*SHAPES[0])
    x = torch.randn(64, SHAPES[0][0], device="cuda", dtype=BF16)
    for name in names(of):
        first, *others = (grouped.run_as(name, x, weights, [None] * 2, [0] * 2)[0] for _ in range(50))
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
@pytest.mark.parametrize("current", [0, 1])
def test_every_proposal_on_the_second_card(never_torch: None, current: int) -> None:
    weights, of = on_card(*SHAPES[0], device="cuda:1")
    x = torch.randn(64, SHAPES[0][0], device="cuda:1", dtype=BF16)
    made: list[Tensor] = []

    def run() -> None:
        with torch.cuda.device(current):
            made.extend(grouped.run_as(name, x, weights, [None] * 2, [0] * 2)[0] for name in names(of))

    run()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(made) == 2 * len(names(of)) > 0
    for one in made:
        assert one.device == x.device
        assert_exact(one, x, weights)


def test_a_measurement_times_the_proposals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSV4_TUNE", "auto")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    weights, of = on_card(*SHAPES[0])
    x = torch.randn(64, SHAPES[0][0], device="cuda", dtype=BF16)
    assert names(of)
    for source in ("searched", "cached"):
        tuning.forget()
        proposals.forget()
        (made,) = linear.grouped_linear(x, weights, [None] * 2, [0] * 2)
        assert_exact(made, x, weights)
        (entry,) = linear.choices()
        assert entry["source"] == source and set(names(of)) < set(entry["microseconds"])
    print(entry["strategy"], entry["microseconds"])


def test_a_proposal_that_is_the_fastest_serves(
    never_torch: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DSV4_TUNE", "auto")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def measure(problem: Problem, counts: range, index: int) -> dict[str, float]:
        every = strategies.legal(problem, counts[-1])
        return {name: 1.0 if name == "pack: proposal 1" else 2.0 for name in every}

    monkeypatch.setattr(timing, "measure", measure)
    weights, _ = on_card(*SHAPES[0])
    for tokens in (64, 40, 64):
        x = torch.randn(2, tokens // 2, SHAPES[0][0], device="cuda", dtype=BF16)
        (made,) = linear.grouped_linear(x, weights, [None] * 2, [0] * 2)
        assert_exact(made.view(tokens, -1), x.view(tokens, -1), weights)
    assert [entry["strategy"] for entry in linear.choices()] == ["pack: proposal 1"]


def test_a_call_is_kept_for_the_next_ones(never_torch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the operator, with new inputs, on other streams, in a graph, and with a weight that has moved."""
    weights, of = on_card(*SHAPES[0])
    name = names(of, 64)[0]
    monkeypatch.setattr(tuning, "strategy", lambda problem, *_: (name, problem, True))

    def run(x: Tensor) -> Tensor:
        (made,) = linear.grouped_linear(x, weights, [None] * 2, [0] * 2)
        return made

    def new() -> Tensor:
        return torch.randn(4, 16, SHAPES[0][0], device="cuda", dtype=BF16)

    def check(x: Tensor, made: Tensor) -> None:
        assert made.shape == (4, 16, SHAPES[0][1]) and made.is_contiguous()
        assert_exact(made.view(64, -1), x.view(64, -1), weights)

    run(new())
    group = grouped._groups[tuple(weight.data_ptr() for weight in weights)]
    assert [type(kept) for kept in group.prepared.values()] == [proposals.Kept]
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            x = new()
            made = run(x)
        torch.cuda.synchronize()
        check(x, made)
    x, graph = new(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run(x)
    x.copy_(new())
    graph.replay()
    check(x, made)
    one_on = torch.zeros(x.numel() + 1, device="cuda", dtype=BF16)[1:].view(x.shape).copy_(x)
    monkeypatch.setattr(products, "multiply", lambda rows, turned, *_: torch.mm(rows, turned))
    check(one_on, run(one_on))  # not aligned
    moved = [weight.clone() for weight in weights]
    assert packing.pack(moved).packed
    weights[:] = [weight.mul_(2) for weight in moved]
    check(x, run(x))
