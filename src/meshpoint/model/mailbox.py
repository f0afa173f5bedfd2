"""What a store keeps for a task besides its checkpoints: its mailbox and its values.

The mailbox has signals that `ctx.receive` has not received yet, and answers to questions that the
task has asked and does not wait for now. `ctx.set_value` sets the values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TypeAlias

from pydantic_core import from_json

from meshpoint.model.ids import AgentName, RunId, TaskId
from meshpoint.model.json_values import json_digest
from meshpoint.model.outcomes import Failed, Ok, Outcome
from meshpoint.model.questions import QuestionKey
from meshpoint.model.tasks import CancelNotice, PlannedCall, Run, TaskState, same_requester
from meshpoint.model.transitions import Pause, TaskLocked
from meshpoint.model.waits import SIGNAL_PREFIX, is_question, is_signal

MAX_SIGNAL_BYTES = 256 * 1024
"""Maximum size of a signal's value, as JSON."""
MAX_SIGNALS, MAX_SIGNALS_OF_SENDER = 1000, 500
"""Maximum unreceived signals of a task: in total, and from one sender."""
MAX_KEPT_BYTES, MAX_KEPT_BYTES_OF_SENDER = 8 * 1024 * 1024, 4 * 1024 * 1024
"""Maximum bytes of their values: in total, and from one sender."""
MAX_SIGNAL_IDS = 1000
"""How many signal ids a task remembers, so that a repeated signal is not kept again."""
MAX_VALUES, MAX_VALUE_BYTES = 100, 64 * 1024
"""Maximum values of a task, and maximum size of one, as JSON."""


@dataclass(frozen=True, slots=True)
class SendSignal:
    """Keep a signal for a task until it receives it.

    Attributes:
        id: chosen by the sender. A signal with a known id is not kept again.
        value: JSON.
        sender: a name. Its signals have limits of their own.
        is_trusted: whether the sender may signal tasks of other requesters.
    """

    task_id: TaskId
    agent: AgentName
    id: str
    name: str
    value: bytes
    sender: str
    is_trusted: bool = False

    @property
    def peer(self) -> str:
        """The reserved name of a wait for this signal."""
        return f"{SIGNAL_PREFIX}{self.name}"

    @property
    def digest(self) -> str:
        """Identifies the name and the value."""
        return json_digest([self.name, from_json(self.value)])

    def may_signal(self, requester: str | None) -> bool:
        """Whether the sender may signal a task of `requester`."""
        return self.is_trusted or same_requester(requester, self.sender)

    def find_excess(self, kept: Mapping[str, tuple[int, int]]) -> str | None:
        """Why the task cannot keep this signal too, or `None` if it can.

        `kept` has the number and the total bytes of the kept signals, by sender.
        """
        number = sum(each for each, _ in kept.values())
        total = sum(each for _, each in kept.values()) + len(self.value)
        own, own_bytes = kept.get(self.sender, (0, 0))
        if number >= MAX_SIGNALS or own >= MAX_SIGNALS_OF_SENDER:
            return f"task {self.task_id} has {number} unreceived signals"
        if total > MAX_KEPT_BYTES or own_bytes + len(self.value) > MAX_KEPT_BYTES_OF_SENDER:
            return f"task {self.task_id} has {total} bytes of unreceived signals"
        return None

    def repeated_result(self, digest: str, *, is_received: bool, state: TaskState) -> MailResult:
        """The result if the task already has a signal with this id and `digest`."""
        if digest != self.digest:
            return MailRefused(f"signal id {self.id!r} was used for another value")
        if state.is_final and not is_received:
            return MailRefused(f"task {self.task_id} ended before it received this signal")
        return MailAccepted()


@dataclass(frozen=True, slots=True)
class RecordAnswer:
    """Record the answer to a question that a task waits for, or keep it for its next wait."""

    id: RunId
    key: QuestionKey
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class MailAccepted:
    """The signal or the answer is kept or was delivered, now or by an earlier message.

    Attributes:
        is_ready: it completed the join, and any replica may acquire the task.
        cancels: for the calls that the join has closed.
    """

    is_ready: bool = False
    cancels: tuple[CancelNotice, ...] = ()


