"""Messages between agents: the envelope, addresses and headers.

`docs/reference/wire.md` specifies the wire format for agents in other languages.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import NewType

from meshpoint.model.ids import AgentName, ReplicaId

Address = NewType("Address", str)
"""The destination of a message: a queue name within the mesh's namespace."""


def requests_of(agent: AgentName) -> Address:
    """The request queue of `agent`, shared by its replicas."""
    return Address(f"{agent}.req")


MOST_SHARDS = 64
"""Maximum request queues of one agent."""
_TAKES_REQUESTS = re.compile(r"[.](req([.][0-9]+)?|nested)$")


def shard_of(agent: AgentName, number: int) -> Address:
    """The request queue of `agent` with this number. Every agent has number 0."""
    return Address(f"{agent}.req.{number}") if number else requests_of(agent)


def shard_for(agent: AgentName, sender: str, shards: int) -> Address:
    """The request queue of `agent` that receives all requests from `sender`."""
    return shard_of(agent, zlib.crc32(sender.encode()) % shards)


def takes_requests(address: str) -> bool:
    """Whether `address` receives requests. Such queues have a length limit and reject floods."""
    return _TAKES_REQUESTS.search(address) is not None


def nested_of(agent: AgentName) -> Address:
    """The queue for requests to `agent` that come from another task.

    It is separate from `requests_of`, so that tasks waiting for peers never block the requests
    that they are waiting for.
    """
    return Address(f"{agent}.nested")


def instead_of_nested(address: Address) -> Address | None:
    """The agent's request queue, given its nested-request queue. `None` for other addresses."""
    agent, _, kind = address.partition(".")
    return requests_of(AgentName(agent)) if kind == "nested" else None


def responses_of(agent: AgentName) -> Address:
    """The queue for responses, status updates and cancels, shared by the replicas of `agent`."""
    return Address(f"{agent}.resp")


def private_of(agent: AgentName, replica: ReplicaId) -> Address:
    """The private queue of one replica: replies to its in-process tasks, and broadcasts."""
    return Address(f"{agent}.private.{replica}")


def dead_letters_of(agent: AgentName) -> Address:
    """The queue for messages to `agent` that could not be read."""
    return Address(f"{agent}.dlq")


def is_private(address: Address) -> bool:
    """Whether `address` is a replica's private queue."""
    return ".private." in address


def is_dead_letters(address: Address) -> bool:
    """Whether `address` is a dead-letter queue."""
    return address.endswith(".dlq")


LONGEST_REASON = 500
"""Maximum characters of a dead letter's reason."""


def bounded_reason(reason: str) -> str:
    """Make `reason` sendable: valid UTF-8, and at most 500 characters."""
    text = reason[:LONGEST_REASON].encode("utf-8", "backslashreplace").decode()
    return text if len(reason) <= LONGEST_REASON >= len(text) else f"{text[: LONGEST_REASON - 1]}…"


class MessageType(StrEnum):
    """The purpose of a message.

    WAKE is a broadcast within one agent: a ready task waits for a free slot.
    """

    REQUEST = "request"
    RESPONSE = "response"
    STATUS = "status"
    CANCEL = "cancel"
    WAKE = "wake"


class Header(StrEnum):
    """Headers needed for routing. Values are strings, integers or floats."""

    CALL_DEPTH = "x-call-depth"
    DEADLINE = "x-deadline"  # seconds since the epoch
    ATTEMPT = "x-attempt"
    PARENT_TASK = "x-parent-task-id"  # the requester's own task, echoed in the response
    IDLE_TIMEOUT = "x-idle-timeout"  # seconds; maximum interval between status updates
    RESUME = "x-resume"  # resume the failed or cancelled task; increases with each attempt
    TRACEPARENT = "traceparent"
    DEAD_REASON = "x-dead-reason"
    ON_BEHALF_OF = "x-on-behalf-of"  # the original sender of a cancel that a replica forwards


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


LONGEST_TEXT = 255
"""Maximum bytes of an id, name or address in a message."""
LONGEST_HEADERS = 120_000
"""Maximum bytes of all headers together, slightly below one AMQP frame."""


def is_sendable(message: Message) -> bool:
    """Whether a broker can carry the envelope of `message`. Bodies have separate limits."""
    texts = message.message_id, message.correlation_id, message.app_id, message.reply_to, message.user_id
    try:
        if any(len(text.encode()) > LONGEST_TEXT for text in texts if text):
            return False
        return sum(_header_bytes(str(key), value) for key, value in message.headers.items()) <= LONGEST_HEADERS
    except ValueError:  # not encodable as UTF-8, or of another type
        return False


def _header_bytes(key: str, value: HeaderValue) -> int:
    name = len(key.encode())
    if name > LONGEST_TEXT:
        raise ValueError(key)
    if isinstance(value, str):
        return name + len(value.encode())
    if not isinstance(value, int | float):
        raise ValueError(key)
    return name + 8
