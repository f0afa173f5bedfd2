"""Tasks as their store sees them: states, owners, requesters, and messages to send.

Instants are aware datetimes of the store's clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import NamedTuple, TypeAlias, TypeVar

from pydantic import JsonValue

from meshpoint.model.ids import AgentName, ReplicaId, RunId, TaskId, new_id
from meshpoint.model.messages import Address
from meshpoint.model.outcomes import Outcome
from meshpoint.model.retry_policy import RetryPolicy
from meshpoint.model.usage import TokenUsage

CheckpointDict: TypeAlias = dict[str, JsonValue]
_Instant = TypeVar("_Instant", datetime, float)

SUSPECT_AFTER_RESCUES = 2
"""Number of rescues since the last pause after which a task is a suspect and runs isolated."""

MAX_ROW_BYTES = 256 * 1024 * 1024
"""Maximum bytes of stored state, context and log.

PostgreSQL writes 1 GiB rows but cannot read them.
"""

LOG_SUFFIX = "+log"
"""Marks the stored state format of a task with a log.

A release that cannot read logs therefore does not resume the task without its history.
"""

WAITS_SUFFIX = "+waits"
"""Marks the stored state format of a task that has slept.

So a release that knows only peer calls does not resume it. `LOG_SUFFIX` follows it.
"""

_MAX_CANCELLERS = 8
_CANCELLER_SEPARATOR = "\n"  # cannot occur in a name, since names are printable


class TaskState(StrEnum):
    """The state of a task's row.

    The last three are tombstones, which keep the reply until `expires_at`.
    """

    RUNNING = "running"  # a replica owns it and renews its lease
    WAITING = "waiting"  # waits for peers
    READY = "ready"  # its join is met; waits for a free slot
    PARKED = "parked"  # its agent's code cannot continue it: waits for another version or a person
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether the task has its final outcome."""
        return self in {TaskState.COMPLETED, TaskState.FAILED, TaskState.CANCELLED}

    @property
    def can_be_suspended(self) -> bool:
        """Whether a person can suspend a task in this state."""
        return self in {TaskState.RUNNING, TaskState.WAITING, TaskState.READY}


class CallState(StrEnum):
    """The state of a peer call's row."""

    PENDING = "pending"  # no outcome yet
    DONE = "done"  # has its outcome
    CANCELLING = "cancelling"  # has its outcome, but the peer has not been sent a cancel yet


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica's incarnation, and the state formats and the version of its agent.

    `version` identifies the agent's code: each version tries a parked task once. If `isolates`, it
    runs suspects in their own processes and counts the crashes there as attempts. Otherwise every
    rescue counts as an attempt. If `fails_lost`, it rescues operations only to end them as failed,
    without their code, so it needs neither their format nor room for suspects.
    """

    id: ReplicaId
    agent: AgentName
    formats: frozenset[str]
    lease: timedelta
    isolates: bool = False
    version: str = ""
    fails_lost: bool = False

    @classmethod
    def onlooker(cls, agent: AgentName) -> Replica:
        """A replica that acquires no task, for changes by others than replicas."""
        return cls(ReplicaId(new_id()), agent, frozenset(), timedelta(seconds=1))


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
    """The requester of a task and how to reply, in columns readable without the context.

    `result_ttl` is the minimum time for which it wants the outcome kept after the end.
    """

    reply_to: Address | None = None
    app_id: str | None = None
    parent_task_id: str | None = None
    deadline: datetime | None = None
    idle_timeout: timedelta | None = None
    result_ttl: timedelta | None = None

    def is_overdue(self, now: datetime) -> bool:
        """Whether the deadline has passed. `False` without one."""
        return self.deadline is not None and self.deadline <= now


MAX_SWEEP_DELAY = timedelta(seconds=10)
"""How late due work is found at most while a replica of its agent and the broker work."""
KEEP_ALIVES_PER_TIMEOUT = 3
"""Keep-alives in one idle timeout, so that a requester misses two before it gives up."""
NO_DEADLINE = datetime(8000, 1, 1, tzinfo=UTC)
"""The stored deadline of a call without one. Earlier versions cannot read a missing deadline."""


def parked_until(limit_at: _Instant, deadline: _Instant | None) -> _Instant:
    """When a parked task must be ended: at the limit or at its own deadline, if earlier."""
    return limit_at if deadline is None else min(limit_at, deadline)


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """A call to write in a pause.

    `outcome` is set if the call is not to be sent: it failed before that, or an earlier attempt of
    the operation has its result.

    It has a `timeout`, an `idle_timeout`, or both, unless it is a wait (`meshpoint.model.waits`).
    A wait is stored as sent, and a sleep ends with the result `Ok(None)` as its headers say.
    """

    sub_task_id: TaskId
    call_id: str
    peer: AgentName
    body: bytes
    timeout: timedelta | None
    idle_timeout: timedelta | None = None
    headers: dict[str, str | int | float] = field(default_factory=dict)
    outcome: Outcome | None = None
    retry: RetryPolicy | None = None


@dataclass(slots=True)  # creating a frozen one takes six times as long
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
        crash_reason: how the task's own process last died.
        log: the entries of the task's log, oldest first. They belong to `state` only if
            `has_log(state_format)`.
        log_seq: number of the last entry ever written, 0 if there was none.
        refusal_reason: why `outcomes` is empty although outcomes exist: they are too large for one
            replica, so the task must fail.
        followers: further addresses that get its status updates and its reply.
    """

    run: Run
    requester: Requester
    context: CheckpointDict
    state: bytes
    state_format: str
    outcomes: tuple[tuple[str, AgentName, Outcome], ...]
    request: bytes | None
    attempt: int
    cancel_requested: bool = False
    checkpoint: int | None = None
    retry_count: int = 0
    rescues: int = 0
    crash_reason: str | None = None
    refusal_reason: str | None = None
    digest: str | None = field(default=None, compare=False)
    log: Sequence[bytes] = field(default=(), repr=False)
    log_seq: int = 0
    followers: tuple[Address, ...] = ()

    @property
    def is_suspect(self) -> bool:
        """Whether this task may have crashed its owners and must run isolated."""
        return self.rescues >= SUSPECT_AFTER_RESCUES

    def without_content(self) -> Resumable:
        """The task as it is given only to be ended: without what its code alone needs."""
        return replace(
            self,
            context={},
            state=b"",
            outcomes=(),
            request=None,
            crash_reason=None,
            refusal_reason=None,
            log=(),
            log_seq=0,
            followers=(),
        )


