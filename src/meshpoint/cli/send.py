"""`meshpoint send`: send a request and print the answer."""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from meshpoint.cli import sources
from meshpoint.cli.exits import ExitCode
from meshpoint.cli.follow import UpdatePrinter
from meshpoint.cli.output import (
    format_duration,
    print_either,
    print_error,
    print_json,
    print_note,
    print_text,
)
from meshpoint.errors import ConfigurationError, NotJson, TooManyFollowers
from meshpoint.files import read_stream

if TYPE_CHECKING:
    from meshpoint.client.requests import SendOptions
    from meshpoint.client.task_handle import TaskHandle
    from meshpoint.model.outcomes import Outcome
    from meshpoint.settings import MeshSettings

EXAMPLES = """\b
Examples:
  meshpoint send travel '{"city": "Rome", "days": 3}' --config travel.yaml
  meshpoint send echo hello --broker amqp://guest:guest@127.0.0.1/ --namespace demo
  meshpoint send travel - --config travel.yaml --wait 300 --json < trip.json
  meshpoint send travel '{"city": "Rome"}' --config travel.yaml --timeout 3600 --no-wait
  meshpoint send travel '{"city": "Rome"}' --config travel.yaml --follow
"""

MAX_INPUT_BYTES = 64 * 1024 * 1024
"""Maximum bytes of a file or standard input."""

_MAX_SECONDS = 315_360_000  # seconds
_DEFAULT_WAIT = 60.0
_REPLY_MARGIN = 4.0
"""Seconds after a task's deadline within which the timeout error arrives.

Less than `ANSWER_GRACE`, after which a handle reports a missing answer as a timeout of the task.
"""


def send(
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="Name of the agent.")],
    text: Annotated[
        str, typer.Argument(metavar="INPUT", help="JSON or plain text; - reads standard input.")
    ],
    *,
    config: sources.Config = None,
    broker: sources.Broker = None,
    namespace: sources.Namespace = None,
    wait: Annotated[
        float | None,
        typer.Option(
            "--wait",
            min=0,
            max=_MAX_SECONDS,
            metavar="SECONDS",
            help="Maximum time to wait for the answer. [60; no limit with --follow]",
        ),
    ] = None,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Print the task id and do not wait.")
    ] = False,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="Print the task id, then status updates, text and artifacts as they arrive. With "
            "--json, every line is an object; the first has the id, the last has the outcome.",
        ),
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            min=0.001,
            max=_MAX_SECONDS,
            metavar="SECONDS",
            help="Maximum duration of the task.",
        ),
    ] = None,
    as_json: sources.AsJson = False,
) -> None:
    """Send INPUT to AGENT and print the answer.

    Exits with 0 if the task completed, 4 if it failed, 5 if it was cancelled, 6 if no answer
    arrived in time.
    """
    if no_wait and wait is not None:
        raise typer.BadParameter("--wait and --no-wait exclude each other")
    if no_wait and follow:
        raise typer.BadParameter("--follow and --no-wait exclude each other")
    from meshpoint.model.ids import new_id

    mesh = sources.require_mesh(config, broker, namespace)
    if wait is None and timeout is not None:
        wait = timeout + _REPLY_MARGIN
    elif wait is None and not follow:
        wait = _DEFAULT_WAIT
    value = parse_input(_read_stdin() if text == "-" else text)
    options: SendOptions = {"task_id": new_id()}
    if timeout is not None:
        options["timeout"] = timedelta(seconds=timeout)
    printer = None
    if follow:
        database_options = sources.database_options(config, namespace)
        printer = UpdatePrinter(as_json=as_json, database_options=database_options)
    task_id = options["task_id"]
    try:
        outcome = asyncio.run(
            _send(mesh, agent, value, options, 0.0 if no_wait else wait, printer)
        )
    except KeyboardInterrupt:
        print_note(f"task {task_id} may still complete")
        raise
    if outcome is not None:
        raise typer.Exit(print_outcome(task_id, outcome, as_json=as_json, one_line=follow))
    if no_wait:
        print_either({"task_id": task_id, "status": "sent"}, task_id, as_json=as_json)
        return
    if as_json:
        key = "kind" if follow else "status"
        print_json({"task_id": task_id, key: "no_answer"}, one_line=follow)
    else:
        print_note(
            f"no answer from {agent} in {format_duration(wait or 0.0)}; "
            f"task {task_id} may still complete"
        )
    raise typer.Exit(ExitCode.NO_ANSWER)


