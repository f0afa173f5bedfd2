"""Arguments and results of the store port.

Instants are aware datetimes of the store's clock. `context` is always
`TaskExecutionContext.to_checkpoint_dict()`. The module is long because it holds the port's
complete vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TypeAlias

from pydantic import JsonValue

from meshpoint.model.calls import Join
from meshpoint.model.ids import AgentName, ReplicaId, RunId, TaskId
from meshpoint.model.messages import Address
from meshpoint.model.outcomes import Failed, Outcome
from meshpoint.model.subtasks import AgentCheckpoint, Child, Operation, Saved

Checkpoint: TypeAlias = dict[str, JsonValue]

SUSPECT_FROM = 2
"""Number of rescues since the last pause after which a task is a suspect and runs isolated."""

MOST_OF_A_ROW = 256 * 1024 * 1024
"""Maximum bytes of stored state and context. PostgreSQL writes 1 GiB rows but cannot read them."""


class TaskState(StrEnum):
    """The state of a task's row.

    The last three are tombstones, which keep the reply until `expires_at`.
    """

    RUNNING = "running"  # a replica owns it and renews its lease
    WAITING = "waiting"  # waits for peers
    READY = "ready"  # its join is met; waits for a free slot
    PARKED = "parked"  # no replica could read its state for too long: waits for an operator
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether the task has its final outcome."""
        return self in {TaskState.COMPLETED, TaskState.FAILED, TaskState.CANCELLED}


class CallState(StrEnum):
    """The state of a peer call's row."""

    PENDING = "pending"  # no outcome yet
    DONE = "done"  # has its outcome
    CANCELLING = "cancelling"  # has its outcome, but the peer has not been sent a cancel yet


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica's incarnation and the state formats that its agent can read.

    If `isolates`, it runs suspects in their own processes and counts the crashes there as
    attempts. Otherwise every rescue counts as an attempt.
    """

    id: ReplicaId
    agent: AgentName
    formats: frozenset[str]
    lease: timedelta
    isolates: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one segment. `fence` is 0 while the task has no row."""

    task_id: TaskId
    agent: AgentName
    id: RunId
    fence: int = 0
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Requester:
    """The requester of a task and how to reply, in columns readable without the context."""

    reply_to: Address | None = None
    app_id: str | None = None
    parent_task_id: str | None = None
    deadline: datetime | None = None
    idle_timeout: timedelta | None = None


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """A call to write in a pause. `outcome` is set if the call failed before it could be sent."""

    sub_task_id: TaskId
    call_id: str
    peer: AgentName
    body: bytes
    timeout: timedelta
    idle_timeout: timedelta | None = None
    headers: dict[str, str | int | float] = field(default_factory=dict)
    outcome: Failed | None = None


@dataclass(frozen=True, slots=True)
class Begin:
    """Write a task and its request as `running` in generation 0.

    This happens before its first segment or during it.

    Attributes:
        operation: written with the task when a subtask is about to run.
        order: the `Revive.order` of a requester that retries a task without a row.
        queued: write the task as `ready` instead, for any replica with a slot.
    """

    run: Run
    replica: Replica
    requester: Requester
    request: bytes  # opaque to the store: the request message as `lifecycle` encodes it
    operation: Operation | None = None
    order: str | None = field(default=None, kw_only=True)
    digest: str | None = field(default=None, kw_only=True)  # of the request's input
    queued: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Track:
    """Make a task with a row an operation, because its first subtask is about to run."""

    run: Run
    operation: Operation


@dataclass(frozen=True, slots=True)
class Save:
    """A checkpoint within a segment, which only the run that owns the task may write.

    `progressed` says whether the run has made progress, which resets its attempts.
    """

    run: Run
    checkpoint: AgentCheckpoint
    progressed: bool = field(default=True, kw_only=True)


