"""The ways to run linear layers of one input, and how each cuts a group into products on streams.

    weights  a b c (bfloat16, one behind the other)  d (float32)          outputs: [N, a+b+c] bfloat16, [N, d] float32

    serial           current stream:  a, b, c, d
    streams          current stream:  b        side 1:  a        side 2:  c, d
    pack             current stream:  abc, d
    pack+streams     current stream:  abc      side 1:  d
    pack: ...        current stream:  abc, nothing besides            up to 512 tokens (`proposals`)
    skinny: ...      current stream:  abc wherever they lie, d        up to 64 tokens (`skinny`)

A group may have float8 weights besides, at its end, each with a float8 input and scales of its own (`Scaled`): in torch
`_scaled_mm` makes their products, in `skinny` the launch of the others. They have one output together.

Each product writes its columns of the output of its dtype. A further way (a kernel of its own, say) is one more entry
of `STRATEGIES`.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4_compile.kernels import streams as auxiliary
from dsv4_compile.kernels.linear import products, proposals, skinny
from dsv4_compile.kernels.linear.products import Scaled

__all__ = [
    "STRATEGIES",
    "Card",
    "Low",
    "Plan",
    "Problem",
    "Strategy",
    "default",
    "execute",
    "fastest",
    "legal",
    "one_launch",
    "plan_of",
]

PACK_MAX_TOKENS = 4096
"""Up to so many tokens one product does not fill the card by itself, so that packing pays where nothing is measured."""

MARGIN = 1.02
"""How much slower than the fastest way a calmer one may be and still be taken."""

Multiply = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
"""`[N, M]` of rows `[N, K]`, transposed weight `[K, M]`, bias `[M]` and where to write it, as `products.multiply`."""

Gather = functools.partial[None]
"""Fills `[N, sum M_i]` from rows `[N, K]`, weights `[M_i, K]` and biases `[M_i]`: `skinny.multiply` with its plan."""


@dataclass(frozen=True)
class Card:
    """A device: its name, its multiprocessors (0 for a CPU), NVIDIA's compute capability as 90 (0 for others)."""

    name: str
    multiprocessors: int
    capability: int = 0


Kind = tuple[torch.dtype, bool]
"""What an output has: dtype of the weights, and whether it is float32 although they are not."""


@dataclass(frozen=True)
class Low:
    """A float8 weight. `dtype` is that of the result, `by_row` whether each row and each token has a scale of its own,
    `input` the number of its input (those with one number have one input), `fast` as in `products.Scaled`, `of_rows`
    and `of_weight` the numbers of the scales."""

    dtype: torch.dtype
    by_row: bool
    input: int
    fast: bool
    of_rows: int = 0
    of_weight: int = 0


