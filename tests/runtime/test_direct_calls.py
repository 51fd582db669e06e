"""Pieces of nothing but operators that Inductor has no code for are called without Inductor."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import dsv4_compile
from dsv4_compile import assembly
from tests.recorder import FakeRecorder


@torch.library.custom_op("dsv4_tests::turned", mutates_args=())
def turned(x: Tensor, scale: float, sizes: list[int]) -> Tensor:
    return (x.flip(0) * scale).reshape(sizes).clone()


@turned.register_fake
def _(x: Tensor, scale: float, sizes: list[int]) -> Tensor:
    return x.new_empty(sizes)


@torch.library.custom_op("dsv4_tests::halves", mutates_args=())
def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., ::2].contiguous(), x[..., 1::2].sin().contiguous()


@halves.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    half = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    return half, torch.empty_like(half)


class Around(nn.Module):
    """Products with an operator in the middle."""

    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(16, 16), nn.Linear(16, 16)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.rms_norm(torch.tanh(self.before(x)), (16,)) + x.cos()
        return torch.nn.functional.rms_norm(self.after(self.middle(x)).sin(), (16,)) + x


def one(x: Tensor) -> Tensor:
    return torch.ops.dsv4_tests.turned(x, 0.5, list(x.shape))


def two(x: Tensor) -> Tensor:
    first, second = torch.ops.dsv4_tests.halves(x)
    return torch.cat([second, first], -1)


def viewed(x: Tensor) -> Tensor:
    heads = x.view(x.shape[0], 4, 4).transpose(1, 2)
    return torch.ops.dsv4_tests.turned(heads, 2.0, [x.shape[0], 16])


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The code of the graphs that Inductor was given. Nothing is captured: the stand-in sees no kernels of Inductor."""
    from torch._inductor import compile_fx

    recorder, given, inner = FakeRecorder(), [], compile_fx.compile_fx_inner

    def compile_fx_inner(gm, *arguments, **settings):
        given.append(gm.print_readable(print_output=False))
        return inner(gm, *arguments, **settings)

    monkeypatch.setattr(assembly, "recorder_of", lambda device: recorder)
    monkeypatch.setattr(compile_fx, "compile_fx_inner", compile_fx_inner)
    assembly._known.clear()
    with torch.no_grad():
        yield given
    torch._dynamo.reset()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("middle", [one, two, viewed])
def test_an_operator_of_another_library_is_called_as_it_is(middle, dynamic, compilations):
    name = "halves" if middle is two else "turned"
    model = Around(middle)
    options = {"cudagraphs": "piecewise", "split_ops": [f"dsv4_tests::{name}"]}
    compiled = torch.compile(model, backend="dsv4", options=options, dynamic=dynamic)
    for rows in (3, 5, 3):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(compiled(x), model(x))
    assert any("split_ops" in piece.reason for piece in dsv4_compile.report().graphs[-1].pieces)
    assert compilations and not any(name in text for text in compilations)


def test_what_inductor_has_code_for_goes_to_inductor(compilations):
    model = Around(torch.sin)
    options = {"cudagraphs": "piecewise", "split_ops": ["aten::sin"]}
    x = torch.randn(3, 16)
    torch.testing.assert_close(torch.compile(model, backend="dsv4", options=options)(x), model(x))
    assert sum("sin" in text for text in compilations) >= 1


def test_an_operator_with_a_lowering_goes_to_inductor(compilations, monkeypatch):
    from torch._inductor import lowering

    target = torch.ops.dsv4_tests.turned.default
    handler = lowering.fallback_handler(target, add_to_fallback_set=False)
    monkeypatch.setitem(lowering.lowerings, target, handler)
    lowering.fallbacks.discard(target)
    model = Around(one)
    options = {"cudagraphs": "piecewise", "split_ops": ["dsv4_tests::turned"]}
    x = torch.randn(3, 16)
    torch.testing.assert_close(torch.compile(model, backend="dsv4", options=options)(x), model(x))
    assert any("turned" in text for text in compilations)
