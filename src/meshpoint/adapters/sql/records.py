"""Operations and their checkpoints as rows, and back."""

from __future__ import annotations

import json
from typing import Any

from pydantic import JsonValue
from pydantic_core import from_json, to_json

from meshpoint.adapters.sql.rows import Columns, Names, instant
from meshpoint.model.checkpoint import L1Snapshot, TaskState
from meshpoint.model.ids import ReplicaId, TaskId
from meshpoint.model.operations import OperationStatus, OperationSummary
from meshpoint.model.subtasks import AgentCheckpoint, Child, Operation, SubtaskRecord, last_of_each

STATES: dict[OperationStatus, tuple[TaskState, ...]] = {
    OperationStatus.PENDING: (TaskState.READY, TaskState.PARKED),
    OperationStatus.RUNNING: (TaskState.RUNNING,),
    OperationStatus.WAITING: (TaskState.WAITING,),
    OperationStatus.COMPLETED: (TaskState.COMPLETED,),
    OperationStatus.FAILED: (TaskState.FAILED,),
    OperationStatus.CANCELLED: (TaskState.CANCELLED,),
}
"""The states in which a task stands for an operation of this status."""

_STATUS = {state: status for status, states in STATES.items() for state in states}


def plain(text: str | None) -> str | None:
    """`text` without the characters that no database keeps: they must not fail a checkpoint."""
    return None if text is None else text.replace("\0", "").encode(errors="replace").decode()


def _safe(value: JsonValue) -> JsonValue:
    match value:
        case str():
            return plain(value)
        case list():
            return [_safe(each) for each in value]
        case dict():
            return {plain(key) or "": _safe(each) for key, each in value.items()}
        case _:
            return value


def _text(value: object) -> str:
    return to_json(value, inf_nan_mode="null").decode()


def _read(column: Any) -> Any:
    return from_json(column) if isinstance(column, str) else column  # PostgreSQL's driver has read it


# ── operations ─────────────────────────────────────────────────────────────────────────────────────


def operation_columns(task_id: str, agent: str, operation: Operation, now: float) -> Columns:
    """The row of an operation of `agent`, a qualified name, that begins `now`."""
    return {
        "task_id": task_id,
        "agent": agent,
        "type": plain(operation.type),
        "subject": plain(operation.subject),
        "parameters": json.dumps(operation.parameters),
        "exclusive": operation.exclusive,
        "preserve": operation.preserve,
        "now": now,
    }


def children_text(children: tuple[Child, ...]) -> str:
    """`children` as they rest."""
    return json.dumps([child.model_dump(mode="json") for child in children])


def summary_of(row: Any, names: Names) -> OperationSummary:
    """An operation's row, joined with its task's and its last checkpoint's."""
    state, gone = TaskState(row.status), row.seq is None
    status = _STATUS[state]
    running = state is TaskState.RUNNING
    done = gone and status is OperationStatus.COMPLETED
    updated_at = (row.ended_at or row.created_at) if gone else row.checkpoint_time
    return OperationSummary(
        id=TaskId(row.operation_id),
        agent=names.plain(row.agent_name),
        type=row.type,
        status=status,
        phase=None if gone else row.current_subtask or next(iter(_read(row.pending_subtasks)), None),
        subject=row.subject,
        parameters=json.loads(row.parameters),
        children=last_of_each(Child.model_validate(child) for child in json.loads(row.children)),
        progress_pct=100.0 if done else row.progress_pct or 0.0,
        retry_count=row.retry_count,
        owner=ReplicaId(row.owner) if running and row.owner is not None else None,
        lease_until=instant(row.wake_at) if running else None,
        created_at=instant(row.created_at),
        updated_at=instant(updated_at),
        ended_at=None if row.ended_at is None else instant(row.ended_at),
        failure_reason=(row.dead_reason if gone else row.failure_reason) if state.ended else None,
        exclusive=bool(row.exclusive),
        preserve=bool(row.preserve),
        checkpoint=row.seq,
    )


# ── checkpoints ────────────────────────────────────────────────────────────────────────────────────


def checkpoint_columns(checkpoint: AgentCheckpoint) -> dict[str, Any]:
    """`checkpoint` as the values of its columns, but for those that name it and its time."""
    progress = checkpoint.progress
    results = {record.name: record.result for record in checkpoint.subtasks if record.result is not None}
    details = checkpoint.error_details
    return {
        "subject": plain(checkpoint.subject),
        "progress_pct": progress.percent,
        "current_subtask": checkpoint.current_subtask,
        "completed_subtasks": _text(progress.completed),
        "pending_subtasks": _text(progress.pending),
        "planned_subtasks": _text(checkpoint.planned),
        "working_memory": _text(_working_memory(checkpoint)),
        "interim_results": _text(results),
        "subtasks": _text([_record_column(record) for record in checkpoint.subtasks]),
        "agent_config": _text(_safe(checkpoint.agent_config)),
        "failure_reason": plain(checkpoint.failure_reason),
        "error_details": None if details is None else _text(_safe(details)),
        "retry_count": checkpoint.retry_count,
        "agent_version": plain(checkpoint.agent_version),
        "l1_snapshot_hash": checkpoint.l1_snapshot_hash,
        "l1_snapshot": checkpoint.l1_snapshot,
    }


def _working_memory(checkpoint: AgentCheckpoint) -> dict[str, Any]:
    kept: dict[str, Any] = {"saved_progress": checkpoint.saved_progress}
    if checkpoint.l1_in_sql is not None:
        kept["l1_in_sql"] = checkpoint.l1_in_sql
    if checkpoint.memory_writes:
        # As text: an answer may have a zero character.
        kept["memory_writes"] = _text([write.model_dump(mode="json") for write in checkpoint.memory_writes])
    return kept


def _record_column(record: SubtaskRecord) -> dict[str, Any]:
    # Pointers as text: a key of a deliverable may have a zero character.
    return record.model_dump(mode="json", exclude={"result"}) | {"secrets": _text(record.secrets)}


def checkpoint_of(row: Any, names: Names) -> AgentCheckpoint:
    """The checkpoint that a row of `agent_checkpoints`, or of the archive, holds."""
    results, kept = _read(row.interim_results), _read(row.working_memory)
    return AgentCheckpoint(
        operation_id=TaskId(row.analysis_id),
        agent=names.plain(row.agent_type),
        seq=row.seq,
        subject=row.subject,
        planned=_read(row.planned_subtasks),
        subtasks=tuple(_record_of(record, results) for record in _read(row.subtasks)),
        saved_progress=kept["saved_progress"],
        l1_in_sql=kept.get("l1_in_sql"),
        memory_writes=from_json(kept.get("memory_writes", "[]")),
        current_subtask=row.current_subtask,
        agent_config=_read(row.agent_config),
        agent_version=row.agent_version,
        retry_count=row.retry_count,
        failure_reason=row.failure_reason,
        error_details=_read(row.error_details),
        l1_snapshot_hash=row.l1_snapshot_hash,
        checkpoint_time=instant(row.checkpoint_time),
    )


def snapshot_of(row: Any) -> L1Snapshot:
    """The working memory that a row of `agent_checkpoints` holds."""
    return L1Snapshot(row.seq, row.l1_snapshot_hash, bytes(row.l1_snapshot))


def _record_of(record: dict[str, Any], results: dict[str, str]) -> SubtaskRecord:
    secrets = from_json(record["secrets"])
    return SubtaskRecord.model_validate(record | {"secrets": secrets, "result": results.get(record["name"])})
