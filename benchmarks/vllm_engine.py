"""vLLM with and without our pass, side by side in one run: a 4-layer DeepSeek-V4 of Flash's widths, and a Qwen3-Next.

    PYTHONPATH=. python benchmarks/vllm_engine.py                               # everything, on a GPU
    PYTHONPATH=. python benchmarks/vllm_engine.py --models qwen3_next --batches 1
    PYTHONPATH=. python benchmarks/vllm_engine.py --models deepseek_v4 --tiny   # small widths, to see whether it runs

What is measured, for batches of 1, 8 and 32 prompts of 64 tokens, greedy, random weights, mode 3 with CUDA graphs:

- `ms`: time per output token, of a whole batch: the difference between generating many tokens and few, over the
  difference of the numbers; median of several rounds, in which the variants take turns.
- `mhc_us`, `kernel_us`: time of the kernels of mHC, and of all kernels, in one step of decoding, from a profile.
- `replay`: vLLM's fused operator and ours on the same inputs, in turns, from replays of a CUDA graph.
- `tokens`: how many rows are the same with the pass and without it. Both round, in other places; where two rows part,
  how near the two best tokens were, and how far the same step's best logarithms of probability are apart before that.

Starting an engine takes minutes of one processor, so all parts start together, each in a process with caches of its own
(`vllm_part.py`), and measure in turns when all have started; seconds of starts and of compilation are those beside the
others. A part that fails, or has not started in `--start` seconds, costs its own numbers and no others; results are
written as they come. Written for vLLM 0.22.1, the last release that compiles DeepSeek-V4 on NVIDIA; others say what
they lack.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from parts import Part  # beside this script
from vllm_models import MODELS, TINY

VARIANTS, ROUNDS = ("vllm", "dsv4"), 15
KEPT_ROWS, KEPT_TOKENS = 2, 24  # of each variant in the results
OWN_CACHES = (
    "VLLM_CACHE_ROOT",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TILELANG_CACHE_DIR",
    "DG_JIT_CACHE_DIR",
    "XDG_CACHE_HOME",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--sure", type=float, default=0.2, help="how far the best token leads (vllm_part.py)")
    parser.add_argument("--no-replay", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--start", type=int, default=420, help="seconds for all to start")
    parser.add_argument("--timeout", type=int, default=90, help="seconds for each measurement")
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder of the logs and of vllm_engine.json")
    parser.add_argument("--caches", help="folder of the parts' caches; by default one that is removed")
    parser.add_argument("--json", type=Path, help="file for the results instead")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        parts = launched(args, args.caches or folder)
        try:
            data = measured(parts, args)
        finally:
            for part in parts:
                part.close()
    print(table(data))


def launched(args: argparse.Namespace, folder: str) -> list[EnginePart]:
    """Every part, before it has started."""
    wanted = []
    for model in args.models.split(","):
        own = Path(folder, model)
        own.mkdir(parents=True, exist_ok=True)
        (own / "config.json").write_text(json.dumps(MODELS[model] | (TINY[model] if args.tiny else {})))
        is_replayed = model == "deepseek_v4" and not args.no_replay
        wanted += [(model, kind, str(own)) for kind in (*args.variants.split(","), *["replay"] * is_replayed)]
    return [EnginePart(model, kind, i, own, args) for i, (model, kind, own) in enumerate(wanted)]


class EnginePart(Part):
    """A process of `vllm_part.py`, with caches of its own. Its log is `vllm_engine-MODEL-KIND.log` in `--out`."""

    def __init__(self, model: str, kind: str, number: int, folder: str, args: argparse.Namespace) -> None:
        self.model, self.kind = model, kind
        own = {variable: str(Path(folder, f"{kind}-{variable.lower()}")) for variable in OWN_CACHES}
        script = str(Path(__file__).with_name("vllm_part.py"))
        command = [sys.executable, script, kind, folder, "--batches", args.batches, "--sure", str(args.sure)]
        log = Path(args.out, f"vllm_engine-{model}-{kind}.log")
        super().__init__(f"{model} {kind}", command, log, own | {"VLLM_PORT": str(21000 + 500 * number)})


def measured(parts: list[EnginePart], args: argparse.Namespace) -> dict[str, Any]:
    """The results, of one part after the other, written whenever there are more."""
    batches = [int(b) for b in args.batches.split(",")]
    data: dict[str, Any] = {"environment": {}, "method": "see benchmarks/vllm_engine.py", "starts": {}}
    data |= {"rows": {}, "tokens": {}, "replay": {}, "failed": {}}
    begun = time.monotonic()

    def take(kind: str, name: str, part: EnginePart, found: dict[str, Any]) -> None:
        if found:
            data[kind].setdefault(name, {}).setdefault(part.kind, {}).update(found)
        if part.failed:
            data["failed"][part.name] = part.failed
        save(data, args)
        words = part.failed or ", ".join(
            f"{key} {value:.4g}" for key, value in found.items() if isinstance(value, float)
        )
        print(f"{time.monotonic() - begun:4.0f} s: {name}, {part.kind}: {words}", file=sys.stderr, flush=True)

    for part in parts:
        take("starts", part.model, part, part.next(begun + args.start - time.monotonic()))
    data["environment"] = environment()
    engines = [part for part in parts if part.kind != "replay"]
    for batch in batches:
        for part in parts:
            kind, name = ("rows", f"{part.model} batch {batch}") if part in engines else ("replay", str(batch))
            take(kind, name, part, part.ask(f"first {batch}", args.timeout))
        rounds: dict[str, list[float]] = {part.name: [] for part in engines}
        for _ in range(ROUNDS):
            for part in engines:
                rounds[part.name] += part.ask(f"time {batch}", args.timeout).values()
        for part in engines:
            if times := rounds[part.name]:
                found = {"ms": statistics.median(times), "ms_all": times}
                take("rows", f"{part.model} batch {batch}", part, found)
    for batch in batches:  # last, because the profiler may leave something behind
        for part in engines:
            take("rows", f"{part.model} batch {batch}", part, part.ask(f"profile {batch}", args.timeout))
    return data


def environment() -> dict[str, str]:
    import torch

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    found = {"card": card, "torch": torch.__version__}
    for package in ("vllm", "dsv4_compile"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def save(data: dict[str, Any], args: argparse.Namespace) -> None:
    """Writes the results; of the tokens only how many are the same, and the first of them."""
    kept = json.loads(json.dumps(data))
    for name, cells in kept["rows"].items():
        if set(VARIANTS) <= {variant for variant, cell in cells.items() if "best" in cell}:
            data["tokens"][name] = kept["tokens"][name] = compared(*(cells[variant] for variant in VARIANTS))
        for cell in cells.values():
            cell.pop("best", None)
            cell["rows"] = [row[:KEPT_TOKENS] for row in cell["rows"][:KEPT_ROWS]]
    path = args.json or Path(args.out, "vllm_engine.json")
    path.write_text(json.dumps(kept, indent=1) + "\n")


def compared(plain: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Tokens of both, row by row up to the first that differs: behind it the rows have other contexts."""
    steps, parted, apart, margins = 0, [], [], []
    for row, (a, b) in enumerate(zip(plain["rows"], ours["rows"], strict=True)):
        first = next((i for i, (p, q) in enumerate(zip(a, b, strict=True)) if p != q), len(a))
        steps += min(first + 1, len(a))
        best = [(plain["best"][row][i], ours["best"][row][i]) for i in range(min(first + 1, len(a)))]
        apart += [abs(p[0] - q[0]) for p, q in best]
        margins += [p[0] - p[1] for p, _ in best]
        if first < len(a):
            (p, q) = best[first]
            parted.append({"row": row, "step": first, "margins": [p[0] - p[1], q[0] - q[1]]})
    return {
        "rows": len(plain["rows"]),
        "same_rows": len(plain["rows"]) - len(parted),
        "steps": steps,
        "different_steps": len(parted),
        "parted": parted,
        "median_margin": statistics.median(margins),
        "median_apart": statistics.median(apart),
        "largest_apart": max(apart),
        "distinct_tokens": len({token for row in plain["rows"] for token in row}),
    }


