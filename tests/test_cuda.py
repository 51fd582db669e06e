"""End to end on a CUDA device: the real model, Triton kernels, packed and parallel projections, CUDA graphs."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dsv4_compile
from dsv4_compile.kernels import linear, streams
from dsv4_compile.kernels.linear import packing, tuning
from tests.models import deepseek
from tests.spellings import SPELLINGS, Stack

pytestmark = pytest.mark.gpu


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("projections", ["auto", "measured", "pack", "streams", "serial", "off"])
def test_real_model_equals_eager(projections, monkeypatch):
    monkeypatch.setenv("DSV4_MEASURE", str(int(projections == "measured")))
    model = deepseek(hidden=64).cuda()
    ids = torch.randint(0, model.config.vocab_size, (2, 40), device="cuda")
    expected = logits(model, ids)
    options = {"projections": "auto" if projections == "measured" else projections}
    compiled = torch.compile(model, backend="dsv4", options=options)
    out = logits(compiled, ids)
    assert distance(out, expected) < 1e-5
    graph = dsv4_compile.report().graphs[-1]
    assert {site.kernel for site in graph.mhc} == {"cuda"}
    assert len(graph.mhc) == 2 * model.config.num_hidden_layers + 2
    if projections == "auto":
        assert {group.strategy for group in graph.projections} == {"pack"}
        assert packing.fallbacks() == []
    if projections == "measured":
        assert {group.strategy for group in graph.projections} == {"measured"}
        assert {entry["strategy"] for entry in linear.choices()} == {"pack"}
        assert not graph.notes


def test_a_fresh_process_compiles_and_runs():
    """Nothing has called a kernel before the passes ask for its family."""
    script = """
import torch
from tests.spellings import SPELLINGS, Stack
module = Stack(*SPELLINGS["hf"], hidden=256, layers=2).cuda()
x = torch.randn(1, 5, 4, 256, device="cuda")
with torch.no_grad():
    for options in ({}, {"inductor": {"triton.cudagraphs": True}}):
        torch._dynamo.reset()
        compiled = torch.compile(module, backend="dsv4", options=options)
        for _ in range(4):
            out = compiled(x).clone()
        print(float((out - module(x)).norm() / module(x).norm()) < 1e-5)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.stdout.split() == ["True", "True"], done.stderr[-2000:]


def test_low_precision_is_as_close_to_float64_as_inductor():
    """Top-k choices flip in low precision, so the comparison is over the whole batch and in the norm."""
    model = deepseek(hidden=64).cuda()
    ids = torch.randint(0, model.config.vocab_size, (4, 40), device="cuda")
    low = copy.deepcopy(model).bfloat16()
    oracle = logits(low.float(), ids)
    low = copy.deepcopy(model).bfloat16()
    ours = distance(logits(torch.compile(low, backend="dsv4"), ids), oracle)
    torch._dynamo.reset()
    inductor = distance(logits(torch.compile(low), ids), oracle)
    assert ours <= inductor * 1.1


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name):
    module = Stack(*SPELLINGS[name], hidden=512, layers=3, dtype=torch.bfloat16).cuda()
    for tokens in (1, 16, 17, 300):
        x = torch.randn(1, tokens, 4, 512, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            eager = module(x)
            wide = copy.deepcopy(module).float()
            oracle = wide(x.float())
            compiled = torch.compile(module, backend="dsv4", dynamic=False, options={"compiler": "eager"})
            out = compiled(x)
        assert [s.form for s in dsv4_compile.report().graphs[-1].mhc] == ["pre", "post_pre", "post_pre", "post"]
        assert distance(out, oracle) <= distance(eager, oracle) * 1.05


class Forked(Stack):
    """Hyper-connections around a group of linears. (The real model's float32 experts cannot be captured.)"""

    def __init__(self) -> None:
        super().__init__(*SPELLINGS["hf"], hidden=256, layers=2)
        self.forks = nn.ModuleList(nn.Linear(256, width) for width in (256, 64, 128))

    def forward(self, residual: Tensor) -> tuple[Tensor, ...]:
        residual = super().forward(residual)
        x = residual.sum(-2)
        return residual, *(fork(x) for fork in self.forks)


@pytest.mark.parametrize("projections", ["pack", "streams", "auto"])
def test_reduce_overhead_replays_are_right(projections):
    model = Forked().cuda()
    compiled = torch.compile(
        model,
        backend="dsv4",
        options={"projections": projections, "inductor": {"triton.cudagraphs": True}},
    )
    kept = []
    with torch.no_grad():
        for tokens in [8, 8, 8, 24, 24, 24, 8, 24]:
            x = torch.randn(1, tokens, 4, 256, device="cuda")
            kept.append(([y.clone() for y in compiled(x)], model(x)))
    for out, expected in kept:
        for a, b in zip(out, expected, strict=True):
            assert distance(a, b) < 1e-5


def test_generation_equals_eager_token_for_token():
    """64 greedy tokens with transformers' cache and every layer type; the prompt ends inside a window."""
    model = deepseek(hidden=64, rates=(2, 2)).cuda()
    ids = torch.randint(0, model.config.vocab_size, (1, 5), generator=torch.Generator().manual_seed(1)).cuda()
    arguments = {"max_new_tokens": 64, "do_sample": False}
    expected = model.generate(ids, **arguments)
    model.forward = torch.compile(model.forward, backend="dsv4", options={"compiler": "eager"})
    with torch._dynamo.config.patch(recompile_limit=64):
        assert torch.equal(model.generate(ids, **arguments), expected)
    graphs = dsv4_compile.report().graphs
    assert all({site.kernel for site in graph.mhc} == {"cuda"} for graph in graphs)
    assert all(len(graph.mhc) == 2 * model.config.num_hidden_layers + 2 for graph in graphs)


@pytest.mark.parametrize("strategy", ["pack", "streams", "auto"])
def test_other_current_stream(strategy):
    model = deepseek(hidden=64).cuda()
    ids = torch.randint(0, model.config.vocab_size, (1, 24), device="cuda")
    expected = logits(model, ids)
    compiled = torch.compile(model, backend="dsv4", options={"projections": strategy, "compiler": "eager"})
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        outs = [logits(compiled, ids) for _ in range(20)]
    torch.cuda.current_stream().wait_stream(side)
    assert all(distance(out, expected) < 1e-5 for out in outs)


def test_streams_are_shared_by_every_model_in_the_process():
    for _ in range(2):
        torch._dynamo.reset()
        model = deepseek(hidden=64).cuda()
        ids = torch.randint(0, model.config.vocab_size, (1, 24), device="cuda")
        compiled = torch.compile(model, backend="dsv4", options={"projections": "streams", "compiler": "eager"})
        logits(compiled, ids)
    assert streams.stream_count(torch.device("cuda")) <= 3


def test_memory_does_not_grow_by_the_packed_copy():
    model = deepseek(hidden=512).cuda().bfloat16()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    ids = torch.randint(0, 128, (1, 24), device="cuda")
    compiled = torch.compile(model, backend="dsv4", options={"projections": "pack", "compiler": "eager"})
    logits(compiled, ids)
    torch._dynamo.reset()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= before * 1.02 + (1 << 20)


class Layers(nn.Module):
    """Groups of four linears on one input, of the size of a decoder layer's."""

    def __init__(self, layers: int = 6, width: int = 2048) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(width, rows, bias=False) for rows in (width, 512, 256, 64)) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            first, *rest = (linear(x) for linear in layer)
            x = first + sum(part.mean(-1, keepdim=True) for part in rest)
        return x


