"""Capture and replay on a CUDA device."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import Tensor, nn

import dsv4_compile
from dsv4_compile import RaggedBuffers
from dsv4_compile.report import CudaGraphs
from dsv4_compile.runtime import runner
from dsv4_compile.runtime.program import Code, Program, Step
from dsv4_compile.runtime.recorder import RecordingError, cuda_recorder
from dsv4_compile.runtime.runner import Policy, Runner
from tests.models import CSA, HCA, SLIDING, deepseek
from tests.runtime.test_direct import SPLIT, Layers
from tests.runtime.test_direct import WIDTH as LAYERS_WIDTH
from tests.runtime.test_ragged import CAPACITY, ROWS, WIDTH, Decode, ragged
from tests.runtime.test_runner import Aliases, Model, Plain, State

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh() -> object:
    torch._dynamo.reset()
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
        yield
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def compiled(module: nn.Module, **options: object) -> nn.Module:
    dynamic = options.pop("dynamic", None)
    options = {"cudagraphs": "piecewise", **options}
    return torch.compile(copy.copy(module), backend="dsv4", options=options, dynamic=dynamic)


def graph() -> dsv4_compile.GraphReport:
    return dsv4_compile.report().graphs[-1]


def generate(model: nn.Module, steps: int, tokens: int = 1, seed: int = 0, device: str = "cuda") -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    layers = len(model.layers) if hasattr(model, "layers") else 3
    caches = [(torch.zeros(4, 16, device=device), torch.zeros(4, 16, device=device)) for _ in range(layers)]
    out = []
    for _ in range(steps):
        y, caches = model(torch.randn(tokens, 16, generator=generator).to(device), caches)
        out.append(y)
    return [*out, *(x for pair in caches for x in pair)]


def close(got: object, expected: object) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_cache_that_grows_is_cut_out_and_the_rest_is_replayed() -> None:
    model = Model().cuda()
    close(generate(compiled(model), 16), generate(model, 16))
    report = graph()
    assert report.cudagraphs.mode == "piecewise" and report.cudagraphs.replays >= 12
    assert sum(one.cudagraphs.bytes for one in dsv4_compile.report().graphs) > 0  # later ones fit into what is there
    assert {piece.kind for piece in report.pieces} == {"captured", "compiled"}


def test_fresh_tensors_at_the_cut_while_old_ones_are_kept() -> None:
    """Case 15: the allocator gives the op at the cut other addresses each time."""
    model = Model(2).cuda()
    run = compiled(model)
    expected = generate(model, 20)
    kept: list[Tensor] = []
    generator = torch.Generator().manual_seed(0)
    caches = [(torch.zeros(4, 16, device="cuda"), torch.zeros(4, 16, device="cuda")) for _ in range(2)]
    for i in range(20):
        y, caches = run(torch.randn(1, 16, generator=generator).cuda(), caches)
        kept += [y, *(t for pair in caches for t in pair), torch.empty(1 << 16, device="cuda").fill_(float("nan"))]
        close(y, expected[i])


@pytest.mark.parametrize("order", [(2, 9, 64), (64, 9, 2)], ids=["short first", "long first"])
def test_token_counts_take_turns_with_allocator_churn(order: tuple[int, ...]) -> None:
    """Cases 16 and 18: large then small, poisoned memory, interleaved."""
    model = Model(2).cuda()
    run = compiled(model, dynamic=True)
    expected = {n: generate(model, 3, tokens=n, seed=n) for n in order}
    for turn in range(4):
        for n in order if turn % 2 else reversed(order):
            close(generate(run, 3, tokens=n, seed=n), expected[n])
            junk = [torch.full((k << 12,), float("nan"), device="cuda") for k in (1, 7, 33)]
            del junk
        torch.cuda.empty_cache()
    assert graph().cudagraphs.sizes == sorted(order)


@pytest.mark.slow
def test_ten_thousand_replays_are_bit_equal() -> None:
    model = Plain(64, 6).cuda()
    run = compiled(model, cudagraphs="full", dynamic=True)
    inputs = {n: torch.randn(n, 64, device="cuda") for n in (2, 8, 32, 128)}
    first = {n: [t.clone() for t in run(x)] for n, x in inputs.items()}
    wrong = torch.zeros((), device="cuda")
    for i in range(10_000):
        n = (2, 8, 32, 128)[i * 7 % 4]
        for got, expected in zip(run(inputs[n]), first[n], strict=True):
            wrong += (got != expected).any()
        if i % 100 == 0:
            torch.empty((1 + i % 7) << 18, device="cuda").fill_(float("nan"))
    assert int(wrong) == 0 and graph().cudagraphs.replays >= 9_990


def test_smaller_sizes_fit_into_the_memory_of_the_largest() -> None:
    model = Plain(1024, 8).cuda()
    large = compiled(model, cudagraphs="full", capture_sizes=[512], dynamic=True)
    large(torch.randn(512, 1024, device="cuda"))
    alone = graph().cudagraphs.bytes
    torch._dynamo.reset()
    gc.collect()
    sizes = [16, 32, 64, 128, 256, 512]
    many = compiled(model, cudagraphs="full", capture_sizes=sizes, dynamic=True)
    many(torch.randn(512, 1024, device="cuda"))
    assert graph().cudagraphs.sizes == sizes and graph().cudagraphs.bytes <= 1.5 * alone


def test_results_of_earlier_calls_stay_and_state_is_written_once() -> None:
    model = State().cuda()
    twin = copy.deepcopy(model)
    run = compiled(model, cudagraphs="full")
    inputs = [torch.randn(3, 16, device="cuda") for _ in range(8)]
    held = [run(x) for x in inputs]
    expected = [twin(x) for x in inputs]
    close(held, expected)
    close(model.mean, twin.mean)
    assert graph().cudagraphs.replays == 7


def test_views_of_captured_values_outlive_the_call() -> None:
    model = Aliases().cuda()
    run = compiled(model)
    held = []
    for length in (2, 3, 4, 5, 6, 7):
        x, cache = torch.randn(3, 16, device="cuda"), torch.randn(length, 16, device="cuda")
        held.append((run(x, cache), model(x, cache)))
    for got, expected in held:
        close(got, expected)


def test_parameters_that_move_are_noticed() -> None:
    model, x = Plain().cuda(), torch.randn(3, 16, device="cuda")
    run = compiled(model, cudagraphs="full")
    run(x)
    for _ in range(3):
        model.layers[1].weight.data = torch.randn(16, 16, device="cuda")
        close(run(x), model(x))
        close(run(x), model(x))
    for _ in range(runner.MAX_MOVES + 1):
        model.layers[1].weight.data = torch.randn(16, 16, device="cuda")
        close(run(x), model(x))
    assert "have moved" in graph().cudagraphs.fallbacks[-1]["reason"]


def test_the_current_stream_is_the_callers() -> None:
    """Case 21."""
    model = Plain().cuda()
    run = compiled(model, cudagraphs="full")
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    for i in range(30):
        stream = streams[i % 3]
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000)
            x = torch.randn(3, 16, device="cuda")
            got, expected = run(x), model(x)
            stream.synchronize() if i % 5 == 0 else None
        stream.synchronize()
        close(got, expected)
    assert graph().cudagraphs.replays == 29


def test_inside_a_capture_of_the_caller() -> None:
    model, x = Plain().cuda(), torch.randn(3, 16, device="cuda")
    run = compiled(model, cudagraphs="full")
    for _ in range(3):
        run(x)
    outer = torch.cuda.CUDAGraph()
    with torch.cuda.graph(outer):
        got = run(x)
    x.copy_(torch.randn(3, 16, device="cuda"))
    outer.replay()
    close(got, model(x))
    close(run(x), model(x))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_a_model_on_another_device() -> None:
    model = Model(2).to("cuda:1")
    close(generate(compiled(model), 8, device="cuda:1"), generate(model, 8, device="cuda:1"))
    assert graph().cudagraphs.replays >= 4


def _program(run: object) -> Program:
    step = Step("piece_0", Code(run), (0,), (1,), (0,))
    return Program((step,), 2, (), (), ((1, None),))


def test_a_failed_recording_leaves_the_process_healthy() -> None:
    def waits(inputs: list[Tensor]) -> list[Tensor]:
        x = inputs.pop()
        torch.cuda.synchronize()
        return [x * 2 + float(x.sum())]

    def adds(inputs: list[Tensor]) -> list[Tensor]:
        return [inputs.pop() + 1]

    report = CudaGraphs()
    bad = Runner(_program(waits), cuda_recorder(0), Policy(), report)
    good = Runner(_program(adds), cuda_recorder(0), Policy(), CudaGraphs())
    for _ in range(3):
        x = torch.randn(5, device="cuda")
        close(bad([x.clone()])[0], x * 2 + x.sum())
        close(good([x.clone()])[0], x + 1)
    assert "cannot be captured" in report.fallbacks[0]["reason"] and report.replays == 0
    assert good.report.replays == 2


def test_an_empty_capture_is_detected() -> None:
    with pytest.raises(RecordingError, match="launches nothing"), cuda_recorder(0).session():
        cuda_recorder(0).record(lambda: None)


def test_ragged_lengths_under_a_full_graph() -> None:
    """Case 17."""
    model, buffers = Decode().cuda(), RaggedBuffers(ROWS, CAPACITY, "cuda")
    run = compiled(model, cudagraphs="full")
    generator = torch.Generator().manual_seed(0)
    for i in range(40):
        lengths = [(i * 5 + j * 3) % 7 for j in range(ROWS)]
        indices, indptr = ragged(lengths, generator)
        given = (indices.cuda(), indptr.cuda()) if i % 2 else (indices, indptr)
        x = torch.randn(ROWS, WIDTH, device="cuda")
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            buffers.update(*given)
            got = run(x, buffers.indices, buffers.indptr) if i else None
        finally:
            torch.cuda.set_sync_debug_mode("default")
        got = run(x, buffers.indices, buffers.indptr) if got is None else got
        close(got, model.reference(x, indices.cuda(), indptr.cuda()))
    assert graph().cudagraphs.replays == 39 and len(dsv4_compile.report().graphs) == 1


def test_verify_compares_replays() -> None:
    model = State().cuda()
    twin = copy.deepcopy(model)
    run = compiled(model, cudagraphs="full", verify=2)
    for _ in range(8):
        x = torch.randn(3, 16, device="cuda")
        close(run(x), twin(x))
        close(model.mean, twin.mean)
    assert graph().cudagraphs.replays >= 3 and not graph().cudagraphs.fallbacks


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["piecewise", "full_and_piecewise"])
def test_generation_of_the_real_model_equals_eager(mode: str) -> None:
    model = deepseek((SLIDING, CSA, HCA), iters=4, hash_layers=1, hidden=64).cuda()
    arguments = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    ids = torch.randint(0, model.config.vocab_size, (1, 13), device="cuda")
    both = torch.randint(0, model.config.vocab_size, (3, 9), device="cuda")
    eager = [model.generate(x, **arguments) for x in (ids, both)]
    model.compile(backend="dsv4", options={"cudagraphs": mode})
    for x, expected in zip((ids, both, ids), (*eager, eager[0]), strict=True):
        assert torch.equal(model.generate(x, **arguments), expected)
    graphs = dsv4_compile.report().graphs
    assert sum(one.cudagraphs.replays for one in graphs) >= 20
    assert not [reason for one in graphs for reason in one.cudagraphs.fallbacks]


def test_generation_with_streams_inside_graphs() -> None:
    model = deepseek((SLIDING, SLIDING), iters=4, hash_layers=0, hidden=64).cuda()
    arguments = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    ids = torch.randint(0, model.config.vocab_size, (1, 13), device="cuda")
    eager = model.generate(ids, **arguments)
    model.compile(backend="dsv4", options={"cudagraphs": "piecewise", "projections": "streams"})
    assert torch.equal(model.generate(ids, **arguments), eager)


@pytest.mark.parametrize("dynamic", [None, True])
def test_cut_operators_are_called_directly_and_their_results_read(dynamic: bool | None) -> None:
    """Tensors at other addresses each time, some that lie otherwise than the recorded ones, the host far ahead."""
    model = Layers().cuda()
    run = compiled(model, split_ops=SPLIT, dynamic=dynamic)
    held = []
    for i in range(40):
        x = torch.randn(5, LAYERS_WIDTH, device="cuda")
        if i % 3 == 2:
            x = torch.randn(LAYERS_WIDTH, 5, device="cuda").t()  # another graph of Dynamo's
        if i == 10:
            torch.cuda._sleep(100_000_000)
        held.append((run(x), model(x), torch.empty(1 << (i % 12), device="cuda")))
    for got, expected, _ in held:
        close(got, expected)
    assert sum(one.cudagraphs.replays for one in dsv4_compile.report().graphs) >= 36


def test_random_numbers_of_an_operator_that_does_not_say_so_differ() -> None:
    """Nothing in its schema keeps it out of a graph."""

    @torch.library.custom_op("graphs::noise", mutates_args=())
    def noise(x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    noise.register_fake(torch.empty_like)

    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.graphs.noise(x.sin() * 2).cos() * 3

    run = compiled(Noisy(), cudagraphs="full")
    x = torch.randn(5, 16, device="cuda")
    results = [run(x) for _ in range(6)]
    assert graph().cudagraphs.replays == 5
    for i, one in enumerate(results):
        assert not any(torch.equal(one, other) for other in results[:i])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_cut_operators_on_another_device() -> None:
    model = Layers().to("cuda:1")
    run = compiled(model, split_ops=SPLIT)
    for i in range(6):
        x = torch.randn(5, LAYERS_WIDTH, device="cuda:1")
        with torch.cuda.device(i % 2):
            close(run(x), model(x))
    assert sum(one.cudagraphs.replays for one in dsv4_compile.report().graphs) >= 4
