"""The measured choice on a CUDA device: what is timed, what it leaves alone, and every way beside serial products."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dsv4_compile.kernels import linear, streams
from dsv4_compile.kernels.choice import replays
from dsv4_compile.kernels.linear import grouped, packing, strategies, timing, tuning
from dsv4_compile.kernels.linear.buckets import counts_of
from dsv4_compile.kernels.linear.strategies import Problem
from tests.kernels.test_grouped_tuning import sources, warnings

pytestmark = pytest.mark.gpu

BF16, F32 = torch.bfloat16, torch.float32
OF_TORCH = ["serial", "streams", "pack", "pack+streams"]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing chosen yet, an empty folder, measurements on."""
    tuning.forget()
    monkeypatch.setenv("DSV4_TUNE", "auto")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    yield
    tuning.forget()


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> list[range]:
    """The measurements made, each of them real."""
    made: list[range] = []
    real = timing.measure

    def measure(problem: Problem, counts: range, index: int) -> dict[str, float]:
        made.append(counts)
        return real(problem, counts, index)

    monkeypatch.setattr(timing, "measure", measure)
    return made


def on_card(dtypes: tuple[torch.dtype, ...] = (BF16, BF16, BF16, F32)) -> list[torch.Tensor]:
    weights = [
        torch.randn(rows, 1024, device="cuda").to(dtype) / 32
        for rows, dtype in zip((1024, 512, 256, 64), dtypes, strict=True)
    ]
    assert packing.pack([weight for weight in weights if weight.dtype == BF16]).packed
    return weights


def assert_serial(outputs: list[torch.Tensor], x: torch.Tensor, weights: list[torch.Tensor]) -> None:
    expected = linear.parallel_linear(x, weights, [None] * len(weights), [0] * len(weights), 0)
    for dtype, output in zip(dict.fromkeys(weight.dtype for weight in weights), outputs, strict=True):
        alike = [part for part in expected if part.dtype == dtype]
        torch.testing.assert_close(output, torch.cat(alike, -1), rtol=2e-2, atol=2e-2)


