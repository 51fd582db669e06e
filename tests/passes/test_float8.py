"""float8 products (`torch._scaled_mm`) beside the linears of their activation, as on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

import dsv4_compile
from dsv4_compile.kernels import linear
from dsv4_compile.kernels.linear import tuning
from dsv4_compile.passes import float8, projections
from tests.kernels.test_float8 import joint_products, of_hopper, scales_rows_on_a_cpu, skip_unless_torch_scales_rows
from tests.passes.test_projections import names, run

FLOAT8, BF16 = torch.float8_e4m3fn, torch.bfloat16


pytestmark = pytest.mark.usefixtures("as_on_cuda")


def by_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax().float() / 448
    return (x.float() / scale).clamp(-448, 448).to(FLOAT8), scale


def by_row(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).float() / 448
    return (x.float() / scale).clamp(-448, 448).to(FLOAT8), scale


class Float8(nn.Module):
    """A float8 layer `[features, width]`; the weight is stored as `[M, K]`, or by columns as `[K, M]` if `turned`."""

    def __init__(
        self,
        width: int,
        features: int,
        rows: bool = False,
        bias: bool = False,
        turned: bool = False,
        fast: bool = False,
    ) -> None:
        super().__init__()
        weight, scale = (by_row if rows else by_tensor)(torch.randn(features, width))
        self.turned, self.fast = turned, fast
        self.quantise: Callable[[Tensor], tuple[Tensor, Tensor]] = by_row if rows else by_tensor
        self.weight = nn.Parameter(weight.t() if turned else weight, requires_grad=False)
        self.scale = nn.Parameter(scale.t() if rows else scale, requires_grad=False)
        self.bias = nn.Parameter(torch.randn(features).to(BF16)) if bias else None

    def product(self, rows: Tensor, scale: Tensor) -> Tensor:
        weight = self.weight if self.turned else self.weight.t()
        return torch._scaled_mm(
            rows, weight, scale_a=scale, scale_b=self.scale, bias=self.bias, out_dtype=BF16, use_fast_accum=self.fast
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, scale = self.quantise(x.reshape(-1, x.shape[-1]))
        return self.product(rows, scale).view(*x.shape[:-1], -1)


def plain(width: int, features: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(width, features, bias=bias, dtype=BF16)


class Attention(nn.Module):
    """DeepSeek's: query and key in float8, what is beside them in bfloat16."""

    def __init__(self, width: int = 64, **low: bool) -> None:
        super().__init__()
        self.q, self.kv = Float8(width, 32, **low), Float8(width, 16, **low)
        self.gate, self.state, self.index = plain(width, 16), plain(width, 24, True), plain(width, 8)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = x * 2
        return [self.q(x).relu(), self.gate(x), self.kv(x) + 1, self.state(x).sigmoid(), self.index(x)]


