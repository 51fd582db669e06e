"""What makes another program of a graph besides the graph itself: settings of Inductor and of torch."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import torch

__all__ = ["fingerprint"]

# Inductor's own settings leave these out, because it asks each pass for its identity.
_PASSES = (
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
    "_pre_fusion_custom_pass",
    "_post_fusion_custom_pass",
    "custom_should_partition_ops",
)
_PRECISIONS = ("allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
_unlike = itertools.count()


def _identity(custom: Any) -> str:
    """What a pass of the user is; one that does not say is like no other."""
    if custom is None or custom == []:
        return "none"
    found = custom.uuid() if hasattr(custom, "uuid") else None
    return f"unknown {next(_unlike)}" if found is None else repr(found)


def _precision(name: str) -> str:
    matmul = torch.backends.cuda.matmul
    try:
        return f"{getattr(matmul, name)} {torch.get_float32_matmul_precision()}"
    except RuntimeError:  # the newer way to set it is in use
        return f"{getattr(matmul, 'fp32_precision', None)}"


def fingerprint() -> str:
    """Text that differs where code of one graph would."""
    from torch._inductor import config

    parts = (
        sorted(
            (name, repr(value)) for name, value in config.save_config_portable(ignore_private_configs=False).items()
        ),
        [_identity(getattr(config, name, None)) for name in _PASSES],
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        bool(getattr(torch.utils.deterministic, "fill_uninitialized_memory", True)),
        [_precision(name) for name in _PRECISIONS],
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_inference_mode_enabled(),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()
