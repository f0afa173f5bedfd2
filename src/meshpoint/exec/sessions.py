"""The sessions in one folder: a file for each, and at most one process at a time in each.

Whoever chooses, expires or deletes sessions holds the lock of their folder meanwhile, and takes the session's own
lock under it. What was read before that is read again: whoever had the lock may have come further.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import ValidationError

from meshpoint.adapters.embedded_leftovers import delete_namespace
from meshpoint.errors import ConfigurationError, MeshpointError, OperationCompleted, OperationNotFound, SessionLocked
from meshpoint.exec.files import write_atomically
from meshpoint.exec.locks import FileLock, LockHolder, read_holder
from meshpoint.exec.report import StepReport
from meshpoint.exec.session import (
    AttemptRecord,
    AttemptStatus,
    Session,
    SessionSpec,
    session_namespace,
    validate_session_id,
)
from meshpoint.model.ids import TaskId, new_id
from meshpoint.model.typed import first_problem


class LockedSession:
    """A session that no other process runs until it is released. Its file comes with its first attempt."""

    def __init__(self, store: SessionStore, session: Session, lock: FileLock, ttl: timedelta) -> None:
        self._store, self.session, self._lock, self._ttl = store, session, lock, ttl

    def begin_attempt(self) -> AttemptRecord:
        """Note that an attempt begins. One before it that never told its end was killed."""
        attempts, now = self.session.attempts, _now()
        if attempts and attempts[-1].ending is None:
            attempts[-1].ending = AttemptStatus.KILLED
        attempts.append(AttemptRecord(number=len(attempts) + 1, pid=os.getpid(), started=now))
        self._save(now)
        return attempts[-1]

    def end_attempt(self, status: AttemptStatus, error: str | None, steps: list[StepReport]) -> None:
        """Note how the attempt ended."""
        attempt, now = self.session.attempts[-1], _now()
        attempt.ended, attempt.ending, attempt.error, attempt.steps = now, status, error, steps
        self._save(now)

    def _save(self, now: datetime) -> None:
        self.session.expires_at = now + self._ttl
        self._store.save_session(self.session)

    def release(self) -> None:
        """Let others run it."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class SessionStore:
    """The sessions in `home_dir`, a folder that also holds the embedded store. It is made when it is needed."""

    def __init__(self, home_dir: Path) -> None:
        self.home_dir = home_dir.absolute()
        self._folder = self.home_dir / "sessions"

    @property
    def store_file(self) -> Path:
        """The embedded store: queues and tasks of all sessions."""
        return self.home_dir / "exec.db"

    # ── choosing one ───────────────────────────────────────────────────────────────────────────────

    def create(self, spec: SessionSpec) -> LockedSession:
        """A new session with a short random id.

        Raises:
            ConfigurationError: there is no input.
        """
        with self._lock_folder():
            ids = iter(lambda: secrets.token_hex(4), "")
            return self._create(next(id_ for id_ in ids if not self._session_file(id_).exists()), spec)

    def open_or_create(self, session_id: str, spec: SessionSpec) -> LockedSession:
        """The session of this name: made if there is none, begun anew if it has completed.

        With another input it goes on as well: the steps that this reaches run again.

        Raises:
            ConfigurationError: the name cannot be one, the session is another agent's, or it is new and has no input.
            SessionLocked: another process runs it.
        """
        with self._lock_folder():
            if not self._session_file(validate_session_id(session_id)).exists():
                return self._create(session_id, spec)
            with self._release_on_error(session_id) as lock:
                found = self._load(session_id)
                if found.entrypoint != spec.entrypoint:
                    problem = f"session {session_id} is one of {found.entrypoint}"
                    raise ConfigurationError("--session", problem, "give this agent's session a name of its own")
                if found.last_status is AttemptStatus.COMPLETED:
                    found.operation_id, found.again = TaskId(new_id()), {}
                if spec.input is not None:
                    found.input, found.input_digest = spec.input.value, spec.input.digest
                return LockedSession(self, found, lock, spec.ttl)

    def open_latest(self, spec: SessionSpec) -> LockedSession:
        """The newest session of this agent and this input.

        Raises:
            OperationNotFound: there is none.
            OperationCompleted: its last attempt has completed.
            SessionLocked: another process runs it.
        """
        key = (spec.entrypoint, spec.required_input.digest)
        with self._lock_folder():
            newest = next((each for each in self.list_all() if (each.entrypoint, each.input_digest) == key), None)
            if newest is None:
                problem = (
                    f"{spec.entrypoint} has no session with this input in {self.home_dir}; run it without --resume"
                )
                raise OperationNotFound("", problem)
            with self._release_on_error(newest.id) as lock:
                newest = self._load(newest.id)
                if newest.last_status is AttemptStatus.COMPLETED:
                    problem = f"session {newest.id} has completed; run it without --resume to begin anew"
                    raise OperationCompleted(newest.operation_id, problem)
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
        """The lock of a session, which an error gives back."""
        lock = self._lock_session(session_id)
        try:
            yield lock
        except BaseException:
            lock.release()
            raise

    def _lock_session(self, session_id: str) -> FileLock:
        path = self._lock_file(session_id)
        lock = FileLock.try_acquire(path)
        if lock is None:
            holder = read_holder(path) or "another process"
            raise SessionLocked(f"session {session_id} is being run by {holder}; wait for it or end it")
        return lock

    # ── looking, and deleting ──────────────────────────────────────────────────────────────────────

    def list_all(self) -> list[Session]:
        """Every session that can be read, the last one used first."""
        found = []
        for id_ in self._ids_with_suffix(".json"):
            try:
                found.append(self._load(id_))
            except MeshpointError:  # of a later release, or broken: `get` tells, and `remove` deletes it
                continue
        return sorted(found, key=lambda session: session.last_used_at, reverse=True)

    def get_session(self, session_id: str) -> Session:
        """One session.

        Raises:
            OperationNotFound: there is none.
            MeshpointError: its file cannot be read.
        """
        self._check_exists(session_id)
        return self._load(session_id)

    def lock_holder(self, session_id: str) -> LockHolder | None:
        """Who runs it now."""
        path = self._lock_file(session_id)
        if not path.exists():
            return None
        with self._lock_folder():
            if (lock := FileLock.try_acquire(path, record_holder=False)) is None:
                return read_holder(path)
            lock.release()
            return None

    def delete_session(self, session_id: str) -> None:
        """Delete a session and all that the store has of it.

        Raises:
            OperationNotFound: there is none.
            SessionLocked: a process runs it.
        """
        self._check_exists(session_id)
        with self._lock_folder(), self._lock_session(session_id):
            self._delete(session_id)

    def delete_expired(self) -> list[str]:
        """Delete the sessions whose time is over and that nobody runs; their ids."""
        with self._lock_folder():
            # A lock without a session is of a process that was killed before its first attempt.
            stray_locks = [id_ for id_ in self._ids_with_suffix(".lock") if not self._session_file(id_).exists()]
            expired = [session.id for session in self.list_all() if self._is_expired(session.id)]
            return [id_ for id_ in [*expired, *stray_locks] if self._delete_if_unlocked(id_)]

    def _ids_with_suffix(self, suffix: str) -> list[str]:
        try:
            return [file.stem for file in self._folder.iterdir() if file.suffix == suffix]
        except FileNotFoundError:
            return []

    def _is_expired(self, session_id: str) -> bool:
        return self._load(session_id).expires_at <= _now()

    def _delete_if_unlocked(self, session_id: str) -> bool:
        lock = FileLock.try_acquire(self._lock_file(session_id), record_holder=False)
        if lock is None:
            return False
        with lock:
            deletable = not self._session_file(session_id).exists() or self._is_expired(session_id)
            if deletable:
                self._delete(session_id)
            return deletable

    def _delete(self, session_id: str) -> None:
        delete_namespace(self.store_file, session_namespace(session_id))
        self._session_file(session_id).unlink(missing_ok=True)
        self._lock_file(session_id).unlink(missing_ok=True)

    # ── files ──────────────────────────────────────────────────────────────────────────────────────

    def save_session(self, session: Session) -> None:
        """Write a session. Only its holder does."""
        write_atomically(self._session_file(session.id), session.model_dump_json(indent=2) + "\n")

    def _load(self, session_id: str) -> Session:
        try:
            return Session.model_validate_json(self._session_file(session_id).read_bytes())
        except (OSError, ValidationError) as error:
            problem = first_problem(error) if isinstance(error, ValidationError) else str(error)
            advice = f"a later release wrote it, or it was edited: `meshpoint sessions rm {session_id}` deletes it"
            raise MeshpointError(f"session {session_id} cannot be read: {problem}; {advice}") from error

    def _check_exists(self, session_id: str) -> None:
        if not self._session_file(validate_session_id(session_id)).exists():
            advice = "`meshpoint sessions list` shows all"
            raise OperationNotFound(session_id, f"there is no session {session_id} in {self.home_dir}; {advice}")

    def _lock_folder(self) -> FileLock:
        try:
            self.home_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._folder.mkdir(exist_ok=True, mode=0o700)
            gitignore = self.home_dir / ".gitignore"
            if not gitignore.exists():  # inputs and outputs lie here
                write_atomically(gitignore, "*\n")
            return FileLock.acquire(self._folder / ".choosing")
        except OSError as error:
            problem = f"{self.home_dir} cannot hold sessions: {error.strerror}"
            raise ConfigurationError("--home", problem, "name a folder that you can write to") from error

    def _session_file(self, session_id: str) -> Path:
        return self._folder / f"{session_id}.json"

    def _lock_file(self, session_id: str) -> Path:
        return self._folder / f"{session_id}.lock"


def _now() -> datetime:
    return datetime.now(UTC)
