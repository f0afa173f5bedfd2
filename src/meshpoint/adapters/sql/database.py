"""Transactions: begun, repeated after a conflict, committed; and what a failure meant."""

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
"""Turns to write to each SQLite file, by path."""


class Transaction:
    """One open transaction, or one autocommitted read.

    With `skip_locked` it does not wait for rows that another session holds; their tasks are left out.
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
        """What the statement returns."""
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
    """The connections of one store."""

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
        """Release every connection; one whose other end is silent is dropped."""
        if self._writer is not None:
            self._writer.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT):
                await self.engine.dispose()
                if self._writer is not None:
                    await self._writer.wait_stopped()

    def stop_waiting(self) -> None:
        """Let no transaction wait any longer for another process that writes to a SQLite file."""
        if self._writer is not None:
            self._writer.waits_for_lock = False

    async def check_session(self, time: DatabaseTime) -> None:
        """Check that sessions of this URL, possibly through a pooler, behave as transitions require; update `time`.

        Raises:
            ConfigurationError: they do not, or the database refuses the URL's user.
            StoreUnavailable: the database did not answer.
        """
        if self.dialect.is_sqlite:
            return
        try:
            await check_session(self.engine, time)
        except driver_errors() as error:
            raise as_configuration_error(error) or StoreUnavailable(summarize(error)) from error

    async def read(self, body: Callable[[Transaction], Awaitable[T]]) -> T:
        """What `body` reads, each statement on its own."""
        return await self._retry(
            lambda: self._with_connection(lambda connection: body(self._transaction(connection)))
        )

    async def write(self, body: Callable[[Transaction], Awaitable[T]], *, skip_locked: bool = False) -> T:
        """What `body` returned, after its transaction has committed.

        `body` may run several times: a conflict with another transaction rolls it back and repeats it. On SQLite it
        runs on another thread's event loop.

        Raises:
            StoreUnavailable: nothing was written.
            CommitInDoubt: COMMIT was sent, and no answer came.
            RowLocked: timed out waiting for a lock; nothing was written.
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
        """Wait for the other writers of this process to the file, which has one writer at a time.

        SQLite's own waiting has no order: with a few busy stores in a process, some wait for seconds.
        """
        lock = _write_locks.setdefault(asyncio.get_running_loop(), WeakValueDictionary()).setdefault(
            self._file, asyncio.Lock()
        )
        try:
            async with asyncio.timeout(self._command_timeout):
                await lock.acquire()
        except TimeoutError as error:
            raise StoreUnavailable("this process has written to the file for too long") from error
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
        """Roll back at once: a server may notice only later that the connection was closed, and keep its locks."""
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
                        pass  # the server was restarted since this connection was last used: take a new one
                    case _:
                        raise StoreUnavailable(summarize(error)) from error
        raise AssertionError("the last attempt returns or raises")

    async def _with_connection(self, attempt: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        async with self.engine.connect() as connection:
            try:
                return await attempt(connection)
            except RowLocked:
                raise  # rolled back
            except BaseException:
                # Whatever state it is in, nobody else may get it: closing it also rolls it back.
                await connection.invalidate()
                raise

    def _transaction(self, connection: AsyncConnection) -> Transaction:
        return Transaction(connection, self.dialect, self._clock)


def _is_lock_failure(error: Exception, skip_locked: bool) -> bool:
    """Whether a row lock caused it. A step that skips locked rows and still timed out met a table lock: an outage."""
    if isinstance(error, RowLocked):
        return True
    return is_row_lock_timeout(error) if skip_locked else is_lock_timeout(error)


async def _run_to_completion(step: Coroutine[Any, Any, T]) -> T:
    """Run `step` to completion even if cancelled: an abandoned statement would keep SQLite's write lock."""
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
