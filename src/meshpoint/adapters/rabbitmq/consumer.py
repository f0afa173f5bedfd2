"""The consumers of one queue on one channel, so that never more than the allowed deliveries are unsettled.

RabbitMQ fixes the prefetch of a consumer when it starts. To raise the limit, another consumer is added for the
difference; to lower it, consumers are cancelled, whose deliveries stay unsettled and are counted until they
settle. Replacing one consumer by another would take up to the sum of both from the other replicas.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from meshpoint.adapters.rabbitmq.connection import WiredChannel, close_quietly
from meshpoint.adapters.rabbitmq.frames import Arrived, Deliveries, acked, nacked

_ADD_DELAY = 0.02
"""Seconds to wait before adding a small consumer, in case a larger one is needed."""
_LARGEST = 0xFFFF
"""Maximum prefetch of one consumer: AMQP has 16 bits for it."""
_ACK_DELAY = 0.01
"""Seconds that an ack waits for others at most."""


class Intake:
    """Consumes `queue` over one channel and ends with that channel."""

    def __init__(
        self, wired: WiredChannel, queue: str, on_arrived: Callable[[Arrived], None], wake: Callable[[], None]
    ) -> None:
        self.channel = wired.channel
        self._wire = wired.wire
        self._queue = queue
        self._on_arrived = on_arrived
        self._wake = wake
        self._sizes: dict[bytes, int] = {}  # prefetch by consumer tag, oldest first
        self._unsettled: Counter[bytes] = Counter()  # by consumer tag, including cancelled consumers
        self._outstanding: dict[int, bytes] = {}  # consumer tags of unacked deliveries, oldest first
        self._acked: set[int] = set()  # and not on the wire yet
        self._acking: asyncio.TimerHandle | None = None
        self._adjusting = asyncio.Lock()
        self._short = False  # fewer deliveries than the prefetch allows
        self._given_up = False
        self._shut = False
        self.cancelled_by_broker = False
        self._deliveries = Deliveries(self._arrived)
        self._wire.take(self.channel.number, self._deliveries)
        self.channel.on_consumer_cancel_callbacks.add(self._on_cancelled)
        self.channel.closing.add_done_callback(self._on_closed)

    @property
    def lost(self) -> bool:
        """Whether nothing will come any more, and nothing can be settled."""
        return self._given_up or self._shut or self._deliveries.closed or self.channel.is_closed

    def give_up(self) -> None:
        """Count it as lost: the broker cancelled a consumer, or does not answer."""
        self._given_up = True
        self._wake()

    @property
    def idle(self) -> bool:
        """Whether everything is settled."""
        return not self._unsettled.total()

    async def adjust(self, limit: int) -> None:
        """Let up to `limit` deliveries be unsettled; 0 takes none."""
        async with self._adjusting:
            while self._size > limit:
                tag, _ = self._sizes.popitem()
                await self.channel.basic_cancel(tag.decode())
            # Prefer few, large consumers: while cancelled ones drain, add one only if it at least doubles
            # the prefetch, or after a short wait, since their deliveries may stay unacked for a long time.
            if self._retired and self._full and 0 < self._room(limit) < self._size:
                await asyncio.sleep(_ADD_DELAY)
            room = self._room(limit)
            if room > 0 and (room >= self._size or not self._retired or self._full):
                await self._add(min(room, _LARGEST))
            self._short = self._room(limit) > 0

    def ack(self, delivery_tag: int) -> None:
        """Settle a delivery, a moment later: many acks that leave together are one write of the broker's.

        Of the deliveries that nobody holds, half are not kept waiting: the consumer is not to run dry for it.
        """
        self._acked.add(delivery_tag)
        held = len(self._outstanding) - len(self._acked)
        if 2 * len(self._acked) >= self._size - held:
            self.send_acks()
        elif self._acking is None:
            self._acking = asyncio.get_running_loop().call_later(_ACK_DELAY, self.send_acks)

    def send_acks(self) -> None:
        """Flush pending acks."""
        if self._acking is not None:
            self._acking.cancel()
            self._acking = None
        acked_, self._acked = self._acked, set()
        if not acked_ or not self._writable:
            return
        up_to = self._all_before(acked_)
        if up_to is not None:
            self._wire.write(acked(self.channel.number, up_to, multiple=True))
        for tag in sorted(acked_):
            if up_to is None or tag > up_to:
                self._wire.write(acked(self.channel.number, tag, multiple=False))
            self._settled(tag)

    def give_back(self, delivery_tag: int, *, requeue: bool = True) -> None:
        """Requeue a delivery, or let the broker dead-letter it. A lost channel requeues everything."""
        if self._writable:
            self._wire.write(nacked(self.channel.number, delivery_tag, requeue))
        self._settled(delivery_tag)

    async def close(self) -> None:
        """Requeue all unsettled deliveries. Earlier acks are on the wire when this returns."""
        self.send_acks()
        self._shut = True
        await close_quietly(self.channel)

    @property
    def _writable(self) -> bool:
        return not (self._shut or self._deliveries.closed or self.channel.is_closed)

    def _all_before(self, acked_: set[int]) -> int | None:
        """The last delivery before which none is left that is not acked."""
        last = None
        for tag in self._outstanding:
            if tag not in acked_:
                break
            last = tag
        return last

    def _settled(self, delivery_tag: int) -> None:
        consumer = self._outstanding.pop(delivery_tag, None)
        if consumer is not None:
            self._unsettled[consumer] -= 1
            if consumer not in self._sizes:
                self._wake()

    @property
    def _size(self) -> int:
        return sum(self._sizes.values())

    def _room(self, limit: int) -> int:
        return limit - self._size - self._retired

    @property
    def _full(self) -> bool:
        """Whether every consumer has reached its prefetch."""
        return all(self._unsettled[tag] >= size for tag, size in self._sizes.items())

    @property
    def _retired(self) -> int:
        return sum(count for tag, count in self._unsettled.items() if tag not in self._sizes)

    async def _add(self, size: int) -> None:
        tag = uuid4().hex
        self._sizes[tag.encode()] = size
        await self.channel.basic_qos(prefetch_count=size)
        await self.channel.basic_consume(self._queue, _passed_by, consumer_tag=tag)

    def _arrived(self, arrived: Arrived) -> None:
        if self._given_up or self._shut:  # requeued with the channel
            return
        self._unsettled[arrived.consumer_tag] += 1
        self._outstanding[arrived.delivery_tag] = arrived.consumer_tag
        if self._short and self._full:
            self._wake()
        self._on_arrived(arrived)

    def _on_cancelled(self, _: Any) -> None:
        self.cancelled_by_broker = True
        self.give_up()

    def _on_closed(self, _: Any) -> None:
        self._wake()


async def _passed_by(_: Any) -> None:
    """Placeholder consumer for the library, which never sees a delivery."""
