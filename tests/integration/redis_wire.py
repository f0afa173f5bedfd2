"""A connection to Redis that breaks at a chosen byte and counts round trips."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from urllib.parse import urlsplit


class Limits:
    """Time limits that expire only when the test says so, however slow the machine is."""

    def __init__(self) -> None:
        self.passed = False

    def __call__(self, seconds: float) -> asyncio.Timeout:
        return asyncio.timeout(0 if self.passed else None)


NEVER = Limits()


class Wire:
    """Async context manager that forwards bytes to the server of `url`.

    `sent` counts the client's bytes. `turns` counts round trips: how often the client sent after
    the server had.
    """

    def __init__(self, url: str) -> None:
        self._parts = urlsplit(url)
        self._served: set[asyncio.Task[None]] = set()
        self._transports: set[asyncio.WriteTransport] = set()
        self._left: int | None = None
        self._at_cut: Callable[[], Awaitable[None]] | None = None
        self._lose_answers = False
        self.sent = self.turns = 0

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
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
        self.sent = self.turns = 0

    def cut_after(self, sent: int, then: Callable[[], Awaitable[None]] | None = None) -> None:
        """Forward `sent` more bytes of the client, run `then`, and break the connection.

        By then the server has executed everything it received.
        """
        self._left, self._at_cut = sent, then

    def lose_answers(self) -> None:
        """Break the connection as soon as the server responds."""
        self._lose_answers = True

    def mend(self) -> None:
        """Stop breaking connections."""
        self._left, self._at_cut, self._lose_answers = None, None, False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._served.add(task)
        try:
            to_reader, to_writer = await asyncio.open_connection(self._parts.hostname, self._parts.port)
        except OSError:
            writer.transport.abort()
            return
        both = {writer.transport, to_writer.transport}
        self._transports |= both
        spoke = asyncio.Event()  # set when the server was the last to send
        spoke.set()
        back = asyncio.create_task(self._back(to_reader, writer, spoke))
        try:
            while chunk := await reader.read(65536):
                self.sent += len(chunk)
                if spoke.is_set():
                    spoke.clear()
                    self.turns += 1
                if self._left is not None and len(chunk) > self._left:
                    to_writer.write(chunk[: self._left])
                    self._left = 0
                    await self._broken(to_reader, to_writer, back)
                    return
                if self._left is not None:
                    self._left -= len(chunk)
                to_writer.write(chunk)
                await to_writer.drain()
        except OSError:
            pass
        finally:
            for transport in both:
                transport.abort()
            await asyncio.gather(back, return_exceptions=True)
            self._transports -= both

    async def _broken(
        self, to_reader: asyncio.StreamReader, to_writer: asyncio.StreamWriter, back: asyncio.Task[None]
    ) -> None:
        back.cancel()
        await asyncio.gather(back, return_exceptions=True)
        if self._at_cut is not None:
            await self._at_cut()
            return
        to_writer.write_eof()
        while await to_reader.read(65536):
            pass  # at its end the server has executed everything it received

    async def _back(
        self, to_reader: asyncio.StreamReader, writer: asyncio.StreamWriter, spoke: asyncio.Event
    ) -> None:
        with suppress(OSError):
            while (chunk := await to_reader.read(65536)) and not self._lose_answers:
                spoke.set()
                writer.write(chunk)
        writer.transport.abort()
