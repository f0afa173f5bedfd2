"""Conversion of operations and their checkpoints to rows and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from pydantic import JsonValue
from pydantic_core import from_json, to_json

from meshpoint.adapters.sql.codec import unpack
from meshpoint.adapters.sql.columns import RECORDS_MARK
from meshpoint.adapters.sql.rows import (
    AgentNames,
    Columns,
    context_from_row,
    instant,
    unpack_outcome,
)
from meshpoint.model.call_attempts import CallAttempt
from meshpoint.model.calls import Join
from meshpoint.model.ids import AgentName, ReplicaId, TaskId
from meshpoint.model.operations import KeptCall, LastPause, OperationStatus, OperationSummary
from meshpoint.model.outcomes import Failed, FailureKind
from meshpoint.model.subtasks import (
    MAX_OPEN_PROGRESS,
    USES,
    AgentCheckpoint,
    Child,
    Operation,
    SubtaskRecord,
    is_counted,
    latest_by_id,
    split_uses,
    with_token_usage,
)
from meshpoint.model.tasks import NO_DEADLINE, L1Snapshot, PlannedCall, Run, TaskState
from meshpoint.model.usage import TokenUsage, parse_usage

STATES_BY_STATUS: dict[OperationStatus, tuple[TaskState, ...]] = {
    OperationStatus.PENDING: (TaskState.READY,),
    OperationStatus.PARKED: (TaskState.PARKED,),
    OperationStatus.RUNNING: (TaskState.RUNNING,),
    OperationStatus.WAITING: (TaskState.WAITING,),
    OperationStatus.COMPLETED: (TaskState.COMPLETED,),
    OperationStatus.FAILED: (TaskState.FAILED,),
    OperationStatus.CANCELLED: (TaskState.CANCELLED,),
}
"""Task states that are reported as each operation status."""

_STATUS_BY_STATE = {
    state: status for status, states in STATES_BY_STATUS.items() for state in states
}


def sanitize(text: str | None) -> str | None:
    """Remove characters that a database cannot store, so that they do not fail a checkpoint.

    NUL is dropped; lone surrogates become question marks.
    """
    return None if text is None else text.replace("\0", "").encode(errors="replace").decode()


def _sanitize_json(value: JsonValue) -> JsonValue:
    match value:
        case str():
            return sanitize(value)
        case list():
            return [_sanitize_json(each) for each in value]
        case dict():
            return {sanitize(key) or "": _sanitize_json(each) for key, each in value.items()}
        case _:
            return value


def _to_json_text(value: object) -> str:
    return to_json(value, inf_nan_mode="null").decode()


def _parse_json(column: Any) -> Any:
    # On PostgreSQL, the driver has already parsed it.
    return from_json(column) if isinstance(column, str) else column


def operation_columns(task_id: str, agent: str, operation: Operation, now: float) -> Columns:
    """Encode an operation that begins `now`. `agent` is a qualified name."""
    return {
        "task_id": task_id,
        "agent": agent,
        "type": sanitize(operation.type),
        "subject": sanitize(operation.subject),
        "parameters": json.dumps(operation.parameters),
        "exclusive": operation.exclusive,
        "preserve": operation.preserve,
        "now": now,
    }


def children_json(children: tuple[Child, ...]) -> str:
    """Encode `children` for the database."""
    return json.dumps([child.model_dump(mode="json") for child in children])


def summary_from_row(row: Any, names: AgentNames) -> OperationSummary:
    """Decode an operation's row, joined with the rows of its task and its last checkpoint."""
    state, no_checkpoint = TaskState(row.status), row.seq is None
    status = _STATUS_BY_STATE[state]
    running = state is TaskState.RUNNING
    updated_at = (row.ended_at or row.created_at) if no_checkpoint else row.checkpoint_time
    return OperationSummary(
        id=TaskId(row.operation_id),
        agent=names.plain(row.agent_name),
        type=row.type,
        status=status,
        phase=None
        if no_checkpoint
        else row.current_subtask or next(iter(_parse_json(row.pending_subtasks)), None),
        subject=row.subject,
        parameters=json.loads(row.parameters),
        children=latest_by_id(Child.model_validate(child) for child in json.loads(row.children)),
        progress_pct=100.0
        if status is OperationStatus.COMPLETED
        else min(row.progress_pct or 0.0, MAX_OPEN_PROGRESS),
        retry_count=row.retry_count,
        owner=ReplicaId(row.owner) if running and row.owner is not None else None,
        lease_until=instant(row.wake_at) if running else None,
        created_at=instant(row.created_at),
        updated_at=instant(updated_at),
        ended_at=None if row.ended_at is None else instant(row.ended_at),
        failure_reason=_reason(row, state),
        exclusive=bool(row.exclusive),
        preserve=bool(row.preserve),
        checkpoint=row.seq,
        usage=usage_from_column(row.token_usage),
    )


