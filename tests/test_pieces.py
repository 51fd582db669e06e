"""A graph compiled piece by piece (`DSV4_PIECES=1`): cuts, keys, shared code, and the same results."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass

import dsv4_compile
from dsv4_compile import assembly
from dsv4_compile.passes import keys as piece_keys
from dsv4_compile.passes.extraction import Extract
from tests.models import SLIDING, deepseek


@pytest.fixture(autouse=True)
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DSV4_PIECES", "1")
    gc.collect()
    assembly._known.clear()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """A layer with more than a few operators."""

    def __init__(self, width: int, scale: float = 2.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(x)) * self.scale
        y = y / (1 + y.abs().sum(-1, keepdim=True))
        return x + torch.sin(self.down(y)) * torch.sigmoid(x)


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(0)).log_softmax(-1)


def run(module: nn.Module, *inputs: Tensor | int, **more: object) -> tuple[object, dsv4_compile.GraphReport]:
    """What the compiled module returns, compared with eager, and the report of its last graph."""
    compiled = torch.compile(module, backend="dsv4", **more)
    with torch.no_grad():
        out, eager = compiled(*inputs), module(*inputs)
    torch.testing.assert_close(out, eager, rtol=1e-5, atol=1e-6)
    return compiled, dsv4_compile.report().graphs[-1]


def keys(graph: dsv4_compile.GraphReport) -> list[str]:
    return [piece.key for piece in graph.pieces]


def count_compilations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    compiled: list[int] = []
    real = assembly._compile

    def counted(part: Extract, *rest: object) -> Callable[..., object]:
        compiled.append(len(part.module.graph.nodes))
        return real(part, *rest)

    monkeypatch.setattr(assembly, "_compile", counted)
    return compiled


def test_layers_that_are_alike_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = count_compilations(monkeypatch)
    _, graph = run(Stack(*(Block(8) for _ in range(6))), torch.randn(5, 8))
    assert len(graph.pieces) == 6 and not graph.notes
    # The head is in the piece of the last layer.
    assert len(set(keys(graph))) == len(compiled) == 2
    assert [piece.shared_with for piece in graph.pieces] == [4] * 5 + [0]
    assert graph.pieces[1].reason == "the same as piece_0"
    assert {"aot_autograd", "inductor"} <= set(graph.seconds)


@pytest.mark.parametrize(
    "other",
    [Block(8, scale=3.0), Block(8).double().float().requires_grad_(False), nn.Sequential(Block(8), nn.ReLU())],
    ids=["constant", "parameters", "another operator"],
)
def test_layers_that_differ_are_not_one_piece(other: nn.Module) -> None:
    _, graph = run(Stack(Block(8), other, Block(8), Block(8)), torch.randn(5, 8))
    same = len({*keys(graph)[:2]}) == 1
    assert same == (type(other) is Block and other.scale == 2.0)
    assert keys(graph)[0] == keys(graph)[2]


def test_another_graph_takes_the_code_over(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = count_compilations(monkeypatch)
    first = run(Stack(*(Block(8) for _ in range(3))), torch.randn(5, 8))
    assert len(compiled) == 2
    second = run(Stack(*(Block(8) for _ in range(7))), torch.randn(5, 8))
    assert len(compiled) == 2 and second[1].pieces[0].reason == "taken over from another graph"
    assert "\n  pieces: 7 compiled; 2 distinct, 2 of them taken over from another graph" in str(dsv4_compile.report())
    run(Stack(*(Block(8) for _ in range(3))), torch.randn(6, 8), dynamic=False)
    assert len(compiled) == 4  # another shape
    del first


def test_code_goes_with_the_last_graph_that_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = count_compilations(monkeypatch)
    module = Stack(*(Block(8) for _ in range(3)))
    run(module, torch.randn(5, 8))
    torch._dynamo.reset()
    gc.collect()
    assert len(assembly._known) == 0
    run(module, torch.randn(5, 8))
    assert len(compiled) == 4


def test_sizes_that_are_symbols(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = count_compilations(monkeypatch)
    module = Stack(*(Block(8) for _ in range(4)))
    callable_, graph = run(module, torch.randn(5, 8), dynamic=True)
    assert graph.dynamic and len(set(keys(graph))) == 2 == len(compiled)
    for tokens in (2, 3, 8, 17, 130):
        x = torch.randn(tokens, 8)
        with torch.no_grad():
            torch.testing.assert_close(callable_(x), module(x), rtol=1e-5, atol=1e-6)
    assert len(dsv4_compile.report().graphs) == 1  # the passes have guarded no size
    other = Stack(*(Block(8) for _ in range(5)))
    run(other, torch.randn(9, 8), dynamic=True)
    assert len(compiled) == 2


class Longer(Stack):
    """One row more for each sequence, and rows that know how many they are."""

    def forward(self, x: Tensor, rows: int) -> Tensor:
        if rows != x.shape[1]:
            raise ValueError("it has other rows")
        x = torch.cat([x, x.mean(1, keepdim=True)], 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) + torch.arange(rows + 1)[:, None] / rows


def test_sizes_that_grow_and_are_found_equal() -> None:
    """Strides are sums, which Inductor writes in its own order; and a size that is an input has two names."""
    module = Longer(*(Block(8) for _ in range(3)))
    compiled, graph = run(module, torch.randn(3, 5, 8), 5, dynamic=True)
    assert graph.dynamic and len(graph.pieces) == 3 and not graph.notes
    for rows in (2, 9, 40):
        x = torch.randn(3, rows, 8)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, rows), module(x, rows), rtol=1e-5, atol=1e-6)
    assert len(dsv4_compile.report().graphs) == 1


class Halves(nn.Module):
    """What it does depends on whether there is an even number of rows."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x) * torch.sigmoid(x) + torch.sin(x)
        return torch.cat([y[: x.shape[0] // 2] * 2, y[x.shape[0] // 2 :] * 3]) if x.shape[0] % 2 == 0 else y.cos() + y


def test_facts_of_the_first_graph_hold_for_those_that_take_it_over() -> None:
    modules = [Stack(Block(8), Halves(), Block(8)) for _ in range(2)]
    compiled = [torch.compile(module, backend="dsv4", dynamic=True) for module in modules]
    for tokens in (4, 6, 5, 7, 2, 3, 64, 65):
        x = torch.randn(tokens, 8)
        for module, one in zip(modules, compiled, strict=True):
            with torch.no_grad():
                torch.testing.assert_close(one(x), module(x), rtol=1e-5, atol=1e-6)


class Cached(nn.Module):
    """Writes a buffer in place, reads the old value before and the new one after."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(8)
        self.register_buffer("state", torch.zeros(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        before = self.state.sum(0)
        self.state.mul_(0.5).add_(x[:4])
        return self.block(x) + before + self.state.mean(0)


def test_buffers_that_are_written() -> None:
    module = Stack(*(Cached() for _ in range(3)))
    eager = Stack(*(Cached() for _ in range(3)))
    eager.load_state_dict(module.state_dict())
    compiled = torch.compile(module, backend="dsv4")
    for _ in range(4):
        x = torch.randn(5, 8)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), eager(x), rtol=1e-5, atol=1e-6)
        for ours, theirs in zip(module.buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    graph = dsv4_compile.report().graphs[-1]
    assert len(graph.pieces) == 3 and keys(graph)[0] == keys(graph)[1]


def test_an_old_value_that_is_read_later_is_not_overwritten_before() -> None:
    class Late(Stack):
        def forward(self, x: Tensor) -> Tensor:
            first = self.layers[0].state
            old = first.view(-1)
            y = self.layers[0].block(x)
            new = first * 0.5 + x[:4]
            y = self.layers[1].block(y) + new.sum(0)
            y = self.layers[2].block(y) + old.view(4, 8).mean(0)  # after `new`, in another piece
            first.copy_(new)
            return self.head(y)

    module, eager = Late(*(Cached() for _ in range(3))), Late(*(Cached() for _ in range(3)))
    eager.load_state_dict(module.state_dict())
    compiled = torch.compile(module, backend="dsv4")
    for _ in range(3):
        x = torch.randn(5, 8)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), eager(x), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(module.layers[0].state, eager.layers[0].state)


class UpFront(nn.Module):
    """Makes views of its buffers before the first layer; each layer reads its own and writes it."""

    def __init__(self, view: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layers, self.view = nn.ModuleList(Block(8) for _ in range(3)), view
        for i in range(3):
            self.register_buffer(f"state{i}", torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        for layer, state in zip(self.layers, [self.view(getattr(self, f"state{i}")) for i in range(3)], strict=True):
            x = layer(x + state.flip(0))
            state.mul_(0.9).add_(x)
        return x


@pytest.mark.parametrize(
    ("view", "shape"),
    [
        (lambda t: t.squeeze(1), (5, 1, 8)),
        (torch.t, (8, 5)),
        (lambda t: t[1], (3, 5, 8)),
        (lambda t: t.unbind(0)[2], (3, 5, 8)),
        (lambda t: t.view(5, 8), (40,)),
    ],
    ids=["squeeze", "transpose", "select", "unbind", "view"],
)
def test_a_view_made_up_front_is_read_before_its_buffer_is_written(
    view: Callable[[Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    module = UpFront(view, shape)
    eager = copy.deepcopy(module)
    compiled = torch.compile(module, backend="dsv4")
    for _ in range(2):
        x = torch.randn(5, 8)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), eager(x), rtol=1e-5, atol=1e-6)
        for ours, theirs in zip(module.buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    graph = dsv4_compile.report().graphs[-1]
    assert len(graph.pieces) > 2 and not graph.notes


class Put(Block):
    def forward(self, x: Tensor, row: int) -> Tensor:
        return torch.select_scatter(super().forward(x), x.sum(0), 0, row) + x.sin()


def test_code_for_a_positive_size_is_not_taken_for_a_negative_one() -> None:
    class Rows(Stack):
        def forward(self, x: Tensor, row: int) -> Tensor:
            for layer in self.layers:
                x = layer(x, row)
            return x

    module, x = Rows(*(Put(8) for _ in range(3))), torch.randn(6, 8)
    compiled = torch.compile(module, backend="dsv4", dynamic=True)
    with torch.no_grad():
        for row in (3, -2, 1, -1):
            torch.testing.assert_close(compiled(x, row), module(x, row), rtol=1e-5, atol=1e-5)


def test_a_pass_of_the_user_makes_other_code() -> None:
    first = run(Stack(*(Block(8) for _ in range(3))), torch.randn(5, 8))
    module, x = Stack(*(Block(8) for _ in range(3))), torch.randn(5, 8)
    options = {"inductor": {"post_grad_custom_post_pass": SineForTanh()}}
    with torch.no_grad():
        got = torch.compile(module, backend="dsv4", options=options)(x)
        assert not torch.allclose(got, module(x), atol=1e-6)
    assert all("taken over" not in piece.reason for piece in dsv4_compile.report().graphs[-1].pieces)
    del first


class SineForTanh(CustomGraphPass):
    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            if node.target is torch.ops.aten.tanh.default:
                node.target = torch.ops.aten.sin.default

    def uuid(self) -> str:
        return "sine for tanh"


class Table(Block):
    def __init__(self, width: int, values: list[float]) -> None:
        super().__init__(width)
        self.values = values

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.tensor(self.values)


def test_constants_are_compared_by_their_content() -> None:
    same, other = [float(i) for i in range(8)], [float(2 * i) for i in range(8)]
    _, graph = run(Stack(*(Table(8, values) for values in (same, same, other, same))), torch.randn(5, 8))
    found = keys(graph)
    assert len(found) == 4 and found[0] == found[1] != found[2]


class Views(nn.Module):
    """Hands views, a permuted tensor, sizes and several results of one operator on."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x) * 2 + torch.sin(x) * torch.cos(x)
        values, indices = y.sort(dim=-1)
        return values.t().contiguous().t()[:, indices[0].argsort()] + y.t().reshape(y.shape)


def test_views_strides_and_several_results_cross_a_cut() -> None:
    run(Stack(Block(8), Views(), Views(), Block(8)), torch.randn(6, 8))
    run(Stack(Block(8), Views(), Views(), Block(8)), torch.randn(6, 8), dynamic=True)


def test_random_numbers_are_those_of_inductor() -> None:
    class Dropped(Block):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.dropout(super().forward(x), 0.5, training=True)

    module = Stack(*(Dropped(8) for _ in range(3)))
    compiled = torch.compile(module, backend="dsv4")
    with torch.no_grad():
        results = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            results.append(compiled(torch.ones(5, 8)))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


def test_what_cannot_be_cut_is_one_piece_with_a_reason() -> None:
    _, graph = run(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(3, 4))
    assert len(graph.pieces) == 1 and "no place to cut it" in graph.notes[0]


def test_a_failure_is_one_piece_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no key today")

    monkeypatch.setattr(piece_keys, "key_of", broken)
    _, graph = run(Stack(Block(8), Block(8)), torch.randn(5, 8))
    assert len(graph.pieces) == 1 and "no key today" in graph.notes[0]


def test_gradients_are_left_alone() -> None:
    module = Stack(Block(8), Block(8))
    x = torch.randn(5, 8)
    torch.compile(module, backend="dsv4")(x).sum().backward()
    got = module.head.weight.grad.clone()
    module.zero_grad()
    module(x).sum().backward()
    torch.testing.assert_close(got, module.head.weight.grad)


def test_parameters_are_inputs_and_not_part_of_the_code() -> None:
    module = Stack(*(Block(8) for _ in range(3)))
    compiled, _ = run(module, torch.randn(5, 8))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1)
        x = torch.randn(5, 8)
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-6)
        module.layers[1].up.weight.data = torch.randn(16, 8)
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-6)


