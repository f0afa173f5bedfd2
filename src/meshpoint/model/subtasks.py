"""Subtask records of a task, and the checkpoint that holds all of them.

Deliverables and states are stored as JSON text exactly as written, because a database's own JSON
type reorders keys, turns 1e16 into an integer and rejects NUL characters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.usage import TokenUsage, parse_usage


class SubtaskStatus(StrEnum):
    """The status of a recorded subtask."""

    STARTED = "started"
    COMPLETED = "completed"
    FAILED = "failed"
    OUTDATED = "outdated"  # it was completed, but must run again because something has changed


COMPUTED_VERSIONS = ("src:", "code:")
"""How the version of a function begins if it was computed from its code."""
USES = " uses "
"""In a computed version, follows the function's own and precedes digests of what it uses."""
ALL_USES = "*"
"""The name of a digest of everything that a function with many uses uses."""

MAX_OPEN_PROGRESS = 99.0
"""Percentage of an operation whose subtasks are all completed, but which has not ended yet."""


class _StoredModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SubtaskRecord(_StoredModel):
    """The record of one subtask. Records are kept in the order in which subtasks started.

    Attributes:
        function: version of the code. `None` if a migration declares the result valid for any
            code.
        inputs: digests of the arguments, by parameter.
        retry: attempt of the operation in which the subtask ran.
        generation: number of pauses before it in that attempt.
        result: the deliverable, as JSON text.
        context: its changes to the task's context, as JSON text.
        secrets: JSON pointers to the places in the deliverable whose type is marked `Secret`.
        again: why a completed subtask ran again in that attempt.
        error: why it failed.
        reused_in: latest attempt that reused it after comparing it. `None` if none did.
    """

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
    reused_in: int | None = None

    @property
    def completed(self) -> bool:
        """Whether its deliverable is recorded."""
        return self.status is SubtaskStatus.COMPLETED

    def belongs_to(self, retry: int) -> bool:
        """Whether attempt `retry` made the record, or has reused it."""
        return retry in (self.retry, self.reused_in)

    def without_usage(self) -> SubtaskRecord:
        """A copy whose tokens are not counted when a later attempt reuses the record."""
        changes = {} if self.context is None else json.loads(self.context)
        if changes.pop("token_usage", None) is None:
            return self
        return self.model_copy(update={"context": json.dumps(changes) if changes else None})


def split_uses(version: str) -> tuple[str, str | None]:
    """Split a version into the function's own and the digests of what it uses, if it has any."""
    own, separator, uses = version.partition(USES)
    has_uses = separator and version.startswith(COMPUTED_VERSIONS)
    return (own, uses) if has_uses else (version, None)


def is_counted(record: SubtaskRecord, retry_count: int, generation: int) -> bool:
    """Whether the context of a task's last pause, number `generation`, has the record's tokens."""
    return record.retry == retry_count and record.generation < generation


@dataclass(frozen=True, slots=True)
class SubtaskProgress:
    """A task's progress: `k` of `n` subtasks are completed.

    `current` is the running or next subtask, `None` at the end. Undeclared subtasks count from
    when they start.
    """

    completed: tuple[str, ...]
    current: str | None
    pending: tuple[str, ...]

    @property
    def k(self) -> int:
        return len(self.completed)

    @property
    def n(self) -> int:
        return len(self.completed) + len(self.pending)

    @property
    def percent(self) -> float:
        """Completion from 0 to 100."""
        return round(100 * self.k / self.n, 2) if self.n else 0.0

    @property
    def open_percent(self) -> float:
        """The same for an operation that has not completed, which stays below 100."""
        return min(self.percent, MAX_OPEN_PROGRESS)


def compute_progress(
    planned: Iterable[str], records: Iterable[SubtaskRecord], current: str | None = None
) -> SubtaskProgress:
    """The progress of a task that declares `planned` and has these records."""
    by_name = {record.name: record for record in records}
    completed = {name: None for name, record in by_name.items() if record.completed}
    pending = tuple(name for name in dict.fromkeys([*planned, *by_name]) if name not in completed)
    return SubtaskProgress(tuple(completed), current or (pending[0] if pending else None), pending)


