"""The mHC operators on a GPU, in every kernel family for it, against the oracle of `test_mhc.py`."""

from __future__ import annotations

import importlib
import math
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.mhc import cuda, families, warmup
from dsv4_compile.kernels.mhc.cuda import compilation, plans
from tests.kernels.test_mhc import (
    SAME,
    Case,
    as_transformers_does,
    assert_close,
    assert_served_by,
    assert_three_operators_match,
    assert_weights_are_rounded,
    distance,
    make,
    oracle,
    oracle_post,
    oracle_pre,
)

GPU_FAMILIES = ("cuda", "triton", "tilelang")
OPERATORS = ("mhc_post_pre", "mhc_pre", "mhc_post", "mhc_head")
# Triton has no head: the reference serves it.
WRITTEN = [(kernel, name) for kernel in GPU_FAMILIES for name in OPERATORS if (kernel, name) != ("triton", "mhc_head")]
each_operator = pytest.mark.parametrize(("kernel", "operator"), WRITTEN)
# Tensor cores cut off what does not fit the sum they add to; Triton's sums are long where tokens or columns are many.
LONG_SUMS = {"cuda": SAME, "triton": 5e-6, "tilelang": 5e-6}
ROUNDED = {torch.float32: SAME, torch.bfloat16: 2e-3}  # bfloat16: a rounding is 2^-9 at most


def arguments_of(operator: str, case: Case) -> tuple[Any, ...]:
    """Those of the operator before `kernel`; the head has the first rows of what `pre` has."""
    n = case.residual.shape[-2]
    head = (case.residual, case.fn[:n], case.scale[:1], case.base[:n], case.norm_weight)
    return {
        "mhc_post_pre": tuple(case),
        "mhc_pre": case.pre(),
        "mhc_post": case.expand(),
        "mhc_head": (*head, case.rms_eps, case.pre_eps, case.norm_eps, case.out_dtype),
    }[operator]


def call(operator: str, case: Case, kernel: str, deterministic: bool = False) -> tuple[Tensor, ...]:
    got = getattr(torch.ops.dsv4, operator)(*arguments_of(operator, case), kernel, deterministic)
    return (got,) if isinstance(got, Tensor) else tuple(got)


def assert_no_farther_than_the_rounding(
    case: Case, got: tuple[Tensor, ...], operator: str = "mhc_post_pre", bound: float = SAME
) -> None:
    """The outputs that are rounded are a rounding away from float64; `post` and `comb` are exact for the residual."""
    if operator in ("mhc_post_pre", "mhc_post"):
        residual, *got = got
        assert distance(residual, oracle_post(case)) <= ROUNDED[case.residual_dtype]
        case = replace(case, residual=residual)
    if operator != "mhc_post":
        row, *expansion = got
        wanted = oracle_pre(case)
        assert distance(row, wanted[0]) <= ROUNDED[case.out_dtype]
        if operator != "mhc_head":
            assert_close(tuple(expansion), wanted[1:], bound)


