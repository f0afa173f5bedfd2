"""Sessions: which attempt gets which session, one holder at a time, and how they end."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from meshpoint.errors import (
    ConfigurationError,
    MeshpointError,
    OperationCompleted,
    OperationNotFound,
    SessionLocked,
)
from meshpoint.exec.flows import FlowVersions
from meshpoint.exec.locks import FileLock, read_holder
from meshpoint.exec.report import StepReport, StepStatus
from meshpoint.exec.session import AttemptStatus, ExecInput, Session, SessionSpec
from meshpoint.exec.sessions import LockedSession, SessionStore
from meshpoint.model.ids import AgentName

STEPS = [StepReport(name="fetch", status=StepStatus.COMPLETED, seconds=0.5)]


def create_spec(
    value: Any = 3, *, entrypoint: str = "flow:flow", ttl: timedelta = timedelta(days=7)
) -> SessionSpec:
    input_ = None if value is None else ExecInput(value)
    return SessionSpec(entrypoint=entrypoint, agent=AgentName("flow"), input=input_, ttl=ttl)


def end_attempt(
    locked_session: LockedSession, ending: AttemptStatus = AttemptStatus.FAILED
) -> Session:
    with locked_session:
        locked_session.begin_attempt()
        locked_session.end_attempt(
            ending, "it broke" if ending is AttemptStatus.FAILED else None, STEPS
        )
    return locked_session.session


def make_old(sessions: SessionStore, session: Session) -> None:
    session.expires_at = datetime.now(UTC) - timedelta(seconds=1)
    sessions.save_session(session)


@pytest.fixture
def sessions(tmp_path: Path) -> SessionStore:
    return SessionStore(tmp_path / "home")


def test_attempts_are_logged_and_read_back(sessions: SessionStore) -> None:
    session = end_attempt(sessions.create(create_spec()))
    end_attempt(sessions.open_latest(create_spec()), AttemptStatus.CANCELLED)
    read = sessions.get_session(session.id)
    assert [
        (attempt.number, attempt.ending, attempt.error, attempt.pid) for attempt in read.attempts
    ] == [
        (1, AttemptStatus.FAILED, "it broke", os.getpid()),
        (2, AttemptStatus.CANCELLED, None, os.getpid()),
    ]
    assert read.attempts[0].steps == STEPS
    assert read.expires_at - read.attempts[1].started >= timedelta(days=7)
    assert sessions.list_all() == [read]


def test_an_attempt_without_a_recorded_end_counts_as_killed(sessions: SessionStore) -> None:
    locked_session = sessions.create(create_spec())
    locked_session.begin_attempt()
    locked_session.release()
    assert sessions.get_session(locked_session.session.id).last_status is None
    end_attempt(sessions.open_latest(create_spec()))
    assert [
        attempt.ending for attempt in sessions.get_session(locked_session.session.id).attempts
    ] == [
        AttemptStatus.KILLED,
        AttemptStatus.FAILED,
    ]


def test_the_newest_session_of_the_same_agent_and_input_is_resumed(sessions: SessionStore) -> None:
    first, second = (
        end_attempt(sessions.create(create_spec({"a": 1, "b": 2.0}))),
        end_attempt(sessions.create(create_spec({"b": 2, "a": 1}))),
    )
    end_attempt(sessions.create(create_spec({"a": 1})))
    end_attempt(sessions.create(create_spec({"a": 1, "b": 2}, entrypoint="flow:other")))
    assert end_attempt(sessions.open_latest(create_spec({"a": 1, "b": 2}))).id == second.id
    end_attempt(sessions.open_or_create(first.id, create_spec(None)))
    assert end_attempt(sessions.open_latest(create_spec({"a": 1, "b": 2}))).id == first.id, (
        "its last attempt is the newest"
    )


def test_a_resume_without_an_earlier_run_is_refused(sessions: SessionStore) -> None:
    end_attempt(sessions.create(create_spec(4)))
    with pytest.raises(
        OperationNotFound, match=r"flow:flow has no session with this input in .*; run it without"
    ):
        sessions.open_latest(create_spec(3))


def test_a_completed_session_is_not_resumed(sessions: SessionStore) -> None:
    end_attempt(sessions.create(create_spec()), AttemptStatus.COMPLETED)
    for _ in range(2):  # a refusal must release the lock
        with pytest.raises(OperationCompleted, match="has completed; run it without --resume"):
            sessions.open_latest(create_spec())


def test_a_named_session_is_resumed_and_restarts_once_completed(sessions: SessionStore) -> None:
    first = end_attempt(sessions.open_or_create("rome", create_spec()))
    second = end_attempt(
        sessions.open_or_create("rome", create_spec(None)), AttemptStatus.COMPLETED
    )
    third = end_attempt(sessions.open_or_create("rome", create_spec(5)))
    assert first.operation_id == second.operation_id != third.operation_id
    assert (second.input, third.input, len(third.attempts)) == (3, 5, 3)


def test_a_named_session_belongs_to_one_agent_and_begins_with_an_input(
    sessions: SessionStore,
) -> None:
    end_attempt(sessions.open_or_create("rome", create_spec()))
    with pytest.raises(ConfigurationError, match="session rome belongs to flow:flow"):
        sessions.open_or_create("rome", create_spec(entrypoint="flow:other"))
    with pytest.raises(ConfigurationError, match="--input: a new session needs an input"):
        sessions.open_or_create("oslo", create_spec(None))
    with pytest.raises(ConfigurationError, match="is not a valid session id"):
        sessions.open_or_create("../rome", create_spec())
    end_attempt(sessions.open_or_create("rome", create_spec()))


def test_only_one_process_can_hold_a_session(sessions: SessionStore) -> None:
    locked_session = sessions.open_or_create("rome", create_spec())
    with pytest.raises(
        SessionLocked, match=rf"rome is in use by pid {os.getpid()} on \S+ since .*; wait for it"
    ):
        sessions.open_or_create("rome", create_spec())
    locked_session.begin_attempt()
    choose: Callable[[], object]
    for choose in (
        lambda: sessions.open_or_create("rome", create_spec()),
        lambda: sessions.open_latest(create_spec()),
    ):
        with pytest.raises(SessionLocked):
            choose()
    with pytest.raises(SessionLocked):
        sessions.delete_session("rome")
    assert (sessions.lock_holder("rome") or "").startswith(f"pid {os.getpid()} on ")
    locked_session.release()
    assert sessions.lock_holder("rome") is None
    assert end_attempt(sessions.open_latest(create_spec())).id == "rome"


def test_a_session_is_read_again_after_it_is_locked(
    sessions: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder of the lock completes after the resuming attempt chose the session."""
    locked_session = sessions.open_or_create("rome", create_spec())
    locked_session.begin_attempt()
    stale = sessions.list_all()

    def list_then_complete() -> list[Session]:
        locked_session.end_attempt(AttemptStatus.COMPLETED, None, [])
        locked_session.release()
        return stale

    monkeypatch.setattr(sessions, "list_all", list_then_complete)
    with pytest.raises(OperationCompleted):
        sessions.open_latest(create_spec())


