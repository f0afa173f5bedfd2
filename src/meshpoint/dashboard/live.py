"""Sends pages that change to the browsers that show them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from time import monotonic

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

log = logging.getLogger(__name__)

_INTERVAL = 0.5
"""Seconds between two looks at the database. Changes in between are sent together."""
_MAX_INTERVAL = 5.0
_SHARE = 10
"""A page that takes long is read at most for one part in so many of the time."""
_KEEP_ALIVE = 15.0
_STREAM_SECONDS = 900.0
"""A browser then connects again, which checks its session."""
MAX_STREAMS = 200
MAX_STREAMS_OF_USER = 50
_MAX_READS = 3
"""Pages that are read at once. Other requests need connections to the database, too."""
_SEND_SECONDS = 30.0
"""A browser that takes nothing for so long loses its stream, which others may need."""


class Live:
    """Reads each page once for all browsers that show it."""

    def __init__(self) -> None:
        self._watches: dict[Hashable, _Watch] = {}
        self._streams: Counter[str] = Counter()
        self._reading = asyncio.Semaphore(_MAX_READS)

    def is_full(self, user: str) -> bool:
        """Whether no further stream fits: of all users, or of this one."""
        return self._streams.total() >= MAX_STREAMS or self._streams[user] >= MAX_STREAMS_OF_USER

    async def stream(
        self, key: Hashable, render: Callable[[], Awaitable[tuple[str, str]]], user: str
    ) -> AsyncIterator[str]:
        """Yield events with the content of a page, now and whenever it changes.

        Args:
            key: Pages with the same key have the same content.
            render: Returns the content, and what is wrong, as HTML.
            user: The name of the user who watches.
        """
        watch = self._watches.get(key)
        if watch is None:
            watch = self._watches[key] = _Watch(render, self._reading)
        self._streams[user] += 1
        watch.readers += 1
        try:
            async for event in _follow(watch):
                yield event
        finally:
            self._streams[user] -= 1
            self._streams += Counter()  # forgets users without streams
            watch.readers -= 1
            if not watch.readers:
                watch.stop()
                if self._watches.get(key) is watch:
                    del self._watches[key]


class _Watch:
    """Reads one page again and again."""

    def __init__(
        self, render: Callable[[], Awaitable[tuple[str, str]]], reading: asyncio.Semaphore
    ) -> None:
        self.readers = 0
        self.content: tuple[str, str] | None = None
        self.changed = asyncio.Event()
        self._render, self._reading = render, reading
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """Read the page no longer."""
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            async with self._reading:
                started = monotonic()
                content = await self._render()
                seconds = monotonic() - started
            if content != self.content:
                self.content = content
                self.changed.set()
                self.changed = asyncio.Event()
            await asyncio.sleep(min(max(_INTERVAL, _SHARE * seconds), _MAX_INTERVAL))


class EventStream(StreamingResponse):
    """Sends events to a browser until either side disconnects or the browser stops reading."""

    media_type = "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(_SEND_SECONDS):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_time)
        except TimeoutError:
            log.info("a browser took nothing for %.0f s; its stream ends", _SEND_SECONDS)


async def _follow(watch: _Watch) -> AsyncIterator[str]:
    end = monotonic() + _STREAM_SECONDS
    sent: tuple[str, str] | None = None
    yield "retry: 1000\n\n"
    while monotonic() < end:
        changed, content = watch.changed, watch.content
        if content is not None and content != sent:
            sent = content
            yield _event("problem", content[1]) + _event("content", content[0])
            continue
        try:
            await asyncio.wait_for(changed.wait(), _KEEP_ALIVE)
        except TimeoutError:
            yield ": still here\n\n"


def _event(name: str, content: str) -> str:
    lines = "".join(f"data: {line}\n" for line in content.replace("\r", "").split("\n"))
    return f"event: {name}\n{lines}\n"
