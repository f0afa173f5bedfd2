"""A minimal AMQP 0-9-1 client without validation, which sends and receives any bytes."""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from urllib.parse import unquote, urlsplit

METHOD, HEADER, BODY, HEARTBEAT = 1, 2, 3, 8
FRAME_MAX = 131_072
FRAME_ROOM = FRAME_MAX - 8
"""Payload bytes in the largest frame."""
PROPERTIES = (
    "content_type",
    "content_encoding",
    "headers",
    "delivery_mode",
    "priority",
    "correlation_id",
    "reply_to",
    "expiration",
    "message_id",
    "timestamp",
    "type",
    "user_id",
    "app_id",
    "cluster_id",
)
"""In wire order; the first has the highest flag."""
_PREFETCH = 100  # otherwise the broker buffers everything this process has not read yet
_BYTES = {"delivery_mode", "priority"}


@dataclass(frozen=True)
class Raw:
    """A field value by tag and bytes, valid or not."""

    tag: bytes
    payload: bytes


Value = str | bytes | int | float | bool | None | Raw | dict[str | bytes, "Value"] | list["Value"]
Headers = dict[str | bytes, Value]


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")


def short(text: str | bytes) -> bytes:
    """Encode a short string, cut to AMQP's limit of 255 bytes."""
    raw = _bytes(text)[:255]
    return bytes((len(raw),)) + raw


def long(raw: bytes) -> bytes:
    """Encode a long string, or any other value with a 32-bit length."""
    return struct.pack(">I", len(raw)) + raw


def field_value(value: Value) -> bytes:
    """Encode `value` with its tag."""
    match value:
        case Raw():
            return value.tag + value.payload
        case bool():
            return b"t" + bytes((value,))
        case int():
            return b"l" + struct.pack(">q", max(-(2**63), min(value, 2**63 - 1)))
        case float():
            return b"d" + struct.pack(">d", value)
        case str() | bytes():
            return b"S" + long(_bytes(value))
        case dict():
            return b"F" + table(value)
        case list():
            return b"A" + long(b"".join(field_value(each) for each in value))
        case None:
            return b"V"


def table(headers: Headers) -> bytes:
    """Encode a field table."""
    return long(b"".join(short(key) + field_value(value) for key, value in headers.items()))


@dataclass(frozen=True)
class Letter:
    """One message on the wire. `properties` are by name; `raw_headers` replaces the header table."""

    key: str
    properties: dict[str, str | bytes | int]
    headers: Headers = field(default_factory=dict)
    body: bytes = b""
    raw_headers: bytes | None = None

    def but(
        self, key: str | None = None, body: bytes | None = None, **properties: str | bytes | int | None
    ) -> Letter:
        """A copy with changed properties; None removes one."""
        kept = {**self.properties, **properties}
        changed = {name: value for name, value in kept.items() if value is not None}
        return replace(
            self, key=self.key if key is None else key, properties=changed, body=self.body if body is None else body
        )

    def with_headers(self, headers: Headers) -> Letter:
        """A copy with added or replaced headers."""
        return replace(self, headers={**self.headers, **headers})

    def without_header(self, name: str) -> Letter:
        """A copy without one header."""
        return replace(self, headers={key: value for key, value in self.headers.items() if key != name})

    def header_payload(self) -> bytes:
        """Payload of the header frame."""
        values = dict[str, str | bytes | int](self.properties)
        flags, parts = 0, []
        for position, name in enumerate(PROPERTIES):
            if name == "headers":
                part = table(self.headers) if self.raw_headers is None else self.raw_headers
            elif name not in values:
                continue
            elif name == "timestamp":
                part = struct.pack(">Q", int(values[name]) % 2**64)
            elif name in _BYTES:
                part = bytes((int(values[name]) % 256,))
            else:
                value = values[name]
                part = short(value if isinstance(value, str | bytes) else str(value))
            flags |= 1 << (15 - position)
            parts.append(part)
        return struct.pack(">HHQH", 60, 0, len(self.body), flags) + b"".join(parts)


def readable(header: bytes) -> tuple[dict[str, str], dict[str, str | int | float]] | None:
    """Properties and plain headers from a header frame's payload, or None if it is malformed."""
    with suppress(ValueError, IndexError, struct.error):
        return _properties(header)
    return None


