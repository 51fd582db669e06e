"""vLLM with and without our pass, side by side in one run: a 4-layer DeepSeek-V4 of Flash's widths, and a Qwen3-Next.

    PYTHONPATH=. python benchmarks/vllm_engine.py                               # everything, on a GPU
    PYTHONPATH=. python benchmarks/vllm_engine.py --models qwen3_next --batches 1
    PYTHONPATH=. python benchmarks/vllm_engine.py --models deepseek_v4 --tiny   # small widths, to see whether it runs

What is measured, for batches of 1, 8 and 32 prompts of 64 tokens, greedy, dummy weights, mode 3 with CUDA graphs:

- `ms/token`: time per output token: the difference between generating `LONG` and `SHORT` tokens, over the difference of
  the numbers; median of `ROUNDS`.
- `mHC us/token`: time of the kernels of mHC in one step, added up by name from a profile of `PROFILED` tokens.
- `replay`: vLLM's fused operator and ours on the same inputs, in turns, from replays of a CUDA graph.
- `same tokens`: how many of the rows are the same with the pass and without it. Both round, in other places.

Each part runs in a process of its own with a time limit (where a command may take ten minutes: one model a call), and
its results are written as they come: what fails or hangs costs its own numbers and no others. The JSON goes to `--out`,
by default to $OUT. Written for vLLM 0.22.1, the last release that compiles DeepSeek-V4 on NVIDIA; others say what they
lack.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHORT, LONG, ROUNDS, PROFILED, PROMPT = 8, 72, 5, 16, 64
VARIANTS = ("vllm", "dsv4")
MHC_KERNEL = re.compile(r"mhc|hc_prenorm|hc_head", re.IGNORECASE)
REPLAYED = (1, 8, 32)
LINE = "RESULT "

FLASH = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "num_experts_per_tok": 6,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_hash_layers": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "sliding_window": 128,
    "compress_ratios": [0, 4, 128, 4],
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "tie_word_embeddings": False,
    "expert_dtype": "fp8",
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
QWEN = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000000.0,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 32,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MODELS: dict[str, dict[str, Any]] = {"deepseek_v4": FLASH, "qwen3_next": QWEN}
TINY: dict[str, dict[str, Any]] = {
    "deepseek_v4": {"vocab_size": 512, "n_routed_experts": 8},
    "qwen3_next": {
        "vocab_size": 256,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 32,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--no-replay", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--timeout", type=int, default=280, help="seconds for each part")
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--child", nargs=2, metavar=("PART", "MODEL_FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(*args.child, [int(b) for b in args.batches.split(",")])
        return
    results: list[dict[str, Any]] = []
    for name in args.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            settings = MODELS[name] | (TINY[name] if args.tiny else {})
            Path(folder, "config.json").write_text(json.dumps(settings))
            for part in [
                *args.variants.split(","),
                *(["replay"] if name == "deepseek_v4" and not args.no_replay else []),
            ]:
                for result in run_part(part, name, folder, args):
                    results.append(result)
                    save(results, args.out)
    print(table(results))


def run_part(part: str, name: str, folder: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The results of one part, as they come; when it fails, one that says so."""
    command = [sys.executable, __file__, "--child", part, folder, "--batches", args.batches]
    log = Path(args.out, f"vllm_engine-{name}-{part}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    begun, count = time.monotonic(), 0
    with log.open("w") as file, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True) as process:
        assert process.stdout is not None
        killer = _kill_after(process, args.timeout)
        for line in process.stdout:
            if line.startswith(LINE):
                count += 1
                yield {"model": name, "part": part, **json.loads(line.removeprefix(LINE))}
            else:
                file.write(line)
        process.wait()
        killer.cancel()
    if process.returncode != 0:
        seconds = time.monotonic() - begun
        why = "ran out of time" if seconds >= args.timeout else f"ended with {process.returncode}"
        yield {"model": name, "part": part, "failed": f"{why} after {seconds:.0f} s and {count} results: {_last(log)}"}


def _kill_after(process: subprocess.Popen[str], seconds: int) -> Any:
    import threading

    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    return timer


