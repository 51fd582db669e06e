"""vLLM's operators as a column of the benchmarks: they compute what ours do."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.mhc import reference

pytest.importorskip("vllm")

EPS = (3e-6, 2e-6, 2e-6, 2.0, 4e-6)  # rms, pre and Sinkhorn (one number on a CPU), the multiplier, the norm


def peers() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "peers.py"
    spec = importlib.util.spec_from_file_location("peers", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules.setdefault("peers", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


def inputs(tokens: int, hidden: int, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    streams = (
        normal(tokens, hidden),
        normal(tokens, 4, hidden),
        normal(tokens, 4).abs(),
        normal(tokens, 4, 4).softmax(-1),
    )
    weights = (normal(24, 4 * hidden) / (4 * hidden) ** 0.5, normal(3), normal(24), 1 + 0.1 * normal(hidden))
    low = (dtype, dtype, torch.float32, torch.float32), (torch.float32, torch.float32, torch.float32, dtype)
    return tuple(
        tuple(v.to(d) for v, d in zip(values, dtypes, strict=True))
        for values, dtypes in zip((streams, weights), low, strict=True)
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="the operators of the CPU")
@pytest.mark.parametrize("operator", ["post_pre", "pre", "post"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_operators_of_the_cpu_compute_the_formula(operator: str, tokens: int) -> None:
    assert peers().present() == ["vllm"]
    run = peers().implementation("vllm", operator)
    streams, weights = inputs(tokens, 128, torch.bfloat16)
    wide_streams, wide_weights = (tuple(v.double() for v in values) for values in (streams, weights))
    exact_dtype = torch.float64
    if operator == "post":
        got, exact = run(*streams, torch.bfloat16), (reference.mhc_post(*wide_streams, exact_dtype),)
    elif operator == "pre":
        got = run(streams[1], *weights, 20, *EPS, torch.bfloat16)
        exact = reference.mhc_pre(wide_streams[1], *wide_weights, 20, *EPS, exact_dtype)
    else:
        got = run(*streams, *weights, 20, *EPS, torch.bfloat16, torch.bfloat16)
        exact = reference.mhc_post_pre(*wide_streams, *wide_weights, 20, *EPS, exact_dtype, exact_dtype)
    for a, b in zip(got, exact, strict=True):
        assert float((a.double() - b).norm() / b.norm()) < 1e-2


def test_what_a_peer_does_not_have_is_none() -> None:
    assert peers().implementation("vllm", "head") is None
    assert peers().implementation("another", "post_pre") is None
