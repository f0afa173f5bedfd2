"""The cost of a round apart from time: CPU of processes, and work of PostgreSQL and Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Protocol
from urllib.parse import urlsplit

import asyncpg
import psutil


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time of these processes and all their descendants, including ended ones."""
    total = 0.0
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for process_times in (process, *process.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    times = process_times.cpu_times()
                    total += (
                        times.user + times.system + times.children_user + times.children_system
                    )
    return total


def process_cpu_seconds(pid: int) -> float:
    """CPU time of this process alone, without its descendants."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def sibling_servers(pids: Iterable[int]) -> list[int]:
    """The other child processes of this one, which are the servers."""
    return [child.pid for child in psutil.Process().children() if child.pid not in set(pids)]


class Meter(Protocol):
    """Counts a server's work for one contender since the server started."""

    async def read(self) -> Mapping[str, float]:
        """The current counts."""

    async def close(self) -> None:
        """Disconnect."""


class PostgresMeter:
    """Counts writing transactions, statements, notifications and bytes of WAL, without delay.

    Transactions and WAL are the whole server's, but only one contender works at a time.
    `pg_stat_database` reports commits up to ten seconds late, so transaction ids are counted
    instead; read-only transactions have none, and a notification has one but writes nothing.
    """

    def __init__(self, connection: asyncpg.Connection, database: str, *, statements: bool) -> None:
        self._connection, self._database, self._statements = connection, database, statements

    @classmethod
    async def open(cls, server_url: str, database_url: str) -> PostgresMeter:
        """Open a meter for one database.

        Statements are counted if pg_stat_statements is loaded.
        """
        connection = await asyncpg.connect(server_url)
        loaded = "pg_stat_statements" in await connection.fetchval("SHOW shared_preload_libraries")
        if loaded:
            await connection.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
        return cls(connection, urlsplit(database_url).path.strip("/"), statements=loaded)

    async def read(self) -> Mapping[str, float]:
        """The current counts."""
        commits, wal = await self._connection.fetchrow(
            "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::float8,"
            " pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::float8"
        )
        counts = {"commits": commits, "wal KiB": wal / 1024}
        if self._statements:
            counts["statements"], counts["notifications"] = await self._connection.fetchrow(
                "SELECT coalesce(sum(calls), 0)::float8,"
                " coalesce(sum(calls) FILTER (WHERE query LIKE '%pg_notify(%'), 0)::float8"
                " FROM pg_stat_statements(true)"
                " JOIN pg_database ON pg_database.oid = dbid WHERE datname = $1",
                self._database,
            )
        return counts

    async def close(self) -> None:
        """Disconnect."""
        await self._connection.close()


class RedisMeter:
    """Counts commands."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, url: str) -> RedisMeter:
        """Open a meter for one server."""
        address = urlsplit(url)
        return cls(*await asyncio.open_connection(address.hostname, address.port))

    async def read(self) -> Mapping[str, float]:
        """The current counts."""
        self._writer.write(b"INFO stats\r\n")
        size = int((await self._reader.readline())[1:])
        reply = (await self._reader.readexactly(size + 2)).decode()
        (line,) = [
            line for line in reply.splitlines() if line.startswith("total_commands_processed:")
        ]
        return {"statements": float(line.partition(":")[2])}

    async def close(self) -> None:
        """Disconnect."""
        self._writer.close()