class PlainFirst(nn.Module):
    """A linear and its reader come before the float8 input is made."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.q = plain(64, 16), Float8(64, 32)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = x * 2
        gate = self.gate(x).sigmoid()
        return [gate, self.q(x) * gate.amax()]


def auto(module: nn.Module, *inputs: Tensor, **options: object) -> tuple[object, dsv4_compile.GraphReport]:
    return run(module, *inputs, projections="auto", **options)


def assert_like_eager(out: object, module: nn.Module, *inputs: Tensor) -> None:
    with torch.no_grad():
        for ours, eager in zip(out, module(*inputs), strict=True):
            assert ours.stride() == eager.stride()
            torch.testing.assert_close(ours, eager, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("low", [{}, {"rows": True}, {"bias": True}, {"turned": True}, {"fast": True}], ids=str)
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 64), (1, 1, 64)])
def test_float8_products_join_the_linears_of_their_activation(shape: tuple[int, ...], low: dict[str, bool]) -> None:
    if low.get("rows"):
        skip_unless_torch_scales_rows()
    module, x = Attention(**low), torch.randn(shape).to(BF16)
    out, graph = auto(module, x)
    assert_like_eager(out, module, x)
    assert names(graph) == [["gate", "state", "index", "q", "kv"]]
    (group,) = graph.projections
    assert group.strategy == "measured" and "with 2 float8 products" in group.reason
    assert [one.dtype for one in group.linears] == ["bfloat16"] * 3 + ["float8_e4m3fn"] * 2
    assert group.biased == (False, True, False, bool(low.get("bias")), bool(low.get("bias")))
    assert not graph.missed
    (choice,) = graph.measured()[0].measured
    assert choice.source.startswith("default")
    (entry,) = linear.choices()
    assert {one["by_row"] for one in entry["scaled"]} == {bool(low.get("rows"))}


def test_one_linear_and_one_float8_product_are_a_group_and_its_input_is_made_before() -> None:
    module, x = PlainFirst(), torch.randn(5, 64).to(BF16)
    out, graph = auto(module, x)
    assert_like_eager(out, module, x)
    assert names(graph) == [["gate", "q"]]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_static_and_dynamic_shapes(compiler: str, dynamic: bool) -> None:
    model = Attention(rows=scales_rows_on_a_cpu())
    options = {"compiler": compiler, "mhc": "off"}
    compiled = torch.compile(model, backend="dsv4", options=options, dynamic=dynamic)
    with torch._inductor.config.patch(force_disable_caches=True), torch.no_grad():
        for tokens in (3, 6):
            x = torch.randn(tokens, 5, 64).to(BF16)
            assert_like_eager(compiled(x), model, x)
    graphs = dsv4_compile.report().graphs
    assert [len(group.linears) for graph in graphs for group in graph.projections] == [5] * (1 if dynamic else 2)


class Together(Attention):
    """The activation is quantised once for both; their scales are of each row, of each weight, or the same."""

    def __init__(self, scales: str) -> None:
        super().__init__(rows=scales == "rows")
        if scales == "same":
            self.kv.scale = self.q.scale

    def forward(self, x: Tensor) -> list[Tensor]:
        x = x * 2
        rows, scale = self.q.quantise(x)
        low = [layer.product(rows, scale) for layer in (self.q, self.kv)]
        return [*low, self.gate(x), self.state(x), self.index(x)]


@pytest.mark.parametrize(("scales", "packs"), [("rows", 2), ("weights", 1), ("same", 2)])
def test_float8_weights_that_can_be_one_product_are_laid_side_by_side(scales: str, packs: int) -> None:
    if scales == "rows":
        skip_unless_torch_scales_rows()
    module, x = Together(scales), torch.randn(5, 64).to(BF16)
    kept = {name: tensor.float().clone() for name, tensor in module.state_dict().items()}
    out, graph = auto(module, x)
    assert_like_eager(out, module, x)
    (group,) = graph.projections
    assert group.packs == packs and len(group.linears) == 5
    apart = module.kv.weight.data_ptr() - module.q.weight.data_ptr() != module.q.weight.numel()
    assert apart is (packs == 1)
    assert all(tensor.float().equal(kept[name]) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_layers_that_quantise_the_activation_alike_read_one_input(compiler: str) -> None:
    """Each by itself, as in the models; a layer that does it otherwise has its own."""
    skip_unless_torch_scales_rows()

    class Many(Attention):
        def __init__(self) -> None:
            super().__init__(rows=True)
            self.other = Float8(64, 16, rows=True)
            self.other.quantise = lambda x: by_row(x * 0.5)
            self.more = Float8(64, 48, rows=True)

        def forward(self, x: Tensor) -> list[Tensor]:
            x = x * 2
            return [layer(x) for layer in (self.q, self.kv, self.other, self.more, self.gate, self.state, self.index)]

    module, x = Many(), torch.randn(5, 64).to(BF16)
    out, graph = auto(module, x, compiler=compiler)
    assert_like_eager(out, module, x)
    (group,) = graph.projections
    assert [linear.name for linear in group.linears][3:] == ["q", "kv", "more", "other"] and group.packs == 2
    assert "not packed: float8 weights: their inputs or their scales differ" in group.reason
    start = module.q.weight.data_ptr()
    assert [layer.weight.data_ptr() - start for layer in (module.kv, module.more)] == [32 * 64, 48 * 64]
    (entry,) = linear.choices()
    assert [one["input"] for one in entry["scaled"]] == [0, 0, 0, 1]


def test_members_of_one_product_are_side_by_side_with_others_between(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_unless_torch_scales_rows()

    class Between(Attention):
        def __init__(self) -> None:
            super().__init__(rows=True)
            self.biased = Float8(64, 16, rows=True, bias=True)

        def forward(self, x: Tensor) -> list[Tensor]:
            x = x * 2
            rows, scale = by_row(x)
            low = [layer.product(rows, scale) for layer in (self.q, self.biased, self.kv)]
            return [*low, self.gate(x), self.state(x), self.index(x)]

    monkeypatch.setattr(tuning, "card_of", of_hopper)
    joint = joint_products(monkeypatch)
    module, x = Between(), torch.randn(5, 64).to(BF16)
    monkeypatch.setattr(tuning, "strategy", lambda problem, *_: ("pack", problem, True))
    out, graph = auto(module, x)
    assert_like_eager(out, module, x)
    (group,) = graph.projections
    assert joint == [2] and group.packs == 2 and "float8 weights: one has a bias" in group.reason
    assert [linear.out_features for linear in group.linears][3:] == [32, 16, 16]
    assert group.biased == (False, True, False, False, False, True)


class Behind(nn.Module):
    """The activation of the second group is the result of a linear of the first, as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = plain(64, 64), plain(64, 16), plain(64, 24), plain(64, 8)
        self.low, self.more = Float8(64, 32), Float8(64, 16)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = x * 2
        y = self.a(x)
        return [self.b(x), self.c(y), self.d(y), self.low(y), self.more(y)]


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 64)])
def test_the_activation_may_be_the_result_of_an_earlier_group(shape: tuple[int, ...], compiler: str) -> None:
    module, x = Behind(), torch.randn(shape).to(BF16)
    out, graph = auto(module, x, compiler=compiler)
    assert_like_eager(out, module, x)
    assert names(graph) == [["a", "b"], ["c", "d", "low", "more"]]


