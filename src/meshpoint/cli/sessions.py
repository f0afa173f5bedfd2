"""`meshpoint sessions`: list, show, restore and delete the sessions of `meshpoint exec`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshpoint.cli import sources
from meshpoint.cli.exec import DEFAULT_HOME, HomeOption
from meshpoint.cli.output import (
    format_age,
    format_due,
    format_duration,
    print_either,
    print_json,
    print_table,
    print_text,
)
from meshpoint.errors import OperationNotFound

if TYPE_CHECKING:
    from meshpoint.exec.flows import FlowVersions
    from meshpoint.exec.session import AttemptRecord, Session
    from meshpoint.exec.sessions import SessionStore

app = typer.Typer(help="List, show and delete sessions of `meshpoint exec`.", no_args_is_help=True)

_SessionId = Annotated[str, typer.Argument(metavar="ID", help="Id of the session.")]

_LIST = """\b
Examples:
  meshpoint sessions list
  meshpoint sessions list --home /var/tmp/repairs --json
"""
_SHOW = """\b
Examples:
  meshpoint sessions show 5f0c91ae
"""
_FLOW = """\b
Examples:
  meshpoint sessions flow 5f0c91ae
  meshpoint sessions flow 5f0c91ae 2 --diff 1
"""
_RESTORE = """\b
Examples:
  meshpoint sessions restore 5f0c91ae 1
  meshpoint exec my_agents.travel:travel --session 5f0c91ae
"""
_RM = """\b
Examples:
  meshpoint sessions rm 5f0c91ae
