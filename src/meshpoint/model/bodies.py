"""JSON message bodies as pydantic models with A2A 1.0 field names.

Unknown fields are ignored, so that newer peers can add fields.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, JsonValue, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import from_json, to_json

from meshpoint.errors import PoisonMessage
from meshpoint.model.declared_type import first_problem, has_too_many_errors
from meshpoint.model.ids import new_id
from meshpoint.model.messages import readable_traceparent
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome
from meshpoint.model.usage import TokenUsage

_MAX_PARTS = 1000
MAX_RETRY_AFTER = 365.25 * 86_400
"""In seconds. Larger values are ignored, as durations beyond a year are elsewhere."""
_MAX_USAGE_BYTES = 128 * 1024
"""In bytes. Bounded because pydantic creates an error object for every invalid entry."""


class Body(BaseModel):
    """Base class of all bodies: camelCase on the wire, snake_case in Python."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="ignore",
        # Caching unique values such as ids would hold 16,384 of them forever.
        cache_strings="keys",
    )

    def to_bytes(self) -> bytes:
        """The body in its wire encoding."""
        return self.model_dump_json(by_alias=True, exclude_none=True).encode()

    def untyped_values(self) -> list[JsonValue]:
        """The values without a declared type that receivers read."""
        return []


class A2ATaskState(StrEnum):
    """A2A 1.0 task states in ProtoJSON form.

    A paused task stays WORKING, because A2A has no state for waiting on peers.
    """

    SUBMITTED = "TASK_STATE_SUBMITTED"
    WORKING = "TASK_STATE_WORKING"
    COMPLETED = "TASK_STATE_COMPLETED"
    FAILED = "TASK_STATE_FAILED"
    CANCELED = "TASK_STATE_CANCELED"


class Part(Body):
    """One part of a message: structured `data` or `text`."""

    data: JsonValue = None
    text: str | None = None


class A2AMessage(Body):
    """A message from a user or an agent."""

    message_id: Annotated[str, Field(default_factory=new_id)]
    role: Literal["ROLE_USER", "ROLE_AGENT"]
    parts: Annotated[list[Part], Field(min_length=1, max_length=_MAX_PARTS), FailFast()]
    context_id: str | None = None
    task_id: str | None = None
    metadata: dict[str, JsonValue] = Field(default_factory=dict)


RESERVED_METADATA = ("userId", "sessionId", "userConfig", "securityContext")
"""Entries in the metadata of a request that have a meaning of their own."""


class RequestBody(Body):
    """A request. `message.task_id` names the task; the first part holds the input.

    `metadata` may contain `userId`, `sessionId`, `userConfig` and `securityContext`; other entries
    are passed on unchanged.
    """

    message: A2AMessage
    metadata: dict[str, JsonValue] = Field(default_factory=dict)

    def untyped_values(self) -> list[JsonValue]:
        return [self.message.parts[0].data, self.metadata]

    def input(self) -> JsonValue:
        """The agent's input: `data` of the first part, or its text."""
        part = self.message.parts[0]
        return part.text if part.text is not None else part.data


def without_security_context(request: bytes) -> bytes:
    """The body of a request without its security context. Other bytes are returned unchanged."""
    if b"securityContext" not in request:
        return request
    try:
        body = parse_body(RequestBody, request)
    except PoisonMessage:
        return request
    kept = {name: value for name, value in body.metadata.items() if name != "securityContext"}
    return body.model_copy(update={"metadata": kept}).to_bytes()


def renamed_request(request: bytes, task_id: str) -> bytes:
    """The body of a request as the request of another task.

    Raises:
        PoisonMessage: It is not the body of a request.
    """
    body = parse_body(RequestBody, request)
    message = body.message.model_copy(update={"message_id": task_id, "task_id": task_id})
    return body.model_copy(update={"message": message}).to_bytes()


class TaskStatus(Body):
    """The current state of a task."""

    state: A2ATaskState
    message: A2AMessage | None = None
    timestamp: str | None = None


