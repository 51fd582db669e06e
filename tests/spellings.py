"""Hyper-connection blocks as different authors write them: the same mathematics, and near misses of it.

Each spelling is a function of (residual, layer, parameters, constants); `Stack` strings layers together, so that every
`hc_post` is followed by the next `hc_pre`. Residual `[B, S, n, D]`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Constants:
    n: int = 4
    rms_eps: float = 1e-5
    hc_eps: float = 1e-6
    norm_eps: float = 1e-4
    iters: int = 5
    post_mult: float = 2.0


Pre = Callable[[Tensor, "Site"], tuple[Tensor, Tensor, Tensor]]
Post = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Site(nn.Module):
    """Parameters of one hyper-connection, and the RMSNorm that follows it."""

    def __init__(self, hidden: int, c: Constants, dtype: torch.dtype):
        super().__init__()
        self.c, self.hidden = c, hidden
        mix = (2 + c.n) * c.n
        self.fn = nn.Parameter(torch.randn(mix, c.n * hidden) * 0.1)
        self.base = nn.Parameter(torch.randn(mix))
        self.scale = nn.Parameter(torch.rand(3) + 0.5)
        self.norm_weight = nn.Parameter((torch.rand(hidden) + 0.5).to(dtype))


def hf_pre(x: Tensor, p: Site) -> tuple[Tensor, Tensor, Tensor]:
    n, eps = p.c.n, p.c.hc_eps
    flat = x.flatten(2).float()
    flat = flat * torch.rsqrt(flat.float().square().mean(-1, keepdim=True) + p.c.rms_eps).to(flat.dtype)
    pre_w, post_w, comb_w = F.linear(flat, p.fn.float()).split([n, n, n * n], dim=-1)
    pre_b, post_b, comb_b = p.base.split([n, n, n * n])
    pre_s, post_s, comb_s = p.scale.unbind(0)
    pre = torch.sigmoid(pre_w * pre_s + pre_b) + eps
    post = p.c.post_mult * torch.sigmoid(post_w * post_s + post_b)
    comb = torch.softmax(comb_w.view(*comb_w.shape[:-1], n, n) * comb_s + comb_b.view(n, n), dim=-1) + eps
    comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    for _ in range(p.c.iters - 1):
        comb = comb / (comb.sum(dim=-1, keepdim=True) + eps)
        comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    return (pre.unsqueeze(-1) * x).sum(dim=2).to(x.dtype), post, comb


def hf_post(y: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    dtype = x.dtype
    return post.to(dtype).unsqueeze(-1) * y.unsqueeze(-2) + torch.matmul(comb.to(dtype).transpose(-1, -2), x)


def sinkhorn(mixes: Tensor, scale: Tensor, base: Tensor, c: Constants) -> tuple[Tensor, Tensor, Tensor]:
    n = c.n
    pre = torch.sigmoid(mixes[..., :n] * scale[0] + base[:n]) + c.hc_eps
    post = torch.sigmoid(mixes[..., n : 2 * n] * scale[1] + base[n : 2 * n]) * c.post_mult
    comb = (mixes[..., 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    comb = torch.exp(comb - comb.amax(-1, keepdim=True))
    comb = comb / comb.sum(-1, keepdim=True) + c.hc_eps
    for step in range(2 * c.iters - 1):
        comb = comb / (comb.sum(-2 if step % 2 == 0 else -1, keepdim=True) + c.hc_eps)
    return pre, post, comb


def deepseek_pre(x: Tensor, p: Site) -> tuple[Tensor, Tensor, Tensor]:
    shape, dtype = x.size(), x.dtype
    x = x.flatten(2).float()
    rsqrt = torch.rsqrt(x.square().mean(-1, keepdim=True) + p.c.rms_eps)
    mixes = F.linear(x, p.fn) * rsqrt
    pre, post, comb = sinkhorn(mixes, p.scale, p.base, p.c)
    return torch.sum(pre.unsqueeze(-1) * x.view(shape), dim=2).to(dtype), post, comb


def deepseek_post(y: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    out = post.unsqueeze(-1) * y.unsqueeze(-2) + torch.sum(comb.unsqueeze(-1) * x.unsqueeze(-2), dim=2)
    return out.type_as(y)


def einsum_pre(x: Tensor, p: Site) -> tuple[Tensor, Tensor, Tensor]:
    n, d = p.c.n, p.hidden
    wide = x.float()
    rms = (torch.einsum("bsnd,bsnd->bs", wide, wide) / (n * d) + p.c.rms_eps).sqrt()
    mixes = torch.einsum("bsnd,mnd->bsm", wide, p.fn.view(-1, n, d)) / rms.unsqueeze(-1)
    pre, post, comb = sinkhorn(mixes, p.scale, p.base, p.c)
    return torch.einsum("bsn,bsnd->bsd", pre, wide).to(x.dtype), post, comb


def einsum_post(y: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    mixed = torch.einsum("bsij,bsid->bsjd", comb, x.float())
    return (torch.einsum("bsn,bsd->bsnd", post, y.float()) + mixed).to(x.dtype)


def sum_pre(x: Tensor, p: Site) -> tuple[Tensor, Tensor, Tensor]:
    flat = x.reshape(-1, p.c.n * p.hidden).float()
    rms = torch.rsqrt(flat.pow(2).sum(-1, keepdim=True) / flat.shape[-1] + p.c.rms_eps)
    mixes = (flat @ p.fn.t()) * rms
    pre, post, comb = sinkhorn(mixes, p.scale, p.base, p.c)
    pre, post = pre.view(*x.shape[:-1]), post.view(*x.shape[:-1])
    comb = comb.view(*x.shape[:-2], p.c.n, p.c.n)
    return (pre[..., None, :] @ x.float()).squeeze(-2).to(x.dtype), post, comb


def loop_post(y: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    n = x.shape[-2]
    rows = []
    for k in range(n):
        row = post[..., k : k + 1] * y
        for j in range(n):
            row = row + comb[..., j, k : k + 1] * x[..., j, :]
        rows.append(row)
    return torch.stack(rows, dim=-2).to(x.dtype)


def rms_norm_pre(x: Tensor, p: Site) -> tuple[Tensor, Tensor, Tensor]:
    flat = F.rms_norm(x.flatten(2).float(), (p.c.n * p.hidden,), eps=p.c.rms_eps)
    parts = [F.linear(flat, w) for w in p.fn.split([p.c.n, p.c.n, p.c.n**2])]
    pre, post, comb = sinkhorn(torch.cat(parts, -1), p.scale, p.base, p.c)
    return (x * pre[..., None]).sum(-2).to(x.dtype), post, comb


def addcmul_post(y: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    mixed = comb.mT @ x.to(comb.dtype)
    return torch.addcmul(mixed, post[..., None], y[..., None, :].to(comb.dtype)).to(x.dtype)


def turned_post(y: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Sums over the second index: other mathematics, to be computed as written."""
    return hf_post(y, x, post, comb.transpose(-1, -2))


