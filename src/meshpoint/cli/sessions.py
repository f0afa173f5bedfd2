"""`meshpoint sessions`: list, show and delete the sessions of `meshpoint exec`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshpoint.cli import sources
from meshpoint.cli.exec import DEFAULT_HOME, HomeOption
from meshpoint.cli.output import format_age, format_due, format_duration, print_json, print_table, print_text

if TYPE_CHECKING:
    from meshpoint.exec.session import AttemptRecord, Session
    from meshpoint.exec.sessions import SessionStore

app = typer.Typer(help="List, show and delete sessions of `meshpoint exec`.", no_args_is_help=True)

SessionId = Annotated[str, typer.Argument(metavar="ID", help="Id of the session.")]

_LIST = """\b
Examples:
  meshpoint sessions list
  meshpoint sessions list --home /var/tmp/repairs --json
"""
_SHOW = """\b
Examples:
  meshpoint sessions show 5f0c91ae
"""
_RM = """\b
Examples:
  meshpoint sessions rm 5f0c91ae
"""


@app.command("list", epilog=_LIST)
def list_sessions(*, home_dir: HomeOption = DEFAULT_HOME, as_json: sources.AsJson = False) -> None:
    """List sessions, most recently used first."""
    from meshpoint.exec.sessions import SessionStore

    sessions = SessionStore(home_dir)
    found = sessions.list_all()
    if as_json:
        print_json([_session_json(each, sessions) for each in found])
    elif not found:
        print_text("no sessions")
    else:
        columns = ("session", "agent", "status", "attempts", "used", "expires")
        print_table(columns, [_session_row(each, sessions) for each in found])


@app.command("show", epilog=_SHOW)
def show_session(
    session_id: SessionId, *, home_dir: HomeOption = DEFAULT_HOME, as_json: sources.AsJson = False
) -> None:
    """Show a session and its attempts."""
    from meshpoint.exec.sessions import SessionStore

    sessions = SessionStore(home_dir)
    session = sessions.get_session(session_id)
    if as_json:
        print_json(_session_json(session, sessions))
        return
    facts = [("agent", session.entrypoint), ("status", _status(session, sessions))]
    facts += [("operation", session.operation_id), ("expires", format_due(session.expires_at))]
    if holder := sessions.lock_holder(session.id):
        facts.append(("run by", str(holder)))
    print_table(("session", session.id), facts)
    if session.attempts:
        columns = ("attempt", "ended", "took", "began", "steps", "why")
        print_table(columns, [_attempt_row(each) for each in session.attempts])


@app.command("rm", epilog=_RM)
def remove_session(
    session_id: SessionId, *, home_dir: HomeOption = DEFAULT_HOME, as_json: sources.AsJson = False
) -> None:
    """Delete a session and everything recorded for it."""
    from meshpoint.exec.sessions import SessionStore

    SessionStore(home_dir).delete_session(session_id)
    if as_json:
        print_json({"session": session_id, "status": "deleted"})
    else:
        print_text(f"deleted session {session_id}")


def _session_json(session: Session, sessions: SessionStore) -> dict[str, Any]:
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
    took = "-" if attempt.ended is None else format_duration((attempt.ended - attempt.started).total_seconds())
    steps = ", ".join(f"{step.name} {step.status.value}" for step in attempt.steps)
    ending = "-" if attempt.ending is None else attempt.ending.value
    return str(attempt.number), ending, took, f"{format_age(attempt.started)} ago", steps or "-", attempt.error or "-"
