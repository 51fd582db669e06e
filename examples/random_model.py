"""A `transformers` DeepSeek-V4 with random weights, for the examples and benchmarks/model.py: nothing is downloaded.

`FLASH` names the widths of DeepSeek-V4-Flash (they are the defaults of `DeepseekV4Config`) with 32 instead of 256
experts, so that four layers fit on one card; `TINY` is for a CPU. What a fresh model sets to zero (biases of the mixing
logits, sinks, the table of the hash router) is drawn at random here: a zero would hide an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

__all__ = ["FLASH", "TINY", "random_model"]

FLASH: dict[str, Any] = {"n_routed_experts": 32, "max_position_embeddings": 8192}
TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 64,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "max_position_embeddings": 2048,
    "o_groups": 2,
    "o_lora_rank": 32,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 8,
    "partial_rotary_factor": 0.25,
}
LAYER_TYPES = {
    "sliding": "sliding_attention",
    "csa": "compressed_sparse_attention",
    "hca": "heavily_compressed_attention",
}


def random_model(
    sizes: Mapping[str, Any], layers: Sequence[str], device: str = "cpu", dtype: torch.dtype = torch.float32
) -> DeepseekV4ForCausalLM:
    """A model for inference, the same one at every call.

    Args:
        sizes: `TINY`, `FLASH` or other arguments of `DeepseekV4Config`.
        layers: kind of attention of each layer: "sliding", "csa" or "hca". The first MLP is routed by a hash of the
            token, the others by their gate.
        dtype: of the weights; those of the hyper-connections stay in float32, as in DeepSeek's checkpoints.
    """
    torch.manual_seed(0)
    config = DeepseekV4Config(
        **sizes,
        num_hidden_layers=len(layers),
        layer_types=[LAYER_TYPES[kind] for kind in layers],
        mlp_layer_types=["hash_moe", *["moe"] * (len(layers) - 1)],
    )
    with torch.device(device):
        model = DeepseekV4ForCausalLM(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith(("base", "sinks", "position_bias")):
            parameter.normal_(0, 0.5)
        elif name.endswith("fn"):
            parameter.normal_(0, config.hidden_size**-0.5)
    model.model.layers[0].mlp.gate.tid2eid.random_(0, config.n_routed_experts)
    model.to(dtype)
    for name, module in model.named_modules():
        if name.endswith(("attn_hc", "ffn_hc", "hc_head")):
            module.float()
    # The default, a Python loop over the experts that were chosen, depends on the data and cannot be in a graph.
    model.set_experts_implementation("grouped_mm")
    return model
