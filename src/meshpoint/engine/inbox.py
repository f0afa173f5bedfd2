"""Queues of deliveries for the worker.

The worker takes the deliveries that arrived while it was busy as one batch.
"""

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
"""Maximum seconds to wait for a larger batch."""
_BATCH_BYTES = 16 * 1024 * 1024
"""Approximate size limit of a batch, small enough for one database statement."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """The size of a batch and the tasks it was for."""

    count: int = 0
    tasks: frozenset[str] = frozenset()


class Turns:
    """Deliveries from several queues, handed out round-robin.

    A long queue cannot starve the others.
    """

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
    """A queue that hands out batches up to a limit: oldest first, or by `turns`.

    `clock` times the batches.
    """

    def __init__(self, clock: Clock, turns: Turns | None = None) -> None:
        self._clock = clock
        self._waiting: deque[Delivery] | Turns = deque() if turns is None else turns
        self._arrived, self._enough_arrived = asyncio.Event(), asyncio.Event()
        self._enough = 0
        self._closed = False
        self._taken_at = 0.0
        self._last, self._before = _Batch(), _Batch()

    def put(self, delivery: Delivery) -> None:
        """Add a delivery. The broker calls this on the event loop."""
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
        """Close the inbox and end `some`. Returns the remaining deliveries, to be requeued."""
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
        """Remove a delivery from `waiting`, so that it can be requeued."""
        self._waiting.remove(delivery)
        if not (self._waiting or self._closed):
            self._arrived.clear()

    async def some(self) -> bool:
        """Wait for a delivery. Returns `False` once the inbox is closed."""
        await self._arrived.wait()
        return not self._closed

    async def let_more_come(self, enough: int) -> None:
        """Wait briefly, or until there are `enough` deliveries, so that the next batch is larger.

        The deliveries of a batch share event loop iterations, network writes, and the round trip
        and commit of the database. The wait grows with the size and duration of recent batches: a
        longer wait delays more deliveries, but also lets more of them share these costs. A task
        that is active alone never waits, because no other task would share the delay.
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