class TaskBody(Body):
    """A task as seen by its requester."""

    id: str
    context_id: str | None = None
    status: TaskStatus
    artifacts: Annotated[list[dict[str, JsonValue]], FailFast()] = Field(default_factory=list)
    metadata: dict[str, JsonValue] = Field(default_factory=dict)


class ResponseBody(Body):
    """The single response to a request. The output is the first part of `task.status.message`.

    A failure has its kind in `task.metadata.failure` and its message in the text of that part.
    Token usage is in `task.metadata.usage`, for attempt `task.metadata.retry` of a resumed
    requester. A response that refuses a request names it in `task.metadata.refuses`. A failure may
    have `task.metadata.retryable` and `task.metadata.retryAfter`, in seconds.
    """

    task: TaskBody

    def untyped_values(self) -> list[JsonValue]:
        message = self.task.status.message
        return [message.parts[0].data if message else None, [*self.task.artifacts]]

    @property
    def refused_fingerprint(self) -> str | None:
        """The fingerprint of the refused request, if any."""
        value = self.task.metadata.get("refuses")
        return None if value is None else str(value)

    @property
    def is_id_in_use(self) -> bool:
        """Whether the request was refused because a task with its id exists."""
        return self.task.metadata.get("idInUse") is True

    @property
    def may_attach(self) -> bool:
        """Whether the task with this id belongs to this agent and to the request's sender."""
        return self.task.metadata.get("mayAttach") is True

    @property
    def is_retryable(self) -> bool:
        """Whether the sender allows another attempt. Only the JSON value `false` forbids it."""
        return self.task.metadata.get("retryable") is not False

    @property
    def retry_after(self) -> float | None:
        """Minimum seconds before another attempt, as the sender asks.

        `None` if missing, or if the value is not a number of seconds up to a year.
        """
        value = self.task.metadata.get("retryAfter")
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return float(value) if 0 <= value <= MAX_RETRY_AFTER else None

    def for_attempt(self, retry: int) -> Self:
        """The response to repeat to attempt `retry` of a resumed requester.

        Without its tokens if it is of an earlier attempt, which has counted them.
        """
        if self.task.metadata.get("retry") == retry:
            return self
        metadata = {key: value for key, value in self.task.metadata.items() if key != "usage"}
        task = self.task.model_copy(update={"metadata": metadata})
        return self.model_copy(update={"task": task})

    def outcome(self) -> Outcome:
        """The outcome for the requester to record.

        Raises:
            PoisonMessage: the state is not final, or the usage is invalid.
        """
        status, metadata = self.task.status, self.task.metadata
        part = status.message.parts[0] if status.message else Part()
        usage = _parse_usage(value) if (value := metadata.get("usage")) else TokenUsage()
        traceparent = readable_traceparent(metadata.get("traceparent"))
        match status.state:
            case A2ATaskState.COMPLETED:
                value = part.text if part.text is not None else part.data
                return Ok(value, tuple(self.task.artifacts), usage, traceparent=traceparent)
            case A2ATaskState.CANCELED:
                text = part.text or "cancelled"
                return Failed(FailureKind.CANCELLED, text, usage, traceparent=traceparent)
            case A2ATaskState.FAILED:
                kind = metadata.get("failure")
                failure_kind = (
                    FailureKind(kind)
                    if isinstance(kind, str) and kind in set(FailureKind)
                    else FailureKind.ERROR
                )
                text = part.text or "failed"
                return Failed(failure_kind, text, usage, traceparent=traceparent)
            case _:
                raise PoisonMessage(f"task.status.state: {status.state} does not end a task")


class StatusUpdate(Body):
    """A progress report on a task."""

    task_id: str
    context_id: str | None = None
    status: TaskStatus
    metadata: dict[str, JsonValue] = Field(default_factory=dict)


class StatusBody(Body):
    """A status update. Advisory: it may be lost or duplicated."""

    status_update: StatusUpdate

    def untyped_values(self) -> list[JsonValue]:
        message = self.status_update.status.message
        return [message.parts[0].data if message else None]


