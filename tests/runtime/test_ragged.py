"""Ragged metadata at fixed addresses, read by a graph that is recorded once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import dsv4_compile
from dsv4_compile import RaggedBuffers, assembly
from dsv4_compile.runtime.ragged import CapacityError
from tests.recorder import FakeRecorder

ROWS, CAPACITY, WIDTH = 4, 24, 8


def ragged(lengths: list[int], generator: torch.Generator, pool: int = 32) -> tuple[Tensor, Tensor]:
    indptr = torch.tensor([0, *lengths]).cumsum(0)
    return torch.randint(0, pool, (int(indptr[-1]),), generator=generator), indptr


def attention(q: Tensor, cache: Tensor, indices: Tensor, indptr: Tensor) -> Tensor:
    """Each row of `q` attends to the entries of the cache that its ragged row names."""
    position = torch.arange(indices.shape[0], device=indices.device)
    mine = (position >= indptr[:-1, None]) & (position < indptr[1:, None])
    scores = (q @ cache[indices].T).masked_fill(~mine, float("-inf"))
    return torch.nan_to_num(scores.softmax(-1)) @ cache[indices]


def row_by_row(q: Tensor, cache: Tensor, indices: Tensor, indptr: Tensor) -> Tensor:
    out = torch.zeros_like(q)
    for i in range(indptr.shape[0] - 1):
        own = cache[indices[indptr[i] : indptr[i + 1]]]
        if len(own):
            out[i] = (q[i] @ own.T).softmax(-1) @ own
    return out


class Decode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("cache", torch.randn(32, WIDTH))

    def forward(self, x: Tensor, indices: Tensor, indptr: Tensor) -> Tensor:
        return x + self.o(attention(self.q(x).tanh(), self.cache, indices, indptr))

    def reference(self, x: Tensor, indices: Tensor, indptr: Tensor) -> Tensor:
        return x + self.o(row_by_row(self.q(x).tanh(), self.cache, indices, indptr))


def test_lengths_change_between_replays_of_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = FakeRecorder()
    monkeypatch.setattr(assembly, "recorder_of", lambda device: recorder)
    model, buffers = Decode(), RaggedBuffers(ROWS, CAPACITY, "cpu")
    options = {"compiler": "eager", "cudagraphs": "full"}
    run = torch.compile(copy.copy(model), backend="dsv4", options=options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for lengths in ([1, 2, 3, 4], [6, 6, 6, 6], [0, 0, 1, 0], [24, 0, 0, 0], [0, 0, 0, 0], [3, 9, 2, 1]):
            indices, indptr = ragged(lengths, generator)
            buffers.update(indices, indptr)
            x = torch.randn(ROWS, WIDTH)
            torch.testing.assert_close(run(x, buffers.indices, buffers.indptr), model.reference(x, indices, indptr))
    graph = dsv4_compile.report().graphs[-1]
    assert len(recorder.recorded) == 1 and graph.cudagraphs.replays == 5 and len(dsv4_compile.report().graphs) == 1
    torch._dynamo.reset()


def test_the_tail_holds_rows_without_entries_and_valid_indices() -> None:
    buffers = RaggedBuffers(ROWS, CAPACITY, "cpu", torch.int64, fill=7)
    buffers.update(torch.arange(20), torch.tensor([0, 5, 20]))
    buffers.update(torch.tensor([3, 1, 2]), torch.tensor([0, 1, 3], dtype=torch.int32))
    assert buffers.indices.tolist() == [3, 1, 2] + [7] * (CAPACITY - 3)
    assert buffers.indptr.tolist() == [0, 1, 3, 3, 3]
    buffers.update(torch.empty(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    assert buffers.indices.tolist() == [7] * CAPACITY and buffers.indptr.tolist() == [0] * 5


@pytest.mark.parametrize(
    ("lengths", "sentence"),
    [([25], "hold 24 entries, and 25 were given"), ([1] * 5, "hold 4 rows, and 5 were given")],
)
def test_above_capacity_is_an_error_and_changes_nothing(lengths: list[int], sentence: str) -> None:
    buffers = RaggedBuffers(ROWS, CAPACITY, "cpu")
    buffers.update(torch.tensor([4, 5]), torch.tensor([0, 2]))
    before = buffers.indices.clone(), buffers.indptr.clone()
    with pytest.raises(CapacityError, match=sentence):
        buffers.update(*ragged(lengths, torch.Generator()))
    assert torch.equal(buffers.indices, before[0]) and torch.equal(buffers.indptr, before[1])


def test_an_update_on_the_edge_of_the_capacity() -> None:
    buffers = RaggedBuffers(ROWS, CAPACITY, "cpu")
    indices, indptr = ragged([24, 0, 0, 0], torch.Generator())
    address = buffers.indices.data_ptr()
    buffers.update(indices, indptr)
    assert torch.equal(buffers.indices.long(), indices) and buffers.indices.data_ptr() == address


@pytest.mark.parametrize(
    ("indices", "indptr", "sentence"),
    [
        (torch.zeros(3), torch.tensor([0, 3]), "one row of int32 or int64"),
        (torch.zeros(3, 1, dtype=torch.int32), torch.tensor([0, 3]), "one row"),
        (torch.arange(3), torch.tensor([0, 2]), "from 0 to the number of entries, 3"),
        (torch.arange(3), torch.tensor([0, 3, 2, 3]), "must go up"),
        (torch.arange(3), torch.tensor([1, 3]), "from 0"),
        (torch.arange(0), torch.empty(0, dtype=torch.int32), "it is empty"),
        (torch.tensor([2**31 + 5]), torch.tensor([0, 1]), "torch.int32 does not hold"),
    ],
)
def test_what_is_no_ragged_row_is_refused(indices: Tensor, indptr: Tensor, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        RaggedBuffers(ROWS, CAPACITY, "cpu").update(indices, indptr)


def test_lists_are_no_tensors() -> None:
    buffers = RaggedBuffers(ROWS, CAPACITY, "cpu")
    with pytest.raises(TypeError, match="indptr must be a tensor, and it is a list"):
        buffers.update(torch.tensor([1]), [0, 1])


@pytest.mark.parametrize("arguments", [(0, 5), (5, 0)])
def test_buffers_have_room_for_something(arguments: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="at least one row and one entry"):
        RaggedBuffers(*arguments, "cpu")
    with pytest.raises(ValueError, match="int32 or int64"):
        RaggedBuffers(1, 1, "cpu", torch.float32)
