"""How a call of the CUDA family is cut up: plans, those measured ahead, and those worth timing where nothing is."""

from __future__ import annotations

import bisect
import dataclasses
import math
from dataclasses import dataclass
from typing import Any

__all__ = [
    "BUCKETS",
    "DETERMINISTIC",
    "HOPPER_SHARED_BYTES",
    "PLANS",
    "SHIPPED",
    "WARPS",
    "Card",
    "Plan",
    "Problem",
    "Table",
    "bucket_of",
    "candidates",
    "counts_of",
    "fitting",
    "illegal",
    "plan_for",
    "shipped",
]

WARPS = 8  # of a block


@dataclass(frozen=True)
class Plan:
    """How a call is cut up.

    groups: groups of 16 tokens in a tile. whole: a warp has all streams of its columns, not one. vec: columns a thread
    has at a time. steps: times that in a slice. together: tokens whose `post` and `comb` one block computes. ahead: a
    collapsing block mixes its token's streams itself. lag: tiles between the producers and the consumers that start
    together. blocks: that are to fit on a multiprocessor. stages: steps whose streams a producer has in shared memory.
    tokens: of a collapsing block. combined: every block is a producer and then a consumer, of a tile `lag` (1 or more)
    before its own. streaming: what a collapsing block reads and writes leaves the caches first. signal: sums in the
    workspace say themselves that they are there, so nobody counts.
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
    signal: bool = False

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


@dataclass(frozen=True)
class Card:
    """A CUDA device: its name, its multiprocessors, bytes of shared memory that a block can have."""

    name: str
    multiprocessors: int
    shared_bytes: int


@dataclass(frozen=True)
class Problem:
    """What the best plan depends on besides the token count.

    `types` are those of `Variant` without the last. That, iterations, epsilons and the norm change a kernel, but not
    what bounds it.
    """

    card: Card
    n: int
    hidden: int
    logits: int
    types: tuple[str, ...]
    has_post: bool


# What a field of a plan may be that is searched or read from disk; one that is not listed must have its default.
RANGES: dict[str, tuple[int, ...] | range] = {
    "groups": (1, 2, 4, 8),  # and `together`: divisors of WARPS
    "whole": (False, True),
    "vec": (4, 8),
    "steps": range(1, 65),
    "together": (1, 2, 4, 8),
    "ahead": (False, True),
    "lag": range(65),
    "blocks": range(1, 9),
    "stages": range(1, 5),
    "tokens": range(1, 5),
    "combined": (False, True),
    "streaming": (False, True),
    "signal": (False, True),
}


def illegal(plan: Plan) -> str | None:
    """Why `plan` must never run, or None: it would wait for ever, or the kernel is not written for it."""
    for field in dataclasses.fields(plan):
        value, allowed = getattr(plan, field.name), RANGES.get(field.name, (field.default,))
        if type(value).__name__ != field.type or value not in allowed:
            return f"{field.name} is {value!r}"
    if plan.combined and plan.lag == 0:
        return "a combined plan without lag waits for blocks that may not have started"
    if not plan.whole and plan.groups > 1:
        return "a tile of several groups needs whole"
    if plan.signal and (not plan.ahead or plan.combined):
        return "signal says nothing of the new residual, so it needs ahead, and blocks of one kind"
    return None


# Few tokens: a warp has one stream of its columns. A slice is all there is to bring in, so there are many of them.
_NARROW = Plan(groups=1, whole=False, vec=4, steps=1, together=1, ahead=True, signal=True)
_BROAD = dataclasses.replace(_NARROW, vec=8)
# More tokens: blocks are producers, then consumers of the tile before. (`tokens` is 1 where a row is too long for 2.)
_TURNS = Plan(groups=1, whole=True, vec=4, steps=1, together=1, ahead=False, lag=1, stages=1, combined=True)
_PAIRS = dataclasses.replace(_TURNS, vec=8, together=2, tokens=2)
_FOURS = dataclasses.replace(_PAIRS, together=4)
# Many tokens: `steps` columns in turn, the next ones under way meanwhile.
_STEADY = dataclasses.replace(_FOURS, steps=2, stages=2)
_PASSING = dataclasses.replace(_STEADY, together=8, streaming=True)
_LONG = dataclasses.replace(_PASSING, steps=4)

Table = tuple[tuple[float, Plan], ...]  # up to so many tokens, this plan

# The fastest of those that `benchmarks/mhc.py --search` timed on an H100 (SXM), bfloat16, four streams, at the limits
# here and at 1024 and 8192 tokens: for hidden size 4096, then for 7168.
PLANS: Table = (
    (1, _NARROW),
    (8, _BROAD),
    (32, dataclasses.replace(_BROAD, together=2)),
    (64, _PAIRS),
    (128, _TURNS),
    (256, _FOURS),
    (512, _PASSING),
    (2048, _LONG),
    (math.inf, _PASSING),
)
_PLANS_OF_LONG_ROWS: Table = (
    (8, _BROAD),
    (16, dataclasses.replace(_BROAD, together=4)),
    (32, dataclasses.replace(_BROAD, together=2, signal=False)),
    (64, _TURNS),
    (128, _FOURS),
    (256, _STEADY),
    (512, _LONG),
    (math.inf, _PASSING),
)

# Plans that need no search, for four streams of 16 bits, by kind of card and hidden size.
SHIPPED: dict[tuple[str, range], Table] = {
    ("H100", range(8, 4097)): PLANS,
    ("H100", range(4097, 7169)): _PLANS_OF_LONG_ROWS,
}
# What a card of a kind has in its name, and multiprocessors at least (slices of a card have fewer).
KINDS = {"H100": (("H100", "H200", "H800"), 132)}

# One plan serves all token counts of a bucket: those up to its limit and above the one before.
BUCKETS: tuple[float, ...] = tuple(
    sorted({8, 16, 32, 64, 128, 256, 512, 1024, 2048, math.inf, *(up for table in SHIPPED.values() for up, _ in table)})
)
MANY = 8192  # tokens at which the last bucket is timed

# The one for every token count where a row's result must not depend on the other rows.
DETERMINISTIC = _TURNS

# Shared memory of a block at most, and what lets two blocks run on a multiprocessor.
HOPPER_SHARED_BYTES = 232_448
TWO_BLOCKS = HOPPER_SHARED_BYTES // 2


def bucket_of(tokens: int) -> float:
    """The limit of the bucket of `tokens`."""
    return BUCKETS[bisect.bisect_left(BUCKETS, tokens)]


def counts_of(bucket: float) -> range:
    """The token counts of the bucket with this limit, of the last bucket those up to where it is timed."""
    before = [limit for limit in BUCKETS if limit < bucket]
    return range(int(before[-1]) + 1 if before else 1, MANY + 1 if bucket == math.inf else int(bucket) + 1)


def shipped(problem: Problem) -> bool:
    """Whether the plans for `problem` were measured ahead."""
    return (
        problem.n == 4
        and "float" not in problem.types[:3]
        and any(_is_of_kind(problem.card, kind) and problem.hidden in sizes for kind, sizes in SHIPPED)
    )


def _is_of_kind(card: Card, kind: str) -> bool:
    names, multiprocessors = KINDS[kind]
    return card.multiprocessors >= multiprocessors and any(name in card.name for name in names)


def _table(problem: Problem) -> Table:
    """The measured plans of the nearest hidden size, if possible of the same kind of card."""

    def distance(key: tuple[str, range]) -> tuple[bool, int]:
        kind, sizes = key
        outside = max(sizes.start - problem.hidden, problem.hidden - sizes.stop + 1, 0)
        return not _is_of_kind(problem.card, kind), outside

    return SHIPPED[min(SHIPPED, key=distance)]


def plan_for(tokens: int, problem: Problem) -> Plan:
    """The plan for `tokens` rows without a search, before `fitting`: measured ahead, for this problem or a near one."""
    return next(plan for limit, plan in _table(problem) if tokens <= limit)


def candidates(tokens: int, problem: Problem) -> list[Plan]:
    """Up to eight plans worth timing for `tokens` rows, before `fitting`; the first is that of `plan_for`.

    Those measured ahead for this bucket and the ones beside it, then the first of these varied.
    """
    here = BUCKETS.index(bucket_of(tokens))
    first = plan_for(tokens, problem)
    near = sorted(range(len(BUCKETS)), key=lambda i: abs(i - here))[:5]
    plans = [first, *(plan_for(counts_of(BUCKETS[i])[0], problem) for i in near)]
    varied: tuple[dict[str, Any], ...] = (
        {"steps": 2 * first.steps},
        {"vec": 12 - first.vec},
        {"steps": first.steps // 2},
        {"groups": 2 * first.groups},
        {"streaming": not first.streaming} if tokens > 1024 else {"lag": 2 * first.lag},
        {"blocks": first.blocks + 1},
    )
    plans += [dataclasses.replace(first, **change) for change in varied]
    return [plan for plan in dict.fromkeys(plans) if illegal(plan) is None][:8]


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
        plan = dataclasses.replace(plan, vec=4, steps=min(2 * plan.steps, RANGES["steps"][-1]))
    if plan.whole and plan.staged_bytes(token_bytes) + fixed > shared_limit:
        plan = dataclasses.replace(plan, stages=1)
    if plan.whole and plan.staged_bytes(token_bytes) + fixed > shared_limit:
        return _NARROW
    return plan
