"""Expire: close calls and joins of waiting tasks that are past their deadline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row

from meshpoint.adapters.sql import statements as sql
from meshpoint.adapters.sql.claiming import close_pending
from meshpoint.adapters.sql.database import Transaction
from meshpoint.adapters.sql.due_rows import DueQuery
from meshpoint.adapters.sql.locking import StoreOptions, lock_child_rows
from meshpoint.adapters.sql.owning import OwnedTasks, can_run, owner_columns, read_owned, ready_columns
from meshpoint.adapters.sql.rows import Columns, cancel_notice_from_row, group_by_task, outcome_column
from meshpoint.model.calls import Join
from meshpoint.model.checkpoint import AllArrived, CancelNotice, Expired, MadeReady, Replica, Resumable, StillWaiting
from meshpoint.model.ids import TaskId, new_id
from meshpoint.model.outcomes import Failed, FailureKind

_TIMED_OUT = Failed(FailureKind.TIMEOUT, "the peer did not answer in time")


@dataclass(frozen=True, slots=True)
class _WaitingTask:
    """A locked waiting task, its join, and its pending calls, at the time of the lock."""

    row: Row[Any]
    join: Row[Any]
    pending: Sequence[Row[Any]]

    @property
    def timed_out(self) -> list[Row[Any]]:
        """The pending calls past their deadline; all pending calls if the join is past its own."""
        if self.join.join_deadline is not None and self.join.join_deadline <= self.row.now:
            return list(self.pending)
        return [call for call in self.pending if call.timeout_deadline <= self.row.now]

    @property
    def completed(self) -> int:
        completed: int = self.join.completed_count
        return completed + len(self.timed_out)

    @property
    def met(self) -> bool:
        join = Join(self.join.needed)
        return join.met(total=self.join.total_expected, completed=self.completed, succeeded=self.join.succeeded_count)

    @property
    def next_deadline(self) -> float:
        """The earliest deadline that remains, which is when to check the task again."""
        closed = {call.sub_task_id for call in self.timed_out}
        deadlines = [call.timeout_deadline for call in self.pending if call.sub_task_id not in closed]
        join_deadline = [] if self.join.join_deadline is None else [self.join.join_deadline]
        return float(min(deadlines + join_deadline))


@dataclass(frozen=True, slots=True)
class ExpireResults:
    """Expired tasks by what happened to them. Acquired tasks are not decoded yet."""

    waiting: list[Expired]
    ready: list[Expired]
    acquired: list[tuple[TaskId, tuple[TaskId, ...], tuple[CancelNotice, ...]]]
    owned: OwnedTasks

    @classmethod
    def merge(cls, results: Sequence[ExpireResults]) -> ExpireResults:
        """Merge the results of several transactions."""
        return cls(
            [one for each in results for one in each.waiting],
            [one for each in results for one in each.ready],
            [one for each in results for one in each.acquired],
            OwnedTasks.merge([each.owned for each in results]),
        )

    def with_tasks(self, readable: Mapping[str, Resumable]) -> list[Expired]:
        """All expired tasks. An acquired task that is not in `readable` was released."""
        acquired = [
            Expired(task_id, ids, _arrival(task_id, ids[-1], readable.get(task_id)), cancels)
            for task_id, ids, cancels in self.acquired
        ]
        return [*self.waiting, *self.ready, *acquired]


def _arrival(task_id: TaskId, sub_task_id: TaskId, task: Resumable | None) -> AllArrived | MadeReady:
    return MadeReady(task_id, sub_task_id) if task is None else AllArrived(task_id, sub_task_id, task)


def pick_expired(replica: Replica, limit: int, options: StoreOptions) -> DueQuery:
    """The query for waiting tasks that may have passed a deadline."""
    return DueQuery(sql.PICK_EXPIRED, {"agent": options.names.qualified(replica.agent), "limit": limit})


async def expire(
    tx: Transaction, replica: Replica, limit: int, slots: int, options: StoreOptions, only: str | None = None
) -> ExpireResults:
    """Close calls past their deadline, count them, and acquire the tasks whose joins are met.

    Acquires at most `slots` tasks; further ones become ready.

    Raises:
        ValueError: A row is damaged: a task waits although its join is met.
    """
    rows = {row.logical_task_id: row for row in await pick_expired(replica, limit, options).fetch(tx, only)}
    for task_id in await lock_child_rows(tx, rows):
        del rows[task_id]
    if not rows:
        return ExpireResults([], [], [], OwnedTasks())
    ids = sorted(rows)
    pending = group_by_task(await tx.fetch(sql.READ_PENDING, ids=ids))
    joins = {row.logical_task_id: row for row in await tx.fetch(sql.READ_JOINS, ids=ids)}
    tasks = [_WaitingTask(rows[task_id], joins[task_id], pending.get(task_id, [])) for task_id in ids]
    for task in tasks:
        if task.met and not task.timed_out:
            raise ValueError(f"task {task.row.logical_task_id} waits although its join is met")
    cancels = await _close_timed_out(tx, tasks, options)
    return await _continue_tasks(tx, [task for task in tasks if task.timed_out], cancels, replica, slots)


async def _close_timed_out(
    tx: Transaction, tasks: Sequence[_WaitingTask], options: StoreOptions
) -> dict[str, tuple[CancelNotice, ...]]:
    """Write timeouts, counters, and when to check the tasks again.

    Returns the cancels to send, by task.
    """
    outcome = await outcome_column(_TIMED_OUT)
    await tx.execute_many(
        sql.UPDATE_TIMED_OUT, [row for task in tasks for row in _timeout_columns(task, outcome, options)]
    )
    await tx.execute_many(sql.UPDATE_JOIN, [_counters(task) for task in tasks if task.timed_out])
    await tx.execute_many(
        sql.UPDATE_WAKE_AT,
        [{"task_id": task.row.logical_task_id, "wake_at": task.next_deadline} for task in tasks if not task.met],
    )
    met = [task for task in tasks if task.met and task.completed < task.join.total_expected]
    no_longer_needed = await close_pending(
        tx, [task.row.logical_task_id for task in met], max(task.row.now for task in tasks), options
    )
    return {
        task.row.logical_task_id: (
            *(cancel_notice_from_row(call, options.names) for call in task.timed_out),
            *no_longer_needed.get(task.row.logical_task_id, ()),
        )
        for task in tasks
    }


def _timeout_columns(task: _WaitingTask, outcome: bytes | None, options: StoreOptions) -> list[Columns]:
    due_at = task.row.now + options.backoff(1)
    return [
        {
            "task_id": task.row.logical_task_id,
            "sub_task_id": call.sub_task_id,
            "outcome": outcome,
            "send_due_at": due_at,
        }
        for call in task.timed_out
    ]


def _counters(task: _WaitingTask) -> Columns:
    return {
        "task_id": task.row.logical_task_id,
        "generation": task.row.generation,
        "completed": task.join.total_expected if task.met else task.completed,
        "succeeded": task.join.succeeded_count,
        "met": task.met,
    }


async def _continue_tasks(
    tx: Transaction,
    tasks: Sequence[_WaitingTask],
    cancels: dict[str, tuple[CancelNotice, ...]],
    replica: Replica,
    slots: int,
) -> ExpireResults:
    expiries = ExpireResults([], [], [], OwnedTasks())
    owners: list[Columns] = []
    for task in tasks:
        task_id = TaskId(task.row.logical_task_id)
        ids = tuple(TaskId(call.sub_task_id) for call in task.timed_out)
        run_id, now = new_id(), task.row.now
        if not task.met:
            expiries.waiting.append(Expired(task_id, ids, StillWaiting(task_id, ids[-1]), cancels[task_id]))
        elif can_run(replica, task.row, slots):
            slots -= 1
            owners.append(owner_columns(replica, task.row, run_id, attempt=1, now=now))
            expiries.acquired.append((task_id, ids, cancels[task_id]))
        else:
            owners.append(ready_columns(task.row, run_id, now))
            expiries.ready.append(Expired(task_id, ids, MadeReady(task_id, ids[-1]), cancels[task_id]))
    await tx.execute_many(sql.UPDATE_OWNER, owners)
    owned = await read_owned(tx, [task_id for task_id, _, _ in expiries.acquired])
    return ExpireResults(expiries.waiting, expiries.ready, expiries.acquired, owned)
