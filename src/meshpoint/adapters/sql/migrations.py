"""Migrations for the command line.

`upgrade` and `check` start an event loop, so they must not be called from a running one.
"""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, cast

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import URL, Connection, inspect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine

from meshpoint.adapters.sql.engine import MAX_ATTEMPTS, async_url, make_files_private
from meshpoint.adapters.sql.failures import (
    as_configuration_error,
    driver_errors,
    is_already_exists,
    is_deadlock,
    summarize,
)
from meshpoint.adapters.sql.tables import VERSION_TABLE, metadata, recorded_revision
from meshpoint.errors import ConfigurationError, StoreUnavailable

_MIGRATION_LOCK_KEY = 0x6D657368  # the advisory lock's key: "mesh"
_CONNECT_TIMEOUT = timedelta(seconds=10)
_ALEMBIC = threading.Lock()  # Alembic has one context per process, and brokers open in threads
_BASE = "base"  # Alembic's name for a database without tables


@dataclass(frozen=True, slots=True)
class Schema:
    """Tables with migrations of their own. `ini_section` names them in `alembic.ini`."""

    ini_section: str
    folder: str
    version_table: str


TASKS = Schema("alembic", "versions", VERSION_TABLE)
QUEUES = Schema("queues", "queue_versions", "meshpoint_queue_version")
"""The tables of a broker on PostgreSQL."""
SCHEMAS = {"tasks": TASKS, "queues": QUEUES}


def migrations_folder() -> Path:
    """The folder of migrations, in the installed package or at the root of a checkout.

    Raises:
        ConfigurationError: The package was installed without migrations.
    """
    here = Path(__file__).resolve()
    for folder in (here.parent / "alembic", here.parents[4] / "alembic"):
        if (folder / "env.py").is_file():
            return folder
    raise ConfigurationError(
        "database", "the migrations were not installed", "reinstall meshpoint"
    )


def upgrade(url: str, schema: Schema = TASKS) -> None:
    """Upgrade the tables to this release's revision, in one transaction.

    Raises:
        ConfigurationError: The database rejects the URL's user, does not exist, has conflicting
            tables, or is at a revision that this release does not know.
        StoreUnavailable: The database does not respond.
    """
    _run(url, lambda connection: _upgrade(connection, schema))


def check(url: str, schema: Schema = TASKS) -> tuple[str | None, str]:
    """The database's revision, `None` if it has no tables, and this release's newest one.

    Raises:
        ConfigurationError: The database rejects the URL's user, does not exist, or has an invalid
            version table.
        StoreUnavailable: The database does not respond.
    """
    found: list[str | None] = []
    _run(url, lambda connection: found.append(recorded_revision(connection, schema.version_table)))
    return found[0], newest_revision(schema)


def upgrade_sql(url: str, schema: Schema = TASKS) -> str:
    """The SQL that `upgrade` runs on an empty database, for administrators who run it by hand."""
    written = io.StringIO()
    config = _config(schema, output=written)
    config.attributes["dialect_name"] = async_url(url).get_backend_name()
    command.upgrade(config, "head", sql=True)
    return written.getvalue()


@dataclass(frozen=True, slots=True)
class DowngradePlan:
    """A downgrade from `revision` to `target`.

    `losses` lists the data that it would delete and that tasks still need.
    """

    revision: str
    target: str
    losses: tuple[str, ...]


def plan_downgrade(url: str, target: str | None) -> DowngradePlan:
    """Describe what a downgrade would do, without changing anything.

    Args:
        url: The database.
        target: A revision before the database's, or `base`; `None` for the previous one.

    Raises:
        ConfigurationError: As for `check`; or the database has no tables, this release does not
            know its revision, or `target` is not an earlier one.
        StoreUnavailable: The database does not respond.
    """
    plans: list[DowngradePlan] = []
    _run(url, lambda connection: plans.append(_plan_downgrade(connection, target)))
    return plans[0]


def downgrade(url: str, target: str | None, *, lose_data: bool = False) -> DowngradePlan:
    """Return the tables to an earlier revision, in one transaction that locks them.

    Replicas of this release then stop working: replace them first. Without `lose_data`, nothing
    changes if tasks need data that the downgrade would delete. Each migration lists such data in
    `NEEDED_BY_TASKS`.

    Raises:
        ConfigurationError: As for `plan_downgrade`; or tasks need data that would be deleted.
        StoreUnavailable: The database does not respond, or its tables are locked for too long.
    """
    plans: list[DowngradePlan] = []

    def run(connection: Connection) -> None:
        _lock_tables(connection)
        plan = _plan_downgrade(connection, target)
        plans.append(plan)
        if plan.losses and not lose_data:
            problem = f"tasks need what revision {plan.target} cannot keep: " + "; ".join(
                plan.losses
            )
            fix = "let these tasks end first, or delete the data with --lose-data"
            raise ConfigurationError("db downgrade", problem, fix)
        command.downgrade(_config(TASKS, connection), plan.target)

    _run(url, run)
    return plans[0]


