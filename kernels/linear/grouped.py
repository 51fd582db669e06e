"""What `dsv4::grouped_linear` does in a call: looks up where the weights lie and which way is chosen, and runs it.

What is remembered of a list of weights has their addresses as a key and is used for weights of the same sizes, strides
and dtypes only, so that a weight that was moved or replaced is another list: nothing about its values is kept.
"""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4_compile.kernels.linear import packing, products, proposals, skinny, strategies, tuning
from dsv4_compile.kernels.linear.buckets import LIMITS
from dsv4_compile.kernels.linear.products import Scaled
from dsv4_compile.kernels.linear.strategies import Card, Low, Operand, Plan, Problem

__all__ = ["Group", "choose", "composed", "fake", "known_as", "run", "run_as", "run_plan"]

_KEEP = 4096
"""Lists of weights that are remembered."""

_KEEP_CALLS = 64
"""Layouts of an input that are remembered for a list of weights."""

_address = torch.Tensor.data_ptr

Prepared = Callable[[Tensor], list[Tensor] | None]
"""A call that is kept: the outputs for an input of one layout, None where it has to be put together anew."""


class Group:
    """What is known of a list of weights `[M_i, K]`, without the weights themselves."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.same = _sameness(weights)
        self.columns = weights[0].shape[1]
        self.features = tuple(weight.shape[0] for weight in weights)
        self.dtypes = tuple(weight.dtype for weight in weights)
        self.runs = _runs(weights)
        self.aligned = all(map(skinny.is_aligned, weights))
        self.plans: dict[tuple[Any, ...], Plan] = {}
        """Plans that are chosen for good, by what the call adds."""
        self.prepared: dict[tuple[Any, ...], Prepared | None] = {}
        """Launches that are kept, by what the call adds; None where every call is put together anew."""

    def problem(
        self,
        rows: Tensor,
        biases: Sequence[Tensor | None],
        streams: Sequence[int],
        pack: bool,
        scaled: tuple[Low, ...] = (),
        wide: tuple[bool, ...] = (),
    ) -> Problem:
        card = tuning.card_of(rows.device.index if rows.is_cuda else None)
        biased = tuple(bias is not None for bias in biases)
        runs: tuple[tuple[int, ...], ...] = tuple((i,) for i in range(len(self.features)))
        if pack:
            runs = _parted(self.runs, wide, len(self.features) - len(scaled), scaled, biased, card)
        return Problem(
            card,
            self.columns,
            self.features,
            self.dtypes,
            biased,
            runs,
            tuple(streams),
            rows.dtype,
            rows.is_contiguous(),
            self.aligned,
            scaled,
            wide,
        )


_groups: dict[tuple[int, ...], Group] = {}


def run(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    streams: list[int],
    max_tokens: int = 1024,
    pack: bool = True,
    wide: Sequence[bool] = (),
) -> list[Tensor]:
    """The operator, see `operators.grouped_linear`."""
    addresses = tuple(map(_address, weights))
    group = _groups.get(addresses)
    if group is None or not group.same(*weights):
        group = _checked(addresses, x, weights, biases, streams)
    call = (x.shape, x.stride(), x.dtype, max_tokens, pack, *streams, None, *wide)
    ready = group.prepared.get(call)
    if ready is not None and biases.count(None) == len(biases):
        outputs = ready(x)
        if outputs is not None:
            return outputs
    rows = products.rows_of(x)
    tokens = rows.shape[0]
    without = [bias is None for bias in biases]
    key = (
        bisect_left(LIMITS, tokens), tokens <= max_tokens, rows.dtype, rows.is_contiguous(), pack, *streams, None,
        *without, *wide,
    )  # fmt: skip
    plan = group.plans.get(key)
    if plan is None:
        plan = _choose(group, key, x, rows, weights, biases, streams, max_tokens, pack, wide)
    elif not all(without):
        products.check(x, weights, biases)
    try:
        operands = plan.operands(weights)
    except RuntimeError:
        # The addresses are those of a run, and other storages lie there now.
        group = _checked(addresses, x, weights, biases, streams)
        plan = _choose(group, key, x, rows, weights, biases, streams, max_tokens, pack, wide)
        operands = plan.operands(weights)
    outputs = run_plan(plan, operands, x, rows, weights, biases)
    if call not in group.prepared and all(without) and key in group.plans and x.data_ptr() % 16 == 0:
        if len(group.prepared) >= _KEEP_CALLS:
            group.prepared.clear()
        group.prepared[call] = _prepared(plan, operands, x, rows, weights, outputs)
    return outputs


def _prepared(
    plan: Plan,
    operands: list[list[Operand]],
    x: Tensor,
    rows: Tensor,
    weights: Sequence[Tensor],
    outputs: Sequence[Tensor],
) -> Prepared | None:
    """The call that `plan` has just made, as a launch for the next ones like it."""
    proposal = strategies.one_proposal(plan)
    if proposal is not None:
        turned = operands[0][0]
        assert isinstance(turned, Tensor)
        return proposals.keep(proposal, x, rows, turned)
    parts = strategies.one_launch(plan)
    if parts is None:
        return None
    skinny_plan, members = parts
    flat = [output.view(rows.shape[0], output.shape[-1]) for output in outputs]
    return skinny.keep_launch(skinny_plan, skinny.Made(x, rows, weights, flat, members))


def run_as(
    name: str,
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    streams: list[int],
    wide: Sequence[bool] = (),
    scaled: Sequence[Scaled] = (),
    lows: tuple[Low, ...] = (),
) -> list[Tensor]:
    """The operator with the way `name` of `strategies.STRATEGIES`. For measurements and tests.

    Raises:
        RuntimeError: the weights do not lie as the way needs them to.
    """
    rows = products.rows_of(x)
    problem = Group(weights).problem(rows, biases, streams, True, lows, tuple(wide))
    if strategies.STRATEGIES[name].gather is not None and not problem.aligned:
        raise RuntimeError(f"{name} needs weights of which every row is contiguous and begins at 16 bytes.")
    plan = strategies.plan_of(name, problem)
    return run_plan(plan, plan.operands(weights), x, rows, weights, biases, scaled)


def fake(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    streams: list[int],
    max_tokens: int = 1024,
    pack: bool = True,
    wide: Sequence[bool] = (),
) -> list[Tensor]:
    """Outputs without values."""
    products.check(x, weights, biases)
    products.check_streams(weights, streams)
    products.check_wide(weights, wide)
    widths: dict[tuple[torch.dtype, bool], int] = {}
    for weight, is_wide in _marked(weights, wide):
        kind = weight.dtype, is_wide
        widths[kind] = widths.get(kind, 0) + weight.shape[0]
    return [
        x.new_empty((*x.shape[:-1], width), dtype=torch.float32 if is_wide else dtype)
        for (dtype, is_wide), width in widths.items()
    ]


def composed(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    streams: list[int],
    max_tokens: int = 1024,
    pack: bool = True,
    wide: Sequence[bool] = (),
) -> list[Tensor]:
    """Outputs that have gradients."""
    products.check(x, weights, biases)
    products.check_streams(weights, streams)
    products.check_wide(weights, wide)
    parts: dict[tuple[torch.dtype, bool], list[Tensor]] = {}
    for (weight, is_wide), bias in zip(_marked(weights, wide), biases, strict=True):
        multiply = products.linear_wide if is_wide else products.linear
        parts.setdefault((weight.dtype, is_wide), []).append(multiply(x, weight, bias))
    return [torch.cat(of_kind, dim=-1) for of_kind in parts.values()]


def _marked(weights: Sequence[Tensor], wide: Sequence[bool]) -> list[tuple[Tensor, bool]]:
    return list(zip(weights, wide or [False] * len(weights), strict=True))


def _checked(
    addresses: tuple[int, ...],
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    streams: list[int],
) -> Group:
    products.check(x, weights, biases)
    products.check_streams(weights, streams)
    return _remember(addresses, weights)


def _remember(addresses: tuple[int, ...], weights: Sequence[Tensor]) -> Group:
    if len(_groups) >= _KEEP:
        _groups.clear()
    group = _groups[addresses] = Group(weights)
    return group


def known_as(weights: Sequence[Tensor], anew: bool = False) -> Group:
    """What is known of these weights, float8 ones among them; they have been checked. `anew`: it is looked up again."""
    addresses = tuple(map(_address, weights))
    group = None if anew else _groups.get(addresses)
    return group if group is not None and group.same(*weights) else _remember(addresses, weights)


def _choose(
    group: Group,
    key: tuple[Any, ...],
    x: Tensor,
    rows: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    streams: Sequence[int],
    max_tokens: int,
    pack: bool,
    wide: Sequence[bool],
) -> Plan:
    products.check(x, weights, biases)
    products.check_streams(weights, streams)
    products.check_wide(weights, wide)
    return choose(group, key, rows, biases, streams, max_tokens, pack, wide)


def choose(
    group: Group,
    key: tuple[Any, ...],
    rows: Tensor,
    biases: Sequence[Tensor | None],
    streams: Sequence[int],
    max_tokens: int,
    pack: bool,
    wide: Sequence[bool],
    scaled: tuple[Low, ...] = (),
) -> Plan:
    """The plan for a call that has been checked, remembered if it is for good."""
    index = rows.device.index if rows.is_cuda else None
    problem = group.problem(rows, biases, streams, pack, scaled, tuple(wide))
    name, problem, settled = tuning.strategy(problem, rows.shape[0], max_tokens, index)
    plan = strategies.plan_of(name, problem)
    if settled:
        group.plans[key] = plan
    return plan


def run_plan(
    plan: Plan,
    operands: list[list[Operand]],
    x: Tensor,
    rows: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    scaled: Sequence[Scaled] = (),
) -> list[Tensor]:
    """The outputs of `plan.outputs`, with the leading axes of `x`; see `strategies.execute`."""
    if plan.alone:
        # What serving does in most layers, with as little on the host as can be.
        operand = operands[0][0]
        assert isinstance(operand, Tensor)
        outputs = [plan.strategy.multiply(rows, operand, None, None)]
    else:
        tokens, columns = rows.shape
        outputs = [rows.new_empty((tokens, width), dtype=dtype) for dtype, width in plan.outputs]
        casts = {dtype: rows.new_empty((tokens, columns), dtype=dtype) for dtype in plan.casts}
        strategies.execute(plan, rows, operands, weights, biases, outputs, casts, scaled)
    if x.dim() == 2:
        return outputs
    return [output.view(*x.shape[:-1], output.shape[1]) for output in outputs]


def _runs(weights: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    """The members of each run of weights of one dtype that lie one behind the other, in the order of the outputs."""
    runs: list[list[int]] = []
    for dtype in dict.fromkeys(weight.dtype for weight in weights):
        run: list[int] = []
        for member in (i for i, weight in enumerate(weights) if weight.dtype == dtype):
            if run and packing.separation([weights[i] for i in (*run, member)]) is None:
                run.append(member)
            else:
                run = [member]
                runs.append(run)
    return tuple(map(tuple, runs))


def _parted(
    runs: tuple[tuple[int, ...], ...],
    wide: Sequence[bool],
    plain: int,
    scaled: Sequence[Low],
    biased: Sequence[bool],
    card: Card,
) -> tuple[tuple[int, ...], ...]:
    """The same runs, cut where one product cannot go on.

    That is where results have another dtype than those before. Of float8 weights (those from `plain` on) one product
    takes those of one input, without a bias, that have one scale together or one for each row, with results in bfloat16
    (torch has no others everywhere where scales are by row). Where each weight has one scale, a product for each is
    faster than what was made of it: 24 us and not 27 for 256 tokens (H200, all of Flash's seven).
    """

    def kind(member: int) -> Hashable:
        if member < plain:
            return bool(wide) and wide[member]
        low = scaled[member - plain]
        joins = low.dtype == torch.bfloat16 and not biased[member] and card.capability >= skinny.FLOAT8
        return (dataclasses.replace(low, of_weight=0) if low.by_row else low) if joins else member

    parted: list[tuple[int, ...]] = []
    for run in runs:
        parted += [tuple(members) for _, members in itertools.groupby(run, kind)]
    return tuple(parted)


def _sameness(weights: Sequence[Tensor]) -> Callable[..., bool]:
    """Whether tensors have the sizes, strides, dtypes and device that `weights` have, in one call of C++ if possible.

    It is what Dynamo guards with, a fraction of the cost of asking each tensor; it holds no tensor.
    """
    sizes, strides = [list(weight.shape) for weight in weights], [list(weight.stride()) for weight in weights]
    try:
        from torch._C._dynamo.guards import TensorGuards

        # The types that torch declares are those of one tensor's list.
        return TensorGuards(*weights, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check  # type: ignore[arg-type]
    except (ImportError, TypeError):
        known = [_facts(weight) for weight in weights]
        return lambda *others: [_facts(other) for other in others] == known


def _facts(weight: Tensor) -> tuple[Any, ...]:
    return weight.shape, weight.stride(), weight.dtype, weight.device
