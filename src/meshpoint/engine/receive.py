"""Parse and validate incoming messages. Unreadable messages are refused here with a reason."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from pydantic import JsonValue, ValidationError

from meshpoint.engine.senders import impostor
from meshpoint.errors import NotJson, PoisonMessage
from meshpoint.model.bodies import CancelBody, RequestBody, ResponseBody, StatusBody, TaskState, parse
from meshpoint.model.checkpoint import Claim, Progress, Requester
from meshpoint.model.context import A2AContext, Report, TaskExecutionContext
from meshpoint.model.ids import RunId, TaskId, new_id, plain_id, resumed_id
from meshpoint.model.json_values import JsonDict, digest_of
from meshpoint.model.messages import Address, Header, Message, MessageType, bounded_reason
from meshpoint.model.options import Options
from meshpoint.model.outcomes import Failed, FailureKind
from meshpoint.model.typed import cause_of, first_problem

_TRACEPARENT = re.compile(r"[0-9a-z-]{1,55}")  # W3C: 55 characters
_LONGEST_PARENT = 280  # bytes: a task id and the attempt in which it was resumed
_LONGEST_CONTEXT = 1000  # bytes
_QUOTED = 100  # maximum characters quoted from a message
_LONGEST_NAME = 248  # bytes: an AMQP property holds 255, and message ids extend a task id


@dataclass(frozen=True, slots=True)
class Request:
    """A parsed request: the agent's input and the initial values of its context."""

    task_id: TaskId
    input: JsonValue
    requester: Requester
    a2a_context: A2AContext
    security_context: dict[str, JsonValue]
    trace_context: dict[str, JsonValue]
    message: Message
    resume: str | None = None  # token of a requester that was resumed and asks again

    @property
    def digest(self) -> str:
        """Digest of the input. Requests with the same id must have the same input."""
        return digest_of(self.input)

    def asked_by(self, requester: Requester) -> Request:
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

    def context(self, report: Report) -> TaskExecutionContext:
        """The context of the first segment."""
        return TaskExecutionContext(
            task_id=self.task_id,
            a2a_context=self.a2a_context,
            security_context=self.security_context,
            trace_context=self.trace_context,
            report=report,
        )


@dataclass(frozen=True, slots=True)
class StatusNews:
    """A peer's status update and its data."""

    progress: Progress
    data: JsonValue


def requester_of(message: Message) -> Requester:
    """The requester, read from the envelope alone.

    Raises:
        PoisonMessage: a header has a wrong type or is out of bounds.
    """
    _whole(message, Header.ATTEMPT)
    deadline = _number(message, Header.DEADLINE)
    idle = _number(message, Header.IDLE_TIMEOUT)
    parent = message.headers.get(Header.PARENT_TASK)
    return Requester(
        reply_to=Address(_name("reply_to", message.reply_to)) if message.reply_to else None,
        app_id=_name("app_id", message.app_id) if message.app_id else None,
        parent_task_id=_name(Header.PARENT_TASK, parent, _LONGEST_PARENT) if parent is not None else None,
        deadline=datetime.fromtimestamp(deadline, UTC) if deadline is not None else None,
        idle_timeout=timedelta(seconds=idle) if idle is not None else None,
    )


