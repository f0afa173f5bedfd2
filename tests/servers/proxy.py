"""A TCP proxy that cuts connections or goes silent, as networks do."""

from __future__ import annotations

import asyncio
from types import TracebackType
from urllib.parse import urlsplit


class Proxy:
    """Async context manager that listens on a free port and forwards to the server of `url`."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._parts = parts
        self._target = (parts.hostname or "127.0.0.1", parts.port or 5672)
        self._writers: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._responses_flow = asyncio.Event()
        self._responses_flow.set()
        self.connections = 0

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.close()
        self.cut()
        for pump in list(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    @property
    def url(self) -> str:
        """The server's URL through this proxy."""
        user, location, _ = self._parts.netloc.rpartition("@")
        return self._parts._replace(netloc=f"{user}{location}127.0.0.1:{self._port}").geturl()

    def cut(self) -> None:
        """Reset every connection. New ones are accepted."""
        for writer in list(self._writers):
            writer.transport.abort()

    def refuse(self) -> None:
        """Reset every connection, and accept no new ones."""
        self._server.close()
        self.cut()

    async def accept(self) -> None:
        """Accept connections again."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)

    def silence(self) -> None:
        """Keep the connections open but forward nothing."""
        self._flowing.clear()

    def hold_responses(self) -> None:
        """Hold back everything the server sends until `resume`."""
        self._responses_flow.clear()

    def resume(self) -> None:
        """Forward again, including everything held back."""
        self._flowing.set()
        self._responses_flow.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            to_reader, to_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, to_writer}
        directions = (reader, to_writer, self._flowing), (to_reader, writer, self._responses_flow)
        for source, sink, is_flowing in directions:
            pump = asyncio.create_task(self._pump(source, sink, is_flowing, {writer, to_writer}))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        is_flowing: asyncio.Event,
        writers: set[asyncio.StreamWriter],
    ) -> None:
        try:
            while chunk := await source.read(65536):
                await self._flowing.wait()
                await is_flowing.wait()
                sink.write(chunk)
                await sink.drain()
        except OSError:
            pass
        finally:
            self._writers -= writers
            for writer in writers:
                writer.close()
