"""Print results on standard output and everything else on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, TextIO

from meshpoint.model.error_text import printable, storable

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_WIDTH = 240


def console(stream: TextIO | None = None) -> Console:
    """Create a console for `stream`. It is wide in a pipe, so that identifiers are not wrapped."""
    from rich.console import Console

    stream = stream or sys.stdout
    return Console(file=stream, width=None if stream.isatty() else _PIPE_WIDTH, highlight=False)


def print_text(text: str) -> None:
    """Print `text` unchanged."""
    console().print(text, markup=False, soft_wrap=True)


def print_json(data: object) -> None:
    """Print `data` as JSON: on one line, but indented on a terminal. Times are in ISO 8601."""
    dumps = partial(json.dumps, data, default=_json_default, indent=2 if sys.stdout.isatty() else None)
    text = dumps(ensure_ascii=False)
    print(text if _can_encode(text) else dumps())


def _can_encode(text: str) -> bool:
    """Whether standard output can encode `text`."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None) -> None:
    """Print rows as a table. The first column is never wrapped."""
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=index == 0, overflow="fold")
    for row in rows:
        table.add_row(
            *(Text(printable(cell, keep="\n"), style=_STYLES.get(cell.partition(" ")[0], "")) for cell in row)
        )
    console().print(table)


def print_note(text: str) -> None:
    """Print a message on standard error."""
    console(sys.stderr).print(printable(text, keep="\n\t"), markup=False, soft_wrap=True)


def print_error(message: str) -> None:
    """Print `error: …` as one line on standard error."""
    from rich.text import Text

    line = Text.assemble(("error: ", "bold red"), printable(" ".join(storable(message).split())))
    console(sys.stderr).print(line, soft_wrap=True)


def format_duration(seconds: float) -> str:
    """Format a duration: "850 ms", "12 s", "3 min", "2 h", "5 d"."""
    if seconds < 1:
        return f"{max(seconds, 0) * 1000:.0f} ms"
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def format_age(instant: datetime) -> str:
    """Format the time since `instant`."""
    return format_duration((datetime.now(UTC) - instant).total_seconds())


def format_due(instant: datetime) -> str:
    """Format `instant` relative to now: "in 12 s" or "3 min ago"."""
    left = (instant - datetime.now(UTC)).total_seconds()
    return f"in {format_duration(left)}" if left >= 0 else f"{format_duration(-left)} ago"


_STYLES = {
    "completed": "green",
    "running": "cyan",
    "ready": "cyan",
    "waiting": "yellow",
    "parked": "magenta",
    "failed": "red",
    "cancelled": "dim",
}


def _json_default(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} is not JSON")
