"""How many segments run at a time in one replica. Paused tasks hold no slot."""

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
        """Slots nobody holds."""
        return self._free

    def take(self, wanted: int) -> int:
        """Take up to `wanted` slots; how many were taken."""
        taken = max(min(wanted, self._free), 0)
        self._change(-taken)
        return taken

    def give_back(self, count: int = 1) -> None:
        """Return slots that were taken.

        A negative count takes slots that are not free: a claim that was repeated may own more tasks than it now
        has slots for. They are worked off before anything else begins.
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
        """Return when there is a free slot; somebody else may take it first."""
        await self._some_free.wait()

    async def none_free(self) -> None:
        """Wait until every slot is taken; one may be free again on return."""
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
