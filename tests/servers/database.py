"""Databases that come and go on a server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import asyncpg

from meshpoint.model.ids import new_id


@asynccontextmanager
async def own_database(server_url: str, template: str = "template0") -> AsyncIterator[str]:
    """The URL of a new database, a copy of `template`; dropped at the end, whoever is still in it."""
    name = f"test_{new_id().replace('-', '')}"
    await execute(server_url, f"CREATE DATABASE {name} TEMPLATE {template}")
    try:
        yield urlsplit(server_url)._replace(path=f"/{name}").geturl()
    finally:
        await execute(server_url, f"DROP DATABASE {name} WITH (FORCE)")


async def execute(url: str, statement: str) -> None:
    """Run `statement` on a connection of its own."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()
