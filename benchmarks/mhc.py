"""The mHC operators, foremost post + pre + RMSNorm between two sublayers: each family against a copy of the same bytes.

    PYTHONPATH=. python benchmarks/mhc.py                         # the table, on a GPU
    PYTHONPATH=. python benchmarks/mhc.py --operator all          # pre, post and head alone as well
    PYTHONPATH=. python benchmarks/mhc.py --search --tokens 1,8   # every plan of the CUDA family

What is measured: microseconds a call, from replays of a CUDA graph that holds many calls; median of the replays.

- `hot`: every call has the same buffers; up to about 500 tokens they stay in L2.
- `cold`: the calls of a graph go round sets of buffers that are together larger than twice L2.
- `copy`: a device copy of as many bytes as the operator must move at least (`LEAST`; post + pre: `20 * D + 160` a token
  and `fn` once); half of them read, half of them written.
- `error`: the largest norm-wise relative error of the outputs to float64, over that of the reference, or over `ULP`
  where the reference is closer than that: of two results that are as good as exact, none is twice as good.

bfloat16 residual, float32 `fn`, four streams, 20 Sinkhorn iterations. In the JSON a row is called "hidden/tokens", and
"operator/hidden/tokens" when the operator is not `post_pre`.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peers  # beside this script, as graph_timing
import torch
from graph_timing import REPLAYS, microseconds, sets_beyond_l2  # beside this script
from torch import Tensor

from dsv4_compile.cli import output
from dsv4_compile.kernels.mhc import cuda, reference
from dsv4_compile.kernels.mhc.cuda import compilation
from dsv4_compile.kernels.mhc.cuda.plans import Problem
from dsv4_compile.kernels.mhc.cuda.plans import candidates as few_candidates

OPERATORS = ("post_pre", "pre", "post", "head")
TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
HIDDEN = (4096, 7168)
N, ITERS = 4, 20
LOGITS = (2 + N) * N
CONSTANTS = (1e-6, 1e-6, 1e-6, 2.0, 1e-6)
ULP = 2.0**-23  # of float32
MIXING = 4 * (N + N * N)  # bytes of a token's `post` and `comb`
# What an operator must move: columns and further bytes of a token in bfloat16 and float32, rows of `fn` in float32.
LEAST = {
    "post_pre": (1 + 2 * N + 1, 2 * MIXING, LOGITS),  # x, residual in and out, the collapsed row
    "pre": (N + 1, MIXING, LOGITS),
    "post": (1 + 2 * N, MIXING, 0),
    "head": (N + 1, 0, N),
}
CALLS = 20
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
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

    def arguments(self, operator: str = "post_pre", dtype: torch.dtype = torch.bfloat16) -> tuple[Any, ...]:
        """Of the function of that name in reference.py; `dtype` is that of the new residual and of the row."""
        streams = (self.x, self.residual, self.post, self.comb)
        weights = (self.fn, self.scale, self.base, self.norm_weight)
        rms_eps, pre_eps, _, _, norm_eps = CONSTANTS
        if operator == "post":
            return (*streams, dtype)
        if operator == "pre":
            return (self.residual, *weights, ITERS, *CONSTANTS, dtype)
        if operator == "head":
            of_head = (self.fn[:N], self.scale[:1], self.base[:N], self.norm_weight)
            return (self.residual, *of_head, rms_eps, pre_eps, norm_eps, dtype)
        return (*streams, *weights, ITERS, *CONSTANTS, dtype, dtype)


def make(tokens: int, hidden: int, seed: int) -> Inputs:
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE)

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


def least_bytes(operator: str, tokens: int, hidden: int) -> int:
    columns, further, rows = LEAST[operator]
    return tokens * (2 * columns * hidden + further) + 4 * rows * N * hidden


def sets_for(operator: str, tokens: int, hidden: int) -> int:
    return sets_beyond_l2(least_bytes(operator, tokens, hidden))


def both(run: Callable[..., Any], sets: list[tuple[Any, ...]]) -> tuple[float, float]:
    """Hot and cold."""
    hot = microseconds([lambda: run(*sets[0])] * CALLS)
    rounds = max(1, CALLS // len(sets))
    cold = microseconds([lambda s=s: run(*s) for s in sets] * rounds)
    return hot, cold


def copies(operator: str, tokens: int, hidden: int) -> tuple[float, float]:
    size = least_bytes(operator, tokens, hidden) // 2
    sets = [
        tuple(torch.empty(size, dtype=torch.uint8, device=DEVICE) for _ in range(2))
        for _ in range(sets_for(operator, tokens, hidden))
    ]
    return both(lambda to, source: to.copy_(source), sets)


def implementation(family: str, operator: str) -> Callable[..., Any] | None:
    """The family's function, or None when it has none; "inductor" is the reference compiled, and peers are others'."""
    if family in peers.PEERS:
        return peers.implementation(family, operator)
    name = f"mhc_{operator}"
    if family == "inductor":
        torch._dynamo.reset()  # each row has shapes of its own, and only so many recompilations are allowed
        return torch.compile(getattr(reference, name), dynamic=False)
    return getattr(importlib.import_module(f"dsv4_compile.kernels.mhc.{family}"), name, None)


def errors(operator: str, outputs: Any, inputs: Inputs) -> float:
    """The largest of the outputs' errors, each over eager's in the same dtypes; float32 for post and comb."""
    run = getattr(reference, f"mhc_{operator}")
    wide = Inputs(*(v.double() for v in vars(inputs).values()))
    exact, eager = run(*wide.arguments(operator, torch.float64)), run(*inputs.arguments(operator))
    if isinstance(outputs, Tensor):
        outputs, exact, eager = (outputs,), (exact,), (eager,)

    def distance(a: Tensor, b: Tensor) -> float:
        return float((a.double() - b).norm() / b.norm())

    return max(distance(o, w) / max(distance(e, w), ULP) for o, e, w in zip(outputs, eager, exact, strict=True))


# ------------------------------------------------------------------------------------------------------------- search


DTYPES = (torch.bfloat16,) * 3 + (torch.float32,) * 2 + (torch.bfloat16,) * 2 + (torch.float32,)


def candidates(tokens: int, hidden: int) -> list[cuda.Plan]:
    """Those that a search in a process times, and many more."""
    problem = Problem(cuda._card(0), N, hidden, LOGITS, tuple(compilation.TYPES[dtype] for dtype in DTYPES[:-1]), True)
    return list(dict.fromkeys([*few_candidates(tokens, problem), *more_candidates(tokens)]))


def more_candidates(tokens: int) -> list[cuda.Plan]:
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
    pairs = [(plan, hidden) for hidden in widths for n in tokens for plan in candidates(n, hidden)]

    def compile_one(pair: tuple[cuda.Plan, int]) -> str | None:
        try:
            variant = cuda._variant(1, pair[0], N, pair[1], LOGITS, ITERS, DTYPES, True, True, False, None)
            compilation.cubin(variant, (9, 0))
        except Exception as error:
            return f"{pair}: {error}"
        return None

    with ThreadPoolExecutor(16) as pool:
        for problem in filter(None, pool.map(compile_one, dict.fromkeys(pairs))):
            print(problem[:300])
    result: dict[str, Any] = {}
    for hidden in widths:
        for n in tokens:
            sets = [make(n, hidden, seed).arguments() for seed in range(sets_for("post_pre", n, hidden))]
            copy = copies("post_pre", n, hidden)
            found = []
            for plan in candidates(n, hidden):
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


def table(operators: list[str], tokens: list[int], widths: list[int], families: list[str]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for operator, hidden, n in output.track(list(itertools.product(operators, widths, tokens)), "Timing", delay=0):
        inputs = [make(n, hidden, seed) for seed in range(sets_for(operator, n, hidden))]
        sets = [i.arguments(operator) for i in inputs]
        row: dict[str, Any] = {"copy": copies(operator, n, hidden)}
        for family in families:
            run = implementation(family, operator)
            if run is None:
                continue
            row[family] = both(run, sets)
            out = run(*sets[0])
            out = out[0] if isinstance(out, tuple) and len(out) == 1 else out
            row[f"{family} error"] = errors(operator, out, inputs[0]) if n <= 2048 else None
        key = f"{hidden}/{n}" if operator == "post_pre" else f"{operator}/{hidden}/{n}"
        rows[key] = row
        text = "  ".join(f"{k} {v[0]:.2f} {v[1]:.2f}" if isinstance(v, tuple) else f"{k} {v}" for k, v in row.items())
        print(f"{key}: {text}", flush=True)
    show(rows, ["copy", *families])
    return rows


def show(rows: dict[str, Any], columns: list[str]) -> None:
    """The times as a table."""
    body = [
        (key, *(f"{row[c][0]:.2f} / {row[c][1]:.2f}" if c in row else "" for c in columns)) for key, row in rows.items()
    ]
    output.table("Microseconds a call, hot / cold", ("row", *columns), body, right=range(1, len(columns) + 1))


def operators_of(text: str) -> list[str]:
    names = list(OPERATORS) if text == "all" else text.split(",")
    if unknown := set(names) - set(OPERATORS):
        raise argparse.ArgumentTypeError(f"no operator {', '.join(sorted(unknown))}; there are {', '.join(OPERATORS)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operator", type=operators_of, default=["post_pre"], help=f"{', '.join(OPERATORS)}, or all")
    parser.add_argument("--tokens", type=lambda t: [int(x) for x in t.split(",")], default=list(TOKENS))
    parser.add_argument("--hidden", type=lambda t: [int(x) for x in t.split(",")], default=list(HIDDEN))
    parser.add_argument(
        "--families",
        type=lambda t: t.split(","),
        help=f"cuda and triton, and of {', '.join(peers.PEERS)} what is installed, when left out; also inductor",
    )
    parser.add_argument("--search", action="store_true", help="time every plan of the CUDA family")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true", help="small rows on a CPU, to see whether this runs")
    arguments = parser.parse_args()
    if arguments.tiny:
        global DEVICE
        DEVICE = "cpu"
        arguments.tokens, arguments.hidden = [1, 8], [64]
    elif not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device; --tiny runs small rows on the CPU.")
    families = arguments.families or [*(["cpp"] if arguments.tiny else ["cuda", "triton"]), *peers.present()]
    with torch.no_grad():
        if arguments.search:
            result = search(arguments.tokens, arguments.hidden)
        else:
            result = table(arguments.operator, arguments.tokens, arguments.hidden, families)
    path = arguments.json or (Path(os.environ["OUT"]) / "mhc.json" if "OUT" in os.environ else None)
    if path is not None:
        from model import environment  # beside this script

        text = {"environment": environment(), "method": METHOD, "rows": result}
        path.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
