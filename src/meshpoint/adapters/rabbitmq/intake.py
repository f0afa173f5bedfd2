"""The consumers of one queue on one channel, so that never more than the allowed deliveries are unsettled.

RabbitMQ fixes the prefetch of a consumer when it starts. To raise the limit, another consumer is added for the
difference; to lower it, consumers are cancelled, whose deliveries stay unsettled and are counted until they
settle. Replacing one consumer by another would take up to the sum of both from the other replicas.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from uuid import uuid4

from aiormq import Channel
from aiormq.abc import DeliveredMessage

from meshpoint.adapters.rabbitmq.link import translated
from meshpoint.errors import BrokerUnavailable

OnDelivered = Callable[[DeliveredMessage], None]

_PATIENCE = 10.0
"""Seconds to wait for room on the wire. After them the connection is as good as lost."""
_ADD_DELAY = 0.02
"""Seconds in which a small consumer may become a larger one before it is added."""
_ACK_DELAY = 0.01
"""Seconds that an ack waits for others at most."""


class Intake:
    """Takes deliveries from `queue` over `channel`; dies with the channel."""

    def __init__(self, channel: Channel, queue: str, on_delivered: OnDelivered, wake: Callable[[], None]) -> None:
        self.channel = channel
        self._queue = queue
        self._on_delivered = on_delivered
        self._wake = wake
        self._sizes: dict[str, int] = {}  # prefetch by consumer tag, oldest first
        self._unsettled: Counter[str] = Counter()  # by consumer tag, cancelled ones too
        self._outstanding: dict[int, str] = {}  # consumer tags of what is not acked yet, oldest delivery first
        self._acked: set[int] = set()  # and not on the wire yet
        self._acking: asyncio.Task[None] | None = None
        self._enough_acked = asyncio.Event()
        self._adjusting = asyncio.Lock()
        self._short = False  # fewer may come than are allowed
        self._given_up = False
        channel.on_consumer_cancel_callbacks.add(lambda _: self.give_up())
        channel.closing.add_done_callback(lambda _: wake())

    @property
    def lost(self) -> bool:
        """Whether nothing will come any more, and nothing can be settled."""
        return self._given_up or self.channel.is_closed

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
                await self.channel.basic_cancel(tag)
            # Few and large consumers: while cancelled ones drain, add only what at least doubles the flow,
            # or a little later whatever there is, as what was delivered to them may stay unsettled for long.
            if self._retired and self._full and 0 < self._room(limit) < self._size:
                await asyncio.sleep(_ADD_DELAY)
            room = self._room(limit)
            if room > 0 and (room >= self._size or not self._retired or self._full):
                await self._add(room)
            self._short = self._room(limit) > 0

    def ack(self, delivery_tag: int) -> None:
        """Settle a delivery, a moment later: many acks that leave together are one write of the broker's.

        Of the deliveries that nobody holds, half are not kept waiting: the consumer is not to run dry for it.
        """
        self._acked.add(delivery_tag)
        if self._acking is None:
            self._acking = asyncio.create_task(self._send_acks())
        held = len(self._outstanding) - len(self._acked)
        if 2 * len(self._acked) >= self._size - held:
            self._enough_acked.set()

    async def acks_sent(self) -> None:
        """Return when all acks are on the wire."""
        if self._acking is not None:
            self._enough_acked.set()
            await asyncio.gather(self._acking, return_exceptions=True)

    async def requeue(self, delivery_tag: int) -> None:
        """Give a delivery back.

        Raises:
            BrokerUnavailable: the connection is lost, which gives it back too.
        """
        try:
            await self._on_the_wire(self.channel.basic_nack(delivery_tag, requeue=True, wait=False))
        except BrokerUnavailable:
            self.give_up()  # or it would be unsettled for as long as the channel lives
            raise
        self._settled(delivery_tag)

    async def _send_acks(self) -> None:
        try:
            while self._acked:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_ACK_DELAY):
                        await self._enough_acked.wait()
                self._enough_acked.clear()
                acked, self._acked = self._acked, set()
                await self._on_the_wire(self._ack_all(acked))
        except BrokerUnavailable:
            self.give_up()
        finally:
            self._acking = None

    async def _ack_all(self, acked: set[int]) -> None:
        up_to = self._all_before(acked)
        if up_to is not None:
            await self.channel.basic_ack(up_to, multiple=True, wait=False)
        for tag in sorted(acked):
            if up_to is None or tag > up_to:
                await self.channel.basic_ack(tag, wait=False)
            self._settled(tag)

    def _all_before(self, acked: set[int]) -> int | None:
        """The last delivery before which none is left that is not acked."""
        last = None
        for tag in self._outstanding:
            if tag not in acked:
                break
            last = tag
        return last

    async def _on_the_wire(self, sending: Awaitable[None]) -> None:
        with translated("settling"):
            async with asyncio.timeout(_PATIENCE):
                await sending

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
        """Whether no consumer takes more."""
        return all(self._unsettled[tag] >= size for tag, size in self._sizes.items())

    @property
    def _retired(self) -> int:
        return sum(count for tag, count in self._unsettled.items() if tag not in self._sizes)

    async def _add(self, size: int) -> None:
        tag = uuid4().hex
        self._sizes[tag] = size
        await self.channel.basic_qos(prefetch_count=size)
        await self.channel.basic_consume(self._queue, self._receive, consumer_tag=tag)

    async def _receive(self, delivered: DeliveredMessage) -> None:
        self._unsettled[str(delivered.consumer_tag)] += 1
        self._outstanding[delivered.delivery_tag or 0] = str(delivered.consumer_tag)
        if self._short and self._full:
            self._wake()
        self._on_delivered(delivered)
