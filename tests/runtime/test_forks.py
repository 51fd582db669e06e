"""Branches as one step: which stream each is on, what is held until the join, and when all of it is in turn."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from dsv4_compile.kernels import streams
from dsv4_compile.passes.capturability import Tokens
from dsv4_compile.passes.extraction import Extract
from dsv4_compile.runtime.forks import Joint, joint
from dsv4_compile.runtime.program import Code
from tests.kernels.test_streams import Log, log  # noqa: F401  (a fixture: CUDA replaced by one that takes notes)

GRAPH = Graph()
X, Y, Z, A, B, C = (GRAPH.placeholder(name) for name in "xyzabc")
ROWS = sympy.Symbol("rows", integer=True)


def piece(inputs: tuple[Node, ...], outputs: tuple[Node, ...], symbols: tuple[sympy.Symbol, ...] = ()) -> Extract:
    return Extract(GraphModule(torch.nn.Module(), Graph()), inputs, symbols, outputs)


def noted(name: str, result: Callable[[list[Any]], list[Any]]) -> Code:
    """As compiled code: it empties its inputs."""

    def run(given: list[Any]) -> list[Any]:
        Log.notes.append(f"{name} on {Log.state['current']}")
        made = result(given)
        given.clear()
        return made

    return Code(run)


def three(max_tokens: int = 8, tokens: Tokens | None = None, device: str = "cuda") -> tuple[Joint, Code]:
    branches = [
        (piece((X, Y), (A,)), noted("a", lambda given: [given[0] + given[1]])),
        (piece((Y, X), (B,), (ROWS,)), noted("b", lambda given: [given[0] - given[1] + given[2]])),
        (piece((Z,), (C,)), noted("c", lambda given: [given[0] * 2])),
    ]
    tokens = tokens or Tokens(frozenset({ROWS}), ROWS * 2)
    return joint(branches, tokens, max_tokens, torch.device(device))


def test_branches_are_forked_and_joined(log: list[str]) -> None:  # noqa: F811
    whole, code = three()
    assert (whole.inputs, whole.symbols, whole.outputs, whole.writes) == ((X, Y, Z), (ROWS,), (A, B, C), ())
    given = [1, 10, 100, 4]
    assert code.run(given) == [11, 13, 200] and given == []
    assert log == [
        "main records",
        "a on main",
        "side 1 waits for event of main",
        "b on side 1",
        "side 1 records",
        "main waits for event of side 1",
        "side 2 waits for event of main",
        "c on side 2",
        "side 2 records",
        "main waits for event of side 2",
    ]


@pytest.mark.parametrize(("rows", "forked"), [(3, True), (4, True), (5, False)])
def test_above_the_limit_of_tokens_nothing_leaves_the_main_stream(log: list[str], rows: int, forked: bool) -> None:  # noqa: F811
    _, code = three(max_tokens=8)
    assert code.run([1, 10, 100, rows]) == [11, 9 + rows, 200]
    assert ("b on side 1" in log, "b on main" in log) == (forked, not forked)


def test_a_fixed_token_count_needs_no_size(log: list[str]) -> None:  # noqa: F811
    _, code = three(max_tokens=8, tokens=Tokens(frozenset(), 9))
    assert code.run([1, 10, 100, 4]) == [11, 13, 200] and "b on side 1" not in log
    _, code = three(max_tokens=9, tokens=Tokens(frozenset(), 9))
    assert code.run([1, 10, 100, 4]) == [11, 13, 200] and "b on side 1" in log


def test_a_branch_on_a_side_stream_does_not_fork(log: list[str]) -> None:  # noqa: F811
    def forking(name: str) -> Code:
        def run(given: list[Any]) -> list[Any]:
            streams.execute_in_parallel(
                lambda: None, [lambda: Log.notes.append(f"{name} {Log.state['current']}")], "cuda"
            )
            return given

        return Code(run)

    branches = [(piece((X,), (A,)), forking("a")), (piece((Y,), (B,)), forking("b"))]
    _, code = joint(branches, Tokens(frozenset(), 1), 8, torch.device("cuda"))
    code.run([1, 2])
    assert [note for note in log if note[0] in "ab"] == ["a side 1", "b side 1"]
    assert log.count("main records") == 2 and log.count("side 1 records") == 2  # its own fork, and that in a


def test_inputs_of_every_branch_are_held_until_the_join() -> None:
    """Without a holder, memory of a side stream could go back to that stream while the main branch still reads it."""
    alive: list[bool] = []
    tensors: list[weakref.ref[Tensor]] = []

    def last(given: list[Any]) -> list[Any]:
        given.clear()
        gc.collect()
        alive.extend(tensor() is not None for tensor in tensors)
        return [0]

    branches = [
        (piece((X,), (A,)), noted("a", lambda given: [0])),
        (piece((Y,), (B,)), Code(last)),
    ]
    _, code = joint(branches, Tokens(frozenset(), 1), 8, torch.device("cpu"))
    given = [torch.ones(3), torch.ones(3)]
    tensors += [weakref.ref(tensor) for tensor in given]
    Log.notes, Log.state = [], {"current": "main"}
    code.run(given)
    assert alive == [True, True]
    gc.collect()
    assert [tensor() for tensor in tensors] == [None, None]
