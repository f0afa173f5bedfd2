"""Startup checks of PostgreSQL sessions: settings, privileges, and poolers."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from meshpoint.adapters.sql.tables import calls, joins, tasks
from meshpoint.adapters.sql.time import DatabaseTime
from meshpoint.errors import ConfigurationError, StoreUnavailable

_PROBE_TIMEOUT = 2.0  # seconds
_PROBE_CONNECTIONS = 6
"""Connections opened to look for the prepared statement; fewer than the store uses in total."""
_SESSION_QUERY = """
SELECT pg_backend_pid() AS pid, current_setting('default_transaction_isolation') AS isolation,
       current_setting('default_transaction_read_only') AS read_only, pg_is_in_recovery() AS standby,
       CAST(EXTRACT(EPOCH FROM statement_timestamp()) AS double precision) AS now
"""
_MISSING_PRIVILEGE = """
SELECT name, privilege
  FROM unnest(CAST($1 AS text[])) AS name,
       unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS privilege
 WHERE NOT has_table_privilege(to_regclass(name), privilege)
 LIMIT 1
"""
_WRITTEN_TABLES = [table.name for table in (tasks, calls, joins)]


async def check_session(engine: AsyncEngine, time: DatabaseTime) -> None:
    """Check that transitions work on the sessions of `engine`. Also updates `time`.

    Raises:
        ConfigurationError: A pooler prevents the store from setting parameters it depends on, and
            the defaults differ; or the role may not write the tables.
        StoreUnavailable: The server is a standby.
    """
    async with engine.connect() as connection:
        driver = await _driver(connection)
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
                problem = f"its sessions have {name} = {found}, and a pooler prevents Meshpoint from setting it"
                raise ConfigurationError("session_db_url", problem, f"run: ALTER ROLE … SET {name} = '{needed}'")
        if missing := await driver.fetchrow(_MISSING_PRIVILEGE, _WRITTEN_TABLES):
            problem = f"the role may not {missing['privilege']} in the table {missing['name']}"
            fix = "run: GRANT SELECT, INSERT, UPDATE, DELETE ON the tables of Meshpoint TO the role"
            raise ConfigurationError("session_db_url", problem, fix)
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
            except TimeoutError:  # the pooler has no more connections, so the check is inconclusive
                return


async def _driver(connection: AsyncConnection) -> Any:
    return (await connection.get_raw_connection()).driver_connection
