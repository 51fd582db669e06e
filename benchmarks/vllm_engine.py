"""vLLM with and without our pass, side by side in one run: a 4-layer DeepSeek-V4 of Flash's widths, and a Qwen3-Next.

    PYTHONPATH=. python benchmarks/vllm_engine.py                               # everything, on a GPU
    PYTHONPATH=. python benchmarks/vllm_engine.py --models qwen3_next --batches 1
    PYTHONPATH=. python benchmarks/vllm_engine.py --models deepseek_v4 --tiny   # small widths, to see whether it runs

What is measured, for batches of 1, 8 and 32 prompts of 64 tokens, greedy, random weights, mode 3 with CUDA graphs:

- `ms`: time per output token, of a whole batch: the difference between generating many tokens and few, over the
  difference of the numbers; median of several.
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
import contextlib
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vllm_models import MODELS, TINY  # beside this script
from vllm_part import LINE

VARIANTS = ("vllm", "dsv4")
KEPT_ROWS, KEPT_TOKENS = 2, 24  # of each variant in the results
OWN_CACHES = (
    "VLLM_CACHE_ROOT",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TILELANG_CACHE_DIR",
    "DG_JIT_CACHE_DIR",
    "XDG_CACHE_HOME",
)


class Part:
    """A process of `vllm_part.py`. Its log is `vllm_engine-NAME.log` in the folder `out`."""

    def __init__(self, model: str, part: str, number: int, folder: str, args: argparse.Namespace) -> None:
        self.model, self.part, self.name = model, part, f"{model} {part}"
        self.failed = ""
        self.begun = time.monotonic()
        self.results: queue.Queue[dict[str, Any] | None] = queue.Queue()
        own = {variable: str(Path(folder, f"{part}-{variable.lower()}")) for variable in OWN_CACHES}
        script = str(Path(__file__).with_name("vllm_part.py"))
        self.log = Path(args.out, f"vllm_engine-{model}-{part}.log")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, script, part, folder, "--batches", args.batches],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("a"),
            env=os.environ | own | {"VLLM_PORT": str(21000 + 500 * number)},
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.log.open("a") as log:
            for line in self.process.stdout:
                log.write(line)
                log.flush()
                if line.startswith(LINE):
                    self.results.put(json.loads(line.removeprefix(LINE)))
        self.results.put(None)

    def ask(self, what: str, number: int, seconds: float) -> dict[str, Any]:
        """What it measures for a batch of `number`, "time" or "profile"; empty where it failed."""
        if self.failed:
            return {}
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, which `next` reports
            print(what, number, file=self.process.stdin, flush=True)
        return self.next(seconds)

    def next(self, seconds: float) -> dict[str, Any]:
        """The next result; empty where it failed or none comes in time, and then the process is ended."""
        try:
            found = self.results.get(timeout=max(0.0, seconds))
        except queue.Empty:
            found, why = None, "ran out of time"
        else:
            why = f"ended: {self._error()}"
        if found is None:
            self.close()
            self.failed = f"after {time.monotonic() - self.begun:.0f} s it {why}"
        return found or {}

    def _error(self) -> str:
        """The last line of its log that names an error."""
        lines = self.log.read_text(errors="replace").splitlines()
        errors = [line.strip() for line in lines if "rror" in line and "WARNING" not in line]
        return (errors or ["no error in its log"])[-1][-300:]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--variants", default=",".join(VARIANTS))
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


def launched(args: argparse.Namespace, folder: str) -> list[Part]:
    """Every part, before it has started."""
    wanted = []
    for model in args.models.split(","):
        own = Path(folder, model)
        own.mkdir(parents=True, exist_ok=True)
        (own / "config.json").write_text(json.dumps(MODELS[model] | (TINY[model] if args.tiny else {})))
        is_replayed = model == "deepseek_v4" and not args.no_replay
        wanted += [(model, part, str(own)) for part in (*args.variants.split(","), *["replay"] * is_replayed)]
    return [Part(model, part, i, own, args) for i, (model, part, own) in enumerate(wanted)]


def measured(parts: list[Part], args: argparse.Namespace) -> dict[str, Any]:
    """The results, of one part after the other, written whenever there are more."""
    batches = [int(b) for b in args.batches.split(",")]
    data: dict[str, Any] = {"environment": {}, "method": "see benchmarks/vllm_engine.py", "starts": {}}
    data |= {"rows": {}, "tokens": {}, "replay": {}, "failed": {}}
    begun = time.monotonic()

    def take(kind: str, name: str, part: Part, found: dict[str, Any]) -> None:
        if found:
            data[kind].setdefault(name, {}).setdefault(part.part, {}).update(found)
        if part.failed:
            data["failed"][part.name] = part.failed
        save(data, args)
        words = part.failed or ", ".join(
            f"{key} {value:.4g}" for key, value in found.items() if isinstance(value, float)
        )
        print(f"{time.monotonic() - begun:4.0f} s: {name}, {part.part}: {words}", file=sys.stderr, flush=True)

    for part in parts:
        take("starts", part.model, part, part.next(begun + args.start - time.monotonic()))
    data["environment"] = environment()
    for what in ("time", "profile"):  # the profiler may leave something behind
        for batch in batches:
            for part in parts:
                if part.part != "replay":
                    take("rows", f"{part.model} batch {batch}", part, part.ask(what, batch, args.timeout))
                elif what == "time":
                    take("replay", str(batch), part, part.ask(what, batch, args.timeout))
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
        if set(VARIANTS) <= set(cells):
            data["tokens"][name] = kept["tokens"][name] = compared(*(cells[variant] for variant in VARIANTS))
        for cell in cells.values():
            del cell["best"]
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
