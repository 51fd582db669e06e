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
import hashlib
import itertools
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from dsv4_compile.passes import pieces
from dsv4_compile.passes.pieces import Extract, Key
from dsv4_compile.report import Piece

__all__ = ["Assembler"]

logger = logging.getLogger("dsv4_compile")


class _Code:
    """A compiled piece: called with a list of inputs, which it empties, it returns the outputs."""

    def __init__(self, run: Callable[[list[Any]], Sequence[Any]], facts: tuple[sympy.Basic, ...]):
        self.run = run
        self.facts = facts
        """What has to be true of the sizes, in the symbols of the key."""


_lock = threading.Lock()
_known: weakref.WeakValueDictionary[tuple[str, int], _Code] = weakref.WeakValueDictionary()
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


@dataclass
class Assembler:
    """Compiles one graph in pieces. `pieces` is for the report, `whole` says why it was not cut. `observe` is given the
    key of each piece, its graph, and the code that Inductor has written for it."""

    observe: Callable[[str, Graph, str], None] | None = None
    pieces: list[Piece] = field(default_factory=list)
    compiled: int = 0
    """Pieces that Inductor had to compile."""
    whole: str | None = None

    def compile(self, gm: GraphModule, example_inputs: Sequence[Any], **settings: Any) -> Any:
        """As `torch._inductor.compile_fx.compile_fx_inner`, with the same arguments."""
        from torch._inductor.compile_fx import compile_fx_inner

        try:
            self.whole = _obstacle(settings) or pieces.obstacle(gm)
            cuts = [] if self.whole else pieces.cut(gm.graph)
            if len(cuts) > 1:
                return self._assemble(gm, cuts, settings)
            self.whole = self.whole or "there is no place to cut it"
        except Exception as error:
            self.pieces.clear()
            brief = (str(error) or "no message").splitlines()[0]
            self.whole = f"it could not be cut ({type(error).__name__}: {brief})"
            logger.warning("A graph is compiled as one piece: %s.", self.whole)
            logger.debug("Cutting failed", exc_info=True)
        return compile_fx_inner(gm, example_inputs, **settings)

    def _assemble(self, gm: GraphModule, cuts: Sequence[Sequence[Node]], settings: dict[str, Any]) -> Any:
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        static = {placeholders[i] for i in settings.get("static_input_idxs", ())}
        sizes = _Sizes(placeholders)
        fingerprint = _fingerprint()
        made = []
        for number, nodes in enumerate(cuts):
            part = pieces.extract(gm, nodes, sizes.of)
            is_static = [node in static for node in part.inputs]
            key = pieces.key_of(part.module, is_static)
            code, shared = self._code(part, key, is_static, fingerprint, settings)
            if self.observe is not None:
                self.observe(key.hash[:16], part.module.graph, getattr(code.run, "source_code", ""))
            made.append((part, code))
            first = next((piece.name for piece in self.pieces if piece.key == key.hash[:16]), None)
            taken = "taken over from another graph" if shared else "between two boundaries"
            reason = f"the same as {first}" if first else taken
            self.pieces.append(Piece(f"piece_{number}", key.hash[:16], 0, "compiled", reason, len(nodes)))
        counts = Counter(piece.key for piece in self.pieces)
        self.pieces = [replace(piece, shared_with=counts[piece.key] - 1) for piece in self.pieces]
        return _program(placeholders, sizes, made, next(iter(reversed(gm.graph.nodes))))

    def _code(
        self, part: Extract, key: Key, static: list[bool], fingerprint: str, settings: dict[str, Any]
    ) -> tuple[_Code, bool]:
        """The code of a piece, and whether it was there already."""
        env = _shape_env(part)
        names = {symbol: pieces.canonical(i) for i, symbol in enumerate(key.symbols)}
        back = {name: symbol for symbol, name in names.items()}
        ranges = [env.var_to_range.get(symbol) for symbol in key.symbols] if env is not None else []
        identity = f"{key.hash}/{fingerprint}/{ranges}"
        with _lock:
            for variant in range(VARIANTS):
                known = _known.get((identity, variant))
                if known is not None and _hold(known.facts, env, back):
                    return known, True
        run = _compile(part, static, settings)
        self.compiled += 1
        code = _Code(run, _facts(env, names))
        with _lock:
            for variant in range(VARIANTS):
                if (identity, variant) not in _known:
                    _known[identity, variant] = code
                    break
        return code, False


def _compile(part: Extract, static: list[bool], settings: dict[str, Any]) -> Callable[[list[Any]], Sequence[Any]]:
    from torch._inductor.compile_fx import compile_fx_inner

    inputs = [node.meta["val"] for node in part.module.graph.nodes if node.op == "placeholder"]
    own = {**settings, "static_input_idxs": [i for i, fixed in enumerate(static) if fixed]}
    with _no_output_strides():
        run = compile_fx_inner(part.module, inputs, **own)
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
        wanted = [str(s.node.expr if isinstance(s, torch.SymInt) else s) for s in value.stride()]
        lengths = [s if isinstance(s, int) else None for s in value.shape]
        if 0 not in lengths and any(a != str(b) and n != 1 for a, b, n in zip(wanted, found, lengths, strict=True)):
            raise ValueError(f"{node.name} has the strides {found} and not {wanted}")


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


def _shape_env(part: Extract) -> Any:
    """What knows about the symbols of a piece, or None when it has none."""
    for node in part.module.graph.nodes:
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
    facts = tuple(dict.fromkeys(pieces.renamed(fact, names) for fact in own))
    # One that says nothing any more, because the new names have fewer properties, would be lost: nobody may take over.
    return facts if all(fact.free_symbols for fact in facts) else (sympy.false,)


