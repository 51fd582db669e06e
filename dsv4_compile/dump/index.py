"""The index of a dump: what `index.json` holds."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from dsv4_compile.dump.schema import SCHEMA
from dsv4_compile.dump.typed import built

__all__ = ["GraphEntry", "Index", "PieceEntry", "StageEntry"]


@dataclass
class StageEntry:
    """A graph at one stage. `ops` counts its operators; `text` and `data` are files, empty where they were left out.

    The passes run on a graph within the graph by itself; `name` then has that graph's in front: `true_graph_0/mhc`.

    `input_bytes` is the memory of the graph's inputs (its parameters among them), `result_bytes` of all results
    together: what is written, not what is held at one time. Sizes that are symbolic count as nothing.
    """

    name: str
    nodes: int
    ops: dict[str, int]
    input_bytes: int = 0
    result_bytes: int = 0
    seconds: float | None = None
    text: str = ""
    data: str = ""


@dataclass
class PieceEntry:
    """One program among the pieces of a graph: the graph as text and Inductor's code, files that graphs may share."""

    text: str = ""
    code: str = ""


@dataclass
class GraphEntry:
    """One graph. `state` is "compiling" (still, or when the process was killed), "compiled" or "failed". `pieces` has
    the files of each distinct piece, by its key."""

    id: str
    folder: str
    report: str
    state: str = "compiling"
    error: str = ""
    stages: list[StageEntry] = field(default_factory=list)
    code: list[str] = field(default_factory=list)
    pieces: dict[str, PieceEntry] = field(default_factory=dict)
    bytecode: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def main(self) -> list[StageEntry]:
        """The stages of the graph itself, without those of graphs within it."""
        return [stage for stage in self.stages if "/" not in stage.name]


@dataclass
class Index:
    """One process. `bytes` is what it wrote, without index and reports, `left_out` what the limit kept out.

    `ended` is empty while the process lives, and for ever when it was killed; `error` is what ended the script under
    `dsv4-compile run`.
    """

    version: str = ""
    schema: int = SCHEMA
    torch: str = ""
    python: str = ""
    script: str = ""
    host: str = ""
    process: int = 0
    rank: str = ""
    started: str = ""
    ended: str = ""
    error: str = ""
    limit: int | None = None
    bytes: int = 0
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    graphs: list[GraphEntry] = field(default_factory=list)

    def to_json(self) -> str:
        """As it is written."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Index:
        """The index in a file.

        Raises:
            ValueError: no JSON.
            TypeError: JSON of another kind.
        """
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, record: Any) -> Index:
        """As `from_json`, of the parsed text."""
        return built(cls, record)
