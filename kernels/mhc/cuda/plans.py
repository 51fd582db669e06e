"""How a call of the CUDA family is cut up, by its token count."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

__all__ = ["DETERMINISTIC", "HOPPER_SHARED_BYTES", "PLANS", "WARPS", "Plan", "fitting", "plan_for"]

WARPS = 8  # of a block


@dataclass(frozen=True)
class Plan:
    """How a call is cut up.

    groups: groups of 16 tokens in a tile. whole: a warp has all streams of its columns, not one. vec: columns a thread
    has at a time. steps: times that in a slice. together: tokens whose `post` and `comb` one block computes. ahead: a
    collapsing block mixes its token's streams itself. lag: tiles between the producers and the consumers that start
    together. blocks: that are to fit on a multiprocessor. stages: steps whose streams a producer has in shared memory.
    tokens: of a collapsing block. combined: every block is a producer and then a consumer, of a tile `lag` (1 or more)
    before its own. streaming: what a collapsing block reads and writes leaves the caches first.
    """

    groups: int
    whole: bool
    vec: int
    steps: int
    together: int
    ahead: bool
    lag: int = 0
    blocks: int = 2
    stages: int = 2
    tokens: int = 1
    combined: bool = False
    streaming: bool = False

    @property
    def tile(self) -> int:
        """Tokens of a tile."""
        return 16 * self.groups

    def staged_bytes(self, token_bytes: int) -> int:
        """Shared memory of a block for the streams of its next steps, with `token_bytes` in one column of a token."""
        return self.stages * 2 * WARPS * 32 * self.vec * token_bytes if self.whole else 0

    def slices(self, n: int, hidden: int) -> int:
        """Slices that the hidden axis is cut into."""
        warps = WARPS // self.groups if self.whole else max(1, WARPS // n)
        return math.ceil(hidden / (warps * 4 * self.vec * self.steps))


_NARROW = Plan(groups=1, whole=False, vec=4, steps=1, together=1, ahead=True)
_TILES = Plan(groups=1, whole=True, vec=4, steps=1, together=4, ahead=True, stages=1)
_TURNS = Plan(groups=1, whole=True, vec=4, steps=1, together=1, ahead=False, lag=1, stages=1, combined=True)
_WIDE = Plan(groups=1, whole=True, vec=8, steps=2, together=4, ahead=False, lag=1, tokens=2, combined=True)
_LONG = Plan(groups=2, whole=True, vec=8, steps=4, together=8, ahead=False, lag=4, tokens=2, combined=True)

# Up to so many tokens, this plan: the fastest of those that `benchmarks/mhc.py --search` timed on an H100, at hidden
# size 4096 and 1, 16, 64, 128, 512 and 8192 tokens.
PLANS: tuple[tuple[float, Plan], ...] = ((32, _NARROW), (64, _TILES), (256, _TURNS), (1024, _WIDE), (math.inf, _LONG))


# The one for every token count where a row's result must not depend on the other rows.
DETERMINISTIC = _TURNS

# Shared memory of a block at most, and what lets two blocks run on a multiprocessor.
HOPPER_SHARED_BYTES = 232_448
TWO_BLOCKS = HOPPER_SHARED_BYTES // 2


def plan_for(tokens: int) -> Plan:
    """The plan for `tokens` rows, before `fitting`."""
    return next(plan for limit, plan in PLANS if tokens <= limit)


def fitting(plan: Plan, n: int, hidden: int, logits: int, token_bytes: int, shared_limit: int) -> Plan:
    """`plan`, or a smaller one that the registers and the shared memory of a block have room for.

    Args:
        n: streams.
        hidden: columns of a stream.
        logits: rows of `fn`.
        token_bytes: bytes of all streams and of `x` in one column of a token.
        shared_limit: bytes of shared memory that a block can have on the device.
    """
    if plan.tokens > 1 and hidden > 4096:
        plan = dataclasses.replace(plan, tokens=1)  # a row of each stream in the registers is all there is room for
    sums = 4 * WARPS * 16 * (logits + 1)
    weights = 4 * plan.tile * n * (n + 1)
    fixed = max(sums, weights) + 1024
    limit = min(shared_limit, TWO_BLOCKS)
    if plan.whole and plan.vec == 8 and plan.staged_bytes(token_bytes) + fixed > limit:
        plan = dataclasses.replace(plan, vec=4, steps=2 * plan.steps)
    if plan.whole and plan.staged_bytes(token_bytes) + fixed > shared_limit:
        plan = dataclasses.replace(plan, stages=1)
    if plan.whole and plan.staged_bytes(token_bytes) + fixed > shared_limit:
        return _NARROW
    return plan
