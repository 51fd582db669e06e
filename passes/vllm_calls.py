"""Calls of vLLM's own mHC operators in a graph, with their arguments by our names.

Sources: `vllm/model_executor/layers/mhc.py` of vLLM 0.20 and 0.21, `vllm/model_executor/kernels/mhc/` since 0.22,
`vllm/_custom_ops.py` of 0.32 for the CPU. All of them take `post` and `comb` in float32 as they are, sum over the first
index of `comb`, do one column normalisation after the softmax and `sinkhorn_repeat - 1` more of rows and columns, and
return `post` as `[..., n, 1]` (those of `_C`: `[N, n]`).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import Node

from dsv4_compile.passes.region import are, is_functionalised, operator_of, shape, value

__all__ = ["NAMES", "Call", "Kind", "arguments_of", "head_of", "name_of", "own_product", "parse"]


@dataclass(frozen=True)
class Kind:
    """An operator of vLLM: what it is, and at which position it returns what (None: it returns `residual` alone)."""

    form: Literal["pre", "post", "post_pre"]
    outputs: Mapping[str, int] | None
    column: bool  # `post` comes as [..., n, 1]


_PRE = {"post": 0, "comb": 1, "row": 2}
_FUSED = {"residual": 0, "post": 1, "comb": 2, "row": 3}
_KINDS = {
    "vllm::mhc_pre": Kind("pre", _PRE, True),
    "vllm::mhc_pre_tilelang": Kind("pre", _PRE, True),
    "_C::hc_pre_fused_cpu": Kind("pre", {"row": 0, "post": 1, "comb": 2}, False),
    "vllm::mhc_post": Kind("post", None, True),
    "vllm::mhc_post_tilelang": Kind("post", None, True),
    "_C::hc_post_fused_cpu": Kind("post", None, True),
    "vllm::mhc_fused_post_pre": Kind("post_pre", _FUSED, True),
    "vllm::mhc_fused_post_pre_tilelang": Kind("post_pre", _FUSED, True),
}
# What vLLM calls an argument, and we. Those that only choose a plan mean nothing to us.
NAMES = {
    "post_layer_mix": "post",
    "comb_res_mix": "comb",
    "hc_fn": "fn",
    "hc_scale": "scale",
    "hc_base": "base",
    "hc_pre_eps": "pre_eps",
    "hc_sinkhorn_eps": "sinkhorn_eps",
    "hc_post_mult_value": "post_mult",
    "sinkhorn_repeat": "iters",
    "sinkhorn_iters": "iters",
}
_PLANS = {"n_splits", "tile_n", "hc_mult"}
_NUMBERS = {"rms_eps", "pre_eps", "sinkhorn_eps", "post_mult", "iters"}
_OF_POST = ("x", "residual", "post", "comb")
_OF_PRE = ("residual", "fn", "scale", "base", "rms_eps", "pre_eps", "sinkhorn_eps", "post_mult", "iters")


@dataclass(frozen=True)
class Call:
    """A call of one of vLLM's operators."""

    node: Node
    kind: Kind

    @property
    def arguments(self) -> dict[str, Any]:
        """Its arguments by our names, as they are now: what they are made by may have been replaced."""
        return arguments_of(self.node)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of one of the results."""
        whole = value(self.node)
        made = whole if self.kind.outputs is None else whole[self.kind.outputs[name]]
        return made.dtype

    def output(self, name: str) -> list[Node]:
        """The nodes that carry one of the results."""
        if self.kind.outputs is None:
            return [self.node]
        index = self.kind.outputs[name]
        return [u for u in self.node.users if u.target is operator.getitem and u.args[1] == index]


def parse(node: Node) -> Call | str | None:
    """A call, or why a lookalike is left alone, or None."""
    name = name_of(node)
    if name is None:
        return None
    kind = _KINDS.get(name)
    if kind is None:
        namespace, _, operator_name = name.partition("::")
        is_alike = namespace == "vllm" and operator_name.startswith("mhc_")
        return f"{name} is not an operator whose formula this release knows" if is_alike else None
    arguments = arguments_of(node)
    wanted = {"post": _OF_POST, "pre": _OF_PRE, "post_pre": (*_OF_POST, *_OF_PRE[1:])}[kind.form]
    absent = [a for a in wanted if a not in arguments]
    extra = arguments.keys() - {*wanted, "norm_weight", "norm_eps"}
    if absent or extra:
        what = ", ".join([*(f"{a} is missing" for a in absent), *(f"{a} is not known" for a in sorted(extra))])
        return f"{name} has other arguments than in the releases this one was written for: {what}"
    why = _misfit(arguments, wanted)
    return f"{name} has {why}" if why else Call(node, kind)


def _misfit(arguments: Mapping[str, Any], wanted: Sequence[str]) -> str | None:
    """What keeps our operator from taking these arguments."""
    residual = arguments["residual"]
    dims = shape(residual) if isinstance(residual, Node) else None
    if dims is None or len(dims) < 2 or not all(isinstance(d, int) for d in dims[-2:]):
        return "a residual whose number of streams or width is not known"
    n, hidden = (int(d) for d in dims[-2:])
    expected = {"fn": ((2 + n) * n, n * hidden), "scale": (3,), "base": ((2 + n) * n,), "norm_weight": (hidden,)}
    for name in wanted:
        given = arguments[name]
        if name in _NUMBERS and (isinstance(given, bool) or not isinstance(given, int | float)):
            return f"{name} {given}, which is not a number"
        if name not in _NUMBERS and not isinstance(given, Node):
            return f"{name} {given}, which is not a tensor"
    for name, size in expected.items():
        given = arguments.get(name)
        if isinstance(given, Node) and not are(shape(given) or (), size):
            return f"{name} of shape {list(shape(given) or ())} and not {list(size)}"
    return None


# vLLM's products with a packed or quantised weight, and what they call the activation.
_PRODUCTS = {
    "_C::weight_packed_linear": "mat1",
    "_C::onednn_mm": "a",
    "_C::cutlass_scaled_mm": "a",
    "vllm::cuda_flashinfer_bf16_gemm": "x",
}


# The final collapse, and what it calls the residual.
_HEADS = {
    "vllm::hc_head_fused_kernel": "hs_flat",
    "vllm::hc_head_fused_kernel_tilelang": "hs_flat",
    "vllm::hc_head_triton": "hs_flat",
    "_C::hc_head_fused_cpu": "x",
}


def own_product(node: Node) -> tuple[str, Node] | None:
    """(name, activation) of a product by a kernel of vLLM's."""
    return _of(node, _PRODUCTS)


