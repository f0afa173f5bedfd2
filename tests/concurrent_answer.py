"""Another replica's write to a task in PostgreSQL, timed to coincide with a test's own write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg

from meshpoint.model.outcomes import Ok, encode_outcome
from meshpoint.model.transitions import Pause
from meshpoint.testing.conformance.build import sub

_LOCK_WAITERS_QUERY = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
    "AND wait_event_type = 'Lock'"
)
"""Number of sessions in this database that wait for a lock."""


async def wait_for_lock_waiter(observer: asyncpg.Connection) -> None:
    """Wait until a session of the observer's database waits for a lock.

    The observer may be inside a transaction, which would otherwise see the activity of its first
    look for ever.
    """
    while not await observer.fetchval(_LOCK_WAITERS_QUERY):
        await asyncio.sleep(0.01)
        await observer.execute("SELECT pg_stat_clear_snapshot()")


@asynccontextmanager
async def concurrent_answer(url: str, pause: Pause, call_id: str) -> AsyncIterator[None]:
    """Record an outcome under the task's lock; commit once the body's write waits for the lock."""
    writer, observer = await asyncpg.connect(url), await asyncpg.connect(url)
    try:
        async with writer.transaction():
            task_id = pause.run.task_id
            await writer.execute(
                "SELECT 1 FROM agent_paused_tasks WHERE logical_task_id = $1 FOR NO KEY UPDATE",
                task_id,
            )
            await writer.execute(
                "UPDATE agent_peer_sub_tasks SET status = 'done', outcome = $2, send_due_at "
                "= NULL WHERE sub_task_id = $1",
                sub(pause, call_id),
                b"\x00" + encode_outcome(Ok(call_id)),
            )
            await writer.execute(
                "UPDATE agent_parallel_invocations SET completed_count = completed_count + 1, "
                "succeeded_count = succeeded_count + 1 WHERE logical_task_id = $1",
                task_id,
            )
            yield
            await wait_for_lock_waiter(observer)
    finally:
        await writer.close()
        await observer.close()
