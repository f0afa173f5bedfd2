"""Controls how many requests this replica consumes, and from which queues of its agent.

Three rules:

- Requests made inside another task have their own queue. Its prefetch grows without limit with the
nested tasks that wait in memory, so the requests that a held task is waiting for can always
arrive.
- All other tasks that wait in memory are limited by `max_in_memory`. The same limit holds
separately for ended tasks whose reply waits for its address.
- A replica whose slots stay taken does not keep requests waiting: it stops taking them and
requeues, once each, the requests it could not start, so that a replica with a free slot can take
them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from meshpoint.engine.inbox import Inbox, Turns
from meshpoint.engine.runtime import Site, Spawn
from meshpoint.engine.segment import Segment
from meshpoint.engine.segments import Segments
from meshpoint.engine.unacked import Kind
from meshpoint.errors import Unavailable
from meshpoint.model.events import Step
from meshpoint.model.messages import MOST_SHARDS, Address, nested_of, shard_of
from meshpoint.ports.broker import Delivery, Subscription

_BUSY_FOR = timedelta(milliseconds=100)
"""Minimum time before requests go to other replicas.

All slots must be taken, or a request must have waited for a slot, for this long.
"""
_BETWEEN_LOOKS = timedelta(minutes=5)
"""Interval of the search for new request queues.

