"""`dsv4::accompanied_linear`: linear layers, and other people's operators beside them on one side stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels import linear, streams
from dsv4_compile.kernels.linear import accompanied, calls
from tests.kernels import quantised_operators as quantised
from tests.kernels import test_streams
from tests.kernels.quantised_operators import BF16, FLOAT8

GPU = pytest.mark.gpu
ops = torch.ops.quantised
log = test_streams.log
"""A CUDA that notes what is asked of it."""


class Placed:
    """Lists of tensors and sizes that calls are written with; tensor 0 is `x`."""

    def __init__(self, x: Tensor) -> None:
        self.tensors, self.sizes = [x], list[int]()

    def of(self, argument: object) -> dict[str, int] | None:
        if not isinstance(argument, Tensor):
            return None
        known = [i for i, tensor in enumerate(self.tensors) if tensor is argument]
        if not known:
            self.tensors.append(argument)
        return {"tensor": known[0] if known else len(self.tensors) - 1}


Written = tuple[Any, Sequence[Any], dict[str, Any], int]
"""Operator, arguments by position and by name, number of results."""


def arguments(x: Tensor, *written: Written, stream: int = 1, max_tokens: int = 1024) -> tuple[Any, ...]:
    """Those of `accompanied_linear` that runs these calls."""
    placed = Placed(x)
    texts = [calls.write(args, named, placed.of) for _, args, named, _ in written]
    names = [calls.name_of(operator) for operator, *_ in written]
    counts = [count for *_, count in written]
    return x, placed.tensors[1:], placed.sizes, names, texts, counts, stream, max_tokens


def layers(device: str = "cpu", tokens: int = 5) -> tuple[Tensor, list[Tensor], list[Written]]:
    """x `[2, tokens, 64]`, two weights, and calls: two linears, an int8 product with a bias and one of four bits."""
    generator = torch.Generator().manual_seed(1)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device)

    def integers(low: int, high: int, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randint(low, high, size, generator=generator, dtype=dtype).to(device)

    x, weights = draw(2, tokens, 64), [draw(24, 64), draw(8, 64)]
    grouped = (torch.ops.dsv4.parallel_linear.default, (x, weights, [None, None], [0, 2]), {}, 2)
    small, scale, bias = integers(-99, 99, (16, 64), torch.int8), draw(16), draw(16)
    int8 = (ops.int8_linear.default, (x, small, scale), {"bias": bias, "gain": 0.5}, 1)
    four = (ops.packed_pair.default, (x, integers(0, 255, (12, 32), torch.uint8), 2 * tokens), {}, 2)
    return x, weights, [grouped, int8, four]


def expected(written: Sequence[Written]) -> list[Tensor]:
    return [tensor for operator, args, named, _ in written for tensor in calls.flattened(operator(*args, **named))]


def assert_same(made: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    for one, other in zip(made, others, strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()


@pytest.mark.parametrize("limit", [1024, 3])
@pytest.mark.parametrize("stream", [0, 1, 3])
def test_results_are_those_of_the_calls_bit_for_bit(stream: int, limit: int) -> None:
    x, _, written = layers()
    given = arguments(x, *written, stream=stream, max_tokens=limit)
    assert_same(linear.accompanied_linear(*given), expected(written))
    assert_same(torch.ops.dsv4.accompanied_linear.default.direct(*given), expected(written))


def test_opcheck() -> None:
    x, weights, written = layers()
    torch.library.opcheck(torch.ops.dsv4.accompanied_linear.default, arguments(x, *written))
    for tensor in (x, *weights):
        tensor.requires_grad_()
    plain: list[Written] = [written[0], (ops.wide_linear.default, (x.detach(), weights[0].detach()), {}, 1)]
    torch.library.opcheck(torch.ops.dsv4.accompanied_linear.default, arguments(x, *plain))


def test_gradients_are_those_of_the_calls() -> None:
    x, weights, written = layers()
    weights[0].requires_grad_()
    made = linear.accompanied_linear(*arguments(x, *written[:1], written[1]))
    made[0].sum().backward()
    torch.testing.assert_close(weights[0].grad, x.sum((0, 1)).expand(24, 64))


def test_all_but_the_first_are_on_one_side_stream_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    forks: list[tuple[list[bool], bool]] = []

    def run(
        main: Callable[[], Any], sides: Sequence[Any], device: object, enabled: bool, inputs: Sequence[Tensor]
    ) -> tuple[Any, list[Any]]:
        # The linears fork by themselves, within the work of the current stream.
        forks.append(([side is not None for side in sides], enabled))
        quantised.started.clear()
        made = main()
        assert not quantised.started, "on the current stream there are only linears"
        results = [side and side() for side in sides]
        ran[:] = quantised.started
        return made, results

    x, _, written = layers()
    written += written[1:]
    want = expected(written)
    monkeypatch.setattr(accompanied.auxiliary, "execute_in_parallel", run)
    for limit, leaves in ((10, True), (9, False)):
        forks.clear()
        made = linear.accompanied_linear(*arguments(x, *written, stream=3, max_tokens=limit))
        assert_same(made, want)
        assert ran == ["int8_linear", "packed_pair"] * 2
        assert forks == [([False, False, True], leaves), ([False, True], True)]


def test_the_order_of_what_is_recorded_where_the_linears_fork_as_well(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outer fork comes first, and its side last, right before its join: the linears run beside it."""
    real = streams.execute_in_parallel

    def as_on_cuda(main: Any, sides: Any, device: object, enabled: bool = True, inputs: Sequence[Tensor] = ()) -> Any:
        return real(main, sides, "cuda", enabled)

    monkeypatch.setattr(streams, "execute_in_parallel", as_on_cuda)
    x, _, written = layers()
    want = expected(written)
    log.clear()
    assert_same(linear.accompanied_linear(*arguments(x, *written)), want)
    assert log == [
        "main records",
        "main records",
        "side 2 waits for event of main",
        "side 2 records",
        "main waits for event of side 2",
        "side 1 waits for event of main",
        "side 1 records",
        "main waits for event of side 1",
    ]
    log.clear()
    with streams.serial():
        assert_same(linear.accompanied_linear(*arguments(x, *written)), want)
    assert log == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {3: ["dsv4::parallel_linear.default", "quantised::absent.default", "quantised::packed_pair.default"]},
            "absent",
        ),
        ({4: ["{}", "{}", "{}"]}, "cannot be read"),
        ({4: ["[", "[", "["]}, "cannot be read"),
        ({5: [2, 1]}, "3 operators, 3 arguments and 2 numbers"),
        ({5: [2, 1, 1]}, "returned 2 tensors, and 1 were expected"),
        ({6: -1}, "must be 0 or more"),
        ({3: [], 4: [], 5: []}, "at least one operator"),
    ],
)
def test_wrong_arguments_are_refused_with_a_sentence(change: dict[int, Any], message: str) -> None:
    x, _, written = layers()
    given = list(arguments(x, *written))
    for position, value in change.items():
        given[position] = value
    with pytest.raises(RuntimeError, match=message):
        torch.ops.dsv4.accompanied_linear(*given)


