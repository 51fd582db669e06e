"""`torch.compile(model, backend="dsv4")`: Dynamo graph -> our passes on the functional graph -> Inductor.

The passes ride in Inductor's `joint_custom_pre_pass`, the first hook that sees the functional ATen graph, so that what
they replace is neither optimised nor lowered by Inductor. The hook is set for this compilation only and runs after
whatever pass the user has put there.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule

import dsv4_compile
from dsv4_compile import branching, memory, names, verification
from dsv4_compile.assembly import Assembler
from dsv4_compile.branching import Branching
from dsv4_compile.dump.writer import GraphDump, observe, recording
from dsv4_compile.hook import HOOK, chained
from dsv4_compile.kernels import environment
from dsv4_compile.nested import watch
from dsv4_compile.options import Options, disabled
from dsv4_compile.passes.attention import AttentionPass
from dsv4_compile.passes.mhc import MhcPass
from dsv4_compile.passes.pipeline import Collected, GraphPass, GraphPasses, collecting
from dsv4_compile.passes.projections import ProjectionsPass
from dsv4_compile.passes.sites import Missed
from dsv4_compile.passes.vllm_mhc import VllmMhcPass
from dsv4_compile.phases import foresee
from dsv4_compile.report import CompileReport, GraphReport, Piece, new_report
from dsv4_compile.runtime.runner import Policy
from dsv4_compile.scalars import fix_model_floats
from dsv4_compile.vllm.log import announce

__all__ = ["CAPTURING", "StrictError", "capture_of", "cuts", "dsv4", "first_effective", "graph_passes"]

logger = logging.getLogger("dsv4_compile")

_GRADIENTS = "the graph needs gradients (run the model under torch.no_grad() or torch.inference_mode())"
watch()

CAPTURING = ("full", "piecewise", "full_and_piecewise")
"""Values of `cudagraphs` for which graphs are cut and captured."""
_MOST_GRAPHS = 128
"""To which Dynamo's limit of graphs for one function is raised, at most."""
_AUTO = "full_and_piecewise"
_FOR_CAPTURE = ("capture_sizes", "capture_memory", "split_ops")


class StrictError(RuntimeError):
    """Under `strict`: a requested optimisation matched nothing or fell back."""


