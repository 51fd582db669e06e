"""vLLM's compile wrapper, backend and pass manager in mode 3, on a stack of its real mHC operators.

vLLM's CPU platform turns mode 3 into 2; the configuration is made with that one line undone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.mhc import MHCPostOp, MHCPreOp
from vllm.platforms.cpu import CpuPlatform

import dsv4_compile
from dsv4_compile.vllm.settings import HOOK

N, D = 4, 64
TOKENS = (40, 5, 1)


@support_torch_compile(dynamic_arg_dims={"x": 0})
class Stack(nn.Module):
    """`layers` sublayers between vLLM's operators for mHC."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", layers: int = 3):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def draw(*dims: int) -> nn.Parameter:
            values = torch.randn(dims, generator=generator) / max(1, dims[-1]) ** 0.5
            return nn.Parameter(values, requires_grad=False)

        def several(*dims: int) -> nn.ParameterList:
            return nn.ParameterList([draw(*dims) for _ in range(layers)])

        self.fn, self.scale, self.base = several((2 + N) * N, N * D), several(3), several((2 + N) * N)
        self.weights = several(D, D).bfloat16()
        self.pre, self.post = MHCPreOp(), MHCPostOp()

    def forward(self, x: Tensor) -> Tensor:
        residual = x.unsqueeze(-2).repeat(1, N, 1)
        for fn, scale, base, weight in zip(self.fn, self.scale, self.base, self.weights, strict=True):
            post, comb, row = self.pre(residual, fn, scale, base, 1e-6, 1e-5, 1e-5, 2.0, 20)
            residual = self.post(torch.nn.functional.linear(row, weight), residual, post, comb)
        return residual.float().mean(-2)


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


def config_of(graph_pass: Any, v2: bool = False, **settings: Any) -> VllmConfig:
    update = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def piecewise(cls: type, config: VllmConfig) -> None:
        update(cls, config)
        config.compilation_config.mode = CompilationMode.VLLM_COMPILE

    hooks = {"enable_auto_functionalized_v2": v2} | ({} if graph_pass is None else {HOOK: graph_pass})
    compilation = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE, compile_sizes=[], inductor_compile_config=hooks, **settings
    )
    with mock.patch.object(CpuPlatform, "check_and_update_config", classmethod(piecewise)):
        return VllmConfig(compilation_config=compilation)


def run(graph_pass: Any, **settings: Any) -> tuple[list[Tensor], list[dsv4_compile.CompileReport]]:
    known = dsv4_compile.reports()
    config = config_of(graph_pass, **settings)
    outputs = []
    with set_current_vllm_config(config), torch.inference_mode():
        model = Stack(vllm_config=config)
        for tokens in TOKENS:
            x = torch.randn(tokens, D, generator=torch.Generator().manual_seed(tokens)).bfloat16()
            with set_forward_context(None, config, num_tokens=tokens):
                outputs.append(model(x))
    return outputs, [r for r in dsv4_compile.reports() if not any(r is k for k in known)]


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() < 5e-3 * b.norm()


@pytest.mark.parametrize("v2", [False, True], ids=["auto_functionalized", "auto_functionalized_v2"])
def test_every_range_of_token_counts_is_rewritten_and_right(v2):
    expected, nothing = run(None)
    assert nothing == []
    ours = dsv4_compile.graph_pass({"mhc": "reference"})
    settings = {"compile_ranges_endpoints": [8, 64], "v2": v2}
    found, reports = run(ours, **settings)
    assert_close(found, expected)
    assert len(reports) == 3, "one for each range: up to 8, up to 64, and the rest"
    for report in reports:
        (graph,) = report.graphs
        assert [s.form for s in graph.mhc] == ["pre", "post_pre", "post_pre", "post"]
        assert {s.kernel for s in graph.mhc} == {"reference"} and graph.dynamic


def test_the_gate_keeps_long_ranges_as_they_are_and_says_so():
    expected, _ = run(None)
    found, reports = run(dsv4_compile.graph_pass({"mhc": "reference"}, 8), compile_ranges_endpoints=[8, 64])
    assert_close(found, expected)
    notes = [note for report in reports for graph in report.graphs for note in graph.notes]
    assert len(notes) == 2 and all("DSV4_VLLM_MAX_TOKENS allows 8" in note for note in notes)
    assert sum(bool(graph.mhc) for report in reports for graph in report.graphs) == 1


