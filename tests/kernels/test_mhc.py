"""The mHC operators against a float64 oracle that shares no code with them, on the CPU."""

import logging
import math
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4_compile.kernels.mhc import cpp, families, reference, warmup

FAMILIES = ("cpp", "reference")
SAME = 1e-6  # relative, norm-wise: what float32 must keep


@dataclass(frozen=True)
class Case:
    """One set of arguments; the epsilons differ so that none can stand in for another."""

    x: Tensor
    residual: Tensor
    post: Tensor
    comb: Tensor
    fn: Tensor
    scale: Tensor
    base: Tensor
    norm_weight: Tensor | None
    iters: int = 20
    rms_eps: float = 1e-2
    pre_eps: float = 3e-2
    sinkhorn_eps: float = 2e-3
    post_mult: float = 1.7
    norm_eps: float = 5e-2
    residual_dtype: torch.dtype = torch.float32
    out_dtype: torch.dtype = torch.float32

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__dict__.values())

    def pre(self) -> tuple[Any, ...]:
        values = tuple(self)
        return (self.residual, *values[4:14], self.out_dtype)

    def expand(self) -> tuple[Any, ...]:
        return (self.x, self.residual, self.post, self.comb, self.residual_dtype)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Case":
        return replace(self, **{k: change(v) for k, v in self.__dict__.items() if isinstance(v, Tensor)})

    def double(self) -> "Case":
        wide = self.map(lambda tensor: tensor.double())
        return replace(wide, residual_dtype=torch.float64, out_dtype=torch.float64)


