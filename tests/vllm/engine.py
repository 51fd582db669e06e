"""Starts real engines of vLLM in this process, one after the other, and prints what came of each as a line of JSON.

    python tests/vllm/engine.py MODEL '[{"compilation": {"mode": 2}, "additional": {}, "plain": true}, ...]'

MODEL is a folder with a tiny model; `plain` keeps its linears as `torch.nn.functional.linear`, as they are on a GPU
(vLLM's CPU platform packs weights for kernels of its own); `piecewise` keeps mode 3, which that platform turns into 2;
`seeing` is for a language model whose file in vLLM holds its relative with eyes as well; `engine` has
arguments of `LLM`; `deepseek`, in all runs of the process or in none, is for the model of `deepseek.py`.
"""

from __future__ import annotations

import gc
import importlib.machinery
import json
import os
import re
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

# What is patched and read here is in the process of the engine.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

PROMPTS = ([3, 5, 7, 11, 13], [200, 3, 9])
MARK = "RESULT "


# vLLM's pass behind all others compares nodes with these operators of its CUDA build.
CUDA_ONLY = (
    "fused_add_rms_norm_static_fp8_quant",
    "rms_norm_dynamic_per_token_quant",
    "rms_norm_static_fp8_quant",
    "silu_and_mul_quant",
    "fused_qk_norm_rope",
)
_libraries: list[Any] = []


def name_cuda_operators() -> None:
    """Lets vLLM's passes name operators that its CPU build lacks; nothing calls them."""
    import torch

    for name in CUDA_ONLY:
        if not hasattr(torch.ops._C, name):
            library = torch.library.Library("_C", "FRAGMENT")
            library.define(f"{name}() -> ()")
            _libraries.append(library)


def name_torchvision() -> None:
    """Lets modules that process images be imported without torchvision, whose builds on PyPI want another torch."""
    from transformers.utils import is_torchvision_available
    from vllm.model_executor.models import registry

    if is_torchvision_available():  # and it is kept for later that it is not
        return
    outer = None
    for name in ("torchvision", "transforms", "v2", "functional"):
        path = f"{outer.__name__}.{name}" if outer else name
        module = types.ModuleType(path)
        module.__path__, module.__spec__ = [], importlib.machinery.ModuleSpec(path, None, is_package=True)
        sys.modules[path] = module
        if outer:
            setattr(outer, name, module)
        outer = module
    registry._run_in_subprocess = lambda look: look()  # it would look at the model's class in another process


@contextmanager
def patched(run: Mapping[str, Any]) -> Iterator[None]:
    """vLLM as `run` wants it."""
    import torch
    from vllm.config import CompilationMode
    from vllm.model_executor.layers import utils
    from vllm.platforms.cpu import CpuPlatform

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    update = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def piecewise(cls: type, config: Any) -> None:
        mode, backend = config.compilation_config.mode, config.compilation_config.backend
        update(cls, config)
        config.compilation_config.mode, config.compilation_config.backend = CompilationMode(mode), backend

    if run.get("piecewise"):
        name_cuda_operators()
    if run.get("seeing"):
        name_torchvision()
    linears = plain if run.get("plain") else utils.dispatch_cpu_unquantized_gemm
    platform = classmethod(piecewise if run.get("piecewise") else update)
    with (
        mock.patch.dict(os.environ, run.get("environment", {})),
        mock.patch.object(utils, "dispatch_cpu_unquantized_gemm", linears),
        mock.patch.object(CpuPlatform, "check_and_update_config", platform),
    ):
        yield


def generate(model: str, run: Mapping[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    before = loaded()
    arguments = {"max_model_len": 128, "max_num_batched_tokens": 128, **run.get("engine", {})}
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        max_num_seqs=4,
        dtype=run.get("dtype", "bfloat16"),
        seed=0,
        **arguments,
        compilation_config=dict(run["compilation"]),
        additional_config=dict(run.get("additional", {})),
    )
    sampling = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True, logprobs=2)
    outputs = llm.generate([{"prompt_token_ids": list(p)} for p in PROMPTS], sampling, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    best = [[sorted(x.logprob for x in step.values())[-2:] for step in o.outputs[0].logprobs] for o in outputs]
    mode = int(llm.llm_engine.vllm_config.compilation_config.mode)
    del llm
    return {"tokens": tokens, "best": best, "mode": mode, "operators": sorted(loaded() - before), "reports": reports()}


_seen = 0


def reports() -> list[dict[str, Any]]:
    """The reports since the last time."""
    global _seen
    if "dsv4_compile" not in sys.modules:
        return []
    import dsv4_compile

    found = [report.to_dict() for report in dsv4_compile.reports()]
    new, _seen = found[_seen:], len(found)
    return new


def loaded() -> set[str]:
    """`module:operator` for each operator of ours in code of Inductor that this process has loaded."""
    from torch._inductor.codecache import PyCodeCache

    found = set()
    for module in PyCodeCache.modules:
        with open(module.__file__) as file:
            names = re.findall(r"dsv4\.(\w+)\.default", file.read())
        found |= {f"{os.path.basename(module.__file__)}:{name}" for name in names}
    return found


def main() -> None:
    model, runs = sys.argv[1], json.loads(sys.argv[2])
    if any(run.get("deepseek") for run in runs):
        import deepseek  # beside this script

        deepseek.prepare()
    for run in runs:
        with patched(run):
            print(MARK + json.dumps(generate(model, run)), flush=True)
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
        gc.collect()


if __name__ == "__main__":
    main()
