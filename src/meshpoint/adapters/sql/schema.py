"""Which revision of the tables a database has."""

from __future__ import annotations

from sqlalchemy import Connection, inspect, text

from meshpoint.adapters.sql.tables import REVISION, VERSION_TABLE, metadata


def recorded_revision(connection: Connection) -> str | None:
    """The newest migration that the database has seen; None: none."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.execute(text(f"SELECT max(version_num) FROM {VERSION_TABLE}")).scalar()


def create_if_empty(connection: Connection) -> None:
    """Create the tables in a database that has none of them, and record their revision."""
    if inspect(connection).has_table(VERSION_TABLE):
        return
    metadata.create_all(connection)
    connection.execute(text(f"CREATE TABLE {VERSION_TABLE} (version_num VARCHAR(32) NOT NULL PRIMARY KEY)"))
    connection.execute(text(f"INSERT INTO {VERSION_TABLE} VALUES ('{REVISION}')"))


def behind(revision: str | None) -> bool:
    """Whether a database of `revision` lacks what this release needs.

    A later revision than this release's own is none of its business: migrations leave the previous release working,
    so that replicas can be replaced one by one.
    """
    return revision is None or revision < REVISION
