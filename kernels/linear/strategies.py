"""The ways to run linear layers of one input, and how each cuts a group into products on streams.

    weights  a b c (bfloat16, one behind the other)  d (float32)          outputs: [N, a+b+c] bfloat16, [N, d] float32

    serial           current stream:  a, b, c, d
    streams          current stream:  b        side 1:  a        side 2:  c, d
    pack             current stream:  abc, d
    pack+streams     current stream:  abc      side 1:  d

Each product writes its columns of the output of its dtype. A further way (a kernel of its own, say) is one more entry
of `STRATEGIES`.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_compile.kernels import streams as auxiliary
from dsv4_compile.kernels.linear import products

__all__ = ["STRATEGIES", "Card", "Plan", "Problem", "Strategy", "default", "execute", "fastest", "legal", "plan_of"]

PACK_MAX_TOKENS = 4096
"""Up to so many tokens one product does not fill the card by itself, so that packing pays where nothing is measured."""

MARGIN = 1.02
"""How much slower than the fastest way one without side streams may be and still be taken."""

Multiply = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
"""`[N, M]` of rows `[N, K]`, transposed weight `[K, M]`, bias `[M]` and where to write it, as `products.multiply`."""


@dataclass(frozen=True)
class Card:
    """A device: its name, its multiprocessors (0 for a CPU)."""

    name: str
    multiprocessors: int


@dataclass(frozen=True)
class Problem:
    """What decides which way is the fastest, besides the token count.

    `features` are the M_i of weights `[M_i, columns]`. `runs` are the members of each run of weights that lie one
    behind the other. `streams` are the stream of each weight, all 0 where nothing may leave the current stream. `x` is
    the dtype of the input, and `contiguous` whether its rows are.
    """

    card: Card
    columns: int
    features: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    biased: tuple[bool, ...]
    runs: tuple[tuple[int, ...], ...]
    streams: tuple[int, ...]
    x: torch.dtype
    contiguous: bool

    @property
    def has_runs(self) -> bool:
        """Whether several weights can be read as one."""
        return len(self.runs) < len(self.features)

    def weight_bytes(self, members: Sequence[int]) -> int:
        """Bytes of the weights of `members`."""
        return self.columns * sum(self.features[i] * self.dtypes[i].itemsize for i in members)


@dataclass(frozen=True)
class Strategy:
    """One way to run a group. `multiply` makes each product; `serves` says whether it can, for the problem."""

    packed: bool = False
    """One product for each run, and not for each weight."""
    forks: bool = False
    """Products run on several streams."""
    multiply: Multiply = products.multiply
    serves: Callable[[Problem], bool] = lambda problem: True


STRATEGIES: dict[str, Strategy] = {
    "serial": Strategy(),
    "streams": Strategy(forks=True),
    "pack": Strategy(packed=True),
    "pack+streams": Strategy(packed=True, forks=True),
}


def legal(problem: Problem) -> tuple[str, ...]:
    """The ways that are right for `problem`, and not the same as one before."""
    return tuple(name for name, strategy in STRATEGIES.items() if _is_legal(strategy, problem))


def _is_legal(strategy: Strategy, problem: Problem) -> bool:
    if strategy.packed and not problem.has_runs:
        return False
    if strategy.forks and (not any(problem.streams) or (strategy.packed and len(problem.runs) == 1)):
        return False
    return strategy.serves(problem)


def default(problem: Problem, tokens: float) -> str:
    """The way where nothing is measured: pack up to 4096 tokens, else streams where they are allowed, else serial."""
    names = legal(problem)
    if "pack" in names and tokens <= PACK_MAX_TOKENS:
        return "pack"
    return "streams" if "streams" in names else "serial"


def fastest(times: Mapping[str, float]) -> str:
    """The way to take, given the microseconds of each: without side streams unless these win by more than 2 %."""
    best = min(times, key=times.__getitem__)
    steady = [name for name in times if not STRATEGIES[name].forks]
    calm = min(steady, key=times.__getitem__, default=best)
    return calm if times[calm] <= MARGIN * times[best] else best


# -------------------------------------------------------------------------------------------------------------- plans


@dataclass(frozen=True)
class Product:
    """One matrix product: the members whose weights it reads, and the columns it writes of the output of their dtype.

    `base` is the member that the memory of a run begins with.
    """

    members: tuple[int, ...]
    base: int
    output: int
    start: int
    stop: int


@dataclass(frozen=True)
class Plan:
    """How one problem runs in one way.

    `slots` are the products of each stream, the current one first. `outputs` are dtype and width of each output, and
    `casts` the dtypes that the input is cast to. `alone`: one product makes the only output, without cast or bias.
    """

    multiply: Multiply
    columns: int
    slots: tuple[tuple[Product, ...], ...]
    outputs: tuple[tuple[torch.dtype, int], ...]
    casts: tuple[torch.dtype, ...]
    alone: bool

    def operands(self, weights: Sequence[Tensor]) -> list[list[Tensor]]:
        """For each product its transposed weight `[K, M]`, a view.

        Raises:
            RuntimeError: weights of a run lie in different storages, although their addresses are those of a run.
        """
        return [[_operand(product, self.columns, weights) for product in slot] for slot in self.slots]


def _operand(product: Product, columns: int, weights: Sequence[Tensor]) -> Tensor:
    base = weights[product.base]
    if len(product.members) == 1:
        return base.t()
    return base.as_strided((columns, product.stop - product.start), (1, columns), base.storage_offset())


@functools.lru_cache(maxsize=4096)
def plan_of(name: str, problem: Problem) -> Plan:
    """The plan of the way `name`."""
    strategy = STRATEGIES[name]
    units = problem.runs if strategy.packed else tuple((i,) for i in range(len(problem.features)))
    slots = [[*units]] if not strategy.forks else _spread(problem, units, by_owner=not strategy.packed)
    dtypes = tuple(dict.fromkeys(problem.dtypes))
    starts, widths = _columns(problem)
    made = tuple(tuple(_product(problem, unit, dtypes, starts) for unit in slot) for slot in slots)
    casts = tuple(dtype for dtype in dtypes if dtype != problem.x)
    alone = len(units) == 1 and not casts and not any(problem.biased)
    return Plan(strategy.multiply, problem.columns, made, tuple(widths.items()), casts, alone)


def _columns(problem: Problem) -> tuple[list[int], dict[torch.dtype, int]]:
    """Where the columns of each member begin in the output of its dtype, and the width of each output."""
    widths: defaultdict[torch.dtype, int] = defaultdict(int)
    starts = []
    for features, dtype in zip(problem.features, problem.dtypes, strict=True):
        starts.append(widths[dtype])
        widths[dtype] += features
    return starts, dict(widths)


def _product(
    problem: Problem, members: tuple[int, ...], dtypes: Sequence[torch.dtype], starts: Sequence[int]
) -> Product:
    base = next((i for i in members if problem.features[i]), members[0])
    start = starts[members[0]]
    stop = start + sum(problem.features[i] for i in members)
    return Product(members, base, dtypes.index(problem.dtypes[base]), start, stop)


def _spread(problem: Problem, units: Iterable[tuple[int, ...]], by_owner: bool) -> list[list[tuple[int, ...]]]:
    """The units of each stream, heaviest first.

    As `problem.streams` says, or the heaviest on the current stream and each other on the side stream with least work.
    """
    heaviest_first = sorted(units, key=lambda unit: -problem.weight_bytes(unit))
    slots: list[list[tuple[int, ...]]] = [[] for _ in range(1 + max(problem.streams))]
    load = [0] * max(2, len(slots))
    for position, unit in enumerate(heaviest_first):
        least = 1 + load[1:].index(min(load[1:])) if position else 0
        slot = problem.streams[unit[0]] if by_owner else least
        slots[slot].append(unit)
        load[slot] += problem.weight_bytes(unit)
    return slots


# ---------------------------------------------------------------------------------------------------------- execution


def execute(
    plan: Plan,
    rows: Tensor,
    operands: Sequence[Sequence[Tensor]],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    outputs: Sequence[Tensor],
    casts: Mapping[torch.dtype, Tensor],
) -> None:
    """Runs `plan`; what follows on the current stream comes after all of it.

    Everything but joined biases is allocated by the caller, before the fork and on the current stream: the caching
    allocator then knows it as memory of that stream, in a capture as well, and a late reader cannot meet it reused by
    a side stream.

    Args:
        rows: `[N, K]`.
        operands: `plan.operands(weights)`.
        outputs: `[N, M]` for each of `plan.outputs`, to be filled.
        casts: `[N, K]` for each of `plan.casts`, to be filled with `rows`.
    """
    for cast in casts.values():
        cast.copy_(rows)
    work = [
        [_task(product, operand, rows, weights, biases, outputs, casts) for product, operand in zip(*slot, strict=True)]
        for slot in zip(plan.slots, operands, strict=True)
    ]
    main, *sides = [functools.partial(_multiply_all, plan.multiply, tasks) if tasks else None for tasks in work]
    if not any(sides):
        _multiply_all(plan.multiply, work[0])
        return
    auxiliary.execute_in_parallel(main or _nothing, sides, rows.device, inputs=(rows, *casts.values()))


_Task = tuple[Tensor, Tensor, Tensor | None, Tensor]
"""Rows `[N, K]`, transposed weight `[K, M]`, bias `[M]` and output `[N, M]` of one product."""


def _task(
    product: Product,
    operand: Tensor,
    rows: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    outputs: Sequence[Tensor],
    casts: Mapping[torch.dtype, Tensor],
) -> _Task:
    output = outputs[product.output]
    members = product.members
    bias = biases[members[0]]
    if len(members) > 1:
        bias = products.joined([biases[i] for i in members], [weights[i] for i in members])
    if product.stop - product.start < output.shape[1]:
        output = output[:, product.start : product.stop]
    return casts.get(output.dtype, rows), operand, bias, output


def _multiply_all(multiply: Multiply, tasks: Iterable[_Task]) -> None:
    for rows, operand, bias, output in tasks:
        multiply(rows, operand, bias, output)


def _nothing() -> None:
    pass
