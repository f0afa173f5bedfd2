"""Keep one reply to a message: the first that decides, or else the latest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class ReplySlot(Generic[T]):
    """The next reply to one message. Several replicas may reply, each any number of times.

    Holds one reply, so that a flood takes no memory: the first that decides, or the latest.
    """

    def __init__(self, decides: Callable[[T], bool]) -> None:
        """Create an empty slot. `decides`: whether a reply ends the exchange."""
        self._decides = decides
        self._reply: T | None = None
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def add(self, reply: T) -> None:
        """Record a reply."""
        if self._reply is None or not self._decides(self._reply):
            self._reply = reply
            self._news.set()

    def close(self, error: Exception) -> None:
        """Make `take` raise `error` once the slot is empty."""
        self._error = error
        self._news.set()

    async def take(self) -> T:
        """Wait for a reply, and remove it."""
        while self._reply is None:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        reply, self._reply = self._reply, None
        return reply
