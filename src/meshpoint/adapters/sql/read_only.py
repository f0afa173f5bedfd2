"""A connection whose transactions cannot write, for observers of a database."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.pool import NullPool

from meshpoint.adapters.sql import tables
from meshpoint.adapters.sql.dialect import Dialect
from meshpoint.adapters.sql.engine import async_url
from meshpoint.adapters.sql.failures import as_configuration_error, driver_errors, summarize
from meshpoint.errors import StoreUnavailable
from meshpoint.ports.clock import Clock

_LIMIT_TIME = "SET LOCAL statement_timeout = {milliseconds}"
"""Filled in by Python, because PostgreSQL accepts no parameter here."""


class ReadOnlyConnection:
    """One connection to a database.

    All methods raise `StoreUnavailable` if the database does not answer, and `ConfigurationError`
    if it refuses the login or the URL.

    Args:
        url: The database.
        timeout: Limit for connecting, and for each statement.
        clock: Replaces the database's clock in tests.
    """

    def __init__(self, url: str, timeout: timedelta, clock: Clock | None = None) -> None:
        parsed = async_url(url)
        self._timeout = timeout
        self.dialect = Dialect(parsed.get_backend_name(), clock)
        self._file = Path(parsed.database or "") if self.dialect.is_sqlite else None
        self._engine = create_async_engine(
            parsed, poolclass=NullPool, connect_args={"timeout": timeout.total_seconds()}
        )
        self._connection: AsyncConnection | None = None
        self.revision: str | None = None
        """The revision of the tables, read by `open`; `None` without tables."""

    async def open(self) -> None:
        """Connect, and read the revision. A missing SQLite file is not created."""
        if self._file is not None and not self._file.exists():
            return
        try:
            self._connection = await self._engine.connect()
            if self.dialect.is_sqlite:
                await self._connection.exec_driver_sql("PRAGMA query_only = ON")
            await self.begin()
            self.revision = await self._connection.run_sync(tables.recorded_revision)
        except driver_errors() as error:
            raise _translate(error) from error

    @property
    def is_open(self) -> bool:
        """Whether the database was found."""
        return self._connection is not None

    async def close(self) -> None:
        """Disconnect. `open` connects again."""
        connection, self._connection = self._connection, None
        with suppress(*driver_errors()):
            if connection is not None:
                await connection.close()
        await self._engine.dispose()

    async def begin(self, *settings: str) -> None:
        """End the transaction, and begin another one with `settings`."""
        assert self._connection is not None
        try:
            await self._connection.rollback()
            await self._connection.begin()
            if not self.dialect.is_sqlite:
                limit = math.ceil(self._timeout / timedelta(milliseconds=1))
                for setting in (
                    "SET TRANSACTION READ ONLY",
                    _LIMIT_TIME.format(milliseconds=limit),
                    *settings,
                ):
                    await self._connection.exec_driver_sql(setting)
        except driver_errors() as error:
            raise _translate(error) from error

    async def fetch(self, template: str, **values: Any) -> Sequence[Row[Any]]:
        """Return the rows of a statement in the open transaction."""
        assert self._connection is not None
        try:
            return (await self._connection.execute(*self.dialect.prepare(template, values))).all()
        except driver_errors() as error:
            raise _translate(error) from error


def _translate(error: Exception) -> Exception:
    return as_configuration_error(error) or StoreUnavailable(summarize(error))