SPELLINGS: dict[str, tuple[Pre, Post]] = {
    "hf": (hf_pre, hf_post),
    "deepseek": (deepseek_pre, deepseek_post),
    "einsum": (einsum_pre, einsum_post),
    "sum_over_size": (sum_pre, hf_post),
    "rms_norm_and_split_fn": (rms_norm_pre, addcmul_post),
    "loop": (deepseek_pre, loop_post),
    "turned": (hf_pre, turned_post),
}


def _miss(change: Callable[[Tensor, Site], Tensor]) -> Pre:
    """DeepSeek's spelling with the mixing logits changed."""

    def pre(x: Tensor, p: Site) -> tuple[Tensor, Tensor, Tensor]:
        flat = x.flatten(2).float()
        gates = sinkhorn(change(flat, p), p.scale, p.base, p.c)
        return torch.sum(gates[0].unsqueeze(-1) * x.float(), dim=2).to(x.dtype), gates[1], gates[2]

    return pre


def _mixes(flat: Tensor, p: Site) -> Tensor:
    return F.linear(flat, p.fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + p.c.rms_eps)


def epsilon_outside(flat: Tensor, p: Site) -> Tensor:
    return F.linear(flat, p.fn) / (flat.square().mean(-1, keepdim=True).sqrt() + p.c.rms_eps)


def clamped(flat: Tensor, p: Site) -> Tensor:
    return _mixes(flat, p).clamp(-8, 8)


def activated(flat: Tensor, p: Site) -> Tensor:
    return torch.tanh(_mixes(flat, p))


def weighted_norm(flat: Tensor, p: Site) -> Tensor:
    return _mixes(flat * p.norm_weight.float().repeat(p.c.n), p)


def _other_sinkhorn(x: Tensor, p: Site, step_sum: Callable[[Tensor, int], Tensor], rows_first: bool) -> tuple:
    y, post, _ = deepseek_pre(x, p)
    n = p.c.n
    logits = _mixes(x.flatten(2).float(), p)[..., 2 * n :] * p.scale[2] + p.base[2 * n :]
    comb = torch.softmax(logits.unflatten(-1, (n, n)), -1) + p.c.hc_eps
    for step in range(2 * p.c.iters - 1):
        comb = comb / step_sum(comb, -1 if (step % 2 == 0) == rows_first else -2)
    return y, post, comb


