"""Reads a dump. It is data: nothing in it is executed or unpickled, and no file outside its folder is opened.

Everything that can be wrong with a folder is a `DumpError` whose message is one sentence for the user.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv4_compile.dump.index import GraphEntry, Index, StageEntry
from dsv4_compile.dump.schema import FIRST_STAGES, INDEX, RUN, SCHEMA, NodeRecord

__all__ = ["Dump", "DumpError", "DumpedGraph", "NoSuchError", "Run", "read"]


class DumpError(Exception):
    """A dump that cannot be read. The message is one sentence: what was found, and what to do."""


class NoSuchError(DumpError):
    """What was asked for is not there: a folder, a graph, a stage, a site."""


_REPORT: dict[str, type] = {
    "version": str,
    "torch": str,
    "device": str,
    "requested": dict,
    "effective": dict,
    "graphs": list,
}
"""What a report must have, and of which type."""

_LISTS = ("mhc", "projections", "missed", "pieces", "notes")


@dataclass(frozen=True)
class Run:
    """The dump of one process."""

    path: Path
    index: Index
    _reports: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False, compare=False)

    def report(self, name: str) -> dict[str, Any]:
        """A compile report, by the name of its file; read once.

        Raises:
            DumpError: as `text`, or it is no report.
        """
        if name not in self._reports:
            record = _mapping(self.text(name), self.path / name)
            for field_name, kind in _REPORT.items():
                if not isinstance(record.get(field_name), kind):
                    found = f"{field_name} is {type(record.get(field_name)).__name__}"
                    raise DumpError(f"{self.path / name} is damaged ({found}); write the dump again.")
            self._reports[name] = record
        return self._reports[name]

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """While data of the file `name` is taken apart: what is of another kind than it should be is a `DumpError`."""
        try:
            yield
        except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
            path = self.path / name
            raise DumpError(f"{path} is damaged ({type(error).__name__}: {error}); write the dump again.") from error

    def text(self, name: str) -> str:
        """A file of the dump, by the name that the index has for it.

        Raises:
            DumpError: it is not there, cannot be read, or lies outside the folder.
        """
        path = self.path / name
        if not path.resolve().is_relative_to(self.path.resolve()):
            raise DumpError(f"The index of {self.path} names {name!r}, which is outside its folder: not read.")
        return _text(path, f"The index of {self.path} names {name}, and it")


@dataclass(frozen=True)
class DumpedGraph:
    """One graph of a dump. `label` is its id, with the run in front where the dump has several."""

    run: Run
    entry: GraphEntry
    label: str

    @property
    def passes(self) -> list[str]:
        """Names of the stages that are passes on the graph itself."""
        return [stage.name for stage in self.entry.main if stage.name not in FIRST_STAGES]

    @property
    def report(self) -> dict[str, Any]:
        """What the report of its compilation says about this graph; lists that are not there are empty."""
        graphs = (graph for graph in self.compile_report["graphs"] if _id(graph) == self.entry.id)
        empty: dict[str, Any] = {name: [] for name in _LISTS}
        found = {**empty, **next(graphs, {})}
        with self.run.reading(self.entry.report):
            for name in _LISTS:
                if not isinstance(found[name], list):
                    raise TypeError(f"{name} of graph {self.entry.id} is {found[name]!r}")
        return found

    @property
    def compile_report(self) -> dict[str, Any]:
        """The report of its compilation."""
        return self.run.report(self.entry.report)

    def stage(self, name: str) -> StageEntry:
        """The entry of a stage.

        Raises:
            NoSuchError: there is none of that name.
        """
        for stage in self.entry.stages:
            if stage.name == name:
                return stage
        known = ", ".join(stage.name for stage in self.entry.stages) or "none"
        raise NoSuchError(f"Graph {self.label} has no stage {name!r}; it has {known}.")

    def nodes(self, name: str) -> list[NodeRecord]:
        """The nodes of a stage.

        Raises:
            DumpError: the file was left out, or is not what was written.
        """
        stage = self.stage(name)
        if not stage.data:
            raise DumpError(
                f"The nodes of {name!r} of graph {self.label} were left out of this dump: {self.why_out()}."
            )
        with self.run.reading(stage.data):
            record = _mapping(self.run.text(stage.data), self.run.path / stage.data)
            return [NodeRecord.from_dict(node) for node in record["nodes"]]

    def listing(self, name: str) -> str:
        """The text of a stage.

        Raises:
            DumpError: as `nodes`.
        """
        stage = self.stage(name)
        if not stage.text:
            raise DumpError(f"The text of {name!r} of graph {self.label} was left out of this dump: {self.why_out()}.")
        return self.run.text(stage.text)

    def why_out(self) -> str:
        """Why a file of this graph is missing."""
        limit = self.run.index.limit
        return f"the limit is {limit} bytes" if limit is not None else "it could not be written"


@dataclass(frozen=True)
class Dump:
    """All runs in a folder. `problems` are sentences about runs that cannot be read, beside others that can."""

    path: Path
    runs: tuple[Run, ...]
    problems: tuple[str, ...] = ()

    @property
    def graphs(self) -> list[DumpedGraph]:
        """Every graph, labelled so that each has another label."""
        several = len(self.runs) > 1
        made: list[DumpedGraph] = []
        seen: set[str] = set()
        for run in self.runs:
            for entry in run.index.graphs:
                name = f"{run.path.name}:{entry.id}" if several else entry.id
                label, count = name, 1
                while label in seen:
                    count += 1
                    label = f"{name}#{count}"
                seen.add(label)
                made.append(DumpedGraph(run, entry, label))
        return made

    def graph(self, name: str | None) -> DumpedGraph:
        """A graph by its label, or the id that only it has; without a name the largest one.

        Raises:
            NoSuchError: no graph, or several of that id.
        """
        graphs = self.graphs
        if not graphs:
            raise NoSuchError(f"{self.path} has no graphs: nothing was compiled with the dsv4 backend there.")
        if name is None:
            return max(graphs, key=lambda graph: max((stage.nodes for stage in graph.entry.stages), default=0))
        found = [graph for graph in graphs if graph.label == name] or [g for g in graphs if g.entry.id == name]
        if len(found) == 1:
            return found[0]
        labels = ", ".join(graph.label for graph in (found or graphs)[:8])
        more = ", ..." if len(found or graphs) > 8 else ""
        if found:
            raise NoSuchError(f"There are several graphs {name!r}; say which: {labels}{more}.")
        raise NoSuchError(f"There is no graph {name!r} in {self.path}; there are {labels}{more}.")


def read(folder: str | os.PathLike[str]) -> Dump:
    """The dump in `folder`: what `dump_dir` named, or one of the folders in there.

    Raises:
        NoSuchError: there is no such folder.
        DumpError: it holds no dump that can be read.
    """
    path = Path(folder)
    try:
        names = sorted(entry.name for entry in os.scandir(path) if not entry.name.startswith("."))
    except FileNotFoundError as error:
        raise NoSuchError(f"There is no folder {path}; a dump is in the folder that dump_dir named.") from error
    except NotADirectoryError as error:
        raise NoSuchError(f"{path} is a file; a dump is in the folder that dump_dir named.") from error
    except OSError as error:
        raise DumpError(f"{path} cannot be read: {error.strerror or error}.") from error
    if not names:
        raise DumpError(f"{path} is empty: nothing was compiled with the dsv4 backend and this dump_dir.")
    # os.path, because a method of Path raises where nothing may be looked at.
    candidates = [path] if INDEX in names else [path / name for name in names if os.path.isdir(path / name)]
    runs, problems = [], []
    for candidate in candidates:
        if not (re.match(RUN, candidate.name) or os.path.exists(candidate / INDEX)):
            continue  # a folder of somebody else
        try:
            runs.append(Run(candidate, _index(candidate)))
        except DumpError as error:
            problems.append(str(error))
    if not runs:
        if len(problems) == 1:
            raise DumpError(problems[0])
        found = f"; {problems[0]}" if problems else f"; it has {', '.join(names[:3])}{', ...' * (len(names) > 3)}."
        raise DumpError(f"{path} holds no dump that can be read{found}")
    return Dump(path, tuple(runs), tuple(problems))


def _id(graph: Any) -> Any:
    return graph.get("id") if isinstance(graph, Mapping) else None


def _index(folder: Path) -> Index:
    path = folder / INDEX
    record = _mapping(_text(path, f"{path}, the index of the dump,"), path)
    schema = record.get("schema")
    if schema != SCHEMA:
        by = record.get("version")
        raise DumpError(
            f"{folder} has format {schema!r}{f', written by dsv4_compile {by}' if by else ''}, and this version "
            f"reads format {SCHEMA}: read it with the version that wrote it, or write it again."
        )
    try:
        return Index.from_dict(record)
    except TypeError as error:
        raise DumpError(f"{path} is damaged ({type(error).__name__}: {error}); write the dump again.") from error


def _mapping(text: str, path: Path) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DumpError(f"{path} is not complete ({error}): it was copied or written halfway.") from error
    if not isinstance(record, Mapping):
        raise DumpError(f"{path} holds a {type(record).__name__} and not an object; it belongs to no dump.")
    return dict(record)


def _text(path: Path, what: str) -> str:
    try:
        if not (os.path.isfile(path) or not os.path.exists(path)):  # a pipe would be waited for
            raise DumpError(f"{what} is no file.")
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError as error:
        raise DumpError(f"{what} is not there: the dump was copied or written halfway; write it again.") from error
    except OSError as error:
        raise DumpError(f"{what} cannot be read: {error.strerror or error}.") from error