def usage_from_column(column: str | None) -> TokenUsage | None:
    """Decode the tokens of a task. `None` if missing or damaged."""
    try:
        return None if column is None else parse_usage(from_json(column))
    except ValueError:
        return None


def usage_details(column: str | None) -> str | None:
    """Encode a task's tokens as the `error_details` of its last checkpoint."""
    usage = usage_from_column(column)
    details = None if usage is None else with_token_usage(None, usage)
    return None if details is None else _to_json_text(_sanitize_json(details))


def _reason(row: Any, state: TaskState) -> str | None:
    """Return why an operation failed, was cancelled or is parked."""
    if state is TaskState.PARKED:
        found: str | None = row.parked_reason
    elif state.is_final:
        found = row.dead_reason if row.seq is None else row.failure_reason
    else:
        found = None
    return found


@dataclass(frozen=True, slots=True)
class CheckpointRows:
    """A checkpoint as column values, without its key and its times.

    Attributes:
        columns: Its own row.
        records: The records to write with it. Empty if its own row has them.
        starts: Whether it shares no records with earlier checkpoints.
    """

    columns: Columns
    records: tuple[Columns, ...] = ()
    starts: bool = False

    @property
    def size(self) -> int:
        """The length of its texts and bytes."""
        values = [value for row in (self.columns, *self.records) for value in row.values()]
        return sum(len(value) for value in values if isinstance(value, str | bytes))


def checkpoint_rows(checkpoint: AgentCheckpoint) -> CheckpointRows:
    """Encode a checkpoint and the records that changed in it."""
    columns, changed = _checkpoint_columns(checkpoint), checkpoint.changed
    if checkpoint.records_from is None:
        return CheckpointRows({**columns, **_records_in_row(checkpoint)})
    records = tuple(
        {
            "name": record.name,
            "place": place,
            "record": _to_json_text(_shared_record(record)),
            "result": record.result,
        }
        for place, record in enumerate(checkpoint.subtasks)
        if changed is None or record.name in changed
    )
    return CheckpointRows(columns, records, starts=checkpoint.records_from == checkpoint.seq)


def _records_in_row(checkpoint: AgentCheckpoint) -> Columns:
    results = {
        record.name: record.result for record in checkpoint.subtasks if record.result is not None
    }
    return {
        "interim_results": _to_json_text(results),
        "subtasks": _to_json_text([_record_in_row(record) for record in checkpoint.subtasks]),
    }


