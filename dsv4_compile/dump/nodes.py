"""FX nodes as records: text and numbers only, nothing that has to be executed or unpickled."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from dsv4_compile.dump.inputs import behind
from dsv4_compile.dump.schema import NodeRecord
from dsv4_compile.passes.sites import module_path, source_location

__all__ = ["nested", "record", "records"]

_LONGEST = 400
"""Characters of an argument that is neither a number nor a node, which may print as long as it likes."""


def records(graph: Graph, names: Sequence[str] = ()) -> list[NodeRecord]:
    """A record of each node, in order, then of those of the graphs within.

    Args:
        names: what the user calls the inputs of the graph that Dynamo handed over.
    """
    found = [record(node, names=names) for node in graph.nodes]
    return found + [record(node, path) for path, inner in nested(graph) for node in inner.nodes]


def nested(graph: Graph, path: str = "") -> Iterator[tuple[str, Graph]]:
    """The graphs that operators of `graph` call, such as the branches of `cond`, and those inside them, by name."""
    names = dict.fromkeys(str(node.target) for node in graph.nodes if node.op == "get_attr")
    for name in names:
        module: Any = graph.owning_module
        for part in name.split("."):
            module = getattr(module, part, None)
        if isinstance(module, GraphModule) and module.graph is not graph:
            yield f"{path}{name}", module.graph
            yield from nested(module.graph, f"{path}{name}.")


def record(node: Node, graph: str = "", names: Sequence[str] = ()) -> NodeRecord:
    """The record of one node; `graph` and `names` as in `NodeRecord` and `records`."""
    val = node.meta.get("val", node.meta.get("example_value"))
    is_tensor = isinstance(val, torch.Tensor)
    return NodeRecord(
        name=node.name,
        op=node.op,
        target=_target(node.target),
        args=tuple(_text(arg) for arg in node.args),
        kwargs={name: _text(arg) for name, arg in node.kwargs.items()},
        inputs=tuple(n.name for n in node.all_input_nodes),
        module=module_path(node),
        source=source_location(node),
        shape=_shape(val) if is_tensor else None,
        dtype=_dtype(val.dtype) if is_tensor else "",
        device=str(val.device) if is_tensor else "",
        value="" if is_tensor or val is None else _value(val),
        bytes=_memory(node, val),
        graph=graph,
        behind=behind(node, names),
    )


def _target(target: Any) -> str:
    return target if isinstance(target, str) else _name(target)


@functools.lru_cache(maxsize=4096)
def _name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket | torch._ops.HigherOrderOperator):
        return str(target)
    module = str(getattr(target, "__module__", None) or "")
    name = str(getattr(target, "__qualname__", None) or getattr(target, "__name__", None) or type(target).__name__)
    return f"{module.removeprefix('_')}.{name}" if module else name


def _text(arg: Any) -> str:
    """`arg` as Python would write it."""
    if isinstance(arg, Node):
        return arg.name
    if isinstance(arg, list | tuple):
        inside = ", ".join(_text(item) for item in arg)
        return f"[{inside}]" if isinstance(arg, list) else f"({inside}{',' if len(arg) == 1 else ''})"
    if isinstance(arg, Mapping):
        return "{" + ", ".join(f"{key!r}: {_text(item)}" for key, item in arg.items()) + "}"
    if isinstance(arg, slice):
        return f"slice({_text(arg.start)}, {_text(arg.stop)}, {_text(arg.step)})"
    if isinstance(arg, bool | int | float | None):
        return repr(arg)
    if isinstance(arg, torch.device):
        return f"torch.device({str(arg)!r})"
    if isinstance(arg, torch.SymInt | torch.SymFloat | torch.SymBool | torch.dtype | torch.layout):
        return str(arg)
    text = repr(arg) if isinstance(arg, str) else _name(arg) if callable(arg) else repr(arg)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _shape(val: torch.Tensor) -> tuple[int | str, ...]:
    return tuple(size if isinstance(size, int) else str(size) for size in val.shape)


@functools.cache
def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _value(val: Any) -> str:
    """A result that is no tensor, in few words."""
    if isinstance(val, torch.Tensor):
        return f"{_dtype(val.dtype)}[{', '.join(map(str, _shape(val)))}]"
    if isinstance(val, list | tuple):
        return f"({', '.join(_value(item) for item in val)})"
    if isinstance(val, bool | int | float | str | torch.SymInt | torch.SymFloat | torch.SymBool | None):
        return f"{type(val).__name__} {val}"
    return type(val).__name__


def _memory(node: Node, val: Any) -> int | None:
    """Bytes of the result: 0 for what makes none, None where a size is symbolic or unknown."""
    if node.op in ("output", "get_attr") or node.target is operator.getitem or getattr(node.target, "is_view", False):
        return 0
    tensors = [val] if isinstance(val, torch.Tensor) else val if isinstance(val, list | tuple) else []
    total = 0
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            continue
        if not all(isinstance(size, int) for size in tensor.shape):
            return None
        total += math.prod(tensor.shape) * tensor.dtype.itemsize
    return total
