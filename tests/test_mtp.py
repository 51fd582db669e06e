"""A head that predicts a further token (MTP) beside its main model: the same path, and the same streams.

transformers ships no such head for DeepSeek-V4. It is built here the way DeepSeek's own code does, a projection of the
embedding and one of the streams and then a decoder layer, from the layer, the hyper-connection head and the norms of
transformers. For DeepSeek-V3 transformers has one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsv4_compile
from dsv4_compile.kernels import streams
from tests.models import CSA, SLIDING, VOCABULARY, deepseek, randomise
from tests.passes.test_mhc import error
from tests.test_deepseek import ATTENTION, MLP, tokens

STRATEGIES = ["auto", "pack", "streams", "serial", "off"]


class Main(nn.Module):
    """The main model; besides its logits `[B, S, V]` it gives the residual streams `[B, S, n, D]` of its last layer."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.kept: list[Tensor] = []
        model.model.layers[-1].register_forward_hook(lambda _module, _args, out: self.kept.append(out))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(ids, use_cache=False).logits
        return logits, self.kept.pop()


class Head(nn.Module):
    """Predicts the token after the next from the next token and the streams of the main model, whose embedding, rotary
    embedding and output layer it shares."""

    def __init__(self, main: nn.Module, kind: str = SLIDING):
        from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

        super().__init__()
        config = copy.deepcopy(main.config)
        config.layer_types, config.mlp_layer_types, config.num_hidden_layers = [kind], ["moe"], 1
        self.config = config
        self.enorm, self.hnorm, self.norm = (v4.DeepseekV4RMSNorm(config.hidden_size) for _ in range(3))
        self.e_proj, self.h_proj = (nn.Linear(config.hidden_size, config.hidden_size, bias=False) for _ in range(2))
        self.block = v4.DeepseekV4DecoderLayer(config, 0)
        self.hc_head = v4.DeepseekV4HyperHead(config)
        for parameter in self.parameters():
            nn.init.ones_(parameter)  # some are made without values, and `randomise` adds to what is there
        randomise(self)
        self.embed, self.rotary, self.output = main.model.embed_tokens, main.model.rotary_emb, main.lm_head

    def forward(self, ids: Tensor, residual: Tensor) -> Tensor:
        from transformers.masking_utils import create_sliding_window_causal_mask

        embedded = self.embed(ids)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        mask = create_sliding_window_causal_mask(
            config=self.config,
            inputs_embeds=embedded,
            attention_mask=None,
            past_key_values=None,
            position_ids=positions,
        )
        rotary = {kind: self.rotary(embedded, position_ids=positions, layer_type=kind) for kind in ("main", "compress")}
        residual = self.e_proj(self.enorm(embedded)).unsqueeze(2) + self.h_proj(self.hnorm(residual))
        residual = self.block(
            residual,
            position_embeddings=rotary,
            position_ids=positions,
            attention_mask=mask,
            input_ids=ids,
            past_key_values=None,
        )
        return self.output(self.norm(self.hc_head(residual)))


class Both(nn.Module):
    """Main model and head in one call; the head gets the ids one place ahead."""

    def __init__(self, main: Main, head: Head):
        super().__init__()
        self.main, self.head = main, head

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits, residual = self.main(ids)
        return logits, self.head(ids.roll(-1, 1), residual)


def made(kind: str = SLIDING, layers: tuple[str, ...] = (SLIDING,), hidden: int = 32) -> Both:
    model = deepseek(layers, iters=2, hidden=hidden)
    return Both(Main(model), Head(model, kind)).eval()


def apart(both: Both, **options: Any) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Main model and head, each with a `torch.compile` of its own."""
    chosen = {"compiler": "eager"} | options
    main = torch.compile(both.main, backend="dsv4", options=chosen)
    head = torch.compile(both.head, backend="dsv4", options=chosen)

    def run(ids: Tensor) -> tuple[Tensor, Tensor]:
        logits, residual = main(ids)
        return logits, head(ids.roll(-1, 1), residual)

    return run


def together(both: Both, **options: Any) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    return torch.compile(both, backend="dsv4", options={"compiler": "eager"} | options)


def check(run: Callable[[Tensor], tuple[Tensor, Tensor]], both: Both, ids: Tensor) -> None:
    with torch.no_grad():
        for out, expected in zip(run(ids), both(ids), strict=True):
            assert error(out, expected.double()) < 1e-5


def check_head(graph: dsv4_compile.GraphReport, kind: str, site: str = "") -> None:
    """The head's layer is replaced and grouped like any layer of the main model."""
    prefix = f"{site}." if site else ""
    sites = [s for s in graph.mhc if s.site.startswith(f"{prefix}block") or s.site == f"{prefix}hc_head"]
    assert [s.form for s in sites] == ["pre", "post_pre", "post", "head"]
    assert sites[0].site == f"{prefix}block.attn_hc"
    attention = [[x.name for x in g.linears] for g in graph.projections if g.site == f"{prefix}block.self_attn"]
    assert attention == ATTENTION[kind]
    assert [[x.name for x in g.linears] for g in graph.projections if g.site == f"{prefix}block.mlp"] == [MLP]
    assert graph.missed == []


