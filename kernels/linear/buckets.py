"""Ranges of token counts: what is chosen for linear layers is chosen once for all counts of a range."""

from __future__ import annotations

import math
from bisect import bisect_left

__all__ = ["LIMITS", "MANY", "bucket_of", "counts_of"]

LIMITS: tuple[float, ...] = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, math.inf)
"""One way serves all token counts of a bucket: those up to its limit and above the one before."""
MANY = 8192  # tokens at which the last bucket is timed


def bucket_of(tokens: float) -> float:
    """The limit of the bucket of `tokens`."""
    return LIMITS[bisect_left(LIMITS, tokens)]


def counts_of(bucket: float) -> range:
    """The token counts of the bucket with this limit, of the last bucket those up to where it is timed."""
    before = max((limit for limit in LIMITS if limit < bucket), default=0)
    return range(int(before) + 1, MANY + 1 if bucket == math.inf else int(bucket) + 1)
