"""`dsv4::grouped_linear`: every way is right, wherever the weights lie, and each cuts a group up as it says."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dsv4_compile.kernels import linear, streams
from dsv4_compile.kernels.linear import grouped, packing, strategies, tuning
from dsv4_compile.kernels.linear.strategies import STRATEGIES, Card, Problem

GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
COLUMNS = 16
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
EVERYWHERE = [name for name, strategy in STRATEGIES.items() if strategy.gather is None]
"""The ways that run on any device."""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    tuning.forget()
    yield
    tuning.forget()


def weights_of(dtypes: list[torch.dtype], device: str = "cpu", columns: int = COLUMNS) -> list[Tensor]:
    rows = itertools.cycle((5, 1, 8, 3))
    return [torch.randn(next(rows), columns, device=device).to(dtype) for dtype in dtypes]


def pack_by_dtype(weights: list[Tensor]) -> None:
    for dtype in {weight.dtype for weight in weights}:
        alike = [weight for weight in weights if weight.dtype == dtype]
        assert len(alike) == 1 or packing.pack(alike).packed


def parts(outputs: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """The results of the weights, in their order."""
    columns = {output.dtype: list(output.split(1, dim=-1)) for output in outputs}
    assert list(columns) == list(dict.fromkeys(weight.dtype for weight in weights))
    found = []
    for weight in weights:
        mine = [columns[weight.dtype].pop(0) for _ in range(weight.shape[0])]
        found.append(torch.cat(mine, -1) if mine else outputs[0].new_empty(0))
    assert not any(columns.values())
    return found


def assert_right(outputs: list[Tensor], x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> None:
    """No farther from float64 than twice what eager is, and half a unit in the last place."""
    for output, weight, bias in zip(parts(outputs, weights), weights, biases, strict=True):
        rounded = x.to(weight.dtype)
        exact = functional.linear(rounded.double(), weight.double(), None if bias is None else bias.double())
        eager = functional.linear(rounded, weight, bias)
        assert output.shape == eager.shape and output.dtype == eager.dtype
        room = torch.finfo(weight.dtype).eps * exact.abs().max() if exact.numel() else 0.0
        error, allowed = (output - exact).abs(), 2 * (eager - exact).abs().max() + room if exact.numel() else 0.0
        assert (error <= allowed).all()


MIXTURES = {"one dtype": [F32] * 4, "low precision": [BF16] * 4, "mixed": [BF16, F32, BF16, F64, BF16]}
NUMBERS = {4: [1, 0, 2, 1], 5: [0, 1, 1, 2, 3]}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 9])
@pytest.mark.parametrize("place", ["packed", "apart", "in part"])
@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("name", [*EVERYWHERE, "operator"])
def test_every_way_is_right(name: str, mixture: str, place: str, tokens: int, device: str) -> None:
    weights = weights_of(MIXTURES[mixture], device)
    if place == "packed":
        pack_by_dtype(weights)
    elif place == "in part":
        alike = [i for i, weight in enumerate(weights) if weight.dtype == weights[0].dtype][:2]
        assert packing.pack([weights[i] for i in alike]).packed
    numbers = NUMBERS[len(weights)]
    x = torch.randn(tokens, COLUMNS, device=device).to(weights[0].dtype)
    for biased in ((), (0,), range(len(weights))):
        biases = [
            torch.randn(weight.shape[0], device=device).to(weight.dtype) if i in biased else None
            for i, weight in enumerate(weights)
        ]
        if name == "operator":
            outputs = linear.grouped_linear(x, weights, biases, numbers, 8)
        else:
            outputs = grouped.run_as(name, x, weights, biases, numbers)
        assert all(output.is_contiguous() for output in outputs)
        assert_right(outputs, x, weights, biases)


@pytest.mark.parametrize("shape", [(COLUMNS,), (2, 3, COLUMNS), (2, 0, COLUMNS), (4, 1, 1, COLUMNS)])
@pytest.mark.parametrize("name", EVERYWHERE)
def test_leading_dimensions_are_kept(name: str, shape: tuple[int, ...]) -> None:
    weights = weights_of([F32, BF16, F32])
    pack_by_dtype(weights)
    x = torch.randn(shape)
    assert_right(grouped.run_as(name, x, weights, [None] * 3, [0, 1, 2]), x, weights, [None] * 3)
    outputs = linear.grouped_linear(x, weights, [None] * 3, [0, 1, 2])
    assert [output.shape for output in outputs] == [(*shape[:-1], 13), (*shape[:-1], 1)]
    assert_right(outputs, x, weights, [None] * 3)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_strided_inputs_and_weights(name: str) -> None:
    wide = torch.randn(6, 2 * COLUMNS)
    weights = [torch.randn(5, COLUMNS), torch.randn(COLUMNS, 4).t(), torch.randn(6, 2 * COLUMNS)[:, ::2]]
    for x in (wide[:, COLUMNS:], wide[:, ::2], torch.randn(COLUMNS, 6).t(), torch.randn(1, COLUMNS).expand(6, COLUMNS)):
        assert_right(grouped.run_as(name, x, weights, [None] * 3, [0, 1, 1]), x, weights, [None] * 3)
        assert_right(linear.grouped_linear(x, weights, [None] * 3, [0, 1, 1]), x, weights, [None] * 3)


@pytest.mark.parametrize("rows", [(0, 3, 0, 2, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("name", EVERYWHERE)
def test_weights_without_rows(name: str, rows: tuple[int, ...]) -> None:
    weights = [torch.randn(count, COLUMNS) for count in rows]
    packing.pack(weights)
    x, nothing = torch.randn(4, COLUMNS), [None] * len(rows)
    expected = x @ torch.cat(weights).t()
    for outputs in (
        grouped.run_as(name, x, weights, nothing, [0, 1, 1, 2, 3][: len(rows)]),
        linear.grouped_linear(x, weights, nothing, [0] * len(rows)),
    ):
        torch.testing.assert_close(outputs, [expected])


def test_no_features_make_zeros_or_the_bias() -> None:
    weights = [torch.randn(2, 0), torch.randn(3, 0)]
    (output,) = linear.grouped_linear(torch.randn(4, 0), weights, [None, torch.ones(3)], [0, 1])
    assert output.equal(torch.cat([torch.zeros(4, 2), torch.ones(4, 3)], -1))


# ------------------------------------------------------------------------------------------------- weights that move


def assert_right_now(weights: list[Tensor]) -> None:
    x = torch.randn(3, weights[0].shape[1])
    nothing: list[Tensor | None] = [None] * len(weights)
    for _ in range(2):
        outputs = linear.grouped_linear(x, weights, nothing, [0, 1, 2][: len(weights)])
        assert_right(outputs, x, weights, nothing)


def runs() -> set[tuple[tuple[int, ...], ...]]:
    return {entry["runs"] for entry in linear.choices()}


def parameters(rows: int = COLUMNS) -> list[Tensor]:
    made: list[Tensor] = [nn.Parameter(torch.randn(rows, COLUMNS), requires_grad=False) for _ in range(3)]
    assert packing.pack(made).packed
    return made


def test_weights_that_are_swapped_moved_or_parted_are_read_as_they_are() -> None:
    weights = parameters()
    assert_right_now(weights)
    assert runs() == {((0, 1, 2),)}
    weights[1].data = torch.randn(COLUMNS, COLUMNS)
    assert_right_now(weights)
    weights[1].data = torch.randn(7, COLUMNS)
    assert_right_now(weights)
    packing.unpack(weights)
    assert_right_now(weights)
    assert packing.pack(weights).packed
    assert_right_now(weights)
    assert_right_now([weights[2], weights[0], weights[1]])
    assert_right_now([weights[0], weights[0]])


def test_a_square_weight_that_is_transposed_in_place_is_noticed() -> None:
    """Same object, same address, same shape: only the strides tell."""
    weights = parameters()
    assert_right_now(weights)
    weights[1].data = weights[1].data.t()
    assert_right_now(weights)
    weights[1].data = weights[1].data.t()
    weights[0].t_()
    assert_right_now(weights)


def test_other_weights_at_the_same_addresses_are_other_weights() -> None:
    weights = parameters()
    assert_right_now(weights)
    assert_right_now([weights[0][:5], weights[1]])
    assert_right_now([weights[0], weights[1][:5], weights[2]])
    assert_right_now([weight.view(torch.int32).view(F32) for weight in weights])
    halves = [weight.view(2 * COLUMNS, COLUMNS // 2) for weight in weights]
    assert_right_now(halves)


def test_storages_that_only_happen_to_lie_side_by_side_are_not_read_as_one() -> None:
    """What is freed is allocated again: the weights of the next model may lie where those of the last one were."""
    memory = bytearray(3 * COLUMNS * COLUMNS * 4)
    size = COLUMNS * COLUMNS

    def own(position: int) -> Tensor:
        made = torch.frombuffer(memory, dtype=F32, count=size, offset=4 * size * position).view(COLUMNS, COLUMNS)
        return made

    whole = torch.frombuffer(memory, dtype=F32).view(3 * COLUMNS, COLUMNS)
    whole.copy_(torch.randn_like(whole))
    together, apart = list(whole.split(COLUMNS)), [own(i) for i in range(3)]
    assert [a.data_ptr() for a in together] == [b.data_ptr() for b in apart]
    assert packing.already_packed(together) and not packing.already_packed(apart)
    assert_right_now(together)
    assert_right_now(apart)
    assert runs() == {((0, 1, 2),), ((0,), (1,), (2,))}
    assert_right_now(together)


def test_what_is_remembered_of_weights_keeps_none_of_them_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "_KEEP", 4)
    for _ in range(10):
        weights = parameters()
        kept = weights[0].untyped_storage()._weak_ref()
        assert_right_now(weights)
        assert len(grouped._groups) <= 4
        del weights
        assert torch.UntypedStorage._expired(kept)


def test_without_the_guards_of_dynamo_the_facts_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._C._dynamo.guards.TensorGuards", None)
    test_a_square_weight_that_is_transposed_in_place_is_noticed()
    test_other_weights_at_the_same_addresses_are_other_weights()


# ------------------------------------------------------------------------------------------------- streams, by plan


def problem(
    features: tuple[int, ...] = (1024, 512, 64),
    dtypes: tuple[torch.dtype, ...] = (BF16, BF16, F32),
    runs: tuple[tuple[int, ...], ...] = ((0, 1), (2,)),
    streams: tuple[int, ...] = (0, 1, 2),
) -> Problem:
    return Problem(Card("a card", 1), 4096, features, dtypes, (False,) * len(features), runs, streams, BF16, True)


def members(name: str, of: Problem) -> list[list[tuple[int, ...]]]:
    return [[product.members for product in slot] for slot in strategies.plan_of(name, of).slots]


def test_each_way_cuts_a_group_up_as_it_says() -> None:
    assert members("serial", problem()) == [[(0,), (1,), (2,)]]
    assert members("pack", problem()) == [[(0, 1), (2,)]]
    assert members("streams", problem(streams=(1, 0, 1))) == [[(1,)], [(0,), (2,)]]
    assert members("pack+streams", problem()) == [[(0, 1)], [(2,)], []]
    # float32 is the heavier one here.
    assert members("pack+streams", problem(features=(100, 100, 200))) == [[(2,)], [(0, 1)], []]
    many = problem((9, 8, 7, 6), (BF16,) * 4, ((0, 1), (2,), (3,)), (0, 1, 1, 1))
    assert members("pack+streams", many) == [[(0, 1)], [(2,), (3,)]]


def test_the_heaviest_of_a_stream_comes_first() -> None:
    assert members("streams", problem((1, 3, 2, 9), (BF16,) * 4, ((0,), (1,), (2,), (3,)), (0, 0, 0, 1))) == [
        [(1,), (2,), (0,)],
        [(3,)],
    ]


def test_legal_are_the_ways_that_differ() -> None:
    apart = ((0,), (1,), (2,))
    assert strategies.legal(problem(), 1) == ("serial", "streams", "pack", "pack+streams")
    assert strategies.legal(problem(streams=(0, 0, 0)), 1) == ("serial", "pack")
    assert strategies.legal(problem(runs=apart), 1) == ("serial", "streams")
    assert strategies.legal(problem(runs=apart, streams=(0, 0, 0)), 1) == ("serial",)
    assert strategies.legal(problem((1, 1), (BF16,) * 2, ((0, 1),), (0, 1)), 1) == ("serial", "streams", "pack")


def test_the_documented_default() -> None:
    assert strategies.default(problem(), 1) == strategies.default(problem(), 4096) == "pack"
    assert strategies.default(problem(), 4097) == "streams"
    assert strategies.default(problem(runs=((0,), (1,), (2,))), 1) == "streams"
    assert strategies.default(problem(streams=(0,) * 3), 5000) == "serial"


@pytest.mark.parametrize(
    ("times", "way"),
    [
        ({"serial": 10.0, "streams": 9.9}, "serial"),
        ({"serial": 10.0, "streams": 9.7}, "streams"),
        ({"serial": 10.0, "streams": 9.5, "pack": 9.6, "pack+streams": 9.45}, "pack"),
        ({"serial": 10.0, "streams": 8.0, "pack": 9.6, "pack+streams": 7.0}, "pack+streams"),
        ({"serial": 9.0, "pack": 9.6}, "serial"),
    ],
)
def test_side_streams_must_win_by_more_than_two_percent(times: dict[str, float], way: str) -> None:
    assert strategies.fastest(times) == way


def test_a_further_way_is_one_more_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []

    def own(rows: Tensor, turned: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        calls.append(tuple(turned.shape))
        return torch.mm(rows, turned, out=out)

    way = strategies.Strategy(packed=True, multiply=own, serves=lambda p, tokens: tokens < 8 and p.x is F32)
    monkeypatch.setitem(STRATEGIES, "own", way)
    weights = parameters()
    x = torch.randn(3, COLUMNS)
    assert_right(grouped.run_as("own", x, weights, [None] * 3, [0] * 3), x, weights, [None] * 3)
    assert calls == [(COLUMNS, 3 * COLUMNS)]
    assert "own" not in strategies.legal(problem(), 1)


@pytest.mark.parametrize(("tokens", "threshold", "leaves"), [(7, 8, True), (8, 8, True), (9, 8, False), (1, 0, False)])
def test_no_stream_above_the_threshold(
    tokens: int, threshold: int, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked: list[Any] = []
    real = streams.execute_in_parallel

    def note(*args: Any, **kwargs: Any) -> Any:
        forked.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(streams, "execute_in_parallel", note)
    weights, x = weights_of([F32] * 3), torch.randn(tokens, COLUMNS)
    outputs = linear.grouped_linear(x, weights, [None] * 3, [0, 1, 2], threshold)
    assert_right(outputs, x, weights, [None] * 3)
    assert bool(forked) is leaves


def test_packing_can_be_forbidden() -> None:
    weights, x = parameters(), torch.randn(3, COLUMNS)
    linear.grouped_linear(x, weights, [None] * 3, [0, 1, 2], 1024, False)
    assert runs() == {((0,), (1,), (2,))}


# ------------------------------------------------------------------------------------------------ tracing, gradients


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(packed: bool, gradients: bool) -> None:
    weights = weights_of([F32, F64, F32, F32])
    if packed:
        pack_by_dtype(weights)
    biases = [None, torch.randn(1, dtype=F64), None, torch.randn(3)]
    x = torch.randn(2, 3, COLUMNS)
    for tensor in (x, *weights, *(bias for bias in biases if bias is not None)):
        tensor.requires_grad_(gradients)
    torch.library.opcheck(torch.ops.dsv4.grouped_linear.default, (x, weights, biases, [0, 1, 1, 2]))


def test_gradients_equal_eager() -> None:
    weights = [torch.randn(rows, COLUMNS, dtype=F64, requires_grad=True) for rows in (5, 1, 8)]
    packing.pack(weights)
    biases = [None, torch.randn(1, dtype=F64, requires_grad=True), None]
    x = torch.randn(2, 3, COLUMNS, dtype=F64, requires_grad=True)
    wanted = [x, *weights, biases[1]]
    pairs = list(zip(weights, biases, strict=True))
    expected = torch.autograd.grad(torch.cat([functional.linear(x, *pair) for pair in pairs], -1).sin().sum(), wanted)
    (output,) = linear.grouped_linear(x, weights, biases, [0, 1, 2])
    for ours, eager in zip(torch.autograd.grad(output.sin().sum(), wanted), expected, strict=True):
        torch.testing.assert_close(ours, eager)


def test_fake_outputs_have_shape_dtype_and_strides_of_real_ones() -> None:
    weights = weights_of([BF16, F32, BF16])
    x = torch.randn(3, 4, COLUMNS)
    real = linear.grouped_linear(x, weights, [None] * 3, [0, 1, 2])
    meta = linear.grouped_linear(x.to("meta"), [w.to("meta") for w in weights], [None] * 3, [0, 1, 2])
    for one, other in zip(real, meta, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (([torch.ones(2, 3)], [None], [0]), r"needs x \[\.\.\., K\]"),
        (([torch.ones(2, 4)], [], [0]), "1 weights and 0 biases"),
        (([], [], []), "0 weights"),
        (([torch.ones(2, 4)], [torch.ones(3)], [0]), r"must be \[2\]"),
        (([torch.ones(2, 4)], [None], [-1]), "stream of 0 or more"),
        (([torch.ones(2, 4)], [None], [0, 1]), "stream of 0 or more"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_wrong_arguments_are_explained(arguments: tuple[Any, ...], sentence: str, device: str) -> None:
    weights, biases, numbers = arguments
    weights = [weight.to(device) for weight in weights]
    biases = [None if bias is None else bias.to(device) for bias in biases]
    with pytest.raises(RuntimeError, match=sentence):
        linear.grouped_linear(torch.ones(1, 4, device=device), weights, biases, numbers)


def test_wrong_biases_are_explained_after_right_ones() -> None:
    weights, x = [torch.ones(2, 4), torch.ones(3, 4)], torch.ones(1, 4)
    linear.grouped_linear(x, weights, [torch.ones(2), None], [0, 0])
    with pytest.raises(RuntimeError, match=r"must be \[2\]"):
        linear.grouped_linear(x, weights, [torch.ones(1), None], [0, 0])
