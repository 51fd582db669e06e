"""`bench --plot`: a benchmark's JSON as a picture, by matplotlib, which is an optional extra.

Times by token count are lines on two logarithmic axes, a panel for each shape; times by kind of work are bars.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv4_compile.dump.schema import printable
from dsv4_compile.files import write_atomically

__all__ = ["Panel", "PlotError", "check", "panels", "plot"]

_COLOURS = ("#2563eb", "#c2410c", "#15803d", "#7c3aed", "#0e7490", "#be185d", "#a16207", "#475569")
_LIMITS = ("copy", "floor")
"""Series that no kernel can be faster than: grey."""


class PlotError(Exception):
    """A picture that cannot be made. The message is one sentence for the user."""


@dataclass
class Panel:
    """One picture of several. `series` has the values by name: of numbers (lines) or of names (bars)."""

    title: str
    unit: str
    series: dict[str, dict[Any, float]] = field(default_factory=dict)

    @property
    def has_lines(self) -> bool:
        """Whether what is measured is a number, such as a token count."""
        return all(isinstance(x, int) for values in self.series.values() for x in values)

    def add(self, name: str, x: Any, value: Any) -> None:
        """Takes up a value; what is no positive number is not drawn."""
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            self.series.setdefault(name, {})[x] = value


def check(path: Path) -> None:
    """Raises what would stand in the way of a picture, before anything is measured.

    Raises:
        PlotError: matplotlib is missing, or makes no such file.
    """
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise PlotError(f"--plot needs matplotlib: pip install 'dsv4_compile[plot]' ({error}).") from error
    known = _figure(1, 1).canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise PlotError(f"{path} says no kind of picture; it must end in one of .{', .'.join(sorted(known))}.")


def panels(name: str, data: Any) -> list[Panel]:
    """What there is to draw in the results of the benchmark `name`.

    Raises:
        PlotError: they are no results of that benchmark.
    """
    try:
        made = [panel for panel in _READERS[name](data) if panel.series]
    except (KeyError, TypeError, AttributeError, ValueError, IndexError):
        made = []
    if not made:
        raise PlotError(f"There are no results of the benchmark {name} to draw.")
    return made


def plot(name: str, data: Any, path: Path) -> None:
    """Draws results into a file, of the kind that its ending says.

    Raises:
        PlotError: as `check` and `panels`, or the file cannot be written.
    """
    check(path)
    made = panels(name, data)
    columns = min(2, len(made))
    rows = -(-len(made) // columns)
    figure = _figure(7.5 * columns, 4.6 * rows + 0.5)
    for axes, panel in zip(figure.subplots(rows, columns, squeeze=False).flat, made, strict=False):
        (_lines if panel.has_lines else _bars)(axes, panel)
    for axes in figure.axes[len(made) :]:
        axes.set_visible(False)
    where = data.get("environment", {})
    known = ", ".join(f"{key} {where[key]}" for key in ("card", "torch", "dsv4_compile") if key in where)
    figure.suptitle(_plain(f"{name}: {known}" if known else name), fontsize=12)
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix.removeprefix(".").lower(), dpi=130)
    try:
        write_atomically(path, content.getvalue())
    except OSError as error:
        raise PlotError(f"{path} could not be written: {error.strerror or error}.") from error


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _plain(text: str) -> str:
    """Without control characters, and with no formula of matplotlib in it."""
    return printable(text).replace("$", r"\$")


def _lines(axes: Any, panel: Panel) -> None:
    colours: dict[str, str] = {}
    for name, values in panel.series.items():
        family = name.removesuffix(" hot").removesuffix(" cold")
        known = "#94a3b8" if family in _LIMITS else _COLOURS[len(set(colours) - set(_LIMITS)) % len(_COLOURS)]
        colour = colours.setdefault(family, known)
        points = sorted(values.items())
        style = "--" if name.endswith(" cold") else "-"
        axes.plot(*zip(*points, strict=True), style, color=colour, marker="o", markersize=3, label=_plain(name))
    ticks = sorted({x for values in panel.series.values() for x in values})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [str(x) for x in ticks], rotation=45)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("tokens")
    _finish(axes, panel, axes.set_ylabel)


def _bars(axes: Any, panel: Panel) -> None:
    categories = list(dict.fromkeys(x for values in panel.series.values() for x in values))
    height = 0.8 / len(panel.series)
    for number, (name, values) in enumerate(panel.series.items()):
        places = [categories.index(x) + height * number for x in values]
        colour = _COLOURS[number % len(_COLOURS)]
        drawn = axes.barh(places, list(values.values()), height * 0.9, color=colour, label=_plain(name))
        axes.bar_label(drawn, fmt="%.3g", padding=3, fontsize=8)
    middle = height * (len(panel.series) - 1) / 2
    axes.set_yticks([i + middle for i in range(len(categories))], [_plain(str(x)) for x in categories])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    _finish(axes, panel, axes.set_xlabel)


def _finish(axes: Any, panel: Panel, label: Callable[[str], Any]) -> None:
    label(panel.unit)
    axes.set_title(_plain(panel.title), fontsize=11)
    axes.grid(True, alpha=0.25)
    axes.legend(fontsize=8)


# ------------------------------------------------------------------------------------- what each benchmark has measured


def _mhc(data: Any) -> list[Panel]:
    """Rows "hidden/tokens" and "operator/hidden/tokens"; each family has [hot, cold]."""
    made: dict[str, Panel] = {}
    for key, row in data["rows"].items():
        *operator, hidden, tokens = key.split("/")
        title = f"{operator[0] if operator else 'post_pre'}, hidden size {int(hidden)}"
        panel = made.setdefault(title, Panel(title, "microseconds a call"))
        for name, times in row.items():
            if isinstance(times, list) and len(times) == 2:
                panel.add(f"{name} hot", int(tokens), times[0])
                panel.add(f"{name} cold", int(tokens), times[1])
    return list(made.values())


def _projections(data: Any) -> list[Panel]:
    """Rows "table/tokens"; each way has its time."""
    made: dict[str, Panel] = {}
    for key, row in data["rows"].items():
        title, _, tokens = key.rpartition("/")
        panel = made.setdefault(title, Panel(title, "microseconds a group"))
        for name, time in row.items():
            panel.add(name, int(tokens), time)
    return list(made.values())


def _cells(data: Any, field_name: str, unit: str, title: str) -> list[Panel]:
    """Rows by kind of work, with a cell for each column."""
    panel = Panel(title, unit)
    for row, cells in data["rows"].items():
        for column, cell in cells.items():
            panel.add(column, row.replace("/", " "), cell.get(field_name))
    return [panel]


def _model(data: Any) -> list[Panel]:
    return _cells(data, "ms", "milliseconds a call, median", str(data.get("model", "")))


def _compile_time(data: Any) -> list[Panel]:
    return _cells(data, "seconds", "seconds", "the first call, with empty caches")


def _decode(data: Any) -> list[Panel]:
    speed = _cells(data, "tokens_per_s", "tokens a second", "a generation, compilations counted")
    step = _cells(data, "steady_ms", "milliseconds a step, median", "one step")
    return [*speed, *step, *_cells(data, "first_s", "seconds", "the first steps, with empty caches")]


def _replay(data: Any) -> list[Panel]:
    """Rows "host" and "memory", each with its numbers."""
    host, memory = Panel("the host, one call", "microseconds, median"), Panel("graphs of all sizes", "bytes")
    for panel, row, names in (
        (host, "host", ("call", "bare", "cuts")),
        (memory, "memory", ("all", "largest")),
    ):
        for name in names:
            panel.add(name, row, data["rows"][row].get(name))
    return [host, memory]


def _dump(data: Mapping[str, Any]) -> list[Panel]:
    panel = Panel(f"{data['layers']} layers, the first call, with empty caches", "seconds")
    for way, cell in data["seconds"].items():
        for name in ("total", "passes", "dump"):
            panel.add(name, way, cell.get(name))
    return [panel]


def _vllm_engine(data: Any) -> list[Panel]:
    """Rows by model and batch with a cell for each variant; `starts` by model, `replay` by tokens."""
    starts = {"rows": data["starts"]}
    boundary = Panel("one mHC boundary, in a CUDA graph", "microseconds a call")
    for tokens, cells in data["replay"].items():
        for name, time in cells["replay"]["microseconds"].items():
            boundary.add(name, int(tokens), time)
    return [
        *_cells(data, "ms", "milliseconds, median", "one token of every row of a batch"),
        *_cells(data, "kernel_us", "microseconds", "all kernels of one step"),
        *_cells(data, "mhc_us", "microseconds", "kernels of mHC in one step"),
        *_cells(starts, "compile_seconds", "seconds", "torch.compile at the start, beside the other engines"),
        boundary,
    ]


_READERS: dict[str, Callable[[Any], list[Panel]]] = {
    "projections": _projections,
    "mhc": _mhc,
    "model": _model,
    "compile-time": _compile_time,
    "dump": _dump,
    "decode": _decode,
    "replay": _replay,
    "vllm-engine": _vllm_engine,
}
