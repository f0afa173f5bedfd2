"""Parse and validate incoming messages. Unreadable messages are refused here with a reason."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from pydantic import JsonValue, ValidationError

from meshpoint.engine.senders import impersonation_error
from meshpoint.errors import NotJson, PoisonMessage
from meshpoint.model.bodies import (
    RESERVED_METADATA,
    A2ATaskState,
    AttachBody,
    CancelBody,
    RequestBody,
    ResponseBody,
    StatusBody,
    parse_body,
)
from meshpoint.model.context import A2AContext, StatusReporter, TaskExecutionContext
from meshpoint.model.declared_type import first_problem, loggable_cause
from meshpoint.model.ids import RunId, TaskId, new_id, resumed_id, split_resumed_id
from meshpoint.model.json_values import JsonDict, json_digest
from meshpoint.model.messages import (
    MAX_CONTEXT_ID_BYTES,
    MAX_NAME_BYTES,
    TRACEPARENT,
    Address,
    Header,
    Message,
    MessageType,
    is_valid_name,
    readable_traceparent,
    truncate_reason,
)
from meshpoint.model.options import Options
from meshpoint.model.outcomes import Failed, FailureKind
from meshpoint.model.status_metadata import StatusMetadata
from meshpoint.model.tasks import NO_DEADLINE, Requester
from meshpoint.model.transitions import Claim, Progress
from meshpoint.model.waits import is_wait

_Entry = TypeVar("_Entry", str, dict[str, JsonValue])

_MAX_PARENT_BYTES = 280  # bytes: a task id and the attempt in which it was resumed
_MAX_QUOTED_LENGTH = 100  # maximum characters quoted from a message


@dataclass(frozen=True, slots=True)
class Request:
    """A parsed request: the agent's input and the initial values of its context.

    Requests with the same id must have the same input, compared by its `digest`.
    """

    task_id: TaskId
    input: JsonValue
    digest: str
    requester: Requester
    a2a_context: A2AContext
    security_context: dict[str, JsonValue]
    trace_context: dict[str, JsonValue]
    message: Message
    resume_token: str | None = None  # token of a requester that was resumed and asks again
    start_at: datetime | None = None  # not before this time
    start_token: str | None = None  # the task must not exist, unless this request began it

    @property
    def order(self) -> str | None:
        """What the task's row keeps of the request to recognize it; see `Begin.order`."""
        return self.resume_token or self.start_order

    @property
    def start_order(self) -> str | None:
        """The order of a task that `start_token` began; lower than any that resumes it."""
        return None if self.start_token is None else f"!{self.start_token}"

    def is_delayed(self, now: datetime) -> bool:
        """Whether the task begins later than `now`."""
        return self.start_at is not None and self.start_at > now

    def with_requester(self, requester: Requester) -> Request:
        """Copy the request with the task's current requester, which may change on resume."""
        if requester == self.requester:
            return self
        a2a_context = self.a2a_context.model_copy(
            update={
                "reply_to": requester.reply_to,
                "requester": requester.app_id,
                "parent_task_id": requester.parent_task_id,
                "deadline": requester.deadline,
                "idle_timeout": requester.idle_timeout,
            }
        )
        return replace(self, requester=requester, a2a_context=a2a_context)

    def create_context(self, report: StatusReporter) -> TaskExecutionContext:
        """The context of the first segment."""
        context = TaskExecutionContext(
            task_id=self.task_id,
            a2a_context=self.a2a_context,
            security_context=self.security_context,
            trace_context=self.trace_context,
            report=report,
        )
        context._runtime.login = self.message.user_id
        return context


