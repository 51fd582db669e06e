"""Whether a pass of ours runs in vLLM, read off the JSON that `--compilation-config` takes; vLLM need not be there.

vLLM hands a pass to Inductor in its mode 3 (VLLM_COMPILE) and with its backend "inductor". It looks the pass up by a
dotted name, which belongs into `inductor_passes`, under the name of the hook.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["HOOK", "PASS", "problems"]

HOOK = "post_grad_custom_post_pass"
PASS = "dsv4_compile.post_grad_pass"

_MODES = ("NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE", "VLLM_COMPILE")
_RIGHT = f'{{"mode": 3, "inductor_passes": {{"{HOOK}": "{PASS}"}}}}'


def problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Why the pass will not run with these settings, one sentence each; nothing when it will."""
    mode, found = _mode(config)
    if mode is None:
        yield f"vLLM has no mode {found!r}; it has {', '.join(f'{i} ({name})' for i, name in enumerate(_MODES))}."
    elif mode != 3:
        compiles = "compiles nothing" if mode == 0 else "does not hand passes to Inductor"
        yield f'The pass will not run: vLLM\'s mode {_MODES[mode]} {compiles}; set "mode": 3 (VLLM_COMPILE).'
    backend = config.get("backend") or "inductor"
    if backend != "inductor":
        yield f'The pass will not run: vLLM\'s backend {backend!r} runs no passes of Inductor; leave "backend" out.'
    yield from _places(config)


def _mode(config: Mapping[str, Any]) -> tuple[int | None, Any]:
    found = config.get("mode", config.get("level", 3))
    if found is None:
        return 3, found
    if isinstance(found, str) and found.upper() in _MODES:
        return _MODES.index(found.upper()), found
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
