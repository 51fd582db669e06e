"""How long compilations take: stock `torch.compile`, this backend, and this backend with `DSV4_PIECES=1`.

    PYTHONPATH=. python benchmarks/compile_time.py                        # on a CPU or a GPU
    PYTHONPATH=. python benchmarks/compile_time.py --layers 4,12 --steps 8

- `layers`: the first call of a DeepSeek-V4 with so many layers, a prefill of 40 tokens.
- `generate`: a prefill of 13 tokens and so many decode steps with the cache of transformers, four layers. Dynamo makes
  a graph for each phase of the cache.

transformers' model with the small widths of examples/random_model.py, float32. Every cell is a process of its own with
empty cache folders; seconds include Dynamo, AOTAutograd, Inductor and the C++ or Triton compiler. `inductor` is what
the report calls so: all but the passes and the kernel families, and of a graph in pieces without `aot_autograd`, which
traces the whole graph.
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

from dsv4_compile.cli.output import table, track

COLUMNS: dict[str, dict[str, str]] = {
    "inductor": {"BENCHMARK_BACKEND": "inductor"},
    "dsv4": {"BENCHMARK_BACKEND": "dsv4"},
    "dsv4, pieces": {"BENCHMARK_BACKEND": "dsv4", "DSV4_PIECES": "1"},
}
TASKS = ("layers", "generate")
# A cache that reaches each of its phases within a few tokens.
SHORT: dict[str, Any] = {
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "sliding_window": 8,
    "eos_token_id": None,
    "bos_token_id": None,
}


def measure(task: str, size: int) -> dict[str, Any]:
    """In this process."""
    sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
    from random_model import TINY, random_model

    torch._dynamo.config.recompile_limit = 64
    backend = os.environ["BENCHMARK_BACKEND"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kinds: tuple[str, ...] = ("sliding", "csa", "hca", "csa")
    if task == "layers" and size != len(kinds):
        kinds = ("sliding", "sliding", *("csa", "hca") * size)[:size]
    model = random_model({**TINY, **SHORT}, kinds, device)
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
            **{name: sum(graph.seconds.get(name, 0.0) for graph in graphs) for name in ("aot_autograd", "inductor")},
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
    tasks = [("layers", size) for size in arguments.layers] + [("generate", size) for size in arguments.steps]
    cells = [(task, size, name) for task, size in tasks for name in arguments.columns]
    for task, size, name in track(cells, "Compiling", delay=0):
        cell = rows.setdefault(f"{task}/{size}", {})[name] = in_a_process(task, size, COLUMNS[name])
        print(f"{task} {size}, {name}: " + ", ".join(f"{key} {value:.4g}" for key, value in cell.items()), flush=True)
        if path is not None:
            content = {"environment": environment(), "method": "see benchmarks/compile_time.py", "rows": rows}
            path.write_text(json.dumps(content, indent=1) + "\n")
    body = [(row, *(cells[name]["seconds"] for name in arguments.columns)) for row, cells in rows.items()]
    table("Seconds of the first calls", ("work", *arguments.columns), body, right=range(1, len(arguments.columns) + 1))


if __name__ == "__main__":
    main()
