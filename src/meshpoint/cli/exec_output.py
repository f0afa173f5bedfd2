"""Show the steps and the result of `meshpoint exec`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from meshpoint.cli.output import (
    console,
    format_duration,
    print_error,
    print_json,
    print_note,
    print_table,
    print_text,
)
from meshpoint.model.error_text import quantity

if TYPE_CHECKING:
    from rich.progress import Progress

    from meshpoint.exec.attempt import AttemptResult
    from meshpoint.exec.checkpoint_file import CheckpointDocument
    from meshpoint.exec.dry_run import Forecast
    from meshpoint.exec.report import StepLog, StepProgress, StepReport

_SYMBOLS = {"completed": ("✓", "green"), "reused": ("=", "cyan"), "failed": ("✗", "red")}
_RERUN_SYMBOL = "↻", "yellow"


@contextmanager
def show_progress(planned: int) -> Iterator[Callable[[StepLog, StepProgress], None]]:
    """Yield a callback for changes of steps: it moves a bar on a terminal, else prints a line."""
    if not sys.stderr.isatty():
        yield _print_line
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
    )
    progress = Progress(*columns, TimeElapsedColumn(), console=console(sys.stderr), transient=True)
    with progress:
        bar = progress.add_task("starting", total=planned or None)
        yield lambda log, step: _update_bar(progress, bar, log, step)


def _update_bar(progress: Progress, bar: int, log: StepLog, step: StepProgress) -> None:
    from rich.markup import escape
    from rich.progress import TaskID
    from rich.text import Text

    running = [
        each.name for each in log.steps.values() if each.status in {"running", "waiting for peers"}
    ]
    description = escape(", ".join(running) or "…")
    progress.update(
        TaskID(bar), completed=log.completed_count, total=len(log.steps), description=description
    )
    symbol = (
        _RERUN_SYMBOL if step.status == "running" and step.reason else _SYMBOLS.get(step.status)
    )
    if symbol is not None:
        described = (f"  {_describe_step(step)}", "dim")
        progress.console.print(Text.assemble(symbol, " ", step.name, described))


def _print_line(log: StepLog, step: StepProgress) -> None:
    if step.status != "ran":
        position = list(log.steps).index(step.name) + 1
        print_note(f"step {position} of {len(log.steps)}: {step.name}: {_describe_step(step)}")


def _describe_step(step: StepProgress) -> str:
    took = "" if step.seconds is None else f" in {format_duration(step.seconds)}"
    match step.status:
        case "running":
            return f"runs again: {step.reason}" if step.reason else "runs"
        case "reused":
            return f"reused, it ran{took}" if took else "reused"
        case "failed":
            return f"failed{took}: {step.reason}"
    return f"{step.status.value}{took}"


def checkpoint_document(
    result: AttemptResult, secret_keys: Sequence[str], *, include_outputs: bool
) -> CheckpointDocument | None:
    """Build the export of an attempt that did not complete; `None` if it has no checkpoint."""
    from meshpoint.exec.checkpoint_file import build_document

    if result.checkpoint is None:
        return None
    document = build_document(
        result.checkpoint,
        include_outputs=include_outputs,
        secret_keys=secret_keys,
        session=result.session.id,
        input_digest=result.session.input_digest,
    )
    if include_outputs:
        count = len(document.removed)
        removed = f"{quantity(count, 'secret value')} {'was' if count == 1 else 'were'} removed"
        print_note(
            f"warning: {removed} from the exported outputs, which may still contain personal data"
        )
    return document


def print_result(
    result: AttemptResult,
    document: CheckpointDocument | None,
    resume_command: str,
    *,
    as_json: bool,
) -> None:
    """Print the output on standard output, and everything else on standard error.

    `resume_command` is the command line that resumes the session.
    """
    if as_json:
        print_json(_result_json(result, document, resume_command))
        return
    from meshpoint.model.outcomes import Ok

    if result.steps:
        columns, rows = ("step", "status", "seconds", "why"), map(_step_row, result.steps)
        print_table(columns, list(rows), right=("seconds",), stream=sys.stderr)
    match result.outcome:
        case Ok(value=value):
            print_json(value)
        case failed:
            _print_traceback(result)
            print_error(f"{result.session.agent} {result.status.value}: {failed.message}")
            print_note(f"resume with: {resume_command}")


def print_forecast(forecast: Forecast, *, as_json: bool) -> None:
    """Print a dry run on standard output, and an input that would be refused on standard error."""
    if as_json:
        print_json(_forecast_json(forecast))
        return
    if forecast.refusal is not None:
        print_error(f"it would fail at once: {forecast.refusal}")
        return
    if forecast.steps:
        rows = [(step.name, step.action.value, step.why or "-") for step in forecast.steps]
        print_table(("step", "action", "why"), rows)
    else:
        print_text("no steps are known before the agent runs")
    target = "a new session" if forecast.session is None else f"session {forecast.session}"
    print_note(f"dry run of attempt {forecast.attempt} in {target}: nothing ran")


def _forecast_json(forecast: Forecast) -> dict[str, Any]:
    return {
        "dry_run": True,
        "session": forecast.session,
        "attempt": forecast.attempt,
        "input_changed": forecast.input_changed,
        "flow_changed": forecast.flow_changed,
        "certain": forecast.is_certain,
        "repeats_steps": forecast.repeats_steps,
        "refusal": forecast.refusal,
        "steps": [step.model_dump(mode="json") for step in forecast.steps],
    }


def _step_row(step: StepReport) -> tuple[str, ...]:
    seconds = "-" if step.seconds is None else f"{step.seconds:.3f}"
    return step.name, step.status.value, seconds, step.why or "-"


def _print_traceback(result: AttemptResult) -> None:
    """Print the traceback of a failure, for debugging."""
    details = result.checkpoint.error_details if result.checkpoint is not None else None
    if details and "traceback" in details and result.status == "failed":
        print_note(str(details["traceback"]))


def _result_json(
    result: AttemptResult, document: CheckpointDocument | None, resume_command: str
) -> dict[str, Any]:
    from meshpoint.exec.checkpoint_file import document_json
    from meshpoint.model.outcomes import Ok

    session, outcome = result.session, result.outcome
    succeeded = isinstance(outcome, Ok)
    return {
        "success": succeeded,
        "session": session.id,
        "attempt": result.attempt_number,
        "operation_id": session.operation_id,
        "agent": session.agent,
        "status": result.status.value,
        "steps": [step.model_dump(mode="json") for step in result.steps],
        "output": outcome.value if isinstance(outcome, Ok) else None,
        "error": None
        if isinstance(outcome, Ok)
        else {"kind": outcome.kind.value, "message": outcome.message},
        "checkpoint": None if document is None else document_json(document),
        "resume": None if succeeded else resume_command,
    }
