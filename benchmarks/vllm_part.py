"""One part of `vllm_engine.py`, in a process of its own: an engine of vLLM, or replays of its mHC operator and ours.

    PYTHONPATH=. python benchmarks/vllm_part.py VARIANT MODEL_FOLDER --batches 1,8

Says so when it has started and every kernel has run; then answers each line it reads with what it has found for that
batch: "first 8" (tokens, or the replays), "time 8" (one round), "profile 8". While it measures it holds the lock
`LOCK`, so that no other part measures.

Weights are random, in the scales of a trained network: vLLM's own dummy weights are so small that most of them are zero
in fp8, and a model of them does little but copy its embeddings. With a purely random product with the vocabulary, the
two best of 129280 tokens are often as near to each other as roundings of bfloat16 move them, and any other order of
additions makes other tokens. So `--sure` adds so many times the embedding of the token before it (in a random order of
all tokens) to the weights of each token: the larger, the farther the best token leads, and the less its choice tells.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parts import say  # beside this script
from vllm_models import FLASH

SHORT, LONG, PROFILED, PROMPT = 8, 72, 16, 64
MHC_KERNEL = re.compile(r"^(?!triton_).*(?:mhc|hc_prenorm|hc_head)", re.IGNORECASE)
LOCK = Path(tempfile.gettempdir(), "dsv4-vllm_engine.lock")
KV_CACHE_BYTES = 4 << 30  # said outright: vLLM would measure what others allocate meanwhile


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", help="vllm, dsv4 or replay")
    parser.add_argument("folder", help="with the config.json of a model")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--sure", type=float, default=0.2)
    args = parser.parse_args()
    batches = [int(b) for b in args.batches.split(",")]
    begun = time.monotonic()
    if args.part == "replay":
        for batch in batches:
            boundary(batch)  # compiles
        work: dict[str, Callable[[int], dict[str, Any]]] = {"first": replay}
        found: dict[str, Any] = {}
    else:
        llm = engine(args.part, args.folder, batches, args.sure)
        for batch in batches:  # kernels that are compiled at their first use
            generate(llm, batch, LONG, logprobs=2)
        found = {"compile_seconds": float(llm.llm_engine.vllm_config.compilation_config.compilation_time)} | what_ran()
        work = {"first": functools.partial(answers, llm), "time": functools.partial(timed, llm)}
        work["profile"] = functools.partial(profiled, llm)
    say({"start_seconds": time.monotonic() - begun, **found})
    from filelock import FileLock

    for line in sys.stdin:
        what, number = line.split()
        with FileLock(LOCK):
            say(work[what](int(number)))
    sys.stdout.flush()
    os._exit(0)  # taking an engine down takes long, and nobody waits for it


# -------------------------------------------------------------------------------------------------------------- engine


def engine(part: str, folder: str, batches: list[int], sure: float) -> Any:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the profiler sees this process only
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_DEEP_GEMM_WARMUP", "skip")
    if part == "vllm":
        os.environ["DSV4_VLLM"] = "0"
    import torch
    from vllm import LLM
    from vllm.model_executor.models import registry

    Weights.replace_dummies(sure)
    # It would look at the model's class in a process of its own, which takes half a minute to import everything.
    registry._run_in_subprocess = lambda look: look()
    compilation: dict[str, Any] = {"mode": 3}
    if torch.cuda.is_available():
        compilation["cudagraph_capture_sizes"] = sorted({1, 2, 4, *batches})
    if part == "dsv4":
        compilation["inductor_passes"] = {"post_grad_custom_post_pass": "dsv4_compile.post_grad_pass"}
    more: dict[str, Any] = {}
    if json.loads(Path(folder, "config.json").read_text())["model_type"] == "qwen3_next":
        more["gdn_prefill_backend"] = "triton"  # FlashInfer need not be there
    else:
        more |= {"kv_cache_dtype": "fp8", "block_size": 256}  # what vLLM has kernels for
    return LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=max(batches),
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.1,  # of which it makes sure only; KV_CACHE_BYTES decides
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        seed=0,
        compilation_config=compilation,
        **more,
    )


class Weights:
    """Random weights of one model, in place of vLLM's dummy weights."""

    loads = 0
    """How many models were given such weights."""

    def __init__(self, sure: float) -> None:
        self.sure = sure
        self.done: set[int] = set()
        self.count = 0
        self.embedding: Any = None

    @classmethod
    def replace_dummies(cls, sure: float) -> None:
        """From now on each model that is loaded with `load_format="dummy"` gets weights of its own, always the same."""
        from vllm.model_executor.model_loader import dummy_loader

        loader = dummy_loader.DummyModelLoader
        load = loader.load_weights

        def load_weights(self: Any, model: Any, model_config: Any) -> None:
            weights = cls(sure)
            if hasattr(dummy_loader, "initialize_dummy_weights"):  # 0.22: for the model, or for each of its modules
                dummy_loader.initialize_dummy_weights = lambda module, *_: weights(module)
                load(self, model, model_config)
            else:
                weights(model)
            cls.loads += weights.count > 0

        loader.load_weights = load_weights

    def __call__(self, module: Any) -> None:
        for one in module.modules():
            if id(one) in self.done:
                continue
            self.done.add(id(one))
            tensors = dict(one.named_parameters(recurse=False))
            for name, tensor in tensors.items():
                self.count += 1
                self._fill(type(one).__name__, name, tensor.data)

    def _fill(self, kind: str, name: str, tensor: Any) -> None:
        import torch

        if tensor.device.type == "meta":
            return
        generator = torch.Generator(tensor.device).manual_seed(self.count)
        if name == "tid2eid":  # experts by token
            tensor.random_(0, FLASH["n_routed_experts"], generator=generator)
        elif tensor.is_floating_point():
            dtype = torch.float16 if tensor.element_size() < 2 else torch.float32
            noise = torch.randn(tensor.shape, dtype=dtype, device=tensor.device, generator=generator)
            values = _scaled(noise, kind, name, is_fp8=tensor.element_size() < 2)
            if kind == "VocabParallelEmbedding":
                self.embedding = tensor
            elif kind == "ParallelLMHead" and self.embedding is not None:
                order = torch.randperm(len(values), device=tensor.device, generator=generator)
                values += self.sure * self.embedding[order] / values.shape[-1] ** 0.5
            tensor.copy_(values)