def test_every_kind_of_constant_is_read_as_it_was_written() -> None:
    constants = [
        None, True, 3, -0.1, math.inf, "a\\\"b' %27%\n", torch.float8_e4m3fn, torch.device("cpu"), torch.strided,
        torch.channels_last, [1, [2.5, None]],
    ]  # fmt: skip
    text = calls.write(constants, {"dtype": torch.bfloat16}, lambda argument: None)
    args, named = calls.read("quantised::int8_linear.default", text).given([], [])
    assert args == constants and named == {"dtype": torch.bfloat16}
    assert [type(one) for one in args] == [type(one) for one in constants]
    assert not {'"', "\\"} & {*text}, "Inductor's C++ wrapper would not quote them"


@pytest.mark.parametrize("argument", [object(), 1j, {"a": 1}, torch.zeros(())])
def test_what_cannot_be_written_is_refused(argument: object) -> None:
    with pytest.raises(ValueError, match="cannot be written down"):
        calls.write([argument], {}, lambda one: None)


def test_traces_once_for_all_token_counts() -> None:
    graphs = 0

    def count(graph: torch.fx.GraphModule, examples: list[Tensor]) -> object:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, examples)

    _, weights, _ = layers()
    small, scale = torch.ones(16, 64, dtype=torch.int8), torch.rand(16)

    def run(x: Tensor) -> list[Tensor]:
        texts = ["{'args':[{'tensor':0},[{'tensor':1},{'tensor':2}],[null,null],[0,2]],'named':{}}"]
        texts.append("{'args':[{'tensor':0},{'tensor':3},{'tensor':4}],'named':{}}")
        names = ["dsv4::parallel_linear.default", "quantised::int8_linear.default"]
        return torch.ops.dsv4.accompanied_linear(x, [*weights, small, scale], [], names, texts, [2, 1])

    compiled = torch.compile(run, backend=count, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for tokens in (4, 7):
            x = torch.randn(3, tokens, 64)
            torch.testing.assert_close(compiled(x), run(x))
    assert graphs == 1


# --------------------------------------------------------------------------------------------------------------- GPU

_slept: list[int] = []


@torch.library.custom_op("quantised::slow_linear", mutates_args=())
def slow_linear(x: Tensor, weight: Tensor) -> Tensor:
    """It comes late, and notes the stream that it ran on."""
    _slept.append(torch.cuda.current_stream().cuda_stream)
    torch.cuda._sleep(20_000_000)
    return x @ weight.to(x.dtype).t()


@slow_linear.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def slow(x: Tensor, weights: list[Tensor], small: list[Tensor]) -> list[Written]:
    target = torch.ops.dsv4.grouped_linear.default
    grouped: Written = (target, (x, weights, [None] * len(weights), [*range(len(weights))]), {}, 1)
    return [grouped, *((ops.slow_linear.default, (x, one), {}, 1) for one in small)]


def on_card(tokens: int = 8) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    x = torch.randn(tokens, 256, device="cuda", dtype=BF16)
    weights = [torch.randn(rows, 256, device="cuda", dtype=BF16) / 16 for rows in (512, 64, 32)]
    small = [torch.randn(rows, 256, device="cuda").to(FLOAT8) for rows in (256, 128)]
    return x, weights, small


def assert_products(made: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], small: Sequence[Tensor]) -> None:
    torch.testing.assert_close(made[0], x @ torch.cat(list(weights)).t(), rtol=2e-2, atol=2e-2)
    for one, weight in zip(made[1:], small, strict=True):
        torch.testing.assert_close(one, x @ weight.to(BF16).t(), rtol=2e-2, atol=2e-2)


