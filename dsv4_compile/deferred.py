"""`dsv4_compile.post_grad_pass` in a process that has not imported torch yet.

vLLM looks a pass up in the module's `__dict__`, where `__getattr__` of the module does not help. So there is always an
object there; this one becomes the pass when it is used.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Deferred"]


class Deferred:
    """Stands for `standalone.post_grad_pass`, and imports it with the first question that is put to it."""

    def __repr__(self) -> str:
        return "<dsv4_compile.post_grad_pass>"

    @property
    def __class__(self) -> type:
        found: type = _real().__class__
        return found

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise TypeError("the class of the pass is fixed")

    def __getattr__(self, name: str) -> Any:
        return getattr(_real(), name)

    def __call__(self, graph: Any) -> None:
        _real()(graph)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _real().__reduce__()


def _real() -> Any:
    from dsv4_compile.standalone import post_grad_pass

    return post_grad_pass
