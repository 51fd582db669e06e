"""mHC's post + pre + RMSNorm between two sublayers: every kernel family against a copy of the same bytes.

    PYTHONPATH=. python benchmarks/mhc.py                         # the table, on a GPU
    PYTHONPATH=. python benchmarks/mhc.py --search --tokens 1,8   # every plan of the CUDA family

What is measured: microseconds a call, from replays of a CUDA graph that holds many calls; median of the replays.

- `hot`: every call has the same buffers; up to about 500 tokens they stay in L2.
- `cold`: the calls of a graph go round sets of buffers that are together larger than twice L2.
- `copy`: a device copy of as many bytes as the operator must move at least, `20 * D + 160` a token and `fn` once; half
  of them read, half of them written.
- `error`: the largest norm-wise relative error of the four outputs to float64, over that of the reference.

bfloat16 residual, float32 `fn`, four streams, 20 Sinkhorn iterations.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4_compile.kernels.mhc import cuda, reference
from dsv4_compile.kernels.mhc.cuda import compilation

TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
HIDDEN = (4096, 7168)
N, ITERS = 4, 20
LOGITS = (2 + N) * N
CONSTANTS = (1e-6, 1e-6, 1e-6, 2.0, 1e-6)
L2_BYTES = 50 << 20
CALLS, REPLAYS = 20, 15
METHOD = (
    f"microseconds a call, hot and cold: median of {REPLAYS} replays of a CUDA graph of {CALLS} calls or more; see "
    "benchmarks/mhc.py"
)


@dataclass(frozen=True)
class Inputs:
    """Arguments of one call."""

    x: Tensor
    residual: Tensor
    post: Tensor
    comb: Tensor
    fn: Tensor
    scale: Tensor
    base: Tensor
    norm_weight: Tensor

    def arguments(self) -> tuple[Any, ...]:
        return (*vars(self).values(), ITERS, *CONSTANTS, torch.bfloat16, torch.bfloat16)


def make(tokens: int, hidden: int, seed: int) -> Inputs:
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    return Inputs(
        normal(tokens, hidden).bfloat16(),
        normal(tokens, N, hidden).bfloat16(),
        normal(tokens, N).abs(),
        normal(tokens, N, N).softmax(-1),
        normal(LOGITS, N * hidden) / (N * hidden) ** 0.5,
        normal(3),
        normal(LOGITS),
        (1 + 0.1 * normal(hidden)).bfloat16(),
    )


def least_bytes(tokens: int, hidden: int) -> int:
    """x, residual in and out, the collapsed row in bfloat16; post and comb in and out and `fn` in float32."""
    return tokens * (20 * hidden + 2 * 4 * (N + N * N)) + 4 * LOGITS * N * hidden


def microseconds(calls: list[Callable[[], Any]]) -> float:
    """Of one call, in a graph of all of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / len(calls))
    return statistics.median(times)