def table(data: dict[str, Any]) -> str:
    lines = [
        "| model | ms/token: vLLM, dsv4 | mHC us/step | kernels us/step | same rows | other tokens | at margins to |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, cells in data["rows"].items():
        shown = [
            ", ".join(f"{cells[v][key]:.{digits}f}" if key in cells.get(v, {}) else "-" for v in VARIANTS)
            for key, digits in (("ms", 3), ("mhc_us", 1), ("kernel_us", 0))
        ]
        if same := data["tokens"].get(name):
            widest = max((max(p["margins"]) for p in same["parted"]), default=0.0)
            shown.append(f"{same['same_rows']} of {same['rows']}")
            shown += [f"{same['different_steps']} of {same['steps']}", f"{widest:.3f}"]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    lines += ["", "| mHC boundary, tokens | vLLM, us | dsv4, us | largest difference |", "|--:|--:|--:|--:|"]
    for tokens, cells in data["replay"].items():
        us, worst = cells["replay"]["microseconds"], max(cells["replay"]["relative_difference"].values())
        lines.append(f"| {tokens} | {us['vllm']:.1f} | {us['dsv4']:.1f} | {worst:.1e} |")
    for model, starts in data["starts"].items():
        for part, start in starts.items():
            words = {key: value for key, value in start.items() if value}
            lines.append(f"{model} {part}: {json.dumps(words)}")
    lines += [f"{name} failed: {why}" for name, why in data["failed"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
