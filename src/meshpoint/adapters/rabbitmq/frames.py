"""Reads and writes the AMQP frames on the path of every message."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import pamqp.frame
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from meshpoint.adapters.rabbitmq.content import body_size, decode

log = logging.getLogger(__name__)

METHOD, HEADER, BODY = 1, 2, 3
_END = b"\xce"
_HEARTBEAT = b"\x08\x00\x00\x00\x00\x00\x00\xce"
_HEARTBEAT_EVERY = 5.0
_FRAME_OVERHEAD = 8
_SMALLEST_FRAME_MAX = 4096
_LARGEST_FRAME_MAX = 131072

_DELIVER, _RETURN, _ACK, _NACK = (struct.pack(">HH", 60, method) for method in (60, 50, 80, 120))
_CHANNEL_CLOSE, _CHANNEL_CLOSE_OK = (struct.pack(">HH", 20, method) for method in (40, 41))
_LAST = {_CHANNEL_CLOSE, _CHANNEL_CLOSE_OK}
"""The broker sends nothing more on the channel after these."""
_CONNECTION_CLOSE = struct.pack(">HH", 10, 50)
_start = struct.Struct(">BHI")
_content_start = struct.Struct(">HHQ")
_tag = struct.Struct(">Q")
_settled = struct.Struct(">BHIHHQBB")


@dataclass(frozen=True, slots=True)
class Arrived:
    """A delivered message; its header is the undecoded payload of the content header frame."""

    consumer_tag: bytes
    delivery_tag: int
    redelivered: bool
    routing_key: bytes
    header: bytes
    body: bytes


@dataclass(frozen=True, slots=True)
class Returned:
    """A message that the broker returned as unroutable."""

    routing_key: bytes
    header: bytes


class Confirmed(Protocol):
    """Receives the broker's confirms and returns."""

    def __call__(self, delivery_tag: int, multiple: bool, accepted: bool) -> None: ...


def body_room(frame_max: int) -> int:
    """Payload bytes that fit into one frame; `frame_max` is the negotiated limit, 0 means none."""
    return max(_SMALLEST_FRAME_MAX, min(frame_max or _LARGEST_FRAME_MAX, _LARGEST_FRAME_MAX)) - _FRAME_OVERHEAD


def short_string(text: str) -> bytes:
    """Encode a string of at most 255 bytes with its length prefix.

    Raises:
        ValueError: it is longer, or cannot be encoded as UTF-8.
    """
    raw = text.encode()
    if len(raw) > 255:
        raise ValueError(f"a text of {len(raw)} bytes; AMQP allows 255 here")
    return bytes([len(raw)]) + raw


def published(channel: int, exchange: bytes, key: bytes, properties: bytes, body: bytes, room: int) -> bytes:
    """Encode one mandatory `basic.publish`; `exchange` and `key` include their length prefixes."""
    size = 7 + len(exchange) + len(key)
    parts = [
        _start.pack(METHOD, channel, size),
        b"\x00\x3c\x00\x28\x00\x00",
        exchange,
        key,
        b"\x01\xce",
        _start.pack(HEADER, channel, 12 + len(properties)),
        _content_start.pack(60, 0, len(body)),
        properties,
        _END,
    ]
    for at in range(0, len(body), room):
        chunk = body[at : at + room]
        parts += (_start.pack(BODY, channel, len(chunk)), chunk, _END)
    return b"".join(parts)


def acked(channel: int, delivery_tag: int, multiple: bool) -> bytes:
    """Encode a `basic.ack`."""
    return _settled.pack(METHOD, channel, 13, 60, 80, delivery_tag, multiple, 0xCE)


def nacked(channel: int, delivery_tag: int, requeue: bool) -> bytes:
    """Encode a `basic.nack` for one delivery."""
    return _settled.pack(METHOD, channel, 13, 60, 120, delivery_tag, 2 * requeue, 0xCE)


class FrameTaker(Protocol):
    """Handles a channel's frames; returns `False` to leave a frame to the library.

    `closed` is set when the broker has closed the channel. Writing another frame after the library's reply would
    close the connection, and the library itself reports the close only a few loop iterations later.
    """

    @property
    def closed(self) -> bool: ...

    def __call__(self, kind: int, payload: bytes) -> bool: ...


class Deliveries:
    """Assembles delivered messages on one channel and passes on each complete one."""

    def __init__(self, take: Callable[[Arrived], None]) -> None:
        self._take = take
        self._content = _Incoming()
        self._method = b""
        self.closed = False

    def __call__(self, kind: int, payload: bytes) -> bool:
        if kind == METHOD:
            if payload[:4] != _DELIVER:
                self.closed = self.closed or payload[:4] == _CHANNEL_CLOSE
                return False
            self._method = payload
            return True
        if not self._method:
            return False
        if self._content.complete(kind, payload):
            method, self._method = self._method, b""
            self._take(self._arrived(method, *self._content.taken()))
        return True

    @staticmethod
    def _arrived(method: bytes, header: bytes, body: bytes) -> Arrived:
        at = 5 + method[4]
        redelivered = method[at + 8] & 1 == 1
        key = at + 10 + method[at + 9]
        return Arrived(
            method[5:at],
            _tag.unpack_from(method, at)[0],
            redelivered,
            method[key + 1 : key + 1 + method[key]],
            header,
            body,
        )


