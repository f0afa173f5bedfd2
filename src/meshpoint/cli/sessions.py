"""`meshpoint sessions`: what `meshpoint exec` keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshpoint.cli import sources
from meshpoint.cli.exec import HOME, Home
from meshpoint.cli.output import ago, print_json, print_table, print_text, span, until

if TYPE_CHECKING:
    from meshpoint.exec.session import AttemptEntry, Session
    from meshpoint.exec.sessions import Sessions

app = typer.Typer(help="See the sessions of `meshpoint exec`, delete them.", no_args_is_help=True)

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
def list_sessions(*, home: Home = HOME, as_json: sources.AsJson = False) -> None:
    """List sessions, the last one used first."""
    from meshpoint.exec.sessions import Sessions

    sessions = Sessions(home)
    found = sessions.all()
    if as_json:
        print_json([_told(each, sessions) for each in found])
    elif not found:
        print_text("no sessions")
    else:
        columns = ("session", "agent", "status", "attempts", "used", "expires")
        print_table(columns, [_row(each, sessions) for each in found])


@app.command("show", epilog=_SHOW)
def show_session(session_id: SessionId, *, home: Home = HOME, as_json: sources.AsJson = False) -> None:
    """Show one session and its attempts."""
    from meshpoint.exec.sessions import Sessions

    sessions = Sessions(home)
    session = sessions.get(session_id)
    if as_json:
        print_json(_told(session, sessions))
        return
    facts = [("agent", session.entrypoint), ("status", _status(session, sessions))]
    facts += [("operation", session.operation_id), ("expires", until(session.expires_at))]
    if holder := sessions.held_by(session.id):
        facts.append(("run by", str(holder)))
    print_table(("session", session.id), facts)
    if session.attempts:
        columns = ("attempt", "ended", "took", "began", "steps", "why")
        print_table(columns, [_attempt_row(each) for each in session.attempts])


@app.command("rm", epilog=_RM)
def remove_session(session_id: SessionId, *, home: Home = HOME, as_json: sources.AsJson = False) -> None:
    """Delete a session with all that is recorded of it."""
    from meshpoint.exec.sessions import Sessions

    Sessions(home).remove(session_id)
    if as_json:
        print_json({"session": session_id, "status": "deleted"})
    else:
        print_text(f"deleted session {session_id}")


def _told(session: Session, sessions: Sessions) -> dict[str, Any]:
    return {**session.model_dump(mode="json"), "status": _status(session, sessions)}


def _status(session: Session, sessions: Sessions) -> str:
    if sessions.held_by(session.id) is not None:
        return "running"
    if not session.attempts:
        return "new"
    return "killed" if session.ending is None else session.ending.value


def _row(session: Session, sessions: Sessions) -> tuple[str, ...]:
    return (
        session.id,
        session.entrypoint,
        _status(session, sessions),
        str(len(session.attempts)),
        f"{ago(session.last_use)} ago",
        until(session.expires_at),
    )


def _attempt_row(attempt: AttemptEntry) -> tuple[str, ...]:
    took = "-" if attempt.ended is None else span((attempt.ended - attempt.started).total_seconds())
    steps = ", ".join(f"{step.name} {step.status.value}" for step in attempt.steps)
    ending = "-" if attempt.ending is None else attempt.ending.value
    return str(attempt.number), ending, took, f"{ago(attempt.started)} ago", steps or "-", attempt.error or "-"
