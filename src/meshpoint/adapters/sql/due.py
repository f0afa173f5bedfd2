"""Take, take over, renew, keep alive and purge: what time alone makes due."""

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
from meshpoint.adapters.sql.due_rows import Pick
from meshpoint.adapters.sql.locking import Terms, held_below
from meshpoint.adapters.sql.owning import OwnedTasks, given_to, made_ready, read_owned
from meshpoint.adapters.sql.rows import Columns, requester_of
from meshpoint.model.checkpoint import SUSPECT_FROM, Due, KeepAlive, Replica, Run, TaskState
from meshpoint.model.ids import TaskId, new_id


async def due(tx: Transaction, replica: Replica, limit: int, terms: Terms) -> Due:
    """Count the work of each kind that is due."""
    (row,) = await tx.rows(
        sql.COUNT_DUE, agent=terms.names.qualified(replica.agent), formats=sorted(replica.formats), limit=limit
    )
    return Due(row.ready, row.lapsed, row.expired, row.keep_alives, min(row.unsent, limit))


def ready(replica: Replica, limit: int, suspects: int, terms: Terms) -> Pick:
    """Ready tasks that `replica` can resume."""
    return _resumable(sql.PICK_READY, replica, limit, terms, suspects=suspects, suspect_from=SUSPECT_FROM)


def lost(replica: Replica, limit: int, terms: Terms) -> Pick:
    """Running tasks with an expired lease that `replica` can resume."""
    return _resumable(sql.PICK_LOST, replica, limit, terms)


def _resumable(template: str, replica: Replica, limit: int, terms: Terms, **more: int) -> Pick:
    agent = terms.names.qualified(replica.agent)
    return Pick(template, {"agent": agent, "formats": sorted(replica.formats), "limit": limit, **more})


async def take(
    tx: Transaction, replica: Replica, limit: int, suspects: int, terms: Terms, only: str | None = None
) -> OwnedTasks:
    """Acquire ready tasks, including at most `suspects` suspects."""
    rows = await ready(replica, limit, suspects, terms).rows(tx, only)
    mine, _ = _parted(rows, suspects, lambda row: int(row.rescues))
    await tx.each(sql.UPDATE_OWNER, [_taken(replica, row) for row in mine])
    return await _in_turn(tx, mine)


async def take_over(
    tx: Transaction, replica: Replica, limit: int, suspects: int, terms: Terms, only: str | None = None
) -> OwnedTasks:
    """Acquire running tasks whose lease has expired. Suspects beyond `suspects` become ready instead."""
    rows = await lost(replica, limit, terms).rows(tx, only)
    mine, others = _parted(rows, suspects, lambda row: row.rescues + 1)
    # Without isolated processes, each lost owner counts as an attempt.
    attempts = {row.logical_task_id: max(row.attempt, 1) + (not replica.isolates) for row in rows}
    taken = [_taken(replica, row) for row in mine]
    left = [made_ready(row, new_id(), row.now) for row in others]
    rescued = [{**each, "attempt": attempts[each["task_id"]]} for each in (*taken, *left)]
    await tx.each(sql.UPDATE_RESCUED, rescued)
    return await _in_turn(tx, mine)


def _parted(
    rows: Sequence[Row[Any]], suspects: int, rescues: Callable[[Row[Any]], int]
) -> tuple[list[Row[Any]], list[Row[Any]]]:
    """Split tasks into what a replica with room for `suspects` suspects can run, and the rest."""
    mine, others = list[Row[Any]](), list[Row[Any]]()
    for row in rows:
        suspect = rescues(row) >= SUSPECT_FROM
        (others if suspect and suspects <= 0 else mine).append(row)
        suspects -= suspect
    return mine, others


def _taken(replica: Replica, row: Row[Any]) -> Columns:
    return given_to(replica, row, new_id(), attempt=max(row.attempt, 1), now=row.now)


async def _in_turn(tx: Transaction, rows: Sequence[Row[Any]]) -> OwnedTasks:
    owned = await read_owned(tx, [row.logical_task_id for row in rows])
    in_turn = {row.logical_task_id: owned.tasks[row.logical_task_id] for row in rows}
    return OwnedTasks(in_turn, owned.calls)


