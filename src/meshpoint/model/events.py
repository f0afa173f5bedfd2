"""The named events of a task's life.

A `Step` with a durable or visible effect (one of `EFFECTS`) is emitted twice, before and after the effect, so that a
test can stop a process exactly there. A look for what is due (one of `LOOKS`) that finds nothing has no effect, and
so no AFTER. A step that only tells something is emitted once, as NOTED.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pydantic import JsonValue

from meshpoint.model.ids import AgentName, ReplicaId, TaskId


class Step(StrEnum):
    """What happens."""

    # steps with an effect
    RECEIVE = "receive"  # a request is looked up
    BEGIN = "begin"  # a task is written as running before its first segment
    SEGMENT = "segment"  # agent code runs
    CHECKPOINT = "checkpoint"  # a pause commits
    DISPATCH = "dispatch"  # peer requests are published
    MARK = "mark"  # what was sent is marked
    ACK = "ack"  # a delivery is acked
    CLAIM = "claim"  # outcomes are recorded
    RESTORE = "restore"  # a context is rebuilt
    SUBTASK = "subtask"  # the code of a subtask runs
    SAVE = "save"  # a checkpoint within a segment commits
    RESUME = "resume"  # an ended operation is made ready to go on
    END = "end"  # an outcome commits
    REPLY = "reply"  # a reply is published
    SWEEP = "sweep"  # one look for what time alone makes due
    CANCEL = "cancel"  # a cancel commits
    CANCEL_NOTICE = "cancel_notice"  # peers are told
    RELEASE = "release"  # a task is given back
    RENEW = "renew"  # leases are renewed
    EXPIRE = "expire"  # calls or joins end at their deadline
    TAKE = "take"  # ready tasks are taken
    TAKE_OVER = "take_over"  # tasks whose lease is over are taken
    PURGE = "purge"  # tombstones are deleted

    # steps that only tell: also in ONLY_TOLD
    STARTED = "started"  # the replica consumes
    DRAINING = "draining"  # told to end: it waits for the tasks it runs, and those held in memory
    DRAINED = "drained"
    DUPLICATE = "duplicate"  # a response whose call has its outcome
    LATE = "late"  # a response for a call that is gone
    FENCED = "fenced"  # a zombie's write changed nothing
    DEGRADED = "degraded"  # a task stays in memory, its checkpoint failed
    DEAD_LETTER = "dead_letter"
    DEAD_TASK = "dead_task"  # past max_attempts
    PARKED = "parked"
    STORE_AWAY = "store_away"
    STORE_BACK = "store_back"
    BROKER_AWAY = "broker_away"
    ROW_LOCKED = "row_locked"  # another database session holds a task's row, and the steps that need it wait
    BROKER_BACK = "broker_back"
    REPLY_UNROUTABLE = "reply_unroutable"
    STATUS_DROPPED = "status_dropped"  # more or larger status updates than are sent on
    REPLY_DROPPED = "reply_dropped"  # a reply could be neither delivered nor kept
    MESSAGE_REJECTED = "message_rejected"  # the broker can never accept it: too large, or not encodable
    CODE_CANCELLED = "code_cancelled"  # running agent code was cancelled
    LEASE_LOST = "lease_lost"
    SUBTASK_REUSED = "subtask_reused"  # its deliverable is recorded: it does not run
    SUBTASK_AGAIN = "subtask_again"  # it is recorded, but something differs: it runs again
    CHECKPOINT_RESTORED = "checkpoint_restored"  # and from where
    CHECKPOINT_COPY = "checkpoint_copy"  # the fast copy of a checkpoint could not be written or read
    MEMORY_RECOVERED = "memory_recovered"  # a working memory is at hand again, and from where
    MEMORY_TROUBLE = "memory_trouble"  # it, or its copy, could not be written or read
    DEFECT = "defect"  # unexpected exception in the engine, a store or a broker; the replica keeps serving
    ABANDONED = "abandoned"  # the drain timed out while agent code was still running
    ISOLATED = "isolated"  # a task that lost its owners runs in its own process
    ISOLATED_DIED = "isolated_died"  # that process died
    OWNER_LOST = "owner_lost"  # an operation ends as failed because its replica died
    MEMORY_FULL = "memory_full"  # max_in_memory tasks wait in memory; new requests wait at the broker


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
"""Steps before and after which a process may die. Whatever is not said to be only told is one."""
LOOKS = frozenset({Step.EXPIRE, Step.TAKE, Step.TAKE_OVER, Step.PURGE})
"""Steps that ask what is due: only their AFTER knows the tasks, and there is none when nothing was due."""


class Phase(StrEnum):
    """Where in a step an event stands."""

    BEFORE = "before"
    AFTER = "after"
    FAILED = "failed"
    NOTED = "noted"


@dataclass(frozen=True, slots=True)
class Event:
    """One event. `task_ids` are those of the step, in no order; `detail` is JSON."""

    step: Step
    phase: Phase
    agent: AgentName
    replica: ReplicaId
    task_ids: tuple[TaskId, ...] = ()
    detail: Mapping[str, JsonValue] = field(default_factory=dict)
