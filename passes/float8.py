"""float8 products beside the linears of a group: `torch._scaled_mm` of what their activation was quantised to.

        x ──┬──► mm(W_0)                                x ──┬──► quantise ──┐
            ├──► mm(W_1)                        ──►         └───────────► dsv4.mixed_linear(x, [W_0, W_1], x8, [V_0])
            └──► quantise ──► _scaled_mm(V_0)

How x is quantised does not matter: the nodes between are moved in front of the group as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from dsv4_compile.passes import hoisting
from dsv4_compile.passes.emission import call, reshape_rows
from dsv4_compile.passes.region import are, aten, count, leaf_of, packet, shape, turns, value
from dsv4_compile.passes.sites import module_path
from dsv4_compile.passes.storages import arguments

__all__ = [
    "ScaledProduct",
    "apart",
    "beside",
    "is_scaled",
    "operands",
    "packable",
    "parse",
    "share_inputs",
    "side_by_side",
    "unpacked",
]

FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class ScaledProduct:
    """`dtype`: of the result. `turned`: the weight is stored as `[M, K]`, `weight` is that.

    Input and scales are those that the node has now: what makes them may have been replaced since it was found.
    """

    node: Node
    weight: Node
    turned: bool
    bias: Node | None
    fast: bool

    @property
    def input(self) -> Node:
        return self._given("self")

    @property
    def input_scale(self) -> Node:
        return self._given("scale_a")

    @property
    def weight_scale(self) -> Node:
        return self._given("scale_b")

    @property
    def features(self) -> int:
        return int((shape(self.node) or (0,))[-1])

    @property
    def columns(self) -> int:
        return int((shape(self.input) or (0,))[-1])

    @property
    def dtype(self) -> torch.dtype:
        return value(self.node).dtype

    @property
    def owner(self) -> str:
        """Path of the module that owns the product."""
        return module_path(self.node).rpartition(".")[0]

    @property
    def operands(self) -> tuple[Node, ...]:
        """All nodes that it reads."""
        bias = () if self.bias is None else (self.bias,)
        return (self.input, self.weight, self.input_scale, self.weight_scale, *bias)

    def _given(self, name: str) -> Node:
        node: Node = arguments(self.node)[name]
        return node

    def as_weight(self, graph: Graph) -> Node:
        """The weight as `[M, K]`, at the insertion point."""
        return self.weight if self.turned else call(graph, aten.permute.default, (self.weight, [1, 0]))

    def put(self, graph: Graph, output: Node) -> Node:
        """Lets `output` `[..., M]` stand for the product; returns what does so."""
        with graph.inserting_before(self.node):
            made = reshape_rows(graph, output, shape(self.node) or ())
        self.node.replace_all_uses_with(made)
        graph.erase_node(self.node)
        return made


def is_scaled(node: Node) -> bool:
    """Whether it is a float8 product of torch's."""
    return packet(node) is aten._scaled_mm


def parse(node: Node) -> ScaledProduct | str:
    """The product, or why it is left alone, as the end of a sentence."""
    given = arguments(node)
    rows, weight = given["self"], given["mat2"]
    scales = given["scale_a"], given["scale_b"]
    bias, dtype = given.get("bias"), value(node).dtype
    inner, features = shape(weight) or (None, None)
    if {value(rows).dtype, value(weight).dtype} != {FLOAT8}:
        return f"its operands are {_brief(value(rows).dtype)} and {_brief(value(weight).dtype)}"
    if leaf_of(weight) is None or not isinstance(inner, int) or not isinstance(features, int):
        return "its weight is computed, not a parameter"
    if value(weight).stride() != (1, inner):
        return "its weight is not stored by columns"
    if given.get("scale_result") is not None:
        return "its result is scaled"
    if not _are_scales(scales, features):
        return "its scales are by blocks, and one launch would have to add up block by block"
    if bias is not None and (
        leaf_of(bias) is None or value(bias).dtype != dtype or not are(shape(bias) or (), (features,))
    ):
        return "its bias is computed or of another dtype"
    turned = turns(weight)
    return ScaledProduct(node, weight.args[0] if turned else weight, turned, bias, bool(given.get("use_fast_accum")))


def _are_scales(scales: tuple[Node, Node], features: int) -> bool:
    """Whether they are one number each, or one for each row of the input and each of the weight."""
    of_rows, of_weight = (shape(scale) or () for scale in scales)
    if any(value(scale).dtype != torch.float32 for scale in scales):
        return False
    if count(of_rows) == count(of_weight) == 1:
        return True
    return len(of_rows) == 2 and are(of_rows[1:], (1,)) and are(of_weight, (1, features))


