"""Names of torch in the options: settings of Inductor, and operators to cut at. Whether there are any of that name."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

import torch

from dsv4_compile.options import OptionError, Options

__all__ = ["absence", "check"]

_COMPLETE = ("aten", "prims")
"""Namespaces that get no further operators; those of others may be registered when a model is made."""


def check(options: Options) -> None:
    """Looks up what can be looked up before there is a graph.

    Raises:
        OptionError: a setting that Inductor does not have, or an operator of torch that there is not.
    """
    from torch._inductor import config

    for name in options.inductor:
        if not hasattr(config, name):
            nearest = _nearest(name.replace("-", "_"), list(config.get_config_copy()))
            raise OptionError(f"Option 'inductor' has {name!r}, which torch._inductor.config has not{nearest}.")
    for name in options.split_ops:
        if name.partition("::")[0] in _COMPLETE and not _exists(name):
            raise OptionError(
                f"Option 'split_ops' has {name!r}, and there is no such operator{_nearest_operator(name)}."
            )


def absence(operators: Sequence[str]) -> str:
    """Why nothing was cut at `operators`, which no graph has."""
    missing = [name for name in operators if not _exists(name)]
    reason = f"no graph so far has {', '.join(operators)} once it is decomposed"
    return reason + "".join(f"; no {name} is registered{_nearest_operator(name)}" for name in missing)


def _exists(operator: str) -> bool:
    """Whether an operator is registered under a qualified name, with or without its overload."""
    names = set(torch._C._dispatch_get_all_op_names())
    return operator.removesuffix(".default") in names or operator in _bases(names)


def _bases(names: Collection[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def _nearest_operator(name: str) -> str:
    """The end of a sentence, with operators of the same namespace."""
    space, separator, own = name.partition(".")[0].partition("::")
    bases = _bases(torch._C._dispatch_get_all_op_names())
    alike = [base.removeprefix(space + separator) for base in sorted(bases) if base.startswith(space + separator)]
    return _nearest(own, alike, space + separator)


def _nearest(name: str, candidates: Sequence[str], prefix: str = "") -> str:
    """The end of a sentence."""
    close = [prefix + match for match in difflib.get_close_matches(name, candidates, n=3)]
    return f"; the nearest {'are' if len(close) > 1 else 'is'} {', '.join(map(repr, close))}" if close else ""
