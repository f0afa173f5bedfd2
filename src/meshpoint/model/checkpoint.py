"""The values that cross the store port: what a transition needs, and what came of it.

Instants are aware datetimes of the store's clock. `context` is always
`TaskExecutionContext.to_checkpoint_dict()`. Long, because it is the whole vocabulary of that port in one place.
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
"""Rescues since the last pause at which a task becomes a suspect and runs in its own process."""

MOST_OF_A_ROW = 256 * 1024 * 1024
"""Bytes of a state with its context, at rest: PostgreSQL writes a row of 1 GiB, but cannot read it again."""


class TaskState(StrEnum):
    """Where a task's row stands. The last three are tombstones: the reply is kept until `expires_at`."""

    RUNNING = "running"  # a replica owns it and renews its lease
    WAITING = "waiting"  # for peers
    READY = "ready"  # its join is met; waits for a free slot
    PARKED = "parked"  # no replica could read its state for too long: waits for a person
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether the task has its outcome."""
        return self in {TaskState.COMPLETED, TaskState.FAILED, TaskState.CANCELLED}


class CallState(StrEnum):
    """Where a peer call's row stands."""

    PENDING = "pending"  # no outcome yet
    DONE = "done"  # has its outcome
    CANCELLING = "cancelling"  # has its outcome, and the peer is still to be told that it may stop


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica's incarnation, and the state formats that its agent can read.

    `isolates`: it runs suspects in their own processes and counts deaths there. Otherwise each rescue counts as an
    attempt.
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
    """Who asked for a task and how to answer: the columns that sweeping and ending need without the context."""

    reply_to: Address | None = None
    app_id: str | None = None
    parent_task_id: str | None = None
    deadline: datetime | None = None
    idle_timeout: timedelta | None = None


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """A call as a pause writes it. `outcome` is set when it failed before it could be sent."""

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
    """Write a task as `running` in generation 0, with its request kept: before its first segment, or within it.

    `operation` is written with it when a subtask is about to run. `order` is the `Revive.order` of a requester that
    asks again for a task that has no row. With `queued` the task is `ready` instead, for any replica with a slot.
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
    """Write the operation of a task that has a row: its first subtask is about to run."""

    run: Run
    operation: Operation


@dataclass(frozen=True, slots=True)
class Save:
    """A checkpoint within a segment. Only the run that owns the task may write it.

    `progressed` tells whether the run has come further with it, so that its attempts are counted anew.
    """

    run: Run
    checkpoint: AgentCheckpoint
    progressed: bool = field(default=True, kw_only=True)


@dataclass(frozen=True, slots=True)
class Pause:
    """A checkpoint: the task's row, one row per call, the join row. `request` is kept when the row is new.

    `children` is set for an operation: the tasks that its calls are at their peers. So is `checkpoint`, which is
    written in the same transaction, as `Save` writes one.
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
    """The wish to record one outcome. `id` is the claim's own: a repeated claim gets its first result again.

    `sender` must be the called peer; None is the mesh itself (undeliverable).
    """

    id: RunId
    task_id: TaskId
    sub_task_id: TaskId
    outcome: Outcome
    sender: str | None
    refuses: str | None = field(default=None, kw_only=True)  # the fingerprint of the request that was not run


@dataclass(frozen=True, slots=True)
class End:
    """The task's outcome, with the reply's body. `dead_reason` lists it as dead, its request kept.

    For an operation that did not complete: `checkpoint` is its last one, with why it ended. Without it, the one
    that stands is written once more, with `reason`.
    """

    run: Run
    state: TaskState
    reply: bytes
    dead_reason: str | None = None
    reason: str | None = None
    checkpoint: AgentCheckpoint | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """Give a running task back as `ready`. `incompatible` when its state could not be read here.

    `counted` increments its attempts, because its own process died or it has been rescued too often. `death`
    describes that death; the row keeps it for the next owner, in case the task fails.
    """

    run: Run
    not_before: timedelta = timedelta()
    incompatible: str | None = None
    counted: bool = False
    death: str | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a task as cancelled, with `reply` as its reply's body.

    `parent` is the `parent_task_id` under which whoever cancels has asked for it, None when that is not known. A task
    that was asked for under another one since is left alone. `sender` must be the task's requester or the agent
    itself; `None` may cancel any task.
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

    `keep` is how long the row stays, `None` for as long as any tombstone. With `again`, the request of an ended task
    was delivered again: the reply in its row becomes due again, for the requester of `reply`. `digest` is the digest
    of the request's input.
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


# ── what is to be sent, read back from committed rows ──────────────────────────────────────────────


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
    """A peer to be told that its task is no longer needed."""

    agent: AgentName
    task_id: TaskId
    sub_task_id: TaskId
    peer: AgentName


@dataclass(frozen=True, slots=True)
class Reply:
    """An ended task's reply to send. `age` bounds how long an unroutable one is tried.

    `fence` is that of the task's row at this end: a task that was revived has another one at its next.
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
    """A requester with an idle timeout is to hear that its waiting task is alive."""

    agent: AgentName
    task_id: TaskId
    requester: Requester


Send: TypeAlias = Dispatch | CancelNotice | Reply


@dataclass(frozen=True, slots=True)
class Due:
    """Counts of due work of each kind, each up to a limit, including locked rows."""

    ready: int = 0
    lapsed: int = 0  # running tasks with an expired lease
    expired: int = 0
    keep_alives: int = 0
    unsent: int = 0


# ── results ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Known:
    """The parts of a task's row that a repeated request needs. `reply` is set once the task has ended.

    `requester` and the input's `digest` are `None` if unknown. `early`: the row is the tombstone of a cancel that
    came before its request, and `requester` is the canceller.
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
        """Whether the task has ended, its reply was sent, and only its id is still known."""
        return self.state.ended and self.reply is None


