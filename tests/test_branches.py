"""`branches=True`: independent chains of a piece run beside each other, numbers are the same, and all is reported."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsv4_compile
from dsv4_compile import assembly, backend
from dsv4_compile.passes import branches, verify
from dsv4_compile.passes.schedule import Violation
from dsv4_compile.passes.sites import module_path
from dsv4_compile.runtime import forks
from tests.models import CSA, HCA, SLIDING, deepseek
from tests.recorder import FakeRecorder

Forks = list[tuple[int, bool]]
"""For each fork the side streams, and whether it was one."""


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forks]:
    """A CUDA device on the CPU: side streams run before the main one, the last of them first."""
    seen: Forks = []

    def backwards(
        main: Callable[[], Any], sides: Sequence[Callable[[], Any]], device: object, enabled: bool = True
    ) -> tuple[Any, list[Any]]:
        seen.append((len(sides), enabled))
        made = [side() for side in reversed(sides)] if enabled else []
        first = main()
        return first, made[::-1] if enabled else [side() for side in sides]

    recorder = FakeRecorder()
    monkeypatch.setattr(forks, "execute_in_parallel", backwards)
    monkeypatch.setattr(backend, "_device_type", lambda inputs: "cuda")
    monkeypatch.setattr(assembly, "recorder_of", lambda device: recorder)
    assembly._known.clear()
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
        yield seen
    torch._dynamo.reset()


class Chains(nn.Module):
    """Two chains of `length` products behind a value, in each layer."""

    def __init__(self, layers: int = 2, width: int = 16, length: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Chain(width, length) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Chain(nn.Module):
    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.left, self.right = (
            nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(length)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        left = right = self.first(x)
        for one, other in zip(self.left, self.right, strict=True):
            left, right = one(left).sin(), other(right.tanh())
        return left * right + x


def compiled(module: nn.Module, **options: object) -> nn.Module:
    dynamic = options.pop("dynamic", None)
    settings = {"compiler": "eager", "cudagraphs": "full", "projections": "off", "branches": True, **options}
    return torch.compile(copy.copy(module), backend="dsv4", options=settings, dynamic=dynamic)


def graph() -> dsv4_compile.GraphReport:
    return dsv4_compile.report().graphs[-1]


def effective() -> object:
    return dsv4_compile.report().to_dict()["effective"]["branches"]


def test_chains_are_pieces_on_streams_and_replayed(forked: Forks) -> None:
    module = Chains()
    run = compiled(module)
    results = []
    for _ in range(4):
        x = torch.randn(5, 16)
        results.append((run(x), module(x)))
    for got, expected in results:
        torch.testing.assert_close(got, expected)
    assert graph().cudagraphs.replays == 3 and effective() is True
    assert set(forked) == {(1, True)} and len(forked) == 4  # two layers, run and recorded
    (site,) = graph().branches
    assert site.count == 2 and [branch.stream for branch in site.branches] == [0, 1]
    assert site.forked < site.serial - 2 and graph().streams == 1
    names = [piece.name for piece in graph().pieces]
    assert "piece_1.0" in names and "piece_1.1" in names
    assert all(piece.kind == "captured" for piece in graph().pieces)
    on = {piece.name: piece.reason for piece in graph().pieces}
    assert on["piece_1.0"].startswith("a branch on the main stream") and "on side stream 1" in on["piece_1.1"]
    text = f"branches at layers.0 and 1 like it: main {site.branches[0].microseconds:.1f} us, side stream 1"
    assert text in str(dsv4_compile.report())


def test_layers_share_the_code_of_their_branches(forked: Forks) -> None:
    module, x = Chains(6), torch.randn(5, 16)
    torch.testing.assert_close(compiled(module, compiler="inductor")(x), module(x), rtol=1e-5, atol=1e-6)
    keys = {piece.key for piece in graph().pieces if "." in piece.name}
    assert sum("." in piece.name for piece in graph().pieces) == 12 and len(keys) == 2
    assert graph().branches[0].count >= 5


def test_views_of_an_input_that_several_pieces_read(forked: Forks) -> None:
    """Each piece makes its own, so pieces have operators that are not theirs."""

    class Shared(Chains):
        def forward(self, x: Tensor, table: Tensor) -> Tensor:  # type: ignore[override]
            view = table.view(5, 16).t()
            for layer in self.layers:
                x = layer(x + view.t()) * view.t()
            return x

    module, table = Shared(4), torch.randn(80)
    run = compiled(module)
    for _ in range(3):
        x = torch.randn(5, 16)
        torch.testing.assert_close(run(x, table), module(x, table))
    assert not graph().notes and sum(site.count for site in graph().branches if site.branches) == 4


def test_without_the_option_nothing_is_divided(forked: Forks) -> None:
    module, x = Chains(), torch.randn(5, 16)
    torch.testing.assert_close(compiled(module, branches=False)(x), module(x))
    assert not forked and not graph().branches and effective() is False
    assert not any("." in piece.name for piece in graph().pieces)


def test_token_counts_above_the_limit_are_in_turn(forked: Forks) -> None:
    module = Chains()
    run = compiled(module, dynamic=True, stream_max_tokens=8)
    for tokens in (5, 8, 9, 40, 5):
        x = torch.randn(tokens, 16)
        forked.clear()
        torch.testing.assert_close(run(x), module(x))
        assert all(enabled == (tokens <= 8) for _, enabled in forked)
    assert graph().dynamic and graph().cudagraphs.sizes == [5, 8, 9, 40] and graph().branches[0].branches


def test_a_fixed_token_count_above_the_limit_is_a_reason(forked: Forks) -> None:
    module, x = Chains(), torch.randn(9, 16)
    torch.testing.assert_close(compiled(module, dynamic=False, stream_max_tokens=8)(x), module(x))
    reason = "it has 9 tokens, and above 8 (stream_max_tokens) nothing leaves the main stream"
    assert not forked and effective() == {"value": False, "reason": reason}
    assert f"no branches at layers.0 and 1 like it: {reason}" in str(dsv4_compile.report())


def test_too_short_chains_are_said_with_their_times(forked: Forks) -> None:
    module, x = Chains(length=1), torch.randn(5, 16)
    torch.testing.assert_close(compiled(module)(x), module(x))
    found = effective()
    assert not forked and isinstance(found, dict) and not found["value"] and "have to be won" in found["reason"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_streams": 0}, "num_streams is 0"),
        ({"stream_max_tokens": 0}, "stream_max_tokens is 0"),
        ({"cudagraphs": "off"}, "graphs are not cut into pieces"),
    ],
)
def test_where_it_has_no_effect_the_report_says_why(forked: Forks, options: dict[str, object], reason: str) -> None:
    module, x = Chains(), torch.randn(5, 16)
    torch.testing.assert_close(compiled(module, **options)(x), module(x))
    assert f"branches: True -> False ({reason}" in str(dsv4_compile.report()) and not forked
    with pytest.raises(Exception, match="branches=True was asked for and has no effect"):
        compiled(module, strict=True, mhc="off", **options)(x)


def test_on_a_cpu_it_has_no_effect() -> None:
    module, x = Chains(), torch.randn(5, 16)
    with torch.no_grad():
        torch.testing.assert_close(compiled(module, cudagraphs="auto")(x), module(x))
    assert effective() == {"value": False, "reason": "there are no streams on cpu"}


def test_strict_takes_a_graph_that_has_branches(forked: Forks) -> None:
    module, x = Chains(), torch.randn(5, 16)
    torch.testing.assert_close(compiled(module, strict=True, mhc="off")(x), module(x))
    assert effective() is True


def test_in_pieces_that_nothing_captures(forked: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the host launches everything, and may take as long as all of the work does."""
    monkeypatch.setenv("DSV4_PIECES", "1")
    module, x = Chains(), torch.randn(5, 16)
    torch.testing.assert_close(compiled(module, cudagraphs="off")(x), module(x))
    assert not forked and "have to be won" in str(effective())
    monkeypatch.setattr(branches, "HOST_LAUNCH", 0.0)
    monkeypatch.setattr(branches, "EVENT", 0.1)
    torch._dynamo.reset()
    torch.testing.assert_close(compiled(module, cudagraphs="off")(x), module(x))
    assert forked == [(1, True)] * 2 and effective() is True
    assert all(piece.kind == "compiled" for piece in graph().pieces)


