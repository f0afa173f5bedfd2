"""Deadlines of waiting tasks' calls and joins: extend them, and close what is past them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import Row

from meshpoint.adapters.sql import statements as sql
from meshpoint.adapters.sql.claiming import close_pending
from meshpoint.adapters.sql.database import Transaction
from meshpoint.adapters.sql.locking import lock_child_rows
from meshpoint.adapters.sql.owning import OwnedTasks, assign_owners, read_owned
from meshpoint.adapters.sql.retrying import (
    AttemptFailure,
    CallKey,
    PlannedRetry,
    plan_retries,
    write_retries,
)
from meshpoint.adapters.sql.rows import (
    Columns,
    cancel_notice_from_row,
    group_by_task,
    outcome_column,
    wake_time,
)
from meshpoint.model.calls import Join
from meshpoint.model.ids import TaskId, new_id
from meshpoint.model.outcomes import (
    Failed,
    FailureKind,
    Ok,
    Outcome,
    peer_missing,
)
from meshpoint.model.tasks import MAX_SWEEP_DELAY, CallState, CancelNotice, Replica, Resumable
from meshpoint.model.transitions import ExpiryResult, JoinCompleted, StillWaiting, TaskReady
from meshpoint.model.waits import SLEEP_PEER, is_wait, overdue_outcome

_TIMED_OUT = Failed(FailureKind.TIMEOUT, "the peer did not answer in time")
_MIN_EXTENSION = 0.1  # of the idle timeout
_MAX_DELAY = MAX_SWEEP_DELAY.total_seconds()


def extensions(calls: Sequence[Row[Any] | None]) -> list[Columns]:
    """New idle deadlines, where they are at least a tenth of the idle timeout later.

    The task's `wake_at` keeps the old deadline, so the sweeper checks the task once in vain.
    """
    extended: dict[tuple[str, str], Columns] = {}
    for row in calls:
        if row is None or row.call_idle_timeout is None:
            continue
        deadline = min(row.now + row.call_idle_timeout, row.absolute_deadline)
        if deadline - row.timeout_deadline >= _MIN_EXTENSION * row.call_idle_timeout:
            task_id, sub_task_id = key = row.logical_task_id, row.sub_task_id
            extended[key] = {
                "task_id": task_id,
                "sub_task_id": sub_task_id,
                "timeout_deadline": deadline,
            }
    return list(extended.values())


@dataclass(frozen=True, slots=True)
class _WaitingTask:
    """A locked waiting task, its join, and its pending calls, at the time of the lock.

    `retries` maps the id of each attempt past its deadline to the attempt that follows it.
    """

    row: Row[Any]
    join: Row[Any]
    pending: Sequence[Row[Any]]
    retries: dict[str, PlannedRetry] = field(default_factory=dict)

    @property
    def timed_out(self) -> list[Row[Any]]:
        """The pending calls past their deadline; all pending calls if the join is past its own.

        This includes sleeps past their end.
        """
        if self.join.join_deadline is not None and self.join.join_deadline <= self.row.now:
            return list(self.pending)
        return [call for call in self.pending if call.timeout_deadline <= self.row.now]

    @property
    def closed(self) -> list[Row[Any]]:
        """The calls in `timed_out` that end. The others are retried."""
        return [call for call in self.timed_out if call.sub_task_id not in self.retries]

    @property
    def completed(self) -> int:
        completed: int = self.join.completed_count
        return completed + len(self.closed)

    @property
    def succeeded(self) -> int:
        succeeded: int = self.join.succeeded_count
        return succeeded + sum(map(self.has_slept, self.timed_out))

    def failed_attempts(self) -> dict[CallKey, AttemptFailure]:
        """The failures of attempts past their deadline, for calls that may be retried."""
        return {
            (call.logical_task_id, call.sub_task_id): AttemptFailure(
                self.failure(call), self.row.now
            )
            for call in self.timed_out
            if call.retry is not None
        }

    def failure(self, call: Row[Any]) -> Failed:
        """The outcome of a peer call past its deadline."""
        return peer_missing(call.peer_agent) if self.is_unroutable(call) else _TIMED_OUT

    def has_slept(self, call: Row[Any]) -> bool:
        """Whether the call is a sleep past its end, so that its result is due."""
        return bool(call.peer_agent == SLEEP_PEER and call.absolute_deadline <= self.row.now)

    @property
    def met(self) -> bool:
        join = Join(self.join.needed)
        return join.met(
            total=self.join.total_expected,
            completed=self.completed,
            succeeded=self.succeeded,
        )

    def is_unroutable(self, call: Row[Any]) -> bool:
        """Whether the call was never sent, because its peer has no queue."""
        is_due = self.join.send_due_at is not None or call.send_due_at is not None
        return call.dispatched_at is None and is_due and call.unroutable_since is not None

    @property
    def next_deadline(self) -> float:
        """The earliest deadline that remains, which is when to check the task again."""
        closed = {call.sub_task_id for call in self.timed_out}
        deadlines = [
            call.timeout_deadline for call in self.pending if call.sub_task_id not in closed
        ]
        deadlines += [retry.timeout_deadline() for retry in self.retries.values()]
        join_deadline = [] if self.join.join_deadline is None else [self.join.join_deadline]
        return float(min(deadlines + join_deadline))


async def expire(
    tx: Transaction, due: Sequence[Row[Any]], replica: Replica, slots: int
) -> tuple[list[ExpiryResult], OwnedTasks]:
    """Close calls past their deadline, count them, and acquire the tasks whose joins are met.

    A call that may be tried again stays open, and only its attempt is closed.

    Acquires at most `slots` of the `due` tasks; further ones become ready. Returns acquired tasks
    as ready, and their rows to be decoded.

    Raises:
        ValueError: A row is damaged: a task waits although its join is met.
    """
    locked_elsewhere = await lock_child_rows(tx, [row.logical_task_id for row in due])
    rows = {row.logical_task_id: row for row in due if row.logical_task_id not in locked_elsewhere}
    if not rows:
        return [], {}
    ids = sorted(rows)
    pending = await _read_pending(tx, rows)
    joins = {row.logical_task_id: row for row in await tx.fetch(sql.READ_JOINS, ids=ids)}
    tasks = [
        _WaitingTask(rows[task_id], joins[task_id], pending.get(task_id, [])) for task_id in ids
    ]
    for task in tasks:
        if task.met and not task.timed_out:
            raise ValueError(f"task {task.row.logical_task_id} waits although its join is met")
    failures = {key: failed for task in tasks for key, failed in task.failed_attempts().items()}
    retries = await plan_retries(tx, failures)
    by_task = {task.row.logical_task_id: task.retries for task in tasks}
    for (task_id, sub_task_id), retry in retries.items():
        by_task[task_id][sub_task_id] = retry
    cancels = await _close_timed_out(tx, tasks)
    tasks = [task for task in tasks if task.timed_out]
    met = [(task.row, new_id(), task.row.now) for task in tasks if task.met]
    owners = assign_owners(met, replica, slots)
    await tx.execute_many(sql.UPDATE_OWNER, owners)
    owned = [columns["task_id"] for columns in owners if columns["owner"] is not None]
    return [
        _expiry_result(task, cancels[task.row.logical_task_id]) for task in tasks
    ], await read_owned(tx, owned)


async def _read_pending(
    tx: Transaction, rows: Mapping[str, Row[Any]]
) -> dict[str, list[Row[Any]]]:
    """Read the pending calls of locked tasks.

    An idle deadline that is found late starts again: no replica received what the peer sent.
    """
    ids = sorted(rows)
    pending = await tx.fetch(sql.READ_PENDING, ids=ids)
    late = [
        {
            "task_id": call.logical_task_id,
            "sub_task_id": call.sub_task_id,
            "timeout_deadline": min(now + call.idle_timeout, call.absolute_deadline),
        }
        for call in pending
        if call.idle_timeout is not None
        and (now := rows[call.logical_task_id].now) - call.timeout_deadline > _MAX_DELAY
    ]
    if late:
        await tx.execute_many(sql.EXTEND_IDLE_DEADLINE, late)
        pending = await tx.fetch(sql.READ_PENDING, ids=ids)
    return group_by_task(pending)


def with_tasks(
    results: Sequence[ExpiryResult], readable: Mapping[str, Resumable]
) -> list[ExpiryResult]:
    """Add the decoded tasks that this replica owns to the results of their expiry."""
    return [
        replace(
            each,
            join_result=JoinCompleted(each.task_id, each.timed_out[-1], readable[each.task_id]),
        )
        if each.task_id in readable
        else each
        for each in results
    ]


async def _close_timed_out(
    tx: Transaction, tasks: Sequence[_WaitingTask]
) -> dict[str, tuple[CancelNotice, ...]]:
    """Write timeouts, counters, and when to check the tasks again.

    Returns the cancels to send, by task.
    """
    await _write_retries(tx, tasks)
    await tx.execute_many(
        sql.UPDATE_TIMED_OUT,
        [
            {
                "task_id": task.row.logical_task_id,
                "sub_task_id": call.sub_task_id,
                "outcome": await outcome_column(
                    task.failure(call), tx.options.codec, call, task.row.agent_name
                ),
                "send_due_at": task.row.now + tx.options.backoff(1),
            }
            for task in tasks
            for call in task.closed
            if not is_wait(call.peer_agent)
        ],
    )
    await tx.execute_many(
        sql.UPDATE_CALL_OUTCOME,
        [
            {
                "task_id": task.row.logical_task_id,
                "sub_task_id": call.sub_task_id,
                "outcome": await outcome_column(
                    _wait_outcome(task, call), tx.options.codec, call, task.row.agent_name
                ),
                "claim_id": None,
            }
            for task in tasks
            for call in task.closed
            if is_wait(call.peer_agent)
        ],
    )
    await tx.execute_many(
        sql.UPDATE_JOIN,
        [
            {
                "task_id": task.row.logical_task_id,
                "generation": task.row.generation,
                "completed": task.join.total_expected if task.met else task.completed,
                "succeeded": task.succeeded,
                "met": task.met,
            }
            for task in tasks
            if task.timed_out
        ],
    )
    await tx.execute_many(
        sql.UPDATE_WAKE_AT,
        [
            {
                "task_id": task.row.logical_task_id,
                "wake_at": wake_time(task.next_deadline, task.row.now),
            }
            for task in tasks
            if not task.met
        ],
    )
    met = [task for task in tasks if task.met and task.completed < task.join.total_expected]
    no_longer_needed = await close_pending(
        tx, [task.row.logical_task_id for task in met], max(task.row.now for task in tasks)
    )
    return {
        task.row.logical_task_id: (
            *(
                cancel_notice_from_row(call, tx.options.names)
                for call in task.timed_out
                if _is_sent(call)
            ),
            *no_longer_needed.get(task.row.logical_task_id, ()),
        )
        for task in tasks
    }


async def _write_retries(tx: Transaction, tasks: Sequence[_WaitingTask]) -> None:
    closed: dict[CallKey, Columns] = {}
    for task in tasks:
        for call in task.timed_out:
            if call.sub_task_id in task.retries:
                closed[(call.logical_task_id, call.sub_task_id)] = {
                    "status": CallState.CANCELLING.value,
                    "outcome": await outcome_column(
                        task.failure(call), tx.options.codec, call, task.row.agent_name
                    ),
                    "send_due_at": task.row.now + tx.options.backoff(1),
                }
    await write_retries(tx, [retry for task in tasks for retry in task.retries.values()], closed)


def _is_sent(call: Row[Any]) -> bool:
    """Whether a peer may have the request of this call, so that a cancel is due.

    If another replica takes the request after this was read, the sweeper sends the cancel.
    """
    return bool(call.send_attempts > 0)


def _wait_outcome(task: _WaitingTask, call: Row[Any]) -> Outcome:
    """The outcome of a wait past its deadline."""
    return Ok(None) if task.has_slept(call) else overdue_outcome(call.peer_agent)


def _expiry_result(task: _WaitingTask, cancels: tuple[CancelNotice, ...]) -> ExpiryResult:
    task_id = TaskId(task.row.logical_task_id)
    timed_out = tuple(TaskId(call.sub_task_id) for call in task.timed_out)
    kind = TaskReady if task.met else StillWaiting
    retried = tuple(retry.to_result() for retry in task.retries.values())
    return ExpiryResult(task_id, timed_out, kind(task_id, timed_out[-1]), cancels, retried)
