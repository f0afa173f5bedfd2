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
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, delivery: Delivery) -> None:
        """Add one; called by the broker on the event loop."""
        self._waiting.append(delivery)
        self._arrived.set()

    def take(self, limit: int) -> list[Delivery]:
        """Up to `limit` deliveries, oldest first."""
        taken = [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]
        if not (self._waiting or self._closed):
            self._arrived.clear()
        return taken

    def close(self) -> list[Delivery]:
        """End it: `some` has no more to wait for. What was left, to be given back."""
        self._closed = True
        self._arrived.set()
        return self.take(len(self))

    async def some(self) -> bool:
        """Return when there is a delivery: True; False once it is closed."""
        await self._arrived.wait()
        return not self._closed
