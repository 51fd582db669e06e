"""The TileLang family of mHC: its code for Hopper and its arithmetic without a GPU, and its results on one."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.mhc import families, reference, tilelang
from dsv4_compile.kernels.mhc.tilelang import PLANS, plan_for
from tests.kernels.test_mhc import (
    Case,
    assert_close,
    assert_served_by,
    distance,
    make,
    oracle,
    oracle_post,
    oracle_pre,
)

needs_tilelang = pytest.mark.skipif(importlib.util.find_spec("tilelang") is None, reason="there is no tilelang")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")

BF16, HALF, FLOAT = "bfloat16", "float16", "float32"
FEW, MANY = PLANS[0][1], PLANS[2][1]


# ----------------------------------------------------------------------------------------------- choosing the family


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that says it has such a GPU, where the reference is what is left."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA A100")
    monkeypatch.setitem(families.BEST, "cuda", ("reference",))


def resolve(device: str, n: int = 4, hidden: int = 64, dtype: torch.dtype = torch.bfloat16) -> tuple[str, str | None]:
    return families.resolve("tilelang", torch.device(device), n, hidden, dtype)


def test_tensors_on_the_cpu_go_to_cpp_with_one_logged_reason(caplog: pytest.LogCaptureFixture) -> None:
    reason = "tilelang cannot serve this call: it runs on CUDA and the tensors are on cpu"
    assert resolve("cpu") == ("cpp", reason)
    for hidden in (64, 72, 72):
        case = make((3,), hidden)
        assert_close(torch.ops.dsv4.mhc_post_pre(*case, "tilelang"), oracle(case))
    records = [record.getMessage() for record in caplog.records if record.name == families.logger.name]
    assert records == [f"{reason}. The numbers are the same, the speed is not."]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("error", [None, OSError("libcuda.so.1: cannot open shared object file")])
def test_a_package_that_cannot_be_imported_is_a_reason(
    error: OSError | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Finder:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "tilelang":
                raise error or ModuleNotFoundError("No module named 'tilelang'")

    monkeypatch.delitem(sys.modules, "tilelang", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    for hidden in (64, 72):
        family, reason = resolve("cuda:0", hidden=hidden)
        assert family == "reference" and reason is not None
        assert reason.startswith("tilelang cannot serve this call: the package tilelang could not be imported (")
        families._warn(reason)
    assert len(caplog.records) == 1


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("n", "hidden", "dtype", "why"),
    [
        (9, 64, torch.bfloat16, "2 to 8 streams and there are 9"),
        (4, 100, torch.bfloat16, "multiples of 8"),
        (4, 32768, torch.bfloat16, "up to 16384"),
        (4, 64, torch.float64, "torch.float64"),
    ],
)
def test_what_it_is_not_written_for_is_refused(n: int, hidden: int, dtype: torch.dtype, why: str) -> None:
    family, reason = resolve("cuda:0", n, hidden, dtype)
    assert family == "reference" and why in (reason or "")


@pytest.mark.usefixtures("hopper")
def test_older_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    assert "NVIDIA A100 is older than Hopper" in (resolve("cuda:0")[1] or "")


@needs_tilelang
@pytest.mark.usefixtures("hopper")
def test_it_is_chosen_where_it_can_run_and_its_module_hides_no_package() -> None:
    assert resolve("cuda:0") == ("tilelang", None)
    package = importlib.import_module("tilelang")
    assert package is not tilelang and hasattr(package, "compile")


@pytest.mark.usefixtures("hopper")
def test_a_failed_compilation_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tilelang, "refusal", lambda *_: None)

    def broken(*_: Any) -> None:
        raise RuntimeError("nvcc not found\nmore")

    monkeypatch.setattr(tilelang, "_run", broken)
    monkeypatch.setitem(families.BEST, "cpu", ("reference",))
    case = make((3,), 64)
    assert_close(torch.ops.dsv4.mhc_pre(*case.pre(), "tilelang"), oracle_pre(case))
    family, reason = families.resolve("tilelang", torch.device("cpu"), 4, 64, torch.float32)
    assert family == "reference" and "it raised RuntimeError: nvcc not found" in (reason or "")


@pytest.mark.parametrize("hidden", [8, 64, 520, 4096, 7168, 16384])
@pytest.mark.parametrize("n", [2, 4, 8])
def test_no_slice_is_empty_and_a_row_has_the_registers_it_needs(n: int, hidden: int) -> None:
    width = tilelang.WIDTH if n <= tilelang.NARROW else tilelang.WIDTH_NARROW
    chunks = -(-hidden // width)
    for _, plan in PLANS:
        steps = -(-chunks // plan.most)
        splits = -(-chunks // steps)
        assert splits <= plan.most and (splits - 1) * steps < chunks <= splits * steps


# ------------------------------------------------------------------------------------------------ code for a GPU, here


def mix(
    plan: tilelang.Plan,
    n: int,
    hidden: int,
    logits: int,
    types: tuple[str, str, str, str],
    has_post: bool = True,
    weights: str = FLOAT,
) -> Any:
    from dsv4_compile.kernels.mhc import tilelang_kernels

    return tilelang_kernels.mix_kernel(tilelang._mix_variant(plan, n, hidden, logits, (*types, weights), has_post))


def finish(n: int, hidden: int, logits: int, splits: int, *types: str) -> Any:
    from dsv4_compile.kernels.mhc import tilelang_kernels

    return tilelang_kernels.finish_kernel(tilelang._finish_variant(n, hidden, logits, splits, types))


VARIANTS = {
    "mix, few tokens": lambda: mix(FEW, 4, 4096, 24, (BF16, BF16, BF16, FLOAT)),
    "mix, many tokens": lambda: mix(MANY, 4, 7168, 24, (BF16, BF16, BF16, FLOAT)),
    "mix, rounded weights": lambda: mix(FEW, 4, 64, 24, (BF16, BF16, BF16, FLOAT), weights=BF16),
    "mix, pre alone": lambda: mix(FEW, 4, 64, 24, (BF16, BF16, BF16, BF16), has_post=False),
    "mix, post alone": lambda: mix(MANY, 4, 4096, 0, (BF16, FLOAT, HALF, BF16)),
    "finish, few tokens": lambda: finish(4, 4096, 24, 128, BF16, FLOAT, FLOAT, BF16, BF16),
    "finish, head": lambda: finish(4, 7168, 4, 112, BF16, FLOAT, FLOAT, BF16, BF16),
}
SLOW_VARIANTS = {
    "finish, many tokens": lambda: finish(4, 7168, 24, 4, BF16, FLOAT, BF16, FLOAT, BF16),
    "mix, head": lambda: mix(MANY, 4, 4096, 4, (HALF, HALF, HALF, FLOAT), has_post=False),
    "mix, float32": lambda: mix(MANY, 3, 520, 15, (FLOAT, FLOAT, FLOAT, FLOAT)),
    "mix, eight streams": lambda: mix(MANY, 8, 4096, 80, (FLOAT, FLOAT, FLOAT, FLOAT)),
    "mix, eight bfloat16 streams": lambda: mix(FEW, 8, 4096, 80, (BF16, BF16, BF16, FLOAT)),
    "mix, three streams": lambda: mix(FEW, 3, 72, 15, (BF16, BF16, BF16, FLOAT)),
    "mix, five streams": lambda: mix(FEW, 5, 64, 35, (BF16, BF16, BF16, FLOAT)),
    "mix, two streams": lambda: mix(MANY, 2, 64, 8, (FLOAT, FLOAT, FLOAT, BF16)),
    "mix, seven streams": lambda: mix(FEW, 7, 1000, 63, (HALF, HALF, HALF, FLOAT)),
    "mix, hidden size 8": lambda: mix(MANY, 4, 8, 24, (FLOAT, BF16, BF16, BF16)),
    "finish, eight streams": lambda: finish(8, 4096, 80, 86, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT),
    "finish, hidden size 8": lambda: finish(3, 8, 15, 1, BF16, FLOAT, FLOAT, "", BF16),
    "finish, widest": lambda: finish(4, 16384, 24, 32, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT),
}
# Of these no register may go to memory: they are the ones that are to be fast.
FAST = ("mix, few tokens", "finish, few tokens", "finish, many tokens")


def cuda_source(program: Any) -> str:
    from tilelang import lower, tvm

    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
    with target, tvm.transform.PassContext(config=tilelang.PASS_CONFIGS):
        return str(lower(program, target=target).kernel_source)


def compiled_by_nvcc(source: str, folder: Path) -> str:
    """What the compiler says about registers."""
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    path = folder / "kernel.cu"
    path.write_text(source)
    includes = [f"-I{TILELANG_TEMPLATE_PATH}", f"-I{CUTLASS_INCLUDE_DIR}"]
    command = ["nvcc", "-cubin", "-std=c++20", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas", "-v", *includes]
    target = folder / "kernel.cubin"
    done = subprocess.run([*command, "-o", str(target), str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert target.stat().st_size > 0
    return done.stderr


@needs_tilelang
@needs_nvcc
@pytest.mark.parametrize("name", [*VARIANTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_VARIANTS)])
def test_it_compiles_for_hopper(name: str, tmp_path: Path) -> None:
    source = cuda_source((VARIANTS | SLOW_VARIANTS)[name]())
    assert "tma_" not in source and "atomic" not in source
    assert ("mma_sync" in source) == (name.startswith("mix") and "post alone" not in name)
    assert "int64_t" in source
    registers = compiled_by_nvcc(source, tmp_path)
    if name in FAST:
        assert "0 bytes spill stores" in registers, registers


@needs_tilelang
def test_the_plans_share_their_programs() -> None:
    """What follows the token count beyond the tile is an argument of the program, not a part of it."""
    variants = {tilelang._mix_variant(plan, 4, 4096, 24, (BF16, BF16, BF16, FLOAT, FLOAT), True) for _, plan in PLANS}
    assert len(variants) == 2
    assert plan_for(1) is FEW and plan_for(10**6) is PLANS[-1][1]


# ------------------------------------------------------------------------------------------------ arithmetic, here


class Serial:
    """`tilelang.language` for the CPU target: one thread, and float32 where a number is stored.

    That target has neither shared memory nor fragments and no bfloat16, so a cast rounds the bits of a float32.
    """

    def __init__(self) -> None:
        import tilelang.language

        self.cut = {BF16: 16, HALF: 13}  # bits of a float32 that the type does not have
        self.language = tilelang.language

    def __getattr__(self, name: str) -> Any:
        return getattr(self.language, name)

    def Tensor(self, shape: Any, dtype: Any) -> Any:
        return self.language.Tensor(shape, self.language.float32)

    def alloc_fragment(self, shape: Any, dtype: Any) -> Any:
        return self.language.alloc_local(shape, self.language.float32)

    alloc_shared = alloc_fragment

    def Parallel(self, *extents: Any) -> Any:
        return self.language.grid(*extents) if len(extents) > 1 else self.language.serial(*extents)

    def async_copy(self, source: Any, target: Any) -> Any:
        return self.language.copy(source, target)

    def _nothing(self, *_: Any) -> None:
        return None

    ptx_wait_group = sync_threads = annotate_min_blocks_per_sm = _nothing

    def cast(self, value: Any, dtype: Any) -> Any:
        T, cut = self.language, self.cut.get(str(dtype), 0)
        value = value.astype("float32")
        if cut == 0:
            return value

        def word(number: int) -> Any:
            return T.uint32(number)

        bits = T.reinterpret(value, "uint32")
        even = (bits >> word(cut)) & word(1)
        bits = (bits + word((1 << (cut - 1)) - 1) + even) & word(0xFFFFFFFF ^ ((1 << cut) - 1))
        return T.reinterpret(bits, "float32")

    def reduce_sum(self, source: Any, target: Any, dim: int) -> None:
        T = self.language

        @T.macro
        def of_one(source, target):
            T.clear(target)
            for i in T.serial(source.shape[0]):
                target[0] = target[0] + source[i]

        @T.macro
        def of_two(source, target):
            T.clear(target)
            for i, j in T.grid(*source.shape):
                if dim == 0:
                    target[j] = target[j] + source[i, j]
                else:
                    target[i] = target[i] + source[i, j]

        @T.macro
        def of_three(source, target):
            T.clear(target)
            for i, j, k in T.grid(*source.shape):
                target[i, k] = target[i, k] + source[i, j, k]

        (of_one, of_two, of_three)[len(source.shape) - 1](source, target)

    def gemm(self, left: Any, right: Any, total: Any, transpose_B: bool, policy: Any, clear_accum: bool) -> None:
        T = self.language

        @T.macro
        def gemm(left, right, total):
            if clear_accum:
                T.clear(total)
            for i, j, k in T.grid(*total.shape, left.shape[1]):
                total[i, j] = total[i, j] + left[i, k] * right[j, k]

        gemm(left, right, total)


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of the family take tensors on the CPU; their programs run on that target, in float32."""
    from tilelang import compile

    from dsv4_compile.kernels.mhc import tilelang_kernels

    def kernel(variant: Any, device: None) -> Any:
        of_mix = isinstance(variant, tilelang_kernels.Mix)
        with tilelang._quiet():
            program = (tilelang_kernels.mix_kernel if of_mix else tilelang_kernels.finish_kernel)(variant)
            compiled = compile(program, target="c")

        def call(*arguments: Any) -> None:
            wide = [a.float() if isinstance(a, Tensor) else a for a in arguments]
            compiled(*wide)
            for argument, result in zip(arguments, wide, strict=True):
                if isinstance(argument, Tensor):
                    argument.copy_(result)

        return call

    monkeypatch.setattr(tilelang_kernels, "T", Serial())
    monkeypatch.setattr(tilelang, "_kernel", kernel)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