@pytest.mark.parametrize("kind", [SLIDING, CSA], ids=["sliding", "csa"])
def test_head_compiled_apart(kind):
    both = made(kind)
    check(apart(both, projections="streams"), both, tokens(9))
    main, head = (report.graphs for report in dsv4_compile.reports()[-2:])
    assert len(main) == len(head) == 1
    check_head(head[0], kind)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_head_compiled_together_with_the_main_model(strategy):
    both = made()
    check(together(both, projections=strategy), both, tokens(9))
    (graph,) = dsv4_compile.report().graphs
    assert [s.form for s in graph.mhc].count("post_pre") == 2
    if strategy == "off":
        assert graph.projections == []
    else:
        check_head(graph, SLIDING, "head")
        assert {g.strategy for g in graph.projections} == {"serial" if strategy == "auto" else strategy}


@pytest.mark.slow
@pytest.mark.parametrize("build", [apart, together])
def test_head_under_inductor(build):
    both = made()
    check(build(both, compiler="inductor", projections="pack"), both, tokens(9))


@pytest.mark.parametrize("count", [1, 2])
def test_no_graph_asks_for_more_streams_than_allowed(count):
    """Four owners read one activation in a layer with an indexer, so a careless choice would take four streams."""
    both = made(CSA, (CSA,))
    apart_run = apart(both, projections="streams", num_streams=count)
    check(apart_run, both, tokens(9))
    asked = [graph.streams for report in dsv4_compile.reports()[-2:] for graph in report.graphs]
    assert asked == [count, count]


class FakeStream:
    """What the registry needs of a CUDA stream. PyTorch hands out its pool in turn: the 33rd is the first again."""

    made = 0

    def __init__(self, device: int):
        self.cuda_stream = 1 + FakeStream.made % 32
        FakeStream.made += 1


def test_main_model_and_head_share_the_streams_of_the_process(monkeypatch):
    """Every operator of both graphs asks the registry of one device, and it makes no stream a second time."""
    monkeypatch.setattr(streams, "_devices", {})
    monkeypatch.setattr(streams, "_index", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(FakeStream, "made", 0)
    forks: list[int] = []

    def execute(main: Any, sides: Any, device: Any, enabled: bool = True, inputs: Any = ()) -> Any:
        forks.append(len(streams.auxiliary_streams(device, len(sides))))
        return main(), [side and side() for side in sides]

    monkeypatch.setattr(streams, "execute_in_parallel", execute)
    both, ids = made(CSA, (CSA,)), tokens(9)
    run = apart(both, projections="streams")
    check(run, both, ids)
    first = len(forks)
    check(run, both, ids)
    assert len(forks) == 2 * first >= 8
    assert max(forks) == FakeStream.made == streams.stream_count("cuda") == 3
    report = dsv4_compile.report()
    assert report.streams == report.to_dict()["streams"] == {"cuda:0": 3}
    assert "auxiliary streams of cuda:0: 3" in str(report)


@pytest.mark.gpu
@pytest.mark.parametrize("build", [apart, together])
def test_main_model_and_head_share_the_streams_of_the_card(build):
    both = made(CSA, (SLIDING, CSA), hidden=64).cuda()
    ids = tokens(24).cuda()
    check(build(both, projections="streams"), both, ids)
    assert all(0 < graph.streams <= 3 for graph in dsv4_compile.report().graphs)
    assert 0 < streams.stream_count(ids.device) <= 3
    assert dsv4_compile.report().streams[str(ids.device)] == streams.stream_count(ids.device)


# ------------------------------------------------------------------------------------------ the head of transformers


def test_head_that_transformers_makes_for_deepseek_v3():
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
    from transformers.modeling_layers import MtpModel

    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        num_mtp_layers=1,
    )
    model = DeepseekV3ForCausalLM(config).eval()
    head = MtpModel(model, 1).eval()
    for part in (model, head):
        part.set_experts_implementation("grouped_mm")
        for parameter in part.parameters():
            nn.init.ones_(parameter)
        randomise(part)
    ids = tokens(9)
    with torch.no_grad():
        residual = model(ids, use_cache=False, output_hidden_states=True).hidden_states[-1]
        arguments = {
            "input_ids": ids.roll(-1, 1),
            "last_hidden_states": residual,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.arange(9)[None],
            "mtp_cache": None,
        }
        token, logits, _ = head(**arguments)
        compiled = torch.compile(
            head, backend="dsv4", options={"compiler": "eager", "projections": "pack", "mhc": "off"}
        )
        token_out, logits_out, _ = compiled(**arguments)
    assert torch.equal(token_out, token)
    assert error(logits_out, logits.double()) < 1e-5
    (graph,) = dsv4_compile.report().graphs
    assert [(g.site, [linear.name for linear in g.linears]) for g in graph.projections] == [
        ("layers.0.mtp_block.self_attn", ["q_a_proj", "kv_a_proj_with_mqa"]),
        ("layers.0.mtp_block.mlp", MLP),
    ]
    assert graph.missed == []
