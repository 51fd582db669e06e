"""A generation whose cache grows: tokens per second of Inductor, of its CUDA graphs, and of captured pieces.

    PYTHONPATH=. python benchmarks/decode.py --columns dsv4-pieces,inductor --batch 1,32 --steps 256
    PYTHONPATH=. python benchmarks/decode.py --tiny --steps 12           # on a CPU: does it run

The model is that of benchmarks/model.py: Flash's widths, four layers, bfloat16, random weights. Each cell is a process.
It fills the cache of transformers with a prompt, eagerly, and then feeds token by token; `dsv4-static` goes on with
`StaticDeepseekV4Cache`. Columns that end in `-branches` have the option `branches`; they are measured when they are
named. Of the cache of transformers Dynamo makes a graph for each phase, so the first `--first` steps are compilations;
all cells take theirs beside each other. Then the cells measure in turns, nothing else running: `--steps` further steps,
each timed by the host's clock between two waits for the device. What is compiled or recorded in these counts. Reported
are

- `tokens_per_s` of the measured steps, everything counted;
- `steady_ms`: the median step of those; `host_ms`: the median time until the call returned, without the wait behind it;
- `unwaited_ms`: time of a step when as many again follow each other without a wait in between;
- `slow_steps`: how many took more than ten times the median (a compilation or a recording), and their `slow_s`;
- `first_s`: seconds of the first steps, and `first_slow`, those of them that took more than a second; `prompt_s`, at
  batch 1 and where the cache is that of transformers: of a prompt through the compiled model, before those;
- `same`: how many rows of greedy tokens, all steps, are those of the first column (bfloat16: rounding may part them);
- for this backend `graphs`, `captured` and `compiled` pieces of the last one, `replays`, `bytes` and `branches`.

Inductor's CUDA graphs overwrite what a call returned before, the cache too. Where PyTorch refuses to go on because of
it, the cell starts again, in a fresh process, and clones the cache after each step (`cloned`), as its error advises.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from parts import Part, say  # beside this script

from dsv4_compile.cli import output

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

COLUMNS: dict[str, dict[str, Any]] = {
    "inductor": {"backend": "inductor"},
    "inductor-ro": {"backend": "inductor", "mode": "reduce-overhead"},
    "dsv4": {"backend": "dsv4"},
    "dsv4-pieces": {"backend": "dsv4", "options": {"cudagraphs": "piecewise"}},
    "dsv4-static": {"backend": "dsv4", "options": {"cudagraphs": "full"}},
    "dsv4-branches": {"backend": "dsv4", "options": {"branches": True}},
    "dsv4-static-branches": {"backend": "dsv4", "options": {"cudagraphs": "full", "branches": True}},
}
DEFAULT = [name for name in COLUMNS if not name.endswith("branches")]
LOCK = Path(tempfile.gettempdir(), "dsv4-decode.lock")


class Generation:
    """A model behind a prompt, in this process, that goes on step by step."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from filelock import FileLock
        from random_model import FLASH, TINY, random_model
        from transformers import DynamicCache

        from dsv4_compile.huggingface import ATTENTION, StaticDeepseekV4Cache

        tiny, batch = arguments.tiny, int(arguments.batch)
        layers = ("sliding", "csa") if tiny else ("sliding", "csa", "hca", "csa")
        kind = ("cpu", torch.float32) if tiny else ("cuda", torch.bfloat16)
        self.model = model = random_model(TINY if tiny else FLASH, layers, *kind)
        shape = (batch, 40 if tiny else arguments.prompt)
        ids = torch.randint(0, model.config.vocab_size, shape, generator=torch.Generator().manual_seed(1)).to(kind[0])
        cache: Any = DynamicCache(config=model.config)
        with torch.no_grad(), FileLock(LOCK):  # a long prompt of many rows takes tens of gigabytes for a moment
            self.token = self._best(ids, cache)
            torch.cuda.empty_cache()
        is_static = arguments.column.startswith("dsv4-static")
        if is_static:
            cache = StaticDeepseekV4Cache.of(cache, model, shape[1] + arguments.first + 2 * arguments.steps)
            model.set_attn_implementation(ATTENTION)
        model.compile(**COLUMNS[arguments.column])
        self.cache, self.clones = cache, arguments.clones
        self.tokens: list[list[int]] = []
        self.prompt_s: float | None = None
        if batch == 1 and not is_static:  # its results round otherwise, so they are not used
            with torch.no_grad():
                start = time.perf_counter()
                self._best(ids, DynamicCache(config=model.config))
                _wait()
                self.prompt_s = time.perf_counter() - start

    def steps(self, number: int, limit: float) -> list[tuple[float, float]]:
        """Seconds of each step, and until its call had returned; ends after `limit` seconds."""
        times = []
        began = time.perf_counter()
        with torch.no_grad():
            while len(times) < number and time.perf_counter() - began < limit:
                _wait()
                start = time.perf_counter()
                self._step()
                returned = time.perf_counter()
                _wait()
                times.append((time.perf_counter() - start, returned - start))
                if times[-1][0] > 1:
                    print(f"step {len(self.tokens)}: {times[-1][0]:.1f} s", flush=True)
                self.tokens.append(self.token.flatten().tolist())
        return times

    def unwaited(self, number: int) -> float:
        """Seconds of a step."""
        _wait()
        start = time.perf_counter()
        with torch.no_grad():
            for _ in range(number):
                self._step()
        _wait()
        return (time.perf_counter() - start) / number

    def _step(self) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        self.token = self._best(self.token, self.cache)
        if self.clones:
            self._clone()

    def _best(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        """The best next token of each row."""
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True)

    def _clone(self) -> None:
        """Gives every tensor of the cache memory of its own."""
        copies: dict[int, torch.Tensor] = {}  # one object stays one: Dynamo guards on it
        for layer in self.cache.layers:
            for names in (vars(layer), *(value for value in vars(layer).values() if isinstance(value, dict))):
                for name, value in names.items():
                    if isinstance(value, torch.Tensor):
                        names[name] = copies.setdefault(id(value), value.clone())


