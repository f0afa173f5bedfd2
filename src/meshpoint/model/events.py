"""The named events of a task's life.

A `Step` with a durable or visible effect is emitted before and after the effect, so that a test
can stop a process exactly there. A search for due work that finds nothing has no effect and emits
no AFTER. Informational steps are emitted once, as INFO.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal, Self

from pydantic import JsonValue

from meshpoint.model.ids import AgentName, ReplicaId, TaskId

_EFFECT: Final = "effect"
"""Emitted before and after an effect. A process may die at either point."""
_SEARCH: Final = "search"
"""Likewise, around a search for due work. Only AFTER has task ids; omitted if none was due."""
_INFO: Final = "informational"
"""Emitted once, as INFO."""


class Step(StrEnum):
    """What an event is about, declared with how it is emitted.

    Attributes:
        is_informational: the step has no effect and is emitted once.
        is_search: the step is a search for due work.
    """

    _value_: str
    is_informational: bool
    is_search: bool

    def __new__(
        cls, name: str, kind: Literal["effect", "search", "informational"] | None = None
    ) -> Self:
        # Only members are created here. The default lets mypy accept `Step("receive")`, a lookup.
        if kind is None:
            raise TypeError(f"step {name!r} is declared without its kind")
        step = str.__new__(cls, name)
        step._value_ = name
        step.is_informational, step.is_search = kind == _INFO, kind == _SEARCH
        return step

    RECEIVE = "receive", _EFFECT  # a request is looked up
    BEGIN = "begin", _EFFECT  # a task is written as running before its first segment
    SEGMENT = "segment", _EFFECT  # agent code runs
    CHECKPOINT = "checkpoint", _EFFECT  # a pause commits
    DISPATCH = "dispatch", _EFFECT  # peer requests are published
    CONFIRM_SENT = "confirm_sent", _EFFECT  # messages are recorded as sent
    ACK = "ack", _EFFECT  # a delivery is acked
    CLAIM = "claim", _EFFECT  # outcomes are recorded
    SIGNAL = "signal", _EFFECT  # a signal is kept for its task, or delivered to it
    SET_VALUE = "set_value", _EFFECT  # a value of a running task commits
    RESTORE = "restore", _EFFECT  # a context is rebuilt
    SUBTASK = "subtask", _EFFECT  # the code of a subtask runs
    STEP = "step", _EFFECT  # the code of a step runs
    RECORD = "record", _EFFECT  # step records commit
    SAVE = "save", _EFFECT  # a checkpoint within a segment commits
    RESUME = "resume", _EFFECT  # an ended operation is made ready to resume
    END = "end", _EFFECT  # an outcome commits
    REPLY = "reply", _EFFECT  # a reply is published
    SWEEP = "sweep", _EFFECT  # one pass over work that is due by time alone
    CANCEL = "cancel", _EFFECT  # a cancel commits
    CANCEL_NOTICE = "cancel_notice", _EFFECT  # cancels are published to peers
    RELEASE = "release", _EFFECT  # a task is released for any replica
    RENEW = "renew", _EFFECT  # leases are renewed
    EXPIRE = "expire", _SEARCH  # overdue calls and joins are closed
    ACQUIRE = "acquire", _SEARCH  # ready tasks are acquired
    RESCUE = "rescue", _SEARCH  # tasks with an expired lease are rescued
    PURGE = "purge", _SEARCH  # tombstones are deleted

    STARTED = "started", _INFO  # the replica consumes
    DRAINING = "draining", _INFO  # the replica stops and waits for its running and in-memory tasks
    DRAINED = "drained", _INFO  # the replica has stopped
    DUPLICATE = "duplicate", _INFO  # a response to a call that already has its outcome
    LATE = "late", _INFO  # a response to a call that no longer exists
    FENCED = "fenced", _INFO  # a zombie's write changed nothing
    DEGRADED = "degraded", _INFO  # a task stays in memory because its checkpoint failed
    DEAD_LETTER = "dead_letter", _INFO
    TASK_COMPLETED = "task_completed", _INFO  # a task has ended with a result
    TASK_FAILED = "task_failed", _INFO  # a task has ended without a result; kind and reason
    DEAD_TASK = "dead_task", _INFO  # failed after max_attempts
    PARKED = "parked", _INFO
    UNREAD = "unread", _INFO  # ready tasks wait in a format that this replica does not read
    STORE_UNAVAILABLE = "store_unavailable", _INFO
    STORE_AVAILABLE = "store_available", _INFO
    BROKER_UNAVAILABLE = "broker_unavailable", _INFO
    ROW_LOCKED = (
        "row_locked",
        _INFO,
    )  # another database session has locked a task's row; its steps wait
    BROKER_AVAILABLE = "broker_available", _INFO
    REPLY_UNROUTABLE = "reply_unroutable", _INFO
    STATUS_DROPPED = (
        "status_dropped",
        _INFO,
    )  # a status update was too large or over the rate limit
    REPLY_DROPPED = "reply_dropped", _INFO  # a reply could be neither delivered nor kept
    PEER_MISSING = "peer_missing", _INFO  # a called peer has no queue yet; its calls wait for one
    CALL_RETRIED = (
        "call_retried",
        _INFO,
    )  # an attempt at a call failed; the next one has a due time
    UNDELIVERABLE = "undeliverable", _INFO  # a called peer's queue was not declared in time
    MESSAGE_REJECTED = "message_rejected", _INFO  # a message is too large or not encodable
    CODE_CANCELLED = "code_cancelled", _INFO  # running agent code was cancelled
    LEASE_LOST = "lease_lost", _INFO
    SUBTASK_REUSED = "subtask_reused", _INFO  # a recorded deliverable was used, nothing ran
    SUBTASK_RERUN = (
        "subtask_rerun",
        _INFO,
    )  # a recorded subtask runs again because something has changed
    SUBTASK_DIFFERS = (
        "subtask_differs",
        _INFO,
    )  # a record was used although the subtask's inputs differ from it within one attempt
    CHECKPOINT_RESTORED = "checkpoint_restored", _INFO  # with its source in `detail`
    CHECKPOINT_COPY = "checkpoint_copy", _INFO  # the cached copy could not be written or read
    MEMORY_RECOVERED = "memory_recovered", _INFO  # with its source in `detail`
    MEMORY_PROBLEM = "memory_problem", _INFO  # memory or snapshot could not be read or written
    DEFECT = (
        "defect",
        _INFO,
    )  # unexpected exception in engine, store or broker; the replica keeps serving
    ABANDONED = "abandoned", _INFO  # the drain timed out while agent code was still running
    ISOLATED = (
        "isolated",
        _INFO,
    )  # a task that has lost its owners repeatedly runs in its own process
    ISOLATED_PROCESS_DIED = "isolated_process_died", _INFO  # that process died
    OWNER_LOST = "owner_lost", _INFO  # an operation ends as failed because its replica died
    MEMORY_FULL = "memory_full", _INFO  # max_in_memory reached; new requests wait at the broker


class Phase(StrEnum):
    """The position of an event relative to its step."""

    BEFORE = "before"
    AFTER = "after"
    FAILED = "failed"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Event:
    """One event. `task_ids` has no particular order; `detail` is JSON.

    `more` builds further details, for observers that need them.
    """

    step: Step
    phase: Phase
    agent: AgentName
    replica: ReplicaId
    task_ids: tuple[TaskId, ...] = ()
    detail: Mapping[str, JsonValue] = field(default_factory=dict)
    more: Callable[[], Mapping[str, JsonValue]] = field(default=dict, compare=False, repr=False)

    def all_details(self) -> Mapping[str, JsonValue]:
        """`detail` and what `more` builds."""
        return {**self.detail, **self.more()}
