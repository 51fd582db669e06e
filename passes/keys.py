"""Says of pieces whether they are the same program.

Two with one key are: nodes, constants, shapes and layouts agree, whatever layer they are of and whatever their nodes
are called. Symbols of sizes are counted in the order in which they appear.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node

from dsv4_compile.passes.extraction import attribute

__all__ = ["Key", "canonical", "key_of", "renamed"]


@dataclass
class Key:
    """What makes a piece the program it is. `symbols` are those of its sizes, in order of appearance."""

    text: str
    symbols: tuple[sympy.Symbol, ...]
    hash: str = field(init=False)

    def __post_init__(self) -> None:
        self.hash = hashlib.sha256(self.text.encode()).hexdigest()


def key_of(module: GraphModule, static: Sequence[bool]) -> Key:
    """The key of an extracted piece.

    Args:
        static: for each input whether it is a parameter, whose address does not change.
    """
    return _Describer(module).key(static)


class _Describer:
    """Writes a piece as text in which only what matters has a name."""

    def __init__(self, module: GraphModule):
        self.module = module
        self.numbers: dict[Node, int] = {}
        self.symbols: dict[sympy.Symbol, sympy.Symbol] = {}

    def key(self, static: Sequence[bool]) -> Key:
        lines = []
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                fixed = static[len(self.numbers)] if len(self.numbers) < len(static) else False
                lines.append(f"in {self.describe(node.meta['val'])} {fixed}")
            elif node.op == "get_attr":
                lines.append(f"constant {_content(attribute(self.module, node.target))}")
            elif node.op == "call_function":
                arguments = f"{self.describe(node.args)} {self.describe(node.kwargs)}"
                eager = self.describe(node.meta.get("eager_input_vals"))
                lines.append(f"{_name(node.target)} {arguments} {self.describe(node.meta['val'])} {eager}")
            else:
                lines.append(f"out {self.describe(node.args)}")
            self.numbers[node] = len(self.numbers)
        return Key("\n".join(lines), tuple(self.symbols))

    def describe(self, value: Any) -> str:
        """An argument or the value of a node."""
        if isinstance(value, Node):
            return f"%{self.numbers[value]}"
        if isinstance(value, torch.Tensor):
            sizes = [self.size(one) for one in (*value.shape, -1, *value.stride(), value.storage_offset())]
            return f"{value.dtype} {value.device} {value.layout} {' '.join(sizes)}"
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self.describe, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{name}: {self.describe(one)}' for name, one in sorted(value.items()))}}}"
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return self.size(value)
        return f"{type(value).__name__} {value!r}"

    def size(self, size: Any) -> str:
        if not isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
            return str(size)
        return str(renamed(size.node.expr, self._canonical(size.node.expr)))

    def _canonical(self, expression: sympy.Basic) -> dict[sympy.Symbol, sympy.Symbol]:
        for symbol in sorted(expression.free_symbols, key=str):
            if symbol not in self.symbols:
                self.symbols[symbol] = canonical(len(self.symbols))
        return self.symbols


def canonical(number: int) -> sympy.Symbol:
    """The symbol that stands for the one which appears at place `number` in a key."""
    return sympy.Symbol(f"size{number}", integer=True)


def renamed(expression: sympy.Basic, names: dict[sympy.Symbol, sympy.Symbol]) -> sympy.Basic:
    """`expression` in other symbols."""
    return expression.xreplace(names)


_objects = itertools.count()


def _content(value: torch.Tensor) -> str:
    """What a constant is, by its content; one that has none at hand is like no other."""
    if type(value) is not torch.Tensor or value.is_meta or value.layout is not torch.strided:
        return f"object {next(_objects)}"
    with unset_fake_temporarily():
        digest = hashlib.sha256(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return f"{value.dtype} {value.device} {tuple(value.shape)} {value.stride()} {digest.hexdigest()}"


def _name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"
