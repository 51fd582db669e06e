"""Quantised products of other people's operators in graphs that are written by hand, as vLLM's passes see them."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from dsv4_compile.passes import opaque, verify
from dsv4_compile.passes.projections import ProjectionsPass
from tests.kernels.quantised_operators import BF16, FLOAT8
from tests.passes.test_opaque import asked_for  # noqa: F401  (a fixture)

ops = torch.ops.quantised

pytestmark = pytest.mark.usefixtures("as_on_cuda", "asked_for")


def traced(function: Callable[..., object], *inputs: Tensor) -> GraphModule:
    """The graph of `function` with weights as inputs, as vLLM's are."""
    with torch.no_grad():
        return make_fx(function, tracing_mode="fake")(*inputs)


def attention(x: Tensor, gate: Tensor, state: Tensor, small: Tensor, scale: Tensor) -> list[Tensor]:
    low = ops.int8_linear(x, small, scale)
    return [torch.mm(x, gate.t()), low, torch.mm(x, state.t())]


def tensors() -> list[Tensor]:
    x, gate, state = torch.randn(5, 64), torch.randn(16, 64), torch.randn(8, 64)
    return [x, gate, state, torch.randint(-99, 99, (32, 64), dtype=torch.int8), torch.rand(32)]


@pytest.mark.parametrize("strategy", ["auto", "streams"])
def test_a_second_run_changes_nothing_and_weights_may_be_inputs(strategy: str) -> None:
    inputs = tensors()
    gm = traced(attention, *inputs)
    rewrite = ProjectionsPass(strategy, pack=False)
    result = rewrite(gm.graph)
    gm.graph.lint()
    code = gm.graph.python_code("self").src
    assert [len(group.linears) for group in result.projections] == [3] and not result.missed
    assert code.count("dsv4.accompanied_linear") == 1 and "quantised.int8_linear(" not in code
    again = rewrite(gm.graph)
    assert gm.graph.python_code("self").src == code
    assert not again.projections and not again.missed
    gm.recompile()
    for ours, eager in zip(gm(*inputs), attention(*inputs), strict=True):
        torch.testing.assert_close(ours, eager)


def test_one_auxiliary_stream_is_shared_with_the_linears() -> None:
    gm = traced(attention, *tensors())
    (group,) = ProjectionsPass("streams", num_streams=1)(gm.graph).projections
    assert [one.stream for one in group.linears] == [0, 1, 1]
    assert not verify.check(gm.graph, 1)


def test_a_write_between_keeps_the_operator_where_it_is() -> None:
    def function(x: Tensor, gate: Tensor, state: Tensor, small: Tensor, scale: Tensor) -> list[Tensor]:
        made = [torch.mm(x, gate.t()), torch.mm(x, state.t())]
        scale.mul_(2)
        return [*made, ops.int8_linear(x, small, scale)]

    gm = traced(function, *tensors())
    result = ProjectionsPass("streams")(gm.graph)
    assert [len(group.linears) for group in result.projections] == [2]
    (missed,) = result.missed
    assert "writes between" in missed.reason


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("view_linear", "returns a view of an argument"),
        ("doubtful_linear", "may write its arguments"),
        ("writing_linear", "the operator writes its arguments"),
    ],
)
def test_a_schema_that_allows_aliases_is_refused(name: str, reason: str) -> None:
    def function(x: Tensor, small: Tensor) -> Tensor:
        return getattr(ops, name)(x, small, *([x[0]] if name == "writing_linear" else []))

    gm = traced(function, torch.randn(5, 64), torch.randn(64, 64).to(FLOAT8))
    (node,) = (n for n in gm.graph.nodes if getattr(n.target, "namespace", "") == "quantised")
    assert reason in str(opaque.parse(node))


