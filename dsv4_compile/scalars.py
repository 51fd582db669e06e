"""Python floats of the model under `dynamic=True`.

There Dynamo makes every float it meets a graph input, the epsilons of the model among them, and a formula with unknown
constants cannot be recognised. The floats that come from a module's attributes are made constants again, with a guard
on their value, and so are those of global variables that are small enough to be an epsilon: the same restart of the
analysis that Dynamo uses itself for floats it cannot pass on. Others stay inputs, because a guard on a number that
changes means a compilation for each value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._guards import GuardSource
from torch.fx import GraphModule

from dsv4_compile.passes.mhc_pre import is_mixing_shape

__all__ = ["fix_model_floats"]

_EPSILON = 1e-2  # at most


def fix_model_floats(gm: GraphModule) -> None:
    """Restarts Dynamo's analysis with the model's own floats as constants; does nothing where there are none.

    Raises:
        TensorifyScalarRestartAnalysis: caught by Dynamo, which traces the frame again.
    """
    try:
        from torch._dynamo.exc import TensorifyScalarRestartAnalysis
        from torch._dynamo.symbolic_convert import TensorifyState
    except ImportError:
        return
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    if not any(_mixes(node.meta.get("example_value")) for node in inputs):
        return
    names = [name for node in inputs if (name := _float_name(node)) and not TensorifyState.should_specialize(name)]
    for name in names:
        TensorifyState.specialize(name)
    if names:
        raise TensorifyScalarRestartAnalysis


def _mixes(example: Any) -> bool:
    return isinstance(example, torch.Tensor) and is_mixing_shape(tuple(example.shape)) is not None


def _float_name(node: torch.fx.Node) -> str | None:
    """Dynamo's name of the float behind a graph input, when it is an attribute of a module or a global epsilon."""
    try:
        origin = node.meta["grapharg"].source.guard_source
        number = node.meta["example_value"].item_memo.node
        is_epsilon = origin is GuardSource.GLOBAL and 0 < abs(float(number.hint)) <= _EPSILON
        return str(number._expr.name) if is_epsilon or origin.is_unspecialized_nn_module() else None
    except (AttributeError, KeyError, TypeError):
        return None