class Depends(nn.Module):
    """The float8 input is made from the result of a linear of the same activation."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.other, self.q = plain(64, 64), plain(64, 8), Float8(64, 32)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = x * 2
        rows, scale = by_tensor(x * self.gate(x))
        return [self.q.product(rows, scale), self.other(x)]


class Other(nn.Module):
    """An input of another float8."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.other = plain(64, 64), plain(64, 8)
        self.q = Float8(64, 32)
        self.q.quantise = lambda x: (x.to(torch.float8_e5m2), torch.ones(()))

    def forward(self, x: Tensor) -> list[Tensor]:
        x = x * 2
        return [self.q(x), self.gate(x), self.other(x)]


class Computed(Other):
    """A weight that is computed from an activation."""

    def forward(self, x: Tensor) -> list[Tensor]:
        x = x * 2
        rows, scale = by_tensor(x)
        weight = torch.cat([x.abs().amax(0, keepdim=True).to(FLOAT8)] * 16)
        low = torch._scaled_mm(rows, weight.t(), scale_a=scale, scale_b=scale, out_dtype=BF16)
        return [low, self.gate(x), self.other(x)]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Depends, "depends on another product"), (Computed, "computed, not a parameter")],
)
def test_a_float8_product_that_cannot_join_is_left_with_its_reason(kind: type[nn.Module], reason: str) -> None:
    module, x = kind(), torch.randn(5, 64).to(BF16)
    out, graph = auto(module, x)
    assert_like_eager(out, module, x)
    assert [len(group.linears) for group in graph.projections] == [2]
    (missed,) = graph.missed
    assert "keeps its own kernel" in missed.reason and reason in missed.reason


def test_a_float8_product_that_no_launch_can_have_is_left_unless_it_is_asked_for() -> None:
    module, x = Other(), torch.randn(5, 64).to(BF16)
    out, graph = auto(module, x)
    assert_like_eager(out, module, x)
    assert names(graph) == [["gate", "other"]]
    (missed,) = graph.missed
    assert "_scaled_mm" in missed.reason and "with projections='streams' or DSV4_BESIDE=1 only" in missed.reason


def test_a_float8_product_that_no_launch_can_have_runs_beside_the_group_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DSV4_BESIDE", "1")
    module, x = Other(), torch.randn(5, 64).to(BF16)
    out, graph = auto(module, x)
    assert_like_eager(out, module, x)
    assert names(graph) == [["gate", "other", "q"]] and not graph.missed
    assert [one.operator for one in graph.projections[0].linears] == ["", "", "aten::_scaled_mm"]


def test_streams_take_float8_products_as_they_are() -> None:
    module, x = Attention(), torch.randn(5, 64).to(BF16)
    out, graph = run(module, x, projections="streams")
    assert_like_eager(out, module, x)
    assert names(graph) == [["gate", "state", "index", "q", "kv"]] and not graph.missed
    assert [one.operator for one in graph.projections[0].linears] == [*[""] * 3, *["aten::_scaled_mm"] * 2]


