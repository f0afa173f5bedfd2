"""The consumers of one queue on one channel, which together respect a limit of unacked deliveries.

RabbitMQ fixes the prefetch of a consumer when it starts. To raise the limit, another consumer is
added for the difference. To lower it, consumers are cancelled; their deliveries stay unacked and
count towards the limit until they are settled. Replacing a consumer by another could take up to
the sum of both limits from the other replicas.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import takewhile
from time import monotonic
from typing import Any
from uuid import uuid4

from meshpoint.adapters.rabbitmq.connection import OpenChannel, close_quietly, translate_errors
from meshpoint.adapters.rabbitmq.frames import (
    DeliveryHandler,
    RawDelivery,
    encode_ack,
    encode_nack,
)
from meshpoint.errors import BrokerUnavailable

_ADD_DELAY = 0.02
"""Seconds to wait before adding a small consumer, in case a larger one is needed."""
_MAX_PREFETCH = 0xFFFF
"""Maximum prefetch of one consumer: AMQP encodes it in 16 bits."""
_ACK_DELAY = 0.01
"""Maximum seconds that an ack waits for others."""


class Consumer:
    """Consumes `queue` over one channel and ends with that channel."""

    def __init__(
        self,
        opened: OpenChannel,
        queue: str,
        on_delivery: Callable[[RawDelivery], None],
        wake: Callable[[], None],
    ) -> None:
        self.channel = opened.channel
        self._transport = opened.transport
        self._queue = queue
        self._on_delivery = on_delivery
        self._wake = wake
        self._prefetch_by_tag: dict[bytes, int] = {}  # prefetch by consumer tag, oldest first
        self._unsettled: Counter[bytes] = Counter()  # by consumer tag, including cancelled ones
        self._unacked: dict[int, bytes] = {}  # consumer tags of unacked deliveries, oldest first
        self._task_ids: dict[int, str] = {}  # of unacked deliveries that were decoded
        self._started_at: dict[bytes, float] = {}  # by consumer tag, by the monotonic clock
        # When the broker had all deliveries that were returned to the queue; infinite until then.
        self._returned_at = 0.0
        self._return_count = 0
        self._return_check: asyncio.Task[None] | None = None
        self._pending_acks: set[int] = set()  # acked, but not sent yet
        self._ack_timer: asyncio.TimerHandle | None = None
        self._adjust_lock = asyncio.Lock()
        self._below_limit = False  # another consumer may be added
        self._given_up = False
        self._closed = False
        self.cancelled_by_broker = False
        self._delivery_handler = DeliveryHandler(self._receive)
        self._transport.route(self.channel.number, self._delivery_handler)
        self.channel.on_consumer_cancel_callbacks.add(self._on_cancelled)
        self.channel.closing.add_done_callback(self._on_closed)

    @property
    def lost(self) -> bool:
        """Whether its deliveries are lost: nothing arrives and nothing can be settled any more."""
        return self._given_up or not self._writable

    def give_up(self) -> None:
        """Treat it as lost: the broker cancelled a consumer, or does not answer."""
        self._given_up = True
        self._wake()

    @property
    def idle(self) -> bool:
        """Whether it has no unacked deliveries."""
        return not self._unsettled.total()

    def record_task(self, delivery_tag: int, task_id: str) -> None:
        """Record the task of an unacked delivery, for `holds`."""
        self._task_ids[delivery_tag] = task_id

    def holds(self, task_id: str) -> bool:
        """Whether it has an unacked delivery of the task."""
        return task_id in self._task_ids.values()

    def count_since(self, instant: float) -> int:
        """The consumers that the broker has counted since `instant`, by the monotonic clock.

        Cancelled ones count until their deliveries are settled. None count if a delivery was
        returned to the queue later than `instant`, or if the broker may not have it yet.
        """
        if self.lost or self._returned_at > instant:
            return 0
        return sum(
            started_at < instant and (tag in self._prefetch_by_tag or self._unsettled[tag] > 0)
            for tag, started_at in self._started_at.items()
        )

    async def adjust(self, limit: int) -> None:
        """Set the maximum number of unacked deliveries; 0 stops the consumers."""
        async with self._adjust_lock:
            while self._total_prefetch > limit:
                tag, _ = self._prefetch_by_tag.popitem()
                await self.channel.basic_cancel(tag.decode())
            # Prefer few, large consumers. While cancelled ones drain, add one only if it at least
            # doubles the prefetch, or after a short wait, since draining may take a long time.
            if (
                self._unsettled_of_cancelled
                and self._is_full
                and 0 < self._remaining_prefetch(limit) < self._total_prefetch
            ):
                await asyncio.sleep(_ADD_DELAY)
            remaining = self._remaining_prefetch(limit)
            if remaining > 0 and (
                remaining >= self._total_prefetch
                or not self._unsettled_of_cancelled
                or self._is_full
            ):
                await self._add_consumer(min(remaining, _MAX_PREFETCH))
            self._below_limit = self._remaining_prefetch(limit) > 0

    def ack(self, delivery_tag: int) -> None:
        """Ack a delivery, up to 10 ms later: acks sent together cost the broker one write.

        At most half of the free prefetch waits like this, so that the consumer does not run dry.
        """
        self._pending_acks.add(delivery_tag)
        unacked = len(self._unacked) - len(self._pending_acks)
        if 2 * len(self._pending_acks) >= self._total_prefetch - unacked:
            self.flush_acks()
        elif self._ack_timer is None:
            self._ack_timer = asyncio.get_running_loop().call_later(_ACK_DELAY, self.flush_acks)

    def flush_acks(self) -> None:
        """Send all pending acks now."""
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None
        acked_tags, self._pending_acks = self._pending_acks, set()
        if not acked_tags or not self._writable:
            return
        # One ack covers a delivery and all earlier ones, if those are acked too.
        covered = list(takewhile(acked_tags.__contains__, self._unacked))
        if covered:
            self._transport.write(encode_ack(self.channel.number, covered[-1], multiple=True))
        for tag in sorted(acked_tags):
            if not covered or tag > covered[-1]:
                self._transport.write(encode_ack(self.channel.number, tag, multiple=False))
            self._record_settled(tag)

    def nack(self, delivery_tag: int, *, requeue: bool = True) -> None:
        """Requeue a delivery, or let the broker dead-letter it.

        A lost channel requeues everything.
        """
        self._returned_at = math.inf
        if self._writable:
            self._transport.write(encode_nack(self.channel.number, delivery_tag, requeue))
            self._return_count += 1
            if self._return_check is None:
                self._return_check = asyncio.create_task(self._check_returns())
        self._record_settled(delivery_tag)

    async def close(self) -> None:
        """Requeue all unacked deliveries. Earlier acks have been sent when this returns."""
        self.flush_acks()
        self._closed = True
        await close_quietly(self.channel)

    async def _check_returns(self) -> None:
        """Wait until the broker has all returned deliveries: it replies to frames in order.

        If the channel is lost, the consumer denies nothing any more.
        """
        try:
            with suppress(BrokerUnavailable), translate_errors("returning messages"):
                while self._returned_at == math.inf:
                    count = self._return_count
                    await self.channel.flow(active=True)
                    if count == self._return_count:
                        self._returned_at = monotonic()
        finally:
            self._return_check = None

    @property
    def _writable(self) -> bool:
        return not (self._closed or self._delivery_handler.closed or self.channel.is_closed)

    def _record_settled(self, delivery_tag: int) -> None:
        self._task_ids.pop(delivery_tag, None)
        consumer = self._unacked.pop(delivery_tag, None)
        if consumer is not None:
            self._unsettled[consumer] -= 1
            if consumer not in self._prefetch_by_tag:
                self._wake()

    @property
    def _total_prefetch(self) -> int:
        return sum(self._prefetch_by_tag.values())

    def _remaining_prefetch(self, limit: int) -> int:
        return limit - self._total_prefetch - self._unsettled_of_cancelled

    @property
    def _is_full(self) -> bool:
        """Whether every consumer has reached its prefetch."""
        return all(self._unsettled[tag] >= size for tag, size in self._prefetch_by_tag.items())

    @property
    def _unsettled_of_cancelled(self) -> int:
        return sum(
            count for tag, count in self._unsettled.items() if tag not in self._prefetch_by_tag
        )

    async def _add_consumer(self, prefetch: int) -> None:
        tag = uuid4().hex
        self._prefetch_by_tag[tag.encode()] = prefetch
        await self.channel.basic_qos(prefetch_count=prefetch)
        await self.channel.basic_consume(self._queue, _unused_callback, consumer_tag=tag)
        self._started_at = {
            known: started_at
            for known, started_at in self._started_at.items()
            if known in self._prefetch_by_tag or self._unsettled[known] > 0
        }
        self._started_at[tag.encode()] = monotonic()

    def _receive(self, raw: RawDelivery) -> None:
        # The broker requeues it when the channel closes.
        if self._given_up or self._closed:
            return
        self._unsettled[raw.consumer_tag] += 1
        self._unacked[raw.delivery_tag] = raw.consumer_tag
        if self._below_limit and self._is_full:
            self._wake()
        self._on_delivery(raw)

    def _on_cancelled(self, _: Any) -> None:
        self.cancelled_by_broker = True
        self.give_up()

    def _on_closed(self, _: Any) -> None:
        self._wake()


async def _unused_callback(_: Any) -> None:
    """Satisfies the library, which never sees a delivery."""
