"""The consumers of one queue on one channel, so that never more than the allowed deliveries are unsettled.

RabbitMQ fixes the prefetch of a consumer when it starts. To raise the limit, another consumer is added for the
difference; to lower it, consumers are cancelled, whose deliveries stay unsettled and are counted until they
settle. Replacing one consumer by another would take up to the sum of both from the other replicas.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from uuid import uuid4

from aiormq import Channel
from aiormq.abc import DeliveredMessage

OnDelivered = Callable[[DeliveredMessage], None]


class Intake:
    """Takes deliveries from `queue` over `channel`; dies with the channel."""

    def __init__(self, channel: Channel, queue: str, on_delivered: OnDelivered, wake: Callable[[], None]) -> None:
        self.channel = channel
        self._queue = queue
        self._on_delivered = on_delivered
        self._wake = wake
        self._sizes: dict[str, int] = {}  # prefetch by consumer tag, oldest first
        self._unsettled: Counter[str] = Counter()  # by consumer tag, cancelled ones too
        self._adjusting = asyncio.Lock()
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
            room = limit - self._size - self._retired
            # Few and large consumers: while cancelled ones drain, add only what at least doubles the flow.
            if room > 0 and (room >= self._size or not self._retired):
                await self._add(room)

    async def settle(self, tag: str, send: Awaitable[None]) -> None:
        """Settle a delivery of consumer `tag`."""
        await send
        self._unsettled[tag] -= 1
        if tag not in self._sizes:
            self._wake()

    @property
    def _size(self) -> int:
        return sum(self._sizes.values())

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
        self._on_delivered(delivered)