def _last(log: Path) -> str:
    """The last line that names an error."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if "rror" in line]
    return (lines or ["no error in its log"])[-1][-300:]


def save(results: list[dict[str, Any]], out: str) -> None:
    import torch

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    record = {"card": card, "torch": torch.__version__, "method": (__doc__ or "").splitlines()[0], "results": results}
    Path(out, "vllm_engine.json").write_text(json.dumps(record, indent=1) + "\n")


def child(part: str, folder: str, batches: list[int]) -> None:
    """One part, in this process: prints a line for each result."""
    if part == "replay":
        for tokens in REPLAYED:
            print(LINE + json.dumps({"tokens": tokens, **replay(tokens)}), flush=True)
        return
    begun = time.monotonic()
    llm = engine(part, folder, batches)
    print(LINE + json.dumps({"start_seconds": time.monotonic() - begun, **what_ran()}), flush=True)
    for batch in batches:
        print(LINE + json.dumps({"batch": batch, **measure(llm, batch)}), flush=True)


def engine(part: str, folder: str, batches: list[int]) -> Any:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the profiler sees this process only
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_DEEP_GEMM_WARMUP", "skip")
    import torch
    from vllm import LLM

    compilation: dict[str, Any] = {"mode": 3}
    if torch.cuda.is_available():
        compilation["cudagraph_capture_sizes"] = sorted({1, 2, 4, *batches})
    if part == "dsv4":
        compilation["inductor_passes"] = {"post_grad_custom_post_pass": "dsv4_compile.post_grad_pass"}
    else:
        os.environ["DSV4_VLLM"] = "0"
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
        gpu_memory_utilization=0.85,
        seed=0,
        compilation_config=compilation,
        **more,
    )


def what_ran() -> dict[str, Any]:
    """The sites of the reports, counted; empty where our pass was not asked for."""
    if "dsv4_compile" not in sys.modules:
        return {"mhc": {}, "projections": {}, "missed": {}}
    import dsv4_compile

    counts: dict[str, dict[str, int]] = {"mhc": {}, "projections": {}, "missed": {}}
    for graph in (g for report in dsv4_compile.reports() for g in report.graphs):
        for kind, names in (
            ("mhc", [f"{s.form} {s.kernel}" for s in graph.mhc]),
            ("projections", [g.strategy for g in graph.projections]),
            ("missed", [m.reason for m in graph.missed]),
        ):
            for name in names:
                counts[kind][name] = counts[kind].get(name, 0) + 1
    return dict(counts)


def measure(llm: Any, batch: int) -> dict[str, Any]:
    vocabulary = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    prompts = [{"prompt_token_ids": [(7 + 31 * r + 13 * i) % vocabulary for i in range(PROMPT)]} for r in range(batch)]

    def generate(tokens: int) -> tuple[float, list[list[int]]]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True)
        begun = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - begun, [list(o.outputs[0].token_ids) for o in outputs]

    _, rows = generate(LONG)
    times = [(generate(LONG)[0] - generate(SHORT)[0]) / (LONG - SHORT) for _ in range(ROUNDS)]
    return {"ms_per_token": 1e3 * statistics.median(times), "ms_all": [1e3 * t for t in times], "rows": rows} | (
        profiled(lambda: generate(PROFILED))
    )


def profiled(call: Any) -> dict[str, Any]:
    """Time of mHC's kernels and of all in one step, microseconds, and which kernels those of mHC were."""
    import torch

    if not torch.cuda.is_available():
        return {}
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
    except RuntimeError as error:
        return {"profile": f"none: {error}"}
    kernels = {e.key: e.self_device_time_total for e in profile.key_averages() if e.self_device_time_total}
    ours = {name: us for name, us in kernels.items() if MHC_KERNEL.search(name)}
    return {
        "mhc_us_per_token": sum(ours.values()) / PROFILED,
        "kernel_us_per_token": sum(kernels.values()) / PROFILED,
        "mhc_kernels": {name[:80]: us / PROFILED for name, us in ours.items()},
    }


def replay(tokens: int) -> dict[str, Any]:
    """vLLM's fused boundary (0.22 to 0.26) and ours on the same inputs, microseconds in a CUDA graph."""
    import torch
    import vllm.model_executor.layers.mhc  # noqa: F401  (registers its operators)
    from graph_timing import side_by_side  # beside this script

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
        times = side_by_side({"vllm": [vllm_call] * 20, "dsv4": [dsv4_call] * 20})
        a, b = vllm_call(), dsv4_call()
    pairs = {"residual": (a[0], b[0]), "row": (a[3], b[1]), "post": (a[1].squeeze(-1), b[2]), "comb": (a[2], b[3])}
    difference = {k: float((p.float() - q.float()).norm() / p.float().norm()) for k, (p, q) in pairs.items()}
    return {"microseconds": times, "relative_difference": difference}


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        "| model | batch | ms/token: vLLM, dsv4 | mHC us/token: vLLM, dsv4 | same tokens |",
        "|---|--:|--:|--:|--:|",
    ]
    found = {(r["model"], r["part"], r["batch"]): r for r in results if "batch" in r}
    for model, batch in dict.fromkeys((m, b) for m, _, b in found):
        plain, ours = (found.get((model, variant, batch), {}) for variant in VARIANTS)
        same = sum(p == q for p, q in zip(plain.get("rows", []), ours.get("rows", []), strict=False))
        cells = [
            ", ".join(f"{r[key]:.3f}" if key in r else "-" for r in (plain, ours))
            for key in ("ms_per_token", "mhc_us_per_token")
        ]
        lines.append(f"| {model} | {batch} | {cells[0]} | {cells[1]} | {same} of {batch} |")
    lines += ["", "| mHC boundary, tokens | vLLM, us | dsv4, us | largest difference |", "|--:|--:|--:|--:|"]
    for r in (r for r in results if "microseconds" in r):
        us, worst = r["microseconds"], max(r["relative_difference"].values())
        lines.append(f"| {r['tokens']} | {us['vllm']:.1f} | {us['dsv4']:.1f} | {worst:.1e} |")
    lines += [f"{r['model']} {r['part']}: {r['failed']}" for r in results if "failed" in r]
    lines += [f"{r['model']} {r['part']} replaced: {r['mhc']} {r['projections']}" for r in results if "mhc" in r]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
