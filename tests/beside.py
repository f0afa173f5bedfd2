"""Another replica's write to a task in PostgreSQL, timed to coincide with a test's own write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg

from meshpoint.model.checkpoint import Pause
from meshpoint.model.outcomes import Ok, encode_outcome
from meshpoint.testing.conformance.build import sub

WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
"""Number of sessions in this database that wait for a lock."""


@asynccontextmanager
async def answered_beside(url: str, pause: Pause, call_id: str) -> AsyncIterator[None]:
    """Record an outcome under the task's lock; commit once the body's write waits for the lock."""
    other, looking = await asyncpg.connect(url), await asyncpg.connect(url)
    try:
        async with other.transaction():
            task_id = pause.run.task_id
            await other.execute(
                "SELECT 1 FROM agent_paused_tasks WHERE logical_task_id = $1 FOR NO KEY UPDATE", task_id
            )
            await other.execute(
                "UPDATE agent_peer_sub_tasks SET status = 'done', outcome = $2, send_due_at = NULL "
                "WHERE sub_task_id = $1",
                sub(pause, call_id),
                b"\x00" + encode_outcome(Ok(call_id)),
            )
            await other.execute(
                "UPDATE agent_parallel_invocations SET completed_count = completed_count + 1, "
                "succeeded_count = succeeded_count + 1 WHERE logical_task_id = $1",
                task_id,
            )
            yield
            while not await looking.fetchval(WAITING):
                await asyncio.sleep(0.01)
    finally:
        await other.close()
        await looking.close()
