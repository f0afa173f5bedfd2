"""A driver connection that runs prepared statements one at a time.

Every statement sent here may be repeated. A repetition does not move a task again; the general
transaction that follows finds, by the id of the run or claim, that the step is done.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import asyncpg
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from meshpoint.adapters.sql.engine import MAX_ATTEMPTS
from meshpoint.adapters.sql.failures import (
    Failure,
    classify,
    driver_errors,
    is_broken,
    is_duplicate,
    is_lock_timeout,
    is_pooler_switch,
    is_read_only,
    summarize,
)
from meshpoint.errors import CommitInDoubt, RowLocked, StoreUnavailable

_CONNECTION_LOST = ("08", "40003", "57P")
"""SQLSTATEs of a lost connection or a server shutdown. The statement may have committed."""


class PreparedRow(asyncpg.Record):  # type: ignore[misc]
    """A row whose columns are attributes, like SQLAlchemy's `Row`."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class PreparedConnection:
    """Sends one statement at a time, each in its own transaction.

    Connects on first use, and reconnects when the connection is lost.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._lock = asyncio.Lock()
        self._connection: AsyncConnection | None = None
        self._driver: Any = None
        self.losses = 0  # connections given up so far

    async def read(self, statement: str, *values: Any) -> Sequence[Any]:
        """Return the rows of a statement that writes nothing.

        Raises:
            StoreUnavailable: The database did not respond.
        """
        try:
            return await self.write(statement, *values)
        except CommitInDoubt as error:  # no doubt here: a read commits nothing
            raise StoreUnavailable(str(error)) from error

    async def write(self, statement: str, *values: Any) -> Sequence[Any]:
        """Return the rows of a statement after it has committed.

        Raises:
            StoreUnavailable: Nothing was written.
            CommitInDoubt: The statement was sent, but the response was lost.
            RowLocked: The statement timed out waiting for a lock. The connection stays usable.
        """
        in_doubt = False
        async with self._lock:
            for number in range(1, MAX_ATTEMPTS + 1):
                driver = None
                try:
                    driver = await self._ensure_connected()
                    rows: Sequence[Any] = await driver.fetch(
                        statement, *values, record_class=PreparedRow
                    )
                    return rows
                except Exception as error:
                    lost, meaning = _is_lost(error, driver), classify(error)
                    sent = driver is not None and not isinstance(error, asyncpg.InterfaceError)
                    in_doubt = in_doubt or (lost and sent)
                    if is_lock_timeout(error):
                        raise RowLocked(summarize(error)) from error
                    if lost or is_pooler_switch(error) or is_read_only(error):
                        await self._discard()
                    # Reconnect once after a lost connection. The repeated statement does not move
                    # again what the first one moved.
                    if number < (2 if lost else MAX_ATTEMPTS if meaning is Failure.RETRY else 0):
                        await asyncio.sleep(random.uniform(0.001, 0.02) * number)
                        continue
                    if meaning is Failure.BUG or is_duplicate(error):
                        raise
                    if in_doubt:
                        raise CommitInDoubt(
                            f"the answer to a statement was lost: {summarize(error)}"
                        ) from error
                    raise StoreUnavailable(summarize(error)) from error
                except BaseException:
                    await self._discard()  # cancelled: the connection may be in any state
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def close(self) -> None:
        """Return the connection to the pool."""
        connection, self._connection, self._driver = self._connection, None, None
        if connection is not None:
            with suppress(*driver_errors()):
                await connection.close()

    async def _ensure_connected(self) -> Any:
        # A loop, because pooled connections may have broken while idle.
        while self._driver is None or self._driver.is_closed():
            await self._discard()
            connection = await self._engine.connect()
            try:
                driver: Any = (await connection.get_raw_connection()).driver_connection
            except BaseException:
                await connection.invalidate()
                await connection.close()
                raise
            self._connection, self._driver = connection, driver
        return self._driver

    async def _discard(self) -> None:
        connection, self._connection, self._driver = self._connection, None, None
        if connection is not None:
            self.losses += 1
            with suppress(*driver_errors()):
                await connection.invalidate()
                await connection.close()


def _is_lost(error: Exception, driver: Any) -> bool:
    """Whether the statement's result is lost with the connection, or there was no connection."""
    state = str(getattr(error, "sqlstate", None) or "")
    return (
        driver is None
        or driver.is_closed()
        or state.startswith(_CONNECTION_LOST)
        or isinstance(error, OSError)
        or is_broken(error)
    )