def parse_requester(message: Message) -> Requester:
    """The requester, read from the envelope alone.

    Raises:
        PoisonMessage: a header has a wrong type or is out of bounds.
    """
    _number_header(message, Header.ATTEMPT)
    deadline = _number_header(message, Header.DEADLINE)
    idle_timeout = _number_header(message, Header.IDLE_TIMEOUT)
    result_ttl = _number_header(message, Header.KEEP_RESULT)
    parent = message.headers.get(Header.PARENT_TASK)
    return Requester(
        reply_to=Address(_check_name("reply_to", message.reply_to)) if message.reply_to else None,
        app_id=_check_name("app_id", message.app_id) if message.app_id else None,
        parent_task_id=_check_name(Header.PARENT_TASK, parent, _MAX_PARENT_BYTES)
        if parent is not None
        else None,
        deadline=datetime.fromtimestamp(deadline, UTC)
        if deadline is not None and deadline < _LATEST_DEADLINE
        else None,
        idle_timeout=timedelta(seconds=idle_timeout) if idle_timeout is not None else None,
        result_ttl=timedelta(seconds=result_ttl) if result_ttl is not None else None,
    )


def parse_request(message: Message, options: Options) -> Request:
    """The request in `message`.

    Raises:
        PoisonMessage: the message is too large or not JSON, or a field or header is missing or has
            a wrong type.
    """
    if message.type is not MessageType.REQUEST:
        raise PoisonMessage(f"a {message.type} message does not belong on a request queue")
    body = parse_body(RequestBody, message.body, options.max_message_bytes)
    if not (message.correlation_id or body.message.task_id):
        raise PoisonMessage("correlation_id: a request must name its task")
    task_id = _check_name("correlation_id", message.correlation_id or body.message.task_id)
    if split_resumed_id(task_id)[1] is not None:
        raise PoisonMessage(f"correlation_id: {task_id!r} ends as only ids of resumed calls may")
    if body.message.task_id not in {None, task_id}:
        raise PoisonMessage(
            f"message.taskId: {body.message.task_id!r} is not the correlation id {task_id!r}"
        )
    requester = parse_requester(message)
    try:
        a2a_context = _build_a2a_context(message, body, requester)
        security_context = JsonDict(
            _metadata_entry(body, "securityContext", dict, "an object") or {},
            name="metadata.securityContext",
        )
    except ValidationError as error:
        raise PoisonMessage(f"metadata: {first_problem(error)}") from loggable_cause(error)
    except NotJson as error:  # nested too deep to store
        raise PoisonMessage(f"metadata: {error}") from error
    traceparent = readable_traceparent(message.headers.get(TRACEPARENT))
    start_at = _number_header(message, Header.START_AT)
    return Request(
        task_id=TaskId(task_id),
        input=(task_input := body.input()),
        digest=json_digest(task_input),
        requester=requester,
        a2a_context=a2a_context,
        security_context=security_context,
        trace_context={} if traceparent is None else {TRACEPARENT: traceparent},
        message=message,
        resume_token=_check_name(Header.RESUME, resume_token)
        if (resume_token := message.headers.get(Header.RESUME))
        else None,
        start_at=datetime.fromtimestamp(start_at, UTC) if start_at is not None else None,
        start_token=_check_name(Header.START, start_token)
        if (start_token := message.headers.get(Header.START))
        else None,
    )


def parse_claim(message: Message, options: Options) -> Claim:
    """The outcome in a response.

    Raises:
        PoisonMessage: the response is unreadable, or does not name its sender or its call.
    """
    body = parse_body(ResponseBody, message.body, options.max_message_bytes)
    if not message.app_id:
        raise PoisonMessage("app_id: a response must name its sender")
    _check_name("app_id", message.app_id)
    if is_wait(message.app_id):  # it would answer a question, or end a sleep
        raise PoisonMessage(f"app_id: {message.app_id[:_MAX_QUOTED_LENGTH]!r} is reserved")
    if (reason := impersonation_error(message, options)) is not None:
        raise PoisonMessage(reason)
    return Claim(
        id=RunId(new_id()),
        task_id=_parent_task_id(message),
        sub_task_id=_sub_task_id(message),
        outcome=body.outcome(),
        sender=message.app_id,
        refused_fingerprint=body.refused_fingerprint,
        retryable=body.is_retryable,
        retry_after=body.retry_after,
    )


