"""Which stream each product of a group runs on, where the products of a group run on several streams."""

from __future__ import annotations

from collections import defaultdict

from dsv4_compile.passes import opaque
from dsv4_compile.passes.linears import Group

__all__ = ["assigned"]


def assigned(group: Group, count: int) -> list[int]:
    """Stream of each product of ours: 0 for those that stay on the main stream.

    Linears of one owner belong together (their results meet soonest). The owner of the heaviest linear, the earlier
    one of equals, stays on the main stream; the others go to the auxiliary streams, heaviest first, each to the
    stream with least work. Other people's operators are on one of them before.
    """
    owners = [product.owner for product in group.products]
    if len(set(owners)) == 1:
        owners = [str(i) for i in range(len(owners))]
    weight = [2 * linear.features for linear in group.linears] + [product.features for product in group.low]
    main = owners[max(range(len(weight)), key=lambda i: (weight[i], -i))]
    total: dict[str, int] = defaultdict(int)
    for owner, features in zip(owners, weight, strict=True):
        total[owner] += features
    load = [0.0] * count
    if group.side:
        load[opaque.STREAM - 1] = sum(product.bytes for product in group.side) / max(1, group.columns)
    slot = {main: 0}
    for owner in sorted((o for o in total if o != main), key=lambda o: -total[o]):
        if not count:
            slot[owner] = 0
            continue
        least = load.index(min(load))
        load[least] += total[owner]
        slot[owner] = least + 1
    return [slot[owner] for owner in owners]
