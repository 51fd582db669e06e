"""transformers' DeepSeek-V4 under the backend: what the report says, the numbers, generation, and new weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.config
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import dsv4_compile
from tests.models import CSA, HCA, SLIDING, VOCABULARY, deepseek
from tests.passes.test_mhc import error

CSA_LINEARS = [
    "q_a_proj",
    "kv_proj",
    "compressor.kv_proj",
    "compressor.gate_proj",
    "compressor.indexer.kv_proj",
    "compressor.indexer.gate_proj",
    "compressor.indexer.scorer.weights_proj",
]
ATTENTION = {
    SLIDING: [["q_a_proj", "kv_proj"]],
    CSA: [CSA_LINEARS, ["q_b_proj", "compressor.indexer.q_b_proj"]],
    HCA: [["q_a_proj", "kv_proj", "compressor.kv_proj", "compressor.gate_proj"]],
}
MLP = ["gate", "shared_experts.gate_proj", "shared_experts.up_proj"]


def tokens(length: int, rows: int = 1, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def logits(model: Callable[..., Any], ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def compiled(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend="dsv4", options={"compiler": "eager"} | options)


class _SingleIsDouble(torch.overrides.TorchFunctionMode):
    """Whatever the model asks for in float32 it gets in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args, kwargs = tree_map(lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs or {}))
        return func(*args, **kwargs)


