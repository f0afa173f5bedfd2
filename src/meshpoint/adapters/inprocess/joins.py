"""What happens to a task when its join is met."""

from __future__ import annotations

from meshpoint.adapters.inprocess.rows import CallRow, Tables, TaskRow
from meshpoint.model.checkpoint import (
    AllArrived,
    CallState,
    CancelNotice,
    Claim,
    MadeReady,
    Replica,
    StillWaiting,
    TaskState,
)
from meshpoint.model.ids import RunId
from meshpoint.model.outcomes import FailureKind


def continue_task(
    tables: Tables, row: TaskRow, last: CallRow, replica: Replica, *, run_id: RunId, slots: int
) -> AllArrived | MadeReady:
    """Close the calls that the join no longer needs, and acquire the task or make it ready.

    `replica` acquires it if a slot is free and it reads the state's format.
    """
    now = tables.clock.now()
    closed = row.pending_calls
    for call in closed:
        call.close(FailureKind.CANCELLED, "no longer needed: the join is met", now + tables.timings.dispatch_lease)
        row.completed += 1
    cancels = tuple(row.to_cancel_notice(call) for call in closed)
    if slots > 0 and row.readable_by(replica):
        return AllArrived(row.task_id, last.sub_task_id, tables.assign_owner(row, replica, run_id), cancels)
    row.state, row.due_at, row.run_id = TaskState.READY, now, run_id
    tables.put(row)
    return MadeReady(row.task_id, last.sub_task_id, cancels)


def repeated_result(
    row: TaskRow, call: CallRow, claim: Claim, replica: Replica
) -> StillWaiting | MadeReady | AllArrived:
    """The result of a claim that is repeated because its answer was lost.

    A task that the claim acquired is returned only to the same replica, and only while no other
    run has acquired it.
    """
    if row.run_id == claim.id and row.state is TaskState.READY:
        return MadeReady(row.task_id, call.sub_task_id, _cancel_notices(row))
    if row.run_id == claim.id and row.state is TaskState.RUNNING and row.owner == replica.id:
        return AllArrived(row.task_id, call.sub_task_id, row.to_resumable(), _cancel_notices(row))
    return StillWaiting(row.task_id, call.sub_task_id)


def _cancel_notices(row: TaskRow) -> tuple[CancelNotice, ...]:
    return tuple(row.to_cancel_notice(call) for call in row.current_calls if call.state is CallState.CANCELLING)
