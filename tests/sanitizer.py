"""Every mHC kernel for a GPU, and the skinny product, under compute-sanitizer, at small sizes.

    python -m tests.sanitizer                # from the root of the checkout; exit status 1 when anything is found
    python -m tests.sanitizer --tools memcheck

For each stream count, hidden size and dtype a process of its own calls each operator of each family at several token
counts, deterministic or not, and `post_pre` of the CUDA family with each shipped plan. One more process calls the
skinny product with each plan. They run side by side: first without a tool, which compiles everything, then under each
of these:

- memcheck: accesses out of bounds or misaligned. Torch's allocator is switched off, because it gives out parts of large
  blocks, in which a neighbour's memory is in bounds. (The counters of the CUDA family stay in the large block that the
  package allocates: their bounds are not checked.)
- racecheck: shared memory. It knows nothing of the counters through which blocks wait for each other.
- initcheck: reads of device memory that nothing has written. What these kernels read was copied from the CPU (the
  inputs), cleared by the driver (the counters) or written by themselves (the workspace, a new residual).

Each result is compared with the oracle: a kernel that has not run is not a kernel without faults.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dsv4_compile.kernels.linear import skinny, tuning
from dsv4_compile.kernels.linear.skinny.plans import PLANS, fitted
from dsv4_compile.kernels.mhc import cuda, families
from dsv4_compile.kernels.mhc.cuda.plans import SHIPPED
from tests.kernels.test_mhc import Case, distance, make, oracle_post, oracle_pre
from tests.kernels.test_mhc_gpu import OPERATORS, arguments_of, first_rows

TOOLS = ("memcheck", "racecheck", "initcheck")
FAMILIES = ("cuda", "triton", "tilelang")
NEEDED = ("cuda", "triton")
TOKENS = (1, 3, 17, 40, 70)
SIZES = tuple(itertools.product((2, 4), (64, 1000), ("bfloat16", "float32")))  # streams, hidden, dtype
SKINNY = "skinny"
PROCESSES = (*(",".join(map(str, size)) for size in SIZES), SKINNY)
NEAR = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
FOUND = 99
SECONDS = 240  # of a process at most
# Torch asks the driver for things that are not there, which is no error of a kernel. The padding keeps allocations from
# touching each other.
OPTIONS = ("--error-exitcode", str(FOUND), "--report-api-errors", "no", "--print-limit", "5")
OF_TOOL = {"memcheck": ("--padding", "32")}


def on_the_device(case: Case) -> Case:
    return case.map(lambda tensor: tensor.cuda())


def calls(most: Case, family: str) -> Iterator[tuple[str, Case, tuple[Tensor, ...]]]:
    """What is called, with what, and what came out."""
    module, hidden = importlib.import_module(f"dsv4_compile.kernels.mhc.{family}"), most.residual.shape[-1]
    # The CUDA family's other plans begin at more tokens; narrow rows make them cheap.
    more = [int(limit) + 1 for limit, _ in cuda.PLANS[:-1] if limit > max(TOKENS)] if hidden < 1000 else []
    for tokens, operator, deterministic in itertools.product((*TOKENS, *more), OPERATORS, (False, True)):
        case = Case(*first_rows(most, tokens))
        if not hasattr(module, operator) or (operator == "mhc_post" and deterministic):
            continue
        arguments = arguments_of(operator, on_the_device(case))
        got = getattr(torch.ops.dsv4, operator)(*arguments, family, deterministic)
        yield operator, case, (got,) if isinstance(got, Tensor) else tuple(got)
    if family == "cuda":
        plans = dict.fromkeys(plan for table in SHIPPED.values() for _, plan in table)
        for tokens, plan in itertools.product(TOKENS, plans):
            case = Case(*first_rows(most, tokens))
            yield "mhc_post_pre", case, cuda.mhc_post_pre(*on_the_device(case), plan=plan)


def oracle_of(operator: str, case: Case) -> tuple[Tensor, ...]:
    streams = (oracle_post(case),) if operator in ("mhc_post_pre", "mhc_post") else ()
    if operator == "mhc_post":
        return streams
    wanted = oracle_pre(replace(case, residual=streams[0]) if streams else case)
    return streams + (wanted[:1] if operator == "mhc_head" else wanted)


def run(n: int, hidden: int, dtype: torch.dtype) -> None:
    """In this process."""
    most = make((1 + max(int(limit) for limit, _ in cuda.PLANS[:-1]),), hidden, n, dtype=dtype, iters=3)
    for family in FAMILIES:
        chosen = families.resolve(family, torch.device("cuda:0"), n, hidden, dtype)
        if chosen != (family, None):
            assert family not in NEEDED, chosen
            print(f"left out: {chosen[1]}")
            continue
        count = 0
        for operator, case, got in calls(most, family):
            distances = [distance(g.cpu(), w) for g, w in zip(got, oracle_of(operator, case), strict=True)]
            assert max(distances) <= NEAR[dtype], (family, operator, case.x.shape, distances)
            count += 1
        assert families.resolve(family, torch.device("cuda:0"), n, hidden, dtype) == chosen
        print(f"{family}: {count} calls")


def run_skinny() -> None:
    """In this process: rows that fill no tile, columns that fill no stage, outputs of two dtypes, a bias."""
    card, count = tuning.card_of(0), 0
    for plan, tokens, columns in itertools.product(PLANS.values(), (1, 9, 33, 64), (520, 2056)):
        features = (70, 1, 33, 500)
        if fitted(plan, "bf16", tokens, features, columns, card.capability, card.multiprocessors) is None:
            continue
        rows, *weights = [torch.randn(lines, columns).to(torch.bfloat16).cuda() for lines in (tokens, *features)]
        biases = [torch.ones(70, dtype=torch.bfloat16, device="cuda"), None, None, None]
        outputs = [torch.empty(tokens, lines, device="cuda") for lines in features[:2]]
        outputs += [rows.new_empty(tokens, lines) for lines in features[2:]]
        skinny.multiply(plan, rows, weights, biases, outputs)
        for weight, bias, output in zip(weights, biases, outputs, strict=True):
            wanted = torch.nn.functional.linear(
                *(None if t is None else t.cpu().double() for t in (rows, weight, bias))
            )
            assert distance(output.cpu(), wanted) <= NEAR[torch.bfloat16], (plan, tokens, columns)
        count += 1
    assert count and skinny.unavailable() is None, (count, skinny.unavailable())
    print(f"skinny: {count} calls")


def under(tool: str | None, process_name: str) -> tuple[int, str]:
    """Exit status and output of one of `PROCESSES`, under `tool` or under none."""
    command = [sys.executable, "-m", "tests.sanitizer", "--only", process_name]
    if tool is not None:
        command = ["compute-sanitizer", "--tool", tool, *OPTIONS, *OF_TOOL.get(tool, ()), *command]
    process = subprocess.Popen(
        command,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "2", "DSV4_TUNE": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=SECONDS)
        return process.returncode, text
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the tool and what it runs
        return FOUND, f"{process.communicate()[0]}\nnot done in {SECONDS} seconds: does a block wait for ever?"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", type=lambda text: text.split(","), default=list(TOOLS))
    parser.add_argument("--only", help="streams,hidden,dtype, or skinny: the calls themselves, in this process")
    arguments = parser.parse_args()
    if arguments.only == SKINNY:
        run_skinny()
        return 0
    if arguments.only:
        n, hidden, dtype = arguments.only.split(",")
        run(int(n), int(hidden), getattr(torch, dtype))
        return 0
    if shutil.which("compute-sanitizer") is None:
        print("There is no compute-sanitizer on PATH; it comes with the CUDA toolkit.")
        return 1
    failed = False
    with ThreadPoolExecutor(min(len(PROCESSES), os.cpu_count() or 1)) as pool:
        for tool in (None, *arguments.tools):
            results = pool.map(lambda name, tool=tool: under(tool, name), PROCESSES)
            for name, (status, text) in zip(PROCESSES, results, strict=True):
                print(f"{tool or 'no tool'}, {name}: {'fine' if status == 0 else f'exit status {status}'}", flush=True)
                if status:
                    failed = True
                    print(text[-6000:], flush=True)
            if failed and tool is None:
                break
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