def _scaled(noise: Any, kind: str, name: str, is_fp8: bool) -> Any:
    """Standard normal values as what a parameter holds, so that activations keep a size of about one."""
    if name.startswith("hc_") and name.endswith("scale"):
        return 0.5 + 0.1 * noise
    if "scale" in name:  # of a block of 128 x 128 weights; a power of two
        one = noise.numel() == 1
        return noise.fill_(1.0 if one else 2.0 ** round(-math.log2(128 * noise.shape[-1]) / 2))
    if is_fp8 or kind == "VocabParallelEmbedding":
        return noise
    if noise.dim() >= 2:
        return noise / noise.shape[-1] ** 0.5
    return 0.1 * noise + (1.0 if "Norm" in kind and "Gemma" not in kind else 0.0)


def what_ran() -> dict[str, Any]:
    """The sites of the reports, counted; empty where our pass was not asked for."""
    counts: dict[str, dict[str, int]] = {"mhc": {}, "projections": {}, "missed": {}}
    for graph in graphs():
        for kind, names in (
            ("mhc", [f"{s.form} {s.kernel}" for s in graph.mhc]),
            ("projections", [f"{'+'.join(x.name for x in g.linears)} {g.strategy}" for g in graph.projections]),
            ("missed", [m.reason for m in graph.missed]),
        ):
            for name in names:
                counts[kind][name] = counts[kind].get(name, 0) + 1
    return counts


def chosen() -> list[dict[str, Any]]:
    """What the measured strategies of projections came to, each once."""
    found = [
        {
            "linears": [linear.name for linear in group.linears],
            "tokens": choice.tokens,
            "strategy": choice.strategy,
            "source": choice.source,
            "microseconds": dict(choice.microseconds),
        }
        for graph in graphs()
        for group in graph.measured()
        for choice in group.measured
    ]
    return [choice for i, choice in enumerate(found) if choice not in found[:i]]


def graphs() -> list[Any]:
    if "dsv4_compile" not in sys.modules:
        return []
    import dsv4_compile

    return [graph for report in dsv4_compile.reports() for graph in report.graphs]


# ----------------------------------------------------------------------------------------------------------- measuring


def generate(llm: Any, batch: int, tokens: int, **more: Any) -> tuple[float, list[Any]]:
    """Seconds, and the output of each of `batch` prompts."""
    from vllm import SamplingParams

    vocabulary = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    prompts = [{"prompt_token_ids": [(7 + 31 * r + 13 * i) % vocabulary for i in range(PROMPT)]} for r in range(batch)]
    sampling = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True, **more)
    begun = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - begun, [output.outputs[0] for output in outputs]


