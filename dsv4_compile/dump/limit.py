"""How large the dump of a process may grow: `DSV4_DUMP_LIMIT`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from dsv4_compile.options import OptionError

__all__ = ["LIMIT_VARIABLE", "limit"]

LIMIT_VARIABLE = "DSV4_DUMP_LIMIT"
"""Environment variable: most bytes that a process writes (`200M`); index and reports do not count."""

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def limit(environ: Mapping[str, str] | None = None) -> int | None:
    """The limit in bytes, None where there is none.

    Raises:
        OptionError: it is no number of bytes.
    """
    text = (os.environ if environ is None else environ).get(LIMIT_VARIABLE, "").strip()
    if not text:
        return None
    parsed = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)B?", text, re.IGNORECASE)
    if parsed is None:
        raise OptionError(f"{LIMIT_VARIABLE} must be a number of bytes such as 200M or 2G, and it is {text!r}.")
    return int(float(parsed[1]) * _UNITS[parsed[2].upper()])
