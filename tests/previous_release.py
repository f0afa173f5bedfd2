"""How the previous release reads what this one writes: its models and its decoding, frozen.

It refuses keys and values that it does not know. During a deploy its replicas work next to those
of this release, and after a rollback it continues their tasks.
"""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, JsonValue
from pydantic_core import from_json


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TaskState(StrEnum):
    RUNNING = "running"
    WAITING = "waiting"
    READY = "ready"
    PARKED = "parked"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class CallState(StrEnum):
    PENDING = "pending"
    DONE = "done"
    CANCELLING = "cancelling"


class SubtaskStatus(StrEnum):
    STARTED = "started"
    COMPLETED = "completed"
    FAILED = "failed"
    OUTDATED = "outdated"


class FailureKind(StrEnum):
    ERROR = "error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    UNDELIVERABLE = "undeliverable"
    INVALID = "invalid"


class SubtaskRecord(_Strict):
    name: str
    status: SubtaskStatus
    function: str | None
    inputs: dict[str, str]
    seconds: float = 0.0
    retry: int = 0
    generation: int = 0
    result: str | None = None
    context: str | None = None
    secrets: tuple[str, ...] = ()
    again: str | None = None
    error: str | None = None


class MemoryWrite(_Strict):
    digest: str
    calls: int
    subtasks: int | str
    after: str = ""
    seq: int
    answers: list[int | str | None] | None = None


class AgentCheckpoint(_Strict):
    seq: int
    subject: str | None = None
    planned: tuple[str, ...] = ()
    subtasks: tuple[SubtaskRecord, ...] = ()
    saved_progress: dict[str, str] = {}
    current_subtask: str | None = None
    agent_config: dict[str, JsonValue] = {}
    agent_version: str | None = None
    retry_count: int = 0
    failure_reason: str | None = None
    error_details: dict[str, JsonValue] | None = None
    l1_snapshot_hash: str | None = None
    l1_in_sql: str | None = None
    memory_writes: tuple[MemoryWrite, ...] = ()


class Child(_Strict):
    id: str
    peer: str
    digest: str
    subtask: str | None = None
    retry: int = 0


class Tokens(_Strict):
    input: int = 0
    output: int = 0
    cached: int = 0


class TokenUsage(_Strict):
    total: Tokens = Tokens()
    by_model: dict[str, Tokens] = {}
    by_source: dict[str, Tokens] = {}


class A2AContext(_Strict):
    context_id: str | None = None
    session_id: str | None = None
    user_id: str | None = None
    reply_to: str | None = None
    requester: str | None = None
    parent_task_id: str | None = None
    call_depth: int = 0
    deadline: datetime | None = None
    idle_timeout: timedelta | None = None
    user_config: dict[str, JsonValue] = {}
    metadata: dict[str, JsonValue] = {}


class Context(_Strict):
    task_id: str
    a2a_context: A2AContext
    response_buffer: str
    produced_artifacts: list[JsonValue]
    artifact_signals_to_return: list[JsonValue]
    flags: dict[str, JsonValue]
    security_context: dict[str, JsonValue]
    token_usage: TokenUsage
    trace_context: dict[str, JsonValue]
    subject: str | None = None


class RecordedCall(_Strict):
    id: str
    peer: str
    digest: str


class JournalEntry(_Strict):
    calls: list[RecordedCall]
    needed: int | None
    within_seconds: float | None
    usage: TokenUsage
    outcomes: list[JsonValue] | None = None
    subtask: str | None = None


class Journal(_Strict):
    format: str
    input: JsonValue
    context: dict[str, JsonValue]
    entries: list[JournalEntry] = []


def read_checkpoint(row: Any) -> AgentCheckpoint:
    """Decode a row of `agent_checkpoints` or of the archive."""
    results, memory = _parse_json(row.interim_results), _parse_json(row.working_memory)
    records = [
        SubtaskRecord.model_validate(
            record
            | {"secrets": from_json(record["secrets"]), "result": results.get(record["name"])}
        )
        for record in _parse_json(row.subtasks)
    ]
    return AgentCheckpoint(
        seq=row.seq,
        subject=row.subject,
        planned=_parse_json(row.planned_subtasks),
        subtasks=tuple(records),
        saved_progress=memory["saved_progress"],
        l1_in_sql=memory.get("l1_in_sql"),
        memory_writes=from_json(memory.get("memory_writes", "[]")),
        current_subtask=row.current_subtask,
        agent_config=_parse_json(row.agent_config),
        agent_version=row.agent_version,
        retry_count=row.retry_count,
        failure_reason=row.failure_reason,
        error_details=_parse_json(row.error_details),
        l1_snapshot_hash=row.l1_snapshot_hash,
    )


def read_children(column: str) -> list[Child]:
    """Decode the children of an operation."""
    return [Child.model_validate(child) for child in json.loads(column)]


def _parse_json(column: Any) -> Any:
    # On PostgreSQL, the driver has already parsed it.
    return from_json(column) if isinstance(column, str) else column