def make(
    lead: tuple[int, ...],
    hidden: int,
    n: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    weights: torch.dtype = torch.float32,
    device: str = "cpu",
    **constants: Any,
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    logits = (2 + n) * n
    tensors = (
        random(*lead, hidden).to(dtype),
        random(*lead, n, hidden).to(dtype),
        torch.rand((*lead, n), generator=generator) * 2,
        torch.rand((*lead, n, n), generator=generator),
        (random(logits, n * hidden) / (n * hidden) ** 0.5).to(weights),
        random(3).to(weights),
        random(logits).to(weights),
        (1 + 0.3 * random(hidden)).to(weights),
    )
    case = Case(*(tensor.to(device) for tensor in tensors), residual_dtype=dtype, out_dtype=dtype)
    return replace(case, **constants)


def oracle_post(case: Case) -> Tensor:
    c = case.double()
    return torch.einsum("...k,...d->...kd", c.post, c.x) + torch.einsum("...jk,...jd->...kd", c.comb, c.residual)


def oracle_pre(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    c = case.double()
    n, hidden = c.residual.shape[-2:]
    power = torch.einsum("...nd,...nd->...", c.residual, c.residual) / (n * hidden)
    mixes = (
        torch.einsum("...nd,mnd->...m", c.residual, c.fn.view(-1, n, hidden)) / (power + c.rms_eps).sqrt()[..., None]
    )
    gate = torch.cat([c.scale[0].expand(n), c.scale[1].expand(n), c.scale[2].expand(n * n)])
    pre, post, comb = (mixes * gate + c.base).split([n, n, n * n], -1)
    pre = 1 / (1 + torch.exp(-pre)) + c.pre_eps
    post = c.post_mult / (1 + torch.exp(-post))
    comb = comb.unflatten(-1, (n, n)).exp()
    comb = comb / comb.sum(-1, keepdim=True) + c.sinkhorn_eps
    for step in range(2 * c.iters - 1 if c.iters else 0):
        comb = comb / (comb.sum(-1 if step % 2 else -2, keepdim=True) + c.sinkhorn_eps)
    row = torch.einsum("...n,...nd->...d", pre, c.residual)
    if c.norm_weight is not None:
        row = row / (row.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * c.norm_weight
    return row, post, comb


def oracle(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    new_residual = oracle_post(case)
    return new_residual, *oracle_pre(replace(case, residual=new_residual))


def as_transformers_does(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`DeepseekV4DecoderLayer` between two sublayers, in the residual's dtype, RMSNorm included."""
    dtype, n = case.residual.dtype, case.residual.shape[-2]
    streams = case.post.to(dtype).unsqueeze(-1) * case.x.unsqueeze(-2)
    streams = streams + torch.matmul(case.comb.to(dtype).transpose(-1, -2), case.residual)
    flat = streams.flatten(-2).float()
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + case.rms_eps)
    pre, post, comb = torch.nn.functional.linear(flat, case.fn.float()).split([n, n, n * n], -1)
    pre_base, post_base, comb_base = case.base.split([n, n, n * n])
    pre = torch.sigmoid(pre * case.scale[0] + pre_base) + case.pre_eps
    post = case.post_mult * torch.sigmoid(post * case.scale[1] + post_base)
    logits = comb.unflatten(-1, (n, n)) * case.scale[2] + comb_base.view(n, n)
    comb = reference.sinkhorn(logits, case.iters, case.sinkhorn_eps)
    row = (pre.unsqueeze(-1) * streams).sum(-2).to(dtype).float()
    row = (row * torch.rsqrt(row.square().mean(-1, keepdim=True) + case.norm_eps)).to(dtype)
    return streams, case.norm_weight * row, post, comb


def distance(got: Tensor, wanted: Tensor) -> float:
    assert got.shape == wanted.shape
    if wanted.numel() == 0:
        return 0.0
    return ((got.double() - wanted).norm() / wanted.norm()).item()


def assert_close(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...], bound: float = SAME) -> None:
    distances = [distance(g, w) for g, w in zip(got, wanted, strict=True)]
    assert max(distances) <= bound, distances


def assert_served_by(kernel: str, case: Case) -> None:
    """No family before it was passed over, and it has not failed."""
    n, hidden = case.residual.shape[-2:]
    assert families.resolve(kernel, case.residual.device, n, hidden, case.residual.dtype) == (kernel, None)


def assert_three_operators_match(case: Case, kernel: str) -> None:
    ops = torch.ops.dsv4
    fused = ops.mhc_post_pre(*case, kernel)
    assert_close(fused, oracle(case))
    assert_close(ops.mhc_pre(*case.pre(), kernel), oracle_pre(case))
    assert_close((ops.mhc_post(*case.expand(), kernel),), (oracle_post(case),))
    assert all(tensor.is_contiguous() for tensor in fused)
    assert [tensor.dtype for tensor in fused] == [case.residual_dtype, case.out_dtype, torch.float32, torch.float32]
    assert_served_by(kernel, case)


def assert_weights_are_rounded(
    case: Case, kernel: str, mixing: torch.dtype, deterministic: bool = False, bound: float = SAME
) -> None:
    """`case` has a float32 result, which shows the rounding: without it the bound would be missed by far.

    `bound` is that of what comes out of the sums over the row.
    """
    rounded = replace(case, post=case.post.to(mixing), comb=case.comb.to(mixing))
    wanted = oracle(rounded)
    assert distance(oracle_post(case), wanted[0]) > 50 * SAME
    fused = torch.ops.dsv4.mhc_post_pre(*case, kernel, deterministic, mixing)
    alone = torch.ops.dsv4.mhc_post(*case.expand(), kernel, deterministic, mixing)
    assert_close((fused[0], alone), (wanted[0], wanted[0]))
    assert_close(fused[1:], wanted[1:], bound)
    assert_served_by(kernel, case)


# ------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("kernel", FAMILIES)
@pytest.mark.parametrize("iters", [0, 1, 2, 20])
@pytest.mark.parametrize("seed", [0, 1])
def test_float32_matches_the_oracle(kernel: str, iters: int, seed: int) -> None:
    assert_three_operators_match(make((5,), 64, seed=seed, iters=iters), kernel)


@pytest.mark.parametrize("kernel", FAMILIES)
@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("hidden", [64, 1000, 4096])
def test_every_stream_count_and_hidden_size_matches(kernel: str, n: int, hidden: int) -> None:
    assert_three_operators_match(make((3,), hidden, n, seed=n), kernel)


@pytest.mark.parametrize("kernel", FAMILIES)
@pytest.mark.parametrize("lead", [(), (0,), (1,), (2, 0), (2, 3), (17,), (67,), (2, 2, 5)])
def test_any_leading_shape_matches(kernel: str, lead: tuple[int, ...]) -> None:
    assert_three_operators_match(make(lead, 72), kernel)


@pytest.mark.parametrize("kernel", FAMILIES)
@pytest.mark.parametrize("hidden", [1, 7, 16, 257])
def test_odd_hidden_sizes_match(kernel: str, hidden: int) -> None:
    assert_three_operators_match(make((6,), hidden, n=3), kernel)


@pytest.mark.parametrize("kernel", FAMILIES)
def test_without_norm_weight_the_row_is_not_normalised(kernel: str) -> None:
    assert_three_operators_match(make((5,), 64, norm_weight=None), kernel)


@pytest.mark.parametrize("kernel", FAMILIES)
def test_weights_in_bfloat16_match(kernel: str) -> None:
    assert_three_operators_match(make((5,), 200, weights=torch.bfloat16), kernel)


@pytest.mark.parametrize("kernel", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [64, 1000])
@pytest.mark.parametrize("rounded", [False, True])
def test_half_precision_is_no_farther_from_the_oracle_than_eager(
    kernel: str, dtype: torch.dtype, hidden: int, rounded: bool
) -> None:
    case = make((33,), hidden, dtype=dtype, weights=dtype)
    wanted = oracle(case)
    ours = torch.ops.dsv4.mhc_post_pre(*case, kernel, False, dtype if rounded else None)
    eager = as_transformers_does(case)
    assert ours[0].dtype == ours[1].dtype == dtype
    for name, got, other, exact in zip(("residual", "input", "post", "comb"), ours, eager, wanted, strict=True):
        assert distance(got, exact) <= distance(other, exact), name
    assert_served_by(kernel, case)


@pytest.mark.parametrize("kernel", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pre_sees_the_residual_as_rounded(kernel: str, dtype: torch.dtype) -> None:
    case = make((9,), 128, dtype=dtype, out_dtype=torch.float32)
    new_residual, *rest = torch.ops.dsv4.mhc_post_pre(*case, kernel)
    assert_close(tuple(rest), oracle_pre(replace(case, residual=new_residual)))
    assert_served_by(kernel, case)


@pytest.mark.parametrize("kernel", FAMILIES)
def test_mixed_dtypes_match(kernel: str) -> None:
    case = make((9,), 128)
    case = replace(case, x=case.x.bfloat16(), post=case.post.half(), comb=case.comb.bfloat16(), fn=case.fn.half())
    assert_three_operators_match(case, kernel)


@pytest.mark.parametrize("mixing", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_rounds_post_and_comb_and_then_mixes(dtype: torch.dtype, mixing: torch.dtype) -> None:
    case = make((9,), 128, dtype=dtype)
    post, comb = (weights.to(mixing).float() for weights in (case.post, case.comb))
    wanted = post.unsqueeze(-1) * case.x.float().unsqueeze(-2) + comb.transpose(-1, -2) @ case.residual.float()
    assert torch.equal(reference.mhc_post(*case.expand(), mixing), wanted.to(dtype))
    assert torch.equal(reference.mhc_post(*case.expand()), wanted.to(dtype)) == (mixing is torch.float32)


@pytest.mark.parametrize("kernel", FAMILIES)
@pytest.mark.parametrize("mixing", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "hidden"), [(2, 64), (3, 257), (4, 4096), (8, 1000)])
def test_rounded_weights_match(kernel: str, mixing: torch.dtype, dtype: torch.dtype, n: int, hidden: int) -> None:
    case = make((17,), hidden, n, dtype=dtype, residual_dtype=torch.float32, out_dtype=torch.float32)
    assert_weights_are_rounded(case, kernel, mixing)


@pytest.mark.parametrize("kernel", FAMILIES)
@pytest.mark.parametrize("mixing", [torch.float32, torch.float64])
def test_a_wide_mixing_dtype_changes_nothing(kernel: str, mixing: torch.dtype) -> None:
    case = make((5,), 64)
    plain, same = (torch.ops.dsv4.mhc_post_pre(*case, kernel, False, dtype) for dtype in (None, mixing))
    assert all(torch.equal(a, b) for a, b in zip(plain, same, strict=True))
    assert_served_by(kernel, case)


@pytest.mark.parametrize("kernel", FAMILIES)
def test_non_contiguous_inputs_match(kernel: str) -> None:
    def strided(tensor: Tensor) -> Tensor:
        return torch.stack([tensor, -tensor], dim=-1)[..., 0]

    case = make((7,), 96).map(strided)
    assert not case.residual.is_contiguous()
    assert_three_operators_match(case, kernel)


def test_float64_stays_float64() -> None:
    case = make((5,), 64).double()
    got = torch.ops.dsv4.mhc_post_pre(*case, "auto")
    assert all(tensor.dtype == torch.float64 for tensor in got)
    assert_close(got, oracle(case), 1e-13)


def test_a_residual_widened_to_float64_is_mixed_in_float64() -> None:
    case = replace(make((5,), 64), residual_dtype=torch.float64)
    got = torch.ops.dsv4.mhc_post_pre(*case, "auto")
    assert [tensor.dtype for tensor in got] == [torch.float64, torch.float32, torch.float64, torch.float64]


@pytest.mark.parametrize("kernel", FAMILIES)
def test_nan_and_large_values_spread_like_in_the_reference(kernel: str) -> None:
    case = make((3,), 64, seed=3)
    case.residual[1, 2, 5] = float("nan")
    case.residual[2] *= 1e6
    case.base.copy_(case.base * 60)
    got = torch.ops.dsv4.mhc_post_pre(*case, kernel)
    wanted = reference.mhc_post_pre(*case)
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, w, equal_nan=True, rtol=2e-5, atol=1e-6)


def test_rows_do_not_depend_on_each_other_or_on_threads_in_cpp() -> None:
    case = make((130,), 1000, seed=5)
    many = torch.ops.dsv4.mhc_post_pre(*case, "cpp")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for row in (0, 63, 129):
            one = torch.ops.dsv4.mhc_post_pre(*(v[row : row + 1] if i < 4 else v for i, v in enumerate(case)), "cpp")
            assert all(torch.equal(a[row], b[0]) for a, b in zip(many, one, strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kernel", FAMILIES)
def test_deterministic_changes_no_result(kernel: str) -> None:
    case = make((9,), 64)
    operators = torch.ops.dsv4
    for operator, arguments in (
        (operators.mhc_post_pre, tuple(case)),
        (operators.mhc_pre, case.pre()),
        (operators.mhc_post, case.expand()),
    ):
        plain, fixed = operator(*arguments, kernel), operator(*arguments, kernel, True)
        for a, b in zip(*((x,) if isinstance(x, Tensor) else x for x in (plain, fixed)), strict=True):
            assert torch.equal(a, b)


def test_threads_may_call_at_once() -> None:
    case = make((20,), 256)
    wanted = oracle(case)
    failures: list[BaseException] = []

    def call() -> None:
        try:
            for _ in range(20):
                assert_close(torch.ops.dsv4.mhc_post_pre(*case, "cpp"), wanted)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert_served_by("cpp", case)


# ------------------------------------------------------------------------------------------ operators in a graph


def with_gradients(case: Case) -> Case:
    return case.map(lambda tensor: tensor.detach().clone().requires_grad_())


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("name", ["mhc_pre", "mhc_post", "mhc_post_pre"])
def test_opcheck_passes(name: str, kernel: str) -> None:
    case = with_gradients(make((2, 3), 16, n=2, iters=2))
    arguments = {"mhc_pre": case.pre(), "mhc_post": case.expand(), "mhc_post_pre": tuple(case)}[name]
    torch.library.opcheck(getattr(torch.ops.dsv4, name).default, (*arguments, kernel))


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("name", ["mhc_post", "mhc_post_pre"])
def test_opcheck_passes_for_rounded_weights(name: str, kernel: str) -> None:
    case = with_gradients(make((2, 3), 16, n=2, iters=2))
    arguments = {"mhc_post": case.expand(), "mhc_post_pre": tuple(case)}[name]
    torch.library.opcheck(getattr(torch.ops.dsv4, name).default, (*arguments, kernel, False, torch.bfloat16))


def test_opcheck_passes_for_bfloat16_without_norm() -> None:
    case = make((3,), 24, dtype=torch.bfloat16, norm_weight=None)
    torch.library.opcheck(torch.ops.dsv4.mhc_post_pre.default, (*case, "auto"))


@pytest.mark.parametrize("mixing", [None, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_the_reference(dtype: torch.dtype, mixing: torch.dtype | None) -> None:
    ours, theirs = (with_gradients(make((2, 3), 40, dtype=dtype, iters=3)) for _ in range(2))
    got = torch.ops.dsv4.mhc_post_pre(*ours, "auto", False, mixing)
    wanted = reference.mhc_post_pre(*theirs, mixing)
    seeds = [torch.randn_like(tensor) for tensor in wanted]
    torch.autograd.backward(got, seeds)
    torch.autograd.backward(wanted, seeds)
    for name, tensor in ours.__dict__.items():
        if isinstance(tensor, Tensor):
            torch.testing.assert_close(tensor.grad, getattr(theirs, name).grad, msg=name)


def test_a_gradient_passes_the_rounding_of_the_weights() -> None:
    def gradients(mixing: torch.dtype | None) -> tuple[Tensor, ...]:
        case = with_gradients(make((3,), 16))
        out = torch.ops.dsv4.mhc_post(*case.expand(), "auto", False, mixing)
        return torch.autograd.grad(out, (case.x, case.residual, case.post, case.comb), torch.ones_like(out))

    for rounded, plain in zip(gradients(torch.bfloat16), gradients(None), strict=True):
        assert 1e-4 < distance(rounded, plain.double()) < 4e-3


def test_a_gradient_of_one_output_reaches_the_inputs_that_ask() -> None:
    case = make((3,), 16, n=2)
    case.fn.requires_grad_()
    *_, comb = torch.ops.dsv4.mhc_pre(*case.pre(), "auto")
    comb[:, 0, 1].sum().backward()
    assert case.fn.grad is not None and case.fn.grad.norm() > 0
    assert case.residual.grad is None


def test_an_input_made_from_another_one_gets_no_gradient_twice() -> None:
    def loss(operator: Callable[..., Any], *kernel: str) -> Tensor:
        case = make((3,), 16, n=2).double()
        x = case.x.requires_grad_()
        residual = x.unsqueeze(-2) * case.residual
        out = operator(x, residual, case.post, case.comb, torch.float64, *kernel)
        return torch.autograd.grad(out.square().sum(), x)[0]

    torch.testing.assert_close(loss(torch.ops.dsv4.mhc_post, "auto"), loss(reference.mhc_post))


def test_gradients_can_be_differentiated_again() -> None:
    case = with_gradients(make((2,), 3, n=2, iters=2).double())
    arguments = tuple(case.expand())
    assert torch.autograd.gradgradcheck(lambda *a: torch.ops.dsv4.mhc_post(*a, torch.float64, "auto"), arguments[:4])
    *tensors, constants = case.residual, case.fn, case.scale, case.base, case.norm_weight, case.pre()[5:]
    assert torch.autograd.gradgradcheck(lambda *a: torch.ops.dsv4.mhc_pre(*a, *constants, "auto"), tuple(tensors))


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_fake_tensors_give_shapes_and_import_no_kernel(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dsv4_compile.kernels.mhc.triton", raising=False)
    case = make((2, 3), 64, dtype=torch.bfloat16)
    with FakeTensorMode():
        fake = case.map(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
        got = torch.ops.dsv4.mhc_post_pre(*fake, "triton")
    wanted = reference.mhc_post_pre(*case)
    for g, w in zip(got, wanted, strict=True):
        assert (g.shape, g.dtype, g.device.type, g.stride()) == (w.shape, w.dtype, device, w.contiguous().stride())
    assert "dsv4_compile.kernels.mhc.triton" not in sys.modules


def test_a_dynamic_token_count_compiles_once() -> None:
    graphs = []

    def remember(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(
        lambda *a: torch.ops.dsv4.mhc_post_pre(*a, "auto"), backend=remember, dynamic=True, fullgraph=True
    )
    for tokens in (5, 9, 17):
        case = make((tokens,), 64)
        assert_close(compiled(*case), oracle(case))
    assert len(graphs) == 1


@pytest.mark.parametrize("wrong", ["x", "post", "comb", "fn", "scale", "base", "norm_weight"])
def test_a_wrong_shape_is_named(wrong: str) -> None:
    case = make((3,), 16)
    broken = replace(case, **{wrong: getattr(case, wrong)[..., :-1]})
    with pytest.raises(ValueError, match=rf"mhc: {wrong} has shape .* must have shape"):
        torch.ops.dsv4.mhc_post_pre(*broken, "auto")


@pytest.mark.parametrize("wrong", ["x", "fn", "base", "norm_weight"])
def test_a_wrong_shape_is_named_when_it_is_traced(wrong: str) -> None:
    """Compiled code does not look again."""
    case = make((3,), 16)
    broken = replace(case, **{wrong: getattr(case, wrong)[..., :-1]})
    compiled = torch.compile(lambda *a: torch.ops.dsv4.mhc_post_pre(*a, "auto"), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=rf"mhc: {wrong} has shape .* must have shape"):
        compiled(*broken)


def test_a_mixing_dtype_that_holds_no_weights_is_named() -> None:
    with pytest.raises(ValueError, match=r"mixing_dtype is torch.int32; it must be None or a float dtype"):
        torch.ops.dsv4.mhc_post(*make((3,), 16).expand(), "auto", mixing_dtype=torch.int32)


def test_a_tensor_on_another_device_is_named() -> None:
    case = make((3,), 16)
    with pytest.raises(ValueError, match="fn is on meta and the residual on cpu"):
        torch.ops.dsv4.mhc_post_pre.default.redispatch(
            torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *replace(case, fn=case.fn.to("meta")), "auto"
        )


def test_an_unknown_kernel_is_named() -> None:
    with pytest.raises(ValueError, match="no kernel family 'cutlass'; there are auto, tilelang, triton"):
        torch.ops.dsv4.mhc_post_pre(*make((3,), 16), "cutlass")


# ---------------------------------------------------------------------------------------------------- falling back


def resolve(kernel: str, n: int = 4, hidden: int = 64, dtype: torch.dtype = torch.float32) -> tuple[str, str | None]:
    return families.resolve(kernel, torch.device("cpu"), n, hidden, dtype)


def test_auto_on_the_cpu_is_cpp() -> None:
    assert resolve("auto") == ("cpp", None)
    assert resolve("reference") == ("reference", None)


def test_a_family_that_raises_is_passed_over_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def broken(*arguments: Any) -> None:
        calls.append(arguments)
        raise RuntimeError("out of registers")

    monkeypatch.setattr(cpp, "mhc_post_pre", broken)
    case = make((5,), 64)
    with caplog.at_level(logging.WARNING, "dsv4_compile.kernels"):
        for _ in range(3):
            assert_close(torch.ops.dsv4.mhc_post_pre(*case, "auto"), oracle(case))
    assert len(calls) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "cpp cannot serve this call: it raised RuntimeError: out of registers. "
        "The numbers are the same, the speed is not."
    ]
    family, reason = resolve("auto")
    assert family == "reference" and reason is not None and "out of registers" in reason
    assert resolve("auto", hidden=72) == ("cpp", None)


@pytest.mark.parametrize("deterministic", [False, True])
def test_warmup_makes_the_calls_so_far_again_for_every_plan(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For families whose kernels are compiled when they are first called."""
    calls: list[tuple[str, tuple[Any, ...], bool]] = []

    def function(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, deterministic: bool = False) -> Any:
            calls.append((name, arguments, deterministic))
            return getattr(reference, name)(*arguments)

        call.__module__ = "late"
        return call

    late = types.ModuleType("late")
    late.PLANS = ((16, None), (64, None), (math.inf, None))  # type: ignore[attr-defined]
    late.refusal = lambda *_: None  # type: ignore[attr-defined]
    for name in ("mhc_pre", "mhc_post", "mhc_post_pre"):
        setattr(late, name, function(name))
    known = families._module
    monkeypatch.setattr(families, "_module", lambda family: late if family == "triton" else known(family))
    monkeypatch.delitem(sys.modules, "dsv4_compile.kernels.mhc.cuda", raising=False)  # it has its own warm-up
    case = make((2, 3), 64, dtype=torch.bfloat16)
    for _ in range(2):
        torch.ops.dsv4.mhc_post_pre(*case, "triton", deterministic)
        torch.ops.dsv4.mhc_pre(*case.pre(), "triton", deterministic)
    torch.ops.dsv4.mhc_post(*case.expand(), "triton", deterministic, torch.float16)
    real = {name: (arguments, how) for name, arguments, how in calls}
    calls.clear()
    assert warmup(64) == len(calls) == 3 * 2  # the plans up to 16 and up to 64
    for name, arguments, how in calls:
        before, wanted = real[name]
        assert how == wanted == (deterministic and name != "mhc_post")
        streams = 1 if name == "mhc_pre" else 4
        for i, (again, once) in enumerate(zip(arguments, before, strict=True)):
            if not isinstance(once, Tensor):
                assert again == once
                continue
            assert again.dtype == once.dtype and again.device == once.device
            assert again.shape == (once.shape if i >= streams else (again.shape[0], *once.shape[2:]))
    assert [arguments[0].shape[0] for _, arguments, _ in calls] == [1, 17] * 3
    families.forget()
    assert warmup(64) == 0


def test_running_out_of_memory_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(cpp, "mhc_post_pre", full)
    with pytest.raises(torch.OutOfMemoryError):
        torch.ops.dsv4.mhc_post_pre(*make((5,), 64), "auto")
    assert resolve("auto") == ("cpp", None)


@pytest.mark.parametrize(
    ("n", "dtype", "why"), [(9, torch.float32, "2 to 8 streams and there are 9"), (4, torch.float64, "torch.float64")]
)
def test_what_cpp_is_not_written_for_goes_to_the_reference(
    n: int, dtype: torch.dtype, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    family, reason = resolve("auto", n=n, dtype=dtype)
    assert family == "reference" and reason is not None and why in reason
    case = make((2,), 16, n).map(lambda tensor: tensor.to(dtype))
    case = replace(case, residual_dtype=dtype, out_dtype=dtype)
    for _ in range(2):
        assert_close(torch.ops.dsv4.mhc_post_pre(*case, "auto"), oracle(case))
    assert len(caplog.records) == 1


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter serves CPU tensors")
def test_triton_on_cpu_tensors_goes_to_cpp() -> None:
    family, reason = resolve("triton")
    assert family == "cpp" and reason is not None and reason.startswith("triton cannot serve this call")


def test_a_triton_that_cannot_be_imported_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dsv4_compile.kernels.mhc.triton", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    family, reason = resolve("triton")
    assert family == "cpp" and reason is not None and "could not be imported (ModuleNotFoundError" in reason
    on_cuda = families.resolve("auto", torch.device("cuda:0"), 4, 64, torch.bfloat16)
    assert on_cuda[0] == "reference"


def test_without_a_compiler_the_reference_serves(tmp_path: Any) -> None:
    script = """
import torch
import dsv4_compile.kernels.mhc as mhc
t = torch.rand
case = (t(3, 8), t(3, 2, 8), t(3, 2), t(3, 2, 2), t(8, 16), t(3), t(8), t(8), 3, 1e-6, 1e-6, 1e-6, 2.0, 1e-6)
case += (torch.float32, torch.float32)
for _ in range(2):
    got = torch.ops.dsv4.mhc_post_pre(*case, "auto")
assert all(torch.equal(a, b) for a, b in zip(got, mhc.reference.mhc_post_pre(*case)))
print(mhc.resolve("auto", torch.device("cpu"), 2, 8, torch.float32)[0])
"""
    environment = {**os.environ, "CXX": "/nonexistent/g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "reference"
    assert done.stderr.count("could not be compiled") == 1