"""


@app.command("list", epilog=_LIST)
def list_sessions(*, home_dir: HomeOption = DEFAULT_HOME, as_json: sources.AsJson = False) -> None:
    """List sessions, most recently used first."""
    from meshpoint.exec.sessions import SessionStore

    sessions = SessionStore(home_dir, sources.environment_sealer())
    found = sessions.list_all()
    if as_json:
        print_json([_to_json(each, sessions) for each in found])
    elif not found:
        print_text("no sessions")
    else:
        columns = ("session", "agent", "status", "attempts", "used", "expires")
        print_table(columns, [_session_row(each, sessions) for each in found])


@app.command("show", epilog=_SHOW)
def show_session(
    session_id: _SessionId, *, home_dir: HomeOption = DEFAULT_HOME, as_json: sources.AsJson = False
) -> None:
    """Show a session and its attempts."""
    from meshpoint.exec.sessions import SessionStore

    sessions = SessionStore(home_dir, sources.environment_sealer())
    session = sessions.get_session(session_id)
    if as_json:
        print_json(_to_json(session, sessions))
        return
    facts = [
        ("agent", session.entrypoint),
        ("status", _status(session, sessions)),
        ("operation", session.operation_id),
        ("expires", format_due(session.expires_at)),
    ]
    if holder := sessions.lock_holder(session.id):
        facts.append(("run by", holder))
    print_table(("session", session.id), facts)
    if session.attempts:
        columns = ("attempt", "flow", "ended", "took", "began", "steps", "why")
        print_table(columns, [_attempt_row(each) for each in session.attempts])


@app.command("flow", epilog=_FLOW)
def show_flow(
    session_id: _SessionId,
    version: Annotated[
        int | None,
        typer.Argument(
            metavar="VERSION", help="Number of the version; by default the last attempt's."
        ),
    ] = None,
    *,
    diff: Annotated[
        int | None,
        typer.Option("--diff", metavar="VERSION", help="Show what changed since this version."),
    ] = None,
    home_dir: HomeOption = DEFAULT_HOME,
    as_json: sources.AsJson = False,
) -> None:
    """Show a version of the flow that attempts of a session ran."""
    from meshpoint.exec.flows import diff_sources
    from meshpoint.exec.sessions import SessionStore

    sessions = SessionStore(home_dir, sources.environment_sealer())
    session = sessions.get_session(session_id)
    versions = sessions.flow_versions(session.id)
    number = version if version is not None else session.last_flow or 0
    files = _read_version(versions, session_id, number)
    if diff is not None:
        before = _read_version(versions, session_id, diff)
        lines = list(diff_sources(before, files, f"v{diff}", f"v{number}"))
        data = {"session": session_id, "from": diff, "version": number, "diff": lines}
        print_either(data, "\n".join(lines), as_json=as_json)
        return
    data = {"session": session_id, "version": number, "files": files}
    texts = [f"# {name}\n{text.rstrip()}" for name, text in files.items()]
    print_either(data, "\n\n".join(texts), as_json=as_json)


@app.command("restore", epilog=_RESTORE)
def restore_flow(
    session_id: _SessionId,
    version: Annotated[int, typer.Argument(metavar="VERSION", help="Number of the version.")],
    *,
    folder: Annotated[
        Path,
        typer.Option(
            "--into", metavar="DIR", help="Folder from which the flow's modules are imported."
        ),
    ] = Path(),
    home_dir: HomeOption = DEFAULT_HOME,
    as_json: sources.AsJson = False,
) -> None:
    """Go back to a version of the flow: write its files into a folder.

    Refuses to overwrite a file with changes that no version of the session has. The next attempt
    of the session reuses the steps whose functions are the recorded ones.
    """
    from meshpoint.exec.sessions import SessionStore

    sessions = SessionStore(home_dir, sources.environment_sealer())
    versions = sessions.flow_versions(sessions.get_session(session_id).id)
    _read_version(versions, session_id, version)
    changed = versions.restore(version, folder)
    data = {"session": session_id, "version": version, "changed": changed}
    text = "\n".join(f"restored {name}" for name in changed) or "no file differs"
    print_either(data, text, as_json=as_json)


def _read_version(versions: FlowVersions, session_id: str, number: int) -> dict[str, str]:
    if not (files := versions.read(number)):
        kept = ", ".join(f"v{each}" for each in versions.numbers()) or "none"
        problem = f"session {session_id} has no version {number} of its flow; it has {kept}"
        raise OperationNotFound(session_id, problem)
    return files


@app.command("rm", epilog=_RM)
def remove_session(
    session_id: _SessionId, *, home_dir: HomeOption = DEFAULT_HOME, as_json: sources.AsJson = False
) -> None:
    """Delete a session and everything recorded for it."""
    from meshpoint.exec.sessions import SessionStore

    SessionStore(home_dir, sources.environment_sealer()).delete_session(session_id)
    data = {"session": session_id, "status": "deleted"}
    print_either(data, f"deleted session {session_id}", as_json=as_json)


def _to_json(session: Session, sessions: SessionStore) -> dict[str, Any]:
    return {**session.model_dump(mode="json"), "status": _status(session, sessions)}


def _status(session: Session, sessions: SessionStore) -> str:
    if sessions.lock_holder(session.id) is not None:
        return "running"
    if not session.attempts:
        return "new"
    return "killed" if session.last_status is None else session.last_status.value


def _session_row(session: Session, sessions: SessionStore) -> tuple[str, ...]:
    return (
        session.id,
        session.entrypoint,
        _status(session, sessions),
        str(len(session.attempts)),
        f"{format_age(session.last_used_at)} ago",
        format_due(session.expires_at),
    )


def _attempt_row(attempt: AttemptRecord) -> tuple[str, ...]:
    ended, ending = attempt.ended, attempt.ending
    took = format_duration((ended - attempt.started).total_seconds()) if ended else "-"
    steps = ", ".join(f"{step.name} {step.status.value}" for step in attempt.steps)
    return (
        str(attempt.number),
        "-" if attempt.flow is None else f"v{attempt.flow}",
        ending.value if ending else "-",
        took,
        f"{format_age(attempt.started)} ago",
        steps or "-",
        attempt.error or "-",
    )