@dataclass(frozen=True, slots=True)
class Pause:
    """A checkpoint: the task's row, one row per call, and the join.

    `request` is stored if the row is new. For an operation, `children` are the peers' tasks
    created by its calls, and `checkpoint` is written in the same transaction, as by `Save`.
    """

    run: Run
    context: Checkpoint
    state: bytes
    state_format: str
    calls: tuple[PlannedCall, ...]
    join: Join
    requester: Requester
    request: bytes | None = None
    app_version: str | None = None
    framework: str | None = None
    children: tuple[Child, ...] = ()
    checkpoint: AgentCheckpoint | None = None
    digest: str | None = field(default=None, kw_only=True)  # of the request's input


@dataclass(frozen=True, slots=True)
class Claim:
    """Record one outcome. Repeating a claim with the same `id` returns the first result again.

    `sender` must be the called peer; `None` is the mesh itself (undeliverable).
    """

    id: RunId
    task_id: TaskId
    sub_task_id: TaskId
    outcome: Outcome
    sender: str | None
    refuses: str | None = field(default=None, kw_only=True)  # fingerprint of the refused request


@dataclass(frozen=True, slots=True)
class End:
    """The task's outcome, with the reply's body.

    `dead_reason` lists the task as dead and keeps its request. For an operation that did not
    complete, `checkpoint` is its last checkpoint, with the reason. Without it, the stored
    checkpoint is repeated with `reason`.
    """

    run: Run
    state: TaskState
    reply: bytes
    dead_reason: str | None = None
    reason: str | None = None
    checkpoint: AgentCheckpoint | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """Make a running task `ready` for any replica.

    `incompatible` is set if its state could not be read here. `counted` increments its attempts,
    because its own process died or it has been rescued too often. `death` describes that crash;
    the row keeps it for the next owner, in case the task fails.
    """

    run: Run
    not_before: timedelta = timedelta()
    incompatible: str | None = None
    counted: bool = False
    death: str | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a task as cancelled, with `reply` as the body of its reply.

    `parent` is the `parent_task_id` under which the canceller requested the task, `None` if
    unknown. A task that has since been requested under another parent is left unchanged. `sender`
    must be the task's requester or its own agent; `None` may cancel any task.
    """

    task_id: TaskId
    agent: AgentName
    run_id: RunId
    reply: bytes
    parent: str | None = field(default=None, kw_only=True)
    sender: str | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class KeepReply:
    """Keep an undeliverable reply in a tombstone if its task has no row.

    The tombstone of an early cancel does not count as the task's row: the reply replaces it.

    Attributes:
        keep: how long the row stays. `None` for the default of tombstones.
        again: the request of an ended task was delivered again; the stored reply becomes due for
            the requester in `reply`.
        digest: digest of the request's input.
    """

    run_id: RunId
    reply: Reply
    keep: timedelta | None = None
    again: bool = False
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """A peer's status update for one call."""

    task_id: TaskId
    sub_task_id: TaskId
    sender: str


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A peer request to send. `deadline` is the call's own; the peer gets it less a margin."""

    agent: AgentName
    task_id: TaskId
    generation: int
    sub_task_id: TaskId
    peer: AgentName
    body: bytes
    headers: dict[str, str | int | float]
    deadline: datetime
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class CancelNotice:
    """Notifies a peer that the result of its task is no longer needed."""

    agent: AgentName
    task_id: TaskId
    sub_task_id: TaskId
    peer: AgentName


@dataclass(frozen=True, slots=True)
class Reply:
    """An ended task's reply to send.

    `age` limits how long an unroutable reply is retried. `fence` is the row's fence at this end; a
    revived task ends again with a different one.
    """

    agent: AgentName
    task_id: TaskId
    state: TaskState
    body: bytes
    requester: Requester
    age: timedelta = timedelta()
    fence: int = field(default=0, kw_only=True)


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """A keep-alive for a requester with an idle timeout, while its task waits."""

    agent: AgentName
    task_id: TaskId
    requester: Requester


