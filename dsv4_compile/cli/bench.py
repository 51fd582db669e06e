"""`bench`: the benchmarks of the repository, from wherever the package is installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dsv4_compile.cli import output

__all__ = ["NAMES", "bench", "script"]

NAMES = {
    "projections": "projections",
    "mhc": "mhc",
    "model": "model",
    "compile-time": "compile_time",
    "dump": "dump",
}
"""Benchmarks by name, and their files."""


def script(name: str) -> Path:
    """The file of a benchmark."""
    spec = importlib.util.find_spec("dsv4_compile.benchmarks")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        if (path := Path(folder) / f"{NAMES[name]}.py").exists():
            return path
    raise FileNotFoundError(f"The benchmark {name} is not installed beside dsv4_compile.")


def bench(name: str, arguments: Sequence[str], as_json: bool) -> int:
    """Runs a benchmark and returns its exit status; as JSON its table goes to the standard error."""
    command = [sys.executable, str(script(name)), *arguments]
    if not as_json:
        return subprocess.run(command, check=False).returncode
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        status = subprocess.run([*command, "--json", str(path)], stdout=sys.stderr, check=False).returncode
        if path.exists():
            output.json_out(json.loads(path.read_text()))
    return status
