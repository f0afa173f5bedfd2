"""Transactions: begin, commit, repetition after a conflict, and classification of failures."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from sqlalchemy import Row
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from meshpoint.adapters.sql.dialect import Dialect
from meshpoint.adapters.sql.engine import (
    LOCK_TIMEOUT,
    MAX_ATTEMPTS,
    TRANSACTION_TIMEOUT,
    engine_for,
    writing_engine,
)
from meshpoint.adapters.sql.failures import (
    Failure,
    as_configuration_error,
    certainly_rolled_back,
    classify,
    driver_errors,
    is_duplicate,
    is_lock_timeout,
    is_row_lock_timeout,
    is_stale,
    summarize,
)
from meshpoint.adapters.sql.sessions import check_session
from meshpoint.adapters.sql.time import DatabaseTime
from meshpoint.adapters.sql.writer_thread import ThreadConnection, WriterThread
from meshpoint.errors import CommitInDoubt, RowLocked, StoreUnavailable
from meshpoint.ports.clock import Clock

T = TypeVar("T")
_CLOSE_TIMEOUT = 5.0  # seconds
_BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"

Values = Mapping[str, Any]
AnyConnection = AsyncConnection | ThreadConnection

_write_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakValueDictionary[str, asyncio.Lock]] = (
    WeakKeyDictionary()
)
"""Locks that order the writers of this process to each SQLite file, by event loop and path."""


class Transaction:
    """An open transaction, or a connection for reads that each see their own snapshot.

    With `skip_locked`, tasks with a row that another session holds are left out instead of waited
    for.
    """

    def __init__(
        self,
        connection: AnyConnection,
        dialect: Dialect,
        clock: Clock | None,
        *,
        skip_locked: bool = False,
    ) -> None:
        self.connection = connection
        self.dialect = dialect
        self.skip_locked = skip_locked
        self._clock = clock

    async def fetch(self, template: str, **values: Any) -> Sequence[Row[Any]]:
        """Execute a statement and return all its rows."""
        statement = self.dialect.statement(template)
        bound = {name: self.dialect.bind(value) for name, value in values.items()}
        return (await self.connection.execute(statement, bound | self._fake_now(template))).all()

    async def execute(self, template: str, **values: Any) -> None:
        """Execute a statement that returns nothing."""
        statement = self.dialect.statement(template)
        bound = {name: self.dialect.bind(value) for name, value in values.items()}
        await self.connection.execute(statement, bound | self._fake_now(template))

    async def execute_many(self, template: str, rows: Sequence[Values]) -> None:
        """Execute a statement once for each of `rows`, in one round trip."""
        if rows:
            now = self._fake_now(template)
            await self.connection.execute(self.dialect.statement(template), [{**row, **now} for row in rows])

    def _fake_now(self, template: str) -> dict[str, float]:
        asks = "{clock}" in template or "{instant}" in template
        return {"clock_now": self._clock.now().timestamp()} if self._clock and asks else {}


class Database:
    """Connections and transactions of one store.

    On SQLite, write transactions run in a thread of their own; see `WriterThread`.
    """

    def __init__(
        self,
        url: str,
        *,
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
        self.dialect = Dialect(self.engine.dialect.name, fake_clock=clock is not None)
        self._command_timeout = command_timeout.total_seconds()
        self._clock = clock
        self._file = str(Path(self.engine.url.database or "").resolve())
        self.writing_engine = self.engine.sync_engine
        self._writer: WriterThread | None = None
        if self.dialect.is_sqlite:
            self.writing_engine = writing_engine(url, command_timeout)
            self._writer = WriterThread(self.writing_engine)

    async def close(self) -> None:
        """Release every connection. Connections still open after five seconds are dropped."""
        if self._writer is not None:
            self._writer.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT):
                await self.engine.dispose()
                if self._writer is not None:
                    await self._writer.wait_stopped()

    def stop_waiting(self) -> None:
        """Make write transactions fail instead of waiting for another process's SQLite lock."""
        if self._writer is not None:
            self._writer.waits_for_lock = False

    async def check_session(self, time: DatabaseTime) -> None:
        """Check that sessions, possibly through a pooler, behave as transitions require.

        Also updates `time`. Does nothing on SQLite.

        Raises:
            ConfigurationError: The sessions are unsuitable, or the database refuses the URL's
                user.
            StoreUnavailable: The database does not respond.
        """
        if self.dialect.is_sqlite:
            return
        try:
            await check_session(self.engine, time)
        except driver_errors() as error:
            raise as_configuration_error(error) or StoreUnavailable(summarize(error)) from error

    async def read(self, body: Callable[[Transaction], Awaitable[T]]) -> T:
        """Run `body` without a transaction, so that each statement has its own snapshot.

        Raises:
            StoreUnavailable: The database does not respond.
        """
        return await self._retry(
            lambda: self._with_connection(lambda connection: body(self._transaction(connection)))
        )

    async def write(self, body: Callable[[Transaction], Awaitable[T]], *, skip_locked: bool = False) -> T:
        """Run `body` in a transaction and return its result after the commit.

        `body` may run several times: after a conflict with another transaction, it is rolled back
        and repeated. On SQLite, it runs on another thread's event loop.

        Raises:
            StoreUnavailable: Nothing was written.
            CommitInDoubt: COMMIT was sent, but the response was lost.
            RowLocked: A lock wait timed out. Nothing was written.
        """

        async def transaction(connection: AnyConnection) -> T:
            return await self._commit(connection, body, skip_locked)

        writer = self._writer
        if writer is None:
            return await self._retry(lambda: self._with_connection(transaction))
        async with self._write_lock():
            return await self._retry(lambda: writer.run(transaction))

    @asynccontextmanager
    async def _write_lock(self) -> AsyncIterator[None]:
        """Serialize the writers of this process to the SQLite file, in the order of their arrival.

        SQLite allows one writer at a time, and its own waiting has no order: with a few busy
        stores in a process, some would wait for seconds.
        """
        lock = _write_locks.setdefault(asyncio.get_running_loop(), WeakValueDictionary()).setdefault(
            self._file, asyncio.Lock()
        )
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

    async def _commit(
        self,
        connection: AnyConnection,
        body: Callable[[Transaction], Awaitable[T]],
        skip_locked: bool,
    ) -> T:
        await self._begin(connection)
        try:
            result = await body(Transaction(connection, self.dialect, self._clock, skip_locked=skip_locked))
        except driver_errors(RowLocked) as error:
            if not _is_lock_failure(error, skip_locked):
                if classify(error) is Failure.BUG:
                    await self._rollback(connection)
                raise
            await connection.exec_driver_sql("ROLLBACK")
            raise RowLocked(summarize(error)) from error
        except Exception:
            await self._rollback(connection)
            raise
        try:
            await connection.exec_driver_sql("COMMIT")
        except driver_errors() as error:
            if certainly_rolled_back(error):
                raise
            raise CommitInDoubt(f"the answer to COMMIT was lost: {summarize(error)}") from error
        return result

    async def _rollback(self, connection: AnyConnection) -> None:
        """Roll back explicitly.

        A server may notice a closed connection late, and would keep its locks until then.
        """
        with suppress(*driver_errors()):
            await connection.exec_driver_sql("ROLLBACK")

    async def _retry(self, attempt: Callable[[], Coroutine[Any, Any, T]]) -> T:
        end = monotonic() + (self._command_timeout if self.dialect.is_sqlite else 0.0)
        for number in count(1):
            try:
                return await (_run_to_completion(attempt()) if self.dialect.is_sqlite else attempt())
            except driver_errors() as error:
                match classify(error):
                    case Failure.BUG:
                        raise
                    case Failure.RETRY if number < MAX_ATTEMPTS or monotonic() < end:
                        await asyncio.sleep(random.uniform(0.001, 0.02) * min(number, MAX_ATTEMPTS))
                    case Failure.RETRY if is_duplicate(error):
                        raise
                    case Failure.UNAVAILABLE if number == 1 and is_stale(error):
                        pass  # the server was restarted since the connection's last use: reconnect
                    case _:
                        raise StoreUnavailable(summarize(error)) from error
        raise AssertionError("the last attempt returns or raises")

    async def _with_connection(self, attempt: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        async with self.engine.connect() as connection:
            try:
                return await attempt(connection)
            except RowLocked:
                raise  # the transaction has rolled back, so the connection is still usable
            except BaseException:
                # The connection may be in any state, so it must not be reused. Closing rolls back.
                await connection.invalidate()
                raise

    def _transaction(self, connection: AsyncConnection) -> Transaction:
        return Transaction(connection, self.dialect, self._clock)


def _is_lock_failure(error: Exception, skip_locked: bool) -> bool:
    """Whether a row lock caused the error.

    If the transaction skips locked rows, only a timeout on a row's lock counts. A timeout on a
    table's lock makes the store unavailable.
    """
    if isinstance(error, RowLocked):
        return True
    return is_row_lock_timeout(error) if skip_locked else is_lock_timeout(error)


async def _run_to_completion(step: Coroutine[Any, Any, T]) -> T:
    """Run `step` to completion even if the caller is cancelled, then re-raise the cancellation.

    An abandoned statement would keep SQLite's write lock.
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
