"""Display the demo: a live table on a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from meshpoint.demo.tracker import (
    MUST_BE_POSITIVE,
    MUST_BE_ZERO,
    Ledger,
    LogLine,
    Replica,
    ReplicaState,
    TaskTracker,
)
from meshpoint.model.error_text import quantity

_WIDTH = 80
_LOG_LINES = 12
_BAR_WIDTH = 58
_SIGN_STYLES = {"✗": "bold red", "»": "bold green", "!": "yellow", "✓": "green"}


@contextmanager
def open_screen(location: str, *, live: bool) -> Iterator[Callable[[TaskTracker], None]]:
    """Yield a function that displays the current state of the demo.

    A live screen is redrawn on standard output; otherwise new lines of the log go to standard
    error.
    """
    if not live:
        yield _line_printer()
        return
    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as view:
        yield lambda tracker: view.update(render(tracker, location), refresh=True)


def _line_printer() -> Callable[[TaskTracker], None]:
    printed_count = 0

    def print_new_lines(tracker: TaskTracker) -> None:
        nonlocal printed_count
        for line in tracker.log[printed_count:]:
            print(f"{line.seconds:5.1f} s  {line.sign} {line.text}", file=sys.stderr, flush=True)
        printed_count = len(tracker.log)

    return print_new_lines


def render(tracker: TaskTracker, location: str) -> RenderableType:
    """Render the current state: replicas, answers, and the last lines of the log."""
    title = Text.assemble(
        ("Meshpoint demo", "bold"), f"  {quantity(len(tracker.replicas), 'replica')} on {location}"
    )
    title.truncate(_WIDTH - 10, overflow="ellipsis", pad=True)
    title.append(f"{tracker.now - tracker.started_at:8.1f} s", "dim")
    return Group(
        title, _replica_table(tracker), _progress_bar(tracker), Text(), *_log_view(tracker.log)
    )


def _replica_table(tracker: TaskTracker) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, width=_WIDTH)
    for name, width in (("replica", 7), ("pid", 8)):
        table.add_column(name, width=width)
    table.add_column("state", ratio=1)
    for name in ("running", "paused", "resumed"):
        table.add_column(name, justify="right", width=7)
    for replica in tracker.replicas.values():
        table.add_row(*_replica_row(replica))
    return table


def _replica_row(replica: Replica) -> tuple[Text, ...]:
    killed = replica.state is ReplicaState.KILLED
    sign, style = {
        ReplicaState.STARTING: ("◌", "dim"),
        ReplicaState.SERVING: ("●", "green"),
        ReplicaState.KILLED: ("✗", "bold red"),
        ReplicaState.DRAINED: ("○", "dim"),
    }[replica.state]
    state = Text(f"{sign} {replica.state}", style)
    if killed:
        state.append(f", {replica.state_note}", "red")
    counts = (len(replica.running), len(replica.paused), replica.resumed)
    dim = "dim strike" if killed else ""
    numbers = [
        Text("" if killed and i < 2 else str(n), "dim" if killed else "")
        for i, n in enumerate(counts)
    ]
    return (Text(replica.name, dim or "bold"), Text(str(replica.pid or ""), dim), state, *numbers)


def _progress_bar(tracker: TaskTracker) -> Text:
    full = _BAR_WIDTH * min(tracker.answers, tracker.requests) // tracker.requests
    counted = f"  {tracker.answers} of {tracker.requests}"
    return Text.assemble(
        ("answered ", "bold"), ("█" * full, "green"), ("░" * (_BAR_WIDTH - full), "dim"), counted
    )


def _log_view(log: list[LogLine]) -> list[Text]:
    shown = [_format_line(line) for line in log[-_LOG_LINES:]]
    return shown + [Text()] * (_LOG_LINES - len(shown))


def _format_line(line: LogLine) -> Text:
    style = _SIGN_STYLES.get(line.sign, "")
    text = Text.assemble(
        (f"{line.seconds:5.1f} s  ", "dim"), (f"{line.sign} ", style), (line.text, style)
    )
    text.truncate(_WIDTH, overflow="ellipsis")
    return text


def print_ledger(ledger: Ledger) -> None:
    """Print the ledger for people."""
    failed_checks = ledger.failed_checks
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column("number", justify="right")
    table.add_column("meaning")
    for name, meaning in _LABELS:
        style = "bold red" if name in failed_checks else "green" if name in _CHECKED else ""
        table.add_row(
            Text(str(getattr(ledger, name)), style),
            Text(meaning, "red" if name in failed_checks else ""),
        )
    console = Console(highlight=False, width=_WIDTH)
    console.print(table)
    if ledger.ok:
        console.print(
            "Two of three replicas were killed; every request was answered once "
            f"({ledger.seconds:.1f} s)."
        )
    else:
        console.print(Text(f"Wrong: {', '.join(ledger.failed_checks)}.", "bold red"))


_LABELS = (
    ("requests", "requests, each with two pauses"),
    ("answers", "answers"),
    ("lost", "lost: requests without an answer"),
    ("duplicated", "duplicated: tasks with more than one outcome"),
    ("failed", "failed: answers that are errors"),
    ("repeated", "answers delivered again and dropped"),
    ("paused_in_killed", "tasks that the first killed replica had paused"),
    ("running_in_killed", "segments running in the second killed replica"),
    ("resumed_elsewhere", "tasks paused by one replica and resumed by another"),
    ("rescued", "tasks rescued in the middle of a segment"),
)
_CHECKED = {*MUST_BE_ZERO, *MUST_BE_POSITIVE}
