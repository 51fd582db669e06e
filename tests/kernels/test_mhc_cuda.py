"""The CUDA family of mHC: what can be known without a GPU, and each plan on one."""

from __future__ import annotations

import concurrent.futures
import itertools
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsv4_compile.kernels.cuda import kept
from dsv4_compile.kernels.driver import bindings, check
from dsv4_compile.kernels.mhc import cuda, families, reference, warmup
from dsv4_compile.kernels.mhc.cuda import ARGUMENTS, compilation
from dsv4_compile.kernels.mhc.cuda.plans import (
    BUCKETS,
    DETERMINISTIC,
    HOPPER_SHARED_BYTES,
    SHIPPED,
    WARPS,
    Plan,
    Problem,
    fitting,
    plan_for,
)
from tests.kernels.test_mhc import assert_close, distance, make, oracle
from tests.kernels.test_mhc_gpu import assert_no_farther_than_the_rounding, first_rows

LIMITS = [limit for limit in BUCKETS if limit != math.inf]
PLANS = list(dict.fromkeys(plan for table in SHIPPED.values() for _, plan in table))
TOKENS = sorted({1, *(int(limit) + k for limit in LIMITS for k in (-1, 0, 1)), 3000})


def problem(n: int, hidden: int) -> Problem:
    return Problem(cuda.HOPPER, n, hidden, (2 + n) * n, ("bf16",) * 7, True)


# ----------------------------------------------------------------------------------------------------- without a GPU


@pytest.mark.parametrize("n", range(2, 9))
@pytest.mark.parametrize("hidden", [8, 1000, 4096, 7168, 8192])
def test_the_slices_of_a_plan_cover_the_hidden_axis_and_no_slice_is_empty(n: int, hidden: int) -> None:
    for tokens, bytes_of_column in itertools.product(TOKENS, (2 * (n + 1), 4 * (n + 1))):
        plan = fitting(
            plan_for(tokens, problem(n, hidden)), n, hidden, (2 + n) * n, bytes_of_column, HOPPER_SHARED_BYTES
        )
        warps = WARPS // plan.groups if plan.whole else max(1, WARPS // n)
        columns = warps * 4 * plan.vec * plan.steps
        slices = plan.slices(n, hidden)
        assert (slices - 1) * columns < hidden <= slices * columns


def test_a_block_whose_programs_take_turns_waits_for_an_earlier_tile() -> None:
    """With lag 0 it would wait for blocks that may not have started: a deadlock."""
    assert all(plan.lag >= 1 for plan in PLANS if plan.combined)


@pytest.mark.parametrize("limit", [101_376, 166_912, HOPPER_SHARED_BYTES], ids=["sm_89", "sm_80", "sm_90"])
def test_every_plan_fits_the_shared_memory(limit: int) -> None:
    for tokens, n, residual, x in itertools.product(TOKENS, range(2, 9), (2, 4), (2, 4)):
        logits = (2 + n) * n
        plan = fitting(plan_for(tokens, problem(n, 4096)), n, 4096, logits, n * residual + x, limit)
        fixed = 4 * WARPS * 16 * (logits + 1)
        assert plan.staged_bytes(n * residual + x) + fixed <= limit, (tokens, n, plan)


def test_a_plan_for_four_bfloat16_streams_is_as_it_was_measured_and_two_blocks_fit() -> None:
    for plan in PLANS:
        assert fitting(plan, 4, 4096, 24, 10, HOPPER_SHARED_BYTES) == plan
        assert 2 * (plan.staged_bytes(10) + 4 * WARPS * 16 * 25 + 1024) <= HOPPER_SHARED_BYTES


