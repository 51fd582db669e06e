"""The skinny product's launch that is kept from call to call: the same launch as one that is put together anew."""

from __future__ import annotations

import ctypes
import threading
import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.linear import grouped, skinny, tuning
from dsv4_compile.kernels.linear.skinny import prepared
from dsv4_compile.kernels.linear.skinny.arguments import ARGUMENTS, groups_of, pack_arguments
from dsv4_compile.kernels.linear.skinny.plans import PLANS, fitted
from dsv4_compile.kernels.linear.strategies import STRATEGIES

BF16, F32 = torch.bfloat16, torch.float32
FEATURES = (70, 1, 33, 500)
SKINNY = [name for name, strategy in STRATEGIES.items() if strategy.gather is not None]


pytestmark = pytest.mark.usefixtures("fresh_choices")


# ----------------------------------------------------------------------------------------------------------- no device


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, bytes]]:
    """Configuration and structure of what is launched; tensors of the CPU count as those of device -1."""
    found: list[tuple[Any, bytes]] = []

    def launch(config: Any, function: Any, place: int, extra: int) -> tuple[int]:
        pointer = ctypes.c_void_p.from_address(place).value
        assert function == "function" and pointer
        found.append((config, ctypes.string_at(pointer, ARGUMENTS.size)))
        return (0,)

    monkeypatch.setattr(prepared, "bindings", lambda: (types.SimpleNamespace(cuLaunchKernelEx=launch), None))
    monkeypatch.setattr(prepared, "configuration", lambda *shape: shape)
    monkeypatch.setattr(prepared, "COUNTERS", types.SimpleNamespace(take=lambda groups, index: 4096 + groups))
    monkeypatch.setattr(prepared, "empty_strided_cuda", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def _prepared(
    plan: str, x: Tensor, weights: Sequence[Tensor], outputs: Sequence[Tensor], parts: Sequence[tuple[int, int, int]]
) -> prepared.Prepared | None:
    features = tuple(weight.shape[0] for weight in weights if weight.shape[0])
    variant = fitted(PLANS[plan], "bf16", x[..., 0].numel(), features, x.shape[-1], 90, 132)
    assert variant is not None
    return prepared.keep(variant, "function", prepared.Made(x, x.reshape(-1, x.shape[-1]), weights, outputs, parts))


@pytest.mark.parametrize("plan", ["whole", "pairs", "parts"])
@pytest.mark.parametrize("shape", [(3, 512), (2, 3, 512), (1, 512)])
@pytest.mark.parametrize("features", [FEATURES, (0, 64, 0, 8), (4096,)], ids=str)
def test_the_structure_is_that_of_a_new_launch(
    launches: list[tuple[Any, bytes]], plan: str, shape: tuple[int, ...], features: tuple[int, ...]
) -> None:
    x = torch.randn(shape).to(BF16)
    rows = x.view(-1, shape[-1])
    weights = [torch.randn(count, shape[-1]).to(BF16) for count in features]
    stops = [sum(features[: i + 1]) for i in range(len(features))]
    parts = [(0, stop - count, stop) for count, stop in zip(features, stops, strict=True)]
    run = _prepared(plan, x, weights, [rows.new_empty(len(rows), stops[-1])], parts)
    assert run is not None
    held = []
    for _ in range(3):
        x = torch.randn(shape).to(BF16)
        (out,) = run(x) or ()
        held.append((x, out))
        assert out.shape == (*shape[:-1], stops[-1]) and out.is_contiguous() and out.dtype == BF16
        config, text = launches[-1]
        given = ARGUMENTS.unpack(text)
        flat = out.view(-1, stops[-1])
        workspace, counters = given[-6:-4]
        views = [flat[:, start:stop] for _, start, stop in parts]
        nothing = [None] * len(weights)
        assert text == pack_arguments(x.view(-1, shape[-1]), weights, nothing, views, workspace, counters)
        groups = groups_of(_variant(plan, x, features), weights)
        assert config[1] == groups * _variant(plan, x, features).splits and config[-1] == 7
        assert (counters == 4096 + groups and workspace) if plan == "parts" else counters == workspace == 0
    assert len({out.data_ptr() for _, out in held}) == 3 and len(launches) == 3


def _variant(plan: str, x: Tensor, features: tuple[int, ...]) -> Any:
    some = tuple(count for count in features if count)
    return fitted(PLANS[plan], "bf16", x[..., 0].numel(), some, x.shape[-1], 90, 132)


def test_outputs_of_two_dtypes(launches: list[tuple[Any, bytes]]) -> None:
    x = torch.randn(5, 512).to(BF16)
    weights = [torch.randn(count, 512).to(BF16) for count in FEATURES]
    parts = [(0, 0, 70), (1, 0, 1), (0, 70, 103), (1, 1, 501)]
    run = _prepared("whole", x, weights, [torch.empty(5, 103, dtype=BF16), torch.empty(5, 501)], parts)
    assert run is not None
    made = run(x) or []
    assert [(one.dtype, one.shape) for one in made] == [(BF16, (5, 103)), (F32, (5, 501))]
    views = [made[i][:, start:stop] for i, start, stop in parts]
    assert launches[-1][1] == pack_arguments(x, weights, [None] * 4, views, 0, 0)


def test_an_input_that_needs_more_is_left(launches: list[tuple[Any, bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    x, weights = torch.randn(5, 512).to(BF16), [torch.randn(64, 512).to(BF16)]
    out, parts = [torch.empty(5, 64, dtype=BF16)], [(0, 0, 64)]
    run = _prepared("whole", x, weights, out, parts)
    assert run is not None
    assert run(torch.randn(5 * 512 + 1).to(BF16)[1:].view(5, 512)) is None  # not at a multiple of 16 bytes
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    assert run(x) is None and not launches
    turned = torch.randn(5, 512, 2).to(BF16).transpose(1, 2)  # as a matrix it is a copy
    assert _prepared("whole", turned, weights, [torch.empty(10, 64, dtype=BF16)], parts) is None
    by_columns = torch.randn(512, 5).to(BF16).t()
    assert _prepared("whole", by_columns, weights, out, parts) is None


def test_a_launch_that_fails_raises(launches: list[tuple[Any, bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    x, weights = torch.randn(5, 512).to(BF16), [torch.randn(64, 512).to(BF16)]
    run = _prepared("whole", x, weights, [torch.empty(5, 64, dtype=BF16)], [(0, 0, 64)])
    assert run is not None

    class Status(int):
        name = "CUDA_ERROR_OUT_OF_MEMORY"

    run._launch = lambda *_: (Status(2),)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        run(x)


# ------------------------------------------------------------------------------------------------------------ a device


@pytest.fixture
def long_way(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number for each launch that was put together anew."""
    found: list[int] = []
    real = skinny._launch

    def counted(*arguments: Any) -> None:
        found.append(1)
        real(*arguments)

    monkeypatch.setattr(skinny, "_launch", counted)
    return found


def _only(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """`auto` has no other way."""
    monkeypatch.setattr(tuning, "strategy", lambda problem, *_: (name, problem, True))


def _weights(device: str = "cuda", columns: int = 1024) -> list[Tensor]:
    return [torch.randn(count, columns, device=device).to(BF16) for count in FEATURES]


def _right(outputs: list[Tensor], x: Tensor, weights: Sequence[Tensor], wide: Sequence[bool] = ()) -> None:
    marks = list(wide) or [False] * len(weights)
    for output, mark in zip(outputs, dict.fromkeys(marks), strict=True):
        parts = [x.double() @ w.double().t() for w, m in zip(weights, marks, strict=True) if m == mark]
        expected = torch.cat(parts, -1)
        assert output.shape == expected.shape and output.dtype == (F32 if mark else BF16)
        assert float((output - expected).norm() / expected.norm()) < (1e-5 if mark else 4e-3)


def _call(x: Tensor, weights: list[Tensor], wide: Sequence[bool] = ()) -> list[Tensor]:
    return grouped.run(x, weights, [None] * len(weights), [0] * len(weights), 1024, True, wide)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SKINNY)
@pytest.mark.parametrize("wide", [(), (False, True, False, True)], ids=["narrow", "wide"])
def test_later_calls_keep_the_launch(
    monkeypatch: pytest.MonkeyPatch, long_way: list[int], name: str, wide: tuple[bool, ...]
) -> None:
    _only(monkeypatch, name)
    weights = _weights()
    for shape in ((1, 1024), (2, 5, 1024), (64, 1024)):
        if not _serves(name, weights, shape):
            continue
        before = len(long_way)
        for _ in range(5):
            x = torch.randn(shape, device="cuda").to(BF16)
            _right(_call(x, weights, wide), x, weights, wide)
        assert len(long_way) == before + 1
        again = _call(x, weights, wide)
        assert all(map(torch.equal, again, _call(x.clone(), weights, wide)))
        assert all(map(torch.equal, again, grouped.run_as(name, x, weights, [None] * 4, [0] * 4, wide)))


def _serves(name: str, weights: Sequence[Tensor], shape: tuple[int, ...]) -> bool:
    rows = torch.empty(shape, device="cuda", dtype=BF16).view(-1, shape[-1])
    problem = grouped.Group(weights).problem(rows, [None] * len(weights), [0] * len(weights), True)
    return STRATEGIES[name].serves(problem, len(rows))


@pytest.mark.gpu
def test_moved_weights_and_other_inputs_are_seen(monkeypatch: pytest.MonkeyPatch, long_way: list[int]) -> None:
    _only(monkeypatch, "skinny: whole")
    weights = _weights()
    x = torch.randn(4, 1024, device="cuda").to(BF16)
    for _ in range(3):
        _right(_call(x, weights), x, weights)
    weights[2].copy_(torch.randn_like(weights[2]))  # in place
    _right(_call(x, weights), x, weights)
    assert len(long_way) == 1
    weights[1] = torch.randn_like(weights[1])  # elsewhere
    for _ in range(2):
        _right(_call(x, weights), x, weights)
    assert len(long_way) == 2
    for other in (
        torch.randn(4, 2048, device="cuda").to(BF16)[:, :1024],  # rows farther apart
        torch.randn(4 * 1024 + 1, device="cuda").to(BF16)[1:].view(4, 1024),  # not aligned
        torch.randn(1024, 4, device="cuda").to(BF16).t(),  # not contiguous by rows
        torch.randn(1, 1024, device="cuda").to(BF16).expand(4, 1024),
    ):
        for _ in range(3):
            _right(_call(other, weights), other, weights)
    biases = [torch.randn(count, device="cuda").to(BF16) for count in FEATURES]
    got = grouped.run(x, weights, biases, [0] * 4)
    expected = x.double() @ torch.cat([w.double() for w in weights]).t() + torch.cat(biases).double()
    assert float((got[0] - expected).norm() / expected.norm()) < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["skinny: whole", "skinny: parts"])
def test_in_a_graph_on_streams_and_in_threads(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    _only(monkeypatch, name)
    weights = _weights()
    x = torch.randn(4, 1024, device="cuda").to(BF16)
    for _ in range(2):
        _call(x, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _call(x, weights)
    x.copy_(torch.randn_like(x))
    graph.replay()
    _right(captured, x, weights)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late = torch.randn(4, 1024, device="cuda").to(BF16)
        got = _call(late, weights)
    stream.synchronize()
    _right(got, late, weights)
    wrong: list[BaseException] = []

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(200):
                    mine = torch.randn(4, 1024, device="cuda").to(BF16)
                    _right(_call(mine, weights), mine, weights)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_on_the_second_device(monkeypatch: pytest.MonkeyPatch) -> None:
    _only(monkeypatch, "skinny: whole")
    weights = _weights("cuda:1")
    for device in (1, 0, 1):
        with torch.cuda.device(device):
            for _ in range(2):
                x = torch.randn(4, 1024, device="cuda:1").to(BF16)
                _right(_call(x, weights), x, weights)
