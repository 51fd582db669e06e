"""Random graphs, cut at random nodes, recorded into memory that is used again: replays equal the graph itself."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from dsv4_compile.passes import pieces
from dsv4_compile.passes.extraction import extract
from dsv4_compile.report import CudaGraphs
from dsv4_compile.runtime.program import Code, Program, Sizes, program
from dsv4_compile.runtime.runner import Policy, Runner
from tests.recorder import FakeRecorder

ROWS, WIDTH, STEPS = 6, 8, 24


def traced(seed: int) -> tuple[GraphModule, int]:
    """A graph of two activations, two weights and a buffer that it writes; and how many inputs it has."""

    def function(x: Tensor, y: Tensor, w: Tensor, v: Tensor, buffer: Tensor) -> tuple[Tensor, ...]:
        choose = random.Random(seed)
        values = [x, y, buffer * 1, buffer + 0.5]
        for _ in range(STEPS):
            a, b = choose.choice(values), choose.choice(values)
            kind = choose.randrange(10)
            if kind == 0:
                values.append(torch.mm(a, choose.choice([w, v])))
            elif kind == 1:
                values += [part.repeat(1, 2) for part in a.split(WIDTH // 2, 1)]
            elif kind == 2:
                top, where = a.topk(WIDTH, dim=1)
                values += [top, where * 0.1]
            elif kind == 3:
                values.append(a.t().contiguous().t())
            elif kind == 4:
                values.append((a if a.is_contiguous() else a.contiguous()).view(-1).view(ROWS, WIDTH))
            elif kind == 5:
                values.append(torch.cat([a[:2], b[2:]]))
            elif kind == 6:
                values.append(a.t().reshape(ROWS, WIDTH))
            elif kind == 7:
                values.append(w.relu().sum() * a)
            else:
                values.append(torch.tanh(a) + b * 0.3)
        buffer.copy_(choose.choice(values) * 0.5)
        results = choose.sample(values[4:], 4)
        return (*results, results[0].reshape(-1), values[-1].t())

    inputs = [torch.randn(ROWS, WIDTH) for _ in range(2)] + [torch.randn(WIDTH, WIDTH) for _ in range(2)]
    inputs.append(torch.randn(ROWS, WIDTH))
    return make_fx(function, tracing_mode="fake")(*inputs), len(inputs)


def assembled(gm: GraphModule, seed: int) -> tuple[Program, int]:
    choose = random.Random(seed)
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    static = placeholders[2:]
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    apart = {node: "chance" for node in choose.sample(calls, choose.randrange(0, 6))}
    cuts = pieces.cut(gm.graph, static, apart)
    _check(gm, cuts)
    sizes = Sizes(placeholders)
    made = []
    for i, one in enumerate(cuts):
        part = extract(gm, one.nodes, sizes.of)
        made.append((f"piece_{i}", part, Code(_boxed(part.module)), one.apart))
    output = next(iter(reversed(gm.graph.nodes)))
    positions = [placeholders.index(node) for node in static]
    return program(placeholders, made, output, positions), len(cuts)


def _boxed(module: GraphModule) -> object:
    def run(inputs: list[Tensor]) -> tuple[Tensor, ...]:
        given = list(inputs)
        inputs.clear()
        return module(*given)

    return run


def _check(gm: GraphModule, cuts: list[pieces.Cut]) -> None:
    """Each node is in one piece, behind what it needs."""
    number: dict[Node, int] = {}
    for i, one in enumerate(cuts):
        assert one.nodes
        number.update(dict.fromkeys(one.nodes, i))
    assert sum(len(one.nodes) for one in cuts) == len(number)
    for node, i in number.items():
        assert all(number[n] <= i for n in node.all_input_nodes if n in number)


@pytest.mark.parametrize("seed", range(60))
def test_replays_of_a_random_program_equal_the_graph(seed: int) -> None:
    torch.manual_seed(seed)
    gm, count = traced(seed)
    steps, _ = assembled(gm, seed)
    recorder = FakeRecorder()
    run = Runner(steps, recorder, Policy(), CudaGraphs())
    fixed = [torch.randn(WIDTH, WIDTH) for _ in range(2)] + [torch.randn(ROWS, WIDTH)]
    twin = [t.clone() for t in fixed]
    held = []
    with torch.no_grad():
        for _ in range(4):
            given = [torch.randn(ROWS, WIDTH) for _ in range(2)]
            expected = [t.clone() for t in gm(*given, *twin)]
            held.append((run([*given, *fixed]), expected))
            torch.testing.assert_close(fixed, twin)
    for got, expected in held:  # at the end: nothing that was handed out has been overwritten
        torch.testing.assert_close(list(got), expected)
    assert count == 5 and run.report.replays in (0, 3)


def test_most_random_programs_are_replayed() -> None:
    replayed = 0
    for seed in range(20):
        gm, _ = traced(seed)
        steps, _ = assembled(gm, seed)
        run = Runner(steps, FakeRecorder(), Policy(), CudaGraphs())
        fixed = [torch.randn(WIDTH, WIDTH) for _ in range(2)] + [torch.randn(ROWS, WIDTH)]
        for _ in range(2):
            run([*(torch.randn(ROWS, WIDTH) for _ in range(2)), *fixed])
        replayed += run.report.replays
    assert replayed > 15


def test_a_later_recording_uses_the_memory_of_an_earlier_one() -> None:
    """The largest first: smaller token counts fit into its memory."""
    gm, _ = traced(3)
    recorder = FakeRecorder()
    peaks = []
    for _ in range(3):
        steps, _ = assembled(gm, 3)
        run = Runner(steps, recorder, Policy(), CudaGraphs())
        fixed = [torch.randn(WIDTH, WIDTH) for _ in range(2)] + [torch.randn(ROWS, WIDTH)]
        run([*(torch.randn(ROWS, WIDTH) for _ in range(2)), *fixed])
        peaks.append(recorder.arena.peak)
    assert peaks == [0, 0, 0]  # all of it went back