def test_the_arguments_are_packed_as_the_kernel_reads_them() -> None:
    text = (compilation.FOLDER / "launch.cuh").read_text()
    members = re.search(r"struct Arguments \{(.*?)\n\};", text, re.S).group(1)
    code = re.sub(r"//.*", "", members)
    floats = re.search(r"float ((?:\w+, )+\w+);", code).group(1).split(", ")
    assert (code.count("*"), len(floats)) == (14, 5)
    assert ARGUMENTS.size == -(-(14 * 8 + 8 + 5 * 4) // 8) * 8


def test_an_arena_gives_no_word_twice() -> None:
    arena = kept.Arena(10, 1000)
    assert [arena.take(4), arena.take(6), arena.take(1)] == [1000, 1016, None]


def test_words_are_kept_for_each_stream_and_each_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, capturing, made = 7, 0, []

    def allocate(index: int, size: int, fill: int) -> kept.Arena:
        made.append((index, size, fill))
        return kept.Arena(size, 4096 * len(made))

    monkeypatch.setattr(kept, "_allocate", allocate)
    monkeypatch.setattr(kept, "_capture", lambda _: capturing)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: stream, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing > 0)
    words = kept.Kept(fill=5, arena=100, least=10)
    first = words.take(3, 0)
    assert words.take(10, 0) == first == 4096
    assert words.take(11, 0) == 4096 + 4 * 10  # more than before: others, rounded up
    stream = 8
    assert words.take(1, 0) == 4096 + 4 * 26
    capturing = 1
    of_capture = words.take(3, 0)
    assert of_capture == words.take(2, 0) == 4096 + 4 * 36
    capturing = 2
    assert words.take(3, 0) == of_capture + 12
    assert words.take(3, 1) == 2 * 4096  # another device
    assert words.take(500, 0) == 3 * 4096
    assert made == [(0, 100, 5), (1, 100, 5), (0, 500, 5)]


def variant(
    tokens: int,
    n: int = 4,
    hidden: int = 512,
    dtype: torch.dtype = torch.bfloat16,
    has_post: bool = True,
    mixing: torch.dtype = torch.float32,
) -> compilation.Variant:
    dtypes = (dtype, dtype, dtype, torch.float32, torch.float32, dtype, dtype, mixing)
    return cuda._variant(tokens, None, n, hidden, (2 + n) * n, 20, dtypes, has_post, True, False, None)


def test_warmup_knows_every_kernel_that_a_token_count_can_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_seen", set())
    cuda._variant.cache_clear()
    for n, has_post in ((4, True), (4, False), (8, True)):
        variant(1, n, 7168, has_post=has_post)
    known = {one for one, _ in cuda.reachable(5000)}
    asked = {
        variant(tokens, n, 7168, has_post=post) for tokens in range(1, 5001) for n, post in ((4, 1), (4, 0), (8, 1))
    }
    assert asked == known
    assert {one for one, _ in cuda.reachable(20)} < known