def downgrade_sql(url: str, target: str | None) -> str:
    """The SQL that `downgrade` runs on this database, without its checks.

    Raises:
        ConfigurationError: As for `plan_downgrade`.
        StoreUnavailable: The database does not respond.
    """
    plan = plan_downgrade(url, target)
    written = io.StringIO()
    config = _config(TASKS, output=written)
    config.attributes["dialect_name"] = async_url(url).get_backend_name()
    command.downgrade(config, f"{plan.revision}:{plan.target}", sql=True)
    return written.getvalue()


def newest_revision(schema: Schema = TASKS) -> str:
    """The revision of this release's last migration."""
    (head,) = ScriptDirectory.from_config(_config(schema)).get_heads()
    return head


def _config(
    schema: Schema, connection: Connection | None = None, output: io.StringIO | None = None
) -> Config:
    config = Config(ini_section=schema.ini_section, output_buffer=output)
    folder = str(migrations_folder()).replace("%", "%%")
    config.set_main_option("script_location", folder)
    for option in ("path_separator", "version_path_separator"):  # before Alembic 1.16: the second
        config.set_main_option(option, "os")  # the path may contain spaces
    config.set_main_option("version_locations", f"{folder}/{schema.folder}")
    config.attributes["connection"] = connection
    return config


def _lock_tables(connection: Connection) -> None:
    """Keep replicas from writing between the check and the change."""
    if connection.dialect.name != "postgresql":
        return  # the transaction holds SQLite's only write lock
    existing = set(inspect(connection).get_table_names())
    names = [table for table in metadata.tables if table in existing]
    connection.exec_driver_sql("SET LOCAL lock_timeout = '5s'")
    if names:
        connection.exec_driver_sql(f"LOCK TABLE {', '.join(names)} IN ACCESS EXCLUSIVE MODE")


def _plan_downgrade(connection: Connection, target: str | None) -> DowngradePlan:
    recorded = recorded_revision(connection)
    if recorded is None:
        raise ConfigurationError("database", "the database has no tables", "use another one")
    known = {
        script.revision: script
        for script in ScriptDirectory.from_config(_config(TASKS)).walk_revisions()
    }
    if recorded not in known:
        raise _unknown_revision(recorded)
    undone = []
    revision: str | None = recorded
    wanted = known[recorded].down_revision or _BASE if target is None else target
    while revision is not None and revision != wanted:
        undone.append(known[revision])
        revision = cast(str | None, known[revision].down_revision)
    if not undone or (revision or _BASE) != wanted:
        earlier = ", ".join(sorted(each for each in known if each < recorded))
        fix = f"name one of {earlier or 'none'}, or {_BASE}"
        problem = f"{wanted!r} is not before the database's revision {recorded}"
        raise ConfigurationError("db downgrade", problem, fix)
    losses = [
        f"{what} ({count})"
        for script in undone
        for what, query in getattr(script.module, "NEEDED_BY_TASKS", {}).items()
        if (count := connection.exec_driver_sql(query).scalar_one())
    ]
    return DowngradePlan(recorded, str(wanted), tuple(losses))


def _unknown_revision(recorded: str | None) -> ConfigurationError:
    problem = f"the database is at revision {recorded}, which this release does not know"
    return ConfigurationError("database", problem, "run the release that upgraded it")


def _upgrade(connection: Connection, schema: Schema) -> None:
    recorded = recorded_revision(connection, schema.version_table)
    try:
        with _ALEMBIC:
            command.upgrade(_config(schema, connection), "head")
    except CommandError as error:
        raise _unknown_revision(recorded) from error
    except DBAPIError as error:
        if not is_already_exists(error):
            raise
        problem = f"a migration conflicts with an existing object: {summarize(error)}"
        raise ConfigurationError(
            "database", problem, "use an empty database, or remove the object"
        ) from error


def _run(url: str, work: Callable[[Connection], None]) -> None:
    """Run `work`, again after a deadlock with running replicas, which lock tables in any order."""
    for attempt in count(1):
        try:
            asyncio.run(run_in_transaction(async_url(url), work))
        except driver_errors() as error:
            if is_deadlock(error) and attempt < MAX_ATTEMPTS:
                continue
            reason = str(getattr(error, "orig", None) or error).splitlines()[0]
            raise as_configuration_error(error) or StoreUnavailable(reason) from error
        else:
            return


async def run_in_transaction(url: URL, work: Callable[[Connection], None]) -> None:
    """Run `work` on a new connection, in one transaction that commits at the end.

    On PostgreSQL, it runs under the migrations' advisory lock. On SQLite, the transaction is begun
    explicitly, because Python's `sqlite3` begins none before a schema change.
    """
    sqlite = url.get_backend_name() == "sqlite"
    mode: dict[str, Any] = {"isolation_level": "AUTOCOMMIT" if sqlite else "READ COMMITTED"}
    engine = create_async_engine(
        url, connect_args={"timeout": _CONNECT_TIMEOUT.total_seconds()}, **mode
    )
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
                await connection.exec_driver_sql(
                    f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK_KEY})"
                )
            await connection.run_sync(work)
    finally:
        await engine.dispose()
