"""`run`: a script as Python would run it, with a dump of everything that the backend compiles in it."""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsv4_compile.dump.limit import LIMIT_VARIABLE
from dsv4_compile.dump.limit import limit as parsed_limit
from dsv4_compile.options import OPTIONS_VARIABLE, OptionError

__all__ = ["environment", "run"]


def environment(dump_dir: str, limit: str | None) -> dict[str, str]:
    """The variables that make this process and its children write a dump; other options that are set there stay.

    Raises:
        OptionError: `DSV4_OPTIONS` is set to something else than a JSON object, or the limit is no number of bytes.
    """
    text = os.environ.get(OPTIONS_VARIABLE, "").strip() or "{}"
    try:
        options: Any = json.loads(text)
    except ValueError as error:
        raise OptionError(f"{OPTIONS_VARIABLE} must be a JSON object, and {text!r} is not JSON.") from error
    if not isinstance(options, dict):
        raise OptionError(f"{OPTIONS_VARIABLE} must be a JSON object, and it holds {text}.")
    variables = {OPTIONS_VARIABLE: json.dumps({**options, "dump_dir": os.path.abspath(dump_dir)})}
    if limit is not None:
        variables[LIMIT_VARIABLE] = limit
    parsed_limit({**os.environ, **variables})
    return variables


def run(script: Path, arguments: Sequence[str]) -> tuple[int, str]:
    """Runs the script as `__main__` in this process.

    Returns:
        Its exit status, and the exception that ended it, in a line; empty where there was none.
    """
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.resolve().parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return (stop.code, "") if isinstance(stop.code, int) else (int(stop.code is not None), "")
    except KeyboardInterrupt:
        return 130, "KeyboardInterrupt"
    except BaseException as error:
        traceback.print_exc()
        return 1, f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    return 0, ""
