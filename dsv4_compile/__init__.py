"""A torch.compile backend that gives an untouched eager DeepSeek-V4 the speed of a rewritten one.

compiled = torch.compile(model, backend="dsv4")       # no import of this package needed
print(dsv4_compile.report())                          # what was matched, what was not, and why
"""

import sys as _sys
from pathlib import Path as _Path
from typing import TYPE_CHECKING as _TYPE_CHECKING

__version__ = "0.1.0"

_here = _Path(__file__).parent
if not (_here / "passes").exists() and (_here.parent / "passes" / "mhc.py").exists():
    # A checkout: `passes/` and `kernels/` lie beside this folder. Installed, they are inside it.
    __path__.append(str(_here.parent))

from dsv4_compile.options import OptionError, Options
from dsv4_compile.report import CompileReport, GraphReport, report, reports

if _TYPE_CHECKING or "torch" in _sys.modules:
    from dsv4_compile.standalone import graph_pass, post_grad_pass
else:
    # Commands that read a dump need no torch and do not wait for it; vLLM wants the name in the module's dictionary.
    from dsv4_compile.deferred import Deferred as _Deferred

    post_grad_pass = _Deferred()  # type: ignore[assignment]

if _TYPE_CHECKING:
    from dsv4_compile.runtime.ragged import RaggedBuffers

__all__ = [
    "CompileReport",
    "GraphReport",
    "OptionError",
    "Options",
    "RaggedBuffers",
    "__version__",
    "graph_pass",
    "post_grad_pass",
    "report",
    "reports",
]


_LATER = {"RaggedBuffers": "dsv4_compile.runtime.ragged", "graph_pass": "dsv4_compile.standalone"}


def __getattr__(name: str) -> object:
    """What needs torch, when it is first asked for. Commands that read a dump need none and do not wait for it."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    globals()[name] = getattr(import_module(_LATER[name]), name)
    return globals()[name]
