"""What writer and reader of a dump agree on: the version of the format, and the record of a node."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["FIRST_STAGES", "INDEX", "RUN", "SCHEMA", "NodeRecord", "printable"]

SCHEMA = 2
"""Version of the format. Another number is another format: there are no readers for several."""

INDEX = "index.json"

RUN = r"\d{8}-\d{6}-\d+"
"""What the name of a process's folder begins with: time of its first graph, and its number."""

FIRST_STAGES = ("dynamo", "before")
"""Stages that are no pass: the graph as Dynamo handed it over, and the functional one before the first pass."""

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}
_UNSEEN = (*range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000))
_CONTROLS |= {code: f"\\u{code:04x}" for code in _UNSEEN}

_EMPTY: tuple[Any, ...] = ("", None, (), {})
_SCALAR = ("shape", ())


def printable(text: str) -> str:
    """`text` with every control character but tab and newline, what turns the direction of text, and halves of
    characters, spelled out: a module's name can move no cursor, change no colour, and is text that can be written."""
    return text.translate(_CONTROLS)


@dataclass  # not frozen: there are tens of thousands in a graph, and a frozen one takes three times as long to make
class NodeRecord:
    """One node of a graph.

    `args` and `kwargs` are as Python would write them, `inputs` the names of the nodes in them. `module` is the module
    path, `source` the user's line (`/path/file.py:123`). `shape` (symbolic sizes as text), `dtype` and `device` are
    those of a tensor; `value` describes anything else (`(float32[1, 4], float32[1])`). `bytes` is the memory of the
    result where it is known: 0 for a view. `graph` names the graph it belongs to where that is not the graph itself but
    one inside it, which an operator such as `cond` calls. `behind` is what the user calls an input of the graph.
    """

    name: str
    op: str
    target: str
    args: tuple[str, ...] = ()
    kwargs: Mapping[str, str] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    module: str = ""
    source: str = ""
    shape: tuple[int | str, ...] | None = None
    dtype: str = ""
    device: str = ""
    value: str = ""
    bytes: int | None = None
    graph: str = ""
    behind: str = ""

    @property
    def ours(self) -> bool:
        """Whether it is an operator of this package."""
        return self.target.startswith("dsv4.")

    @property
    def margin(self) -> str:
        """dtype and shape, for the margin."""
        return self.value if self.shape is None else f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    def to_json(self) -> str:
        """One line; empty fields are left out."""
        fields = vars(self).items()
        return json.dumps({name: value for name, value in fields if value not in _EMPTY or (name, value) == _SCALAR})

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> NodeRecord:
        """The record in a line of JSON.

        Raises:
            TypeError: a field that is not known, none of a name, op or target, or a value of another type.
        """
        made = cls(**record)
        made.args, made.inputs = tuple(made.args), tuple(made.inputs)
        made.shape = None if made.shape is None else tuple(made.shape)
        # Not by the types of the fields, as elsewhere: there are too many nodes. What is no text cannot be joined.
        "".join((made.name, made.op, made.target, made.module, made.source, made.dtype, made.device, made.value))
        "".join((*made.args, *made.inputs, *made.kwargs, *made.kwargs.values(), made.graph, made.behind))
        if made.bytes is not None and type(made.bytes) is not int:
            raise TypeError(f"the node {made.name} has {made.bytes!r} bytes")
        return made
