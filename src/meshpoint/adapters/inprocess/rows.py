"""In-process rows of tasks and calls, and the values read from them."""

from __future__ import annotations

import heapq
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from pydantic import JsonValue
from pydantic_core import from_json

from meshpoint.errors import PoisonMessage
from meshpoint.model.bodies import renamed_request, without_security_context
from meshpoint.model.call_attempts import (
    ANSWERED_EARLIER,
    CallAttempt,
    children_of_attempts,
    superseded,
)
from meshpoint.model.calls import ALL, Join
from meshpoint.model.ids import AgentName, ReplicaId, RunId, TaskId
from meshpoint.model.mailbox import asks_same, match_mail, with_outcomes
from meshpoint.model.messages import Address, Header
from meshpoint.model.operations import KeptCall, LastPause
from meshpoint.model.options import StoreTimings
from meshpoint.model.outcomes import (
    Failed,
    FailureKind,
    Ok,
    Outcome,
    decode_outcome,
    encode_outcome,
    lacks_usage,
)
from meshpoint.model.questions import was_answered
from meshpoint.model.subtasks import AgentCheckpoint, Child, Operation
from meshpoint.model.tasks import (
    KEEP_ALIVES_PER_TIMEOUT,
    NO_DEADLINE,
    CallState,
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
    parked_until,
)
from meshpoint.model.transitions import (
    CallRetried,
    Claim,
    ExistingTask,
    JoinCompleted,
    LogChange,
    Pause,
    StoreReply,
    TaskReady,
)
from meshpoint.model.usage import TokenUsage, parse_usage
from meshpoint.model.waits import SLEEP_PEER, is_question, is_wait, sleep_end
from meshpoint.ports.clock import Clock

log = logging.getLogger("meshpoint.store")

_FAR_FUTURE = datetime(9999, 1, 1, tzinfo=UTC)
_MAX_BACKOFF = 64
"""Maximum back-off in dispatch leases. A send is repeated after 1, 2, 4, … leases."""
_MAX_STALE_ENTRIES = 1_000
"""Outdated entries tolerated in the tombstone heap before it is rebuilt."""
_MAX_TRIED_VERSIONS = 20
_NOT_NEEDED = Failed(FailureKind.CANCELLED, "the join no longer needed it")
_MAX_RESUMABLE = 100
"""Limit on failed operations, and on archived ones, that a process keeps with checkpoints."""


def next_keep_alive_at(requester: Requester, now: datetime) -> datetime | None:
    """When the task sends its next keep-alive, or `None` if `requester` has no idle timeout."""
    idle = requester.idle_timeout
    return None if idle is None else now + idle / KEEP_ALIVES_PER_TIMEOUT


def postpone(send: CallRow | TaskRow, now: datetime, lease: timedelta) -> None:
    """Lease the next send of a call or a reply to the caller, for twice as long each time."""
    send.send_at = now + lease * min(2**send.sends, _MAX_BACKOFF)
    send.sends += 1


@dataclass(slots=True)
class CallRow:
    """One peer call, or one attempt at a retried call.

    `due_at` is the earlier of the idle and the absolute deadline. `send_at` is when the lease of
    the current send ends, or when the attempt begins. `seq` is the position of the call in its
    pause. `sends` is 0 if the request was never due.
    """

    sub_task_id: TaskId
    call_id: str
    peer: AgentName
    generation: int
    body: bytes
    headers: dict[str, str | int | float]
    deadline: datetime
    due_at: datetime
    send_at: datetime
    idle_timeout: timedelta | None
    sends: int = 1
    state: CallState = CallState.PENDING
    outcome: bytes | None = None
    claim_id: RunId | None = None
    dispatched_at: datetime | None = None
    unroutable_since: datetime | None = None
    seq: int = 0
    attempt: CallAttempt | None = None
    created_at: datetime | None = None

    @property
    def unsent(self) -> bool:
        """Whether the request or the cancel still has to be sent."""
        undispatched = self.state is CallState.PENDING and self.dispatched_at is None
        return undispatched or self.state is CallState.CANCELLING


