"""Branches on a CUDA device: the same numbers however late a side stream is, in a capture and outside."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

import dsv4_compile
from dsv4_compile.kernels import streams
from dsv4_compile.passes.capturability import Tokens
from dsv4_compile.passes.extraction import Extract
from dsv4_compile.runtime.forks import joint
from dsv4_compile.runtime.program import Code
from tests.models import CSA, HCA, SLIDING, deepseek
from tests.runtime.test_graphs_gpu import fresh, graph  # noqa: F401  (a fixture)
from tests.test_branches import Chains

pytestmark = pytest.mark.gpu

LATE = 2_000_000
"""Cycles that a delay kernel waits, about a millisecond."""


def compiled(module: nn.Module, **options: object) -> nn.Module:
    dynamic = options.pop("dynamic", None)
    settings = {"cudagraphs": "full", "projections": "off", "branches": True, **options}
    return torch.compile(copy.copy(module), backend="dsv4", options=settings, dynamic=dynamic)


def fork(delays: tuple[int, ...], max_tokens: int = 8) -> Code:
    """Branches that wait before they add to what they read: `[x + 1, x + 2, ...]`."""
    made = Graph()
    x = made.placeholder("x")

    def late(number: int, delay: int) -> Code:
        def run(given: list[Tensor]) -> list[Tensor]:
            (value,) = given
            given.clear()
            if delay:
                torch.cuda._sleep(delay)
            first = value * 2  # memory of this stream, used again by the next line
            second = first - value
            del first
            return [second + (number + 1)]

        return Code(run)

    def piece(number: int) -> Extract:
        outputs: tuple[Node, ...] = (made.placeholder(f"out_{number}"),)
        return Extract(GraphModule(torch.nn.Module(), Graph()), (x,), (), outputs)

    branches = [(piece(i), late(i, delay)) for i, delay in enumerate(delays)]
    return joint(branches, Tokens(frozenset(), 1), max_tokens, torch.device("cuda"))[1]


@pytest.mark.parametrize("delays", [(0, LATE), (LATE, 0), (0, LATE, 3 * LATE, 0)], ids=str)
def test_late_branches_outside_a_capture(delays: tuple[int, ...]) -> None:
    run = fork(delays)
    for turn in range(20):
        x = torch.full((1 << 20,), float(turn), device="cuda")
        results = run.run([x])
        del x
        junk = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(4)]
        for number, result in enumerate(results):
            assert torch.equal(result, torch.full_like(result, turn + number + 1))
        del junk


@pytest.mark.parametrize("delays", [(0, LATE), (LATE, 0), (0, LATE, 3 * LATE, 0)], ids=str)
def test_late_branches_in_a_capture(delays: tuple[int, ...]) -> None:
    """Two forks, one behind the other: the second reads what the first has made on its side streams."""
    first, second = fork(delays), fork(delays[::-1])

    def both(x: Tensor) -> list[Tensor]:
        results = first.run([x])
        total = sum(results[1:], results[0])
        del results
        return second.run([total])

    x = torch.zeros(1 << 20, device="cuda")
    both(x)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        results = both(x)
    count = len(delays)
    for turn in range(20):
        x.fill_(float(turn))
        captured.replay()
        total = count * turn + count * (count + 1) // 2
        for number, result in enumerate(results):
            assert torch.equal(result, torch.full_like(result, total + number + 1))


def test_chains_are_captured_with_side_streams_and_equal() -> None:
    module = Chains(4, 256, 4).cuda()
    run = compiled(module, num_streams=2)
    held = []
    for _ in range(6):
        x = torch.randn(5, 256, device="cuda")
        held.append((run(x), module(x)))
    for got, expected in held:
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert graph().cudagraphs.replays == 5 and graph().cudagraphs.mode == "full"
    assert sum(site.count for site in graph().branches if site.branches) == 4
    assert 1 <= graph().streams <= 2
    assert dsv4_compile.report().effective["branches"] is True
    assert streams.stream_count("cuda") >= graph().streams


def test_no_more_streams_are_made_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_devices", {})
    module, x = Chains(2, 256, 4).cuda(), torch.randn(5, 256, device="cuda")
    run = compiled(module, num_streams=1)
    for _ in range(3):
        torch.testing.assert_close(run(x), module(x), rtol=1e-4, atol=1e-4)
    assert graph().branches[0].branches and streams.stream_count("cuda") == 1


def test_token_counts_on_both_sides_of_the_limit() -> None:
    module = Chains(2, 256, 4).cuda()
    run = compiled(module, dynamic=True, stream_max_tokens=8)
    for turn in range(3):
        for tokens in (5, 8, 9, 64):
            x = torch.randn(tokens, 256, device="cuda")
            torch.testing.assert_close(run(x), module(x), rtol=1e-4, atol=1e-4)
        assert graph().cudagraphs.sizes == [5, 8, 9, 64], turn


def test_replays_are_compared_with_the_code_of_the_branches() -> None:
    module = Chains(3, 256, 4).cuda()
    run = compiled(module, verify=3)
    for _ in range(8):
        x = torch.randn(5, 256, device="cuda")
        torch.testing.assert_close(run(x), module(x), rtol=1e-4, atol=1e-4)
    assert graph().notes == ["verify: 3 of the first 3 calls were compared, and none differed"]
    assert not graph().cudagraphs.fallbacks and graph().cudagraphs.replays >= 4


@pytest.mark.slow
@pytest.mark.parametrize("projections", ["serial", "streams", "auto"])
def test_the_real_model_with_branches_equals_eager(projections: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_devices", {})
    model = deepseek((SLIDING, CSA, HCA, CSA), hidden=64, hash_layers=0).cuda()
    # The cache that the model makes has a tensor on the CPU, so there are cuts.
    run = compiled(model, projections=projections, mhc="auto", cudagraphs="piecewise")
    for _ in range(4):
        ids = torch.randint(0, 128, (1, 13), device="cuda")
        torch.testing.assert_close(run(ids).logits, model(ids).logits, rtol=1e-3, atol=1e-3)
    assert graph().cudagraphs.replays >= 2
    assert any(site.branches for site in graph().branches)
    assert streams.stream_count("cuda") <= 3
