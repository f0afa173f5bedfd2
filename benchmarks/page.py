"""Write the page with all tables of the last system benchmark: `python -m benchmarks.page`.

`make bench ARGS=system` writes it too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Cell, cell_text

_ROOT = Path(__file__).parents[1]
RESULT = _ROOT / "benchmarks" / "results" / "system.json"
PAGE = _ROOT / "docs" / "explanation" / "benchmark-tables.md"

_INTRODUCTION = """\
# Tables of the system benchmark

`make bench ARGS=system` has written this page. A client calls an agent with 8 KB of state, which
calls N peers that answer at once, waits for all, and answers. All contenders run on the same
machine, one at a time in interleaved rounds, and every answer is checked.
[Benchmarks](benchmarks.md) explains the figures.
"""


def to_markdown(report: Mapping[str, Any]) -> str:
    """The page of a report as saved by `Report.save`."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    yield _INTRODUCTION
    yield "## Machine"
    yield ""
    yield from _table(["", ""], [[name, str(value)] for name, value in report["about"].items()])
    for each in report["tables"]:
        yield ""
        yield f"## {each['title']}"
        yield ""
        yield from _table(each["columns"], each["rows"])
        if each["note"]:
            yield ""
            yield each["note"]


def _table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Iterator[str]:
    yield _row(columns)
    yield _row(["---", *["---:"] * (len(columns) - 1)])
    for row in rows:
        yield _row(row)


def _row(cells: Sequence[Cell]) -> str:
    return f"| {' | '.join(cell_text(cell) for cell in cells)} |".replace("|  |", "| |")


def write() -> None:
    """Write the page from the saved report."""
    PAGE.write_text(to_markdown(json.loads(RESULT.read_text())))


if __name__ == "__main__":
    write()
