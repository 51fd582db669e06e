"""New nodes with everything later passes expect of a node: a fake value, the module path, the user's line."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from dsv4_compile.passes.region import aten, prims, shape, value

__all__ = ["call", "cast", "item", "renew", "reshape_rows", "size_of", "transpose"]


def call(graph: Graph, target: Any, args: tuple[Any, ...], like: Node | None = None, **constants: Any) -> Node:
    """A call of `target` at the insertion point; its fake value is computed, its origin is taken from `like`."""
    node = graph.call_function(target, args, constants)
    renew(node)
    source = like if like is not None else next(iter(node.all_input_nodes))
    for key in ("nn_module_stack", "stack_trace", "seq_nr"):
        if key in source.meta:
            node.meta[key] = source.meta[key]
    node.meta["dsv4_helper"] = True
    return node


def renew(node: Node) -> None:
    """Computes the fake value of a call from those of its arguments."""
    args, kwargs = map_arg((node.args, node.kwargs), value)
    first = next(a for a in _flatten(args) if isinstance(a, torch.Tensor))
    mode = first.fake_mode if isinstance(first, FakeTensor) else nullcontext()
    target: Any = node.target
    with mode, torch.no_grad():
        node.meta["val"] = target(*args, **kwargs)


def item(graph: Graph, node: Node, index: int) -> Node:
    """One output of an operator with several."""
    made = graph.call_function(operator.getitem, (node, index))
    made.meta.update({k: v for k, v in node.meta.items() if k != "val"})
    made.meta["val"] = value(node)[index]
    return made


def cast(graph: Graph, node: Node, dtype: torch.dtype) -> Node:
    """`node` in `dtype`; itself when it has it."""
    if value(node).dtype == dtype:
        return node
    return call(graph, prims.convert_element_type.default, (node, dtype))


def transpose(graph: Graph, node: Node) -> Node:
    """The last two axes exchanged."""
    rank = len(shape(node) or ())
    return call(graph, aten.permute.default, (node, [*range(rank - 2), rank - 1, rank - 2]))


def reshape_rows(graph: Graph, node: Node, dims: Sequence[int | torch.SymInt]) -> Node:
    """`node` reshaped to `dims`. A symbolic size must be a size of `node` itself, or the only one (then it is -1).

    Raises:
        ValueError: when a size cannot be written from the sizes of `node`.
    """
    own = [str(d) for d in shape(node) or ()]
    sizes: list[int | Node] = []
    for d in dims:
        if isinstance(d, int):
            sizes.append(d)
        elif str(d) in own:
            axis = own.index(str(d))
            sizes.append(size_of(graph, (shape(node) or ())[axis], aten.sym_size.int, (node, axis)))
        elif -1 not in sizes:
            sizes.append(-1)
        else:
            raise ValueError(f"cannot reshape {own} to {[str(d) for d in dims]} without other sizes of the graph")
    return call(graph, aten.reshape.default, (node, sizes))


def size_of(graph: Graph, size: Any, target: Any, arguments: tuple[Any, ...]) -> Node:
    """A call of `target`, at the insertion point, whose result is `size`."""
    made = graph.call_function(target, arguments)
    made.meta["val"], made.meta["dsv4_helper"] = size, True
    return made


def _flatten(args: Any) -> list[Any]:
    return [x for a in args for x in (_flatten(a) if isinstance(a, list | tuple) else [a])]