def claim_for_unreadable(message: Message, reason: str, options: Options) -> Claim | None:
    """The outcome of a call whose peer sent an unreadable response.

    Returns `None` if the envelope names no call, or if the message did not come from the peer.
    """
    if impersonation_error(message, options) is not None or is_wait(message.app_id):
        return None
    try:
        task_id, sub_task_id = _parent_task_id(message), _sub_task_id(message)
        _check_name("app_id", message.app_id)
    except PoisonMessage:
        return None
    failed = Failed(FailureKind.INVALID, f"the response cannot be read: {truncate_reason(reason)}")
    return (
        Claim(RunId(new_id()), task_id, sub_task_id, failed, message.app_id)
        if message.app_id
        else None
    )


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """A peer's status update, and what to forward: its content and metadata."""

    progress: Progress
    content: JsonValue
    metadata: StatusMetadata


def parse_status(message: Message, options: Options) -> PeerStatus:
    """A peer's status update.

    Raises:
        PoisonMessage: the message is unreadable.
    """
    body = parse_body(StatusBody, message.body, options.max_message_bytes)
    task_status = body.status_update.status
    if task_status.state not in {A2ATaskState.SUBMITTED, A2ATaskState.WORKING}:
        raise PoisonMessage(
            f"statusUpdate.status.state: {task_status.state} ends a task; send a response"
        )
    part = task_status.message.parts[0] if task_status.message else None
    data = None if part is None else part.text if part.text is not None else part.data
    sender = _check_name("app_id", message.app_id)
    progress = Progress(_parent_task_id(message), _sub_task_id(message), sender)
    metadata = StatusMetadata.from_json(body.status_update.metadata)
    return PeerStatus(progress, data, metadata.forwarded(sender, message.correlation_id))


def parse_cancel(message: Message, options: Options) -> tuple[TaskId, str | None, str]:
    """The task that a cancel names, the sender's task that it is sent for, and the reason.

    If not given, the sender's task is `None` and the reason is empty.

    Raises:
        PoisonMessage: the message is unreadable.
    """
    parent = message.headers.get(Header.PARENT_TASK)
    _check_name("app_id", message.app_id)  # an early cancel stores its sender
    body = parse_body(CancelBody, message.body, options.max_message_bytes)
    task_id = TaskId(_check_name("id", body.id))
    if parent is not None:
        parent = _check_name(Header.PARENT_TASK, parent, _MAX_PARENT_BYTES)
    return task_id, parent, truncate_reason(body.reason or "")


def parse_attach(message: Message, options: Options) -> tuple[TaskId, Address]:
    """The task that an attach names, and the address to which it wants the outcome.

    Raises:
        PoisonMessage: the message is unreadable.
    """
    body = parse_body(AttachBody, message.body, options.max_message_bytes)
    _check_name("app_id", message.app_id)
    if not message.reply_to:
        raise PoisonMessage("reply_to: an attach must say where to reply")
    return TaskId(_check_name("id", body.id)), Address(_check_name("reply_to", message.reply_to))


def parse_query(message: Message) -> str | None:
    """The token of an attach that asks only for the status; `None` for any other attach.

    Raises:
        PoisonMessage: the token is unreadable.
    """
    token = message.headers.get(Header.QUERY)
    return None if token is None else _check_name(Header.QUERY, str(token))


def _parent_task_id(message: Message) -> TaskId:
    parent = message.headers.get(Header.PARENT_TASK)
    if not parent:
        raise PoisonMessage(f"{Header.PARENT_TASK}: the header must echo the requester's task id")
    return split_resumed_id(_check_name(Header.PARENT_TASK, parent, _MAX_PARENT_BYTES))[0]


def _sub_task_id(message: Message) -> TaskId:
    if not message.correlation_id:
        raise PoisonMessage("correlation_id: must name the call")
    peer_task_id = TaskId(_check_name("correlation_id", message.correlation_id))
    _, resume_attempt = split_resumed_id(str(message.headers.get(Header.PARENT_TASK)))
    return peer_task_id if resume_attempt is None else resumed_id(peer_task_id, resume_attempt)


