"""Passes ask for no size that changes: that would fix it, and each length of a cache would be a graph of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import dsv4_compile


class Growing(nn.Module):
    """Attention over a cache that grows, in two-dimensional products; or candidates for hc_post of changing sizes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.q, self.k, self.o = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        cache = torch.cat([cache, self.k(x)])
        if self.kind == "products":
            return self.o(torch.softmax(self.q(x) @ cache.T, -1) @ cache), cache
        mixed = torch.einsum("nm,nd->md", torch.softmax(cache @ cache.T, -1), cache)
        return self.o(mixed + cache.sum(-1, keepdim=True) * self.q(x)), cache


@pytest.mark.parametrize("kind", ["products", "mixes"])
def test_a_cache_that_grows_is_one_graph_after_the_first(kind: str) -> None:
    torch._dynamo.reset()
    model = Growing(kind)
    compiled = torch.compile(model, backend="dsv4", options={"compiler": "eager"})
    cache = twin = torch.randn(4, 8)
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(1, 8)
            (got, cache), (expected, twin) = compiled(x, cache), model(x, twin)
            torch.testing.assert_close(got, expected)
    assert len(dsv4_compile.report().graphs) == 2
    torch._dynamo.reset()
