"""Inputs of the store, made from small numbers: failing runs are readable and shrink well."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import count
from typing import Literal

from machines.task_model import RETRY_SECONDS, TaskModel
from meshpoint.model.bodies import A2AMessage, Part, RequestBody
from meshpoint.model.calls import Join
from meshpoint.model.ids import AgentName, ReplicaId, RunId, TaskId
from meshpoint.model.mailbox import RecordAnswer, SendSignal, SetValue
from meshpoint.model.messages import Address
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome
from meshpoint.model.questions import QuestionKey
from meshpoint.model.retry_policy import RetryPolicy
from meshpoint.model.tasks import (
    CheckpointDict,
    PlannedCall,
    Replica,
    Requester,
    Run,
    TaskState,
    logged_format,
)
from meshpoint.model.transitions import Append, Attach, Begin, Cancel, Claim, End, LogChange, Pause
from meshpoint.model.waits import QUESTION_PREFIX, SIGNAL_PREFIX, SLEEP_PEER, Sleep
from meshpoint.testing.conformance.build import (
    AGENT,
    FORMAT,
    HOUR,
    LEASE,
    OTHER_FORMAT,
    PEER,
    REQUESTER,
    SECOND,
)

ALL_FORMATS = frozenset({FORMAT, OTHER_FORMAT, logged_format(FORMAT), logged_format(OTHER_FORMAT)})
REPLICAS = tuple(
    Replica(ReplicaId(name), AGENT, frozenset(formats), LEASE, isolates=name != "A", version=name)
    for name, formats in (
        ("A", {FORMAT, logged_format(FORMAT)}),
        ("B", ALL_FORMATS),
        ("C", {OTHER_FORMAT}),  # of the previous release, which reads no logs
    )
)
READS_ALL = Replica(ReplicaId("Z"), AGENT, ALL_FORMATS, LEASE, version="Z")
PEERS = (PEER, AgentName("hotels"))
RETRY = RetryPolicy(max_attempts=3, initial_interval=RETRY_SECONDS, jitter=False)
TIMEOUTS = (60 * SECOND, 20 * SECOND, HOUR, 5 * SECOND)
QUESTION = AgentName(f"{QUESTION_PREFIX}approval")
SIGNALS = ("chat", "stop")
WAIT_TIMEOUTS = (None, 20 * SECOND, HOUR)
IDLE_TIMEOUTS = (None, None, 12 * SECOND)


@dataclass(frozen=True, slots=True)
class PauseShape:
    """Shape of a pause: which calls have an outcome before they are sent, the join, and the log.

    A pause without `entries` ends the log. Calls beyond `waits` are to peers.
    """

    failed: tuple[bool, ...]
    needed: int | None
    join_seconds: int | None
    times: int
    state_format: str
    entries: int = 0
    replaces: bool = False
    keeps_state: bool = False
    waits: tuple[Literal["peer", "sleep", "question", "signal"], ...] = ()

    def join(self) -> Join:
        """The join; it never needs more results than there are calls."""
        needed = None if self.needed is None else min(self.needed, len(self.failed))
        return Join(needed, None if self.join_seconds is None else self.join_seconds * SECOND)


class InputFactory:
    """Makes inputs with unique ids. `prefix` separates machines that share a database."""

    def __init__(self, prefix: str) -> None:
        self._prefix, self._numbers = prefix, count()

    def new_id(self, word: str) -> str:
        """A new id that contains `word`."""
        return f"{self._prefix}-{word}-{next(self._numbers):04}"

    def make_run(self, task_id: TaskId | None = None) -> Run:
        """The first run of a task."""
        return Run(task_id or TaskId(self.new_id("task")), AGENT, RunId(self.new_id("run")))

    def make_requester(self, number: int, now: datetime) -> Requester:
        """A requester that is plain, has a deadline, has an idle timeout, or has no address."""
        address = Address("client.resp")
        return (
            Requester(address, REQUESTER, "parent"),
            Requester(address, REQUESTER, "parent", deadline=now + 40 * SECOND),
            Requester(address, REQUESTER, None, deadline=now + 3 * HOUR, idle_timeout=30 * SECOND),
            Requester(),
        )[number % 4]

    def make_begin(self, run: Run, replica: Replica, requester: Requester) -> Begin:
        """A request written before it runs."""
        return Begin(run, replica, requester, b"request")

    def make_attach(self, task_id: TaskId, number: int) -> Attach:
        """An attach of the requester or another sender, with six possible addresses."""
        sender = "mallory" if number % 7 == 6 else REQUESTER
        return Attach(task_id, AGENT, sender, Address(f"client.private.{number % 6}"))

    def make_pause(
        self, run: Run, requester: Requester, shape: PauseShape, model: TaskModel | None = None
    ) -> Pause:
        """A checkpoint of the given shape. `model` is the task that the run has read."""
        calls = tuple(
            self._make_call(number, shape, failed) for number, failed in enumerate(shape.failed)
        )
        state = f"state of {run.id}".encode()
        context: CheckpointDict = {"flags": {"run": run.id}}
        pause = Pause(
            run, context, state, shape.state_format, calls, shape.join(), requester, b"request"
        )
        return self._add_log(pause, shape, model)

    def _add_log(self, pause: Pause, shape: PauseShape, model: TaskModel | None) -> Pause:
        log_seq, log = (0, ()) if model is None else (model.log_seq, model.log)
        if not (log or shape.entries):
            return pause
        entries = tuple(
            f"entry {number} of {pause.run.id}".encode() for number in range(shape.entries)
        )
        change = LogChange(entries, log_seq, replaces=shape.replaces or not entries)
        if not entries:
            return replace(pause, log=change)
        pause = replace(pause, state_format=logged_format(pause.state_format))
        if shape.keeps_state and model is not None and model.pause is not None:
            change, pause = (
                replace(change, keeps_state=True),
                replace(pause, state=model.pause.state),
            )
        return replace(pause, log=change)

    def make_append(self, run: Run, model: TaskModel, shape: PauseShape) -> Append:
        """Entries that a run appends between two pauses of a task as it has read it."""
        entries = tuple(
            f"step {number} of {run.id}".encode() for number in range(shape.entries or 1)
        )
        return Append(run, LogChange(entries, model.log_seq, replaces=shape.replaces))

    def _make_call(self, number: int, shape: PauseShape, failed: bool) -> PlannedCall:
        choice = number + shape.times
        wait = shape.waits[number] if number < len(shape.waits) else "peer"
        if wait == "sleep":
            return self._make_sleep(number, choice, has_passed=failed)
        if wait == "question":
            return self._make_question(number, choice)
        if wait == "signal":
            return self._make_receive(number, choice)
        idle_timeout = IDLE_TIMEOUTS[choice % len(IDLE_TIMEOUTS)]
        is_unlimited = idle_timeout is not None and choice % 2 == 0
        id_, part = TaskId(self.new_id("call")), Part(text=f"call {number}")
        message = A2AMessage(message_id=id_, role="ROLE_AGENT", parts=[part], task_id=id_)
        return PlannedCall(
            sub_task_id=id_,
            call_id="edcba"[number],
            peer=PEERS[choice % len(PEERS)],
            body=RequestBody(message=message).to_bytes(),
            timeout=None if is_unlimited else TIMEOUTS[choice % len(TIMEOUTS)],
            idle_timeout=idle_timeout,
            headers={"x-call-depth": 1},
            outcome=Failed(FailureKind.INVALID, "too large") if failed else None,
            retry=RETRY if choice % 3 else None,
        )

    def _make_sleep(self, number: int, choice: int, *, has_passed: bool) -> PlannedCall:
        duration = timedelta() if has_passed else TIMEOUTS[choice % len(TIMEOUTS)]
        return PlannedCall(
            sub_task_id=TaskId(self.new_id("sleep")),
            call_id="edcba"[number],
            peer=AgentName(SLEEP_PEER),
            body=b"{}",
            timeout=None,
            headers=Sleep("nap", duration).to_headers(),
            outcome=Ok(None) if has_passed else None,
        )

    def _make_question(self, number: int, choice: int) -> PlannedCall:
        """A question. Later pauses of the task ask it again, some with another prompt."""
        return PlannedCall(
            sub_task_id=TaskId(f"{QUESTION}.{number}"),
            call_id="edcba"[number],
            peer=QUESTION,
            body=f'{{"prompt": "{number}.{choice % 5 // 4}"}}'.encode(),
            timeout=WAIT_TIMEOUTS[choice % len(WAIT_TIMEOUTS)],
        )

    def _make_receive(self, number: int, choice: int) -> PlannedCall:
        return PlannedCall(
            sub_task_id=TaskId(self.new_id("receive")),
            call_id="edcba"[number],
            peer=AgentName(f"{SIGNAL_PREFIX}{SIGNALS[choice % len(SIGNALS)]}"),
            body=b"{}",
            timeout=WAIT_TIMEOUTS[choice % len(WAIT_TIMEOUTS)],
        )

    def make_signal(self, task_id: TaskId, name: str, number: int) -> SendSignal:
        """A signal of the requester; some are of an operator or a stranger."""
        id_ = self.new_id("signal")
        value = f'"{id_}"'.encode()
        sender = "mallory" if number % 9 > 6 else REQUESTER
        return SendSignal(task_id, AGENT, id_, name, value, sender, is_trusted=number % 9 == 7)

    def make_answer(self, task_id: TaskId, question: TaskId) -> RecordAnswer:
        """An answer to a question."""
        id_ = RunId(self.new_id("answer"))
        return RecordAnswer(id_, QuestionKey(AGENT, task_id, question), Ok(id_))

    def make_value(self, run: Run, number: int) -> SetValue:
        """A value. Three keys are used in turn."""
        return SetValue(run, f"key {number % 3}", f'"{self.new_id("value")}"'.encode())

    def make_claim(
        self, task_id: TaskId, sub_task_id: TaskId, sender: str | None, number: int
    ) -> Claim:
        """A response; one in four is a failure, some with advice for retries."""
        claim_id = RunId(self.new_id("claim"))
        outcome: Outcome = Failed(FailureKind.ERROR, claim_id) if number % 4 == 3 else Ok(claim_id)
        return Claim(
            claim_id,
            task_id,
            sub_task_id,
            outcome,
            sender,
            retryable=number % 16 != 15,
            retry_after=9.0 if number % 16 == 11 else None,
        )

    def make_end(self, run: Run, number: int) -> End:
        """An end as completed, failed, dead or cancelled."""
        state = (TaskState.COMPLETED, TaskState.FAILED, TaskState.FAILED, TaskState.CANCELLED)[
            number % 4
        ]
        return End(
            run,
            state,
            self.new_id("reply").encode(),
            "too many attempts" if number % 4 == 2 else None,
        )

    def make_cancel(self, task_id: TaskId) -> Cancel:
        """A cancel with a new id."""
        return Cancel(task_id, AGENT, RunId(self.new_id("cancel")), b"cancelled")
