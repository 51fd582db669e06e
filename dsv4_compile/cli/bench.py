"""`bench`: the benchmarks of the repository, from wherever the package is installed, as table, data and picture."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dsv4_compile
from dsv4_compile.cli import output
from dsv4_compile.cli.plot import PlotError, check, plot
from dsv4_compile.dump.reader import NoSuchError

__all__ = ["NAMES", "Wish", "bench", "script", "wish"]

NAMES = {
    "projections": "projections",
    "mhc": "mhc",
    "model": "model",
    "compile-time": "compile_time",
    "dump": "dump",
    "decode": "decode",
    "replay": "replay",
    "vllm-engine": "vllm_engine",
}
"""Benchmarks by name, and their files."""


@dataclass(frozen=True)
class Wish:
    """What of a benchmark's command line is ours: `--plot FILE` and `--from FILE`. `arguments` are the benchmark's."""

    arguments: tuple[str, ...]
    plot: Path | None
    source: Path | None


def wish(arguments: Sequence[str], plot: Path | None, source: Path | None) -> Wish:
    """Takes `--plot FILE` and `--from FILE` out of what stands behind the benchmark's name.

    Raises:
        NoSuchError: one has no file, or `--from` has no `--plot`.
    """
    found: dict[str, Path | None] = {"--plot": plot, "--from": source}
    rest = []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name not in found:
            rest.append(word)
            continue
        file = value if equals else next(words, "")
        if not file:
            raise NoSuchError(f"{name} takes the name of a file.")
        found[name] = Path(file)
    if found["--from"] is not None and found["--plot"] is None:
        raise NoSuchError("--from FILE is for a picture of results that there are: give it with --plot FILE.")
    if found["--from"] is not None and rest:
        raise NoSuchError(f"With --from nothing is measured, so {' '.join(rest)} has no meaning; leave it out.")
    return Wish(tuple(rest), found["--plot"], found["--from"])


def script(name: str) -> Path:
    """The file of a benchmark.

    Raises:
        NoSuchError: it was not installed.
    """
    spec = importlib.util.find_spec("dsv4_compile.benchmarks")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        if (path := Path(folder) / f"{NAMES[name]}.py").exists():
            return path
    raise NoSuchError(f"The benchmark {name} is not installed beside dsv4_compile.")


def bench(name: str, asked: Wish, as_json: bool) -> int:
    """Runs a benchmark and returns its exit status; as JSON its table goes to the standard error.

    Raises:
        NoSuchError: there is no such file of results.
        PlotError: the picture cannot be made.
    """
    if asked.plot is not None:
        check(asked.plot)
    if asked.source is not None and asked.plot is not None:
        data = _results(asked.source)
        _draw(name, data, asked.plot)
        if as_json:
            output.json_out(data)
        return 0
    command = [sys.executable, str(script(name)), *asked.arguments]
    if not as_json and asked.plot is None:
        return subprocess.run(command, env=_environment(), check=False).returncode
    with tempfile.TemporaryDirectory() as folder:
        path = _own_json(asked.arguments) or Path(folder) / "results.json"
        stdout = sys.stderr if as_json else None
        command += ["--json", str(path)]
        status = subprocess.run(command, stdout=stdout, env=_environment(), check=False).returncode
        if status == 0 and path.exists():
            data = _results(path)
            if as_json:
                output.json_out(data)
            if asked.plot is not None:
                _draw(name, data, asked.plot)
    return status


def _environment() -> dict[str, str]:
    """In which the benchmark finds the package that runs it, also in a checkout that is not installed."""
    root = str(Path(dsv4_compile.__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


def _own_json(arguments: Sequence[str]) -> Path | None:
    """The file that the benchmark is told to write by its own `--json`."""
    for i, word in enumerate(arguments):
        if word.startswith("--json="):
            return Path(word.removeprefix("--json="))
        if word == "--json" and i + 1 < len(arguments):
            return Path(arguments[i + 1])
    return None


def _draw(name: str, data: Any, path: Path) -> None:
    plot(name, data, path)
    output.warning(f"Written: {path}")


def _results(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise NoSuchError(f"There is no file {path}.") from error
    except OSError as error:
        raise PlotError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise PlotError(f"{path} is no JSON ({error}).") from error
