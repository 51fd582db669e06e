"""Compiles a graph piece by piece, each distinct piece once, and runs the pieces one after the other.

`Assembler.compile` stands in for Inductor's `compile_fx_inner`. What was compiled is found again by the key of a piece
(`passes/pieces.py`) and what else makes another program of it: Inductor's settings, the ranges of its sizes, and the
facts that compiling it relied on. These are guards of the first graph; they have to be true of another graph that takes
the code over, and become its own. So the layers of a model, and those of the graphs that Dynamo makes later (another
cache phase, another batch), share their code without Inductor. Code lives as long as a graph that uses it; in another
process Inductor's cache has it, because pieces are named alike.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, GraphModule, Node

from dsv4_compile.branching import Brancher, Branching
from dsv4_compile.fingerprint import fingerprint
from dsv4_compile.passes import capturability, keys, pieces
from dsv4_compile.passes.capturability import Tokens
from dsv4_compile.passes.extraction import Extract, extract, symbols_of
from dsv4_compile.passes.keys import Key
from dsv4_compile.passes.pieces import Cut
from dsv4_compile.passes.roofline import is_free
from dsv4_compile.passes.sites import BranchSite
from dsv4_compile.report import TAKEN_OVER, CudaGraphs, Piece
from dsv4_compile.runtime.direct import operator_call
from dsv4_compile.runtime.forks import joint
from dsv4_compile.runtime.program import Code, Part, Sizes, evaluated, function_of, program
from dsv4_compile.runtime.recorder import Recorder, recorder_of
from dsv4_compile.runtime.runner import Ahead, Policy, Runner, plain

__all__ = ["Assembler"]

logger = logging.getLogger("dsv4_compile")


_lock = threading.Lock()
CompilePiece = Callable[..., Any]
"""Called as `compile_fx_inner`."""

_known: weakref.WeakValueDictionary[tuple[str, int], Code] = weakref.WeakValueDictionary()
VARIANTS = 8  # codes of one key that rely on different facts


def _obstacle(settings: dict[str, Any]) -> str | None:
    """Why a graph with these settings is not cut, or None."""
    if not settings.get("is_inference"):
        return "it is not for inference"
    if settings.get("cudagraphs"):
        return "Inductor captures it as one CUDA graph"
    if settings.get("cpp_wrapper") or settings.get("fx_wrapper"):
        return "its wrapper is not Python"
    return None


@dataclass(frozen=True)
class _Plan:
    """Where a graph is cut. `recorder` captures the pieces, when something does."""

    placeholders: list[Node]
    static: set[Node]
    cuts: list[Cut]
    tokens: Tokens
    recorder: Recorder | None


def _device(placeholders: Sequence[Node]) -> torch.device:
    """The device of most inputs."""
    values = [node.meta.get("val") for node in placeholders]
    counts = Counter(value.device for value in values if isinstance(value, torch.Tensor))
    return counts.most_common(1)[0][0] if counts else torch.device("cpu")


def _ahead(plan: _Plan, policy: Policy) -> Ahead | str:
    """How a call of a token count is made up before there is one."""
    if policy.sizes is None:
        return policy.ahead
    tokens, static = plan.tokens, plan.static
    if len(tokens.symbols) != 1:
        return "the token count is fixed here" if not tokens.symbols else "the token count is made of several sizes"
    symbol = next(iter(tokens.symbols))
    env = _environment_of(plan.placeholders)
    given = [node for node in plan.placeholders if node not in static]
    if any(s != symbol for node in given for s in symbols_of(node.meta["val"])):
        return "inputs have sizes that do not follow it"

    def inputs(count: int) -> list[Any] | None:
        solutions = [v for v in sympy.solve(sympy.sympify(tokens.count) - count, symbol) if v.is_integer]
        if len(solutions) != 1 or not _allowed(env, {symbol: solutions[0]}):
            return None
        return [
            None if node in static else _example(node.meta["val"], symbol, solutions[0]) for node in plan.placeholders
        ]

    return Ahead(inputs)


def _allowed(env: Any, values: dict[sympy.Symbol, sympy.Integer]) -> bool:
    """Whether the graph is good for a token count."""
    (symbol, value), *_ = values.items()
    bounds = env.var_to_range.get(symbol)
    if bounds is not None and not bounds.lower <= value <= bounds.upper:
        return False
    return all(
        guard.expr.xreplace(values) in (sympy.true, True) for guard in env.guards if symbol in guard.expr.free_symbols
    )


def _example(value: Any, symbol: sympy.Symbol, count: sympy.Integer) -> Any:
    def fixed(size: Any) -> int:
        return int(size.node.expr.xreplace({symbol: count})) if isinstance(size, torch.SymInt) else int(size)

    if not isinstance(value, torch.Tensor):
        return fixed(value)
    shape, stride = tuple(map(fixed, value.shape)), tuple(map(fixed, value.stride()))
    with unset_fake_temporarily():
        return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device).zero_()


@dataclass(frozen=True)
class _Making:
    """What all pieces of a graph are made with. `captures` is whether something captures them."""

    gm: GraphModule
    sizes: Sizes
    static: set[Node]
    fingerprint: str
    settings: dict[str, Any]
    captures: bool

    def extracted(self, one: Cut) -> tuple[Extract, list[bool], Key]:
        """The piece, which of its inputs are parameters, and its key."""
        part = extract(self.gm, one.nodes, self.sizes.of)
        is_static = [node in self.static for node in part.inputs]
        return part, is_static, keys.key_of(part.module, is_static)


@dataclass
class Assembler:
    """Compiles one graph in pieces, and captures them as `mode` and `policy` say.

    Attributes:
        mode: as the option `cudagraphs`.
        observe: is given the key of each piece, its graph, and the code that Inductor has written for it.
        branching: how pieces are divided into branches, or None when they are not.
        pieces: for the report.
        sites: for the report: pieces that were, or might have been, divided.
        met: for the report: those of `split_ops` that the graph has.
        whole: why the graph was not cut.
    """

    mode: str = "off"
    policy: Policy = field(default_factory=Policy)
    split_ops: tuple[str, ...] = ()
    branching: Branching | None = None
    compile_piece: CompilePiece | None = None
    """Instead of Inductor: runs a piece as it is."""
    observe: Callable[[str, Graph, str], None] | None = None
    cudagraphs: CudaGraphs = field(default_factory=CudaGraphs)
    pieces: list[Piece] = field(default_factory=list)
    sites: list[BranchSite] = field(default_factory=list)
    met: list[str] = field(default_factory=list)
    compiled: int = 0
    """Pieces that had to be compiled."""
    whole: str | None = None

    def compile(self, gm: GraphModule, example_inputs: Sequence[Any], **settings: Any) -> Any:
        """As `torch._inductor.compile_fx.compile_fx_inner`, with the same arguments."""
        from torch._inductor.compile_fx import compile_fx_inner

        self.met[:] = capturability.met(gm.graph, self.split_ops)
        try:
            self.whole = _obstacle(settings) or pieces.obstacle(gm)
            plan = None if self.whole else self._plan(gm.graph, settings)
            if plan is not None and (len(plan.cuts) > 1 or plan.recorder is not None):
                return self._assemble(gm, plan, settings)
            self.whole = self.whole or "there is no place to cut it"
        except Exception as error:
            self.pieces.clear()
            self.sites.clear()
            self.cudagraphs.mode = "off"
            brief = (str(error) or "no message").splitlines()[0]
            self.whole = f"it could not be cut ({type(error).__name__}: {brief})"
            logger.warning("A graph is compiled as one piece: %s.", self.whole)
            logger.debug("Cutting failed", exc_info=True)
        if self.mode != "off" and not self.cudagraphs.fallbacks:
            self._not_captured(self.whole)
        return (self.compile_piece or compile_fx_inner)(gm, example_inputs, **settings)

    def _not_captured(self, reason: str) -> None:
        self.cudagraphs.fallbacks.append({"reason": reason, "piece": "", "tokens": ""})

    def _plan(self, graph: Graph, settings: dict[str, Any]) -> _Plan:
        """Where the graph is cut, and what captures the pieces."""
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        static = {placeholders[i] for i in settings.get("static_input_idxs", ())}
        recorder = self._recorder(placeholders)
        if recorder is None:
            tokens = Tokens() if self.branching is None else capturability.tokens_of(graph, static)
            return _Plan(placeholders, static, pieces.cut(graph, static), tokens, None)
        tokens = capturability.tokens_of(graph, static)
        apart = capturability.obstacles(graph, static, tokens, _device(placeholders))
        whole = self.mode != "piecewise" and not apart  # one graph may hold what split_ops names
        if not whole and self.mode != "full":
            apart |= capturability.named(graph, self.split_ops)
        if self.mode == "full" and apart:
            self._not_captured(f"one graph cannot hold it: {next(iter(apart.values()))}")
            recorder = None
        cuts = pieces.cut(graph, static, apart if recorder else None)
        if recorder is not None and all(one.apart for one in cuts):
            self._not_captured(f"nothing in it can be captured: {cuts[0].apart if cuts else 'it is empty'}")
            recorder = None
        self.cudagraphs.mode = "off" if recorder is None else "full" if not apart else "piecewise"
        return _Plan(placeholders, static, cuts, tokens, recorder)

    def _recorder(self, placeholders: Sequence[Node]) -> Recorder | None:
        """What captures on the device of the graph."""
        if self.mode == "off":
            return None
        device = _device(placeholders)
        recorder = recorder_of(device)
        if recorder is None:
            self._not_captured(f"there are no CUDA graphs on {device}")
        return recorder

    def _assemble(self, gm: GraphModule, plan: _Plan, settings: dict[str, Any]) -> Any:
        making = _Making(gm, Sizes(plan.placeholders), plan.static, fingerprint(), settings, plan.recorder is not None)
        known = plan.tokens if plan.tokens.symbols <= making.sizes.found.keys() else Tokens()
        device, brancher = _device(plan.placeholders), None
        if self.branching is not None:
            captures = making.captures and self.policy.takes(known)
            brancher = Brancher(self.branching, known, captures, self.sites, device)
        made: list[tuple[str, Part, Code, str]] = []
        for one in plan.cuts:
            for step in self._steps(making, one, brancher):
                made += self._made(making, step, f"piece_{len(made)}", known, device)
        counts = Counter(piece.key for piece in self.pieces)
        self.pieces[:] = [replace(piece, shared_with=counts[piece.key] - 1) for piece in self.pieces]
        positions = [i for i, node in enumerate(plan.placeholders) if node in plan.static]
        tokens = plan.tokens if making.captures else Tokens()
        counted = (sorted(tokens.symbols, key=str), tokens.count)
        result = program(plan.placeholders, made, next(iter(reversed(gm.graph.nodes))), positions, counted)
        if plan.recorder is None:
            run = functools.partial(plain, result)
            run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd hands over a list then, to be emptied
            return run
        policy = replace(self.policy, ahead=_ahead(plan, self.policy))
        return Runner(result, plan.recorder, policy, self.cudagraphs, self._changed)

    def _steps(self, making: _Making, one: Cut, brancher: Brancher | None) -> list[tuple[Cut, ...]]:
        """A piece as it is, or divided: of each step the pieces that run beside each other."""
        if brancher is None:
            return [(one,)]
        part, _, key = making.extracted(one)
        return brancher.divide(one, part.module.graph, key)

    def _made(
        self, making: _Making, step: Sequence[Cut], name: str, tokens: Tokens, device: torch.device
    ) -> list[tuple[str, Part, Code, str]]:
        """The code of a step; nothing when it is views of inputs only, which each reader makes itself."""
        parts: list[tuple[Extract, Code]] = []
        for stream, one in enumerate(step):
            part, is_static, key = making.extracted(one)
            if not part.outputs and all(map(is_free, one.nodes)) and len(step) == 1:
                return []
            code, shared = self._code(part, key, is_static, making.fingerprint, making.settings)
            if self.observe is not None:
                self.observe(key.hash[:16], part.module.graph, getattr(code.run, "source_code", ""))
            parts.append((part, code))
            branch = f"a branch on {f'side stream {stream}' if stream else 'the main stream'}" if len(step) > 1 else ""
            label = f"{name}.{stream}" if branch else name
            self.pieces.append(self._piece(label, one, key, shared, making.captures, branch))
        if len(parts) == 1:
            return [(name, *parts[0], step[0].apart)]
        assert self.branching is not None
        return [(name, *joint(parts, tokens, self.branching.max_tokens, device), step[0].apart)]

    def _piece(self, name: str, one: Cut, key: Key, shared: bool, captures: bool, branch: str = "") -> Piece:
        first = next((piece.name for piece in self.pieces if piece.key == key.hash[:16]), None)
        taken = TAKEN_OVER if shared else "between two boundaries"
        reason = f"the same as {first}" if first else taken
        if branch:
            reason = f"{branch}; {reason}"
        if captures:
            reason = f"{one.apart or 'captured when it is called'}; {reason}"
        return Piece(name, key.hash[:16], 0, "compiled", reason, len(one.nodes))

    def _changed(self, name: str, kind: str, reason: str) -> None:
        """A piece was captured, or was not."""
        for i, piece in enumerate(self.pieces):
            if (
                piece.name.partition(".")[0] == name
                and (reason or piece.kind != kind)
                and not piece.reason.startswith(reason or "\0")
            ):
                why = piece.reason.removeprefix("captured when it is called; ")
                self.pieces[i] = replace(piece, kind=kind, reason=f"{reason}; {why}" if reason else why)

    def _code(
        self, part: Extract, key: Key, static: list[bool], fingerprint: str, settings: dict[str, Any]
    ) -> tuple[Code, bool]:
        """The code of a piece, and whether it was there already."""
        env = _environment_of(part.module.graph.nodes)
        names = {symbol: keys.canonical(i) for i, symbol in enumerate(key.symbols)}
        back = {name: symbol for symbol, name in names.items()}
        ranges = [env.var_to_range.get(symbol) for symbol in key.symbols] if env is not None else []
        identity = f"{key.hash}/{fingerprint}/{ranges}"
        with _lock:
            for variant in range(VARIANTS):
                known = _known.get((identity, variant))
                if known is not None and _hold(known.facts, env, back):
                    return known, True
        run = _compile(part, static, settings, self.compile_piece)
        self.compiled += 1
        source = None if self.compile_piece is not None else getattr(run, "source_code", "")
        code = Code(run, _facts(env, names), operator_call(part.module.graph, source))
        with _lock:
            for variant in range(VARIANTS):
                if (identity, variant) not in _known:
                    _known[identity, variant] = code
                    break
        return code, False


def _compile(
    part: Extract, static: list[bool], settings: dict[str, Any], compile_piece: CompilePiece | None
) -> Callable[[list[Any]], Sequence[Any]]:
    from torch._inductor.compile_fx import compile_fx_inner

    inputs = [node.meta["val"] for node in part.module.graph.nodes if node.op == "placeholder"]
    own = {**settings, "static_input_idxs": [i for i, fixed in enumerate(static) if fixed]}
    with _no_output_strides():
        run = (compile_piece or compile_fx_inner)(part.module, inputs, **own)
    _check_strides(part, getattr(run, "output_strides", None))
    return run


def _check_strides(part: Extract, strides: Sequence[tuple[str, ...] | None] | None) -> None:
    """The next piece was traced with the strides that the whole graph has; Inductor has to have kept them.

    Raises:
        ValueError: it has not.
    """
    for node, found in zip(part.outputs, strides or (), strict=False):
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor) or found is None:
            continue
        lengths = [s if isinstance(s, int) else None for s in value.shape]
        if 0 not in lengths and any(
            length != 1 and not _is_size(wanted, text)
            for wanted, text, length in zip(value.stride(), found, lengths, strict=True)
        ):
            raise ValueError(f"{node.name} has the strides {found} and not {tuple(value.stride())}")


def _is_size(size: int | torch.SymInt, text: str) -> bool:
    """Whether Inductor's `text` for a size says the same, which is tried with some values of its symbols."""
    if not isinstance(size, torch.SymInt):
        return text == str(size)
    expression = size.node.expr
    symbols = sorted(expression.free_symbols, key=str)
    wanted, known = function_of(expression, symbols), _values_of(size.node.shape_env)
    for scale, shift in ((1, 0), (2, 3), (3, 7)):
        values = [scale * int(known[symbol]) + shift for symbol in symbols]
        try:
            if evaluated(text, dict(zip(map(str, symbols), values, strict=True))) != wanted(values):
                return False
        except NameError:  # it is made of other symbols
            return False
    return True