Send: TypeAlias = Dispatch | CancelNotice | Reply


@dataclass(frozen=True, slots=True)
class Due:
    """Number of due items of each kind, each up to a limit, including locked rows."""

    ready: int = 0
    lapsed: int = 0  # running tasks with an expired lease
    expired: int = 0
    keep_alives: int = 0
    unsent: int = 0


@dataclass(frozen=True, slots=True)
class Known:
    """The parts of a task's row that a repeated request needs.

    `reply` is set once the task has ended. `requester` and the input's `digest` are `None` if
    unknown. `early` marks the tombstone of a cancel that arrived before its request; `requester`
    is then the canceller.
    """

    task_id: TaskId
    agent: AgentName
    state: TaskState
    reply: Reply | None = None
    requester: str | None = field(default=None, compare=False, kw_only=True)
    digest: str | None = field(default=None, compare=False, kw_only=True)
    early: bool = field(default=False, compare=False, kw_only=True)

    @property
    def forgotten(self) -> bool:
        """Whether only the id is left, because the task has ended and its reply was sent."""
        return self.state.ended and self.reply is None


@dataclass(frozen=True, slots=True)
class Begun:
    """The row exists and this run owns it, also after a repeated begin.

    `queued`: the row is `ready` without an owner.
    """

    run: Run
    queued: bool = False


