"""Projections that read one activation, as DeepSeek-V4 and Qwen3-Next have them: every way to run them, side by side.

    PYTHONPATH=. python benchmarks/projections.py                        # all tables, on a GPU; a few minutes
    PYTHONPATH=. python benchmarks/projections.py --tables flash --tokens 1,64
    PYTHONPATH=. python benchmarks/projections.py --tiny                 # on a CPU: does it run

What is measured: microseconds of a whole group, from replays of CUDA graphs that hold many groups. The groups of a
graph go round sets of weights and inputs that together are larger than twice L2; the columns of a row take turns,
replay by replay; median. The inputs and weights are random.

- `7 GEMMs`: one `torch.nn.functional.linear` for each weight, as Hugging Face's eager model does.
- `4 serial`, `4 streams`: after the merging that vLLM does by hand, in turn and on three side streams.
- `1 packed`: one `torch.mm` with all weights in one; it is of no use where their dtypes differ.
- `serial`, `streams`, `pack`: the ways of `dsv4::grouped_linear`, on the unmerged weights, which lie one behind the
  other. Its result is one tensor.
- `pack: proposal ...`: up to 512 tokens, the packed product with other algorithms of cuBLASLt (`proposals.py`).
- `skinny: ...`: up to 64 tokens, the plans of the kernel for few tokens (docs/projections.md), on the same weights.
- `ours`: `dsv4::grouped_linear` as `projections="auto"` runs it. Its choice is measured in this run, by itself.
- `floor`: weights, input and outputs as fast as a large tensor is read or copied in the same run, or the products at
  800 TFLOP/s, whichever takes longer.
- `reading`: a launch that only brings the weights into shared memory (`reading.py`), one after the other like the rest.

In the table `mixed` the query and key projections are float8 (e4m3, scaled by tensor), with an input of their own; in
the first columns they are one product of `torch._scaled_mm`. In the table `scales` each of the two has a scale of its
own, so that they are two products there. `ours` is `dsv4::mixed_linear` on all seven as
`projections="auto"` runs it, `streams` and `skinny: ...` are its ways: in the latter one launch has all weights.
`grouped + _scaled_mm` is that product beside the operator for the rest, also with the product on a side stream.
`host`: microseconds of the host for a call outside of a graph, with one token; `direct` as compiled code calls the
operator, without the dispatcher.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from graph_timing import REPLAYS, Calls, microseconds, sets_beyond_l2, side_by_side  # beside this script
from reading import read
from torch import Tensor
from torch.nn import functional

from dsv4_compile.cli.output import track
from dsv4_compile.kernels import linear, streams
from dsv4_compile.kernels.linear import grouped, mixed, packing, proposals, skinny, strategies, tuning
from dsv4_compile.kernels.linear.buckets import bucket_of
from dsv4_compile.kernels.linear.products import FLOAT8, Scaled

TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
MIXED_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024)
MIXED = ("mixed", "scales")
CALLS = 20
FLOPS = 800e12
METHOD = (
    f"microseconds a group: median of {REPLAYS} replays of a CUDA graph of {CALLS} groups or more over sets beyond "
    "twice L2, columns taking turns; see benchmarks/projections.py"
)


@functools.cache
def bandwidth() -> float:
    """Bytes a second that the memory gives, read or copied; without a device, an H100's."""
    if not torch.cuda.is_available():
        return 3.0e12
    source, to = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    # The first ones run before the clocks have risen.
    copied = 2e6 * source.numel() / min(microseconds([lambda: to.copy_(source)] * 2) for _ in range(10))
    return max(copied, 1e6 * source.numel() / min(microseconds([lambda: read(source)] * 2) for _ in range(10)))


@dataclass(frozen=True)
class Group:
    """Weights `[M_i, columns]` on one input; `merged` says which of them vLLM puts into one, `numbers` where each runs
    if the group runs on several streams, as the pass places the layers of the model."""

    columns: int
    features: tuple[int, ...]
    merged: tuple[int, ...]
    numbers: tuple[int, ...]

    @property
    def weight_bytes(self) -> int:
        return 2 * self.columns * sum(self.features)

    def floor(self, tokens: int) -> float:
        """Microseconds at `bandwidth`."""
        moved = self.weight_bytes + 2 * tokens * (self.columns + sum(self.features))
        return 1e6 * max(moved / bandwidth(), 2 * tokens * self.columns * sum(self.features) / FLOPS)


