"""Cut operators called without the code around them, and inputs that a graph copies itself; a recorder on the CPU."""

from __future__ import annotations

import copy
import dataclasses
import gc
import math
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import dsv4_compile
from dsv4_compile import assembly
from dsv4_compile.report import CudaGraphs
from dsv4_compile.runtime import straight
from dsv4_compile.runtime.direct import OperatorCall, call_text, operator_call
from dsv4_compile.runtime.program import Code, Program, Step
from dsv4_compile.runtime.recorder import Recording
from dsv4_compile.runtime.runner import Policy, Runner
from tests.recorder import FakeRecorder

WIDTH = 16
calls: list[str] = []
"""Which operators have run, and how often."""


@torch.library.custom_op("direct::attend", mutates_args=())
def attend(x: Tensor, factor: float, name: str = "layer") -> Tensor:
    calls.append(name)
    return x * factor


@attend.register_fake
def _(x: Tensor, factor: float, name: str = "layer") -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("direct::pair", mutates_args=())
def pair(tensors: list[Tensor], scale: Tensor | None, *, sizes: list[int]) -> tuple[Tensor, Tensor]:
    calls.append("pair")
    a, b = tensors
    return b + sizes[0], a * (sizes[1] if scale is None else scale)


@pair.register_fake
def _(tensors: list[Tensor], scale: Tensor | None, *, sizes: list[int]) -> tuple[Tensor, Tensor]:
    return torch.empty_like(tensors[1]), torch.empty_like(tensors[0])


@torch.library.custom_op("direct::lies", mutates_args=())
def lies(x: Tensor) -> Tensor:
    """From its third call on the result is not as its fake says."""
    calls.append("lies")
    return x.clone() if len(calls) < 3 else x.t().contiguous().t()


@lies.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


SPLIT = ["direct::attend", "direct::pair", "direct::lies"]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRecorder]:
    made = FakeRecorder()
    monkeypatch.setattr(assembly, "recorder_of", lambda device: made)
    assembly._known.clear()
    calls.clear()
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
        yield made
    torch._dynamo.reset()


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that were called directly."""
    called: list[str] = []

    def counted(call: Any, places: Any, name: Any) -> str:
        return f"{name('seen', lambda made: called.append(str(call.target)) or made)}({call_text(call, places, name)})"

    monkeypatch.setattr(straight, "call_text", counted)
    return called


def compiled(module: nn.Module, **options: Any) -> nn.Module:
    dynamic = options.pop("dynamic", None)
    options = {"compiler": "eager", "cudagraphs": "piecewise", "split_ops": SPLIT, **options}
    return torch.compile(copy.copy(module), backend="dsv4", options=options, dynamic=dynamic)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x)) * 2 + 1
        h = torch.ops.direct.attend(h, 0.5, name="first")
        y = torch.sin(self.b(h)).exp() + h
        p, q = torch.ops.direct.pair([y, h], None, sizes=[3, 2])
        return self.c(torch.relu(p + q) * p).cos() * 2


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_cut_operator_is_called_with_the_same_arguments(
    recorder: FakeRecorder, direct: list[str], dynamic: bool | None
) -> None:
    model = Layers()
    run = compiled(model, dynamic=dynamic)
    for tokens in (4, 4, 4, 7, 7, 4):
        x = torch.randn(tokens, WIDTH)
        torch.testing.assert_close(run(x), model(x))
    replays = sum(graph.cudagraphs.replays for graph in dsv4_compile.report().graphs)
    assert replays >= 3 and direct == replays * ["direct.attend.default", "direct.pair.default"]


def _extract(graph_of: Any, source: str | None = None, device: str = "cpu") -> OperatorCall | None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    outputs = graph_of(graph, x)
    with FakeTensorMode():
        for node in graph.nodes:
            node.meta["val"] = torch.empty(3, 4, device=device)
    graph.output(outputs)
    return operator_call(graph, source)


def test_what_is_more_than_one_call_keeps_its_code() -> None:
    operators = torch.ops.direct
    alone = _extract(lambda g, x: (g.call_function(operators.attend.default, (x, 2.0)),))
    assert alone is not None and alone.target is operators.attend.default and alone.results == (None,)

    def two(g: Any, x: Any) -> Any:
        y = g.call_function(operators.attend.default, (x, 2.0))
        return (g.call_function(operators.attend.default, (y, 2.0)),)

    assert _extract(two) is None
    assert _extract(lambda g, x: (g.call_function(torch.ops.aten.add_.Tensor, (x, x)),)) is None  # writes
    assert _extract(lambda g, x: (g.call_function(torch.ops.aten.t.default, (x,)),)) is None  # a view
    assert _extract(lambda g, x: (g.call_function(operators.attend.default, (x, 2.0)), x)) is None
    assert _extract(lambda g, x: (g.call_function(torch.sin, (x,)),)) is None
    no_name = {"from": "x"}
    assert _extract(lambda g, x: (g.call_function(operators.attend.default, (x, 2.0), no_name),)) is None


CODE = """
class Runner:
    def call(self, args):
        input_0, = args
        args.clear()
        assert_size_stride(input_0, (3, 4), (4, 1))
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            buf0 = torch.ops.direct.attend.default(input_0, 2.0, name='of inductor')
            del input_0
            buf1 = buf0
            assert_size_stride(buf1, (3, 4), (4, 1), 'torch.ops.direct.attend.default')
            assert_alignment(buf1, 16, 'torch.ops.direct.attend.default')
        return (buf1, )
