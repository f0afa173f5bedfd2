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

from meshpoint.adapters.embedded_leftovers import forget
from meshpoint.errors import ConfigurationError, MeshpointError, OperationCompleted, OperationNotFound, SessionHeld
from meshpoint.exec.files import write_whole
from meshpoint.exec.locks import FileLock, Holder, holder_of
from meshpoint.exec.report import StepReport
from meshpoint.exec.session import AttemptEntry, Ending, Session, Wanted, checked_id, namespace_of
from meshpoint.model.ids import TaskId, new_id
from meshpoint.model.typed import first_problem


class HeldSession:
    """A session that no other process runs until it is released. Its file comes with its first attempt."""

    def __init__(self, sessions: Sessions, session: Session, lock: FileLock, ttl: timedelta) -> None:
        self._sessions, self.session, self._lock, self._ttl = sessions, session, lock, ttl

    def begin(self) -> AttemptEntry:
        """Note that an attempt begins. One before it that never told its end was killed."""
        attempts, now = self.session.attempts, _now()
        if attempts and attempts[-1].ending is None:
            attempts[-1].ending = Ending.KILLED
        attempts.append(AttemptEntry(number=len(attempts) + 1, pid=os.getpid(), started=now))
        self._save(now)
        return attempts[-1]

    def end(self, ending: Ending, error: str | None, steps: list[StepReport]) -> None:
        """Note how the attempt ended."""
        attempt, now = self.session.attempts[-1], _now()
        attempt.ended, attempt.ending, attempt.error, attempt.steps = now, ending, error, steps
        self._save(now)

    def _save(self, now: datetime) -> None:
        self.session.expires_at = now + self._ttl
        self._sessions.save(self.session)

    def release(self) -> None:
        """Let others run it."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Sessions:
    """The sessions in `home`, a folder that also holds the embedded store. It is made when it is needed."""

    def __init__(self, home: Path) -> None:
        self.home = home.absolute()
        self._folder = self.home / "sessions"

    @property
    def store_file(self) -> Path:
        """The embedded store: queues and tasks of all sessions."""
        return self.home / "exec.db"

    # ── choosing one ───────────────────────────────────────────────────────────────────────────────

    def new(self, wanted: Wanted) -> HeldSession:
        """A new session with a short random id.

        Raises:
            ConfigurationError: there is no input.
        """
        with self._choosing():
            ids = iter(lambda: secrets.token_hex(4), "")
            return self._made(next(id_ for id_ in ids if not self._file(id_).exists()), wanted)

    def named(self, id_: str, wanted: Wanted) -> HeldSession:
        """The session of this name: made if there is none, begun anew if it has completed.

        With another input it goes on as well: the steps that this reaches run again.

        Raises:
            ConfigurationError: the name cannot be one, the session is another agent's, or it is new and has no input.
            SessionHeld: another process runs it.
        """
        with self._choosing():
            if not self._file(checked_id(id_)).exists():
                return self._made(id_, wanted)
            with self._locking(id_) as lock:
                found = self._read(id_)
                if found.entrypoint != wanted.entrypoint:
                    problem = f"session {id_} is one of {found.entrypoint}"
                    raise ConfigurationError("--session", problem, "give this agent's session a name of its own")
                if found.ending is Ending.COMPLETED:
                    found.operation_id, found.again = TaskId(new_id()), {}
                if wanted.input is not None:
                    found.input, found.input_digest = wanted.input.value, wanted.input.digest
                return HeldSession(self, found, lock, wanted.ttl)

    def latest(self, wanted: Wanted) -> HeldSession:
        """The newest session of this agent and this input.

        Raises:
            OperationNotFound: there is none.
            OperationCompleted: its last attempt has completed.
            SessionHeld: another process runs it.
        """
        key = (wanted.entrypoint, wanted.given.digest)
        with self._choosing():
            newest = next((each for each in self.all() if (each.entrypoint, each.input_digest) == key), None)
            if newest is None:
                problem = (
                    f"{wanted.entrypoint} has no session with this input in {self.home}; run it without --resume"
                )
                raise OperationNotFound("", problem)
            with self._locking(newest.id) as lock:
                newest = self._read(newest.id)
                if newest.ending is Ending.COMPLETED:
                    problem = f"session {newest.id} has completed; run it without --resume to begin anew"
                    raise OperationCompleted(newest.operation_id, problem)
                return HeldSession(self, newest, lock, wanted.ttl)

    def _made(self, id_: str, wanted: Wanted) -> HeldSession:
        now, given = _now(), wanted.given
        session = Session(
            id=id_,
            entrypoint=wanted.entrypoint,
            agent=wanted.agent,
            input=given.value,
            input_digest=given.digest,
            operation_id=TaskId(new_id()),
            created_at=now,
            expires_at=now + wanted.ttl,
        )
        return HeldSession(self, session, self._lock(id_), wanted.ttl)

    @contextmanager
    def _locking(self, id_: str) -> Iterator[FileLock]:
        """The lock of a session, which an error gives back."""
        lock = self._lock(id_)
        try:
            yield lock
        except BaseException:
            lock.release()
            raise

    def _lock(self, id_: str) -> FileLock:
        path = self._lock_file(id_)
        lock = FileLock.try_acquire(path)
        if lock is None:
            who = holder_of(path) or "another process"
            raise SessionHeld(f"session {id_} is being run by {who}; wait for it or end it")
        return lock

    # ── looking, and deleting ──────────────────────────────────────────────────────────────────────

    def all(self) -> list[Session]:
        """Every session that can be read, the last one used first."""
        found = []
        for id_ in self._listed(".json"):
            try:
                found.append(self._read(id_))
            except MeshpointError:  # of a later release, or broken: `get` tells, and `remove` deletes it
                continue
        return sorted(found, key=lambda session: session.last_use, reverse=True)

    def get(self, id_: str) -> Session:
        """One session.

        Raises:
            OperationNotFound: there is none.
            MeshpointError: its file cannot be read.
        """
        self._check_there(id_)
        return self._read(id_)

    def held_by(self, id_: str) -> Holder | None:
        """Who runs it now."""
        path = self._lock_file(id_)
        if not path.exists():
            return None
        with self._choosing():
            if (lock := FileLock.try_acquire(path, tell=False)) is None:
                return holder_of(path)
            lock.release()
            return None

    def remove(self, id_: str) -> None:
        """Delete a session and all that the store has of it.

        Raises:
            OperationNotFound: there is none.
            SessionHeld: a process runs it.
        """
        self._check_there(id_)
        with self._choosing(), self._lock(id_):
            self._delete(id_)

    def expire(self) -> list[str]:
        """Delete the sessions whose time is over and that nobody runs; their ids."""
        with self._choosing():
            # A lock without a session is of a process that was killed before its first attempt.
            strays = [id_ for id_ in self._listed(".lock") if not self._file(id_).exists()]
            over = [session.id for session in self.all() if self._is_over(session.id)]
            return [id_ for id_ in [*over, *strays] if self._deleted_if_free(id_)]

    def _listed(self, suffix: str) -> list[str]:
        try:
            return [file.stem for file in self._folder.iterdir() if file.suffix == suffix]
        except FileNotFoundError:
            return []

    def _is_over(self, id_: str) -> bool:
        return self._read(id_).expires_at <= _now()

    def _deleted_if_free(self, id_: str) -> bool:
        lock = FileLock.try_acquire(self._lock_file(id_), tell=False)
        if lock is None:
            return False
        with lock:
            over = not self._file(id_).exists() or self._is_over(id_)
            if over:
                self._delete(id_)
            return over

    def _delete(self, id_: str) -> None:
        forget(self.store_file, namespace_of(id_))
        self._file(id_).unlink(missing_ok=True)
        self._lock_file(id_).unlink(missing_ok=True)

    # ── files ──────────────────────────────────────────────────────────────────────────────────────

    def save(self, session: Session) -> None:
        """Write a session. Only its holder does."""
        write_whole(self._file(session.id), session.model_dump_json(indent=2) + "\n")

    def _read(self, id_: str) -> Session:
        try:
            return Session.model_validate_json(self._file(id_).read_bytes())
        except (OSError, ValidationError) as error:
            problem = first_problem(error) if isinstance(error, ValidationError) else str(error)
            advice = f"a later release wrote it, or it was edited: `meshpoint sessions rm {id_}` deletes it"
            raise MeshpointError(f"session {id_} cannot be read: {problem}; {advice}") from error

    def _check_there(self, id_: str) -> None:
        if not self._file(checked_id(id_)).exists():
            advice = "`meshpoint sessions list` shows all"
            raise OperationNotFound(id_, f"there is no session {id_} in {self.home}; {advice}")

    def _choosing(self) -> FileLock:
        try:
            self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._folder.mkdir(exist_ok=True, mode=0o700)
            ignored = self.home / ".gitignore"
            if not ignored.exists():  # inputs and outputs lie here
                write_whole(ignored, "*\n")
            return FileLock.acquire(self._folder / ".choosing")
        except OSError as error:
            problem = f"{self.home} cannot hold sessions: {error.strerror}"
            raise ConfigurationError("--home", problem, "name a folder that you can write to") from error

    def _file(self, id_: str) -> Path:
        return self._folder / f"{id_}.json"

    def _lock_file(self, id_: str) -> Path:
        return self._folder / f"{id_}.lock"


def _now() -> datetime:
    return datetime.now(UTC)