def request(message: Message, options: Options) -> Request:
    """The request in `message`.

    Raises:
        PoisonMessage: the message is too large or not JSON, or a field or header is missing or has
            a wrong type.
    """
    if message.type is not MessageType.REQUEST:
        raise PoisonMessage(f"a {message.type} message does not belong on a request queue")
    body = parse(RequestBody, _within(options, message))
    if not (message.correlation_id or body.message.task_id):
        raise PoisonMessage("correlation_id: a request must name its task")
    task_id = _name("correlation_id", message.correlation_id or body.message.task_id)
    if plain_id(task_id)[1] is not None:
        raise PoisonMessage(f"correlation_id: {task_id!r} ends as only ids of resumed calls may")
    if body.message.task_id not in {None, task_id}:
        raise PoisonMessage(f"message.taskId: {body.message.task_id!r} is not the correlation id {task_id!r}")
    requester = requester_of(message)
    try:
        a2a_context = _a2a_context(message, body, requester)
        security_context = JsonDict(_dict(body, "securityContext"), name="metadata.securityContext")
    except ValidationError as error:
        raise PoisonMessage(f"metadata: {first_problem(error)}") from cause_of(error)
    except NotJson as error:  # nested too deep to store
        raise PoisonMessage(f"metadata: {error}") from error
    return Request(
        task_id=TaskId(task_id),
        input=body.input(),
        requester=requester,
        a2a_context=a2a_context,
        security_context=security_context,
        trace_context=_trace(message),
        message=message,
        resume=_name(Header.RESUME, resume) if (resume := message.headers.get(Header.RESUME)) else None,
    )


def claim(message: Message, options: Options) -> Claim:
    """The outcome in a response.

    Raises:
        PoisonMessage: the response is unreadable, or does not name its sender or its call.
    """
    body = parse(ResponseBody, _within(options, message))
    if not message.app_id:
        raise PoisonMessage("app_id: a response must name its sender")
    _name("app_id", message.app_id)
    if (reason := impostor(message, options)) is not None:
        raise PoisonMessage(reason)
    return Claim(
        id=RunId(new_id()),
        task_id=_parent_task(message),
        sub_task_id=_sub_task(message),
        outcome=body.outcome(),
        sender=message.app_id,
        refuses=body.refuses,
    )


def unreadable_claim(message: Message, reason: str, options: Options) -> Claim | None:
    """The outcome of a call whose peer sent an unreadable response.

    Returns `None` if the envelope names no call, or if the message did not come from the peer.
    """
    if impostor(message, options) is not None:
        return None
    try:
        task_id, sub_task_id = _parent_task(message), _sub_task(message)
        _name("app_id", message.app_id)
    except PoisonMessage:
        return None
    failed = Failed(FailureKind.INVALID, f"the response cannot be read: {bounded_reason(reason)}")
    return Claim(RunId(new_id()), task_id, sub_task_id, failed, message.app_id) if message.app_id else None


def status(message: Message, options: Options) -> StatusNews:
    """Parse a status update.

    Raises:
        PoisonMessage: the message is unreadable.
    """
    body = parse(StatusBody, _within(options, message))
    said = body.status_update.status
    if said.state not in {TaskState.SUBMITTED, TaskState.WORKING}:
        raise PoisonMessage(f"statusUpdate.status.state: {said.state} ends a task; send a response")
    part = said.message.parts[0] if said.message else None
    data = None if part is None else part.text if part.text is not None else part.data
    progress = Progress(_parent_task(message), _sub_task(message), _name("app_id", message.app_id))
    return StatusNews(progress, data)


def cancelled_task(message: Message, options: Options) -> tuple[TaskId, str | None]:
    """The task that a cancel names, and the sender's own task on whose behalf, if given.

    Raises:
        PoisonMessage: the message is unreadable.
    """
    parent = message.headers.get(Header.PARENT_TASK)
    _name("app_id", message.app_id)  # an early cancel stores its sender
    id_ = TaskId(_name("id", parse(CancelBody, _within(options, message)).id))
    return id_, None if parent is None else _name(Header.PARENT_TASK, parent, _LONGEST_PARENT)


def _within(options: Options, message: Message) -> bytes:
    if len(message.body) > options.max_message_bytes:
        raise PoisonMessage(
            f"the body has {len(message.body)} bytes; max_message_bytes is {options.max_message_bytes}"
        )
    return message.body


def _parent_task(message: Message) -> TaskId:
    parent = message.headers.get(Header.PARENT_TASK)
    if not parent:
        raise PoisonMessage(f"{Header.PARENT_TASK}: the header must echo the requester's task id")
    return plain_id(_name(Header.PARENT_TASK, parent, _LONGEST_PARENT))[0]


