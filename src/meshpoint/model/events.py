"""The named events of a task's life.

A `Step` with a durable or visible effect (see `EFFECTS`) is emitted before and after the effect,
so that a test can stop a process exactly there. A search for due work (see `LOOKS`) that finds
nothing has no effect and emits no AFTER. Purely informational steps are emitted once, as NOTED.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pydantic import JsonValue

from meshpoint.model.ids import AgentName, ReplicaId, TaskId


class Step(StrEnum):
    """The kind of an event."""

    # steps with an effect
    RECEIVE = "receive"  # a request is looked up
    BEGIN = "begin"  # a task is written as running before its first segment
    SEGMENT = "segment"  # agent code runs
    CHECKPOINT = "checkpoint"  # a pause commits
    DISPATCH = "dispatch"  # peer requests are published
    MARK = "mark"  # sent messages are marked as sent
    ACK = "ack"  # a delivery is acked
    CLAIM = "claim"  # outcomes are recorded
    RESTORE = "restore"  # a context is rebuilt
    SUBTASK = "subtask"  # the code of a subtask runs
    SAVE = "save"  # a checkpoint within a segment commits
    RESUME = "resume"  # an ended operation is made ready to resume
    END = "end"  # an outcome commits
    REPLY = "reply"  # a reply is published
    SWEEP = "sweep"  # one pass over work that is due by time alone
    CANCEL = "cancel"  # a cancel commits
    CANCEL_NOTICE = "cancel_notice"  # cancels are published to peers
    RELEASE = "release"  # a task is released for any replica
    RENEW = "renew"  # leases are renewed
    EXPIRE = "expire"  # overdue calls and joins are closed
    TAKE = "take"  # ready tasks are acquired
    TAKE_OVER = "take_over"  # tasks with an expired lease are rescued
    PURGE = "purge"  # tombstones are deleted

    # informational steps, also listed in ONLY_TOLD
    STARTED = "started"  # the replica consumes
    DRAINING = "draining"  # the replica stops and waits for its running and in-memory tasks
    DRAINED = "drained"  # the replica has stopped
    DUPLICATE = "duplicate"  # a response to a call that already has its outcome
    LATE = "late"  # a response to a call that no longer exists
    FENCED = "fenced"  # a zombie's write changed nothing
    DEGRADED = "degraded"  # a task stays in memory because its checkpoint failed
    DEAD_LETTER = "dead_letter"
    DEAD_TASK = "dead_task"  # failed after max_attempts
    PARKED = "parked"
    STORE_AWAY = "store_away"
    STORE_BACK = "store_back"
    BROKER_AWAY = "broker_away"
    ROW_LOCKED = "row_locked"  # another database session has locked a task's row; its steps wait
    BROKER_BACK = "broker_back"
    REPLY_UNROUTABLE = "reply_unroutable"
    STATUS_DROPPED = "status_dropped"  # a status update was too large or over the rate limit
    REPLY_DROPPED = "reply_dropped"  # a reply could be neither delivered nor kept
    MESSAGE_REJECTED = "message_rejected"  # a message is too large or not encodable
    CODE_CANCELLED = "code_cancelled"  # running agent code was cancelled
    LEASE_LOST = "lease_lost"
    SUBTASK_REUSED = "subtask_reused"  # a recorded deliverable was used, nothing ran
    SUBTASK_AGAIN = "subtask_again"  # a recorded subtask runs again because something has changed
    CHECKPOINT_RESTORED = "checkpoint_restored"  # with its source in `detail`
    CHECKPOINT_COPY = "checkpoint_copy"  # the cached copy could not be written or read
    MEMORY_RECOVERED = "memory_recovered"  # with its source in `detail`
    MEMORY_TROUBLE = "memory_trouble"  # memory or snapshot could not be read or written
    DEFECT = "defect"  # unexpected exception in engine, store or broker; the replica keeps serving
    ABANDONED = "abandoned"  # the drain timed out while agent code was still running
    ISOLATED = "isolated"  # a task that has lost its owners repeatedly runs in its own process
    ISOLATED_DIED = "isolated_died"  # that process died
    OWNER_LOST = "owner_lost"  # an operation ends as failed because its replica died
    MEMORY_FULL = "memory_full"  # max_in_memory reached; new requests wait at the broker


ONLY_TOLD = frozenset(
    {
        Step.STARTED,
        Step.DRAINING,
        Step.DRAINED,
        Step.DUPLICATE,
        Step.LATE,
        Step.FENCED,
        Step.DEGRADED,
        Step.DEAD_LETTER,
        Step.DEAD_TASK,
        Step.PARKED,
        Step.STORE_AWAY,
        Step.STORE_BACK,
        Step.BROKER_AWAY,
        Step.ROW_LOCKED,
        Step.BROKER_BACK,
        Step.REPLY_UNROUTABLE,
        Step.STATUS_DROPPED,
        Step.REPLY_DROPPED,
        Step.MESSAGE_REJECTED,
        Step.CODE_CANCELLED,
        Step.LEASE_LOST,
        Step.SUBTASK_REUSED,
        Step.SUBTASK_AGAIN,
        Step.CHECKPOINT_RESTORED,
        Step.CHECKPOINT_COPY,
        Step.MEMORY_RECOVERED,
        Step.MEMORY_TROUBLE,
        Step.DEFECT,
        Step.ABANDONED,
        Step.ISOLATED,
        Step.ISOLATED_DIED,
        Step.OWNER_LOST,
        Step.MEMORY_FULL,
    }
)
EFFECTS = frozenset(Step) - ONLY_TOLD
"""Steps before and after which a process may die: all that are not purely informational."""
LOOKS = frozenset({Step.EXPIRE, Step.TAKE, Step.TAKE_OVER, Step.PURGE})
"""Searches for due work. Only AFTER carries task ids, and it is omitted if nothing was due."""


class Phase(StrEnum):
    """The position of an event relative to its step."""

    BEFORE = "before"
    AFTER = "after"
    FAILED = "failed"
    NOTED = "noted"


@dataclass(frozen=True, slots=True)
class Event:
    """One event. `task_ids` has no particular order; `detail` is JSON."""

    step: Step
    phase: Phase
    agent: AgentName
    replica: ReplicaId
    task_ids: tuple[TaskId, ...] = ()
    detail: Mapping[str, JsonValue] = field(default_factory=dict)
