"""transformers' Qwen3-Next and Qwen3.5 under the backend: their projections are found and run by the same pass."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo.config
import torch._dynamo.utils
from torch import Tensor, nn

import dsv4_compile
from tests.models import FULL, LINEAR, qwen
from tests.passes.test_mhc import error
from tests.test_deepseek import _SingleIsDouble, compiled, logits, tokens

STRATEGIES = ["auto", "pack", "streams", "serial", "off"]
COMBINATIONS = [
    *[("qwen3_next", True, strategy) for strategy in STRATEGIES],
    *[("qwen3_5", False, strategy) for strategy in STRATEGIES],
    ("qwen3_next", False, "pack"),
    ("qwen3_5", True, "pack"),
]

LINEAR_ATTENTION = {
    "qwen3_next": {"in_proj_qkvz": 96, "in_proj_ba": 8},
    "qwen3_5": {"in_proj_qkv": 64, "in_proj_z": 32, "in_proj_b": 4, "in_proj_a": 4},
}
FULL_ATTENTION = {"q_proj": 128, "k_proj": 32, "v_proj": 32}
MLP = {
    True: {"shared_expert.gate_proj": 16, "shared_expert.up_proj": 16, "gate": 4, "shared_expert_gate": 1},
    False: {"gate_proj": 48, "up_proj": 48},
}


def expected_groups(family: str, moe: bool, layers: tuple[str, ...]) -> list[tuple[str, dict[str, int]]]:
    groups = []
    for i, kind in enumerate(layers):
        if kind == LINEAR:
            groups.append((f"model.layers.{i}.linear_attn", LINEAR_ATTENTION[family]))
        else:
            groups.append((f"model.layers.{i}.self_attn", FULL_ATTENTION))
        groups.append((f"model.layers.{i}.mlp", MLP[moe]))
    return groups


def groups(graph: dsv4_compile.GraphReport) -> list[tuple[str, dict[str, int]]]:
    return [(g.site, {linear.name: linear.out_features for linear in g.linears}) for g in graph.projections]


@pytest.mark.parametrize(("family", "moe", "strategy"), COMBINATIONS)
def test_every_strategy_finds_the_groups_and_equals_eager(family, moe, strategy):
    model, ids = qwen(family, moe=moe), tokens(9, rows=2)
    assert error(logits(compiled(model, projections=strategy), ids), logits(model, ids).double()) < 1e-5
    (graph,) = dsv4_compile.report().graphs
    assert (graph.mhc, graph.missed, graph.notes) == ([], [], [])
    if strategy == "off":
        assert graph.projections == []
        return
    assert groups(graph) == expected_groups(family, moe, (LINEAR, FULL))
    assert {linear.dtype for g in graph.projections for linear in g.linears} == {"float32"}
    assert {g.strategy for g in graph.projections} == {"serial" if strategy == "auto" else strategy}


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_padded_prompts_in_bfloat16(family):
    """The mask of the padding multiplies the activation; all linears read the product."""
    layers = (LINEAR, FULL, LINEAR)
    model, ids = qwen(family, layers, moe=False, dtype=torch.bfloat16), tokens(9, rows=2)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, use_cache=False).logits
        out = compiled(model, projections="pack")(ids, attention_mask=mask, use_cache=False).logits
    assert error(out[0], expected[0].double()) < 2e-2
    assert error(out[1, 4:], expected[1, 4:].double()) < 2e-2
    (graph,) = dsv4_compile.report().graphs
    assert groups(graph) == expected_groups(family, False, layers)
    assert {linear.dtype for g in graph.projections for linear in g.linears} == {"bfloat16"}
    assert {g.strategy for g in graph.projections} == {"pack"}


@pytest.mark.parametrize("length", [1, 63, 64, 65])
def test_lengths_around_a_chunk(length):
    """The gated delta rule works on chunks of 64 tokens."""
    model, ids = qwen("qwen3_5", (LINEAR,), moe=False), tokens(length)
    assert error(logits(compiled(model, projections="pack"), ids), logits(model, ids).double()) < 1e-5


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_generation_equals_eager_token_for_token(family):
    """With transformers' cache: one graph for the prompt, one for the first step, and one for all further steps."""
    model, ids = qwen(family, moe=False), tokens(5, seed=1)
    arguments = {"max_new_tokens": 16, "do_sample": False}
    expected = model.generate(ids, **arguments)
    model.forward = compiled(model.forward, projections="pack")
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=True):
        assert torch.equal(model.generate(ids, **arguments), expected)
    assert not torch._dynamo.utils.counters["graph_break"]
    graphs = dsv4_compile.report().graphs
    assert len(graphs) == 3
    for graph in graphs:
        assert groups(graph) == expected_groups(family, False, (LINEAR, FULL))
        assert (graph.missed, graph.notes) == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["streams", "pack"])
@pytest.mark.parametrize(("family", "moe"), [("qwen3_next", True), ("qwen3_5", True)], ids=["next", "3.5"])
def test_generation_of_a_padded_batch_equals_eager_token_for_token(family, moe, strategy):
    model, ids = qwen(family, moe=moe), tokens(6, rows=2, seed=2)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    arguments = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False}
    expected = model.generate(ids, **arguments)
    model.forward = compiled(model.forward, projections=strategy)
    with torch._dynamo.config.patch(recompile_limit=16, fail_on_recompile_limit_hit=True):
        assert torch.equal(model.generate(ids, **arguments), expected)
    for graph in dsv4_compile.report().graphs:
        assert groups(graph) == expected_groups(family, moe, (LINEAR, FULL))


def oracle(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits of the same weights with all arithmetic in float64."""
    with _SingleIsDouble():
        return logits(copy.deepcopy(model).double(), ids)


@pytest.mark.parametrize("family", [pytest.param("qwen3_next", marks=pytest.mark.slow), "qwen3_5"])
def test_inductor_float32_equals_eager(family):
    model, ids = qwen(family, moe=False), tokens(9, rows=2)
    out = logits(torch.compile(model, backend="dsv4", options={"projections": "pack"}), ids)
    assert error(out, logits(model, ids).double()) < 1e-5
    assert {g.strategy for g in dsv4_compile.report().graphs[-1].projections} == {"pack"}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_bf16_under_inductor_is_as_close_to_float64_as_without_us(family):
    model = qwen(family, moe=False, dtype=torch.bfloat16)
    batches = [tokens(8, rows=2, seed=s) for s in range(4)]
    oracles = [oracle(model, ids) for ids in batches]
    assert all(wide.dtype == torch.float64 for wide in oracles)
    errors = {}
    for backend, options in (("inductor", None), ("dsv4", {"projections": "pack"})):
        torch._dynamo.reset()
        run = torch.compile(model, backend=backend, options=options)
        errors[backend] = sum(error(logits(run, ids), wide) for ids, wide in zip(batches, oracles, strict=True))
    assert errors["dsv4"] <= errors["inductor"] * 1.05, errors
