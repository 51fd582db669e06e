"""Writes the dump of this process, file by file while a graph is compiled, so that one that fails has its graphs too.

Every file is whole or not there. `index.json` is written last, each time: what it names exists. A dump that cannot be
written breaks no compilation; the reason is logged once and gets into the report.
"""

from __future__ import annotations

import atexit
import contextvars
import logging
import os
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch.fx import Graph, GraphModule

import dsv4_compile
from dsv4_compile.dump import bytecode
from dsv4_compile.dump.index import GraphEntry, Index, PieceEntry, StageEntry
from dsv4_compile.dump.inputs import source_names
from dsv4_compile.dump.limit import limit
from dsv4_compile.dump.listing import listing
from dsv4_compile.dump.nodes import records
from dsv4_compile.dump.order import Order
from dsv4_compile.dump.schema import FIRST_STAGES, INDEX
from dsv4_compile.files import write_atomically
from dsv4_compile.report import CompileReport, GraphReport

__all__ = ["GraphDump", "end", "observe", "recording"]

logger = logging.getLogger("dsv4_compile")


class _Run:
    """The dump of one process in one folder."""

    def __init__(self, folder: str) -> None:
        self.limit = limit()
        self.problem: str | None = None
        self.lock = threading.RLock()
        self.reports: list[CompileReport] = []
        self.files: dict[str, str] = {}
        now = datetime.now(UTC)
        # The script may change its folder while it runs.
        self.path = Path(os.path.abspath(folder)) / f"{now:%Y%m%d-%H%M%S}-{os.getpid()}"
        self.index = Index(
            version=dsv4_compile.__version__,
            torch=torch.__version__,
            python=sys.version.split()[0],
            script=sys.argv[0] if sys.argv else "",
            host=socket.gethostname(),
            process=os.getpid(),
            rank=os.environ.get("RANK", ""),
            started=now.isoformat(timespec="seconds"),
            limit=self.limit,
        )
        self._make_folder()

    def _make_folder(self) -> None:
        base, attempt = self.path, 1
        while True:
            try:
                self.path.mkdir(parents=True)
                return
            except FileExistsError:
                if self.path.parent.is_file():
                    self._failed(NotADirectoryError(f"{self.path.parent} is a file"))
                    return
                attempt += 1
                self.path = base.with_name(f"{base.name}-{attempt}")
            except OSError as error:
                self._failed(error)
                return

    def write(self, name: str, text: str) -> bool:
        """Writes a file that counts towards the limit; false when it was left out."""
        size = len(text.encode("utf-8", "backslashreplace"))
        with self.lock:
            if self.limit is not None and self.index.bytes + size > self.limit:
                self.index.left_out.append(f"{name} ({size} bytes)")
                return False
            if not self._put(name, text):
                return False
            self.index.bytes += size
            return True

    def shared(self, name: str, text: str) -> str:
        """As `write`, of a file that may have been written before; returns its name, empty when it was left out.

        Other text under the same name gets a number: two codes of one piece rely on other facts about its sizes.
        """
        with self.lock:
            stem, dot, ending = name.partition(".")
            number = 1
            while self.files.get(name, text) != text:
                number += 1
                name = f"{stem}_{number}{dot}{ending}"
            if name not in self.files and self.write(name, text):
                self.files[name] = text
            return name if name in self.files else ""

    def write_index(self) -> None:
        with self.lock:
            self._put(INDEX, self.index.to_json())

    def write_report(self, report: CompileReport) -> str:
        """Writes the report as it is now; returns the name of its file."""
        with self.lock:
            if not any(known is report for known in self.reports):
                self.reports.append(report)
            number = next(i for i, known in enumerate(self.reports) if known is report)
            name = f"report_{number}.json"
            self._put(name, report.to_json())
            return name

    def close(self) -> None:
        """Reports once more, for they grow while graphs run, and the time of the end."""
        if self.index.process != os.getpid() or self.problem is not None:
            return
        for report in self.reports:
            self.write_report(report)
        self.index.ended = datetime.now(UTC).isoformat(timespec="seconds")
        self.write_index()

    def folder_for(self, graph_id: str) -> str:
        """A name for the folder of a graph that no other has."""
        name = re.sub(r"\W+", "_", f"graph_{graph_id}")
        known = {graph.folder for graph in self.index.graphs}
        return next(n for n in (name, *(f"{name}.{i}" for i in range(2, len(known) + 3))) if n not in known)

    def _put(self, name: str, text: str) -> bool:
        if self.problem is not None:
            return False
        try:
            write_atomically(self.path / name, text)
            return True
        except OSError as error:
            self._failed(error)
            return False

    def _failed(self, error: OSError) -> None:
        self.problem = f"the dump could not be written: {error}"
        logger.warning("The dump could not be written: %s.", error)


