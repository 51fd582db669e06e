"""`hc_head`, in spellings and near misses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import dsv4_compile
from tests.passes.test_mhc import error, oracle_of

RMS_EPS, PRE_EPS, NORM_EPS = 1e-5, 1e-6, 1e-4
N, HIDDEN = 4, 48

Formula = Callable[["Head", Tensor], Tensor]


class Head(nn.Module):
    """Parameters of `hc_head` and of the norm behind it; `formula` is how the author spells it."""

    def __init__(self, formula: Formula, n: int = N, hidden: int = HIDDEN, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.formula, self.n, self.hidden = formula, n, hidden
        self.fn = nn.Parameter(torch.randn(n, n * hidden) / (n * hidden) ** 0.5)
        self.scale = nn.Parameter(torch.randn(1))
        self.base = nn.Parameter(torch.randn(n))
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(hidden).to(dtype))

    def forward(self, residual: Tensor) -> Tensor:
        return self.formula(self, residual)

    def norm(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS)).to(x.dtype)


def transformers(m: Head, residual: Tensor) -> Tensor:
    flat = residual.flatten(2).float()
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + RMS_EPS)
    pre = torch.sigmoid(nn.functional.linear(flat, m.fn) * m.scale + m.base) + PRE_EPS
    return m.norm((pre.unsqueeze(-1) * residual).sum(dim=2).to(residual.dtype))


def deepseek(m: Head, residual: Tensor) -> Tensor:
    flat = residual.flatten(2).float()
    inverse = torch.rsqrt(flat.pow(2).mean(-1, keepdim=True) + RMS_EPS)
    pre = torch.sigmoid((flat @ m.fn.t()) * inverse * m.scale[0] + m.base) + PRE_EPS
    return m.norm(torch.sum(pre.unsqueeze(-1) * flat.view(residual.shape), dim=2).to(residual.dtype))


def einsum(m: Head, residual: Tensor) -> Tensor:
    mixes = torch.einsum("bsnd,mnd->bsm", residual, m.fn.view(m.n, m.n, m.hidden))
    power = residual.square().sum((-2, -1)) / (m.n * m.hidden)
    pre = (mixes / (power + RMS_EPS).sqrt()[..., None] * m.scale + m.base).sigmoid() + PRE_EPS
    return m.norm(torch.einsum("bsn,bsnd->bsd", pre, residual))


def without_norm(m: Head, residual: Tensor) -> Tensor:
    flat = residual.flatten(2)
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + RMS_EPS)
    pre = torch.sigmoid(flat @ m.fn.t() * m.scale + m.base) + PRE_EPS
    return (pre.unsqueeze(-1) * residual).sum(dim=2)


def softmax(m: Head, residual: Tensor) -> Tensor:
    flat = residual.flatten(2)
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + RMS_EPS)
    pre = torch.softmax(flat @ m.fn.t() * m.scale + m.base, -1) + PRE_EPS
    return (pre.unsqueeze(-1) * residual).sum(dim=2)


def clamped(m: Head, residual: Tensor) -> Tensor:
    flat = residual.flatten(2)
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + RMS_EPS)
    pre = torch.sigmoid((flat @ m.fn.t() * m.scale + m.base).clamp(-1.5, 1.5)) + PRE_EPS
    return (pre.unsqueeze(-1) * residual).sum(dim=2)


def of_each_stream(m: Head, residual: Tensor) -> Tensor:
    """The RMS of each stream, not of all of them."""
    flat = (residual * torch.rsqrt(residual.square().mean(-1, keepdim=True) + RMS_EPS)).flatten(2)
    pre = torch.sigmoid(flat @ m.fn.t() * m.scale + m.base) + PRE_EPS
    return (pre.unsqueeze(-1) * residual).sum(dim=2)


def integers(m: Head, residual: Tensor) -> Tensor:
    """The sum is of integers."""
    flat = residual.flatten(2)
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + RMS_EPS)
    pre = torch.sigmoid(flat @ m.fn.t() * m.scale + m.base) + PRE_EPS
    return (pre.unsqueeze(-1) * residual * 10).sum(dim=2, dtype=torch.int64).float()


def wide(m: Head, residual: Tensor) -> Tensor:
    """Arithmetic in float64, and a result that shows it."""
    residual = residual.double()
    flat = residual.flatten(2)
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + RMS_EPS)
    pre = torch.sigmoid(flat @ m.fn.double().t() * m.scale + m.base) + PRE_EPS
    return (pre.unsqueeze(-1) * residual).sum(dim=2)


def eps_outside(m: Head, residual: Tensor) -> Tensor:
    """A row of zeros stays one, however small the epsilon outside of the root is."""
    row = without_norm(m, residual)
    return row / (row.square().mean(-1, keepdim=True).sqrt() + 1e-12) * m.weight


def run(model: Head, residual: Tensor, mhc: str = "reference") -> tuple[Tensor, dsv4_compile.GraphReport]:
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="dsv4", options={"compiler": "eager", "mhc": mhc}, dynamic=False)
    with torch.no_grad():
        out = compiled(residual)
    return out, dsv4_compile.report().graphs[-1]


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("formula", [transformers, deepseek, einsum, without_norm])
def test_every_spelling_is_replaced(formula: Formula, n: int) -> None:
    model, residual = Head(formula, n), torch.randn(2, 5, n, HIDDEN)
    out, graph = run(model, residual)
    (site,) = graph.mhc
    assert (site.form, site.kernel, site.norm_fused) == ("head", "reference", formula is not without_norm)
    assert (site.streams, site.hidden, site.iters) == (n, HIDDEN, None)
    eps = {"rms": RMS_EPS, "pre": PRE_EPS} | ({"norm": NORM_EPS} if site.norm_fused else {})
    assert site.eps == pytest.approx(eps)
    assert error(out, oracle_of(model, residual)) < 1e-6


@pytest.mark.parametrize("formula", [softmax, clamped, of_each_stream])
def test_near_misses_are_left_alone(formula: Formula) -> None:
    model, residual = Head(formula), torch.randn(2, 5, N, HIDDEN)
    out, graph = run(model, residual)
    assert graph.mhc == []
    with torch.no_grad():
        assert error(out, model(residual).double()) < 1e-6


@pytest.mark.parametrize("formula", [integers, wide, eps_outside])
def test_what_float32_and_a_root_over_a_sum_cannot_do_is_not_replaced(formula: Formula) -> None:
    model, residual = Head(formula), torch.randn(2, 5, N, HIDDEN)
    residual[0, 3] = 0
    out, graph = run(model, residual)
    assert [site.norm_fused for site in graph.mhc] in ([], [False])
    with torch.no_grad():
        torch.testing.assert_close(out, model(residual), rtol=1e-6 if out.dtype is torch.float32 else 1e-12, atol=1e-6)


def test_bfloat16_is_no_farther_from_float64_than_eager() -> None:
    model = Head(transformers, dtype=torch.bfloat16)
    residual = torch.randn(3, 40, N, HIDDEN).bfloat16()
    out, graph = run(model, residual)
    assert len(graph.mhc) == 1 and out.dtype == torch.bfloat16
    with torch.no_grad():
        eager = model(residual)
    exact = oracle_of(model, residual)
    assert error(out, exact) <= error(eager, exact)


def test_a_reader_of_the_row_before_the_norm_keeps_it() -> None:
    def both(m: Head, residual: Tensor) -> Tensor:
        row = without_norm(m, residual)
        return torch.cat([row, m.norm(row)], -1)

    model, residual = Head(both), torch.randn(1, 5, N, HIDDEN)
    out, graph = run(model, residual)
    assert [site.norm_fused for site in graph.mhc] == [False]
    assert error(out, oracle_of(model, residual)) < 1e-6


def test_where_no_kernel_is_made_for_it_inductor_keeps_it() -> None:
    model, residual = Head(transformers), torch.randn(1, 5, N, HIDDEN)
    out, graph = run(model, residual, "auto")
    assert [(site.form, site.kernel) for site in graph.mhc] == [("head", "inductor")]
    with torch.no_grad():
        assert torch.equal(out, model(residual))


def test_deterministic_is_not_promised_for_a_head_that_inductor_keeps() -> None:
    compiled = torch.compile(Head(transformers), backend="dsv4", options={"compiler": "eager", "deterministic": True})
    with torch.no_grad():
        compiled(torch.randn(1, 5, N, HIDDEN))
    assert dsv4_compile.report().effective["deterministic"]["value"] == "False"


def test_opcheck_and_gradients() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(2, 3, 2, 8), torch.randn(2, 16), torch.randn(1), torch.randn(2), torch.rand(8)]
    wanted = [tensor.requires_grad_() for tensor in tensors]
    arguments = (*wanted, RMS_EPS, PRE_EPS, NORM_EPS, torch.float32, "auto")
    torch.library.opcheck(torch.ops.dsv4.mhc_head.default, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 17, 100, 700, 1500])
def test_the_kernel_matches_float64(tokens: int) -> None:
    model = Head(transformers, hidden=4096, dtype=torch.bfloat16).cuda()
    residual = torch.randn(1, tokens, N, 4096, device="cuda", dtype=torch.bfloat16)
    out, graph = run(model, residual, "auto")
    assert [(site.form, site.kernel, site.norm_fused) for site in graph.mhc] == [("head", "cuda", True)]
    with torch.no_grad():
        eager = model(residual)
    exact = oracle_of(model, residual)
    assert error(out, exact) <= error(eager, exact) * 1.02
