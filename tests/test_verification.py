"""`verify=N`: the first calls are compared with the uncompiled graph."""

from __future__ import annotations

import copy
import itertools
import operator

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph

import dsv4_compile
from dsv4_compile import verification
from tests.passes.test_mhc import error, oracle_of, residual
from tests.test_backend import FORMS, Branches, compiled, forms, notes, stack, without_grad

pytestmark = pytest.mark.usefixtures("no_reports")


def spoil(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel family of the CPU adds a quarter to every new residual."""
    from dsv4_compile.kernels.mhc import cpp

    good = cpp.mhc_post
    monkeypatch.setattr(cpp, "mhc_post", lambda *args: good(*args) + 0.25)


def test_verify_passes_a_right_graph():
    module, x = stack(), residual(0, 2, 3, 4, 64)
    run = compiled(module, verify=2)
    without_grad(run, x)
    assert notes() == "verify: 1 of the first 2 calls were compared so far, and none differed"
    for _ in range(3):
        assert error(without_grad(run, x), oracle_of(module, x)) < 1e-6
    assert forms() == FORMS
    assert notes() == "verify: 2 of the first 2 calls were compared, and none differed"


def test_verify_drops_a_wrong_graph_and_says_so(monkeypatch):
    module, x = stack(), residual(0, 2, 3, 4, 64)
    torch.testing.assert_close(without_grad(compiled(module), x), without_grad(module, x), rtol=1e-4, atol=1e-5)
    assert dsv4_compile.report().graphs[0].mhc[0].kernel == "cpp"
    torch._dynamo.reset()
    spoil(monkeypatch)
    assert error(without_grad(compiled(module), x), oracle_of(module, x)) > 1e-3, "the kernel is wrong indeed"
    torch._dynamo.reset()
    run = compiled(module, verify=2)
    for _ in range(4):
        assert error(without_grad(run, x), oracle_of(module, x)) < 1e-6
    assert "dropped" in notes()
    assert notes().count("dropped") == 1


class Counting(nn.Module):
    """Writes into its state in every call."""

    def __init__(self, state: Tensor):
        super().__init__()
        self.inner = Branches()
        self.state = state if isinstance(state, nn.Parameter) else nn.Buffer(state)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        self.state.add_(x.mean(0))
        return (*self.inner(x + self.state), self.state * 2)


def in_a_list(state: Tensor) -> None:
    torch._foreach_add_([state], 1.0)


def by_keyword(state: Tensor) -> None:
    torch.transpose(input=state, dim0=0, dim1=1).add_(1.0)


def by_out(state: Tensor) -> None:
    torch.add(state, 1.0, out=state)


@pytest.mark.parametrize("write", [in_a_list, by_keyword, by_out])
def test_verify_finds_every_way_to_write_a_parameter(write):
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.state = nn.Parameter(torch.zeros(3, 3), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            write(self.state)
            return x + self.state

    module = Writing()
    run = compiled(module, verify=2)
    for count in (1.0, 2.0, 3.0):
        assert torch.equal(without_grad(run, torch.ones(3, 3)), torch.full((3, 3), 1 + count))
        assert torch.equal(module.state, torch.full((3, 3), count))
    assert notes() == "verify: 2 of the first 2 calls were compared, and none differed"


@pytest.mark.parametrize("name", ["iadd", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ilshift"])
def test_verify_knows_the_operators_that_write(name):
    graph = Graph()
    state, other = graph.placeholder("state"), graph.placeholder("other")
    graph.output(graph.call_function(getattr(operator, name), (state, other)))
    assert 0 in verification._written(torch.fx.GraphModule(nn.Module(), graph))


def test_verify_compares_infinities_and_complex_numbers():
    inf, nan = torch.tensor([torch.inf, 1.0]), torch.tensor([torch.nan, 1.0])
    same = [(inf, inf), (nan, nan), (torch.tensor([1 + 2j]), torch.tensor([1 + 2j]))]
    assert all(verification.difference([a], [b]) is None for a, b in same)
    one = torch.tensor([1.0, 1.0])
    other = [
        (inf, -inf),
        (nan, inf),
        (inf, nan),
        (nan, one),
        (inf, one),
        (one, nan),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 3j])),
    ]
    assert all(verification.difference([a], [b]) is not None for a, b in other)


@pytest.mark.parametrize("parameter", [False, True], ids=["buffer", "parameter"])
def test_verify_writes_into_state_once(parameter):
    start = torch.zeros(16)
    module = Counting(nn.Parameter(start.clone()) if parameter else start.clone()).requires_grad_(False)
    eager = copy.deepcopy(module)
    x = torch.randn(3, 16)
    run = compiled(module, verify=1, projections="serial")
    for _ in range(3):
        for a, b in zip(run(x), eager(x), strict=True):
            torch.testing.assert_close(a, b)
    torch.testing.assert_close(module.state, eager.state)
    assert notes() == "verify: 1 of the first 1 calls were compared, and none differed"


def test_verify_no_longer_says_that_none_differed_once_one_has():
    graph, calls = dsv4_compile.GraphReport(id="0"), itertools.count()
    original = torch.fx.symbolic_trace(torch.nn.Tanh())
    run = verification.verified(lambda x: original(x) + (next(calls) == 1), original, 3, graph)
    for _ in range(4):
        torch.testing.assert_close(run(torch.ones(3)), torch.ones(3).tanh())
    (note,) = graph.notes
    assert note.startswith("verify: the compiled graph was dropped")


@pytest.mark.parametrize(
    "view",
    [lambda x: x[:, ::2], lambda x: x[:1].expand(4, 6, 16), lambda x: x.transpose(0, 1)],
    ids=["strided", "expanded", "transposed"],
)
def test_verify_takes_inputs_of_any_layout(view, cold):
    module = Branches()
    x = view(torch.randn(4, 6, 16))
    run = compiled(module, compiler="inductor", verify=1, projections="serial")
    for _ in range(2):
        for a, b in zip(without_grad(run, x), without_grad(module, x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert notes() == "verify: 1 of the first 1 calls were compared, and none differed"


def test_verify_leaves_random_numbers_to_the_uncompiled_graph():
    """Inductor's decompositions draw others than eager, so there is nothing to compare, and nothing is dropped."""

    class Dropped(Branches):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return super().forward(nn.functional.dropout(x, 0.5, training=True))

    module, x = Dropped(), torch.randn(3, 16)
    run = compiled(module, verify=2, projections="serial")
    for seed in (1, 2):
        torch.manual_seed(seed)
        got = without_grad(run, x)
        torch.manual_seed(seed)
        torch.testing.assert_close(got, without_grad(module, x))
    assert "draws random numbers" in notes() and "dropped" not in notes()
