"""`dump_dir`: every graph as readable text, before and after every pass, and the report beside it."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.fx import Graph

from dsv4_compile.files import write_atomically
from dsv4_compile.report import CompileReport

__all__ = ["Writer", "problem", "write_report"]

logger = logging.getLogger("dsv4_compile")

_problems: dict[str, str] = {}  # by folder


@dataclass(frozen=True)
class Writer:
    """Writes one graph per stage to `folder/graph_<id>/<stage>.py`."""

    folder: str
    graph_id: str

    def __call__(self, stage: str, graph: Graph) -> None:
        module = torch.fx.GraphModule(graph.owning_module or torch.nn.Module(), graph)
        try:
            text = module.print_readable(print_output=False, include_stride=True, include_device=True)
        except Exception as error:
            text = f"# print_readable failed: {error}\n{graph}"
        name = re.sub(r"\W+", "_", f"graph_{self.graph_id}")
        _write(self.folder, f"{name}/{stage}.py", text)


def write_report(folder: str, report: CompileReport) -> None:
    """Writes `report.json`, replacing the one of an earlier graph of the same process."""
    _write(folder, "report.json", report.to_json())


def problem(folder: str) -> str | None:
    """Why the dump in `folder` is not complete, or None."""
    return _problems.get(folder)


def _write(folder: str, name: str, text: str) -> None:
    try:
        write_atomically(Path(folder) / name, text)
    except OSError as error:
        if folder not in _problems:
            _problems[folder] = f"the dump could not be written: {error}"
            logger.warning("The dump could not be written: %s.", error)
