"""Capture and replay with a recorder that works on the CPU: same results as eager, whatever is recorded or is not."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import dsv4_compile
from dsv4_compile import assembly, backend
from dsv4_compile.options import Options
from dsv4_compile.report import CudaGraphs
from dsv4_compile.runtime import runner
from dsv4_compile.runtime.program import Code, Program, Step
from tests.recorder import FakeRecorder


@torch.library.custom_op("dsv4_test::attend", mutates_args=["output"])
def attend(x: Tensor, output: Tensor) -> None:
    output.copy_(x * 2)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRecorder]:
    made = FakeRecorder()
    monkeypatch.setattr(assembly, "recorder_of", lambda device: made)
    assembly._known.clear()
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
        yield made
    torch._dynamo.reset()


def compiled(module: nn.Module, **options: object) -> nn.Module:
    options = {"compiler": "eager", "cudagraphs": "piecewise", **options}
    return torch.compile(copy.copy(module), backend="dsv4", options=options, dynamic=options.pop("dynamic", None))


def graph() -> dsv4_compile.GraphReport:
    return dsv4_compile.report().graphs[-1]


class Attention(nn.Module):
    """One layer that appends to a cache, as Hugging Face's do."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.late = nn.Linear(width, 4)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        q = self.q(h)
        keys, values = torch.cat([keys, self.k(h)], 0), torch.cat([values, self.v(h)], 0)
        weights = torch.softmax(q @ keys.T, -1)
        gate = self.late(h).sigmoid().mean(-1, keepdim=True)  # written behind the read of the cache, needs none of it
        x = x + self.o((weights @ values) * gate)
        return x + self.down(torch.tanh(self.up(x))), keys, values


