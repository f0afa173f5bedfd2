"""Hand-built content headers that RabbitMQ passes on but AMQP libraries cannot decode."""

from __future__ import annotations

import json
import struct
from typing import Any

import aiormq
from pamqp.commands import Basic


def short(text: bytes) -> bytes:
    return bytes([len(text)]) + text


def long(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def entry(name: bytes, kind: bytes, value: bytes) -> bytes:
    return short(name) + kind + value


def nested(depth: int) -> bytes:
    """Nested tables."""
    table = long(b"")
    for _ in range(depth):
        table = long(entry(b"t", b"F", table))
    return table


def properties(
    *,
    headers: bytes = b"",
    correlation_id: bytes = b"c",
    message_id: bytes = b"m",
    timestamp: int | None = None,
    kind: bytes = b"request",
    app_id: bytes = b"a",
) -> bytes:
    """Encode the flags and values of a content header; complete by default."""
    flags = 0x2000 | 0x0400 | 0x0080 | 0x0020 | 0x0008 | (0x0040 if timestamp is not None else 0)
    stamp = b"" if timestamp is None else struct.pack(">Q", timestamp)
    values = (
        long(headers),
        short(correlation_id),
        short(message_id),
        stamp,
        short(kind),
        short(app_id),
    )
    return struct.pack(">H", flags) + b"".join(values)


UNDECODABLE: dict[str, bytes] = {
    "id without UTF-8": properties(correlation_id=b"\xff\xfe"),
    "type without UTF-8": properties(kind=b"\xc3("),
    "sender without UTF-8": properties(app_id=b"\x80" * 255),
    "message id without UTF-8": properties(message_id=b"\xf5"),
    "header name without UTF-8": properties(headers=entry(b"x-\xff", b"S", long(b"v"))),
    "timestamp beyond all calendars": properties(timestamp=2**64 - 1),
    "timestamp of the year 300,000": properties(timestamp=9_400_000_000_000_000),
    "nested 900 deep": properties(headers=entry(b"t", b"F", nested(900))),
    "nested 100 deep in an array": properties(
        headers=entry(b"a", b"A", long(b"A" + long(b"F" + nested(100))))
    ),
}
"""Contents that must become dead letters, by name."""


def _request(**fields: Any) -> bytes:
    """Body of a request without any work."""
    parts: list[dict[str, Any]] = [{"data": {"numbers": []}}]
    return json.dumps(
        {"message": {"messageId": "m", "role": "ROLE_USER", "parts": parts, **fields}}
    ).encode()


_LONG_TEXT = long(b"9" * 100_000)

OVERSIZED: dict[str, tuple[bytes, bytes]] = {
    "deadline": (properties(headers=entry(b"x-deadline", b"S", _LONG_TEXT)), _request()),
    "depth": (properties(headers=entry(b"x-call-depth", b"S", _LONG_TEXT)), _request()),
    "parent": (properties(headers=entry(b"x-parent-task-id", b"S", _LONG_TEXT)), _request()),
    "task id": (properties(), _request(taskId="x" * 200_000)),
    "full frame": (properties(headers=entry(b"x", b"S", long(b"y" * 131_000))), b"no JSON"),
    "no JSON": (properties(), b"\xff" * 100_000),
}
"""Legal contents with parts too large for a copy or a reply: properties and body, by name."""

EXOTIC = b"".join(
    (
        entry(b"void", b"V", b""),
        entry(b"bytes", b"x", long(b"\x00\xff")),
        entry(b"no text", b"S", long(b"\xff")),
        entry(b"table", b"F", long(entry(b"deep", b"F", nested(3)))),
        entry(b"array", b"A", long(b"I" + struct.pack(">i", 1) + b"V")),
        entry(b"bool", b"t", b"\x01"),
        entry(b"decimal", b"D", struct.pack(">Bi", 2, 314)),
        entry(b"time", b"T", struct.pack(">Q", 1_700_000_000)),
        entry(b"huge", b"l", struct.pack(">q", -(2**63))),
        entry(b"short", b"s", struct.pack(">h", -7)),
        entry(b"float", b"f", struct.pack(">f", 0.5)),
        entry(b"text", b"S", long("Zürich".encode())),
    )
)
"""One header of each type."""

EXOTIC_DECODED = {
    "bool": True,
    "decimal": 3.14,
    "time": 1_700_000_000,
    "huge": -(2**63),
    "short": -7,
    "float": 0.5,
    "text": "Zürich",
}
"""The readable headers of `EXOTIC`."""


class Raw(Basic.Properties):
    """Encoded properties, sent unchanged."""

    def __init__(self, encoded: bytes) -> None:
        super().__init__(message_id="any")
        self._encoded = encoded

    __slots__ = ("_encoded",)

    def marshal(self) -> bytes:
        return self._encoded


async def publish_raw(
    url: str, exchange: str, key: str, encoded: bytes, body: bytes = b"{}"
) -> None:
    """Publish content with the encoded properties, and wait for the confirm."""
    connection = await aiormq.connect(url)
    try:
        channel: Any = await connection.channel(publisher_confirms=True)
        await channel.basic_publish(
            body, exchange=exchange, routing_key=key, properties=Raw(encoded)
        )
    finally:
        await connection.close()