@pytest.mark.gpu
def test_auto_on_a_gpu_is_cuda() -> None:
    assert families.resolve("auto", torch.device("cuda:0"), 4, 4096, torch.bfloat16) == ("cuda", None)
    family, reason = families.resolve("auto", torch.device("cuda:0"), 4, 4100, torch.bfloat16)
    assert family == "triton" and reason is not None and "multiples of 8" in reason


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", GPU_FAMILIES)
@pytest.mark.parametrize("hidden", [4096, 7168])
@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 300])
def test_on_a_gpu_float32_matches_the_oracle(kernel: str, tokens: int, hidden: int) -> None:
    assert_three_operators_match(make((tokens,), hidden, seed=tokens, device="cuda"), kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", GPU_FAMILIES)
@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("iters", [0, 1, 20])
def test_on_a_gpu_other_stream_counts_match(kernel: str, n: int, iters: int) -> None:
    assert_three_operators_match(make((5,), 1000, n, iters=iters, device="cuda"), kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", GPU_FAMILIES)
@pytest.mark.parametrize("tokens", [1, 65, 2500])
def test_on_a_gpu_bfloat16_is_no_farther_from_the_oracle_than_eager(kernel: str, tokens: int) -> None:
    case = make((tokens,), 4096, dtype=torch.bfloat16, weights=torch.bfloat16, device="cuda")
    ours = torch.ops.dsv4.mhc_post_pre(*case, kernel)
    # At one token a single rounding of the new residual shows in `comb`, in both of them.
    margin = 1.05 if tokens == 1 else 1.0
    for got, other, exact in zip(ours, as_transformers_does(case), oracle(case), strict=True):
        assert distance(got, exact) <= distance(other, exact) * margin
    assert_served_by(kernel, case)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", GPU_FAMILIES)
@pytest.mark.parametrize("mixing", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "n"), [(1, 4), (17, 4), (100, 4), (600, 4), (2500, 4), (33, 3), (33, 8)])
def test_on_a_gpu_rounded_weights_match(
    kernel: str, mixing: torch.dtype, dtype: torch.dtype, tokens: int, n: int
) -> None:
    constants = {"residual_dtype": torch.float32, "out_dtype": torch.float32}
    case = make((tokens,), 1024, n, seed=tokens, dtype=dtype, device="cuda", **constants)
    for deterministic in (False, True):
        assert_weights_are_rounded(case, kernel, mixing, deterministic, LONG_SUMS[kernel])


def first_rows(case: Case, count: int) -> tuple[Any, ...]:
    return tuple(v[:count] if i < 4 else v for i, v in enumerate(case))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "ranges"),
    [
        ("cuda", [(2, 8), (9, 32), (33, 64), (65, 128), (129, 256)]),
        ("tilelang", [(1, 16), (17, 64), (65, 256)]),
        ("triton", [(17, 64), (65, 256)]),
    ],
)
def test_on_a_gpu_rows_are_equal_within_one_plan(kernel: str, ranges: list[tuple[int, int]]) -> None:
    case = make((300,), 4096, dtype=torch.bfloat16, device="cuda")
    for few, many in ranges:
        one, other = (torch.ops.dsv4.mhc_post_pre(*first_rows(case, count), kernel) for count in (few, many))
        assert all(torch.equal(a, b[:few]) for a, b in zip(one, other, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", GPU_FAMILIES)
@pytest.mark.parametrize("hidden", [1000, 4096])
def test_on_a_gpu_deterministic_rows_are_equal_in_any_batch(kernel: str, hidden: int) -> None:
    case = make((3000,), hidden, dtype=torch.bfloat16, device="cuda")
    many = torch.ops.dsv4.mhc_post_pre(*case, kernel, True)
    of_pre = torch.ops.dsv4.mhc_pre(*case.pre(), kernel, True)
    for count in (1, 2, 16, 17, 33, 65, 257, 1025, 2049):
        some = Case(*first_rows(case, count))
        got = torch.ops.dsv4.mhc_post_pre(*some, kernel, True)
        assert all(torch.equal(a, b[:count]) for a, b in zip(got, many, strict=True)), count
        got = torch.ops.dsv4.mhc_pre(*some.pre(), kernel, True)
        assert all(torch.equal(a, b[:count]) for a, b in zip(got, of_pre, strict=True)), count
    shifted = Case(*(v[5:] if i < 4 else v for i, v in enumerate(case)))
    got = torch.ops.dsv4.mhc_post_pre(*shifted, kernel, True)
    assert all(torch.equal(a, b[5:]) for a, b in zip(got, many, strict=True))
    assert_served_by(kernel, case)


@pytest.mark.gpu
@each_operator
@pytest.mark.parametrize("lead", [(0,), (2, 0)])
def test_on_a_gpu_no_tokens_give_empty_outputs(kernel: str, operator: str, lead: tuple[int, ...]) -> None:
    case = make(lead, 4096, device="cuda")
    got = call(operator, case, kernel)
    wanted = call(operator, case, "reference")
    assert [(v.shape, v.dtype, v.device) for v in got] == [(v.shape, v.dtype, v.device) for v in wanted]
    assert all(v.is_contiguous() for v in got)
    assert_served_by(kernel, case)


@pytest.mark.gpu
@each_operator
@pytest.mark.parametrize("tokens", [16, 600])
def test_on_a_gpu_a_cuda_graph_reads_new_values(kernel: str, operator: str, tokens: int) -> None:
    case, other = (make((tokens,), 4096, seed=seed, dtype=torch.bfloat16, device="cuda") for seed in (0, 1))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        before = call(operator, case, kernel)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = call(operator, case, kernel)
    case.residual.copy_(other.residual)
    case.x.copy_(other.x)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    again = call(operator, case, kernel)
    assert all(torch.equal(a, b) for a, b in zip(captured, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(captured, before, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", GPU_FAMILIES)
def test_on_a_gpu_it_runs_on_the_current_stream(kernel: str) -> None:
    case = make((64,), 4096, device="cuda")
    wanted = oracle(case)
    late = case.x.clone()
    stream = torch.cuda.Stream()
    case.x.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        case.x.copy_(late)
        got = torch.ops.dsv4.mhc_post_pre(*case, kernel)
    stream.synchronize()
    assert_close(got, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["triton", "tilelang"])
def test_after_warmup_no_token_count_compiles(kernel: str) -> None:
    module = importlib.import_module(f"dsv4_compile.kernels.mhc.{kernel}")
    torch.ops.dsv4.mhc_post_pre(*make((5,), 512, device="cuda"), kernel)
    assert warmup(5000) >= len(module.PLANS)
    before = dict(module._compiled)
    for tokens in (1, 2, 3, 16, 17, 32, 33, 64, 100, 256, 1000, 2048, 4096, 5000):
        torch.ops.dsv4.mhc_post_pre(*make((tokens,), 512, device="cuda"), kernel)
    assert module._compiled == before
    assert families.resolve(kernel, torch.device("cuda:0"), 4, 512, torch.float32) == (kernel, None)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [4096, 7168])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_head_matches_the_oracle_at_any_token_count(dtype: torch.dtype, hidden: int, deterministic: bool) -> None:
    most = make((300,), hidden, dtype=dtype, device="cuda")
    of_all = call("mhc_head", most, "cuda", deterministic)
    for tokens in (0, 1, 15, 16, 17, 300):
        case = Case(*first_rows(most, tokens))
        got = call("mhc_head", case, "cuda", deterministic)
        assert got[0].dtype == dtype and got[0].is_contiguous()
        assert_no_farther_than_the_rounding(case, got, "mhc_head")
        assert not deterministic or torch.equal(got[0], of_all[0][:tokens])
    without = replace(most, norm_weight=None)
    assert_no_farther_than_the_rounding(without, call("mhc_head", without, "cuda", deterministic), "mhc_head")
    assert_served_by("cuda", most)


@pytest.mark.gpu
@each_operator
def test_every_small_token_count_and_the_powers_of_two_are_right(kernel: str, operator: str) -> None:
    powers = [2**k + d for k in range(6, 15) for d in (-1, 0, 1)]  # the smaller ones are in the range
    most = make((max(powers),), 256, dtype=torch.bfloat16, device="cuda")
    for tokens in [*range(41), *powers]:
        case = Case(*first_rows(most, tokens))
        assert_no_farther_than_the_rounding(case, call(operator, case, kernel), operator, LONG_SUMS[kernel])
    assert_served_by(kernel, most)


def limits_of(kernel: str) -> list[float]:
    """Token counts up to which a plan serves."""
    if kernel == "cuda":
        return list(plans.BUCKETS)
    return [limit for limit, _ in importlib.import_module(f"dsv4_compile.kernels.mhc.{kernel}").PLANS]


def compile_at_once(most: Case, counts: list[int]) -> None:
    """The CUDA family's kernels for so many tokens, in parallel: in turn they take most of a test's time."""
    n, hidden = most.residual.shape[-2:]
    used = (most.residual, most.residual, most.x, most.fn, most.base, most.norm_weight, most.residual)
    common = (
        None,
        n,
        hidden,
        (2 + n) * n,
        most.iters,
        (*(v.dtype for v in used), torch.float32),
        True,
        True,
        False,
        None,
    )
    capability = torch.cuda.get_device_capability()
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda count: compilation.cubin(cuda._chosen(count, *common), capability), counts))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "hidden"),
    [*(("cuda", hidden) for hidden in (64, 1000, 4096, 5120, 7168)), ("triton", 64), ("triton", 5120)],
)
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_both_sides_of_every_threshold_are_right_with_bfloat16_weights(kernel: str, hidden: int, n: int) -> None:
    limits = [int(limit) for limit in limits_of(kernel) if limit != math.inf]
    counts = [1, *(limit + k for limit in limits for k in (0, 1))]
    most = make((max(counts),), hidden, n, dtype=torch.bfloat16, weights=torch.bfloat16, device="cuda")
    if kernel == "cuda":
        compile_at_once(most, [1, *(limit + 1 for limit in limits)])
    for tokens in counts:
        case = Case(*first_rows(most, tokens))
        assert_no_farther_than_the_rounding(case, call("mhc_post_pre", case, kernel), bound=LONG_SUMS[kernel])
    assert_served_by(kernel, most)