class Confirms:
    """Handles confirms and returned messages on one channel."""

    def __init__(self, confirmed: Confirmed, returned: Callable[[Returned], None]) -> None:
        self._confirmed, self._returned = confirmed, returned
        self._content = _Incoming()
        self._method = b""
        self.closed = False

    def __call__(self, kind: int, payload: bytes) -> bool:
        if kind == METHOD:
            which = payload[:4]
            if which in {_ACK, _NACK}:
                self._confirmed(_tag.unpack_from(payload, 4)[0], payload[12] & 1 == 1, which == _ACK)
                return True
            if which != _RETURN:
                self.closed = self.closed or which == _CHANNEL_CLOSE
                return False
            self._method = payload
            return True
        if not self._method:
            return False
        if self._content.complete(kind, payload):
            method, self._method = self._method, b""
            header, _ = self._content.taken()
            at = 6  # after the reply code: the reply text, the exchange, the routing key
            for _ in range(2):
                at += 1 + method[at]
            self._returned(Returned(method[at + 1 : at + 1 + method[at]], header))
        return True


class Farewell:
    """Reads why the broker closes the connection, and leaves every frame to the library."""

    closed = False
    reason = ""

    def __call__(self, kind: int, payload: bytes) -> bool:
        if kind == METHOD and payload[:4] == _CONNECTION_CLOSE:  # then the reply code and the reply text
            self.reason = payload[7 : 7 + payload[6]].decode(errors="replace")
        return False


class _Incoming:
    """Collects the content header and body frames of one message."""

    __slots__ = ("_header", "_missing", "_parts")

    def __init__(self) -> None:
        self._header = b""
        self._missing = 0
        self._parts: list[bytes] = []

    def complete(self, kind: int, payload: bytes) -> bool:
        if kind == HEADER:
            self._header, self._parts, self._missing = payload, [], body_size(payload)
        else:
            self._parts.append(payload)
            self._missing -= len(payload)
        return self._missing <= 0

    def taken(self) -> tuple[bytes, bytes]:
        header, parts = self._header, self._parts
        self._header, self._parts = b"", []
        return header, parts[0] if len(parts) == 1 else b"".join(parts)


class FrameReader(asyncio.StreamReaderProtocol):
    """Splits incoming data into frames: message frames go to their takers, all others to the library.

    Content headers that the library cannot decode are replaced first, because they would close the connection. The
    library treats a silent connection as lost, so it gets heartbeats in place of the frames it does not see.
    """

    def __init__(self, reader: asyncio.StreamReader, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(reader, loop=loop)
        self._library, self._time = reader, loop.time
        self._takers: dict[int, FrameTaker] = {}
        self._rest = b""
        self._raw = False
        self._fed_at = 0.0

    def take(self, channel: int, taker: FrameTaker) -> None:
        """Route the frames of `channel` to `taker` until the broker has closed it.

        Also when the library has given the channel up: it would queue a few frames more and then stop reading.
        """
        self._takers[channel] = taker

    def data_received(self, data: bytes) -> None:
        """Process received bytes."""
        if self._raw:
            self._library.feed_data(data)
            return
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        while end - at >= _FRAME_OVERHEAD:
            kind, channel, size = _start.unpack_from(data, at)
            if kind == ord("A"):  # "AMQP": the broker speaks a different protocol version
                self._raw = True
                break
            stop = at + size + _FRAME_OVERHEAD
            if stop > end:
                break
            if data[stop - 1] != _END[0]:  # the library reports it and closes the connection
                self._raw = True
                break
            taker = self._takers.get(channel)
            if taker is None or not self._taken(taker, kind, data[at + 7 : stop - 1]):
                self._feed(kind, data[at:stop])
                if kind == METHOD and data[at + 7 : at + 11] in _LAST:
                    self._takers.pop(channel, None)
            at = stop
        self._rest = data[at:]
        if self._raw:
            self._library.feed_data(self._rest)
        elif at and self._time() - self._fed_at > _HEARTBEAT_EVERY:
            self._feed(0, _HEARTBEAT)

    def _taken(self, taker: FrameTaker, kind: int, payload: bytes) -> bool:
        try:
            return taker(kind, payload)
        except Exception:  # a defect in our own code must not close the connection that all agents share
            log.exception("a frame could not be handled")
            return True

    def _feed(self, kind: int, frame: bytes) -> None:
        self._fed_at = self._time()
        self._library.feed_data(readable(frame) if kind == HEADER else frame)


def readable(frame: bytes) -> bytes:
    """Return the frame unchanged, or a re-encoded one with readable properties if the library cannot decode it.

    The nesting that the library can decode varies with the depth of the stack, so `decode` judges that.
    """
    payload = frame[7:-1]
    content = decode(payload)
    if content.defect is not None or not _is_readable(payload):
        properties = Basic.Properties(
            message_id=content.message_id and content.message_id[:60],
            correlation_id=content.correlation_id and content.correlation_id[:60],
            message_type=content.message_type and content.message_type[:60],
            app_id=content.app_id and content.app_id[:60],
            headers={"x-dead-reason": f"undecodable: {content.defect or 'unknown to the library'}"},
        )
        _, channel, _ = _start.unpack_from(frame)
        return pamqp.frame.marshal(ContentHeader(0, body_size(payload), properties), channel)
    return frame


def _is_readable(payload: bytes) -> bool:
    try:
        ContentHeader().unmarshal(payload)
    except Exception:
        return False
    return True
