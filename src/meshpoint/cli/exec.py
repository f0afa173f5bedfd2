"""`meshpoint exec`: run one agent once, in the foreground."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshpoint.cli import sources
from meshpoint.cli.exec_output import (
    checkpoint_document,
    print_forecast,
    print_result,
    show_progress,
)
from meshpoint.cli.exits import ExitCode
from meshpoint.cli.output import print_note
from meshpoint.cli.send import MAX_INPUT_BYTES, parse_input
from meshpoint.errors import ConfigurationError, Interrupted
from meshpoint.files import read_bounded

if TYPE_CHECKING:
    from meshpoint.exec.attempt import AttemptResult
    from meshpoint.exec.checkpoint_file import CheckpointDocument
    from meshpoint.exec.dry_run import Forecast
    from meshpoint.exec.embedded import ExecConfig
    from meshpoint.exec.session import ExecInput, SessionSpec
    from meshpoint.exec.sessions import LockedSession, SessionStore

EXAMPLES = """\b
Examples:
  meshpoint exec my_agents.travel:travel --input '{"city": "Rome"}'
  meshpoint exec my_agents.travel:travel --input @trip.json --resume         after fixing a step
  meshpoint exec my_agents.travel:travel --input @trip.json --session rome --ttl 12h --json
  meshpoint exec my_agents.travel:travel --session rome --with my_agents.flights:flights
  meshpoint exec my_agents.travel:travel --input @trip.json --export failed.json --include-outputs
  meshpoint exec my_agents.travel:travel --input @trip.json --resume-from failed.json
  jq .checkpoint run.json | meshpoint exec my_agents.travel:travel --input 3 --resume-from -
  meshpoint exec my_agents.travel:travel --input @trip.json --resume --dry-run