@dataclass(frozen=True, slots=True)
class StoredCall:
    """A call of a task's last pause. `outcome` is `None` while it is open."""

    call_id: str
    peer: AgentName
    body: bytes
    outcome: Outcome | None


@dataclass(frozen=True, slots=True)
class StoredTask:
    """A stored task, read without acquiring it.

    Attributes:
        resumable: the input of its next segment, except for outcomes.
        calls: the calls of its last pause, in call order. Empty in generation 0.
        app_version: the version of the agent's code that paused it; `None` if unknown.
    """

    resumable: Resumable
    state: TaskState
    calls: tuple[StoredCall, ...]
    app_version: str | None = None


@dataclass(frozen=True, slots=True)
class L1Snapshot:
    """The packed working memory of an operation at checkpoint `seq`, with its digest there."""

    seq: int
    digest: str
    content: bytes = field(repr=False)


@dataclass(slots=True)  # a frozen one takes three times as long to create
class Dispatch:
    """A peer request to send.

    Attributes:
        deadline: the call's own, or `NO_DEADLINE`; the peer's is earlier by a margin.
        unroutable_for: time since the broker first returned it because its peer has no queue;
            `None` if it never did, or if this attempt comes more than `MAX_SWEEP_DELAY` too late.
        is_retry: whether it is a later attempt at its call, with its own due time.
    """

    agent: AgentName
    task_id: TaskId
    generation: int
    sub_task_id: TaskId
    peer: AgentName
    body: bytes
    headers: dict[str, str | int | float]
    deadline: datetime
    attempt: int = 1
    unroutable_for: timedelta | None = field(default=None, compare=False, kw_only=True)
    is_retry: bool = field(default=False, compare=False, kw_only=True)


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


OutboxItem: TypeAlias = Dispatch | CancelNotice | Reply


@dataclass(frozen=True, slots=True)
class DueCounts:
    """Number of due items of each kind, each up to a limit, including locked rows."""

    ready: int = 0
    lapsed: int = 0  # running tasks with an expired lease
    expired: int = 0
    keep_alives: int = 0
    unsent: int = 0
    overdue: int = 0  # ready and parked tasks that only need to be ended
    parked: int = 0  # 1 if any task of the agent is parked
    lost_unread: int = 0  # running tasks in other formats, not rescued in time


@dataclass(frozen=True, slots=True)
class CallSummary:
    """One call of a task, or one attempt at it, as printed by `tasks show`.

    Attributes:
        outcome: "ok" or the kind of the failure; `None` while the call is open.
        deadline: the earlier of its idle and its absolute deadline.
        message: why it failed.
        since: when the task paused for it.
        sends: number of times that its request was sent.
        absolute_deadline: later than `deadline` if status updates of the peer extend that; `None`
            if they extend it without limit.
        attempt: number of this attempt at the call.
        max_attempts: `None` if the call is not retried.
        is_superseded: whether another attempt has followed, or has the result.
        due_at: when this attempt begins, if it has not begun.
    """

    sub_task_id: TaskId
    call_id: str
    peer: AgentName
    generation: int
    state: CallState
    outcome: str | None
    dispatched_at: datetime | None
    deadline: datetime
    message: str | None = field(default=None, compare=False)
    since: datetime | None = field(default=None, compare=False)
    sends: int = field(default=0, compare=False)
    absolute_deadline: datetime | None = field(default=None, compare=False)
    attempt: int = 1
    max_attempts: int | None = None
    is_superseded: bool = False
    due_at: datetime | None = field(default=None, compare=False)


