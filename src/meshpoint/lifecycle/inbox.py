"""Deliveries that wait for the worker: what arrived while it was busy is taken together."""

from __future__ import annotations

import asyncio
from collections import deque

from meshpoint.ports.broker import Delivery


class Inbox:
    """A queue that hands out all it has, up to a limit."""

    def __init__(self) -> None:
        self._waiting: deque[Delivery] = deque()
        self._arrived = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, delivery: Delivery) -> None:
        """Add one; called by the broker on the event loop."""
        self._waiting.append(delivery)
        self._arrived.set()

    def take(self, limit: int) -> list[Delivery]:
        """Up to `limit` deliveries, oldest first."""
        taken = [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]
        if not self._waiting:
            self._arrived.clear()
        return taken

    async def some(self) -> None:
        """Return when there is a delivery."""
        await self._arrived.wait()