def test_by_default_vllms_operators_stay_on_a_cpu():
    expected, _ = run(None)
    found, reports = run(dsv4_compile.graph_pass())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert {s.kernel for report in reports for s in report.graphs[0].mhc} == {"vllm"}
    assert "only where ours were measured to be faster" in str(reports[0])


def test_two_settings_in_one_process_do_not_share_code():
    one, first = run(dsv4_compile.graph_pass({"mhc": "off"}))
    two, second = run(dsv4_compile.graph_pass({"mhc": "reference"}))
    again, third = run(dsv4_compile.graph_pass({"mhc": "reference"}))
    assert_close(two, one)
    assert [len(r) for r in (first, second)] == [1, 1], "another setting is another compilation"
    assert third == [], "the same settings are taken from vLLM's cache"
    assert first[0].graphs[0].mhc == [] and len(second[0].graphs[0].mhc) == 4
    assert all(torch.equal(a, b) for a, b in zip(two, again, strict=True))


@pytest.mark.parametrize("mode", [1, 2])
def test_the_backend_compiles_the_whole_model_in_modes_1_and_2(mode, monkeypatch):
    """Mode 1 by the function that vLLM's GPU runner calls; its CPU runner calls none."""
    from vllm.compilation.wrapper import compile_model_with_stock_torch

    expected, _ = run(None)
    monkeypatch.setenv("DSV4_OPTIONS", '{"mhc": "reference", "compiler": "eager"}')
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", "0")
    known = len(dsv4_compile.reports())
    config = VllmConfig(compilation_config=CompilationConfig(mode=mode, backend="dsv4"))
    with set_current_vllm_config(config), torch.inference_mode():
        model: nn.Module = Stack(vllm_config=config)
        if mode == 1:  # as a whole model holds the part that is marked for the other modes
            model = nn.Sequential(model)
            compile_model_with_stock_torch(model, config)
        found = []
        for tokens in TOKENS[:2]:
            x = torch.randn(tokens, D, generator=torch.Generator().manual_seed(tokens)).bfloat16()
            with set_forward_context(None, config, num_tokens=tokens):
                found.append(model(x))
    assert_close(found, expected[:2])
    (report,) = dsv4_compile.reports()[known:]
    assert [[s.form for s in graph.mhc] for graph in report.graphs] == [["pre", "post_pre", "post_pre", "post"]] * len(
        report.graphs
    )


def test_vllms_real_cpu_operators_compute_what_we_replace_them_with():
    """In float32 at the tolerance of bfloat16 results: layouts, orientation of `comb`, constants, iterations."""
    generator = torch.Generator().manual_seed(3)
    residual, x = (torch.randn(*d, generator=generator).bfloat16() for d in ((6, N, D), (6, D)))
    fn = torch.randn((2 + N) * N, N * D, generator=generator) / (N * D) ** 0.5
    scale, base = torch.rand(3, generator=generator) + 0.5, torch.randn((2 + N) * N, generator=generator)
    for iters in (1, 2, 20):
        numbers: tuple[Any, ...] = (iters, 3e-3, 2e-2, 2e-2, 2.0, 0.0)
        row, post, comb = torch.ops._C.hc_pre_fused_cpu(residual, fn, scale, base, N, iters, 3e-3, 2e-2)
        pre: Callable[..., Any] = dsv4_compile.kernels.mhc.reference.mhc_pre  # type: ignore[attr-defined]
        of_reference = pre(residual.double(), fn, scale, base, None, *numbers, torch.float64)
        for a, b, tolerance in zip((row, post, comb), of_reference, (1e-2, 1e-5, 1e-5), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)
        mixed = torch.ops._C.hc_post_fused_cpu(x, residual, post, comb)
        exact = dsv4_compile.kernels.mhc.reference.mhc_post(  # type: ignore[attr-defined]
            x.double(), residual.double(), post.double(), comb.double(), torch.float64
        )
        torch.testing.assert_close(mixed.double(), exact, rtol=1e-2, atol=2e-2)
