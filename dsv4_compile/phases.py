"""Tells Dynamo which sizes of transformers' DeepSeek-V4 cache change, before it has seen them change.

Dynamo takes a size for fixed until it has met another. The lists and counters of the compressors change when a window
is full, every fourth or 128th token, so each phase of the cache (0, 1, 2 or more tokens in the window, or a full one)
becomes a graph twice: once with the number of windows so far, once with any number. Known as changing from the first
graph on, the second time falls away: 8 graphs instead of 15 in the first 34 steps behind a prompt of 1000 tokens.

Dynamo's profile of sizes (`torch._dynamo.pgo`) is the place: it has an entry for each input, by its source.
"""

from __future__ import annotations

import logging
import re
from typing import Any

__all__ = ["foresee"]

logger = logging.getLogger("dsv4_compile")

_COUNTER = re.compile(r"(?P<layer>.*)\.entry_count\['\w+'\]")
_LIST = re.compile(r"(?P<layer>.*)\.(compressed_kv|buffer_kv|buffer_gate)\['\w+'\]")
_TOKENS = 1
"""The axis of tokens or windows in the compressors' lists, `[B, T, D]`."""


def foresee() -> int:
    """Marks the sizes of compressors that have been seen so far as changing; the next graph has symbols for them.

    Only of layers with a counter `entry_count`: caches of fixed size have none. Without effect where Dynamo keeps no
    profile of sizes (`dynamic=False`). Returns how many entries there are.
    """
    try:
        from torch._dynamo import pgo

        return sum(_mark(code.automatic_dynamic, pgo.auto_dynamic) for code in pgo.get_code_state().values())
    except (ImportError, AttributeError, TypeError) as error:  # it is not public
        logger.debug("Dynamo's profile of sizes is not as expected: %s", error)
        return 0


def _mark(entries: dict[str, Any], dynamic: Any) -> int:
    counters = {source: found["layer"] for source in entries if (found := _COUNTER.fullmatch(source))}
    layers, count = set(counters.values()), len(counters)
    for source, entry in entries.items():
        if source in counters:
            entry.scalar = dynamic
        elif (found := _LIST.fullmatch(source)) and found["layer"] in layers and isinstance(entry.size, tuple):
            entry.size = tuple(dynamic if axis == _TOKENS else size for axis, size in enumerate(entry.size))
            count += 1
    return count
