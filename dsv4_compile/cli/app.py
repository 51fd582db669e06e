"""`dsv4-compile`: what the compiler did to a model, why a site did not match, what runs where, what it cost.

Exit status: 0 when all is well, 1 when a problem was found (a failed compilation, a site that was left alone, a dump
that cannot be read), 2 when the command was not understood.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

import dsv4_compile
from dsv4_compile.cli import compare as comparing
from dsv4_compile.cli import diff as diffing
from dsv4_compile.cli import explain as explaining
from dsv4_compile.cli import output, show, streams
from dsv4_compile.cli import pieces as cutting
from dsv4_compile.cli import run as running
from dsv4_compile.cli.output import FOUND_A_PROBLEM, USAGE
from dsv4_compile.cli.plot import PlotError
from dsv4_compile.dump.reader import Dump, DumpedGraph, DumpError, NoSuchError, read
from dsv4_compile.files import write_atomically
from dsv4_compile.options import OptionError

__all__ = ["app", "main"]

app = typer.Typer(
    name="dsv4-compile",
    help=(__doc__ or "").partition("\n")[0],
    epilog="Exit status: 0 all is well, 1 a problem was found, 2 the command was not understood.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Entry point of the command."""
    app(prog_name="dsv4-compile")


@contextmanager
def _reading() -> Iterator[None]:
    """As `_sentences`, for a command that reads a dump: it makes many objects, none of which is garbage before its end,
    and looking for some takes a third of its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        with _sentences():
            yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _sentences() -> Iterator[None]:
    """What a user can mend is one sentence and an exit status, not a traceback."""
    try:
        yield
    except (DumpError, OptionError, PlotError) as error:
        output.warning(str(error))
        raise typer.Exit(USAGE if isinstance(error, NoSuchError | OptionError) else FOUND_A_PROBLEM) from error
    except BrokenPipeError:
        # `| head` has seen enough. What is still buffered must not raise once more at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None


def _graph_names(context: typer.Context, incomplete: str) -> list[str]:
    return [graph.label for graph in _completed(context) if graph.label.startswith(incomplete)]


def _pass_names(context: typer.Context, incomplete: str) -> list[str]:
    stages = dict.fromkeys(stage.name for graph in _completed(context) for stage in graph.entry.stages)
    return [name for name in stages if name.startswith(incomplete)]


def _completed(context: typer.Context) -> list[DumpedGraph]:
    """The graphs of the dump on the command line, for completion: none when there is nothing to read."""
    # Behind an option that still lacks its value, arguments have not been given their names yet.
    folder = context.params.get("folder") or next(iter(context.args), None)
    try:
        return read(folder).graphs if folder is not None else []
    except DumpError:
        return []


def _benchmark_names(incomplete: str) -> list[str]:
    from dsv4_compile.cli import bench

    return [name for name in bench.NAMES if name.startswith(incomplete)]


Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A dump: the folder that dump_dir named.")]
Graph = Annotated[
    str | None,
    typer.Argument(metavar="[GRAPH]", help="A graph, as `show DIR` lists it.", autocompletion=_graph_names),
]
Pass = Annotated[str | None, typer.Option("--pass", metavar="NAME", help="A pass.", autocompletion=_pass_names)]
Module = Annotated[str, typer.Option(metavar="PATH", help="Only this module and what is inside it.")]
Json = Annotated[bool, typer.Option("--json", help="Print data instead of tables.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dsv4_compile {dsv4_compile.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _read(folder: Path) -> Dump:
    dump = read(folder)
    for problem in dump.problems:
        output.warning(problem)
    return dump


def _end(is_problem: bool) -> None:
    if is_problem:
        raise typer.Exit(FOUND_A_PROBLEM)


@app.command("show")
def _show(folder: Folder, graph: Graph = None, stage: Pass = None, module: Module = "", as_json: Json = False) -> None:
    """The graphs of a dump; the stages of one GRAPH; with --pass the graph behind that pass ("before": before all)."""
    with _reading():
        dump = _read(folder)
        if stage is not None or module:
            one = dump.graph(graph)
            name = stage or (one.entry.main[-1].name if one.entry.main else "before")
            if as_json:
                output.json_out([vars(node) for node in show.selected(one.nodes(name), module)])
            else:
                show.print_listing(one, name, module)
        elif graph is not None:
            stages = show.stages(dump.graph(graph))
            output.json_out(stages) if as_json else show.print_graph(stages)
            _end(stages["state"] != "compiled")
        else:
            overview = show.overview(dump)
            output.json_out(overview) if as_json else show.print_overview(overview)
            is_bad = any(one["state"] == "failed" for one in overview["graphs"])
            _end(is_bad or bool(dump.problems) or any(run["error"] for run in overview["runs"]))


@app.command("diff")
def _diff(folder: Folder, graph: Graph = None, name: Pass = None, module: Module = "", as_json: Json = False) -> None:
    """What the passes did to a graph (the largest, when none is named): - removed, + added, > moved, ~ changed."""
    with _reading():
        one = _read(folder).graph(graph)
        names = diffing.between(one, name)
        diff = diffing.compared(one.nodes(names[0]), one.nodes(names[1]), names, module)
        output.json_out(diff.to_dict()) if as_json else diffing.print_diff(diff, one.label)


@app.command("explain")
def _explain(
    folder: Folder,
    site: Annotated[str, typer.Argument(metavar="[SITE]", help="A module path such as model.layers.3.")] = "",
    graph: Annotated[str | None, typer.Option(metavar="GRAPH", autocompletion=_graph_names)] = None,
    as_json: Json = False,
) -> None:
    """What happened at each site: matched and how, or what stopped it (status 1, as for an unfinished graph)."""
    with _reading():
        dump = _read(folder)
        graphs = dump.graphs if graph is None else [dump.graph(graph)]
        found = explaining.findings(graphs, site)
        is_whole = all(one.entry.state == "compiled" for one in graphs)
        if not found and site:
            sentence = explaining.nothing_there(dump, graphs, site)
            output.json_out([]) if as_json else output.line(sentence)
            _end(not is_whole)
            return
        output.json_out(explaining.to_dicts(found)) if as_json else explaining.print_findings(found, graphs, bool(site))
        if not found and not as_json and is_whole:
            output.line("Nothing in this dump looked like a site.")
        _end(not is_whole or any(one.outcome == explaining.LEFT_ALONE for one in found))


@app.command("streams")
def _streams(
    folder: Folder,
    graph: Graph = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the lanes into this file.")] = None,
    as_json: Json = False,
) -> None:
    """Which projections run on which stream, where they fork and join, and which stream decides the time."""
    with _reading():
        dump = _read(folder)
        graphs = dump.graphs if graph is None else [dump.graph(graph)]
        if svg is not None:
            from dsv4_compile.cli.page import streams_picture

            _write(svg, streams_picture(graphs))
        found = [fork for one in graphs for fork in streams.forks(one)]
        if as_json:
            output.json_out([fork.to_dict() for fork in found])
        else:
            device = graphs[0].compile_report["device"] if graphs else "cpu"
            streams.print_forks(found, device)


@app.command("pieces")
def _pieces(folder: Folder, graph: Graph = None, as_json: Json = False) -> None:
    """Where graphs are cut into pieces, which are the same, what is captured and what that holds in memory."""
    with _reading():
        dump = _read(folder)
        found = cutting.pieces(dump.graphs if graph is None else [dump.graph(graph)])
        output.json_out(found) if as_json else cutting.print_pieces(found)


@app.command("compare")
def _compare(
    first: Annotated[Path, typer.Argument(metavar="DIR_A")],
    second: Annotated[Path, typer.Argument(metavar="DIR_B")],
    as_json: Json = False,
) -> None:
    """What differs between two dumps. Status 1 when the second leaves alone or does not capture what the first did."""
    with _reading():
        data = comparing.compared(_read(first), _read(second))
        output.json_out(data) if as_json else comparing.print_comparison(data, (str(first), str(second)))
        _end(comparing.is_worse(data))


@app.command("report")
def _report(
    folder: Folder,
    file: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Else DIR/report.html.")] = None,
    max_lines: Annotated[int, typer.Option(min=0, help="Lines of graphs that the page may hold.")] = 150_000,
) -> None:
    """One page of HTML with everything, for a browser; it needs no network."""
    with _reading():
        from dsv4_compile.cli.page import page

        text = page(_read(folder), max_lines)
        _write(folder / "report.html" if file is None else file, text)


def _write(path: Path, text: str) -> None:
    try:
        write_atomically(path, text)
    except OSError as error:
        raise DumpError(f"{path} could not be written: {error.strerror or error}.") from error
    output.warning(f"Written: {path} ({output.size(len(text))})")


@app.command("run", context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def _run(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A Python script.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Its arguments.")] = None,
    dump_dir: Annotated[Path, typer.Option(metavar="DIR", help="Where the dump goes.")] = Path("dsv4_dump"),
    limit: Annotated[str | None, typer.Option(metavar="SIZE", help="Most bytes of a process, such as 200M.")] = None,
) -> None:
    """Runs a script with a dump of all that it compiles; options before SCRIPT. Ends with the script's exit status."""
    with _sentences():
        if not script.is_file():
            raise NoSuchError(f"There is no script {script}.")
        os.environ.update(running.environment(str(dump_dir), limit))
        status, error = running.run(script, arguments or [])
        from dsv4_compile.dump.writer import end

        folders = end(error)
        if not folders:
            output.warning("Nothing was compiled with the dsv4 backend in this process, so there is no dump of it.")
        for folder in folders:
            output.warning(f"Dump: {folder} (dsv4-compile show {folder})")
        raise typer.Exit(status or (0 if folders else FOUND_A_PROBLEM))


