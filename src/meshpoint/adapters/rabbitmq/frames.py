"""Reading and writing of the AMQP frames that carry messages."""

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
_FRAME_END = b"\xce"
_HEARTBEAT = b"\x08\x00\x00\x00\x00\x00\x00\xce"
_HEARTBEAT_INTERVAL = 5.0
_FRAME_OVERHEAD = 8
_MIN_FRAME_MAX = 4096
_MAX_FRAME_MAX = 131072

_DELIVER, _RETURN, _ACK, _NACK = (struct.pack(">HH", 60, method) for method in (60, 50, 80, 120))
_CHANNEL_CLOSE, _CHANNEL_CLOSE_OK = (struct.pack(">HH", 20, method) for method in (40, 41))
_CHANNEL_CLOSE_METHODS = {_CHANNEL_CLOSE, _CHANNEL_CLOSE_OK}
"""The broker sends no more frames on the channel after these methods."""
_CONNECTION_CLOSE = struct.pack(">HH", 10, 50)
_frame_start = struct.Struct(">BHI")
_content_start = struct.Struct(">HHQ")
_tag = struct.Struct(">Q")
_settle_frame = struct.Struct(">BHIHHQBB")


@dataclass(frozen=True, slots=True)
class RawDelivery:
    """A delivered message. `header` is the undecoded payload of its content header frame."""

    consumer_tag: bytes
    delivery_tag: int
    redelivered: bool
    routing_key: bytes
    header: bytes
    body: bytes


@dataclass(frozen=True, slots=True)
class ReturnedMessage:
    """A message that the broker returned as unroutable."""

    routing_key: bytes
    header: bytes


class OnConfirm(Protocol):
    """Receives the broker's confirms and returns."""

    def __call__(self, delivery_tag: int, multiple: bool, accepted: bool) -> None: ...


def max_frame_payload(frame_max: int) -> int:
    """Payload bytes that fit into one frame. `frame_max` is the negotiated limit; 0 means none."""
    return max(_MIN_FRAME_MAX, min(frame_max or _MAX_FRAME_MAX, _MAX_FRAME_MAX)) - _FRAME_OVERHEAD


def short_string(text: str) -> bytes:
    """Encode a string of at most 255 bytes with its length prefix.

    Raises:
        ValueError: it is longer, or not encodable as UTF-8.
    """
    raw = text.encode()
    if len(raw) > 255:
        raise ValueError(f"a text of {len(raw)} bytes; AMQP allows 255 here")
    return bytes([len(raw)]) + raw


def encode_publish(
    channel: int, exchange: bytes, routing_key: bytes, properties: bytes, body: bytes, max_payload: int
) -> bytes:
    """Encode a mandatory `basic.publish`. `exchange` and `routing_key` have length prefixes."""
    size = 7 + len(exchange) + len(routing_key)
    parts = [
        _frame_start.pack(METHOD, channel, size),
        b"\x00\x3c\x00\x28\x00\x00",
        exchange,
        routing_key,
        b"\x01\xce",
        _frame_start.pack(HEADER, channel, 12 + len(properties)),
        _content_start.pack(60, 0, len(body)),
        properties,
        _FRAME_END,
    ]
    for at in range(0, len(body), max_payload):
        chunk = body[at : at + max_payload]
        parts += (_frame_start.pack(BODY, channel, len(chunk)), chunk, _FRAME_END)
    return b"".join(parts)


def encode_ack(channel: int, delivery_tag: int, multiple: bool) -> bytes:
    """Encode a `basic.ack`."""
    return _settle_frame.pack(METHOD, channel, 13, 60, 80, delivery_tag, multiple, 0xCE)


def encode_nack(channel: int, delivery_tag: int, requeue: bool) -> bytes:
    """Encode a `basic.nack` for one delivery."""
    return _settle_frame.pack(METHOD, channel, 13, 60, 120, delivery_tag, 2 * requeue, 0xCE)


class FrameHandler(Protocol):
    """Handles a channel's frames. Returns `False` to leave a frame to the library.

    `closed` is set once the broker has closed the channel. Writing a frame after the library has
    replied would close the connection, and the library reports the close only a few loop
    iterations later.
    """

    @property
    def closed(self) -> bool: ...

    def __call__(self, kind: int, payload: bytes) -> bool: ...


class DeliveryHandler:
    """Assembles delivered messages on one channel and passes on each complete one."""

    def __init__(self, on_delivery: Callable[[RawDelivery], None]) -> None:
        self._on_delivery = on_delivery
        self._assembler = _ContentAssembler()
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
        if self._assembler.add(kind, payload):
            method, self._method = self._method, b""
            self._on_delivery(self._parse(method, *self._assembler.pop()))
        return True

    @staticmethod
    def _parse(method: bytes, header: bytes, body: bytes) -> RawDelivery:
        at = 5 + method[4]
        redelivered = method[at + 8] & 1 == 1
        key = at + 10 + method[at + 9]
        return RawDelivery(
            method[5:at],
            _tag.unpack_from(method, at)[0],
            redelivered,
            method[key + 1 : key + 1 + method[key]],
            header,
            body,
        )


