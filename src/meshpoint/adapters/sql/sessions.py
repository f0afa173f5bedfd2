"""Startup checks of PostgreSQL sessions, and an estimate of the database's clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from time import monotonic
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from meshpoint.adapters.sql.catalog_statements import READ_MISSING_PRIVILEGE
from meshpoint.adapters.sql.failures import as_configuration_error, driver_errors, summarize
from meshpoint.adapters.sql.tables import calls, joins, tasks
from meshpoint.errors import ConfigurationError, StoreUnavailable

_PROBE_TIMEOUT = 2.0  # seconds
_PROBE_CONNECTIONS = 6
"""Connections opened to look for the prepared statement; fewer than the store uses in total."""
_SESSION_QUERY = """
SELECT pg_backend_pid() AS pid, current_setting('default_transaction_isolation') AS isolation,
       current_setting('default_transaction_read_only') AS read_only,
       pg_is_in_recovery() AS standby,
       CAST(EXTRACT(EPOCH FROM statement_timestamp()) AS double precision) AS now
"""
_MISSING_PRIVILEGE = READ_MISSING_PRIVILEGE.replace(":names", "$1")
_WRITTEN_TABLES = [table.name for table in (tasks, calls, joins)]


class DatabaseTime:
    """Estimates the database's clock from timestamps in results, advanced by the monotonic clock.

    The database reads its clock after the statement is sent and before its result is received.
    Each result therefore bounds the difference between the two clocks on both sides. The estimate
    changes only when it is outside these bounds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.clock = clock
        self._offset: float | None = None

    def observe(self, now: float, sent_at: float) -> None:
        """Record that a statement sent at `sent_at` (monotonic) returned database time `now`."""
        least, most = now - self.clock(), now - sent_at
        self._offset = least if self._offset is None else min(max(self._offset, least), most)

    @property
    def current_time(self) -> datetime | None:
        """The current time, or `None` before the first result."""
        return (
            None
            if self._offset is None
            else datetime.fromtimestamp(self.clock() + self._offset, UTC)
        )


async def check_session(
    engine: AsyncEngine, time: DatabaseTime, written_tables: Sequence[str] = _WRITTEN_TABLES
) -> None:
    """Check that sessions, possibly through a pooler, behave as transitions require.

    Also updates `time`.

    Raises:
        ConfigurationError: A pooler prevents the store from setting parameters it depends on, and
            the defaults differ; or the role may not write `written_tables`; or the database
            refuses the URL's user.
        StoreUnavailable: The database does not respond, or is a standby.
    """
    try:
        async with engine.connect() as connection:
            await _check_session(engine, await _driver(connection), time, written_tables)
    except driver_errors() as error:
        raise as_configuration_error(error) or StoreUnavailable(summarize(error)) from error


async def _check_session(
    engine: AsyncEngine, driver: Any, time: DatabaseTime, written_tables: Sequence[str]
) -> None:
    sent_at = time.clock()
    session = await driver.fetchrow(_SESSION_QUERY)
    time.observe(session["now"], sent_at)
    if session["standby"]:
        raise StoreUnavailable("the server is a standby, which cannot write")
    for name, found, needed in (
        ("default_transaction_isolation", session["isolation"], "read committed"),
        ("default_transaction_read_only", session["read_only"], "off"),
    ):
        if found != needed:
            problem = (
                f"its sessions have {name} = {found}, "
                "and a pooler prevents Meshpoint from setting it"
            )
            raise ConfigurationError(
                "database", problem, f"run: ALTER ROLE … SET {name} = '{needed}'"
            )
    if missing := await driver.fetchrow(_MISSING_PRIVILEGE, written_tables):
        problem = f"the role may not {missing['privilege']} in the table {missing['name']}"
        fix = "run: GRANT SELECT, INSERT, UPDATE, DELETE ON the tables of Meshpoint TO the role"
        raise ConfigurationError("database", problem, fix)
    if session["pid"] != driver.get_server_pid():
        await _check_prepared_statements(engine, driver)


async def _check_prepared_statements(engine: AsyncEngine, driver: Any) -> None:
    """Run a prepared statement while another transaction occupies its server connection.

    Behind a pooler, another server session runs it, which fails unless the pooler prepares it
    there.
    """
    async with driver.transaction():
        prepared = await driver.prepare("SELECT pg_backend_pid()")
        pid = await prepared.fetchval()
    async with AsyncExitStack() as others:
        for _ in range(_PROBE_CONNECTIONS):
            probe = await _driver(await others.enter_async_context(engine.connect()))
            try:
                async with asyncio.timeout(_PROBE_TIMEOUT):
                    await probe.execute("BEGIN")
                    others.push_async_callback(probe.execute, "ROLLBACK")
                    if await probe.fetchval("SELECT pg_backend_pid()") == pid:
                        await prepared.fetchval()
                        return
            except (
                TimeoutError
            ):  # the pooler has no more connections, so the check is inconclusive
                return


async def _driver(connection: AsyncConnection) -> Any:
    return (await connection.get_raw_connection()).driver_connection
