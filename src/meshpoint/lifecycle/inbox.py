"""Deliveries that wait for the worker: what arrived while it was busy is taken together."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from meshpoint.model.messages import Header, Message
from meshpoint.ports.broker import Delivery

_LONGEST_WAIT = 0.02
"""Seconds."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """What was taken together: how many, and whose work it is."""

    count: int = 0
    tasks: frozenset[str] = frozenset()


class Inbox:
    """A queue that hands out all it has, up to a limit."""

    def __init__(self) -> None:
        self._waiting: deque[Delivery] = deque()
        self._arrived = asyncio.Event()
        self._closed = False
        self._taken_at = 0.0
        self._last, self._before = _Batch(), _Batch()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, delivery: Delivery) -> None:
        """Add one; called by the broker on the event loop."""
        self._waiting.append(delivery)
        self._arrived.set()

    def take(self, limit: int) -> list[Delivery]:
        """Up to `limit` deliveries, oldest first."""
        taken = [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]
        self._taken_at = asyncio.get_running_loop().time()
        self._before, self._last = self._last, _Batch(len(taken), frozenset(_asker(each.message) for each in taken))
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

    async def let_more_come(self, enough: int) -> None:
        """Wait a little after a batch, for the next to be larger: each costs a round trip and a commit as a whole.

        The longer, the more come: so many deliveries wait, and so many share what is saved. While one task alone is
        at work, nobody waits: the wait would be all its own. Nor when `enough` wait already.
        """
        if len(self._waiting) < enough and len(self._last.tasks | self._before.tasks) > 1:
            took = asyncio.get_running_loop().time() - self._taken_at
            count = (self._last.count + self._before.count) / 2
            await asyncio.sleep(min(count * took, _LONGEST_WAIT))


def _asker(message: Message) -> str:
    return str(message.headers.get(Header.PARENT_TASK, message.correlation_id))
