"""Creates and checks the tables of the queues, when a broker opens.

They may share a database with the task tables; all names begin with `meshpoint_queue`. Their
migrations are in `alembic/queue_versions`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from meshpoint.adapters.postgres_queue.statements import FIND_TABLES, TABLES
from meshpoint.adapters.sql.failures import as_configuration_error, driver_errors, summarize
from meshpoint.adapters.sql.sessions import DatabaseTime, check_session
from meshpoint.errors import BrokerUnavailable, ConfigurationError, StoreUnavailable


async def ensure_tables(engine: AsyncEngine, url: str) -> None:
    """Create or upgrade the tables if necessary, and check that the login may use them.

    Several processes may do this concurrently.

    Raises:
        ConfigurationError: The login may not create or write them, or the database refuses it.
        BrokerUnavailable: The database does not answer.
    """
    try:
        if not await _are_current(engine):
            from meshpoint.adapters.sql import migrations  # slow to import

            await asyncio.to_thread(migrations.upgrade, url, migrations.QUEUES)
        await check_session(engine, DatabaseTime(), TABLES)
    except StoreUnavailable as error:
        raise BrokerUnavailable(str(error)) from error
    except ConfigurationError as error:
        raise ConfigurationError("mesh.broker_url", error.problem, error.fix) from error


async def _are_current(engine: AsyncEngine) -> bool:
    """Whether the tables exist, with all columns.

    Raises:
        ConfigurationError: They do not, and the login may not create them.
        StoreUnavailable: The database does not answer.
    """
    try:
        async with engine.connect() as connection:
            driver: Any = (await connection.get_raw_connection()).driver_connection
            _, are_current, may_create = await driver.fetchrow(FIND_TABLES)
    except driver_errors() as error:
        raise as_configuration_error(error) or StoreUnavailable(summarize(error)) from error
    if not are_current and not may_create:
        raise ConfigurationError(
            "database",
            "the role may not create or upgrade the tables of the queues",
            "run `meshpoint db upgrade` as a role that may, or: GRANT CREATE ON SCHEMA … TO the "
            "role",
        )
    return bool(are_current)