"""

HomeOption = Annotated[
    Path,
    typer.Option("--home", envvar="MESHPOINT_HOME", metavar="DIR", help="Folder of the sessions."),
]
DEFAULT_HOME = Path(".meshpoint")

_CANCEL_NOTICE = b"cancelling; a second signal ends it at once\n"
_DURATION = re.compile(r"([0-9]{1,9})([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_MAX_DAYS = 3650


def exec_(
    entrypoint: Annotated[
        str, typer.Argument(metavar="MODULE:AGENT", help="The agent, as module:attribute.")
    ],
    *,
    input_: Annotated[
        str | None,
        typer.Option(
            "--input", metavar="JSON|@FILE", help="Input of the agent; the session stores it."
        ),
    ] = None,
    others: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="MODULE:AGENT",
            help="Another agent that this one may call; repeatable.",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Resume the last session of this agent with this input."),
    ] = False,
    session: Annotated[
        str | None,
        typer.Option("--session", metavar="ID", help="Resume this session, or create it."),
    ] = None,
    resume_from: Annotated[
        str | None,
        typer.Option(
            "--resume-from",
            metavar="FILE|-|JSON",
            help="Resume from an exported checkpoint: a file, - for standard input, or its text.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Only show which steps would run. Nothing runs, nothing is written."
        ),
    ] = False,
    export_to: Annotated[
        Path | None,
        typer.Option(
            "--export", metavar="FILE", help="Export the checkpoint unless the agent completes."
        ),
    ] = None,
    include_outputs: Annotated[
        bool,
        typer.Option(
            "--include-outputs", help="Also export the outputs of the steps, without secrets."
        ),
    ] = False,
    secret_key: sources.SecretKeys = None,
    unencrypted: sources.Unencrypted = False,
    ttl: Annotated[
        str,
        typer.Option(
            "--ttl", metavar="DURATION", help="How long to keep the session: 90m, 12h, 7d."
        ),
    ] = "7d",
    home_dir: HomeOption = DEFAULT_HOME,
    as_json: sources.AsJson = False,
) -> None:
    """Run one agent in the foreground; resume it where it failed.

    The steps are the agent's subtasks. After a failure, a cancellation or a kill, the next attempt
    of the session runs only the steps without a result, the steps that have changed, and all steps
    after them.

    Exits with 0 if the agent completed, 4 if it failed, 5 if it was cancelled, 7 if another
    process runs the session, 10 if there is nothing to resume, 12 if the session has already
    completed, 130 on Ctrl-C. With --dry-run it exits with 0 if each step with a result would be
    reused, with 9 if one would run again, and with 4 if the agent would refuse the input.
    """
    if sum((resume, session is not None, resume_from is not None)) > 1:
        problem = "--resume, --session and --resume-from exclude each other"
        raise ConfigurationError("meshpoint exec", problem, "use one of them")
    if dry_run and export_to is not None:
        problem = "--dry-run has nothing to export"
        raise ConfigurationError("meshpoint exec", problem, "leave out --dry-run or --export")
    if export_to is not None and not _is_valid_target(export_to):
        raise ConfigurationError(
            "--export", f"{export_to} cannot be a file", "name a file in an existing folder"
        )
    from meshpoint.exec.sessions import SessionStore

    secret_keys = (*(secret_key or ()), *sources.environment_secret_keys())
    agent_input, keep = _read_input(input_), _parse_duration(ttl)
    sessions = SessionStore(home_dir, sources.environment_sealer())
    with redirect_stdout(sys.stderr):  # output of agents must not mix with the result
        config, spec = _load(entrypoint, others or [], agent_input, keep, sessions, secret_keys)
        if dry_run:
            forecasting = _forecast(config, spec, sessions, resume, session, resume_from)
            forecast = asyncio.run(forecasting)
    if dry_run:
        print_forecast(forecast, as_json=as_json)
        raise typer.Exit(_forecast_code(forecast))
    with redirect_stdout(sys.stderr):
        sessions.delete_expired(warn=lambda reason: print_note(f"warning: {reason}"))
        opening = _open_session(config, spec, sessions, resume, session, resume_from)
        result, signal_number = asyncio.run(_run_session(config, opening, quiet=as_json))
        document = checkpoint_document(result, secret_keys, include_outputs=include_outputs)
    command = _resume_command(entrypoint, others or [], home_dir, result.session.id)
    print_result(result, document, command, as_json=as_json)
    if export_to is not None:
        _write_export(document, export_to, unencrypted=unencrypted)
    raise typer.Exit(_exit_code(result, signal_number))


def _is_valid_target(path: Path) -> bool:
    try:
        return not path.is_dir() and path.absolute().parent.is_dir()
    except OSError:  # such as a name that is too long
        return False


def _read_input(text: str | None) -> ExecInput | None:
    """Parse `text` as JSON. After an @, it names a file to read.

    Raises:
        ConfigurationError: It cannot be read or is not JSON.
    """
    from meshpoint.exec.session import ExecInput

    if text is None:
        return None
    try:
        content = (
            read_bounded(Path(text[1:]), MAX_INPUT_BYTES).decode("utf-8-sig")
            if text.startswith("@")
            else text
        )
        return ExecInput(parse_input(content))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            "--input", f"{text[1:]} cannot be read: {error}", "name a JSON file after @"
        ) from error
    except ConfigurationError as error:
        raise ConfigurationError("--input", error.problem, error.fix) from error


def _parse_duration(text: str) -> timedelta:
    """Parse a duration such as "12h".

    Raises:
        ConfigurationError: It is not a valid duration.
    """
    found = _DURATION.fullmatch(text)
    duration = timedelta(**{_UNITS[found[2]]: int(found[1])}) if found is not None else timedelta()
    if not timedelta() < duration <= timedelta(days=_MAX_DAYS):
        fix = f"write a number and s, m, h or d, such as 12h, up to {_MAX_DAYS}d"
        raise ConfigurationError("--ttl", f"{text!r} is not a valid duration", fix)
    return duration


def _write_export(document: CheckpointDocument | None, file: Path, *, unencrypted: bool) -> None:
    from meshpoint.exec.checkpoint_file import write_document

    if document is None:
        print_note(f"nothing is written to {file}: there is no checkpoint to resume from")
        return
    fix = "name a file in a folder that you can write to"
    with sources.exported(file, sources.environment_sealer(), unencrypted) as sealer:
        write_document(document, file, "--export", fix, sealer)
        print_note(f"wrote {file}")


def _forecast_code(forecast: Forecast) -> ExitCode:
    if forecast.refusal is not None:
        return ExitCode.FAILED
    return ExitCode.REPEATS if forecast.repeats_steps else ExitCode.OK


def _exit_code(result: AttemptResult, signal_number: int | None) -> ExitCode:
    if result.status == "completed":
        return ExitCode.OK
    if result.status == "cancelled":
        return ExitCode.INTERRUPTED if signal_number == signal.SIGINT else ExitCode.CANCELLED
    return ExitCode.FAILED


def _load(
    entrypoint: str,
    others: list[str],
    agent_input: ExecInput | None,
    ttl: timedelta,
    sessions: SessionStore,
    secret_keys: tuple[str, ...],
) -> tuple[ExecConfig, SessionSpec]:
    from meshpoint.agents.entrypoint import load_agent
    from meshpoint.exec.embedded import ExecConfig
    from meshpoint.exec.flows import read_sources
    from meshpoint.exec.session import NO_EXPIRY, SessionSpec
    from meshpoint.ports.agent import get_plan

    sources.add_working_directory()
    # Python validates bytecode by the size and modification time (in seconds) of the source. A
    # quick fix may change neither, and the old code would run.
    sys.dont_write_bytecode = True
    agent = load_agent(entrypoint)
    ttl = NO_EXPIRY if get_plan(agent).preserve else ttl
    peers = [load_agent(other) for other in others]
    config = ExecConfig(
        agent=agent,
        others=peers,
        sources=read_sources([agent, *peers]),
        store_file=sessions.store_file,
        ttl=ttl,
        secret_keys=secret_keys,
        encryption_keys=(keys := sources.environment_keys())[0],
        encryption_tenant=keys[1],
    )
    return config, SessionSpec(
        entrypoint=entrypoint, agent=config.agent_name, input=agent_input, ttl=ttl
    )


async def _open_session(
    config: ExecConfig,
    spec: SessionSpec,
    sessions: SessionStore,
    resume: bool,
    session_id: str | None,
    source: str | None,
) -> LockedSession:
    """Open the session that the options select, or create it."""
    if resume:
        return sessions.open_latest(spec)
    if session_id is not None:
        return sessions.open_or_create(session_id, spec)
    if source is None:
        return sessions.create(spec)
    from meshpoint.exec.checkpoint_file import read_document
    from meshpoint.exec.importing import import_checkpoint

    document = read_document(source, config.agent_name, sources.environment_sealer())
    if document.input_digest not in {None, spec.required_input.digest}:
        print_note(
            "the input differs from the exported one: the steps that depend on it run again"
        )
    return await import_checkpoint(config, sessions, spec, document)


async def _forecast(
    config: ExecConfig,
    spec: SessionSpec,
    sessions: SessionStore,
    resume: bool,
    session_id: str | None,
    source: str | None,
) -> Forecast:
    """Forecast the attempt that the options select."""
    from meshpoint.exec.checkpoint_file import read_document
    from meshpoint.exec.dry_run import forecast_import, forecast_session

    if source is None:
        return await forecast_session(config, sessions, spec, resume=resume, session_id=session_id)
    document = read_document(source, config.agent_name, sources.environment_sealer())
    return await forecast_import(config, sessions, spec, document)


async def _run_session(
    config: ExecConfig, opening: Awaitable[LockedSession], *, quiet: bool
) -> tuple[AttemptResult, int | None]:
    """Run an attempt; return its result, and the number of the signal that stopped it."""
    from meshpoint.exec.attempt import run_attempt

    stop, signals = asyncio.Event(), list[int]()

    def on_signal(number: int) -> None:
        signals.append(number)
        stop.set()

    with await opening as locked:
        if not quiet:
            print_note(f"session {locked.session.id}, attempt {len(locked.session.attempts) + 1}")
        with _handle_signals(on_signal), show_progress(len(config.plan.subtasks)) as on_change:
            result = await run_attempt(config, locked, on_change, stop)
    return result, signals[0] if signals else None


@contextmanager
def _handle_signals(callback: Callable[[int], object]) -> Iterator[None]:
    """Call `callback` on the event loop at the first SIGINT or SIGTERM.

    A second signal raises `Interrupted` in the running code. The event loop's own signal handlers
    cannot do that while agent code blocks the loop.
    """
    loop, signalled = asyncio.get_running_loop(), False

    def on_signal(number: int, _: object) -> None:
        nonlocal signalled
        if signalled:
            raise Interrupted
        signalled = True
        os.write(2, _CANCEL_NOTICE)  # the signal may have interrupted a write to the stream
        loop.call_soon_threadsafe(callback, number)

    previous_handlers = {
        number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def _resume_command(entrypoint: str, others: list[str], home_dir: Path, session_id: str) -> str:
    command = ["meshpoint", "exec", entrypoint]
    for other in others:
        command += ["--with", other]
    if home_dir != DEFAULT_HOME:
        command += ["--home", str(home_dir)]
    return shlex.join([*command, "--session", session_id])
