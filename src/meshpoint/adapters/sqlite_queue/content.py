"""Conversion of messages to rows of `meshpoint_queue_content` and back.

SQLite stores any type in any column, and other programs can write to the file, so each value is
checked when it is read.
"""

from __future__ import annotations

import json
from typing import Any, TypeAlias

from meshpoint.adapters.stored_messages import (
    MAX_BODY_BYTES,
    check_headers,
    check_text,
    parse_timestamp,
)
from meshpoint.errors import PoisonMessage
from meshpoint.model.messages import Address, Header, HeaderValue, Message, MessageType

COLUMNS = "type, message_id, correlation_id, app_id, reply_to, user_id, headers, timestamp, body"
PROPERTIES = COLUMNS.split(", ")[:-1]
"""All columns but the body, which is the last one."""
_MAX_REASON_LENGTH = 10_000  # characters
_MAX_TEXT_BYTES = 1024 * 1024
"""Maximum bytes of one text column. RabbitMQ allows 128 KiB for all properties together."""

ContentRow: TypeAlias = tuple[str, str, str, str, str | None, str | None, str, str | None, bytes]


def _bounded_column(column: str) -> str:
    if column == "body":
        return (
            f"CASE WHEN typeof(body) = 'blob' AND length(body) <= {MAX_BODY_BYTES} THEN body END"
        )
    # length() of a text stops at its first NUL, so measure it as a blob; the cast keeps the bytes.
    too_long = f"length(CAST({column} AS BLOB)) > {_MAX_TEXT_BYTES}"
    return f"CASE WHEN {too_long} THEN X'00' ELSE {column} END"


READ_COLUMNS = ", ".join(_bounded_column(name) for name in COLUMNS.split(", "))
"""`COLUMNS` for a SELECT. Values too large to load become values that `from_row` rejects."""
READ_PROPERTIES = ", ".join(_bounded_column(name) for name in PROPERTIES)
"""`PROPERTIES` for a SELECT, in the same way."""
READ_BODY = _bounded_column("body")
READ_DELIVERIES = "CASE typeof(deliveries) WHEN 'integer' THEN deliveries END"
READ_REASON = f"substr(dead_reason, 1, {_MAX_REASON_LENGTH})"


def to_row(message: Message) -> ContentRow:
    """Encode a message as the values of `COLUMNS`.

    Raises:
        UnicodeEncodeError: A text has lone surrogates, which cannot be stored.
        ValueError: The body or a text is too large to be read back.
    """
    row = (
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
    for text in (*row[:-1], *message.headers, *message.headers.values()):
        if isinstance(text, str) and len(text.encode()) > _MAX_TEXT_BYTES:
            raise ValueError(f"a property has {len(text)} characters")
    if len(message.body) > MAX_BODY_BYTES:
        raise ValueError(f"the body has {len(message.body)} bytes")
    return row


def from_row(row: tuple[Any, ...], dead_reason: str | None) -> Message:
    """Decode the values of `READ_COLUMNS`. `dead_reason` becomes a header.

    Raises:
        PoisonMessage: A value is missing, too large, or of the wrong type. Names its column.
    """
    kind, message_id, correlation_id, app_id, reply_to, user_id, headers, timestamp, body = row
    try:
        type_ = MessageType(kind)
    except ValueError as error:
        raise PoisonMessage(f"type: {str(kind)[:100]!r} is not known") from error
    if not isinstance(body, bytes):
        raise PoisonMessage("body: must be a blob small enough to load")
    table = _parse_headers(headers)
    if dead_reason is not None:
        table[Header.DEAD_REASON.value] = dead_reason
    return Message(
        type_,
        body,
        message_id=_required("message_id", message_id),
        correlation_id=_required("correlation_id", correlation_id),
        app_id=_required("app_id", app_id),
        reply_to=Address(check_text("reply_to", reply_to)) if reply_to else None,
        user_id=check_text("user_id", user_id) if user_id else None,
        headers=table,
        timestamp=parse_timestamp(timestamp),
    )


def _required(column: str, value: object) -> str:
    if not value:
        raise PoisonMessage(f"{column}: is missing or too large to load")
    return check_text(column, value)


def _parse_headers(text: object) -> dict[str, HeaderValue]:
    """Parse headers, and drop values of other types than the wire specification has."""
    try:
        table = json.loads(_required("headers", text))
    except (ValueError, RecursionError) as error:
        raise PoisonMessage(f"headers: not JSON: {str(error)[:100]}") from error
    return check_headers(table)
