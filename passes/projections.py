"""The projections pass: linears that read one activation run together.

        x ──► view ─► mm(W_0)                  x ──► dsv4.packed_linear(x, [W_0, W_1, W_2]) ──► slices
        ├──► view ─► mm(W_1)         ──►       or    dsv4.parallel_linear(x, [...], streams=[0, 0, 1])
        └──► cast ─► mm(W_2)                   or    dsv4.grouped_linear(x, [...], streams=[...]) ──► slices
                                               or    dsv4.mixed_linear(x, [...], ..., [x8], [V_0]) (passes/float8.py)
                                               or    one of them within dsv4.accompanied_linear    (passes/opaque.py)

What a group is: `linears.py`.

`auto` on CUDA emits `grouped_linear`, which chooses by measurement when called (`kernels/linear/tuning.py`); with
`DSV4_MEASURE=0` it follows a rule.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from dsv4_compile.kernels.environment import word
from dsv4_compile.passes import float8, hoisting, opaque
from dsv4_compile.passes.assignment import assigned
from dsv4_compile.passes.emission import call, item, reshape_rows
from dsv4_compile.passes.float8 import ScaledProduct
from dsv4_compile.passes.layout import with_new_strides
from dsv4_compile.passes.linears import Group, Linear, find, left_alone, operands
from dsv4_compile.passes.opaque import OpaqueProduct
from dsv4_compile.passes.region import RESHAPE, VIEW, aten, packet, shape, turns, value
from dsv4_compile.passes.sites import LinearInfo, Missed, PassResult, ProjectionGroup, module_path, source_location
from dsv4_compile.passes.verify import MAIN_STREAM_ONLY

__all__ = ["ProjectionsPass"]

# Packing pays while one product does not fill the card by itself (a few thousand rows).
_PACK_MAX_TOKENS = 4096


@dataclass
class ProjectionsPass:
    """Runs the linears of one activation together.

    Args:
        strategy: value of the option `projections`.
        num_streams: auxiliary streams per device.
        stream_max_tokens: above this many rows nothing leaves the main stream.
        pack: whether somebody lays the weights of a packed group side by side afterwards.
        apart: qualified names of operators that stay by themselves, as the option `split_ops` has them.
    """

    strategy: str = "auto"
    num_streams: int = 3
    stream_max_tokens: int = 1024
    pack: bool = True
    apart: tuple[str, ...] = ()
    name: str = field(default="projections", init=False)

    def __call__(self, graph: Graph) -> PassResult:
        order = {node: i for i, node in enumerate(graph.nodes)}
        groups, missed = find(graph, self._stay)
        inputs = {n: _position(n, i) for i, n in enumerate(n for n in graph.nodes if n.op == "placeholder")}
        done, packs = [], []
        moved: dict[Node, Node] = {}
        for group in groups:
            # The activation may itself have been the result of a linear of an earlier group.
            group = replace(group, x=moved.get(group.x, group.x))
            group, strategy, reason, left = self._settled(graph, group)
            missed += left
            if len(group.members) < 2:
                continue
            if strategy == "measured" and group.low:
                float8.share_inputs(group.low, group.x)
                group = replace(group, low=float8.side_by_side(group.low))
            streams = assigned(group, self.num_streams)
            alike: list[Sequence[Linear | ScaledProduct]] = []
            if strategy == "measured":
                alike = _packable(group) if self.pack else []
                moved |= _measured(graph, group, order, streams, self.stream_max_tokens, self.pack)
            elif strategy == "pack":
                alike = [group.linears]
                moved |= _pack(graph, group, order)
            elif strategy == "streams" or self.strategy != "auto":
                slots = streams if strategy == "streams" else [0] * len(streams)
                moved |= _spread(graph, group, order, slots, self.stream_max_tokens)
            packs += [tuple(inputs[linear.weight] for linear in linears) for linears in alike]
            done.append(_report(group, strategy, reason, streams, len(alike)))
        return PassResult(projections=tuple(done), missed=tuple(missed), packs=tuple(packs))

    def _settled(self, graph: Graph, group: Group) -> tuple[Group, str, str, list[Missed]]:
        """What of the group runs together, (strategy, reason in words), and what is left alone and missed."""
        strategy, reason = self._choose(group)
        # Where each runs by itself anyway, nobody misses those that do.
        is_missed = strategy != "serial" or self.strategy == "pack"
        missed = [*group.refused] if self._has_streams and self._is_wanted else []
        while True:
            found, left = self._allowed(graph, group, strategy)
            if found == group or len(found.members) < 2:
                return found, strategy, reason, missed + left if is_missed else []
            # With fewer members another strategy may be possible, which others of them may not be.
            group, missed = found, missed + left
            strategy, reason = self._choose(group)

    def _allowed(self, graph: Graph, group: Group, strategy: str) -> tuple[Group, list[Missed]]:
        """What of the group can run in this way, and why the rest of it is left alone."""
        missed = []
        if strategy != "measured" and any(linear.wide for linear in group.linears):
            left = "its result is float32, which only a measured group has beside others"
            missed += [left_alone(linear.node, left) for linear in group.linears if linear.wide]
            group = replace(group, linears=tuple(linear for linear in group.linears if not linear.wide))
        linears = [linear.node for linear in group.linears]
        why = hoisting.lost(graph, group.low, linears)
        if group.low and (why is not None or strategy != "measured"):
            low, group = group.low, replace(group, low=())
            found = [] if why is not None or strategy != "streams" else [opaque.parse(p.node, self._stay) for p in low]
            side = [product for product in found if isinstance(product, OpaqueProduct)]
            group = replace(group, side=tuple(sorted((*group.side, *side), key=lambda product: product.node)))
            left = f"a quantised product (_scaled_mm) keeps its own kernel: {why or 'nothing is measured'}"
            taken = {product.node for product in side}
            missed += [left_alone(product.node, left) for product in low if product.node not in taken]
        if group.side and (why := self._keeps(graph, group, strategy)) is not None:
            # Whoever has not asked for it misses torch's own products only.
            own = [product for product in group.side if self._is_wanted or float8.is_scaled(product.node)]
            if self._has_streams and not self._is_above(group):
                missed += [left_alone(product.node, opaque.left(product.node, why)) for product in own]
            group = replace(group, side=())
        return group, missed

    def _keeps(self, graph: Graph, group: Group, strategy: str) -> str | None:
        """Why the operators beside the group stay where they are, or None."""
        if not self._has_streams:
            return "there are no side streams"
        if self._is_above(group):
            return f"above {self.stream_max_tokens} tokens nothing leaves the main stream"
        if not self._is_wanted:
            return "beside others it runs with projections='streams' or DSV4_BESIDE=1 only, which is not measured"
        if strategy not in ("measured", "streams"):
            return f"it runs beside others on side streams only, and the strategy is {strategy}"
        if not group.linears:
            return "no linear is left that it could run beside"
        return hoisting.lost(graph, [*group.low, *group.side], [linear.node for linear in group.linears])

    @property
    def _has_streams(self) -> bool:
        return self.num_streams > 0 and self.stream_max_tokens > 0

    @property
    def _stay(self) -> list[str]:
        """Qualified names of operators that somebody wants to see in the graph."""
        return [*self.apart, *opaque.wanted_apart()]

    @property
    def _is_wanted(self) -> bool:
        """Whether operators of others may run beside a group, which nobody has measured."""
        return self.strategy != "auto" or word("DSV4_BESIDE") == "1"

    def _is_above(self, group: Group) -> bool:
        tokens = _tokens(group.x)
        return tokens is not None and tokens > self.stream_max_tokens

    def uuid(self) -> str:
        settings = (self.name, self.strategy, self.num_streams, self.stream_max_tokens, self.pack, _measures())
        stay = (self._is_wanted, *self.apart, "|", *opaque.wanted_apart(), "|", *sorted(MAIN_STREAM_ONLY))
        return ":".join(map(str, (*settings, *stay)))

    def _choose(self, group: Group) -> tuple[str, str]:
        """(strategy, reason in words)."""
        device = _device_type(group)
        if self.strategy == "pack":
            obstacle = _pack_obstacle(group.linears) if self.pack else "the parameters are not at hand in this hook"
            return ("pack", "asked for") if obstacle is None else ("serial", f"cannot be packed: {obstacle}")
        if self.strategy == "streams":
            if device != "cuda":
                return "streams", f"asked for; on {device} there are no streams, so the branches run in turn"
            return "streams", f"asked for; up to {self.stream_max_tokens} tokens on side streams{self._beside(group)}"
        if self.strategy == "serial":
            return "serial", "asked for"
        if device != "cuda":
            return "serial", f"on {device} one product after the other is as fast, so they stay as they are"
        if _measures() and not any(map(_depends_on_data, group.linears)):
            beside = ""
            if group.low:
                others = [value(linear.weight).dtype for linear in group.linears]
                beside = f", with {len(group.low)} float8 products{float8.apart(group.low, others)}"
            when = "for each range of token counts at the first call there"
            return "measured", f"measured {when}{beside}{self._apart(group)}{self._beside(group)}"
        obstacle = _pack_obstacle(group.linears) if self.pack else "the parameters are not at hand in this hook"
        tokens = _tokens(group.x)
        if obstacle is None and (tokens is None or tokens <= _PACK_MAX_TOKENS):
            return "pack", "one product reads all weights (the rule: nothing is measured)"
        if self.num_streams and (tokens is None or tokens <= self.stream_max_tokens):
            why = f"cannot be packed: {obstacle}" if obstacle else "the rule: nothing is measured"
            return "streams", f"{why}{self._beside(group)}"
        return "serial", f"{tokens} tokens: each product fills the card by itself"

    def _beside(self, group: Group) -> str:
        """Which operators run beside the group, as the end of a sentence."""
        names = ", ".join(dict.fromkeys(product.name for product in group.side))
        upto = f"up to {self.stream_max_tokens} tokens on side stream {opaque.STREAM}"
        return f"; beside it {names} {upto}, not measured" if names else ""

    def _apart(self, group: Group) -> str:
        """Which weights cannot be packed, as the end of a sentence."""
        if not self.pack:
            return "; not packed, the parameters are not at hand in this hook"
        reasons = [_pack_obstacle(linears) for linears in _by_dtype(group) if len(linears) > 1]
        if (why := float8.unpacked(group.low, group.x)) is not None:
            reasons.append(f"float8 weights: {why}")
        return "".join(f"; not packed: {reason}" for reason in dict.fromkeys(reasons) if reason is not None)


def _measures() -> bool:
    """Whether `auto` is the choice by measurement; `DSV4_MEASURE=0` makes it a rule."""
    return word("DSV4_MEASURE") == "1"


def _device_type(group: Group) -> str:
    return str(value(group.x).device.type)


def _position(node: Node, index: int) -> int:
    """Which input of Dynamo's graph an input is: AOTAutograd merges inputs that share memory, and says so."""
    return int(getattr(node.meta.get("desc"), "idx", index))


