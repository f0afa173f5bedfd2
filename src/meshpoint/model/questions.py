"""Questions: waits of a task that a person or a webhook answers."""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypeVar

from pydantic import JsonValue, TypeAdapter

from meshpoint.errors import (
    AgentMisbehaved,
    AnswerRefused,
    NotJson,
    QuestionNotOpen,
)
from meshpoint.model.calls import Call
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.json_schema import find_mismatch
from meshpoint.model.json_values import check_json
from meshpoint.model.messages import is_agent_name, is_valid_name
from meshpoint.model.named_wait import NamedWait
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome
from meshpoint.model.tasks import CallState, CallSummary, TaskSummary
from meshpoint.model.waitable import Waitable, mark_used
from meshpoint.model.waits import QUESTION_PREFIX, is_question

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
MAX_PROMPT_LENGTH = 10_000
"""Maximum characters of a prompt. Each is stored with its call and sent with its update."""
_MAX_QUOTED_LENGTH = 100  # maximum characters quoted from an id
_ANSWERED_BY, _ANSWERED_AT, _MESSAGE_ID = "answeredBy", "answeredAt", "messageId"


class Question(NamedWait[T]):
    """A typed question, shared by the agent that asks and the code that answers.

        approval = Question("approval", Decision)
        decision = await ctx.wait_for(approval, prompt="Buy it?")

    Raises:
        ConfigurationError: the name or the type cannot be used.
    """

    _kind, _value_name, _prefix = "question", "answer", QUESTION_PREFIX
    _late = "nobody answered {name!r} in time"

    def __init__(self, name: str, answer: type[T] | TypeAdapter[T]) -> None:
        super().__init__(name, answer)

    @property
    def answer_schema(self) -> dict[str, Any]:
        """The JSON schema of its answer."""
        return self._type.json_schema("validation")


@dataclass(frozen=True, slots=True)
class QuestionCall(Call):
    """A question as a `Call` of a pause. `details` are stored with it."""

    sub_task_id: str = ""
    details: dict[str, JsonValue] = field(default_factory=dict)

    def to_update(self, agent: AgentName, task_id: TaskId) -> JsonValue:
        """The content of the update that shows it to the callers of its task."""
        return _update(
            self.peer, QuestionKey(agent, task_id, TaskId(self.sub_task_id)), self.details
        )


class QuestionKey(NamedTuple):
    """Where a question is asked. `sub_task_id` is unique within the task."""

    agent: AgentName
    task_id: TaskId
    sub_task_id: TaskId

    @property
    def name(self) -> str:
        """The name of the question."""
        return self.sub_task_id.removeprefix(QUESTION_PREFIX).partition(".")[0]

    def to_id(self) -> str:
        """The id of the question, which is safe in URLs."""
        encoded = json.dumps(self, separators=(",", ":")).encode()
        return urlsafe_b64encode(encoded).decode().rstrip("=")

    @classmethod
    def from_id(cls, question_id: str) -> QuestionKey:
        """Decode what `to_id` returned.

        Raises:
            QuestionNotOpen: It is not the id of a question.
        """
        try:
            padded = question_id + "=" * (-len(question_id) % 4)
            agent, task_id, sub_task_id = json.loads(urlsafe_b64decode(padded.encode()))
            # A replica looks the names up, and a client sends to the agent.
            if is_agent_name(agent) and is_valid_name(task_id) and is_valid_name(sub_task_id):
                return cls(AgentName(agent), TaskId(task_id), TaskId(sub_task_id))
        except (ValueError, TypeError, AttributeError, RecursionError):
            pass
        quoted = repr(question_id)[:_MAX_QUOTED_LENGTH]
        raise QuestionNotOpen(f"{quoted} is not the id of a question")


def open_question_keys(task: TaskSummary, calls: Iterable[CallSummary]) -> list[QuestionKey]:
    """The keys of the questions that a task waits for."""
    return [
        QuestionKey(task.agent, task.task_id, TaskId(call.sub_task_id))
        for call in calls
        if call.generation == task.generation
        and call.state is CallState.PENDING
        and is_question(call.peer)
    ]


def check_prompt(prompt: str | None) -> str | None:
    """Return `prompt` if it can be stored.

    Raises:
        AgentMisbehaved: It is not a text, or too long.
    """
    if prompt is None:
        return None
    if not isinstance(prompt, str):
        raise AgentMisbehaved(f"prompt must be a string, not {type(prompt).__name__}")
    if len(prompt) > MAX_PROMPT_LENGTH:
        problem = f"prompt has {len(prompt):,} characters; at most {MAX_PROMPT_LENGTH:,}"
        raise AgentMisbehaved(f"{problem} are shown to people: send more as an artifact")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        problem = f"prompt cannot be encoded as UTF-8 ({error.reason})"
        raise AgentMisbehaved(problem) from error
    return prompt


def check_logins(allow: Sequence[str]) -> list[str]:
    """Return `allow` as a list of logins.

    Raises:
        AgentMisbehaved: It is a single string, whose letters would be the logins, or a login is
            not a name.
    """
    if isinstance(allow, str) or not isinstance(allow, Iterable):
        raise AgentMisbehaved(f"allow must be a list of logins, such as ['ada'], not {allow!r}")
    logins = list(allow)
    for login in logins:
        if not (isinstance(login, str) and login and is_valid_name(login)):
            raise AgentMisbehaved(f"allow has {login!r}, which is not the name of a login")
    return logins


