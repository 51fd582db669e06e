"""`verify=N`: the first calls are compared with the uncompiled graph; a compiled graph that differs is dropped."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor.utils import clone_preserve_strides
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from dsv4_compile.report import GraphReport

__all__ = ["TOLERANCE", "copy_of", "difference", "verified"]

logger = logging.getLogger("dsv4_compile")

_WRITING = [
    "setitem",
    "iadd",
    "isub",
    "imul",
    "imatmul",
    "itruediv",
    "ifloordiv",
    "imod",
    "ipow",
    "iand",
    "ior",
    "ixor",
    "ilshift",
    "irshift",
]
"""Functions of the module `operator` that write into their first argument."""

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest norm of a difference over the norm of the uncompiled result, by dtype."""


def copy_of(gm: GraphModule) -> GraphModule:
    """A module with a graph of its own and the same tensors."""
    return GraphModule(gm, copy.deepcopy(gm.graph))


def verified(compiled: Callable[..., Any], original: GraphModule, calls: int, graph: GraphReport) -> Callable[..., Any]:
    """`compiled`, compared with `original` on its first `calls` calls.

    A compared call runs the compiled graph on copies of the inputs (but for parameters that nothing writes) and returns
    what the uncompiled graph returned, so a wrong result or a wrong write into an input is never seen outside. After
    a difference every later call runs uncompiled.
    """
    left, compared = calls, 0
    failed = False
    told = ""
    written = _written(original)

    def call(*args: Any) -> Any:
        nonlocal left, compared, failed, told
        if failed:
            return original(*args)
        if left == 0:
            return compiled(*args)
        left -= 1
        copies = [_copy(x) if i in written or not isinstance(x, torch.nn.Parameter) else x for i, x in enumerate(args)]
        with torch.random.fork_rng(devices=_devices(args)):
            actual = compiled(*copies)
        drawn = _random_states(args)
        expected = original(*args)
        if any(not torch.equal(a, b) for a, b in zip(drawn, _random_states(args), strict=True)):
            graph.notes.append("verify: a call was not compared, because the graph draws random numbers")
            return expected
        compared += 1
        problem = difference(actual, expected) or difference(copies, args)
        graph.notes[:] = [note for note in graph.notes if note != told]
        if problem is not None:
            failed = True
            graph.notes.append(f"verify: the compiled graph was dropped: {problem}")
            logger.warning("Graph %s runs uncompiled from now on: %s.", graph.id, problem)
        else:
            so_far = " so far" if left else ""
            told = f"verify: {compared} of the first {calls} calls were compared{so_far}, and none differed"
            graph.notes.append(told)
        return expected

    return call


def _devices(args: Sequence[Any]) -> list[int]:
    return sorted({x.device.index for x in args if isinstance(x, torch.Tensor) and x.is_cuda})


def _random_states(args: Sequence[Any]) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in _devices(args))]


def _copy(x: Any) -> Any:
    """A copy with the strides of `x`, which the compiled code relies on."""
    return clone_preserve_strides(x) if isinstance(x, torch.Tensor) else x


def _written(gm: GraphModule) -> set[int]:
    """Positions of the inputs that the graph may write in place, looking through views; rather one too many."""
    inputs = {node: i for i, node in enumerate(n for n in gm.graph.nodes if n.op == "placeholder")}
    found: set[int] = set()
    for node in gm.graph.nodes:
        for target in node.all_input_nodes if _writes(node) else ():
            while target not in inputs and target.all_input_nodes:
                target = target.all_input_nodes[0]
            if target in inputs:
                found.add(inputs[target])
    return found


def _writes(node: torch.fx.Node) -> bool:
    """Whether `node` may write into what it is given, as far as its name, its arguments and its schema tell."""
    if node.op not in ("call_function", "call_method"):
        return node.op == "call_module"
    if "out" in node.kwargs or node.kwargs.get("inplace"):
        return True
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    overloads = [node.target]
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        overloads = [getattr(node.target, overload) for overload in node.target.overloads()]
    schemas = [overload._schema for overload in overloads if isinstance(overload, torch._ops.OpOverload)]
    if schemas:
        return any(schema.is_mutable for schema in schemas)
    return (name.endswith("_") and not name.endswith("__")) or name in _WRITING


def difference(actual: Any, expected: Any) -> str | None:
    """Where tensors differ by more than `TOLERANCE`, in one line, or None."""
    pairs: Sequence[tuple[Any, Any]] = list(zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True))
    for i, (a, b) in enumerate(pairs):
        if not isinstance(b, torch.Tensor) or a is b:
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"tensor {i} is {a.dtype}{list(a.shape)} and should be {b.dtype}{list(b.shape)}"
        if not (b.dtype.is_floating_point or b.dtype.is_complex):
            if not torch.equal(a, b):
                return f"tensor {i} differs"
            continue
        if b.is_complex():
            a, b = torch.view_as_real(a), torch.view_as_real(b)
        wide_a, wide_b = a.double(), b.double()
        finite = wide_b.isfinite()
        if not torch.equal(wide_a.where(~finite, 0).nan_to_num(7), wide_b.where(~finite, 0).nan_to_num(7)):
            return f"tensor {i} differs in where it is finite"
        error = torch.linalg.vector_norm((wide_a - wide_b)[finite]) / (torch.linalg.vector_norm(wide_b[finite]) + 1e-30)
        if not error <= TOLERANCE.get(b.dtype, 1e-4):  # NaN is no small error
            return f"tensor {i} differs by {float(error):.2g} of its norm"
    return None
