"""What replaying pieces costs the host, and what the graphs of several token counts take of the card.

    PYTHONPATH=. python benchmarks/replay.py

- `host`: a model of `--pieces` MLPs with an operator named in `split_ops` behind each, so that each MLP is a piece of
  its own. The host's microseconds of a call, the device idle at its start and not waited for at its end: of the
  compiled model (`call`); of bare `CUDAGraph.replay()` of the same graphs with calls of the same operators between them
  (`bare`); of the operators alone (`cuts`); of the model compiled to nothing (`around`: Dynamo's guards of the
  parameters and AOTAutograd's wrapper). `per_piece` is (call - bare) / pieces, so everything counts that one call
  costs; `own_per_piece` is without `around`: the check of parameters, the copies of inputs, and the steps.
- `memory`: bytes by which the pool grew, for all token counts 1, 2, 4, ... `--largest` of an MLP stack, and for the
  largest alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import dsv4_compile
from dsv4_compile.backend import dsv4
from dsv4_compile.cli import output

CALLS = 200


@torch.library.custom_op("benchmark::cut", mutates_args=())
def cut(x: torch.Tensor) -> torch.Tensor:
    """Stands for attention over a cache: one kernel."""
    return x.clone()


@cut.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Layers(torch.nn.Module):
    """MLPs with a residual, and after each the operator that is cut out, if `cuts`."""

    def __init__(self, number: int, hidden: int, cuts: bool) -> None:
        super().__init__()
        self.up = torch.nn.ModuleList(torch.nn.Linear(hidden, 2 * hidden) for _ in range(number))
        self.down = torch.nn.ModuleList(torch.nn.Linear(2 * hidden, hidden) for _ in range(number))
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(hidden) for _ in range(number))
        self.cuts = cuts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down, norm in zip(self.up, self.down, self.norms, strict=True):
            x = x + down(torch.nn.functional.silu(up(norm(x))))
            if self.cuts:
                x = torch.ops.benchmark.cut(x)
        return x


def host(pieces: int, hidden: int) -> dict[str, Any]:
    model = Layers(pieces, hidden, cuts=True).to("cuda", torch.bfloat16).requires_grad_(False)
    known = {id(graph) for graph in _graphs()}
    options = {"cudagraphs": "piecewise", "split_ops": ["benchmark::cut"]}
    compiled = torch.compile(model, backend=dsv4, options=options)
    x = torch.randn(1, hidden, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for _ in range(5):
            out = compiled(x)
        error = float((out - model(x)).float().norm() / model(x).float().norm())
        graphs = [graph for graph in _graphs() if id(graph) not in known]

        def bare() -> None:
            for graph in graphs:
                graph.replay()
                torch.ops.benchmark.cut(x)

        def cuts() -> None:
            for _ in graphs:
                torch.ops.benchmark.cut(x)

        around = torch.compile(model, backend=aot_autograd(fw_compiler=lambda *_: make_boxed_func(lambda *_: [out])))
        around(x)
        us = _in_turns({"call": lambda: compiled(x), "bare": bare, "cuts": cuts, "around": lambda: around(x)})
    found = dsv4_compile.report().graphs[-1]
    return {
        "pieces": len(graphs),
        "captured": [piece.kind for piece in found.pieces].count("captured"),
        "parameters": len(list(model.parameters())),
        "relative_difference": error,
        **us,
        "per_piece": (us["call"] - us["bare"]) / len(graphs),
        "own_per_piece": (us["call"] - us["bare"] - us["around"]) / len(graphs),
        "replay": (us["bare"] - us["cuts"]) / len(graphs),
    }


def memory(largest: int, hidden: int) -> dict[str, Any]:
    every = [1 << i for i in range(largest.bit_length())]
    used = {}
    for name, sizes in (("all", every), ("largest", every[-1:])):
        torch._dynamo.reset()
        gc.collect()
        model = Layers(8, hidden, cuts=False).to("cuda", torch.bfloat16).requires_grad_(False)
        options = {"cudagraphs": "piecewise", "capture_sizes": sizes}
        compiled = torch.compile(model, backend=dsv4, options=options, dynamic=True)
        with torch.no_grad():
            for count in sorted(sizes, reverse=True):
                compiled(torch.randn(count, hidden, device="cuda", dtype=torch.bfloat16))
        report = dsv4_compile.report()
        used[name] = sum(graph.cudagraphs.bytes for graph in report.graphs)
        used[f"{name} sizes"] = sorted({size for graph in report.graphs for size in graph.cudagraphs.sizes})
        del compiled, model
    return {**used, "ratio": used["all"] / used["largest"]}


def _graphs() -> list[torch.cuda.CUDAGraph]:
    return [one for one in gc.get_objects() if isinstance(one, torch.cuda.CUDAGraph)]


def _in_turns(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Microseconds until each returns, median."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    for _ in range(CALLS):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            result = call()
            times[name].append(time.perf_counter() - start)
            del result
    return {name: 1e6 * statistics.median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pieces", type=int, default=40)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--largest", type=int, default=512)
    parser.add_argument("--json", type=Path, help="file for the results; $OUT/replay.json when OUT is set")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device, and without one there are no graphs to replay.")
    rows = {
        "host": host(arguments.pieces, arguments.hidden),
        "memory": memory(arguments.largest, 4096),
    }
    environment = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
    data = {"environment": environment, "method": "see benchmarks/replay.py", "rows": rows}
    path = arguments.json or (Path(os.environ["OUT"]) / "replay.json" if "OUT" in os.environ else None)
    if path is not None:
        path.write_text(json.dumps(data, indent=1) + "\n")
    for name, row in rows.items():
        body = [(key, f"{value:.2f}" if isinstance(value, float) else str(value)) for key, value in row.items()]
        output.table(name, ("what", "value"), body, right=(2,))


if __name__ == "__main__":
    main()
