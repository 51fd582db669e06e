"""Calls of operators as text, so that an operator can be given others to run.

    hf::fp8_linear(x, weight, scale, [128, 128], out_dtype=torch.bfloat16)          tensors = [x, weight, scale]

    "hf::fp8_linear.default"
    {'args':[{'tensor':0},{'tensor':1},{'tensor':2},[128,128]],'named':{'out_dtype':{'dtype':'bfloat16'}}}

Tensors and symbolic sizes are places in lists that the call gets when it is made; all else is in the text. That is JSON
with other quotation marks: Inductor's C++ wrapper puts the text between double ones as it is.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Call", "flattened", "name_of", "read", "write"]

_NAMED = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
"""Kinds of constants that are attributes of `torch`."""

_MARKS = (("%", "%25"), ("\\", "%5C"), ("'", "%27"), ('"', "'"))
"""What stands for what in the text."""

Place = Callable[[Any], "dict[str, int] | None"]
"""`{"tensor": i}` or `{"size": i}` for what has a place, None for a constant."""


@dataclass(frozen=True)
class Call:
    """A call that was read: the operator, and its arguments with places where tensors and sizes are to be put."""

    operator: torch._ops.OpOverload
    args: Sequence[Any]
    named: Mapping[str, Any]

    @functools.cached_property
    def reads(self) -> frozenset[int]:
        """The places of the tensors that it reads."""
        places = _places([*self.args, *self.named.values()])
        return frozenset(place.index for place in places if place.kind == "tensor")

    def given(self, tensors: Sequence[Any], sizes: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Its arguments, by position and by name, with `tensors` and `sizes` put in their places."""
        lists = {"tensor": tensors, "size": sizes}
        return [_put(one, lists) for one in self.args], {name: _put(one, lists) for name, one in self.named.items()}


@dataclass(frozen=True)
class _At:
    kind: str
    index: int


def name_of(operator: torch._ops.OpOverload) -> str:
    """`namespace::operator.overload`, by which `read` finds it."""
    return f"{operator._schema.name}.{operator._overloadname}"


def write(args: Sequence[Any], named: Mapping[str, Any], place: Place) -> str:
    """The arguments of a call as text.

    Raises:
        ValueError: one of them has no place and is no constant that can be written.
    """
    record = {
        "args": [_written(one, place) for one in args],
        "named": {k: _written(one, place) for k, one in named.items()},
    }
    text = json.dumps(record, separators=(",", ":"))
    for mark, stands in _MARKS:
        text = text.replace(mark, stands)
    return text


def _written(argument: Any, place: Place) -> Any:
    found = place(argument)
    if found is not None:
        return found
    if argument is None or isinstance(argument, bool | str) or type(argument) in (int, float):
        return argument
    if isinstance(argument, list | tuple):
        return [_written(one, place) for one in argument]
    for kind, of in _NAMED.items():
        if isinstance(argument, of):
            return {kind: str(argument).removeprefix("torch.")}
    if isinstance(argument, torch.device):
        return {"device": str(argument)}
    raise ValueError(f"an argument of type {type(argument).__name__} cannot be written down")


@functools.lru_cache(maxsize=4096)
def read(name: str, text: str) -> Call:
    """The call of the operator `name` with the arguments `text` of `write`.

    Raises:
        RuntimeError: there is no operator of this name (yet), or the text is none of `write`.
    """
    qualified, _, overload = name.partition(".")
    namespace, _, operator_name = qualified.partition("::")
    try:
        operator = getattr(getattr(getattr(torch.ops, namespace), operator_name), overload)
    except AttributeError:
        raise RuntimeError(
            f"The operator {name} is not registered in this process; import what registers it before the model runs."
        ) from None
    try:
        plain = text
        for mark, stands in reversed(_MARKS):
            plain = plain.replace(stands, mark)
        record = json.loads(plain)
        return Call(
            operator, [_parsed(one) for one in record["args"]], {k: _parsed(v) for k, v in record["named"].items()}
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RuntimeError(f"The arguments of {name} cannot be read ({error!r}): {text}") from error


def _parsed(argument: Any) -> Any:
    if isinstance(argument, list):
        return [_parsed(one) for one in argument]
    if not isinstance(argument, dict):
        return argument
    ((kind, what),) = argument.items()
    if kind in ("tensor", "size"):
        return _At(kind, what)
    return torch.device(what) if kind == "device" else getattr(torch, what)


def _put(argument: Any, lists: Mapping[str, Sequence[Any]]) -> Any:
    if isinstance(argument, _At):
        return lists[argument.kind][argument.index]
    return [_put(one, lists) for one in argument] if isinstance(argument, list) else argument


def _places(argument: Any) -> list[_At]:
    if isinstance(argument, list):
        return [place for one in argument for place in _places(one)]
    return [argument] if isinstance(argument, _At) else []


def flattened(made: Any) -> list[Tensor]:
    """The tensors that an operator has returned: one, or a tuple, or a list.

    Raises:
        RuntimeError: it returned something else besides.
    """
    if isinstance(made, Tensor):
        return [made]
    if isinstance(made, list | tuple):
        return [tensor for one in made for tensor in flattened(one)]
    raise RuntimeError(f"Only tensors can be returned, and an operator returned a {type(made).__name__}.")
