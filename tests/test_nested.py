"""A method decorated with `@torch.compile` inside the compiled model: same result, no argument lost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import dsv4_compile
from dsv4_compile import assembly
from tests.recorder import FakeRecorder
from tests.test_backend import Branches, compiled, strategies, without_grad


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    @torch.compile(backend="dsv4", options={"compiler": "eager"})
    def by_us(self, x: Tensor, scale: float = 3.0, *, shift: float = 0.5, power: int = 2) -> Tensor:
        return (self.first(x) * scale + shift) ** power

    @torch.compile(backend="eager", dynamic=True)
    def by_torch(self, x: Tensor, scale: float = 0.25, *, negative: bool = True) -> Tensor:
        return -self.second(x) * scale if negative else self.second(x) * scale

    def forward(self, x: Tensor) -> Tensor:
        y = self.by_us(x) + self.by_us(x, 2.0) + self.by_us(x, shift=-1.0) + self.by_us(x, power=3)
        return self.by_torch(torch.tanh(y)) + self.by_torch(y, negative=False) + self.by_torch(y, 0.5)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Decorated() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.sin(layer(x))
        return x


def reference(module: Outer, x: Tensor) -> Tensor:
    with torch._dynamo.config.patch(disable=True):
        return module(x)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_decorated_methods_with_keyword_defaults(compiler: str) -> None:
    torch._dynamo.reset()
    module, x = Outer(), torch.randn(3, 8)
    with torch.no_grad():
        expected = reference(module, x)
        compiled = torch.compile(module, backend="dsv4", options={"compiler": compiler})
        for _ in range(2):
            torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-5)


def test_decorated_methods_are_part_of_the_one_graph() -> None:
    torch._dynamo.reset()
    module, x = Outer(), torch.randn(3, 8)
    with torch.no_grad():
        compiled = torch.compile(module, backend="dsv4", options={"compiler": "eager"}, fullgraph=True)
        torch.testing.assert_close(compiled(x), reference(module, x), rtol=1e-5, atol=1e-5)
    assert len(dsv4_compile.report().graphs) == 1


def test_decorated_methods_do_not_break_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    recorder = FakeRecorder()
    monkeypatch.setattr(assembly, "recorder_of", lambda device: recorder)
    module = Outer()
    with torch.no_grad():
        compiled = torch.compile(module, backend="dsv4", options={"compiler": "eager", "cudagraphs": "full"})
        for _ in range(3):
            x = torch.randn(3, 8)
            torch.testing.assert_close(compiled(x), reference(module, x), rtol=1e-5, atol=1e-5)
    assert dsv4_compile.report().graphs[-1].cudagraphs.replays == 2
    torch._dynamo.reset()


def test_a_method_that_reaches_its_class_and_its_surroundings() -> None:
    torch._dynamo.reset()
    factor = 1.5

    class Base(nn.Module):
        def step(self, x: Tensor, shift: float = 0.25) -> Tensor:
            return x.sin() + shift

    class Derived(Base):
        @torch.compile(backend="eager")
        def step(self, x: Tensor, *, shift: float = 0.75) -> Tensor:
            return super().step(x, shift) * factor

        def forward(self, x: Tensor) -> Tensor:
            return self.step(x) + self.step(x, shift=0.0)

    x = torch.randn(3, 8)
    with torch.no_grad():
        got = torch.compile(Derived(), backend="dsv4", options={"compiler": "eager"})(x)
    torch.testing.assert_close(got, (x.sin() + 0.75) * 1.5 + x.sin() * 1.5, rtol=1e-5, atol=1e-5)


@torch.compile(backend="dsv4", options={"compiler": "eager"})
def decorated(x: Tensor, weight: Tensor | None = None, *, scale: float = 2.0) -> Tensor:
    return (x if weight is None else x @ weight) * scale


def test_a_compiled_function_is_called_by_name_and_by_keyword() -> None:
    torch._dynamo.reset()
    weight, x = torch.randn(8, 8), torch.randn(3, 8)

    def outer(x: Tensor) -> Tensor:
        return decorated(x, weight=weight) + decorated(x, scale=0.5) + decorated(x)

    with torch.no_grad():
        got = torch.compile(outer, backend="dsv4", options={"compiler": "eager"})(x)
    torch.testing.assert_close(got, x @ weight * 2 + x * 0.5 + x * 2, rtol=1e-5, atol=1e-5)


class Mixed(nn.Module):
    """A method compiled by its author, called with and without its keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = Branches()

    @torch.compile(backend="dsv4", options={"compiler": "eager"})
    def mixed(self, x: Tensor, *, scale: float = 3.0, shift: Tensor | None = None) -> Tensor:
        out = torch.cat(self.branches(x), -1) * scale
        return out if shift is None else out + shift

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.mixed(x), self.mixed(x, scale=0.5, shift=torch.ones(24))


@pytest.mark.parametrize("outer", [None, "pack"], ids=["alone", "in_a_compiled_model"])
def test_method_compiled_inside_with_keyword_defaults(outer: str | None) -> None:
    module, x = Mixed(), torch.randn(3, 16)
    out = without_grad(module if outer is None else compiled(module, projections=outer), x)
    plain = without_grad(lambda t: torch.cat(module.branches(t), -1), x)
    torch.testing.assert_close(out, (plain * 3, plain * 0.5 + 1))
    assert strategies()


def test_submodule_compiled_inside_with_keyword_defaults() -> None:
    class Inner(Branches):
        def forward(self, x: Tensor, *, scale: float = 3.0, shift: Tensor | None = None) -> Tensor:
            out = torch.cat(super().forward(x), -1) * scale
            return out if shift is None else out + shift

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()
            self.inner.compile(backend="dsv4", options={"compiler": "eager"})

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.inner(x), self.inner(x, scale=0.5, shift=torch.ones(24))

    module, x = Outer(), torch.randn(3, 16)
    plain = without_grad(lambda t: torch.cat(Branches.forward(module.inner, t), -1), x)
    for run in (module, compiled(module, projections="pack")):
        torch.testing.assert_close(without_grad(run, x), (plain * 3, plain * 0.5 + 1))
