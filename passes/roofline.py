"""What an operator takes at least: the bytes that move or the products, whichever is more, and a launch.

A cost is made of shapes and dtypes. Which operators are products, and of how many operations, says the registry of
`torch.utils.flop_counter`; which of them Inductor writes into a kernel together with their neighbours say its own
lowerings. Of a run of such operators what lies between two of them moves no bytes and is no launch. Views are free.

A size that is a symbol counts as it is now.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map

from dsv4_compile.passes.extraction import shares_memory

__all__ = ["LAUNCH", "Cost", "Reduction", "bytes_of", "is_free", "is_fusable", "product_us", "reduction_of"]

BANDWIDTH = 3.0e6
"""Bytes a microsecond; what a copy reaches on an H100."""
RATES = {1: 1.2e9, 2: 6.0e8, 4: 5.0e7, 8: 4.0e7}
"""Operations a microsecond by the bytes of a number, three fifths of an H100's peak or a little more; without TF32."""
LAUNCH = 2.0
"""Microseconds of a kernel that depends on the one before it, in a CUDA graph, besides its bytes: 1.0 for one that does
nothing and 6.1 for a product of few tokens, on an H100."""


@dataclass(frozen=True)
class Cost:
    """Of some operators, one after the other: the `us` that they take, and of those the ones that the memory and the
    multipliers are busy; `launches` is how many kernels they are."""

    us: float = 0.0
    memory: float = 0.0
    products: float = 0.0
    launches: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.us + other.us,
            self.memory + other.memory,
            self.products + other.products,
            self.launches + other.launches,
        )

    @classmethod
    def of(cls, moved: float, products: float = 0.0) -> Cost:
        """One operator that moves so many bytes and whose products take so many microseconds, without its launch."""
        memory = moved / BANDWIDTH
        return cls(max(memory, products), memory, products)


def bytes_of(node: Node) -> int:
    """Of all results of `node`, what is repeated by being expanded counted once."""
    return sum(_bytes(leaf) for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor))


def _bytes(tensor: torch.Tensor) -> int:
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if isinstance(stride, torch.SymInt) or stride != 0:
            count *= _now(size)
    return count * tensor.element_size()


def _now(size: int | torch.SymInt) -> int:
    """A size, without a guard when it is a symbol."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    hint = size.node.hint
    return int(hint) if hint is not None else 1


def is_free(node: Node) -> bool:
    """Whether the result of `node` is its argument, seen otherwise."""
    if node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and not schema.is_mutable and shares_memory(node, node)


def is_fusable(node: Node) -> bool:
    """Whether Inductor writes it into a kernel with its neighbours."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._overloadpacket in _formulas():
        return False
    lowered, called = _of_inductor()
    return node.target in lowered and node.target not in called


Reduction = tuple[int, int]
"""A kind of reduction: the elements that it reads, and its results."""


def reduction_of(node: Node) -> Reduction | None:
    """What kind of reduction `node` is, None where it is none."""
    tag = getattr(torch.Tag, "reduction", None)  # an older torch does not say which operators are
    if tag is None or tag not in getattr(node.target, "tags", ()):
        return None
    read = max((_elements(n.meta.get("val")) for n in node.all_input_nodes), default=1)
    return read, max(map(_elements, tree_leaves(node.meta.get("val"))))


def _elements(value: Any) -> int:
    return math.prod(_sizes(value)) if isinstance(value, torch.Tensor) else 1


@functools.cache
def _of_inductor() -> tuple[Any, Any]:
    """What it has code for, and those of them for which the code is a call of the operator."""
    from torch._inductor import lowering

    return lowering.lowerings, lowering.fallbacks


@functools.cache
def _formulas() -> dict[Any, Callable[..., Any]]:
    """How many operations a product has, by operator; the module imports Triton, so it is imported when asked for."""
    from torch.utils.flop_counter import flop_registry

    return flop_registry


def product_us(node: Node) -> float:
    """Microseconds of the products of `node`, 0 where it is none that the registry knows."""
    formula = _formulas().get(getattr(node.target, "_overloadpacket", None))
    value = node.meta.get("val")
    if formula is None or not isinstance(value, torch.Tensor):
        return 0.0
    given = [n.meta.get("val") for n in node.all_input_nodes]
    width = min((x.element_size() for x in given if isinstance(x, torch.Tensor)), default=4)
    arguments = tree_map(_shape, (node.args, node.kwargs), is_leaf=lambda x: isinstance(x, Node))
    try:
        count = float(formula(*arguments[0], **arguments[1], out_val=_sizes(value)))
    except Exception:  # a formula, of whomever, that wants what a graph does not have
        return 0.0
    return count / RATES.get(width, RATES[4])


def _shape(argument: Any) -> Any:
    value = argument.meta.get("val") if isinstance(argument, Node) else argument
    return _sizes(value) if isinstance(value, torch.Tensor) else value


def _sizes(value: torch.Tensor) -> torch.Size:
    return torch.Size([_now(size) for size in value.shape])