class CancelBody(Body):
    """A request to end the task `id` as cancelled."""

    id: str
    reason: str | None = None


class AttachBody(Body):
    """A request for the outcome of the task `id`."""

    id: str


class DenyBody(Body):
    """A replica does not have a task, and its `consumers` do not hold the task's request.

    `consumers` counts them by queue.
    """

    replica: str
    consumers: dict[str, int]


class CompleteBody(Body):
    """An answer to the question with the id `question`, or a rejection of `rejects`.

    A rejection has no `question`: a replica of an earlier release must not take it for an answer.
    """

    question: str | None = None
    value: JsonValue = None
    rejects: str | None = None
    reason: str | None = None

    def untyped_values(self) -> list[JsonValue]:
        return [self.value]


class SignalBody(Body):
    """A value for the task `id`, which receives its signals named `signal` in order."""

    id: str
    signal: str
    signal_id: str
    value: JsonValue = None

    def untyped_values(self) -> list[JsonValue]:
        return [self.value]


class ReadBody(Body):
    """Asks for the value of the task `id` under `key`."""

    id: str
    key: str


class CompletedBody(Body):
    """The result of an answer, a signal or a read. `text` says why it was not recorded.

    The result of a read has the `value`, if one `is_set`. A refusal because the task belongs to
    another requester names the `requester`.
    """

    text: str = ""
    value: JsonValue = None
    is_set: bool | None = None
    requester: str | None = None

    def untyped_values(self) -> list[JsonValue]:
        return [self.value]


_BodyT = TypeVar("_BodyT", bound=Body)


def parse_body(type_: type[_BodyT], body: bytes, max_message_bytes: int | None = None) -> _BodyT:
    """Parse `body` as `type_`.

    Raises:
        PoisonMessage: the body is too large or not JSON, or a field is missing or has the wrong
            type; the message names the field.
    """
    if max_message_bytes is not None and len(body) > max_message_bytes:
        raise PoisonMessage(
            f"the body has {len(body)} bytes; max_message_bytes is {max_message_bytes}"
        )
    try:
        if b"NaN" in body or b"Infinity" in body:  # pydantic accepts these literals, JSON does not
            from_json(body, allow_inf_nan=False, cache_strings="keys")
        parsed = type_.model_validate_json(body)
    except ValidationError as error:
        if has_too_many_errors(error):
            raise PoisonMessage(f"body: {first_problem(error)}") from None
        first_error = error.errors(include_url=False, include_input=False)[0]
        location = ".".join(str(part) for part in first_error["loc"]) or "body"
        raise PoisonMessage(f"{location}: {first_error['msg']}") from error
    except ValueError as error:
        raise PoisonMessage(f"body: not JSON: {error}") from error
    for value in parsed.untyped_values():
        if _contains_infinity(value):
            raise PoisonMessage("body: a number is too large for a float")
    return parsed


def _contains_infinity(value: JsonValue) -> bool:
    """Whether `value` contains a number that was too large, such as 1e400, and became infinity."""
    if isinstance(value, float):
        return math.isinf(value)
    if not value or not isinstance(value, list | dict):
        return False
    encoded = to_json(value, inf_nan_mode="constants")
    if b"Infinity" not in encoded:
        return False
    try:
        from_json(encoded, allow_inf_nan=False)  # the match may be inside a string
    except ValueError:
        return True
    return False


def _parse_usage(value: JsonValue) -> TokenUsage:
    if len(to_json(value)) > _MAX_USAGE_BYTES:
        raise PoisonMessage(f"task.metadata.usage: has more than {_MAX_USAGE_BYTES} bytes")
    try:
        usage = TokenUsage.model_validate(value)
    except ValidationError as error:
        raise PoisonMessage(f"task.metadata.usage: {error.errors()[0]['msg']}") from error
    if not usage.is_plausible:
        raise PoisonMessage("task.metadata.usage: a count is negative, or beyond 2**53")
    return usage