class ConfirmHandler:
    """Handles confirms and returned messages on one channel."""

    def __init__(self, on_confirm: OnConfirm, on_return: Callable[[ReturnedMessage], None]) -> None:
        self._on_confirm, self._on_return = on_confirm, on_return
        self._assembler = _ContentAssembler()
        self._method = b""
        self.closed = False

    def __call__(self, kind: int, payload: bytes) -> bool:
        if kind == METHOD:
            which = payload[:4]
            if which in {_ACK, _NACK}:
                self._on_confirm(_tag.unpack_from(payload, 4)[0], payload[12] & 1 == 1, which == _ACK)
                return True
            if which != _RETURN:
                self.closed = self.closed or which == _CHANNEL_CLOSE
                return False
            self._method = payload
            return True
        if not self._method:
            return False
        if self._assembler.add(kind, payload):
            method, self._method = self._method, b""
            header, _ = self._assembler.pop()
            at = 6  # skip the reply code, the reply text and the exchange
            for _ in range(2):
                at += 1 + method[at]
            self._on_return(ReturnedMessage(method[at + 1 : at + 1 + method[at]], header))
        return True


class CloseHandler:
    """Records why the broker closes the connection, and leaves all frames to the library."""

    closed = False
    reason = ""

    def __call__(self, kind: int, payload: bytes) -> bool:
        # The method has a reply code, then a reply text.
        if kind == METHOD and payload[:4] == _CONNECTION_CLOSE:
            self.reason = payload[7 : 7 + payload[6]].decode(errors="replace")
        return False


class _ContentAssembler:
    """Joins the content header and body frames of one message."""

    __slots__ = ("_header", "_parts", "_remaining")

    def __init__(self) -> None:
        self._header = b""
        self._remaining = 0
        self._parts: list[bytes] = []

    def add(self, kind: int, payload: bytes) -> bool:
        if kind == HEADER:
            self._header, self._parts, self._remaining = payload, [], body_size(payload)
        else:
            self._parts.append(payload)
            self._remaining -= len(payload)
        return self._remaining <= 0

    def pop(self) -> tuple[bytes, bytes]:
        header, parts = self._header, self._parts
        self._header, self._parts = b"", []
        return header, parts[0] if len(parts) == 1 else b"".join(parts)


class FrameReader(asyncio.StreamReaderProtocol):
    """Splits incoming data into frames for their handlers; all other frames go to the library.

    Content headers that the library cannot decode are replaced first, because they would close the
    connection. The library treats a silent connection as lost, so it gets heartbeats in place of
    the frames it does not see.
    """

    def __init__(self, reader: asyncio.StreamReader, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(reader, loop=loop)
        self._library, self._time = reader, loop.time
        self._handlers: dict[int, FrameHandler] = {}
        self._buffer = b""
        self._passthrough = False
        self._last_fed_at = 0.0

    def route(self, channel: int, handler: FrameHandler) -> None:
        """Route the frames of `channel` to `handler` until the broker has closed the channel.

        The route outlasts the library's own use of the channel: without it, the library would
        queue a few more frames and then stop reading.
        """
        self._handlers[channel] = handler

    def data_received(self, data: bytes) -> None:
        """Split `data` into frames and dispatch the complete ones."""
        if self._passthrough:
            self._library.feed_data(data)
            return
        if self._buffer:
            data = self._buffer + data
        at, end = 0, len(data)
        while end - at >= _FRAME_OVERHEAD:
            kind, channel, size = _frame_start.unpack_from(data, at)
            if kind == ord("A"):  # the broker speaks another protocol version
                self._passthrough = True
                break
            stop = at + size + _FRAME_OVERHEAD
            if stop > end:
                break
            # The library reports the error and closes the connection.
            if data[stop - 1] != _FRAME_END[0]:
                self._passthrough = True
                break
            handler = self._handlers.get(channel)
            if handler is None or not self._handle(handler, kind, data[at + 7 : stop - 1]):
                self._feed(kind, data[at:stop])
                if kind == METHOD and data[at + 7 : at + 11] in _CHANNEL_CLOSE_METHODS:
                    self._handlers.pop(channel, None)
            at = stop
        self._buffer = data[at:]
        if self._passthrough:
            self._library.feed_data(self._buffer)
        elif at and self._time() - self._last_fed_at > _HEARTBEAT_INTERVAL:
            self._feed(0, _HEARTBEAT)

    def _handle(self, handler: FrameHandler, kind: int, payload: bytes) -> bool:
        try:
            return handler(kind, payload)
        # A bug here must not close the connection, which all agents share.
        except Exception:
            log.exception("a frame could not be handled")
            return True

    def _feed(self, kind: int, frame: bytes) -> None:
        self._last_fed_at = self._time()
        self._library.feed_data(make_decodable(frame) if kind == HEADER else frame)


def make_decodable(frame: bytes) -> bytes:
    """Return `frame`, re-encoded with its readable properties if the library cannot decode it.

    How much nesting the library can decode depends on the stack depth, so `decode` checks that.
    """
    payload = frame[7:-1]
    content = decode(payload)
    if content.defect is not None or not _is_decodable(payload):
        properties = Basic.Properties(
            message_id=content.message_id and content.message_id[:60],
            correlation_id=content.correlation_id and content.correlation_id[:60],
            message_type=content.message_type and content.message_type[:60],
            app_id=content.app_id and content.app_id[:60],
            headers={"x-dead-reason": f"undecodable: {content.defect or 'unknown to the library'}"},
        )
        _, channel, _ = _frame_start.unpack_from(frame)
        return pamqp.frame.marshal(ContentHeader(0, body_size(payload), properties), channel)
    return frame


def _is_decodable(payload: bytes) -> bool:
    try:
        ContentHeader().unmarshal(payload)
    except Exception:
        return False
    return True
