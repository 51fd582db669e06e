"""Quantised products of other people's operators that may not join a group, with their reasons, and what is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dsv4_compile.passes import projections, verify
from tests.kernels.quantised_operators import BF16, FLOAT8
from tests.passes.test_opaque import Attention, Int8, asked_for, assert_like_eager, auto, plain  # noqa: F401  (a fixture)
from tests.passes.test_projections import names

ops = torch.ops.quantised

pytestmark = pytest.mark.usefixtures("as_on_cuda", "asked_for")


class Near(nn.Module):
    """Two linears and an operator that may not join them."""

    def __init__(self, name: str, *rest: Tensor, dtype: torch.dtype = FLOAT8) -> None:
        super().__init__()
        self.gate, self.other, self.name = plain(16), plain(8), name
        self.weight = nn.Parameter(torch.randn(64, 64).to(dtype), requires_grad=False)
        self.rest = nn.ParameterList(nn.Parameter(one, requires_grad=False) for one in rest)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = x * 2
        made = getattr(ops, self.name)(x, self.weight, *(one.clone() for one in self.rest))
        return [made + 1, self.gate(x), self.other(x)]


class Depends(nn.Module):
    """It reads the result of a linear of the same activation; or it is made from it by very many operators."""

    def __init__(self, steps: int = 0) -> None:
        super().__init__()
        self.gate, self.other, self.q, self.steps = plain(64), plain(8), Int8(32), steps

    def forward(self, x: Tensor) -> list[Tensor]:
        x = x * 2
        gate = self.gate(x)
        y = x if self.steps else x * gate
        for _ in range(self.steps):
            y = y.sin()
        return [self.q(y), gate, self.other(x)]


class Whole(Depends):
    """Its weight is computed from the activation."""

    def forward(self, x: Tensor) -> list[Tensor]:
        x = x * 2
        return [ops.wide_linear(x, x.to(FLOAT8)), self.gate(x), self.other(x)]


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (
            lambda: Near("writing_linear", torch.zeros(())),
            "(quantised::writing_linear) keeps its own kernel: the operator writes",
        ),
        (lambda: Near("random_linear"), "draws from the random generator"),
        (lambda: Near("confined_linear"), "the operator uses one workspace for all calls"),
        (lambda: Depends(), "its input depends on another product of the activation"),
        (lambda: Depends(100), "more than 64 operators lie between"),
    ],
)
def test_an_operator_that_cannot_join_is_left_with_its_reason(
    module: Callable[[], nn.Module], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(verify.MAIN_STREAM_ONLY, "quantised::confined_linear", "uses one workspace for all calls")
    near, x = module(), torch.randn(5, 64).to(BF16)
    out, graph = auto(near, x)
    with torch.no_grad():
        for ours, eager in zip(out, near(x), strict=True):
            torch.testing.assert_close(ours, eager, rtol=2e-2, atol=2e-2)
    assert names(graph) == [["gate", "other"]]
    (missed,) = graph.missed
    assert reason in missed.reason


class Scales(Depends):
    """A parameter of one byte a number that is no matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.ones(64, dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = x * 2
        return [ops.int8_linear(x, self.gate.weight, self.numbers), self.gate(x), self.other(x)]


@pytest.mark.parametrize("module", [lambda: Near("wide_linear", dtype=BF16), Whole, Scales])
def test_what_reads_no_quantised_parameter_is_not_spoken_of(module: Callable[[], nn.Module]) -> None:
    near, x = module(), torch.randn(64, 64).to(BF16)
    out, graph = auto(near, x, strict=True)
    assert_like_eager(out, near, x, exact=False)
    assert names(graph) == [["gate", "other"]] and not graph.missed


class Alone(nn.Module):
    """Operators whose activation no linear reads, behind one that two linears do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.q, self.k = plain(64), plain(64), Int8(32), Int8(16)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.gate(x).sigmoid() * self.up(x)
        return [self.q(x), self.k(x)]


def test_operators_of_an_activation_without_linears_are_not_spoken_of() -> None:
    module, x = Alone(), torch.randn(5, 64).to(BF16)
    out, graph = auto(module, x, strict=True)
    assert_like_eager(out, module, x, exact=False)
    assert names(graph) == [["gate", "up"]] and not graph.missed


class Behind(nn.Module):
    """DeepSeek's query: an operator whose input another one makes from the activation."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.other, self.q_a, self.q_b = plain(16), plain(8), Int8(64), Int8(32)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = x * 2
        return [self.q_b(self.q_a(x).relu()), self.gate(x), self.other(x)]


def test_an_operator_behind_another_is_not_spoken_of() -> None:
    module, x = Behind(), torch.randn(5, 64).to(BF16)
    out, graph = auto(module, x, strict=True)
    assert_like_eager(out, module, x, exact=False)
    assert names(graph) == [["gate", "other", "q_a"]] and not graph.missed


def test_on_a_cpu_nothing_changes_and_strict_is_content(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projections, "_device_type", lambda group: "cpu")
    module, x = Attention(), torch.randn(5, 64).to(BF16)
    for one in (module, Near("writing_linear", torch.zeros(()))):
        out, graph = auto(one, x, strict=True)
        assert_like_eager(out, one, x)
        assert [group.strategy for group in graph.projections] == ["serial"] and not graph.missed
        assert all(not linear.operator for group in graph.projections for linear in group.linears)
