"""Conversion between messages and AMQP content."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from datetime import datetime
from functools import lru_cache
from itertools import starmap

from meshpoint.adapters.rabbitmq.content import Content
from meshpoint.adapters.rabbitmq.frames import RawDelivery, short_string
from meshpoint.errors import PoisonMessage
from meshpoint.model.dead_letters import UNKNOWN_REASON
from meshpoint.model.messages import (
    Address,
    Header,
    HeaderValue,
    Message,
    MessageType,
    truncate_reason,
)

_DELIVERY_COUNT = "x-delivery-count"
_ACQUIRED_COUNT = "x-acquired-count"
_FIRST_DEATH = "x-first-death-reason"
_FIRST_DEATH_QUEUE = "x-first-death-queue"
_BROKER_HEADER_PREFIXES = (
    "x-delivery-count",
    "x-acquired-count",
    "x-first-death-",
    "x-last-death-",
    "x-death",
)
_MAX_COUNT = 1_000_000
_UNKNOWN_TYPE = "x-dead-type"
_RAW_ROUTING_KEY = "x-dead-routing-key"
_DROPPED_HEADERS = "x-dead-headers-dropped"
_MAX_ID_BYTES = 255
_KEY_LENGTH = 16
_KNOWN_HEADERS = 256
"""Encoded headers kept: the calls of one pause have the same."""
_LETTER_HEADERS = {Header.DEAD_FROM.value, _RAW_ROUTING_KEY, _UNKNOWN_TYPE}
"""Headers that a letter gets when it is copied or decoded."""

_u32, _u64, _i64, _double = (struct.Struct(format).pack for format in (">I", ">Q", ">q", ">d"))
_OCTET_PERSISTENT = b"\x02"


class UnencodableMessage(ValueError):
    """A message that AMQP cannot carry."""


def to_properties(message: Message, user_id: str | None) -> bytes:
    """Encode the properties of `message`. The broker verifies `user_id` against the login.

    Raises:
        UnencodableMessage: a string is too long, or a value cannot be encoded.
    """
    try:
        return _properties(
            content_type="application/json",
            headers=b"".join(starmap(_encode_header, message.headers.items())),
            correlation_id=message.correlation_id,
            reply_to=message.reply_to,
            message_id=message.message_id,
            timestamp=message.timestamp,
            message_type=message.type.value,
            user_id=user_id,
            app_id=message.app_id,
        )
    except (ValueError, TypeError, OverflowError, struct.error, OSError) as error:
        raise UnencodableMessage(str(error)) from error


def to_dead_letter(
    raw: RawDelivery,
    content: Content,
    reason: str,
    user_id: str | None,
    max_bytes: int,
    died_in: Address | None = None,
) -> bytes:
    """Encode the properties of a dead-letter copy of `raw`, in at most `max_bytes` bytes.

    Accepts any delivery. If the headers do not fit, the largest are dropped. `died_in` is the
    queue of `raw`, unless that is a dead letter already.
    """
    headers = _headers(content)
    headers[Header.DEAD_REASON.value] = truncate_reason(reason)
    if died_in is not None:
        headers[Header.DEAD_FROM.value] = died_in
    if content.defect is not None:
        headers[_RAW_ROUTING_KEY] = raw.routing_key.decode("utf-8", "backslashreplace")
    entries = {key: _encode_dead_header(key, value) for key, value in headers.items()}
    fitting = _drop_largest_headers(entries, max_bytes)
    return _properties(
        content_type=_truncate(content.content_type),
        headers=b"".join(fitting.values()),
        correlation_id=_truncate(content.correlation_id),
        reply_to=_truncate(content.reply_to),
        message_id=_truncate(content.message_id),
        timestamp=content.timestamp,
        message_type=_truncate(content.message_type),
        user_id=user_id,
        app_id=_truncate(content.app_id),
    )


def minimal_dead_letter(reason: str, user_id: str | None) -> bytes:
    """Encode minimal properties for a message whose own properties cannot be copied."""
    entry = _encode_dead_header(Header.DEAD_REASON.value, truncate_reason(reason))
    return _properties(headers=entry, user_id=user_id)


def to_message(raw: RawDelivery, content: Content) -> Message:
    """Decode a message.

    Raises:
        PoisonMessage: it cannot be decoded, or a required property is missing or unknown; names
            that property.
    """
    if content.defect is not None:
        raise PoisonMessage(content.defect)
    try:
        kind = MessageType(content.message_type or "")
    except ValueError as error:
        raise PoisonMessage(f"property type: {content.message_type!r} is not known") from error
    return Message(
        type=kind,
        body=raw.body,
        message_id=_required(content.message_id, "message_id"),
        correlation_id=_required(content.correlation_id, "correlation_id"),
        app_id=_required(content.app_id, "app_id"),
        reply_to=Address(content.reply_to) if content.reply_to else None,
        user_id=content.user_id or None,
        headers=_headers(content),
        timestamp=content.timestamp,
    )


def from_dead_letter(raw: RawDelivery, content: Content) -> Message:
    """Decode a dead letter as far as possible. The header `x-dead-type` keeps an unknown type."""
    headers = _headers(content)
    try:
        kind = MessageType(content.message_type or "")
    except ValueError:
        kind = MessageType.REQUEST
        headers[_UNKNOWN_TYPE] = content.message_type or ""
    if content.defect is not None:
        headers.setdefault(Header.DEAD_REASON.value, content.defect)
    return Message(
        type=kind,
        body=raw.body,
        message_id=content.message_id or "",
        correlation_id=content.correlation_id or "",
        app_id=content.app_id or "",
        reply_to=Address(content.reply_to) if content.reply_to else None,
        user_id=content.user_id or None,
        headers=headers,
        timestamp=content.timestamp,
    )


def died_in(content: Content, namespace: str) -> Address | None:
    """The recorded address of the queue from which a dead letter came.

    RabbitMQ names the queue of a message that it moved itself.
    """
    queue = content.headers.get(_FIRST_DEATH_QUEUE)
    if queue is not None:
        return Address(str(queue).removeprefix(f"{namespace}."))
    address = content.headers.get(Header.DEAD_FROM.value)
    return None if address is None else Address(str(address))


def copy_defect(content: Content) -> str | None:
    """Why a dead letter is not a complete copy of its message; `None` if it is."""
    if _RAW_ROUTING_KEY in content.headers:
        return "its properties could not be decoded"
    if _DROPPED_HEADERS in content.headers:
        return "its largest headers were dropped"
    return None


def letter_key(letter: Message) -> str:
    """Identifies a decoded dead letter by its content, which is the same in all copies of it."""
    headers = [
        (name, value)
        for name, value in letter.headers.items()
        if name not in _LETTER_HEADERS and value != UNKNOWN_REASON
    ]
    seconds = None if letter.timestamp is None else int(letter.timestamp.timestamp())
    ids = letter.type, letter.message_id, letter.correlation_id, letter.app_id, letter.reply_to
    facts = json.dumps([*ids, seconds, sorted(headers)])
    return hashlib.sha256(facts.encode() + b"\0" + letter.body).hexdigest()[:_KEY_LENGTH]


def count_returns(raw: RawDelivery, content: Content) -> int:
    """How often a quorum queue has got this message back.

    RabbitMQ 4 counts every return in a header of its own. The sender may have set both headers,
    but not the flag of a redelivered message.
    """
    if not raw.redelivered:
        return 0
    counts = (content.headers.get(name) for name in (_DELIVERY_COUNT, _ACQUIRED_COUNT))
    return max((count for count in counts if isinstance(count, int)), default=0)


def quorum_delivery_count(content: Content) -> int | None:
    """The quorum queue's count of deliveries, including this one. `None` if it does not count.

    Only valid for a redelivered message: on a first delivery, the sender may have set the header.
    """
    redeliveries = content.headers.get(_DELIVERY_COUNT)
    return (
        1 + redeliveries
        if isinstance(redeliveries, int) and 0 < redeliveries < _MAX_COUNT
        else None
    )


def _headers(content: Content) -> dict[str, HeaderValue]:
    table = content.headers
    headers: dict[str, HeaderValue] = {
        k: v for k, v in table.items() if not k.startswith(_BROKER_HEADER_PREFIXES)
    }
    if _FIRST_DEATH in table:
        headers.setdefault(
            Header.DEAD_REASON.value, truncate_reason(f"broker: {table[_FIRST_DEATH]}")
        )
    return headers


def _required(value: str | None, name: str) -> str:
    if not value:
        raise PoisonMessage(f"property {name} is missing")
    return value


def _properties(
    *,
    content_type: str | None = None,
    headers: bytes = b"",
    correlation_id: str | None = None,
    reply_to: str | None = None,
    message_id: str | None = None,
    timestamp: datetime | None = None,
    message_type: str | None = None,
    user_id: str | None = None,
    app_id: str | None = None,
) -> bytes:
    flags, parts = 0x3000, [b""]
    if content_type is not None:
        flags |= 0x8000
        parts.append(short_string(content_type))
    parts += (_u32(len(headers)), headers, _OCTET_PERSISTENT)
    for flag, text in ((0x0400, correlation_id), (0x0200, reply_to), (0x0080, message_id)):
        if text is not None:
            flags |= flag
            parts.append(short_string(text))
    if timestamp is not None:
        flags |= 0x0040
        parts.append(_u64(int(timestamp.timestamp())))
    for flag, text in ((0x0020, message_type), (0x0010, user_id), (0x0008, app_id)):
        if text is not None:
            flags |= flag
            parts.append(short_string(text))
    parts[0] = struct.pack(">H", flags)
    return b"".join(parts)


@lru_cache(_KNOWN_HEADERS, typed=True)
def _encode_header(key: str, value: HeaderValue) -> bytes:
    name = short_string(str(key))
    if isinstance(value, str):
        raw = value.encode()
        return name + b"S" + _u32(len(raw)) + raw
    if isinstance(value, float):
        # RabbitMQ would close the connection with an internal error.
        if not math.isfinite(value):
            raise ValueError(f"a header cannot be {value}")
        return name + b"d" + _double(value)
    if isinstance(value, bool):
        return name + (b"t\x01" if value else b"t\x00")
    if isinstance(value, int):
        return name + b"l" + _i64(value)
    raise TypeError(f"a header cannot be a {type(value).__name__}")


def _encode_dead_header(key: str, value: HeaderValue) -> bytes:
    """Encode a header of a dead letter; empty if it cannot be encoded."""
    try:
        return _encode_header(key, value)
    except (ValueError, struct.error):
        return b""


def _drop_largest_headers(entries: dict[str, bytes], max_bytes: int) -> dict[str, bytes]:
    """Drop the largest entries until the rest fits with the other properties. Keeps the reason."""
    available = max_bytes - 12 - 2 - 4 - 1 - 8 - 7 * (1 + _MAX_ID_BYTES) - 64
    total = sum(map(len, entries.values()))
    if total <= available:
        return entries
    dropped = 0
    for key in sorted(entries, key=lambda each: len(entries[each]), reverse=True):
        if key == Header.DEAD_REASON.value:
            continue
        total -= len(entries.pop(key))
        dropped += 1
        if total <= available:
            break
    entries[_DROPPED_HEADERS] = _encode_header(_DROPPED_HEADERS, dropped)
    return entries


def _truncate(text: str | None) -> str | None:
    """Cut `text` to 255 bytes. Escaped text can be longer than the undecodable original."""
    if text is None or len(text) <= _MAX_ID_BYTES // 4:
        return text
    return text.encode("utf-8", "backslashreplace")[:_MAX_ID_BYTES].decode("utf-8", "ignore")