@contextlib.contextmanager
def _no_output_strides() -> Iterator[None]:
    """Inductor tells the tracing context the strides of the outputs, which are those of the whole graph only."""
    context = torch._guards.TracingContext.try_get()
    if context is None:
        yield
        return
    before, context.output_strides = context.output_strides, None
    try:
        yield
    finally:
        context.output_strides = before


def _environment_of(nodes: Iterable[Node]) -> Any:
    """What knows about the symbols in the sizes of `nodes`, or None when they have none."""
    for node in nodes:
        value = node.meta.get("val")
        for size in (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt):
                return size.node.shape_env
    return None


def _facts(env: Any, names: dict[sympy.Symbol, sympy.Symbol]) -> tuple[sympy.Basic, ...]:
    """The guards on no other symbols than these, which the code may rely on."""
    if env is None:
        return ()
    own = [guard.expr for guard in env.guards if guard.expr.free_symbols and guard.expr.free_symbols <= names.keys()]
    facts = tuple(dict.fromkeys(keys.renamed(fact, names) for fact in own))
    # One that says nothing any more, because the new names have fewer properties, would be lost: nobody may take over.
    return facts if all(fact.free_symbols for fact in facts) else (sympy.false,)


def _hold(facts: Sequence[sympy.Basic], env: Any, names: dict[sympy.Symbol, sympy.Symbol]) -> bool:
    """Whether the facts are true here; they become guards if they are."""
    here = [keys.renamed(fact, names) for fact in facts]
    if not all(_is_true(env, fact) for fact in here):
        return False
    return all(bool(env.evaluate_expr(fact)) for fact in here)


def _is_true(env: Any, fact: sympy.Basic) -> bool:
    """Without a guard, for the sizes of now."""
    value = fact.xreplace(_values_of(env))
    return value is sympy.true or value is True


def _values_of(env: Any) -> dict[sympy.Symbol, sympy.Integer]:
    """The values that symbols have now."""
    return dict(env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val)