def _hold(facts: Sequence[sympy.Basic], env: Any, names: dict[sympy.Symbol, sympy.Symbol]) -> bool:
    """Whether the facts are true here; they become guards if they are."""
    here = [pieces.renamed(fact, names) for fact in facts]
    if not all(_is_true(env, fact) for fact in here):
        return False
    return all(bool(env.evaluate_expr(fact)) for fact in here)


def _is_true(env: Any, fact: sympy.Basic) -> bool:
    """Without a guard, for the sizes of now."""
    value = fact.xreplace(dict(env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val))
    return value is sympy.true or value is True


# Inductor's own settings leave these out, because it asks each pass for its identity.
_PASSES = (
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
    "_pre_fusion_custom_pass",
    "_post_fusion_custom_pass",
    "custom_should_partition_ops",
)
_PRECISIONS = ("allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
_unlike = itertools.count()


def _identity(custom: Any) -> str:
    """What a pass of the user is; one that does not say is like no other."""
    if custom is None or custom == []:
        return "none"
    found = custom.uuid() if hasattr(custom, "uuid") else None
    return f"unknown {next(_unlike)}" if found is None else repr(found)


def _precision(name: str) -> str:
    matmul = torch.backends.cuda.matmul
    try:
        return f"{getattr(matmul, name)} {torch.get_float32_matmul_precision()}"
    except RuntimeError:  # the newer way to set it is in use
        return f"{getattr(matmul, 'fp32_precision', None)}"


def _fingerprint() -> str:
    """What else makes another program of a graph."""
    from torch._inductor import config

    parts = (
        sorted(
            (name, repr(value)) for name, value in config.save_config_portable(ignore_private_configs=False).items()
        ),
        [_identity(getattr(config, name, None)) for name in _PASSES],
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        bool(getattr(torch.utils.deterministic, "fill_uninitialized_memory", True)),
        [_precision(name) for name in _PRECISIONS],
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_inference_mode_enabled(),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


# -------------------------------------------------------------------------------------------------------------- running


class _Sizes:
    """Where the sizes come from that symbols stand for: an input, or an axis of one."""

    def __init__(self, placeholders: Sequence[Node]):
        self.found: dict[sympy.Symbol, tuple[int, int | None, torch.SymInt]] = {}
        for position, node in enumerate(placeholders):
            value = node.meta["val"]
            if isinstance(value, torch.SymInt) and (symbol := pieces.symbol_of(value)) is not None:
                self.found[symbol] = (position, None, value)
        for position, node in enumerate(placeholders):
            value = node.meta["val"]
            shape: tuple[Any, ...] = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
            for axis, size in enumerate(shape):
                if (symbol := pieces.symbol_of(size)) is not None and symbol not in self.found:
                    self.found[symbol] = (position, axis, size)

    def of(self, symbol: sympy.Symbol) -> torch.SymInt:
        """The size as the graph knows it.

        Raises:
            KeyError: no input has it.
        """
        return self.found[symbol][2]

    def source(self, symbol: sympy.Symbol) -> tuple[int, int | None]:
        """Position of the input, and the axis if it is a tensor."""
        return self.found[symbol][:2]


@dataclass(frozen=True)
class _Step:
    """A call of a piece: which values it reads, where its results go, which are not read any more."""

    code: _Code
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    done: tuple[int, ...]


def _program(
    placeholders: Sequence[Node], sizes: _Sizes, made: Sequence[tuple[Extract, _Code]], output: Node
) -> Callable[[list[Any]], list[Any]]:
    places: dict[Any, int] = {node: i for i, node in enumerate(placeholders)}
    for part, _ in made:
        for value in (*part.symbols, *part.outputs):
            places.setdefault(value, len(places))
    measured = tuple(
        (places[symbol], *sizes.source(symbol)) for symbol in dict.fromkeys(s for part, _ in made for s in part.symbols)
    )
    results = tuple(_result(one, places) for one in output.args[0])
    kept = {place for place, _ in results if place is not None}
    last: dict[int, int] = {}
    for number, (part, _) in enumerate(made):
        for value in (*part.inputs, *part.symbols, *part.outputs):
            last[places[value]] = number
    steps = []
    for number, (part, code) in enumerate(made):
        inputs = tuple(places[value] for value in (*part.inputs, *part.symbols))
        done = tuple(place for place, at in last.items() if at == number and place not in kept)
        steps.append(_Step(code, inputs, tuple(places[node] for node in part.outputs), done))
    run = functools.partial(_run, tuple(steps), measured, results, len(places))
    run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd hands over a list then, to be emptied
    return run


def _result(argument: Any, places: dict[Any, int]) -> tuple[int | None, Any]:
    """Where a result of the graph lies, or the constant that it is."""
    return (places[argument], None) if isinstance(argument, Node) else (None, argument)


def _run(
    steps: tuple[_Step, ...],
    measured: tuple[tuple[int, int, int | None], ...],
    results: tuple[tuple[int | None, Any], ...],
    size: int,
    inputs: list[Any],
) -> list[Any]:
    values = [*inputs, *[None] * (size - len(inputs))]
    inputs.clear()
    for place, position, axis in measured:
        values[place] = values[position] if axis is None else values[position].shape[axis]
    for step in steps:
        arguments = [values[i] for i in step.inputs]
        for i in step.done:
            values[i] = None
        for place, value in zip(step.outputs, step.code.run(arguments), strict=True):
            values[place] = value
    return [constant if place is None else values[place] for place, constant in results]
