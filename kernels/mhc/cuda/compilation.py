"""Compiles `mhc.cu` with NVRTC for one plan, shape and set of dtypes, and keeps the machine code on disk."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dsv4_compile.kernels.cuda.code import loaded, machine_code, texts
from dsv4_compile.kernels.mhc.cuda.plans import Plan

__all__ = ["NORMAL_EPS", "TYPES", "Variant", "cubin", "kernel", "token_bytes"]

TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "f16"}
BYTES = {"float": 4, "bf16": 2, "f16": 2}
FOLDER = Path(__file__).parent
SOURCE = FOLDER / "mhc.cu"
# Below this the product of two sums of Sinkhorn could be denormal, which the fast reciprocal takes for zero.
NORMAL_EPS = 1e-18


@dataclass(frozen=True)
class Variant:
    """What one compiled kernel is for."""

    plan: Plan
    n: int
    hidden: int
    logits: int
    iters: int
    types: tuple[str, ...]  # of residual, new residual, x, fn, parameters, norm weight, output, post and comb in use
    has_post: bool
    has_norm: bool
    denormal: bool
    entry: str = "mhc"  # or "mhc_post"

    @property
    def macros(self) -> dict[str, str | int]:
        names = ("RESIDUAL", "NEW", "X", "FN", "PARAMETER", "NORM", "OUT", "WEIGHT")
        plan = self.plan
        return {
            **dict(zip(names, self.types, strict=True)),
            "N": self.n,
            "HIDDEN": self.hidden,
            "LOGITS": self.logits,
            "ITERS": self.iters,
            "HAS_POST": int(self.has_post),
            "HAS_NORM": int(self.has_norm),
            "AHEAD": int(plan.ahead or not self.has_post),
            "GROUPS": plan.groups,
            "ALL": int(plan.whole),
            "VEC": plan.vec,
            "STEPS": plan.steps,
            "STRIDE": self.stride,
            "SIGNAL": int(plan.signal),
            "SPLITS": plan.slices(self.n, self.hidden),
            "TOGETHER": plan.together,
            "LAG": plan.lag,
            "BLOCKS": plan.blocks,
            "STAGES": plan.stages,
            "TOKENS": plan.tokens,
            "COMBINED": int(plan.combined),
            "STREAMING": int(plan.streaming),
            "DENORMAL": int(self.denormal),
            "POST_ALONE": int(self.entry == "mhc_post"),
        }

    def sizes(self, tokens: int) -> tuple[int, int, int]:
        """Of a launch for `tokens` rows: blocks; tiles, each with a counter; float32 sums in the workspace."""
        plan, head = self.plan, self.logits == self.n
        slices, tiles = plan.slices(self.n, self.hidden), -(-tokens // plan.tile)
        of_tile = slices
        if not plan.combined:
            rows = min(tokens, plan.tile)
            of_tile += -(-rows // plan.tokens) + (0 if head else -(-rows // plan.together))
        return (tiles + plan.lag) * of_tile, tiles, tokens * slices * self.stride

    @property
    def stride(self) -> int:
        """Of a slice's sums in the workspace, in whole sectors: products, the sum of squares, with `signal` twice."""
        return -(-(self.logits + 1 + (self.plan.signal and self.logits != self.n)) // 8) * 8

    @functools.cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return 0 if self.entry == "mhc_post" else self.plan.staged_bytes(token_bytes(self.n, self.types, self.has_post))


def token_bytes(n: int, types: tuple[str, ...], has_post: bool) -> int:
    """Bytes of all streams and of `x` in one column of a token."""
    return n * max(BYTES[types[0]], BYTES[types[1]]) + has_post * BYTES[types[2]]


def cubin(variant: Variant, capability: tuple[int, int]) -> bytes:
    """Machine code for the architecture `capability`; from Inductor's cache folder where it has been made before.

    Raises:
        RuntimeError: NVRTC cannot compile it; the message has the log.
    """
    return machine_code("mhc", sources(), variant.macros, capability)


@functools.cache
def sources() -> dict[str, bytes]:
    """mhc.cu and the files it includes, by name."""
    return texts(SOURCE)


_lock = threading.Lock()
_kernels: dict[tuple[Variant, int], Any] = {}


def kernel(variant: Variant, device: int) -> Any:
    """The handle to launch `variant` on CUDA device number `device`; compiled and loaded when it is new."""
    key = (variant, device)
    known = _kernels.get(key)
    if known is None:
        with _lock:
            known = _kernels.get(key)
            if known is None:
                code = cubin(variant, torch.cuda.get_device_capability(device))
                known = _kernels[key] = loaded(code, variant.entry, variant.shared_bytes)
    return known
