"""The plugin `dsv4` of vLLM's group `vllm.general_plugins`.

vLLM calls `register` in the process that makes the configuration, in the engine's and in every worker's. It

- registers the operators `dsv4::...`: a compilation that vLLM finds in its cache calls them and imports nothing;
- watches `VllmConfig`: where something of ours is used it writes the identity of our settings into the configuration,
  which vLLM's cache keys are made of, and logs one line that says what will run, what will not, and why;
- sets our pass where none is set, if `DSV4_VLLM=1` or `--additional-config '{"dsv4": {...}}'` wants that.

Otherwise it is silent. Nothing it does raises: what fails is one line in the log, and the engine runs without us.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from dsv4_compile.options import OptionError
from dsv4_compile.vllm import verdict
from dsv4_compile.vllm.settings import BACKEND, HOOK, PASS

__all__ = ["KEY", "VARIABLE", "register", "switch"]

VARIABLE = "DSV4_VLLM"
"""The environment variable that switches the passes on (1) or the plugin's part in it off (0)."""
KEY = "dsv4"
"""The key of vLLM's `additional_config`: options as those of `torch.compile`, or `true`."""
_IDENTITY = "dsv4_compile"

# A name below vLLM's, so that its logging prints the lines.
logger = logging.getLogger("vllm.dsv4_compile")


def register() -> None:
    """The entry point. May be called any number of times."""
    try:
        from dsv4_compile.kernels import linear  # noqa: F401
        from dsv4_compile.kernels.mhc import operators  # noqa: F401

        _watch()
    except Exception as error:
        _once(logging.WARNING, f"nothing of ours runs with this vLLM: {_brief(error)}")


def _watch() -> None:
    """Has every `VllmConfig` that is made pass through us."""
    from vllm.config import VllmConfig

    original: Callable[..., None] = VllmConfig.__post_init__
    if getattr(original, "of_dsv4", False):
        return

    @functools.wraps(original)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        asked = _safely(_before, self)
        original(self, *args, **kwargs)
        _safely(_after, self, asked)

    made.of_dsv4 = True  # type: ignore[attr-defined]
    VllmConfig.__post_init__ = made


def _safely(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        _once(logging.WARNING, f"nothing of ours was set up: {_brief(error)}")
        return None


def _before(config: Any) -> bool:
    """Sets our pass where that is wanted, and our identity where something of ours is used.

    Returns whether the backend is ours, which a platform may yet change.
    """
    compilation = config.compilation_config
    _tidy(compilation.inductor_compile_config)
    is_backend = compilation.backend == BACKEND
    wish = _wish(config)
    if wish is not None and not is_backend:
        _set_pass(compilation, wish)
    if is_backend:
        _identify(config, _identity_of_backend())
    elif (ours := _own(compilation)) is not None:
        _identify(config, ours.uuid())
    return is_backend


def _tidy(hooks: dict[str, Any]) -> None:
    """Puts right, or takes out, what would stop the engine: our pass in another hook, or its name instead of it."""
    import dsv4_compile

    for hook, found in list(hooks.items()):
        if isinstance(found, str) and found.startswith("dsv4_compile"):
            if (hook, found) == (HOOK, PASS):
                hooks[hook] = dsv4_compile.post_grad_pass
                continue
            _once(logging.WARNING, f"{found!r} in {hook} is not used: write inductor_passes={{{HOOK!r}: {PASS!r}}}")
        elif verdict.is_ours(found) and hook != HOOK:
            _once(logging.WARNING, f"the pass cannot run in the hook {hook} and was taken out there: use {HOOK}")
        else:
            continue
        del hooks[hook]


def switch() -> bool | None:
    """What `DSV4_VLLM` says, None where it is not set.

    Raises:
        OptionError: it is neither 1, true, yes, on nor 0, false, no, off.
    """
    word = os.environ.get(VARIABLE, "").strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    if word:
        raise OptionError(f"{VARIABLE} must be 1 or 0, and it is {word!r}.")
    return None


def _wish(config: Any) -> Mapping[str, Any] | None:
    """The options with which the passes are switched on, or None."""
    wanted = switch()
    if wanted is False:
        return None
    additional = config.additional_config
    found = additional.get(KEY) if isinstance(additional, Mapping) else None
    if isinstance(found, Mapping):
        return found
    if found not in (None, True, False):
        raise OptionError(f'additional_config["{KEY}"] must be true or an object of options, and it is {found!r}.')
    return {} if found or wanted else None


def _set_pass(compilation: Any, options: Mapping[str, Any]) -> None:
    from dsv4_compile import standalone

    taken = compilation.inductor_compile_config.get(HOOK)
    if taken is not None and not verdict.is_ours(taken):
        raise OptionError(f"Inductor's hook {HOOK} is taken by {type(taken).__name__}; vLLM has one place there.")
    if taken is None:
        chosen = standalone.graph_pass(options) if options else standalone.post_grad_pass
        compilation.inductor_compile_config[HOOK] = chosen


def _own(compilation: Any) -> Any:
    """Our pass, where it is set."""
    found = compilation.inductor_compile_config.get(HOOK)
    return found if verdict.is_ours(found) else None


def _identity_of_backend() -> str:
    from dsv4_compile.backend import graph_passes
    from dsv4_compile.options import Options

    return graph_passes(Options.resolve(None)).uuid()


def _identify(config: Any, identity: str) -> None:
    """vLLM's keys have the name of a backend in them, and not what `DSV4_OPTIONS` asks it for."""
    if isinstance(config.additional_config, dict):  # another engine may have been given the same one
        config.additional_config = {**config.additional_config, _IDENTITY: identity}


def _after(config: Any, is_backend: bool | None) -> None:
    """Says what will run."""
    compilation = config.compilation_config
    ours = _own(compilation)
    if not is_backend and ours is None:
        return
    runs, text = verdict.of(config, ours, bool(is_backend))
    _once(logging.INFO if runs else logging.WARNING, text)


@functools.cache
def _once(level: int, text: str) -> None:
    logger.log(level, "dsv4: %s", text)


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
