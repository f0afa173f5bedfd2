"""The picture: a table that lives on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from meshpoint.demo.ledger import Ledger
from meshpoint.demo.story import Line, Replica, State, Story

_WIDTH = 80
_LOG_LINES = 9
_BAR = 58
_SIGNS = {"✗": "bold red", "»": "bold green", "!": "yellow", "✓": "green"}


class Screen(Protocol):
    """What shows a story."""

    def show(self, story: Story) -> None:
        """Show it as it stands now."""


@contextmanager
def screen(place: str, *, live: bool) -> Iterator[Screen]:
    """A live picture on standard output, or lines on standard error."""
    if not live:
        yield Lines()
        return
    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as view:
        yield Picture(view, place)


class Lines:
    """Prints each line of the log as it comes."""

    def __init__(self) -> None:
        self._printed = 0

    def show(self, story: Story) -> None:
        for line in story.log[self._printed :]:
            print(f"{line.seconds:5.1f} s  {line.sign} {line.text}", file=sys.stderr, flush=True)
        self._printed = len(story.log)


class Picture:
    """Draws the whole story anew each time."""

    def __init__(self, view: Live, place: str) -> None:
        self._view, self._place = view, place

    def show(self, story: Story) -> None:
        self._view.update(picture(story, self._place), refresh=True)


def picture(story: Story, place: str) -> RenderableType:
    """The story as it stands: replicas, answers, and the last lines of the log."""
    title = Text.assemble(("Meshpoint demo", "bold"), f"  {len(story.replicas)} replicas on {place}")
    title.truncate(_WIDTH - 10, overflow="ellipsis", pad=True)
    title.append(f"{story.now - story.began:8.1f} s", "dim")
    return Group(title, _replicas(story), _answers(story), Text(), *_log(story.log))


def _replicas(story: Story) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, width=_WIDTH)
    for name, width in (("replica", 7), ("pid", 8)):
        table.add_column(name, width=width)
    table.add_column("state", ratio=1)
    for name in ("running", "paused", "resumed"):
        table.add_column(name, justify="right", width=7)
    for replica in story.replicas.values():
        table.add_row(*_row(replica))
    return table


def _row(replica: Replica) -> tuple[Text, ...]:
    killed = replica.state is State.KILLED
    sign, style = {
        State.STARTING: ("◌", "dim"),
        State.SERVING: ("●", "green"),
        State.KILLED: ("✗", "bold red"),
        State.ENDED: ("○", "dim"),
    }[replica.state]
    state = Text(f"{sign} {replica.state}", style)
    if killed:
        state.append(f", {replica.remark}", "red")
    counts = (len(replica.running), len(replica.paused), replica.resumed)
    dim = "dim strike" if killed else ""
    numbers = [Text("" if killed and i < 2 else str(n), "dim" if killed else "") for i, n in enumerate(counts)]
    return (Text(replica.name, dim or "bold"), Text(str(replica.pid or ""), dim), state, *numbers)


def _answers(story: Story) -> Text:
    full = _BAR * min(story.answers, story.requests) // story.requests
    counted = f"  {story.answers} of {story.requests}"
    return Text.assemble(("answered ", "bold"), ("█" * full, "green"), ("░" * (_BAR - full), "dim"), counted)


def _log(log: list[Line]) -> list[Text]:
    shown = [_line(line) for line in log[-_LOG_LINES:]]
    return shown + [Text()] * (_LOG_LINES - len(shown))


def _line(line: Line) -> Text:
    style = _SIGNS.get(line.sign, "")
    text = Text.assemble((f"{line.seconds:5.1f} s  ", "dim"), (f"{line.sign} ", style), (line.text, style))
    text.truncate(_WIDTH, overflow="ellipsis")
    return text


def print_ledger(ledger: Ledger) -> None:
    """The account, for people."""
    wrong = set(ledger.wrong)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column("number", justify="right")
    table.add_column("meaning")
    for name, meaning in _MEANINGS:
        style = "bold red" if name in wrong else "green" if name in _CHECKED else ""
        table.add_row(Text(str(getattr(ledger, name)), style), Text(meaning, "red" if name in wrong else ""))
    console = Console(highlight=False, width=_WIDTH)
    console.print(table)
    if ledger.ok:
        console.print(f"Two of three replicas were killed; every request was answered once ({ledger.seconds:.1f} s).")
    else:
        console.print(Text(f"Wrong: {', '.join(ledger.wrong)}.", "bold red"))


_MEANINGS = (
    ("requests", "requests, each with two pauses"),
    ("answers", "answers"),
    ("lost", "lost: requests without an answer"),
    ("duplicated", "duplicated: tasks with more than one end"),
    ("failed", "failed: answers that are errors"),
    ("repeated", "answers delivered again, and dropped"),
    ("paused_in_killed", "tasks paused by the first replica when it was killed"),
    ("running_in_killed", "segments running in the second replica when it was killed"),
    ("resumed_elsewhere", "tasks resumed on another replica than paused them"),
    ("taken_over", "tasks taken over in the middle of a segment"),
)
_CHECKED = {
    "lost",
    "duplicated",
    "failed",
    "paused_in_killed",
    "running_in_killed",
    "resumed_elsewhere",
    "taken_over",
}