def test_tensors_on_several_devices_are_refused() -> None:
    with FakeTensorMode():
        x, gate, state = (torch.empty(rows, 64, device="cuda") for rows in (5, 16, 8))
        small = torch.empty(32, 64, dtype=torch.int8, device="cuda")
        gm = make_fx(attention)(x, gate, state, small, torch.empty(32))
        result = ProjectionsPass("streams")(gm.graph)
    assert [len(group.linears) for group in result.projections] == [2]
    (missed,) = result.missed
    assert missed.reason.endswith("it has tensors on cpu and cuda:0")


def test_a_triton_kernel_of_the_activation_is_missed_with_its_reason() -> None:
    """As the graph has a kernel of Triton's that no operator wraps: the Hugging Face hub's, say."""
    gm = traced(attention, *tensors())
    (node,) = (n for n in gm.graph.nodes if n.target is ops.int8_linear.default)
    wrapper = torch.ops.higher_order.triton_kernel_wrapper_functional
    given = {"x": node.args[0], "w": node.args[1], "out": node.args[0]}
    with gm.graph.inserting_before(node):
        kernel = gm.graph.call_function(wrapper, (), {"kernel_idx": 0, "kwargs": given, "tensors_to_clone": ["out"]})
        made = gm.graph.call_function(operator.getitem, (kernel, "out"))
    made.meta["val"] = node.meta["val"]
    kernel.meta["val"] = {"out": node.meta["val"]}
    node.replace_all_uses_with(made)
    gm.graph.erase_node(node)
    result = ProjectionsPass("streams")(gm.graph)
    assert [len(group.linears) for group in result.projections] == [2]
    (missed,) = result.missed
    assert "(triton_kernel_wrapper_functional)" in missed.reason
    assert "no operator with a schema of its own" in missed.reason


@pytest.mark.parametrize("version", [1, 2])
def test_scaled_mm_with_scales_by_blocks_runs_beside_the_group(version: int) -> None:
    """As DeepSeek's checkpoints have them. A CPU has no such product, so only the graph is looked at."""
    if version == 2 and not hasattr(torch.nn.functional, "scaled_mm"):
        pytest.skip("this torch has no scaled_mm")

    def product(rows: Tensor, w: Tensor, scales: Tensor, w_scales: Tensor) -> Tensor:
        if version == 1:
            return torch._scaled_mm(rows, w.t(), scale_a=scales, scale_b=w_scales.t(), out_dtype=BF16)
        recipes = torch.nn.functional.ScalingType.BlockWise1x128, torch.nn.functional.ScalingType.BlockWise128x128
        return torch.nn.functional.scaled_mm(
            rows, w.t(), scales, recipes[0], w_scales.t(), recipes[1], output_dtype=BF16
        )

    def function(x: Tensor, x8: Tensor, scales: Tensor, gate: Tensor, w: Tensor, w_scales: Tensor) -> list[Tensor]:
        rows = (x * 0 + x8.to(BF16)).to(FLOAT8)
        return [torch.mm(x, gate.t()), product(rows, w, scales, w_scales)]

    with FakeTensorMode():
        inputs = [
            torch.empty(16, 512, dtype=BF16, device="cuda"),
            torch.empty(16, 512, dtype=FLOAT8, device="cuda"),
            torch.empty(4, 16, device="cuda").t(),
            torch.empty(32, 512, dtype=BF16, device="cuda"),
            torch.empty(384, 512, dtype=FLOAT8, device="cuda"),
            torch.empty(3, 4, device="cuda"),
        ]
        gm = make_fx(function)(*inputs)
        result = ProjectionsPass("auto", pack=False)(gm.graph)
    gm.graph.lint()
    (group,) = result.projections
    name = "aten::_scaled_mm" if version == 1 else "aten::_scaled_mm_v2"
    assert not result.missed and [one.operator for one in group.linears] == ["", name]
    (node,) = (n for n in gm.graph.nodes if n.target is torch.ops.dsv4.accompanied_linear.default)
    (_, wanted, *_), _ = node.meta["eager_input_vals"]
    assert [tuple(one.stride()) for one in wanted if one.shape == (16, 4)] == [(1, 16)]
    assert not verify.check(gm.graph, 3)