@pytest.mark.gpu
@pytest.mark.parametrize("operator", ["mhc_pre", "mhc_post", "mhc_head"])
@pytest.mark.parametrize("hidden", [64, 1000, 4096, 5120, 7168])
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_the_other_operators_are_right_at_every_width(operator: str, hidden: int, n: int) -> None:
    most = make((70,), hidden, n, dtype=torch.bfloat16, weights=torch.bfloat16, device="cuda")
    for tokens in (5, 70):
        case = Case(*first_rows(most, tokens))
        assert_no_farther_than_the_rounding(case, call(operator, case, "cuda"), operator)
    assert_served_by("cuda", most)


def off_the_boundary(tensor: Tensor) -> Tensor:
    moved = torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)
    assert moved.data_ptr() % 16
    return moved


LAYOUTS = {
    "every second element": lambda tensor: torch.stack([tensor, -tensor], dim=-1)[..., 0],
    "off the boundary": off_the_boundary,
    "last axis first": lambda tensor: tensor.transpose(0, -1).contiguous().transpose(0, -1),
    "one row for all": lambda tensor: tensor[:1].expand_as(tensor),
}


@pytest.mark.gpu
@each_operator
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_may_lie_anyhow(kernel: str, operator: str, layout: str, dtype: torch.dtype) -> None:
    for tokens in (7, 70):
        case = make((tokens,), 96, dtype=dtype, weights=dtype, device="cuda").map(LAYOUTS[layout])
        assert_no_farther_than_the_rounding(case, call(operator, case, kernel), operator)
    assert_served_by(kernel, case)