def test_a_measurement_on_the_card_finds_a_way_and_disturbs_nothing(
    cold: list[range], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It leaves workspaces of cuBLAS behind, the first time only."""
    weights = on_card()
    x = torch.randn(300, 1024, device="cuda", dtype=BF16)
    memory = []
    for folder in ("first", "second"):
        tuning.forget()
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / folder))
        seed, stream = torch.cuda.get_rng_state(), torch.cuda.current_stream()
        for tokens in (1, 20, 300):
            assert_serial(linear.grouped_linear(x[:tokens], weights, [None] * 4, [0, 1, 2, 3]), x[:tokens], weights)
        assert torch.equal(torch.cuda.get_rng_state(), seed) and torch.cuda.current_stream() == stream
        torch.cuda.synchronize()
        memory.append(torch.cuda.memory_allocated())
    assert cold == 2 * [counts_of(8), counts_of(32), counts_of(512)] and sources() == {"searched"}
    assert memory[0] == memory[1]
    for entry in linear.choices():
        assert set(entry["microseconds"]) >= set(OF_TORCH)
        assert any(name not in OF_TORCH for name in entry["microseconds"]) is (entry["tokens"] <= 64)
        assert all(1 < took < 1000 for took in entry["microseconds"].values())


def test_measured_times_are_those_of_a_graph_of_the_same_launches(cold: list[range]) -> None:
    """The packed product of a layer, against the same product in torch's own CUDA graph, to a factor of two."""
    weights = on_card((BF16,) * 4)
    x = torch.randn(8, 1024, device="cuda", dtype=BF16)
    linear.grouped_linear(x, weights, [None] * 4, [0, 1, 2, 3])
    (entry,) = linear.choices()
    whole = torch.cat(weights)
    copies = [whole.clone() for _ in range(2 * 50 * 2**20 // whole.nbytes + 1)]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.mm(x, whole.t())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for copy in copies:
            torch.mm(x, copy.t())
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    took = 1e3 * start.elapsed_time(end) / len(copies)
    assert took / 2 < entry["microseconds"]["pack"] < took * 2


def test_a_capture_on_the_card_is_not_measured_and_a_later_call_is(cold: list[range]) -> None:
    weights = on_card()
    x = torch.randn(20, 1024, device="cuda", dtype=BF16)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        linear.grouped_linear(x[:1], weights, [None] * 4, [0, 1, 2, 3])
    torch.cuda.synchronize()
    assert cold == [counts_of(8)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        captured = linear.grouped_linear(x, weights, [None] * 4, [0, 1, 2, 3])
    assert cold == [counts_of(8)]
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert_serial(captured, x, weights)
    linear.grouped_linear(x, weights, [None] * 4, [0, 1, 2, 3])
    assert cold == [counts_of(8), counts_of(32)]
    graph.replay()
    assert_serial(captured, x, weights)


def test_a_measurement_may_happen_in_the_warm_up_of_inductors_cuda_graphs(cold: list[range]) -> None:
    weights = on_card()
    x = torch.randn(20, 1024, device="cuda", dtype=BF16)

    def layers(x: torch.Tensor) -> list[torch.Tensor]:
        return torch.ops.dsv4.grouped_linear(x * 1, weights, [None] * 4, [0, 1, 2, 3])

    compiled = torch.compile(layers, mode="reduce-overhead")
    with torch.inference_mode():
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            assert_serial([output.clone() for output in compiled(x)], x, weights)
    assert cold == [counts_of(32)]


def test_a_capture_of_another_thread_goes_on_while_this_one_measures(cold: list[range]) -> None:
    weights = on_card()
    x = torch.randn(300, 1024, device="cuda", dtype=BF16)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    begun, measured = threading.Event(), threading.Event()
    graph, result = torch.cuda.CUDAGraph(), []

    def capture() -> None:
        with torch.cuda.stream(side):
            torch.mm(x, weights[0].t())  # cuBLAS has a handle for each thread
            side.synchronize()
            graph.capture_begin(capture_error_mode="thread_local")
            result.append(torch.mm(x, weights[0].t()))
            begun.set()
            measured.wait(60)
            graph.capture_end()

    thread = threading.Thread(target=capture)
    thread.start()
    assert begun.wait(60)
    linear.grouped_linear(x[:8], weights, [None] * 4, [0, 1, 2, 3])
    measured.set()
    thread.join()
    assert cold == [counts_of(8)] and sources() == {"searched"}
    graph.replay()
    torch.testing.assert_close(result[0], torch.mm(x, weights[0].t()))


def test_measured_under_autocast_and_serial_is_the_same(cold: list[range]) -> None:
    weights = on_card()
    x = torch.randn(8, 1024, device="cuda", dtype=BF16)
    with streams.serial(), torch.autocast("cuda"):
        linear.grouped_linear(x, weights, [None] * 4, [0, 1, 2, 3])
    (entry,) = linear.choices()
    assert entry["source"] == "searched" and entry["microseconds"]["streams"] != entry["microseconds"]["serial"]


def test_short_memory_is_a_reason(
    cold: list[range], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replays, "budget", lambda most: 1 << 20)
    weights = on_card()
    x = torch.randn(8, 1024, device="cuda", dtype=BF16)
    assert_serial(linear.grouped_linear(x, weights, [None] * 4, [0, 1, 2, 3]), x, weights)
    (reason,) = warnings(caplog)
    assert "MiB" in reason and "not measured here" in reason


@pytest.mark.parametrize("name", strategies.STRATEGIES)
def test_every_way_equals_serial_outside_and_inside_a_capture_and_on_other_streams(name: str) -> None:
    weights = on_card()
    biases = [None, torch.randn(512, device="cuda", dtype=BF16), None, torch.randn(64, device="cuda")]
    x = torch.randn(64, 1024, device="cuda", dtype=BF16)

    def run() -> list[torch.Tensor]:
        return grouped.run_as(name, x, weights, biases, [0, 1, 2, 3])

    def expected() -> list[torch.Tensor]:
        return grouped.run_as("serial", x, weights, biases, [0, 0, 0, 0])

    def assert_equal(ours: list[torch.Tensor]) -> None:
        torch.testing.assert_close(ours, expected(), rtol=2e-2, atol=2e-2)

    assert_equal(run())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        outputs = run()
    torch.cuda.current_stream().wait_stream(side)
    assert_equal(outputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        outputs = run()
    for _ in range(10):
        x.copy_(torch.randn_like(x))
        weights[1].copy_(torch.randn_like(weights[1]) / 32)
        graph.replay()
        assert_equal(outputs)
    assert streams.stream_count("cuda") <= 3


def test_ways_with_streams_are_right_a_thousand_times_behind_delays() -> None:
    weights = on_card((BF16,) * 4)
    for step in range(1000):
        x = torch.randn(8, 1024, device="cuda", dtype=BF16)
        (output,) = grouped.run_as("streams", x, weights, [None] * 4, [0, 1, 2, 3])
        if step % 50 == 0:
            torch.cuda._sleep(1_000_000)
            assert_serial([output], x, weights)
        del x, output


def test_weights_that_move_between_calls_are_read_where_they_are(cold: list[range]) -> None:
    weights = on_card()
    x = torch.randn(8, 1024, device="cuda", dtype=BF16)
    for change in (
        lambda: None,
        lambda: weights[1].set_(torch.randn_like(weights[1])),
        lambda: packing.unpack(weights),
        lambda: packing.pack(weights[:3]),
        lambda: weights[0].set_(weights[0].t().contiguous().t()),
    ):
        with torch.no_grad():
            change()
        assert_serial(linear.grouped_linear(x, weights, [None] * 4, [0, 1, 2, 3]), x, weights)