async def _send(
    mesh: MeshSettings,
    agent: str,
    value: Any,
    options: SendOptions,
    wait_seconds: float | None,
    printer: UpdatePrinter | None,
) -> Outcome | None:
    """Send the request and return its outcome; `None` if none arrives within `wait_seconds`.

    With `wait_seconds=0` it does not wait, with `None` there is no limit. `printer` gets each
    update before the end.
    """
    from meshpoint.connecting import connect_to

    async with connect_to(mesh) as client:
        task = await client.send(agent, value, **options)
        if printer is not None:
            printer.print_sent(task.id)
        if wait_seconds == 0:
            return None
        try:
            async with asyncio.timeout(wait_seconds):
                return await _wait(task, printer)
        except TimeoutError:
            return None


async def _wait(task: TaskHandle[Any], printer: UpdatePrinter | None) -> Outcome:
    if printer is None:
        return await task.outcome()
    try:
        async for update in task.updates():
            if update.kind == "ended":
                return update.outcome
            printer.print(update)
    except TooManyFollowers:
        printer.end_text()
        print_note("four newer connections follow the task: no more updates, only its outcome")
        return await task.outcome()
    finally:
        printer.end_text()
    raise AssertionError("the updates of a task end with its outcome")


def _read_stdin() -> str:
    try:
        return read_stream(sys.stdin.buffer, MAX_INPUT_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        problem = f"standard input cannot be read: {reason}"
        raise ConfigurationError("INPUT", problem, "send UTF-8 text of at most 64 MiB") from error


def parse_input(text: str, name: str = "INPUT") -> Any:
    """Parse `text` as JSON, or return it unchanged if it is plain text.

    NaN and Infinity are not JSON. `name` is the argument that errors name.

    Raises:
        ConfigurationError: It starts like a JSON object or list but is not valid, or it cannot be
            sent.
    """
    from meshpoint.model.json_values import check_json

    try:
        return check_json(_parse_json_or_text(text, name), name.lower())
    except NotJson as error:
        raise ConfigurationError(name, str(error), "use valid JSON values") from error


def _parse_json_or_text(text: str, name: str) -> Any:
    try:
        return json.loads(text, parse_constant=_reject_constant)
    except RecursionError as error:
        raise ConfigurationError(name, "it is nested too deeply", "flatten it") from error
    except ValueError as error:
        if not text.lstrip().startswith(("{", "[")):
            return text
        fix = "correct it, or put plain text in JSON quotes"
        raise ConfigurationError(name, f"is not valid JSON: {error}", fix) from error


def _reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON value")


def print_outcome(
    task_id: str, outcome: Outcome, *, as_json: bool, one_line: bool = False
) -> ExitCode:
    """Print `outcome`: a result on standard output, a failure on standard error.

    With `one_line`, JSON is the last line of a sequence of updates, in their form.
    """
    from meshpoint.model.outcomes import Failed, FailureKind, Ok

    summary: dict[str, Any]
    match outcome:
        case Ok(value=value, artifacts=artifacts):
            summary = {"status": "completed", "value": value, "artifacts": list(artifacts)}
            code = ExitCode.OK
        case Failed(kind=FailureKind.CANCELLED, message=message):
            summary, code = {"status": "cancelled", "message": message}, ExitCode.CANCELLED
        case Failed(kind=kind, message=message):
            summary = {"status": "failed", "kind": kind.value, "message": message}
            code = ExitCode.FAILED
    if as_json:
        summary["usage"] = outcome.usage.model_dump(mode="json")
        if one_line:
            print_json({"kind": "ended", "task_id": task_id, "outcome": summary}, one_line=True)
        else:
            print_json({"task_id": task_id, **summary})
    elif isinstance(outcome, Failed):
        print_error(
            f"task {task_id} {summary['status']} ({outcome.kind.value}): {outcome.message}"
        )
    elif isinstance(outcome.value, str):
        print_text(outcome.value)
    else:
        print_json(outcome.value)
    return code
