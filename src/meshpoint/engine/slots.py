"""Limit how many segments run at once in one replica. Paused tasks hold no slot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Slots:
    """An awaitable counter of slots.

    Attributes:
        free: Number of free slots.
        released_count: Number of slots released so far.
        available: Set while a slot is free. Another waiter may take it first.
        all_taken: Set while no slot is free.
    """

    def __init__(self, limit: int) -> None:
        self._limit = self.free = limit
        self.released_count = 0
        self.available, self.all_taken = asyncio.Event(), asyncio.Event()
        self.available.set()
        self._deficit_cleared = asyncio.Event()

    def acquire(self, wanted: int) -> int:
        """Take up to `wanted` slots. Returns the number taken."""
        acquired = max(min(wanted, self.free), 0)
        self.release(-acquired)
        return acquired

    def release(self, count: int = 1) -> None:
        """Release slots.

        A negative count takes slots even if none is free, because a repeated claim may own more
        tasks than there are free slots. Nothing else starts until the deficit is worked off.
        """
        self.released_count += max(count, 0)
        self.free += count
        if self.free > 0:
            self.available.set()
            self.all_taken.clear()
        else:
            self.available.clear()
            self.all_taken.set()
        if self.free >= 0:
            self._deficit_cleared.set()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Hold every slot during the block, which starts when only the caller's slot is in use."""
        others = self._limit - 1
        self.release(-others)
        try:
            while self.free < 0:
                self._deficit_cleared.clear()
                await self._deficit_cleared.wait()
            yield
        finally:
            self.release(others)
