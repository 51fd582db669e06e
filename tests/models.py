"""Models small enough to be compiled in a test: DeepSeek-V4 and Qwen with real layers and random weights."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["CSA", "FULL", "HCA", "LINEAR", "SLIDING", "VOCABULARY", "deepseek", "qwen", "randomise"]

SLIDING = "sliding_attention"
CSA = "compressed_sparse_attention"
HCA = "heavily_compressed_attention"

LINEAR = "linear_attention"
FULL = "full_attention"

VOCABULARY = 128


def deepseek(
    layers: tuple[str, ...] = (SLIDING, CSA, HCA),
    *,
    hidden: int = 32,
    rates: tuple[int, int] = (4, 8),
    window: int = 8,
    iters: int = 4,
    hash_layers: int = 1,
    experts: str = "grouped_mm",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    index_heads: int = 2,
    index_topk: int = 2,
) -> nn.Module:
    """transformers' `DeepseekV4ForCausalLM`, untouched but for its size, ready for `torch.compile`.

    Every parameter that transformers initialises to zeros or ones, and the table of the hash router, gets random
    values: otherwise a wrong index or a lost term would not show.

    Args:
        layers: attention type of each layer.
        hidden: width of the residual streams.
        rates: tokens in one compressed entry, of CSA and of HCA.
        window: tokens in the sliding window.
        iters: Sinkhorn iterations; few make few nodes.
        hash_layers: how many of the first layers route by the table, the others by top-k.
        index_heads: of the indexer; with few of them scores are often tied at zero.
        index_topk: compressed entries that a query attends to.
        experts: how transformers runs them; "grouped_mm" and "batched_mm" can be traced, and the latter takes float64.
    """
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.manual_seed(seed)
    config = DeepseekV4Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        moe_intermediate_size=16,
        num_hidden_layers=len(layers),
        num_attention_heads=4,
        head_dim=16,
        q_lora_rank=32,
        num_experts_per_tok=2,
        n_routed_experts=4,
        max_position_embeddings=512,
        layer_types=list(layers),
        mlp_layer_types=["hash_moe" if i < hash_layers else "moe" for i in range(len(layers))],
        compress_rates={CSA: rates[0], HCA: rates[1]},
        sliding_window=window,
        o_groups=2,
        o_lora_rank=8,
        index_n_heads=index_heads,
        index_head_dim=8,
        index_topk=index_topk,
        partial_rotary_factor=0.25,
        hc_sinkhorn_iters=iters,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = DeepseekV4ForCausalLM(config).eval()
    model.set_experts_implementation(experts)
    randomise(model)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                rows = [torch.randperm(config.n_routed_experts)[: config.num_experts_per_tok] for _ in buffer]
                buffer.copy_(torch.stack(rows))
            elif name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
    return model.to(dtype)


def qwen(
    family: str = "qwen3_next",
    layers: tuple[str, ...] = (LINEAR, FULL),
    *,
    moe: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> nn.Module:
    """transformers' causal model of Qwen3-Next or Qwen3.5, untouched but for its size, with random parameters.

    Args:
        family: "qwen3_next" (one projection for queries, keys, values and gates, one for the rest) or "qwen3_5" (four).
        layers: attention type of each layer.
        moe: routed experts and a shared one in each layer, else a plain MLP.
    """
    import transformers

    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": len(layers),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "max_position_embeddings": 512,
        "layer_types": list(layers),
    }
    plain = {"intermediate_size": 48}
    experts = {
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    if family == "qwen3_next":
        config = transformers.Qwen3NextConfig(**sizes, **plain, **experts)
        config.mlp_only_layers = [] if moe else list(range(len(layers)))
        model = transformers.Qwen3NextForCausalLM(config)
    elif moe:
        model = transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**sizes, **experts))
    else:
        model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**sizes, **plain))
    if moe:
        model.set_experts_implementation("grouped_mm")
    randomise(model)
    return model.eval().to(dtype)


def randomise(model: nn.Module) -> None:
    """Random values in every parameter, also where a model begins with zeros or ones: a lost term then shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