def assert_no_farther_than_the_rounding(case: Case, got: tuple[Tensor, ...]) -> None:
    """The rounded outputs are a rounding away from float64, `post` and `comb` are exact for the residual."""
    residual, row, post, comb = got
    bound = {torch.bfloat16: 2e-3, torch.float16: 3e-4, torch.float32: 1e-6}[case.residual_dtype]
    assert distance(residual, oracle_post(case)) < bound
    wanted = oracle_pre(replace(case, residual=residual))
    assert distance(row, wanted[0]) < bound
    assert_close((post, comb), wanted[1:])


in_c = pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")


@needs_tilelang
@in_c
@pytest.mark.slow
@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize(
    ("n", "dtype", "weights", "lead", "hidden", "norm", "iters"),
    [
        (4, torch.bfloat16, torch.float32, (3, 7), 40, True, 20),
        (3, torch.float32, torch.float32, (5,), 72, False, 1),
        (2, torch.float16, torch.bfloat16, (17,), 136, True, 0),
    ],
)
def test_post_pre_computes_what_the_oracle_does(
    n: int, dtype: torch.dtype, weights: torch.dtype, lead: tuple[int, ...], hidden: int, norm: bool, iters: int
) -> None:
    case = make(lead, hidden, n, dtype=dtype, weights=weights, iters=iters)
    case = case if norm else replace(case, norm_weight=None)
    got = tilelang.mhc_post_pre(*case)
    assert [tensor.dtype for tensor in got] == [dtype, dtype, torch.float32, torch.float32]
    assert_no_farther_than_the_rounding(case, got)


