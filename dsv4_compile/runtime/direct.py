"""Pieces that are one call of somebody's operator, called without the code around it.

An operator that cannot be captured (`split_ops`) is a piece of its own between two graphs. Inductor's code for it
unpacks the inputs, checks them, calls the operator and checks its results, behind some wrappers: more host time than
the replay of a graph. In a recorded call the operator is called with the same arguments by one expression:

    made = op(v[7], 3, [v[9], v[4]])

Only where Inductor's code does nothing else: its text is read, and the call is the one that is found there, so passes
of the user, lowerings, and layouts that an operator asks for are kept. Where the code checks how a result lies, a
direct call checks that it lies as in the call that was recorded.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import keyword
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

__all__ = ["OperatorCall", "call_text", "operator_call"]


@dataclass(frozen=True)
class _Given:
    """An input of the piece."""

    position: int


@dataclass(frozen=True)
class OperatorCall:
    """The call that a piece consists of: in `args` and `kwargs` its inputs are `_Given`.

    `results` says for each result of the piece which one of the operator's it is; None for the only one. All tensors
    are on `device`. `checked`: the code looks how each result lies.
    """

    target: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[int | None, ...]
    device: torch.device
    checked: bool = False


def operator_call(graph: Graph, source: str | None) -> OperatorCall | None:
    """What the piece `graph` calls, or None when it is more than one call.

    Args:
        source: the code that Inductor has written for it; None when the graph is run as it is.
    """
    calls = [node for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    if len(calls) != 1 or not isinstance(calls[0].target, torch._ops.OpOverload):
        return None
    (call,) = calls
    schema = call.target._schema
    if schema.is_mutable or any(result.alias_info is not None for result in schema.returns):
        return None
    given = {node: _Given(i) for i, node in enumerate(n for n in graph.nodes if n.op == "placeholder")}
    results = [_place(node, call) for node in next(iter(reversed(graph.nodes))).args[0]]
    if any(node not in given for node in call.all_input_nodes) or -1 in results:
        return None
    values = [leaf for node in graph.nodes for leaf in tree_leaves(node.meta.get("val"))]
    devices = {value.device for value in values if isinstance(value, torch.Tensor)}
    if len(devices) != 1:
        return None
    args, kwargs = (torch.fx.map_arg(part, given.__getitem__) for part in (call.args, call.kwargs))
    if not all(name.isidentifier() and not keyword.iskeyword(name) for name in kwargs):
        return None
    found = OperatorCall(call.target, args, kwargs, tuple(results), devices.pop())
    return found if source is None else _as_written(found, source)


def _place(result: Any, call: Node) -> int | None:
    """Which result of `call` a result of the piece is; -1 when it is none."""
    value = result.meta.get("val") if isinstance(result, Node) else None
    if not isinstance(value, torch.Tensor):
        return -1
    if result is call:
        return None
    is_part = result.target is operator.getitem and result.args[0] is call and isinstance(result.args[1], int)
    return result.args[1] if is_part else -1


# -------------------------------------------------------------------------------------------------- what Inductor wrote


def _as_written(expected: OperatorCall, source: str) -> OperatorCall | None:
    """The call that Inductor's code makes, None where it does anything else."""
    try:
        functions = [one for one in ast.walk(ast.parse(source)) if isinstance(one, ast.FunctionDef)]
        (body,) = [one.body for one in functions if one.name == "call"]
        reader = _Reader(expected)
        reader.read(body)
        made = reader.made
        if made is None or made.results != expected.results:
            return None
        return made
    except (SyntaxError, _Unknown, ValueError, NameError, TypeError, KeyError):
        return None


class _Unknown(Exception):
    """The code does something that a direct call does not."""


@dataclass(frozen=True)
class _Result:
    """What the operator returns, or one element of it."""

    part: int | None = None