def _check_name(field: str, name: object, max_bytes: int = MAX_NAME_BYTES) -> str:
    """Return `name` if it is a valid key.

    A single zero byte would make PostgreSQL reject the whole batch statement.
    """
    text = str(name)
    if not is_valid_name(text, max_bytes):
        raise PoisonMessage(f"{field}: must be printable and at most {max_bytes} bytes long")
    return text


def _build_a2a_context(message: Message, body: RequestBody, requester: Requester) -> A2AContext:
    context_id, metadata = body.message.context_id, dict(body.metadata)
    for reserved_key in RESERVED_METADATA:
        metadata.pop(reserved_key, None)
    return A2AContext(
        context_id=_check_name("message.contextId", context_id, MAX_CONTEXT_ID_BYTES)
        if context_id is not None
        else None,
        session_id=_metadata_entry(body, "sessionId", str, "a string"),
        user_id=_metadata_entry(body, "userId", str, "a string"),
        reply_to=requester.reply_to,
        requester=requester.app_id,
        parent_task_id=requester.parent_task_id,
        call_depth=int(_number_header(message, Header.CALL_DEPTH) or 0),
        deadline=requester.deadline,
        idle_timeout=requester.idle_timeout,
        user_config=_metadata_entry(body, "userConfig", dict, "an object") or {},
        metadata=metadata,
    )


def _metadata_entry(
    body: RequestBody, key: str, kind: type[_Entry], description: str
) -> _Entry | None:
    """An entry of a request's metadata, or `None` if it is missing or empty.

    Raises:
        PoisonMessage: the entry is not of this kind, or not a valid text.
    """
    value = body.metadata.get(key)
    if value is not None and not isinstance(value, kind):
        raise PoisonMessage(f"metadata.{key}: must be {description}")
    if isinstance(value, str):
        _check_name(f"metadata.{key}", value)
    return value or None


def _number_header(message: Message, header: Header) -> float | None:
    """Read a number from a header and check its bounds.

    Raises:
        PoisonMessage: the header is not a number, is out of bounds, or must be an integer.
    """
    value = message.headers.get(header)
    if value is None:
        return None
    quoted = repr(value)[:_MAX_QUOTED_LENGTH]
    try:
        number = float(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise PoisonMessage(f"{header}: {quoted} is not a number") from error
    if isinstance(value, bool) or not math.isfinite(number):
        raise PoisonMessage(f"{header}: {quoted} is not a number")
    minimum, maximum = _BOUNDS[header]
    if not minimum <= number <= maximum:
        raise PoisonMessage(f"{header}: {quoted} is not between {minimum:g} and {maximum:.15g}")
    if header in {Header.CALL_DEPTH, Header.ATTEMPT} and not number.is_integer():
        raise PoisonMessage(f"{header}: {number:g} is not an integer")
    return number


_LATEST_DEADLINE = (NO_DEADLINE - timedelta(days=1)).timestamp()
"""Seconds since the epoch. Earlier versions send `NO_DEADLINE` as a deadline, less a margin."""
_MIN_SECONDS = 0.001  # seconds
_TEN_YEARS_SECONDS = 315_360_000.0  # seconds
_YEAR_9000 = 221_845_392_000.0  # seconds since the epoch; leaves room for extending a deadline
_BOUNDS: dict[Header, tuple[float, float]] = {
    Header.CALL_DEPTH: (0, 1_000_000),
    Header.ATTEMPT: (1, 1_000_000_000),
    Header.DEADLINE: (_MIN_SECONDS, _YEAR_9000),
    Header.START_AT: (_MIN_SECONDS, _YEAR_9000),
    Header.IDLE_TIMEOUT: (_MIN_SECONDS, _TEN_YEARS_SECONDS),
    Header.KEEP_RESULT: (_MIN_SECONDS, _TEN_YEARS_SECONDS),
}
