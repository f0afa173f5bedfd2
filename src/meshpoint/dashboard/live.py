"""Sends pages that change to the browsers that show them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from time import monotonic

_INTERVAL = 0.5
"""Seconds between two looks at the database. Changes in between are sent together."""
_MAX_INTERVAL = 5.0
_SHARE = 10
"""A page that takes long is read at most for one part in so many of the time."""
_KEEP_ALIVE = 15.0
_STREAM_SECONDS = 900.0
"""A browser then connects again, which checks its session."""
MAX_STREAMS = 200


class Live:
    """Reads each page once for all browsers that show it."""

    def __init__(self) -> None:
        self._watches: dict[Hashable, _Watch] = {}
        self._streams = 0

    @property
    def is_full(self) -> bool:
        """Whether no further stream fits."""
        return self._streams >= MAX_STREAMS

    async def stream(
        self, key: Hashable, render: Callable[[], Awaitable[tuple[str, str]]]
    ) -> AsyncIterator[str]:
        """Yield events with the content of a page, now and whenever it changes.

        Args:
            key: Pages with the same key have the same content.
            render: Returns the content, and what is wrong, as HTML.
        """
        watch = self._watches.get(key)
        if watch is None:
            watch = self._watches[key] = _Watch(render)
        self._streams += 1
        watch.readers += 1
        try:
            async for event in _follow(watch):
                yield event
        finally:
            self._streams -= 1
            watch.readers -= 1
            if not watch.readers:
                watch.stop()
                if self._watches.get(key) is watch:
                    del self._watches[key]


class _Watch:
    """Reads one page again and again."""

    def __init__(self, render: Callable[[], Awaitable[tuple[str, str]]]) -> None:
        self.readers = 0
        self.content: tuple[str, str] | None = None
        self.changed = asyncio.Event()
        self._render = render
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """Read the page no longer."""
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            started = monotonic()
            content = await self._render()
            if content != self.content:
                self.content = content
                self.changed.set()
                self.changed = asyncio.Event()
            seconds = monotonic() - started
            await asyncio.sleep(min(max(_INTERVAL, _SHARE * seconds), _MAX_INTERVAL))


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
