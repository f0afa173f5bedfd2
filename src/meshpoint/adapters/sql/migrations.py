"""Migrations for the command line.

`upgrade` and `check` start an event loop, so they must not be called from a running one.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import URL, Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine

from meshpoint.adapters.sql.engine import async_url, make_files_private
from meshpoint.adapters.sql.failures import as_configuration_error, driver_errors, is_already_exists, summarize
from meshpoint.adapters.sql.schema import recorded_revision
from meshpoint.errors import ConfigurationError, StoreUnavailable

_MIGRATION_LOCK_KEY = 0x6D657368  # the advisory lock's key: "mesh"
_CONNECT_TIMEOUT = timedelta(seconds=10)


def migrations_folder() -> Path:
    """The folder of migrations, in the installed package or at the root of a checkout.

    Raises:
        ConfigurationError: The package was installed without migrations.
    """
    here = Path(__file__).resolve()
    for folder in (here.parent / "alembic", here.parents[4] / "alembic"):
        if (folder / "env.py").is_file():
            return folder
    raise ConfigurationError("session_db_url", "the migrations were not installed", "reinstall meshpoint")


def upgrade(url: str) -> None:
    """Upgrade the tables to this release's revision, in one transaction.

    Raises:
        ConfigurationError: The database rejects the URL's user, does not exist, has conflicting
            tables, or is at a revision that this release does not know.
        StoreUnavailable: The database does not respond.
    """
    _run(url, _upgrade)


def check(url: str) -> tuple[str | None, str]:
    """The database's revision, `None` if it has no tables, and this release's newest one.

    Raises:
        ConfigurationError: The database rejects the URL's user, does not exist, or has an invalid
            version table.
        StoreUnavailable: The database does not respond.
    """
    found: list[str | None] = []
    _run(url, lambda connection: found.append(recorded_revision(connection)))
    return found[0], newest_revision()


def upgrade_sql(url: str) -> str:
    """The SQL that `upgrade` runs on an empty database, for administrators who run it by hand."""
    written = io.StringIO()
    config = _config(output=written)
    config.attributes["dialect_name"] = async_url(url).get_backend_name()
    command.upgrade(config, "head", sql=True)
    return written.getvalue()


def newest_revision() -> str:
    """The revision of this release's last migration."""
    head = ScriptDirectory.from_config(_config()).get_current_head()
    assert head is not None
    return head


def _config(connection: Connection | None = None, output: io.StringIO | None = None) -> Config:
    config = Config(output_buffer=output)
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def _upgrade(connection: Connection) -> None:
    recorded = recorded_revision(connection)
    try:
        command.upgrade(_config(connection), "head")
    except CommandError as error:
        problem = f"the database is at revision {recorded}, which this release does not know"
        raise ConfigurationError("session_db_url", problem, "run the release that upgraded it") from error
    except DBAPIError as error:
        if not is_already_exists(error):
            raise
        problem = f"a migration conflicts with an existing object: {summarize(error)}"
        raise ConfigurationError("session_db_url", problem, "use an empty database, or remove the object") from error


def _run(url: str, work: Callable[[Connection], None]) -> None:
    asyncio.run(_run_async(url, work))


async def _run_async(url: str, work: Callable[[Connection], None]) -> None:
    try:
        await run_in_transaction(async_url(url), work)
    except driver_errors() as error:
        unavailable = StoreUnavailable(str(getattr(error, "orig", None) or error).splitlines()[0])
        raise as_configuration_error(error) or unavailable from error


async def run_in_transaction(url: URL, work: Callable[[Connection], None]) -> None:
    """Run `work` on a new connection, in one transaction that commits at the end.

    On PostgreSQL, it runs under the migrations' advisory lock. On SQLite, the transaction is begun
    explicitly, because Python's `sqlite3` begins none before a schema change.
    """
    sqlite = url.get_backend_name() == "sqlite"
    mode: dict[str, Any] = {"isolation_level": "AUTOCOMMIT" if sqlite else "READ COMMITTED"}
    engine = create_async_engine(url, connect_args={"timeout": _CONNECT_TIMEOUT.total_seconds()}, **mode)
    if sqlite:
        make_files_private(engine.sync_engine)
    try:
        async with engine.begin() as connection:
            if sqlite:
                await connection.exec_driver_sql("BEGIN IMMEDIATE")
            else:
                # The default may be read-only. The lock makes concurrent upgrades run one after
                # another.
                await connection.exec_driver_sql("SET TRANSACTION READ WRITE")
                await connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK_KEY})")
            await connection.run_sync(work)
    finally:
        await engine.dispose()