def oracle(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits of the same weights with all arithmetic in float64."""
    wide = copy.deepcopy(model).double()
    wide.set_experts_implementation("batched_mm")
    with _SingleIsDouble():
        return logits(wide, ids)


# ---------------------------------------------------------------------------------------------------------- the report


@pytest.fixture(scope="module")
def reported() -> tuple[dsv4_compile.GraphReport, float]:
    """The graph of one model with every kind of layer, long enough for every window, and its error."""
    torch._dynamo.reset()
    model, ids = deepseek((SLIDING, CSA, HCA)), tokens(9)
    out = logits(compiled(model, projections="streams"), ids)
    (graph,) = dsv4_compile.report().graphs
    return graph, error(out, logits(model, ids).double())


def test_every_hyper_connection_is_replaced(reported):
    graph, _ = reported
    sites = [f"model.layers.{i}.{part}" for i in range(3) for part in ("attn_hc", "ffn_hc")]
    assert [s.form for s in graph.mhc] == ["pre", *["post_pre"] * 5, "post", "head"]
    assert [s.site for s in graph.mhc[:-2]] == sites
    assert graph.mhc[-2].site.startswith("model.layers.2")
    assert (graph.mhc[-1].site, graph.mhc[-1].kernel) == ("model.hc_head", "inductor")
    assert [s.norm_fused for s in graph.mhc] == [True] * 6 + [False, True]
    assert [s.iters for s in graph.mhc] == [4] * 6 + [None, None]
    assert {(s.streams, s.hidden) for s in graph.mhc} == {(4, 32)}
    assert [s.mixing for s in graph.mhc] == [None, *["float32"] * 6, None]
    assert all(s.eps == pytest.approx(dict.fromkeys(("rms", "pre", "sinkhorn", "norm"), 1e-6)) for s in graph.mhc[:-2])
    assert graph.missed == []


def test_a_bfloat16_model_rounds_post_and_comb_and_so_do_the_operators():
    model, ids = deepseek((SLIDING,), dtype=torch.bfloat16), tokens(9)
    logits(compiled(model), ids)
    (graph,) = dsv4_compile.report().graphs
    assert [s.form for s in graph.mhc] == ["pre", "post_pre", "post", "head"]
    assert [s.mixing for s in graph.mhc] == [None, "bfloat16", "bfloat16", None]
    assert graph.missed == []


@pytest.mark.parametrize("layer", range(3), ids=["sliding", "csa", "hca"])
def test_projections_of_each_layer_type_are_grouped(layer, reported):
    graph, _ = reported
    kind = (SLIDING, CSA, HCA)[layer]

    def groups(site: str) -> list[list[str]]:
        return [[linear.name for linear in g.linears] for g in graph.projections if g.site == site]

    assert groups(f"model.layers.{layer}.self_attn") == ATTENTION[kind]
    assert groups(f"model.layers.{layer}.mlp") == [MLP]


def test_linears_of_one_module_share_a_stream(reported):
    """As in serving engines: the queries stay, the compressor, the indexer and its weights leave."""
    graph, _ = reported
    site = "model.layers.1.self_attn"
    streams = {x.name: x.stream for g in graph.projections if g.site == site for x in g.linears}
    assert streams["q_a_proj"] == streams["kv_proj"] == 0
    sides = [
        {streams["compressor.kv_proj"], streams["compressor.gate_proj"]},
        {streams["compressor.indexer.kv_proj"], streams["compressor.indexer.gate_proj"]},
        {streams["compressor.indexer.scorer.weights_proj"]},
    ]
    assert [len(side) for side in sides] == [1, 1, 1]
    assert set.union(*sides) == {1, 2, 3}
    assert (streams["q_b_proj"], streams["compressor.indexer.q_b_proj"]) == (0, 1)


def test_streams_do_not_change_the_logits(reported):
    _, difference = reported
    assert difference < 1e-5


def test_equal_layers_are_proved_once():
    """The time of the passes is linear in the layers, counted in what has to be proved."""
    from dsv4_compile.passes import mhc_post, mhc_proof

    counts = []
    for layers in (2, 5):
        mhc_proof._proved.cache_clear()
        mhc_post._proved.cache_clear()
        logits(compiled(deepseek((SLIDING,) * layers, iters=1)), tokens(5))
        assert len(dsv4_compile.report().graphs[-1].mhc) == 2 * layers + 2
        counts.append(mhc_proof._proved.cache_info().currsize + mhc_post._proved.cache_info().currsize)
        torch._dynamo.reset()
    assert counts[1] <= counts[0] + 2


# --------------------------------------------------------------------------------------------------------- the numbers


@pytest.mark.parametrize(
    ("rates", "lengths"),
    [((4, 8), (3, 4, 5, 7, 8, 9, 17)), ((4, 128), (127, 128, 129))],
    ids=["small_windows", "windows_of_the_model"],
)
def test_prefill_equals_eager_around_the_windows(rates, lengths):
    model = deepseek((CSA, HCA), rates=rates, window=rates[1], iters=2)
    run = compiled(model, projections="pack")
    for length in lengths:
        ids = tokens(length, seed=length)
        assert error(logits(run, ids), logits(model, ids).double()) < 1e-5, length
    assert all(len(g.mhc) == 6 and not g.missed for g in dsv4_compile.report().graphs)


@pytest.mark.slow
def test_generation_equals_eager_token_for_token():
    """64 greedy tokens with transformers' cache, every layer type, prompts that end inside a window.

    Dynamo makes a graph for every state of the cache it has not met: the windows are of 2 tokens, so that the states
    repeat soon.
    """
    model = deepseek((SLIDING, CSA, HCA), rates=(2, 2), iters=1)
    prompts = [tokens(3, seed=1), tokens(5, seed=2)]
    arguments = {"max_new_tokens": 64, "do_sample": False}
    expected = [model.generate(ids, **arguments) for ids in prompts]
    model.forward = compiled(model.forward, projections="pack")
    with torch._dynamo.config.patch(recompile_limit=64):
        for ids, want in zip(prompts, expected, strict=True):
            assert torch.equal(model.generate(ids, **arguments), want)
    graphs = dsv4_compile.report().graphs
    assert all(len(g.mhc) == 8 for g in graphs), [(g.id, len(g.mhc), g.missed) for g in graphs]
    assert len(graphs) < 16, "more graphs than the cache has states"


def test_bf16_under_inductor_is_as_close_to_float64_as_without_us():
    """One layer with table routing: no discrete choice that rounding could turn."""
    model = deepseek((SLIDING,), dtype=torch.bfloat16)
    batches = [tokens(8, rows=2, seed=s) for s in range(4)]
    oracles = [oracle(model, ids) for ids in batches]
    assert all(wide.dtype == torch.float64 for wide in oracles)
    errors = {}
    for backend in ("inductor", "dsv4"):
        torch._dynamo.reset()
        run = torch.compile(model, backend=backend)
        errors[backend] = sum(error(logits(run, ids), wide) for ids, wide in zip(batches, oracles, strict=True))
    assert len(dsv4_compile.report().graphs[-1].mhc) == 4
    assert errors["dsv4"] <= errors["inductor"] * 1.05, errors


# --------------------------------------------------------------------------------------------------------- new weights


def test_weights_of_a_packed_model_stay_what_they_are_and_may_change():
    def made(seed: int = 0) -> nn.Module:
        return deepseek((CSA,), iters=2, experts="batched_mm", seed=seed)

    model, ids = made(), tokens(9)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    objects = dict(model.named_parameters())
    run = compiled(model, projections="pack")
    assert error(logits(run, ids), logits(model, ids).double()) < 1e-5
    assert {g.strategy for g in dsv4_compile.report().graphs[-1].projections} == {"pack"}
    assert not dsv4_compile.report().graphs[-1].notes, "every group is packed"

    after = model.state_dict()
    assert list(after) == list(before)
    for name, tensor in before.items():
        assert (after[name].shape, after[name].dtype, after[name].stride()) == (
            tensor.shape,
            tensor.dtype,
            tensor.stride(),
        )
        assert torch.equal(after[name], tensor), name
    assert all(objects[name] is parameter for name, parameter in model.named_parameters())

    other = made(seed=1)
    model.load_state_dict(other.state_dict())
    assert error(logits(run, ids), logits(other, ids).double()) < 1e-5, "load_state_dict"

    for new, old in zip(made(seed=2).parameters(), model.parameters(), strict=True):
        old.data = new.data.clone()
    assert error(logits(run, ids), logits(copy.deepcopy(model), ids).double()) < 1e-5, "param.data = ..."

    third = made(seed=3)
    model.load_state_dict(third.state_dict(), assign=True)
    assert error(logits(run, ids), logits(third, ids).double()) < 1e-5, "assign=True"

    model.to(torch.float64)
    out = logits(run, ids)
    assert out.dtype == torch.float64
    assert error(out, logits(third.to(torch.float64), ids)) < 1e-5, (
        "to(float64), where the model keeps parts in float32"
    )
