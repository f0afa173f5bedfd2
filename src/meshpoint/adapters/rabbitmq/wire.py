"""The transport below aiormq: all writes of one event-loop iteration take one system call.

aiormq writes each frame separately, and the broker then reads each separately. Incoming data is
split into frames here, so that messages bypass the library (`frames.py`).
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from aiormq import SSLContextProvider, TransportFactory
from aiormq.exceptions import AMQPConnectionError
from yarl import URL

from meshpoint.adapters.rabbitmq.frames import CloseHandler, FrameHandler, FrameReader


class FrameTransport(TransportFactory):
    """Both directions of one connection.

    The library creates it to connect, and uses it for all I/O.
    """

    def __init__(self) -> None:
        self._frames: FrameReader | None = None
        self._writer: _BatchingWriter | None = None
        self._close_handler = CloseHandler()

    @property
    def close_reason(self) -> str:
        """The broker's reason for closing the connection; empty if it has not closed it."""
        return self._close_handler.reason

    async def create(self, url: URL, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Like `asyncio.open_connection`, but splits incoming frames and batches outgoing ones."""
        provider: SSLContextProvider = kwargs["ssl_context_provider"]
        context: ssl.SSLContext | None = await provider.get_context() if url.scheme == "amqps" else None
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        self._frames = frames = FrameReader(reader, loop)
        try:
            transport, _ = await loop.create_connection(lambda: frames, url.host or "", url.port or 0, ssl=context)
        except OSError as error:
            raise AMQPConnectionError(*error.args) from error
        frames.route(0, self._close_handler)
        self._writer = _BatchingWriter(transport, frames, reader, loop)
        return reader, self._writer

    def route(self, channel: int, handler: FrameHandler) -> None:
        """Route the frames of `channel` to `handler` until the broker has closed the channel."""
        if self._frames is not None:
            self._frames.route(channel, handler)

    def write(self, frames: bytes) -> None:
        """Send `frames` with all other writes of this loop iteration. Lost with the connection."""
        if self._writer is not None:
            self._writer.write(frames)

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
