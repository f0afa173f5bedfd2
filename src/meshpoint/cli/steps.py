"""Show the steps of `meshpoint exec` on standard error: their progress, and a table at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from meshpoint.cli.output import console, format_duration, print_note

if TYPE_CHECKING:
    from rich.progress import Progress

    from meshpoint.exec.report import StepLog, StepProgress, StepReport

    OnStepChange = Callable[[StepLog, StepProgress], None]

_STYLES = {"completed": "green", "reused": "cyan", "failed": "red", "not run": "dim"}
_SYMBOLS = {"completed": "✓", "reused": "=", "failed": "✗"}
_RERUN_SYMBOL = "↻"


@contextmanager
def show_progress(planned: int) -> Iterator[OnStepChange]:
    """Yield a callback for changes of steps: it moves a bar on a terminal, else prints a line."""
    if not sys.stderr.isatty():
        yield _print_line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    progress = Progress(*columns, TimeElapsedColumn(), console=console(sys.stderr), transient=True)
    with progress:
        bar = progress.add_task("starting", total=planned or None)
        yield lambda log, step: _update_bar(progress, bar, log, step)


def _update_bar(progress: Progress, bar: int, log: StepLog, step: StepProgress) -> None:
    from rich.markup import escape
    from rich.progress import TaskID
    from rich.text import Text

    running = [each.name for each in log.steps.values() if each.state in {"running", "waiting for peers"}]
    description = escape(", ".join(running) or "…")
    progress.update(TaskID(bar), completed=log.completed_count, total=len(log.steps), description=description)
    symbol = _RERUN_SYMBOL if step.state == "running" and step.reason else _SYMBOLS.get(step.state)
    if symbol is not None:
        text = Text.assemble(
            (symbol, _STYLES.get(step.state, "yellow")), " ", step.name, (f"  {_describe_step(step)}", "dim")
        )
        progress.console.print(text)


def _print_line(log: StepLog, step: StepProgress) -> None:
    if step.state != "ran":
        position = list(log.steps).index(step.name) + 1
        print_note(f"step {position} of {len(log.steps)}: {step.name}: {_describe_step(step)}")


def _describe_step(step: StepProgress) -> str:
    took = "" if step.seconds is None else f" in {format_duration(step.seconds)}"
    match step.state:
        case "running":
            return f"runs again: {step.reason}" if step.reason else "runs"
        case "reused":
            return f"reused, it ran{took}" if took else "reused"
        case "failed":
            return f"failed{took}: {step.reason}"
    return f"{step.state.value}{took}"


def print_steps(steps: Iterable[StepReport]) -> None:
    """Print the table of steps."""
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