RabbitMQ logs an error for each lookup of a missing queue.
"""
_BETWEEN_RESIZES = timedelta(milliseconds=20)


@dataclass(slots=True, eq=False)
class _Lane:
    """One request queue, and its limit of unacked requests."""

    address: Address
    subscription: Subscription
    limit: int
    room: int = 0
    """The part of `limit` for requests whose tasks wait in memory."""


class Intake:
    """Consumes an agent's requests through `subscriptions`.

    `inbox` hands out the deliveries round-robin.

    `before_requests` serves work that takes precedence over requests.
    """

    def __init__(
        self, site: Site, segments: Segments, spawn: Spawn, before_requests: Callable[[], Awaitable[None]]
    ) -> None:
        self._site = site
        self._segments = segments
        self._spawn = spawn
        self._before_requests = before_requests
        self.inbox = Inbox(site.clock, Turns())
        self.subscriptions: dict[str, Subscription] = {}
        self._lanes: dict[str, _Lane] = {}
        self._shards = 0
        self._busy = False
        self._full = False
        self._turned_away = asyncio.Event()
        self._started = 0
        self._waits_for_slot: Delivery | None = None

    @property
    def names(self) -> list[str]:
        """The names of the subscriptions."""
        return list(self._lanes)

    async def start(self) -> None:
        """Start consuming the known request queues."""
        await self._consume("nested", nested_of(self._site.agent))
        for number in range(self._site.options.request_shards):
            await self._consume_shard(number)
        await self.find_shards()

    async def find_shards(self) -> None:
        """Also consume the queues that replicas with a larger `request_shards` have declared."""
        while self._shards > self._site.options.request_shards and not await self._exists(self._shards - 1):
            self._shards -= 1
            await self._leave_shard(self._shards)
        while self._shards < MOST_SHARDS and await self._exists(self._shards):
            await self._consume_shard(self._shards)

    async def _exists(self, number: int) -> bool:
        return await self._site.broker.depth(shard_of(self._site.agent, number)) is not None

    async def _leave_shard(self, number: int) -> None:
        del self._lanes[_name(number)]
        await self.subscriptions.pop(_name(number)).cancel()

    async def watch_shards(self) -> None:
        """Look for additional request queues periodically, until cancelled."""
        while True:
            await self._site.clock.sleep(_BETWEEN_LOOKS)
            await self.find_shards()

    async def _consume_shard(self, number: int) -> None:
        await self._consume(_name(number), shard_of(self._site.agent, number))
        self._shards = number + 1

    async def _consume(self, name: str, address: Address) -> None:
        limit = self._site.options.max_concurrency
        subscription = await self._site.broker.consume(address, limit, self.inbox.put)
        self._lanes[name] = _Lane(address, subscription, limit)
        self.subscriptions[name] = subscription

    def make_room(self) -> None:
        """Adapt the prefetch to the tasks waiting in memory."""
        self._tell_if_full()
        for lane in list(self._lanes.values()):
            room = self._room(lane)
            if room > lane.room or 4 * room <= lane.room > 0:  # avoid oscillation
                lane.room = room
                if not self._busy:
                    self._spawn(self._resize(lane))

    def _room(self, lane: _Lane) -> int:
        """Return the number of places for held requests.

        It is rounded up to a power of two so that the prefetch seldom changes.
        """
        held, limit = self._segments.held, self._site.options.max_in_memory
        nested, roots = held.count(lane.address, Kind.NESTED), held.count(lane.address, Kind.ROOT)
        ended = _rounded_up(held.count(lane.address, Kind.ENDED))
        if lane.address == nested_of(self._site.agent):
            return _rounded_up(nested + roots) + ended
        elsewhere = self._held_roots - roots
        return min(_rounded_up(roots), max(limit - elsewhere, 0)) + _rounded_up(nested) + ended

    @property
    def _held_roots(self) -> int:
        nested = nested_of(self._site.agent)
        addresses = [lane.address for lane in self._lanes.values() if lane.address != nested]
        return sum(self._segments.held.count(address, Kind.ROOT) for address in addresses)

    def _tell_if_full(self) -> None:
        held, limit = self._held_roots, self._site.options.max_in_memory
        if held >= limit and not self._full:
            self._full = True
            self._site.steps.note(Step.MEMORY_FULL, held=held, max_in_memory=limit)
        elif 2 * held < limit:
            self._full = False

    async def _resize(self, lane: _Lane, more: int | None = None) -> None:
        """Set the prefetch of `lane` to its unacked requests plus `more`, or to its limit."""
        if more is None:
            lane.limit = self._site.options.max_concurrency + lane.room
        else:
            lane.limit = self._unacked(lane) + more
        try:
            await lane.subscription.resize(lane.limit)
        except Unavailable as error:
            self._site.patience.note_away(error)

    def _unacked(self, lane: _Lane) -> int:
        """Count the unacked requests of `lane`, excluding one about to be requeued."""
        held = self._segments.held.count(lane.address, *Kind)
        live = [each for segment in self._segments.live.values() for each in segment.deliveries]
        here = [each for each in (*live, *self.inbox.waiting) if each.address == lane.address]
        leaves = self._waits_for_slot in here and _may_go(self._waits_for_slot)
        return held + len(here) - leaves

    def _spare(self, lane: _Lane) -> int:
        """The number of requests of `lane` that the broker may still send."""
        return lane.limit - self._unacked(lane)

    async def take_slot(self, segment: Segment, *, at_once: bool = False) -> bool:
        """Wait for a slot and take it.

        Returns `False` if this replica stays busy and the request should be requeued. With
        `at_once`, a request that may be requeued does not wait.
        """
        slots = self._site.slots
        while True:
            await self._before_requests()
            if slots.take(1):
                self._started += 1
                return True
            may_go = segment.stopped is None and len(segment.deliveries) == 1 and _may_go(segment.deliveries[0])
            if may_go and at_once:
                return False
            at_once = await self._slot_or_turned_away(segment.deliveries[0] if may_go else None)

    async def _slot_or_turned_away(self, delivery: Delivery | None) -> bool:
        """Wait for a free slot.

        Returns `True` if no slot became free and `delivery` should go to another replica.
        """
        if delivery is None:
            await self._site.slots.some_free()
            return False
        self._waits_for_slot = delivery
        try:
            await _first(self._site.slots.some_free(), self._turned_away.wait())
        finally:
            self._waits_for_slot = None
        return self._site.slots.free <= 0

    async def govern(self) -> None:
        """Leave requests to other replicas while all slots are taken. Runs until cancelled."""
        await self._take_all()
        while True:
            await self._site.slots.none_free()
            freed, waiting = self._site.slots.freed, self._waiting()
            await self._site.clock.sleep(_BUSY_FOR)
            if self._site.slots.free > 0:
                continue
            nothing_freed = freed == self._site.slots.freed
            if self._still_waits(waiting) or (nothing_freed and any(map(self._spare, self._lanes.values()))):
                await self._leave_requests_to_others()

    def _waiting(self) -> list[Delivery]:
        """Requests that can still be requeued because no work has been done for them."""
        first = [] if self._waits_for_slot is None else [self._waits_for_slot]
        return [each for each in (*first, *self.inbox.waiting) if _may_go(each)]

    def _still_waits(self, earlier: Sequence[Delivery]) -> bool:
        return any(each in earlier for each in self._waiting())

    async def _leave_requests_to_others(self) -> None:
        self._busy = True
        try:
            await self._turn_away()
            while True:
                started, waiting = self._started, self._waiting()
                await _first(self._site.slots.some_free(), self._site.clock.sleep(_BUSY_FOR))
                if 2 * self._site.slots.free >= self._site.options.max_concurrency:
                    break
                if self._site.slots.free <= 0 and self._still_waits(waiting):
                    await self._turn_away()
                else:
                    await self._let_some_in(started)
                await self._site.clock.sleep(_BETWEEN_RESIZES)
        finally:
            self._busy = False
        await self._take_all()

    async def _take_all(self) -> None:
        for lane in list(self._lanes.values()):
            if lane.limit != self._site.options.max_concurrency + lane.room:
                await self._resize(lane)

    async def _let_some_in(self, started: int) -> None:
        """Allow one request per free slot, or only one while other queues fill the slots."""
        wanted = max(self._site.slots.free, int(self._started > started))
        for lane in list(self._lanes.values()):
            if self._spare(lane) < wanted - len(self.inbox.waiting):
                await self._resize(lane, wanted)

    async def _turn_away(self) -> None:
        """Stop consuming, then requeue the waiting requests.

        In reverse order, they would return here.
        """
        leaving = [each for each in self.inbox.waiting if _may_go(each)]
        for delivery in leaving:
            self.inbox.withdraw(delivery)
        try:
            for lane in list(self._lanes.values()):
                if self._spare(lane) > 0:
                    await self._resize(lane, 0)
            self._turned_away.set()
            self._turned_away.clear()
        finally:  # even if a drain interrupts: no other list has them
            for delivery in leaving:
                with suppress(Unavailable):  # its connection is lost, which requeues it too
                    await delivery.requeue()


def _name(shard: int) -> str:
    return f"requests {shard}" if shard else "requests"


def _may_go(delivery: Delivery) -> bool:
    """Whether `delivery` may be requeued.

    Only once, because the delivery count is also used to detect crashes.
    """
    return delivery.count == 1


def _rounded_up(held: int) -> int:
    """The next power of two above `held`, or 0 if `held` is 0."""
    return 1 << held.bit_length() if held else 0


async def _first(*steps: Coroutine[Any, Any, object]) -> None:
    """Wait until any of `steps` ends and cancel the rest."""
    tasks = [asyncio.ensure_future(step) for step in steps]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
