"""A decoder for AMQP content headers that never raises.

RabbitMQ forwards almost anything that a publisher puts into a content header: bytes that are not
UTF-8, timestamps beyond any calendar, deeply nested tables. The library's decoder raises on those
in its reader, which closes the connection. This decoder keeps every readable property and
describes the first unreadable one in `defect`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import TypeAlias

_FIXED_BYTES = 12
"""Bytes before the property flags: class, weight and body size."""
_MAX_NESTING = 16
"""Maximum nesting of tables and arrays in a header. RabbitMQ's own headers use three levels."""
_LAST_32_BIT_SECOND = 0xFFFFFFFF
"""Larger timestamps are taken as milliseconds, which many clients send."""
_MAX_EXCERPT = 40

_Scalar: TypeAlias = str | int | float

_u16 = struct.Struct(">H").unpack_from
_u32 = struct.Struct(">I").unpack_from
_u64 = struct.Struct(">Q").unpack_from
_decimal = struct.Struct(">Bi").unpack_from

_SHORT_STRINGS_BEFORE_HEADERS = ((0x8000, "content_type"), (0x4000, "content_encoding"))
_OCTETS = ((0x1000, "delivery_mode"), (0x0800, "priority"))
_SHORT_STRINGS = (
    (0x0400, "correlation_id"),
    (0x0200, "reply_to"),
    (0x0100, "expiration"),
    (0x0080, "message_id"),
)
_LAST_SHORT_STRINGS = (
    (0x0020, "message_type"),
    (0x0010, "user_id"),
    (0x0008, "app_id"),
    (0x0004, "cluster_id"),
)
_HEADERS, _TIMESTAMP, _CONTINUED, _UNUSED = 0x2000, 0x0040, 0x0001, 0x0002

_NUMBERS = {
    kind[0]: struct.Struct(format)
    for kind, format in (
        (b"t", ">?"),
        (b"b", ">b"),
        (b"B", ">B"),
        (b"s", ">h"),
        (b"u", ">H"),
        (b"I", ">i"),
        (b"i", ">I"),
        (b"l", ">q"),
        (b"L", ">q"),
        (b"f", ">f"),
        (b"d", ">d"),
    )
}
_STRING, _BYTES, _TABLE, _ARRAY, _TIME, _DECIMAL, _VOID, _NOTHING = b"SxFATDV\x00"


@dataclass(slots=True)
class Content:
    """The properties of one message. Missing and unreadable ones are `None`.

    `headers` contains only strings and numbers. Values of other types (void, bytes, tables,
    arrays) are omitted. Decimals become floats, timestamps become seconds.
    """

    content_type: str | None = None
    content_encoding: str | None = None
    headers: dict[str, _Scalar] = field(default_factory=dict)
    delivery_mode: int | None = None
    priority: int | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    expiration: str | None = None
    message_id: str | None = None
    timestamp: datetime | None = None
    message_type: str | None = None
    user_id: str | None = None
    app_id: str | None = None
    cluster_id: str | None = None
    defect: str | None = None


class _MalformedContent(Exception):
    """The rest of this part cannot be parsed, because the next value's position is unknown."""


def body_size(payload: bytes) -> int:
    """Size in bytes of the body that follows a content header frame with this payload."""
    return int(_u64(payload, 4)[0])


def decode(payload: bytes) -> Content:
    """Decode the payload of a content header frame. Never raises."""
    content = Content()
    try:
        _Reader(payload, content).read()
    except (_MalformedContent, struct.error, IndexError) as error:
        _record_defect(
            content,
            str(error)
            if isinstance(error, _MalformedContent)
            else "the content header is cut off",
        )
    return content


def _record_defect(content: Content, defect: str) -> None:
    if content.defect is None:
        content.defect = defect


