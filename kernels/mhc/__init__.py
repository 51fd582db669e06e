"""Manifold-constrained hyper-connections (mHC): the operators `dsv4::mhc_pre`, `mhc_post`, `mhc_post_pre`, `mhc_head`.

Importing this package registers them. `reference` holds the formulas in plain PyTorch, `cpp`, `cuda` and `triton` the
fast families, `families` the choice between them. Nothing here imports Triton before a CUDA tensor asks for it.
"""

from dsv4_compile.kernels.mhc import operators, reference
from dsv4_compile.kernels.mhc.families import FAMILIES, WISHES, choices, forget, resolve, warmup

__all__ = ["FAMILIES", "WISHES", "choices", "forget", "operators", "reference", "resolve", "warmup"]
