"""Messages between agents: the envelope, addresses and headers.

`docs/reference/wire.md` specifies the wire format for agents in other languages.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Final, NewType

from meshpoint.errors import ConfigurationError
from meshpoint.model.ids import AgentName, ReplicaId

Address = NewType("Address", str)
"""The destination of a message: a queue name within the mesh's namespace."""


_AGENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


def is_agent_name(name: object) -> bool:
    """Whether an agent can have this name."""
    return isinstance(name, str) and _AGENT_NAME.fullmatch(name) is not None


def validate_agent_name(name: str) -> AgentName:
    """Check `name`: letters, digits, `_` and `-`, at most 63 characters.

    Raises:
        ConfigurationError: the name has other characters, which queue names do not support.
    """
    if not is_agent_name(name):
        raise ConfigurationError(
            "agent.name",
            f"{name!r} is not a valid agent name",
            "use letters, digits, '_' and '-' (63 at most)",
        )
    return AgentName(name)


def request_queue(agent: AgentName) -> Address:
    """The request queue of `agent`, shared by its replicas."""
    return Address(f"{agent}.req")


MAX_SHARDS = 64
"""Maximum request queues of one agent."""
_REQUEST_QUEUE = re.compile(r"[.](req([.][0-9]+)?|nested)$")


def request_shard(agent: AgentName, number: int) -> Address:
    """The request queue of `agent` with this number. Every agent has number 0."""
    return Address(f"{agent}.req.{number}" if number else f"{agent}.req")


def shard_for_sender(agent: AgentName, sender: str, shards: int) -> Address:
    """The request queue of `agent` that receives all requests from `sender`."""
    return request_shard(agent, zlib.crc32(sender.encode()) % shards)


def is_request_queue(address: str) -> bool:
    """Whether `address` receives requests. Such queues have a length limit and reject floods."""
    return _REQUEST_QUEUE.search(address) is not None


def nested_queue(agent: AgentName) -> Address:
    """The queue for requests to `agent` that come from another task.

    It is separate from `request_queue`, so that tasks waiting for peers never block the requests
    that they are waiting for.
    """
    return Address(f"{agent}.nested")


def fallback_for_nested(address: Address) -> Address | None:
    """The agent's request queue, given its nested-request queue. `None` for other addresses."""
    agent, _, kind = address.partition(".")
    return request_queue(AgentName(agent)) if kind == "nested" else None


def response_queue(agent: AgentName) -> Address:
    """The queue for responses, status updates and cancels, shared by the replicas of `agent`."""
    return Address(f"{agent}.resp")


def private_queue(agent: AgentName, replica: ReplicaId) -> Address:
    """The private queue of one replica: replies to its in-process tasks, and broadcasts."""
    return Address(f"{agent}.private.{replica}")


def dead_letter_queue(agent: AgentName) -> Address:
    """The queue for messages to `agent` that could not be read."""
    return Address(f"{agent}.dlq")


def is_private_queue(address: Address) -> bool:
    """Whether `address` is a replica's private queue."""
    return ".private." in address


def is_dead_letter_queue(address: Address) -> bool:
    """Whether `address` is a dead-letter queue."""
    return address.endswith(".dlq")


_MAX_REASON_LENGTH = 500
"""Maximum characters of a dead letter's reason."""


def truncate_reason(reason: str) -> str:
    """Make `reason` sendable: valid UTF-8, and at most 500 characters."""
    text = reason[:_MAX_REASON_LENGTH].encode("utf-8", "backslashreplace").decode()
    return (
        text
        if len(reason) <= _MAX_REASON_LENGTH >= len(text)
        else f"{text[: _MAX_REASON_LENGTH - 1]}…"
    )


Topic = NewType("Topic", str)
"""What a private queue can subscribe to, in addition to the broadcasts of its agent."""

DESCRIBE_ALL = Topic("*.describe")
"""Questions for the cards of all agents."""
CARDS = Topic("*.card")
"""Cards of replicas that start."""


def describe_topic(agent: AgentName) -> Topic:
    """The topic of questions for the card of `agent`."""
    return Topic(f"{agent}.describe")


class MessageType(StrEnum):
    """The purpose of a message.

    ATTACH asks for the outcome of a task. COMPLETE answers a question of a task, SIGNAL sends a
    value to a task, and READ asks for a value that a task has set. Replies to these three have the
    type of the message. WAKE is a broadcast within one agent: a ready task waits for a free slot.
    DESCRIBE asks for the card of an agent, and CARD contains it.
    """

    REQUEST = "request"
    RESPONSE = "response"
    STATUS = "status"
    CANCEL = "cancel"
    ATTACH = "attach"
    COMPLETE = "complete"
    SIGNAL = "signal"
    READ = "read"
    WAKE = "wake"
    DENY = "deny"
    DESCRIBE = "describe"
    CARD = "card"


class CompletionStatus(StrEnum):
    """The result of an answer, a signal or a read."""

    RECORDED = "recorded"
    REFUSED = "refused"
    NOT_OPEN = "not-open"  # the question or the task is unknown here