def _tokens(x: Node) -> int | None:
    """Rows of the activation, or None when symbolic."""
    lead = [d for d in (shape(x) or ())[:-1] if isinstance(d, int)]
    return math.prod(lead) if len(lead) == len(shape(x) or ()) - 1 else None


def _by_dtype(group: Group) -> list[list[Linear]]:
    """The linears of each dtype, in order of first appearance: those that one product can serve."""
    alike: dict[tuple[torch.dtype, bool], list[Linear]] = defaultdict(list)
    for linear in group.linears:
        alike[value(linear.weight).dtype, linear.wide].append(linear)
    return list(alike.values())


def _packable(group: Group) -> list[Sequence[Linear | ScaledProduct]]:
    """The layers whose weights can be laid one behind the other: those of each dtype, and of each float8 input."""
    plain = [linears for linears in _by_dtype(group) if len(linears) > 1 and _pack_obstacle(linears) is None]
    return [*plain, *float8.packable(group.low)]


def _pack_obstacle(linears: Sequence[Linear]) -> str | None:
    weights = [linear.weight for linear in linears]
    if any(_depends_on_data(linear) for linear in linears):
        return "the number of rows depends on data"
    if any(w.op != "placeholder" for w in weights):
        return "a weight is cast, stored transposed or a part of another tensor"
    if not all(turns(operands(linear.node)[2]) for linear in linears):
        return "a weight is stored transposed"
    if len(set(weights)) < len(weights):
        return "two of them share one weight"
    if len({value(w).dtype for w in weights}) > 1:
        return "their dtypes differ"
    if any(not value(w).is_contiguous() for w in weights):
        return "a weight is not contiguous"
    return None


