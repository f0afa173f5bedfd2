"""Temporary databases on a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import asyncpg

from meshpoint.model.ids import new_id


@asynccontextmanager
async def own_database(server_url: str, template: str = "template0") -> AsyncIterator[str]:
    """Create a database from `template` and yield its URL.

    At the end it is dropped, even with open sessions.
    """
    name = await create_database(server_url, template)
    try:
        yield url_on(server_url, name)
    finally:
        await drop_database(server_url, name)


async def create_database(server_url: str, template: str = "template0") -> str:
    """Create a database from `template`. Returns its name."""
    name = f"test_{new_id().replace('-', '')}"
    await execute(server_url, f"CREATE DATABASE {name} TEMPLATE {template}")
    return name


async def drop_database(server_url: str, name: str) -> None:
    """Drop a database, even with open sessions."""
    await execute(server_url, f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


def url_on(server_url: str, name: str) -> str:
    """URL of the database `name` on the server."""
    return urlsplit(server_url)._replace(path=f"/{name}").geturl()


class DatabasePool:
    """A pool of databases with empty tables, because creating one takes a third of a second.

    A database is dropped instead of reused if a test changed its schema or settings.
    """

    def __init__(self, server_url: str, template: str) -> None:
        self._server_url, self._template = server_url, template
        self._unchanged: tuple[str, str] | None = None  # row versions, definitions
        self._free: list[str] = []

    @asynccontextmanager
    async def borrow(self) -> AsyncIterator[str]:
        """Lend a database for exclusive use. Yields its URL."""
        if self._free:
            name = self._free.pop()
        else:
            name = await create_database(self._server_url, self._template)
        url = url_on(self._server_url, name)
        try:
            yield url
        finally:
            if await self._try_empty(url):
                self._free.append(name)
            else:
                await drop_database(self._server_url, name)

    async def close(self) -> None:
        """Drop the databases in the pool."""
        while self._free:
            await drop_database(self._server_url, self._free.pop())

    async def _try_empty(self, url: str) -> bool:
        """Terminate all sessions and delete all rows.

        Returns `False` if the database cannot be reused.
        """
        try:
            if self._unchanged is None:
                template = url_on(url, self._template)
                async with _connect(template) as connection:
                    self._unchanged = (
                        await connection.fetchval(_CATALOG_VERSIONS),
                        await connection.fetchval(_DEFINITIONS),
                    )
            async with _connect(url) as connection:
                while await connection.fetch(_TERMINATE_OTHERS):  # noqa: ASYNC110  no event for it
                    await asyncio.sleep(0.005)
                if not await self._has_template_schema(connection):
                    return False
                tables = [row[0] for row in await connection.fetch(_TABLES)]
                await connection.execute("; ".join(f"DELETE FROM {table}" for table in tables))
        except (
            OSError,
            asyncpg.PostgresError,
            asyncpg.InterfaceError,
            asyncpg.InternalClientError,
        ):
            return False  # the test stopped the server or dropped the database
        return True

    async def _has_template_schema(self, connection: asyncpg.Connection) -> bool:
        """Compare row versions of the catalog, which a clone shares with its template.

        The definitions take much longer to read; they decide after a change that was undone.
        """
        assert self._unchanged is not None
        versions, definitions = self._unchanged
        return bool(
            await connection.fetchval(_CATALOG_VERSIONS) == versions
            or await connection.fetchval(_DEFINITIONS) == definitions
        )


_TERMINATE_OTHERS = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
 WHERE datname = current_database() AND pid <> pg_backend_pid()
"""
_TABLES = """
SELECT tablename FROM pg_tables
 WHERE schemaname = 'public' AND tablename <> 'meshpoint_alembic_version'
"""
_CATALOG_VERSIONS = """
SELECT string_agg(concat_ws(' ', kind, rows, newest, total), ',' ORDER BY kind) FROM (
  SELECT 'relations' AS kind, count(*) AS rows, max(xmin::text::bigint) AS newest,
         sum(xmin::text::bigint) AS total
  FROM pg_class WHERE relnamespace = 'public'::regnamespace
  UNION ALL
  SELECT 'columns', count(*), max(pg_attribute.xmin::text::bigint),
         sum(pg_attribute.xmin::text::bigint)
  FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid
  WHERE relnamespace = 'public'::regnamespace
  UNION ALL
  SELECT 'constraints', count(*), max(xmin::text::bigint), sum(xmin::text::bigint)
  FROM pg_constraint WHERE connamespace = 'public'::regnamespace
  UNION ALL
  SELECT 'triggers', count(*), max(xmin::text::bigint), sum(xmin::text::bigint)
  FROM pg_trigger WHERE NOT tgisinternal
  UNION ALL
  SELECT 'settings', count(*), NULL, NULL FROM pg_db_role_setting
  WHERE setdatabase = (SELECT oid FROM pg_database WHERE datname = current_database())
) AS versions
"""
_DEFINITIONS = """
SELECT coalesce(string_agg(line, E'\n' ORDER BY line), '') FROM (
  SELECT concat_ws(' ', relname, relkind, relacl::text, attname,
                   attnum, atttypid, atttypmod, attnotnull) AS line
  FROM pg_class LEFT JOIN pg_attribute ON attrelid = pg_class.oid AND NOT attisdropped
  WHERE relnamespace = 'public'::regnamespace
  UNION ALL
  SELECT concat_ws(' ', conrelid::regclass::text, conname, pg_get_constraintdef(oid))
  FROM pg_constraint
  WHERE connamespace = 'public'::regnamespace
  UNION ALL
  SELECT indexdef FROM pg_indexes WHERE schemaname = 'public'
  UNION ALL
  SELECT pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal
  UNION ALL
  SELECT unnest(setconfig) FROM pg_db_role_setting
  WHERE setdatabase = (SELECT oid FROM pg_database WHERE datname = current_database())
) AS definitions
"""


@asynccontextmanager
async def _connect(url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close()


async def execute(url: str, statement: str) -> None:
    """Run `statement` on a new connection."""
    async with _connect(url) as connection:
        await connection.execute(statement)