@pytest.mark.parametrize("strategy", ["pack", "serial"])
def test_other_strategies_leave_float8_products_alone(strategy: str) -> None:
    module, x = Attention(), torch.randn(5, 64).to(BF16)
    out, graph = run(module, x, projections=strategy)
    assert_like_eager(out, module, x)
    assert names(graph) == [["gate", "state", "index"]]
    assert len(graph.missed) == (0 if strategy == "serial" else 2)
    assert all("keeps its own kernel" in missed.reason for missed in graph.missed)
    module = PlainFirst()
    out, graph = run(module, x, projections=strategy)
    assert_like_eager(out, module, x)
    assert not graph.projections


def test_on_a_cpu_nothing_changes_and_strict_is_content(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projections, "_device_type", lambda group: "cpu")
    module, x = Attention(), torch.randn(5, 64).to(BF16)
    out, graph = auto(module, x, strict=True)
    assert_like_eager(out, module, x)
    assert [group.strategy for group in graph.projections] == ["serial"] and not graph.missed


class Unturned(nn.Module):
    """A square weight by columns, under a permute that changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.q = plain(64, 16), Float8(64, 64, turned=True)

    def forward(self, x: Tensor) -> list[Tensor]:
        rows, scale = by_tensor(x)
        low = torch._scaled_mm(rows, self.q.weight.permute(0, 1), scale_a=scale, scale_b=self.q.scale, out_dtype=BF16)
        return [self.gate(x), low]


def test_a_permute_that_changes_nothing_is_no_transpose_of_the_weight() -> None:
    module, x = Unturned(), torch.randn(5, 64).to(BF16)
    out, graph = auto(module, x)
    assert_like_eager(out, module, x)
    assert [len(group.linears) for group in graph.projections] == [2] and not graph.missed


class Many(nn.Module):
    """Two layers, one behind the other, and an input of which two float8 layers have different scales."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attention(), Attention()
        self.out, self.extra = plain(96, 64), Float8(64, 16)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.out(torch.cat(self.first(x), -1)).tanh()
        rows = (x * 4).to(FLOAT8)
        return [*self.second(x), self.extra.product(rows, torch.full((), 0.25))]


def test_groups_behind_each_other() -> None:
    module, x = Many(), torch.randn(5, 64).to(BF16)
    out, graph = auto(module, x)
    assert [len(group.linears) for group in graph.projections] in ([5, 5], [5, 6])
    with torch.no_grad():
        for ours, eager in zip(out, module(x), strict=True):
            torch.testing.assert_close(ours, eager, rtol=5e-2, atol=5e-2)


class AcrossGroups(nn.Module):
    """The float8 input is made from a product of another activation, in whose group that product comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.q = plain(64, 16), Float8(64, 32)
        self.early, self.gate = plain(64, 8), plain(64, 64)

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        x, y = x * 2, y * 3
        return [self.first(x), self.early(y), self.q(x * self.gate(y).sigmoid())]


def test_a_float8_input_that_needs_a_product_of_a_later_group_moves_that_group() -> None:
    module, inputs = AcrossGroups(), (torch.randn(5, 64).to(BF16), torch.randn(5, 64).to(BF16))
    out, graph = auto(module, *inputs)
    assert_like_eager(out, module, *inputs)
    assert names(graph) == [["first", "q"], ["early", "gate"]] and not graph.missed


class Constants(nn.Module):
    """What the float8 input is made with is a constant of the graph, which stands where it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.q = plain(64, 16), Float8(64, 32)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = x * 2
        gate = self.gate(x)
        rows, scale = by_tensor(x * torch.tensor([0.5, 0.25] * 32))
        return [gate, self.q.product(rows, scale * torch.tensor([1.5]))]


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_constants_of_the_graph_move_with_the_float8_input(compiler: str) -> None:
    module, x = Constants(), torch.randn(5, 64).to(BF16)
    out, graph = auto(module, x, compiler=compiler)
    assert_like_eager(out, module, x)
    assert [len(group.linears) for group in graph.projections] == [2] and not graph.missed


