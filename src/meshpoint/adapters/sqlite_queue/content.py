"""A message as a row of `meshpoint_queue_content`."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, TypeAlias

from meshpoint.model.messages import Address, Header, Message, MessageType

COLUMNS = "type, message_id, correlation_id, app_id, reply_to, user_id, headers, timestamp, body"

Row: TypeAlias = tuple[str, str, str, str, str | None, str | None, str, str | None, bytes]


def to_row(message: Message) -> Row:
    """The values of `COLUMNS`."""
    return (
        message.type.value,
        message.message_id,
        message.correlation_id,
        message.app_id,
        message.reply_to,
        message.user_id,
        json.dumps(message.headers),
        message.timestamp.isoformat() if message.timestamp else None,
        message.body,
    )


def from_row(row: tuple[Any, ...], dead_reason: str | None) -> Message:
    """The message of such a row; `dead_reason` becomes its header."""
    kind, message_id, correlation_id, app_id, reply_to, user_id, headers, timestamp, body = row
    return Message(
        MessageType(kind),
        body,
        message_id=message_id,
        correlation_id=correlation_id,
        app_id=app_id,
        reply_to=None if reply_to is None else Address(reply_to),
        user_id=user_id,
        headers=json.loads(headers) | ({} if dead_reason is None else {Header.DEAD_REASON.value: dead_reason}),
        timestamp=datetime.fromisoformat(timestamp) if timestamp else None,
    )
