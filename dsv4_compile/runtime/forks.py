"""A step whose pieces run on several streams: the branches of a fork, joined before the next step.

The inputs of all branches are held until the join. A side stream's result of an earlier fork may be among them, and in
a CUDA graph its memory would be that stream's again as soon as nobody holds it, while another branch still reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from dsv4_compile.kernels.streams import execute_in_parallel, serial
from dsv4_compile.passes.capturability import Tokens
from dsv4_compile.passes.extraction import Extract
from dsv4_compile.runtime.program import Code, function_of

__all__ = ["Joint", "joint"]


@dataclass(frozen=True)
class Joint:
    """What the branches of a fork read and make together; as in `Extract`."""

    inputs: tuple[Node, ...]
    symbols: tuple[sympy.Symbol, ...]
    outputs: tuple[Node, ...]
    writes: tuple[int, ...] = ()


def joint(
    branches: Sequence[tuple[Extract, Code]], tokens: Tokens, max_tokens: int, device: torch.device
) -> tuple[Joint, Code]:
    """The branches as one piece: the first on the current stream, the others on side stream 1, 2, ...

    Args:
        branches: the pieces and their code. None writes what it is given.
        tokens: how the token count is made of sizes.
        max_tokens: above this many nothing leaves the current stream.
    """
    counted = sorted(tokens.symbols, key=str)
    parts = [part for part, _ in branches]
    whole = Joint(
        tuple(dict.fromkeys(node for part in parts for node in part.inputs)),
        tuple(dict.fromkeys([*(symbol for part in parts for symbol in part.symbols), *counted])),
        tuple(node for part in parts for node in part.outputs),
    )
    places: dict[Any, int] = {value: i for i, value in enumerate((*whole.inputs, *whole.symbols))}
    run = _Fork(
        tuple(code for _, code in branches),
        tuple(tuple(places[value] for value in (*part.inputs, *part.symbols)) for part in parts),
        tuple(places[symbol] for symbol in counted),
        function_of(sympy.sympify(tokens.count), counted),
        max_tokens,
        device,
    )
    return whole, Code(run)


@dataclass(frozen=True)
class _Fork:
    codes: tuple[Code, ...]
    inputs: tuple[tuple[int, ...], ...]
    """For each branch the places of its inputs among those of all."""
    sizes: tuple[int, ...]
    count: Callable[[Sequence[int]], int]
    max_tokens: int
    device: torch.device

    def __call__(self, given: list[Any]) -> list[Any]:
        """Runs all branches; empties `given` and returns what they make, in turn."""
        values = list(given)
        given.clear()

        def branch(number: int) -> Sequence[Any]:
            return self.codes[number].run([values[i] for i in self.inputs[number]])

        def side(number: int) -> Sequence[Any]:
            with serial():  # a fork in it would put work on the streams of the others
                return branch(number)

        main, sides = execute_in_parallel(
            functools.partial(branch, 0),
            [functools.partial(side, number) for number in range(1, len(self.codes))],
            self.device,
            enabled=self.count([values[i] for i in self.sizes]) <= self.max_tokens,
        )
        return [value for made in (main, *sides) for value in made]
