"""The transitions of a task: arguments and results of the store port.

Instants are aware datetimes of the store's clock. `context` is always
`TaskExecutionContext.to_checkpoint_dict()`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TypeAlias

from meshpoint.model.calls import Join
from meshpoint.model.hand_over import HandOver
from meshpoint.model.ids import AgentName, ReplicaId, RunId, TaskId
from meshpoint.model.messages import Address
from meshpoint.model.outcomes import FailureKind, Outcome
from meshpoint.model.subtasks import AgentCheckpoint, Child, Operation, SaveCommitted
from meshpoint.model.tasks import (
    CancelNotice,
    CheckpointDict,
    Dispatch,
    PlannedCall,
    Replica,
    Reply,
    Requester,
    Resumable,
    Run,
    TaskState,
)
from meshpoint.model.usage import TokenUsage


@dataclass(frozen=True, slots=True)
class ExistingTask:
    """The parts of a task's row that a repeated request needs.

    `reply` is set once the task has ended. `requester` and the input's `digest` are `None` if
    unknown. `is_early_cancel` marks the tombstone of a cancel that arrived before its request;
    `requester` is then the canceller. `reply_to` is where its reply goes first. `order` is the one
    of its latest request that had an order, see `Begin`.
    """

    task_id: TaskId
    agent: AgentName
    state: TaskState
    reply: Reply | None = None
    requester: str | None = field(default=None, compare=False, kw_only=True)
    digest: str | None = field(default=None, compare=False, kw_only=True)
    is_early_cancel: bool = field(default=False, compare=False, kw_only=True)
    reply_to: Address | None = field(default=None, compare=False, kw_only=True)
    order: str | None = field(default=None, compare=False, kw_only=True)

    @property
    def is_reply_discarded(self) -> bool:
        """Whether only the id is left, because the task has ended and its reply was sent."""
        return self.state.is_final and self.reply is None


@dataclass(frozen=True, slots=True)
class Begin:
    """Write a task and its request as `running` in generation 0.

    This happens before its first segment or during it.

    Attributes:
        operation: written with the task when a subtask is about to run.
        order: the `Revive.order` of a requester that retries a task without a row, or the token of
            a request whose task must not exist yet.
        queued: write the task as `ready` instead, for any replica with a slot.
        start_at: a queued task is not acquired earlier.
        state_format: the format of the version that begins the task. A replica that serves
            several versions restarts the task with the same one.
    """

    run: Run
    replica: Replica
    requester: Requester
    request: bytes  # opaque to the store: the request message as `lifecycle` encodes it
    operation: Operation | None = None
    order: str | None = field(default=None, kw_only=True)
    digest: str | None = field(default=None, kw_only=True)  # of the request's input
    queued: bool = field(default=False, kw_only=True)
    start_at: datetime | None = field(default=None, kw_only=True)
    state_format: str | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class Save:
    """A checkpoint within a segment, which only the run that owns the task may write.

    `progressed` says whether the run has made progress, which resets its attempts.
    """

    run: Run
    checkpoint: AgentCheckpoint
    progressed: bool = field(default=True, kw_only=True)


@dataclass(frozen=True, slots=True)
class LogChange:
    """How a pause or an append changes the log of its task.

    Attributes:
        entries: appended in this order.
        after: `Resumable.log_seq` as the run read it. A row with another number is fenced.
        replaces: delete the earlier entries, which the state and `entries` replace.
        keeps_state: the row already has `Pause.state`, which is not written again.
        kept_bytes: size of the earlier entries that stay, counted for `MAX_ROW_BYTES`.
    """

    entries: tuple[bytes, ...] = field(default=(), repr=False)
    after: int = 0
    replaces: bool = False
    keeps_state: bool = False
    kept_bytes: int = 0

    @property
    def log_bytes(self) -> int:
        """Size of the log after the pause."""
        return self.kept_bytes + sum(map(len, self.entries))


@dataclass(frozen=True, slots=True)
class Append:
    """Entries of a task's log, which only the run that owns the task may append.

    Each append is progress: it resets the task's attempts, as `Save` does.
    """

    run: Run
    log: LogChange


@dataclass(frozen=True, slots=True)
class Pause:
    """A checkpoint: the task's row, one row per call, and the join.

    `request` is stored if the row is new. For an operation, `children` are the peers' tasks
    created by its calls, and `checkpoint` is written in the same transaction, as by `Save`.
    Without `log`, the task's log is unchanged, and `state_format` must not be a logged one.
    `hand_over` has the requests of its calls, and acks the requests of its task. The timeouts that
    these requests name begin at `planned_at`.
    """

    run: Run
    context: CheckpointDict
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
    log: LogChange | None = field(default=None, kw_only=True)
    hand_over: HandOver | None = field(default=None, compare=False, kw_only=True)
    planned_at: datetime | None = field(default=None, compare=False, kw_only=True)

    def dispatch(self, call: PlannedCall, deadline: datetime) -> Dispatch:
        """The request of one of its calls."""
        run = self.run
        return Dispatch(
            run.agent,
            run.task_id,
            run.generation + 1,
            call.sub_task_id,
            call.peer,
            call.body,
            call.headers,
            deadline,
        )


@dataclass(frozen=True, slots=True)
class Claim:
    """Record one outcome, or retry its call.

    Repeating a claim with the same `id` returns the first result again, but `StillWaiting` for a
    retry.

    `sender` must be the called peer; `None` is the mesh itself (undeliverable). `hand_over` acks
    the response.
    """

    id: RunId
    task_id: TaskId
    sub_task_id: TaskId
    outcome: Outcome
    sender: str | None
    refused_fingerprint: str | None = field(
        default=None, kw_only=True
    )  # fingerprint of the refused request
    retryable: bool = field(default=True, kw_only=True)  # whether the sender allows a retry
    retry_after: float | None = field(default=None, kw_only=True)  # seconds, if it asks to wait
    hand_over: HandOver | None = field(default=None, compare=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class End:
    """The task's outcome, with the reply's body.

    `dead_reason` lists the task as dead and keeps its request. For an operation that did not
    complete, `checkpoint` is its last checkpoint, with the reason. Without it, the stored
    checkpoint is repeated with `reason`. `usage` has the tokens of all attempts of an operation;
    its next one starts with them, and the records of `checkpoint` no longer count them.
    `hand_over` has the reply, and acks the requests of the task.
    """

    run: Run
    state: TaskState
    reply: bytes
    dead_reason: str | None = None
    reason: str | None = None
    checkpoint: AgentCheckpoint | None = None
    usage: TokenUsage | None = None
    hand_over: HandOver | None = field(default=None, compare=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Release:
    """Make a running task `ready` for any replica.

    `counts_as_attempt` increments its attempts, because its own process died or it has been
    rescued too often. `crash_reason` describes that crash; the row keeps it for the next owner, in
    case the task fails.

    With `parked_reason`, the task becomes `parked` instead: `version` of the agent's code cannot
    continue it.
    """

    run: Run
    delay: timedelta = timedelta()
    parked_reason: str | None = None
    counts_as_attempt: bool = False
    crash_reason: str | None = None
    version: str = ""


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
class StoreReply:
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
    retention: timedelta | None = None
    is_redelivery: bool = False
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class UnroutableCall:
    """A request that the broker returned because its peer has no queue.

    Attributes:
        starts: Whether the time until the call is undeliverable starts now.
        retry_after: When to send the request again, at the latest.
    """

    task_id: TaskId
    generation: int
    sub_task_id: TaskId
    starts: bool
    retry_after: timedelta


@dataclass(frozen=True, slots=True)
class Progress:
    """A peer's status update for one call."""

    task_id: TaskId
    sub_task_id: TaskId
    sender: str