def _checkpoint_columns(checkpoint: AgentCheckpoint) -> Columns:
    """Encode a checkpoint without its records."""
    progress, details = checkpoint.progress, checkpoint.error_details
    version = sanitize(checkpoint.agent_version)
    if version is not None and checkpoint.records_from is not None:
        version += RECORDS_MARK
    return {
        "subject": sanitize(checkpoint.subject),
        "progress_pct": progress.open_percent,
        "current_subtask": checkpoint.current_subtask,
        "completed_subtasks": _to_json_text(progress.completed),
        "pending_subtasks": _to_json_text(progress.pending),
        "planned_subtasks": _to_json_text(checkpoint.planned),
        "working_memory": _to_json_text(_working_memory(checkpoint)),
        "interim_results": "{}",
        "subtasks": "[]",
        "agent_config": _to_json_text(_sanitize_json(checkpoint.agent_config)),
        "failure_reason": sanitize(checkpoint.failure_reason),
        "error_details": None if details is None else _to_json_text(_sanitize_json(details)),
        "retry_count": checkpoint.retry_count,
        "agent_version": version,
        "l1_snapshot_hash": checkpoint.l1_snapshot_hash,
        "l1_snapshot": checkpoint.l1_snapshot,
    }


def _working_memory(checkpoint: AgentCheckpoint) -> dict[str, Any]:
    memory: dict[str, Any] = {"saved_progress": checkpoint.saved_progress}
    if checkpoint.l1_in_sql is not None:
        memory["l1_in_sql"] = checkpoint.l1_in_sql
    if checkpoint.memory_writes:
        # As text, since a response may contain NUL, which JSONB cannot store.
        memory["memory_writes"] = _to_json_text(
            [write.model_dump(mode="json") for write in checkpoint.memory_writes]
        )
    if checkpoint.extra:  # as text, for the same reason
        memory["extra"] = json.dumps(checkpoint.extra)
    if checkpoint.memory_writes_replace_log:
        memory["memory_writes_replace_log"] = True
    if checkpoint.records_from is not None:
        # In this column, because earlier releases copy it when they end an operation.
        return memory | {"records_from": checkpoint.records_from}
    reused_in = {
        record.name: record.reused_in
        for record in checkpoint.subtasks
        if record.reused_in is not None
    }
    uses = {
        record.name: digests
        for record in checkpoint.subtasks
        if (digests := split_uses(record.function or "")[1]) is not None
    }
    named = {"reused_in": reused_in, "uses": uses}
    return memory | {key: by_subtask for key, by_subtask in named.items() if by_subtask}


def _shared_record(record: SubtaskRecord) -> dict[str, Any]:
    """Encode a record of `agent_subtask_records`."""
    unused = {"result"} if record.reused_in is not None else {"result", "reused_in"}
    return record.model_dump(mode="json", exclude=unused) | {
        # As text, since a deliverable's key may contain NUL, which JSONB cannot store.
        "secrets": _to_json_text(record.secrets),
    }


def _record_in_row(record: SubtaskRecord) -> dict[str, Any]:
    """Encode a record in its checkpoint's row as the previous release reads it.

    `_working_memory` has the rest. That release refuses unknown keys, and repeats a subtask whose
    `function` is not exactly the version that it computes itself.
    """
    function = record.function
    encoded = _shared_record(record.model_copy(update={"reused_in": None}))
    return encoded | {"function": None if function is None else split_uses(function)[0]}


def without_counted_usage(
    records: Any, retry_count: int, generation: int, *, in_row: bool
) -> tuple[str, list[Columns]]:
    """Encode the records of a checkpoint without tokens that its task has counted.

    `in_row` says whether its row has them. Returns all of them, and the changed ones.
    """
    encode = _record_in_row if in_row else _shared_record
    kept, changed = list[dict[str, Any]](), list[Columns]()
    for stored in _parse_json(records):
        record = _record_from_json(stored, {}, {})
        counted = is_counted(record, retry_count, generation)
        kept.append(encode(record.without_usage() if counted else record))
        if kept[-1]["context"] != stored["context"]:
            changed.append({"name": record.name, "record": _to_json_text(kept[-1])})
    return _to_json_text(kept), changed