@dataclass(frozen=True)
class Problem:
    """What decides which way is the fastest, besides the token count.

    `features` are the M_i of weights `[M_i, columns]`. `runs` are the members of each run of weights that lie one
    behind the other. `streams` are the stream of each weight, all 0 where nothing may leave the current stream. `x` is
    the dtype of the input, and `contiguous` whether its rows are. `aligned`: every row of every weight is contiguous
    and begins at a multiple of 16 bytes. `scaled` describes the last weights, those that are float8. `wide` says of
    which of the others the results are float32 although the weight is not; empty: of none.
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
    aligned: bool = True
    scaled: tuple[Low, ...] = ()
    wide: tuple[bool, ...] = ()

    def kind(self, member: int) -> Kind:
        """Which output the result of a weight that is not float8 is a part of."""
        return self.dtypes[member], bool(self.wide) and self.wide[member]

    @property
    def plain(self) -> int:
        """How many weights are not float8; they come first."""
        return len(self.features) - len(self.scaled)

    @property
    def has_runs(self) -> bool:
        """Whether several weights can be read as one."""
        return len(self.runs) < len(self.features)

    def weight_bytes(self, members: Sequence[int]) -> int:
        """Bytes of the weights of `members`."""
        return self.columns * sum(self.features[i] * self.dtypes[i].itemsize for i in members)


@dataclass(frozen=True)
class Strategy:
    """One way to run a group. `serves` says whether it can, for the problem and so many tokens."""

    packed: bool = False
    """One product for each run, and not for each weight."""
    forks: bool = False
    """Products run on several streams."""
    multiply: Multiply = products.multiply
    """Makes each product but those that `gather` makes."""
    gather: Gather | None = None
    """Makes one product for all weights of a dtype that `skinny.takes`, wherever they lie."""
    serves: Callable[[Problem, float], bool] = lambda problem, tokens: True


STRATEGIES: dict[str, Strategy] = {
    "serial": Strategy(),
    "streams": Strategy(forks=True),
    "pack": Strategy(packed=True),
    "pack+streams": Strategy(packed=True, forks=True),
    **{
        f"pack: proposal {which + 1}": Strategy(
            packed=True,
            multiply=functools.partial(proposals.multiply, which),
            serves=functools.partial(proposals.serves, which),
        )
        for which in range(proposals.MOST)
    },
    **{
        f"skinny: {name}": Strategy(
            gather=functools.partial(skinny.multiply, plan, known=True), serves=functools.partial(skinny.serves, plan)
        )
        for name, plan in skinny.PLANS.items()
    },
}


def legal(problem: Problem, tokens: float) -> tuple[str, ...]:
    """The ways that are right for `problem` with up to `tokens` rows, and not the same as one before."""
    return tuple(name for name, strategy in STRATEGIES.items() if _is_legal(strategy, problem, tokens))


def _is_legal(strategy: Strategy, problem: Problem, tokens: float) -> bool:
    if strategy.packed and not problem.has_runs:
        return False
    if strategy.forks and (not any(problem.streams) or (strategy.packed and len(problem.runs) == 1)):
        return False
    return strategy.serves(problem, tokens)


def default(problem: Problem, tokens: float) -> str:
    """The way where nothing is measured: pack up to 4096 tokens if that joins others than float8 weights, else streams
    where they are allowed, else serial."""
    names = legal(problem, tokens)
    joins = any(len(run) > 1 and run[0] < problem.plain for run in problem.runs)
    if "pack" in names and joins and tokens <= PACK_MAX_TOKENS:
        return "pack"
    return "streams" if "streams" in names else "serial"


def fastest(times: Mapping[str, float]) -> str:
    """The way to take, given the microseconds of each: torch's products in turn or packed, and then any without side
    streams, unless others win by more than 2 %."""
    best = min(times, key=times.__getitem__)
    steady = [name for name in times if not STRATEGIES[name].forks]
    plain = [name for name in steady if name in ("serial", "pack")]
    for calmer in filter(None, (plain, steady)):
        calm = min(calmer, key=times.__getitem__)
        if times[calm] <= MARGIN * times[best]:
            return calm
    return best


# -------------------------------------------------------------------------------------------------------------- plans


@dataclass(frozen=True)
class Product:
    """One matrix product: the members whose weights it reads, and the columns it writes of their output.

    `base` is the member that the memory of a run begins with. `gathered`: the weights are read wherever they lie.
    `places` are output, start and stop of each member.
    """

    members: tuple[int, ...]
    base: int
    output: int
    start: int
    stop: int
    gathered: bool
    places: tuple[tuple[int, int, int], ...]

    @functools.cached_property
    def is_parted(self) -> bool:
        """Whether it writes several outputs."""
        return len({output for output, _, _ in self.places}) > 1


Operand = Tensor | list[Tensor]
"""What a product reads: its transposed weight `[K, M]`, a view, or its weights `[M_i, K]` if it is gathered."""


@dataclass(frozen=True)
class Plan:
    """How one problem runs in one way.

    `slots` are the products of each stream, the current one first. `outputs` are dtype and width of each output, and
    `casts` the dtypes that the input is cast to. `alone`: one product makes the only output, without cast or bias.
    """

    strategy: Strategy
    columns: int
    slots: tuple[tuple[Product, ...], ...]
    outputs: tuple[tuple[torch.dtype, int], ...]
    casts: tuple[torch.dtype, ...]
    alone: bool

    def operands(self, weights: Sequence[Tensor]) -> list[list[Operand]]:
        """What each product reads.

        Raises:
            RuntimeError: weights of a run lie in different storages, although their addresses are those of a run.
        """
        return [[_operand(product, self.columns, weights) for product in slot] for slot in self.slots]


def _operand(product: Product, columns: int, weights: Sequence[Tensor]) -> Operand:
    if product.gathered:
        return [weights[i] for i in product.members]
    base = weights[product.base]
    if len(product.members) == 1:
        return base.t()
    return base.as_strided((columns, product.stop - product.start), (1, columns), base.storage_offset())


@functools.lru_cache(maxsize=4096)
def plan_of(name: str, problem: Problem) -> Plan:
    """The plan of the way `name`."""
    strategy = STRATEGIES[name]
    units = _units(strategy, problem)
    slots = [[*units]] if not strategy.forks else _spread(problem, units, by_owner=not strategy.packed)
    dtypes = dict.fromkeys(problem.dtypes[: problem.plain])
    places, outputs = _columns(problem)
    made = tuple(tuple(_product(strategy, problem, unit, places) for unit in slot) for slot in slots)
    casts = tuple(dtype for dtype in dtypes if dtype != problem.x)
    alone = (
        len(units) == 1 and not casts and not any(problem.biased) and not any(problem.wide) and strategy.gather is None
    )
    return Plan(strategy, problem.columns, made, outputs, casts, alone)


def _units(strategy: Strategy, problem: Problem) -> tuple[tuple[int, ...], ...]:
    """The members of each product."""
    if strategy.packed:
        return problem.runs
    if strategy.gather is None:
        return tuple((i,) for i in range(len(problem.features)))
    alike: defaultdict[Hashable, list[int]] = defaultdict(list)
    for i in range(len(problem.features)):
        dtype = skinny.joined_type(problem, i)
        alike[i if dtype is None else dtype].append(i)
    return tuple(map(tuple, alike.values()))


def _columns(problem: Problem) -> tuple[list[tuple[int, int, int]], tuple[tuple[torch.dtype, int], ...]]:
    """Output, first column and last of each member, and dtype and width of each output.

    Members of one kind are side by side in an output; float8 weights in one of their own for each dtype of results.
    """
    widths: dict[Kind, int] = {}
    places = []
    for i, features in enumerate(problem.features[: problem.plain]):
        start = widths.setdefault(problem.kind(i), 0)
        widths[problem.kind(i)] = start + features
        places.append(([*widths].index(problem.kind(i)), start, start + features))
    outputs = [(torch.float32 if wide else dtype, width) for (dtype, wide), width in widths.items()]
    of_low: dict[torch.dtype, int] = {}
    for low, features in zip(problem.scaled, problem.features[problem.plain :], strict=True):
        start = of_low.setdefault(low.dtype, 0)
        of_low[low.dtype] = start + features
        places.append((len(outputs) + [*of_low].index(low.dtype), start, start + features))
    return places, (*outputs, *of_low.items())


def _product(
    strategy: Strategy, problem: Problem, members: tuple[int, ...], places: Sequence[tuple[int, int, int]]
) -> Product:
    base = next((i for i in members if problem.features[i]), members[0])
    own = tuple(places[i] for i in members)
    output, start, _ = own[0]
    stop = start + sum(stop - start for _, start, stop in own)
    gathered = strategy.gather is not None and skinny.takes(problem.dtypes[members[0]])
    return Product(members, base, output, start, stop, gathered, own)


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


def one_launch(plan: Plan) -> tuple[skinny.Plan, list[tuple[int, int, int]]] | None:
    """Where one launch of the skinny product is all that `plan` does: its plan, and of each weight the output, and the
    first and last column there. Else None."""
    if plan.casts or len(plan.slots) != 1 or len(plan.slots[0]) != 1:
        return None
    (product,) = plan.slots[0]
    gather = plan.strategy.gather
    if not product.gathered or gather is None or product.members != tuple(range(len(product.members))):
        return None
    return gather.args[0], list(product.places)


def one_proposal(plan: Plan) -> int | None:
    """The number of the proposal where one such product is all that `plan` does, else None."""
    multiply = plan.strategy.multiply
    if plan.alone and isinstance(multiply, functools.partial) and multiply.func is proposals.multiply:
        return int(multiply.args[0])
    return None


# ---------------------------------------------------------------------------------------------------------- execution


def execute(
    plan: Plan,
    rows: Tensor,
    operands: Sequence[Sequence[Operand]],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    outputs: Sequence[Tensor],
    casts: Mapping[torch.dtype, Tensor],
    scaled: Sequence[Scaled] = (),
) -> None:
    """Runs `plan`; what follows on the current stream comes after all of it.

    Everything but joined biases and scales is allocated by the caller, before the fork and on the current stream: the
    caching allocator then knows it as memory of that stream, in a capture as well, and a late reader cannot meet it
    reused by a side stream.

    Args:
        rows: `[N, K]`.
        operands: `plan.operands(weights)`.
        outputs: `[N, M]` for each of `plan.outputs`, to be filled.
        casts: `[N, K]` for each of `plan.casts`, to be filled with `rows`.
        scaled: what the float8 weights, which are the last ones, are multiplied by.
    """
    for cast in casts.values():
        cast.copy_(rows)
    work = [
        [
            _task(plan.strategy, product, operand, rows, weights, biases, outputs, casts, scaled)
            for product, operand in zip(*slot, strict=True)
        ]
        for slot in zip(plan.slots, operands, strict=True)
    ]
    main, *sides = [functools.partial(_run_all, tasks) if tasks else None for tasks in work]
    if not any(sides):
        _run_all(work[0])
        return
    low = [tensor for given in scaled for tensor in (given.rows, given.of_rows, given.of_weight)]
    auxiliary.execute_in_parallel(main or _nothing, sides, rows.device, inputs=(rows, *casts.values(), *low))


def _task(
    strategy: Strategy,
    product: Product,
    operand: Operand,
    rows: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    outputs: Sequence[Tensor],
    casts: Mapping[torch.dtype, Tensor],
    scaled: Sequence[Scaled],
) -> Callable[[], Any]:
    """Makes one product."""
    output = outputs[product.output]
    members = product.members
    plain = len(weights) - len(scaled)
    if members[0] >= plain:
        assert isinstance(operand, Tensor)
        output = output[:, product.start : product.stop]
        if len(members) > 1:
            together = [scaled[i - plain] for i in members]
            return functools.partial(products.multiply_scaled_together, together, operand, output)
        given = scaled[members[0] - plain]
        return functools.partial(products.multiply_scaled, given, operand, biases[members[0]], output)
    dtype = weights[members[0]].dtype
    cast = casts.get(dtype, rows)
    if not product.is_parted and product.stop - product.start < output.shape[1]:
        output = output[:, product.start : product.stop]
    if isinstance(operand, list):
        assert strategy.gather is not None
        gather = functools.partial(strategy.gather, cast, operand, [biases[i] for i in members])
        if not product.is_parted:
            return functools.partial(gather, output)
        each = [outputs[i][:, start:stop] for i, start, stop in product.places]
        return functools.partial(gather, each, scaled=[scaled[i - plain] for i in members if i >= plain])
    bias = biases[members[0]]
    if len(members) > 1:
        bias = products.joined([biases[i] for i in members], [weights[i] for i in members])
    if output.dtype != dtype:
        return functools.partial(products.multiply_wide, cast, operand, bias, output)
    return functools.partial(strategy.multiply, cast, operand, bias, output)


def _run_all(tasks: Iterable[Callable[[], Any]]) -> None:
    for task in tasks:
        task()


def _nothing() -> None:
    pass
