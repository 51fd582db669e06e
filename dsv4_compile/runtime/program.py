"""A compiled graph as a list of steps over a table of values.

Each value has a place in the table: first the inputs of the graph, then sizes, then what the steps make. A step takes
its inputs from their places and puts its results into theirs; what nobody reads any more leaves the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import sympy
import torch
from torch.fx import Node

from dsv4_compile.passes.extraction import is_size, symbol_of, symbols_of
from dsv4_compile.runtime.direct import OperatorCall

__all__ = [
    "Code",
    "Part",
    "Program",
    "Sizes",
    "Step",
    "begin",
    "evaluated",
    "finish",
    "function_of",
    "program",
    "run_step",
    "run_steps",
]


class Code:
    """A compiled piece: called with a list of inputs, which it empties, it returns the outputs."""

    def __init__(
        self,
        run: Callable[[list[Any]], Sequence[Any]],
        facts: tuple[sympy.Basic, ...] = (),
        call: OperatorCall | None = None,
    ):
        self.run = run
        self.facts = facts
        """What has to be true of the sizes, in the symbols of the key."""
        self.call = call
        """What it does, where that is one call of an operator."""


class Part(Protocol):
    """What a step reads and makes, as `passes.extraction.Extract` has it."""

    @property
    def inputs(self) -> tuple[Node, ...]: ...
    @property
    def symbols(self) -> tuple[sympy.Symbol, ...]: ...
    @property
    def outputs(self) -> tuple[Node, ...]: ...
    @property
    def writes(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Step:
    """A call of a piece: the places it reads and fills, and those that nobody reads after it.

    `apart` says why it cannot be captured (empty when it can), `writes` which of its inputs it writes in place,
    `is_fixed` whether the layouts of its results follow the token count and nothing else.
    """

    name: str
    code: Code
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    done: tuple[int, ...]
    apart: str = ""
    writes: tuple[int, ...] = ()
    is_fixed: bool = False


@dataclass(frozen=True)
class Program:
    """The steps of a graph, and where its results are: a place, or None and a constant."""

    steps: tuple[Step, ...]
    places: int
    measured: tuple[tuple[int, int, int | None], ...]
    """Sizes read off the inputs: their place, the input, the axis (None when the input is the size)."""
    computed: tuple[tuple[int, Callable[[Sequence[int]], int], tuple[int, ...]], ...]
    """Sizes made of others: their place, a function, the places of its arguments."""
    results: tuple[tuple[int | None, Any], ...]
    static: tuple[int, ...] = ()
    """Inputs whose address does not change, as a rule: parameters."""
    tokens: tuple[int, ...] = field(default=())
    """Places of the sizes that the token count is made of."""
    count: Callable[[Sequence[int]], int] = field(default=lambda _: 0)
    """The token count, given the values at `tokens`."""


class Sizes:
    """Where the sizes come from that symbols stand for: an input, or an axis of one."""

    def __init__(self, placeholders: Sequence[Node]):
        self.found: dict[sympy.Symbol, tuple[int, int | None, torch.SymInt]] = {}
        for position, node in enumerate(placeholders):
            value = node.meta["val"]
            if isinstance(value, torch.SymInt) and (symbol := symbol_of(value)) is not None:
                self.found[symbol] = (position, None, value)
        for position, node in enumerate(placeholders):
            value = node.meta["val"]
            shape: tuple[Any, ...] = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
            for axis, size in enumerate(shape):
                if (symbol := symbol_of(size)) is not None and symbol not in self.found:
                    self.found[symbol] = (position, axis, size)

    def of(self, symbol: sympy.Symbol) -> torch.SymInt:
        """The size as the graph knows it.

        Raises:
            KeyError: no input has it.
        """
        return self.found[symbol][2]

    def source(self, symbol: sympy.Symbol) -> tuple[int, int | None]:
        """Position of the input, and the axis if it is a tensor."""
        return self.found[symbol][:2]


def function_of(expression: sympy.Expr, symbols: Sequence[sympy.Symbol]) -> Callable[[Sequence[int]], int]:
    """`expression` as a function of the values of `symbols`."""
    from torch.utils._sympy.printers import PythonPrinter

    names = {symbol: sympy.Symbol(f"size{i}", integer=True, nonnegative=True) for i, symbol in enumerate(symbols)}
    text = PythonPrinter().doprint(expression.xreplace(names))
    arguments = ", ".join(name.name for name in names.values())
    made: Callable[..., Any] = eval(f"lambda {arguments}: {text}", {"math": math, "torch": torch})
    return lambda values: int(made(*values))


def evaluated(text: str, values: Mapping[str, int]) -> int:
    """What the text of a size is worth, given the values of its symbols.

    Raises:
        NameError: it has symbols that are not in `values`.
    """
    return int(eval(text, {"math": math, "torch": torch, **values}))


def program(
    placeholders: Sequence[Node],
    made: Sequence[tuple[str, Part, Code, str]],
    output: Node,
    static: Sequence[int] = (),
    tokens: tuple[Sequence[sympy.Symbol], Any] = ((), None),
) -> Program:
    """Puts the pieces of a graph in order.

    Args:
        made: for each piece its name, the piece, its code, and why it cannot be captured.
        static: positions of inputs that keep their address.
        tokens: the symbols of the token count, and the count.
    """
    sizes = Sizes(placeholders)
    places: dict[Any, int] = {node: i for i, node in enumerate(placeholders)}
    results = output.args[0]
    given = [v for _, part, _, _ in made for v in (*part.inputs, *part.symbols, *part.outputs)]
    derived = [v for v in (*given, *_nodes(results)) if isinstance(v, Node) and is_size(v)]
    symbols = {s: None for v in given if isinstance(v, sympy.Symbol) for s in (v,)}
    symbols.update(dict.fromkeys(s for node in derived for s in _expression(node).free_symbols))
    symbols.update(dict.fromkeys(tokens[0]))
    for value in (*symbols, *derived, *given):
        places.setdefault(value, len(places))
    counted = tuple(tokens[0])
    return Program(
        steps=_steps(made, places, {places[n] for n in _nodes(results)}, set(counted)),
        places=len(places),
        measured=tuple((places[symbol], *sizes.source(symbol)) for symbol in symbols),
        computed=tuple(_computed(node, places) for node in dict.fromkeys(derived)),
        results=tuple((places[r], None) if isinstance(r, Node) else (None, r) for r in results),
        static=tuple(static),
        tokens=tuple(places[symbol] for symbol in counted),
        count=function_of(sympy.sympify(tokens[1] or 0), counted),
    )


def _nodes(results: Sequence[Any]) -> list[Node]:
    return [result for result in results if isinstance(result, Node)]


def _expression(size: Node) -> sympy.Expr:
    value = size.meta["val"]
    return value.node.expr if isinstance(value, torch.SymInt) else sympy.Integer(value)


def _computed(size: Node, places: Mapping[Any, int]) -> tuple[int, Callable[[Sequence[int]], int], tuple[int, ...]]:
    expression = _expression(size)
    symbols = sorted(expression.free_symbols, key=str)
    return places[size], function_of(expression, symbols), tuple(places[symbol] for symbol in symbols)


def _steps(
    made: Sequence[tuple[str, Part, Code, str]], places: Mapping[Any, int], kept: set[int], counted: set[sympy.Symbol]
) -> tuple[Step, ...]:
    last: dict[int, int] = {}
    for number, (_, part, _, _) in enumerate(made):
        for value in (*part.inputs, *part.symbols, *part.outputs):
            last[places[value]] = number
    steps = []
    for number, (name, part, code, apart) in enumerate(made):
        inputs = tuple(places[value] for value in (*part.inputs, *part.symbols))
        done = tuple(place for place, at in last.items() if at == number and place not in kept)
        outputs = tuple(places[node] for node in part.outputs)
        writes = tuple(places[part.inputs[i]] for i in part.writes)
        is_fixed = all(counted.issuperset(symbols_of(node.meta["val"])) for node in part.outputs)
        steps.append(Step(name, code, inputs, outputs, done, apart, writes, is_fixed))
    return tuple(steps)


# -------------------------------------------------------------------------------------------------------------- running


def begin(program: Program, inputs: list[Any]) -> list[Any]:
    """The table with the inputs and the sizes; empties `inputs`, so that the table alone keeps them alive."""
    values = [*inputs, *[None] * (program.places - len(inputs))]
    inputs.clear()
    for place, position, axis in program.measured:
        values[place] = values[position] if axis is None else values[position].shape[axis]
    for place, function, arguments in program.computed:
        values[place] = function([values[i] for i in arguments])
    return values


def run_step(step: Step, values: list[Any]) -> None:
    """Calls a piece."""
    arguments = [values[i] for i in step.inputs]
    for i in step.done:
        values[i] = None
    for place, value in zip(step.outputs, step.code.run(arguments), strict=True):
        values[place] = value


def run_steps(program: Program, values: list[Any]) -> list[Any]:
    """Calls all pieces in turn; returns the results of the graph."""
    for step in program.steps:
        run_step(step, values)
    return finish(program, values)


def finish(program: Program, values: Sequence[Any]) -> list[Any]:
    """The results of the graph."""
    return [constant if place is None else values[place] for place, constant in program.results]