class _Reader:
    """Follows the names in `call(args)`: inputs, the operator's results, and copies of those names."""

    def __init__(self, expected: OperatorCall) -> None:
        self.expected = expected
        self.names: dict[str, Any] = {}
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.checked: set[_Result] = set()
        self.made: OperatorCall | None = None

    def read(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            if self.made is not None:
                raise _Unknown
            match statement:
                case ast.Assign(targets=[ast.Tuple(elts=elements)], value=ast.Name(id="args")):
                    self.names.update((_name(one), _Given(i)) for i, one in enumerate(elements))
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.names[name] = self._value(value)
                case ast.Expr(value=ast.Call(func=function, args=arguments)):
                    self._check(ast.unparse(function), arguments)
                case ast.Delete():
                    pass
                case ast.With(items=[ast.withitem(context_expr=ast.Call(func=function, args=arguments))], body=inner):
                    self._check(ast.unparse(function), arguments)
                    self.read(inner)
                case ast.Return(value=ast.Tuple(elts=elements)):
                    self._return([self.names[_name(one)] for one in elements])
                case _:
                    raise _Unknown

    def _value(self, value: ast.expr) -> Any:
        match value:
            case ast.Name(id=name):
                return self.names[name]
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=int(part))):
                if self.names[name] != _Result():
                    raise _Unknown
                return _Result(part)
            case ast.Call(func=function, args=args, keywords=keywords):
                if ast.unparse(function) != f"torch.ops.{self.expected.target}" or self.arguments is not None:
                    raise _Unknown
                self.arguments = (
                    tuple(map(self._argument, args)),
                    {one.arg: self._argument(one.value) for one in keywords if one.arg},
                )
                return _Result()
        raise _Unknown

    def _argument(self, value: ast.expr) -> Any:
        known = {name: one for name, one in self.names.items() if isinstance(one, _Given)}
        constants = {"torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan, "float": float}
        calls = {ast.unparse(one.func) for one in ast.walk(value) if isinstance(one, ast.Call)}
        if not calls <= {"device", "torch.device", "float"}:
            raise _Unknown
        return eval(ast.unparse(value), {"__builtins__": {}, **constants, **known})

    def _check(self, function: str, arguments: Sequence[ast.expr]) -> None:
        """A call whose result nobody needs."""
        if function in ("torch.cuda._DeviceGuard", "torch.cuda.set_device"):
            if [ast.literal_eval(one) for one in arguments] != [self.expected.device.index]:
                raise _Unknown
        elif function == "assert_size_stride":
            checked = self.names[_name(arguments[0])]
            if isinstance(checked, _Result):
                self.checked.add(checked)
        elif function not in ("args.clear", "assert_alignment"):
            raise _Unknown

    def _return(self, values: Sequence[Any]) -> None:
        if self.arguments is None or not all(isinstance(value, _Result) for value in values):
            raise _Unknown
        args, kwargs = self.arguments
        results = tuple(value.part for value in values)
        checked = self.checked.issuperset(values)
        self.made = dataclasses.replace(self.expected, args=args, kwargs=kwargs, results=results, checked=checked)


def _name(value: ast.expr) -> str:
    if not isinstance(value, ast.Name):
        raise _Unknown
    return value.id


# -------------------------------------------------------------------------------------------------------------- calling


def call_text(call: OperatorCall, places: Sequence[int], name: Callable[[str, Any], str]) -> str:
    """The call as an expression over the table `values`.

    Args:
        places: those of the piece's inputs in the table.
        name: is given a name and what it is to stand for, and returns the name to write.
    """
    number = itertools.count()

    def text(value: Any) -> str:
        if isinstance(value, _Given):
            return f"values[{places[value.position]}]"
        if isinstance(value, list | tuple):
            inside = ", ".join(map(text, value))
            return f"[{inside}]" if isinstance(value, list) else f"({inside},)" if value else "()"
        return name(f"constant_{next(number)}", value)

    arguments = [text(value) for value in call.args] + [f"{key}={text(value)}" for key, value in call.kwargs.items()]
    return f"{name('operator', call.target)}({', '.join(arguments)})"
