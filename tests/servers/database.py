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
    name = f"test_{new_id().replace('-', '')}"
    await execute(server_url, f"CREATE DATABASE {name} TEMPLATE {template}")
    try:
        yield urlsplit(server_url)._replace(path=f"/{name}").geturl()
    finally:
        await execute(server_url, f"DROP DATABASE {name} WITH (FORCE)")


class DatabasePool:
    """A pool of databases with empty tables, because creating one takes a third of a second.

    A database is dropped instead of reused if a test changed its schema or settings.
    """

    def __init__(self, server_url: str, template: str) -> None:
        self._server_url, self._template = server_url, template
        self._definitions: str | None = None
        self._free: list[str] = []

    @asynccontextmanager
    async def borrow(self) -> AsyncIterator[str]:
        """Lend a database for exclusive use. Yields its URL."""
        name = self._free.pop() if self._free else await self._create()
        url = urlsplit(self._server_url)._replace(path=f"/{name}").geturl()
        try:
            yield url
        finally:
            if await self._try_empty(url):
                self._free.append(name)
            else:
                await self._drop(name)

    async def close(self) -> None:
        """Drop the databases in the pool."""
        while self._free:
            await self._drop(self._free.pop())

    async def _create(self) -> str:
        name = f"test_{new_id().replace('-', '')}"
        await execute(self._server_url, f"CREATE DATABASE {name} TEMPLATE {self._template}")
        return name

    async def _drop(self, name: str) -> None:
        await execute(self._server_url, f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    async def _try_empty(self, url: str) -> bool:
        """Terminate all sessions and delete all rows.

        Returns `False` if the database cannot be reused.
        """
        try:
            if self._definitions is None:
                template = urlsplit(url)._replace(path=f"/{self._template}").geturl()
                async with _connect(template) as connection:
                    self._definitions = await connection.fetchval(_DEFINITIONS)
            async with _connect(url) as connection:
                while await connection.fetch(_TERMINATE_OTHERS):  # noqa: ASYNC110  no event for it
                    await asyncio.sleep(0.005)
                if await connection.fetchval(_DEFINITIONS) != self._definitions:
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


_TERMINATE_OTHERS = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
 WHERE datname = current_database() AND pid <> pg_backend_pid()
"""
_TABLES = """
SELECT tablename FROM pg_tables
 WHERE schemaname = 'public' AND tablename <> 'meshpoint_alembic_version'
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
