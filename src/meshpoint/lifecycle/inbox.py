"""Deliveries that wait for the worker: what arrived while it was busy is taken together."""

from __future__ import annotations

import asyncio
from collections import deque

from meshpoint.model.messages import Header, Message
from meshpoint.ports.broker import Delivery

_LINGER = 3.0
"""Times what the last batch took."""
_LONGEST_LINGER = 0.01
"""Seconds."""


class Inbox:
    """A queue that hands out all it has, up to a limit."""

    def __init__(self) -> None:
        self._waiting: deque[Delivery] = deque()
        self._arrived = asyncio.Event()
        self._closed = False
        self._taken_at = 0.0
        self._of_tasks: set[str] = set()  # whom the last batch was for
        self._of_tasks_before: set[str] = set()

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
        self._of_tasks_before, self._of_tasks = self._of_tasks, {_asked_by(each.message) for each in taken}
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

    async def let_more_come(self) -> None:
        """Wait a little after a batch, for the next to be larger: it costs a round trip and a commit as a whole.

        Not while one task alone is at work: then the wait would be all its own.
        """
        if len(self._of_tasks | self._of_tasks_before) > 1:
            took = asyncio.get_running_loop().time() - self._taken_at
            await asyncio.sleep(min(_LINGER * took, _LONGEST_LINGER))


def _asked_by(message: Message) -> str:
    return str(message.headers.get(Header.PARENT_TASK, message.correlation_id))
