"""Operators that no CUDA graph may hold although nothing in their schema says so."""

from __future__ import annotations

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  (registers the operator)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

from dsv4_compile.passes.capturability import Tokens, obstacles


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_experts_that_are_not_bfloat16_wait_for_the_device(device: str) -> None:
    """transformers asks the host where the rows of each expert end."""
    graph = Graph()
    rows, weights, ends = (graph.placeholder(name) for name in ("rows", "weights", "ends"))
    made = graph.call_function(torch.ops.transformers.grouped_mm_fallback.default, (rows, weights, ends))
    graph.output((made,))
    with FakeTensorMode():
        rows.meta["val"], made.meta["val"] = torch.empty(6, 8, device=device), torch.empty(6, 4, device=device)
        weights.meta["val"] = torch.empty(3, 8, 4, device=device)
        ends.meta["val"] = torch.empty(3, dtype=torch.int32, device=device)
    found = obstacles(graph, {weights}, Tokens(), torch.device(device))
    expected = "transformers::grouped_mm_fallback: the host waits for one of its inputs"
    assert found == ({} if device == "cpu" else {made: expected})
