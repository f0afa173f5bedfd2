"""Write transactions on a SQLite file, each wholly in one thread.

A transaction holds the file's only write lock from its first statement to its last. On the caller's event loop it
would keep the lock for as long as other callbacks delay it between its statements.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sqlalchemy import Connection, CursorResult, Engine, Executable

from meshpoint.errors import RowLocked, StoreUnavailable

T = TypeVar("T")


class ThreadConnection:
    """What transactions use of `AsyncConnection`, on a connection of the calling thread; no method ever suspends."""

    def __init__(self, connection: Connection) -> None:
        self.sync_connection = connection

    async def execute(
        self, statement: Executable, values: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    ) -> CursorResult[Any]:
        """The result of `statement`."""
        return self.sync_connection.execute(statement, values)

    async def exec_driver_sql(self, statement: str) -> CursorResult[Any]:
        """The result of `statement`, sent as it is."""
        return self.sync_connection.exec_driver_sql(statement)

    async def run_sync(self, work: Callable[[Connection], T]) -> T:
        """What `work` returned."""
        return work(self.sync_connection)


class WriterThread:
    """A thread with an event loop and one connection, for the transactions of one store."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="meshpoint-sqlite")
        self._loop = asyncio.Runner()
        self.closed = False

    async def run(self, transaction: Callable[[ThreadConnection], Coroutine[Any, Any, T]]) -> T:
        """What `transaction` returned.

        Raises:
            StoreUnavailable: the store is closed.
        """
        if self.closed:
            raise StoreUnavailable("the store is closed")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, transaction)

    async def close(self) -> None:
        """Release the connection, once the running transaction has ended."""
        self.closed = True
        closing = asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)
        await closing

    # From here on: runs in the thread.

    def _run(self, transaction: Callable[[ThreadConnection], Coroutine[Any, Any, T]]) -> T:
        with self.engine.connect() as connection:
            try:
                return self._loop.run(transaction(ThreadConnection(connection)))
            except RowLocked:
                raise  # rolled back
            except BaseException:
                connection.invalidate()  # which also rolls back
                raise

    def _close(self) -> None:
        self._loop.close()
        self.engine.dispose()
