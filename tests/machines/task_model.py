"""Model of one task: the expected state in plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from machines.mail_model import MailModel
from meshpoint.model.ids import AgentName, ReplicaId, RunId, TaskId
from meshpoint.model.messages import Address
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome
from meshpoint.model.questions import was_answered
from meshpoint.model.tasks import (
    MAX_SWEEP_DELAY,
    NO_DEADLINE,
    SUSPECT_AFTER_RESCUES,
    CancelNotice,
    PlannedCall,
    Replica,
    Reply,
    Requester,
    Resumable,
    Run,
    TaskState,
    has_log,
    logged_format,
)
from meshpoint.model.transitions import Append, LogChange, Pause
from meshpoint.model.waits import SLEEP_PEER, is_question, is_wait, sleep_end
from meshpoint.testing.conformance.build import TIMINGS

KEEP_ALIVES_PER_TIMEOUT = 3
RETRY_SECONDS = 4
"""First wait of calls that are retried; each further one is twice as long."""
FAR_FUTURE = datetime(9999, 1, 1, tzinfo=UTC)
MAX_LEASE_FACTOR = 64  # maximum lease of a sender, in dispatch leases
CLOSING_FAILURES = {FailureKind.TIMEOUT, FailureKind.CANCELLED}


def without_message(outcome: Outcome) -> Outcome:
    """`outcome` without the message, if the store itself wrote it."""
    return (
        Failed(outcome.kind)
        if isinstance(outcome, Failed) and outcome.kind in CLOSING_FAILURES
        else outcome
    )


@dataclass(slots=True)
class PendingSend:
    """An unsent message, leased exclusively to one sender until `due_at`."""

    due_at: datetime
    attempts: int = 1

    def offer(self, now: datetime) -> None:
        """Lease it to a sender; each lease is twice as long as the previous one."""
        self.due_at = now + TIMINGS.dispatch_lease * min(2**self.attempts, MAX_LEASE_FACTOR)
        self.attempts += 1


@dataclass(slots=True)
class CallModel:
    """One call since its checkpoint. Its outcome is kept even after its row is deleted."""

    planned: PlannedCall
    generation: int
    deadline: datetime
    due_at: datetime
    sending: PendingSend
    outcome: Outcome | None = None
    claim_id: RunId | None = None
    dispatched: bool = False
    cancelling: bool = False
    seq: int = 0
    attempt: int = 1
    superseded: bool = False

    @property
    def is_sent(self) -> bool:
        """Whether the peer may have the request."""
        return self.sending.attempts > 0

    @property
    def id(self) -> TaskId:
        return self.planned.sub_task_id

    @property
    def is_wait(self) -> bool:
        """Whether it is a wait without a peer, for which nothing is sent."""
        return is_wait(self.planned.peer)

    def expire(self, now: datetime) -> None:
        """End it because its own deadline, its join's or its task's has passed."""
        if self.planned.peer == SLEEP_PEER and self.deadline <= now:
            self.record(Ok(None), None)
        else:
            self.close(FailureKind.TIMEOUT, now)

    def record(self, outcome: Outcome, claim_id: RunId | None) -> None:
        """Record its only outcome."""
        assert self.outcome is None, f"{self.id} has {self.outcome} and now gets {outcome}"
        self.outcome, self.claim_id = without_message(outcome), claim_id

    def close(self, kind: FailureKind, now: datetime) -> None:
        """Close it without its peer, which has to be notified if it may have the request."""
        self.record(Failed(kind), None)
        if self.is_sent:
            self.cancelling, self.sending = True, PendingSend(now + TIMINGS.dispatch_lease)


@dataclass(slots=True)
class TaskModel:
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
    # running: when its lease ends; ready: when it may be acquired; parked: when it is answered
    due_at: datetime | None = None
    pause: Pause | None = None
    stored_format: str = ""
    join_deadline: datetime | None = None
    keep_alive_at: datetime | None = None
    cancel_requested: bool = False
    suspended_at: datetime | None = None
    parked_since: datetime | None = None
    parked_reason: str | None = None
    tried_versions: tuple[str, ...] = ()
    calls: dict[TaskId, CallModel] = field(default_factory=dict)
    runs: list[tuple[Run, Replica]] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)
    # since the owner changed: a repeated append finds itself
    appends: list[Append] = field(default_factory=list)
    log: tuple[bytes, ...] = ()
    log_seq: int = 0
    mail: MailModel = field(default_factory=MailModel)
    reply: Reply | None = None
    reply_sending: PendingSend | None = None
    # addresses that get the reply after the requester's
    further_addresses: tuple[Address, ...] = ()
    ended_at: datetime | None = None
    expires_at: datetime | None = None

    @property
    def is_early_cancel(self) -> bool:
        """Whether its cancel came before its request."""
        return self.state is TaskState.CANCELLED and self.fence == 0

    @property
    def current_calls(self) -> list[CallModel]:
        """The open or last attempts at the calls of this pause, in call order."""
        return [call for call in self._attempts if not call.superseded]

    @property
    def _attempts(self) -> list[CallModel]:
        """All attempts at the calls of this pause, in call order, oldest first."""
        if self.state.is_final:
            return []
        calls = [call for call in self.calls.values() if call.generation == self.generation]
        return sorted(calls, key=lambda call: (call.seq, call.attempt))

    @property
    def calls_with_row(self) -> list[CallModel]:
        """Calls with a row: this pause's, and closed ones whose peer is not notified yet."""
        current = {call.id for call in self._attempts}
        calls = [call for call in self.calls.values() if call.cancelling or call.id in current]
        return sorted(calls, key=lambda call: (call.generation, call.seq, call.attempt))

    @property
    def pending_calls(self) -> list[CallModel]:
        """Calls without an outcome, in call order."""
        return [call for call in self.current_calls if call.outcome is None]

    @property
    def is_join_met(self) -> bool:
        """Whether the recorded outcomes meet the join."""
        assert self.pause is not None
        outcomes = [call.outcome for call in self.current_calls if call.outcome is not None]
        succeeded = sum(not isinstance(outcome, Failed) for outcome in outcomes)
        return self.pause.join.met(
            total=len(self.current_calls), completed=len(outcomes), succeeded=succeeded
        )

    def is_owned_by(self, run: Run) -> bool:
        """Whether `run` may write."""
        return (
            self.state is TaskState.RUNNING
            and self.owner is not None
            and self.owner.fence == run.fence
        )

    def is_readable_by(self, replica: Replica) -> bool:
        """Whether `replica` may take the task."""
        return (
            self.generation == 0
            or self.cancel_requested
            or (self.pause is not None and self.stored_format in replica.formats)
        )

    def overdue_calls(self, now: datetime) -> list[CallModel]:
        """Pending calls whose deadline has passed."""
        if self.state is not TaskState.WAITING:
            return []
        join_is_late = self.join_deadline is not None and self.join_deadline <= now
        return [call for call in self.pending_calls if join_is_late or call.due_at <= now]

    def next_wait(
        self, call: CallModel, kind: FailureKind, now: datetime, *, at_least: float = 0.0
    ) -> timedelta | None:
        """How long the next attempt waits. `None` if the failure of this one is final."""
        policy = call.planned.retry
        if policy is None or kind not in policy.retry_on or call.attempt == policy.max_attempts:
            return None
        wait = timedelta(seconds=max(RETRY_SECONDS * 2 ** (call.attempt - 1), at_least))
        deadlines = (self.requester.deadline, self.join_deadline)
        is_late = any(each is not None and now + wait >= each for each in deadlines)
        return None if is_late else wait

    def add_attempt(
        self, call: CallModel, next_id: TaskId, wait: timedelta, now: datetime
    ) -> None:
        """Add the attempt after `call`, which the caller closes."""
        planned = replace(call.planned, sub_task_id=next_id)
        following = self._call_model(planned, now + wait, call.seq)
        following.attempt = call.attempt + 1
        following.sending = PendingSend(now + wait, attempts=0)
        self.calls[next_id] = following
        call.superseded = True

    def let_win(self, call: CallModel, now: datetime) -> bool:
        """Replace the open attempt by an earlier one. `False` if the call has ended."""
        is_current = call.superseded and call.generation == self.generation
        for other in self.pending_calls:
            if is_current and other.seq == call.seq:
                other.close(FailureKind.CANCELLED, now - TIMINGS.dispatch_lease)
                other.superseded, call.superseded = True, False
                call.outcome, call.cancelling = None, False
                return True
        return False

    def notice(self, call: CallModel) -> CancelNotice:
        """Notice for the peer of a closed call."""
        return CancelNotice(self.agent, self.task_id, call.id, call.planned.peer)

    def set_owner(self, run: Run, replica: Replica, now: datetime) -> None:
        """Make `run` the only writer."""
        self.state, self.owner, self.replica, self.written_by = (
            TaskState.RUNNING,
            run,
            replica.id,
            run.id,
        )
        self.fence, self.attempt, self.due_at = (
            run.fence,
            max(self.attempt, 1),
            now + replica.lease,
        )
        self.runs.append((run, replica))
        self.appends.clear()

    def make_ready(self, at: datetime, written_by: RunId | None) -> None:
        """Remove the owner; any replica may acquire the task, unless it is suspended."""
        self.state, self.due_at, self.written_by = TaskState.READY, self._due(at), written_by
        self.owner = self.replica = None

    def _due(self, at: datetime) -> datetime:
        return at if self.suspended_at is None else FAR_FUTURE

    def suspend(self, now: datetime) -> None:
        """Keep replicas from acquiring the task."""
        self.suspended_at = self.suspended_at or now
        if self.state is TaskState.READY:
            self.due_at = FAR_FUTURE

    def unsuspend(self, now: datetime) -> None:
        """Let replicas acquire the task again."""
        self.suspended_at = None
        if self.state is TaskState.READY:
            self.due_at = now

    def park(self, reason: str, version: str, now: datetime) -> None:
        """Wait for a version of the code that has not tried the task."""
        self.state, self.parked_reason = TaskState.PARKED, reason
        self.parked_since = self.parked_since or now
        tried = [each for each in self.tried_versions if each != version]
        self.tried_versions = (*tried, version)
        self.due_at = self.parked_until(self.parked_since)

    def parked_until(self, since: datetime) -> datetime:
        """When the task ends if it is parked `since` then."""
        limit_at = since + TIMINGS.parked_limit
        return min(limit_at, self.requester.deadline or limit_at)

    def forget_parking(self) -> None:
        """Forget which versions have tried the task."""
        self.parked_since = self.parked_reason = None
        self.tried_versions = ()

    def is_overdue(self, now: datetime) -> bool:
        """Whether the task only needs to be ended."""
        if self.state is TaskState.PARKED:
            return self.due_at is not None and self.due_at <= now
        return self.state is TaskState.READY and self.is_past_deadline(now)

    def is_past_deadline(self, now: datetime) -> bool:
        """Whether the task's own deadline has passed."""
        return self.requester.deadline is not None and self.requester.deadline <= now

    def checkpoint(self, pause: Pause, now: datetime) -> None:
        """Wait for the calls of `pause`."""
        self.state, self.pause, self.written_by = TaskState.WAITING, pause, pause.run.id
        self.owner = self.replica = self.due_at = None
        self.forget_parking()
        self.generation, self.attempt, self.rescues = self.generation + 1, 0, 0
        self.pauses.append(pause)
        self.stored_format = pause.state_format
        self.appends.clear()
        if pause.log is not None:
            self.change_log(pause.log)
        self.join_deadline = now + pause.join.deadline if pause.join.deadline else None
        self.schedule_keep_alive(now)
        for seq, planned in enumerate(pause.calls):
            self.calls.pop(planned.sub_task_id, None)  # a question that is asked again
            self.calls[planned.sub_task_id] = self._call_model(planned, now, seq)
        self._receive_mail()
        if self.is_join_met:
            for call in self.pending_calls:  # never sent, so there is nothing to cancel
                call.record(Failed(FailureKind.CANCELLED), None)
            self.state, self.due_at = TaskState.READY, self._due(now)

    def _receive_mail(self) -> None:
        """Receive signals and kept answers, in call order, until the join is met."""
        questions = [call.planned for call in self.current_calls if is_question(call.planned.peer)]
        for planned in questions:
            self.mail.drop_answer_to_other(planned.sub_task_id, planned.body)
        for call in self.pending_calls:
            if self.is_join_met:
                break
            outcome = self.mail.kept_answer(call.id) or self.mail.receive(call.planned.peer)
            if outcome is not None:
                call.record(outcome, None)
        for planned in questions:
            outcome = self.calls[planned.sub_task_id].outcome
            if outcome is None or was_answered(outcome):
                self.mail.ask(planned.sub_task_id, planned.body, outcome)

    def extend_late_calls(self, now: datetime) -> None:
        """Start idle deadlines that are found late again."""
        for call in self.pending_calls:
            idle_timeout = call.planned.idle_timeout
            if idle_timeout is not None and now - call.due_at > MAX_SWEEP_DELAY:
                call.due_at = min(now + idle_timeout, call.deadline)

    def schedule_keep_alive(self, now: datetime) -> None:
        """Note when the requester is due the next keep-alive."""
        idle_timeout = self.requester.idle_timeout
        self.keep_alive_at = now + idle_timeout / KEEP_ALIVES_PER_TIMEOUT if idle_timeout else None

    def append(self, change: LogChange) -> None:
        """Add entries between two pauses."""
        self.change_log(change)
        self.attempt, self.rescues = 1, min(self.rescues, SUSPECT_AFTER_RESCUES)
        if self.generation and not has_log(self.stored_format):
            self.stored_format = logged_format(self.stored_format)

    def change_log(self, change: LogChange) -> None:
        """Add entries to the log, or replace it."""
        self.log = (*(() if change.replaces else self.log), *change.entries)
        self.log_seq += len(change.entries)

    def _call_model(self, planned: PlannedCall, now: datetime, seq: int) -> CallModel:
        own = NO_DEADLINE if planned.timeout is None else now + planned.timeout
        deadline = min(own, self.requester.deadline or own)
        due_at = min(deadline, now + planned.idle_timeout) if planned.idle_timeout else deadline
        if planned.peer == SLEEP_PEER:
            deadline = datetime.fromtimestamp(sleep_end(planned.headers, now.timestamp()), UTC)
            due_at = min(deadline, self.requester.deadline or deadline)
        return CallModel(
            planned,
            self.generation,
            deadline,
            due_at,
            PendingSend(now + TIMINGS.dispatch_lease, 0 if is_wait(planned.peer) else 1),
            planned.outcome,
            dispatched=is_wait(planned.peer),
            seq=seq,
        )

    def close_pending(self, now: datetime) -> tuple[CancelNotice, ...]:
        """Close the calls that are not needed any more; return notices for their peers."""
        closed = self.pending_calls
        for call in closed:
            call.close(FailureKind.CANCELLED, now)
        return tuple(self.notice(call) for call in closed if call.is_sent)

    def end_with_reply(
        self, state: TaskState, body: bytes, written_by: RunId, now: datetime
    ) -> None:
        """End the task with its reply."""
        assert self.reply is None, f"{self.task_id} has a reply and now gets another"
        self.state, self.written_by, self.ended_at = state, written_by, now
        self.owner = self.replica = self.suspended_at = None
        self.reply = Reply(self.agent, self.task_id, state, body, self.requester, fence=self.fence)
        self.reply_sending = (
            PendingSend(now + TIMINGS.dispatch_lease) if self.requester.reply_to else None
        )
        self.expires_at = max(now, self.requester.deadline or now) + TIMINGS.tombstone_ttl

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The addresses that get the reply, in this order."""
        first = self.requester.reply_to
        return self.further_addresses if first is None else (first, *self.further_addresses)

    def attach(self, address: Address) -> None:
        """Send the reply to one more address."""
        if address not in self.addresses:
            position = 0 if self.requester.parent_task_id is None else 1
            addresses = [*self.addresses[:position], address, *self.addresses[position:]]
            self._set_addresses(addresses[:4])

    def confirm_reply(self, sent: Reply) -> None:
        """Record that the broker has a reply, which makes it due to the next address."""
        is_current = self.reply is not None and (sent.fence, sent.requester.reply_to) == (
            self.fence,
            self.requester.reply_to,
        )
        if self.reply is None or not is_current or self.reply_sending is None:
            return
        self.reply_sending = None
        if self.further_addresses:
            self._set_addresses(self.further_addresses)
            self.reply = replace(self.reply, requester=self.requester)
            assert self.ended_at is not None
            self.reply_sending = PendingSend(self.ended_at)

    def _set_addresses(self, addresses: Sequence[Address]) -> None:
        first, *further = addresses
        self.requester = replace(self.requester, reply_to=first)
        self.further_addresses = tuple(further)

    def reply_at(self, now: datetime) -> Reply:
        """The reply, with its age at `now`."""
        assert self.reply is not None
        assert self.ended_at is not None
        return replace(self.reply, age=now - self.ended_at)

    def to_resumable(self) -> Resumable:
        """The task as its owner must receive it."""
        assert self.owner is not None
        waiting_calls = self.pause
        outcomes = tuple(
            (call.planned.call_id, call.planned.peer, call.outcome)
            for call in self.current_calls
            if call.outcome is not None
        )
        assert len(outcomes) == len(self.current_calls), (
            f"{self.task_id} is resumed with calls without an outcome"
        )
        return Resumable(
            run=self.owner,
            requester=self.requester,
            context=waiting_calls.context if waiting_calls else {},
            state=waiting_calls.state if waiting_calls else b"",
            state_format=self.stored_format,
            outcomes=outcomes,
            request=None if waiting_calls else self.request,  # optional once there is a state
            attempt=self.attempt,
            cancel_requested=self.cancel_requested,
            rescues=self.rescues,
            log=self.log,
            log_seq=self.log_seq,
            followers=self.further_addresses,
        )
