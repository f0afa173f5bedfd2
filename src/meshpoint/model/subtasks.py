"""What a task remembers of its subtasks: one record for each, and the checkpoint that holds them all.

Deliverables and states are kept as JSON text, exactly as they were written: a database's own JSON type reorders keys,
makes an integer of 1e16 and refuses a zero character.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from meshpoint.model.ids import AgentName, TaskId


class SubtaskStatus(StrEnum):
    """How far a recorded subtask came."""

    STARTED = "started"
    COMPLETED = "completed"
    FAILED = "failed"
    OUTDATED = "outdated"  # it was completed, but something has changed: it is to run again


class _Kept(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SubtaskRecord(_Kept):
    """One subtask, in the order in which they were begun.

    `function` is the version of what it runs, None when a migration vouches for the result whatever runs now.
    `inputs` are digests of its arguments by parameter, `result` is its deliverable and `context` what it changed on
    the task's context, both as JSON text; `secrets` are the places in the deliverable whose type says `Secret`, as
    JSON pointers. `retry` and `generation` tell in which attempt at the operation, and after which of its pauses, it
    ran; `error` how it failed, and `again` why it ran once more in that attempt, if it had been completed before.
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

    @property
    def completed(self) -> bool:
        """Whether its deliverable is there."""
        return self.status is SubtaskStatus.COMPLETED


@dataclass(frozen=True, slots=True)
class SubtaskProgress:
    """How far a task is: `k` of `n` subtasks are completed. `current` runs now, or is the next one, None at the end.

    Subtasks that were not declared are counted from when they begin.
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
        """From 0 to 100."""
        return round(100 * self.k / self.n, 2) if self.n else 0.0


def progress_of(
    planned: Iterable[str], records: Iterable[SubtaskRecord], current: str | None = None
) -> SubtaskProgress:
    """How far a task is that declares `planned` and has these records."""
    by_name = {record.name: record for record in records}
    names = list(dict.fromkeys([*planned, *by_name]))
    done = tuple(name for name, record in by_name.items() if record.completed)
    pending = tuple(name for name in names if name not in done)
    return SubtaskProgress(done, current or (pending[0] if pending else None), pending)


class MemoryWrite(_Kept):
    """A write to the working memory, so that code which runs again does not write twice.

    `digest` stands for the commands. `calls` and `subtasks` tell the place: how many pauses lay before it, and how
    many subtasks, or which one it was in; `after` is the digest of what was read there last. `answers` is what was
    answered, None where all of it was OK. `seq` is the first checkpoint that has it.
    """

    digest: str
    calls: int
    subtasks: int | str
    after: str = ""
    seq: int
    answers: list[int | str | None] | None = None


class AgentCheckpoint(_Kept):
    """All that a task remembers of its subtasks at one moment. A row of `agent_checkpoints`.

    `seq` counts the checkpoints of an operation; a higher one replaces a lower one whole. `saved_progress` holds, by
    subtask, the state that it saved within itself, as JSON text. `failure_reason` and `error_details` are set on the
    one that a failure or a cancellation wrote.

    `l1_snapshot_hash` is the digest of the working memory as it was then, None for a task that had none.
    `l1_snapshot` is that memory, packed, if it goes with this checkpoint to the database; who reads the checkpoint
    does not get it, and it is no part of its JSON. `l1_in_sql` is the digest of the one that rests there since, and
    `memory_writes` are the writes whose effects that memory has.
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
    checkpoint_time: datetime | None = None  # set by the store

    @model_validator(mode="after")
    def _hashed(self) -> Self:
        if self.l1_snapshot is not None and self.l1_snapshot_hash is None:
            raise ValueError("a working memory comes with its hash")
        return self

    @property
    def progress(self) -> SubtaskProgress:
        """How far the task was."""
        return progress_of(self.planned, self.subtasks, self.current_subtask)


@dataclass(frozen=True, slots=True)
class Migration:
    """A step from checkpoints of one version of an agent to those of the next; made by `@migrates`."""

    from_version: str
    to_version: str
    function: Callable[[dict[str, Any]], dict[str, Any]]

    def __call__(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """The checkpoint's public form, migrated."""
        return self.function(checkpoint)


class Child(_Kept):
    """A task that an operation started at a peer. `digest` stands for its input."""

    id: TaskId
    peer: AgentName
    digest: str
    subtask: str | None = None
    retry: int = 0


def last_of_each(children: Iterable[Child]) -> tuple[Child, ...]:
    """`children` without what was said of them in earlier attempts."""
    return tuple({child.id: child for child in children}.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What is written of an operation when its first subtask begins. `parameters` is the request's input."""

    type: str
    parameters: JsonValue
    subject: str | None = None
    exclusive: bool = False
    preserve: bool = False


@dataclass(frozen=True, slots=True)
class Saved:
    """The checkpoint is durable (also when a repetition found itself)."""
