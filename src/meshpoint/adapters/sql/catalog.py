"""Summaries of tasks and calls, for people and scripts."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row

from meshpoint.adapters.sql import statements as sql
from meshpoint.adapters.sql.database import Transaction
from meshpoint.adapters.sql.rows import AgentNames, instant, unpack_outcome
from meshpoint.model.checkpoint import CallState, CallSummary, TaskState, TaskSummary
from meshpoint.model.ids import AgentName, ReplicaId, TaskId
from meshpoint.model.outcomes import Ok


async def list_tasks(
    tx: Transaction, names: AgentNames, agent: AgentName | None, states: list[str], limit: int
) -> list[TaskSummary]:
    """List tasks, newest first. An empty list of states means all."""
    statuses = states or [state.value for state in TaskState]
    if agent is None:
        rows = await tx.fetch(sql.LIST_TASKS, prefix=names.prefix, statuses=statuses, limit=limit)
    else:
        rows = await tx.fetch(sql.LIST_AGENT_TASKS, agent=names.qualified(agent), statuses=statuses, limit=limit)
    return [_task(row, names) for row in rows]


async def show_task(
    tx: Transaction, names: AgentNames, task_id: TaskId
) -> tuple[TaskSummary, list[CallSummary]] | None:
    """One task of this namespace and its calls in call order, or `None` if it does not exist."""
    rows = await tx.fetch(sql.SHOW_TASK, task_id=task_id)
    if not rows or not rows[0].agent_name.startswith(names.prefix):
        return None
    calls = await tx.fetch(sql.SHOW_CALLS, task_id=task_id)
    return _task(rows[0], names), [await _call(row) for row in calls]


def _task(row: Row[Any], names: AgentNames) -> TaskSummary:
    return TaskSummary(
        task_id=TaskId(row.logical_task_id),
        agent=names.plain(row.agent_name),
        state=TaskState(row.status),
        generation=row.generation,
        fence=row.fence,
        attempt=row.attempt,
        owner=None if row.owner is None else ReplicaId(row.owner),
        completed=row.completed_count or 0,
        expected=row.total_expected or 0,
        checkpointed_at=instant(row.checkpointed_at),
        wake_at=instant(row.wake_at),
        dead_reason=row.dead_reason,
        rescues=row.rescues,
    )


async def _call(row: Row[Any]) -> CallSummary:
    return CallSummary(
        sub_task_id=TaskId(row.sub_task_id),
        call_id=row.call_id,
        peer=AgentName(row.peer_agent),
        generation=row.invocation_id,
        state=CallState(row.status),
        outcome=None if row.outcome is None else await _outcome_label(row),
        dispatched_at=None if row.dispatched_at is None else instant(row.dispatched_at),
        deadline=instant(row.timeout_deadline),
    )


async def _outcome_label(row: Row[Any]) -> str:
    outcome = await unpack_outcome(row.outcome)
    return "ok" if isinstance(outcome, Ok) else outcome.kind.value
