"""Limit how many segments run at once in one replica. Paused tasks hold no slot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Slots:
    """An awaitable counter of free slots. `freed` counts all slots released so far."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._free = limit
        self.freed = 0
        self._some_free, self._none_free = asyncio.Event(), asyncio.Event()
        self._some_free.set()
        self._others_done = asyncio.Event()

    @property
    def free(self) -> int:
        """Number of free slots."""
        return self._free

    def take(self, wanted: int) -> int:
        """Take up to `wanted` slots. Returns the number taken."""
        taken = max(min(wanted, self._free), 0)
        self._change(-taken)
        return taken

    def give_back(self, count: int = 1) -> None:
        """Release slots.

        A negative count takes slots even if none is free, because a repeated claim may own more
        tasks than there are free slots. Nothing else starts until the deficit is worked off.
        """
        self.freed += max(count, 0)
        self._change(count)

    def _change(self, count: int) -> None:
        self._free += count
        if self._free > 0:
            self._some_free.set()
            self._none_free.clear()
        else:
            self._some_free.clear()
            self._none_free.set()
        if self._free >= 0:
            self._others_done.set()

    async def some_free(self) -> None:
        """Wait for a free slot. Another caller may take it first."""
        await self._some_free.wait()

    async def none_free(self) -> None:
        """Wait until every slot is taken. A slot may be free again on return."""
        await self._none_free.wait()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Hold every slot during the block, which starts when only the caller's slot is in use."""
        others = self._limit - 1
        self.give_back(-others)
        try:
            while self._free < 0:
                self._others_done.clear()
                await self._others_done.wait()
            yield
        finally:
            self.give_back(others)