@dataclass(slots=True)
class OperationRow:
    """Additional fields of an operation.

    `seq` is the number of its last checkpoint, even if that has been deleted.
    """

    operation: Operation
    created_at: datetime
    preserve: bool
    seq: int = 0
    children: list[Child] = field(default_factory=list)
    checkpoints: list[AgentCheckpoint] = field(default_factory=list)

    def save_checkpoint(
        self, checkpoint: AgentCheckpoint, seq: int, now: datetime, history: int
    ) -> None:
        """Append a checkpoint and delete the oldest beyond `history`.

        Only the latest working memory is kept. The checkpoint that holds it and the final
        checkpoint of each attempt are not deleted.
        """
        stored = checkpoint.model_copy(
            update={"seq": seq, "checkpoint_time": now, "changed": None}, deep=True
        )
        if stored.l1_snapshot is not None:
            self.checkpoints = [without_memory(each) for each in self.checkpoints]
        everything = [*self.checkpoints, stored]
        last_seqs = {each.retry_count: each.seq for each in everything}.values()
        self.checkpoints, self.seq = (
            [
                each
                for each in everything
                if each.seq > seq - history
                or each.l1_snapshot is not None
                or each.seq in last_seqs
            ],
            seq,
        )


def without_memory(checkpoint: AgentCheckpoint) -> AgentCheckpoint:
    """A copy of `checkpoint` without its working memory."""
    return checkpoint.model_copy(update={"l1_snapshot": None})


@dataclass(slots=True)
class SignalRow:
    """One signal. `value` is `None` once the task has received it."""

    seq: int
    id: str
    name: str
    sender: str
    size: int
    digest: str
    sent_at: datetime
    value: bytes | None


@dataclass(slots=True)
class QuestionRow:
    """A question, as the latest pause that waited for it asked it.

    `is_kept`: the answer arrived while the task was not waiting for it.
    """

    request: bytes
    answer: Outcome | None = None
    is_kept: bool = False


