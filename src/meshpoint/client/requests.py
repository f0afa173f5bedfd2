"""Check the options of a request, and build its message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal, TypedDict

from pydantic import JsonValue

from meshpoint.errors import AgentMisbehaved, InvalidOption
from meshpoint.model.bodies import RESERVED_METADATA, A2AMessage, Part, RequestBody
from meshpoint.model.calls import MAX_DURATION
from meshpoint.model.ids import AgentName, TaskId, new_id, split_resumed_id
from meshpoint.model.json_values import JsonDict, json_digest
from meshpoint.model.messages import (
    MAX_CONTEXT_ID_BYTES,
    MAX_NAME_BYTES,
    TRACEPARENT,
    Address,
    Header,
    HeaderValue,
    Message,
    MessageType,
    is_valid_name,
)
from meshpoint.model.retry_policy import Duration, duration_seconds
from meshpoint.model.waits import check_instant


class SendOptions(TypedDict, total=False):
    """Options of `Mesh.send` and `Mesh.call`.

    Attributes:
        task_id: Id of the task: printable, at most 248 bytes. Repeating a request with the same id
            and input is safe. Default: a new id.
        if_exists: What to do if a task with `task_id` and the same input exists. "attach", the
            default: the handle is of that task. "reject": raise `TaskExists`. `Mesh.send` then
            returns only when a replica has begun the task.
        timeout: Maximum duration of the task; a number is seconds. Default: the `timeout` of the
            peer, or none. It counts from the start of a task that begins later.
        delay: Begin the task after this time; a number is seconds.
        start_at: Begin the task at this instant, which must have a time zone.
        user_id: On whose behalf; `ctx.a2a_context.user_id`.
        session_id: The user's session; `ctx.a2a_context.session_id`.
        context_id: The conversation; `ctx.a2a_context.context_id`.
        metadata: More JSON for the agent; `ctx.a2a_context.metadata`.
    """

    task_id: str
    if_exists: Literal["attach", "reject"]
    timeout: Duration
    delay: Duration
    start_at: datetime
    user_id: str
    session_id: str
    context_id: str
    metadata: Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request. `timeout` and `delay` are in seconds.

    `digest` is the digest of the input, or `None` if the id is new. `result_ttl` is how long the
    agent should keep the outcome after the end; `None` means as long as its other outcomes.
    `must_be_new`: refuse it if a task with this id exists.
    """

    agent: AgentName
    input: JsonValue
    task_id: TaskId
    timeout: float | None = None
    delay: float | None = None
    start_at: datetime | None = None
    context_id: str | None = None
    metadata: dict[str, JsonValue] = field(default_factory=dict)
    digest: str | None = None
    result_ttl: timedelta | None = None
    must_be_new: bool = False


