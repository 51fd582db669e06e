"""The projections pass: groups by structure, every strategy right, the rest left alone with its reason."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dsv4_compile
from dsv4_compile.kernels.linear import packing

STRATEGIES = ["auto", "pack", "streams", "serial", "off"]


def run(module: nn.Module, *inputs: Tensor, **options: object) -> tuple[object, dsv4_compile.GraphReport]:
    """Result and graph report under `compiler="eager"`."""
    options = {"compiler": "eager", "mhc": "off", "projections": "pack"} | options
    with torch.no_grad():
        out = torch.compile(module, backend="dsv4", options=options)(*inputs)
    return out, dsv4_compile.report().graphs[-1]


def names(graph: dsv4_compile.GraphReport) -> list[list[str]]:
    return [[linear.name for linear in group.linears] for group in graph.projections]


class Linears(nn.Module):
    """Three linears on one input, one with a bias, summed after different activations."""

    def __init__(self, width: int = 32, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.a = nn.Linear(width, 24, bias=False, dtype=dtype)
        self.b = nn.Linear(width, 8, dtype=dtype)
        self.c = nn.Linear(width, 40, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.a(x).relu(), self.b(x).sigmoid(), self.c(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 32), (2, 7, 32), (5, 32), (0, 32), (32,)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_gives_eager_results(strategy, shape, dtype):
    module = Linears(dtype=dtype)
    x = torch.randn(shape, dtype=dtype)
    with torch.no_grad():
        expected = module(x)
    out, graph = run(module, x, projections=strategy)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
    for a, b in zip(out, expected, strict=True):
        torch.testing.assert_close(a, b, **tolerance)
    if strategy == "off":
        assert graph.projections == []
    elif x.numel():
        assert names(graph) == [["a", "b", "c"]]
        assert graph.projections[0].strategy == {"auto": "serial"}.get(strategy, strategy)


class Chains(nn.Module):
    """One activation behind views, casts, a permute and an unsqueeze."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(16, 8, bias=False)
        self.flat = nn.Linear(16, 8, bias=False)
        self.turned = nn.Linear(16, 8, bias=False)
        self.deep = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x * 2
        flat = self.flat(x.reshape(-1, 16))
        return self.plain(x), flat, self.turned(x.permute(1, 0, 2)), self.deep(x.unsqueeze(0))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("strategy", ["pack", "streams", "serial"])
