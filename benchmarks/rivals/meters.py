"""What a round costs besides time: CPU of processes, and what PostgreSQL and Redis had to do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Protocol
from urllib.parse import urlsplit

import asyncpg
import psutil


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time of these processes, of all that descend from them, and of those of them that have ended."""
    total = 0.0
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for each in (process, *process.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    times = each.cpu_times()
                    total += times.user + times.system + times.children_user + times.children_system
    return total


def servers_beside(pids: Iterable[int]) -> list[int]:
    """The other processes that this one has started: the servers."""
    return [child.pid for child in psutil.Process().children() if child.pid not in set(pids)]


class Meter(Protocol):
    """Counts what a server did for one contender, from the server's start on."""

    async def read(self) -> Mapping[str, float]:
        """The counts of now."""

    async def close(self) -> None:
        """Disconnect."""


class PostgresMeter:
    """Writing transactions, statements and bytes of WAL; PostgreSQL knows all of them at once.

    The first and the last are the whole server's: one contender works at a time. `pg_stat_database` would tell of
    commits up to ten seconds late, so ids of transactions are counted: those that only read have none.
    """

    def __init__(self, connection: asyncpg.Connection, database: str, *, statements: bool) -> None:
        self._connection, self._database, self._statements = connection, database, statements

    @classmethod
    async def open(cls, server_url: str, database_url: str) -> PostgresMeter:
        """A meter for one database; statements are counted where PostgreSQL's module for that is loaded."""
        connection = await asyncpg.connect(server_url)
        loaded = "pg_stat_statements" in await connection.fetchval("SHOW shared_preload_libraries")
        if loaded:
            await connection.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
        return cls(connection, urlsplit(database_url).path.strip("/"), statements=loaded)

    async def read(self) -> Mapping[str, float]:
        """The counts of now."""
        commits, wal = await self._connection.fetchrow(
            "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::float8,"
            " pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::float8"
        )
        counts = {"commits": commits, "wal KiB": wal / 1024}
        if self._statements:
            counts["statements"] = await self._connection.fetchval(
                "SELECT coalesce(sum(calls), 0)::float8 FROM pg_stat_statements(false)"
                " JOIN pg_database ON pg_database.oid = dbid WHERE datname = $1",
                self._database,
            )
        return counts

    async def close(self) -> None:
        """Disconnect."""
        await self._connection.close()


class RedisMeter:
    """Commands."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, url: str) -> RedisMeter:
        """A meter for one server."""
        address = urlsplit(url)
        return cls(*await asyncio.open_connection(address.hostname, address.port))

    async def read(self) -> Mapping[str, float]:
        """The counts of now."""
        self._writer.write(b"INFO stats\r\n")
        size = int((await self._reader.readline())[1:])
        said = (await self._reader.readexactly(size + 2)).decode()
        (line,) = [line for line in said.splitlines() if line.startswith("total_commands_processed:")]
        return {"statements": float(line.partition(":")[2])}

    async def close(self) -> None:
        """Disconnect."""
        self._writer.close()
