"""Dataclasses out of JSON, whose values have the types that the fields say: a dump may be damaged, or made up."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

__all__ = ["built"]

T = TypeVar("T")


def built(cls: type[T], record: Any) -> T:
    """An object of the dataclass `cls`, with the dataclasses in it.

    Raises:
        TypeError: a field that is not known, one that is missing, or a value of another type.
    """
    if not isinstance(record, Mapping):
        raise TypeError(f"a {cls.__name__} is {_found(record)}")
    hints = _hints(typing.cast(Any, cls))
    for name in record:
        if name not in hints:
            raise TypeError(f"a {cls.__name__} has the unknown field {name!r}")
    return cls(**{name: _checked(value, hints[name], f"{cls.__name__}.{name}") for name, value in record.items()})


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    known = {field.name for field in dataclasses.fields(cls)}
    return {name: hint for name, hint in typing.get_type_hints(cls).items() if name in known}


def _checked(value: Any, hint: Any, where: str) -> Any:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (list, tuple) and isinstance(value, list):
        return origin(_checked(item, inner[0], where) for item in value)
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        return {name: _checked(item, inner[1], where) for name, item in value.items()}
    if origin in (types.UnionType, typing.Union):
        kinds = [kind for kind in inner if _is_of(value, kind)] or inner
        return _checked(value, kinds[0], where)
    if origin is typing.Literal and value in inner:
        return value
    if dataclasses.is_dataclass(hint):
        return built(typing.cast(type, hint), value)
    if origin is None and _is_of(value, hint):
        return value
    raise TypeError(f"{where} is {_found(value)}")


def _is_of(value: Any, hint: Any) -> bool:
    if isinstance(value, bool):
        return hint in (bool, Any)
    if hint is float:
        return isinstance(value, int | float)
    return hint is Any or isinstance(value, typing.get_origin(hint) or hint)


def _found(value: Any) -> str:
    return f"{value!r}"[:60]