@dataclass(frozen=True, slots=True)
class Renewals:
    """Leases that were not extended: lost to another run, or on a row that another session holds."""

    lost: list[Run]
    held: list[Run]


async def renew(tx: Transaction, runs: Sequence[Run], replica: Replica) -> Renewals:
    """Extend leases, skipping rows that another session holds so that they do not delay the others."""
    ids = sorted({run.task_id for run in runs})
    locked = await tx.rows(sql.LOCK_FREE_TASKS, ids=ids)
    mine, others = _of_these_runs(runs, locked)
    if mine:
        wake_at = max(row.now for row in locked) + replica.lease.total_seconds()
        await tx.run(sql.UPDATE_LEASES, ids=sorted({run.task_id for run in mine}), wake_at=wake_at)
    if not others:
        return Renewals([], [])
    free = {row.logical_task_id for row in locked}
    unseen = [run for run in others if run.task_id not in free]
    held = _of_these_runs(unseen, await tx.rows(sql.READ_OWNERS, ids=ids))[0]
    return Renewals([run for run in others if run not in held], held)


async def renew_when_free(tx: Transaction, run: Run, replica: Replica, patience: timedelta) -> None:
    """Wait for a locked row, then extend its lease if the run still owns it."""
    await tx.run(sql.SET_LOCK_TIMEOUT, limit=f"{math.ceil(patience.total_seconds() * 1000)}ms")
    locked = await tx.rows(sql.LOCK_TASKS, ids=[run.task_id])
    if _of_these_runs([run], locked)[0]:
        await tx.run(sql.UPDATE_LEASES, ids=[run.task_id], wake_at=locked[0].now + replica.lease.total_seconds())


def _of_these_runs(runs: Sequence[Run], rows: Sequence[Row[Any]]) -> tuple[list[Run], list[Run]]:
    """Split runs into owners of `rows` and the rest."""
    owned = {(row.logical_task_id, row.fence) for row in rows if row.status == TaskState.RUNNING}
    mine = [run for run in runs if (run.task_id, run.fence) in owned]
    return mine, [run for run in runs if (run.task_id, run.fence) not in owned]


def quiet(replica: Replica, limit: int, terms: Terms) -> Pick:
    """Paused tasks that are due to send a keep-alive."""
    return Pick(sql.PICK_KEEP_ALIVES, {"agent": terms.names.qualified(replica.agent), "limit": limit})


async def keep_alives(
    tx: Transaction, replica: Replica, limit: int, terms: Terms, only: str | None = None
) -> list[KeepAlive]:
    """Paused tasks whose requester is to hear of them now."""
    rows = await quiet(replica, limit, terms).rows(tx, only)
    await tx.each(
        sql.UPDATE_KEEP_ALIVE,
        [
            {
                "task_id": row.logical_task_id,
                # At most one a second, so that a single requester cannot keep the sweeper busy.
                "keep_alive_at": row.now + max(row.idle_timeout / KEEP_ALIVES_PER_TIMEOUT, 1.0),
            }
            for row in rows
        ],
    )
    return [KeepAlive(replica.agent, TaskId(row.logical_task_id), requester_of(row)) for row in rows]


def over(agent: str, limit: int) -> Pick:
    """Tombstones whose time is over."""
    return Pick(sql.PICK_PURGEABLE, {"agent": agent, "limit": limit})


async def purge(tx: Transaction, agent: str, limit: int, only: str | None = None) -> int:
    """Delete tombstones whose time is over; how many."""
    rows = await over(agent, limit).rows(tx, only)
    held = await held_below(tx, [row.logical_task_id for row in rows])
    rows = [row for row in rows if row.logical_task_id not in held]
    if rows:
        ids = sorted(row.logical_task_id for row in rows)
        for statement in (sql.DELETE_CALLS, sql.DELETE_JOINS, sql.DELETE_TASKS):
            await tx.run(statement, ids=ids)
        operations = sorted(row.logical_task_id for row in rows if row.checkpoint_seq is not None)
        if operations:
            await tx.run(operation_statements.DELETE_CHECKPOINTS, ids=operations)
            await tx.run(operation_statements.DELETE_OPERATIONS, ids=operations)
    return len(rows)