@dataclass(slots=True)
class _Reader:
    _data: bytes
    _content: Content
    _offset: int = _FIXED_BYTES

    def read(self) -> None:
        (flags,) = _u16(self._data, self._offset)
        self._offset += 2
        if flags & (_CONTINUED | _UNUSED):
            raise _MalformedContent(
                "the content header has properties that AMQP 0-9-1 does not know"
            )
        self._short_strings(flags, _SHORT_STRINGS_BEFORE_HEADERS)
        if flags & _HEADERS:
            self._headers()
        for flag, name in _OCTETS:
            if flags & flag:
                setattr(self._content, name, self._data[self._offset])
                self._offset += 1
        self._short_strings(flags, _SHORT_STRINGS)
        if flags & _TIMESTAMP:
            self._timestamp()
        self._short_strings(flags, _LAST_SHORT_STRINGS)

    def _short_strings(self, flags: int, names: tuple[tuple[int, str], ...]) -> None:
        data, at, content = self._data, self._offset, self._content
        for flag, name in names:
            if flags & flag:
                start = at + 1
                at = start + data[at]
                if at > len(data):
                    raise _MalformedContent(f"property {name}: is cut off")
                setattr(content, name, self._text(data[start:at], f"property {name}"))
        self._offset = at

    def _text(self, raw: bytes, where: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            text = raw.decode("utf-8", "backslashreplace")
            _record_defect(self._content, f"{where}: is not UTF-8: {text[:_MAX_EXCERPT]!r}")
            return text

    def _timestamp(self) -> None:
        (seconds,) = _u64(self._data, self._offset)
        self._offset += 8
        try:
            exact = seconds / 1000 if seconds > _LAST_32_BIT_SECOND else seconds
            self._content.timestamp = datetime.fromtimestamp(exact, UTC)
        except (ValueError, OverflowError, OSError):
            _record_defect(self._content, f"property timestamp: {seconds} is out of range")

    def _headers(self) -> None:
        (size,) = _u32(self._data, self._offset)
        at, end = self._offset + 4, self._offset + 4 + size
        if end > len(self._data):
            raise _MalformedContent("headers: are cut off")
        self._offset = end
        try:
            self._table(at, end)
        except (_MalformedContent, struct.error, IndexError) as error:
            _record_defect(
                self._content,
                f"headers: {error if isinstance(error, _MalformedContent) else 'are cut off'}",
            )

    def _table(self, at: int, end: int) -> None:
        data, headers = self._data, self._content.headers
        while at < end:
            start = at + 1
            at = start + data[at]
            if at >= end:
                raise _MalformedContent("a name is cut off")
            name = self._text(data[start:at], "headers: a name")
            kind = data[at]
            at += 1
            if kind == _STRING:
                start = at + 4
                at = start + _u32(data, at)[0]
                if at > end:
                    raise _MalformedContent(f"{name[:_MAX_EXCERPT]!r}: is cut off")
                try:
                    headers[name] = data[start:at].decode()
                except UnicodeDecodeError:  # bytes, which AMQP allows here
                    headers.pop(name, None)
                continue
            value, at = _value(data, kind, at, end, _MAX_NESTING)
            if value is None:
                headers.pop(name, None)
            else:
                headers[name] = value


def _value(
    data: bytes, kind: int, at: int, end: int, max_depth: int
) -> tuple[_Scalar | None, int]:
    """Parse the value at `at`.

    Returns:
        The value, or `None` unless it is a string or a number, and the offset of the next entry.
    """
    value: _Scalar | None = None
    if (number := _NUMBERS.get(kind)) is not None:
        (value,) = number.unpack_from(data, at)
        at += number.size
    elif kind in {_STRING, _BYTES}:
        at += 4 + _u32(data, at)[0]
    elif kind == _DECIMAL:
        places, unscaled = _decimal(data, at)
        value, at = float(Decimal(unscaled).scaleb(-places)), at + 5
    elif kind == _TIME:
        value, at = int(_u64(data, at)[0]), at + 8
    elif kind in {_TABLE, _ARRAY}:
        inner_end = at + 4 + _u32(data, at)[0]
        if inner_end <= end:
            _check_nested(data, at + 4, inner_end, max_depth - 1, named=kind == _TABLE)
        at = inner_end
    elif kind not in {_VOID, _NOTHING}:
        raise _MalformedContent(f"a value of unknown type {bytes([kind])!r}")
    if at > end:
        raise _MalformedContent("a value is cut off")
    return value, at


def _check_nested(data: bytes, at: int, end: int, max_depth: int, *, named: bool) -> None:
    if max_depth < 0:
        raise _MalformedContent(f"are nested more than {_MAX_NESTING} levels deep")
    while at < end:
        if named:
            at += 1 + data[at]
        kind = data[at]
        _, at = _value(data, kind, at + 1, end, max_depth)