class Model(nn.Module):
    def __init__(self, layers: int = 3, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(width) for _ in range(layers))
        self.head = nn.Linear(width, 32)

    def forward(self, x: Tensor, caches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        new = []
        for layer, (keys, values) in zip(self.layers, caches, strict=True):
            x, keys, values = layer(x, keys, values)
            new.append((keys, values))
        return self.head(x), new


def generate(model: nn.Module, steps: int, layers: int = 3, tokens: int = 1, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    caches = [(torch.zeros(4, 16), torch.zeros(4, 16)) for _ in range(layers)]
    out = []
    for _ in range(steps):
        y, caches = model(torch.randn(tokens, 16, generator=generator), caches)
        out.append(y)
    return [*out, *(x for pair in caches for x in pair)]


def test_a_cache_that_grows_is_cut_out_and_the_rest_is_replayed(recorder: FakeRecorder) -> None:
    model = Model()
    expected = generate(model, 12)
    got = generate(compiled(model), 12)
    torch.testing.assert_close(got, expected)  # those of the first steps as well: nothing was overwritten
    report = graph()
    assert report.cudagraphs.mode == "piecewise" and report.cudagraphs.replays >= 8
    assert report.cudagraphs.sizes == [1] and report.cudagraphs.bytes > 0
    kinds = [piece.kind for piece in report.pieces]
    assert kinds.count("captured") >= 4 and kinds.count("compiled") >= 3
    text = f"  pieces: {kinds.count('captured')} captured, {kinds.count('compiled')} compiled; "
    assert text + f"{len({piece.key for piece in report.pieces})} distinct" in str(dsv4_compile.report())
    apart = [piece for piece in report.pieces if piece.kind == "compiled"]
    assert all(
        "follows something other than the token count" in p.reason and "test_runner.py" in p.reason for p in apart
    )


def test_auto_cuts_what_can_be_captured(recorder: FakeRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CUDA device."""
    monkeypatch.setattr(backend, "_device_type", lambda inputs: "cuda")
    model = Model(1)
    expected = generate(model, 8, 1)
    torch.testing.assert_close(generate(compiled(model, cudagraphs="auto", compiler="inductor"), 8, 1), expected)
    report = dsv4_compile.report()
    assert graph().cudagraphs.mode == "piecewise"
    assert report.effective["cudagraphs"] == {"value": "piecewise", "reason": "the best that this graph allows"}


@pytest.mark.parametrize(
    ("options", "device", "patches", "mode"),
    [
        ({}, "cuda", {}, "full_and_piecewise"),
        ({}, "cpu", {}, "off"),
        ({}, "cuda", {"triton.cudagraphs": True}, "off"),
        ({"compiler": "eager"}, "cuda", {}, "off"),
        ({"cudagraphs": "off"}, "cuda", {}, "off"),
        ({"cudagraphs": "full", "compiler": "eager"}, "cpu", {}, "full"),
    ],
)
def test_what_auto_stands_for(
    options: dict[str, str], device: str, patches: dict[str, bool], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    resolved = Options.resolve(options)
    found, reason = backend.capture_of(resolved, device, patches)
    assert found == mode and bool(reason) == (resolved.cudagraphs == "auto")
    assert "Inductor captures" not in backend.capture_of(Options(compiler="eager"), device, patches)[1]


def test_vllm_captures_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", sys)
    assert backend.capture_of(Options.resolve({}), "cuda") == ("off", "vLLM captures")


def test_what_needs_no_cache_is_done_before_it_is_read(recorder: FakeRecorder) -> None:
    run = compiled(Model(1))
    generate(run, 4, layers=1)
    # Two graphs: the projections with the late one, and what follows attention.
    assert [piece.kind for piece in graph().pieces] == ["captured", "compiled", "captured"]


def test_layers_share_the_code_of_pieces(recorder: FakeRecorder) -> None:
    generate(compiled(Model(6)), 4, layers=6)
    pieces = graph().pieces
    assert len({piece.key for piece in pieces if piece.kind == "compiled"}) == 1
    assert len({piece.key for piece in pieces}) <= 5


def test_each_token_count_is_recorded_once_and_sizes_take_turns(recorder: FakeRecorder) -> None:
    model = Model(2)
    run = compiled(model, dynamic=True)
    expected = {n: generate(model, 3, layers=2, tokens=n, seed=n) for n in (2, 5, 9)}
    for _ in range(3):
        for n in (9, 2, 5):
            torch.testing.assert_close(generate(run, 3, layers=2, tokens=n, seed=n), expected[n])
    report = graph()
    assert report.cudagraphs.sizes == [2, 5, 9]
    segments = sum(kind == "captured" for kind in _runs(report))
    assert len(recorder.recorded) == 3 * segments


def _runs(report: dsv4_compile.GraphReport) -> list[str]:
    kinds = [piece.kind for piece in report.pieces]
    return [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]


class Plain(nn.Module):
    def __init__(self, width: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = torch.sin(layer(x)) + x.cos() * 0.5
        return x, x.sum(-1)


@pytest.mark.parametrize("mode", ["full", "piecewise", "full_and_piecewise"])
def test_a_graph_that_one_recording_can_hold_is_recorded_as_one(recorder: FakeRecorder, mode: str) -> None:
    model = Plain()
    run = compiled(model, cudagraphs=mode)
    for _ in range(4):
        x = torch.randn(3, 16)
        torch.testing.assert_close(run(x), model(x))
    assert len(recorder.recorded) == 1 and graph().cudagraphs.mode == "full" and graph().cudagraphs.replays == 3


def test_full_does_not_record_a_part(recorder: FakeRecorder) -> None:
    run = compiled(Model(1), cudagraphs="full")
    generate(run, 5, layers=1)
    report = graph()
    assert report.cudagraphs.mode == "off" and report.dynamic
    assert "one graph cannot hold it" in report.cudagraphs.fallbacks[0]["reason"]
    assert dsv4_compile.report().effective["cudagraphs"]["value"] == "off"


def test_split_ops_cut_unless_one_graph_may_hold_everything(recorder: FakeRecorder) -> None:
    model, x = Plain(), torch.randn(3, 16)
    for mode, cuts in (("piecewise", 4), ("full_and_piecewise", 0), ("full", 0)):
        run = compiled(model, cudagraphs=mode, split_ops=["aten::sin"])
        for _ in range(2):
            torch.testing.assert_close(run(x), model(x))
        assert sum("split_ops" in piece.reason for piece in graph().pieces) == cuts
        torch._dynamo.reset()


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("name", ["dsv4_test::attend", "dsv4_test::attend.default"])
def test_an_operator_that_writes_an_argument_is_cut_at(recorder: FakeRecorder, name: str, compiler: str) -> None:
    """As attention with an `output` argument does, in a functional graph within a wrapper."""

    def model(x: Tensor) -> Tensor:
        x = torch.tanh(torch.sin(x * 2).cos() + 1)
        output = torch.empty_like(x)
        attend(x, output)
        return torch.sin(torch.tanh(output.exp() - 1) * 3)

    run = torch.compile(
        model, backend="dsv4", options={"compiler": compiler, "cudagraphs": "piecewise", "split_ops": [name]}
    )
    for _ in range(3):
        x = torch.randn(3, 16)
        torch.testing.assert_close(run(x), model(x))
    assert graph().split_ops == [name]
    assert graph().cudagraphs.replays or compiler == "inductor"  # the stand-in does not see what C++ does
    assert any(piece.reason.startswith("dsv4_test::attend: it is one of split_ops") for piece in graph().pieces)
    assert dsv4_compile.report().effective["split_ops"] == [name]


@pytest.mark.parametrize("mode", ["piecewise", "full_and_piecewise"])
def test_split_ops_that_no_graph_has_are_in_the_report(recorder: FakeRecorder, mode: str) -> None:
    asked = ["aten::softmax", "aten::sin.default", "nosuch::attention"]
    compiled(Plain(), cudagraphs=mode, split_ops=asked)(torch.randn(3, 16))
    assert graph().split_ops == ["aten::sin.default"]
    assert "split_ops: ['aten::softmax', 'aten::sin.default', 'nosuch::attention'] -> ['aten::sin.default'] (" in str(
        dsv4_compile.report()
    )
    reason = dsv4_compile.report().effective["split_ops"]["reason"]
    assert reason.startswith("no graph so far has aten::softmax, nosuch::attention")
    assert "no nosuch::attention is registered" in reason and "no aten::softmax is" not in reason


def test_split_ops_that_a_later_graph_has_are_met(recorder: FakeRecorder) -> None:
    class Broken(Plain):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.layers[0](x))
            torch._dynamo.graph_break()
            return torch.sin(self.layers[1](x))

    seen = []
    observed = backend._settle

    def settle(report: dsv4_compile.CompileReport, *rest: object) -> None:
        observed(report, *rest)
        seen.append(report.effective["split_ops"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_settle", settle)
        compiled(Broken(), split_ops=["aten::sin"])(torch.randn(3, 16))
    assert seen[0]["value"] == [] and seen[1] == ["aten::sin"]


def test_results_of_earlier_calls_stay(recorder: FakeRecorder) -> None:
    model = Plain()
    run = compiled(model, cudagraphs="full")
    inputs = [torch.randn(3, 16) for _ in range(5)]
    held = [run(x) for x in inputs]
    for x, results in zip(inputs, held, strict=True):
        torch.testing.assert_close(results, model(x))


def test_parameters_that_are_written_are_read_anew_and_those_that_move_are_recorded_again(
    recorder: FakeRecorder,
) -> None:
    model, x = Plain(), torch.randn(3, 16)
    run = compiled(model, cudagraphs="full")
    run(x)
    model.layers[1].weight.mul_(2)
    torch.testing.assert_close(run(x), model(x))
    assert len(recorder.recorded) == 1
    model.layers[1].weight.data = torch.randn(16, 16)
    for _ in range(2):
        torch.testing.assert_close(run(x), model(x))
    assert len(recorder.recorded) == 2
    for _ in range(runner.MAX_MOVES + 3):
        model.layers[1].weight.data = torch.randn(16, 16)
        torch.testing.assert_close(run(x), model(x))
    assert len(recorder.recorded) == 1 + runner.MAX_MOVES
    assert "have moved" in graph().cudagraphs.fallbacks[-1]["reason"] and graph().cudagraphs.bytes == 0


class State(Plain):
    """Keeps a running mean in a buffer, and reads the old value."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        old = self.mean.clone()
        self.mean.mul_(0.5).add_(x.mean(0))
        y, total = super().forward(x + old)
        return y, total + self.mean.sum()


@pytest.mark.parametrize("verify", [0, 3])
def test_a_buffer_of_the_model_is_written_once_a_call(recorder: FakeRecorder, verify: int) -> None:
    model = State()
    twin = copy.deepcopy(model)
    run = compiled(model, cudagraphs="full", verify=verify)
    for _ in range(6):
        x = torch.randn(3, 16)
        torch.testing.assert_close(run(x), twin(x))
        torch.testing.assert_close(model.mean, twin.mean)
    assert graph().cudagraphs.mode == "full" and graph().cudagraphs.replays >= 2 and not graph().cudagraphs.fallbacks


class Elsewhere(Plain):
    """Writes into an input, which the graph does not own."""

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y, total = super().forward(x + state)
        state.copy_(y[:1].expand_as(state))
        return y, total


def test_inputs_that_are_written_belong_to_the_caller(recorder: FakeRecorder) -> None:
    model = Elsewhere()
    run = compiled(model)
    for _ in range(4):
        x, state = torch.randn(3, 16), torch.randn(3, 16)
        twin = state.clone()
        torch.testing.assert_close(run(x, state), model(x, twin))
        torch.testing.assert_close(state, twin)
    assert any("does not own" in piece.reason for piece in graph().pieces)


def test_a_recording_that_fails_leaves_that_piece_to_its_code(recorder: FakeRecorder) -> None:
    recorder.fail = lambda number: "it cannot be captured (no luck)" if number >= 1 else None
    model = Model(3)
    expected = generate(model, 6)
    run = compiled(model)
    torch.testing.assert_close(generate(run, 6), expected)
    failed = [piece for piece in graph().pieces if "no luck" in piece.reason]
    assert failed and all(piece.kind == "compiled" for piece in failed)


def _steps(recorder: FakeRecorder, bad: set[int], number: int) -> Program:
    """Steps that can be captured, it seems; those in `bad` ask the host."""

    def step(i: int) -> Step:
        def run(given: list[Tensor]) -> list[Tensor]:
            if i in bad and recorder.is_recording:
                raise RuntimeError("a copy to the host")
            return [given.pop() * 2 + i]

        return Step(f"piece_{i}", Code(run), (i,), (i + 1,), (i,))

    return Program(tuple(map(step, range(number))), number + 1, (), (), ((number, None),))


@pytest.mark.parametrize("bad", [{0}, {3}, {6}, {2, 3}, {0, 6}, set(range(7))], ids=str)
@pytest.mark.parametrize("whole", [False, True])
def test_what_cannot_be_recorded_is_found_and_the_rest_is_replayed(
    recorder: FakeRecorder, bad: set[int], whole: bool
) -> None:
    program = _steps(recorder, bad, 7)
    kinds: dict[str, str] = {}
    report = CudaGraphs()
    run = runner.Runner(
        program, recorder, runner.Policy(whole=whole), report, lambda name, kind, _: kinds.update({name: kind})
    )
    for _ in range(4):
        x = torch.randn(3, 5)
        expected = x
        for i in range(7):
            expected = expected * 2 + i
        torch.testing.assert_close(run([x])[0], expected)
    replayed = set() if whole else set(range(7)) - bad
    assert {int(name.removeprefix("piece_")) for name, kind in kinds.items() if kind == "captured"} == replayed
    assert report.replays == (3 if replayed else 0)
    assert {one["reason"] for one in report.fallbacks} == {"it cannot be captured (a copy to the host)"}
    assert len(report.fallbacks) == (1 if whole else len(bad))


def test_strict_says_that_a_recording_failed(recorder: FakeRecorder) -> None:
    recorder.fail = lambda number: "it cannot be captured (no luck)"
    run = compiled(Plain(), strict=True, projections="off", mhc="off")
    with pytest.raises(runner.CaptureError, match="no luck"):
        run(torch.randn(3, 16))


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1).view(2, -1).t()[1:]


def test_a_graph_without_launches_is_not_replayed(recorder: FakeRecorder) -> None:
    run = compiled(Nothing())
    for _ in range(3):
        x = torch.randn(4, 4)
        assert torch.equal(run(x), Nothing()(x))
    assert graph().cudagraphs.replays == 0


def test_the_budget_ends_recording(recorder: FakeRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_total", 0)
    model = Plain()
    run = compiled(model, cudagraphs="full", capture_memory=1, dynamic=True)
    for n in (3, 4, 3, 4):
        x = torch.randn(n, 16)
        torch.testing.assert_close(run(x), model(x))
    report = graph().cudagraphs
    assert report.replays == 0 and report.bytes == 0 and report.sizes == []
    assert "budget" in report.fallbacks[0]["reason"]


def test_capture_sizes_are_recorded_ahead_the_largest_first_and_no_others(recorder: FakeRecorder) -> None:
    model = State()
    twin = copy.deepcopy(model)
    run = compiled(model, cudagraphs="full", capture_sizes=[4, 8], dynamic=True)
    for n in (3, 4, 8, 3):
        x = torch.randn(n, 16)
        torch.testing.assert_close(run(x), twin(x))
        torch.testing.assert_close(model.mean, twin.mean)  # recording ahead left it as it was
    report = graph().cudagraphs
    assert report.sizes == [4, 8] and report.replays == 2 and len(recorder.recorded) == 2
    assert "not one of capture_sizes" in report.fallbacks[-1]["reason"]


def test_a_wrong_replay_is_found_and_turned_off(recorder: FakeRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    real = FakeRecorder.record

    def broken(self: FakeRecorder, body: object) -> object:
        made = real(self, body)
        return type(made)(lambda: None, made.bytes)  # leaves what was there

    monkeypatch.setattr(FakeRecorder, "record", broken)
    model = Plain()
    run = compiled(model, cudagraphs="full", verify=2)
    for _ in range(5):
        x = torch.randn(3, 16)
        torch.testing.assert_close(run(x), model(x))
    assert "another result than its code" in graph().cudagraphs.fallbacks[0]["reason"]
    assert all(piece.kind == "compiled" for piece in graph().pieces)


def test_inside_a_capture_of_the_caller_nothing_is_replayed(recorder: FakeRecorder) -> None:
    recorder.available = False
    model, x = Plain(), torch.randn(3, 16)
    run = compiled(model)
    for _ in range(3):
        torch.testing.assert_close(run(x), model(x))
    assert not recorder.recorded


class Aliases(nn.Module):
    """Results that share memory with values of captured pieces, behind a piece that is not captured."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        h = torch.tanh(self.a(x)).sin().cos()
        late = torch.cat([cache, h])[-x.shape[0] :] * 1.0
        y = torch.tanh(self.b(late)).sin() + h.t().sum()
        z = (y * 2).exp().log() + 1
        return y.view(-1), z, h.t(), torch.cat([cache, z])


def test_views_of_captured_values_outlive_the_call(recorder: FakeRecorder) -> None:
    model = Aliases()
    run = compiled(model)
    held = []
    for length in (2, 3, 4, 5, 6):
        x, cache = torch.randn(3, 16), torch.randn(length, 16)
        held.append((run(x, cache), model(x, cache)))
    for got, expected in held:
        torch.testing.assert_close(got, expected)
    assert graph().cudagraphs.replays >= 2


def test_expanded_inputs_are_copied_once(recorder: FakeRecorder) -> None:
    model = Plain()
    run = compiled(model, cudagraphs="full")
    for _ in range(3):
        x = torch.randn(1, 16).expand(3, 16)
        torch.testing.assert_close(run(x), model(x))
    assert graph().cudagraphs.replays == 2


def test_the_report_says_what_is_captured_and_what_is_not(recorder: FakeRecorder) -> None:
    run = compiled(Plain(), cudagraphs="full", capture_sizes=[4], dynamic=True)
    for n in (4, 5, 6, 4):
        run(torch.randn(n, 16))
    text = str(dsv4_compile.report())
    assert re.search(r"cuda graphs: full, (\d) of \1 pieces at 4 tokens; 2 replays", text)
    assert "not captured at 5, 6 tokens: it is not one of capture_sizes" in text


def test_without_cuda_graphs_the_device_is_the_reason() -> None:
    torch._dynamo.reset()
    with torch.no_grad():
        compiled(Plain())(torch.randn(3, 16))
    assert "not captured: there are no CUDA graphs on cpu" in str(dsv4_compile.report())
    assert dsv4_compile.report().effective["cudagraphs"]["value"] == "off"
    with torch.no_grad(), pytest.raises(Exception, match="there are no CUDA graphs on cpu"):
        compiled(Plain(), strict=True, mhc="off", projections="off")(torch.randn(3, 16))
    torch._dynamo.reset()


class Old(nn.Module):
    """Reads a buffer before it writes it, and needs the old value behind a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("state", torch.zeros(3, 16))

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        old = self.state * 2 + 1
        h = torch.tanh(self.a(x)).sin().cos()
        self.state.copy_(h)
        cache = torch.cat([cache, h])
        late = torch.softmax(h @ cache.T, -1) @ cache
        return torch.tanh(self.b(late)).sin() * 3 + old, cache


def test_an_old_value_that_is_needed_behind_a_cut_is_read_before_it_is_written(recorder: FakeRecorder) -> None:
    model = Old()
    twin = copy.deepcopy(model)
    run = compiled(model)
    cache = other = torch.randn(4, 16)
    for _ in range(6):
        x = torch.randn(3, 16)
        (got, cache), (expected, other) = run(x, cache), twin(x, other)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(model.state, twin.state)
    assert graph().cudagraphs.mode == "piecewise" and graph().cudagraphs.replays >= 3


def test_a_graph_that_could_not_be_cut_is_not_said_to_be_captured(
    recorder: FakeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no key today")

    monkeypatch.setattr(assembly.keys, "key_of", broken)
    model, x = Plain(), torch.randn(3, 16)
    torch.testing.assert_close(compiled(model)(x), model(x))
    assert graph().cudagraphs.mode == "off"
    assert "no key today" in graph().cudagraphs.fallbacks[0]["reason"]
