"""Faults between a store and its PostgreSQL, at a point that the test chooses."""

from __future__ import annotations

import asyncio
import re
from enum import Enum, auto
from types import TracebackType
from urllib.parse import urlsplit

_PARSE_COMMIT = re.compile(rb"P....([^\0]*)\0(?:COMMIT|/\* commits: [^\0]*)\0", re.DOTALL)
"""Parse message of a statement that commits: COMMIT, or one marked as committing by itself."""


class LostPart(Enum):
    """The lost part of a commit."""

    REQUEST = auto()  # it never reaches the server
    RESPONSE = auto()  # the server has committed, but the client never learns of it


class CommitCuttingProxy:
    """Async context manager: a proxy to PostgreSQL that cuts connections at the next commits."""

    def __init__(self, url: str) -> None:
        self._parts = urlsplit(url)
        self._planned_losses: list[LostPart] = []
        self._clients: set[asyncio.Task[None]] = set()
        self.cuts = 0

    async def __aenter__(self) -> CommitCuttingProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.close()
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)

    @property
    def url(self) -> str:
        """The server's URL through this proxy, unencrypted."""
        user, location, _ = self._parts.netloc.rpartition("@")
        port = self._server.sockets[0].getsockname()[1]
        return self._parts._replace(
            netloc=f"{user}{location}127.0.0.1:{port}", query="ssl=disable"
        ).geturl()

    def cut_next(self, *lost: LostPart) -> None:
        """Cut at the next commits, one for each of `lost`."""
        self._planned_losses = list(lost)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        to_reader, to_writer = await asyncio.open_connection(
            self._parts.hostname, self._parts.port
        )
        responses = asyncio.create_task(_copy(to_reader, writer))
        try:
            await self._forward(reader, to_writer, to_reader, responses)
        finally:
            responses.cancel()
            await asyncio.gather(responses, return_exceptions=True)
            writer.transport.abort()
            to_writer.close()

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        to_writer: asyncio.StreamWriter,
        to_reader: asyncio.StreamReader,
        responses: asyncio.Task[None],
    ) -> None:
        commits: set[bytes] = set()
        while chunk := await reader.read(65536):
            prepared = _PARSE_COMMIT.findall(chunk)
            commits.update(prepared)
            executed = not prepared and any(
                re.search(rb"B....\0" + name + rb"\0", chunk, re.DOTALL) for name in commits
            )
            if not self._planned_losses or not executed:
                to_writer.write(chunk)
                continue
            lost, self.cuts = self._planned_losses.pop(0), self.cuts + 1
            if lost is LostPart.RESPONSE:
                responses.cancel()
                await asyncio.gather(responses, return_exceptions=True)
                to_writer.write(chunk)
                await to_reader.read(1)  # the server has responded, so it has committed
            return


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while chunk := await source.read(65536):
        sink.write(chunk)
    sink.close()
