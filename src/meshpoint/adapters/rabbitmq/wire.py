"""The wire to the broker: what is written in one turn of the event loop leaves in one system call.

aiormq writes each frame by itself, and the broker reads it by itself.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from aiormq import Connection, SSLContextProvider, TransportFactory
from aiormq.exceptions import AMQPConnectionError
from yarl import URL


class WiredConnection(Connection):
    """A connection whose frames leave together."""

    FRAME_BUFFER_SIZE = 256
    """Frames that wait to be written; with aiormq's own 10, publishers of a large batch wait for each other."""

    def __init__(self, url: URL) -> None:
        super().__init__(url, transport_factory=_Wire())


class _Wire(TransportFactory):
    async def create(self, url: URL, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """What `asyncio.open_connection` makes, with a writer that gathers."""
        provider: SSLContextProvider = kwargs["ssl_context_provider"]
        context: ssl.SSLContext | None = await provider.get_context() if url.scheme == "amqps" else None
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        try:
            transport, _ = await loop.create_connection(lambda: protocol, url.host or "", url.port or 0, ssl=context)
        except OSError as error:
            raise AMQPConnectionError(*error.args) from error
        return reader, _GatheringWriter(transport, protocol, reader, loop)


class _GatheringWriter(asyncio.StreamWriter):
    def __init__(
        self,
        transport: asyncio.WriteTransport,
        protocol: asyncio.StreamReaderProtocol,
        reader: asyncio.StreamReader,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(transport, protocol, reader, loop)
        self._later = loop.call_soon
        self._gathered: list[bytes | bytearray | memoryview] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._gathered:
            self._later(self._send)
        self._gathered.append(data)

    async def drain(self) -> None:
        self._send()
        await super().drain()

    def write_eof(self) -> None:
        self._send()
        super().write_eof()

    def close(self) -> None:
        self._send()
        super().close()

    def _send(self) -> None:
        gathered, self._gathered = self._gathered, []
        if gathered and not self.transport.is_closing():  # one that closes has lost the rest too
            super().write(b"".join(gathered))