def test_views_and_permutes_are_looked_through(strategy, dynamic):
    module = Chains()
    x = torch.randn(3, 5, 16)
    with torch.no_grad():
        expected = module(x)
        options = {"compiler": "eager", "projections": strategy}
        out = torch.compile(module, backend="dsv4", options=options, dynamic=dynamic)(x)
    assert names(dsv4_compile.report().graphs[-1]) == [["flat", "plain", "turned", "deep"]]
    for a, b in zip(out, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_casts_are_looked_through_and_dtypes_do_not_pack():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Linear(16, 8, bias=False, dtype=torch.bfloat16)
            self.wide = nn.Linear(16, 4, bias=False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.low(x), self.wide(x.float())

    module, x = Mixed(), torch.randn(5, 16).bfloat16()
    with torch.no_grad():
        expected = module(x)
    for strategy, runs in (("pack", "serial"), ("streams", "streams")):
        torch._dynamo.reset()
        out, graph = run(module, x, projections=strategy)
        assert names(graph) == [["low", "wide"]]
        assert graph.projections[0].strategy == runs
        for a, b in zip(out, expected, strict=True):
            torch.testing.assert_close(a, b)
    torch._dynamo.reset()
    _, graph = run(module, x, projections="pack")
    assert "dtypes differ" in graph.projections[0].reason


def test_a_bias_of_one_number_leaves_its_linear_and_no_other():
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(16, 8) for _ in range(3))
            self.shift = nn.Parameter(torch.randn(1))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return self.a(x), torch.addmm(self.shift, x, self.b.weight.t()), self.c(x)

    module, x = Shifted(), torch.randn(5, 16)
    with torch.no_grad():
        expected = module(x)
    out, graph = run(module, x)
    assert names(graph) == [["a", "c"]]
    assert [m.reason for m in graph.missed] == ["its bias is one number for all outputs"]
    for a, b in zip(out, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_rounding_before_a_linear_is_not_removed():
    class Rounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 8, bias=False), nn.Linear(16, 8, bias=False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x.bfloat16().float())

    module, x = Rounded(), torch.randn(5, 16)
    with torch.no_grad():
        expected = module(x)
    out, graph = run(module, x)
    assert names(graph) == []
    assert [m.reason for m in graph.missed] == ["its input is rounded on the way"]
    for a, b in zip(out, expected, strict=True):
        torch.testing.assert_close(a, b)


class Odd(nn.Module):
    """A transposed weight, a tied one, a computed one, an unused one, one with two readers."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(16, 8, bias=False)
        self.turned = nn.Parameter(torch.randn(16, 8))
        self.tied = nn.Linear(16, 8, bias=False)
        self.tied.weight = self.plain.weight
        self.codes = nn.Parameter(torch.randint(-8, 8, (8, 16), dtype=torch.int8), requires_grad=False)
        self.steps = nn.Parameter(torch.rand(8, 1))
        self.unused = nn.Linear(16, 8, bias=False)
        self.twice = nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        self.unused(x)
        twice = self.twice(x)
        quantised = F.linear(x, self.codes.float() * self.steps)
        return self.plain(x), x @ self.turned, self.tied(x), quantised, twice + 1, twice * 2


@pytest.mark.parametrize("strategy", ["auto", "pack", "streams", "serial"])
def test_odd_weights(strategy):
    module, x = Odd(), torch.randn(5, 16)
    with torch.no_grad():
        expected = module(x)
    out, graph = run(module, x, projections=strategy)
    for a, b in zip(out, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert len(graph.projections) == 1
    assert len(graph.projections[0].linears) == 4
    assert [m.reason for m in graph.missed] == ["its weight is computed, not a parameter"]
    if strategy == "pack":
        assert graph.projections[0].strategy == "serial"
        assert "transposed" in graph.projections[0].reason


@pytest.mark.parametrize("strategy", ["pack", "streams", "serial"])
def test_permute_that_changes_nothing_is_not_a_transpose(strategy):
    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(32, 32)), nn.Parameter(torch.randn(32, 32))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x @ self.a.permute(0, 1), x @ self.b.movedim(0, 0)

    module, x = Same(), torch.randn(5, 32)
    out, _ = run(module, x, projections=strategy)
    with torch.no_grad():
        for a, b in zip(out, module(x), strict=True):
            torch.testing.assert_close(a, b)


def test_inputs_of_the_user_are_not_moved():
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 32))

        def forward(self, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
            return self.w @ y.t(), self.w @ z.t()

    module, y, z = Backwards(), torch.randn(5, 32), torch.randn(6, 32)
    addresses = y.data_ptr(), z.data_ptr()
    out, graph = run(module, y, z)
    assert (y.data_ptr(), z.data_ptr()) == addresses
    assert all(group.strategy != "pack" for group in graph.projections)
    with torch.no_grad():
        for a, b in zip(out, module(y, z), strict=True):
            torch.testing.assert_close(a, b)


def test_linears_of_a_rounded_activation_are_a_group():
    class Rounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Linear(32, 8, bias=False, dtype=torch.bfloat16) for _ in range(2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = (x * x).bfloat16()
            return self.a(h), self.b(h)

    module, x = Rounded(), torch.randn(2, 5, 32)
    out, graph = run(module, x)
    assert names(graph) == [["a", "b"]]
    with torch.no_grad():
        for a, b in zip(out, module(x), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("first", ["read", "write"])
@pytest.mark.parametrize("through", ["tensor", "view"])
@pytest.mark.parametrize("strategy", ["pack", "streams", "serial"])
def test_write_between_two_readers_of_an_input(strategy, through, first):
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(16, 8, bias=False) for _ in range(3))

        def write(self, x: Tensor) -> Tensor:
            (x if through == "tensor" else x.view(-1)[:16]).mul_(3)
            return self.b(x)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            x = x + 1
            if first == "read":
                return self.a(x), self.c(x), self.write(x)
            return self.write(x), self.a(x), self.c(x)

    module, x = Writes(), torch.randn(5, 16)
    with torch.no_grad():
        expected = module(x)
    out, graph = run(module, x, projections=strategy)
    assert sorted(map(len, names(graph))) == ([2] if first == "read" else [3])
    for a, b in zip(out, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_input_that_is_written_in_place():
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 8, bias=False), nn.Linear(16, 8, bias=False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            before = self.a(x)
            x.add_(1)
            return before, self.b(x)

    module, x = Writes(), torch.randn(5, 16)
    mine, theirs = x.clone(), x.clone()
    with torch.no_grad():
        expected = module(theirs)
    out, graph = run(module, mine)
    assert names(graph) == []
    torch.testing.assert_close(mine, theirs)
    for a, b in zip(out, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_linear_that_depends_on_another_is_in_another_group():
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(16, 16, bias=False) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return self.c(y) + self.d(y) + self.b(x)

    module, x = Deep(), torch.randn(5, 16)
    out, graph = run(module, x)
    assert names(graph) == [["a", "b"], ["c", "d"]]
    with torch.no_grad():
        torch.testing.assert_close(out, module(x))


def packed(module: Linears) -> bool:
    return packing.already_packed([module.a.weight, module.b.weight, module.c.weight])


def test_packing_moves_the_parameters_and_changes_nothing_else():
    module = Linears()
    before = copy.deepcopy(module.state_dict())
    storage = sum(p.untyped_storage().nbytes() for p in (module.a.weight, module.b.weight, module.c.weight))
    run(module, torch.randn(5, 32))
    assert packed(module)
    assert module.a.weight.untyped_storage().nbytes() == storage
    assert list(module.state_dict()) == list(before)
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


def _load(module: Linears, fresh: Linears) -> None:
    module.load_state_dict(fresh.state_dict())


def _assign(module: Linears, fresh: Linears) -> None:
    module.load_state_dict(copy.deepcopy(fresh.state_dict()), assign=True)


def _swap(module: Linears, fresh: Linears) -> None:
    module.a.weight.data = fresh.a.weight.data.clone()
    fresh.load_state_dict(module.state_dict())


def _step(module: Linears, fresh: Linears) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    fresh.load_state_dict(module.state_dict())


def _widen(module: Linears, fresh: Linears) -> None:
    module.to(torch.float64)
    fresh.to(torch.float64).load_state_dict(module.state_dict())


def _tie(module: Linears, fresh: Linears) -> None:
    module.b = nn.Linear(32, 24, bias=False)
    module.b.weight = module.a.weight
    fresh.b = nn.Linear(32, 24, bias=False)
    fresh.load_state_dict(module.state_dict())


@pytest.mark.parametrize("strategy", ["pack", "streams"])
@pytest.mark.parametrize("change", [_load, _assign, _swap, _step, _widen, _tie], ids=lambda f: f.__name__[1:])
def test_values_are_never_stale(change, strategy):
    module, fresh, x = Linears(), Linears(), torch.randn(5, 32)
    compiled = torch.compile(module, backend="dsv4", options={"compiler": "eager", "projections": strategy})
    with torch.no_grad():
        compiled(x)
        change(module, fresh)
        x = x.to(module.a.weight.dtype)
        for a, b in zip(compiled(x), fresh(x), strict=True):
            torch.testing.assert_close(a, b)


def test_two_models_that_share_weights():
    first, second, x = Linears(), Linears(), torch.randn(5, 32)
    second.a, second.c = first.c, first.a
    run(first, x)
    out, graph = run(second, x)
    with torch.no_grad():
        for a, b in zip(out, second(x), strict=True):
            torch.testing.assert_close(a, b)
    assert any("separate products" in note for note in graph.notes)


@pytest.mark.parametrize("tokens", [7, 8, 9])
def test_stream_threshold(tokens):
    module, x = Linears(), torch.randn(tokens, 32)
    out, graph = run(module, x, projections="streams", stream_max_tokens=8)
    with torch.no_grad():
        for a, b in zip(out, module(x), strict=True):
            torch.testing.assert_close(a, b)
    assert "8 tokens" in graph.projections[0].reason or "in turn" in graph.projections[0].reason


def test_collectives_and_foreign_operators_are_not_moved():
    """Nothing but products with parameters is ever in a group (case 4)."""
    torch.library.define("dsv4_test::opaque", "(Tensor x) -> Tensor")
    torch.library.impl("dsv4_test::opaque", "CompositeExplicitAutograd")(lambda x: x * 2)
    torch.library.register_fake("dsv4_test::opaque")(lambda x: torch.empty_like(x))

    class Opaque(Linears):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return self.a(x), torch.ops.dsv4_test.opaque(x), self.c(x)

    module, x = Opaque(), torch.randn(5, 32)
    out, graph = run(module, x, projections="streams")
    assert names(graph) == [["a", "c"]]
    with torch.no_grad():
        for a, b in zip(out, module(x), strict=True):
            torch.testing.assert_close(a, b)


def test_heaviest_owner_stays_on_the_main_stream():
    class Owner(nn.Module):
        def __init__(self, *widths: int) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(16, w, bias=False) for w in widths)

        def forward(self, x: Tensor) -> list[Tensor]:
            return [part(x) for part in self.parts]

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.compressor, self.small = Owner(64, 32), Owner(64, 64), Owner(4)

        def forward(self, x: Tensor) -> list[Tensor]:
            return [*self.q(x), *self.compressor(x), *self.small(x)]

    _, graph = run(Layer(), torch.randn(5, 16), projections="streams")
    assert [linear.stream for linear in graph.projections[0].linears] == [0, 0, 1, 1, 2]
    torch._dynamo.reset()
    _, graph = run(Layer(), torch.randn(5, 16), projections="streams", num_streams=1)
    assert [linear.stream for linear in graph.projections[0].linears] == [0, 0, 1, 1, 1]
