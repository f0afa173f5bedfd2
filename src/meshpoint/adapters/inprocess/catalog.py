"""The task catalog, kept in the in-process rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from meshpoint.adapters.inprocess.rows import CallRow, Tables, TaskRow
from meshpoint.model.call_attempts import superseded
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.outcomes import Failed, decode_outcome
from meshpoint.model.tasks import (
    EVERY_TASK,
    NO_DEADLINE,
    CallState,
    CallSummary,
    ListPosition,
    StoredCall,
    StoredTask,
    TaskFilter,
    TaskState,
    TaskSummary,
)
from meshpoint.model.timeline import TimelineEntry
from meshpoint.model.waits import display_name, is_wait


class InProcessCatalog:
    """In-process implementation of `meshpoint.ports.task_store.Catalog`."""

    _tables: Tables

    async def tasks(
        self,
        *,
        agent: AgentName | None = None,
        states: Sequence[TaskState] = (),
        where: TaskFilter = EVERY_TASK,
        limit: int = 100,
        after: ListPosition | None = None,
    ) -> list[TaskSummary]:
        """Tasks, newest first."""
        rows = [
            row
            for row in self._tables.tasks.values()
            if agent in {None, row.agent} and (not states or row.state in states)
        ]
        if after is not None:
            rows = [row for row in rows if _position(row) < after]
        rows.sort(key=_position, reverse=True)
        found = (summary for row in rows if _matches(summary := _summary(row), where))
        return [summary for summary, _ in zip(found, range(limit), strict=False)]

    async def task(self, task_id: TaskId) -> tuple[TaskSummary, list[CallSummary]] | None:
        """One task and its calls, in call order, or `None`."""
        row = self._tables.tasks.get(task_id)
        if row is None:
            return None
        calls = [_call_summary(call, row) for call in sorted(row.calls.values(), key=_call_order)]
        return _summary(row), calls

    async def timeline(
        self, task_id: TaskId, *, after: int = 0, limit: int = 1000
    ) -> list[TimelineEntry]:
        """Nothing: the tasks of a process have no timelines."""
        return []

    async def stored_request(self, task_id: TaskId) -> bytes | None:
        """The encoded request of a task, or `None`."""
        row = self._tables.tasks.get(task_id)
        return None if row is None else row.request

    async def stored_task(self, task_id: TaskId) -> StoredTask | None:
        """A task that has not ended, with its calls and its log."""
        row = self._tables.tasks.get(task_id)
        if row is None or row.state.is_final:
            return None
        calls = [
            StoredCall(
                call.call_id,
                call.peer,
                call.body,
                None if call.outcome is None else decode_outcome(call.outcome),
            )
            for call in row.current_calls
        ]
        resumable = replace(row.to_resumable(), outcomes=())
        return StoredTask(resumable, row.state, tuple(calls))


def _position(row: TaskRow) -> ListPosition:
    return ListPosition(row.checkpointed_at.timestamp(), row.task_id)


def _matches(task: TaskSummary, where: TaskFilter) -> bool:
    return (
        where.subject in {None, task.subject}
        and where.requester in {None, task.requester}
        and where.user in {None, task.user_id}
        and (where.since is None or task.checkpointed_at >= where.since)
        and (where.until is None or task.checkpointed_at < where.until)
        and where.suspended in {None, task.suspended_at is not None}
        and (where.waiting_for is None or where.waiting_for in task.waiting_for)
    )


def _summary(row: TaskRow) -> TaskSummary:
    context = json.loads(row.context)
    origin = context.get("a2a_context", {})
    waiting = row.state is TaskState.WAITING
    open_calls = (call for call in row.current_calls if call.state is CallState.PENDING)
    return TaskSummary(
        row.task_id,
        row.agent,
        row.state,
        row.generation,
        row.fence,
        row.attempt,
        row.owner,
        row.completed,
        row.expected,
        row.checkpointed_at,
        row.wake_at,
        row.dead_reason,
        row.rescues,
        subject=None if row.operation is None else row.operation.operation.subject,
        requester=row.requester.app_id,
        parent_task_id=row.requester.parent_task_id,
        user_id=origin.get("user_id"),
        session_id=origin.get("session_id"),
        deadline=row.requester.deadline,
        ended_at=row.ended_at,
        retry_count=row.retry_count,
        waiting_for=tuple(sorted({display_name(call.peer) for call in open_calls}))
        if waiting
        else (),
        state_format=row.state_format or None,
        incompatible_since=row.parked_since,
        join_deadline=row.join_deadline,
        usage=row.usage,
        parked_reason=row.parked_reason,
        tried_versions=row.tried_versions,
        suspended_at=row.suspended_at,
        position=_position(row),
        needed=None if row.state.is_final else row.join.needed,
    )


def _call_summary(call: CallRow, row: TaskRow) -> CallSummary:
    outcome = decode_outcome(call.outcome) if call.outcome is not None else None
    return CallSummary(
        call.sub_task_id,
        call.call_id,
        call.peer,
        superseded(call.generation) if call.generation < -1 else call.generation,
        call.state,
        None if outcome is None else outcome.kind.value if isinstance(outcome, Failed) else "ok",
        call.dispatched_at,
        call.due_at,
        message=outcome.message if isinstance(outcome, Failed) else None,
        since=call.created_at,
        sends=call.sends,
        absolute_deadline=call.deadline if call.deadline < NO_DEADLINE else None,
        attempt=1 if call.attempt is None else call.attempt.number,
        max_attempts=None if call.attempt is None else call.attempt.policy.max_attempts,
        is_superseded=call.generation < -1,
        due_at=call.send_at
        if call.state is CallState.PENDING and not (call.sends or is_wait(call.peer))
        else None,
    )


def _call_order(call: CallRow) -> tuple[int, int, int]:
    generation = superseded(call.generation) if call.generation < -1 else call.generation
    return generation, call.seq, 1 if call.attempt is None else call.attempt.number
