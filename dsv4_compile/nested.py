"""Methods decorated with `@torch.compile` inside a compiled model.

Dynamo inlines such a method, but looks for its defaults and its closure on the wrapper that `torch.compile` made, which
has others: the compilation ends in an internal error (torch 2.11 to 2.13). Told where the method itself is, it works.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

__all__ = ["watch"]

_INLINE = "_torchdynamo_inline"
"""The attribute of a wrapper that holds what it wraps."""


@functools.cache
def watch() -> None:
    """From now on Dynamo is told, for each decorated method that it meets while it traces."""
    try:
        from torch._dynamo.source import AttrSource
        from torch._dynamo.variables.functions import UserMethodVariable
    except ImportError:
        return
    original = UserMethodVariable.__init__

    @functools.wraps(original)
    def init(self: Any, fn: Any, obj: Any, source_fn: Any = None, **kwargs: Any) -> None:
        source: Any = kwargs.get("source")
        method = source  # of which there may be one wrapper less
        wrappers = 0
        while isinstance(method, AttrSource) and method.member == _INLINE:
            method, wrappers = method.base, wrappers + 1
        while (inner := inspect.getattr_static(fn, _INLINE, None)) is not None:
            fn, wrappers = inner, wrappers + 1
        if wrappers and (source_fn is not None or source is not None):
            source_fn = AttrSource(method, "__func__") if source_fn is None else source_fn
            for _ in range(wrappers):
                source_fn = AttrSource(source_fn, _INLINE)
        original(self, fn, obj, source_fn=source_fn, **kwargs)

    UserMethodVariable.__init__ = init  # type: ignore[method-assign]
