"""Dynamo's bytecode as source, by depyf: an optional extra that may be absent, or too old for this torch or Python."""

from __future__ import annotations

import threading
import types
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from dsv4_compile.dump.writer import GraphDump

__all__ = ["expect"]

_ABSENT = "Dynamo's bytecode is missing: it takes depyf (pip install 'dsv4_compile[depyf]')"

_pending: dict[str, GraphDump] = {}
_lock = threading.Lock()
_is_hooked = False


def expect(dump: GraphDump) -> None:
    """Dynamo writes the bytecode of a frame after its graph has been compiled: keep it for this graph then."""
    try:
        import depyf  # noqa: F401
    except Exception as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == "depyf"
        dump.note(_ABSENT if is_absent else f"Dynamo's bytecode is missing: depyf cannot be imported ({_brief(error)})")
        return
    name = _compile_id()
    if name is None:
        return
    global _is_hooked
    with _lock:
        _pending[name] = dump
        if not _is_hooked:
            from torch._dynamo.convert_frame import register_bytecode_hook

            register_bytecode_hook(_keep)
            _is_hooked = True


def _keep(code: types.CodeType, new_code: types.CodeType) -> None:
    """The hook: `new_code` replaces `code`."""
    dump = _pending.pop(_compile_id() or "", None)
    if dump is None:
        return
    import depyf

    try:
        text = depyf.decompile(new_code)
    except Exception as error:
        dump.note(f"depyf {depyf.__version__} could not decompile Dynamo's bytecode of {code.co_name}: {_brief(error)}")
        return
    dump.bytecode(text)


def _compile_id() -> str | None:
    current = torch._guards.CompileContext.current_compile_id()
    return None if current is None else str(current)


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
