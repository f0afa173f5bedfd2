"""Controls how many requests this replica consumes, and from which queues of its agent.

Three rules:

- Requests made inside another task have their own queue. Its prefetch grows without limit with the
nested tasks that wait in memory, so the requests that a waiting task depends on can always
arrive.
- All other tasks that wait in memory are limited by `max_in_memory`. The same limit holds
separately for ended tasks whose reply waits for its address.
- A replica whose slots stay taken does not keep requests waiting: it stops taking them and
requeues, once each, the requests it could not start, so that a replica with a free slot can take
them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from meshpoint.engine.background import wait_for_first
from meshpoint.engine.inbox import Inbox
from meshpoint.engine.live_tasks import LiveTasks
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.segment import Segment
from meshpoint.engine.unacked import UnackedKind
from meshpoint.errors import Unavailable
from meshpoint.model.events import Step
from meshpoint.model.messages import MAX_SHARDS, Address, nested_queue, request_shard
from meshpoint.ports.broker import Delivery, Subscription

_BUSY_THRESHOLD = timedelta(milliseconds=100)
"""Minimum time before requests go to other replicas.

All slots must be taken, or a request must have waited for a slot, for this long.
"""
_SHARD_SEARCH_INTERVAL = timedelta(minutes=5)
"""Interval of the search for new request queues.