def check_request(
    agent: AgentName,
    input_: JsonValue,
    options: Mapping[str, Any],
    default_timeout: timedelta | None = None,
) -> Request:
    """Check `options`, of the type `SendOptions`, as the agent would.

    Raises:
        InvalidOption: The agent would refuse one, or there is no such option. The message names
            it.
        NotJson: `metadata` is not JSON. The message names the key.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if unknown := sorted(given.keys() - SendOptions.__annotations__.keys()):
        known = ", ".join(SendOptions.__annotations__)
        raise InvalidOption(f"{unknown[0]}: there is no such option; the options are {known}")
    timeout = given.get("timeout", default_timeout)
    return Request(
        agent,
        input_,
        TaskId(_check_task_id(given) if "task_id" in given else new_id()),
        None if timeout is None else _check_timeout(timeout),
        _check_delay(given["delay"]) if "delay" in given else None,
        _check_start(given) if "start_at" in given else None,
        _check_name("context_id", given, MAX_CONTEXT_ID_BYTES),
        _build_metadata(given),
        digest=json_digest(input_) if "task_id" in given else None,
        # A new id cannot exist yet.
        must_be_new=_check_if_exists(given) == "reject" and "task_id" in given,
    )


def check_task_id(task_id: str) -> TaskId:
    """Check the id of a task.

    Raises:
        InvalidOption: The id is invalid.
    """
    return TaskId(_check_task_id({"task_id": task_id}))


def _check_task_id(given: Mapping[str, Any]) -> str:
    name = _check_name("task_id", given)
    if not name:
        raise InvalidOption("task_id: must not be empty")
    if split_resumed_id(name)[1] is not None:
        raise InvalidOption(f"task_id: {name!r} ends as only ids of resumed calls may")
    return name


def _check_if_exists(given: Mapping[str, Any]) -> str:
    value = given.get("if_exists", "attach")
    if value not in {"attach", "reject"}:
        raise InvalidOption(f'if_exists: must be "attach" or "reject", not {value!r}')
    return str(value)


def _check_name(
    option: str, given: Mapping[str, Any], max_bytes: int = MAX_NAME_BYTES
) -> str | None:
    name = given.get(option)
    if name is None:
        return None
    if not isinstance(name, str):
        raise InvalidOption(f"{option}: must be a string, not {type(name).__name__}")
    if not is_valid_name(name, max_bytes):
        raise InvalidOption(f"{option}: must be printable and at most {max_bytes} bytes long")
    return name


def _check_timeout(timeout: Duration) -> float:
    try:
        seconds = duration_seconds(timeout, "timeout")
    except AgentMisbehaved as error:
        raise InvalidOption(str(error)) from None
    if not 0 < seconds <= MAX_DURATION.total_seconds():
        raise InvalidOption(f"timeout is {timeout}; it must be positive and at most ten years")
    return seconds


def _check_delay(delay: Duration) -> float:
    try:
        seconds = duration_seconds(delay, "delay")
    except AgentMisbehaved as error:
        raise InvalidOption(str(error)) from None
    if seconds > MAX_DURATION.total_seconds():
        raise InvalidOption(f"delay is {delay}; it must be at most ten years")
    return seconds


def _check_start(given: Mapping[str, Any]) -> datetime:
    start_at = given["start_at"]
    if "delay" in given:
        raise InvalidOption("start_at: give either start_at or delay")
    if not isinstance(start_at, datetime):
        raise InvalidOption(f"start_at: must be a datetime, not {type(start_at).__name__}")
    if start_at.utcoffset() is None:
        raise InvalidOption("start_at has no time zone: datetime.now(UTC), or delay=")
    try:
        return check_instant(start_at, "start_at")
    except AgentMisbehaved as error:
        raise InvalidOption(str(error)) from None


def _build_metadata(given: Mapping[str, Any]) -> dict[str, JsonValue]:
    metadata = given.get("metadata", {})
    if not isinstance(metadata, Mapping):
        raise InvalidOption(f"metadata: must be a mapping, not {type(metadata).__name__}")
    for key in RESERVED_METADATA:
        if key in metadata:
            raise InvalidOption(
                f"metadata: the key {key!r} is reserved; use user_id or session_id"
            )
    checked = JsonDict(metadata, name="metadata").to_plain()
    for option, key in (("user_id", "userId"), ("session_id", "sessionId")):
        if name := _check_name(option, given):
            checked[key] = name
    return checked


def build_message(
    request: Request,
    sender: AgentName,
    reply_to: Address,
    now: datetime,
    start_token: str | None = None,
    traceparent: str | None = None,
) -> Message:
    """Build the message of `request`, with its deadline counted from `now`.

    With `start_token`, it is refused if a task with its id exists, unless a request with the same
    token began that task. `traceparent` is the caller's current span.
    """
    content = A2AMessage(
        message_id=new_id(),
        role="ROLE_USER",
        parts=[
            Part(text=request.input)
            if isinstance(request.input, str)
            else Part(data=request.input)
        ],
        task_id=request.task_id,
        context_id=request.context_id,
    )
    headers: dict[str, HeaderValue] = {Header.CALL_DEPTH.value: 0}
    start_at = request.start_at or (now + timedelta(seconds=request.delay or 0.0))
    if start_at > now:  # agents refuse instants before 1970
        headers[Header.START_AT.value] = start_at.timestamp()
    if request.timeout is not None:
        headers[Header.DEADLINE.value] = max(start_at, now).timestamp() + request.timeout
    if start_token is not None:
        headers[Header.START.value] = start_token
    if traceparent is not None:
        headers[TRACEPARENT] = traceparent
    if request.result_ttl is not None:
        headers[Header.KEEP_RESULT.value] = request.result_ttl.total_seconds()
    return Message(
        type=MessageType.REQUEST,
        body=RequestBody(message=content, metadata=request.metadata).to_bytes(),
        message_id=request.task_id,
        correlation_id=request.task_id,
        app_id=sender,
        reply_to=reply_to,
        headers=headers,
        timestamp=now,
    )
