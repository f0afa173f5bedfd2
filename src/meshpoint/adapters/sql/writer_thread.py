"""Write transactions on a SQLite file, run entirely in a thread of their own.

A transaction holds the file's only write lock from its first statement to its last. On the
caller's event loop, other callbacks would run between its statements while it holds the lock.
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


ThreadTransaction = Callable[[ThreadConnection], Coroutine[Any, Any, _T]]
"""A transaction, from BEGIN to COMMIT."""


class WriterThread:
    """A thread with an event loop and one connection, for the write transactions of one store.

    The process does not wait for the thread on exit: SQLite rolls back open transactions.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.waits_for_lock = True
        """Whether a transaction waits while another process holds the write lock."""
        self._jobs: SimpleQueue[tuple[Future[Any], ThreadTransaction[Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="meshpoint-sqlite", daemon=True)
        self._stopped: Future[None] = Future()
        self._closed = False

    async def run(self, transaction: ThreadTransaction[_T]) -> _T:
        """Run `transaction` in the thread, after those before it, and return its result.

        Raises:
            StoreUnavailable: The store is closed.
        """
        if self._closed:
            raise StoreUnavailable("the store is closed")
        if not self._thread.ident:
            self._thread.start()
        result: Future[_T] = Future()
        self._jobs.put((result, transaction))
        return await asyncio.wrap_future(result)

    def stop(self) -> None:
        """Accept no more transactions, and release the connection after the last one."""
        if not self._closed:
            self.waits_for_lock, self._closed = False, True
            self._jobs.put(None)

    async def wait_stopped(self) -> None:
        """Wait until a stopped thread has released its connection."""
        if self._thread.ident:
            await asyncio.shield(asyncio.wrap_future(self._stopped))

    # The methods below run in the thread.

    def _main(self) -> None:
        with asyncio.Runner() as loop:
            while job := self._jobs.get():
                self._run_job(loop, *job)
        self.engine.dispose()
        self._stopped.set_result(None)

    def _run_job(
        self, loop: asyncio.Runner, result: Future[_T], transaction: ThreadTransaction[_T]
    ) -> None:
        if result.set_running_or_notify_cancel():
            try:
                result.set_result(self._transact(loop, transaction))
            except BaseException as error:
                result.set_exception(error)

    def _transact(self, loop: asyncio.Runner, transaction: ThreadTransaction[_T]) -> _T:
        with self.engine.connect() as connection:
            try:
                return loop.run(transaction(ThreadConnection(connection)))
            except RowLocked:
                raise  # the transaction has rolled back, so the connection is still usable
            except BaseException:
                connection.invalidate()  # also rolls back
                raise
