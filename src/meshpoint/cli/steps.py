"""The steps of `meshpoint exec` on standard error: while they run, and as a table at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from meshpoint.cli.output import console, print_note, span

if TYPE_CHECKING:
    from rich.progress import Progress

    from meshpoint.exec.report import LiveStep, StepLog, StepReport

    Told = Callable[[StepLog, LiveStep], None]

_STYLES = {"completed": "green", "reused": "cyan", "failed": "red", "not run": "dim"}
_MARKS = {"completed": "✓", "reused": "=", "failed": "✗"}
_AGAIN = "↻"


@contextmanager
def shown_steps(planned: int) -> Iterator[Told]:
    """What to call with each change of a step: on a terminal it moves a bar, in a pipe it prints a line."""
    if not sys.stderr.isatty():
        yield _line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    progress = Progress(*columns, TimeElapsedColumn(), console=console(sys.stderr), transient=True)
    with progress:
        bar = progress.add_task("begins", total=planned or None)
        yield lambda log, step: _moved(progress, bar, log, step)


def _moved(progress: Progress, bar: int, log: StepLog, step: LiveStep) -> None:
    from rich.markup import escape
    from rich.progress import TaskID
    from rich.text import Text

    running = [each.name for each in log.steps.values() if each.moment in {"running", "waits for its peers"}]
    description = escape(", ".join(running) or "…")
    progress.update(TaskID(bar), completed=log.done, total=len(log.steps), description=description)
    mark = _AGAIN if step.moment == "running" and step.why else _MARKS.get(step.moment)
    if mark is not None:
        text = Text.assemble((mark, _STYLES.get(step.moment, "yellow")), " ", step.name, (f"  {_told(step)}", "dim"))
        progress.console.print(text)


def _line(log: StepLog, step: LiveStep) -> None:
    if step.moment != "ran":
        place = list(log.steps).index(step.name) + 1
        print_note(f"step {place} of {len(log.steps)}: {step.name}: {_told(step)}")


def _told(step: LiveStep) -> str:
    took = "" if step.seconds is None else f" in {span(step.seconds)}"
    match step.moment:
        case "running":
            return f"runs again: {step.why}" if step.why else "runs"
        case "reused":
            return f"reused, it ran{took}" if took else "reused"
        case "failed":
            return f"failed{took}: {step.why}"
    return f"{step.moment.value}{took}"


def print_steps(steps: Iterable[StepReport]) -> None:
    """The table of steps."""
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE, pad_edge=False)
    for column in ("step", "status", "seconds", "why"):
        table.add_column(column, overflow="fold", justify="right" if column == "seconds" else "left")
    for step in steps:
        seconds = "-" if step.seconds is None else f"{step.seconds:.3f}"
        status = Text(step.status.value, style=_STYLES[step.status])
        table.add_row(Text(step.name), status, seconds, Text(step.why or "-"))
    if table.row_count:
        console(sys.stderr).print(table)
