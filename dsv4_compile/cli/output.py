"""What commands print: tables and lines for people, JSON for programs; colours on a terminal only."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dsv4_compile.dump.schema import printable

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["FOUND_A_PROBLEM", "USAGE", "coloured", "json_out", "line", "lines", "size", "table", "track", "warning"]

FOUND_A_PROBLEM = 1
USAGE = 2

T = TypeVar("T")

_WIDTH = 180
"""Columns where the output is no terminal and COLUMNS is not set."""


def table(title: str, headings: Sequence[str], rows: Iterable[Sequence[Any]], right: Iterable[int] = ()) -> None:
    """Prints a table; the columns numbered in `right` are aligned to the right. No row, no table."""
    body = [[_cell(value) for value in row] for row in rows]
    if not body:
        return
    made = Table(title=_plain(title), title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for i, heading in enumerate(headings):
        made.add_column(heading, justify="right" if i in right else "left", overflow="fold")
    for row in body:
        made.add_row(*row)
    _console().print(made)


def coloured(text: str, style: str) -> Text:
    """A cell of a table."""
    return _plain(text, style)


def line(text: str = "", style: str = "") -> None:
    """Prints a line, never wrapped."""
    _console().print(_plain(text, style), soft_wrap=True)


def lines(text: Iterable[tuple[str, str]]) -> None:
    """Prints many lines at once: (text, colour), the colour by the name that ANSI has for it, "" for none."""
    _take_every_character()
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        typer.echo(printable("\n".join(content for content, _ in text)))
        return
    typer.echo("\n".join(typer.style(printable(content), fg=colour or None) for content, colour in text))


def json_out(data: Any) -> None:
    """Prints data as JSON."""
    typer.echo(json.dumps(data, indent=2))


def warning(text: str) -> None:
    """Prints a sentence to the standard error."""
    Console(stderr=True, highlight=False).print(_plain(text, "yellow"), soft_wrap=True)


def track(items: Sequence[T], what: str, delay: float = 0.5) -> Iterator[T]:
    """The items one by one, with a bar on the standard error where that is a terminal.

    Args:
        delay: seconds that it may take without a bar.
    """
    start, bar, task = time.monotonic(), None, None
    try:
        for number, item in enumerate(items):
            if bar is None and sys.stderr.isatty() and time.monotonic() - start >= delay:
                bar = _bar()
                bar.start()
                task = bar.add_task(printable(what), total=len(items), completed=number)
            yield item
            if bar is not None and task is not None:
                bar.update(task, completed=number + 1)
    finally:
        if bar is not None:
            bar.stop()


def _bar() -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True, highlight=False),
        transient=True,
        # What is printed meanwhile would go to the standard error, which is right on one terminal only.
        redirect_stdout=sys.stdout.isatty(),
    )


def size(count: int | float | None) -> str:
    """Bytes in a unit of a thousand."""
    if count is None:
        return ""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """`| head` has seen enough, which is no problem: rich would end with 1."""
        raise BrokenPipeError


def _console() -> Console:
    _take_every_character()
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDTH
    return _Console(width=width, highlight=False)


def _take_every_character() -> None:
    """What the encoding of the standard output lacks is a question mark there and not an error."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def _plain(text: str, style: str = "") -> Text:
    """Text in which nothing is markup and no control character is left."""
    return Text(printable(text), style)


def _cell(value: Any) -> Text:
    if isinstance(value, Text):
        return value
    if value is None:
        return Text("")
    return _plain(f"{value:.2f}" if isinstance(value, float) else str(value))
