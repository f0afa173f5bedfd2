"""Benchmark results: tables for people, figures for scripts, plots for pages."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from pydantic import JsonValue
from rich.console import Console
from rich.table import Table as RichTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Cell: TypeAlias = str | int | float | None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under columns. Numbers are shown with three significant digits but saved in full."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""

    def to_rich(self) -> RichTable:
        """The table for a terminal."""
        table = RichTable(
            title=self.title,
            title_justify="left",
            caption=self.note or None,
            caption_justify="left",
        )
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="right" if index else "left")
        for row in self.rows:
            table.add_row(*[cell_text(cell) for cell in row])
        return table

    def to_dict(self) -> dict[str, JsonValue]:
        """The table as JSON."""
        return {
            "title": self.title,
            "columns": list(self.columns),
            "rows": [list(row) for row in self.rows],
            "note": self.note,
        }


@dataclass(frozen=True, slots=True)
class Lines:
    """A line plot with one line per series."""

    title: str
    x: str
    y: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    log_x: bool = False
    log_y: bool = False

    def draw(self, axes: Axes) -> None:
        """Draw the plot on `axes`."""
        for name, points in self.series.items():
            axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
        if self.log_x:
            axes.set_xscale("log")
        if self.log_y:
            axes.set_yscale("log")
        axes.set(title=self.title, xlabel=self.x, ylabel=self.y)
        axes.grid(visible=True, alpha=0.3)
        axes.legend()


@dataclass(frozen=True, slots=True)
class Bars:
    """A horizontal bar plot, first value on top."""

    title: str
    x: str
    values: Mapping[str, float]
    log_x: bool = False

    def draw(self, axes: Axes) -> None:
        """Draw the plot on `axes`."""
        bars = axes.barh(list(self.values), list(self.values.values()))
        axes.bar_label(
            bars, labels=[cell_text(value) for value in self.values.values()], padding=3
        )
        axes.invert_yaxis()
        axes.margins(x=0.15)
        if self.log_x:
            axes.set_xscale("log")
        axes.set(title=self.title, xlabel=self.x)


Plot: TypeAlias = Lines | Bars | Callable[["Axes"], None]


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one benchmark. `figures` are quoted by other pages, under stable names."""

    name: str
    about: Mapping[str, JsonValue]
    tables: Sequence[Table]
    figures: Mapping[str, JsonValue] = field(default_factory=dict)
    plots: Mapping[str, Plot] = field(default_factory=dict)

    def to_dict(self) -> dict[str, JsonValue]:
        """The report as JSON, without plots."""
        return {
            "name": self.name,
            "about": dict(self.about),
            "figures": dict(self.figures),
            "tables": [table.to_dict() for table in self.tables],
        }

    def show(self) -> None:
        """Print the report."""
        console = Console(width=None if sys.stdout.isatty() else 120)
        facts = ", ".join(f"{name} {value}" for name, value in self.about.items())
        console.print(f"[bold]{self.name}[/bold]: {facts}", highlight=False)
        for table in self.tables:
            console.print(table.to_rich())

    def save(self, folder: Path, plots: Path | None = None) -> None:
        """Write NAME.json to `folder`, and NAME-PLOT.svg for each plot to `plots`.

        Args:
            folder: for the JSON file.
            plots: for the plots; `folder` by default.
        """
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.json").write_text(json.dumps(self.to_dict(), indent=2) + "\n")
        plots = plots or folder
        plots.mkdir(parents=True, exist_ok=True)
        for title, plot in self.plots.items():
            _draw(plot, plots / f"{self.name}-{title}.svg")


def _draw(plot: Plot, path: Path) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # A fixed salt, so that equal figures produce identical files.
    with mpl.rc_context({"svg.hashsalt": path.name}):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        draw = plot.draw if isinstance(plot, Lines | Bars) else plot
        draw(axes)
        figure.savefig(path, metadata={"Date": None})


def cell_text(cell: Cell) -> str:
    """A cell with three significant digits."""
    match cell:
        case None:
            return "–"
        case float() if abs(cell) >= 100:
            return f"{cell:,.0f}"
        case float():
            return f"{cell:.3g}"
        case int():
            return f"{cell:,}"
        case _:
            return cell
