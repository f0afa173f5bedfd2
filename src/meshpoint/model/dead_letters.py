"""Dead letters as operators see them, and which of them a command is about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from meshpoint.errors import ConfigurationError
from meshpoint.model.error_text import make_storable, quantity
from meshpoint.model.ids import AgentName
from meshpoint.model.messages import (
    Address,
    HeaderValue,
    Message,
    MessageType,
    is_agent_name,
    is_private_queue,
    is_request_queue,
    nested_queue,
    request_queue,
    response_queue,
)

UNKNOWN_REASON = "unknown"
"""The reason of a dead letter that names none."""
_OWN_PREFIX = "x-dead-"
"""Prefix of the headers that describe a dead letter. Replayed messages do not have them."""
_PRIVATE_TYPES = {
    MessageType.WAKE,
    MessageType.DENY,
    MessageType.DESCRIBE,
    MessageType.CARD,
}


@dataclass(frozen=True, slots=True, eq=False)
class DeadLetter:
    """A dead letter, without its body.

    Attributes:
        id: unique in the mesh: the name of its agent, a colon, and a key.
        agent: the agent whose dead letters contain it.
        reason: why it is a dead letter.
        queue: the queue in which it died, or would be delivered today; `None` if unknown.
        message: the message with an empty body; `None` if it is unreadable.
        defect: why the message cannot be replayed; `None` if it can.
        properties: its properties as far as they are readable, including headers.
        deliveries: how often it was delivered since it became a dead letter.
        body_size: in bytes.
    """

    id: str
    agent: AgentName
    reason: str
    queue: Address | None
    message: Message | None
    defect: str | None
    properties: Mapping[str, object] = field(repr=False)
    deliveries: int = 0
    body_size: int = 0

    @property
    def key(self) -> str:
        """Its id among the dead letters of its agent."""
        return self.id.partition(":")[2]

    @property
    def sender(self) -> str | None:
        """The agent or client that sent it; `None` if it is unreadable."""
        return None if self.message is None else self.message.app_id


class LetterResult(Enum):
    """What happened to a dead letter."""

    DONE = auto()  # replayed or dropped
    GONE = auto()  # another command took it, or the queue dropped it
    NO_QUEUE = auto()  # not replayed: its queue does not exist
    REFUSED = auto()  # not replayed: its queue is full, or the broker does not accept it
    DEFECTIVE = auto()  # not replayed: see `DeadLetter.defect`


_RESULTS = {
    LetterResult.GONE: "not found: dropped, displaced or taken by another command",
    LetterResult.NO_QUEUE: "kept: the queue of origin is gone",
    LetterResult.REFUSED: "kept: the queue is full, or the broker refuses the message",
    LetterResult.DEFECTIVE: "kept: impossible to replay, the letter itself says why",
}


def describe_results(results: Counter[LetterResult], verb: str) -> str:
    """What happened to letters, on one line. `verb` is "replayed" or "dropped"."""
    others = [f"{results[each]} {text}" for each, text in _RESULTS.items() if results[each]]
    return "; ".join([f"{verb} {quantity(results[LetterResult.DONE], 'letter')}", *others])


@dataclass(frozen=True, slots=True)
class LetterFilter:
    """Selects dead letters. By default, all.

    Attributes:
        ids: only these; empty for any.
        agent: only letters of this agent.
        reason: part of the reason.
        sender: `app_id` of the message. Unreadable letters have none.
    """

    ids: frozenset[str] = frozenset()
    agent: AgentName | None = None
    reason: str = ""
    sender: str | None = None

    @property
    def agents(self) -> frozenset[AgentName] | None:
        """The agents whose letters can match; `None` for any."""
        if self.agent is not None:
            return frozenset({self.agent})
        return frozenset(map(agent_of, self.ids)) if self.ids else None

    def matches(self, letter: DeadLetter) -> bool:
        """Whether it selects `letter`."""
        return (
            (not self.ids or letter.id in self.ids)
            and (self.agent is None or letter.agent == self.agent)
            and self.reason in letter.reason
            and (self.sender is None or letter.sender == self.sender)
        )


def agent_of(id_: str) -> AgentName:
    """The agent whose dead letters contain the one with this id.

    Raises:
        ConfigurationError: It is not the id of a dead letter.
    """
    agent, colon, key = id_.partition(":")
    if not (colon and key and is_agent_name(agent)):
        raise ConfigurationError(
            "ID",
            f"{id_[:100]!r} is not the id of a dead letter",
            "copy one from `meshpoint dead list --letters`, such as travel:17",
        )
    return AgentName(agent)


def without_death(message: Message, body: bytes) -> Message:
    """The message of a dead letter as it was before it died, with `body`."""
    headers: dict[str, HeaderValue] = {
        name: value for name, value in message.headers.items() if not name.startswith(_OWN_PREFIX)
    }
    return replace(message, headers=headers, body=body)


def make_letter(
    agent: AgentName,
    key: object,
    *,
    reason: object,
    died_in: object,
    message: Message | None,
    defect: str | None,
    stored: Mapping[str, object],
    deliveries: int | None,
    body_size: int | None,
) -> DeadLetter:
    """A dead letter from what a broker stores, which other programs may have written.

    Args:
        agent: the agent whose dead letters contain it.
        key: its id among them.
        reason: why it is a dead letter.
        died_in: the recorded address of its queue.
        message: the message without its body; `None` if it is unreadable.
        defect: why it cannot be replayed, if the broker knows.
        stored: its properties as stored, for an unreadable message.
        deliveries: how often it was delivered as a dead letter.
        body_size: in bytes.
    """
    queue = _find_queue(agent, died_in, message)
    if queue is None and defect is None:
        defect = "the queue from which it came is not recorded"
    properties = _describe(message) if message else stored
    return DeadLetter(
        f"{agent}:{key}",
        agent,
        make_storable(str(reason)) if reason else defect or UNKNOWN_REASON,
        queue,
        message,
        defect,
        {name: value for name, value in properties.items() if value not in (None, "", {})},
        deliveries or 0,
        body_size or 0,
    )


def _find_queue(agent: AgentName, died_in: object, message: Message | None) -> Address | None:
    """The queue from which a dead letter of `agent` came; `None` if unknown.

    Any sender can write headers, so only a queue of the agent itself counts as recorded. Earlier
    releases recorded none: then it is the shared queue for messages of this type.
    """
    if isinstance(died_in, str) and _is_queue_of(agent, died_in):
        return Address(died_in)
    if message is None or message.type in _PRIVATE_TYPES:
        return None
    if message.type is not MessageType.REQUEST:
        return response_queue(agent)
    return nested_queue(agent) if message.nested else request_queue(agent)


def _is_queue_of(agent: AgentName, address: str) -> bool:
    return address.startswith(f"{agent}.") and (
        is_request_queue(address)
        or address == response_queue(agent)
        or is_private_queue(Address(address))
    )


def _describe(message: Message) -> dict[str, object]:
    return {
        "type": message.type.value,
        "message_id": message.message_id,
        "correlation_id": message.correlation_id,
        "app_id": message.app_id,
        "reply_to": message.reply_to,
        "user_id": message.user_id,
        "timestamp": message.timestamp,
        "headers": message.headers,
    }
