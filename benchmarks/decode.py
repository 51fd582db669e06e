"""A generation whose cache grows: tokens per second of Inductor, of its CUDA graphs, and of captured pieces.

    PYTHONPATH=. python benchmarks/decode.py --columns dsv4-pieces,inductor --batch 1,32 --steps 256
    PYTHONPATH=. python benchmarks/decode.py --tiny --steps 12           # on a CPU: does it run

The model is that of benchmarks/model.py: Flash's widths, four layers, bfloat16, random weights. Each cell is a process.
It fills the cache of transformers with a prompt, eagerly, and then feeds token by token, each step timed by the host's
clock between two waits for the device. `dsv4-static` goes on with `StaticDeepseekV4Cache`. Of the cache of transformers
Dynamo makes a graph for each phase, so compilations and recordings happen in the middle. Reported are

- `tokens_per_s`: from step `--skip` to the end, everything counted, compilations and recordings as well;
- `steady_ms`: the median step of those;
- `slow_steps`: how many took more than ten times the median (a compilation or a recording), and their `slow_s`;
- `slow`: those and the ones before `--skip`, each with its seconds;
- `same`: whether the greedy tokens of the steps are those of the first column (bfloat16: rounding may part them);
- for this backend `graphs`, `captured` and `compiled` pieces of the last one, `replays` and `bytes`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from dsv4_compile.cli import output

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

COLUMNS: dict[str, dict[str, Any]] = {
    "inductor": {"backend": "inductor"},
    "inductor-ro": {"backend": "inductor", "mode": "reduce-overhead"},
    "dsv4": {"backend": "dsv4"},
    "dsv4-pieces": {"backend": "dsv4", "options": {"cudagraphs": "piecewise"}},
    "dsv4-static": {"backend": "dsv4", "options": {"cudagraphs": "full"}},
}
PROMPT = 1000


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """One cell, in this process."""
    from random_model import FLASH, TINY, random_model
    from transformers import DynamicCache

    from dsv4_compile.backend import dsv4
    from dsv4_compile.huggingface import ATTENTION, StaticDeepseekV4Cache

    if "dsv4" not in torch._dynamo.list_backends():  # a checkout that is not installed
        torch._dynamo.register_backend(dsv4, name="dsv4")
    torch._dynamo.config.recompile_limit = 256
    device = "cpu" if arguments.tiny else "cuda"
    layers = ("sliding", "csa") if arguments.tiny else ("sliding", "csa", "hca", "csa")
    dtype = torch.float32 if arguments.tiny else torch.bfloat16
    model = random_model(TINY if arguments.tiny else FLASH, layers, device, dtype)
    generator = torch.Generator().manual_seed(1)
    shape = (int(arguments.batch), 40 if arguments.tiny else PROMPT)
    ids = torch.randint(0, model.config.vocab_size, shape, generator=generator).to(device)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        if arguments.column == "dsv4-static":
            cache = StaticDeepseekV4Cache.of(cache, model, shape[1] + arguments.steps)
            model.set_attn_implementation(ATTENTION)
        model.compile(**COLUMNS[arguments.column])
        return _decode(model, cache, logits[:, -1].argmax(-1, keepdim=True), arguments)


def _decode(model: Any, cache: Any, token: torch.Tensor, arguments: argparse.Namespace) -> dict[str, Any]:
    seconds, tokens = [], []
    began = time.perf_counter()
    for _ in range(arguments.steps):
        torch.compiler.cudagraph_mark_step_begin()
        _wait()
        start = time.perf_counter()
        logits = model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        token = logits[:, -1].argmax(-1, keepdim=True)
        _wait()
        seconds.append(time.perf_counter() - start)
        tokens.append(token.flatten().tolist())
        if time.perf_counter() - began > arguments.limit:
            break
    timed = seconds[arguments.skip :] or seconds
    median = statistics.median(timed)
    slow = [s for s in timed if s > 10 * median]
    result = {
        "steps": len(seconds),
        "tokens_per_s": len(timed) * int(arguments.batch) / sum(timed),
        "steady_ms": 1e3 * median,
        "slow_steps": len(slow),
        "slow_s": sum(slow),
        "first_s": sum(seconds[: arguments.skip]),
        "slow": {str(i): round(s, 2) for i, s in enumerate(seconds) if s > 10 * median},
        "tokens": tokens,
    }
    return result | (_report() if arguments.column.startswith("dsv4") else {})


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _report() -> dict[str, Any]:
    import dsv4_compile

    graphs = dsv4_compile.report().graphs
    kinds = [piece.kind for piece in graphs[-1].pieces]
    return {
        "graphs": len(graphs),
        "captured": kinds.count("captured"),
        "compiled": kinds.count("compiled"),
        "replays": sum(graph.cudagraphs.replays for graph in graphs),
        "bytes": sum(graph.cudagraphs.bytes for graph in graphs),
        "fallbacks": [one["reason"] for graph in graphs for one in graph.cudagraphs.fallbacks][:5],
    }


def environment() -> dict[str, str]:
    import transformers

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"card": card, "torch": torch.__version__, "transformers": transformers.__version__}


def in_a_process(column: str, batch: int, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--column", column, "--batch", str(batch), "--steps", str(arguments.steps)]
    command += ["--skip", str(arguments.skip), "--limit", str(arguments.limit), *["--tiny"] * arguments.tiny]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return {"error": f"the process ended with {done.returncode}"}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", type=lambda text: text.split(","), default=list(COLUMNS))
    parser.add_argument("--batch", default="1,32", help="comma-separated")
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--skip", type=int, default=20, help="first steps that do not count")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which a cell ends, whatever its steps")
    parser.add_argument("--json", type=Path, help="file for the results; $OUT/decode.json when OUT is set")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU, to see whether this runs")
    parser.add_argument("--column", choices=list(COLUMNS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.column:
        print(json.dumps(measure(arguments)))
        return
    if not (arguments.tiny or torch.cuda.is_available()):
        raise SystemExit("There is no CUDA device; --tiny runs a small model on the CPU.")
    path = arguments.json or (Path(os.environ["OUT"]) / "decode.json" if "OUT" in os.environ else None)
    rows: dict[str, Any] = {}
    for batch in map(int, arguments.batch.split(",")):
        row: dict[str, Any] = {}
        rows[f"batch {batch}"] = row
        first: list[Any] | None = None
        for column in arguments.columns:
            cell = row[column] = in_a_process(column, batch, arguments)
            tokens = cell.pop("tokens", None)
            first = first or tokens
            if tokens and first:
                cell["same"] = all(a == b for a, b in zip(tokens, first, strict=False))
            print(f"batch {batch} {column}: {cell}", flush=True)
            if path is not None:
                text = {"environment": environment(), "method": "see benchmarks/decode.py", "rows": rows}
                path.write_text(json.dumps(text, indent=1) + "\n")
    show(rows)


def show(rows: dict[str, Any]) -> None:
    """The cells as a table."""
    names = ("tokens_per_s", "steady_ms", "slow_steps", "slow_s", "same", "graphs", "replays")
    body = [
        (row, column, *(_text(cell.get(name)) for name in names))
        for row, cells in rows.items()
        for column, cell in cells.items()
    ]
    output.table("A generation with a growing cache", ("row", "column", *names), body, right=range(2, len(names) + 2))


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
