"""Queues of deliveries for the worker.

The worker takes the deliveries that arrived while it was busy as one batch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from meshpoint.model.messages import Address, Header
from meshpoint.ports.broker import Delivery
from meshpoint.ports.clock import Clock

_MAX_WAIT_SECONDS = 0.002
"""Maximum seconds to wait for a larger batch.

A longer wait saves less time in the database than it costs: it is on the path of every task.
"""
_MAX_BATCH_BYTES = 16 * 1024 * 1024
"""Approximate size limit of a batch, small enough for one database statement."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """The size of a batch and the tasks it was for."""

    count: int
    tasks: set[str]


class Inbox:
    """Hands out batches up to a limit, round-robin over the source queues, oldest first.

    So a long queue cannot starve the others. `clock` times the batches.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_queue: dict[Address, deque[Delivery]] = {}
        self._count = 0
        self._arrived, self._target_reached = asyncio.Event(), asyncio.Event()
        self._target_count = 0
        self._closed = False
        self._taken_at = 0.0
        self._last_batch = self._previous_batch = _Batch(0, set())

    def put(self, delivery: Delivery) -> None:
        """Add a delivery. The broker calls this on the event loop."""
        self._by_queue.setdefault(delivery.address, deque()).append(delivery)
        self._count += 1
        self._arrived.set()
        if self._count >= self._target_count:
            self._target_reached.set()

    def take_batch(self, limit: int) -> list[Delivery]:
        """Take up to `limit` deliveries, fewer if they are large."""
        batch, tasks, size = list[Delivery](), set[str](), 0
        while self._by_queue and len(batch) < limit and size < _MAX_BATCH_BYTES:
            address, deliveries = next(iter(self._by_queue.items()))
            del self._by_queue[address]
            delivery = deliveries.popleft()
            if deliveries:  # behind the other queues
                self._by_queue[address] = deliveries
            batch.append(delivery)
            message = delivery.message
            tasks.add(str(message.headers.get(Header.PARENT_TASK, message.correlation_id)))
            size += len(message.body)
        self._count -= len(batch)
        self._taken_at = self._clock.monotonic()
        self._previous_batch, self._last_batch = self._last_batch, _Batch(len(batch), tasks)
        if not (self._count or self._closed):
            self._arrived.clear()
        return batch

    def close(self) -> list[Delivery]:
        """Close the inbox and end `wait_for_batch`. Returns the deliveries to be requeued."""
        self._closed = True
        self._arrived.set()
        self._target_reached.set()
        remaining = self.waiting
        self._by_queue.clear()
        self._count = 0
        return remaining

    @property
    def waiting(self) -> list[Delivery]:
        """Deliveries not taken yet."""
        return [delivery for deliveries in self._by_queue.values() for delivery in deliveries]

    def withdraw(self, delivery: Delivery) -> None:
        """Remove a delivery from `waiting`, so that it can be requeued."""
        deliveries = self._by_queue[delivery.address]
        deliveries.remove(delivery)
        if not deliveries:
            del self._by_queue[delivery.address]
        self._count -= 1
        if not (self._count or self._closed):
            self._arrived.clear()

    async def wait_for_batch(self, target_count: int) -> bool:
        """Wait briefly for `target_count` deliveries, then for at least one.

        The deliveries of a batch share event loop iterations, network writes, and the round trip
        and commit of the database. The brief wait grows with the size and duration of recent
        batches: a longer wait delays more deliveries, but also lets more of them share these
        costs. A task that is active alone skips it, because no other task would share the delay.

        Returns:
            `False` once the inbox is closed.
        """
        last, previous = self._last_batch, self._previous_batch
        if (
            self._count < target_count
            and len(last.tasks | previous.tasks) > 1
            and (elapsed := self._clock.monotonic() - self._taken_at)
        ):
            timeout = min((last.count + previous.count) / 2 * elapsed, _MAX_WAIT_SECONDS)
            self._target_count = target_count
            self._target_reached.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._target_reached.wait()
        await self._arrived.wait()
        return not self._closed