def _depends_on_data(linear: Linear) -> bool:
    """Whether it has an unbacked number of rows. Inductor reads columns of a wider matrix wrongly then."""
    return bool(free_unbacked_symbols(value(linear.node)))


def _spread(
    graph: Graph, group: Group, order: dict[Node, int], streams: list[int], max_tokens: int
) -> dict[Node, Node]:
    """Emits one `parallel_linear`; returns what stands for each product now."""
    first = _prepared(graph, group, order)
    with graph.inserting_before(first):
        weights = [_as_weight(graph, linear) for linear in group.linears]
        biases = [linear.bias for linear in group.linears]
        target = torch.ops.dsv4.parallel_linear.default
        args = (group.x, weights, biases, streams, max_tokens)
        made = opaque.emit(graph, target, args, len(weights), group.side, max_tokens, first)
        outputs = [item(graph, made, i) for i in range(len(weights))]
    return _replace(graph, group, outputs) | opaque.put(graph, made, group.side)


def _pack(graph: Graph, group: Group, order: dict[Node, int]) -> dict[Node, Node]:
    """Emits one `packed_linear`; returns what stands for each product now."""
    first = _insertion_point(group, order)
    with graph.inserting_before(first):
        weights = [linear.weight for linear in group.linears]
        biases = [linear.bias for linear in group.linears]
        made = call(graph, torch.ops.dsv4.packed_linear.default, (group.x, weights, biases), like=first)
        outputs = _slices(graph, made, group.linears)
    return _replace(graph, group, [outputs[linear.node] for linear in group.linears])


