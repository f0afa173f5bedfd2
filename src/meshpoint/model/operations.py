"""Operations (tasks that use subtasks): summaries for operators, and requests to resume them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from pydantic import JsonValue

from meshpoint.model.calls import Join
from meshpoint.model.ids import AgentName, ReplicaId, TaskId
from meshpoint.model.outcomes import Outcome
from meshpoint.model.subtasks import Child
from meshpoint.model.tasks import CheckpointDict, PlannedCall, Requester, Run
from meshpoint.model.usage import TokenUsage

if TYPE_CHECKING:
    from meshpoint.model.transitions import Pause

DIFFERENT_REQUESTER = "it was requested by another agent"
DIFFERENT_INPUT = "it was requested with a different input"
RESUMED_SINCE = "resumed since"

NO_REQUESTER = Requester()
"""In a resume by an operator, who expects no reply: the task keeps its requester."""


class OperationStatus(StrEnum):
    """The status of an operation.

    PENDING waits for any replica, WAITING for peers, and PARKED for another version of the agent's
    code or a person.
    """

    PENDING = "pending"
    PARKED = "parked"
    RUNNING = "running"
    WAITING = "waiting"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationSummary:
    """One operation.

    `phase` is its current subtask. `lease_until` is set while a replica owns it. `checkpoint` is
    the number of its last checkpoint, `None` before the first. `usage` has the tokens of all its
    attempts, up to its last pause or its end; `None` before the first pause.
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
    usage: TokenUsage | None = None


class Refusal(StrEnum):
    """Why an operation cannot be resumed, in the order of the checks."""

    NOT_FOUND = "not_found"
    RUNNING = "running"  # or pending or waiting: a replica runs it, or will
    COMPLETED = "completed"
    NO_CHECKPOINT = "no_checkpoint"  # or, to resume at a pause, no pause
    OTHER_ACTIVE = "other_active"  # another operation of an `exclusive` agent is active


@dataclass(frozen=True, slots=True, kw_only=True)
class Revive:
    """Request to resume an ended task from its checkpoint, as `ready` for any replica.

    Attributes:
        token: identifies the request. Repeating it returns the first result until a new run has
            acquired the task.
        order: set by a requester that retries a task; a fixed-width text that increases with each
            attempt. Repeating the last recorded value returns the first result, and lower values
            are refused as RUNNING. Only the agent that requested the task may retry it. Requests
            by operators have no order and skip these checks.
        agent: the task's agent, `None` if unknown.
        request: replaces the stored request.
        requester: replaces the stored requester. If unset, the stored one gets the new outcome,
            without the old deadline.
        without_checkpoint: also resume a task without a checkpoint, from its start.
        abandoned: the task's owner is known to be gone, so also accept a running, waiting, pending
            or parked task.
        adopt: let an active task continue and reply to this requester.
        digest: digest of the input in `request`. A repeated request must have the same input.
        pause: resume at the task's last pause, which is written again like this. Without it, the
            task starts again from its request.
    """

    task_id: TaskId
    token: str
    order: str | None = None
    agent: AgentName | None = None
    request: bytes | None = None
    requester: Requester = NO_REQUESTER
    without_checkpoint: bool = False
    abandoned: bool = False
    adopt: bool = False
    digest: str | None = None
    pause: Pause | None = None

    @staticmethod
    def kept_requester(requester: Requester, *, reply_sent: bool) -> Requester:
        """The task's own requester, which gets another reply if it still listens.

        Its deadline was for the earlier attempt, and so were keep-alives once it has a reply.
        """
        idle_timeout = None if reply_sent else requester.idle_timeout
        return replace(requester, deadline=None, idle_timeout=idle_timeout)


@dataclass(frozen=True, slots=True)
class KeptCall:
    """A call of a kept pause, with its outcome. `planned` has no outcome."""

    planned: PlannedCall
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class LastPause:
    """The last pause of an operation that has failed or was cancelled.

    Attributes:
        run: the run that ended the operation, with the generation of the pause.
        context: as of the pause, but with the tokens of the whole attempt, and without its
            security context.
        children: the peers' tasks of the operation, oldest first.
        retry_count: how often the operation had been resumed.
    """

    run: Run
    context: CheckpointDict
    state: bytes
    state_format: str
    join: Join
    calls: tuple[KeptCall, ...]
    children: tuple[Child, ...]
    retry_count: int


@dataclass(frozen=True, slots=True)
class Adopted:
    """The task is already active and will reply to the new requester."""


@dataclass(frozen=True, slots=True)
class Revived:
    """The task is `ready`, or `waiting` if it was resumed at a pause and asks peers again.

    `repeated` says that an earlier attempt of this request had revived it; the task may have ended
    since. `retry_count` is how often it was resumed.
    """

    task_id: TaskId
    agent: AgentName
    retry_count: int
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class NotRevived:
    """Nothing changed. `detail` has the state and owner, or the other operation's id."""

    refusal: Refusal
    detail: str = ""


ReviveResult: TypeAlias = Revived | Adopted | NotRevived
