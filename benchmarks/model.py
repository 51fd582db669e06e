"""A whole DeepSeek-V4: eager, Inductor and this backend, in time, launches, compile time and numbers.

    PYTHONPATH=. python benchmarks/model.py --rows decode-1,prefill-64 --columns eager,inductor,dsv4
    PYTHONPATH=. python benchmarks/model.py --merge a.json b.json --json benchmarks/results/model-h100.json
    PYTHONPATH=. python benchmarks/model.py --tiny --rows decode-1 --columns inductor,dsv4   # on a CPU: does it run

The model is `DeepseekV4ForCausalLM` of `transformers` with random weights: Flash's widths, four layers (sliding, CSA,
HCA, CSA), 32 experts as grouped products, bfloat16, the hyper-connections' parameters in float32. What is measured:

- `compile_s`: the first call, which compiles and runs. Every row of every column starts with new modules, a new
  `torch.compile` and an empty folder for Inductor's and Triton's caches; Dynamo and Inductor have run once before.
  What a process keeps in memory is not reset: the mHC kernels are compiled with the first `dsv4` row of a process.
- `ms`: median over calls that each begin and end with an idle device, by the host's clock, after warm-up calls. It
  includes what the host does, as a serving loop without overlap would. The columns of a row take turns, call by call.
- `least_ms`: the fastest of those calls.
- `kernels`: CUDA kernels of one call, counted by torch.profiler; copies and memsets are not counted.
- `max_diff`: largest absolute difference of the logits of the last position to eager; `error`: norm of the difference
  to a float32 run of the same weights on the same inputs, over the norm of that run (experts in a loop, TF32 off). In
  bfloat16 a router can choose other experts than in float32; that is part of the error, eager's too.

`dsv4-branches` is `dsv4` with the option `branches`; how many pieces have some is in `replaced`. It is measured when it
is named: `--columns eager,dsv4,dsv4-branches`.

A decode row is one step after 1021 tokens. The step changes Hugging Face's cache, so before each call, outside of the
measured time, the cache is set back to the state after the prompt: every call does the same work. At 1021 no window of
the compressors closes.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))


@dataclass(frozen=True)
class Row:
    """One piece of work: a decode step of `batch` sequences after `context` tokens, or a prefill of `tokens`."""

    batch: int
    tokens: int
    context: int = 0


@dataclass(frozen=True)
class Column:
    """One way to run it: arguments of `torch.compile`, or none of them for eager."""

    backend: str | None = None
    mode: str | None = None
    options: dict[str, Any] | None = None


@dataclass
class Cell:
    """What was measured for one row and column; None where it could not be."""

    ms: float | None = None
    least_ms: float | None = None
    compile_s: float | None = None
    kernels: int | None = None
    max_diff: float | None = None
    error: float | None = None
    replaced: str = ""


ROWS = {
    "decode-1": Row(1, 1, 1021),
    "decode-32": Row(32, 1, 1021),
    "prefill-64": Row(1, 64),
    "prefill-1024": Row(1, 1024),
}
TINY_ROWS = {
    "decode-1": Row(1, 1, 141),
    "decode-32": Row(4, 1, 141),
    "prefill-64": Row(1, 64),
    "prefill-1024": Row(1, 160),
}
COLUMNS = {
    "eager": Column(),
    "inductor": Column("inductor"),
    "inductor-ro": Column("inductor", "reduce-overhead"),
    "dsv4": Column("dsv4"),
    "dsv4-ro": Column("dsv4", "reduce-overhead"),
    "dsv4-branches": Column("dsv4", options={"branches": True}),
}
DEFAULT = [name for name in COLUMNS if name != "dsv4-branches"]
METHOD = (
    "host clock around single calls with an idle device before and after, columns taking turns, median of {calls} "
    "after {warmup} warm-ups; "
    "cache set back before each call, untimed; compile = first call with empty Inductor and Triton caches; "
    "kernels counted by torch.profiler; error = |logits - float32 logits| / |float32 logits| at the last position"
)


# ------------------------------------------------------------------------------------------------- the work of a row


class CacheState:
    """The state of a Hugging Face cache, to be put back as often as wanted.

    The layers of this model's cache never write into a tensor: each update makes a new one and stores it in the layer
    or in one of its dicts. So the state is a set of references and of counters.
    """

    def __init__(self, cache: Any):
        self.cache = cache
        self._saved = [{name: _shallow(value) for name, value in vars(layer).items()} for layer in cache.layers]
        self._versions = [(tensor, tensor._version) for tensor in self.tensors()]

    def tensors(self) -> list[Tensor]:
        values = [v for saved in self._saved for v in saved.values()]
        nested = [w for v in values if isinstance(v, dict) for w in v.values()]
        return [v for v in (*values, *nested) if isinstance(v, Tensor)]

    def restore(self) -> None:
        """Puts the references and counters back.

        Raises:
            RuntimeError: a saved tensor has been written in place, so the state is lost.
        """
        if any(tensor._version != version for tensor, version in self._versions):
            raise RuntimeError("The cache was written in place: this way of setting it back does not hold here.")
        for layer, saved in zip(self.cache.layers, self._saved, strict=True):
            for name, value in saved.items():
                if isinstance(value, dict):
                    getattr(layer, name).update(value)
                else:
                    setattr(layer, name, value)

    def in_float32(self) -> CacheState:
        """A copy of the cache with its floating-point tensors in float32."""
        self.restore()
        other = copy.deepcopy(self.cache)
        for layer in other.layers:
            for name, value in list(vars(layer).items()):
                if isinstance(value, dict):
                    value.update({key: _float32(item) for key, item in value.items()})
                elif name != "values":
                    setattr(layer, name, torch.float32 if isinstance(value, torch.dtype) else _float32(value))
            layer.values = layer.keys  # one tensor under two names, as in the original
        return CacheState(other)


def _shallow(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value


def _float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


@dataclass(frozen=True)
class Work:
    """Inputs of a row. `state` is None for a prefill, which uses no cache."""

    ids: Tensor
    state: CacheState | None

    def prepare(self) -> None:
        """What happens before a call and is not measured."""
        if self.state is not None:
            self.state.restore()
        torch.compiler.cudagraph_mark_step_begin()

    def call(self, model: Callable[..., Any]) -> Tensor:
        """Logits `[B, 1, V]` of the last position."""
        if self.state is None:
            return model(input_ids=self.ids, use_cache=False, logits_to_keep=1).logits
        return model(input_ids=self.ids, past_key_values=self.state.cache, use_cache=True, logits_to_keep=1).logits


def make_work(model: Any, row: Row) -> Work:
    from transformers import DynamicCache

    generator = torch.Generator().manual_seed(1)
    shape = (row.batch, row.context + row.tokens)
    ids = torch.randint(0, model.config.vocab_size, shape, generator=generator).to(model.device)
    if not row.context:
        return Work(ids, None)
    cache = DynamicCache(config=model.config)
    model(input_ids=ids[:, : row.context], past_key_values=cache, use_cache=True, logits_to_keep=1)
    return Work(ids[:, row.context :].contiguous(), CacheState(cache))


# ------------------------------------------------------------------------------------------------------- measurement


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(work: Work, model: Callable[..., Any]) -> float:
    work.prepare()
    synchronise()
    start = time.perf_counter()
    work.call(model)
    synchronise()
    return time.perf_counter() - start


def logits_of(work: Work, model: Callable[..., Any]) -> Tensor:
    """A copy, because a CUDA graph overwrites its outputs."""
    work.prepare()
    return work.call(model).float().clone()


def count_kernels(work: Work, model: Callable[..., Any]) -> int | None:
    if not torch.cuda.is_available():
        return None
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    work.prepare()
    synchronise()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work.call(model)
        synchronise()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    # Regions that somebody named are shown on the device as well.
    kernels = [event.name for event in events if not getattr(event, "is_user_annotation", False)]
    return sum(not name.lower().startswith(("memcpy", "memset")) for name in kernels)


def float32_logits(model: Any, work: Work) -> Tensor:
    wide = copy.deepcopy(model).float()
    wide.set_experts_implementation("eager")
    logits = logits_of(Work(work.ids, None if work.state is None else work.state.in_float32()), wide)
    del wide
    torch.cuda.empty_cache()  # several rows may share the card
    return logits


@contextmanager
def caches_in(folder: Path | None) -> Iterator[None]:
    """Empty caches of Inductor and Triton, gone afterwards; with a `folder` they are what it holds, and stay."""
    from torch._inductor.utils import clear_caches, fresh_cache

    if folder is None:
        with fresh_cache():
            yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    clear_caches()
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
    with mock.patch.dict(os.environ, variables):
        yield
    clear_caches()


@dataclass(frozen=True)
class Way:
    """One column, ready: modules of its own over the weights of all, compiled and warm."""

    run: Callable[..., Any]
    cell: Cell


def make_way(model: Any, work: Work, column: Column, warmup: int, caches: Path | None) -> Way:
    if column.backend is None:
        for _ in range(warmup):
            seconds_of(work, model)
        return Way(model, Cell())
    weights = itertools.chain(model.parameters(), model.buffers())
    own = copy.deepcopy(model, {id(weight): weight for weight in weights})
    run = torch.compile(own, backend=column.backend, mode=column.mode, options=column.options)
    with caches_in(caches):
        cell = Cell(compile_s=seconds_of(work, run))
        for _ in range(warmup):
            seconds_of(work, run)
    if column.backend == "dsv4":
        cell.replaced = _replaced()
    return Way(run, cell)


def measure(ways: dict[str, Way], work: Work, calls: int, exact: Tensor | None, eager: Tensor) -> None:
    """Fill the cells. The columns take turns, call by call: whatever else the host does meets all of them."""
    for way in ways.values():
        for _ in range(3):  # packing has moved weights, for which the others' CUDA graphs are recorded again
            seconds_of(work, way.run)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(calls):
        for name, way in ways.items():
            seconds[name].append(seconds_of(work, way.run))
    for name, way in ways.items():
        cell = way.cell
        cell.ms = 1e3 * statistics.median(seconds[name])
        cell.least_ms = 1e3 * min(seconds[name])
        logits = logits_of(work, way.run)
        cell.kernels = count_kernels(work, way.run)
        if exact is not None:
            cell.error = float((logits - exact).norm() / exact.norm())
        if name != "eager":
            cell.max_diff = float((logits - eager).abs().max())


def _replaced() -> str:
    import dsv4_compile

    report = dsv4_compile.report()
    sites = sum(site.kernel != "inductor" for graph in report.graphs for site in graph.mhc)
    groups = [group.strategy for graph in report.graphs for group in graph.projections]
    strategies = ", ".join(f"{groups.count(name)} {name}" for name in sorted(set(groups)))
    missed = sum(len(graph.missed) for graph in report.graphs)
    divided = sum(site.count for graph in report.graphs for site in graph.branches if site.branches)
    branches = f", {divided} pieces with branches" if report.requested["branches"] else ""
    found = f"{sites} mHC sites, projections: {strategies or 'none'}{branches}"
    return f"{len(report.graphs)} graph(s), {found}; {missed} missed"


# ------------------------------------------------------------------------------------------------------------ results


def environment() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    import dsv4_compile

    found = {"card": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU", "torch": torch.__version__}
    for package in ("triton", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return {**found, "dsv4_compile": dsv4_compile.__version__}


def slug(card: str) -> str:
    """`h100` of "NVIDIA H100 80GB HBM3"."""
    known = re.search(r"\b([ABHL]\d{2,3}S?|RTX \w+ ?\d+)\b", card)
    return re.sub(r"\W+", "-", (known.group(1) if known else card).lower())


def show(result: dict[str, Any]) -> None:
    """The table of times and numbers, with rich where it is installed."""
    headings = ("work", "way", "compile s", "ms", "least ms", "CUDA kernels", "difference to eager", "error to float32")
    lines = [(row, name, *_cells(cell)) for row, cells in result["rows"].items() for name, cell in cells.items()]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print("| " + " | ".join(headings) + " |\n|" + "---|" * len(headings))
        print("\n".join("| " + " | ".join(line) + " |" for line in lines))
        return
    table = Table(title=", ".join(f"{key} {value}" for key, value in result["environment"].items()))
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i < 2 else "right")
    for line in lines:
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def _cells(cell: dict[str, Any]) -> list[str]:
    times = (("compile_s", ".1f"), ("ms", ".2f"), ("least_ms", ".2f"))
    formats = (*times, ("kernels", "d"), ("max_diff", ".2g"), ("error", ".2e"))
    return ["" if cell[name] is None else format(cell[name], form) for name, form in formats]


def merge(paths: list[Path], cold: list[Path]) -> dict[str, Any]:
    """Results of several runs as one; of a cell measured twice the later file counts, of `cold` only compile times.

    Raises:
        SystemExit: the files come from different cards, versions or settings.
    """
    results = [json.loads(path.read_text()) for path in paths]
    for path, result in zip(paths, results, strict=True):
        for key in ("environment", "method", "model"):
            if result[key] != results[0][key]:
                raise SystemExit(f"{path} and {paths[0]} are apart in {key}: {result[key]} and {results[0][key]}.")
    found: dict[str, dict[str, Any]] = {row: {} for row in ROWS}
    for result in results:
        for row, cells in result["rows"].items():
            found[row].update(cells)
    for path in cold:
        for row, cells in json.loads(path.read_text())["rows"].items():
            for name, cell in cells.items():
                if name in found[row]:
                    found[row][name]["compile_s"] = cell["compile_s"]
    rows = {row: {name: cells[name] for name in COLUMNS if name in cells} for row, cells in found.items() if cells}
    return {**results[0], "rows": rows}


def write(result: dict[str, Any], path: Path | None) -> None:
    if path is None and "OUT" in os.environ:
        path = Path(os.environ["OUT"]) / f"model-{slug(result['environment']['card'])}.json"
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {path}", flush=True)


# -------------------------------------------------------------------------------------------------------------- running


def chosen(text: str | None, among: dict[str, Any]) -> list[str]:
    names = list(among) if text is None else text.split(",")
    for name in names:
        if name not in among:
            raise SystemExit(f"There is no {name!r}; there are {', '.join(among)}.")
    return names


def start(model: Any) -> None:
    """What Dynamo and Inductor do once in a process is not to be the first column's compile time."""
    ids = torch.ones(1, 16, dtype=torch.long, device=model.device)
    torch.compile(model, backend="eager")(input_ids=ids, use_cache=False)
    torch.compile(lambda x: x.sin() + 1)(ids.float())