def measure(arguments: argparse.Namespace) -> None:
    """One cell, in this process: says when it is ready, and what it measured when it is asked."""
    from dsv4_compile.backend import dsv4

    if "dsv4" not in torch._dynamo.list_backends():  # a checkout that is not installed
        torch._dynamo.register_backend(dsv4, name="dsv4")
    torch._dynamo.config.recompile_limit = 256
    generation = Generation(arguments)
    try:
        first = generation.steps(arguments.first, arguments.until - time.time())
    except RuntimeError as error:
        if arguments.clones or arguments.column != "inductor-ro" or "overwritten" not in str(error):
            raise
        print(error, flush=True)
        os.execv(sys.executable, [sys.executable, *sys.argv, "--clones"])
    seconds = [s for s, _ in first]
    say(
        {
            "prompt_s": generation.prompt_s,
            "first": len(first),
            "first_s": sum(seconds),
            "first_slow": {str(i): round(s, 2) for i, s in enumerate(seconds) if s > 1},
            **({"cloned": True} if arguments.clones else {}),
        }
    )
    for _ in sys.stdin:
        timed = generation.steps(arguments.steps, arguments.steps_limit)
        seconds = [s for s, _ in timed]
        median = statistics.median(seconds)
        slow = [s for s in seconds if s > 10 * median]
        result = {
            "steps": len(seconds),
            "tokens_per_s": len(seconds) * int(arguments.batch) / sum(seconds),
            "steady_ms": 1e3 * median,
            "host_ms": 1e3 * statistics.median(host for _, host in timed),
            "slow_steps": len(slow),
            "slow_s": sum(slow),
            "tokens": generation.tokens,
            "unwaited_ms": 1e3 * generation.unwaited(len(seconds)),
        }
        say(result | (_report() if arguments.column.startswith("dsv4") else {}))


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _report() -> dict[str, Any]:
    import dsv4_compile
    from dsv4_compile.report import branch_text

    graphs = dsv4_compile.report().graphs
    kinds = [piece.kind for piece in graphs[-1].pieces]
    return {
        "graphs": len(graphs),
        "captured": kinds.count("captured"),
        "compiled": kinds.count("compiled"),
        "replays": sum(graph.cudagraphs.replays for graph in graphs),
        "bytes": sum(graph.cudagraphs.bytes for graph in graphs),
        "branches": [branch_text(site) for graph in graphs for site in graph.branches],
        "fallbacks": [one["reason"] for graph in graphs for one in graph.cudagraphs.fallbacks][:5],
    }


