"""Print results on standard output and everything else on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, TextIO

from meshpoint.model.error_text import escape_unprintable, make_storable

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_WIDTH, _MAX_WIDTH = 240, 10_000
_STYLES = {  # by the first word of a cell
    "completed": "green",
    "reused": "cyan",
    "running": "cyan",
    "ready": "cyan",
    "waiting": "yellow",
    "parked": "magenta",
    "suspending": "yellow",
    "failed": "red",
    "cancelled": "dim",
    "not": "dim",  # not run
}


def console(stream: TextIO | None = None) -> Console:
    """Create a console for `stream`. It is wide in a pipe, so that identifiers are not wrapped."""
    from rich.console import Console

    stream = stream or sys.stdout
    return Console(file=stream, width=None if stream.isatty() else _PIPE_WIDTH, highlight=False)


def print_text(text: str) -> None:
    """Print `text` unchanged."""
    console().print(text, markup=False, soft_wrap=True)


def print_json(data: object, *, one_line: bool = False) -> None:
    """Print `data` as JSON: on one line, but indented on a terminal. Times are in ISO 8601.

    With `one_line`, it is on one line on a terminal too, and flushed at once.
    """
    indent = 2 if sys.stdout.isatty() and not one_line else None
    dumps = partial(json.dumps, data, default=_json_default, indent=indent)
    text = dumps(ensure_ascii=False)
    print(text if _can_encode(text) else dumps(), flush=one_line)


def print_either(data: Mapping[str, object], text: str, *, as_json: bool) -> None:
    """Print `data` with `as_json`, else `text`."""
    if as_json:
        print_json(data)
    else:
        print_text(text)


def _can_encode(text: str) -> bool:
    """Whether standard output can encode `text`."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Container[str] = (),
    stream: TextIO | None = None,
) -> None:
    """Print rows as a table, with the columns named in `right` aligned to the right.

    The first column is never wrapped. A terminal that would have to wrap any but the last column
    gets one small table for each row instead, without empty cells ("-").
    """
    from rich.box import SIMPLE
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    out, last = console(stream), len(columns) - 1
    table = Table(box=SIMPLE, pad_edge=False)
    texts = [[escape_unprintable(cell, allowed="\n") for cell in row] for row in rows]
    headers = map(escape_unprintable, columns)  # a header may be the first cell of a row
    for index, (column, header) in enumerate(zip(columns, headers, strict=True)):
        fixed = index == 0 or (out.is_terminal and index < last)
        width = max(map(cell_len, (header, *(cells[index] for cells in texts))))
        table.add_column(
            Text(header),
            no_wrap=fixed,
            min_width=width if fixed else None,
            overflow="fold",
            justify="right" if column in right else "left",
        )
    for cells in texts:
        table.add_row(*(Text(cell, _STYLES.get(cell.partition(" ")[0], "")) for cell in cells))
    min_width = out.measure(table, options=out.options.update(max_width=_MAX_WIDTH)).minimum
    if last > 1 and out.is_terminal and min_width > out.width:
        for first, *rest in rows:
            facts = [each for each in zip(columns[1:], rest, strict=True) if each[1] != "-"]
            print_table((columns[0], first), facts, stream=stream)
    else:
        out.print(table)


def print_note(text: str) -> None:
    """Print a message on standard error."""
    console(sys.stderr).print(
        escape_unprintable(text, allowed="\n\t"), markup=False, soft_wrap=True
    )


def print_error(message: str) -> None:
    """Print `error: …` as one line on standard error."""
    from rich.text import Text

    line = Text.assemble(
        ("error: ", "bold red"), escape_unprintable(" ".join(make_storable(message).split()))
    )
    console(sys.stderr).print(line, soft_wrap=True)


@contextmanager
def show_progress(text: str) -> Iterator[Callable[[str], None]]:
    """Show `text`, and then what the block passes on, if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    with console(sys.stderr).status(text) as status:
        yield lambda text: status.update(escape_unprintable(text))


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


def _json_default(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} is not JSON")
