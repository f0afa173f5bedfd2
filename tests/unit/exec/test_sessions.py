"""Sessions: which attempt gets which session, one holder at a time, and how they end."""

from __future__ import annotations

import json
import os
import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from meshpoint.errors import (
    ConfigurationError,
    MeshpointError,
    OperationCompleted,
    OperationNotFound,
    SessionLocked,
)
from meshpoint.exec.locks import FileLock, read_holder
from meshpoint.exec.report import StepReport, StepStatus
from meshpoint.exec.session import AttemptStatus, ExecInput, Session, SessionSpec
from meshpoint.exec.sessions import LockedSession, SessionStore
from meshpoint.model.ids import AgentName

STEPS = [StepReport(name="fetch", status=StepStatus.COMPLETED, seconds=0.5)]


def wanted(value: object = 3, *, entrypoint: str = "flow:flow", ttl: timedelta = timedelta(days=7)) -> SessionSpec:
    given = None if value is None else ExecInput(value)  # type: ignore[arg-type]
    return SessionSpec(entrypoint=entrypoint, agent=AgentName("flow"), input=given, ttl=ttl)


def ended(held: LockedSession, ending: AttemptStatus = AttemptStatus.FAILED) -> Session:
    with held:
        held.begin_attempt()
        held.end_attempt(ending, "it broke" if ending is AttemptStatus.FAILED else None, STEPS)
    return held.session


def age(sessions: SessionStore, session: Session) -> None:
    session.expires_at = datetime.now(UTC) - timedelta(seconds=1)
    sessions.save_session(session)


@pytest.fixture
def sessions(tmp_path: Path) -> SessionStore:
    return SessionStore(tmp_path / "home")


def test_attempts_are_logged_and_read_back(sessions: SessionStore) -> None:
    session = ended(sessions.create(wanted()))
    ended(sessions.open_latest(wanted()), AttemptStatus.CANCELLED)
    read = sessions.get_session(session.id)
    assert [(each.number, each.ending, each.error, each.pid) for each in read.attempts] == [
        (1, AttemptStatus.FAILED, "it broke", os.getpid()),
        (2, AttemptStatus.CANCELLED, None, os.getpid()),
    ]
    assert read.attempts[0].steps == STEPS
    assert read.expires_at - read.attempts[1].started >= timedelta(days=7)
    assert sessions.list_all() == [read]


def test_an_attempt_that_never_told_its_end_was_killed(sessions: SessionStore) -> None:
    held = sessions.create(wanted())
    held.begin_attempt()
    held.release()
    assert sessions.get_session(held.session.id).last_status is None
    ended(sessions.open_latest(wanted()))
    assert [each.ending for each in sessions.get_session(held.session.id).attempts] == [
        AttemptStatus.KILLED,
        AttemptStatus.FAILED,
    ]


def test_the_newest_session_of_the_same_agent_and_input_is_resumed(sessions: SessionStore) -> None:
    first, second = (
        ended(sessions.create(wanted({"a": 1, "b": 2.0}))),
        ended(sessions.create(wanted({"b": 2, "a": 1}))),
    )
    ended(sessions.create(wanted({"a": 1})))
    ended(sessions.create(wanted({"a": 1, "b": 2}, entrypoint="flow:other")))
    assert ended(sessions.open_latest(wanted({"a": 1, "b": 2}))).id == second.id
    ended(sessions.open_or_create(first.id, wanted(None)))
    assert ended(sessions.open_latest(wanted({"a": 1, "b": 2}))).id == first.id, "its last attempt is the newest"


def test_without_an_earlier_run_there_is_nothing_to_resume(sessions: SessionStore) -> None:
    ended(sessions.create(wanted(4)))
    with pytest.raises(OperationNotFound, match=r"flow:flow has no session with this input in .*; run it without"):
        sessions.open_latest(wanted(3))


def test_what_has_completed_is_not_resumed(sessions: SessionStore) -> None:
    ended(sessions.create(wanted()), AttemptStatus.COMPLETED)
    for _ in range(2):  # a refusal must release the lock
        with pytest.raises(OperationCompleted, match="has completed; run it without --resume"):
            sessions.open_latest(wanted())


def test_a_named_session_goes_on_and_begins_anew_when_it_has_completed(sessions: SessionStore) -> None:
    first = ended(sessions.open_or_create("rome", wanted()))
    second = ended(sessions.open_or_create("rome", wanted(None)), AttemptStatus.COMPLETED)
    third = ended(sessions.open_or_create("rome", wanted(5)))
    assert first.operation_id == second.operation_id != third.operation_id
    assert (second.input, third.input, len(third.attempts)) == (3, 5, 3)


def test_a_named_session_belongs_to_one_agent_and_begins_with_an_input(sessions: SessionStore) -> None:
    ended(sessions.open_or_create("rome", wanted()))
    with pytest.raises(ConfigurationError, match="session rome belongs to flow:flow"):
        sessions.open_or_create("rome", wanted(entrypoint="flow:other"))
    with pytest.raises(ConfigurationError, match="--input: a new session needs an input"):
        sessions.open_or_create("oslo", wanted(None))
    with pytest.raises(ConfigurationError, match="is not a valid session id"):
        sessions.open_or_create("../rome", wanted())
    ended(sessions.open_or_create("rome", wanted()))