def test_an_expired_session_is_deleted_with_its_rows_unless_it_runs(
    sessions: SessionStore,
) -> None:
    expired, live = (
        end_attempt(sessions.create(create_spec(1))),
        end_attempt(sessions.create(create_spec(2))),
    )
    with sqlite3.connect(sessions.store_file) as db:
        db.execute("CREATE TABLE agent_operations (operation_id, agent_name)")
        db.executemany(
            "INSERT INTO agent_operations VALUES (?, ?)",
            [("a", f"exec-{expired.id}/flow"), ("b", "exec-x/flow")],
        )
    db.close()
    make_old(sessions, expired)
    running = sessions.open_or_create(expired.id, create_spec(1))
    assert sessions.delete_expired() == []
    running.release()
    assert sessions.delete_expired() == [expired.id]
    assert [session.id for session in sessions.list_all()] == [live.id]
    assert not list(sessions.home_dir.glob(f"sessions/{expired.id}*"))
    with sqlite3.connect(sessions.store_file) as db:
        assert db.execute("SELECT operation_id FROM agent_operations").fetchall() == [("b",)]
    db.close()


def test_a_session_killed_before_its_first_attempt_leaves_nothing(sessions: SessionStore) -> None:
    locked_session = sessions.open_or_create("rome", create_spec())
    assert sessions.delete_expired() == []
    locked_session.release()
    assert sessions.delete_expired() == ["rome"]
    assert not list(sessions.home_dir.glob("sessions/rome*"))


def test_a_removed_session_is_deleted_with_its_rows(sessions: SessionStore) -> None:
    session = end_attempt(sessions.create(create_spec()))
    sessions.delete_session(session.id)
    assert sessions.list_all() == []
    for ask in (sessions.get_session, sessions.delete_session):
        with pytest.raises(OperationNotFound, match=f"there is no session {session.id}"):
            ask(session.id)


def test_a_broken_session_file_is_named_and_hides_no_other_session(sessions: SessionStore) -> None:
    good, bad = (
        end_attempt(sessions.create(create_spec(1))),
        end_attempt(sessions.create(create_spec(2))),
    )
    file = sessions.home_dir / f"sessions/{bad.id}.json"
    file.write_text(file.read_text().replace("meshpoint-session/1", "meshpoint-session/2"))
    assert [session.id for session in sessions.list_all()] == [good.id]
    with pytest.raises(
        MeshpointError, match=f"{bad.id} cannot be read: .*`meshpoint sessions rm {bad.id}`"
    ):
        sessions.get_session(bad.id)
    sessions.delete_expired()
    sessions.delete_session(bad.id)
    assert not file.exists()


def write_session_file(
    sessions: SessionStore, name: str, template: Session, **changes: object
) -> Path:
    """Write an expired session with other contents into a file with this name."""
    fields = {**template.model_dump(mode="json"), "expires_at": "2000-01-01T00:00:00Z", **changes}
    file = sessions.home_dir / "sessions" / name
    file.write_text(json.dumps(fields))
    return file


