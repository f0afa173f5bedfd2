"""PostgreSQL's counters before and after a contender's work."""

from __future__ import annotations

import time
from dataclasses import dataclass

import asyncpg


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals since the server started.

    `commits` counts transactions that wrote. `statements` is `None` if they are not counted.
    """

    statements: float | None
    commits: float
    wal_bytes: float
    cpu_seconds: float

    def increase_per(self, count: int, earlier: Counters) -> dict[str, float]:
        """The increase since `earlier`, per task."""
        increases = {
            "commits": self.commits - earlier.commits,
            "wal_kib": (self.wal_bytes - earlier.wal_bytes) / 1024,
            "cpu_us": (self.cpu_seconds - earlier.cpu_seconds) * 1e6,
        }
        if self.statements is not None and earlier.statements is not None:
            increases["statements"] = self.statements - earlier.statements
        return {name: value / count for name, value in increases.items()}


class PostgresProbe:
    """A separate connection to a contender's database."""

    async def open(self, url: str) -> None:
        """Connect."""
        self._connection = await asyncpg.connect(url)
        libraries = await self._connection.fetchval("SHOW shared_preload_libraries")
        self._has_statement_counts = "pg_stat_statements" in libraries
        if self._has_statement_counts:
            await self._connection.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")

    async def close(self) -> None:
        """Disconnect."""
        await self._connection.close()

    async def counters(self) -> Counters:
        """The current totals. CPU time is this process's."""
        row = await self._connection.fetchrow(
            "SELECT pg_current_wal_lsn() - '0/0'::pg_lsn, "
            "pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
        )
        statements = (
            await self._connection.fetchval(_STATEMENTS) if self._has_statement_counts else None
        )
        return Counters(
            statements=None if statements is None else float(statements),
            commits=float(row[1]),
            wal_bytes=float(row[0]),
            cpu_seconds=time.process_time(),
        )


_STATEMENTS = """
SELECT coalesce(sum(calls), 0) FROM pg_stat_statements
 WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