# q, kv, the compressor's kv and gate, the indexer's kv and gate, the indexer's weights.
REST = (1024, 1024, 256, 256, 64)
FLASH = Group(4096, (1024, 512, *REST), (2, 2, 2, 1), (0, 0, 1, 1, 2, 2, 3))
PRO = Group(7168, (1536, 512, *REST), (2, 2, 2, 1), (0, 0, 1, 1, 2, 2, 3))
QWEN = Group(2048, (12288, 64), (1, 1), (0, 1))
GROUPS = {"flash": FLASH, "pro": PRO, "qwen": QWEN}
TABLES = (*GROUPS, "mixed", "scales", "host")


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call: `weights` are parts of `whole`, `merged` are parts of it as well."""

    x: Tensor
    whole: Tensor
    weights: list[Tensor]
    merged: list[Tensor]


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def make(group: Group, tokens: int, seed: int) -> Inputs:
    generator = torch.Generator(device()).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device(), dtype=torch.bfloat16)

    whole = normal(sum(group.features), group.columns) / group.columns**0.5
    weights = list(whole.split(group.features))
    ends = [sum(group.merged[: i + 1]) for i in range(len(group.merged))]
    sizes = [sum(group.features[end - count : end]) for end, count in zip(ends, group.merged, strict=True)]
    assert packing.already_packed(weights)
    return Inputs(normal(tokens, group.columns), whole, weights, list(whole.split(sizes)))


def each(run: Callable[[Inputs], Any], sets: list[Inputs]) -> Calls:
    return [functools.partial(run, one) for one in sets] * max(1, CALLS // len(sets))


def ours(one: Inputs, numbers: tuple[int, ...]) -> list[Tensor]:
    return torch.ops.dsv4.grouped_linear.default.direct(one.x, one.weights, [None] * len(numbers), list(numbers))


def columns_of(group: Group, tokens: int) -> dict[str, Callable[[Inputs], Any]]:
    """By name what runs one group."""
    count = len(group.features)
    merged_numbers = list(range(len(group.merged)))
    nothing: list[None] = [None] * count
    found: dict[str, Callable[[Inputs], Any]] = {
        f"{count} GEMMs": lambda one: [functional.linear(one.x, weight) for weight in one.weights],
        "4 serial": lambda one: [functional.linear(one.x, weight) for weight in one.merged],
        "4 streams": lambda one: torch.ops.dsv4.parallel_linear.default.direct(
            one.x, one.merged, [None] * len(one.merged), merged_numbers, 1 << 30
        ),
        "1 packed": lambda one: torch.mm(one.x, one.whole.t()),
    }
    if len(group.merged) == count:
        del found["4 serial"]
        found["2 streams"] = found.pop("4 streams")
    for name in legal(group, tokens):
        if strategies.STRATEGIES[name].forks and tokens > 1024:
            continue  # `stream_max_tokens`
        found[name] = lambda one, name=name: grouped.run_as(name, one.x, one.weights, nothing, list(group.numbers))
    found["ours"] = lambda one: ours(one, group.numbers)
    return found


def legal(group: Group, tokens: int) -> tuple[str, ...]:
    """The ways of `dsv4::grouped_linear`."""
    one = make(group, 1, 0)
    card = tuning.card_of(torch.cuda.current_device() if torch.cuda.is_available() else None)
    count, dtype = len(group.features), one.x.dtype
    weights = (group.columns, group.features, (dtype,) * count, (False,) * count, (tuple(range(count)),))
    return strategies.legal(strategies.Problem(card, *weights, group.numbers, dtype, True), tokens)


def measure(table: str, group: Group, tokens: int) -> dict[str, float]:
    sets = [make(group, tokens, seed) for seed in range(sets_beyond_l2(group.weight_bytes))]
    runs = columns_of(group, tokens)
    check(runs, sets[0])
    calls = {name: each(run, sets) for name, run in runs.items()}
    if torch.cuda.is_available():
        calls = {"reading": each(lambda one: read(one.whole), sets), **calls}
    return {"floor": group.floor(tokens), **side_by_side(calls)}


def check(runs: dict[str, Callable[[Inputs], Any]], one: Inputs) -> None:
    """Every column computes the same."""
    exact = one.x.float() @ one.whole.float().t()
    for name, run in runs.items():
        made = run(one)
        made = torch.cat(made, -1) if isinstance(made, list) else made
        error = float((made.float() - exact).norm() / exact.norm())
        if not error < 1e-2:
            raise SystemExit(f"{name} is wrong: an error of {error:.2e}")


# -------------------------------------------------------------------------------------------------------------- mixed


@dataclass(frozen=True)
class Mixed:
    """The float8 product, `[1024 + 512, K]`, and the bfloat16 weights beside it."""

    low: Tensor
    low_weight: Tensor
    unit: Tensor
    scales: list[Tensor]
    rest: Inputs
    memory: Tensor

    @property
    def low_weights(self) -> list[Tensor]:
        return list(self.low_weight.split(LOW_FEATURES))

    @property
    def scaled(self) -> list[Scaled]:
        return [Scaled(self.low, self.unit, scale, torch.bfloat16) for scale in self.scales]


MIXED_REST = Group(4096, REST, (2, 2, 1), (0, 0, 1, 1, 2))
LOW_FEATURES = (1024, 512)
MIXED_NUMBERS = (0, 0, 1, 1, 2, 3, 3)
BESIDE = ("grouped + _scaled_mm", "grouped + _scaled_mm on a stream")


def make_mixed(tokens: int, seed: int, apart: bool = False) -> Mixed:
    rest = make(MIXED_REST, tokens, seed)
    shape = sum(LOW_FEATURES), MIXED_REST.columns
    # All weights in one piece of memory, for `reading`.
    memory = torch.empty(rest.whole.nbytes + math.prod(shape), dtype=torch.uint8, device=device())
    whole = memory[: rest.whole.nbytes].view(torch.bfloat16).view(rest.whole.shape).copy_(rest.whole)
    weight = memory[rest.whole.nbytes :].view(FLOAT8).view(shape).copy_(torch.randn(shape, device=device()))
    sizes = [merged.shape[0] for merged in rest.merged]
    rest = Inputs(rest.x, whole, list(whole.split(MIXED_REST.features)), list(whole.split(sizes)))
    scales = [torch.full((), MIXED_REST.columns**-0.5, device=device()) for _ in LOW_FEATURES]
    scales = scales if apart else scales[:1] * len(LOW_FEATURES)
    return Mixed(rest.x.to(FLOAT8), weight, torch.ones((), device=device()), scales, rest, memory)


def low_product(one: Mixed) -> Tensor:
    scales = {"scale_a": one.unit, "scale_b": one.scales[0]}
    return torch._scaled_mm(one.low, one.low_weight.t(), **scales, out_dtype=torch.bfloat16)


def low_products(one: Mixed) -> list[Tensor]:
    """With a scale for each weight."""
    layers = zip(one.low_weights, one.scales, strict=True)
    return [
        torch._scaled_mm(one.low, weight.t(), scale_a=one.unit, scale_b=scale, out_dtype=torch.bfloat16)
        for weight, scale in layers
    ]


def mixed_legal(one: Mixed, tokens: int) -> tuple[str, ...]:
    """The ways of `dsv4::mixed_linear`."""
    card = tuning.card_of(torch.cuda.current_device() if torch.cuda.is_available() else None)
    features = (*MIXED_REST.features, *LOW_FEATURES)
    dtypes = (one.rest.x.dtype,) * len(REST) + (FLOAT8,) * len(LOW_FEATURES)
    runs = (tuple(range(len(REST))), tuple(range(len(REST), len(features))))
    lows = tuple(strategies.Low(torch.bfloat16, False, 0, False) for _ in LOW_FEATURES)
    weights = (MIXED_REST.columns, features, dtypes, (False,) * len(features), runs)
    of = strategies.Problem(card, *weights, MIXED_NUMBERS, one.rest.x.dtype, True, scaled=lows)
    return strategies.legal(of, tokens)


def mixed_ours(one: Mixed) -> list[Tensor]:
    count = len(LOW_FEATURES)
    scales = [one.unit] * count, one.scales
    low = [one.low] * count, one.low_weights, [None] * count, *scales, torch.bfloat16, False
    nothing = [None] * len(REST)
    return torch.ops.dsv4.mixed_linear.default.direct(one.rest.x, one.rest.weights, nothing, list(MIXED_NUMBERS), *low)


def mixed_way(name: str, one: Mixed) -> list[Tensor]:
    weights = [*one.rest.weights, *one.low_weights]
    return mixed.run_as(name, one.rest.x, weights, [None] * len(weights), MIXED_NUMBERS, one.scaled)


def check_mixed(runs: dict[str, Callable[[Mixed], Any]], one: Mixed) -> None:
    """Every column computes the same; the order of the results differs."""
    low = one.scales[0] * (one.low.float() @ one.low_weight.float().t())
    exact = torch.cat([low, one.rest.x.float() @ one.rest.whole.float().t()], -1).norm()
    for name, run in runs.items():
        parts: list[Tensor] = []
        rest = [run(one)]
        while rest:
            part = rest.pop()
            if isinstance(part, Tensor):
                parts.append(part)
            else:
                rest += part
        if sum(part.shape[-1] for part in parts) != sum(LOW_FEATURES) + sum(REST):
            raise SystemExit(f"{name} leaves something out")
        norm = torch.cat([part.float() for part in parts], -1).norm()
        if not abs(float(norm / exact) - 1) < 1e-3:
            raise SystemExit(f"{name} is wrong: a norm of {float(norm):.4e} and not {float(exact):.4e}")


def measure_mixed(apart: bool, tokens: int) -> dict[str, float]:
    weight_bytes = sum(LOW_FEATURES) * MIXED_REST.columns + MIXED_REST.weight_bytes
    sets = [make_mixed(tokens, seed, apart) for seed in range(sets_beyond_l2(weight_bytes))]
    float8 = low_products if apart else low_product

    def serial(one: Mixed) -> Any:
        return float8(one), [functional.linear(one.rest.x, weight) for weight in one.rest.merged]

    def packed(one: Mixed) -> Any:
        return float8(one), torch.mm(one.rest.x, one.rest.whole.t())

    def forked(one: Mixed) -> Any:
        def main() -> Tensor:
            return functional.linear(one.rest.x, one.rest.merged[0])

        others = [functools.partial(functional.linear, one.rest.x, weight) for weight in one.rest.merged[1:]]
        return streams.execute_in_parallel(main, [lambda: float8(one), *others], device())

    def packed_and_forked(one: Mixed) -> Any:
        def main() -> Tensor:
            return torch.mm(one.rest.x, one.rest.whole.t())

        return streams.execute_in_parallel(main, [lambda: float8(one)], device())

    def with_ours(one: Mixed) -> Any:
        return float8(one), ours(one.rest, MIXED_REST.numbers)

    def ours_and_forked(one: Mixed) -> Any:
        def main() -> list[Tensor]:
            return ours(one.rest, MIXED_REST.numbers)

        return streams.execute_in_parallel(main, [lambda: float8(one)], device())

    runs: dict[str, Callable[[Mixed], Any]] = {
        "serial": serial,
        "packed by dtype": packed,
        "merged, streams": forked,
        "packed by dtype + stream": packed_and_forked,
        **dict(zip(BESIDE, (with_ours, ours_and_forked), strict=True)),
        **{name: functools.partial(mixed_way, name) for name in mixed_legal(sets[0], tokens) if name != "serial"},
        "ours": mixed_ours,
    }
    check_mixed(runs, sets[0])
    runs = {"reading": lambda one: read(one.memory), **runs}
    row = side_by_side(
        {name: [functools.partial(run, one) for one in sets] * max(1, CALLS // len(sets)) for name, run in runs.items()}
    )
    moved = weight_bytes + tokens * (3 * MIXED_REST.columns + 2 * (sum(LOW_FEATURES) + sum(REST)))
    products = 2 * tokens * MIXED_REST.columns * (sum(LOW_FEATURES) / 2 + sum(REST))
    return {"floor": 1e6 * max(moved / bandwidth(), products / FLOPS), **row}


# --------------------------------------------------------------------------------------------------------------- host


def measure_host(group: Group) -> dict[str, float]:
    one = make(group, 1, 0)
    count = len(group.features)
    nothing: list[None] = [None] * count
    turned = one.whole.t()
    runs: dict[str, Callable[[], Any]] = {
        "torch.mm": lambda: torch.mm(one.x, turned),
        "torch.mm and t": lambda: torch.mm(one.x, one.whole.t()),
        "packed_linear direct": lambda: torch.ops.dsv4.packed_linear.default.direct(one.x, one.weights, nothing),
        "ours direct": lambda: ours(one, group.numbers),
        "ours": lambda: linear.grouped_linear(one.x, one.weights, nothing, group.numbers),
        f"{count} GEMMs": lambda: [functional.linear(one.x, weight) for weight in one.weights],
    }
    return {name: host_microseconds(run) for name, run in runs.items()}


def host_microseconds(run: Callable[[], Any], calls: int = 50, rounds: int = 21) -> float:
    """Of the host for one call, while the device keeps up: few calls, then a wait."""

    def once() -> float:
        begun = time.perf_counter()
        for _ in range(calls):
            run()
        took = time.perf_counter() - begun
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return 1e6 * took / calls

    once()
    return statistics.median(once() for _ in range(rounds))


# ------------------------------------------------------------------------------------------------------------- running


def show(table: str, rows: dict[str, dict[str, float]]) -> None:
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    print(f"\n{table}\n| N | " + " | ".join([*names, "ours / best other", "way"]) + " |")
    print("|--:|" + "--:|" * (len(names) + 1) + "---|")
    for tokens, row in rows.items():
        cells = [f"{row[name]:.1f}" if name in row else "" for name in names]
        mine = ("floor", "reading", "ours", *BESIDE, *strategies.STRATEGIES)
        others = [took for name, took in row.items() if name not in mine]
        print(f"| {tokens} | " + " | ".join(cells) + f" | {row['ours'] / min(others):.2f} | {way(table, tokens)} |")


def way(table: str, tokens: str) -> str:
    """What `ours` runs for this row."""
    group = GROUPS.get(table, MIXED_REST)
    features = (*REST, *LOW_FEATURES) if table in MIXED else group.features
    scales = len(LOW_FEATURES) if table == "scales" else 1
    limit = bucket_of(int(tokens))
    known = [
        entry["strategy"]
        for entry in linear.choices()
        if (entry["columns"], entry["features"]) == (group.columns, features)
        and len({low["of_weight"] for low in entry["scaled"]}) in (0, scales)
        and (entry["tokens"] or float("inf")) == limit
    ]
    return ", ".join(dict.fromkeys(known))


def measure_all(tables: list[str], tokens: list[int] | None) -> dict[str, Any]:
    result: dict[str, Any] = {"rows": {}, "host": {}, "seconds": {}}
    for table in tables:
        begun = time.perf_counter()
        if table == "host":
            result["host"] = {name: measure_host(group) for name, group in GROUPS.items()}
            for name, row in result["host"].items():
                print(f"\nhost, {name}: " + ", ".join(f"{way} {took:.1f}" for way, took in row.items()), flush=True)
        else:
            counts = tokens or (MIXED_TOKENS if table in MIXED else TOKENS)
            run = functools.partial(measure_mixed, table == "scales")
            if table in GROUPS:
                run = functools.partial(measure, table, GROUPS[table])
            rows = {str(count): run(count) for count in track(counts, f"Timing {table}", delay=0)}
            show(table, rows)
            result["rows"] |= {f"{table}/{count}": row for count, row in rows.items()}
        result["seconds"][table] = round(time.perf_counter() - begun, 1)
    if torch.cuda.is_available() and (reason := skinny.unavailable()) is not None:
        print(f"\nThe columns of the skinny product are torch's: {reason}")
    if (reason := proposals.unavailable()) is not None:
        print(f"\nProposals are missing: {reason}")
    return {**result, "bandwidth": bandwidth(), "choices": linear.choices()}


def tiny() -> None:
    """Small groups, for a CPU."""
    for name, group in GROUPS.items():
        GROUPS[name] = Group(64, tuple(features // 32 for features in group.features), group.merged, group.numbers)


def names_of(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(TABLES):
        raise argparse.ArgumentTypeError(f"no table {', '.join(sorted(unknown))}; there are {', '.join(TABLES)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=names_of, default=list(TABLES), help=", ".join(TABLES))
    parser.add_argument("--tokens", type=lambda text: [int(count) for count in text.split(",")])
    parser.add_argument("--json", type=Path, help="file for the results; $OUT/projections.json when OUT is set")
    parser.add_argument("--tiny", action="store_true", help="small groups, on a CPU as well, to see whether this runs")
    arguments = parser.parse_args()
    if arguments.tiny:
        tiny()
        arguments.tables = [table for table in arguments.tables if table not in MIXED]
        arguments.tokens = arguments.tokens or [1, 9]
    elif not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device; --tiny runs small groups on the CPU.")
    gc.freeze()  # each capture collects garbage
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # nothing that was measured before
        result = measure_all(arguments.tables, arguments.tokens)
        from model import environment  # beside this script

        where = {**environment(), "cuda": torch.version.cuda, "cublas": tuning.cublas_version()}
    path = arguments.json or (Path(os.environ["OUT"]) / "projections.json" if "OUT" in os.environ else None)
    if path is not None:
        path.write_text(json.dumps({"environment": where, "method": METHOD, **result}, indent=1) + "\n")
        print(f"written to {path}")


if __name__ == "__main__":
    main()