class ScaledByLinear(nn.Module):
    """The scales of the rows are the result of a linear, which others of another group stand beside."""

    def __init__(self, beside: bool, others: int) -> None:
        super().__init__()
        self.gate, self.q, self.beside = plain(64, 16), Float8(64, 32, rows=True), beside
        self.scale, self.other = nn.Linear(32, 1, bias=False), nn.Linear(32, others, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        x, y = x * 2, y * 3
        scale, other = self.scale(y), self.other(y)
        low = self.q.product(x.to(FLOAT8), scale)
        return [low, other, *([self.gate(x)] if self.beside else [])]


@pytest.mark.parametrize("others", [7, 8])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("strategy", ["auto", "pack"])
def test_scales_that_a_group_makes_are_read_where_they_are_now(strategy: str, beside: bool, others: int) -> None:
    skip_unless_torch_scales_rows()
    module = ScaledByLinear(beside, others)
    inputs = torch.randn(5, 64).to(BF16), torch.rand(5, 32)
    out, graph = run(module, *inputs, projections=strategy)
    assert_like_eager(out, module, *inputs)
    assert len(graph.projections) == 1 + (beside and strategy == "auto")
    assert not any("failed" in missed.reason for missed in graph.missed)


@pytest.mark.gpu
@pytest.mark.parametrize("cudagraphs", ["off", "auto"])
@pytest.mark.parametrize("rows", [False, True])
def test_on_the_card_the_way_is_measured_for_the_whole_group(
    rows: bool, cudagraphs: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the card has no float8")
    monkeypatch.setenv("DSV4_TUNE", "auto")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = Attention(4096, rows=rows).cuda()
    compiled = torch.compile(model, backend="dsv4", options={"mhc": "off", "cudagraphs": cudagraphs})
    with torch.inference_mode():
        for _ in range(6):
            x = torch.randn(8, 4096, device="cuda", dtype=BF16)
            made = [output.clone() for output in compiled(x)]
            for ours, eager in zip(made, model(x), strict=True):
                # Inductor rounds some inputs to the float8 number next to eager's.
                assert (ours.float() - eager.float()).norm() <= 2e-2 * eager.float().norm()
    (graph,) = dsv4_compile.report().graphs
    (group,) = graph.measured()
    assert [linear.dtype for linear in group.linears] == ["bfloat16"] * 3 + ["float8_e4m3fn"] * 2
    (choice,) = group.measured
    assert choice.source == "searched" and any(name.startswith("skinny") for name in choice.microseconds)


def scaled_node(**changes: Any) -> Node:
    """A product `[5, 256] x [256, 48]` in a graph of its own, with other operands where `changes` has them."""
    graph = Graph()

    def operand(name: str, value: Tensor) -> Node:
        node = graph.placeholder(name)
        node.meta["val"] = value
        return node

    given: dict[str, Tensor | None] = {
        "self": torch.empty(5, 256, dtype=FLOAT8, device="meta"),
        "mat2": torch.empty(48, 256, dtype=FLOAT8, device="meta").t(),
        "scale_a": torch.empty((), device="meta"),
        "scale_b": torch.empty((), device="meta"),
        "bias": None,
        "scale_result": None,
    } | changes
    nodes = [None if value is None else operand(name, value) for name, value in given.items()]
    node = graph.call_function(torch.ops.aten._scaled_mm.default, (*nodes, BF16))
    node.meta["val"] = torch.empty(5, 48, dtype=BF16, device="meta")
    return node


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scale_a": torch.empty(5, 2), "scale_b": torch.empty(2, 1)}, "by blocks"),
        ({"scale_a": torch.empty(5, 1), "scale_b": torch.empty(())}, "by blocks"),
        ({"mat2": torch.empty(256, 48, dtype=FLOAT8)}, "not stored by columns"),
        ({"self": torch.empty(5, 256, dtype=torch.float8_e5m2)}, "its operands are float8_e5m2 and float8_e4m3fn"),
        ({"scale_result": torch.empty(())}, "its result is scaled"),
        ({"bias": torch.empty(48)}, "its bias is"),
    ],
)
def test_products_of_other_kinds_have_a_reason(changes: dict[str, Tensor], reason: str) -> None:
    found = float8.parse(scaled_node(**changes))
    assert isinstance(found, str) and reason in found


def test_both_kinds_of_scales_are_read() -> None:
    by_number = float8.parse(scaled_node())
    by_row = float8.parse(
        scaled_node(scale_a=torch.empty(5, 1), scale_b=torch.empty(1, 48), bias=torch.empty(48, dtype=BF16))
    )
    assert isinstance(by_number, float8.ScaledProduct) and isinstance(by_row, float8.ScaledProduct)
    assert (by_row.features, by_row.columns, by_row.dtype, by_row.turned) == (48, 256, BF16, False)


def test_what_no_launch_can_have_together_is_in_the_reason() -> None:
    product = float8.parse(scaled_node())
    assert isinstance(product, float8.ScaledProduct)
    assert float8.apart([product], [torch.float32, BF16]) == ""
    assert "none is bfloat16" in float8.apart([product], [torch.float32])
    assert "results are bfloat16" in float8.apart([product], [torch.float16])
