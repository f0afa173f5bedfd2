"""Sessions in one folder: a file for each, used by at most one process at a time.

Processes that choose, expire or delete sessions hold the lock of the folder, and acquire the
session's own lock under it. What they read before that must be read again, because the previous
holder may have changed it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from meshpoint.errors import (
    ConfigurationError,
    KeyMissing,
    MeshpointError,
    OperationCompleted,
    OperationNotFound,
    SessionLocked,
)
from meshpoint.exec.flows import FlowSources, FlowVersions
from meshpoint.exec.locks import FileLock, read_holder
from meshpoint.exec.report import StepReport
from meshpoint.exec.session import (
    AttemptRecord,
    AttemptStatus,
    Session,
    SessionSpec,
    is_session_id,
    session_namespace,
    validate_session_id,
)
from meshpoint.files import write_atomically
from meshpoint.model.declared_type import first_problem
from meshpoint.model.ids import TaskId, new_id
from meshpoint.ports.sealer import Place, Sealer


class LockedSession:
    """A session that no other process can run until it is released.

    Its file is written when its first attempt begins. With `input_changed`, the next attempt has
    another input than the last one.
    """

    def __init__(
        self,
        store: SessionStore,
        session: Session,
        lock: FileLock,
        ttl: timedelta,
        *,
        input_changed: bool = False,
    ) -> None:
        self._store, self.session, self._lock, self._ttl = store, session, lock, ttl
        self._input_changed = input_changed

    def begin_attempt(self, sources: FlowSources | None = None) -> AttemptRecord:
        """Record a new attempt, and the version of the flow that it runs.

        A previous attempt that has not recorded its end is marked as killed.
        """
        attempts, now = self.session.attempts, _now()
        if attempts and attempts[-1].ending is None:
            attempts[-1].ending = AttemptStatus.KILLED
        version = self._store.flow_versions(self.session.id).record(sources or {})
        number = len(attempts) + 1
        attempts.append(AttemptRecord(number=number, pid=os.getpid(), flow=version, started=now))
        self._save(now)
        return attempts[-1]

    @property
    def continues_killed(self) -> bool:
        """Whether this attempt repeats a killed one: the same flow, with the same input."""
        if len(self.session.attempts) < 2 or self._input_changed:
            return False
        killed, current = self.session.attempts[-2:]
        is_same = current.flow is not None and current.flow == killed.flow
        return is_same and killed.ending is AttemptStatus.KILLED

    def end_attempt(
        self, status: AttemptStatus, error: str | None, steps: list[StepReport]
    ) -> None:
        """Record how the attempt ended."""
        attempt, now = self.session.attempts[-1], _now()
        attempt.ended, attempt.ending, attempt.error, attempt.steps = now, status, error, steps
        self._save(now)

    def _save(self, now: datetime) -> None:
        self.session.expires_at = now + self._ttl
        self._store.save_session(self.session)

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class SessionStore:
    """The sessions in `home_dir`, a folder that also contains the embedded store.

    The folder is created when needed. With a sealer, the files of sessions are encrypted.
    """

    def __init__(self, home_dir: Path, sealer: Sealer | None = None) -> None:
        self.home_dir, self._sealer = home_dir.absolute(), sealer
        self._folder = self.home_dir / "sessions"

    @property
    def store_file(self) -> Path:
        """The embedded store: queues and tasks of all sessions."""
        return self.home_dir / "exec.db"

    def create(self, spec: SessionSpec) -> LockedSession:
        """Create a session with a short random id.

        Raises:
            ConfigurationError: No input was given.
        """
        with self._lock_folder():
            ids = iter(lambda: secrets.token_hex(4), "")
            unused = next(id_ for id_ in ids if not self._session_file(id_).exists())
            return self._create(unused, spec)

    def open_or_create(self, session_id: str, spec: SessionSpec) -> LockedSession:
        """Open the session with this id; create it if missing, restart it if it has completed.

        Another input replaces the old one: the steps that depend on it run again.

        Raises:
            ConfigurationError: The id is invalid, the session belongs to another agent, or it is
                new and no input was given.
            SessionLocked: Another process runs it.
        """
        with self._lock_folder():
            if not self._session_file(validate_session_id(session_id)).exists():
                return self._create(session_id, spec)
            with self._release_on_error(session_id) as lock:
                found = self._load(session_id)
                check_entrypoint(found, spec)
                if found.last_status is AttemptStatus.COMPLETED:
                    found.operation_id, found.again = TaskId(new_id()), {}
                changed = spec.input is not None and spec.input.digest != found.input_digest
                if spec.input is not None:
                    found.input, found.input_digest = spec.input.value, spec.input.digest
                return LockedSession(self, found, lock, spec.ttl, input_changed=changed)

    def open_latest(self, spec: SessionSpec) -> LockedSession:
        """Open the newest session of this agent and this input.

        Raises:
            OperationNotFound: There is no such session.
            OperationCompleted: Its last attempt has completed.
            SessionLocked: Another process runs it.
        """
        with self._lock_folder():
            newest = self.require_latest(spec)
            with self._release_on_error(newest.id) as lock:
                newest = _require_unfinished(self._load(newest.id))
                return LockedSession(self, newest, lock, spec.ttl)

    def _create(self, session_id: str, spec: SessionSpec) -> LockedSession:
        now, session_input = _now(), spec.required_input
        session = Session(
            id=session_id,
            entrypoint=spec.entrypoint,
            agent=spec.agent,
            input=session_input.value,
            input_digest=session_input.digest,
            operation_id=TaskId(new_id()),
            created_at=now,
            expires_at=now + spec.ttl,
        )
        return LockedSession(self, session, self._lock_session(session_id), spec.ttl)

    @contextmanager
    def _release_on_error(self, session_id: str) -> Iterator[FileLock]:
        """Lock a session, and release it on an error."""
        lock = self._lock_session(session_id)
        try:
            yield lock
        except BaseException:
            lock.release()
            raise

    def _lock_session(self, session_id: str) -> FileLock:
        path = self._lock_file(session_id)
        lock = self._try_lock(session_id)
        if lock is None:
            holder = read_holder(path) or "another process"
            raise SessionLocked(
                f"session {session_id} is in use by {holder}; wait for it or end it"
            )
        return lock

    def _try_lock(self, session_id: str, *, record_holder: bool = True) -> FileLock | None:
        path = self._lock_file(session_id)
        try:
            return FileLock.try_acquire(path, record_holder=record_holder)
        except OSError as error:
            problem = f"session {session_id} cannot be locked: {path}: {error.strerror}"
            raise MeshpointError(f"{problem}; delete this file") from error

    def list_all(self) -> list[Session]:
        """Return all readable sessions, most recently used first."""
        found = []
        for id_ in self._ids_with_suffix(".json"):
            try:
                found.append(self._load(id_))
            except MeshpointError:  # from a later release, or damaged: `get_session` says which
                continue
        return sorted(found, key=lambda session: session.last_used_at, reverse=True)

    def get_session(self, session_id: str) -> Session:
        """Return one session.

        Raises:
            OperationNotFound: No session has this id.
            MeshpointError: Its file cannot be read.
        """
        self._check_exists(session_id)
        return self._load(session_id)

    def flow_versions(self, session_id: str) -> FlowVersions:
        """Return the versions of the flow that the session's attempts ran."""
        return FlowVersions(self._folder, session_id)

    def require_latest(self, spec: SessionSpec) -> Session:
        """Return the newest session of this agent and this input, without locking it.

        Raises:
            OperationNotFound: There is no such session.
            OperationCompleted: Its last attempt has completed.
        """
        key = (spec.entrypoint, spec.required_input.digest)
        sessions = self.list_all()
        newest = next(
            (each for each in sessions if (each.entrypoint, each.input_digest) == key), None
        )
        if newest is None:
            problem = (
                f"{spec.entrypoint} has no session with this input in {self.home_dir}; "
                "run it without --resume"
            )
            raise OperationNotFound("", problem)
        return _require_unfinished(newest)

    def find(self, session_id: str) -> Session | None:
        """Return a session, without locking it; `None` if no session has this id."""
        exists = self._session_file(validate_session_id(session_id)).exists()
        return self._load(session_id) if exists else None

    def lock_holder(self, session_id: str) -> str | None:
        """Return the process that runs the session now; `None` if it is not running."""
        path = self._lock_file(session_id)
        if not path.exists():
            return None
        with self._lock_folder():
            try:
                lock = self._try_lock(session_id, record_holder=False)
            except MeshpointError:  # no process can lock it
                return None
            if lock is None:
                return read_holder(path)
            lock.release()
            return None

    def delete_session(self, session_id: str) -> None:
        """Delete a session and all its data in the store.

        Raises:
            OperationNotFound: No session has this id.
            SessionLocked: A process runs it.
        """
        self._check_exists(session_id)
        with self._lock_folder(), self._lock_session(session_id):
            self._delete(session_id)

    def delete_expired(self, warn: Callable[[str], None] | None = None) -> list[str]:
        """Delete expired sessions that are not running, and return their ids.

        Skips sessions that cannot be read or deleted, and calls `warn` with each reason.
        """
        deleted = []
        with self._lock_folder():
            # A lock file without a session was left by a process killed before its first attempt.
            ids = {*self._ids_with_suffix(".json"), *self._ids_with_suffix(".lock")}
            for id_ in sorted(ids):
                try:
                    if self._is_deletable(id_) and self._delete_if_unlocked(id_):
                        deleted.append(id_)
                except (MeshpointError, OSError) as error:
                    if warn is not None:
                        warn(str(error))
        return deleted

    def _ids_with_suffix(self, suffix: str) -> list[str]:
        """Return the ids that files are named after. Files with other names are no sessions."""
        try:
            stems = [file.stem for file in self._folder.iterdir() if file.suffix == suffix]
        except FileNotFoundError:
            return []
        return list(filter(is_session_id, stems))

    def _is_deletable(self, session_id: str) -> bool:
        return not self._session_file(session_id).exists() or self._is_expired(session_id)

    def _is_expired(self, session_id: str) -> bool:
        return self._load(session_id).expires_at <= _now()

    def _delete_if_unlocked(self, session_id: str) -> bool:
        lock = self._try_lock(session_id, record_holder=False)
        if lock is None:
            return False
        with lock:
            deletable = self._is_deletable(session_id)
            if deletable:
                self._delete(session_id)
            return deletable

    def _delete(self, session_id: str) -> None:
        from meshpoint.wiring import delete_embedded_namespace  # imports the engine

        delete_embedded_namespace(self.store_file, session_namespace(session_id))
        self.flow_versions(session_id).delete()
        self._session_file(session_id).unlink(missing_ok=True)
        self._lock_file(session_id).unlink(missing_ok=True)

    def save_session(self, session: Session) -> None:
        """Write a session. Only the process that holds its lock may do this."""
        from meshpoint.wiring import seal_file  # imports the engine

        content = (session.model_dump_json(indent=2) + "\n").encode()
        place = _place(session.id)
        write_atomically(self._session_file(session.id), seal_file(self._sealer, content, place))

    def _load(self, session_id: str) -> Session:
        from meshpoint.wiring import open_file  # imports the engine

        file = self._session_file(session_id)
        try:
            opened = open_file(self._sealer, file.read_bytes(), _place(session_id))
            session = Session.model_validate_json(opened)
        except KeyMissing as error:
            raise MeshpointError(f"session {session_id} is {error}") from error
        except OSError as error:
            raise _unreadable(session_id, str(error)) from error
        except ValidationError as error:
            raise _unreadable(session_id, first_problem(error)) from error
        except ValueError as error:
            raise _unreadable(session_id, str(error)) from error
        if session.id != session_id:
            raise _unreadable(session_id, f"{file} has the id of another session")
        return session

    def _check_exists(self, session_id: str) -> None:
        if not self._session_file(validate_session_id(session_id)).exists():
            advice = "`meshpoint sessions list` shows all"
            raise OperationNotFound(
                session_id, f"there is no session {session_id} in {self.home_dir}; {advice}"
            )

    def _lock_folder(self) -> FileLock:
        try:
            self.home_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._folder.mkdir(exist_ok=True, mode=0o700)
            gitignore = self.home_dir / ".gitignore"
            if not gitignore.exists():  # the folder contains inputs and outputs
                write_atomically(gitignore, "*\n")
            return FileLock.acquire(self._folder / ".choosing")
        except OSError as error:
            problem = f"{self.home_dir} cannot be used for sessions: {error.strerror}"
            raise ConfigurationError(
                "--home", problem, "name a folder that you can write to"
            ) from error

    def _session_file(self, session_id: str) -> Path:
        return self._folder / f"{session_id}.json"

    def _lock_file(self, session_id: str) -> Path:
        return self._folder / f"{session_id}.lock"


def _place(session_id: str) -> Place:
    return ("exec.session", "", session_id)


def check_entrypoint(session: Session, spec: SessionSpec) -> None:
    """Check that the session belongs to the agent in `spec`.

    Raises:
        ConfigurationError: It belongs to another agent.
    """
    if session.entrypoint != spec.entrypoint:
        problem = f"session {session.id} belongs to {session.entrypoint}"
        fix = "use another session id for this agent"
        raise ConfigurationError("--session", problem, fix)


def _require_unfinished(session: Session) -> Session:
    if session.last_status is AttemptStatus.COMPLETED:
        problem = f"session {session.id} has completed; run it without --resume to start again"
        raise OperationCompleted(session.operation_id, problem)
    return session


def _unreadable(session_id: str, problem: str) -> MeshpointError:
    advice = (
        "a later release wrote it, or it was edited: "
        f"`meshpoint sessions rm {session_id}` deletes it"
    )
    return MeshpointError(f"session {session_id} cannot be read: {problem}; {advice}")


def _now() -> datetime:
    return datetime.now(UTC)
