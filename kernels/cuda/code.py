"""Machine code of kernels in CUDA C++: compiled with NVRTC, kept on disk, loaded."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsv4_compile.kernels.choice.store import cache_folder
from dsv4_compile.kernels.driver import bindings, check

__all__ = ["loaded", "machine_code", "texts"]

logger = logging.getLogger("dsv4_compile.kernels")


def texts(source: Path) -> dict[str, bytes]:
    """`source` and the headers beside it, by name."""
    return {path.name: path.read_bytes() for path in (source, *sorted(source.parent.glob("*.cuh")))}


def machine_code(
    name: str, files: Mapping[str, bytes], macros: Mapping[str, str | int], capability: tuple[int, int]
) -> bytes:
    """The first of `files` compiled for the architecture `capability`; from Inductor's cache folder if it is there.

    Args:
        name: what the name of the file begins with that it is kept in.
        files: the source, then what it includes, by name.
        macros: that are defined.

    Raises:
        RuntimeError: NVRTC cannot compile it; the message has the log.
    """
    _, nvrtc = bindings()
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", "--std=c++17"]
    options += [f"-D{macro}={value}" for macro, value in macros.items()]
    key = hashlib.sha256(b"\0".join([*files.values(), repr((options, nvrtc.nvrtcVersion())).encode()])).hexdigest()
    path = cache_folder() / f"{name}-{key}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        pass
    code = _compiled(files, options)
    try:
        from torch._inductor.codecache import write_atomic

        write_atomic(str(path), code, make_dirs=True)
    except OSError as error:
        logger.info("The compiled kernel %s is not kept, the folder cannot be written: %s", name, error)
    return code


def _compiled(files: Mapping[str, bytes], options: list[str]) -> bytes:
    _, nvrtc = bindings()
    (main, source), *headers = files.items()
    names, contents = [name.encode() for name, _ in headers], [text for _, text in headers]
    program = check(nvrtc.nvrtcCreateProgram(source, main.encode(), len(headers), contents, names))
    encoded = [option.encode() for option in options]
    if int(nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)[0]) != 0:
        log = bytearray(check(nvrtc.nvrtcGetProgramLogSize(program)))
        check(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"NVRTC could not compile {main}: {log.decode(errors='replace').strip()}")
    code = bytearray(check(nvrtc.nvrtcGetCUBINSize(program)))
    check(nvrtc.nvrtcGetCUBIN(program, code))
    check(nvrtc.nvrtcDestroyProgram(program))
    return bytes(code)


def loaded(code: bytes, entry: str, shared_bytes: int) -> Any:
    """The handle of kernel `entry` in the current context, with up to `shared_bytes` of dynamic shared memory."""
    driver, _ = bindings()
    library = check(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0))
    handle = check(driver.cuLibraryGetKernel(library, entry.encode()))
    function = check(driver.cuKernelGetFunction(handle))  # loads it into the current context
    if shared_bytes:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
    return function