def test_branches_of_inductor_whose_sizes_are_symbols(forked: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_PIECES", "1")
    monkeypatch.setattr(branches, "HOST_LAUNCH", 0.0)
    monkeypatch.setattr(branches, "EVENT", 0.1)
    module = Chains()
    run = compiled(module, cudagraphs="off", compiler="inductor", dynamic=True, stream_max_tokens=64)
    for tokens in (5, 2, 64, 65, 300):
        x = torch.randn(tokens, 16)
        forked.clear()
        torch.testing.assert_close(run(x), module(x), rtol=1e-5, atol=1e-6)
        assert forked == [(1, tokens <= 64)] * 2
    assert graph().dynamic and not graph().notes and len(dsv4_compile.report().graphs) == 1


def test_token_counts_that_are_not_recorded_are_launched_by_the_host(forked: Forks) -> None:
    module, x = Chains(), torch.randn(600, 16)
    for sizes, has_branches in ((None, False), ([600], True), ([5], False)):
        torch._dynamo.reset()
        options = {"cudagraphs": "full", "capture_sizes": sizes}
        torch.testing.assert_close(compiled(module, dynamic=False, **options)(x), module(x))
        assert bool(graph().branches[0].branches) == has_branches, sizes


def test_a_fork_that_is_not_proved_is_none(forked: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Violation("mm", "layers.0", "order", "something is wrong")
    monkeypatch.setattr(verify, "check_fork", lambda *parts: [fault])
    module, x = Chains(), torch.randn(5, 16)
    torch.testing.assert_close(compiled(module)(x), module(x))
    assert not forked and "it is not proved to be safe: order at layers.0: something is wrong" in str(effective())


@pytest.mark.parametrize("wrong", [False, True])
def test_verify_compares_what_is_replayed_with_the_branches_as_code(
    forked: Forks, monkeypatch: pytest.MonkeyPatch, wrong: bool
) -> None:
    real = forks.execute_in_parallel

    def spoiled(*given: Any, **more: Any) -> tuple[Any, list[Any]]:
        first, sides = real(*given, **more)
        # Two layers: in the first call, which is compared as a whole, in the second, and when that is recorded.
        return first, [[x + 1 for x in side] for side in sides] if wrong and len(forked) in (5, 6) else sides

    monkeypatch.setattr(forks, "execute_in_parallel", spoiled)
    module = Chains()
    run = compiled(module, verify=1)
    for _ in range(5):
        x = torch.randn(5, 16)
        torch.testing.assert_close(run(x), module(x))
    assert graph().notes == ["verify: 1 of the first 1 calls were compared, and none differed"]
    reasons = [one["reason"] for one in graph().cudagraphs.fallbacks]
    assert len(reasons) == wrong and graph().cudagraphs.replays == 3
    assert all("its graph gave another result than its code" in reason for reason in reasons)


def test_state_that_is_written_is_written_behind_the_branches(forked: Forks) -> None:
    class State(Chain):
        def __init__(self) -> None:
            super().__init__(16, 3)
            self.register_buffer("mean", torch.zeros(16))

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x + self.mean)
            self.mean.mul_(0.5).add_(y.mean(0))
            return y * self.mean

    module = nn.Sequential(State(), State())
    twin = copy.deepcopy(module)
    run = compiled(module)
    for _ in range(4):
        x = torch.randn(5, 16)
        torch.testing.assert_close(run(x), twin(x))
    torch.testing.assert_close([*module.buffers()], [*twin.buffers()])
    assert forked and graph().cudagraphs.replays == 3


def test_a_compressed_layer_of_the_real_model_has_its_chains_on_streams(
    forked: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[set[str]]] = []
    real = branches.find

    def noted(graph: torch.fx.Graph, *rest: object) -> branches.Split | branches.Declined:
        made = real(graph, *rest)
        found.append([{module_path(n).partition("self_attn.")[2] for n in p} for p in getattr(made, "branches", ())])
        return made

    monkeypatch.setattr(branches, "find", noted)
    model = deepseek((SLIDING, CSA, HCA, CSA), hidden=64, hash_layers=0)
    run = compiled(model, mhc="auto", projections="serial")
    for _ in range(3):
        ids = torch.randint(0, 128, (1, 13))
        torch.testing.assert_close(run(ids).logits, model(ids).logits, rtol=1e-4, atol=2e-5)
    assert graph().cudagraphs.mode == "full" and graph().cudagraphs.replays == 2 and not graph().notes
    sites = {site.site: site for site in graph().branches if site.branches}
    assert set(sites) == {"model.layers.0.mlp.experts", "model.layers.1.self_attn", "model.layers.2.self_attn"}
    csa, hca = sites["model.layers.1.self_attn"], sites["model.layers.2.self_attn"]
    assert (csa.count, len(csa.branches), len(hca.branches)) == (2, 3, 2) and graph().streams == 2
    assert [branch.stream for branch in csa.branches] == [0, 1, 2]
    queries, keys, indexer = next(parts for parts in found if len(parts) == 3)
    assert {"q_a_norm", "q_b_proj", "q_b_norm", "compressor.indexer.q_b_proj"} <= queries
    assert {"kv_norm", "compressor.kv_norm", "compressor.rotary_emb"} <= keys
    assert {"compressor.indexer.kv_norm"} <= indexer
    assert not any("norm" in name for name in queries & keys | queries & indexer | keys & indexer)