def answers(llm: Any, batch: int) -> dict[str, Any]:
    """The tokens of each prompt, with the logarithms of the two best probabilities of each step."""
    first, again = (generate(llm, batch, LONG, logprobs=2)[1] for _ in range(2))
    rows = [list(output.token_ids) for output in first]
    best = [[sorted((x.logprob for x in step.values()), reverse=True)[:2] for step in row.logprobs] for row in first]
    same = sum(a == list(b.token_ids) for a, b in zip(rows, again, strict=True))
    return {"rows": rows, "best": best, "same_again": same, "chosen": chosen()}


def timed(llm: Any, batch: int) -> dict[str, Any]:
    """Milliseconds of a token of the whole batch, once."""
    return {"ms": 1e3 * (generate(llm, batch, LONG)[0] - generate(llm, batch, SHORT)[0]) / (LONG - SHORT)}


def profiled(llm: Any, batch: int) -> dict[str, Any]:
    """Microseconds of mHC's kernels and of all kernels in one step of decoding: what `PROFILED` more tokens cost."""
    import torch

    if not torch.cuda.is_available():
        return {"profile": "none without a GPU"}
    (few, few_count), (many, many_count) = (_kernels(llm, batch, n) for n in (2, 2 + PROFILED))
    step = {name: (many[name] - few.get(name, 0.0)) / PROFILED for name in many}
    calls = {name: (many_count[name] - few_count.get(name, 0)) / PROFILED for name in many}
    ours = sorted(name for name in step if MHC_KERNEL.search(name))
    return {
        "mhc_us": sum(step[name] for name in ours),
        "kernel_us": sum(step.values()),
        "kernels": sum(calls.values()),
        "mhc_kernels": {name[:80]: {"us": step[name], "calls": calls[name]} for name in ours},
        "longest": {name[:80]: step[name] for name in sorted(step, key=lambda name: -step[name])[:8]},
    }


def _kernels(llm: Any, batch: int, tokens: int) -> tuple[dict[str, float], dict[str, int]]:
    """Time and number of each kernel in one generation."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        generate(llm, batch, tokens)
        torch.cuda.synchronize()
    events = [e for e in profile.key_averages() if e.self_device_time_total]
    return {e.key: e.self_device_time_total for e in events}, {e.key: e.count for e in events}


def boundary(tokens: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Calls of vLLM's fused boundary (0.22 to 0.26) and of ours, on the same inputs."""
    import torch
    import vllm.model_executor.layers.mhc  # noqa: F401  (registers its operators)

    from dsv4_compile.kernels.mhc import operators  # noqa: F401

    n, hidden, device = 4, FLASH["hidden_size"], "cuda"
    logits = (2 + n) * n
    generator = torch.Generator(device).manual_seed(0)

    def draw(*dims: int) -> torch.Tensor:
        return torch.randn(dims, device=device, generator=generator)

    x, residual = draw(tokens, hidden).bfloat16(), draw(tokens, n, hidden).bfloat16()
    post, comb = draw(tokens, n).sigmoid(), draw(tokens, n, n).softmax(-1)
    fn, scale, base = draw(logits, n * hidden) / (n * hidden) ** 0.5, draw(3).abs(), draw(logits)
    weight = draw(hidden).bfloat16()
    theirs, own = torch.ops.vllm.mhc_fused_post_pre_tilelang, torch.ops.dsv4.mhc_post_pre
    numbers = (1e-6, 1e-6, 1e-6, 2.0)
    dtypes = (torch.bfloat16, torch.bfloat16)

    def vllm_call() -> Any:
        return theirs(x, residual, post.unsqueeze(-1), comb, fn, scale, base, *numbers, 20, 1, 1, weight, 1e-6)

    def dsv4_call() -> Any:
        return own(x, residual, post, comb, fn, scale, base, weight, 20, *numbers, 1e-6, *dtypes, "auto")

    with torch.inference_mode():
        vllm_call(), dsv4_call()
    return vllm_call, dsv4_call


def replay(tokens: int) -> dict[str, Any]:
    """Both on the same inputs, microseconds in CUDA graphs that are replayed in turns."""
    import torch
    from graph_timing import side_by_side  # beside this script

    vllm_call, dsv4_call = boundary(tokens)
    with torch.inference_mode():
        times = side_by_side({"vllm": [vllm_call] * 20, "dsv4": [dsv4_call] * 20})
        a, b = vllm_call(), dsv4_call()
    pairs = {"residual": (a[0], b[0]), "row": (a[3], b[1]), "post": (a[1].squeeze(-1), b[2]), "comb": (a[2], b[3])}
    difference = {k: float((p.float() - q.float()).norm() / p.float().norm()) for k, (p, q) in pairs.items()}
    return {"microseconds": times, "relative_difference": difference}


if __name__ == "__main__":
    main()
