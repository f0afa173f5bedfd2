"""Many paused tasks at once: one task written by the store itself, copied inside PostgreSQL.

A copy has every column of the original, so it always matches what the store writes. Like real ids,
the copies' ids begin with a time; these times, and the instants in the columns, are spread over
the past.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import asyncpg
from sqlalchemy import Table

from meshpoint.adapters.sql.tables import calls, joins, tasks
from meshpoint.model.transitions import Pause, PauseCommitted
from meshpoint.ports.task_store import CheckpointStore

TABLES = (tasks, calls, joins)

# The g-th of :count copies is this many seconds older than the original.
_AGE_EXPRESSION = "$3::double precision * ($2 - g) / $2"
_TIME_COLUMNS = {
    "wake_at",
    "keep_alive_at",
    "task_deadline",
    "checkpointed_at",
    "ended_at",
    "expires_at",
    "dispatched_at",
    "send_due_at",
    "timeout_deadline",
    "absolute_deadline",
    "join_deadline",
    "created_at",
}


async def write_waiting_task(store: CheckpointStore, pause: Pause) -> str:
    """Id of a waiting task whose requests are recorded as sent."""
    (result,) = await store.pause([pause])
    assert isinstance(result, PauseCommitted)
    await store.confirm_sent(result.dispatches)
    return pause.run.task_id


async def copy_task(url: str, task_id: str, count: int, *, period: timedelta) -> None:
    """Add `count` copies of the task, its calls and joins, spread over the last `period`.

    The deadlines of a copy move back by its age, so the original must have more than `period`
    left.
    """
    connection = await asyncpg.connect(url)
    try:
        # one `now()` for all, so that a task's id is the same in each table
        async with connection.transaction():
            for table in TABLES:
                await connection.execute(
                    _copy_statement(table), task_id, count, period.total_seconds()
                )
        await connection.execute("VACUUM ANALYZE")
    finally:
        await connection.close()


def _copy_statement(table: Table) -> str:
    names = [column.name for column in table.columns]
    values = ", ".join(_value_expression(name) for name in names)
    return f"""
        INSERT INTO {table.name} ({", ".join(names)})
        SELECT {values} FROM {table.name} AS original, generate_series(1, $2::bigint) AS g
         WHERE original.logical_task_id = $1 ORDER BY g"""


def _value_expression(column: str) -> str:
    if column in _ID_EXPRESSIONS:
        return _ID_EXPRESSIONS[column]
    return (
        f"original.{column} - {_AGE_EXPRESSION}"
        if column in _TIME_COLUMNS
        else f"original.{column}"
    )


def _id_expression(seed: str) -> str:
    """A UUIDv7 of the copy's age; the random part is a digest of `seed`."""
    timestamp = f"to_hex((1000 * (EXTRACT(EPOCH FROM now()) - {_AGE_EXPRESSION}))::bigint)"
    time, random_part = f"lpad({timestamp}, 12, '0')", f"md5({seed})"
    parts = (
        f"substr({time}, 1, 8)",
        f"substr({time}, 9, 4)",
        f"'7' || substr({random_part}, 1, 3)",
        f"'a' || substr({random_part}, 4, 3)",
        f"substr({random_part}, 7, 12)",
    )
    return " || '-' || ".join(parts)


_ID_EXPRESSIONS: Mapping[str, str] = {
    "logical_task_id": _id_expression("original.logical_task_id || g"),
    "sub_task_id": _id_expression("original.sub_task_id || g"),
    "run_id": _id_expression("original.run_id || g"),
}
