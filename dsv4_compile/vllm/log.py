"""A line in vLLM's log for each graph that was compiled."""

from __future__ import annotations

import logging
import sys

from dsv4_compile.report import GraphReport, summary

__all__ = ["announce"]

logger = logging.getLogger("vllm.dsv4_compile")


def announce(graph: GraphReport) -> None:
    """Logs what was done to a graph, in a process that runs vLLM."""
    if "vllm" in sys.modules:
        logger.info("dsv4: %s", summary(graph))