def beside(
    graph: Graph, groups: Mapping[Node, Sequence[Node]]
) -> tuple[dict[Node, list[ScaledProduct]], list[tuple[Node, str]]]:
    """The float8 products of each activation, and those that are left alone, with the reason.

    Args:
        groups: for each activation the products that read it itself.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    found: dict[Node, list[ScaledProduct]] = {}
    refused = []
    for node in filter(is_scaled, graph.nodes):
        x = hoisting.activation([node.args[0]], groups, _is_product)
        if x is None:
            continue
        product = parse(node)
        reason = product if isinstance(product, str) else _obstacle(product, x, groups[x], found.get(x, []), order)
        if isinstance(product, ScaledProduct) and reason is None:
            found.setdefault(x, []).append(product)
        else:
            refused.append((node, f"a quantised product (_scaled_mm) keeps its own kernel: {reason}"))
    return found, refused


def _is_product(node: Node) -> bool:
    return packet(node) in hoisting.PRODUCTS


def _obstacle(
    product: ScaledProduct,
    x: Node,
    linears: Sequence[Node],
    others: Sequence[ScaledProduct],
    order: Mapping[Node, int],
) -> str | None:
    """Why `product` cannot run with the products `linears` and `others` of the activation `x`, or None."""
    if leaf_of(product.weight, {x}) is None:
        return "its weight is computed, not a parameter"
    own, of_x = shape(product.input) or (), shape(x) or ()
    if str(own[-1]) != str(of_x[-1]) or str(own[0]) != str(math.prod(of_x[:-1])):
        return "its input has other rows than the activation"
    if others and others[0].dtype != product.dtype:
        return "its result has another dtype than the first"
    return hoisting.obstacle([*others, product], x, linears, order)


def apart(products: Sequence[ScaledProduct], others: Iterable[torch.dtype]) -> str:
    """Why no launch has `products` and weights of the dtypes `others`, as the end of a sentence; empty if one may."""
    first = next((dtype for dtype in others if dtype in (torch.bfloat16, torch.float16)), None)
    dtype = products[0].dtype
    if first is None:
        return ", apart from the others, of which none is bfloat16 or float16"
    if dtype != first and (dtype != torch.float32 or any(product.bias is not None for product in products)):
        return f", apart from the others, because their results are {_brief(dtype)}"
    return (
        "" if products[0].columns % 16 == 0 else ", apart from the others, because their columns are no multiple of 16"
    )


def packable(products: Sequence[ScaledProduct], same: Mapping[Node, Node] | None = None) -> list[list[ScaledProduct]]:
    """Those of one input, two or more, whose weights can be laid one behind the other for one product of all: with one
    scale together, or with one for each row.

    Args:
        same: for inputs and their scales the node that counts in their place.
    """
    same = same or {}
    found: dict[tuple[Node, ...], dict[Node, ScaledProduct]] = {}
    for product in products:
        if _unfit(product) is None:
            by_tensor = count(shape(product.weight_scale) or ()) == 1
            given = [same.get(node, node) for node in (product.input, product.input_scale)]
            key = *given, *([product.weight_scale] if by_tensor else [])
            # A weight that several of them read lies in one place.
            found.setdefault(key, {}).setdefault(product.weight, product)
    return [list(weights.values()) for weights in found.values() if len(weights) > 1]


def _unfit(product: ScaledProduct) -> str | None:
    """Why it is a product of its own wherever its weight lies, or None."""
    if product.weight.op != "placeholder" or not product.turned or not value(product.weight).is_contiguous():
        return "a weight is stored by columns, or a part of another tensor"
    if product.bias is not None:
        return "one has a bias"
    return None if product.dtype == torch.bfloat16 else f"their results are {_brief(product.dtype)}"


def unpacked(products: Sequence[ScaledProduct], x: Node) -> str | None:
    """Why not all of `products` are one where they are packed, or None."""
    together = packable(products, _alike(products, x)) if len(products) > 1 else []
    if len(products) < 2 or (together and len(together[0]) == len(products)):
        return None
    return next(filter(None, map(_unfit, products)), "their inputs or their scales differ")


def side_by_side(products: Sequence[ScaledProduct]) -> tuple[ScaledProduct, ...]:
    """`products`, those that are packed together one behind the other."""
    together = {product: found for found in packable(products) for product in found}
    return tuple(dict.fromkeys(one for product in products for one in together.get(product, [product])))


def share_inputs(products: Sequence[ScaledProduct], x: Node) -> None:
    """Lets `products` read one input where they read several that are computed from `x` alike."""
    same = _alike(products, x)
    for product in products:
        for operand in (product.input, product.input_scale):
            if same[operand] is not operand:
                product.node.replace_input_with(operand, same[operand])
                _erase_unused(operand)


def _alike(products: Sequence[ScaledProduct], x: Node) -> dict[Node, Node]:
    """For each input and its scale the first one that is computed from `x` in the same way."""
    return hoisting.alike([node for product in products for node in (product.input, product.input_scale)], x)


def _erase_unused(node: Node) -> None:
    if not node.users and node.op == "call_function":
        inputs = node.all_input_nodes
        node.graph.erase_node(node)
        for one in inputs:
            _erase_unused(one)


def operands(graph: Graph, products: Sequence[ScaledProduct]) -> tuple[Any, ...]:
    """The arguments of `mixed_linear` from `inputs` to `fast`, at the insertion point."""
    return (
        [product.input for product in products],
        [product.as_weight(graph) for product in products],
        [product.bias for product in products],
        [product.input_scale for product in products],
        [product.weight_scale for product in products],
        products[0].dtype,
        all(product.fast for product in products),
    )


def _brief(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