@GPU
@pytest.mark.parametrize(("limit", "leaves"), [(8, True), (7, False)])
def test_on_the_card_slow_operators_are_joined_and_share_one_stream(limit: int, leaves: bool) -> None:
    x, weights, small = on_card()
    for stream in (1, 2):
        _slept.clear()
        made = linear.accompanied_linear(*arguments(x, *slow(x, weights, small), stream=stream, max_tokens=limit))
        # No synchronisation before: what reads the results on the current stream must wait for the sleepers.
        copies = [one.clone() for one in made]
        assert_products(copies, x, weights, small)
        side = streams.auxiliary_streams("cuda", stream)[-1] if leaves else torch.cuda.current_stream()
        assert _slept == [side.cuda_stream] * 2
    with streams.serial():
        _slept.clear()
        linear.accompanied_linear(*arguments(x, *slow(x, weights, small)))
        assert _slept == [torch.cuda.current_stream().cuda_stream] * 2


@GPU
def test_on_the_card_results_that_are_read_late_keep_their_values() -> None:
    """Results are made on the side stream: their memory must not be given to it again while the main one reads."""
    x, weights, small = on_card(1024)
    for _ in range(5):
        made = linear.accompanied_linear(*arguments(x, *slow(x, weights, small)))
        torch.cuda._sleep(20_000_000)
        found = [one.double().abs().sum() for one in made]
        sums = [(x @ weight.to(BF16).t()).double().abs().sum() for weight in small]
        del made
        for stream in [torch.cuda.current_stream(), *streams.auxiliary_streams("cuda", 2)]:
            with torch.cuda.stream(stream):
                [torch.full((1024, rows), 7.0, device="cuda", dtype=BF16) for rows in (608, 256, 128)]
        for one, other in zip(found[1:], sums, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=0)


@GPU
def test_on_the_card_an_input_that_comes_late_is_waited_for() -> None:
    x, weights, small = on_card()
    for _ in range(3):
        torch.cuda._sleep(20_000_000)
        late = x * 2
        made = linear.accompanied_linear(*arguments(late, *slow(late, weights, small)))
        assert_products(made, x * 2, weights, small)
        del late, made


@GPU
def test_on_the_card_a_capture_replays_with_new_inputs() -> None:
    x, weights, small = on_card()
    given = arguments(x, *slow(x, weights, small))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        linear.accompanied_linear(*given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = linear.accompanied_linear(*given)
        # The first results are free again, and their memory may serve for the second ones.
        read = [one * 1 for one in first]
        del first
        second = [one * 2 for one in linear.accompanied_linear(*given)]
    for _ in range(5):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert_products(read, x, weights, small)
        assert_products([one / 2 for one in second], x, weights, small)