@dataclass(frozen=True, slots=True)
class BeginCommitted:
    """The row exists and this run owns it, also after a repeated begin.

    `queued`: the row is `ready` without an owner.
    """

    run: Run
    queued: bool = False


@dataclass(frozen=True, slots=True)
class PauseCommitted:
    """The checkpoint is durable. `state` is WAITING, or READY if the join was complete at once."""

    state: TaskState
    dispatches: tuple[Dispatch, ...]


@dataclass(frozen=True, slots=True)
class EndCommitted:
    """The end is durable. Publish `reply`, then record it as sent."""

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


PauseResult: TypeAlias = PauseCommitted | Fenced | CancelFound | PastDeadline

BeginResult: TypeAlias = BeginCommitted | Fenced | CancelFound

SaveResult: TypeAlias = SaveCommitted | Fenced | CancelFound
"""The result of `Save` and `Append`. Nothing was written unless committed."""

EndResult: TypeAlias = EndCommitted | Fenced


@dataclass(frozen=True, slots=True)
class UnknownCall:
    """The call does not exist: its task has ended or moved on to a later generation."""

    task_id: TaskId
    sub_task_id: TaskId


@dataclass(frozen=True, slots=True)
class DuplicateOutcome:
    """The call already has its outcome."""

    task_id: TaskId
    sub_task_id: TaskId


@dataclass(frozen=True, slots=True)
class WrongSender:
    """The outcome came from an agent other than the one called."""

    task_id: TaskId
    sub_task_id: TaskId
    expected: AgentName


@dataclass(slots=True)  # not frozen: it is created for most claims
class StillWaiting:
    """The outcome is recorded and the join is not complete."""

    task_id: TaskId
    sub_task_id: TaskId