@pytest.mark.gpu
@each_operator
def test_indices_beyond_two_to_the_31st(kernel: str, operator: str) -> None:
    if torch.cuda.mem_get_info()[1] < 32 << 30:
        pytest.skip("needs 32 GiB of device memory")
    copies = 3375
    few = make((40,), 4096, dtype=torch.bfloat16, device="cuda")
    repeated = {
        name: getattr(few, name).repeat(copies, *[1] * (getattr(few, name).dim() - 1))
        for name in ("x", "residual", "post", "comb")
    }
    many = replace(few, **repeated)
    assert many.residual.numel() > 2**31
    got = call(operator, many, kernel)
    assert_no_farther_than_the_rounding(few, tuple(tensor[-40:] for tensor in got), operator, LONG_SUMS[kernel])
    for tensor in got:  # a row's result does not depend on where in the batch it is
        of_copy = tensor.view(copies, -1)
        assert all(torch.equal(of_copy[0], one) for one in of_copy)
    assert_served_by(kernel, few)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", GPU_FAMILIES)
def test_the_residual_spreads_over_43_layers_as_in_the_reference(kernel: str) -> None:
    """Behind each of the 86 sublayers: the distance to float64, and the growth of the norm."""
    cases = [make((16,), 1024, seed=seed, dtype=torch.bfloat16, device="cuda") for seed in range(86)]

    def run(family: str, wide: bool) -> list[Tensor]:
        residual, post, comb = cases[0].residual, cases[0].post, cases[0].comb
        residual = residual.double() if wide else residual
        passed = []
        for case in cases:
            step = replace(case.double() if wide else case, residual=residual, post=post, comb=comb, sinkhorn_eps=1e-6)
            residual, _, post, comb = torch.ops.dsv4.mhc_post_pre(*step, family)
            passed.append(residual.double())
        return passed

    for ours, eager, exact in zip(run(kernel, False), run("reference", False), run("reference", True), strict=True):
        assert distance(ours, exact) <= distance(eager, exact) * 1.1
        growth, other = (abs((v.norm() / exact.norm()).item() - 1) for v in (ours, eager))
        assert growth <= max(1.1 * other, 1e-3)
    assert_served_by(kernel, cases[0])