_TRACEPARENT_PATTERN = re.compile(r"[0-9a-z-]{1,55}")  # W3C: 55 characters


def readable_traceparent(value: object) -> str | None:
    """A W3C `traceparent`, or `None` if `value` cannot be one. Only its characters are checked."""
    if isinstance(value, str) and _TRACEPARENT_PATTERN.fullmatch(value):
        return value
    return None


class Header(StrEnum):
    """Headers needed for routing. Values are strings, integers or floats."""

    CALL_DEPTH = "x-call-depth"
    DEADLINE = "x-deadline"  # seconds since the epoch
    START_AT = "x-start-at"  # seconds since the epoch; the task begins then, or at once
    ATTEMPT = "x-attempt"
    PARENT_TASK = "x-parent-task-id"  # the requester's own task, echoed in the response
    IDLE_TIMEOUT = "x-idle-timeout"  # seconds; maximum interval between status updates
    RESUME = "x-resume"  # resume the failed or cancelled task; increases with each attempt
    START = "x-start"  # a token: the task must not exist; repeated in the reply that accepts it
    COMPLETED = "x-completed"  # a `CompletionStatus`
    TRACEPARENT = "traceparent"
    DEAD_REASON = "x-dead-reason"
    DEAD_FROM = "x-dead-from"  # the address of the queue from which a dead letter came
    # the original sender of a cancel or an attach that a replica forwards
    ON_BEHALF_OF = "x-on-behalf-of"
    ON_BEHALF_OF_LOGIN = "x-on-behalf-of-login"  # the login of that sender
    ATTACH = "x-attach"  # in the status update that replies to an attach: an `AttachStatus`
    QUERY = "x-query"  # a token, in an attach that asks only for the status; repeated in the reply
    SNAPSHOT = "x-snapshot"  # 1 in an attach: also send the latest status and the open questions
    DENY_TO = "x-deny-to"  # in a forwarded attach: the private queue for `deny` messages
    CERTAIN = "x-certain"  # 1 in a reply to an attach: no replica and no queue has the task
    KEEP_RESULT = "x-keep-result"  # seconds; keep the outcome at least this long after the end


TRACEPARENT: Final = Header.TRACEPARENT.value
"""Read for each message; `value` of a member is a function call."""


class AttachStatus(StrEnum):
    """What a replica knows about a task that a caller attaches to.

    If the task has ended, the replica sends the task's response instead.
    """

    RECORDED = "recorded"  # its response will be sent, even if replicas die
    RUNNING = "running"  # its response will be sent unless this replica dies: ask again
    QUEUED = "queued"  # unknown, but requests wait in the queue: ask again
    UNKNOWN = "unknown"  # to the replica that answers; others may know it, unless `CERTAIN`
    REFUSED = "refused"  # it belongs to another requester
    DETACHED = "detached"  # newer addresses took the place of this one: it gets nothing more


HeaderValue = str | int | float


@dataclass(frozen=True, slots=True)
class Message:
    """One broker message.

    Attributes:
        message_id: stable across re-sends.
        correlation_id: the task id, shared by the request and its status updates, cancel and
            response.
        app_id: the sending agent.
    """

    type: MessageType
    body: bytes
    message_id: str
    correlation_id: str
    app_id: str
    reply_to: Address | None = None
    user_id: str | None = None
    headers: dict[str, HeaderValue] = field(default_factory=dict)
    timestamp: datetime | None = None

    @property
    def nested(self) -> bool:
        """Whether another task sent this request, that is, its call depth is above 0."""
        try:
            return float(self.headers.get(Header.CALL_DEPTH.value, 0)) > 0
        except (TypeError, ValueError, OverflowError):
            return False


MAX_NAME_BYTES = 248
"""Maximum bytes of a name or id: an AMQP property holds 255, and message ids extend a task id."""
MAX_CONTEXT_ID_BYTES = 1000
"""Maximum bytes of a context id, which every call and reply carries."""


def is_valid_name(text: str, max_bytes: int = MAX_NAME_BYTES) -> bool:
    """Whether receivers accept `text` as a name or id: printable, at most `max_bytes` long."""
    return text.isprintable() and len(text.encode()) <= max_bytes


_MAX_TEXT_BYTES = 255
"""Maximum bytes of an id, name or address in a message."""
_MAX_HEADER_BYTES = 120_000
"""Maximum bytes of all headers together, slightly below one AMQP frame."""


def is_sendable(message: Message) -> bool:
    """Whether a broker can carry the envelope of `message`. Bodies have separate limits."""
    texts = (
        message.message_id,
        message.correlation_id,
        message.app_id,
        message.reply_to,
        message.user_id,
        *map(str, message.headers),
    )
    header_bytes = 0
    try:
        for text in texts:
            if text and len(text.encode()) > _MAX_TEXT_BYTES:
                return False
        for key, value in message.headers.items():
            if not isinstance(value, str | int | float):
                return False
            header_bytes += len(str(key).encode())
            header_bytes += len(value.encode()) if isinstance(value, str) else 8
    except UnicodeEncodeError:
        return False
    return header_bytes <= _MAX_HEADER_BYTES