class ListPosition(NamedTuple):
    """Where a listing had a task when it was read. `at` is exact, unlike a `datetime`."""

    at: float
    task_id: str


@dataclass(frozen=True, slots=True)
class TaskSummary:
    """One task, as printed by `tasks list`: "waiting, 2 of 3".

    Attributes:
        wake_at: when the task is due next; for a running task, when its lease ends; for a parked
            one, when it fails.
        dead_reason: why it is dead, or how its own process last died.
        subject: of an operation.
        needed: results that complete the join; `None` if it needs the outcomes of all calls.
        requester: the name in `app_id` of its request.
        user_id, session_id: until the task ends.
        waiting_for: the peers that have not answered yet.
        incompatible_since: when it was first parked since its last pause.
        join_deadline: when it resumes with the outcomes it has by then.
        usage: tokens up to its last pause, until the task ends. Not in listings.
        parked_reason: why the task was last parked, until it pauses again.
        tried_versions: versions of the agent's code that could not continue it, oldest first.
        suspended_at: since when a person has suspended it. A running one runs to its next pause.
        position: for the next page of a listing.
    """

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
    subject: str | None = None
    requester: str | None = None
    parent_task_id: str | None = field(default=None, compare=False)
    user_id: str | None = None
    session_id: str | None = None
    deadline: datetime | None = None
    ended_at: datetime | None = None
    retry_count: int = 0
    waiting_for: tuple[str, ...] = ()
    state_format: str | None = field(default=None, compare=False)
    app_version: str | None = field(default=None, compare=False)
    incompatible_since: datetime | None = field(default=None, compare=False)
    join_deadline: datetime | None = field(default=None, compare=False)
    usage: TokenUsage | None = field(default=None, compare=False)
    parked_reason: str | None = None
    tried_versions: tuple[str, ...] = ()
    suspended_at: datetime | None = None
    position: ListPosition | None = field(default=None, compare=False, repr=False)
    needed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFilter:
    """Which tasks to list. Unset fields match every task.

    Attributes:
        subject: of an operation.
        user: of a task that has not ended.
        since: paused, or began, at this time or later.
        until: paused, or began, before this time.
        waiting_for: a peer that the task waits for.
        suspended: whether a person has suspended the task.
    """

    subject: str | None = None
    requester: str | None = None
    user: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    waiting_for: str | None = None
    suspended: bool | None = None


EVERY_TASK = TaskFilter()


def logged_format(state_format: str) -> str:
    """The stored format of a state in `state_format` that is continued by a log."""
    return state_format + LOG_SUFFIX


def waits_format(state_format: str) -> str:
    """The stored format of a state in `state_format` of a task that has slept."""
    return state_format + WAITS_SUFFIX


def plain_format(stored_format: str) -> str:
    """The agent's own format of a state that is stored in this format."""
    return stored_format.removesuffix(LOG_SUFFIX).removesuffix(WAITS_SUFFIX)


def has_log(stored_format: str) -> bool:
    """Whether a log continues the state that is stored in this format."""
    return stored_format.endswith(LOG_SUFFIX)


def same_requester(known: str | None, other: str | None) -> bool:
    """Whether two requesters are the same. `None` is unknown and matches any."""
    return None in (known, other) or known == other


MAX_REPLY_ADDRESSES = 4
"""Maximum addresses that get the reply of one task."""


def add_reply_address(
    addresses: Sequence[Address], address: Address, *, keeps_first: bool
) -> tuple[Address, ...]:
    """Add `address` as the first of a task's reply addresses, or second with `keeps_first`.

    If there are too many, the address that was attached first is dropped.
    """
    if keeps_first and addresses:
        first, *others = addresses
        return (first, *add_reply_address(others, address, keeps_first=False))[
            :MAX_REPLY_ADDRESSES
        ]
    return (address, *(each for each in addresses if each != address))[:MAX_REPLY_ADDRESSES]


def dropped_address(before: Sequence[Address], after: Sequence[Address]) -> Address | None:
    """The reply address that `add_reply_address` has dropped, or `None`."""
    return next((each for each in before if each not in after), None)


def same_input(known: str | None, other: str | None) -> bool:
    """Whether two input digests are the same. `None` is unknown and matches any."""
    return None in (known, other) or known == other


def cancel_applies(cancellers: str | None, requester: str | None) -> bool:
    """Whether an early cancel applies to a request from `requester`; `None` matches any."""
    return (
        cancellers is None
        or requester is None
        or requester in cancellers.split(_CANCELLER_SEPARATOR)
    )


def add_canceller(cancellers: str | None, canceller: str | None) -> str | None:
    """Add a canceller to `cancellers`; `None` matches any requester."""
    if cancellers is None or canceller is None:
        return None
    names = cancellers.split(_CANCELLER_SEPARATOR)
    return (
        cancellers
        if canceller in names
        else _CANCELLER_SEPARATOR.join([*names, canceller][-_MAX_CANCELLERS:])
    )