class QuestionWait(Waitable[T_co]):
    """A question that has not been asked yet. Await it, or pass it on like a peer call.

    It may be awaited again after a `TimeoutError`: the question keeps its id.
    """

    input: JsonValue = None

    def __init__(
        self,
        question: Question[T_co],
        key: QuestionKey,
        prompt: str | None,
        timeout: timedelta | None,
        allow: list[str],
    ) -> None:
        self._question, self._key, self._timeout = question, key, timeout
        self._details: dict[str, JsonValue] = {
            "prompt": prompt,
            "schema": question.answer_schema,
            "allow": [*allow],
        }

    @property
    def peer(self) -> str:
        """The reserved name of the question."""
        return self._question.peer

    @property
    def id(self) -> str:
        """The question's id, the same in every run and until it is answered."""
        mark_used(self)
        return self._key.to_id()

    def as_call(self, call_id: str) -> Call:
        """The question as a `Call` of a pause."""
        mark_used(self)
        return QuestionCall(
            call_id,
            self.peer,
            None,
            self._timeout,
            sub_task_id=self._key.sub_task_id,
            details=self._details,
        )

    def read(self, outcome: Outcome, /) -> Ok[T_co] | Failed:
        """Convert the answer to the declared type, or `Failed(INVALID)` if it does not fit."""
        return self._question.read_outcome(outcome)

    def _error(self, failed: Failed) -> Exception:
        return self._question.error_of(failed)

    def _describe_unused(self) -> str:
        return f"question {self._question.name!r} was never awaited: nobody was asked"

    def _describe_misuse(self, *, in_agent: bool) -> str:
        if in_agent:
            fix = 'return self.ask(state, {"answer": ctx.wait_for(...)}, then=…)'
            return f"only function agents (@agent) await a question; in a StatefulAgent, {fix}"
        return (
            "ctx.wait_for pauses a task; a script answers with mesh.complete(question_id, value)"
        )


@dataclass(frozen=True, slots=True)
class AskedQuestion:
    """A question as its task asked it.

    `outcome` is `None` while it is open, even while its task runs or waits for something else.
    """

    key: QuestionKey
    peer: str
    details: bytes
    requester: str | None
    outcome: Outcome | None = None

    @property
    def name(self) -> str:
        """The name of the question."""
        return self.peer.removeprefix(QUESTION_PREFIX)

    @property
    def prompt(self) -> str | None:
        """The prompt of the question, or `None`."""
        prompt = self._parsed().get("prompt")
        return prompt if isinstance(prompt, str) else None

    def to_update(self) -> JsonValue:
        """The content of the update that shows it to the callers of its task."""
        return _update(self.peer, self.key, self._parsed())

    def may_answer(self, names: Sequence[str | None]) -> bool:
        """Whether a sender with these names, such as its login, may answer it."""
        allowed = self._parsed().get("allow") or [self.requester]
        return any(name is not None and name in allowed for name in names)

    def is_answered_by(self, message_id: str) -> bool:
        """Whether the answer in the message with this id was recorded."""
        return (
            bool(message_id)
            and self.outcome is not None
            and any(each.get(_MESSAGE_ID) == message_id for each in self.outcome.artifacts)
        )

    def check(
        self, value: JsonValue, by: str, now: datetime, message_id: str = ""
    ) -> Ok[JsonValue]:
        """The outcome of the question if `by` answers it with `value`.

        Raises:
            AnswerRefused: It was answered already, or the value does not fit.
        """
        self._check_open()
        try:
            check_json(value, self.name)
        except NotJson as error:  # nested too deep to store with the task's pauses
            raise AnswerRefused(str(error)) from None
        problem = find_mismatch(self._parsed().get("schema") or {}, value, self.name)
        if problem is not None:
            raise AnswerRefused(problem)
        return Ok(value, (_record(by, now, message_id),))

    def reject(self, reason: str, by: str, now: datetime, message_id: str = "") -> Failed:
        """The outcome of the question if `by` rejects it.

        Raises:
            AnswerRefused: It was answered already.
        """
        self._check_open()
        message = f"rejected by {by!r}: {reason}" if reason else f"rejected by {by!r}"
        return Failed(FailureKind.ERROR, message, artifacts=(_record(by, now, message_id),))

    def _check_open(self) -> None:
        if self.outcome is not None:
            raise AnswerRefused(self.describe())

    def _parsed(self) -> dict[str, Any]:
        parsed = json.loads(self.details)
        return parsed if isinstance(parsed, dict) else {}

    def describe(self) -> str:
        """Who answered it and when, or why it is no longer open."""
        return describe_answer(self.name, self.outcome)


def _update(peer: str, key: QuestionKey, details: Mapping[str, JsonValue]) -> JsonValue:
    return {
        "name": peer.removeprefix(QUESTION_PREFIX),
        "questionId": key.to_id(),
        "prompt": details.get("prompt"),
        "answerSchema": details.get("schema"),
    }


def was_answered(outcome: Outcome | None) -> bool:
    """Whether this is the outcome of a question that someone has answered or rejected."""
    if isinstance(outcome, Failed):
        return any(_ANSWERED_BY in each for each in outcome.artifacts)
    return outcome is not None


def describe_answer(name: str, outcome: Outcome | None) -> str:
    """Say who answered the question with this name and when, or why it is no longer open."""
    if outcome is None:
        return f"{name!r} is open"
    verb = "rejected" if isinstance(outcome, Failed) else "answered"
    for each in outcome.artifacts:
        if _ANSWERED_AT in each:
            at = datetime.fromisoformat(str(each[_ANSWERED_AT]))
            return f"{name!r} was {verb} at {at:%H:%M} by {each.get(_ANSWERED_BY)!r}"
    if isinstance(outcome, Failed):
        return f"{name!r} is no longer open: {outcome.message}"
    return f"{name!r} was answered"


def _record(by: str, now: datetime, message_id: str) -> dict[str, JsonValue]:
    """Who answered and when, stored with the outcome."""
    return {_ANSWERED_BY: by, _ANSWERED_AT: now.isoformat(), _MESSAGE_ID: message_id}