class GraphDump:
    """The dump of one graph, open while it is compiled. `seconds` is the time that writing has taken so far."""

    def __init__(self, run: _Run, report: CompileReport, graph: GraphReport) -> None:
        self.seconds = 0.0
        self._run, self._report, self._graph = run, report, graph
        self._names: list[str] = []
        self._order = Order()
        with run.lock:
            self._entry = GraphEntry(id=graph.id, folder=run.folder_for(graph.id), report=run.write_report(report))
            run.index.graphs.append(self._entry)
            run.write_index()

    @property
    def problem(self) -> str | None:
        """Why the dump is not complete, or None."""
        return self._run.problem

    def stage(self, name: str, graph: Graph) -> None:
        """Writes the graph as it is now, as text and as records, one node a line."""
        with self._timed():
            if name == FIRST_STAGES[0]:
                self._names, self._order = source_names(graph), Order(graph)
            elif name == FIRST_STAGES[1]:
                self._order.begin(graph, self._entry.stages)
            name = self._order.name(name)
            nodes = records(graph, self._names)
            title = f"graph {self._graph.id}, {name}: {len(nodes)} nodes"
            stage = StageEntry(
                name,
                len(nodes),
                dict(Counter(node.target for node in nodes if node.op.startswith("call_")).most_common()),
                sum(node.bytes or 0 for node in nodes if node.op == "placeholder" and not node.graph),
                sum(node.bytes or 0 for node in nodes if node.op != "placeholder"),
            )
            lines = ",\n".join(node.to_json() for node in nodes)
            head = f'{{"schema": {self._run.index.schema}, "nodes": [\n'
            file = name.replace("/", ".")
            stage.text = self._file(f"{file}.py", listing(nodes, title))
            stage.data = self._file(f"{file}.json", f"{head}{lines}\n]}}\n")
            self._entry.stages.append(stage)
            self._run.write_index()

    def code(self, text: str) -> None:
        """Keeps code that Inductor wrote."""
        with self._timed():
            count = len(self._entry.code)
            name = self._file("inductor.py" if not count else f"inductor_{count}.py", text)
            if name:
                self._entry.code.append(name)
                self._run.write_index()

    def piece(self, key: str, graph: Graph, code: str) -> None:
        """Keeps a distinct piece of the graph, and the code that Inductor wrote for it; once for all graphs."""
        if key in self._entry.pieces:
            return
        with self._timed():
            name = f"pieces/{key}.py"
            if name not in self._run.files:  # in another graph only the names of its nodes are others
                self._run.shared(name, listing(records(graph), f"piece {key}: {len(graph.nodes)} nodes"))
            written = self._run.shared(f"pieces/{key}.inductor.py", code) if code else ""
            with self._run.lock:  # another thread may be writing the index
                self._entry.pieces[key] = PieceEntry(name if name in self._run.files else "", written)
                self._run.write_index()

    def bytecode(self, text: str) -> None:
        """Keeps Dynamo's bytecode as source."""
        name = self._file("bytecode.py", text)
        if name:
            self._entry.bytecode = name
            self._run.write_index()

    def note(self, text: str) -> None:
        """Something that whoever reads the dump should know."""
        if text not in self._run.index.notes:
            self._run.index.notes.append(text)
            self._run.write_index()

    def close(self, error: BaseException | None) -> None:
        """Writes the report, and how the compilation ended."""
        seconds = self.seconds
        with self._timed():
            self._order = Order()  # graphs are not to live as long as the process
            for stage in self._entry.stages:
                stage.seconds = self._graph.seconds.get(stage.name)
            if error is not None:
                self._entry.error = f"{type(error).__name__}: {(str(error) or 'no message').strip()}"
            self._entry.state = "compiled" if error is None else "failed"
            self._entry.seconds = {**self._graph.seconds, "dump": seconds}
            self._run.write_report(self._report)
            self._run.write_index()

    def _file(self, name: str, text: str) -> str:
        name = f"{self._entry.folder}/{name}"
        return name if self._run.write(name, text) else ""

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        except Exception as error:
            # A graph that cannot be described must not keep it from being compiled.
            logger.debug("A part of the dump failed", exc_info=True)
            self.note(f"graph {self._graph.id}: a part of the dump failed: {type(error).__name__}: {error}")
        finally:
            self.seconds += time.perf_counter() - start


_runs: dict[tuple[str, int], _Run] = {}  # by folder and process: a forked child has a dump of its own
_lock = threading.Lock()
_current: contextvars.ContextVar[GraphDump | None] = contextvars.ContextVar("dsv4_dump", default=None)


@contextmanager
def recording(
    folder: str | None, report: CompileReport, graph: GraphReport, gm: GraphModule | None = None
) -> Iterator[GraphDump | None]:
    """While this is open, `observe` writes into the dump in `folder`; None is for no dump.

    Args:
        gm: Dynamo's graph; without one there is neither that stage nor Dynamo's bytecode.

    An exception that passes through is written down, and raised on.

    Raises:
        OptionError: `DSV4_DUMP_LIMIT` is no number of bytes.
    """
    if folder is None:
        yield None
        return
    dump = GraphDump(_run_in(folder), report, graph)
    if gm is not None:
        dump.stage("dynamo", gm.graph)
        bytecode.expect(dump)
    token = _current.set(dump)
    try:
        yield dump
    except BaseException as error:
        dump.close(error)
        raise
    finally:
        _current.reset(token)
    dump.close(None)


def observe(stage: str, graph: Graph) -> None:
    """Writes a stage of the graph that is being compiled in this thread; nothing where none is recorded."""
    dump = _current.get()
    if dump is not None:
        dump.stage(stage, graph)


def end(error: str) -> list[str]:
    """Writes the end of this process into its dumps; `error` is what ended it, empty where nothing did.

    Returns:
        The folders of the dumps.
    """
    runs = [run for (_, process), run in _runs.items() if process == os.getpid() and run.problem is None]
    for run in runs:
        run.index.error = error
        run.close()
    return [str(run.path) for run in runs]


def _run_in(folder: str) -> _Run:
    key = (os.path.abspath(folder), os.getpid())
    with _lock:
        if key not in _runs:
            _runs[key] = _Run(folder)
            atexit.register(_runs[key].close)
        return _runs[key]