def head_of(node: Node) -> tuple[str, Node] | None:
    """(name, residual) of vLLM's collapse behind the last layer."""
    return _of(node, _HEADS)


def _of(node: Node, names: Mapping[str, str]) -> tuple[str, Node] | None:
    """(name, the argument that `names` has for it) of one of these operators; those that write their result come
    functionalised, in one of two ways."""
    target = operator_of(node)
    if not isinstance(target, torch._ops.OpOverload) or target._schema.name not in names:
        return None
    named = dict(node.kwargs) if is_functionalised(node) else _named(node)
    wanted = named.get(names[target._schema.name])
    return (target._schema.name, wanted) if isinstance(wanted, Node) else None


def name_of(node: Node) -> str | None:
    """`namespace::operator` of a custom operator."""
    target = node.target
    return target._schema.name if isinstance(target, torch._ops.OpOverload) else None


def arguments_of(node: Node) -> dict[str, Any]:
    """All arguments that carry meaning by our names, defaults filled in; one epsilon for both where there is one."""
    named = _named(node)
    if node.target._schema.name.startswith("_C::") and "sinkhorn_iters" in named:
        named["residual"] = named.pop("x")
        named["pre_eps"] = named["sinkhorn_eps"] = named.pop("hc_eps", None)
        named["post_mult"] = 2.0  # written into the kernel
    return {NAMES.get(k, k): v for k, v in named.items() if k not in _PLANS}


def _named(node: Node) -> dict[str, Any]:
    """The arguments of a call by the names of its schema."""
    return {
        argument.name: node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
        for i, argument in enumerate(node.target._schema.arguments)
    }
