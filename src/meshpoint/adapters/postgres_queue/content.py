"""Conversion of messages to the columns of `meshpoint_queue_message` and back."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from meshpoint.adapters.stored_messages import (
    MAX_BODY_BYTES,
    check_headers,
    check_text,
    parse_timestamp,
)
from meshpoint.errors import PoisonMessage
from meshpoint.model.messages import Address, Header, Message, MessageType

MAX_PROPERTIES_BYTES = 1024 * 1024
"""Maximum bytes of all properties. RabbitMQ allows 128 KiB, and more is never sent."""


class Content(NamedTuple):
    """A message as it is stored. `request` is the id of the task that a request begins."""

    request: str | None
    properties: str
    body: bytes


def to_content(message: Message) -> Content:
    """Encode a sendable message.

    Raises:
        ValueError: The body is too large.
    """
    if len(message.body) > MAX_BODY_BYTES:
        raise ValueError(f"the body has {len(message.body)} bytes")
    properties = {
        "type": message.type.value,
        "message_id": message.message_id,
        "correlation_id": message.correlation_id,
        "app_id": message.app_id,
    }
    if message.reply_to:
        properties["reply_to"] = message.reply_to
    if message.user_id:
        properties["user_id"] = message.user_id
    if message.timestamp:
        properties["timestamp"] = message.timestamp.isoformat()
    table = {**properties, "headers": message.headers} if message.headers else properties
    return Content(request_id(message), json.dumps(table), message.body)


def request_id(message: Message) -> str | None:
    """The id of the task that `message` begins; `None` if it begins none."""
    is_request = message.type is MessageType.REQUEST and "\0" not in message.correlation_id
    return message.correlation_id if is_request else None


def from_row(properties: str | None, body: bytes, dead_reason: str | None) -> Message:
    """Decode a row. `dead_reason` becomes a header.

    Args:
        properties: JSON; `None` if it is too large to load.
        body: The content.
        dead_reason: Why the message is a dead letter.

    Raises:
        PoisonMessage: A property is missing or of the wrong type. Names it.
    """
    if properties is None:
        raise PoisonMessage("properties: are too large to load")
    try:
        table = json.loads(properties)
    except (ValueError, RecursionError) as error:
        raise PoisonMessage(f"properties: not JSON: {str(error)[:100]}") from error
    if not isinstance(table, dict):
        raise PoisonMessage("properties: must be a JSON object")
    try:
        type_ = MessageType(str(table.get("type")))
    except ValueError as error:
        raise PoisonMessage(f"type: {str(table.get('type'))[:100]!r} is not known") from error
    headers = check_headers(table.get("headers", {}))
    if dead_reason is not None:
        headers[Header.DEAD_REASON.value] = dead_reason
    reply_to = _text(table, "reply_to")
    return Message(
        type_,
        body,
        message_id=_required(table, "message_id"),
        correlation_id=_required(table, "correlation_id"),
        app_id=_required(table, "app_id"),
        reply_to=Address(reply_to) if reply_to else None,
        user_id=_text(table, "user_id"),
        headers=headers,
        timestamp=parse_timestamp(table.get("timestamp")),
    )


def _text(table: dict[str, Any], name: str) -> str | None:
    value = table.get(name)
    return None if value is None else check_text(name, value) or None


def _required(table: dict[str, Any], name: str) -> str:
    if (value := _text(table, name)) is None:
        raise PoisonMessage(f"{name}: is missing")
    return value