@needs_tilelang
@in_c
@pytest.mark.slow
@pytest.mark.usefixtures("on_the_cpu")
def test_the_other_operators_compute_what_the_oracle_does() -> None:
    case = make((5,), 24, 2)
    assert_close((tilelang.mhc_post(*case.expand()),), (oracle_post(case),))
    assert_close(tilelang.mhc_pre(*case.pre(), deterministic=True), oracle_pre(case))
    weights = (case.fn[:2], case.scale[:1], case.base[:2], case.norm_weight)
    constants = (case.rms_eps, case.pre_eps, case.norm_eps)
    wanted = reference.mhc_head(case.residual.double(), *(w.double() for w in weights), *constants, torch.float64)
    assert_close((tilelang.mhc_head(case.residual, *weights, *constants, torch.float32),), (wanted,))


@needs_tilelang
@in_c
@pytest.mark.slow
@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("mixing", [torch.bfloat16, torch.float16])
def test_post_and_comb_are_rounded_where_that_is_asked_for(mixing: torch.dtype) -> None:
    case = make((5,), 24, 3)
    rounded = replace(case, post=case.post.to(mixing).float(), comb=case.comb.to(mixing).float())
    got = tilelang.mhc_post(*case.expand(), mixing_dtype=mixing)
    assert_close((got,), (oracle_post(rounded),))
    assert distance(got, oracle_post(case)) > 1e-5


