"""`doctor`: what there is on this machine, and what a compilation of DeepSeek-V4 would use here, and why."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv4_compile.cli import output
from dsv4_compile.vllm import settings

if TYPE_CHECKING:
    from dsv4_compile.options import Options

__all__ = ["Check", "checks", "print_checks"]

OK, NOTE, PROBLEM = "ok", "note", "problem"

_STREAMS, _HIDDEN = 4, 4096
_LANGUAGES = {"cuda": "CUDA C++", "cpp": "C++"}
_ASKED = "DSV4_OPTIONS asks for it"
_SIMILAR = 0.75
"""Similarity from which on the name of a variable is a slip of the pen."""
_MEASURED = "timed once for each range of token counts; DSV4_MEASURE=0 follows a rule"


@dataclass(frozen=True)
class Check:
    """One line. `state` is "ok", "note" (something that is not there and need not be) or "problem"."""

    name: str
    state: str
    value: str
    detail: str = ""


def checks(vllm: Mapping[str, Any] | None = None) -> list[Check]:
    """All of them; one that raises is a problem and keeps no other from being made.

    Args:
        vllm: what `--compilation-config` of vLLM is given.
    """
    made: list[Check] = []
    parts: tuple[Callable[[], Iterator[Check]], ...] = (
        _versions,
        _device,
        _compilers,
        _kernels,
        _compilation,
        _options,
        _variables,
        _folders,
        _extras,
        lambda: _vllm(vllm),
    )
    for part in parts:
        try:
            made += part()
        except Exception as error:
            made.append(Check(part.__name__.strip("_"), PROBLEM, "could not be found out", _brief(error)))
    return made


def _versions() -> Iterator[Check]:
    import torch

    import dsv4_compile

    yield Check("dsv4_compile", OK, dsv4_compile.__version__, str(Path(dsv4_compile.__file__).parent))
    fits = (3, 11) <= sys.version_info[:2] < (3, 14)
    yield Check("Python", OK if fits else PROBLEM, platform.python_version(), "" if fits else "3.11 to 3.13 is needed")
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    fits = (2, 11) <= release < (2, 14)
    yield Check("torch", OK if fits else PROBLEM, torch.__version__, "" if fits else "2.11 to 2.13 is needed")
    found = importlib.metadata.entry_points(group="torch_dynamo_backends", name="dsv4")
    why = "" if found else "no entry point torch_dynamo_backends: install the package (pip install .)"
    yield Check('backend="dsv4"', OK if found else PROBLEM, "registered" if found else "not registered", why)


def _device() -> Iterator[Check]:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = "this torch is built without CUDA" if built is None else f"torch is built for {built} and finds no card"
        yield Check("card", NOTE, "none, the CPU is used", why)
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"compute capability {properties.major}.{properties.minor}"
        memory = f"{properties.total_memory / 1e9:.0f} GB, {properties.multi_processor_count} multiprocessors"
        is_old = (properties.major, properties.minor) < (8, 0)
        detail = f"{capability}, {memory}" + (", older than 8.0: mHC runs in Triton" if is_old else "")
        yield Check(f"card cuda:{index}", NOTE if is_old else OK, properties.name, detail)


def _compilers() -> Iterator[Check]:
    compiler = os.environ.get("CXX", "").split() or ["g++"]
    path = shutil.which(compiler[0]) or shutil.which("clang++")
    why = "" if path else "Inductor writes C++; install g++ or name yours in CXX"
    yield Check("C++ compiler", OK if path else PROBLEM, path or "none", why)
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc") or (shutil.which("nvcc", path=f"{home}/bin") if home else None)
    yield Check("nvcc", OK if nvcc else NOTE, nvcc or "none", "" if nvcc else "needed by TileLang only")
    yield _package("triton", "its kernels, and Inductor's on a GPU, need it")
    yield _package("tilelang", "for mhc='tilelang' only: pip install 'dsv4_compile[tilelang]'")


def _package(name: str, purpose: str) -> Check:
    """Whether a package is there and can be imported."""
    if importlib.util.find_spec(name) is None:
        return Check(name, NOTE, "not installed", purpose)
    try:
        importlib.import_module(name)
    except Exception as error:
        return Check(name, PROBLEM, "cannot be imported", _brief(error))
    return Check(name, OK, importlib.metadata.version(name))


def _kernels() -> Iterator[Check]:
    import torch

    from dsv4_compile.kernels.mhc import families
    from dsv4_compile.options import CHOICES

    asked = _in_force().mhc
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    of = f"for {_STREAMS} streams of {_HIDDEN} in bfloat16 on {device.type}"
    chosen, why = families.resolve("auto", device, _STREAMS, _HIDDEN, torch.bfloat16)
    best = families.BEST.get(device.type, ("reference",))[0]
    hidden = "" if chosen in CHOICES["mhc"] else "; a family that 'auto' picks, and no value of mhc="
    detail = f"{of}{f': {why}' if why else hidden}"
    yield Check("mhc='auto'", OK if chosen == best else PROBLEM, chosen, detail)
    for wish in families.FAMILIES:
        if wish in (chosen, "reference"):
            continue
        family, why = families.resolve(wish, device, _STREAMS, _HIDDEN, torch.bfloat16)
        usable = family == wish
        if wish in CHOICES["mhc"]:
            value = "usable" if usable else f"falls back to {family}"
            state = OK if usable else PROBLEM if wish == asked else NOTE
            yield Check(f"mhc={wish!r}", state, value, "; ".join(filter(None, [_ASKED * (wish == asked), why])))
        else:
            detail = f"{'' if usable else f'{why}; '}{_elsewhere(wish, families.BEST)}"
            yield Check(f"{_LANGUAGES.get(wish, wish)} kernels", NOTE, "not used here", detail)


def _elsewhere(family: str, best: Mapping[str, tuple[str, ...]]) -> str:
    """Where a family that is no value of `mhc=` runs."""
    devices = [device for device, order in best.items() if order[0] == family]
    return f"mhc='auto' takes them on {' and '.join(devices) or 'no device'}; they cannot be asked for"


def _in_force() -> Options:
    """The options of this process; the defaults where `DSV4_OPTIONS` cannot be used, which `_options` says."""
    from dsv4_compile.options import OptionError, Options

    try:
        return Options.resolve({})
    except OptionError:
        return Options()


def _compilation() -> Iterator[Check]:
    """What options lead to in this process: those of `DSV4_OPTIONS`, and the defaults."""
    import torch

    from dsv4_compile.backend import CAPTURING, capture_of, cuts, first_effective
    from dsv4_compile.runtime.recorder import recorder_of

    options, is_cuda = _in_force(), torch.cuda.is_available()
    device = torch.device("cuda" if is_cuda else "cpu")
    effective = first_effective(options, device.type)
    for name in ("projections", "cudagraphs"):
        asked, runs = getattr(options, name), effective[name]
        differs = isinstance(runs, Mapping)
        value, why = (str(runs["value"]), str(runs["reason"])) if differs else (str(runs), "")
        if (name, asked) == ("projections", "auto") and not differs:
            value, why = ("measured", _MEASURED) if is_cuda else ("serial", "as they are: as fast on a CPU")
        if (name, asked) == ("projections", "streams") and not is_cuda:
            differs, value, why = True, "serial", f"there are no streams on {device}"
        if name == "cudagraphs" and asked in CAPTURING and recorder_of(device) is None:
            differs, value, why = True, "off", f"there are no CUDA graphs on {device}"
        yield Check(f"{name}={asked!r}", PROBLEM if differs and asked != "auto" else OK, value, why)
    value = "graphs are cut" if cuts(capture_of(options, device.type)[0]) else "a graph is one piece"
    yield Check("pieces", OK, value, "cudagraphs= and DSV4_PIECES=1 cut graphs")


def _options() -> Iterator[Check]:
    from dsv4_compile import names
    from dsv4_compile.options import DISABLE_VARIABLE, OPTIONS_VARIABLE, OptionError, Options, disabled

    try:
        names.check(Options.resolve({}))
        is_off = disabled()
    except OptionError as error:
        yield Check("environment", PROBLEM, "cannot be used", str(error))
        return
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith("DSV4_")}
    text = ", ".join(f"{name}={value}" for name, value in found.items()) or "no DSV4_ variables"
    yield Check(
        "environment", PROBLEM if is_off else OK, text, f"{DISABLE_VARIABLE} turns the backend off" if is_off else ""
    )
    if OPTIONS_VARIABLE in found:
        yield Check(OPTIONS_VARIABLE, NOTE, found[OPTIONS_VARIABLE], "stronger than options= of every call")


def _variables() -> Iterator[Check]:
    """Variables with a value that is not understood, and those that look like one of ours and that nobody reads."""
    from dsv4_compile.dump.limit import LIMIT_VARIABLE, limit
    from dsv4_compile.kernels import environment
    from dsv4_compile.options import DISABLE_VARIABLE, NAMES, OPTIONS_VARIABLE, OptionError
    from dsv4_compile.standalone import MAX_TOKENS_VARIABLE, token_limit
    from dsv4_compile.vllm.plugin import VARIABLE, switch

    for name in environment.WORDS:
        if problem := environment.problem(name):
            yield Check(name, PROBLEM, "cannot be used", problem)
    readers: dict[str, Callable[[], object]] = {
        LIMIT_VARIABLE: limit,
        MAX_TOKENS_VARIABLE: token_limit,
        VARIABLE: switch,
    }
    for name, read in readers.items():
        try:
            read()
        except OptionError as error:
            yield Check(name, PROBLEM, "cannot be used", str(error))
    known = (*environment.WORDS, *readers, OPTIONS_VARIABLE, DISABLE_VARIABLE)
    for name in sorted(name for name in os.environ if name.startswith("DSV4_") and name not in known):
        option = name.removeprefix("DSV4_").lower()
        close = difflib.get_close_matches(name, known, n=1, cutoff=_SIMILAR)
        if option in NAMES:
            yield Check(name, PROBLEM, "is not read", f"{option!r} is an option; options go into {OPTIONS_VARIABLE}")
        elif close:
            yield Check(name, PROBLEM, "is not read", f"{close[0]} was probably meant")


def _folders() -> Iterator[Check]:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    from dsv4_compile.kernels.choice.store import cache_folder

    yield _folder("Inductor's cache", Path(cache_dir()), "TORCHINDUCTOR_CACHE_DIR")
    yield _folder("kernels and choices", cache_folder(), "TORCHINDUCTOR_CACHE_DIR")
    if triton := os.environ.get("TRITON_CACHE_DIR"):  # without it Triton keeps its code in Inductor's folder
        yield _folder("Triton's cache", Path(triton), "TRITON_CACHE_DIR")


def _folder(name: str, folder: Path, variable: str) -> Check:
    nearest = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    is_writable = nearest.is_dir() and os.access(nearest, os.W_OK)
    why = "" if is_writable else f"it cannot be written: every process compiles anew; set {variable}"
    return Check(name, OK if is_writable else PROBLEM, str(folder), why)


def _extras() -> Iterator[Check]:
    yield _package("depyf", "a dump then has no bytecode of Dynamo: pip install 'dsv4_compile[depyf]'")
    yield _package("matplotlib", "bench --plot needs it: pip install 'dsv4_compile[plot]'")


def _vllm(config: Mapping[str, Any] | None) -> Iterator[Check]:
    try:
        yield Check("vllm", OK, importlib.metadata.version("vllm"))
    except importlib.metadata.PackageNotFoundError:
        yield Check("vllm", NOTE, "not installed", "its settings can be checked all the same: --vllm-config")
    if config is None:
        return
    found = list(settings.problems(config))
    for sentence in found:
        yield Check("vLLM's settings", PROBLEM, "nothing of ours runs", sentence)
    if not found:
        yield Check("vLLM's settings", OK, "ours runs", "unless vLLM is started with --enforce-eager or -O0")


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def print_checks(found: list[Check]) -> None:
    """Prints them as a table, the problems once more at its end."""
    output.table("", ("", "", "found", ""), ((c.name, c.state, c.value, c.detail) for c in found))
    bad = [check for check in found if check.state == PROBLEM]
    for check in bad:
        output.line(f"{check.name}: {check.value}{f': {check.detail}' if check.detail else ''}", "red")
    if not bad:
        output.line("No problem found.", "green")
