"""Model of one task: the expected state in plain values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime

from meshpoint.model.checkpoint import (
    CancelNotice,
    Pause,
    PlannedCall,
    Replica,
    Reply,
    Requester,
    Resumable,
    Run,
    TaskState,
)
from meshpoint.model.ids import AgentName, ReplicaId, RunId, TaskId
from meshpoint.model.outcomes import Failed, FailureKind, Outcome
from meshpoint.testing.conformance.build import TIMINGS

KEEP_ALIVES_PER_TIMEOUT = 3
LONGEST_LEASE = 64  # maximum lease of a sender, in dispatch leases
CLOSED = {FailureKind.TIMEOUT, FailureKind.CANCELLED}


def plain(outcome: Outcome) -> Outcome:
    """`outcome` without the message, if the store itself wrote it."""
    return Failed(outcome.kind) if isinstance(outcome, Failed) and outcome.kind in CLOSED else outcome


@dataclass(slots=True)
class Sending:
    """An unsent message, leased exclusively to one sender until `due_at`."""

    due_at: datetime
    attempts: int = 1

    def offer(self, now: datetime) -> None:
        """Lease it to a sender; each lease is twice as long as the previous one."""
        self.due_at = now + TIMINGS.dispatch_lease * min(2**self.attempts, LONGEST_LEASE)
        self.attempts += 1


@dataclass(slots=True)
class CallStory:
    """One call since its checkpoint. Its outcome is kept even after its row is deleted."""

    planned: PlannedCall
    generation: int
    deadline: datetime
    due_at: datetime
    sending: Sending
    outcome: Outcome | None = None
    claim_id: RunId | None = None
    dispatched: bool = False
    cancelling: bool = False

    @property
    def id(self) -> TaskId:
        return self.planned.sub_task_id

    def record(self, outcome: Outcome, claim_id: RunId | None) -> None:
        """Record its only outcome."""
        assert self.outcome is None, f"{self.id} has {self.outcome} and now gets {outcome}"
        self.outcome, self.claim_id = plain(outcome), claim_id

    def close(self, kind: FailureKind, now: datetime) -> None:
        """Close it without its peer, which still has to be notified."""
        self.record(Failed(kind), None)
        self.cancelling, self.sending = True, Sending(now + TIMINGS.dispatch_lease)


@dataclass(slots=True)
class Story:
    """Everything promised about one task."""

    task_id: TaskId
    agent: AgentName
    requester: Requester
    state: TaskState
    request: bytes | None = None
    fence: int = 1
    generation: int = 0
    attempt: int = 0
    rescues: int = 0
    # run, claim or cancel that wrote last; its repetition finds itself
    written_by: RunId | None = None
    owner: Run | None = None
    replica: ReplicaId | None = None
    due_at: datetime | None = None  # running: when its lease ends; ready: when it may be acquired
    pause: Pause | None = None
    join_deadline: datetime | None = None
    keep_alive_at: datetime | None = None
    cancel_requested: bool = False
    incompatible_since: datetime | None = None
    calls: dict[TaskId, CallStory] = field(default_factory=dict)
    runs: list[tuple[Run, Replica]] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)
    reply: Reply | None = None
    reply_sending: Sending | None = None
    ended_at: datetime | None = None
    expires_at: datetime | None = None

    @property
    def current(self) -> list[CallStory]:
        """Calls of this pause, in call order."""
        if self.state.ended:
            return []
        return [call for call in self.calls.values() if call.generation == self.generation]

    @property
    def rows(self) -> list[CallStory]:
        """Calls with a row: this pause's, and closed ones whose peer is not notified yet."""
        current = {call.id for call in self.current}
        return [call for call in self.calls.values() if call.cancelling or call.id in current]

    @property
    def pending(self) -> list[CallStory]:
        """Calls without an outcome, in call order."""
        return [call for call in self.current if call.outcome is None]

    @property
    def met(self) -> bool:
        """Whether the recorded outcomes meet the join."""
        assert self.pause is not None
        outcomes = [call.outcome for call in self.current if call.outcome is not None]
        succeeded = sum(not isinstance(outcome, Failed) for outcome in outcomes)
        return self.pause.join.met(total=len(self.current), completed=len(outcomes), succeeded=succeeded)

    def owned_by(self, run: Run) -> bool:
        """Whether `run` may write."""
        return self.state is TaskState.RUNNING and self.owner is not None and self.owner.fence == run.fence

    def readable_by(self, replica: Replica) -> bool:
        """Whether `replica` may take the task."""
        return self.generation == 0 or (self.pause is not None and self.pause.state_format in replica.formats)

    def late(self, now: datetime) -> list[CallStory]:
        """Pending calls whose deadline has passed."""
        if self.state is not TaskState.WAITING:
            return []
        everything = self.join_deadline is not None and self.join_deadline <= now
        return [call for call in self.pending if everything or call.due_at <= now]

    def notice(self, call: CallStory) -> CancelNotice:
        """Notice for the peer of a closed call."""
        return CancelNotice(self.agent, self.task_id, call.id, call.planned.peer)

    def own(self, run: Run, replica: Replica, now: datetime) -> None:
        """Make `run` the only writer."""
        self.state, self.owner, self.replica, self.written_by = TaskState.RUNNING, run, replica.id, run.id
        self.fence, self.attempt, self.due_at = run.fence, max(self.attempt, 1), now + replica.lease
        self.runs.append((run, replica))

    def make_ready(self, at: datetime, written_by: RunId | None) -> None:
        """Remove the owner; any replica may acquire the task."""
        self.state, self.due_at, self.written_by = TaskState.READY, at, written_by
        self.owner = self.replica = None

    def checkpoint(self, pause: Pause, now: datetime) -> None:
        """Wait for the calls of `pause`."""
        self.state, self.pause, self.written_by = TaskState.WAITING, pause, pause.run.id
        self.owner = self.replica = self.incompatible_since = self.due_at = None
        self.generation, self.attempt, self.rescues = self.generation + 1, 0, 0
        self.pauses.append(pause)
        self.join_deadline = now + pause.join.deadline if pause.join.deadline else None
        idle = self.requester.idle_timeout
        self.keep_alive_at = now + idle / KEEP_ALIVES_PER_TIMEOUT if idle else None
        for planned in pause.calls:
            self.calls[planned.sub_task_id] = self._call(planned, now)
        if self.met:
            self.state, self.due_at = TaskState.READY, now

    def _call(self, planned: PlannedCall, now: datetime) -> CallStory:
        deadline = min(now + planned.timeout, self.requester.deadline or now + planned.timeout)
        due_at = min(deadline, now + planned.idle_timeout) if planned.idle_timeout else deadline
        sending = Sending(now + TIMINGS.dispatch_lease)
        return CallStory(planned, self.generation, deadline, due_at, sending, planned.outcome)

    def close_pending(self, now: datetime) -> tuple[CancelNotice, ...]:
        """Close the calls that are not needed any more; return notices for their peers."""
        closed = self.pending
        for call in closed:
            call.close(FailureKind.CANCELLED, now)
        return tuple(self.notice(call) for call in closed)

    def entomb(self, state: TaskState, body: bytes, written_by: RunId, now: datetime) -> None:
        """End the task with its reply."""
        assert self.reply is None, f"{self.task_id} has a reply and now gets another"
        self.state, self.written_by, self.ended_at = state, written_by, now
        self.owner = self.replica = None
        self.reply = Reply(self.agent, self.task_id, state, body, self.requester, fence=self.fence)
        self.reply_sending = Sending(now + TIMINGS.dispatch_lease) if self.requester.reply_to else None
        self.expires_at = max(now, self.requester.deadline or now) + TIMINGS.tombstone_ttl

    def reply_at(self, now: datetime) -> Reply:
        """The reply, with its age at `now`."""
        assert self.reply is not None
        assert self.ended_at is not None
        return replace(self.reply, age=now - self.ended_at)

    def resumable(self) -> Resumable:
        """The task as its owner must receive it."""
        assert self.owner is not None
        waited = self.pause
        outcomes = tuple(
            (call.planned.call_id, call.planned.peer, call.outcome)
            for call in self.current
            if call.outcome is not None
        )
        assert len(outcomes) == len(self.current), f"{self.task_id} is resumed with calls without an outcome"
        return Resumable(
            run=self.owner,
            requester=self.requester,
            context=waited.context if waited else {},
            state=waited.state if waited else b"",
            state_format=waited.state_format if waited else "",
            outcomes=outcomes,
            request=None if waited else self.request,  # optional once there is a state
            attempt=self.attempt,
            cancel_requested=self.cancel_requested,
            rescues=self.rescues,
        )
