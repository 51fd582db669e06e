"""Results whose strides have changed: what reads them must not notice.

A packed product gives each linear its columns of a wider matrix, where the graph had a matrix of its own:

    mm ──► view                           packed_linear ──► slice ──► reshape
    mm ──► view ──► output         ──►    packed_linear ──► slice ──► clone ──► view ──► output

A `view` of such columns may not exist, so it becomes a `reshape`. Where a reader may depend on the strides (somebody
behind the graph, an operator of somebody else, one that reinterprets memory), the columns are copied to what was there.
Beyond the views nothing changes: operators choose the strides of a new tensor by the order of those they read.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from dsv4_compile.passes.emission import call, renew
from dsv4_compile.passes.region import CUT, RESHAPE, VIEW, aten, packet, packets, value

__all__ = ["with_new_strides"]

_FOLLOWED = VIEW | CUT | {aten.permute, aten.transpose, aten.t, aten.expand}
_STRIDES = packets(
    "slice_scatter select_scatter diagonal_scatter as_strided_scatter as_strided_copy view_copy copy"
    " _reshape_alias_copy unfold_copy _scaled_mm _scaled_mm_v2 _scaled_grouped_mm _scaled_grouped_mm_v2"
)
"""Operators that read the strides of their first argument, or give their result the same, or want contiguous scales."""
_ALIGNMENT = 16
"""Bytes at which kernels of these families want a row to begin; memory of a tensor of its own always does."""
_ALIGNED = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_grouped_mm", "_scaled")


def with_new_strides(graph: Graph, node: Node) -> None:
    """Makes the readers of `node`, which were written for a contiguous tensor, right for the strides that it has."""
    readers = list(_readers(node))
    aligned = _is_aligned(value(node))
    if any(_depends_on_strides(reader, aligned) for reader in readers):
        with graph.inserting_after(node):
            copied = call(graph, aten.clone.default, (node,), like=node, memory_format=torch.contiguous_format)
        node.replace_all_uses_with(copied, delete_user_cb=lambda user: user is not copied)
        return
    for reader in readers:
        if packet(reader) in RESHAPE:
            reader.target = aten.reshape.default
        if _is_followed(reader):
            renew(reader)


def _readers(node: Node) -> Iterator[Node]:
    """Everything that reads the memory of `node`, itself or through views."""
    seen: set[Node] = set()
    rest = [node]
    while rest:
        for user in rest.pop().users:
            if user not in seen:
                seen.add(user)
                yield user
                if _is_followed(user):
                    rest.append(user)


def _is_followed(reader: Node) -> bool:
    return packet(reader) in _FOLLOWED or reader.target is operator.getitem


def _depends_on_strides(reader: Node, aligned: bool) -> bool:
    target: Any = reader.target
    if _is_followed(reader) and target is not aten.view.dtype:
        return False
    if not isinstance(target, torch._ops.OpOverload):
        return True
    if packet(reader) in _STRIDES:
        return True
    if torch.Tag.flexible_layout in target.tags:
        return False
    if target.namespace not in ("aten", "prims") or any(r.alias_info is not None for r in target._schema.returns):
        return target is not aten.copy_.default
    return not aligned and target._schema.name.removeprefix("aten::").startswith(_ALIGNED)


def _is_aligned(fake: torch.Tensor) -> bool:
    """Whether every row begins where kernels like it. A symbolic stride is a multiple of those that are not."""
    steps = [fake.storage_offset(), *(stride for stride in fake.stride() if stride != 1)]
    return all(step * fake.element_size() % _ALIGNMENT == 0 for step in steps if isinstance(step, int))