def environment() -> dict[str, str]:
    import transformers

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"card": card, "torch": torch.__version__, "transformers": transformers.__version__}


def launched(column: str, batch: int, arguments: argparse.Namespace, folder: str) -> Part:
    """A cell, before it has compiled, with caches of its own. It may start again, and the limit is that of both."""
    command = [sys.executable, __file__, "--column", column, "--batch", str(batch), "--steps", str(arguments.steps)]
    command += ["--first", str(arguments.first), "--until", str(time.time() + arguments.limit)]
    command += ["--prompt", str(arguments.prompt)]
    command += ["--steps-limit", str(arguments.steps_limit or arguments.limit), *["--tiny"] * arguments.tiny]
    name = f"decode-{batch}-{column}"
    own = {"TORCHINDUCTOR_CACHE_DIR": str(Path(folder, name)), "TRITON_CACHE_DIR": str(Path(folder, name, "triton"))}
    return Part(name, command, Path(arguments.out or folder, f"{name}.log"), own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", type=lambda text: text.split(","), default=DEFAULT)
    parser.add_argument("--batch", default="1,32", help="comma-separated")
    parser.add_argument("--prompt", type=int, default=1000, help="tokens in the cache before the first step")
    parser.add_argument("--first", type=int, default=64, help="steps that compile, before what is measured")
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--limit", type=float, default=3000, help="seconds after which the first steps end")
    parser.add_argument("--steps-limit", type=float, help="the same for those that are measured")
    parser.add_argument("--json", type=Path, help="file for the results; $OUT/decode.json when OUT is set")
    parser.add_argument("--out", type=Path, help="folder of the logs, one of each cell; none are kept without it")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU, to see whether this runs")
    parser.add_argument("--column", choices=list(COLUMNS), help=argparse.SUPPRESS)
    parser.add_argument("--clones", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.column:
        measure(arguments)
        return
    if not (arguments.tiny or torch.cuda.is_available()):
        raise SystemExit("There is no CUDA device; --tiny runs a small model on the CPU.")
    path = arguments.json or (Path(os.environ["OUT"]) / "decode.json" if "OUT" in os.environ else None)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        cells = {
            (batch, column): launched(column, batch, arguments, folder)
            for batch in map(int, arguments.batch.split(","))
            for column in arguments.columns
        }
        try:
            rows = measured(cells, arguments, path)
        finally:
            for part in cells.values():
                part.close()
    show(rows)


def measured(cells: dict[tuple[int, str], Part], arguments: argparse.Namespace, path: Path | None) -> dict[str, Any]:
    """What the cells say, written whenever there is more."""
    rows: dict[str, dict[str, Any]] = {}
    reference: dict[int, list[list[int]]] = {}
    patience = 2 * arguments.limit + 600
    for phase in ("first", "steps"):
        for (batch, column), part in cells.items():
            found = part.next(patience) if phase == "first" else part.ask("steps", patience)
            if tokens := found.pop("tokens", None):
                if batch in reference:
                    found["same"] = _same_rows(tokens, reference[batch])
                reference.setdefault(batch, tokens)
            cell = rows.setdefault(f"batch {batch}", {}).setdefault(column, {})
            cell |= found | ({"error": part.failed} if part.failed else {})
            print(f"batch {batch} {column}: {found or cell}", flush=True)
            if path is not None:
                text = {"environment": environment(), "method": "see benchmarks/decode.py", "rows": rows}
                path.write_text(json.dumps(text, indent=1) + "\n")
    return rows


def _same_rows(a: list[list[int]], b: list[list[int]]) -> str:
    """How many sequences have the same tokens in both, which hold them by steps."""
    pairs = list(zip(zip(*a, strict=True), zip(*b, strict=True), strict=True))
    return f"{sum(p[: len(q)] == q[: len(p)] for p, q in pairs)} of {len(pairs)}"


def show(rows: dict[str, Any]) -> None:
    """The cells as a table."""
    times = ("tokens_per_s", "steady_ms", "unwaited_ms", "host_ms", "slow_steps", "slow_s", "first_s")
    names = (*times, "same", "graphs", "replays")
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
