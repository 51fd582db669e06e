"""Environment variables that have a word for a value: the words there are, and what happens to another one.

A word that is none of them breaks nothing: it counts as if the variable were not set, and a warning says so, once.
"""

from __future__ import annotations

import functools
import logging
import os

__all__ = ["WORDS", "check", "problem", "word"]

logger = logging.getLogger("dsv4_compile")

WORDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "DSV4_TUNE": ("auto", ("0", "1", "auto")),
    "DSV4_MEASURE": ("1", ("0", "1")),
    "DSV4_BESIDE": ("0", ("0", "1")),
    "DSV4_PIECES": ("0", ("0", "1")),
    "DSV4_CHECK": ("0", ("0", "1")),
    "DSV4_VLLM_MHC": ("auto", ("auto", "always", "never")),
}
"""For each variable its default and its words."""

_SWITCH = {"true": "1", "yes": "1", "on": "1", "false": "0", "no": "0", "off": "0"}
"""What is 1 or 0 as well where there are no other words."""


def word(name: str) -> str:
    """What one of `WORDS` says, its default where it is not set, empty or wrong; a wrong one is told once."""
    found = _read(name)
    if found is None:
        _warn(problem(name) or "")
    return found or WORDS[name][0]


def problem(name: str) -> str | None:
    """What is wrong with the value of one of `WORDS`, without a full stop, or None."""
    if _read(name) is not None:
        return None
    default, words = WORDS[name]
    return f"{name} is {os.environ[name]!r}; it can be {', '.join(words[:-1])} or {words[-1]}, and {default} is used"


def check() -> None:
    """Tells what is wrong in all of them, also in one that is not asked for here."""
    for name in WORDS:
        word(name)


def _read(name: str) -> str | None:
    """The word, empty where there is none; None where it is not one of those there are."""
    words = WORDS[name][1]
    text = os.environ.get(name, "").strip().lower()
    if words == ("0", "1"):
        text = _SWITCH.get(text, text)
    return text if text in ("", *words) else None


@functools.cache
def _warn(sentence: str) -> None:
    logger.warning("%s.", sentence)