def test_one_process_at_a_time_has_a_session(sessions: SessionStore) -> None:
    held = sessions.open_or_create("rome", wanted())
    with pytest.raises(SessionLocked, match=rf"rome is in use by pid {os.getpid()} on \S+ since .*; wait for it"):
        sessions.open_or_create("rome", wanted())
    held.begin_attempt()
    for choose in (lambda: sessions.open_or_create("rome", wanted()), lambda: sessions.open_latest(wanted())):
        with pytest.raises(SessionLocked):
            choose()
    with pytest.raises(SessionLocked):
        sessions.delete_session("rome")
    holder = sessions.lock_holder("rome")
    assert holder is not None
    assert holder.pid == os.getpid()
    held.release()
    assert sessions.lock_holder("rome") is None
    assert ended(sessions.open_latest(wanted())).id == "rome"


def test_what_was_read_before_the_lock_is_read_again(sessions: SessionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder of the lock completes after the resuming attempt chose the session."""
    held = sessions.open_or_create("rome", wanted())
    held.begin_attempt()
    stale = sessions.list_all()

    def all_and_then_it_completes() -> list[Session]:
        held.end_attempt(AttemptStatus.COMPLETED, None, [])
        held.release()
        return stale

    monkeypatch.setattr(sessions, "list_all", all_and_then_it_completes)
    with pytest.raises(OperationCompleted):
        sessions.open_latest(wanted())


def test_an_expired_session_goes_with_its_rows_but_not_while_it_runs(sessions: SessionStore) -> None:
    over, kept = ended(sessions.create(wanted(1))), ended(sessions.create(wanted(2)))
    with sqlite3.connect(sessions.store_file) as db:
        db.execute("CREATE TABLE agent_operations (operation_id, agent_name)")
        db.executemany(
            "INSERT INTO agent_operations VALUES (?, ?)", [("a", f"exec-{over.id}/flow"), ("b", "exec-x/flow")]
        )
    db.close()
    age(sessions, over)
    running = sessions.open_or_create(over.id, wanted(1))
    assert sessions.delete_expired() == []
    running.release()
    assert sessions.delete_expired() == [over.id]
    assert [each.id for each in sessions.list_all()] == [kept.id]
    assert not list(sessions.home_dir.glob(f"sessions/{over.id}*"))
    with sqlite3.connect(sessions.store_file) as db:
        assert db.execute("SELECT operation_id FROM agent_operations").fetchall() == [("b",)]
    db.close()


def test_a_session_that_was_killed_before_its_first_attempt_leaves_nothing(sessions: SessionStore) -> None:
    held = sessions.open_or_create("rome", wanted())
    assert sessions.delete_expired() == []
    held.release()
    assert sessions.delete_expired() == ["rome"]
    assert not list(sessions.home_dir.glob("sessions/rome*"))


def test_removing(sessions: SessionStore) -> None:
    session = ended(sessions.create(wanted()))
    sessions.delete_session(session.id)
    assert sessions.list_all() == []
    for ask in (sessions.get_session, sessions.delete_session):
        with pytest.raises(OperationNotFound, match=f"there is no session {session.id}"):
            ask(session.id)


def test_a_broken_file_is_named_and_hides_no_other(sessions: SessionStore) -> None:
    good, bad = ended(sessions.create(wanted(1))), ended(sessions.create(wanted(2)))
    file = sessions.home_dir / f"sessions/{bad.id}.json"
    file.write_text(file.read_text().replace("meshpoint-session/1", "meshpoint-session/2"))
    assert [each.id for each in sessions.list_all()] == [good.id]
    with pytest.raises(MeshpointError, match=f"{bad.id} cannot be read: .*`meshpoint sessions rm {bad.id}`"):
        sessions.get_session(bad.id)
    sessions.delete_expired()
    sessions.delete_session(bad.id)
    assert not file.exists()


def test_sessions_are_for_their_owner_only(sessions: SessionStore) -> None:
    session = ended(sessions.create(wanted()))
    assert sessions.home_dir.stat().st_mode & 0o077 == 0
    assert (sessions.home_dir / f"sessions/{session.id}.json").stat().st_mode & 0o077 == 0
    assert (sessions.home_dir / ".gitignore").read_text() == "*\n"


def test_a_lock_excludes_other_handles_and_a_dead_holder_does_not_block(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = FileLock.try_acquire(path)
    assert first is not None
    assert FileLock.try_acquire(path) is None
    first.release()
    # the record of a holder that died
    path.write_text(json.dumps({"pid": 1, "host": "elsewhere", "since": "long ago"}))
    second = FileLock.try_acquire(path, record_holder=False)
    assert second is not None
    assert str(read_holder(path)) == "pid 1 on elsewhere since long ago"
    second.release()
    path.write_text("")
    assert read_holder(path) is None