def test_processes_share_a_cold_folder(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    script = """
import torch
from tests.kernels.test_mhc_cuda import variant
from dsv4_compile.kernels.mhc.cuda.compilation import cubin
print(len(cubin(variant(1), (9, 0))))
"""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", script]
    root = Path(__file__).parents[2]
    running = [
        subprocess.Popen(command, env=environment, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    outputs = [process.communicate() for process in running]
    assert len({out for out, _ in outputs}) == 1 and int(outputs[0][0]) > 10_000, outputs
    assert len(list((tmp_path / "dsv4").glob("*"))) == 1


def compiled_by_nvcc(one: compilation.Variant, folder: Path) -> str:
    """What the compiler says about registers."""
    macros = [f"-D{name}={value}" for name, value in one.macros.items()]
    command = ["nvcc", "-cubin", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas", "-v", *macros]
    target = folder / f"{abs(hash(one))}.cubin"
    done = subprocess.run(
        [*command, "-o", str(target), str(compilation.SOURCE)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert target.stat().st_size > 0
    return done.stderr


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_every_plan_compiles_for_hopper(tmp_path: Path) -> None:
    variants = [variant(tokens, has_post=post) for tokens in {1, *TOKENS} for post in (True, False)]
    variants += [variant(1, n, 40, dtype) for n in (2, 3, 8) for dtype in (torch.float32, torch.float16)]
    variants += [variant(tokens, mixing=torch.bfloat16) for tokens in {1, *TOKENS}]
    variants += [variant(1, mixing=torch.float16), variant(1, 3, 40, torch.float32, mixing=torch.bfloat16)]
    distinct = {str(one.macros): one for one in variants}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(lambda one: compiled_by_nvcc(one, tmp_path), distinct.values()))
    # The plans for a bfloat16 residual of four streams are the ones that are to be fast.
    assert sum("0 bytes spill stores" in text for text in texts) >= 2 * len(PLANS)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_a_kernel_that_rounds_the_weights_is_another_one(tmp_path: Path) -> None:
    types = variant(1).types[:-1]
    for mixing in ("float", "bf16", "f16"):
        one = compilation.Variant(PLANS[0], 4, 512, 4, 0, (*types, mixing), True, False, False, "mhc_post")
        compiled_by_nvcc(one, tmp_path)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 3


def test_without_the_bindings_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'cuda'")

    monkeypatch.setattr(cuda, "bindings", missing)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    reason = cuda.refusal(torch.device("cuda:0"), 4, 4096, torch.bfloat16)
    assert reason is not None and "NVRTC could not be loaded (ModuleNotFoundError" in reason


@pytest.mark.parametrize(
    ("n", "hidden", "dtype", "why"),
    [
        (9, 64, torch.bfloat16, "2 to 8 streams and there are 9"),
        (4, 100, torch.bfloat16, "multiples of 8"),
        (4, 16384, torch.bfloat16, "up to 8192"),
        (4, 64, torch.float64, "torch.float64"),
    ],
)
def test_what_it_is_not_written_for_is_refused(n: int, hidden: int, dtype: torch.dtype, why: str) -> None:
    assert why in (cuda.refusal(torch.device("cuda:0"), n, hidden, dtype) or "")
    assert "runs on CUDA" in (cuda.refusal(torch.device("cpu"), 4, 64, torch.float32) or "")


# --------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    "plan",
    [*PLANS, replace(DETERMINISTIC, groups=2)],
    ids=lambda plan: f"tile{plan.tile}-vec{plan.vec}-lag{plan.lag}",
)
@pytest.mark.parametrize("hidden", [520, 4096])
def test_every_plan_is_right_at_any_token_count(plan: Plan, hidden: int) -> None:
    for tokens in (1, 15, 16, 17, 31, 33, 64, 65, 200):
        case = make((tokens,), hidden, seed=tokens, dtype=torch.bfloat16, device="cuda")
        assert_no_farther_than_the_rounding(case, cuda.mhc_post_pre(*case, plan=plan))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "plan",
    PLANS,
    ids=lambda plan: f"tile{plan.tile}-vec{plan.vec}-lag{plan.lag}",
)
@pytest.mark.parametrize("mixing", [torch.bfloat16, torch.float16])
def test_every_plan_rounds_the_weights(plan: Plan, mixing: torch.dtype) -> None:
    for tokens in (1, 17, 65, 200):
        case = make((tokens,), 520, seed=tokens, dtype=torch.bfloat16, device="cuda")
        rounded = replace(case, post=case.post.to(mixing), comb=case.comb.to(mixing))
        wanted = cuda.mhc_post_pre(*rounded, plan=plan)[0].double()
        got = cuda.mhc_post_pre(*case, mixing_dtype=mixing, plan=plan)[0]
        assert distance(got, wanted) < 2e-4 < 5e-4 < distance(cuda.mhc_post_pre(*case, plan=plan)[0], wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 40, 300, 2000])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_thousand_repeats_are_equal_and_leave_kept_words_as_they_were(tokens: int, deterministic: bool) -> None:
    case = make((tokens,), 1024, dtype=torch.bfloat16, device="cuda")
    first = torch.ops.dsv4.mhc_post_pre(*case, "cuda", deterministic)
    for _ in range(1000):
        again = torch.ops.dsv4.mhc_post_pre(*case, "cuda", deterministic)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    torch.cuda.synchronize()
    driver, _ = bindings()
    for words in (kept.COUNTERS, kept.SUMS):
        for arena in (arena for arenas in words.arenas.values() for arena in arenas):
            content = bytearray(4 * arena.size)
            check(driver.cuMemcpyDtoH(content, arena.address, len(content)))
            assert content == words.fill.to_bytes(4, "little") * arena.size


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [3, 300])
def test_graphs_of_one_stream_replay_side_by_side(tokens: int) -> None:
    """They were captured on one stream and run on two: they must not share counters or sums."""
    case = make((tokens,), 4096, dtype=torch.bfloat16, device="cuda")
    wanted = torch.ops.dsv4.mhc_post_pre(*case, "cuda")
    graphs, outputs = [], []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs.append([torch.ops.dsv4.mhc_post_pre(*case, "cuda") for _ in range(10)])
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for call in (call for calls in outputs for call in calls):
        assert all(torch.equal(a, b) for a, b in zip(call, wanted, strict=True))


@pytest.mark.gpu
def test_streams_run_it_side_by_side() -> None:
    case = make((200,), 4096, dtype=torch.bfloat16, device="cuda")
    wanted = torch.ops.dsv4.mhc_post_pre(*case, "cuda")
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for _ in range(25):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(torch.ops.dsv4.mhc_post_pre(*case, "cuda"))
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for got in results for a, b in zip(got, wanted, strict=True))