@dataclass(slots=True)
class TaskRow:
    """One task with its join and its calls.

    `due_at` is when the task needs attention: when a running task's lease expires, when a ready
    task may be acquired, when a tombstone may be deleted. Context and outcomes are stored as JSON,
    so that no caller shares mutable objects with them.
    """

    task_id: TaskId
    agent: AgentName
    run_id: RunId
    requester: Requester
    state: TaskState
    checkpointed_at: datetime
    due_at: datetime
    fence: int = 1
    generation: int = 0
    attempt: int = 0
    rescues: int = 0
    owner: ReplicaId | None = None
    context: str = "{}"
    body: bytes = b""
    state_format: str = ""
    log: list[tuple[RunId, bytes]] = field(default_factory=list)
    log_seq: int = 0
    request: bytes | None = None
    digest: str | None = None
    cancel_requested: bool = False
    parked_since: datetime | None = None
    parked_reason: str | None = None
    tried_versions: tuple[str, ...] = ()
    suspended_at: datetime | None = None
    keep_alive_at: datetime | None = None
    # Join
    join: Join = ALL
    join_deadline: datetime | None = None
    expected: int = 0
    completed: int = 0
    succeeded: int = 0
    calls: dict[TaskId, CallRow] = field(default_factory=dict)
    # End
    reply: bytes = b""
    reply_sent: bool = False
    further_reply_to: tuple[Address, ...] = ()
    ended_at: datetime | None = None
    send_at: datetime | None = None
    sends: int = 1
    dead_reason: str | None = None
    # Operation
    operation: OperationRow | None = None
    resume_token: str | None = None
    retry_count: int = 0
    # Mailbox
    signals: list[SignalRow] = field(default_factory=list)
    signal_seq: int = 0
    questions: dict[TaskId, QuestionRow] = field(default_factory=dict)
    values: dict[str, bytes] = field(default_factory=dict)

    @property
    def is_early_cancel(self) -> bool:
        """Whether this is the tombstone of a cancel that arrived before its request.

        Its requester is the canceller.
        """
        return (
            self.state is TaskState.CANCELLED
            and self.fence == 0
            and self.requester.reply_to is None
        )

    @property
    def is_suspended(self) -> bool:
        """Whether a person has suspended the task. A cancel and an end lift the suspension."""
        return self.suspended_at is not None

    @property
    def usage(self) -> TokenUsage | None:
        """The tokens up to the last pause, or to the end of an operation."""
        return parse_usage(json.loads(self.context).get("token_usage"))

    @property
    def has_kept_pause(self) -> bool:
        """Whether the task is an ended operation that can be resumed at its last pause."""
        return self.state.is_final and _is_resumable(self) and self.generation > 0

    @property
    def current_calls(self) -> list[CallRow]:
        """The calls of this generation, in call order, without earlier attempts."""
        current = [call for call in self.calls.values() if call.generation == self.generation]
        return sorted(current, key=_seq)

    @property
    def pending_calls(self) -> list[CallRow]:
        """The calls without an outcome, in call order."""
        pending = [call for call in self.calls.values() if call.state is CallState.PENDING]
        return sorted(pending, key=_seq)

    @property
    def wake_at(self) -> datetime:
        """When this task is next due. For a waiting task, its earliest deadline."""
        if self.state is not TaskState.WAITING:
            return self.due_at
        deadlines = [call.due_at for call in self.pending_calls]
        return min(
            [*deadlines, self.join_deadline] if self.join_deadline else deadlines,
            default=self.due_at,
        )

    @property
    def unsent(self) -> bool:
        """Whether a request, a cancel or the reply still has to be sent."""
        return (self.state.is_final and not self.reply_sent) or any(
            call.unsent for call in self.calls.values()
        )

    @property
    def run(self) -> Run:
        """The current or latest run of this task."""
        return Run(self.task_id, self.agent, self.run_id, self.fence, self.generation)

    def readable_by(self, replica: Replica) -> bool:
        """Whether `replica` may run the task, or cancel it.

        Before its first pause, it has no state to read. A cancel reads none.
        """
        return self.agent == replica.agent and (
            self.generation == 0 or self.cancel_requested or self.state_format in replica.formats
        )

    def only_ends_at(self, replica: Replica) -> bool:
        """Whether `replica` rescues the task only to end it as failed."""
        return replica.fails_lost and self.operation is not None

    def make_ready(self, at: datetime) -> None:
        """Make the task ready to be acquired at `at`, or once it is no longer suspended."""
        self.state, self.owner = TaskState.READY, None
        self.due_at = _FAR_FUTURE if self.is_suspended else at

    def suspend(self, now: datetime) -> None:
        """Keep replicas from acquiring the task. A repetition keeps the first time."""
        self.suspended_at = self.suspended_at or now
        if self.state is TaskState.READY:
            self.make_ready(now)

    def unsuspend(self, now: datetime) -> None:
        """Let replicas acquire the task again, at once if it is ready."""
        self.suspended_at = None
        if self.state is TaskState.READY:
            self.make_ready(now)

    def park(self, reason: str, version: str, now: datetime, limit: timedelta) -> None:
        """Park the task, because `version` of its agent's code cannot continue it."""
        self.state, self.parked_reason = TaskState.PARKED, reason
        self.parked_since = self.parked_since or now
        tried = [each for each in self.tried_versions if each != version]
        self.tried_versions = (*tried, version)[-_MAX_TRIED_VERSIONS:]
        self.due_at = parked_until(self.parked_since + limit, self.requester.deadline)

    def adopt(self, requester: Requester, now: datetime, parked_limit: timedelta) -> None:
        """Let the task continue for `requester`, whose deadline also limits its parking."""
        self.requester, self.keep_alive_at = requester, next_keep_alive_at(requester, now)
        if self.state is TaskState.PARKED and self.parked_since is not None:
            self.due_at = parked_until(self.parked_since + parked_limit, requester.deadline)

    def forget_parking(self) -> None:
        """Forget which versions of the agent's code could not continue the task."""
        self.parked_since, self.parked_reason, self.tried_versions = None, None, ()

    def change_log(self, run_id: RunId, change: LogChange) -> None:
        """Change the task's log as its run `run_id` asks."""
        earlier = [] if change.replaces else self.log
        self.log = [*earlier, *((run_id, entry) for entry in change.entries)]
        self.log_seq += len(change.entries)

    def receive(self, name: str) -> Ok[JsonValue]:
        """Take the oldest signal with this name out of the mailbox. There must be one."""
        oldest = next(
            each for each in self.signals if each.name == name and each.value is not None
        )
        value, oldest.value = oldest.value or b"null", None
        return Ok(from_json(value))

    def deliver(self, pause: Pause) -> Pause:
        """Add the outcomes in the mailbox to a pause, and record the questions that it asks."""
        answers = dict[TaskId, Outcome]()
        for call in pause.calls:
            known = self.questions.get(call.sub_task_id)
            if known is None or not known.is_kept or known.answer is None:
                continue
            if asks_same(known.request, call.body):
                answers[call.sub_task_id] = known.answer
            else:
                known.answer, known.is_kept = None, False
        kept = [(each.seq, each.name) for each in self.signals if each.value is not None]
        names = dict(kept)
        outcomes = {
            id_: answers[id_] if seq is None else self.receive(names[seq])
            for id_, seq in match_mail(pause, kept, answers).items()
        }
        pause = with_outcomes(pause, outcomes)
        for call in pause.calls:
            if is_question(call.peer) and (call.outcome is None or was_answered(call.outcome)):
                known = self.questions.get(call.sub_task_id)
                if call.outcome is not None or known is None or not known.is_kept:
                    self.questions[call.sub_task_id] = QuestionRow(call.body, call.outcome)
                else:
                    known.request = call.body
        return pause

    def record_outcome(self, call: CallRow, outcome: Outcome, claim_id: RunId | None) -> None:
        """Record the outcome of `call` and count it on the join."""
        call.outcome, call.claim_id, call.state = encode_outcome(outcome), claim_id, CallState.DONE
        self.completed += 1
        self.succeeded += not isinstance(outcome, Failed)

    @property
    def is_join_met(self) -> bool:
        """Whether the outcomes recorded so far meet the join."""
        return self.join.met(
            total=self.expected, completed=self.completed, succeeded=self.succeeded
        )

    def count_late_usage(self, call: CallRow, usage: TokenUsage) -> None:
        """Count the tokens of a response to a closed call, once, if nothing has read its outcome.

        An ended operation counts them in its total.
        """
        if usage.is_empty or call.claim_id is not None or call.outcome is None:
            return
        is_earlier = call.generation == superseded(self.generation)
        if self.state is TaskState.RUNNING or not (
            is_earlier or call.generation == self.generation
        ):
            return
        if self.state.is_final and not _is_resumable(self):
            return
        recorded = decode_outcome(call.outcome)
        if not lacks_usage(recorded):
            return
        call.outcome = encode_outcome(replace(recorded, usage=usage))
        if self.state.is_final or is_earlier:
            self.add_usage(call.peer, usage)

    def add_usage(self, peer: AgentName, usage: TokenUsage) -> None:
        """Add tokens of `peer` to the token usage in the context."""
        if not usage.is_empty:
            total = self.usage or TokenUsage()
            total.merge(usage, source=peer)
            self.set_usage(total)

    def retry(self, call: CallRow, claim: Claim, now: datetime) -> CallRetried | None:
        """Insert the attempt after `call`, unless the failure in `claim` is final.

        The caller closes the failed attempt.
        """
        if call.attempt is None or not isinstance(claim.outcome, Failed):
            return None
        deadlines = [
            None if each is None else each.timestamp()
            for each in (self.requester.deadline, self.join_deadline)
        ]
        following = call.attempt.next(
            claim.outcome.kind,
            now.timestamp(),
            deadlines,
            retryable=claim.retryable,
            retry_after=claim.retry_after,
        )
        if following is None:
            return None
        try:
            body = renamed_request(call.body, following.sub_task_id)
        except PoisonMessage as error:
            log.error("task %s: a call cannot be retried: %s", self.task_id, error)
            return None
        idle = None if call.idle_timeout is None else call.idle_timeout.total_seconds()
        deadline, due_at = following.deadlines(idle, deadlines[0], NO_DEADLINE.timestamp())
        headers = {key: each for key, each in call.headers.items() if key != Header.RESUME.value}
        self.calls[following.sub_task_id] = replace(
            call,
            sub_task_id=following.sub_task_id,
            body=body,
            headers=headers,
            deadline=datetime.fromtimestamp(deadline, UTC),
            due_at=datetime.fromtimestamp(due_at, UTC),
            send_at=datetime.fromtimestamp(following.due_at, UTC),
            sends=0,
            dispatched_at=None,
            unroutable_since=None,
            attempt=following.attempt,
            created_at=now,
        )
        call.generation = superseded(self.generation)
        self.add_usage(call.peer, claim.outcome.usage)
        if self.operation is not None:
            ids = [(call.sub_task_id, following.sub_task_id)]
            self.operation.children += children_of_attempts(self.operation.children, ids)
        wait = timedelta(seconds=following.due_at - now.timestamp())
        return CallRetried(
            self.task_id,
            call.sub_task_id,
            following.sub_task_id,
            call.peer,
            following.attempt.number,
            wait,
            claim.outcome.kind,
        )

    def let_win(self, call: CallRow, now: datetime) -> bool:
        """Make an earlier attempt the open one. Returns `False` if its call has ended."""
        if call.generation != superseded(self.generation):
            return False
        for current in self.pending_calls:
            if current.call_id == call.call_id:
                current.outcome = encode_outcome(ANSWERED_EARLIER)
                current.generation, call.generation = call.generation, current.generation
                current.state = CallState.CANCELLING if current.sends else CallState.DONE
                if current.sends:
                    current.send_at, current.sends = now, 1
                call.state = CallState.PENDING
                return True
        return False

    def delete_done_calls(self) -> None:
        """Delete all calls except cancels that are still unsent."""
        self.calls = {
            key: call for key, call in self.calls.items() if call.state is CallState.CANCELLING
        }

    def merged_usage(self) -> TokenUsage:
        """Tokens up to the end of the last pause, including its calls."""
        usage = TokenUsage.model_validate(json.loads(self.context).get("token_usage") or {})
        for call in self.current_calls:
            if call.outcome is not None:
                usage.merge(decode_outcome(call.outcome).usage, source=call.peer)
        return usage

    def set_usage(self, usage: TokenUsage) -> None:
        """Replace the tokens in the context."""
        context = json.loads(self.context) | {"token_usage": usage.model_dump(mode="json")}
        self.context = json.dumps(context)

    def strip_pause(self, *, keep_security_context: bool) -> None:
        """Remove what no resume needs from the last pause.

        These are the requests of calls with a result and, unless they are kept, security contexts.
        """
        for call in self.current_calls:
            if call.outcome is not None and isinstance(decode_outcome(call.outcome), Ok):
                call.body = b""
        if keep_security_context:
            return
        context = json.loads(self.context)
        context.pop("security_context", None)
        self.context = json.dumps(context)
        for call in self.current_calls:
            call.body = without_security_context(call.body)

    def to_last_pause(self) -> LastPause:
        """The pause that an ended operation has kept."""
        deadline = None
        if self.join_deadline is not None:
            deadline = max(self.join_deadline - self.checkpointed_at, timedelta(seconds=1))
        return LastPause(
            self.run,
            json.loads(self.context),
            self.body,
            self.state_format,
            Join(self.join.needed, deadline),
            tuple(self._kept_call(call) for call in self.current_calls),
            () if self.operation is None else tuple(self.operation.children),
            self.retry_count,
        )

    def _kept_call(self, call: CallRow) -> KeptCall:
        timeout = call.deadline - self.checkpointed_at if call.deadline < NO_DEADLINE else None
        if call.attempt is not None:
            seconds = call.attempt.timeout
            timeout = None if seconds is None else timedelta(seconds=seconds)
        planned = PlannedCall(
            call.sub_task_id,
            call.call_id,
            call.peer,
            call.body,
            None if timeout is None else max(timeout, timedelta(seconds=1)),
            call.idle_timeout,
            dict(call.headers),
            retry=None if call.attempt is None else call.attempt.policy,
        )
        failed = Failed(FailureKind.CANCELLED)
        return KeptCall(planned, failed if call.outcome is None else decode_outcome(call.outcome))

    def detach_cancels(self) -> None:
        """Delete all calls except unsent cancels, and detach those from their generation."""
        self.delete_done_calls()
        for call in self.calls.values():
            call.generation = -1

    def to_dispatch(self, call: CallRow, now: datetime | None = None) -> Dispatch:
        """The request of `call`, ready to send. `now` adds how long it has been unroutable."""
        since = call.unroutable_since
        return Dispatch(
            self.agent,
            self.task_id,
            call.generation,
            call.sub_task_id,
            call.peer,
            call.body,
            dict(call.headers),
            call.deadline,
            call.sends,
            is_retry=call.attempt is not None and call.attempt.number > 1,
            unroutable_for=None if now is None or since is None else now - since,
        )

    def to_cancel_notice(self, call: CallRow) -> CancelNotice:
        """The cancel of `call`, ready to send."""
        return CancelNotice(self.agent, self.task_id, call.sub_task_id, call.peer)

    def to_existing_task(self, reply: Reply | None) -> ExistingTask:
        """The task as a duplicate of its request sees it."""
        return ExistingTask(
            self.task_id,
            self.agent,
            self.state,
            reply,
            requester=self.requester.app_id,
            digest=self.digest,
            is_early_cancel=self.is_early_cancel,
            reply_to=self.requester.reply_to,
            order=self.resume_token,
        )

    @property
    def reply_addresses(self) -> tuple[Address, ...]:
        """The addresses that get the reply, in the order of sending."""
        first = self.requester.reply_to
        return self.further_reply_to if first is None else (first, *self.further_reply_to)

    def set_reply_addresses(self, addresses: Sequence[Address]) -> None:
        """Replace the addresses that get the reply. There must be one."""
        first, *further = addresses
        self.requester = replace(self.requester, reply_to=first)
        self.further_reply_to = tuple(further)

    def to_reply(self, now: datetime) -> Reply:
        """The reply of an ended task, with its age at `now`."""
        age = now - self.ended_at if self.ended_at else timedelta()
        return Reply(
            self.agent, self.task_id, self.state, self.reply, self.requester, age, fence=self.fence
        )

    def to_resumable(self) -> Resumable:
        """The task as its new owner needs it."""
        outcomes = tuple(
            (c.call_id, c.peer, decode_outcome(c.outcome))
            for c in self.current_calls
            if c.outcome is not None
        )
        context: CheckpointDict = json.loads(self.context)
        return Resumable(
            self.run,
            self.requester,
            context,
            self.body,
            self.state_format,
            outcomes,
            self.request,
            self.attempt,
            self.cancel_requested,
            checkpoint=None if self.operation is None else self.operation.seq,
            retry_count=self.retry_count,
            digest=self.digest,
            rescues=self.rescues,
            crash_reason=self.dead_reason,
            log=tuple(entry for _, entry in self.log),
            log_seq=self.log_seq,
            followers=self.further_reply_to,
        )


