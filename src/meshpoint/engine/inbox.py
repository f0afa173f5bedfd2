"""Deliveries that wait for the worker: what arrived while it was busy is taken together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from meshpoint.model.messages import Address, Header, Message
from meshpoint.ports.broker import Delivery
from meshpoint.ports.clock import Clock

_LONGEST_WAIT = 0.02
"""Seconds."""
_BATCH_BYTES = 16 * 1024 * 1024
"""About as much is taken together: a statement of the database carries it."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """What was taken together: how many, and whose work it is."""

    count: int = 0
    tasks: frozenset[str] = frozenset()


class Turns:
    """Deliveries from several queues, handed out round-robin so that a long queue cannot starve the others."""

    def __init__(self) -> None:
        self._by_queue: dict[Address, deque[Delivery]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Delivery]:
        return (delivery for waiting in self._by_queue.values() for delivery in waiting)

    def append(self, delivery: Delivery) -> None:
        """Append a delivery behind the others from its queue."""
        self._by_queue.setdefault(delivery.address, deque()).append(delivery)
        self._count += 1

    def popleft(self) -> Delivery:
        """Remove and return the oldest delivery of the next queue."""
        address, waiting = next(iter(self._by_queue.items()))
        del self._by_queue[address]
        delivery = waiting.popleft()
        if waiting:
            self._by_queue[address] = waiting
        self._count -= 1
        return delivery

    def remove(self, delivery: Delivery) -> None:
        """Remove a delivery out of order."""
        waiting = self._by_queue[delivery.address]
        waiting.remove(delivery)
        if not waiting:
            del self._by_queue[delivery.address]
        self._count -= 1

    def clear(self) -> None:
        """Remove all deliveries."""
        self._by_queue.clear()
        self._count = 0


class Inbox:
    """A queue that hands out batches up to a limit: oldest first, or by `turns`. `clock` times the batches."""

    def __init__(self, clock: Clock, turns: Turns | None = None) -> None:
        self._clock = clock
        self._waiting: deque[Delivery] | Turns = deque() if turns is None else turns
        self._arrived, self._enough_arrived = asyncio.Event(), asyncio.Event()
        self._enough = 0
        self._closed = False
        self._taken_at = 0.0
        self._last, self._before = _Batch(), _Batch()

    def put(self, delivery: Delivery) -> None:
        """Add one; called by the broker on the event loop."""
        self._waiting.append(delivery)
        self._arrived.set()
        if len(self._waiting) >= self._enough:
            self._enough_arrived.set()

    def take(self, limit: int) -> list[Delivery]:
        """Take up to `limit` deliveries, fewer if they are large."""
        taken, size = list[Delivery](), 0
        while self._waiting and len(taken) < limit and size < _BATCH_BYTES:
            taken.append(self._waiting.popleft())
            size += len(taken[-1].message.body)
        self._taken_at = self._clock.monotonic()
        self._before, self._last = self._last, _Batch(len(taken), frozenset(_asker(each.message) for each in taken))
        if not (self._waiting or self._closed):
            self._arrived.clear()
        return taken

    def close(self) -> list[Delivery]:
        """End it: `some` has no more to wait for. What was left, to be given back."""
        self._closed = True
        self._arrived.set()
        self._enough_arrived.set()
        left = list(self._waiting)
        self._waiting.clear()
        return left

    @property
    def waiting(self) -> list[Delivery]:
        """Deliveries not taken yet."""
        return list(self._waiting)

    def withdraw(self, delivery: Delivery) -> None:
        """Remove one of `waiting`, to requeue it."""
        self._waiting.remove(delivery)
        if not (self._waiting or self._closed):
            self._arrived.clear()

    async def some(self) -> bool:
        """Return when there is a delivery: True; False once it is closed."""
        await self._arrived.wait()
        return not self._closed

    async def let_more_come(self, enough: int) -> None:
        """Wait a little after a batch, for the next to be larger, until there are `enough`.

        What comes together shares turns of the event loop, writes on the wire, and in a database the round trip and
        the commit. The longer, the more come: so many deliveries wait, and so many share what is saved. While one
        task alone is at work, nobody waits: the wait would be all its own.
        """
        if len(self._waiting) < enough and len(self._last.tasks | self._before.tasks) > 1:
            took = self._clock.monotonic() - self._taken_at
            count = (self._last.count + self._before.count) / 2
            if took:
                await self._enough_within(min(count * took, _LONGEST_WAIT), enough)

    async def _enough_within(self, seconds: float, enough: int) -> None:
        self._enough = enough
        self._enough_arrived.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._enough_arrived.wait()


def _asker(message: Message) -> str:
    return str(message.headers.get(Header.PARENT_TASK, message.correlation_id))
