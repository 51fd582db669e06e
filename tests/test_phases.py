"""Sizes of transformers' DeepSeek-V4 cache that change are known before they have changed."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from transformers import DynamicCache

import dsv4_compile
from dsv4_compile import phases
from tests.models import CSA, deepseek


def test_a_phase_of_the_cache_is_one_graph_whatever_the_number_of_windows() -> None:
    """Two windows of four tokens: Dynamo by itself makes a graph of each step."""
    torch._dynamo.reset()
    model = deepseek(hidden=32, layers=(CSA,))
    ids = torch.randint(0, model.config.vocab_size, (1, 40))
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    run = torch.compile(model, backend="dsv4", options={"compiler": "eager"})
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
        for cache in caches:
            model(ids, past_key_values=cache, use_cache=True)
        for step in range(12):
            token = torch.full((1, 1), step)
            got, expected = (f(token, past_key_values=c).logits for f, c in zip((run, model), caches, strict=True))
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert len(dsv4_compile.report().graphs) <= 5
    torch._dynamo.reset()


def test_caches_of_fixed_size_are_left_alone() -> None:
    def tensor() -> SimpleNamespace:
        return SimpleNamespace(scalar=None, size=(1, 5, 8))

    lists = ("buffer_kv['compressor']", "compressed_kv['indexer']", "overlap_kv['compressor']", "keys")
    entries = {f"L['cache'].layers[{layer}].{name}": tensor() for layer in (0, 1) for name in lists}
    entries["L['cache'].layers[1].entry_count['compressor']"] = SimpleNamespace(scalar=3, size="any")
    assert phases._mark(entries, "changes") == 3
    marked = {source for source, entry in entries.items() if entry.size == (1, "changes", 8)}
    assert marked == {f"L['cache'].layers[1].{name}" for name in lists[:2]}
    assert entries["L['cache'].layers[1].entry_count['compressor']"].scalar == "changes"