# --------------------------------------------------------------------------------------------------------- on a GPU

TOKENS = (0, 1, 3, 15, 16, 17, 31, 64, 65, 300)


def run(case: Case, deterministic: bool = False) -> tuple[Tensor, ...]:
    return tuple(torch.ops.dsv4.mhc_post_pre(*case, "tilelang", deterministic))


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [8, 64])
def test_on_a_gpu_float32_matches_the_oracle_at_any_token_count(hidden: int) -> None:
    for tokens in TOKENS:
        case = make((tokens,), hidden, seed=tokens, device="cuda")
        assert_close(run(case), oracle(case))
        assert_served_by("tilelang", case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [520, 7168])
def test_on_a_gpu_half_precision_is_exact_but_for_its_roundings(hidden: int, dtype: torch.dtype) -> None:
    for tokens in TOKENS[1:]:
        case = make((tokens,), hidden, seed=tokens, dtype=dtype, device="cuda")
        assert_no_farther_than_the_rounding(case, run(case))
        assert_served_by("tilelang", case)


@pytest.mark.gpu
def test_on_a_gpu_threads_compile_once_and_in_silence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    case = make((5,), 88, dtype=torch.bfloat16, device="cuda")
    compiled: list[Any] = []
    original = tilelang._compile

    def counted(variant: Any) -> Any:
        compiled.append(variant)
        return original(variant)

    monkeypatch.setattr(tilelang, "_compile", counted)
    failures: list[BaseException] = []

    def call() -> None:
        try:
            assert_no_farther_than_the_rounding(case, run(case))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(compiled) == 2
    assert capfd.readouterr().out == ""
    assert logging.getLogger("tilelang").level != logging.ERROR
    assert_served_by("tilelang", case)
