"""Random programs of captured, called and directly called steps give what their steps give, call after call."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.report import CudaGraphs
from dsv4_compile.runtime.direct import OperatorCall, call_text, operator_call
from dsv4_compile.runtime.program import Code, Program, Step, begin, run_steps
from dsv4_compile.runtime.runner import Policy, Runner
from tests.recorder import FakeRecorder

SIZE = 4
CALLS = 6
Run = Callable[[list[Any]], list[Tensor]]


@torch.library.custom_op("programs::two", mutates_args=())
def two(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The second result is not contiguous."""
    return a + 2 * b.contiguous(), (a - b).t().contiguous().t()


@two.register_fake
def _(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty(a.shape), torch.empty(a.shape).t()


def captured(number: int) -> tuple[Run, int]:
    """Some results are views of others, or expanded."""

    def run(given: list[Any]) -> list[Tensor]:
        total = given[0]
        for i, one in enumerate(given[1:], 1):
            total = total * 0.5 + one * i
        given.clear()
        made = [torch.tanh(total) + number, total.sin()]
        made += [total.t().cos().t()] if number % 3 == 0 else []
        return made + ([made[0][:, :1].expand_as(total)] if number % 4 == 0 else [])

    return run, 2 + (number % 3 == 0) + (number % 4 == 0)


def called(number: int) -> tuple[Run, int]:
    """Some results are views of inputs."""

    def run(given: list[Any]) -> list[Tensor]:
        a, b = given
        given.clear()
        return [a.t()[:].t(), b * 1.5] if number % 3 == 0 else [a * 0.7 + b, b[:, :1].expand_as(b)]

    return run, 2


def direct_call() -> OperatorCall:
    graph = torch.fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    made = graph.call_function(torch.ops.programs.two.default, (a, b))
    parts = [graph.call_function(operator.getitem, (made, i)) for i in range(2)]
    graph.output(tuple(parts))
    for node in (a, b, *parts):
        node.meta["val"] = torch.empty(SIZE, SIZE)
    found = operator_call(graph, None)
    assert found is not None and call_text(found, (3, 5), lambda name, value: name) == "operator(values[3], values[5])"
    return found


def directly(given: list[Any]) -> list[Tensor]:
    a, b = given
    given.clear()
    return list(torch.ops.programs.two(a, b))


def random_program(rng: random.Random) -> Program:
    inputs = rng.randint(1, 4)
    places = list(range(inputs))
    made: list[tuple[Code, tuple[int, ...], tuple[int, ...], str]] = []
    for _ in range(rng.randint(3, 12)):
        kind, number = rng.choice("ccdo"), rng.randint(0, 20)
        read = tuple(rng.choice(places) for _ in range(rng.randint(1, 3) if kind == "c" else 2))
        run, count = captured(number) if kind == "c" else called(number) if kind == "o" else (directly, 2)
        read = tuple(dict.fromkeys(read)) if kind == "c" else read
        outputs = tuple(range(len(places), len(places) + count))
        code = Code(run, (), direct_call() if kind == "d" else None)
        made.append((code, read, outputs, "" if kind == "c" else "apart"))
        places += outputs
    results = rng.sample(places[inputs:], min(3, len(places) - inputs))
    last = {place: i for i, (_, read, outputs, _) in enumerate(made) for place in (*read, *outputs)}
    steps = tuple(
        Step(f"piece_{i}", code, read, outputs, _done(last, i, results), apart, (), True)
        for i, (code, read, outputs, apart) in enumerate(made)
    )
    static = tuple(i for i in range(inputs) if rng.random() < 0.2)
    return Program(steps, len(places), (), (), tuple((place, None) for place in results), static)


def _done(last: dict[int, int], number: int, results: Sequence[int]) -> tuple[int, ...]:
    return tuple(place for place, at in last.items() if at == number and place not in results)


def random_input(rng: random.Random) -> Tensor:
    layouts: tuple[Callable[[], Tensor], ...] = (
        lambda: torch.randn(SIZE, SIZE),
        lambda: torch.randn(SIZE, SIZE).t(),
        lambda: torch.randn(SIZE * SIZE + 1)[1:].view(SIZE, SIZE),
        lambda: torch.randn(2 * SIZE, 2 * SIZE)[::2, ::2],
    )
    return rng.choice(layouts)()


@pytest.mark.parametrize("seed", range(60))
def test_a_random_program_gives_what_its_steps_give(seed: int) -> None:
    """Results of earlier calls stay, inputs lie anyhow, parameters move, another device is current now and then."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    program = random_program(rng)
    inputs = min(place for step in program.steps for place in step.outputs)
    recorder = FakeRecorder()
    recorder.feeds = rng.random() < 0.8
    run = Runner(program, recorder, Policy(verify=rng.choice([0, 0, 1])), CudaGraphs())
    parameters = {i: torch.randn(SIZE, SIZE) for i in program.static}
    held = []
    for _ in range(CALLS):
        if rng.random() < 0.1:
            parameters = {i: torch.randn(SIZE, SIZE) for i in parameters}
        given = [parameters[i] if i in parameters else random_input(rng) for i in range(inputs)]
        if inputs > 1 and rng.random() < 0.2 and not {0, 1} & parameters.keys():
            given[1] = given[0]
        expected = [result.clone() for result in run_steps(program, begin(program, list(given)))]
        recorder.is_here = rng.random() < 0.8
        held.append((run(list(given)), expected))
        del given
        for got, wanted in held:
            torch.testing.assert_close(got, wanted)
    if any(not step.apart for step in program.steps):
        assert run.report.replays + len(run.report.fallbacks) > 0
