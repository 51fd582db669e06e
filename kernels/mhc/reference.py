"""mHC in plain PyTorch: the definition every other family is judged against.

Formulas: manifold-constrained hyper-connections (Xie et al. 2026), section 2.2, eq. 8, as spelled by DeepSeek-V4's
`inference/model.py` (`hc_pre`, `hc_post`) and by transformers' `DeepseekV4HyperConnection`, with every constant an
argument.

Symbols: `n` residual streams, `D` hidden size, `M = (2 + n) * n` mixing logits, `...` any leading (token) dimensions.
Arithmetic runs in float64 when the residual is float64 and in float32 otherwise. All functions are differentiable and
run on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["compute_dtype", "mhc_head", "mhc_post", "mhc_post_pre", "mhc_pre", "rounded_dtype", "sinkhorn"]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype the arithmetic runs in for a residual of `dtype`: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """Project `logits` `[..., n, n]` towards the doubly stochastic matrices.

    A softmax over the rows plus `eps`, then one column normalisation and `iters - 1` row and column normalisations,
    each sum raised by `eps`. `iters` 0 stops after the softmax. Shape and dtype are those of `logits`.
    """
    comb = torch.softmax(logits, dim=-1) + eps
    if iters >= 1:
        comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(dim=-1, keepdim=True) + eps)
        comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    return comb


def mhc_pre(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor | None,
    iters: int,
    rms_eps: float,
    pre_eps: float,
    sinkhorn_eps: float,
    post_mult: float,
    norm_eps: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Collapse the streams into one row and compute the weights that will expand it again.

    Arguments: `residual` `[..., n, D]`; `fn` `[M, n * D]`; `scale` `[3]`; `base` `[M]`; `norm_weight` `[D]`, or None
    to leave the collapsed row without RMSNorm; `iters` Sinkhorn iterations; the epsilons of the flattened RMS
    (`rms_eps`), of `pre` (`pre_eps`), of Sinkhorn (`sinkhorn_eps`) and of the RMSNorm (`norm_eps`); `post_mult` the
    upper end of `post`. Any float dtypes. Dividing the row by its RMS before the product would be the same.

    Returns `(layer_input, post, comb)`: `[..., D]` in `out_dtype`, `[..., n]` and `[..., n, n]` in the compute dtype.
    """
    compute = compute_dtype(residual.dtype)
    n = residual.shape[-2]
    streams = residual.to(compute)
    flat = streams.flatten(-2)
    inverse_rms = torch.rsqrt(flat.square().mean(dim=-1, keepdim=True) + rms_eps)
    mixes = (flat @ fn.to(compute).T) * inverse_rms
    scale, base = scale.to(compute), base.to(compute)

    pre = torch.sigmoid(mixes[..., :n] * scale[0] + base[:n]) + pre_eps
    post = post_mult * torch.sigmoid(mixes[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = (mixes[..., 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    comb = sinkhorn(logits, iters, sinkhorn_eps)

    row = _normalised((pre.unsqueeze(-1) * streams).sum(dim=-2), norm_weight, norm_eps)
    return row.to(out_dtype), post, comb


def mhc_head(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor | None,
    rms_eps: float,
    pre_eps: float,
    norm_eps: float,
    out_dtype: torch.dtype,
) -> Tensor:
    """Collapse the streams for the last time, behind the last layer: `mhc_pre` without what would expand them again.

    Source: `hc_head` of DeepSeek-V4's `inference/model.py`, transformers' `DeepseekV4HyperHead`. Arguments as in
    `mhc_pre`, but `fn` `[n, n * D]`, `scale` `[1]` and `base` `[n]`. Returns `[..., D]` in `out_dtype`.
    """
    compute = compute_dtype(residual.dtype)
    streams = residual.to(compute)
    flat = streams.flatten(-2)
    inverse_rms = torch.rsqrt(flat.square().mean(dim=-1, keepdim=True) + rms_eps)
    mixes = (flat @ fn.to(compute).T) * inverse_rms
    pre = torch.sigmoid(mixes * scale.to(compute) + base.to(compute)) + pre_eps
    return _normalised((pre.unsqueeze(-1) * streams).sum(dim=-2), norm_weight, norm_eps).to(out_dtype)


def _normalised(row: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return row
    return row * torch.rsqrt(row.square().mean(dim=-1, keepdim=True) + eps) * weight.to(row.dtype)


def rounded_dtype(mixing_dtype: torch.dtype | None) -> torch.dtype:
    """What weights in float32 are rounded to for `mixing_dtype`: float32 where that rounds nothing."""
    return torch.float32 if mixing_dtype in (None, torch.float64) else mixing_dtype


def mhc_post(
    x: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    residual_dtype: torch.dtype,
    mixing_dtype: torch.dtype | None = None,
) -> Tensor:
    """Mix the streams with `comb` and add the sublayer's output to each of them.

    `new[k] = post[k] * x + sum_j comb[j, k] * residual[j]`: the sum runs over the first index of `comb`, which is not
    symmetric. `x` `[..., D]`, `residual` `[..., n, D]`, `post` `[..., n]`, `comb` `[..., n, n]`, any float dtypes.

    `mixing_dtype` is the dtype that `post` and `comb` are rounded to before they are multiplied, or None to take them
    as they are. The arithmetic has the compute dtype either way. transformers rounds to the residual's dtype, DeepSeek
    does not round. Returns `[..., n, D]` in `residual_dtype`.
    """
    compute = compute_dtype(residual.dtype)
    if mixing_dtype is not None:
        post, comb = post.to(mixing_dtype), comb.to(mixing_dtype)
    added = post.to(compute).unsqueeze(-1) * x.to(compute).unsqueeze(-2)
    mixed = comb.to(compute).transpose(-1, -2) @ residual.to(compute)
    return (added + mixed).to(residual_dtype)


def mhc_post_pre(
    x: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor | None,
    iters: int,
    rms_eps: float,
    pre_eps: float,
    sinkhorn_eps: float,
    post_mult: float,
    norm_eps: float,
    residual_dtype: torch.dtype,
    out_dtype: torch.dtype,
    mixing_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`mhc_post` followed by `mhc_pre` on its result, which is rounded to `residual_dtype` in between.

    Returns `(new_residual, layer_input, post, comb)`; see the two functions for the shapes and dtypes.
    """
    new_residual = mhc_post(x, residual, post, comb, residual_dtype, mixing_dtype)
    pre = mhc_pre(
        new_residual,
        fn,
        scale,
        base,
        norm_weight,
        iters,
        rms_eps,
        pre_eps,
        sinkhorn_eps,
        post_mult,
        norm_eps,
        out_dtype,
    )
    return (new_residual, *pre)