def _properties(header: bytes) -> tuple[dict[str, str], dict[str, str | int | float]]:
    (flags,) = struct.unpack_from(">H", header, 12)
    at, found, headers = 14, dict[str, str](), dict[str, str | int | float]()
    for position, name in enumerate(PROPERTIES):
        if not flags & 1 << (15 - position):
            continue
        if name == "headers":
            (size,) = struct.unpack_from(">I", header, at)
            headers = _table(header[at + 4 : at + 4 + size])
            at += 4 + size
        elif name in _BYTES or name == "timestamp":
            at += 1 if name in _BYTES else 8
        else:
            size = header[at]
            found[name] = header[at + 1 : at + 1 + size].decode()
            at += 1 + size
    return found, headers


def _table(raw: bytes) -> dict[str, str | int | float]:
    at, found = 0, dict[str, str | int | float]()
    plain = {
        b"l": ">q",
        b"d": ">d",
        b"I": ">i",
        b"t": ">?",
        b"b": ">b",
        b"s": ">h",
        b"B": ">B",
        b"u": ">H",
        b"i": ">I",
    }
    plain |= {b"T": ">Q", b"f": ">f", b"L": ">q", b"U": ">h"}
    while at < len(raw):
        key = raw[at + 1 : at + 1 + raw[at]].decode()
        at += 1 + raw[at]
        tag = raw[at : at + 1]
        at += 1
        if tag in plain:
            (found[key],) = struct.unpack_from(plain[tag], raw, at)
            at += struct.calcsize(plain[tag])
        elif tag in {b"S", b"F", b"A", b"x"}:
            (size,) = struct.unpack_from(">I", raw, at)
            if tag == b"S":
                found[key] = raw[at + 4 : at + 4 + size].decode()
            at += 4 + size
        elif tag != b"V":
            raise ValueError(tag)
    return found


@dataclass(frozen=True)
class Received:
    """One received message: `header` is its header frame's payload, `tag` its delivery tag."""

    key: str
    header: bytes
    body: bytes
    tag: int = 0


KEEP = "keep"
"""Returned by a consumer for a message it does not ack yet; `Wire.give_back` requeues it."""


class Closed(Exception):
    """The broker closed the connection; carries its reason."""