@app.command("doctor")
def _doctor(
    vllm_config: Annotated[
        str | None, typer.Option(metavar="JSON", help="What vLLM gets as --compilation-config, or a file with it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """What is on this machine, what a DeepSeek-V4 compilation would use here, and whether a pass would run in vLLM."""
    with _sentences():
        from dsv4_compile.cli import doctor

        found = doctor.checks(None if vllm_config is None else _settings(vllm_config))
        if as_json:
            output.json_out([dataclasses.asdict(check) for check in found])
        else:
            doctor.print_checks(found)
        _end(any(check.state == doctor.PROBLEM for check in found))


def _settings(text: str) -> dict[str, Any]:
    """The JSON object in `text`, or in the file of that name."""
    try:
        content = text if text.lstrip().startswith("{") else Path(text).read_text()
        settings = json.loads(content)
    except (OSError, ValueError) as error:
        raise NoSuchError(f"--vllm-config is neither a JSON object nor a file with one: {error}.") from error
    if not isinstance(settings, dict):
        raise NoSuchError(f"--vllm-config must be a JSON object, and it holds {content.strip()}.")
    return settings


@app.command("bench", context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def _bench(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="projections, mhc, model, compile-time, dump, decode, replay or vllm-engine.",
            autocompletion=_benchmark_names,
        ),
    ],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="For the benchmark.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the results into this file (.svg, .png, .pdf).")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Measure nothing, draw the results in this JSON.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Runs a benchmark of the repository; --json before NAME, the benchmark's own options behind it."""
    with _sentences():
        from dsv4_compile.cli import bench

        if name not in bench.NAMES:
            raise NoSuchError(f"There is no benchmark {name!r}; there are {', '.join(bench.NAMES)}.")
        raise typer.Exit(bench.bench(name, bench.wish(arguments or [], plot, source), as_json))
