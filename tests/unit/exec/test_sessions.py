"""Sessions: who gets which, one at a time, and how they end."""

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
    SessionHeld,
)
from meshpoint.exec.locks import FileLock, holder_of
from meshpoint.exec.report import StepReport, StepStatus
from meshpoint.exec.session import Ending, Input, Session, Wanted
from meshpoint.exec.sessions import HeldSession, Sessions
from meshpoint.model.ids import AgentName

STEPS = [StepReport(name="fetch", status=StepStatus.COMPLETED, seconds=0.5)]


def wanted(value: object = 3, *, entrypoint: str = "flow:flow", ttl: timedelta = timedelta(days=7)) -> Wanted:
    given = None if value is None else Input(value)  # type: ignore[arg-type]
    return Wanted(entrypoint=entrypoint, agent=AgentName("flow"), input=given, ttl=ttl)


def ended(held: HeldSession, ending: Ending = Ending.FAILED) -> Session:
    with held:
        held.begin()
        held.end(ending, "it broke" if ending is Ending.FAILED else None, STEPS)
    return held.session


def age(sessions: Sessions, session: Session) -> None:
    session.expires_at = datetime.now(UTC) - timedelta(seconds=1)
    sessions.save(session)


@pytest.fixture
def sessions(tmp_path: Path) -> Sessions:
    return Sessions(tmp_path / "home")


def test_attempts_are_logged_and_read_back(sessions: Sessions) -> None:
    session = ended(sessions.new(wanted()))
    ended(sessions.latest(wanted()), Ending.CANCELLED)
    read = sessions.get(session.id)
    assert [(each.number, each.ending, each.error, each.pid) for each in read.attempts] == [
        (1, Ending.FAILED, "it broke", os.getpid()),
        (2, Ending.CANCELLED, None, os.getpid()),
    ]
    assert read.attempts[0].steps == STEPS
    assert read.expires_at - read.attempts[1].started >= timedelta(days=7)
    assert sessions.all() == [read]


def test_an_attempt_that_never_told_its_end_was_killed(sessions: Sessions) -> None:
    held = sessions.new(wanted())
    held.begin()
    held.release()
    assert sessions.get(held.session.id).ending is None
    ended(sessions.latest(wanted()))
    assert [each.ending for each in sessions.get(held.session.id).attempts] == [Ending.KILLED, Ending.FAILED]


def test_the_newest_session_of_the_same_agent_and_input_is_resumed(sessions: Sessions) -> None:
    first, second = ended(sessions.new(wanted({"a": 1, "b": 2.0}))), ended(sessions.new(wanted({"b": 2, "a": 1})))
    ended(sessions.new(wanted({"a": 1})))
    ended(sessions.new(wanted({"a": 1, "b": 2}, entrypoint="flow:other")))
    assert ended(sessions.latest(wanted({"a": 1, "b": 2}))).id == second.id
    ended(sessions.named(first.id, wanted(None)))
    assert ended(sessions.latest(wanted({"a": 1, "b": 2}))).id == first.id, "its last attempt is the newest"


def test_without_an_earlier_run_there_is_nothing_to_resume(sessions: Sessions) -> None:
    ended(sessions.new(wanted(4)))
    with pytest.raises(OperationNotFound, match=r"flow:flow has no session with this input in .*; run it without"):
        sessions.latest(wanted(3))


def test_what_has_completed_is_not_resumed(sessions: Sessions) -> None:
    ended(sessions.new(wanted()), Ending.COMPLETED)
    for _ in range(2):  # the refusal gives the lock back
        with pytest.raises(OperationCompleted, match="has completed; run it without --resume"):
            sessions.latest(wanted())


def test_a_named_session_goes_on_and_begins_anew_when_it_has_completed(sessions: Sessions) -> None:
    first = ended(sessions.named("rome", wanted()))
    second = ended(sessions.named("rome", wanted(None)), Ending.COMPLETED)
    third = ended(sessions.named("rome", wanted(5)))
    assert first.operation_id == second.operation_id != third.operation_id
    assert (second.input, third.input, len(third.attempts)) == (3, 5, 3)


def test_a_named_session_belongs_to_one_agent_and_begins_with_an_input(sessions: Sessions) -> None:
    ended(sessions.named("rome", wanted()))
    with pytest.raises(ConfigurationError, match="session rome is one of flow:flow"):
        sessions.named("rome", wanted(entrypoint="flow:other"))
    with pytest.raises(ConfigurationError, match="--input: a new session needs one"):
        sessions.named("oslo", wanted(None))
    with pytest.raises(ConfigurationError, match="is no id of a session"):
        sessions.named("../rome", wanted())
    ended(sessions.named("rome", wanted()))


