"""`meshpoint exec`: one agent once, in the foreground."""

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
from meshpoint.cli.exec_given import configured_keys, duration_of, input_of
from meshpoint.cli.exec_result import document_of, export, tell
from meshpoint.cli.exits import ExitCode
from meshpoint.cli.output import print_note
from meshpoint.cli.steps import shown_steps
from meshpoint.errors import ConfigurationError, Interrupted

if TYPE_CHECKING:
    from meshpoint.exec.embedded import Exec
    from meshpoint.exec.running import Finished
    from meshpoint.exec.session import Input, Wanted
    from meshpoint.exec.sessions import HeldSession, Sessions

EXAMPLES = """\b
Examples:
  meshpoint exec my_agents.travel:travel --input '{"city": "Rome"}'
  meshpoint exec my_agents.travel:travel --input @trip.json --resume         after a step was repaired
  meshpoint exec my_agents.travel:travel --input @trip.json --session rome --ttl 12h --json
  meshpoint exec my_agents.travel:travel --session rome --with my_agents.flights:flights
  meshpoint exec my_agents.travel:travel --input @trip.json --export failed.json --include-outputs
  meshpoint exec my_agents.travel:travel --input @trip.json --resume-from failed.json
"""

Home = Annotated[
    Path,
    typer.Option("--home", envvar="MESHPOINT_HOME", metavar="DIR", help="Where sessions are kept."),
]
HOME = Path(".meshpoint")

_CANCELLING = b"cancelling; a second signal ends it at once\n"


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("exec", epilog=EXAMPLES)(exec_)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """What the command line asks for, beside the agent."""

    resume: bool
    session: str | None
    resume_from: Path | None
    export: Path | None
    include_outputs: bool
    secret_keys: tuple[str, ...]
    as_json: bool
    again: list[str]
    """The command line that goes on, without its session."""


def exec_(
    entrypoint: Annotated[str, typer.Argument(metavar="MODULE:AGENT", help="The agent, as module:attribute.")],
    *,
    input_: Annotated[
        str | None, typer.Option("--input", metavar="JSON|@FILE", help="Its input; a session remembers it.")
    ] = None,
    others: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="MODULE:AGENT", help="Another agent, for the calls of this one; repeatable."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the last run of this agent with this input.")
    ] = False,
    session: Annotated[
        str | None, typer.Option("--session", metavar="ID", help="Go on with this session, or begin it.")
    ] = None,
    resume_from: Annotated[
        Path | None, typer.Option("--resume-from", metavar="FILE", help="Go on from an exported checkpoint.")
    ] = None,
    export_to: Annotated[
        Path | None, typer.Option("--export", metavar="FILE", help="Write the checkpoint, unless it completes.")
    ] = None,
    include_outputs: Annotated[
        bool, typer.Option("--include-outputs", help="Export the steps' outputs too, less what is secret.")
    ] = False,
    secret_key: Annotated[
        list[str] | None, typer.Option("--secret-key", metavar="NAME", help="A key whose values are secret, too.")
    ] = None,
    ttl: Annotated[
        str, typer.Option("--ttl", metavar="DURATION", help="How long the session is kept: 90m, 12h, 7d.")
    ] = "7d",
    home: Home = HOME,
    as_json: sources.AsJson = False,
) -> None:
    """Run an agent once, in the foreground, and go on where it failed.

    Its subtasks are the steps. After a failure, a cancellation or a kill, the next attempt of the session runs only
    the steps that have no result yet, those that were changed, and those after them.

    Exits with 0 when it completed, 4 when it failed, 5 when it was cancelled, 7 when another process runs the
    session, 10 when there is nothing to resume, 12 when that has completed, 130 on Ctrl-C.
    """
    if sum((resume, session is not None, resume_from is not None)) > 1:
        problem = "--resume, --session and --resume-from exclude each other"
        raise ConfigurationError("meshpoint exec", problem, "give one of them")
    if export_to is not None and not _may_be_file(export_to):
        raise ConfigurationError("--export", f"{export_to} can be no file", "name a file in a folder that is there")
    options = _Options(
        resume=resume,
        session=session,
        resume_from=resume_from,
        export=export_to,
        include_outputs=include_outputs,
        secret_keys=(*(secret_key or ()), *configured_keys()),
        as_json=as_json,
        again=_again(entrypoint, others or [], home),
    )
    raise typer.Exit(_exec(entrypoint, others or [], input_of(input_), duration_of(ttl), home, options))