class Wire:
    """One connection with one channel: publishes with confirms, consumes, and acks."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 5672
        self._login = unquote(parts.username or "guest"), unquote(parts.password or "guest")
        self._replies: asyncio.Queue[tuple[int, int, bytes]] = asyncio.Queue()
        self._consumers: dict[str, Callable[[Received], str | None]] = {}
        self._content: list[object] = []
        self._sent = 0
        self._open: deque[tuple[int, asyncio.Future[str]]] = deque()
        self._returned = 0
        self._reading: asyncio.Task[None] | None = None
        self.why = ""

    async def __aenter__(self) -> Wire:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port, limit=2**24)
        self._writer.write(b"AMQP\x00\x00\x09\x01")
        self._reading = asyncio.create_task(self._read())
        await self._reply(10, 10)
        user, password = self._login
        response = long(f"\0{user}\0{password}".encode())
        self._method(0, 10, 11, table({}) + short("PLAIN") + response + short("en_US"))
        await self._reply(10, 30)
        self._method(0, 10, 31, struct.pack(">HIH", 2047, FRAME_MAX, 0))
        self._method(0, 10, 40, short("/") + short("") + b"\0")
        await self._reply(10, 41)
        self._method(1, 20, 10, short(""))
        await self._reply(20, 11)
        self._method(1, 60, 10, struct.pack(">IHB", 0, _PREFETCH, 0))
        await self._reply(60, 11)
        self._method(1, 85, 10, b"\0")
        await self._reply(85, 11)
        return self

    async def __aexit__(self, *failure: object) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    @property
    def closed(self) -> bool:
        """Whether the broker has closed it."""
        return bool(self.why)

    async def declare(self, queue: str, *, exclusive: bool, arguments: Headers, durable: bool = False) -> None:
        """Declare a queue."""
        bits = durable << 1 | exclusive << 2
        self._method(1, 50, 10, b"\0\0" + short(queue) + bytes((bits,)) + table(arguments))
        await self._reply(50, 11)

    async def bind(self, queue: str, exchange: str, key: str) -> None:
        """Bind `queue` to `key`."""
        self._method(1, 50, 20, b"\0\0" + short(queue) + short(exchange) + short(key) + b"\0" + table({}))
        await self._reply(50, 21)

    async def consume(
        self, queue: str, tag: str, receive: Callable[[Received], str | None], priority: int = 0
    ) -> None:
        """Consume `queue` ahead of consumers with a lower priority."""
        self._consumers[tag] = receive
        arguments = table({"x-priority": priority})
        self._method(1, 60, 20, b"\0\0" + short(queue) + short(tag) + b"\0" + arguments)
        await self._reply(60, 21)

    async def cancel(self, tag: str) -> None:
        """Stop consuming. Messages that are kept stay unacked."""
        self._method(1, 60, 30, short(tag) + b"\0")
        await self._reply(60, 31)

    def give_back(self, tag: int) -> None:
        """Requeue a kept message."""
        self._method(1, 60, 120, struct.pack(">QB", tag, 2))

    async def publish(self, exchange: str, letter: Letter) -> asyncio.Future[str]:
        """Publish one message; its future becomes `accepted`, `refused`, `returned` or `closed`."""
        told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        if self.closed:
            told.set_result("closed")
            return told
        self._sent += 1
        self._open.append((self._sent, told))
        self._method(1, 60, 40, b"\0\0" + short(exchange) + short(letter.key) + b"\x01")
        self._frame(HEADER, 1, letter.header_payload())
        for at in range(0, len(letter.body), FRAME_ROOM):
            self._frame(BODY, 1, letter.body[at : at + FRAME_ROOM])
        with suppress(OSError):
            await self._writer.drain()
        return told

    def _method(self, channel: int, kind: int, method: int, payload: bytes) -> None:
        self._frame(METHOD, channel, struct.pack(">HH", kind, method) + payload)

    def _frame(self, kind: int, channel: int, payload: bytes) -> None:
        self._writer.write(struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce")

    async def _reply(self, kind: int, method: int) -> bytes:
        async with asyncio.timeout(30):
            got, name, payload = await self._replies.get()
        if (got, name) != (kind, method):
            raise Closed(self.why or f"expected {kind}.{method}, got {got}.{name}")
        return payload

    async def _read(self) -> None:
        try:
            while not self.closed:
                kind, _, size = struct.unpack(">BHI", await self._reader.readexactly(7))
                payload = (await self._reader.readexactly(size + 1))[:-1]
                if kind == METHOD:
                    self._on_method(payload)
                elif kind in {HEADER, BODY}:
                    self._on_content(kind, payload)
        except (OSError, asyncio.IncompleteReadError) as error:
            self.why = self.why or repr(error)
        finally:
            self.why = self.why or "closed"
            for _, told in self._open:
                if not told.done():
                    told.set_result("closed")
            self._open.clear()
            self._replies.put_nowait((0, 0, b""))

    def _on_method(self, payload: bytes) -> None:
        kind, method = struct.unpack_from(">HH", payload)
        rest = payload[4:]
        match kind, method:
            case (10, 50) | (20, 40):
                self.why = rest[3 : 3 + rest[2]].decode(errors="replace") or "closed"
            case 60, 80 | 120:
                tag, multiple = struct.unpack_from(">QB", rest)
                self._settled(tag, multiple=bool(multiple & 1), word="accepted" if method == 80 else "refused")
            case 60, 50 | 60:
                self._content = [method, rest]
            case _:
                self._replies.put_nowait((kind, method, rest))

    def _on_content(self, kind: int, payload: bytes) -> None:
        self._content.append(payload)
        header = self._content[2]
        assert isinstance(header, bytes)
        (size,) = struct.unpack_from(">Q", header, 4)
        parts = [part for part in self._content[3:] if isinstance(part, bytes)]
        if sum(map(len, parts)) < size:
            return
        method, told = self._content[0], self._content[1]
        assert isinstance(told, bytes)
        self._content = []
        if method == 50:
            self._returned += 1  # its confirm follows
            return
        tag = told[1 : 1 + told[0]].decode()
        rest = told[1 + told[0] + 9 :]
        key = rest[1 + rest[0] :]
        (number,) = struct.unpack_from(">Q", told, 1 + told[0])
        received = Received(key[1 : 1 + key[0]].decode(errors="replace"), header, b"".join(parts), number)
        if self._consumers[tag](received) != KEEP:
            self._method(1, 60, 80, struct.pack(">QB", number, 0))

    def _settled(self, tag: int, *, multiple: bool, word: str) -> None:
        for number, told in list(self._open) if not multiple else [each for each in self._open if each[0] <= tag]:
            if number == tag or multiple:
                if not told.done():
                    told.set_result("returned" if self._returned and number == tag else word)
                self._open.remove((number, told))
                if not multiple:
                    break
        self._returned = 0
