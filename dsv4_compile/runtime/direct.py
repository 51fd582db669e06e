"""Pieces that are one call of somebody's operator, called without the code around it.

An operator that cannot be captured (`split_ops`) is a piece of its own between two graphs. Inductor's code for it
unpacks the inputs, checks them, calls the operator and checks its results, behind some wrappers: more host time than
the replay of a graph. In a recorded call the operator is called with the same arguments by one expression:

    made = op(v[7], 3, [v[9], v[4]])

Only where Inductor's code was found to do nothing else (its text is read), so passes of the user, layouts that an
operator asks for, and operators that Inductor has code for keep theirs. Where the layout of a result follows the token
count, it is that of the call that was recorded, which is checked.
"""

from __future__ import annotations

import ast
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

__all__ = ["OperatorCall", "call_text", "operator_call"]

_CHECKS = {"args.clear", "assert_size_stride", "assert_alignment", "torch.cuda._DeviceGuard", "torch.cuda.set_device"}


@dataclass(frozen=True)
class _Given:
    """An input of the piece."""

    position: int


@dataclass(frozen=True)
class OperatorCall:
    """The call that a piece consists of: in `args` and `kwargs` its inputs are `_Given`.

    `results` says for each result of the piece which one of the operator's it is; None for the only one.
    """

    target: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[int | None, ...]


def operator_call(graph: Graph, source: str | None) -> OperatorCall | None:
    """What the piece `graph` calls, or None when it is more than one call.

    Args:
        source: the code that Inductor has written for it; None when the graph is run as it is.
    """
    calls = [node for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    if len(calls) != 1 or not isinstance(calls[0].target, torch._ops.OpOverload):
        return None
    call = calls[0]
    schema = call.target._schema
    if schema.is_mutable or any(result.alias_info is not None for result in schema.returns):
        return None
    if source is not None and not _does_nothing_else(source, call.target):
        return None
    given = {node: _Given(i) for i, node in enumerate(n for n in graph.nodes if n.op == "placeholder")}
    results = [_place(node, call) for node in next(iter(reversed(graph.nodes))).args[0]]
    if any(node not in given for node in call.all_input_nodes) or -1 in results:
        return None
    args, kwargs = (torch.fx.map_arg(part, given.__getitem__) for part in (call.args, call.kwargs))
    return OperatorCall(call.target, args, kwargs, tuple(results))


def _place(result: Any, call: Node) -> int | None:
    """Which result of `call` a result of the piece is; -1 when it is none."""
    value = result.meta.get("val") if isinstance(result, Node) else None
    if not isinstance(value, torch.Tensor):
        return -1
    if result is call:
        return None
    is_part = result.target is operator.getitem and result.args[0] is call and isinstance(result.args[1], int)
    return result.args[1] if is_part else -1


def _does_nothing_else(source: str, target: torch._ops.OpOverload) -> bool:
    """Whether Inductor's code calls `target` once and nothing else but checks."""
    try:
        functions = [one for one in ast.walk(ast.parse(source)) if isinstance(one, ast.FunctionDef)]
    except SyntaxError:
        return False
    bodies = [one for one in functions if one.name == "call"]
    called = [ast.unparse(node.func) for body in bodies for node in ast.walk(body) if isinstance(node, ast.Call)]
    return len(bodies) == 1 and [name for name in called if name not in _CHECKS] == [f"torch.ops.{target}"]


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
