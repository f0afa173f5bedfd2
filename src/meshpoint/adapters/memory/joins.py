"""What happens when a join is met."""

from __future__ import annotations

from meshpoint.adapters.memory.rows import CallRow, Tables, TaskRow
from meshpoint.model.checkpoint import (
    AllArrived,
    CallState,
    CancelNotice,
    Claim,
    Duplicate,
    MadeReady,
    Replica,
    StillWaiting,
    TaskState,
)
from meshpoint.model.ids import RunId
from meshpoint.model.outcomes import FailureKind


def go_on(
    tables: Tables, row: TaskRow, last: CallRow, replica: Replica, *, run_id: RunId, slots: int
) -> AllArrived | MadeReady:
    """Close the calls the join no longer needs, and give the task to `replica` if it can run it now."""
    now = tables.clock.now()
    closed = row.pending
    for call in closed:
        call.close(FailureKind.CANCELLED, "no longer needed: the join is met", now + tables.timings.dispatch_lease)
    cancels = tuple(row.notice(call) for call in closed)
    if slots > 0 and row.readable_by(replica):
        return AllArrived(row.task_id, last.sub_task_id, tables.own(row, replica, run_id), cancels)
    row.state, row.due_at = TaskState.READY, now
    tables.put(row)
    return MadeReady(row.task_id, last.sub_task_id, cancels)


def answer_again(row: TaskRow, call: CallRow, claim: Claim) -> StillWaiting | MadeReady | AllArrived | Duplicate:
    """The result of a claim that is repeated because its answer was lost."""
    if row.met_by != claim.id:
        return StillWaiting(row.task_id, call.sub_task_id)
    cancels = _cancels(row)
    if row.state is TaskState.READY:
        return MadeReady(row.task_id, call.sub_task_id, cancels)
    if row.run_id == claim.id and row.state is TaskState.RUNNING:
        return AllArrived(row.task_id, call.sub_task_id, row.resumable(), cancels)
    return Duplicate(row.task_id, call.sub_task_id)  # another run has taken the task meanwhile


def _cancels(row: TaskRow) -> tuple[CancelNotice, ...]:
    return tuple(row.notice(call) for call in row.current if call.state is CallState.CANCELLING)
