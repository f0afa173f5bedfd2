"""The revision of a database's tables: read it, check it, and create the tables on SQLite."""

from __future__ import annotations

from sqlalchemy import Connection, String, inspect, text

from meshpoint.adapters.sql.tables import REVISION, VERSION_TABLE, metadata
from meshpoint.errors import ConfigurationError


def recorded_revision(connection: Connection) -> str | None:
    """The latest migration applied to the database, or `None`.

    Raises:
        ConfigurationError: The version table was not written by Alembic.
    """
    inspector = inspect(connection)
    if not inspector.has_table(VERSION_TABLE):
        return None
    columns = {column["name"]: column["type"] for column in inspector.get_columns(VERSION_TABLE)}
    if not isinstance(columns.get("version_num"), String):
        raise _version_table_error("it has no text column version_num")
    found = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE} LIMIT 2")).scalars().all()
    if len(found) > 1:
        raise _version_table_error("it has more than one row")
    if not all(isinstance(each, str) for each in found):
        raise _version_table_error("its version_num is not text")
    return found[0] if found else None


def _version_table_error(problem: str) -> ConfigurationError:
    """The error for a version table that Alembic did not write, or that was changed since."""
    fix = "use another database, or repair or drop that table"
    return ConfigurationError("session_db_url", f"cannot use table {VERSION_TABLE}: {problem}", fix)


def create_if_empty(connection: Connection) -> None:
    """Create the tables in a database without a version table, and record their revision."""
    if inspect(connection).has_table(VERSION_TABLE):
        return
    metadata.create_all(connection)
    connection.execute(text(f"CREATE TABLE {VERSION_TABLE} (version_num VARCHAR(32) NOT NULL PRIMARY KEY)"))
    connection.execute(text(f"INSERT INTO {VERSION_TABLE} VALUES ('{REVISION}')"))


def is_outdated(revision: str | None) -> bool:
    """Whether a database at `revision` must be upgraded for this release.

    A revision later than this release's own is accepted: migrations keep the previous release
    working, so that replicas can be replaced one by one.
    """
    return revision is None or revision < REVISION
