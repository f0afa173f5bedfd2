"""Conversion of operations and their checkpoints to rows and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from pydantic import JsonValue
from pydantic_core import from_json, to_json

from meshpoint.adapters.sql import inventory
from meshpoint.adapters.sql.codec import Codec
from meshpoint.adapters.sql.columns import RECORDS_MARK
from meshpoint.adapters.sql.database import StoreOptions
from meshpoint.adapters.sql.rows import (
    AgentNames,
    Columns,
    context_from_row,
    headers_from_row,
    instant,
    read_outcome,
    unpack_request,
)
from meshpoint.errors import KeyMissing
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


def operation_columns(
    task_id: str, agent: str, operation: Operation, now: float, options: StoreOptions
) -> Columns:
    """Encode an operation that begins `now`. `agent` is a qualified name."""
    codec, parameters = options.codec, json.dumps(operation.parameters)
    return {
        "task_id": task_id,
        "agent": agent,
        "type": sanitize(operation.type),
        "subject": codec.text(
            sanitize(operation.subject), inventory.SUBJECT, options.names.prefix
        ),
        "parameters": codec.text(parameters, inventory.PARAMETERS, agent, task_id),
        "exclusive": operation.exclusive,
        "preserve": operation.preserve,
        "now": now,
    }


def children_json(children: tuple[Child, ...], codec: Codec, agent: str, task_id: str) -> str:
    """Encode `children` for the database."""
    encoded = json.dumps([child.model_dump(mode="json") for child in children])
    sealed = codec.json(encoded, inventory.CHILDREN, agent, task_id)
    return encoded if sealed is encoded else f"[{sealed}]"


def parse_children(stored: str, codec: Codec, agent: str, task_id: str) -> list[Child]:
    """Decode the list to which `children_json` was appended."""
    children: list[Child] = []
    for each in json.loads(stored):
        found = codec.read_json(each, inventory.CHILDREN, agent, task_id)
        children += map(Child.model_validate, found if isinstance(found, list) else [found])
    return children


def _shown_operation(row: Any, codec: Codec) -> tuple[Any, list[Child]]:
    """The parameters and children of an operation. Without the keys, the first say so."""
    key = (row.agent_name, row.operation_id)
    try:
        parameters = codec.read_text(row.parameters, inventory.PARAMETERS, *key)
        return json.loads(parameters or "{}"), parse_children(row.children, codec, *key)
    except KeyMissing as error:
        return {inventory.SEALED_KEY: str(error)}, []


def summary_from_row(row: Any, names: AgentNames, codec: Codec) -> OperationSummary:
    """Decode an operation's row, joined with the rows of its task and its last checkpoint."""
    state, no_checkpoint = TaskState(row.status), row.seq is None
    status = _STATUS_BY_STATE[state]
    running = state is TaskState.RUNNING
    parameters, children = _shown_operation(row, codec)
    usage = codec.show_text(
        row.token_usage, inventory.TOKEN_USAGE, row.agent_name, row.operation_id
    )
    updated_at = (row.ended_at or row.created_at) if no_checkpoint else row.checkpoint_time
    return OperationSummary(
        id=TaskId(row.operation_id),
        agent=names.plain(row.agent_name),
        type=row.type,
        status=status,
        phase=None
        if no_checkpoint
        else row.current_subtask or next(iter(_parse_json(row.pending_subtasks)), None),
        subject=codec.show_text(row.subject, inventory.SUBJECT, names.prefix),
        parameters=parameters,
        children=latest_by_id(children),
        progress_pct=100.0
        if status is OperationStatus.COMPLETED
        else min(row.progress_pct or 0.0, MAX_OPEN_PROGRESS),
        retry_count=row.retry_count,
        owner=ReplicaId(row.owner) if running and row.owner is not None else None,
        lease_until=instant(row.wake_at) if running else None,
        created_at=instant(row.created_at),
        updated_at=instant(updated_at),
        ended_at=None if row.ended_at is None else instant(row.ended_at),
        failure_reason=_reason(row, state, codec),
        exclusive=bool(row.exclusive),
        preserve=bool(row.preserve),
        checkpoint=row.seq,
        usage=usage_from_column(usage),
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


def _reason(row: Any, state: TaskState, codec: Codec) -> str | None:
    """Return why an operation failed, was cancelled or is parked."""
    agent = row.agent_name
    if state is TaskState.PARKED:
        return codec.show_text(row.parked_reason, inventory.PARKED_REASON, agent)
    if not state.is_final:
        return None
    if row.seq is None:
        return codec.show_text(row.dead_reason, inventory.REASON, agent)
    return codec.show_text(row.failure_reason, inventory.FAILURE_REASON, agent, row.operation_id)


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


def checkpoint_rows(
    checkpoint: AgentCheckpoint, codec: Codec, names: AgentNames
) -> CheckpointRows:
    """Encode a checkpoint and the records that changed in it."""
    encoder = _Encoder(
        codec, names.qualified(checkpoint.agent), checkpoint.operation_id, checkpoint.seq
    )
    columns, changed = _checkpoint_columns(checkpoint, encoder), checkpoint.changed
    if checkpoint.records_from is None:
        return CheckpointRows({**columns, **_records_in_row(checkpoint, encoder)})
    records = tuple(
        {
            "name": record.name,
            "place": place,
            "record": encoder.json(_to_json_text(_shared_record(record)), inventory.RECORD),
            "result": encoder.text(record.result, inventory.RESULT, record.name),
        }
        for place, record in enumerate(checkpoint.subtasks)
        if changed is None or record.name in changed
    )
    return CheckpointRows(columns, records, starts=checkpoint.records_from == checkpoint.seq)


@dataclass(frozen=True, slots=True)
class _Encoder:
    """Encodes the values of one checkpoint."""

    codec: Codec
    agent: str
    operation_id: str
    seq: int

    def text(self, value: str | None, column: inventory.Sealed, *keys: str) -> str | None:
        key = (self.agent, self.operation_id, *keys)
        return self.codec.text(value, column, *key, seq=self.seq)

    def json(self, value: str | None, column: inventory.Sealed) -> str | None:
        return self.codec.json(value, column, self.agent, self.operation_id, seq=self.seq)

    def record(self, encoded: dict[str, Any]) -> Any:
        """An item of the list of records in a checkpoint's row."""
        if not self.codec.seals(self.agent):
            return encoded
        return self.text(_to_json_text(encoded), inventory.RECORD)


def _records_in_row(checkpoint: AgentCheckpoint, encoder: _Encoder) -> Columns:
    results = {
        record.name: encoder.text(record.result, inventory.RESULT, record.name)
        for record in checkpoint.subtasks
        if record.result is not None
    }
    records = [encoder.record(_record_in_row(record)) for record in checkpoint.subtasks]
    return {"interim_results": _to_json_text(results), "subtasks": _to_json_text(records)}


def _checkpoint_columns(checkpoint: AgentCheckpoint, encoder: _Encoder) -> Columns:
    """Encode a checkpoint without its records."""
    progress, details = checkpoint.progress, checkpoint.error_details
    version = sanitize(checkpoint.agent_version)
    if version is not None and checkpoint.records_from is not None:
        version += RECORDS_MARK
    return {
        "subject": encoder.text(sanitize(checkpoint.subject), inventory.CHECKPOINT_SUBJECT),
        "progress_pct": progress.open_percent,
        "current_subtask": checkpoint.current_subtask,
        "completed_subtasks": _to_json_text(progress.completed),
        "pending_subtasks": _to_json_text(progress.pending),
        "planned_subtasks": _to_json_text(checkpoint.planned),
        "working_memory": _to_json_text(
            encoder.codec.memory(
                _working_memory(checkpoint),
                "records_from",
                inventory.WORKING_MEMORY,
                encoder.agent,
                encoder.operation_id,
                encoder.seq,
            )
        ),
        "interim_results": "{}",
        "subtasks": "[]",
        "agent_config": encoder.json(
            _to_json_text(_sanitize_json(checkpoint.agent_config)), inventory.AGENT_CONFIG
        ),
        "failure_reason": encoder.text(
            sanitize(checkpoint.failure_reason), inventory.FAILURE_REASON
        ),
        "error_details": None
        if details is None
        else encoder.json(_to_json_text(_sanitize_json(details)), inventory.ERROR_DETAILS),
        "retry_count": checkpoint.retry_count,
        "agent_version": version,
        "l1_snapshot_hash": encoder.text(checkpoint.l1_snapshot_hash, inventory.SNAPSHOT_HASH),
        "l1_snapshot": encoder.codec.seal(
            checkpoint.l1_snapshot,
            inventory.SNAPSHOT,
            encoder.agent,
            encoder.operation_id,
            seq=encoder.seq,
        ),
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
    records: Any, row: Any, codec: Codec, *, in_row: bool
) -> tuple[str, list[Columns]]:
    """Encode the records of a checkpoint without tokens that its task, in `row`, has counted.

    `in_row` says whether its row has them. Returns all of them, and the changed ones.
    """
    encode = _record_in_row if in_row else _shared_record
    encoder = _Encoder(codec, row.agent_name, row.logical_task_id, row.checkpoint_seq + 1)
    kept, changed = list[Any](), list[Columns]()
    for each in _parse_json(records):
        stored = codec.read_json(each, inventory.RECORD, row.agent_name, row.logical_task_id)
        record = _record_from_json(stored, {}, {})
        counted = is_counted(record, row.retry_count, row.generation)
        encoded = encode(record.without_usage() if counted else record)
        kept.append(encoder.record(encoded))
        if encoded["context"] != stored["context"]:
            text = encoder.json(_to_json_text(encoded), inventory.RECORD)
            changed.append({"name": record.name, "record": text})
    return _to_json_text(kept), changed


def checkpoint_from_row(row: Any, names: AgentNames, codec: Codec) -> AgentCheckpoint:
    """Decode a row of `agent_checkpoints` or of the archive."""
    key = (row.agent_type, row.analysis_id)
    results = {
        name: codec.read_text(result, inventory.RESULT, *key, name)
        for name, result in _parse_json(row.interim_results).items()
    }
    memory = codec.read_memory(_parse_json(row.working_memory), inventory.WORKING_MEMORY, *key)
    records = [codec.read_json(each, inventory.RECORD, *key) for each in _parse_json(row.subtasks)]
    version, records_from = row.agent_version, memory.get("records_from")
    if version is not None and records_from is not None:
        version = version.removesuffix(RECORDS_MARK)
    return AgentCheckpoint(
        operation_id=TaskId(row.analysis_id),
        agent=names.plain(row.agent_type),
        seq=row.seq,
        subject=codec.read_text(row.subject, inventory.CHECKPOINT_SUBJECT, *key),
        planned=_parse_json(row.planned_subtasks),
        subtasks=tuple(_record_from_json(record, results, memory) for record in records),
        saved_progress=memory["saved_progress"],
        l1_in_sql=memory.get("l1_in_sql"),
        memory_writes=from_json(memory.get("memory_writes", "[]")),
        extra=json.loads(memory.get("extra", "{}")),
        memory_writes_replace_log=memory.get("memory_writes_replace_log", False),
        current_subtask=row.current_subtask,
        agent_config=codec.read_json(row.agent_config, inventory.AGENT_CONFIG, *key),
        agent_version=version,
        records_from=records_from,
        retry_count=row.retry_count,
        failure_reason=codec.read_text(row.failure_reason, inventory.FAILURE_REASON, *key),
        error_details=codec.read_json(row.error_details, inventory.ERROR_DETAILS, *key),
        l1_snapshot_hash=codec.read_text(row.l1_snapshot_hash, inventory.SNAPSHOT_HASH, *key),
        checkpoint_time=instant(row.checkpoint_time),
    )


def snapshot_from_row(row: Any, codec: Codec) -> L1Snapshot:
    """Decode the working memory in a row of `agent_checkpoints`."""
    key = (row.agent_type, row.analysis_id)
    digest = codec.read_text(row.l1_snapshot_hash, inventory.SNAPSHOT_HASH, *key)
    content = codec.open(bytes(row.l1_snapshot), inventory.SNAPSHOT, *key)
    return L1Snapshot(row.seq, digest or "", content or b"")


def _record_from_json(
    record: dict[str, Any], results: Mapping[str, str | None], memory: dict[str, Any]
) -> SubtaskRecord:
    name, function = record["name"], record["function"]
    more: dict[str, Any] = {"secrets": from_json(record["secrets"]), "result": results.get(name)}
    if (reused_in := memory.get("reused_in", {}).get(name)) is not None:
        more["reused_in"] = reused_in
    if function is not None and (uses := memory.get("uses", {}).get(name)) is not None:
        more["function"] = function + USES + uses
    return SubtaskRecord.model_validate(record | more)


async def last_pause_from_rows(
    row: Any, calls: Sequence[Any], names: AgentNames, codec: Codec
) -> LastPause:
    """Decode the last pause of an ended operation from its row and the rows of its calls."""
    deadline = (
        None
        if row.join_deadline is None
        else timedelta(seconds=max(row.join_deadline - row.checkpointed_at, 1.0))
    )
    agent, key = names.plain(row.agent_name), (row.agent_name, row.logical_task_id)
    return LastPause(
        run=Run(TaskId(row.logical_task_id), agent, row.run_id, row.fence, row.generation),
        context=await context_from_row(row, codec),
        state=await codec.unpack(row.state, inventory.STATE, *key) or b"",
        state_format=row.state_format,
        join=Join(row.needed, deadline),
        calls=tuple([await _kept_call(call, codec) for call in calls]),
        children=tuple(parse_children(row.children, codec, *key)),
        retry_count=row.retry_count,
    )


async def _kept_call(call: Any, codec: Codec) -> KeptCall:
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
        body=await unpack_request(call, codec),
        timeout=None if timeout is None else timedelta(seconds=max(timeout, 1.0)),
        idle_timeout=None if idle is None else timedelta(seconds=idle),
        headers=headers_from_row(call, codec),
        retry=None if attempt is None else attempt.policy,
    )
    outcome = (
        Failed(FailureKind.CANCELLED) if call.outcome is None else await read_outcome(call, codec)
    )
    return KeptCall(planned, outcome)