def measure_all(arguments: argparse.Namespace) -> dict[str, Any]:
    from random_model import FLASH, TINY, random_model

    from dsv4_compile.backend import dsv4
    from dsv4_compile.cli.output import track

    if "dsv4" not in torch._dynamo.list_backends():  # a checkout that is not installed
        torch._dynamo.register_backend(dsv4, name="dsv4")
    rows = TINY_ROWS if arguments.tiny else ROWS
    device = "cuda" if torch.cuda.is_available() and not arguments.tiny else "cpu"
    if device == "cpu" and not arguments.tiny:
        raise SystemExit("There is no CUDA device; --tiny runs a small model on the CPU.")
    layers = ("sliding", "csa") if arguments.tiny else ("sliding", "csa", "hca", "csa")
    dtype = torch.float32 if arguments.tiny else torch.bfloat16
    torch.set_float32_matmul_precision("highest")
    torch._dynamo.config.recompile_limit = 64
    model = random_model(TINY if arguments.tiny else FLASH, layers, device, dtype)
    start(model)
    result: dict[str, Any] = {
        "environment": environment(),
        "method": METHOD.format(calls=arguments.calls, warmup=arguments.warmup),
        "model": f"{'tiny' if arguments.tiny else 'Flash widths'}, {len(layers)} layers ({', '.join(layers)}), {dtype}",
        "rows": {},
    }
    for row in chosen(arguments.rows, rows):
        work = make_work(model, rows[row])
        eager = logits_of(work, model)
        exact = None if arguments.no_float32 else float32_logits(model, work)
        ways: dict[str, Way] = {}
        for name in track(chosen(arguments.columns or ",".join(DEFAULT), COLUMNS), f"Compiling for {row}", delay=0):
            began = time.perf_counter()
            caches = None if arguments.caches is None else arguments.caches / f"{row}-{name}"
            ways[name] = make_way(model, work, COLUMNS[name], arguments.warmup, caches)
            print(f"{row:13} {name:12} ready after {time.perf_counter() - began:.0f} s", flush=True)
        measure(ways, work, arguments.calls, exact, eager)
        cells = result["rows"][row] = {name: dataclasses.asdict(way.cell) for name, way in ways.items()}
        for name, cell in cells.items():
            print(f"{row:13} {name:12} {cell['ms']:8.2f} ms   {cell['replaced']}", flush=True)
        write(result, arguments.json)  # a run that is cut off has not been for nothing
        del ways
        torch._dynamo.reset()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", help=f"comma-separated, of {', '.join(ROWS)}; all when left out")
    parser.add_argument("--columns", help=f"comma-separated, of {', '.join(COLUMNS)}; the first five when left out")
    parser.add_argument("--calls", type=int, default=30, help="calls that are timed")
    parser.add_argument("--warmup", type=int, default=5, help="calls before them; CUDA graphs need three")
    parser.add_argument("--json", type=Path, help="file for the results; $OUT/model-<card>.json when OUT is set")
    parser.add_argument("--merge", type=Path, nargs="+", help="measure nothing, put these files together")
    parser.add_argument("--caches", type=Path, help="folder for compiled code, kept; a second run starts from it")
    parser.add_argument("--cold", type=Path, nargs="+", help="with --merge: files whose compile times count")
    parser.add_argument("--no-float32", action="store_true", help="no float32 run (it takes 18 GB), so no error")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU, to see whether this runs")
    arguments = parser.parse_args()
    if arguments.merge:
        result = merge(arguments.merge, arguments.cold or [])
        write(result, arguments.json)
    else:
        with torch.no_grad():
            result = measure_all(arguments)
    show(result)


if __name__ == "__main__":
    main()
