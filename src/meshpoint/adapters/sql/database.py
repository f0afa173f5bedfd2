"""Transactions: begin, commit, repetition after a conflict, and classification of failures."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum, auto
from functools import partial
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from meshpoint.adapters.sql.codec import CLEAR_CODEC, Codec
from meshpoint.adapters.sql.dialect import Dialect
from meshpoint.adapters.sql.engine import (
    LOCK_TIMEOUT,
    MAX_ATTEMPTS,
    TRANSACTION_TIMEOUT,
    engine_for,
    sqlite_engine,
)
from meshpoint.adapters.sql.failures import (
    Failure,
    certainly_rolled_back,
    classify,
    driver_errors,
    is_duplicate,
    is_lock_timeout,
    is_row_lock_timeout,
    is_stale,
    summarize,
)
from meshpoint.adapters.sql.log_cache import LogCache
from meshpoint.adapters.sql.rows import AgentNames, Columns
from meshpoint.adapters.sql.sqlite_thread import SqliteThread, ThreadConnection
from meshpoint.adapters.sql.timelines import NewEntries
from meshpoint.errors import CommitInDoubt, RowLocked, StoreUnavailable
from meshpoint.model.timeline import TimelineOptions
from meshpoint.model.transitions import TaskLocked
from meshpoint.ports.clock import Clock

_T = TypeVar("_T")
_CLOSE_TIMEOUT = 5.0  # seconds
_BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"

_SKIP_SECONDS = 10.0
_LOCKED_SECONDS = 10.0
_MAX_TASKS = 10_000

AnyConnection: TypeAlias = AsyncConnection | ThreadConnection

_write_locks: WeakKeyDictionary[
    asyncio.AbstractEventLoop, WeakValueDictionary[str, asyncio.Lock]
] = WeakKeyDictionary()
"""Locks that order the writers of this process to each SQLite file, by event loop and path."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Options that all transitions of one store share. Durations are in seconds."""

    names: AgentNames
    dispatch_lease: float
    tombstone_ttl: float
    parked_limit: float
    checkpoint_ttl: float
    checkpoint_history: int
    checkpoint_archive: bool
    keep_security_context: bool
    max_join_bytes: int
    timeline: TimelineOptions | None = None
    codec: Codec = CLEAR_CODEC

    def backoff(self, attempts: int) -> float:
        """Seconds that the sender of an item has it leased on the given attempt, starting at 1."""
        return self.dispatch_lease * float(2 ** min(max(attempts - 1, 0), 6))


class OnLock(Enum):
    """What a transaction does about rows that another session holds."""

    WAIT = auto()
    SKIP_TASKS = auto()  # leave out tasks whose own rows are held, and wait for their other rows
    SKIP = auto()  # leave out tasks with any row that is held


@dataclass(frozen=True, slots=True)
class Transaction:
    """An open transaction, or a connection for reads that each see their own snapshot.

    `entries` collects what the transaction adds to the timelines of tasks; `None` without
    timelines.
    """

    connection: AnyConnection
    dialect: Dialect
    options: StoreOptions
    logs: LogCache
    on_lock: OnLock = OnLock.WAIT
    entries: NewEntries | None = None

    def without_timelines(self) -> Transaction:
        """This transaction, for statements that repeat a change."""
        return replace(self, entries=None)

    async def fetch(self, template: str, **values: Any) -> Sequence[Row[Any]]:
        """Execute a statement and return all its rows."""
        return (await self.connection.execute(*self.dialect.prepare(template, values))).all()

    async def execute(self, template: str, **values: Any) -> None:
        """Execute a statement that returns nothing."""
        await self.connection.execute(*self.dialect.prepare(template, values))
        if self.entries is not None:
            self.entries.add(template, [values])

    async def execute_many(self, template: str, rows: Sequence[Columns]) -> None:
        """Execute a statement once for each of `rows`, in one round trip."""
        if rows:
            prepared = [self.dialect.prepare(template, row) for row in rows]
            await self.connection.execute(prepared[0][0], [values for _, values in prepared])
            if self.entries is not None:
                self.entries.add(template, rows)


Body: TypeAlias = Callable[[Transaction], Awaitable[_T]]
"""The statements of a transaction. They may be executed several times."""


