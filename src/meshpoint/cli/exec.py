"""`meshpoint exec`: run one agent once, in the foreground."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshpoint.cli import sources
from meshpoint.cli.exec_given import configured_secret_keys, parse_duration, read_input
from meshpoint.cli.exec_result import checkpoint_document, print_result, write_export
from meshpoint.cli.exits import ExitCode
from meshpoint.cli.output import print_note
from meshpoint.cli.steps import show_progress
from meshpoint.errors import ConfigurationError, Interrupted

if TYPE_CHECKING:
    from meshpoint.exec.embedded import ExecConfig
    from meshpoint.exec.running import AttemptResult
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
"""

HomeOption = Annotated[
    Path,
    typer.Option("--home", envvar="MESHPOINT_HOME", metavar="DIR", help="Folder of the sessions."),
]
DEFAULT_HOME = Path(".meshpoint")

_CANCEL_NOTICE = b"cancelling; a second signal ends it at once\n"


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("exec", epilog=EXAMPLES)(exec_)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """Options of the command line, besides the agent, its input and the session store."""

    resume: bool
    session: str | None
    resume_from: Path | None
    export_to: Path | None
    include_outputs: bool
    secret_keys: tuple[str, ...]
    as_json: bool
    resume_command: list[str]
    """The command line that resumes the session, without `--session`."""


def exec_(
    entrypoint: Annotated[str, typer.Argument(metavar="MODULE:AGENT", help="The agent, as module:attribute.")],
    *,
    input_: Annotated[
        str | None, typer.Option("--input", metavar="JSON|@FILE", help="Input of the agent; the session stores it.")
    ] = None,
    others: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="MODULE:AGENT", help="Another agent that this one may call; repeatable."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the last session of this agent with this input.")
    ] = False,
    session: Annotated[
        str | None, typer.Option("--session", metavar="ID", help="Resume this session, or create it.")
    ] = None,
    resume_from: Annotated[
        Path | None, typer.Option("--resume-from", metavar="FILE", help="Resume from an exported checkpoint.")
    ] = None,
    export_to: Annotated[
        Path | None,
        typer.Option("--export", metavar="FILE", help="Export the checkpoint unless the agent completes."),
    ] = None,
    include_outputs: Annotated[
        bool, typer.Option("--include-outputs", help="Also export the outputs of the steps, without secrets.")
    ] = False,
    secret_key: Annotated[
        list[str] | None,
        typer.Option("--secret-key", metavar="NAME", help="Another key whose values are secret; repeatable."),
    ] = None,
    ttl: Annotated[
        str, typer.Option("--ttl", metavar="DURATION", help="How long to keep the session: 90m, 12h, 7d.")
    ] = "7d",
    home_dir: HomeOption = DEFAULT_HOME,
    as_json: sources.AsJson = False,
) -> None:
    """Run an agent once in the foreground, and resume it where it failed.

    The steps are the agent's subtasks. After a failure, a cancellation or a kill, the next attempt
    of the session runs only the steps without a result, the steps that have changed, and all steps
    after them.

    Exits with 0 if the agent completed, 4 if it failed, 5 if it was cancelled, 7 if another
    process runs the session, 10 if there is nothing to resume, 12 if the session has already
    completed, 130 on Ctrl-C.
    """
    if sum((resume, session is not None, resume_from is not None)) > 1:
        problem = "--resume, --session and --resume-from exclude each other"
        raise ConfigurationError("meshpoint exec", problem, "use one of them")
    if export_to is not None and not _is_valid_target(export_to):
        raise ConfigurationError("--export", f"{export_to} cannot be a file", "name a file in an existing folder")
    options = _Options(
        resume=resume,
        session=session,
        resume_from=resume_from,
        export_to=export_to,
        include_outputs=include_outputs,
        secret_keys=(*(secret_key or ()), *configured_secret_keys()),
        as_json=as_json,
        resume_command=_resume_command(entrypoint, others or [], home_dir),
    )
    raise typer.Exit(_run_exec(entrypoint, others or [], read_input(input_), parse_duration(ttl), home_dir, options))


def _is_valid_target(path: Path) -> bool:
    try:
        return not path.is_dir() and path.absolute().parent.is_dir()
    except OSError:  # such as a name that is too long
        return False