@pytest.mark.parametrize("id_", ["../..", "..", ".", "", "/tmp", "other"])
def test_an_id_in_a_file_of_another_name_deletes_nothing(sessions: SessionStore, id_: str) -> None:
    neighbour = sessions.home_dir.parent / "code.py"
    neighbour.write_text("x = 1")
    good = end_attempt(sessions.create(create_spec()))
    expired = end_attempt(sessions.create(create_spec(2)))
    make_old(sessions, expired)
    file = write_session_file(sessions, "forged.json", good, id=id_)
    warnings: list[str] = []
    assert sessions.delete_expired(warn=warnings.append) == [expired.id]
    (warning,) = warnings
    assert f"{file} has the id of another session" in warning
    assert "`meshpoint sessions rm forged`" in warning
    assert neighbour.exists()
    assert [session.id for session in sessions.list_all()] == [good.id]
    with pytest.raises(MeshpointError, match="session forged cannot be read: "):
        sessions.get_session("forged")
    sessions.delete_session("forged")
    assert not file.exists()
    assert neighbour.exists()


@pytest.mark.parametrize("name", ["...lock", "...json", "..lock", "a b.lock", "x" * 52 + ".lock"])
def test_files_without_a_valid_id_are_no_sessions(sessions: SessionStore, name: str) -> None:
    good = end_attempt(sessions.create(create_spec()))
    file = write_session_file(sessions, name, good, id=Path(name).stem)
    warnings: list[str] = []
    assert sessions.delete_expired(warn=warnings.append) == warnings == []
    assert [session.id for session in sessions.list_all()] == [good.id]
    assert file.exists()
    assert sessions.store_file.parent.exists()


def test_a_bad_lock_or_a_time_without_zone_stops_no_other_session(sessions: SessionStore) -> None:
    good = end_attempt(sessions.create(create_spec()))
    write_session_file(sessions, "naive.json", good, id="naive", expires_at="2000-01-01T00:00:00")
    write_session_file(sessions, "locked.json", good, id="locked")
    folder = sessions.home_dir / "sessions"
    (folder / "locked.lock").mkdir()
    victim = sessions.home_dir.parent / "victim"
    victim.write_text("precious")
    (folder / "linked.lock").symlink_to(victim)
    write_session_file(sessions, "old.json", good, id="old")
    warnings: list[str] = []
    assert sessions.delete_expired(warn=warnings.append) == ["old"]
    assert [warning.split(":")[0] for warning in warnings] == [
        "session linked cannot be locked",
        "session locked cannot be locked",
        "session naive cannot be read",
    ]
    assert sessions.lock_holder("locked") is None
    with pytest.raises(MeshpointError, match=r"locked\.lock: .*; delete this file"):
        sessions.open_or_create("locked", create_spec())
    with pytest.raises(MeshpointError, match="cannot be locked"):
        sessions.open_or_create("linked", create_spec())
    assert victim.read_text() == "precious"
    assert {session.id for session in sessions.list_all()} == {good.id, "locked"}


def test_flow_versions_follow_no_link_out_of_the_folder(sessions: SessionStore) -> None:
    session = end_attempt(sessions.create(create_spec()))
    outside = sessions.home_dir.parent / "outside"
    outside.mkdir()
    (outside / "code.py").write_text("x = 1")
    versions = sessions.flow_versions(session.id)
    assert versions.record({"flow.py": "y = 2"}) == 1
    folder = sessions.home_dir / "sessions" / session.id
    (folder / "v7").symlink_to(outside)
    linked = sessions.home_dir / "sessions" / "linked"
    linked.symlink_to(outside)
    versions.delete()
    sessions.flow_versions("linked").delete()
    assert not folder.exists()
    assert not linked.is_symlink()
    assert (outside / "code.py").exists()


@pytest.mark.parametrize("id_", ["..", "", "a/b", "/", "x" * 52])
def test_flow_versions_need_a_valid_id(tmp_path: Path, id_: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a valid session id"):
        FlowVersions(tmp_path, id_)


def test_only_folders_named_after_a_number_are_versions(tmp_path: Path) -> None:
    versions = FlowVersions(tmp_path, "rome")
    assert versions.record({"flow.py": "x = 1"}) == 1
    for name in ("v²", "v0", "v01", "v٣", "w2", f"v{'9' * 200}"):
        (tmp_path / "rome" / name).mkdir()
    assert versions.numbers() == [1]
    assert versions.read(10**300) == versions.read(-1) == {}
    assert versions.record({"flow.py": "x = 2"}) == 2


def test_session_files_are_private_to_their_owner(sessions: SessionStore) -> None:
    session = end_attempt(sessions.create(create_spec()))
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
    assert read_holder(path) == "pid 1 on elsewhere since long ago"
    second.release()
    path.write_text("")
    assert read_holder(path) is None
