"""Table size over a long run of short-lived tasks, with the migrations' autovacuum settings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

import asyncpg
from pydantic import JsonValue

from benchmarks.paused_tasks import DAY, STATE_BYTES, make_pause, make_response, make_store
from benchmarks.report import Lines, Table
from bulk_tasks import TABLES, copy_task, write_waiting_task
from meshpoint.adapters.sql import SqlStore
from meshpoint.model.transitions import EndCommitted, JoinCompleted, PauseCommitted
from meshpoint.testing.conformance.build import AGENT, HERE, an_end

STANDING_TASKS = 10_000
_BATCH = 256
_SAMPLES = 50
_MB = 1024 * 1024

_SIZES = {
    "tables": "pg_relation_size(oid)",
    "indexes": "pg_indexes_size(oid)",
    "large values": "pg_table_size(oid) - pg_relation_size(oid)",
}
"""The parts of a table. Free-space and visibility maps are counted as large values."""


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of the three tables after a number of cycles, in MB."""

    cycles: int
    seconds: float
    parts: dict[str, float]
    dead_rows: int
    vacuums: int

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class ChurnResult:
    """Table sizes during a churn. The first is measured with the standing tasks only.

    `free` is the percentage of the tasks' table and its large values that new rows can reuse at
    the end, `None` if the server cannot measure it.
    """

    sizes: Sequence[Size]
    free: float | None

    @property
    def growth(self) -> float:
        """Mean size in the last quarter divided by the second quarter's. 1 is a plateau."""
        quarter = len(self.sizes) // 4
        return self._mean_size(self.sizes[-quarter:]) / self._mean_size(
            self.sizes[quarter : 2 * quarter]
        )

    def _mean_size(self, sizes: Sequence[Size]) -> float:
        return mean(size.total for size in sizes)

    def table(self) -> Table:
        """A table of about eleven of the sizes."""
        step = max(1, (len(self.sizes) - 1) // 10)
        rows = [
            [size.cycles, size.total, *size.parts.values(), size.dead_rows, size.vacuums]
            for size in self.sizes[::step]
        ]
        last = self.sizes[-1]
        return Table(
            "Size of the three tables under churn",
            ("cycles", "MB", *(f"{part} MB" for part in _SIZES), "dead rows", "vacuums"),
            rows,
            "A cycle: pause, response, end, reply sent, purged; "
            f"{_BATCH} at a time, {STATE_BYTES} bytes of state, {last.cycles / last.seconds:,.0f} "
            f"cycles/s next to {STANDING_TASKS:,} paused tasks. Last quarter to second quarter: "
            f"{self.growth:.2f} (1 is a plateau).",
        )

    def figures(self) -> dict[str, JsonValue]:
        """The figures by name, for scripts."""
        return {
            "churn cycles": self.sizes[-1].cycles,
            "churn seconds": round(self.sizes[-1].seconds),
            "churn MB at the start": round(self.sizes[0].total, 1),
            "churn MB at most": round(max(size.total for size in self.sizes), 1),
            "churn MB at the end": round(self.sizes[-1].total, 1),
            "churn growth, last quarter to second": round(self.growth, 3),
            "churn vacuums": self.sizes[-1].vacuums,
            "churn free percent at the end": None if self.free is None else round(self.free, 1),
        }

    def plot(self) -> Lines:
        """A plot of the sizes by cycle."""
        parts: dict[str, Callable[[Size], float]] = {part: _part_size(part) for part in _SIZES}
        series = {
            name: [(float(size.cycles), value_of(size)) for size in self.sizes]
            for name, value_of in {"all": lambda size: size.total, **parts}.items()
        }
        return Lines("Size of the three tables under churn", "cycles", "MB", series)


def _part_size(name: str) -> Callable[[Size], float]:
    return lambda size: size.parts[name]


async def churn(url: str, *, cycles: int) -> ChurnResult:
    """Create and end `cycles` tasks next to the standing ones, and record table sizes."""
    store = make_store(url)
    await store.open()
    connection = await asyncpg.connect(url)
    try:
        await copy_task(
            url, await write_waiting_task(store, make_pause()), STANDING_TASKS - 1, period=DAY
        )
        sizes, started_at, finished = (
            [await _measure_size(connection, 0, 0)],
            time.perf_counter(),
            0,
        )
        while finished < cycles:
            await _run_cycles(store)
            finished += _BATCH
            if finished >= len(sizes) * cycles / _SAMPLES:
                sizes.append(
                    await _measure_size(connection, finished, time.perf_counter() - started_at)
                )
        return ChurnResult(sizes, await _free_share(connection))
    finally:
        await connection.close()
        await store.close()


async def _run_cycles(store: SqlStore) -> None:
    """Run a batch of tasks from their first checkpoint until all their rows are deleted."""
    pauses = [make_pause() for _ in range(_BATCH)]
    paused = await store.pause(pauses)
    await store.confirm_sent(
        [
            sends_
            for each in paused
            if isinstance(each, PauseCommitted)
            for sends_ in each.dispatches
        ]
    )
    responses = [
        make_response((pause.run.task_id, pause.calls[0].sub_task_id)) for pause in pauses
    ]
    arrived = await store.claim(responses, HERE, _BATCH)
    runs = [each.task.run for each in arrived if isinstance(each, JoinCompleted)]
    ended = await store.end([an_end(run, reply=b"x" * 300) for run in runs])
    await store.confirm_sent([each.reply for each in ended if isinstance(each, EndCommitted)])
    assert await store.purge(AGENT, _BATCH) == _BATCH


async def _measure_size(connection: asyncpg.Connection, cycles: int, seconds: float) -> Size:
    columns = ", ".join(f'sum({size}) AS "{part}"' for part, size in _SIZES.items())
    names = [table.name for table in TABLES]
    size = await connection.fetchrow(
        f"SELECT {columns} FROM pg_class WHERE relname = ANY($1)", names
    )
    row = await connection.fetchrow(
        """SELECT sum(n_dead_tup)::bigint AS dead, sum(autovacuum_count)::bigint AS vacuums
             FROM pg_stat_user_tables WHERE relname = ANY($1)""",
        names,
    )
    parts = {part: float(size[part]) / _MB for part in _SIZES}
    return Size(cycles, seconds, parts, row["dead"], row["vacuums"])


async def _free_share(connection: asyncpg.Connection) -> float | None:
    available = "SELECT count(*) FROM pg_available_extensions WHERE name = 'pgstattuple'"
    if not await connection.fetchval(available):
        return None
    await connection.execute("CREATE EXTENSION pgstattuple")
    share = """SELECT 100.0 * sum(seen.free_space) / sum(seen.table_len)
                 FROM pg_class, LATERAL unnest(ARRAY[oid, reltoastrelid]) AS part,
                      pgstattuple(part) AS seen
                WHERE relname = $1"""
    return float(await connection.fetchval(share, TABLES[0].name))
