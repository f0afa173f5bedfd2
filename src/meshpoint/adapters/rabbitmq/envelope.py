"""Messages as AMQP properties and back."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from aiormq.abc import DeliveredMessage
from pamqp import encode
from pamqp.commands import Basic
from pamqp.common import FieldValue

from meshpoint.errors import PoisonMessage
from meshpoint.model.messages import Address, Header, HeaderValue, Message, MessageType

_COUNT = "x-delivery-count"
_FIRST_DEATH = "x-first-death-reason"
_OF_THE_BROKER = ("x-delivery-count", "x-acquired-count", "x-first-death-", "x-last-death-", "x-death")


class Properties(Basic.Properties):
    """AMQP properties whose headers keep a float as it is.

    pamqp writes floats with 32 bits, which moves a deadline by up to a minute.
    """

    def encode_property(self, name: str, value: FieldValue) -> bytes:
        """Encode one property."""
        if name != "headers" or not isinstance(value, dict):
            return super().encode_property(name, value)
        table = b"".join(encode.short_string(key) + _encoded(item) for key, item in value.items())
        return encode.long_uint(len(table)) + table


def _encoded(value: FieldValue) -> bytes:
    return b"d" + encode.double(value) if isinstance(value, float) else encode.encode_table_value(value)


def to_properties(message: Message, user_id: str | None) -> Properties:
    """The properties of `message`; `user_id` is the login, which the broker verifies."""
    return Properties(
        content_type="application/json",
        delivery_mode=2,
        message_id=message.message_id,
        correlation_id=message.correlation_id,
        reply_to=message.reply_to,
        app_id=message.app_id,
        user_id=user_id,
        message_type=message.type.value,
        timestamp=message.timestamp,
        headers={str(key): value for key, value in message.headers.items()},
    )


def to_message(delivered: DeliveredMessage) -> Message:
    """What was sent.

    Raises:
        PoisonMessage: a property that every message has is missing or unknown; names it.
    """
    properties = delivered.header.properties
    try:
        kind = MessageType(properties.message_type or "")
    except ValueError as error:
        raise PoisonMessage(f"property type: {properties.message_type!r} is not known") from error
    return Message(
        type=kind,
        body=delivered.body,
        message_id=_required(properties, "message_id"),
        correlation_id=_required(properties, "correlation_id"),
        app_id=_required(properties, "app_id"),
        reply_to=Address(properties.reply_to) if properties.reply_to else None,
        user_id=properties.user_id or None,
        headers=_headers(properties.headers or {}),
        timestamp=_instant(properties.timestamp),
    )


def to_dead_letter(delivered: DeliveredMessage, reason: str, user_id: str | None) -> Properties:
    """The properties of a copy of `delivered` for the dead letters; works on what `to_message` refuses."""
    old = delivered.header.properties
    return Properties(
        content_type=old.content_type,
        delivery_mode=2,
        message_id=old.message_id,
        correlation_id=old.correlation_id,
        reply_to=old.reply_to,
        app_id=old.app_id,
        user_id=user_id,
        message_type=old.message_type,
        timestamp=old.timestamp,
        headers={**_headers(old.headers or {}), Header.DEAD_REASON.value: reason},
    )


def delivery_count(delivered: DeliveredMessage) -> int:
    """The how-manieth delivery this is. Quorum queues count; of others it is known whether it is the first."""
    again = (delivered.header.properties.headers or {}).get(_COUNT)
    return 1 + (again if isinstance(again, int) else int(bool(delivered.redelivered)))


def _headers(table: dict[str, Any]) -> dict[str, HeaderValue]:
    headers: dict[str, HeaderValue] = {
        key: value
        for key, value in table.items()
        if isinstance(value, str | int | float) and not key.startswith(_OF_THE_BROKER)
    }
    if _FIRST_DEATH in table:
        headers.setdefault(Header.DEAD_REASON.value, f"broker: {table[_FIRST_DEATH]}")
    return headers


def _required(properties: Basic.Properties, name: str) -> str:
    value = getattr(properties, name)
    if not value:
        raise PoisonMessage(f"property {name} is missing")
    return str(value)


def _instant(value: datetime | None) -> datetime | None:
    return value.astimezone(UTC) if value else None