def checkpoint_from_row(row: Any, names: AgentNames) -> AgentCheckpoint:
    """Decode a row of `agent_checkpoints` or of the archive."""
    results, memory = _parse_json(row.interim_results), _parse_json(row.working_memory)
    version, records_from = row.agent_version, memory.get("records_from")
    if version is not None and records_from is not None:
        version = version.removesuffix(RECORDS_MARK)
    return AgentCheckpoint(
        operation_id=TaskId(row.analysis_id),
        agent=names.plain(row.agent_type),
        seq=row.seq,
        subject=row.subject,
        planned=_parse_json(row.planned_subtasks),
        subtasks=tuple(
            _record_from_json(record, results, memory) for record in _parse_json(row.subtasks)
        ),
        saved_progress=memory["saved_progress"],
        l1_in_sql=memory.get("l1_in_sql"),
        memory_writes=from_json(memory.get("memory_writes", "[]")),
        extra=json.loads(memory.get("extra", "{}")),
        memory_writes_replace_log=memory.get("memory_writes_replace_log", False),
        current_subtask=row.current_subtask,
        agent_config=_parse_json(row.agent_config),
        agent_version=version,
        records_from=records_from,
        retry_count=row.retry_count,
        failure_reason=row.failure_reason,
        error_details=_parse_json(row.error_details),
        l1_snapshot_hash=row.l1_snapshot_hash,
        checkpoint_time=instant(row.checkpoint_time),
    )


def snapshot_from_row(row: Any) -> L1Snapshot:
    """Decode the working memory in a row of `agent_checkpoints`."""
    return L1Snapshot(row.seq, row.l1_snapshot_hash, bytes(row.l1_snapshot))


def _record_from_json(
    record: dict[str, Any], results: dict[str, str], memory: dict[str, Any]
) -> SubtaskRecord:
    name, function = record["name"], record["function"]
    more: dict[str, Any] = {"secrets": from_json(record["secrets"]), "result": results.get(name)}
    if (reused_in := memory.get("reused_in", {}).get(name)) is not None:
        more["reused_in"] = reused_in
    if function is not None and (uses := memory.get("uses", {}).get(name)) is not None:
        more["function"] = function + USES + uses
    return SubtaskRecord.model_validate(record | more)


async def last_pause_from_rows(row: Any, calls: Sequence[Any], names: AgentNames) -> LastPause:
    """Decode the last pause of an ended operation from its row and the rows of its calls."""
    deadline = (
        None
        if row.join_deadline is None
        else timedelta(seconds=max(row.join_deadline - row.checkpointed_at, 1.0))
    )
    agent = names.plain(row.agent_name)
    return LastPause(
        run=Run(TaskId(row.logical_task_id), agent, row.run_id, row.fence, row.generation),
        context=await context_from_row(row),
        state=await unpack(row.state) or b"",
        state_format=row.state_format,
        join=Join(row.needed, deadline),
        calls=tuple([await _kept_call(call) for call in calls]),
        children=tuple(Child.model_validate(child) for child in json.loads(row.children)),
        retry_count=row.retry_count,
    )


async def _kept_call(call: Any) -> KeptCall:
    idle, attempt = call.idle_timeout, CallAttempt.decode(call.retry)
    timeout = call.absolute_deadline - call.created_at
    if call.absolute_deadline >= NO_DEADLINE.timestamp():
        timeout = None
    if attempt is not None:
        timeout = attempt.timeout
    planned = PlannedCall(
        sub_task_id=TaskId(call.sub_task_id),
        call_id=call.call_id,
        peer=AgentName(call.peer_agent),
        body=await unpack(call.request) or b"",
        timeout=None if timeout is None else timedelta(seconds=max(timeout, 1.0)),
        idle_timeout=None if idle is None else timedelta(seconds=idle),
        headers=json.loads(call.correlation_data),
        retry=None if attempt is None else attempt.policy,
    )
    outcome = (
        Failed(FailureKind.CANCELLED)
        if call.outcome is None
        else await unpack_outcome(call.outcome)
    )
    return KeptCall(planned, outcome)