# ------------------------------------------------------------------------------- the operators as torch sees them


@pytest.mark.gpu
@each_operator
def test_opcheck_passes_on_a_gpu(kernel: str, operator: str) -> None:
    case = make((2, 3), 16, n=2, iters=2, device="cuda")
    arguments = (
        v.detach().clone().requires_grad_() if isinstance(v, Tensor) else v for v in arguments_of(operator, case)
    )
    torch.library.opcheck(getattr(torch.ops.dsv4, operator).default, (*arguments, kernel))
    assert_served_by(kernel, case)


@pytest.mark.gpu
@each_operator
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_on_the_second_device_are_served_there(kernel: str, operator: str) -> None:
    assert torch.cuda.current_device() == 0
    for tokens in (3, 300):
        case = make((tokens,), 1000, dtype=torch.bfloat16, device="cuda:1")
        got = call(operator, case, kernel)
        assert all(tensor.device == case.x.device for tensor in got)
        assert_no_farther_than_the_rounding(case, got, operator)
        on_the_first = call(operator, case.map(lambda tensor: tensor.to("cuda:0")), kernel)
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(got, on_the_first, strict=True))
    assert torch.cuda.current_device() == 0
    assert_served_by(kernel, case)


@pytest.mark.gpu
@pytest.mark.slow
def test_eight_processes_fill_a_cold_cache_at_once(tmp_path: Path) -> None:
    script = """
import torch
from tests.kernels.test_mhc import assert_served_by, make
from tests.kernels.test_mhc_gpu import GPU_FAMILIES, assert_no_farther_than_the_rounding, call
for kernel in GPU_FAMILIES:
    for tokens in (1, 70):
        case = make((tokens,), 1000, dtype=torch.bfloat16, device="cuda")
        assert_no_farther_than_the_rounding(case, call("mhc_post_pre", case, kernel))
    assert_served_by(kernel, case)
"""
    folders = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**os.environ, **folders},
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(8)
    ]
    outputs = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0] * 8, outputs
    assert len(list((tmp_path / "dsv4").iterdir())) == 2


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="there is no compute-sanitizer on PATH")
def test_the_sanitizer_finds_nothing() -> None:
    command = [sys.executable, "-m", "tests.sanitizer"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support this device, or a virtual machine keeps it from it")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