@dataclass(frozen=True, slots=True)
class MailRefused:
    """Nothing changed, and repeating it is pointless. `reason` is for the sender."""

    reason: str


@dataclass(frozen=True, slots=True)
class MailForbidden:
    """The task belongs to `requester`. Nothing changed."""

    requester: str | None


@dataclass(frozen=True, slots=True)
class MailUnknown:
    """The task or the question is unknown here. Nothing changed."""


MailResult: TypeAlias = MailAccepted | MailRefused | MailForbidden | MailUnknown | TaskLocked


@dataclass(frozen=True, slots=True)
class SetValue:
    """Set a value of the task that is running under exactly this fence. `value` is JSON."""

    run: Run
    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class TooManyValues:
    """The task has `MAX_VALUES` values under other keys. Nothing changed."""


@dataclass(frozen=True, slots=True)
class StoredValue:
    """The value of a task under one key, as JSON; `None` if it is not set."""

    requester: str | None
    value: bytes | None


@dataclass(frozen=True, slots=True)
class KeptSignal:
    """An unreceived signal."""

    id: str
    name: str
    sender: str
    size: int
    sent_at: datetime


@dataclass(frozen=True, slots=True)
class Mailbox:
    """What the store keeps for a task, as shown to people.

    Attributes:
        signals: its unreceived signals, oldest first.
        questions: ids of the open questions that it has asked.
        answered: ids of the questions with an answer that the task has not read.
        values: JSON, by key.
    """

    signals: tuple[KeptSignal, ...] = ()
    questions: tuple[TaskId, ...] = ()
    answered: tuple[TaskId, ...] = ()
    values: tuple[tuple[str, bytes], ...] = ()


def uses_mailbox(pause: Pause) -> bool:
    """Whether something in the mailbox may be the outcome of a call."""
    return any(
        call.outcome is None and (is_signal(call.peer) or is_question(call.peer))
        for call in pause.calls
    )


def match_mail(
    pause: Pause, signals: Sequence[tuple[int, str]], answers: Mapping[TaskId, Outcome]
) -> dict[TaskId, int | None]:
    """Match the mailbox with the calls of a pause, in call order, until its join is met.

    Each call takes the oldest signal with its name. `signals` are the numbers and names of the
    signals, oldest first. `answers` are the outcomes of questions by id.

    Returns:
        The numbers of the signals by call; `None` for an answer.
    """
    left, matched = list(signals), dict[TaskId, int | None]()
    completed = sum(call.outcome is not None for call in pause.calls)
    succeeded = sum(isinstance(call.outcome, Ok) for call in pause.calls)
    for call in pause.calls:
        if call.outcome is not None:
            continue
        if pause.join.met(total=len(pause.calls), completed=completed, succeeded=succeeded):
            break
        answer = answers.get(call.sub_task_id)
        if answer is not None:
            matched[call.sub_task_id] = None
        elif (first := next((each for each in left if _fits(call, each[1])), None)) is not None:
            left.remove(first)
            matched[call.sub_task_id] = first[0]
        else:
            continue
        completed += 1
        succeeded += not isinstance(answer, Failed)
    return matched


def _fits(call: PlannedCall, name: str) -> bool:
    return call.peer == f"{SIGNAL_PREFIX}{name}"


def with_outcomes(pause: Pause, outcomes: Mapping[TaskId, Outcome]) -> Pause:
    """The pause with these outcomes, by `sub_task_id`."""
    calls = [
        replace(call, outcome=outcomes[call.sub_task_id]) if call.sub_task_id in outcomes else call
        for call in pause.calls
    ]
    return replace(pause, calls=tuple(calls))


def asks_same(asked: bytes, again: bytes) -> bool:
    """Whether two requests of a question have the same prompt and the same schema.

    An answer that was kept for another prompt must not answer this one.
    """
    if asked == again:
        return True
    try:
        one, other = from_json(asked), from_json(again)
    except ValueError:
        return False
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return False
    return all(one.get(key) == other.get(key) for key in ("prompt", "schema"))