class LockedRows:
    """Remembers for a few seconds that a lock timed out, and which tasks were skipped.

    This avoids waiting repeatedly for rows that other sessions hold.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._skip_until = float("-inf")
        self._tasks: dict[str, float] = {}

    @property
    def skip_locked(self) -> bool:
        """Whether to skip locked rows instead of waiting for them."""
        return self._clock() < self._skip_until

    def record_timeout(self) -> None:
        """Start skipping locked rows, since a statement timed out waiting for one."""
        self._skip_until = self._clock() + _SKIP_SECONDS

    def record_locked(self, task_ids: Iterable[str]) -> None:
        """Remember tasks that were skipped because another session holds a row."""
        now = self._clock()
        self._tasks = {task_id: until for task_id, until in self._tasks.items() if until > now}
        if len(self._tasks) < _MAX_TASKS:
            self._tasks.update(dict.fromkeys(task_ids, now + _LOCKED_SECONDS))

    def require_unlocked(self, results: Sequence[_T | TaskLocked]) -> list[_T]:
        """Return `results` if no other session holds a task among them.

        Raises:
            RowLocked: Another session holds a task. The other tasks are written; repeating the
                call finds them.
        """
        locked_ids = {result.task_id for result in results if isinstance(result, TaskLocked)}
        if locked_ids:
            self.record_locked(locked_ids)
            raise RowLocked(f"another session holds {', '.join(sorted(locked_ids)[:3])}")
        return [result for result in results if not isinstance(result, TaskLocked)]

    def recently_locked(self, task_ids: Iterable[str]) -> set[str]:
        """The recently skipped tasks among `task_ids`, to be kept out of batches with others."""
        if not self._tasks:
            return set()
        now = self._clock()
        return {task_id for task_id in task_ids if self._tasks.get(task_id, now) > now}


class Database:
    """Connections and transactions of one store.

    On SQLite, reads and write transactions have a thread each; see `SqliteThread`.
    """

    def __init__(
        self,
        url: str,
        *,
        options: StoreOptions,
        command_timeout: timedelta,
        transaction_timeout: timedelta = TRANSACTION_TIMEOUT,
        lock_timeout: timedelta = LOCK_TIMEOUT,
        pool_size: int,
        clock: Clock | None,
    ) -> None:
        self.engine = engine_for(
            url,
            command_timeout=command_timeout,
            transaction_timeout=transaction_timeout,
            lock_timeout=lock_timeout,
            pool_size=pool_size,
        )
        self.dialect = Dialect(self.engine.dialect.name, clock)
        self.options, self.locked_rows = options, LockedRows()
        self.logs = LogCache()
        self._command_timeout = command_timeout.total_seconds()
        self._file = str(Path(self.engine.url.database or "").resolve())
        self.reading_engine = self.writing_engine = self.engine.sync_engine
        self._reader: SqliteThread | None = None
        self._writer: SqliteThread | None = None
        if self.dialect.is_sqlite:
            self.reading_engine = sqlite_engine(url, command_timeout)
            self.writing_engine = sqlite_engine(url, command_timeout)
            self._reader = SqliteThread(self.reading_engine, self._command_timeout)
            self._writer = SqliteThread(self.writing_engine)

    async def close(self) -> None:
        """Release every connection. Connections still open after five seconds are dropped."""
        threads = [thread for thread in (self._reader, self._writer) if thread is not None]
        for thread in threads:
            thread.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT):
                await self.engine.dispose()
                for thread in threads:
                    await thread.wait_stopped()

    def stop_waiting(self) -> None:
        """Make write transactions fail instead of waiting for another process's SQLite lock."""
        if self._writer is not None:
            self._writer.waits_for_lock = False

    async def read(self, body: Body[_T]) -> _T:
        """Run `body` without a transaction, so that each statement has its own snapshot.

        Raises:
            StoreUnavailable: The database does not respond.
        """
        reader = self._reader
        if reader is None:
            return await self._retry(partial(self._run, body))

        async def run(connection: ThreadConnection) -> _T:
            return await body(Transaction(connection, self.dialect, self.options, self.logs))

        return await self._retry(partial(reader.transact, run))

    async def fetch(self, template: str, **values: Any) -> Sequence[Row[Any]]:
        """Return the rows of a statement that writes nothing.

        Raises:
            StoreUnavailable: The database does not respond.
        """
        reader = self._reader
        if reader is None:
            fetch = partial(Transaction.fetch, template=template, **values)
            return await self._retry(partial(self._run, fetch))
        statement, bound = self.dialect.prepare(template, values)

        def execute(connection: Connection) -> Sequence[Row[Any]]:
            return connection.execute(statement, bound).all()

        return await self._retry(partial(reader.run, execute))

    async def write(self, body: Body[_T]) -> _T:
        """Run `body` like `transact`, and again without the locked rows if a lock wait times out.

        Raises:
            RowLocked: A lock wait timed out again.
        """
        if not self.locked_rows.skip_locked:
            try:
                return await self.transact(body)
            except RowLocked:
                self.locked_rows.record_timeout()
        return await self.transact(body, OnLock.SKIP)

    async def transact(self, body: Body[_T], on_lock: OnLock = OnLock.WAIT) -> _T:
        """Run `body` in a transaction and return its result after the commit.

        `body` may run several times: after a conflict with another transaction, it is rolled back
        and repeated. On SQLite, it runs on another thread's event loop.

        Raises:
            StoreUnavailable: Nothing was written.
            CommitInDoubt: COMMIT was sent, but the response was lost.
            RowLocked: A lock wait timed out. Nothing was written.
        """
        transaction, writer = partial(self._commit, body), self._writer
        if writer is None:
            return await self._retry(partial(self._run, transaction, on_lock))

        async def run(connection: ThreadConnection) -> _T:
            return await transaction(self._transaction(connection, on_lock))

        async with self._write_lock():
            return await self._retry(lambda: _run_to_completion(writer.transact(run)))

    def _transaction(self, connection: AnyConnection, on_lock: OnLock) -> Transaction:
        entries = None if self.options.timeline is None else NewEntries()
        return Transaction(connection, self.dialect, self.options, self.logs, on_lock, entries)

    @asynccontextmanager
    async def _write_lock(self) -> AsyncIterator[None]:
        """Serialize the writers of this process to the SQLite file, in the order of their arrival.

        SQLite allows one writer at a time, and its own waiting has no order: with a few busy
        stores in a process, some would wait for seconds.
        """
        lock = _write_locks.setdefault(
            asyncio.get_running_loop(), WeakValueDictionary()
        ).setdefault(self._file, asyncio.Lock())
        try:
            async with asyncio.timeout(self._command_timeout):
                await lock.acquire()
        except TimeoutError as error:
            raise StoreUnavailable("timed out waiting for this process's other writers") from error
        try:
            yield
        finally:
            lock.release()

    async def _begin(self, connection: AnyConnection) -> None:
        if self._writer is None:
            await connection.exec_driver_sql(_BEGIN)
            return
        end = monotonic() + self._command_timeout
        while True:
            try:
                await connection.exec_driver_sql("BEGIN IMMEDIATE")
            except DBAPIError as error:
                if classify(error) is not Failure.RETRY:
                    raise
                if monotonic() >= end or not self._writer.waits_for_lock:  # another process writes
                    raise StoreUnavailable(summarize(error)) from error
            else:
                return

    async def _commit(self, body: Body[_T], tx: Transaction) -> _T:
        await self._begin(tx.connection)
        try:
            result = await body(tx)
            if tx.entries is not None:
                await tx.entries.write(tx)
        except driver_errors(RowLocked) as error:
            if not _is_lock_failure(error, tx.on_lock):
                if classify(error) is Failure.BUG:
                    await _rollback(tx.connection)
                raise
            await tx.connection.exec_driver_sql("ROLLBACK")
            raise RowLocked(summarize(error)) from error
        except Exception:
            await _rollback(tx.connection)
            raise
        try:
            await tx.connection.exec_driver_sql("COMMIT")
        except driver_errors() as error:
            if certainly_rolled_back(error):
                raise
            raise CommitInDoubt(f"the answer to COMMIT was lost: {summarize(error)}") from error
        return result

    async def _retry(self, attempt: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        end = monotonic() + (self._command_timeout if self.dialect.is_sqlite else 0.0)
        for number in count(1):
            try:
                return await attempt()
            except driver_errors() as error:
                match classify(error):
                    case Failure.BUG:
                        raise
                    case Failure.RETRY if number < MAX_ATTEMPTS or monotonic() < end:
                        await asyncio.sleep(
                            random.uniform(0.001, 0.02) * min(number, MAX_ATTEMPTS)
                        )
                    case Failure.RETRY if is_duplicate(error):
                        raise
                    case Failure.UNAVAILABLE if number == 1 and is_stale(error):
                        pass  # the server was restarted since the connection's last use: reconnect
                    case _:
                        raise StoreUnavailable(summarize(error)) from error
        raise AssertionError("the last attempt returns or raises")

    async def _run(self, body: Body[_T], on_lock: OnLock = OnLock.WAIT) -> _T:
        async with self.engine.connect() as connection:
            try:
                return await body(self._transaction(connection, on_lock))
            except RowLocked:
                raise  # the transaction has rolled back, so the connection is still usable
            except BaseException:
                # The connection may be in any state, so it must not be reused. Closing rolls back.
                await connection.invalidate()
                raise


async def _rollback(connection: AnyConnection) -> None:
    """Roll back explicitly.

    A server may notice a closed connection late, and would keep its locks until then.
    """
    with suppress(*driver_errors()):
        await connection.exec_driver_sql("ROLLBACK")


def _is_lock_failure(error: Exception, on_lock: OnLock) -> bool:
    """Whether a row lock caused the error.

    If the transaction skips locked rows, only a timeout on a row's lock counts. A timeout on a
    table's lock makes the store unavailable.
    """
    if isinstance(error, RowLocked):
        return True
    return is_row_lock_timeout(error) if on_lock is OnLock.SKIP else is_lock_timeout(error)


async def _run_to_completion(step: Coroutine[Any, Any, _T]) -> _T:
    """Run `step` to completion even if the caller is cancelled, then re-raise the cancellation.

    An abandoned transaction would keep SQLite's write lock.
    """
    running = asyncio.create_task(step)
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return running.result()
    await asyncio.gather(running, return_exceptions=True)
    raise cancelled
