"""Operations: tasks that use subtasks, as people see them and as they are resumed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TypeAlias

from pydantic import JsonValue

from meshpoint.model.checkpoint import Requester
from meshpoint.model.ids import AgentName, ReplicaId, TaskId
from meshpoint.model.subtasks import Child

ASKED_BY_ANOTHER = "it was asked for by another agent"
ASKED_FOR_OTHERWISE = "it was asked for with another input"

NOBODY = Requester()
"""Whoever resumes an operation by hand waits for no reply."""


class OperationStatus(StrEnum):
    """Where an operation stands. PENDING: any replica may take it. WAITING: for peers."""

    PENDING = "pending"
    RUNNING = "running"
    WAITING = "waiting"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationSummary:
    """One operation. `phase` is its current subtask; `lease_until` is set while a replica owns it.

    `checkpoint` is the number of its last checkpoint, None when there is none.
    """

    id: TaskId
    agent: AgentName
    type: str
    status: OperationStatus
    phase: str | None
    subject: str | None
    parameters: JsonValue
    children: tuple[Child, ...]
    progress_pct: float
    retry_count: int
    owner: ReplicaId | None
    lease_until: datetime | None
    created_at: datetime
    updated_at: datetime
    ended_at: datetime | None
    failure_reason: str | None
    exclusive: bool
    preserve: bool
    checkpoint: int | None


class Refusal(StrEnum):
    """Why an operation is not resumed, in the order of the checks."""

    NOT_FOUND = "not_found"
    RUNNING = "running"  # or pending, or waiting: somebody is at it, or will be
    COMPLETED = "completed"
    NO_CHECKPOINT = "no_checkpoint"
    OTHER_ACTIVE = "other_active"  # another operation of an agent that says `exclusive`


@dataclass(frozen=True, slots=True, kw_only=True)
class Revive:
    """The wish that an ended task go on from its checkpoint, as `ready` for any replica.

    `token` names the wish: a repeated one finds itself, as long as no run has had the task since. `order` is set by a
    requester that asks again, and grows with each of its attempts, as a text of fixed width: the last one that the
    task has seen finds itself, a smaller one is refused as RUNNING, and only the agent that has asked for the task
    may ask again for it. A wish without one, by hand, is refused for neither reason.

    `agent` is None when whoever asks does not know it. `request` replaces the one that the task has. So does
    `requester`; without one nobody is answered, but for whoever still waits for a reply that was not sent: he gets
    the new outcome instead, without the old deadline. `without_checkpoint` also takes a task that has
    none, to be run from its start. `abandoned` says that whoever had the task is known to be gone: then a running,
    waiting, pending or parked one is taken as well. `adopt` leaves an active task at its work, and lets it answer
    this requester.

    `digest` is the digest of the input in `request`. A repeated request must have the same input.
    """

    task_id: TaskId
    token: str
    order: str | None = None
    agent: AgentName | None = None
    request: bytes | None = None
    requester: Requester = NOBODY
    without_checkpoint: bool = False
    abandoned: bool = False
    adopt: bool = False
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class Adopted:
    """The task is at work already, and will answer the new requester."""


@dataclass(frozen=True, slots=True)
class Revived:
    """The task is `ready`. `again` when this very wish had done it before; the task may have ended since.

    `retry_count` counts its resumes.
    """

    task_id: TaskId
    agent: AgentName
    retry_count: int
    again: bool = False


@dataclass(frozen=True, slots=True)
class NotRevived:
    """Nothing was changed. `detail` says more: the state and the owner, or the other operation's id."""

    refusal: Refusal
    detail: str = ""


ReviveResult: TypeAlias = Revived | Adopted | NotRevived
