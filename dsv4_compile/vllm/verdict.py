"""What of ours runs under a configuration that vLLM has resolved, and why the rest does not, in one sentence."""

from __future__ import annotations

from typing import Any

from dsv4_compile.vllm.settings import BACKEND, HOOK, MODES

__all__ = ["is_ours", "of"]

_NOT_COMPILED_SINCE = (0, 23)
"""From this release on vLLM runs DeepSeek-V4 on NVIDIA eagerly, in breakable CUDA graphs."""


def is_ours(found: Any) -> bool:
    """Whether an object in a hook is a pass of this package."""
    from dsv4_compile.passes.pipeline import GraphPasses

    return issubclass(type(found), GraphPasses) or type(found).__module__ == "dsv4_compile.deferred"


def of(config: Any, ours: Any, is_backend: bool) -> tuple[bool, str]:
    """(whether something of ours runs, the sentence) for a resolved `VllmConfig`.

    Args:
        config: vLLM's configuration after its `__post_init__`.
        ours: the pass in the hook, or None.
        is_backend: whether the backend was ours before vLLM's platform had its say.
    """
    compilation = config.compilation_config
    mode = int(compilation.mode or 0)
    name = MODES[mode] if mode < len(MODES) else str(mode)
    if (why := _never_compiled(config, mode)) is not None:
        return False, f"nothing of ours runs: {why}"
    if mode == 0:
        return False, "nothing of ours runs: vLLM compiles nothing (mode NONE: --enforce-eager, -O0 or its own choice)"
    if mode == 1 and _is_cpu():
        return False, f'nothing of ours runs: vLLM compiles nothing on a CPU in mode {name}; set "mode": 2'
    if is_backend:
        return _of_backend(compilation, mode, name)
    if compilation.backend not in ("", "inductor"):
        return False, f"nothing of ours runs: vLLM's backend {compilation.backend!r} runs no passes of Inductor"
    if mode == 1:
        return False, f'nothing of ours runs: mode {name} hands no passes to Inductor; set "backend": "{BACKEND}"'
    if mode == 3 and (hook := _pass_key()) != HOOK:
        return (
            False,
            f"nothing of ours runs: this platform runs vLLM's passes in the hook {hook}, and ours is in {HOOK}",
        )
    return True, f"the passes run in mode {name}{_details(ours)}"


def _of_backend(compilation: Any, mode: int, name: str) -> tuple[bool, str]:
    if compilation.backend != BACKEND or mode == 3:
        how = f"vLLM made it mode {name} with backend {compilation.backend!r}"
        return False, f'the backend "{BACKEND}" does not run: {how}; set "mode": 2 together with the backend'
    return True, f'the backend "{BACKEND}" compiles whole graphs in mode {name}; {_cache()}'


def _details(ours: Any) -> str:
    idle = getattr(ours, "idle", None)
    if idle:
        return f", and do nothing: {idle}"
    options, gate = ours.options, getattr(ours, "max_tokens", None)
    upto = "" if gate is None else f", on graphs for at most {gate} tokens"
    return f": mhc={options.mhc}, projections={options.projections}{upto}; {_cache()}"


def _cache() -> str:
    return "each graph that is compiled gets a line; one from a cache was treated when it went in, and gets none"


def _never_compiled(config: Any, mode: int) -> str | None:
    """Why vLLM does not compile this model on this platform at all, where that is known."""
    model = config.model_config
    architectures = set(getattr(model, "architectures", None) or ())
    if not any("DeepseekV4" in a or "DeepSeekV4" in a for a in architectures):
        return None
    from vllm import __version__
    from vllm.platforms import current_platform

    release = tuple(int(part) for part in __version__.split(".")[:2] if part.isdecimal())
    if not current_platform.is_cuda() or release < _NOT_COMPILED_SINCE or mode == 1:
        return None
    return (
        f"vLLM {__version__} runs DeepSeek-V4 on NVIDIA in breakable CUDA graphs (mode NONE) and does not mark its "
        "model for compilation; VLLM_USE_BREAKABLE_CUDAGRAPH=0 together with "
        f'{{"mode": 1, "backend": "{BACKEND}"}} is left to be tried, and 0.22.1 compiles it'
    )


def _is_cpu() -> bool:
    try:
        from vllm.platforms import current_platform

        return bool(current_platform.is_cpu())
    except (ImportError, AttributeError):
        return False


def _pass_key() -> str:
    try:
        from vllm.platforms import current_platform

        return str(current_platform.pass_key)
    except (ImportError, AttributeError):
        return HOOK
