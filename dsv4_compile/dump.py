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

__all__ = ["Writer", "write_report"]

logger = logging.getLogger("dsv4_compile")


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
        _write(Path(self.folder) / name / f"{stage}.py", text)


def write_report(folder: str, report: CompileReport) -> None:
    """Writes `report.json`, replacing the one of an earlier graph of the same process."""
    _write(Path(folder) / "report.json", report.to_json())


def _write(path: Path, text: str) -> None:
    try:
        write_atomically(path, text)
    except OSError as error:
        logger.warning("The dump could not be written: %s.", error)