def _run_exec(
    entrypoint: str,
    others: list[str],
    agent_input: ExecInput | None,
    ttl: timedelta,
    home_dir: Path,
    options: _Options,
) -> ExitCode:
    from meshpoint.exec.sessions import SessionStore

    sessions = SessionStore(home_dir)
    with redirect_stdout(sys.stderr):  # output of agents must not mix with the result
        config, spec = _load(entrypoint, others, agent_input, ttl, sessions, options.secret_keys)
        sessions.delete_expired()
        result, signal_number = asyncio.run(_run_session(config, spec, sessions, options))
        document = checkpoint_document(result, options.secret_keys, include_outputs=options.include_outputs)
    command = shlex.join([*options.resume_command, "--session", result.session.id])
    print_result(result, document, command, as_json=options.as_json)
    if options.export_to is not None:
        write_export(document, options.export_to)
    return _exit_code(result, signal_number)


def _exit_code(result: AttemptResult, signal_number: int | None) -> ExitCode:
    from meshpoint.exec.session import AttemptStatus

    match result.status:
        case AttemptStatus.COMPLETED:
            return ExitCode.OK
        case AttemptStatus.CANCELLED:
            return ExitCode.INTERRUPTED if signal_number == signal.SIGINT else ExitCode.CANCELLED
        case _:
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
    from meshpoint.exec.session import NO_EXPIRY, SessionSpec
    from meshpoint.ports.agent import plan_of

    cwd = str(Path.cwd())
    if cwd not in sys.path:
        sys.path.insert(0, cwd)
    # Python validates bytecode by the size and modification time (in seconds) of the source. A
    # quick fix may change neither, and the old code would run.
    sys.dont_write_bytecode = True
    agent = load_agent(entrypoint)
    ttl = NO_EXPIRY if plan_of(agent).preserve else ttl
    config = ExecConfig(
        agent=agent,
        others=[load_agent(other) for other in others],
        store_file=sessions.store_file,
        ttl=ttl,
        secret_keys=secret_keys,
    )
    return config, SessionSpec(entrypoint=entrypoint, agent=config.agent_name, input=agent_input, ttl=ttl)


async def _run_session(
    config: ExecConfig, spec: SessionSpec, sessions: SessionStore, options: _Options
) -> tuple[AttemptResult, int | None]:
    """Run an attempt; return its result, and the number of the signal that stopped it."""
    from meshpoint.exec.report import StepLog
    from meshpoint.exec.running import run_attempt

    stop, signals = asyncio.Event(), list[int]()

    def on_signal(number: int) -> None:
        signals.append(number)
        stop.set()

    with await _choose_session(config, spec, sessions, options) as locked:
        if not options.as_json:
            print_note(f"session {locked.session.id}, attempt {len(locked.session.attempts) + 1}")
        with _handle_signals(on_signal), show_progress(len(config.plan.subtasks)) as on_change:
            result = await run_attempt(
                config, locked, StepLog(config.plan.subtasks, config.secret_keys, on_change), stop
            )
    return result, signals[0] if signals else None


async def _choose_session(
    config: ExecConfig, spec: SessionSpec, sessions: SessionStore, options: _Options
) -> LockedSession:
    """Open the session that the options select, or create it."""
    if options.resume:
        return sessions.open_latest(spec)
    if options.session is not None:
        return sessions.open_or_create(options.session, spec)
    if options.resume_from is None:
        return sessions.create(spec)
    from meshpoint.exec.checkpoint_file import read_document
    from meshpoint.exec.importing import import_checkpoint

    document = read_document(options.resume_from, config.agent_name)
    if document.input_digest not in {None, spec.required_input.digest}:
        print_note("the input differs from the exported one: the steps that depend on it run again")
    return await import_checkpoint(config, sessions, spec, document)


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

    previous_handlers = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def _resume_command(entrypoint: str, others: list[str], home_dir: Path) -> list[str]:
    command = ["meshpoint", "exec", entrypoint]
    for other in others:
        command += ["--with", other]
    return command if home_dir == DEFAULT_HOME else [*command, "--home", str(home_dir)]
