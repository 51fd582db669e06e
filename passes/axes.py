"""Token axes: run a static or symbolic graph at a few tokens.

A region of a model's graph carries its batch and sequence lengths in every `view`. To run it at a few rows each
token axis is given a small size, and every size argument is recomputed from the axes of the operand:

    real   [8, 512, 4, 4096] --view--> [4096, 16384]
    small  [2,   3, 4, 4096] --view--> [   6, 16384]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch

__all__ = ["TokenAxes", "Unsupported"]

_SYMBOL_SIZES = (3, 5, 7, 11, 13, 17, 19, 23)
_STATIC_SIZES = (2, 3, 4, 5)


class Unsupported(Exception):
    """The region cannot be evaluated; the message is a clause for the report."""


class TokenAxes:
    """Maps real sizes to small ones.

    Args:
        lead: the token axes of the residual (batch, sequence, ...), ints or SymInts.
    """

    def __init__(self, lead: Sequence[int | torch.SymInt]):
        self._symbols: dict[sympy.Symbol, int] = {}
        self.rank = len(lead)
        real = self.real(lead)
        symbolic = [not isinstance(d, int) for d in lead]
        fresh = iter(_STATIC_SIZES)
        self._small: dict[int, int] = {}
        for size, is_symbolic in zip(real, symbolic, strict=True):
            if not is_symbolic and size > 1 and size not in self._small:
                self._small[size] = next((s for s in fresh if s != size), size)
        self.lead = tuple(s if dyn else self._small.get(s, s) for s, dyn in zip(real, symbolic, strict=True))
        self.rows = math.prod(self.lead)
        self._small.setdefault(math.prod(real), self.rows)

    def integer(self, value: Any) -> int:
        """`value` (int or SymInt) with every symbol replaced by its small size."""
        if isinstance(value, int):
            return value
        expr = value.node.expr
        for symbol in sorted(expr.free_symbols, key=str):
            if symbol not in self._symbols:
                self._symbols[symbol] = _SYMBOL_SIZES[len(self._symbols) % len(_SYMBOL_SIZES)]
        return int(expr.xreplace({s: sympy.Integer(self._symbols[s]) for s in expr.free_symbols}))

    def real(self, shape: Sequence[int | torch.SymInt]) -> tuple[int, ...]:
        """Shape with symbols replaced; static sizes stay as they are."""
        return tuple(self.integer(d) for d in shape)

    def seed_shape(self, shape: Sequence[int | torch.SymInt], features: int) -> tuple[int, ...]:
        """Small shape of an activation whose last `features` axes are not token axes."""
        real = self.real(shape)
        cut = len(real) - features
        return tuple(self._small.get(d, d) for d in real[:cut]) + real[cut:]

    def expanded(self, small: Sequence[int], real: Sequence[int], target: Sequence[int]) -> tuple[int, ...]:
        """Small shape after `expand` of a tensor from `real` to `target` (real sizes)."""
        offset = len(target) - len(real)
        out = []
        for i, size in enumerate(target):
            j = i - offset
            if j >= 0 and real[j] == size:
                out.append(small[j])
            else:
                out.append(self._small.get(size, size) if i < self.rank else size)
        return tuple(out)

    def reshaped(self, small: Sequence[int], real: Sequence[int], target: Sequence[int]) -> tuple[int, ...]:
        """Small shape after a reshape from `real` to `target`; raises `Unsupported` when tokens and features mix."""
        out: list[int] = []
        for source, sink in _groups(real, target):
            if all(small[i] == real[i] for i in source):
                out.extend(target[i] for i in sink)
                continue
            product = math.prod(small[i] for i in source)
            out.extend(self._split([target[i] for i in sink], product))
        return tuple(out)

    def _split(self, sizes: list[int], product: int) -> list[int]:
        if len(sizes) == 1:
            return [product]
        choices = [dict.fromkeys((self._small.get(s, s), s)) for s in sizes]
        for choice in itertools.product(*choices):
            if math.prod(choice) == product:
                return list(choice)
        raise Unsupported("a reshape mixes the token axes with others")


def _groups(real: Sequence[int], target: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Pairs of axis runs of `real` and `target` with equal products, from the left."""
    if math.prod(real) == 0:
        raise Unsupported("an empty tensor")
    groups = []
    i = j = 0
    while i < len(real) or j < len(target):
        source, sink, a, b = [], [], 1, 1
        if i < len(real):
            source, a, i = [i], real[i], i + 1
        if j < len(target):
            sink, b, j = [j], target[j], j + 1
        while a != b:
            if a < b:
                if i == len(real):
                    raise Unsupported("a reshape that changes the number of elements")
                source.append(i)
                a, i = a * real[i], i + 1
            else:
                if j == len(target):
                    raise Unsupported("a reshape that changes the number of elements")
                sink.append(j)
                b, j = b * target[j], j + 1
        groups.append((source, sink))
    return groups
