"""Whether anything of ours runs in vLLM, read off the JSON that `--compilation-config` takes; vLLM need not be there.

vLLM hands a pass to Inductor in its modes 2 (DYNAMO_TRACE_ONCE) and 3 (VLLM_COMPILE) with its backend "inductor". It
looks the pass up by a dotted name, which belongs into `inductor_passes`, under the name of the hook. In its modes 1
(STOCK_TORCH_COMPILE) and 2 it takes any backend of Dynamo by name, ours for instance, which brings the passes itself.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["BACKEND", "HOOK", "MODES", "PASS", "problems"]

BACKEND = "dsv4"
HOOK = "post_grad_custom_post_pass"
PASS = "dsv4_compile.post_grad_pass"
MODES = ("NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE", "VLLM_COMPILE")

_RIGHT = f'{{"mode": 3, "inductor_passes": {{"{HOOK}": "{PASS}"}}}}'
_KEYS = ("mode", "level", "backend", "inductor_passes", "inductor_compile_config")


def problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Why nothing of ours will run with these settings, one sentence each; nothing when it will."""
    yield from _keys(config)
    mode, found = _mode(config)
    backend = config.get("backend") or "inductor"
    if mode is None:
        yield f"vLLM has no mode {found!r}; it has {', '.join(f'{i} ({name})' for i, name in enumerate(MODES))}."
    elif mode == 0:
        yield 'Nothing will run: vLLM\'s mode NONE compiles nothing; set "mode": 3 (VLLM_COMPILE).'
    elif backend == BACKEND:
        if mode == 3:
            yield f'vLLM\'s mode VLLM_COMPILE has its own backend; with "backend": "{BACKEND}" set "mode": 2.'
        return
    elif mode == 1:
        yield (
            "The pass will not run: vLLM's mode STOCK_TORCH_COMPILE does not hand passes to Inductor; "
            f'set "mode": 3 (VLLM_COMPILE), or "backend": "{BACKEND}".'
        )
    if backend not in ("inductor", BACKEND):
        close = difflib.get_close_matches(str(backend), [BACKEND], cutoff=0.6)
        meant = f'; "{BACKEND}" was probably meant' if close else '; leave "backend" out'
        yield f"The pass will not run: vLLM's backend {backend!r} runs no passes of Inductor{meant}."
    yield from _places(config)


def _keys(config: Mapping[str, Any]) -> Iterator[str]:
    """Names that look like those that matter here; vLLM refuses what it does not know."""
    for key in config:
        close = difflib.get_close_matches(str(key), _KEYS, cutoff=0.8)
        if close and key not in _KEYS:
            yield f"vLLM has no setting {key!r}; {close[0]!r} was probably meant."


def _mode(config: Mapping[str, Any]) -> tuple[int | None, Any]:
    found = config.get("mode", config.get("level", 3))
    if found is None:
        return 3, found
    if isinstance(found, str) and found.upper() in MODES:
        return MODES.index(found.upper()), found
    if isinstance(found, str) and found.isdecimal():
        found = int(found)
    return (found if isinstance(found, int) and not isinstance(found, bool) and found in range(4) else None), found


def _places(config: Mapping[str, Any]) -> Iterator[str]:
    passes, plain = config.get("inductor_passes") or {}, config.get("inductor_compile_config") or {}
    if not isinstance(passes, Mapping) or not isinstance(plain, Mapping):
        yield f"inductor_passes and inductor_compile_config must be JSON objects; an example is {_RIGHT}."
        return
    misplaced, ours = (
        {hook: value for hook, value in where.items() if isinstance(value, str) and value.startswith("dsv4_compile")}
        for where in (plain, passes)
    )
    for hook in misplaced:
        yield f"vLLM looks up no name in inductor_compile_config, and {hook} is one there; write {_RIGHT}."
    for hook, value in ours.items():
        if value != PASS:
            yield f"There is no pass {value!r}; the name is {PASS!r}."
        if hook != HOOK:
            close = difflib.get_close_matches(hook, [HOOK], cutoff=0.6)
            meant = f", {HOOK} was probably meant" if close else f"; use {HOOK}"
            yield f"The pass is for Inductor's hook {HOOK}, and it is set for {hook!r}{meant}."
    if not ours and not misplaced:
        yield f"No pass of ours is set; an example is {_RIGHT}."