def _measured(
    graph: Graph, group: Group, order: dict[Node, int], streams: list[int], max_tokens: int, pack: bool
) -> dict[Node, Node]:
    """Emits one `grouped_linear`; returns what stands for each product now."""
    first = _prepared(graph, group, order)
    kinds = _by_dtype(group)
    with graph.inserting_before(first):
        weights = [_as_weight(graph, linear) for linear in group.linears]
        biases = [linear.bias for linear in group.linears]
        flags = [linear.wide for linear in group.linears]
        target, args = torch.ops.dsv4.grouped_linear.default, (group.x, weights, biases, streams)
        if group.low:
            target, args = torch.ops.dsv4.mixed_linear.default, (*args, *float8.operands(graph, group.low))
        args = (*args, max_tokens, pack, *([flags] if any(flags) else []))
        joint: list[Sequence[Linear | ScaledProduct]] = [*kinds, *([group.low] if group.low else [])]
        made = opaque.emit(graph, target, args, len(joint), group.side, max_tokens, first)
        outputs: dict[Node, Node] = {}
        for i, linears in enumerate(joint):
            outputs |= _slices(graph, item(graph, made, i), linears)
    moved = _replace(graph, group, [outputs[linear.node] for linear in group.linears])
    for product in group.low:
        moved[product.node] = product.put(graph, outputs[product.node])
        if len(group.low) > 1:
            with_new_strides(graph, moved[product.node])
    return moved | opaque.put(graph, made, group.side)


