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
MAX_BODY_PER_FRAME = FRAME_MAX - 8
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
_OCTET_PROPERTIES = {"delivery_mode", "priority"}


@dataclass(frozen=True)
class Raw:
    """A field value by tag and bytes, valid or not."""

    tag: bytes
    payload: bytes


Value = str | bytes | int | float | bool | None | Raw | dict[str | bytes, "Value"] | list["Value"]
Headers = dict[str | bytes, Value]


def _encode(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")


def encode_short(text: str | bytes) -> bytes:
    """Encode a short string, cut to AMQP's limit of 255 bytes."""
    raw = _encode(text)[:255]
    return bytes((len(raw),)) + raw


def encode_long(raw: bytes) -> bytes:
    """Encode a long string, or any other value with a 32-bit length."""
    return struct.pack(">I", len(raw)) + raw


def encode_field(value: Value) -> bytes:
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
            return b"S" + encode_long(_encode(value))
        case dict():
            return b"F" + encode_table(value)
        case list():
            return b"A" + encode_long(b"".join(encode_field(item) for item in value))
        case None:
            return b"V"


def encode_table(headers: Headers) -> bytes:
    """Encode a field table."""
    return encode_long(
        b"".join(encode_short(key) + encode_field(value) for key, value in headers.items())
    )


@dataclass(frozen=True)
class WireMessage:
    """One message on the wire.

    `properties` are by name; `raw_headers` replaces the header table.
    """

    key: str
    properties: dict[str, str | bytes | int]
    headers: Headers = field(default_factory=dict)
    body: bytes = b""
    raw_headers: bytes | None = None

    def with_properties(
        self,
        key: str | None = None,
        body: bytes | None = None,
        **properties: str | bytes | int | None,
    ) -> WireMessage:
        """A copy with changed properties; None removes one."""
        unchanged = {**self.properties, **properties}
        updated = {name: value for name, value in unchanged.items() if value is not None}
        return replace(
            self,
            key=self.key if key is None else key,
            properties=updated,
            body=self.body if body is None else body,
        )

    def with_headers(self, headers: Headers) -> WireMessage:
        """A copy with added or replaced headers."""
        return replace(self, headers={**self.headers, **headers})

    def without_header(self, name: str) -> WireMessage:
        """A copy without one header."""
        return replace(
            self, headers={key: value for key, value in self.headers.items() if key != name}
        )

    def header_payload(self) -> bytes:
        """Payload of the header frame."""
        values = dict[str, str | bytes | int](self.properties)
        flags, parts = 0, []
        for position, name in enumerate(PROPERTIES):
            if name == "headers":
                part = encode_table(self.headers) if self.raw_headers is None else self.raw_headers
            elif name not in values:
                continue
            elif name == "timestamp":
                part = struct.pack(">Q", int(values[name]) % 2**64)
            elif name in _OCTET_PROPERTIES:
                part = bytes((int(values[name]) % 256,))
            else:
                value = values[name]
                part = encode_short(value if isinstance(value, str | bytes) else str(value))
            flags |= 1 << (15 - position)
            parts.append(part)
        return struct.pack(">HHQH", 60, 0, len(self.body), flags) + b"".join(parts)


def decode_header(header: bytes) -> tuple[dict[str, str], dict[str, str | int | float]] | None:
    """Properties and plain headers from a header frame's payload, or None if it is malformed."""
    with suppress(ValueError, IndexError, struct.error):
        return _decode_properties(header)
    return None


def _decode_properties(header: bytes) -> tuple[dict[str, str], dict[str, str | int | float]]:
    (flags,) = struct.unpack_from(">H", header, 12)
    offset, decoded, headers = 14, dict[str, str](), dict[str, str | int | float]()
    for position, name in enumerate(PROPERTIES):
        if not flags & 1 << (15 - position):
            continue
        if name == "headers":
            (size,) = struct.unpack_from(">I", header, offset)
            headers = _decode_table(header[offset + 4 : offset + 4 + size])
            offset += 4 + size
        elif name in _OCTET_PROPERTIES or name == "timestamp":
            offset += 1 if name in _OCTET_PROPERTIES else 8
        else:
            size = header[offset]
            decoded[name] = header[offset + 1 : offset + 1 + size].decode()
            offset += 1 + size
    return decoded, headers


def _decode_table(raw: bytes) -> dict[str, str | int | float]:
    offset, decoded = 0, dict[str, str | int | float]()
    plain_headers = {
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
    plain_headers |= {b"T": ">Q", b"f": ">f", b"L": ">q", b"U": ">h"}
    while offset < len(raw):
        key = raw[offset + 1 : offset + 1 + raw[offset]].decode()
        offset += 1 + raw[offset]
        tag = raw[offset : offset + 1]
        offset += 1
        if tag in plain_headers:
            (decoded[key],) = struct.unpack_from(plain_headers[tag], raw, offset)
            offset += struct.calcsize(plain_headers[tag])
        elif tag in {b"S", b"F", b"A", b"x"}:
            (size,) = struct.unpack_from(">I", raw, offset)
            if tag == b"S":
                decoded[key] = raw[offset + 4 : offset + 4 + size].decode()
            offset += 4 + size
        elif tag != b"V":
            raise ValueError(tag)
    return decoded


@dataclass(frozen=True)
class ReceivedMessage:
    """One received message: `header` is its header frame's payload, `tag` its delivery tag."""

    key: str
    header: bytes
    body: bytes
    tag: int = 0


KEEP = "keep"
"""Returned by a consumer for a message it does not ack yet; `Wire.give_back` requeues it."""


class ConnectionClosedByBroker(Exception):
    """The broker closed the connection; carries its reason."""


class RawConnection:
    """One connection with one channel: publishes with confirms, consumes, and acks."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 5672
        self._login = unquote(parts.username or "guest"), unquote(parts.password or "guest")
        self._method_replies: asyncio.Queue[tuple[int, int, bytes]] = asyncio.Queue()
        self._calling = asyncio.Lock()  # replies carry no id, so only one call may be pending
        self._consumers: dict[str, Callable[[ReceivedMessage], str | None]] = {}
        self._incoming: list[object] = []
        self._sent = 0
        self._unconfirmed: deque[tuple[int, asyncio.Future[str]]] = deque()
        self._is_returned = 0
        self._reader_task: asyncio.Task[None] | None = None
        self.close_reason = ""

    async def __aenter__(self) -> RawConnection:
        self._reader, self._writer = await asyncio.open_connection(
            self._host, self._port, limit=2**24
        )
        self._writer.write(b"AMQP\x00\x00\x09\x01")
        self._reader_task = asyncio.create_task(self._read())
        await self._wait_for_reply(10, 10)
        user, password = self._login
        response = encode_long(f"\0{user}\0{password}".encode())
        self._method(
            0,
            10,
            11,
            encode_table({}) + encode_short("PLAIN") + response + encode_short("en_US"),
        )
        await self._wait_for_reply(10, 30)
        self._method(0, 10, 31, struct.pack(">HIH", 2047, FRAME_MAX, 0))
        self._method(0, 10, 40, encode_short("/") + encode_short("") + b"\0")
        await self._wait_for_reply(10, 41)
        self._method(1, 20, 10, encode_short(""))
        await self._wait_for_reply(20, 11)
        self._method(1, 60, 10, struct.pack(">IHB", 0, _PREFETCH, 0))
        await self._wait_for_reply(60, 11)
        self._method(1, 85, 10, b"\0")
        await self._wait_for_reply(85, 11)
        return self

    async def __aexit__(self, *failure: object) -> None:
        if self._reader_task is not None:
            self._reader_task.cancel()
            await asyncio.gather(self._reader_task, return_exceptions=True)
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    @property
    def closed(self) -> bool:
        """Whether the broker has closed it."""
        return bool(self.close_reason)

    async def declare(
        self, queue: str, *, exclusive: bool, arguments: Headers, durable: bool = False
    ) -> None:
        """Declare a queue."""
        bits = durable << 1 | exclusive << 2
        payload = b"\0\0" + encode_short(queue) + bytes((bits,)) + encode_table(arguments)
        await self._call(50, 10, payload, reply=11)

    async def bind(self, queue: str, exchange: str, key: str) -> None:
        """Bind `queue` to `key`."""
        payload = (
            b"\0\0"
            + encode_short(queue)
            + encode_short(exchange)
            + encode_short(key)
            + b"\0"
            + encode_table({})
        )
        await self._call(50, 20, payload, reply=21)

    async def consume(
        self,
        queue: str,
        tag: str,
        receive: Callable[[ReceivedMessage], str | None],
        priority: int = 0,
    ) -> None:
        """Consume `queue` ahead of consumers with a lower priority."""
        self._consumers[tag] = receive
        arguments = encode_table({"x-priority": priority})
        await self._call(
            60, 20, b"\0\0" + encode_short(queue) + encode_short(tag) + b"\0" + arguments, reply=21
        )

    async def cancel(self, tag: str) -> None:
        """Stop consuming. Messages that are kept stay unacked."""
        await self._call(60, 30, encode_short(tag) + b"\0", reply=31)

    def requeue(self, tag: int) -> None:
        """Requeue a kept message."""
        self._method(1, 60, 120, struct.pack(">QB", tag, 2))

    async def publish(self, exchange: str, message: WireMessage) -> asyncio.Future[str]:
        """Publish a message. Its future becomes `accepted`, `refused`, `returned` or `closed`."""
        confirmation: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        if self.closed:
            confirmation.set_result("closed")
            return confirmation
        self._sent += 1
        self._unconfirmed.append((self._sent, confirmation))
        self._method(
            1, 60, 40, b"\0\0" + encode_short(exchange) + encode_short(message.key) + b"\x01"
        )
        self._frame(HEADER, 1, message.header_payload())
        for offset in range(0, len(message.body), MAX_BODY_PER_FRAME):
            self._frame(BODY, 1, message.body[offset : offset + MAX_BODY_PER_FRAME])
        with suppress(OSError):
            await self._writer.drain()
        return confirmation

    def _method(self, channel: int, kind: int, method: int, payload: bytes) -> None:
        self._frame(METHOD, channel, struct.pack(">HH", kind, method) + payload)

    def _frame(self, kind: int, channel: int, payload: bytes) -> None:
        self._writer.write(struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce")

    async def _call(self, kind: int, method: int, payload: bytes, *, reply: int) -> None:
        async with self._calling:
            self._method(1, kind, method, payload)
            await self._wait_for_reply(kind, reply)

    async def _wait_for_reply(self, kind: int, method: int) -> bytes:
        async with asyncio.timeout(30):
            received, name, payload = await self._method_replies.get()
        if (received, name) != (kind, method):
            raise ConnectionClosedByBroker(
                self.close_reason or f"expected {kind}.{method}, got {received}.{name}"
            )
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
            self.close_reason = self.close_reason or repr(error)
        finally:
            self.close_reason = self.close_reason or "closed"
            for _, confirmation in self._unconfirmed:
                if not confirmation.done():
                    confirmation.set_result("closed")
            self._unconfirmed.clear()
            self._method_replies.put_nowait((0, 0, b""))

    def _on_method(self, payload: bytes) -> None:
        kind, method = struct.unpack_from(">HH", payload)
        rest = payload[4:]
        match kind, method:
            case (10, 50) | (20, 40):
                self.close_reason = rest[3 : 3 + rest[2]].decode(errors="replace") or "closed"
            case 60, 80 | 120:
                tag, multiple = struct.unpack_from(">QB", rest)
                self._confirm(
                    tag,
                    multiple=bool(multiple & 1),
                    result="accepted" if method == 80 else "refused",
                )
            case 60, 50 | 60:
                self._incoming = [method, rest]
            case _:
                self._method_replies.put_nowait((kind, method, rest))

    def _on_content(self, kind: int, payload: bytes) -> None:
        self._incoming.append(payload)
        header = self._incoming[2]
        assert isinstance(header, bytes)
        (size,) = struct.unpack_from(">Q", header, 4)
        parts = [part for part in self._incoming[3:] if isinstance(part, bytes)]
        if sum(map(len, parts)) < size:
            return
        method, method_payload = self._incoming[0], self._incoming[1]
        assert isinstance(method_payload, bytes)
        self._incoming = []
        if method == 50:
            self._is_returned += 1  # its confirm follows
            return
        tag = method_payload[1 : 1 + method_payload[0]].decode()
        rest = method_payload[1 + method_payload[0] + 9 :]
        key = rest[1 + rest[0] :]
        (number,) = struct.unpack_from(">Q", method_payload, 1 + method_payload[0])
        received = ReceivedMessage(
            key[1 : 1 + key[0]].decode(errors="replace"), header, b"".join(parts), number
        )
        if self._consumers[tag](received) != KEEP:
            self._method(1, 60, 80, struct.pack(">QB", number, 0))

    def _confirm(self, tag: int, *, multiple: bool, result: str) -> None:
        for number, confirmation in (
            list(self._unconfirmed)
            if not multiple
            else [unconfirmed for unconfirmed in self._unconfirmed if unconfirmed[0] <= tag]
        ):
            if number == tag or multiple:
                if not confirmation.done():
                    confirmation.set_result(
                        "returned" if self._is_returned and number == tag else result
                    )
                self._unconfirmed.remove((number, confirmation))
                if not multiple:
                    break
        self._is_returned = 0