def sets_for(tokens: int, hidden: int) -> int:
    return max(2, -(-2 * L2_BYTES // least_bytes(tokens, hidden)) + 1)


def both(run: Callable[..., Any], sets: list[tuple[Any, ...]]) -> tuple[float, float]:
    """Hot and cold."""
    hot = microseconds([lambda: run(*sets[0])] * CALLS)
    rounds = max(1, CALLS // len(sets))
    cold = microseconds([lambda s=s: run(*s) for s in sets] * rounds)
    return hot, cold


def copies(tokens: int, hidden: int) -> tuple[float, float]:
    size = least_bytes(tokens, hidden) // 2
    sets = [
        tuple(torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
        for _ in range(sets_for(tokens, hidden))
    ]
    return both(lambda to, source: to.copy_(source), sets)


def errors(outputs: tuple[Tensor, ...], inputs: Inputs) -> float:
    """The largest of the four errors, each over eager's in the same dtypes; float32 for post and comb."""
    wide = [v.double() for v in vars(inputs).values()]
    exact = reference.mhc_post_pre(*wide, ITERS, *CONSTANTS, torch.float64, torch.float64)
    eager = reference.mhc_post_pre(*inputs.arguments())

    def distance(a: Tensor, b: Tensor) -> float:
        return float((a.double() - b).norm() / b.norm())

    return max(distance(o, w) / max(distance(e, w), 1e-9) for o, e, w in zip(outputs, eager, exact, strict=True))


# ------------------------------------------------------------------------------------------------------------- search


def candidates(tokens: int) -> list[cuda.Plan]:
    """Plans worth timing for a token count."""
    plans = []
    if tokens <= 64:
        for vec in (4, 8):
            plans.append(cuda.Plan(1, False, vec, 1, 1, True))
    if 32 <= tokens <= 128:
        for steps, (together, width) in itertools.product((1, 2), ((1, 1), (4, 1), (4, 2))):
            plans.append(cuda.Plan(1, True, 4, steps, together, True, 0, 2, min(2, steps), width))
    if 32 <= tokens <= 512:
        for groups, (vec, steps), together, width, blocks in itertools.product(
            (1, 2), ((4, 1), (4, 2), (8, 1), (8, 2)), (1, 4), (1, 2), (2, 3)
        ):
            if blocks == 2 or vec == 4:
                plan = cuda.Plan(groups, True, vec, steps, together, False, 1, blocks, min(2, steps), width, True)
                plans.append(plan)
    if tokens >= 256:
        for groups, (vec, steps), lag, width in itertools.product(
            (2, 4), ((8, 1), (8, 2), (8, 4), (4, 4)), (1, 4, 8, 12), (1, 2)
        ):
            plans.append(cuda.Plan(groups, True, vec, steps, 8, False, lag, 2, 2, width, True))
        for groups, steps, lag, stages in itertools.product((2, 4), (4, 8), (8, 16), (2, 3)):
            plans.append(cuda.Plan(groups, True, 4, steps, 8, False, lag, 3, stages, 1, True))
        for lag, width in itertools.product((8, 16), (1, 2)):
            plans.append(cuda.Plan(2, True, 8, 2, 8, False, lag, 2, 2, width))
    return plans


def search(tokens: list[int], widths: list[int]) -> dict[str, Any]:
    pairs = [(plan, hidden) for hidden in widths for n in tokens for plan in candidates(n)]
    dtypes = (torch.bfloat16,) * 3 + (torch.float32,) * 2 + (torch.bfloat16,) * 2

    def compile_one(pair: tuple[cuda.Plan, int]) -> str | None:
        try:
            compilation.cubin(cuda._variant(1, pair[0], N, pair[1], LOGITS, ITERS, dtypes, True, True, False), (9, 0))
        except Exception as error:
            return f"{pair}: {error}"
        return None

    with ThreadPoolExecutor(16) as pool:
        for problem in filter(None, pool.map(compile_one, dict.fromkeys(pairs))):
            print(problem[:300])
    result: dict[str, Any] = {}
    for hidden in widths:
        for n in tokens:
            sets = [make(n, hidden, seed).arguments() for seed in range(sets_for(n, hidden))]
            copy = copies(n, hidden)
            found = []
            for plan in candidates(n):
                try:
                    hot, cold = both(lambda *a, plan=plan: cuda.mhc_post_pre(*a, plan=plan), sets)
                except Exception as error:
                    print(plan, str(error)[:200])
                    continue
                found.append((hot, cold, plan))
            found.sort(key=lambda entry: entry[0] + entry[1])
            print(f"hidden {hidden} N {n}: copy {copy[0]:.1f} {copy[1]:.1f}", flush=True)
            for hot, cold, plan in found[:6]:
                print(f"   {hot:7.2f} {cold:7.2f}  {plan}", flush=True)
            result[f"{hidden}/{n}"] = {"copy": copy, "plans": [(h, c, str(p)) for h, c, p in found]}
    return result


# -------------------------------------------------------------------------------------------------------------- table


def table(tokens: list[int], widths: list[int], families: list[str]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for hidden in widths:
        for n in tokens:
            inputs = [make(n, hidden, seed) for seed in range(sets_for(n, hidden))]
            sets = [i.arguments() for i in inputs]
            row: dict[str, Any] = {"copy": copies(n, hidden)}
            for family in families:
                run = FAMILIES[family]
                row[family] = both(run, sets)
                row[f"{family} error"] = errors(run(*sets[0]), inputs[0]) if n <= 2048 else None
            rows[f"{hidden}/{n}"] = row
            text = "  ".join(
                f"{k} {v[0]:.2f} {v[1]:.2f}" if isinstance(v, tuple) else f"{k} {v}" for k, v in row.items()
            )
            print(f"{hidden}/{n}: {text}", flush=True)
    return rows


def _triton(*arguments: Any) -> Any:
    from dsv4_compile.kernels.mhc import triton

    return triton.mhc_post_pre(*arguments)


def _tilelang(*arguments: Any) -> Any:
    from dsv4_compile.kernels.mhc import tilelang

    return tilelang.mhc_post_pre(*arguments)


FAMILIES: dict[str, Callable[..., Any]] = {
    "cuda": cuda.mhc_post_pre,
    "triton": _triton,
    "tilelang": _tilelang,
    "inductor": torch.compile(reference.mhc_post_pre, dynamic=False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=lambda t: [int(x) for x in t.split(",")], default=list(TOKENS))
    parser.add_argument("--hidden", type=lambda t: [int(x) for x in t.split(",")], default=list(HIDDEN))
    parser.add_argument("--families", type=lambda t: t.split(","), default=["cuda", "triton"])
    parser.add_argument("--search", action="store_true", help="time every plan of the CUDA family")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with torch.no_grad():
        if arguments.search:
            result = search(arguments.tokens, arguments.hidden)
        else:
            result = table(arguments.tokens, arguments.hidden, arguments.families)
    path = arguments.json or (Path(os.environ["OUT"]) / "mhc.json" if "OUT" in os.environ else None)
    if path is not None:
        from model import environment  # beside this script

        text = {"environment": environment(), "method": METHOD, "rows": result}
        path.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
