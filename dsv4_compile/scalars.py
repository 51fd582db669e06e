"""Python floats of the model under `dynamic=True`.

There Dynamo makes every float it meets a graph input, the epsilons of the model among them, and a formula with unknown
constants cannot be recognised. The floats that come from a module's attributes are made constants again, with a guard
on their value: the same restart of the analysis that Dynamo uses itself for floats it cannot pass on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule

from dsv4_compile.passes.mhc_pre import is_mixing_shape

__all__ = ["fix_module_floats"]


def fix_module_floats(gm: GraphModule) -> None:
    """Restarts Dynamo's analysis with the floats of modules as constants; does nothing where there are none.

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
    """Dynamo's name of the float behind a graph input, when it is an attribute of a module."""
    try:
        source = node.meta["grapharg"].source.base
        if not source.guard_source.is_unspecialized_nn_module():
            return None
        return str(node.meta["example_value"].item_memo.node._expr.name)
    except (AttributeError, KeyError, TypeError):
        return None
