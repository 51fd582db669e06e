"""How long compilations take: stock `torch.compile`, this backend, and this backend with `DSV4_PIECES=1`.

    PYTHONPATH=. python benchmarks/compile_time.py                        # on a CPU or a GPU
    PYTHONPATH=. python benchmarks/compile_time.py --layers 4,12 --steps 8

- `layers`: the first call of a DeepSeek-V4 with so many layers, a prefill of 40 tokens.
- `generate`: a prefill of 13 tokens and so many decode steps with the cache of transformers, four layers. Dynamo makes
  a graph for each phase of the cache.

transformers' model with small widths, float32. Every cell is a process of its own with empty cache folders; seconds
include Dynamo, AOTAutograd, Inductor and the C++ or Triton compiler. `inductor` is what the report calls so: all but
the passes and the kernel families.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

COLUMNS: dict[str, dict[str, str]] = {
    "inductor": {"BENCHMARK_BACKEND": "inductor"},
    "dsv4": {"BENCHMARK_BACKEND": "dsv4"},
    "dsv4, pieces": {"BENCHMARK_BACKEND": "dsv4", "DSV4_PIECES": "1"},
}
TASKS = ("layers", "generate")


def measure(task: str, size: int) -> dict[str, Any]:
    """In this process."""
    from tests.models import CSA, HCA, SLIDING, deepseek

    torch._dynamo.config.recompile_limit = 64
    backend = os.environ["BENCHMARK_BACKEND"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if task == "layers":
        kinds = (SLIDING, CSA, HCA, CSA) if size == 4 else (SLIDING, SLIDING, *(CSA, HCA) * size)[:size]
    else:
        kinds = (SLIDING, CSA, HCA, CSA)
    model = deepseek(kinds, iters=20, hash_layers=min(3, len(kinds) - 1)).to(device)
    ids = torch.randint(0, model.config.vocab_size, (1, 40 if task == "layers" else 13), device=device)
    with torch.no_grad():
        arguments = {"max_new_tokens": 1 + size, "do_sample": False, "pad_token_id": 0}
        eager = model(ids, use_cache=False).logits if task == "layers" else model.generate(ids, **arguments)
        start = time.perf_counter()
        if task == "layers":
            out = torch.compile(model, backend=backend)(ids, use_cache=False).logits
            same = float((out - eager).norm() / eager.norm()) < 1e-4
        else:
            model.compile(backend=backend)
            same = torch.equal(model.generate(ids, **arguments), eager)
        seconds = time.perf_counter() - start
    result: dict[str, Any] = {"seconds": seconds, "equal": same}
    if backend == "dsv4":
        import dsv4_compile

        graphs = dsv4_compile.report().graphs
        result |= {
            "inductor": sum(graph.seconds.get("inductor", 0.0) for graph in graphs),
            "graphs": len(graphs),
            "pieces": sum(len(graph.pieces) for graph in graphs),
            "compiled": sum(piece.reason == "between two boundaries" for graph in graphs for piece in graph.pieces),
        }
    return result


def in_a_process(task: str, size: int, environment: dict[str, str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--task", task, "--size", str(size)]
        variables = {
            **os.environ,
            **environment,
            "TORCHINDUCTOR_CACHE_DIR": folder,
            "TRITON_CACHE_DIR": f"{folder}/triton",
        }
        done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def environment() -> dict[str, Any]:
    import transformers

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {len(os.sched_getaffinity(0))} cores"
    return {"card": card, "torch": torch.__version__, "transformers": transformers.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=lambda text: [int(x) for x in text.split(",") if x], default=[4, 12, 43])
    parser.add_argument("--steps", type=lambda text: [int(x) for x in text.split(",") if x], default=[64])
    parser.add_argument("--columns", type=lambda text: text.split(";"), default=list(COLUMNS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--task", choices=TASKS, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        print(json.dumps(measure(arguments.task, arguments.size)))
        return
    rows: dict[str, Any] = {}
    path = arguments.json or (Path(os.environ["OUT"]) / "compile_time.json" if "OUT" in os.environ else None)
    for task, sizes in (("layers", arguments.layers), ("generate", arguments.steps)):
        for size in sizes:
            row = {name: in_a_process(task, size, COLUMNS[name]) for name in arguments.columns}
            rows[f"{task}/{size}"] = row
            text = "  ".join(f"{name} {cell['seconds']:.1f} s" for name, cell in row.items())
            print(f"{task} {size}: {text}  {row.get('dsv4, pieces', '')}", flush=True)
            if path is not None:
                content = {"environment": environment(), "method": "see benchmarks/compile_time.py", "rows": rows}
                path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