PROCESS = """
import sys, torch, dsv4_compile
from torch._dynamo.utils import counters
from tests.test_pieces import Block, Stack
with torch.no_grad():
    module = Stack(*(Block(8) for _ in range(int(sys.argv[1]))))
    torch.compile(module, backend="dsv4", dynamic=True)(torch.randn(5, 8))
assert len(dsv4_compile.report().graphs[-1].pieces) == int(sys.argv[1])
print(*(counters["inductor"][f"fxgraph_cache_{kind}"] for kind in ("hit", "miss")))
"""


def test_another_process_finds_the_pieces_of_another_model_in_the_cache(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    outputs = [
        subprocess.run(
            [sys.executable, "-c", PROCESS, layers],
            cwd=Path(__file__).parent.parent,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for layers in ("3", "5")
    ]
    assert outputs == [["0", "2"], ["2", "0"]]


@pytest.mark.slow
def test_layers_of_the_real_model_and_phases_of_its_cache_share_code(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = count_compilations(monkeypatch)
    model = deepseek((SLIDING, SLIDING, SLIDING), iters=2, hash_layers=0)
    ids = torch.randint(0, model.config.vocab_size, (1, 13))
    arguments = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    eager = model.generate(ids, **arguments)
    model.compile(backend="dsv4")
    with torch._dynamo.config.patch(recompile_limit=4):  # raised before it is reached
        assert torch.equal(model.generate(ids, **arguments), eager)
        assert torch._dynamo.config.recompile_limit == 16
    graphs = dsv4_compile.report().graphs
    assert all(len(graph.pieces) == 8 and not graph.notes for graph in graphs)
    prefill = keys(graphs[0])
    assert prefill[2] == prefill[4] == prefill[6] and prefill[3] == prefill[5]  # experts; attention of two layers
    assert len(compiled) < 0.7 * sum(len(graph.pieces) for graph in graphs)
    assert any(piece.reason == "taken over from another graph" for graph in graphs[1:] for piece in graph.pieces)
