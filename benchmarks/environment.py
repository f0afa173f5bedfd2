"""Private servers for one benchmark run, and a description of them."""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import TypeVar
from urllib.parse import urlsplit

import asyncpg
from pydantic import JsonValue
from redis.asyncio import Redis

from meshpoint.adapters.sql import migrations
from meshpoint.model.ids import new_id
from servers import PostgresServer, PrivateServer, RabbitServer, RedisServer
from servers.locate import postgres_programs, rabbit_programs

Server = TypeVar("Server", bound=PrivateServer)

POSTGRES_SETTINGS = {
    "fsync": "on",
    "synchronous_commit": "on",
    "shared_buffers": "1GB",
    "max_wal_size": "8GB",
}
_PACKAGES = ("meshpoint", "asyncpg", "sqlalchemy", "aiormq", "aiosqlite", "pydantic")


class BenchmarkServers:
    """Servers that start on first use and stop with the stage. An async context manager."""

    def __init__(self) -> None:
        self._servers: dict[object, PrivateServer] = {}
        self._template: str | None = None

    async def __aenter__(self) -> BenchmarkServers:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while self._servers:
            _, server = self._servers.popitem()
            await asyncio.to_thread(server.close)

    async def server(self, kind: Callable[[], Server]) -> Server:
        """The running server created by `kind()`. There is one per `kind`."""
        if kind not in self._servers:
            self._servers[kind] = kind()
            await self._servers[kind].start()
        return self._servers[kind]  # type: ignore[return-value]  # it was created by `kind`

    async def postgres(self) -> PostgresServer:
        """PostgreSQL with `POSTGRES_SETTINGS`.

        It counts statements if pg_stat_statements is installed.
        """
        return await self.server(_postgres)

    async def rabbit(self) -> RabbitServer:
        """RabbitMQ, started as in the tests."""
        return await self.server(RabbitServer)

    async def redis(self) -> RedisServer:
        """Redis, started as in the tests."""
        return await self.server(RedisServer)

    async def database(self) -> str:
        """The URL of a new database with Meshpoint's tables."""
        if self._template is None:
            self._template = await self.empty_database()
            await asyncio.to_thread(migrations.upgrade, self._template)
        return await self.empty_database(template=urlsplit(self._template).path.strip("/"))

    async def empty_database(self, *, template: str = "template0") -> str:
        """The URL of a new database copied from `template`."""
        server, name = await self.postgres(), f"bench_{new_id().replace('-', '')}"
        await self._execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return urlsplit(server.url)._replace(path=f"/{name}").geturl()

    async def _execute(self, statement: str) -> None:
        async with connect((await self.postgres()).url) as connection:
            await connection.execute(statement)

    async def describe(self, *packages: str) -> dict[str, JsonValue]:
        """The machine, server settings, and versions of the servers in use and of packages.

        `packages` are added to the default ones.
        """
        facts: dict[str, JsonValue] = {
            "cpus": os.cpu_count(),
            "processor": _processor(),
            "memory GB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            "system": platform.platform(),
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in (*_PACKAGES, *packages)},
        }
        if _postgres in self._servers:
            facts["postgresql"] = (await self._scalar("SHOW server_version")).split()[0]
            facts["postgresql settings"] = ", ".join(
                f"{key} {value}" for key, value in POSTGRES_SETTINGS.items()
            )
        if RabbitServer in self._servers:
            facts["rabbitmq"] = _rabbit_version()
        if RedisServer in self._servers:
            async with Redis.from_url((await self.redis()).url) as redis:
                facts["redis server"] = str((await redis.info("server"))["redis_version"])
        return facts

    async def _scalar(self, query: str) -> str:
        async with connect((await self.postgres()).url) as connection:
            return str(await connection.fetchval(query))


@asynccontextmanager
async def connect(url: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection of its own."""
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close()


def _postgres() -> PostgresServer:
    settings = dict(POSTGRES_SETTINGS)
    if (postgres_programs().parent / "lib" / "pg_stat_statements.so").exists():
        settings["shared_preload_libraries"] = "pg_stat_statements"
    return PostgresServer(settings)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        "unknown",
    )


def _rabbit_version() -> str:
    match = sorted(rabbit_programs().parent.glob("lib/rabbitmq_server-*"))
    return match[-1].name.rpartition("-")[2] if match else "unknown"