@dataclass(frozen=True, slots=True)
class Committed:
    """The checkpoint is durable. `state` is WAITING, or READY if the join was complete at once."""

    state: TaskState
    dispatches: tuple[Dispatch, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """The end is durable. Publish `reply`, then mark it as sent."""

    reply: Reply


@dataclass(frozen=True, slots=True)
class Fenced:
    """Another run owns the task. This run is a zombie and changed nothing."""


@dataclass(frozen=True, slots=True)
class CancelFound:
    """A cancel was requested in the meantime.

    `run` is set if this run still owns the row: end the task as cancelled. It is `None` if the row
    is already a tombstone.
    """

    run: Run | None


@dataclass(frozen=True, slots=True)
class PastDeadline:
    """The task's own deadline has passed and nothing was written. End the task as failed."""


PauseResult: TypeAlias = Committed | Fenced | CancelFound | PastDeadline
BeginResult: TypeAlias = Begun | Fenced | CancelFound
SaveResult: TypeAlias = Saved | Fenced | CancelFound
EndResult: TypeAlias = Ended | Fenced


@dataclass(frozen=True, slots=True)
class Resumable:
    """A task that this replica now owns, read after its row was locked.

    Attributes:
        outcomes: (call id, peer, outcome) in call order. Empty in generation 0, where `request`
            runs from the start.
        attempt: number of runs of this segment that may have crashed their process, including this
            one.
        checkpoint: number of an operation's last checkpoint; 0 before the first, `None` if the
            task is not an operation.
        retry_count: how often the operation was resumed.
        rescues: owners lost since the last pause, for any reason.
        death: how the task's own process last died.
        refused: why `outcomes` is empty although outcomes exist: they are too large for one
            replica, so the task must fail.
    """

    run: Run
    requester: Requester
    context: Checkpoint
    state: bytes
    state_format: str
    outcomes: tuple[tuple[str, AgentName, Outcome], ...]
    request: bytes | None
    attempt: int
    cancel_requested: bool = False
    checkpoint: int | None = None
    retry_count: int = 0
    rescues: int = 0
    death: str | None = None
    refused: str | None = None
    digest: str | None = field(default=None, compare=False)

    @property
    def suspect(self) -> bool:
        """Whether this task may have crashed its owners and must run isolated."""
        return self.rescues >= SUSPECT_FROM


@dataclass(frozen=True, slots=True)
class L1Snapshot:
    """The packed working memory of an operation at checkpoint `seq`, with its digest there."""

    seq: int
    digest: str
    content: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Unknown:
    """The call does not exist: its task has ended or moved on to a later generation."""

    task_id: TaskId
    sub_task_id: TaskId


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The call already has its outcome."""

    task_id: TaskId
    sub_task_id: TaskId


@dataclass(frozen=True, slots=True)
class WrongSender:
    """The outcome came from an agent other than the one called."""

    task_id: TaskId
    sub_task_id: TaskId
    expected: AgentName


@dataclass(frozen=True, slots=True)
class StillWaiting:
    """The outcome is recorded and the join is not complete."""

    task_id: TaskId
    sub_task_id: TaskId


@dataclass(frozen=True, slots=True)
class MadeReady:
    """The outcome completed the join, but no slot is free here; any replica may acquire it."""

    task_id: TaskId
    sub_task_id: TaskId
    cancels: tuple[CancelNotice, ...] = ()


@dataclass(frozen=True, slots=True)
class AllArrived:
    """The outcome completed the join and this replica owns the task.

    `cancels` are for the calls that the join closed.
    """

    task_id: TaskId
    sub_task_id: TaskId
    task: Resumable
    cancels: tuple[CancelNotice, ...] = ()


@dataclass(frozen=True, slots=True)
class Locked:
    """Another database session has locked a row of the task.

    Nothing was written; retry later. `sub_task_id` is the claim's; it is `None` for a cancel.
    """

    task_id: TaskId
    sub_task_id: TaskId | None = None


Arrival: TypeAlias = Unknown | Duplicate | WrongSender | StillWaiting | MadeReady | AllArrived | Locked


@dataclass(frozen=True, slots=True)
class Expired:
    """The effect of passed deadlines on one waiting task: the timed-out calls and the result."""

    task_id: TaskId
    timed_out: tuple[TaskId, ...]
    then: StillWaiting | MadeReady | AllArrived
    cancels: tuple[CancelNotice, ...] = ()


@dataclass(frozen=True, slots=True)
class CancelledNow:
    """The task was waiting, ready or parked, and is now cancelled."""

    reply: Reply
    cancels: tuple[CancelNotice, ...]


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """The task is running and its cancel flag is set. Broadcast the cancel to all replicas."""

    owner: ReplicaId | None


@dataclass(frozen=True, slots=True)
class CancelTooLate:
    """The task had already ended, with `reply`."""

    reply: Reply


@dataclass(frozen=True, slots=True)
class CancelBeforeRequest:
    """The task is unknown and a tombstone was written.

    Broadcast the cancel to all replicas, because the task may be running without a row.
    """


@dataclass(frozen=True, slots=True)
class CancelStale:
    """The cancel belongs to an earlier attempt; the task was requested again. Nothing changed."""


@dataclass(frozen=True, slots=True)
class CancelRefused:
    """The task belongs to another requester. Nothing changed."""


CancelResult: TypeAlias = (
    CancelledNow | CancelRequested | CancelTooLate | CancelBeforeRequest | CancelStale | CancelRefused | Locked
)


@dataclass(frozen=True, slots=True)
class ProgressNoted:
    """Forward the status update to this requester of the waiting task."""

    task_id: TaskId
    requester: Requester


@dataclass(frozen=True, slots=True)
class CallSummary:
    """One call of a task, as printed by `tasks show`."""

    sub_task_id: TaskId
    call_id: str
    peer: AgentName
    generation: int
    state: CallState
    outcome: str | None
    dispatched_at: datetime | None
    deadline: datetime


@dataclass(frozen=True, slots=True)
class TaskSummary:
    """One task, as printed by `tasks list`: "waiting, 2 of 3"."""

    task_id: TaskId
    agent: AgentName
    state: TaskState
    generation: int
    fence: int
    attempt: int
    owner: ReplicaId | None
    completed: int
    expected: int
    checkpointed_at: datetime
    wake_at: datetime
    dead_reason: str | None = None
    rescues: int = 0
