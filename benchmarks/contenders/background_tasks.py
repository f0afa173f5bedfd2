"""Permanently waiting tasks, which make query plans and indexes realistic."""

from __future__ import annotations

import asyncpg

STANDING_TASKS = 10_000
"""Number of tasks, with three calls each."""

_MESHPOINT = (
    """INSERT INTO agent_paused_tasks (
         logical_task_id, agent_name, status, generation, fence, run_id, attempt,
         wake_at, state, checkpointed_at)
       SELECT '00-' || i, 'bench/other', 'waiting', 1, 1, 'standing', 0, 4e9 + i, '\\x00', 0
         FROM generate_series(1, $1::int) AS i""",
    """INSERT INTO agent_peer_sub_tasks (
         logical_task_id, sub_task_id, agent_name, invocation_id, seq, call_id, peer_agent,
         correlation_data, request, status, send_attempts, timeout_deadline, absolute_deadline,
         created_at)
       SELECT '00-' || i, '00-' || i || '-' || k, 'bench/other', 1, k, 'call-' || k,
              'flights', '{}', '\\x00', 'pending', 1, 4e9, 4e9, 0
         FROM generate_series(1, $1::int) AS i, generate_series(0, 2) AS k""",
    """INSERT INTO agent_parallel_invocations (
         logical_task_id, invocation_id, total_expected, completed_count, succeeded_count)
       SELECT '00-' || i, 1, 3, 0, 0 FROM generate_series(1, $1::int) AS i""",
)
_SEED = (
    """INSERT INTO agent_paused_tasks (logical_task_id, agent_name, a2a_context, checkpointed_at)
       SELECT '00-' || i, 'other', '{}', 0 FROM generate_series(1, $1::int) AS i""",
    """INSERT INTO agent_peer_sub_tasks (
         sub_task_id, logical_task_id, invocation_id, correlation_data, timeout_deadline,
         created_at)
       SELECT '00-' || i || '-' || k, '00-' || i, '00-' || i, '{}', 4e9, 0
         FROM generate_series(1, $1::int) AS i, generate_series(0, 2) AS k""",
    """INSERT INTO agent_parallel_invocations (
         logical_task_id, invocation_id, total_expected, completed_count, results)
       SELECT '00-' || i, '00-' || i, 3, 0, '[]' FROM generate_series(1, $1::int) AS i""",
)
_TABLES = ("agent_peer_sub_tasks", "agent_parallel_invocations", "agent_paused_tasks")


async def add_standing_tasks(url: str, *, seed: bool = False) -> None:
    """Fill Meshpoint's tables, or the seed design's."""
    connection = await asyncpg.connect(url)
    try:
        for statement in _SEED if seed else _MESHPOINT:
            await connection.execute(statement, STANDING_TASKS)
        await _vacuum(connection)
    finally:
        await connection.close()


async def delete_finished_tasks(url: str) -> None:
    """Delete the rows of the last round, including tombstones."""
    connection = await asyncpg.connect(url)
    try:
        for table in _TABLES:
            await connection.execute(f"DELETE FROM {table} WHERE logical_task_id NOT LIKE '00-%'")
        await _vacuum(connection)
    finally:
        await connection.close()


async def _vacuum(connection: asyncpg.Connection) -> None:
    for table in _TABLES:
        await connection.execute(f"VACUUM (ANALYZE) {table}")
