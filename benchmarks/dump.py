"""How long the first call takes: stock Inductor, dsv4, and dsv4 with a dump, each in a fresh process.

    PYTHONPATH=. python benchmarks/dump.py --layers 4                      # on a GPU or a CPU
    PYTHONPATH=. python benchmarks/dump.py --layers 43 --compiler eager    # the passes without Inductor

The model is `transformers`' DeepSeek-V4 with the small widths of examples/random_model.py and random weights: a graph
has as many nodes as one with the true widths. Every process begins with an empty cache. `passes` is what ours took,
`dump` what writing took, of `total`.
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

from dsv4_compile.cli.output import table, track

WAYS = ("inductor", "dsv4", "dsv4 with a dump")
TOKENS = 16


def measure(way: str, layers: int, compiler: str, folder: str) -> dict[str, Any]:
    """Compiles in this process; seconds, and what was written."""
    import torch

    sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
    from random_model import TINY, random_model

    kinds = ["sliding" if i < 2 else ("csa", "hca")[i % 2] for i in range(layers)]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = random_model(TINY, kinds, device)
    ids = torch.arange(TOKENS, device=device)[None]
    dump = f"{folder}/dump"
    if way == WAYS[0]:
        compiled = torch.compile(model, backend="inductor")
    else:
        options = {"compiler": compiler, **({"dump_dir": dump} if way == WAYS[2] else {})}
        compiled = torch.compile(model, backend="dsv4", options=options)
    start = time.perf_counter()
    with torch.no_grad():
        compiled(ids, use_cache=False)
    result: dict[str, Any] = {"total": time.perf_counter() - start}
    if way == WAYS[0]:
        return result
    import dsv4_compile

    graphs = dsv4_compile.report().graphs
    result["nodes"] = sum(graph.nodes for graph in graphs)
    result["passes"] = sum(graph.seconds.get(name, 0.0) for graph in graphs for name in ("mhc", "projections"))
    result["kernels"] = sum(graph.seconds.get("kernels", 0.0) for graph in graphs)
    if way == WAYS[2]:
        result["dump"] = sum(graph.seconds.get("dump", 0.0) for graph in graphs)
        result["bytes"] = sum(path.stat().st_size for path in Path(dump).rglob("*") if path.is_file())
    return result


def measure_all(layers: int, compiler: str) -> dict[str, dict[str, Any]]:
    results = {}
    for way in track(WAYS if compiler == "inductor" else WAYS[1:], "Compiling", delay=0):
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder, "DSV4_TUNE": "0"}
            command = [sys.executable, __file__, "--layers", str(layers), "--compiler", compiler, "--one", way]
            done = subprocess.run([*command, "--folder", folder], env=environment, stdout=subprocess.PIPE, check=True)
        results[way] = json.loads(done.stdout.splitlines()[-1])
        print(f"{way:18}", ", ".join(f"{name} {value:.4g}" for name, value in results[way].items()), flush=True)
    names = list(dict.fromkeys(name for row in results.values() for name in row))
    body = [(way, *(f"{row[name]:.4g}" if name in row else "" for name in names)) for way, row in results.items()]
    table("The first call: seconds, and what was written", ("", *names), body, right=range(1, len(names) + 1))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--compiler", choices=("inductor", "eager"), default="inductor", help="what follows the passes")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.layers, arguments.compiler, arguments.folder)))
        return
    results = measure_all(arguments.layers, arguments.compiler)
    if arguments.json is not None:
        what = {"layers": arguments.layers, "compiler": arguments.compiler, "tokens": TOKENS}
        arguments.json.write_text(json.dumps({**what, "seconds": results}, indent=1) + "\n")
        print(f"written to {arguments.json}")


if __name__ == "__main__":
    main()