class Tables:
    """All rows and their indexes.

    `tombstones` is a heap ordered by expiry. It may hold outdated entries: of rows whose expiry
    has changed, or that are no longer tombstones.

    With `max_ended`, a task is forgotten once its outcome is confirmed. Only the requesters and
    input digests of the last `max_ended` tasks are kept, in `recently_ended`, along with as many
    early cancels and `_MAX_RESUMABLE` failed operations. The oldest are forgotten first. The
    request of a forgotten early cancel runs, and a forgotten operation cannot be resumed.
    """

    def __init__(self, clock: Clock, timings: StoreTimings, max_ended: int | None = None) -> None:
        self.clock, self.timings, self._max_ended = clock, timings, max_ended
        self.early_cancels: dict[TaskId, TaskRow] = {}
        self.resumable: dict[TaskId, TaskRow] = {}
        self.recently_ended: dict[TaskId, ExistingTask] = {}
        self.tasks: dict[TaskId, TaskRow] = {}
        self.live: dict[TaskId, TaskRow] = {}
        self.sending: dict[TaskId, TaskRow] = {}
        self.tombstones: list[tuple[datetime, TaskId]] = []
        self.archive: dict[TaskId, list[AgentCheckpoint]] = {}
        self.copy_key = os.urandom(32)

    def put(self, row: TaskRow) -> None:
        """Write `row` and update the indexes. Every change of a row ends here."""
        self.tasks[row.task_id] = row
        for index, belongs in (
            (self.live, not row.state.is_final),
            (self.sending, row.unsent),
            (self.early_cancels, row.is_early_cancel),
            (self.resumable, row.state.is_final and _is_resumable(row)),
        ):
            if belongs:
                index[row.task_id] = row
            else:
                index.pop(row.task_id, None)
        if self._max_ended is not None:
            for index, limit in (
                (self.early_cancels, self._max_ended),
                (self.resumable, _MAX_RESUMABLE),
            ):
                if len(index) > limit and (
                    oldest := next((each for each in index.values() if not each.unsent), None)
                ):
                    self._forget(oldest, self._max_ended)

    def remove(self, row: TaskRow) -> None:
        """Delete `row` and its index entries."""
        for index in (self.tasks, self.live, self.sending, self.early_cancels, self.resumable):
            index.pop(row.task_id, None)
        if len(self.tombstones) > 2 * len(self.tasks) + _MAX_STALE_ENTRIES:
            self.tombstones = [each for each in self.tombstones if each[1] in self.tasks]
            heapq.heapify(self.tombstones)

    def archive_checkpoints(self, row: TaskRow, checkpoints: list[AgentCheckpoint]) -> None:
        """Archive the checkpoints of a completed operation."""
        self.archive[row.task_id] = checkpoints
        if self._max_ended is not None and len(self.archive) > _MAX_RESUMABLE:
            del self.archive[next(iter(self.archive))]

    def forget_if_finished(self, row: TaskRow) -> None:
        """Forget an ended task with nothing left to send or to resume, if `max_ended` is set."""
        if (
            self._max_ended is not None
            and row.state.is_final
            and not (row.unsent or row.is_early_cancel or _is_resumable(row))
        ):
            self._forget(row, self._max_ended)

    def _forget(self, row: TaskRow, max_ended: int) -> None:
        self.remove(row)
        if not row.is_early_cancel:
            self.recently_ended[row.task_id] = row.to_existing_task(None)
        if len(self.recently_ended) > max_ended:
            del self.recently_ended[next(iter(self.recently_ended))]

    def write_checkpoint(self, row: TaskRow, pause: Pause, context: str) -> None:
        """Let a task wait for the calls of a pause. `context` is the pause's, as JSON."""
        now = self.clock.now()
        pause = row.deliver(pause)
        row.run_id, row.owner = pause.run.id, None
        row.generation += 1
        row.attempt, row.rescues = 0, 0
        row.forget_parking()
        row.context, row.state_format = context, pause.state_format
        if pause.log is None or not pause.log.keeps_state or pause.run.fence == 0:
            row.body = pause.state
        if pause.log is not None:
            row.change_log(pause.run.id, pause.log)
        row.checkpointed_at = row.due_at = now
        row.state, row.join, row.dead_reason = TaskState.WAITING, pause.join, None
        row.join_deadline = now + pause.join.deadline if pause.join.deadline else None
        row.expected, row.completed, row.succeeded = len(pause.calls), 0, 0
        row.keep_alive_at = next_keep_alive_at(row.requester, now)
        row.delete_done_calls()
        for seq, planned in enumerate(pause.calls):
            call = row.calls[planned.sub_task_id] = self._call_row(planned, row, now)
            call.seq, call.created_at = seq, now
            if planned.outcome is not None:
                row.record_outcome(call, planned.outcome, None)
        if row.is_join_met:
            for call in row.pending_calls:  # a passed sleep or a kept signal may win the race
                row.record_outcome(call, _NOT_NEEDED, None)
            row.make_ready(now)

    def _call_row(self, planned: PlannedCall, row: TaskRow, now: datetime) -> CallRow:
        own = NO_DEADLINE if planned.timeout is None else now + planned.timeout
        deadline = min(own, row.requester.deadline or own)
        idle = planned.idle_timeout
        due_at = min(now + idle, deadline) if idle else deadline
        if planned.peer == SLEEP_PEER:
            end = sleep_end(planned.headers, now.timestamp())
            deadline = datetime.fromtimestamp(end, UTC)
            due_at = min(deadline, row.requester.deadline or deadline)
        return CallRow(
            planned.sub_task_id,
            planned.call_id,
            planned.peer,
            row.generation,
            planned.body,
            dict(planned.headers),
            deadline=deadline,
            due_at=due_at,
            send_at=now + self.timings.dispatch_lease,
            idle_timeout=idle,
            sends=0 if is_wait(planned.peer) else 1,
            dispatched_at=now if is_wait(planned.peer) else None,
            attempt=CallAttempt.first(planned, now.timestamp()),
        )

    def close_calls(
        self, row: TaskRow, calls: Sequence[CallRow], kind: FailureKind, message: str
    ) -> tuple[CancelNotice, ...]:
        """Fail `calls` of `row`. Returns the cancels that still have to be sent to their peers.

        Earlier attempts at calls are not counted.
        """
        send_at, notices = self.clock.now() + self.timings.dispatch_lease, list[CancelNotice]()
        for call in calls:
            call.outcome = encode_outcome(Failed(kind, message))
            call.state = CallState.DONE
            if call.sends:
                call.state, call.send_at, call.sends = CallState.CANCELLING, send_at, 1
                notices.append(row.to_cancel_notice(call))
            row.completed += call.generation == row.generation
        return tuple(notices)

    def assign_owner(self, row: TaskRow, replica: Replica, run_id: RunId) -> Resumable:
        """Make `replica` the owner of `row`. The previous owner is fenced from now on."""
        row.state, row.owner, row.run_id = TaskState.RUNNING, replica.id, run_id
        row.fence += 1
        row.attempt = max(row.attempt, 1)
        row.due_at = self.clock.now() + replica.lease
        self.put(row)
        return row.to_resumable()

    def write_tombstone(
        self,
        row: TaskRow,
        state: TaskState,
        run_id: RunId,
        reply: bytes,
        dead_reason: str | None = None,
        usage: TokenUsage | None = None,
    ) -> None:
        """End the task. Only its reply and unsent cancels remain until it expires.

        A failed or cancelled operation, and a dead task, also keep their request. The operation
        also keeps its last pause.
        """
        now = self.clock.now()
        row.state, row.run_id, row.reply, row.ended_at, row.owner = state, run_id, reply, now, None
        row.suspended_at = None
        row.due_at = self.expiry(row, now)
        row.reply_sent = row.requester.reply_to is None
        row.send_at = now + self.timings.dispatch_lease
        row.dead_reason = dead_reason
        row.request = row.request if dead_reason or _is_resumable(row) else None
        if not _is_resumable(row):
            row.log = []
        row.completed = row.succeeded = row.expected = 0
        if row.has_kept_pause:
            if not (total := usage or row.merged_usage()).is_empty:
                row.set_usage(total)
            row.strip_pause(keep_security_context=self.timings.keep_security_context)
        else:
            row.delete_done_calls()
            stored = json.loads(row.context).get("token_usage") if _is_resumable(row) else None
            row.context, row.body = json.dumps({"token_usage": stored} if stored else {}), b""
            if usage is not None:
                row.set_usage(usage)
        heapq.heappush(self.tombstones, (row.due_at, row.task_id))
        self.put(row)

    def store_reply(self, command: StoreReply) -> None:
        """Insert a tombstone with a reply to send, for a task without a row."""
        now, reply = self.clock.now(), command.reply
        row = TaskRow(
            reply.task_id, reply.agent, command.run_id, reply.requester, reply.state, now, now
        )
        row.fence, row.reply, row.ended_at, row.digest = 0, reply.body, now, command.digest
        row.send_at = now + self.timings.dispatch_lease
        row.due_at = (
            self.expiry(row, now)
            if command.retention is None
            else now + max(command.retention, reply.requester.result_ttl or timedelta())
        )
        heapq.heappush(self.tombstones, (row.due_at, row.task_id))
        self.put(row)

    def make_reply_due(self, row: TaskRow, requester: Requester) -> None:
        """Send the reply of an ended task again, now to `requester`."""
        previous = row.requester
        row.requester = replace(
            requester, deadline=previous.deadline, idle_timeout=previous.idle_timeout
        )
        row.reply_sent = False
        row.sends = 1
        row.send_at = self.clock.now() + self.timings.dispatch_lease
        self.put(row)

    def expiry(self, row: TaskRow, ended_at: datetime) -> datetime:
        """When an ended task may be deleted."""
        if row.operation is not None and row.operation.preserve:
            return _FAR_FUTURE
        # Until the deadline, a duplicate of the request may still arrive and must find the
        # tombstone.
        tombstone = max(
            max(ended_at, row.requester.deadline or ended_at) + self.timings.tombstone_ttl,
            ended_at + (row.requester.result_ttl or timedelta()),
        )
        if not _is_resumable(row):
            return tombstone
        return max(tombstone, ended_at + self.timings.checkpoint_ttl)


def _seq(call: CallRow) -> int:
    return call.seq


def _is_resumable(row: TaskRow) -> bool:
    return row.operation is not None and row.state is not TaskState.COMPLETED


def continue_task(
    tables: Tables, row: TaskRow, last: CallRow, replica: Replica, *, run_id: RunId, slots: int
) -> JoinCompleted | TaskReady:
    """Close the calls that the join no longer needs, and acquire the task or make it ready.

    `replica` acquires it if a slot is free, it reads the state's format, and the task is not
    suspended.
    """
    cancels = tables.close_calls(row, row.pending_calls, _NOT_NEEDED.kind, _NOT_NEEDED.message)
    if slots > 0 and row.readable_by(replica) and not row.is_suspended:
        return JoinCompleted(
            row.task_id, last.sub_task_id, tables.assign_owner(row, replica, run_id), cancels
        )
    row.run_id = run_id
    row.make_ready(tables.clock.now())
    tables.put(row)
    return TaskReady(row.task_id, last.sub_task_id, cancels)
