"""Work that becomes due by time: acquire, rescue, renew, keep alive and purge."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import Row

from meshpoint.adapters.sql import operation_statements
from meshpoint.adapters.sql import statements as sql
from meshpoint.adapters.sql.checkpointing import KEEP_ALIVES_PER_TIMEOUT
from meshpoint.adapters.sql.database import Transaction
from meshpoint.adapters.sql.due_rows import DueQuery
from meshpoint.adapters.sql.locking import StoreOptions, lock_child_rows
from meshpoint.adapters.sql.owning import OwnedTasks, owner_columns, read_owned, ready_columns
from meshpoint.adapters.sql.rows import Columns, requester_from_row
from meshpoint.model.checkpoint import SUSPECT_FROM, Due, KeepAlive, Replica, Run, TaskState
from meshpoint.model.ids import TaskId, new_id


async def count_due(tx: Transaction, replica: Replica, limit: int, options: StoreOptions) -> Due:
    """Count the due work of each kind, up to `limit`, without locks."""
    (row,) = await tx.fetch(
        sql.COUNT_DUE, agent=options.names.qualified(replica.agent), formats=sorted(replica.formats), limit=limit
    )
    return Due(row.ready, row.lapsed, row.expired, row.keep_alives, min(row.unsent, limit))


def pick_ready(replica: Replica, limit: int, suspects: int, options: StoreOptions) -> DueQuery:
    """The query for ready tasks that `replica` can resume."""
    return _pick_resumable(sql.PICK_READY, replica, limit, options, suspects=suspects, suspect_from=SUSPECT_FROM)


def pick_lost(replica: Replica, limit: int, options: StoreOptions) -> DueQuery:
    """The query for running tasks with an expired lease that `replica` can resume."""
    return _pick_resumable(sql.PICK_LOST, replica, limit, options)


def _pick_resumable(template: str, replica: Replica, limit: int, options: StoreOptions, **more: int) -> DueQuery:
    agent = options.names.qualified(replica.agent)
    return DueQuery(template, {"agent": agent, "formats": sorted(replica.formats), "limit": limit, **more})


async def acquire(
    tx: Transaction, replica: Replica, limit: int, suspects: int, options: StoreOptions, only: str | None = None
) -> OwnedTasks:
    """Acquire ready tasks, most overdue first, including at most `suspects` suspects."""
    rows = await pick_ready(replica, limit, suspects, options).fetch(tx, only)
    mine, _ = _split_suspects(rows, suspects, lambda row: int(row.rescues))
    await tx.execute_many(sql.UPDATE_OWNER, [_acquired_columns(replica, row) for row in mine])
    return await _read_in_order(tx, mine)


async def rescue(
    tx: Transaction, replica: Replica, limit: int, suspects: int, options: StoreOptions, only: str | None = None
) -> OwnedTasks:
    """Acquire running tasks whose lease has expired.

    At most `suspects` of them are suspects; further ones become ready instead.
    """
    rows = await pick_lost(replica, limit, options).fetch(tx, only)
    mine, others = _split_suspects(rows, suspects, lambda row: row.rescues + 1)
    # A replica that does not isolate suspects cannot count deaths, so each lost owner counts as an
    # attempt.
    attempts = {row.logical_task_id: max(row.attempt, 1) + (not replica.isolates) for row in rows}
    acquired = [_acquired_columns(replica, row) for row in mine]
    left = [ready_columns(row, new_id(), row.now) for row in others]
    rescued = [{**each, "attempt": attempts[each["task_id"]]} for each in (*acquired, *left)]
    await tx.execute_many(sql.UPDATE_RESCUED, rescued)
    return await _read_in_order(tx, mine)


def _split_suspects(
    rows: Sequence[Row[Any]], suspects: int, rescues: Callable[[Row[Any]], int]
) -> tuple[list[Row[Any]], list[Row[Any]]]:
    """Split rows into tasks that fit a replica with room for `suspects` suspects, and the rest."""
    mine, others = list[Row[Any]](), list[Row[Any]]()
    for row in rows:
        suspect = rescues(row) >= SUSPECT_FROM
        (others if suspect and suspects <= 0 else mine).append(row)
        suspects -= suspect
    return mine, others


def _acquired_columns(replica: Replica, row: Row[Any]) -> Columns:
    return owner_columns(replica, row, new_id(), attempt=max(row.attempt, 1), now=row.now)


async def _read_in_order(tx: Transaction, rows: Sequence[Row[Any]]) -> OwnedTasks:
    owned = await read_owned(tx, [row.logical_task_id for row in rows])
    in_order = {row.logical_task_id: owned.tasks[row.logical_task_id] for row in rows}
    return OwnedTasks(in_order, owned.calls)


@dataclass(frozen=True, slots=True)
class Renewals:
    """Runs whose leases were not extended.

    Runs in `lost` no longer own their task. Another session holds the task's row of runs in
    `locked`.
    """

    lost: list[Run]
    locked: list[Run]


async def renew(tx: Transaction, runs: Sequence[Run], replica: Replica) -> Renewals:
    """Extend leases. Rows that another session holds are skipped, so that they delay no others."""
    ids = sorted({run.task_id for run in runs})
    locked = await tx.fetch(sql.LOCK_TASKS_SKIP_LOCKED, ids=ids)
    mine, others = _split_by_ownership(runs, locked)
    if mine:
        wake_at = max(row.now for row in locked) + replica.lease.total_seconds()
        await tx.execute(sql.UPDATE_LEASES, ids=sorted({run.task_id for run in mine}), wake_at=wake_at)
    if not others:
        return Renewals([], [])
    free = {row.logical_task_id for row in locked}
    unseen = [run for run in others if run.task_id not in free]
    locked_runs = _split_by_ownership(unseen, await tx.fetch(sql.READ_OWNERS, ids=ids))[0]
    return Renewals([run for run in others if run not in locked_runs], locked_runs)


async def renew_when_unlocked(tx: Transaction, run: Run, replica: Replica, lock_timeout: timedelta) -> None:
    """Wait for a locked row, then extend its lease if the run still owns it."""
    await tx.execute(sql.SET_LOCK_TIMEOUT, limit=f"{math.ceil(lock_timeout.total_seconds() * 1000)}ms")
    locked = await tx.fetch(sql.LOCK_TASKS, ids=[run.task_id])
    if _split_by_ownership([run], locked)[0]:
        await tx.execute(sql.UPDATE_LEASES, ids=[run.task_id], wake_at=locked[0].now + replica.lease.total_seconds())


def _split_by_ownership(runs: Sequence[Run], rows: Sequence[Row[Any]]) -> tuple[list[Run], list[Run]]:
    """Split runs into owners of a task in `rows`, and others."""
    owned = {(row.logical_task_id, row.fence) for row in rows if row.status == TaskState.RUNNING}
    mine = [run for run in runs if (run.task_id, run.fence) in owned]
    return mine, [run for run in runs if (run.task_id, run.fence) not in owned]


def pick_keep_alives(replica: Replica, limit: int, options: StoreOptions) -> DueQuery:
    """The query for paused tasks that are due to send a keep-alive."""
    return DueQuery(sql.PICK_KEEP_ALIVES, {"agent": options.names.qualified(replica.agent), "limit": limit})


async def keep_alives(
    tx: Transaction, replica: Replica, limit: int, options: StoreOptions, only: str | None = None
) -> list[KeepAlive]:
    """Return due keep-alives of paused tasks, and set when the next ones are due."""
    rows = await pick_keep_alives(replica, limit, options).fetch(tx, only)
    await tx.execute_many(
        sql.UPDATE_KEEP_ALIVE,
        [
            {
                "task_id": row.logical_task_id,
                # At most one per second, so that one requester cannot keep the sweeper busy.
                "keep_alive_at": row.now + max(row.idle_timeout / KEEP_ALIVES_PER_TIMEOUT, 1.0),
            }
            for row in rows
        ],
    )
    return [KeepAlive(replica.agent, TaskId(row.logical_task_id), requester_from_row(row)) for row in rows]


def pick_purgeable(agent: str, limit: int) -> DueQuery:
    """The query for expired tombstones with nothing left to send."""
    return DueQuery(sql.PICK_PURGEABLE, {"agent": agent, "limit": limit})


async def purge(tx: Transaction, agent: str, limit: int, only: str | None = None) -> int:
    """Delete expired tombstones with everything that belongs to them, and return their number.

    Tasks with a row that another session holds are left for a later call.
    """
    rows = await pick_purgeable(agent, limit).fetch(tx, only)
    locked_elsewhere = await lock_child_rows(tx, [row.logical_task_id for row in rows])
    rows = [row for row in rows if row.logical_task_id not in locked_elsewhere]
    if rows:
        ids = sorted(row.logical_task_id for row in rows)
        for statement in (sql.DELETE_CALLS, sql.DELETE_JOINS, sql.DELETE_TASKS):
            await tx.execute(statement, ids=ids)
        operations = sorted(row.logical_task_id for row in rows if row.checkpoint_seq is not None)
        if operations:
            await tx.execute(operation_statements.DELETE_CHECKPOINTS, ids=operations)
            await tx.execute(operation_statements.DELETE_OPERATIONS, ids=operations)
    return len(rows)
