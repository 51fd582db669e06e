"""How a skinny product is cut up: the plans there are, and the kernel of a plan for a problem."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["FLOAT8", "MOST_LINEARS", "MOST_TOKENS", "PLANS", "Plan", "Variant", "fitted"]

MOST_TOKENS = 64
MOST_LINEARS = 8  # as in skinny.cuh
TOKENS = (8, 16, 32, 64)
"""Tokens that a kernel is compiled for; fewer are a call of the next one."""
MOST_STAGES, FEWEST_STAGES = 16, 3
# Shared memory by compute capability: of a multiprocessor, and of one block at most. A block takes 1 KiB more.
SHARED_BYTES = {
    80: (167_936, 166_912),
    86: (102_400, 101_376),
    87: (167_936, 166_912),
    89: (102_400, 101_376),
    90: (233_472, 232_448),
    100: (233_472, 232_448),
    103: (233_472, 232_448),
    120: (102_400, 101_376),
}
SYSTEM_BYTES = 1024
CLUSTERS = 90  # the compute capability that has them
FLOAT8 = 89  # the compute capability that converts from float8


WARPS = 8  # of a block
# What a multiprocessor can do in a microsecond when all are busy (H100), in KiB: bring in its share of the memory's
# bandwidth, bring in from L2, move through shared memory.
FROM_MEMORY, FROM_CACHE, FROM_SHARED = 22, 38, 200
PROCESSORS_OF_CLUSTERS = 16  # multiprocessors of a GPC, at least


@dataclass(frozen=True)
class Plan:
    """How the work is shared.

    columns: of the weights, of a stage in shared memory. splits: what may be the number of blocks that share the
    columns of their rows. cluster: these are a cluster and add up through each other's shared memory; else the last of
    them adds up what all have written. blocks: of a launch that are on a multiprocessor together. early: the blocks of
    the next launch fit beside them, and begin as soon as this one has ended. apart: warps copy the columns that they
    multiply, and wait only for those that have the same.
    """

    columns: int
    splits: tuple[int, ...]
    cluster: bool = False
    blocks: int = 1
    early: bool = False
    apart: bool = False

    @property
    def fitting(self) -> int:
        """Blocks that fit on a multiprocessor."""
        return self.blocks * (1 + self.early)


# With more splits a block has more rows, so that the input is read less often; with fewer there is less to add up.
# Clusters are small, because those of a size that does not divide the multiprocessors of a GPC leave some of them idle.
PLANS: dict[str, Plan] = {
    "whole": Plan(columns=256, splits=(1,)),
    "whole, early": Plan(columns=256, splits=(1,), early=True),
    "apart": Plan(columns=256, splits=(1,), apart=True),
    "apart, early": Plan(columns=256, splits=(1,), early=True, apart=True),
    "apart, wide": Plan(columns=512, splits=(1,), apart=True),
    "pairs": Plan(columns=128, splits=(2,), cluster=True),
    "pairs, early": Plan(columns=128, splits=(2,), cluster=True, early=True),
    "pairs, two": Plan(columns=128, splits=(2,), cluster=True, blocks=2),
    "fours": Plan(columns=64, splits=(3, 4), cluster=True),
    "parts": Plan(columns=128, splits=(2, 3, 4, 5, 6)),
}


@dataclass(frozen=True)
class Variant:
    """What one compiled kernel is for, and how its launches are cut up.

    type: "bf16" or "f16". tokens: of the input, at most. row_warps: warps of a block along the rows of the weights; the
    others are along their columns. tiles: of 16 rows, of a warp. low: some of the weights are float8.
    """

    plan: Plan
    type: str
    tokens: int
    row_warps: int
    tiles: int
    splits: int
    stages: int = 0
    low: bool = False

    @property
    def block_tiles(self) -> int:
        """Tiles of 16 rows of the weights, of a block."""
        return self.row_warps * self.tiles

    @property
    def rows(self) -> int:
        """Of the weights, of a block."""
        return 16 * self.block_tiles

    @property
    def macros(self) -> dict[str, str | int]:
        return {
            "TYPE": self.type,
            "TOKENS": self.tokens,
            "ROW_WARPS": self.row_warps,
            "COLUMN_WARPS": WARPS // self.row_warps,
            "TILES": self.tiles,
            "COLUMNS": self.plan.columns,
            "STAGES": self.stages,
            "APART": int(self.plan.apart),
            "BLOCKS": self.plan.fitting,
            "SPLITS": self.splits,
            "CLUSTER": int(self.plan.cluster),
            **({"LOW": 1} if self.low else {}),
        }

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage."""
        return 2 * self.plan.columns * (self.rows + self.tokens)

    @property
    def sum_bytes(self) -> int:
        """Shared memory of the sums of the warps, where the stages were before."""
        return 4 * WARPS // self.row_warps * self.tokens * (self.rows + 4)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return max(self.stages * self.stage_bytes, self.sum_bytes)

    @property
    def partials(self) -> int:
        """float32 numbers in the workspace, of a group of blocks."""
        return 0 if self.plan.cluster or self.splits == 1 else self.splits * self.tokens * self.rows

    def groups(self, tiles: int) -> int:
        """Groups of `splits` blocks for `tiles` tiles of 16 rows."""
        return -(-16 * tiles // self.rows)

    def cost(self, columns: int) -> float:
        """Microseconds of a block, roughly: only good to compare variants of one plan."""
        plan, kib = self.plan, 2 * -(-columns // self.splits) / 1024
        copying = max(kib * self.rows / FROM_MEMORY, kib * (self.rows + self.tokens) / FROM_CACHE) * plan.blocks
        adding = 2 * self.sum_bytes / 1024 / FROM_SHARED
        if self.splits > 1:
            adding += 4 * self.rows * self.tokens * (1 if plan.cluster else self.splits) / 1024 / FROM_CACHE
        return copying + adding


def groups_at_once(plan: Plan, splits: int, multiprocessors: int) -> int:
    """Groups of `splits` blocks that run at the same time."""
    if not plan.cluster or 2 * plan.blocks % splits == 0:  # a cluster that fills two neighbours leaves nothing idle
        return multiprocessors * plan.blocks // splits
    return multiprocessors // PROCESSORS_OF_CLUSTERS * (PROCESSORS_OF_CLUSTERS * plan.blocks // splits)


def tiles_of(features: Sequence[int]) -> int:
    """Tiles of 16 rows that weights of `features` rows have; each weight begins with a new one."""
    return sum(-(-count // 16) for count in features)


def fitted(
    plan: Plan,
    dtype: str,
    tokens: float,
    features: Sequence[int],
    columns: int,
    capability: int,
    multiprocessors: int,
    low: Sequence[Sequence[int]] = (),
) -> Variant | None:
    """The kernel of `plan` that does everything in one wave and costs least, or None where there is none.

    Args:
        dtype: "bf16" or "f16".
        tokens: of the input, at most.
        features: rows of each weight.
        columns: of the weights.
        capability: compute capability, as 90.
        multiprocessors: of the card.
        low: for each float8 input, rows of each float8 weight that it is multiplied by.
    """
    if not 0 < tokens <= MOST_TOKENS or capability not in SHARED_BYTES or (plan.cluster and capability < CLUSTERS):
        return None
    if low and (capability < FLOAT8 or columns % 16):
        return None
    whole, of_block = SHARED_BYTES[capability]
    room = min(of_block, whole // plan.fitting - SYSTEM_BYTES)
    padded = next(count for count in TOKENS if tokens <= count)
    found = []
    for splits, row_warps in itertools.product(plan.splits, (1, 2, 4)):
        groups = groups_at_once(plan, splits, multiprocessors)
        tiles = _tiles_of_warp([tiles_of(rows) for rows in (features, *low)], groups, row_warps)
        variant = Variant(plan, dtype, padded, row_warps, tiles, splits, low=bool(low))
        if groups and tiles and _is_possible(variant, columns, room):
            found.append(variant)
    if not found:
        return None
    best = min(found, key=lambda variant: (variant.cost(columns), -variant.row_warps))
    most = math.ceil(-(-columns // plan.columns) / best.splits) + 1
    return dataclasses.replace(best, stages=min(room // best.stage_bytes, max(most, FEWEST_STAGES), MOST_STAGES))


def _tiles_of_warp(parts: Sequence[int], groups: int, row_warps: int) -> int:
    """The fewest with which `groups` groups have all tiles; 0 if none do. A group has tiles of one part only."""
    if groups < len(parts):
        return 0
    tiles = -(-sum(parts) // (groups * row_warps))
    while sum(-(-part // (tiles * row_warps)) for part in parts) > groups:
        tiles += 1
    return tiles


def _is_possible(variant: Variant, columns: int, room: int) -> bool:
    plan = variant.plan
    registers = variant.tiles * variant.tokens // 2  # that a thread sums in
    if variant.low:
        registers += variant.tokens // 4  # tokens are held twice as wide
    return (
        plan.columns % (16 * WARPS // variant.row_warps) == 0
        and -(-columns // plan.columns) >= variant.splits
        and registers <= 128 // plan.fitting
        and FEWEST_STAGES * variant.stage_bytes <= room
        and variant.sum_bytes <= room
    )
