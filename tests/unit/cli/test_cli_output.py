"""Tables fit the terminal, and keep each row on one line in a pipe."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest

from meshpoint.cli.output import print_table

COLUMNS = ("task", "state", "owner", "why")
ROWS = [("01941f29-7c00-7000-8000-000000000000", "waiting 2 of 3", "-", "it is still waiting")]
NARROW = 36 + 14 + 5 + 7 + 11
"""The narrowest terminal on which only the last column needs to be wrapped."""


class Terminal(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def printed(
    stream: io.StringIO, columns: int, monkeypatch: pytest.MonkeyPatch, rows: Any = ROWS
) -> list[list[str]]:
    """The cells of each printed line."""
    for name, value in (("COLUMNS", str(columns)), ("TERM", "xterm"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    print_table(COLUMNS, rows, stream=stream)
    text = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    return [re.split(r" {2,}", line.strip()) for line in text.splitlines() if line.strip()]


def test_a_wide_terminal_gets_one_line_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed(Terminal(), 100, monkeypatch)[-1] == [*ROWS[0]]


def test_only_the_last_column_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    *_, first, second, third = printed(Terminal(), NARROW, monkeypatch)
    assert (first, second, third) == ([*ROWS[0][:3], "it is"], ["still"], ["waiting"])


def test_a_narrow_terminal_gets_one_table_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    header, _, *lines = printed(Terminal(), NARROW - 1, monkeypatch)
    pairs = [list(pair) for pair in zip(COLUMNS, ROWS[0], strict=True) if pair[1] != "-"]
    assert [header, *lines] == pairs


def test_a_pipe_gets_one_line_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed(io.StringIO(), 60, monkeypatch)[-1] == [*ROWS[0]]


@pytest.mark.parametrize("task_id", ["order [/x] 17", "order[bold]17", "a\x1b[2Jb"])
@pytest.mark.parametrize("width", [60, 200])
def test_an_id_is_shown_as_it_is(
    monkeypatch: pytest.MonkeyPatch, task_id: str, width: int
) -> None:
    rows = [(task_id, *ROWS[0][1:])]
    cells = {cell for line in printed(Terminal(), width, monkeypatch, rows) for cell in line}
    assert task_id.replace("\x1b", "\\x1b") in cells