"""
CALL = "torch.ops.direct.attend.default(input_0, 2.0, name='of inductor')"


def _read(code: str, device: str = "cuda:0") -> OperatorCall | None:
    return _extract(lambda g, x: (g.call_function(torch.ops.direct.attend.default, (x, 0.5)),), code, device)


@pytest.mark.parametrize(
    "code",
    [
        CODE.replace("default(input_0,", "default(reinterpret_tensor(input_0, (4, 3), (1, 4)),"),
        CODE.replace("return", "triton_poi_fused_add_0.run(buf0, 12, stream=0)\n        return"),
        CODE.replace("direct.attend", "direct.other"),
        CODE.replace("buf1 = buf0", f"buf1 = {CALL}"),
        CODE.replace("buf1 = buf0", "buf1 = buf0[0]"),  # not the result that the graph has
        CODE.replace("buf1 = buf0", "buf1 = buf0.t()"),
        CODE.replace("buf1 = buf0", "buf1 = other"),
        CODE.replace("return (buf1, )", "return (input_0, )"),
        CODE.replace("return (buf1, )", "return (buf1, buf1, )"),
        CODE.replace("Guard(0)", "Guard(1)"),
        CODE.replace("set_device(0)", "set_device(1)"),
        CODE.replace("_DeviceGuard", "_Stream"),
        CODE.replace(CALL, "torch.ops.direct.attend.default(something, 2.0)"),
        CODE.replace("args.clear()", "if args: args.clear()"),
        CODE.replace("    def call", "    def call(self, args): pass\n    def call"),
        "def call(args): (",
        "",
    ],
)
def test_inductors_code_must_do_nothing_else(code: str) -> None:
    assert code != CODE and _read(code) is None


def test_the_call_is_the_one_that_inductor_wrote() -> None:
    """A pass of the user may have changed it, which a warm cache does not show in the graph."""
    found = _read(CODE)
    assert found is not None and (found.args[1], dict(found.kwargs), found.results) == (
        2.0,
        {"name": "of inductor"},
        (None,),
    )
    assert found.checked and found.device == torch.device("cuda:0")
    unchecked = _read(CODE.replace("assert_size_stride(buf1", "assert_alignment(buf1"))
    assert unchecked is not None and not unchecked.checked
    assert _read(CODE, "cuda:1") is None
    infinite = _read(CODE.replace("2.0", "-inf"))
    assert infinite is not None and infinite.args[1] == -math.inf


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_code_that_inductor_writes_is_recognised(recorder: FakeRecorder, dynamic: bool) -> None:
    found: list[Any] = []
    real = assembly.operator_call
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "operator_call", lambda *a: found.append(real(*a)) or found[-1])
        model = Layers()
        x = torch.randn(4, WIDTH)
        torch.testing.assert_close(compiled(model, compiler="inductor", dynamic=dynamic)(x), model(x))
    assert [str(call.target) for call in found if call] == ["direct.attend.default", "direct.pair.default"]


def test_a_pass_of_the_user_that_replaces_the_operator_is_kept(recorder: FakeRecorder) -> None:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Doubles(CustomGraphPass):
        def __call__(self, graph: Any) -> None:
            for node in graph.nodes:
                if node.target is torch.ops.direct.attend.default:
                    with graph.inserting_after(node):
                        twice = graph.call_function(torch.ops.aten.mul.Tensor, (node, 2.0))
                    twice.meta.update(node.meta)
                    node.replace_all_uses_with(twice, delete_user_cb=lambda user, twice=twice: user is not twice)

        def uuid(self) -> str:
            return "doubles"

    model = Layers()
    found: list[Any] = []
    real = assembly.operator_call
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "operator_call", lambda *a: found.append(real(*a)) or found[-1])
        run = compiled(model, compiler="inductor", inductor={"post_grad_custom_post_pass": Doubles()})
        run(torch.randn(4, WIDTH))
    assert [str(call.target) for call in found if call] == ["direct.pair.default"]


class Liar(nn.Module):
    def __init__(self, is_read: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.is_read = is_read

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        h = torch.ops.direct.lies(torch.tanh(self.a(x)) * 2)
        y = torch.sin(self.b(h)).exp()
        return (y, h) if self.is_read else y


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("is_read", [False, True])
def test_a_result_that_lies_otherwise_than_recorded(
    recorder: FakeRecorder, direct: list[str], monkeypatch: pytest.MonkeyPatch, is_read: bool, checked: bool
) -> None:
    """A copy into a graph looks how it lies; for anybody else it is an error, if it is one in the code."""
    real = assembly.operator_call
    monkeypatch.setattr(
        assembly, "operator_call", lambda *a: (call := real(*a)) and dataclasses.replace(call, checked=checked)
    )
    model = Liar(is_read)
    run = compiled(model)
    x = torch.randn(4, WIDTH)
    run(x)
    run(x)
    if is_read and checked:
        with pytest.raises(AssertionError, match="expected size"):
            run(x)
    else:
        torch.testing.assert_close(run(x), model(x))
    assert direct == 2 * ["direct.lies.default"] and not recorder.is_busy


@pytest.mark.parametrize("what", ["dtype", "shape", "negative"])
def test_a_result_that_is_something_else_is_not_taken_for_its_bytes(recorder: FakeRecorder, what: str) -> None:
    def other(given: list[Any]) -> list[Tensor]:
        (x,) = given
        given.clear()
        seen.append(x)
        if len(seen) < 3:
            return [x * 1.0]
        if what == "dtype":
            return [x.double()]
        return [torch._neg_view(-x) if what == "negative" else (x * 1.0).t().contiguous()]

    seen: list[Tensor] = []
    steps = (
        Step("piece_0", Code(other), (0,), (1,), (0,), "apart"),
        Step("piece_1", Code(lambda given: [given.pop() * 2 + 1]), (1,), (2,), (1,)),
    )
    run = Runner(Program(steps, 3, (), (), ((2, None),)), recorder, Policy(), CudaGraphs())
    for _ in range(2):
        x = torch.randn(3, 5)
        torch.testing.assert_close(run([x])[0], 2 * x + 1)
    if what == "shape":
        with pytest.raises((ValueError, RuntimeError)):
            run([x])
    else:
        torch.testing.assert_close(run([x])[0], 2 * x + 1)
    assert not recorder.is_busy


def test_a_graph_that_is_turned_off_may_leave_an_expanded_value(recorder: FakeRecorder) -> None:
    def expands(given: list[Any]) -> list[Tensor]:
        return [(given.pop()[:1] * 2).expand(3, 5)]

    steps = (
        Step("piece_0", Code(expands), (0,), (1,), (0,)),
        Step("piece_1", Code(lambda given: [given.pop() + 1.0]), (1,), (2,), (1,), "apart"),
    )
    run = Runner(Program(steps, 3, (), (), ((2, None),)), recorder, Policy(), CudaGraphs())
    for turn in range(4):
        x = torch.randn(3, 5)
        torch.testing.assert_close(run([x])[0], (2 * x[:1] + 1).expand(3, 5))
        (recorded,) = run.tapes.values()
        if turn == 1 and recorded is not None:
            recorded.turn_off(recorded.segments[0])


def test_what_is_compared_is_checked_as_well(recorder: FakeRecorder) -> None:
    """Under `verify` the entries run one by one."""
    model = Layers()
    run = compiled(model, verify=2)
    for _ in range(6):
        x = torch.randn(4, WIDTH)
        torch.testing.assert_close(run(x), model(x))
    found = dsv4_compile.report().graphs[-1].cudagraphs
    assert found.replays == 3 and not found.fallbacks


def test_elsewhere_the_code_runs(recorder: FakeRecorder, direct: list[str]) -> None:
    """Where the current device is not that of the graphs."""
    model = Layers()
    run = compiled(model)
    recorder.is_here = False
    for _ in range(3):
        x = torch.randn(4, WIDTH)
        torch.testing.assert_close(run(x), model(x))
    assert not direct and calls.count("first") == 6


def test_inside_a_call_that_replays_nothing_else_is_replayed(recorder: FakeRecorder) -> None:
    """Between two graphs the values of a call lie in the pool that its graphs and all others share."""
    inner = runner(1, recorder)
    for _ in range(2):
        inner([torch.randn(3, 5)])
    assert inner.report.replays == 1
    steps = (
        Step("piece_0", Code(lambda given: [given[0].sin(), given.pop().cos()]), (0,), (1, 2), (0,)),
        Step(
            "piece_1", Code(lambda given: [inner([given.pop() * 1.0])[0] * 1.0]), (1,), (3,), (1,), "it calls another"
        ),
        Step("piece_2", Code(lambda given: [given.pop() + given.pop()]), (2, 3), (4,), (2, 3)),
    )
    outer = Runner(Program(steps, 5, (), (), ((4, None),)), recorder, Policy(), CudaGraphs())
    for _ in range(4):
        x = torch.randn(3, 5)
        torch.testing.assert_close(outer([x])[0], 2 * x.sin() + x.cos())
    assert outer.report.replays == 3 and inner.report.replays == 1
    x = torch.randn(3, 5)
    torch.testing.assert_close(inner([x])[0], 2 * x)
    assert inner.report.replays == 2  # afterwards it is again


# --------------------------------------------------------------------------------------------------------------- inputs


def runner(inputs: int, recorder: FakeRecorder) -> Runner:
    """Adds up its inputs, twice each."""

    def adds(given: list[Any]) -> list[Tensor]:
        total = given[0] * 2
        for one in given[1:]:
            total = total + one * 2
        given.clear()
        return [total]

    step = Step("piece_0", Code(adds), tuple(range(inputs)), (inputs,), tuple(range(inputs)))
    program = Program((step,), inputs + 1, (), (), ((inputs, None),))
    return Runner(program, recorder, Policy(), CudaGraphs())


def layouts() -> dict[str, Tensor]:
    wide = torch.randn(6, 10)
    return {
        "contiguous": torch.randn(3, 5),
        "every second": wide[::2, ::2],
        "transposed": torch.randn(5, 3).t(),
        "one row for all": torch.randn(1, 5).expand(3, 5),
        "off the boundary": torch.randn(16)[1:].view(3, 5),
    }


@pytest.mark.parametrize("first", list(layouts()))
@pytest.mark.parametrize("feeds", [True, False])
def test_inputs_may_lie_in_another_way_than_when_recorded(recorder: FakeRecorder, first: str, feeds: bool) -> None:
    recorder.feeds = feeds
    run = runner(2, recorder)
    others = layouts()
    order = [others.pop(first), *others.values()]
    if first == "one row for all":  # then one row is copied, and something else has more
        order = [order[0], torch.randn(1, 5).expand(3, 5)]
    for x in order:
        y = torch.randn(3, 5)
        torch.testing.assert_close(run([x, y])[0], 2 * x + 2 * y)
    assert run.report.replays == len(order) - 1


def test_an_input_at_the_same_address_costs_nothing(recorder: FakeRecorder) -> None:
    run = runner(1, recorder)
    x = torch.randn(3, 5)
    for _ in range(4):
        x.copy_(torch.randn(3, 5))
        torch.testing.assert_close(run([x])[0], 2 * x)
    assert recorder.pointed == 1
    y = torch.randn(3, 5)
    torch.testing.assert_close(run([y])[0], 2 * y)
    assert recorder.pointed == 2 and run.report.replays == 4


def test_complex_inputs_are_copied_by_torch(recorder: FakeRecorder) -> None:
    """The bytes of `x.conj()` are those of `x`."""
    run = runner(1, recorder)
    for x in (torch.randn(3, dtype=torch.cfloat), torch.randn(3, dtype=torch.cfloat).conj()):
        torch.testing.assert_close(run([x])[0], 2 * x)
    assert recorder.pointed == 0 and run.report.replays == 1


def test_graphs_go_with_their_runner(recorder: FakeRecorder) -> None:
    """Without waiting for the garbage collector: they hold memory of the device."""
    run = runner(1, recorder)
    for _ in range(3):
        run([torch.randn(3, 5)])
    (recorded,) = run.tapes.values()
    assert recorded is not None
    segment = weakref.ref(recorded.segments[0])
    gc.disable()
    try:
        del run, recorded
        assert segment() is None
    finally:
        gc.enable()


def test_no_elements_are_not_copied(recorder: FakeRecorder) -> None:
    run = runner(1, recorder)
    for _ in range(3):
        assert run([torch.randn(0, 5)])[0].shape == (0, 5)
    assert recorder.pointed == 0


def test_a_graph_of_nothing_but_copies_is_empty(recorder: FakeRecorder) -> None:
    step = Step("piece_0", Code(lambda given: [given.pop()[:, :2]]), (0,), (1,), (0,))
    run = Runner(Program((step,), 2, (), (), ((1, None),)), recorder, Policy(), CudaGraphs())
    x = torch.randn(3, 5)
    for _ in range(2):
        torch.testing.assert_close(run([x])[0], x[:, :2])
    assert "launches nothing" in run.report.fallbacks[0]["reason"] and run.report.replays == 0


def test_a_graph_that_does_nothing_is_found_although_it_copies_nothing_either(
    recorder: FakeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FakeRecorder.record
    monkeypatch.setattr(
        FakeRecorder, "record", lambda self, body: Recording(lambda: None, real(self, body).bytes, None)
    )
    run = runner(2, recorder)
    run.policy = Policy(verify=1)
    for _ in range(4):
        x, y = torch.randn(3, 5), torch.randn(3, 5)
        torch.testing.assert_close(run([x, y])[0], 2 * x + 2 * y)
    assert "another result than its code" in run.report.fallbacks[0]["reason"]