@pytest.mark.gpu
def test_a_write_of_the_launch_before_is_seen() -> None:
    """Blocks start before that launch has ended."""
    case = make((8,), 4096, dtype=torch.bfloat16, device="cuda")
    sources = [torch.randn_like(case.x) for _ in range(20)]
    wanted = [torch.ops.dsv4.mhc_post_pre(*replace(case, x=source), "cuda") for source in sources]
    got = []
    for source in sources:
        case.x.copy_(source)
        got.append(torch.ops.dsv4.mhc_post_pre(*case, "cuda"))
    for one, other in zip(got, wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.gpu
def test_float32_matches_the_oracle_in_every_plan() -> None:
    for tokens in (1, 40, 100, 500, 1500):
        case = make((tokens,), 1024, seed=tokens, device="cuda")
        assert_close(torch.ops.dsv4.mhc_post_pre(*case, "cuda"), oracle(case))


@pytest.mark.gpu
@pytest.mark.parametrize("eps", [1e-30, 1e-24, 1e-19])
def test_sums_near_the_smallest_numbers_do_not_become_infinite(eps: float) -> None:
    case = make((20,), 64, device="cuda", sinkhorn_eps=eps)
    case.base[8:].view(4, 4)[:, 2:] -= 120
    wanted = tuple(v.double() for v in reference.mhc_post_pre(*case))
    assert all(v.isfinite().all() for v in wanted)
    assert_close(torch.ops.dsv4.mhc_post_pre(*case, "cuda"), wanted, 1e-5)


@pytest.mark.gpu
def test_a_base_of_minus_infinity_masks() -> None:
    case = make((20,), 64, device="cuda")
    case.base[1] = case.base[5] = case.base[9] = -math.inf
    wanted = reference.mhc_post_pre(*case)
    got = torch.ops.dsv4.mhc_post_pre(*case, "cuda")
    assert all(v.isfinite().all() for v in wanted)
    assert_close(got, tuple(v.double() for v in wanted), 1e-5)


@pytest.mark.gpu
def test_after_warmup_nothing_is_compiled() -> None:
    case = make((3000,), 256, dtype=torch.bfloat16, device="cuda")
    torch.ops.dsv4.mhc_post_pre(*first_rows(case, 1), "cuda")
    warmup(3000)
    before = len(compilation._kernels)
    for tokens in (*range(1, 300), 1000, 1024, 1025, 3000):
        torch.ops.dsv4.mhc_post_pre(*first_rows(case, tokens), "cuda")
    assert len(compilation._kernels) == before


@pytest.mark.gpu
def test_a_new_thread_may_call_it_first() -> None:
    case = make((5,), 512, dtype=torch.bfloat16, device="cuda")
    wanted = torch.ops.dsv4.mhc_post(*case.expand(), "cuda")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        got = pool.submit(lambda: torch.ops.dsv4.mhc_post(*case.expand(), "cuda")).result()
    assert torch.equal(got, wanted)
    assert families.resolve("cuda", case.x.device, 4, 512, torch.bfloat16) == ("cuda", None)
