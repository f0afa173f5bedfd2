"""A connection to Redis that breaks at a chosen byte and counts round trips."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from urllib.parse import urlsplit


class ManualTimeouts:
    """Time limits that expire only when the test says so, however slow the machine is."""

    def __init__(self) -> None:
        self.expired = False

    def __call__(self, seconds: float) -> asyncio.Timeout:
        return asyncio.timeout(0 if self.expired else None)


NEVER = ManualTimeouts()


class RedisProxy:
    """Async context manager that forwards bytes to the server of `url`.

    `sent` counts the client's bytes. `round_trips` counts round trips: how often the client sent
    after the server had.
    """

    def __init__(self, url: str) -> None:
        self._parts = urlsplit(url)
        self._served: set[asyncio.Task[None]] = set()
        self._transports: set[asyncio.WriteTransport] = set()
        self._bytes_until_cut: int | None = None
        self._on_cut: Callable[[], Awaitable[None]] | None = None
        self._lose_answers = False
        self.sent = self.round_trips = 0

    async def __aenter__(self) -> RedisProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.close()
        for transport in self._transports:
            transport.abort()
        await asyncio.gather(*self._served, return_exceptions=True)

    @property
    def url(self) -> str:
        """The server's URL through this wire."""
        port = self._server.sockets[0].getsockname()[1]
        return self._parts._replace(netloc=f"127.0.0.1:{port}").geturl()

    def reset(self) -> None:
        """Reset the counts."""
        self.sent = self.round_trips = 0

    def cut_after(self, sent: int, on_cut: Callable[[], Awaitable[None]] | None = None) -> None:
        """Forward `sent` more bytes of the client, run `on_cut`, and break the connection.

        By then the server has executed everything it received.
        """
        self._bytes_until_cut, self._on_cut = sent, on_cut

    def lose_answers(self) -> None:
        """Break the connection as soon as the server responds."""
        self._lose_answers = True

    def mend(self) -> None:
        """Stop breaking connections."""
        self._bytes_until_cut, self._on_cut, self._lose_answers = None, None, False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._served.add(task)
        try:
            server_reader, server_writer = await asyncio.open_connection(
                self._parts.hostname, self._parts.port
            )
        except OSError:
            writer.transport.abort()
            return
        transports = {writer.transport, server_writer.transport}
        self._transports |= transports
        server_sent_last = asyncio.Event()  # set when the server was the last to send
        server_sent_last.set()
        response_task = asyncio.create_task(
            self._forward_responses(server_reader, writer, server_sent_last)
        )
        try:
            while chunk := await reader.read(65536):
                self.sent += len(chunk)
                if server_sent_last.is_set():
                    server_sent_last.clear()
                    self.round_trips += 1
                if self._bytes_until_cut is not None and len(chunk) > self._bytes_until_cut:
                    server_writer.write(chunk[: self._bytes_until_cut])
                    self._bytes_until_cut = 0
                    await self._break(server_reader, server_writer, response_task)
                    return
                if self._bytes_until_cut is not None:
                    self._bytes_until_cut -= len(chunk)
                server_writer.write(chunk)
                await server_writer.drain()
        except OSError:
            pass
        finally:
            for transport in transports:
                transport.abort()
            await asyncio.gather(response_task, return_exceptions=True)
            self._transports -= transports

    async def _break(
        self,
        server_reader: asyncio.StreamReader,
        server_writer: asyncio.StreamWriter,
        response_task: asyncio.Task[None],
    ) -> None:
        response_task.cancel()
        await asyncio.gather(response_task, return_exceptions=True)
        if self._on_cut is not None:
            await self._on_cut()
            return
        server_writer.write_eof()
        while await server_reader.read(65536):
            pass  # at its end the server has executed everything it received

    async def _forward_responses(
        self,
        server_reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        server_sent_last: asyncio.Event,
    ) -> None:
        with suppress(OSError):
            while (chunk := await server_reader.read(65536)) and not self._lose_answers:
                server_sent_last.set()
                writer.write(chunk)
        writer.transport.abort()
