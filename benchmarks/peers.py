"""Kernels of other projects for the same work, where they are installed. For the benchmarks beside it.

vLLM registers its mHC operators when certain modules are imported; which there are depends on the release and the
device. They are called by the names of their arguments, so that one table serves several releases.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4_compile.passes.vllm_calls import NAMES

__all__ = ["PEERS", "implementation", "present"]

PEERS = ("vllm",)

_MODULES = (
    "vllm.platforms",
    "vllm._custom_ops",
    "vllm.model_executor.layers.mhc",
    "vllm.model_executor.kernels.mhc",
    "vllm.model_executor.kernels.mhc.tilelang",
)
# By operator of ours: those of vLLM, the newest first; two are called one after the other.
_OPERATORS = {
    "cuda": {
        "post_pre": (("mhc_fused_post_pre_tilelang",), ("mhc_fused_post_pre",), ("mhc_post", "mhc_pre")),
        "pre": (("mhc_pre_tilelang",), ("mhc_pre",)),
        "post": (("mhc_post_tilelang",), ("mhc_post",)),
    },
    "cpu": {
        "post_pre": (("hc_post_fused_cpu", "hc_pre_fused_cpu"),),
        "pre": (("hc_pre_fused_cpu",),),
        "post": (("hc_post_fused_cpu",),),
    },
}
_NAMES = {**NAMES, "hc_eps": "pre_eps"}  # the one epsilon of the operators of the CPU
Values = dict[str, Any]


def present() -> list[str]:
    """Those that are installed and have operators for this device."""
    return [name for name in PEERS if implementation(name, "post_pre") is not None]


def implementation(peer: str, operator: str) -> Callable[..., tuple[Tensor, ...]] | None:
    """The peer's function for one of our operators, with our arguments and results, or None.

    Args:
        operator: `post_pre`, `pre` or `post`; the RMSNorm is done by `torch.nn.functional` where the peer has none.
    """
    if peer not in PEERS or importlib.util.find_spec(peer) is None:
        return None
    for module in _MODULES:
        try:
            importlib.import_module(module)
        except Exception:  # of another release, or for another device
            continue
    device = "cuda" if torch.cuda.is_available() else "cpu"
    namespace = torch.ops.vllm if device == "cuda" else torch.ops._C
    for names in _OPERATORS[device].get(operator, ()):
        if all(hasattr(namespace, name) for name in names):
            return _runs(operator, [getattr(namespace, name).default for name in names])
    return None


def _runs(operator: str, overloads: list[Any]) -> Callable[..., tuple[Tensor, ...]]:
    takes = {
        "post_pre": ("x", "residual", "post", "comb"),
        "pre": ("residual",),
        "post": ("x", "residual", "post", "comb"),
    }[operator]
    numbers = ("iters", "rms_eps", "pre_eps", "sinkhorn_eps", "post_mult", "norm_eps")

    def run(*arguments: Any) -> tuple[Tensor, ...]:
        given = dict(zip(takes, arguments, strict=False))
        given["hc_mult"] = given["residual"].shape[-2]
        if operator != "post":
            rest = arguments[len(takes) :]
            given |= dict(zip(("fn", "scale", "base", "norm_weight", *numbers), rest, strict=False))
        made: Values = {}
        for overload in overloads:
            made |= _call(overload, given | made)
        if operator == "post":
            return (made["residual"],)
        row = made["row"]
        if not made.get("normed"):
            row = torch.nn.functional.rms_norm(row, row.shape[-1:], given["norm_weight"], given["norm_eps"])
        found = (row, made["post"].reshape(made["comb"].shape[:-1]), made["comb"])
        return (made["residual"], *found) if operator == "post_pre" else found

    return run


def _call(overload: Any, values: Values) -> Values:
    """Calls an operator of vLLM; its results by our names."""
    arguments: Values = {}
    on_cpu = overload.namespace == "_C"
    is_post = "fn" not in {_NAMES.get(a.name, a.name) for a in overload._schema.arguments}
    for argument in overload._schema.arguments:
        name = _NAMES.get(argument.name, argument.name)
        name = "residual" if on_cpu and not is_post and name == "x" else name
        if name in values:
            value = values[name]
            column = name == "post" and value.dim() == 2 and not on_cpu
            arguments[argument.name] = value.unsqueeze(-1) if column else value
    results = overload(**arguments)
    if is_post:
        return {"residual": results}
    normed = "norm_weight" in arguments
    if on_cpu:
        row, post, comb = results
        return {"post": post, "comb": comb, "row": row, "normed": normed}
    if len(results) == 4:
        return dict(zip(("residual", "post", "comb", "row"), results, strict=True)) | {"normed": normed}
    return dict(zip(("post", "comb", "row"), results, strict=True)) | {"normed": normed}