@pytest.mark.parametrize("projections", ["pack", "auto"])
def test_memory_stays_within_one_percent_of_the_unpacked_model(projections):
    model, x = Layers().cuda().bfloat16(), torch.randn(8, 2048, device="cuda", dtype=torch.bfloat16)

    def used(run: nn.Module) -> tuple[int, int]:
        """After and at most during two calls."""
        with torch.no_grad():
            run(x)
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            run(x)
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()

    before = used(model)
    options = {"projections": projections, "compiler": "eager", "mhc": "off"}
    after = used(torch.compile(model, backend="dsv4", options=options))
    assert all(packing.already_packed([part.weight for part in layer]) for layer in model.layers)
    assert all(ours <= 1.01 * theirs for ours, theirs in zip(after, before, strict=True))


@pytest.fixture
def measuring(monkeypatch, tmp_path):
    """Nothing chosen yet, an empty folder, measurements on."""
    tuning.forget()
    monkeypatch.setenv("DSV4_TUNE", "auto")
    monkeypatch.setenv("DSV4_MEASURE", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    yield
    tuning.forget()


@pytest.mark.parametrize("mode", ["eager", "inductor", "reduce-overhead"])
def test_measured_choice_end_to_end(mode, measuring):
    model = Layers(3).cuda().bfloat16()
    options = {"mhc": "off", "compiler": "eager" if mode == "eager" else "inductor"}
    if mode == "reduce-overhead":
        options["inductor"] = {"triton.cudagraphs": True}
    compiled = torch.compile(model, backend="dsv4", options=options, dynamic=mode != "reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            for tokens in (4, 24, 300):
                x = torch.randn(tokens, 2048, device="cuda", dtype=torch.bfloat16)
                assert distance(compiled(x), model(x)) < 2e-2
    assert {entry["tokens"] for entry in linear.choices()} == {8, 32, 512}
    assert {entry["source"] for entry in linear.choices()} == {"searched"}
    assert streams.stream_count("cuda") <= 3
    for entry in linear.choices():  # all weights have one dtype
        ways = set(entry["microseconds"])
        assert {"serial", "streams", "pack"} <= ways
        others = ways - {"serial", "streams", "pack"}
        assert all(way.startswith(("skinny", "pack: proposal")) for way in others)
        assert any(way.startswith("skinny") for way in others) == (entry["tokens"] <= 64)
    text = str(dsv4_compile.report())
    assert "up to 8 tokens: " in text and "searched: " in text and " us" in text
    known = len(linear.choices())
    assert linear.warmup(300) == 7 and len(linear.choices()) == 7 > known
    tuning.forget()
    with torch.no_grad():
        x = torch.randn(4, 2048, device="cuda", dtype=torch.bfloat16)
        linear.grouped_linear(x, [part.weight for part in model.layers[0]], [None] * 4, [0, 1, 2, 3])
    assert {entry["source"] for entry in linear.choices()} == {"cached"}


def test_a_real_model_is_measured_and_equals_eager(measuring):
    model = deepseek(hidden=64).cuda()
    compiled = torch.compile(model, backend="dsv4", options={"compiler": "eager"}, dynamic=False)
    for tokens in (24, 24, 40):
        ids = torch.randint(0, model.config.vocab_size, (1, tokens), device="cuda")
        assert distance(logits(compiled, ids), logits(model, ids)) < 1e-5
    assert {entry["source"] for entry in linear.choices()} <= {"searched", "cached"}
    assert streams.stream_count("cuda") <= 3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_model_on_the_second_device():
    model = deepseek(hidden=64).to("cuda:1")
    ids = torch.randint(0, model.config.vocab_size, (1, 24), device="cuda:1")
    expected = logits(model, ids)
    assert distance(logits(torch.compile(model, backend="dsv4"), ids), expected) < 1e-5