@dataclass(frozen=True, slots=True)
class Begun:
    """The row exists and this run owns it, also after a repeated begin. `queued`: it is ready, without an owner."""

    run: Run
    queued: bool = False


@dataclass(frozen=True, slots=True)
class Committed:
    """The checkpoint is durable. `state` is WAITING, or READY when the join was met at once."""

    state: TaskState
    dispatches: tuple[Dispatch, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """The end is durable; send `reply`, then mark it sent."""

    reply: Reply


@dataclass(frozen=True, slots=True)
class Fenced:
    """Another run owns the task: this one is a zombie and changed nothing."""


@dataclass(frozen=True, slots=True)
class CancelFound:
    """The task was cancelled meanwhile.

    `run` is set when the row is still this run's (its cancel flag is up): end it as cancelled.
    It is None when the row is a tombstone already.
    """

    run: Run | None


@dataclass(frozen=True, slots=True)
class PastDeadline:
    """The task's own deadline has passed; nothing was written. End it as failed."""


PauseResult: TypeAlias = Committed | Fenced | CancelFound | PastDeadline
BeginResult: TypeAlias = Begun | Fenced | CancelFound
SaveResult: TypeAlias = Saved | Fenced | CancelFound
EndResult: TypeAlias = Ended | Fenced


@dataclass(frozen=True, slots=True)
class Resumable:
    """A task this replica now owns, read after its row was locked.

    `outcomes` holds (call id, peer, outcome) in call order; it is empty in generation 0, where `request` is
    to be run from the start. `attempt` counts the runs of this segment that may have killed their process, including
    this one; `rescues` counts the owners lost since the last pause for any reason, and `death` describes how the
    task's own process last died. `checkpoint` is the number of an operation's last checkpoint, 0 before the
    first, None for a task that is none; `retry_count` how often it was resumed. `refused` says why the outcomes are
    missing: they are too large for one replica, and the task can only fail.
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
        """Whether this task may have killed its owners and must run separately."""
        return self.rescues >= SUSPECT_FROM


@dataclass(frozen=True, slots=True)
class L1Snapshot:
    """The working memory that an operation had at its checkpoint `seq`, packed. `digest` is its hash there."""

    seq: int
    digest: str
    content: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Unknown:
    """No such call: its task has ended, or gone on to a later generation."""

    task_id: TaskId
    sub_task_id: TaskId


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The call has its outcome already."""

    task_id: TaskId
    sub_task_id: TaskId


@dataclass(frozen=True, slots=True)
class WrongSender:
    """The outcome came from another agent than the one called."""

    task_id: TaskId
    sub_task_id: TaskId
    expected: AgentName


@dataclass(frozen=True, slots=True)
class StillWaiting:
    """Recorded; the join is not met yet."""

    task_id: TaskId
    sub_task_id: TaskId


@dataclass(frozen=True, slots=True)
class MadeReady:
    """Recorded, and the join is met; no slot here, so any replica may take it."""

    task_id: TaskId
    sub_task_id: TaskId
    cancels: tuple[CancelNotice, ...] = ()


@dataclass(frozen=True, slots=True)
class AllArrived:
    """Recorded, the join is met, and this replica owns the task. `cancels`: calls the join closed."""

    task_id: TaskId
    sub_task_id: TaskId
    task: Resumable
    cancels: tuple[CancelNotice, ...] = ()


@dataclass(frozen=True, slots=True)
class Locked:
    """Another database session holds the task or one of its rows. Nothing was written; try again later.

    `sub_task_id` belongs to the claim; it is `None` for a cancel.
    """

    task_id: TaskId
    sub_task_id: TaskId | None = None


Arrival: TypeAlias = Unknown | Duplicate | WrongSender | StillWaiting | MadeReady | AllArrived | Locked


@dataclass(frozen=True, slots=True)
class Expired:
    """What the passing of time did to one waiting task: the calls that ended as timeouts, and then what."""

    task_id: TaskId
    timed_out: tuple[TaskId, ...]
    then: StillWaiting | MadeReady | AllArrived
    cancels: tuple[CancelNotice, ...] = ()


@dataclass(frozen=True, slots=True)
class CancelledNow:
    """The task was waiting, ready or parked, and has ended as cancelled."""

    reply: Reply
    cancels: tuple[CancelNotice, ...]


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """The task is running; its flag is up. Tell all replicas."""

    owner: ReplicaId | None


@dataclass(frozen=True, slots=True)
class CancelTooLate:
    """The task has ended; its reply is in `reply`."""

    reply: Reply


@dataclass(frozen=True, slots=True)
class CancelBeforeRequest:
    """No such task here: a tombstone now stands in its place. Tell all replicas, it may run in memory."""


@dataclass(frozen=True, slots=True)
class CancelStale:
    """The cancel is of an earlier attempt of whoever asked: the task was asked for anew since. Nothing changed."""


@dataclass(frozen=True, slots=True)
class CancelRefused:
    """The task belongs to another requester. Nothing changed."""


CancelResult: TypeAlias = (
    CancelledNow | CancelRequested | CancelTooLate | CancelBeforeRequest | CancelStale | CancelRefused | Locked
)


@dataclass(frozen=True, slots=True)
class ProgressNoted:
    """Where to forward a status update of a call: to the requester of the waiting task."""

    task_id: TaskId
    requester: Requester


# ── for people ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class CallSummary:
    """One call of a task, as `tasks show` prints it."""

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
    """One task, as `tasks list` prints it: "waiting, 2 of 3"."""

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
