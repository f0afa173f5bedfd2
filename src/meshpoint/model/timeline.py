"""The timeline of a task: one entry for each change of its state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from meshpoint.model.error_text import quantity
from meshpoint.model.ids import AgentName, ReplicaId, TaskId
from meshpoint.model.waits import display_name, is_wait


class Change(StrEnum):
    """What an entry records."""

    BEGUN = "begun"
    QUEUED = "queued"
    PAUSED = "paused"
    ANSWERED = "answered"
    """Outcomes of calls were recorded and counted on the join."""
    TIMED_OUT = "timed_out"
    """Calls passed their deadline, or sleeps their end, and were counted on the join."""
    RETRIED = "retried"
    """Another attempt at a call was planned."""
    READY = "ready"
    """The join was met, and any replica may acquire the task."""
    ACQUIRED = "acquired"
    """A replica owns the task and runs its next segment."""
    RESCUED = "rescued"
    """A replica acquired the task of a lost owner."""
    LOST = "lost"
    """The task of a lost owner became ready."""
    RELEASED = "released"
    PARKED = "parked"
    UNPARKED = "unparked"
    SUSPENDED = "suspended"
    UNSUSPENDED = "unsuspended"
    SIGNALLED = "signalled"
    ANSWER_KEPT = "answer_kept"
    """The answer to a question came while the task did not wait for it."""
    CANCEL_REQUESTED = "cancel_requested"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REVIVED = "revived"
    """A failed or cancelled task began a new attempt."""
    ADOPTED = "adopted"
    """A task that had not ended got another requester."""

    @property
    def begins_segment(self) -> bool:
        """Whether agent code runs from here on."""
        return self in {Change.BEGUN, Change.ACQUIRED, Change.RESCUED}

    @property
    def ends_segment(self) -> bool:
        """Whether no agent code runs from here on."""
        return self in _SEGMENT_ENDS

    @property
    def is_final(self) -> bool:
        """Whether the task has ended."""
        return self in {Change.COMPLETED, Change.FAILED, Change.CANCELLED}


_SEGMENT_ENDS = {
    *(Change.PAUSED, Change.LOST, Change.RELEASED, Change.PARKED, Change.RESCUED),
    *(Change.COMPLETED, Change.FAILED, Change.CANCELLED),
}
CHANGES_OF_CALLS = (Change.ANSWERED, Change.TIMED_OUT, Change.RETRIED)
"""Changes while no run owns the task. Their entries have neither fence nor attempt."""
CHANGES_WITH_JOIN = (Change.PAUSED, Change.ANSWERED, Change.TIMED_OUT)
"""Changes whose entries have the counters of the join."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEntry:
    """One change of a task's state.

    Attributes:
        id: Grows from entry to entry of a task.
        at: When the transaction wrote it, by the database's clock.
        replica: The replica that wrote it; `None` for a command of an operator.
        generation: Number of pauses up to and including this change.
        fence: Of the run that owns the task, or owned it last.
        attempt: Number of the run of this segment, from 1; 0 before the first.
        calls: Number of calls that the change closed.
        completed: Number of the pause's calls with an outcome.
        total: Number of the pause's calls.
        peer: The peer of the call, if the change concerns one call.
        ref: Id of that call's task at the peer, or of the signal.
    """

    id: int
    task_id: TaskId
    agent: AgentName
    at: datetime
    change: Change
    replica: ReplicaId | None = None
    generation: int
    fence: int | None = None
    attempt: int | None = None
    calls: int | None = None
    completed: int | None = None
    total: int | None = None
    peer: str | None = None
    ref: str | None = None


@dataclass(frozen=True, slots=True)
class TimelineOptions:
    """Which changes a store records.

    Attributes:
        replica: The replica that uses the store; `None` for a command.
        retention: How long entries are kept.
        known_only: Record only changes of tasks that have a timeline.
    """

    replica: ReplicaId | None = None
    retention: timedelta = timedelta(days=7)
    known_only: bool = False


def durations(entries: Sequence[TimelineEntry]) -> list[timedelta]:
    """The time from the entry before to each entry, zero for the first.

    Never negative, even if the database's clock was set back.
    """
    starts = [entry.at for entry in (*entries[:1], *entries)]
    pairs = zip(starts, entries, strict=False)
    return [max(entry.at - start, timedelta()) for start, entry in pairs]


def format_duration(duration: timedelta) -> str:
    """Return a duration for people, such as "12 ms", "3.4 s" or "2:00:05"."""
    seconds = duration.total_seconds()
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


def describe(entry: TimelineEntry) -> str:
    """Return the facts of an entry: the peer or number of its calls, and the join's counters."""
    if entry.change is Change.PAUSED:
        return f"for {quantity(entry.total or 0, 'call')}"
    facts = []
    if entry.peer is not None:
        facts.append(display_name(entry.peer) if is_wait(entry.peer) else entry.peer)
    elif entry.calls:
        facts.append(quantity(entry.calls, "call"))
    if entry.total is not None:
        facts.append(f"{entry.completed} of {entry.total}")
    if entry.change is Change.SIGNALLED:
        facts.append(f"signal {entry.ref}")
    elif entry.ref is not None and entry.peer is not None and not is_wait(entry.peer):
        facts.append(f"task {entry.ref}")
    return ", ".join(facts)
