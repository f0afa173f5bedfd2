"""Reading and writing of the AMQP frames that carry messages, and the transport below aiormq.

aiormq writes each frame separately, and the broker then reads each separately. Here, all writes of
one event-loop iteration take one system call. Incoming data is split into frames, so that messages
bypass the library.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import pamqp.frame
from aiormq import SSLContextProvider, TransportFactory
from aiormq.exceptions import AMQPConnectionError
from pamqp.commands import Basic
from pamqp.header import ContentHeader
from yarl import URL

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


_OnConfirm = Callable[[int, bool, bool], None]
"""Receives a delivery tag, whether it covers all earlier ones, and whether it is accepted."""


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
    channel: int,
    exchange: bytes,
    routing_key: bytes,
    properties: bytes,
    body: bytes,
    max_payload: int,
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


class _ContentHandler:
    """Assembles the method, content header and body frames of one message after another."""

    def __init__(self) -> None:
        self._method = b""
        self._header = b""
        self._parts: list[bytes] = []
        self._remaining = 0
        self.closed = False

    def _add(self, kind: int, payload: bytes) -> tuple[bytes, bytes, bytes] | None:
        """Add a header or body frame. Returns the method, header and body once complete."""
        if kind == HEADER:
            self._header, self._parts, self._remaining = payload, [], body_size(payload)
        else:
            self._parts.append(payload)
            self._remaining -= len(payload)
        if self._remaining > 0:
            return None
        content = self._method, self._header, b"".join(self._parts)
        self._method, self._header, self._parts = b"", b"", []
        return content


class DeliveryHandler(_ContentHandler):
    """Passes on each complete message that is delivered on one channel."""

    def __init__(self, on_delivery: Callable[[RawDelivery], None]) -> None:
        super().__init__()
        self._on_delivery = on_delivery

    def __call__(self, kind: int, payload: bytes) -> bool:
        if kind == METHOD:
            if payload[:4] != _DELIVER:
                self.closed = self.closed or payload[:4] == _CHANNEL_CLOSE
                return False
            self._method = payload
        elif not self._method:
            return False
        elif (content := self._add(kind, payload)) is not None:
            method, header, body = content
            at = 5 + method[4]
            key = at + 10 + method[at + 9]
            delivery = RawDelivery(
                consumer_tag=method[5:at],
                delivery_tag=_tag.unpack_from(method, at)[0],
                redelivered=method[at + 8] & 1 == 1,
                routing_key=method[key + 1 : key + 1 + method[key]],
                header=header,
                body=body,
            )
            self._on_delivery(delivery)
        return True


class ConfirmHandler(_ContentHandler):
    """Passes on the confirms and returned messages of one channel."""

    def __init__(
        self, on_confirm: _OnConfirm, on_return: Callable[[ReturnedMessage], None]
    ) -> None:
        super().__init__()
        self._on_confirm, self._on_return = on_confirm, on_return

    def __call__(self, kind: int, payload: bytes) -> bool:
        if kind == METHOD:
            which = payload[:4]
            if which in {_ACK, _NACK}:
                self._on_confirm(
                    _tag.unpack_from(payload, 4)[0], payload[12] & 1 == 1, which == _ACK
                )
                return True
            if which != _RETURN:
                self.closed = self.closed or which == _CHANNEL_CLOSE
                return False
            self._method = payload
        elif not self._method:
            return False
        elif (content := self._add(kind, payload)) is not None:
            method, header, _ = content
            at = 6  # skip the reply code, the reply text and the exchange
            for _ in range(2):
                at += 1 + method[at]
            self._on_return(ReturnedMessage(method[at + 1 : at + 1 + method[at]], header))
        return True


class _CloseHandler:
    """Records why the broker closes the connection, and leaves all frames to the library."""

    closed = False
    reason = ""

    def __call__(self, kind: int, payload: bytes) -> bool:
        # The method has a reply code, then a reply text.
        if kind == METHOD and payload[:4] == _CONNECTION_CLOSE:
            self.reason = payload[7 : 7 + payload[6]].decode(errors="replace")
        return False


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
            headers={
                "x-dead-reason": f"undecodable: {content.defect or 'unknown to the library'}"
            },
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


class FrameTransport(TransportFactory):
    """Both directions of one connection.

    The library creates it to connect, and uses it for all I/O.

    Attributes:
        route: like `FrameReader.route`, once connected.
        write: sends frames with all other writes of this loop iteration, once connected. They are
            lost with the connection.
    """

    route: Callable[[int, FrameHandler], None]
    write: Callable[[bytes], None]

    def __init__(self) -> None:
        self._writer: _BatchingWriter | None = None
        self._close_handler = _CloseHandler()

    @property
    def close_reason(self) -> str:
        """The broker's reason for closing the connection; empty if it has not closed it."""
        return self._close_handler.reason

    async def create(
        self, url: URL, **kwargs: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Like `asyncio.open_connection`, but splits incoming frames and batches outgoing ones."""
        provider: SSLContextProvider = kwargs["ssl_context_provider"]
        context: ssl.SSLContext | None = (
            await provider.get_context() if url.scheme == "amqps" else None
        )
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        frames = FrameReader(reader, loop)
        try:
            transport, _ = await loop.create_connection(
                lambda: frames, url.host or "", url.port or 0, ssl=context
            )
        except OSError as error:
            raise AMQPConnectionError(*error.args) from error
        frames.route(0, self._close_handler)
        self._writer = _BatchingWriter(transport, frames, reader, loop)
        self.route, self.write = frames.route, self._writer.write
        return reader, self._writer

    def abort(self) -> bool:
        """Drop the connection without sending pending frames.

        Returns `False` if no connection was opened.
        """
        if self._writer is None:
            return False
        self._writer.transport.abort()
        return True


class _BatchingWriter(asyncio.StreamWriter):
    def __init__(
        self,
        transport: asyncio.WriteTransport,
        protocol: asyncio.StreamReaderProtocol,
        reader: asyncio.StreamReader,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(transport, protocol, reader, loop)
        self._call_soon = loop.call_soon
        self._chunks: list[bytes | bytearray | memoryview] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._chunks:
            self._call_soon(self._flush)
        self._chunks.append(data)

    async def drain(self) -> None:
        self._flush()
        await super().drain()

    def write_eof(self) -> None:
        self._flush()
        super().write_eof()

    def close(self) -> None:
        self._flush()
        super().close()

    def _flush(self) -> None:
        chunks, self._chunks = self._chunks, []
        if chunks and not self.transport.is_closing():  # earlier data is then lost too
            super().write(b"".join(chunks))