def rows_first_pre(x: Tensor, p: Site) -> tuple[Tensor, Tensor, Tensor]:
    return _other_sinkhorn(x, p, lambda c, dim: c.sum(dim, keepdim=True) + p.c.hc_eps, rows_first=True)


def no_epsilon_in_sums_pre(x: Tensor, p: Site) -> tuple[Tensor, Tensor, Tensor]:
    return _other_sinkhorn(x, p, lambda c, dim: c.sum(dim, keepdim=True), rows_first=False)


def raised_post_pre(x: Tensor, p: Site) -> tuple[Tensor, Tensor, Tensor]:
    y, post, comb = deepseek_pre(x, p)
    return y, post + 0.125, comb


def token_mixing_pre(x: Tensor, p: Site) -> tuple[Tensor, Tensor, Tensor]:
    """The RMS is taken over all tokens: no batch axis any more."""
    flat = x.flatten(2).float()
    rms = torch.rsqrt(flat.square().mean(dim=(1, 2), keepdim=True) + p.c.rms_eps)
    pre, post, comb = sinkhorn(F.linear(flat, p.fn) * rms, p.scale, p.base, p.c)
    return torch.sum(pre.unsqueeze(-1) * x.float(), dim=2).to(x.dtype), post, comb


def capped_by_maximum(flat: Tensor, p: Site) -> Tensor:
    """A clamp without `clamp`: it bites only for large logits."""
    mixes = _mixes(flat, p)
    return torch.stack([mixes, torch.full_like(mixes, -3.0)], -1).amax(-1)


def _with_base(change: Callable[[Tensor], Tensor]) -> Pre:
    """DeepSeek's spelling with the base changed."""

    def pre(x: Tensor, p: Site) -> tuple[Tensor, Tensor, Tensor]:
        gates = sinkhorn(_mixes(x.flatten(2).float(), p), p.scale, change(p.base), p.c)
        return torch.sum(gates[0].unsqueeze(-1) * x.float(), dim=2).to(x.dtype), gates[1], gates[2]

    return pre


# What a token axis or a size that follows the token count does to `post`: other mathematics at other lengths.
TOKEN_DEPENDENT: dict[str, Callable[[Tensor], Tensor]] = {
    "times_length": lambda post: post * post.shape[1],
    "times_batch": lambda post: post * post.shape[0],
    "length_minus_four": lambda post: post * (post.shape[1] - 4),
    "prefix_of_three": lambda post: torch.cat([post[:, :3], post[:, 3:] * 2], 1),
    "prefix_of_five": lambda post: torch.cat([post[:, :5], post[:, 5:] * 2], 1),
}


NEAR_MISSES: dict[str, Pre] = {
    "capped_by_a_maximum": _miss(capped_by_maximum),
    "base_without_its_sign": _with_base(lambda base: base.square().sqrt()),
    "base_cut_to_whole_numbers": _with_base(lambda base: base.int().float()),
    "base_capped_by_a_maximum": _with_base(lambda base: torch.stack([base, base * 0 - 0.5], -1).amax(-1)),
    "epsilon_outside_the_root": _miss(epsilon_outside),
    "clamped_logits": _miss(clamped),
    "activated_logits": _miss(activated),
    "norm_with_weight_inside": _miss(weighted_norm),
    "rows_before_columns": rows_first_pre,
    "no_epsilon_in_the_sums": no_epsilon_in_sums_pre,
    "rms_over_all_tokens": token_mixing_pre,
}


class Stack(nn.Module):
    """`layers` blocks `residual = post(layer(norm(pre(residual))), residual)`, a projection as the layer."""

    def __init__(
        self,
        pre: Pre,
        post: Post,
        hidden: int = 64,
        layers: int = 2,
        norm: bool = True,
        dtype: torch.dtype = torch.float32,
        constants: Constants | None = None,
    ):
        super().__init__()
        c = constants or Constants()
        self.pre, self.post, self.norm, self.c = pre, post, norm, c
        self.sites = nn.ModuleList(Site(hidden, c, dtype) for _ in range(layers))
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden, bias=False, dtype=dtype) for _ in range(layers))

    def forward(self, residual: Tensor) -> Tensor:
        for site, layer in zip(self.sites, self.layers, strict=True):
            x, post, comb = self.pre(residual, site)
            if self.norm:
                wide = x.float()
                wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.c.norm_eps)
                x = site.norm_weight * wide.to(x.dtype)
            residual = self.post(torch.tanh(layer(x)), residual, post, comb)
        return residual
