"""What brokers that keep messages in tables have in common."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from meshpoint.errors import PoisonMessage
from meshpoint.model.messages import HeaderValue, Message, is_sendable

_Row = TypeVar("_Row")

_log = logging.getLogger(__name__)

MAX_BODY_BYTES = 128 * 1024 * 1024
"""Maximum bytes of a body; RabbitMQ's default limit."""
LETTERS_PER_PAGE = 500
"""Dead letters that are read, and replayed or dropped, at a time."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Maximum messages in a queue. Full queues refuse more; dead-letter queues drop the oldest."""

    private: int | None = None
    requests: int | None = None
    dead_letters: int | None = None


def encode_sendable(message: Message, encode: Callable[[Message], _Row]) -> _Row | None:
    """Return what `encode` makes of `message`, or `None` if the message cannot be stored.

    `encode` raises `ValueError` if it cannot be.
    """
    if not is_sendable(message):
        _log.warning(
            "message %r cannot be sent: its envelope is too large", message.message_id[:300]
        )
        return None
    try:
        return encode(message)
    except ValueError as error:
        _log.warning("message %r cannot be sent: %s", message.message_id[:300], error)
        return None


def parse_timestamp(value: object) -> datetime | None:
    """Parse the time of sending. `None` if unreadable, since nothing depends on it."""
    try:
        instant = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return instant.replace(tzinfo=UTC) if instant and instant.tzinfo is None else instant


def check_text(name: str, value: object) -> str:
    """Return `value` if it is text that can be encoded.

    Raises:
        PoisonMessage: It is not. Names it.
    """
    if not isinstance(value, str):
        raise PoisonMessage(f"{name}: must be text, not {type(value).__name__}")
    if not value.isascii():
        try:
            value.encode()  # fails for lone surrogates
        except UnicodeEncodeError as error:
            raise PoisonMessage(f"{name}: is not UTF-8") from error
    return value


def check_headers(table: object) -> dict[str, HeaderValue]:
    """Return the headers, without values of other types than the wire specification has.

    Raises:
        PoisonMessage: They are not an object, or a text in them cannot be encoded.
    """
    if not isinstance(table, dict):
        raise PoisonMessage("headers: must be a JSON object")
    return {
        check_text("headers", key): check_text(f"headers.{key[:100]}", value)
        if isinstance(value, str)
        else value
        for key, value in table.items()
        if isinstance(value, str | int | float)
    }
