"""Take, take over, renew, keep alive and purge: what time alone makes due."""

from __future__ import annotations

from collections.abc import Sequence

from meshpoint.adapters.sql import operation_statements
from meshpoint.adapters.sql import statements as sql
from meshpoint.adapters.sql.checkpointing import KEEP_ALIVES_PER_TIMEOUT
from meshpoint.adapters.sql.database import Transaction
from meshpoint.adapters.sql.locking import Terms, lock_tasks
from meshpoint.adapters.sql.owning import OwnedTasks, given_to, read_owned
from meshpoint.adapters.sql.rows import requester_of
from meshpoint.model.checkpoint import KeepAlive, Replica, Run, TaskState
from meshpoint.model.ids import TaskId, new_id


async def take(tx: Transaction, replica: Replica, limit: int, status: TaskState, terms: Terms) -> OwnedTasks:
    """Own ready tasks, or running ones whose lease is over. Only the latter raise `attempt`."""
    rows = await tx.rows(
        sql.PICK_RUNNABLE,
        agent=terms.names.qualified(replica.agent),
        status=status.value,
        formats=sorted(replica.formats),
        limit=limit,
    )
    await tx.each(
        sql.UPDATE_OWNER,
        [
            given_to(
                replica,
                row,
                new_id(),
                attempt=row.attempt + 1 if status is TaskState.RUNNING else max(row.attempt, 1),
                now=row.now,
            )
            for row in rows
        ],
    )
    owned = await read_owned(tx, [row.logical_task_id for row in rows])
    in_turn = {row.logical_task_id: owned.tasks[row.logical_task_id] for row in rows}
    return OwnedTasks(in_turn, owned.calls)


async def renew(tx: Transaction, runs: Sequence[Run], replica: Replica) -> list[Run]:
    """Extend leases; the runs that have lost theirs."""
    locked = await lock_tasks(tx, [run.task_id for run in runs])
    held = {(row.logical_task_id, row.fence) for row in locked.rows.values() if row.status == TaskState.RUNNING}
    mine = sorted({run.task_id for run in runs if (run.task_id, run.fence) in held})
    if mine:
        await tx.run(sql.UPDATE_LEASES, ids=mine, wake_at=locked.now + replica.lease.total_seconds())
    return [run for run in runs if (run.task_id, run.fence) not in held]


async def keep_alives(tx: Transaction, replica: Replica, limit: int, terms: Terms) -> list[KeepAlive]:
    """Paused tasks whose requester is to hear of them now."""
    rows = await tx.rows(sql.PICK_KEEP_ALIVES, agent=terms.names.qualified(replica.agent), limit=limit)
    await tx.each(
        sql.UPDATE_KEEP_ALIVE,
        [
            {
                "task_id": row.logical_task_id,
                "keep_alive_at": row.now + row.idle_timeout / KEEP_ALIVES_PER_TIMEOUT,
            }
            for row in rows
        ],
    )
    return [KeepAlive(replica.agent, TaskId(row.logical_task_id), requester_of(row)) for row in rows]


async def purge(tx: Transaction, agent: str, limit: int) -> int:
    """Delete tombstones whose time is over; how many."""
    rows = await tx.rows(sql.PICK_PURGEABLE, agent=agent, limit=limit)
    if rows:
        ids = sorted(row.logical_task_id for row in rows)
        for statement in (sql.DELETE_CALLS, sql.DELETE_JOINS, sql.DELETE_TASKS):
            await tx.run(statement, ids=ids)
        operations = sorted(row.logical_task_id for row in rows if row.checkpoint_seq is not None)
        if operations:
            await tx.run(operation_statements.DELETE_CHECKPOINTS, ids=operations)
            await tx.run(operation_statements.DELETE_OPERATIONS, ids=operations)
    return len(rows)
