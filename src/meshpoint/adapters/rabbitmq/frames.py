"""AMQP frames by hand: those that every message needs, out and in."""

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
_CHANNEL_CLOSE = struct.pack(">HH", 20, 40)
_start = struct.Struct(">BHI")
_content_start = struct.Struct(">HHQ")
_tag = struct.Struct(">Q")
_settled = struct.Struct(">BHIHHQBB")


@dataclass(frozen=True, slots=True)
class Arrived:
    """One message as a consumer gets it; its header is the payload of the content header frame, not yet decoded."""

    consumer_tag: bytes
    delivery_tag: int
    redelivered: bool
    routing_key: bytes
    header: bytes
    body: bytes


@dataclass(frozen=True, slots=True)
class Returned:
    """A message that found no queue."""

    routing_key: bytes
    header: bytes


class Confirmed(Protocol):
    """Takes the broker's word on published messages."""

    def __call__(self, delivery_tag: int, multiple: bool, accepted: bool) -> None: ...


def body_room(frame_max: int) -> int:
    """Bytes of payload that fit into one frame of a connection with this `frame_max`; 0 there is no limit."""
    return max(_SMALLEST_FRAME_MAX, min(frame_max or _LARGEST_FRAME_MAX, _LARGEST_FRAME_MAX)) - _FRAME_OVERHEAD


def short_string(text: str) -> bytes:
    """A string of at most 255 bytes with its length.

    Raises:
        ValueError: it is longer, or it is no text that UTF-8 can write.
    """
    raw = text.encode()
    if len(raw) > 255:
        raise ValueError(f"a text of {len(raw)} bytes; AMQP allows 255 here")
    return bytes([len(raw)]) + raw


def published(channel: int, exchange: bytes, key: bytes, properties: bytes, body: bytes, room: int) -> bytes:
    """The frames of one mandatory `basic.publish`; `exchange` and `key` come with their lengths."""
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
    """A `basic.ack`."""
    return _settled.pack(METHOD, channel, 13, 60, 80, delivery_tag, multiple, 0xCE)


def nacked(channel: int, delivery_tag: int, requeue: bool) -> bytes:
    """A `basic.nack` of one delivery."""
    return _settled.pack(METHOD, channel, 13, 60, 120, delivery_tag, 2 * requeue, 0xCE)


class FrameTaker(Protocol):
    """What a channel of ours does with a frame; False leaves it to the library.

    `closed` says that the broker has closed the channel: a frame that is written after the library has answered ends
    the connection, and the library says that the channel is closed only some turns later.
    """

    @property
    def closed(self) -> bool: ...

    def __call__(self, kind: int, payload: bytes) -> bool: ...


class Deliveries:
    """Takes the frames of delivered messages on one channel, and hands each message on when it is complete."""

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
    """Takes confirms and returned messages on one channel."""

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


class _Incoming:
    """The content header and the body frames of one message, until they are complete."""

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
    """Splits what the broker sends into frames: those of messages go to their takers, the others to the library.

    The library gets no content header that its decoder cannot read: it would end the connection. It gets a
    heartbeat now and then instead of the frames that it does not see, as it counts a silent connection as lost.
    """

    def __init__(self, reader: asyncio.StreamReader, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(reader, loop=loop)
        self._library, self._time = reader, loop.time
        self._takers: dict[int, FrameTaker] = {}
        self._rest = b""
        self._raw = False
        self._fed_at = 0.0

    def take(self, channel: int, taker: FrameTaker) -> None:
        """Hand the frames of `channel` to `taker` from now on."""
        self._takers[channel] = taker

    def leave(self, channel: int, taker: FrameTaker) -> None:
        """Hand them to the library again, unless another taker has them by now."""
        if self._takers.get(channel) is taker:
            del self._takers[channel]

    def data_received(self, data: bytes) -> None:
        """Handle what has come."""
        if self._raw:
            self._library.feed_data(data)
            return
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        while end - at >= _FRAME_OVERHEAD:
            kind, channel, size = _start.unpack_from(data, at)
            if kind == ord("A"):  # "AMQP": the broker speaks another version
                self._raw = True
                break
            stop = at + size + _FRAME_OVERHEAD
            if stop > end:
                break
            if data[stop - 1] != _END[0]:  # the library says so, and gives the connection up
                self._raw = True
                break
            taker = self._takers.get(channel)
            if taker is None or not self._taken(taker, kind, data[at + 7 : stop - 1]):
                self._feed(kind, data[at:stop])
            at = stop
        self._rest = data[at:]
        if self._raw:
            self._library.feed_data(self._rest)
        elif at and self._time() - self._fed_at > _HEARTBEAT_EVERY:
            self._feed(0, _HEARTBEAT)

    def _taken(self, taker: FrameTaker, kind: int, payload: bytes) -> bool:
        try:
            return taker(kind, payload)
        except Exception:  # in our own code; the connection of all agents is not to end for it
            log.exception("a frame could not be handled")
            return True

    def _feed(self, kind: int, frame: bytes) -> None:
        self._fed_at = self._time()
        self._library.feed_data(readable(frame) if kind == HEADER else frame)


def readable(frame: bytes) -> bytes:
    """A content header frame as it is, or one with the same properties as text if the library cannot decode it."""
    payload = frame[7:-1]
    try:
        ContentHeader().unmarshal(payload)
    except Exception:
        content = decode(payload)
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
