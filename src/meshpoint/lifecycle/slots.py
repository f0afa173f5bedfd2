"""How many segments run at a time in one replica. Paused tasks hold no slot."""

from __future__ import annotations

import asyncio


class Slots:
    """A counter of free slots that can be waited for."""

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._some_free = asyncio.Event()
        self._some_free.set()

    @property
    def free(self) -> int:
        """Slots nobody holds."""
        return self._free

    def take(self, wanted: int) -> int:
        """Take up to `wanted` slots; how many were taken."""
        taken = max(min(wanted, self._free), 0)
        self.give_back(-taken)
        return taken

    def give_back(self, count: int = 1) -> None:
        """Return slots that were taken.

        A negative count takes slots that are not free: a claim that was repeated may own more tasks than it now
        has slots for. They are worked off before anything else begins.
        """
        self._free += count
        if self._free > 0:
            self._some_free.set()
        else:
            self._some_free.clear()

    async def some_free(self) -> None:
        """Return when there is a free slot; somebody else may take it first."""
        await self._some_free.wait()