def dsv4(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The Dynamo backend.

    Args:
        gm: Dynamo's graph; taken over and possibly changed.
        example_inputs: its inputs, parameters among them.
        options: see `Options`; `DSV4_OPTIONS` in the environment overrides.
        mode: as for Inductor ("reduce-overhead", "max-autotune", ...).

    Returns:
        A callable with the graph's inputs and outputs.

    Raises:
        OptionError: an option, its value, a setting of Inductor or an operator in it is not known, or two contradict
            each other.
        StrictError: under `strict`, when a requested optimisation matched nothing or fell back.
    """
    environment.check()
    chosen = Options.resolve(options)
    names.check(chosen)
    patches = _inductor_patches(mode, chosen)
    if disabled():
        return _inductor(gm, example_inputs, patches)
    if chosen.mhc != "off":
        fix_model_floats(gm)
    report = _report_of(chosen, example_inputs, patches)
    graph = GraphReport(id=_graph_id(report))
    report.graphs.append(graph)
    key = memory.key_of(gm, example_inputs, chosen, patches)
    mode = capture_of(chosen, _device_type(example_inputs), patches)[0]
    original = verification.copy_of(gm) if chosen.verify else None
    size = len(gm.graph.nodes)
    with recording(chosen.dump_dir, report, graph, gm) as dump:
        start = time.perf_counter()
        with collecting() as collected:
            try:
                compiled = _compile(gm, example_inputs, chosen, patches, mode, graph, dump)
            except Exception:
                _take_up(graph, collected)  # what the passes did before may say why
                raise
        _fill(graph, collected, time.perf_counter() - start, chosen, key, dump)
        graph.nodes = graph.nodes or size  # the passes, which count those of the functional graph, did not run
        _settle(report, graph, collected, chosen, mode)
        if chosen.branches:
            refusal = branching.refusal(chosen, cuts(mode), _device_type(example_inputs))
            branching.settle(report, graph, refusal)
        memory.pack(collected, example_inputs, graph)
        unmet = _unmet(chosen, graph, _device_type(example_inputs))
        if unmet is not None:
            report.effective["projections"] = {"value": unmet[0], "reason": unmet[1]}
        foresee()
        if cuts(mode):
            _make_room(report)
        if dump is not None and dump.problem is not None:
            graph.notes.append(dump.problem)
        logger.info("%s", report)
        announce(graph)
        if chosen.strict:
            _enforce(chosen, mode, report, graph, collected, unmet)
    if original is not None:
        compiled = verification.verified(compiled, original, chosen.verify, graph)
    return compiled


def graph_passes(options: Options) -> GraphPasses:
    """The passes that `options` ask for, as one custom pass."""
    passes: list[GraphPass] = []
    if options.mhc != "off":
        passes.append(MhcPass(options.mhc, options.deterministic))
        if "vllm" in sys.modules or "DSV4_VLLM_MHC" in os.environ:  # nobody else has its operators
            passes.append(VllmMhcPass(options.mhc, options.deterministic))
    if options.projections != "off":
        chosen = (options.projections, options.num_streams, options.stream_max_tokens)
        passes.append(ProjectionsPass(*chosen, apart=options.split_ops))
    if options.attention != "off":
        passes.append(AttentionPass(options.compiler == "inductor"))
    settings = f"{dsv4_compile.__version__}/{options.fingerprint()}"
    observer = None if options.dump_dir is None else observe
    return GraphPasses(tuple(passes), settings, strict=options.strict, observe=observer)


def _compile(
    gm: GraphModule,
    inputs: Sequence[Any],
    options: Options,
    patches: dict[str, Any],
    mode: str,
    graph: GraphReport,
    dump: GraphDump | None,
) -> Callable[..., Any]:
    passes: GraphPasses | None = graph_passes(options)
    if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs):
        graph.notes.append(f"compiled without replacements: {_GRADIENTS}")
        logger.warning("Graph %s is compiled without replacements: %s.", graph.id, _GRADIENTS)
        passes = None
    if options.compiler == "eager":
        in_pieces = passes is not None and cuts(mode)
        observe = None if dump is None else dump.piece
        assembler = _assembler(options, mode, graph, observe, _device_type(inputs)) if in_pieces else None
        return _eager(gm, inputs, passes, assembler)
    if passes is not None:
        patches = {**patches, HOOK: chained(passes, patches)}
        if cuts(mode):
            observe = None if dump is None else dump.piece
            assembler = _assembler(options, mode, graph, observe, _device_type(inputs))
            return _in_pieces(gm, inputs, patches, assembler, graph, dump)
    return _inductor(gm, inputs, patches, dump)


def _inductor(gm: GraphModule, inputs: Sequence[Any], patches: dict[str, Any], dump: GraphDump | None = None) -> Any:
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    if dump is None:
        return compile_fx(gm, inputs, config_patches=patches or None)

    # A graph that comes from a cache passes through none of our passes, and there would be nothing to see.
    patches = {**patches, "fx_graph_cache": False}
    return compile_fx(gm, inputs, inner_compile=_shown(compile_fx_inner, dump), config_patches=patches)


def _shown(inner: Callable[..., Any], dump: GraphDump | None) -> Callable[..., Any]:
    """`inner`, with the code of what it compiles in the dump; a graph in pieces has none of its own."""

    def shown(*args: Any, **kwargs: Any) -> Any:
        compiled = inner(*args, **kwargs)
        if dump is not None and (code := getattr(compiled, "source_code", "")):
            dump.code(code)
        return compiled

    return shown


def _timed(inner: Callable[..., Any], graph: GraphReport) -> Callable[..., Any]:
    """`inner`, with its seconds in the report: those of Inductor, without AOTAutograd's."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            graph.seconds["inductor"] = graph.seconds.get("inductor", 0.0) + time.perf_counter() - start

    return timed


def _in_pieces(
    gm: GraphModule,
    inputs: Sequence[Any],
    patches: dict[str, Any],
    assembler: Assembler,
    graph: GraphReport,
    dump: GraphDump | None,
) -> Any:
    """Each distinct piece of the graph compiled once, without the cache of AOTAutograd, which keeps whole graphs."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    inner = _timed(_shown(assembler.compile, dump), graph)
    with config.patch(enable_autograd_cache=False):
        compiled = compile_fx(gm, inputs, inner_compile=inner, config_patches=patches or None)
    if assembler.whole is not None:
        graph.notes.append(f"compiled as one piece: {assembler.whole}")
    return compiled


def _assembler(
    options: Options, mode: str, graph: GraphReport, observe: Callable[[str, Graph, str], None] | None, device: str
) -> Assembler:
    """One that writes into the report of the graph."""
    divides = options.branches and branching.refusal(options, cuts(mode), device) is None
    strict = options.strict and options.cudagraphs in CAPTURING
    whole = options.cudagraphs == "full"
    policy = Policy(options.capture_sizes, options.capture_memory, options.verify, strict=strict, whole=whole)
    return Assembler(
        mode=mode,
        policy=policy,
        split_ops=options.split_ops,
        branching=Branching(options.num_streams, options.stream_max_tokens) if divides else None,
        observe=observe,
        pieces=graph.pieces,
        sites=graph.branches,
        cudagraphs=graph.cudagraphs,
        met=graph.split_ops,
    )


def _eager(
    gm: GraphModule, inputs: Sequence[Any], passes: GraphPasses | None, assembler: Assembler | None = None
) -> Callable[..., Any]:
    """The rewritten graph, run node by node, or recorded as `assembler` says."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._inductor.decomposition import select_decomp_table

    def plain(module: GraphModule, _: Sequence[Any]) -> Any:
        return make_boxed_func(module.forward)

    def rewritten(module: GraphModule, given: Sequence[Any]) -> Any:
        if passes is not None:
            passes(module.graph)
            module.recompile()
        if assembler is None:
            return make_boxed_func(module.forward)
        assembler.compile_piece = lambda part, *_, **__: make_boxed_func(part.forward)
        return assembler.compile(module, given, static_input_idxs=_static(), is_inference=True)

    compiler = aot_autograd(
        fw_compiler=plain,
        bw_compiler=plain,
        inference_compiler=rewritten,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    return compiler(gm, inputs)


def _static() -> list[int]:
    """Positions of the inputs that keep their address: parameters, and what is marked so."""
    context = torch._guards.TracingContext.try_get()
    return list(context.fw_metadata.static_input_indices) if context is not None and context.fw_metadata else []


def _inductor_patches(mode: str | None, options: Options) -> dict[str, Any]:
    from torch._inductor import list_mode_options

    return {**(list_mode_options(mode) if mode else {}), **options.inductor}


def _fill(
    graph: GraphReport, collected: Collected, seconds: float, options: Options, key: str, dump: GraphDump | None
) -> None:
    """Moves what the passes found into the report; a warm cache skips them, then what they found last time counts."""
    if collected.ran:
        memory.remember(key, collected)
    elif not graph.notes:
        remembered = memory.recall(key)
        if remembered is None:
            graph.notes.append("loaded from Inductor's cache; what the passes did when it was compiled is not known")
        else:
            collected.results[:] = remembered.results
            collected.nodes, collected.dynamic = remembered.nodes, remembered.dynamic
            graph.notes.append("loaded from Inductor's cache; the passes ran when it was first compiled")
    if dump is not None:
        collected.seconds["dump"] = dump.seconds
    of_pieces = graph.seconds.pop("inductor", None)
    _take_up(graph, collected)
    rest = max(0.0, seconds - sum(collected.seconds.values()))
    if of_pieces is None:
        graph.seconds[options.compiler] = rest
    else:
        graph.seconds |= {"aot_autograd": max(0.0, rest - of_pieces), "inductor": of_pieces}
    kind = "compiled" if options.compiler == "inductor" else "eager"
    graph.pieces = graph.pieces or [Piece("piece_0", key[:16], 0, kind, "the graph is one piece", graph.nodes)]


def _take_up(graph: GraphReport, collected: Collected) -> None:
    graph.nodes, graph.dynamic, graph.seconds = collected.nodes, collected.dynamic, dict(collected.seconds)
    for result in collected.results:
        graph.add(result)


def _settle(report: CompileReport, graph: GraphReport, collected: Collected, options: Options, mode: str) -> None:
    """Records where something else happened than was asked for."""
    for result in collected.results:
        report.fell_back(result)
    if options.mhc == "auto" and graph.mhc and not isinstance(report.effective["mhc"], Mapping):
        family = graph.mhc[0].kernel
        report.effective["mhc"] = {"value": family, "reason": f"the family for {report.device}"}
    if mode in CAPTURING:  # the first graph may have been on another device
        report.effective |= {name: report.requested[name] for name in _FOR_CAPTURE}
        met = [name for name in options.split_ops if any(name in one.split_ops for one in report.graphs)]
        if len(met) < len(options.split_ops):
            reason = names.absence([name for name in options.split_ops if name not in met])
            report.effective["split_ops"] = {"value": met, "reason": reason}
    if mode in CAPTURING and graph.cudagraphs.mode != options.cudagraphs:
        reasons = [one["reason"] for one in graph.cudagraphs.fallbacks] or graph.notes
        reason = reasons[0] if reasons and graph.cudagraphs.mode == "off" else "the best that this graph allows"
        report.effective["cudagraphs"] = {"value": graph.cudagraphs.mode, "reason": reason}
    strategies = sorted({group.strategy for group in graph.projections})
    if options.projections == "auto" and strategies:
        reason = graph.projections[0].reason
        report.effective["projections"] = {"value": ", ".join(strategies), "reason": reason}


def _unmet(options: Options, graph: GraphReport, device: str) -> tuple[str, str] | None:
    """How projections run instead where not every group runs as the option names it, and why; else None."""
    if options.projections not in ("pack", "streams") or not graph.projections:
        return None
    if options.projections == "streams" and device != "cuda":
        return "serial", f"there are no streams on {device}"
    other = next((group for group in graph.projections if group.strategy != options.projections), None)
    if other is None:
        return None
    at = f"at {other.site}, " if other.site else ""
    return ", ".join(sorted({group.strategy for group in graph.projections})), f"{at}{other.reason.removesuffix('.')}"


def _enforce(
    options: Options,
    mode: str,
    report: CompileReport,
    graph: GraphReport,
    collected: Collected,
    unmet: tuple[str, str] | None,
) -> None:
    """Raises when a requested optimisation matched nothing or fell back, that of projections as `unmet` says."""
    if graph.notes and "without replacements" in graph.notes[0]:
        raise StrictError(f"Graph {graph.id}: {graph.notes[0]}.")
    for result in collected.results:
        for option, value, reason in result.effective:
            if option in options.explicit:
                raise StrictError(f"{option}={getattr(options, option)!r} was asked for and {value!r} runs: {reason}.")
    # A graph break leaves pieces in which there is nothing to find.
    matched = {
        "mhc": any(g.mhc for g in report.graphs),
        "projections": any(g.projections for g in report.graphs),
        "attention": any(g.attention for g in report.graphs),
    }
    asked = [o for o in ("mhc", "projections") if getattr(options, o) != "off"]
    named = [o for o in matched if o in options.explicit and getattr(options, o) != "off"]
    failed = [o for o in named if not matched[o]] or (asked if asked and not any(matched[o] for o in asked) else [])
    if failed:
        raise StrictError(f"Graph {graph.id} ({graph.nodes} nodes): {' and '.join(failed)} matched nothing.")
    missed: list[Missed] = [m for m in graph.missed if m.kind in (named or asked)]
    if missed:
        raise StrictError(f"Graph {graph.id}: {missed[0].kind} at {missed[0].site} was left alone: {missed[0].reason}.")
    if unmet is not None:
        value, reason = unmet
        raise StrictError(
            f"Graph {graph.id}: projections={options.projections!r} was asked for and {value!r} runs: {reason}."
        )
    if options.cudagraphs in CAPTURING and graph.cudagraphs.mode == "off":
        raise StrictError(
            f"Graph {graph.id}: cudagraphs={options.cudagraphs!r} was asked for and nothing is captured: "
            f"{graph.cudagraphs.fallbacks[0]['reason']}."
        )
    for option, reason in _without_effect(options, mode):
        if option in options.explicit:
            raise StrictError(f"{option}={getattr(options, option)!r} was asked for and has no effect: {reason}.")
    effective = report.effective["branches"]
    if options.branches and isinstance(effective, Mapping):
        raise StrictError(f"branches=True was asked for and has no effect: {effective['reason']}.")


# Reports by the object that Dynamo keeps for one torch.compile(...) call.
_by_caller: list[tuple[weakref.ref[Any], str, CompileReport]] = []


def _report_of(options: Options, inputs: Sequence[Any], patches: dict[str, Any]) -> CompileReport:
    """The report of the `torch.compile` call that is compiling, a new one at its first graph."""
    caller = _caller()
    identity = options.fingerprint()
    _by_caller[:] = [entry for entry in _by_caller if entry[0]() is not None]
    for reference, known, report in _by_caller:
        if caller is not None and reference() is caller and known == identity:
            return report
    device = _device(inputs)
    name = f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
    report = new_report(name, options.to_dict(), first_effective(options, _device_type(inputs), patches))
    if caller is not None:
        _by_caller.append((weakref.ref(caller), identity, report))
    return report


def _caller() -> Any:
    """What stands for one `torch.compile(...)` inside Dynamo, or None when the backend is called by hand."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        return InstructionTranslator.current_tx().output.compiler_fn
    except (ImportError, AttributeError):
        return None


def first_effective(options: Options, device: str, patches: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What runs for `options`, before any graph is known: a value, or {"value", "reason"} where another one does."""
    effective: dict[str, Any] = options.to_dict()
    mode, reason = capture_of(options, device, patches)
    if mode != options.cudagraphs:
        effective["cudagraphs"] = {"value": mode, "reason": reason}
    without = _without_effect(options, mode)
    if options.branches and (refusal := branching.refusal(options, cuts(mode), device)) is not None:
        without.append(("branches", refusal))
    for option, why in without:
        effective[option] = {"value": Options().to_dict()[option], "reason": why}
        logger.warning("%s=%r has no effect: %s.", option, getattr(options, option), why)
    return effective


def capture_of(options: Options, device: str, patches: Mapping[str, Any] | None = None) -> tuple[str, str]:
    """How graphs on a type of device are captured, and why when that is not what the option says.

    Args:
        patches: settings of Inductor.
    """
    if options.cudagraphs != "auto":
        return options.cudagraphs, ""
    if device != "cuda" or torch.version.hip is not None:
        return "off", f"there are no CUDA graphs on {'ROCm' if device == 'cuda' else device}"
    if options.compiler == "eager":
        return "off", "compiler='eager' runs a graph node by node, unless capture is asked for"
    if (patches or {}).get("triton.cudagraphs"):
        return "off", "Inductor captures"
    if "vllm" in sys.modules:
        return "off", "vLLM captures"
    return _AUTO, "one CUDA graph where it can hold the call, else pieces"


def cuts(mode: str) -> bool:
    """Whether graphs are compiled piece by piece where they are captured as `mode` says."""
    return mode in CAPTURING or environment.word("DSV4_PIECES") == "1"


def _make_room(report: CompileReport) -> None:
    """Raises Dynamo's limit of graphs for one function before it is reached: later ones share their code.

    A cache that grows goes through more phases than the limit allows by default, and Dynamo would then run the model
    uncompiled without an error.
    """
    from torch._dynamo import config

    limit = config.recompile_limit
    if len(report.graphs) >= limit - 1 and limit < _MOST_GRAPHS:
        config.recompile_limit = min(4 * limit, _MOST_GRAPHS)
        logger.info("torch._dynamo.config.recompile_limit is %d from now on, was %d.", config.recompile_limit, limit)


def _without_effect(options: Options, mode: str) -> list[tuple[str, str]]:
    """Options that are set and do nothing where graphs are captured as `mode` says, with the reason of each."""
    found = []
    if mode not in CAPTURING:
        found += [(name, "nothing is captured") for name in _FOR_CAPTURE if getattr(options, name) not in (None, ())]
    if options.deterministic and options.mhc == "off":
        found.append(("deterministic", "it is about the kernels for mHC, and mhc is 'off'"))
    return found


def _device(inputs: Sequence[Any]) -> torch.device:
    """The device that a graph with these inputs is on."""
    devices = (x.device for x in inputs if isinstance(x, torch.Tensor) and x.device.type != "cpu")
    return next(devices, torch.device("cpu"))


def _device_type(inputs: Sequence[Any]) -> str:
    return _device(inputs).type


def _graph_id(report: CompileReport) -> str:
    compile_id = torch._guards.CompileContext.current_compile_id()
    known = {graph.id for graph in report.graphs}
    name = str(compile_id) if compile_id is not None else str(len(report.graphs))
    return name if name not in known else f"{name}.{len(report.graphs)}"