def _slices(graph: Graph, made: Node, linears: Sequence[Linear | ScaledProduct]) -> dict[Node, Node]:
    """The columns of each of `linears` in their joint result."""
    if len(linears) == 1:
        return {linears[0].node: made}
    outputs, start = {}, 0
    for linear in linears:
        stop = start + linear.features
        outputs[linear.node] = call(graph, aten.slice.Tensor, (made, -1, start, stop), like=linear.node)
        start = stop
    return outputs


def _prepared(graph: Graph, group: Group, order: dict[Node, int]) -> Node:
    """The insertion point, in front of which everything is made that the group reads."""
    first = _insertion_point(group, order)
    if group.low or group.side:
        hoisting.hoist(graph, first, [*group.low, *group.side])
        # Members of later groups may have been moved, and what they read with them.
        order |= {node: i for i, node in enumerate(graph.nodes)}
    return first


def _insertion_point(group: Group, order: dict[Node, int]) -> Node:
    """The first member, or a later place where every weight has been made (casts and views of parameters)."""
    first = min((member.node for member in group.members), key=order.__getitem__)
    for linear in group.linears:
        for needed in _weight_nodes(linear):
            if needed.op != "placeholder" and order[needed] > order[first]:
                first.prepend(needed)
    return first


def _weight_nodes(linear: Linear) -> Iterator[Node]:
    """The chain from the parameter to the weight operand, top first, and the bias."""
    chain: list[Node] = []
    node = operands(linear.node)[2]
    while node.op == "call_function":
        chain.insert(0, node)
        node = node.all_input_nodes[0]
    yield node
    yield from chain
    if linear.bias is not None:
        yield linear.bias


def _as_weight(graph: Graph, linear: Linear) -> Node:
    operand = operands(linear.node)[2]
    if linear.weight is not operand:
        return linear.weight
    return call(graph, aten.permute.default, (operand, [1, 0]))


def _replace(graph: Graph, group: Group, outputs: Sequence[Node]) -> dict[Node, Node]:
    moved = {}
    for linear, output in zip(group.linears, outputs, strict=True):
        with graph.inserting_before(linear.node):
            new = _along_chain(graph, linear, output)
        linear.node.replace_all_uses_with(new)
        with_new_strides(graph, new)
        moved[linear.node] = new
        graph.erase_node(linear.node)
        for node in reversed(linear.chain):
            if not node.users:
                graph.erase_node(node)
    return moved


def _along_chain(graph: Graph, linear: Linear, output: Node) -> Node:
    """Gives the result the rows the member had: its own views and permutes, with its features as the last axis."""
    if not any(packet(n) is aten.permute for n in linear.chain):
        return reshape_rows(graph, output, shape(linear.node) or ())
    for node in linear.chain:
        if packet(node) is aten.permute:
            output = call(graph, aten.permute.default, (output, node.args[1]))
        elif packet(node) in RESHAPE:
            output = call(graph, aten.reshape.default, (output, [*node.args[1][:-1], linear.features]))
        elif packet(node) in VIEW:
            output = reshape_rows(graph, output, (*(shape(node) or ())[:-1], linear.features))
    return output


def _name(node: Node, site: str) -> str:
    """What the report calls a product of a group at `site`."""
    path = module_path(node)
    return node.name if path in ("", site) else path.removeprefix(site + ".")


def _report(group: Group, strategy: str, reason: str, streams: list[int], packs: int) -> ProjectionGroup:
    site = group.site
    infos = tuple(
        LinearInfo(
            _name(member.node, site),
            member.features,
            str(value(member.weight).dtype).removeprefix("torch."),
            stream if strategy in ("streams", "measured") else 0,
            member.name if isinstance(member, OpaqueProduct) else "",
        )
        for member, stream in zip(group.members, [*streams, *[opaque.STREAM] * len(group.side)], strict=True)
    )
    biased = tuple(member.bias is not None for member in group.members)
    packs = packs if strategy == "measured" else 0
    source = source_location(group.linears[0].node)
    return ProjectionGroup(site, group.x.name, infos, strategy, reason, group.columns, biased, packs, source=source)