@dataclass(frozen=True, slots=True)
class CallRetried:
    """An attempt failed and does not count: attempt `number`, `next_id`, begins after `wait`."""

    task_id: TaskId
    sub_task_id: TaskId
    next_id: TaskId
    peer: AgentName
    number: int
    wait: timedelta
    kind: FailureKind


@dataclass(frozen=True, slots=True)
class TaskReady:
    """The outcome completed the join, but no slot is free here; any replica may acquire it."""

    task_id: TaskId
    sub_task_id: TaskId
    cancels: tuple[CancelNotice, ...] = ()


@dataclass(frozen=True, slots=True)
class JoinCompleted:
    """The outcome completed the join and this replica owns the task.

    `cancels` are for the calls that the join closed.
    """

    task_id: TaskId
    sub_task_id: TaskId
    task: Resumable
    cancels: tuple[CancelNotice, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskLocked:
    """Another database session has locked a row of the task.

    Nothing was written; retry later. `sub_task_id` is the claim's; it is `None` for a cancel.
    """

    task_id: TaskId
    sub_task_id: TaskId | None = None


@dataclass(frozen=True, slots=True)
class Overdue:
    """A ready or parked task that this replica now owns, only to end it.

    Its own deadline has passed, or it has been parked for too long. `parked_reason` says why it
    was parked, and `is_suspended` whether a person had suspended it. `task` is without content
    (`Resumable.without_content`), so that damaged content does not prevent the end.
    """

    task: Resumable
    past_deadline: bool
    parked_reason: str | None = None
    is_suspended: bool = field(default=False, kw_only=True)


ClaimResult: TypeAlias = (
    UnknownCall
    | DuplicateOutcome
    | WrongSender
    | StillWaiting
    | CallRetried
    | TaskReady
    | JoinCompleted
    | TaskLocked
)


@dataclass(frozen=True, slots=True)
class ExpiryResult:
    """The effect of passed time on one waiting task: the calls that it ended and the result.

    `timed_out` includes the attempts in `retried`, whose calls are still open. `cancels` has all
    cancels, and `join_result` none.
    """

    task_id: TaskId
    timed_out: tuple[TaskId, ...]
    join_result: StillWaiting | TaskReady | JoinCompleted
    cancels: tuple[CancelNotice, ...] = ()
    retried: tuple[CallRetried, ...] = ()


@dataclass(frozen=True, slots=True)
class CancelCommitted:
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


@dataclass(frozen=True, slots=True)
class Attach:
    """Also send the reply of a task to another address of its requester, `sender`."""

    task_id: TaskId
    agent: AgentName
    sender: str
    reply_to: Address


@dataclass(frozen=True, slots=True)
class Attached:
    """The reply of the task, which is in `state`, will also be sent to this address.

    It is sent to the address that attached last, and then to up to three others. `dropped` is the
    address whose place it took: it gets neither updates nor the reply.
    """

    state: TaskState
    dropped: Address | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class AttachEnded:
    """The task has ended with `reply`, addressed to its requester. Nothing changed.

    An early cancel of the same sender is the outcome of its request, even before that arrives.
    """

    reply: Reply


@dataclass(frozen=True, slots=True)
class AttachRefused:
    """The task belongs to `requester`. Nothing changed."""

    requester: str | None


@dataclass(frozen=True, slots=True)
class AttachUnknown:
    """The agent has no row of this task, or only the tombstone of another's early cancel."""


AttachResult: TypeAlias = Attached | AttachEnded | AttachRefused | AttachUnknown | TaskLocked


CancelResult: TypeAlias = (
    CancelCommitted
    | CancelRequested
    | CancelTooLate
    | CancelBeforeRequest
    | CancelStale
    | CancelRefused
    | TaskLocked
)


@dataclass(frozen=True, slots=True)
class TaskSuspended:
    """No replica acquires the task until it is resumed.

    Attributes:
        state: a `running` task continues to its next pause.
        repeated: whether it was already suspended; the first time is then kept.
    """

    state: TaskState
    repeated: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class SuspendRefused:
    """The task cannot be suspended, and nothing changed.

    Attributes:
        state: parked or ended; `None` if the task has no row in this namespace.
        is_cancelled: whether it only waits for its cancel.
    """

    state: TaskState | None
    is_cancelled: bool = field(default=False, kw_only=True)


SuspendResult: TypeAlias = TaskSuspended | SuspendRefused


@dataclass(frozen=True, slots=True)
class ProgressRecorded:
    """Forward the status update to this requester of the waiting task, and to `followers`.

    `idle_timeout` is the call's.
    """

    task_id: TaskId
    requester: Requester
    idle_timeout: timedelta | None = field(default=None, compare=False)
    followers: tuple[Address, ...] = ()
