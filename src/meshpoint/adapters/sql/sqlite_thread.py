"""Threads that read and write a SQLite file, each with its own connection.

A write transaction holds the file's only write lock from its first statement to its last. On the
caller's event loop, other callbacks would run between its statements while it holds the lock. A
read takes no lock, but a thread runs all of it in one hop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from sqlalchemy import Connection, CursorResult, Engine, Executable

from meshpoint.errors import RowLocked, StoreUnavailable

_T = TypeVar("_T")


class ThreadConnection:
    """The methods of `AsyncConnection` that transactions use, on a connection of this thread.

    No method ever suspends.
    """

    def __init__(self, connection: Connection) -> None:
        self.sync_connection = connection

    async def execute(
        self, statement: Executable, values: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    ) -> CursorResult[Any]:
        """Execute `statement` with bound `values`."""
        return self.sync_connection.execute(statement, values)

    async def exec_driver_sql(self, statement: str) -> CursorResult[Any]:
        """Execute `statement` verbatim."""
        return self.sync_connection.exec_driver_sql(statement)

    async def run_sync(self, work: Callable[[Connection], _T]) -> _T:
        """Call `work` with the connection and return its result."""
        return work(self.sync_connection)


_Job = Callable[[Connection], _T]
ThreadTransaction = Callable[[ThreadConnection], Coroutine[Any, Any, _T]]
"""A transaction, from BEGIN to COMMIT, or the statements of a read."""


class SqliteThread:
    """A thread with one connection, and an event loop for transactions.

    Callers wait for at most `timeout` seconds, if given. A job that has started runs on.

    The process does not wait for the thread on exit: SQLite rolls back open transactions.
    """

    def __init__(self, engine: Engine, timeout: float | None = None) -> None:
        self.engine, self._timeout = engine, timeout
        self.waits_for_lock = True
        """Whether a transaction waits while another process holds the write lock."""
        self._runner = asyncio.Runner()
        self._jobs: SimpleQueue[tuple[Future[Any], _Job[Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="meshpoint-sqlite", daemon=True)
        self._stopped: Future[None] = Future()
        self._closed = False

    async def transact(self, transaction: ThreadTransaction[_T]) -> _T:
        """Run `transaction` in the thread, like `run`."""
        return await self.run(
            lambda connection: self._runner.run(transaction(ThreadConnection(connection)))
        )

    async def run(self, job: _Job[_T]) -> _T:
        """Run `job` in the thread, after those before it, and return its result.

        Raises:
            StoreUnavailable: The store is closed.
            TimeoutError: The job does not end in time.
        """
        if self._closed:
            raise StoreUnavailable("the store is closed")
        if not self._thread.ident:
            self._thread.start()
        result: Future[_T] = Future()
        self._jobs.put((result, job))
        async with asyncio.timeout(self._timeout):
            return await asyncio.wrap_future(result)

    def stop(self) -> None:
        """Accept no more jobs, and release the connection after the last one."""
        if not self._closed:
            self.waits_for_lock, self._closed = False, True
            self._jobs.put(None)

    async def wait_stopped(self) -> None:
        """Wait until a stopped thread has released its connection."""
        if self._thread.ident:
            await asyncio.shield(asyncio.wrap_future(self._stopped))

    # The methods below run in the thread.

    def _main(self) -> None:
        with self._runner:
            while job := self._jobs.get():
                self._run_job(*job)
        self.engine.dispose()
        self._stopped.set_result(None)

    def _run_job(self, result: Future[_T], job: _Job[_T]) -> None:
        if not result.set_running_or_notify_cancel():
            return
        try:
            with self.engine.connect() as connection:
                try:
                    value = job(connection)
                except RowLocked:
                    raise  # the transaction has rolled back, so the connection is still usable
                except BaseException:
                    connection.invalidate()  # also rolls back
                    raise
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(value)
