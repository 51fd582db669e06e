"""Does it recognise a model that is written another way than Hugging Face's?

    python examples/deepseek_style.py

Two layers with the structure and the names of DeepSeek's `inference/model.py`: `hc_pre` and `hc_post` are methods of
the block, the Sinkhorn iteration is a function of its own, and attention projects with `wq_a` and `wkv`. The backend
compares what the graph computes, not how it is spelled, so it finds the same sites.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dsv4_compile

VOCABULARY, DIM, STREAMS, ITERS, EPS = 512, 128, 4, 20, 1e-6


def split_sinkhorn(mixes: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`[.., 24]` mixing logits -> pre `[.., 4]`, post `[.., 4]` and the doubly stochastic comb `[.., 4, 4]`."""
    n = STREAMS
    pre = torch.sigmoid(mixes[..., :n] * scale[0] + base[:n]) + EPS
    post = 2 * torch.sigmoid(mixes[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = mixes[..., 2 * n :] * scale[2] + base[2 * n :]
    comb = comb.unflatten(-1, (n, n)).softmax(-1) + EPS
    comb = comb / (comb.sum(-2, keepdim=True) + EPS)
    for _ in range(ITERS - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + EPS)
        comb = comb / (comb.sum(-2, keepdim=True) + EPS)
    return pre, post, comb


class Attention(nn.Module):
    def __init__(self, heads: int = 4, rank: int = 64):
        super().__init__()
        self.heads, self.head_dim = heads, DIM // heads
        self.wq_a, self.q_norm = nn.Linear(DIM, rank, bias=False), nn.RMSNorm(rank, eps=EPS)
        self.wq_b = nn.Linear(rank, DIM, bias=False)
        self.wkv, self.kv_norm = nn.Linear(DIM, self.head_dim, bias=False), nn.RMSNorm(self.head_dim, eps=EPS)
        self.wo = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.wq_b(self.q_norm(self.wq_a(x))).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        kv = self.kv_norm(self.wkv(x)).unsqueeze(1).expand(-1, self.heads, -1, -1)
        return self.wo(F.scaled_dot_product_attention(q, kv, kv, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(DIM, 2 * DIM, bias=False)
        self.w2 = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.ffn = Attention(), FeedForward()
        self.attn_norm, self.ffn_norm = nn.RMSNorm(DIM, eps=EPS), nn.RMSNorm(DIM, eps=EPS)
        for site in ("attn", "ffn"):
            setattr(self, f"hc_{site}_fn", nn.Parameter(torch.randn(24, STREAMS * DIM) * 0.05))
            setattr(self, f"hc_{site}_base", nn.Parameter(torch.randn(24)))
            setattr(self, f"hc_{site}_scale", nn.Parameter(torch.rand(3) + 0.5))

    def mixes(self, x: Tensor, fn: Tensor) -> Tensor:
        flat = x.flatten(2).float()
        return F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)

    def hc_pre(self, x: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pre, post, comb = split_sinkhorn(self.mixes(x, fn), scale, base)
        return (pre.unsqueeze(-1) * x).sum(2).type_as(x), post, comb

    def hc_post(self, y: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        return (post.unsqueeze(-1) * y.unsqueeze(-2) + (comb.unsqueeze(-1) * x.unsqueeze(-2)).sum(2)).type_as(x)

    def forward(self, x: Tensor) -> Tensor:
        y, post, comb = self.hc_pre(x, self.hc_attn_fn, self.hc_attn_scale, self.hc_attn_base)
        x = self.hc_post(self.attn(self.attn_norm(y)), x, post, comb)
        y, post, comb = self.hc_pre(x, self.hc_ffn_fn, self.hc_ffn_scale, self.hc_ffn_base)
        return self.hc_post(self.ffn(self.ffn_norm(y)), x, post, comb)


class Transformer(nn.Module):
    """Token ids `[B, S]` in, logits out; the streams are averaged at the end."""

    def __init__(self, blocks: tuple[type[Block], ...] = (Block, Block)):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY, bias=False)
        self.layers = nn.ModuleList(block() for block in blocks)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).unsqueeze(2).expand(-1, -1, STREAMS, -1).contiguous()
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(2))


def main() -> None:
    torch.manual_seed(0)
    model = Transformer()
    ids = torch.randint(0, VOCABULARY, (1, 32))
    with torch.no_grad():
        expected = model(ids)
        actual = torch.compile(model, backend="dsv4", options={"compiler": "eager"})(ids)
    print(dsv4_compile.report())
    print(f"largest difference to eager: {(actual - expected).abs().max():.1e} of {expected.abs().max():.1f}")


if __name__ == "__main__":
    main()