def _sub_task(message: Message) -> TaskId:
    if not message.correlation_id:
        raise PoisonMessage("correlation_id: must name the call")
    peers_own = TaskId(_name("correlation_id", message.correlation_id))
    _, retry = plain_id(str(message.headers.get(Header.PARENT_TASK)))
    return peers_own if retry is None else resumed_id(peers_own, retry)


def _name(where: str, name: object, longest: int = _LONGEST_NAME) -> str:
    """Return `name` if it is a valid key.

    A single zero byte would make PostgreSQL reject the whole batch statement.
    """
    text = str(name)
    if not text.isprintable() or len(text.encode()) > longest:
        raise PoisonMessage(f"{where}: must be printable and at most {longest} bytes long")
    return text


def _a2a_context(message: Message, body: RequestBody, requester: Requester) -> A2AContext:
    metadata = body.metadata
    known = {"userId", "sessionId", "userConfig", "securityContext"}
    return A2AContext(
        context_id=_context_id(body),
        session_id=_text(body, "sessionId"),
        user_id=_text(body, "userId"),
        reply_to=requester.reply_to,
        requester=requester.app_id,
        parent_task_id=requester.parent_task_id,
        call_depth=_whole(message, Header.CALL_DEPTH) or 0,
        deadline=requester.deadline,
        idle_timeout=requester.idle_timeout,
        user_config=_dict(body, "userConfig"),
        metadata={key: value for key, value in metadata.items() if key not in known},
    )


def _text(body: RequestBody, key: str) -> str | None:
    value = body.metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise PoisonMessage(f"metadata.{key}: must be a string")
    return _name(f"metadata.{key}", value) if value else None


def _context_id(body: RequestBody) -> str | None:
    # Every call and reply carries this id: a huge one would make them too large to send.
    given = body.message.context_id
    return _name("message.contextId", given, _LONGEST_CONTEXT) if given is not None else None


def _dict(body: RequestBody, key: str) -> dict[str, JsonValue]:
    value = body.metadata.get(key)
    if value is not None and not isinstance(value, dict):
        raise PoisonMessage(f"metadata.{key}: must be an object")
    return value or {}


def _trace(message: Message) -> dict[str, JsonValue]:
    """The trace context to pass to calls. An invalid `traceparent` is dropped."""
    value = message.headers.get(Header.TRACEPARENT)
    if not isinstance(value, str) or not _TRACEPARENT.fullmatch(value):
        return {}
    return {Header.TRACEPARENT.value: value}


def _number(message: Message, header: Header) -> float | None:
    """Read a number from a header and check its bounds.

    Raises:
        PoisonMessage: the header is not a number or is out of bounds.
    """
    value = message.headers.get(header)
    if value is None:
        return None
    shown = repr(value)[:_QUOTED]
    try:
        number = float(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise PoisonMessage(f"{header}: {shown} is not a number") from error
    if isinstance(value, bool) or not math.isfinite(number):
        raise PoisonMessage(f"{header}: {shown} is not a number")
    least, most = _BOUNDS[header]
    if not least <= number <= most:
        raise PoisonMessage(f"{header}: {shown} is not between {least:g} and {most:.15g}")
    return number


def _whole(message: Message, header: Header) -> int | None:
    """Read an integer from a header and check its bounds.

    Raises:
        PoisonMessage: as for `_number`.
    """
    number = _number(message, header)
    if number is not None and not number.is_integer():
        raise PoisonMessage(f"{header}: {number:g} is not an integer")
    return None if number is None else int(number)


_SMALLEST = 0.001  # seconds
_TEN_YEARS = 315_360_000.0  # seconds
_YEAR_9000 = 221_845_392_000.0  # seconds since the epoch; leaves room for extending a deadline
_BOUNDS: dict[Header, tuple[float, float]] = {
    Header.CALL_DEPTH: (0, 1_000_000),
    Header.ATTEMPT: (1, 1_000_000_000),
    Header.DEADLINE: (_SMALLEST, _YEAR_9000),
    Header.IDLE_TIMEOUT: (_SMALLEST, _TEN_YEARS),
}