class MemoryWrite(_StoredModel):
    """A write to the working memory, recorded so that repeated code does not write twice.

    Attributes:
        digest: identifies the commands.
        calls: number of pauses before the write.
        subtasks: number of subtasks before the write, or the subtask it was in.
        after: digest of the last read at this place.
        seq: first checkpoint that contains the write.
        answers: the answers, `None` if all of them were OK.
    """

    digest: str
    calls: int
    subtasks: int | str
    after: str = ""
    seq: int
    answers: list[int | str | None] | None = None


class AgentCheckpoint(_StoredModel):
    """The complete subtask state of a task at one moment. A row of `agent_checkpoints`.

    Attributes:
        seq: increases with each checkpoint of an operation. A higher one replaces a lower one
            entirely.
        saved_progress: intermediate states saved by subtasks, by name, as JSON text.
        failure_reason: set when a failure or cancellation wrote the checkpoint; so are the
            `error_details`: `type`, `message` and `traceback` of the error that code raised, and
            `token_usage`, the tokens of all attempts so far.
        l1_snapshot_hash: digest of the working memory at this time, `None` without a working
            memory.
        l1_snapshot: the packed working memory, if stored in the database with this checkpoint. Not
            part of the JSON, and not loaded with the checkpoint.
        l1_in_sql: digest of the working memory last stored in the database.
        memory_writes: the writes that the working memory at this checkpoint contains, apart from
            those in the task's log.
        memory_writes_replace_log: `memory_writes` has all writes, and those in the log do not
            count.
        records_from: the first checkpoint whose records are among `subtasks`. A store may then
            store only the `changed` ones with this checkpoint. `None` if it must store all
            records with it, in a form that every release reads.
        changed: the names of the subtasks whose records differ from the previous checkpoint.
            `None` stands for all of them. Not part of the JSON, and not loaded with the
            checkpoint.
        extra: keys that migrations have added, for later migrations.
    """

    operation_id: TaskId
    agent: AgentName
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
    l1_snapshot: bytes | None = Field(default=None, exclude=True, repr=False)
    l1_in_sql: str | None = None
    memory_writes: tuple[MemoryWrite, ...] = ()
    extra: dict[str, JsonValue] = {}
    memory_writes_replace_log: bool = False
    records_from: int | None = None
    changed: frozenset[str] | None = Field(default=None, exclude=True, repr=False)
    checkpoint_time: datetime | None = None  # set by the store

    @model_validator(mode="after")
    def _check_snapshot_hash(self) -> Self:
        if self.l1_snapshot is not None and self.l1_snapshot_hash is None:
            raise ValueError("l1_snapshot needs l1_snapshot_hash")
        return self

    @property
    def progress(self) -> SubtaskProgress:
        """The task's progress at this checkpoint."""
        return compute_progress(self.planned, self.subtasks, self.current_subtask)

    @property
    def progress_pct(self) -> float:
        """Completion of the operation, which is below 100 until the operation has completed."""
        return self.progress.open_percent

    @property
    def token_usage(self) -> TokenUsage | None:
        """The tokens of all attempts up to a failure or cancellation; `None` if unknown."""
        return parse_usage((self.error_details or {}).get("token_usage"))


def with_token_usage(
    details: dict[str, JsonValue] | None, usage: TokenUsage
) -> dict[str, JsonValue] | None:
    """Add an operation's tokens, if it has used any, to the details of its failure."""
    if usage.is_empty:
        return details
    return {**(details or {}), "token_usage": usage.model_dump(mode="json")}


@dataclass(frozen=True, slots=True)
class Migration:
    """A conversion from one checkpoint version to the next, created by `@migrates`."""

    from_version: str
    to_version: str
    function: Callable[[dict[str, Any]], dict[str, Any]]

    def __call__(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Convert the checkpoint's public form."""
        return self.function(checkpoint)


class Child(_StoredModel):
    """A peer's task started by an operation. `digest` identifies its input."""

    id: TaskId
    peer: AgentName
    digest: str
    subtask: str | None = None
    retry: int = 0


def latest_by_id(children: Iterable[Child]) -> tuple[Child, ...]:
    """Keep only the latest entry for each child id."""
    return tuple({child.id: child for child in children}.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """The data written when an operation's first subtask starts.

    `parameters` is the request's input.
    """

    type: str
    parameters: JsonValue
    subject: str | None = None
    exclusive: bool = False
    preserve: bool = False


@dataclass(frozen=True, slots=True)
class SaveCommitted:
    """It is durable, possibly since an earlier attempt to save it."""