RabbitMQ logs an error for each lookup of a missing queue.
"""
_RESIZE_INTERVAL = timedelta(milliseconds=20)


@dataclass(slots=True, eq=False)
class _Queue:
    """One request queue, and its limit of unacked requests."""

    address: Address
    subscription: Subscription
    limit: int
    waiting_capacity: int = 0
    """The part of `limit` for requests whose tasks wait in memory."""


class RequestConsumer:
    """Consumes an agent's requests through `subscriptions` into `inbox`.

    `acquire_ready` resumes ready tasks, which get free slots before new requests.
    """

    def __init__(
        self,
        runtime: ReplicaRuntime,
        tasks: LiveTasks,
        acquire_ready: Callable[[], Awaitable[None]],
    ) -> None:
        self._runtime = runtime
        self._tasks = tasks
        self._acquire_ready = acquire_ready
        self.inbox = Inbox(runtime.clock)
        self.subscriptions: dict[str, Subscription] = {}
        self._queues: dict[str, _Queue] = {}
        self._shard_count = 0
        self._is_busy = False
        self._is_memory_full = False
        self._requests_requeued = asyncio.Event()
        self._started_count = 0
        self._awaiting_slot: Delivery | None = None

    @property
    def subscription_names(self) -> list[str]:
        """The names of the subscriptions."""
        return list(self._queues)

    async def start(self) -> None:
        """Start consuming the known request queues."""
        await self._consume("nested", nested_queue(self._runtime.agent))
        for shard in range(self._runtime.options.request_shards):
            await self._consume_shard(shard)
        await self.discover_shards()

    async def discover_shards(self) -> None:
        """Also consume the queues that replicas with a larger `request_shards` have declared."""
        while (
            self._shard_count > self._runtime.options.request_shards
            and not await self._shard_exists(self._shard_count - 1)
        ):
            self._shard_count -= 1
            await self._stop_consuming_shard(self._shard_count)
        while self._shard_count < MAX_SHARDS and await self._shard_exists(self._shard_count):
            await self._consume_shard(self._shard_count)

    async def _shard_exists(self, shard: int) -> bool:
        return (
            await self._runtime.broker.depth(request_shard(self._runtime.agent, shard)) is not None
        )

    async def _stop_consuming_shard(self, shard: int) -> None:
        del self._queues[_subscription_name(shard)]
        await self.subscriptions.pop(_subscription_name(shard)).cancel()

    async def watch_shards(self) -> None:
        """Look for additional request queues periodically, until cancelled."""
        while True:
            await self._runtime.clock.sleep(_SHARD_SEARCH_INTERVAL)
            await self.discover_shards()

    async def _consume_shard(self, shard: int) -> None:
        await self._consume(_subscription_name(shard), request_shard(self._runtime.agent, shard))
        self._shard_count = shard + 1

    async def _consume(self, name: str, address: Address) -> None:
        limit = self._runtime.options.max_concurrency
        subscription = await self._runtime.broker.consume(address, limit, self.inbox.put)
        self._queues[name] = _Queue(address, subscription, limit)
        self.subscriptions[name] = subscription

    def adjust_prefetch(self) -> None:
        """Adapt the prefetch to the tasks waiting in memory."""
        self._report_if_memory_full()
        for queue in list(self._queues.values()):
            capacity = self._compute_waiting_capacity(queue)
            if (
                capacity > queue.waiting_capacity or 4 * capacity <= queue.waiting_capacity > 0
            ):  # avoid oscillation
                queue.waiting_capacity = capacity
                if not self._is_busy:
                    self._runtime.background.spawn(self._resize, queue)

    def _compute_waiting_capacity(self, queue: _Queue) -> int:
        """Return the number of places for waiting requests.

        It is rounded up to a power of two so that the prefetch seldom changes.
        """
        unacked, limit = self._tasks.unacked, self._runtime.options.max_in_memory
        nested_count, root_count = (
            unacked.count(queue.address, UnackedKind.NESTED),
            unacked.count(queue.address, UnackedKind.ROOT),
        )
        idle_capacity = _round_up(unacked.count(queue.address, UnackedKind.ENDED))
        idle_capacity += _round_up(unacked.count(queue.address, UnackedKind.DELAYED))
        if queue.address == nested_queue(self._runtime.agent):
            return _round_up(nested_count + root_count) + idle_capacity
        roots_elsewhere = self._unacked_root_count - root_count
        return (
            min(_round_up(root_count), max(limit - roots_elsewhere, 0))
            + _round_up(nested_count)
            + idle_capacity
        )

    @property
    def _unacked_root_count(self) -> int:
        nested_address = nested_queue(self._runtime.agent)
        addresses = [
            queue.address for queue in self._queues.values() if queue.address != nested_address
        ]
        return sum(self._tasks.unacked.count(address, UnackedKind.ROOT) for address in addresses)

    def _report_if_memory_full(self) -> None:
        root_count, limit = self._unacked_root_count, self._runtime.options.max_in_memory
        if root_count >= limit and not self._is_memory_full:
            self._is_memory_full = True
            self._runtime.steps.emit(Step.MEMORY_FULL, unacked=root_count, max_in_memory=limit)
        elif 2 * root_count < limit:
            self._is_memory_full = False

    async def _resize(self, queue: _Queue, extra: int | None = None) -> None:
        """Set the prefetch of `queue` to its unacked requests plus `extra`, or to its limit."""
        if extra is None:
            queue.limit = self._runtime.options.max_concurrency + queue.waiting_capacity
        else:
            queue.limit = self._count_unacked(queue) + extra
        try:
            await queue.subscription.resize(queue.limit)
        except Unavailable as error:
            self._runtime.retry.record_outage(error)

    def _count_unacked(self, queue: _Queue) -> int:
        """Count the unacked requests of `queue`, excluding one about to be requeued."""
        waiting_count = self._tasks.unacked.count(queue.address, *UnackedKind)
        live_deliveries = [
            delivery
            for segment in self._tasks.segments.values()
            for delivery in segment.deliveries
        ]
        queue_deliveries = [
            each
            for each in (*live_deliveries, *self.inbox.waiting)
            if each.address == queue.address
        ]
        is_leaving = self._awaiting_slot in queue_deliveries and _may_requeue(self._awaiting_slot)
        return waiting_count + len(queue_deliveries) - is_leaving

    def _spare_capacity(self, queue: _Queue) -> int:
        """The number of requests of `queue` that the broker may still send."""
        return queue.limit - self._count_unacked(queue)

    async def acquire_slot(self, segment: Segment, *, nowait: bool = False) -> bool:
        """Wait for a slot and take it.

        Returns `False` if this replica stays busy and the request should be requeued. With
        `nowait`, a request that may be requeued does not wait.
        """
        slots = self._runtime.slots
        while True:
            if self._tasks.tasks_ready.is_set() and slots.free > 0 and not self._tasks.is_draining:
                await self._acquire_ready()
            if slots.acquire(1):
                self._started_count += 1
                return True
            may_requeue = (
                segment.stop_reason is None
                and len(segment.deliveries) == 1
                and _may_requeue(segment.deliveries[0])
            )
            if may_requeue and nowait:
                return False
            nowait = await self._wait_for_slot(segment.deliveries[0] if may_requeue else None)

    async def _wait_for_slot(self, delivery: Delivery | None) -> bool:
        """Wait for a free slot.

        Returns `True` if no slot became free and `delivery` should go to another replica.
        """
        if delivery is None:
            await self._runtime.slots.available.wait()
            return False
        self._awaiting_slot = delivery
        try:
            await wait_for_first(
                self._runtime.slots.available.wait(), self._requests_requeued.wait()
            )
        finally:
            self._awaiting_slot = None
        return self._runtime.slots.free <= 0

    async def shed_load(self) -> None:
        """Leave requests to other replicas while all slots are taken. Runs until cancelled."""
        await self._restore_limits()
        while True:
            await self._runtime.slots.all_taken.wait()
            released_count, waiting = (
                self._runtime.slots.released_count,
                self._requeueable_deliveries(),
            )
            await self._runtime.clock.sleep(_BUSY_THRESHOLD)
            if self._runtime.slots.free > 0:
                continue
            none_released = released_count == self._runtime.slots.released_count
            if self._is_any_still_waiting(waiting) or (
                none_released and any(map(self._spare_capacity, self._queues.values()))
            ):
                await self._shed_until_available()

    def _requeueable_deliveries(self) -> list[Delivery]:
        """Requests that can still be requeued because no work has been done for them."""
        slot_waiters = [] if self._awaiting_slot is None else [self._awaiting_slot]
        return [
            delivery for delivery in (*slot_waiters, *self.inbox.waiting) if _may_requeue(delivery)
        ]

    def _is_any_still_waiting(self, earlier: Sequence[Delivery]) -> bool:
        return any(delivery in earlier for delivery in self._requeueable_deliveries())

    async def _shed_until_available(self) -> None:
        self._is_busy = True
        try:
            await self._requeue_waiting()
            while True:
                started_before, waiting = self._started_count, self._requeueable_deliveries()
                await wait_for_first(
                    self._runtime.slots.available.wait(),
                    self._runtime.clock.sleep(_BUSY_THRESHOLD),
                )
                if 2 * self._runtime.slots.free >= self._runtime.options.max_concurrency:
                    break
                if self._runtime.slots.free <= 0 and self._is_any_still_waiting(waiting):
                    await self._requeue_waiting()
                else:
                    await self._admit_requests(started_before)
                await self._runtime.clock.sleep(_RESIZE_INTERVAL)
        finally:
            self._is_busy = False
        await self._restore_limits()

    async def _restore_limits(self) -> None:
        for queue in list(self._queues.values()):
            if queue.limit != self._runtime.options.max_concurrency + queue.waiting_capacity:
                await self._resize(queue)

    async def _admit_requests(self, started_before: int) -> None:
        """Allow one request per free slot, or only one while other queues fill the slots."""
        target = max(self._runtime.slots.free, int(self._started_count > started_before))
        for queue in list(self._queues.values()):
            if self._spare_capacity(queue) < target - len(self.inbox.waiting):
                await self._resize(queue, target)

    async def _requeue_waiting(self) -> None:
        """Stop consuming, then requeue the waiting requests.

        In reverse order, they would return here.
        """
        leaving = [
            waiting_delivery
            for waiting_delivery in self.inbox.waiting
            if _may_requeue(waiting_delivery)
        ]
        for delivery in leaving:
            self.inbox.withdraw(delivery)
        try:
            for queue in list(self._queues.values()):
                if self._spare_capacity(queue) > 0:
                    await self._resize(queue, 0)
            self._requests_requeued.set()
            self._requests_requeued.clear()
        finally:  # even if a drain interrupts: no other list has them
            for delivery in leaving:
                with suppress(Unavailable):  # its connection is lost, which requeues it too
                    await delivery.requeue()


def _subscription_name(shard: int) -> str:
    return f"requests {shard}" if shard else "requests"


def _may_requeue(delivery: Delivery) -> bool:
    """Whether `delivery` may be requeued.

    Only once, because the delivery count is also used to detect crashes.
    """
    return delivery.delivery_count == 1


def _round_up(count: int) -> int:
    """The next power of two above `count`, or 0 if `count` is 0."""
    return 1 << count.bit_length() if count else 0
