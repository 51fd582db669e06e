"""vLLM's mHC operators by name and signature, computed as its sources say: for graphs as its models make them."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["SCHEMAS", "register"]

_OF_PRE = (
    "Tensor residual, Tensor fn, Tensor hc_scale, Tensor hc_base, float rms_eps, float hc_pre_eps, "
    "float hc_sinkhorn_eps, float hc_post_mult_value, int sinkhorn_repeat, int n_splits=1"
)
_OF_POST = "Tensor x, Tensor residual, Tensor post_layer_mix, Tensor comb_res_mix"
_FUSED = f"{_OF_POST}, {_OF_PRE.removeprefix('Tensor residual, ')}, int tile_n=1"
_NORM = ", Tensor? norm_weight=None, float norm_eps=1e-06"
_THREE, _FOUR = "(Tensor, Tensor, Tensor)", "(Tensor, Tensor, Tensor, Tensor)"

SCHEMAS = {
    # 0.20 and 0.21
    "vllm::mhc_pre": f"({_OF_PRE}) -> {_THREE}",
    "vllm::mhc_post": f"({_OF_POST}) -> Tensor",
    "vllm::mhc_fused_post_pre": f"({_FUSED}) -> {_FOUR}",
    # 0.22 to 0.26
    "vllm::mhc_pre_tilelang": f"({_OF_PRE}{_NORM}) -> {_THREE}",
    "vllm::mhc_post_tilelang": f"({_OF_POST}) -> Tensor",
    "vllm::mhc_fused_post_pre_tilelang": f"({_FUSED}{_NORM}) -> {_FOUR}",
    # a lookalike with another formula
    "vllm::mhc_pre_delayed_tilelang": f"({_OF_PRE}, Tensor? pre_mix=None) -> {_FOUR}",
    # 0.32 on a CPU
    "_C::hc_pre_fused_cpu": (
        "(Tensor x, Tensor hc_fn, Tensor hc_scale, Tensor hc_base, int hc_mult, int sinkhorn_iters, float rms_eps, "
        f"float hc_eps) -> {_THREE}"
    ),
    "_C::hc_post_fused_cpu": "(Tensor x, Tensor residual, Tensor post, Tensor comb) -> Tensor",
    "vllm::hc_head_fused_kernel_tilelang": (
        "(Tensor hs_flat, Tensor fn, Tensor hc_scale, Tensor hc_base, Tensor(a!) out, int hidden_size, float rms_eps, "
        "float hc_eps, int hc_mult) -> ()"
    ),
    "_C::weight_packed_linear": "(Tensor(a!) out, Tensor mat1, Tensor mat2, Tensor? bias, bool is_vnni) -> ()",
    "vllm_ir::rms_norm": "(Tensor x, Tensor? weight, float epsilon, int? variance_size=None) -> Tensor",
}


def _pre(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    rms_eps: float,
    pre_eps: float,
    sinkhorn_eps: float,
    mult: float,
    repeat: int,
    weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """`post` `[..., n, 1]`, `comb` `[..., n, n]`, row `[..., D]`; float64 in, float64 out, for the oracle."""
    n, hidden = residual.shape[-2:]
    wide = torch.float64 if fn.dtype == torch.float64 else torch.float32
    streams = residual.to(wide)
    flat = streams.flatten(-2)
    mixes = flat @ fn.T * torch.rsqrt(flat.square().sum(-1, keepdim=True) / (n * hidden) + rms_eps)
    pre = torch.sigmoid(mixes[..., :n] * scale[0] + base[:n]) + pre_eps
    post = torch.sigmoid(mixes[..., n : 2 * n] * scale[1] + base[n : 2 * n]) * mult
    comb = torch.softmax((mixes[..., 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n)), -1) + sinkhorn_eps
    comb = comb / (comb.sum(-2, keepdim=True) + sinkhorn_eps)
    for _ in range(repeat - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + sinkhorn_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + sinkhorn_eps)
    row = (pre.unsqueeze(-1) * streams).sum(-2)
    if weight is not None:
        inverse = torch.rsqrt(row.square().mean(-1, keepdim=True) + norm_eps)
        row = row.to(residual.dtype).to(wide) * inverse * weight.to(torch.bfloat16).to(wide)
    return post.unsqueeze(-1), comb, row.to(residual.dtype)


def _post(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    wide = comb.dtype
    post = post.reshape(*residual.shape[:-1], 1)
    mixed = torch.einsum("...ij,...ih->...jh", comb, residual.to(wide))
    return (mixed + post * x.unsqueeze(-2).to(wide)).to(residual.dtype)


def _fused(x, residual, post, comb, fn, scale, base, rms, pre, sinkhorn, mult, repeat, splits=1, tile=1, *norm):
    now = _post(x, residual, post, comb)
    return (now, *_pre(now, fn, scale, base, rms, pre, sinkhorn, mult, repeat, *norm))


def _plain_pre(residual, fn, scale, base, rms, pre, sinkhorn, mult, repeat, splits=1, *norm):
    return _pre(residual, fn, scale, base, rms, pre, sinkhorn, mult, repeat, *norm)


def _cpu_pre(x, fn, scale, base, n, iters, rms, eps):
    post, comb, row = _pre(x, fn, scale, base, rms, eps, eps, 2.0, iters)
    return row, post.squeeze(-1).contiguous(), comb


def _norm(x, weight, epsilon, variance_size=None):
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide.to(weight.dtype) * weight).to(x.dtype)


def _delayed(residual, fn, scale, base, rms, pre, sinkhorn, mult, repeat, splits=1, mix=None):
    return (*_pre(residual, fn, scale, base, rms, pre, sinkhorn, mult, repeat), base.clone())


def _head(residual, fn, scale, base, out, hidden, rms, eps, n):
    out.copy_(residual.float().sum(-2))  # never compared: it stays vLLM's


def _packed(out, x, weight, bias, is_vnni):
    out.copy_(x @ weight.T)


_FUNCTIONS = {
    "_C::weight_packed_linear": _packed,
    "vllm::hc_head_fused_kernel_tilelang": _head,
    "vllm::mhc_pre": _plain_pre,
    "vllm::mhc_post": _post,
    "vllm::mhc_fused_post_pre": _fused,
    "vllm::mhc_pre_tilelang": _plain_pre,
    "vllm::mhc_post_tilelang": _post,
    "vllm::mhc_fused_post_pre_tilelang": _fused,
    "vllm::mhc_pre_delayed_tilelang": _delayed,
    "_C::hc_pre_fused_cpu": _cpu_pre,
    "_C::hc_post_fused_cpu": _post,
    "vllm_ir::rms_norm": _norm,
}
_libraries: list[torch.library.Library] = []


def register() -> None:
    """Defines those that vLLM has not defined in this process; they stay until it ends."""
    for name, schema in SCHEMAS.items():
        namespace, _, operator = name.partition("::")
        if hasattr(getattr(torch.ops, namespace), operator):
            continue
        library = torch.library.Library(namespace, "FRAGMENT")
        library.define(operator + schema)
        library.impl(operator, _FUNCTIONS[name], "CompositeExplicitAutograd")
        torch.library.register_fake(name, _FUNCTIONS[name], lib=library)
        _libraries.append(library)