def test_one_process_at_a_time_has_a_session(sessions: Sessions) -> None:
    held = sessions.named("rome", wanted())
    with pytest.raises(SessionHeld, match=rf"rome is being run by pid {os.getpid()} on \S+ since .*; wait for it"):
        sessions.named("rome", wanted())
    held.begin()
    for choose in (lambda: sessions.named("rome", wanted()), lambda: sessions.latest(wanted())):
        with pytest.raises(SessionHeld):
            choose()
    with pytest.raises(SessionHeld):
        sessions.remove("rome")
    holder = sessions.held_by("rome")
    assert holder is not None
    assert holder.pid == os.getpid()
    held.release()
    assert sessions.held_by("rome") is None
    assert ended(sessions.latest(wanted())).id == "rome"


def test_what_was_read_before_the_lock_is_read_again(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever had the lock completes between the choice and the lock of the one who resumes."""
    held = sessions.named("rome", wanted())
    held.begin()
    stale = sessions.all()

    def all_and_then_it_completes() -> list[Session]:
        held.end(Ending.COMPLETED, None, [])
        held.release()
        return stale

    monkeypatch.setattr(sessions, "all", all_and_then_it_completes)
    with pytest.raises(OperationCompleted):
        sessions.latest(wanted())


def test_an_expired_session_goes_with_its_rows_but_not_while_it_runs(sessions: Sessions) -> None:
    over, kept = ended(sessions.new(wanted(1))), ended(sessions.new(wanted(2)))
    with sqlite3.connect(sessions.store_file) as db:
        db.execute("CREATE TABLE agent_operations (operation_id, agent_name)")
        db.executemany(
            "INSERT INTO agent_operations VALUES (?, ?)", [("a", f"exec-{over.id}/flow"), ("b", "exec-x/flow")]
        )
    db.close()
    age(sessions, over)
    running = sessions.named(over.id, wanted(1))
    assert sessions.expire() == []
    running.release()
    assert sessions.expire() == [over.id]
    assert [each.id for each in sessions.all()] == [kept.id]
    assert not list(sessions.home.glob(f"sessions/{over.id}*"))
    with sqlite3.connect(sessions.store_file) as db:
        assert db.execute("SELECT operation_id FROM agent_operations").fetchall() == [("b",)]
    db.close()


def test_a_session_that_was_killed_before_its_first_attempt_leaves_nothing(sessions: Sessions) -> None:
    held = sessions.named("rome", wanted())
    assert sessions.expire() == []
    held.release()
    assert sessions.expire() == ["rome"]
    assert not list(sessions.home.glob("sessions/rome*"))


def test_removing(sessions: Sessions) -> None:
    session = ended(sessions.new(wanted()))
    sessions.remove(session.id)
    assert sessions.all() == []
    for ask in (sessions.get, sessions.remove):
        with pytest.raises(OperationNotFound, match=f"there is no session {session.id}"):
            ask(session.id)


def test_a_broken_file_is_named_and_hides_no_other(sessions: Sessions) -> None:
    good, bad = ended(sessions.new(wanted(1))), ended(sessions.new(wanted(2)))
    file = sessions.home / f"sessions/{bad.id}.json"
    file.write_text(file.read_text().replace("meshpoint-session/1", "meshpoint-session/2"))
    assert [each.id for each in sessions.all()] == [good.id]
    with pytest.raises(MeshpointError, match=f"{bad.id} cannot be read: .*`meshpoint sessions rm {bad.id}`"):
        sessions.get(bad.id)
    sessions.expire()
    sessions.remove(bad.id)
    assert not file.exists()


def test_sessions_are_for_their_owner_only(sessions: Sessions) -> None:
    session = ended(sessions.new(wanted()))
    assert sessions.home.stat().st_mode & 0o077 == 0
    assert (sessions.home / f"sessions/{session.id}.json").stat().st_mode & 0o077 == 0
    assert (sessions.home / ".gitignore").read_text() == "*\n"


def test_a_lock_excludes_other_handles_and_a_dead_holder_does_not_block(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = FileLock.try_acquire(path)
    assert first is not None
    assert FileLock.try_acquire(path) is None
    first.release()
    path.write_text(json.dumps({"pid": 1, "host": "elsewhere", "since": "long ago"}))  # of a holder that died
    second = FileLock.try_acquire(path, tell=False)
    assert second is not None
    assert str(holder_of(path)) == "pid 1 on elsewhere since long ago"
    second.release()
    path.write_text("")
    assert holder_of(path) is None