def _may_be_file(path: Path) -> bool:
    try:
        return not path.is_dir() and path.absolute().parent.is_dir()
    except OSError:  # such as a name that is too long
        return False


def _exec(
    entrypoint: str, others: list[str], given: Input | None, ttl: timedelta, home: Path, options: _Options
) -> ExitCode:
    from meshpoint.exec.sessions import Sessions

    sessions = Sessions(home)
    with redirect_stdout(sys.stderr):  # what agents print is no result
        run, wanted = _loaded(entrypoint, others, given, ttl, sessions, options.secret_keys)
        sessions.expire()
        finished, number = asyncio.run(_run(run, wanted, sessions, options))
        document = document_of(finished, options.secret_keys, include_outputs=options.include_outputs)
    command = shlex.join([*options.again, "--session", finished.session.id])
    tell(finished, document, command, as_json=options.as_json)
    if options.export is not None:
        export(document, options.export)
    return _code(finished, number)


def _code(finished: Finished, number: int | None) -> ExitCode:
    from meshpoint.exec.session import Ending

    match finished.ending:
        case Ending.COMPLETED:
            return ExitCode.OK
        case Ending.CANCELLED:
            return ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.CANCELLED
        case _:
            return ExitCode.FAILED


def _loaded(
    entrypoint: str, others: list[str], given: Input | None, ttl: timedelta, sessions: Sessions, keys: tuple[str, ...]
) -> tuple[Exec, Wanted]:
    from meshpoint.agents.entrypoint import load_agent
    from meshpoint.exec.embedded import Exec
    from meshpoint.exec.session import NEVER, Wanted
    from meshpoint.ports.agent import plan_of

    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    # Bytecode is known by its source's size and second: a repair may leave both as they were.
    sys.dont_write_bytecode = True
    agent = load_agent(entrypoint)
    ttl = NEVER if plan_of(agent).preserve else ttl
    run = Exec(
        agent=agent,
        others=[load_agent(other) for other in others],
        file=sessions.store_file,
        ttl=ttl,
        secret_keys=keys,
    )
    return run, Wanted(entrypoint=entrypoint, agent=run.name, input=given, ttl=ttl)


async def _run(run: Exec, wanted: Wanted, sessions: Sessions, options: _Options) -> tuple[Finished, int | None]:
    """What is to be told, and the signal that stopped it."""
    from meshpoint.exec.report import StepLog
    from meshpoint.exec.running import run_attempt

    stop, caught = asyncio.Event(), list[int]()

    def on_signal(number: int) -> None:
        caught.append(number)
        stop.set()

    with await _held(run, wanted, sessions, options) as held:
        if not options.as_json:
            print_note(f"session {held.session.id}, attempt {len(held.session.attempts) + 1}")
        with _on_signals(on_signal), shown_steps(len(run.plan.subtasks)) as told:
            finished = await run_attempt(run, held, StepLog(run.plan.subtasks, run.secret_keys, told), stop)
    return finished, caught[0] if caught else None


async def _held(run: Exec, wanted: Wanted, sessions: Sessions, options: _Options) -> HeldSession:
    """The session that the options choose."""
    if options.resume:
        return sessions.latest(wanted)
    if options.session is not None:
        return sessions.named(options.session, wanted)
    if options.resume_from is None:
        return sessions.new(wanted)
    from meshpoint.exec.checkpoint_file import read
    from meshpoint.exec.importing import imported

    document = read(options.resume_from, run.name)
    if document.input_digest not in {None, wanted.given.digest}:
        print_note("the input is another one than that of the file: the steps that it reaches run again")
    return await imported(run, sessions, wanted, document)


@contextmanager
def _on_signals(act: Callable[[int], object]) -> Iterator[None]:
    """Call `act` on the event loop at the first SIGINT or SIGTERM; a second one interrupts whatever runs.

    Not by the loop's own handlers: agent code that blocks the loop must not keep the second one from its effect.
    """
    loop, heard = asyncio.get_running_loop(), False

    def on_signal(number: int, _: object) -> None:
        nonlocal heard
        if heard:
            raise Interrupted
        heard = True
        os.write(2, _CANCELLING)  # not by way of a stream, whose write it may have interrupted
        loop.call_soon_threadsafe(act, number)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _again(entrypoint: str, others: list[str], home: Path) -> list[str]:
    command = ["meshpoint", "exec", entrypoint]
    for other in others:
        command += ["--with", other]
    return command if home == HOME else [*command, "--home", str(home)]
