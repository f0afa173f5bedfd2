"""A subscription that survives lost channels, lost connections and broker restarts."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

from aiormq.exceptions import ChannelNotFoundEntity

from meshpoint.adapters.rabbitmq.connection import Connection, backoff_delays, translate_errors
from meshpoint.adapters.rabbitmq.consumer import Consumer
from meshpoint.adapters.rabbitmq.content import Content, decode
from meshpoint.adapters.rabbitmq.envelope import (
    from_dead_letter,
    quorum_delivery_count,
    to_message,
)
from meshpoint.adapters.rabbitmq.frames import RawDelivery
from meshpoint.errors import BrokerUnavailable, ConfigurationError, PoisonMessage
from meshpoint.model.messages import (
    Address,
    Message,
    is_dead_letter_queue,
    is_private_queue,
    truncate_reason,
)
from meshpoint.ports.broker import OnDelivery
from meshpoint.ports.clock import OutageTracker

log = logging.getLogger(__name__)

_MAX_COUNTS = 1000
_DeadLetter = Callable[[Address, RawDelivery, Content, str], Awaitable[bool]]
"""Copies a message to its agent's dead-letter queue.

Returns `False` if no copy can ever be made.
"""


@dataclass(slots=True, eq=False)
class _RabbitDelivery:
    """A `Delivery` that can be settled once, on the channel that delivered it."""

    message: Message
    address: Address
    delivery_count: int
    _raw: RawDelivery
    _content: Content
    _consumer: Consumer
    _dead_letter: _DeadLetter
    _settled: bool = False

    @property
    def lost(self) -> bool:
        """Whether its channel was lost, so the broker requeued the message."""
        return self._consumer.lost and not self._settled

    async def ack(self) -> bool:
        """Ack the message. The ack may be sent a few milliseconds later."""
        if not self._start_settling():
            return False
        self._consumer.ack(self._raw.delivery_tag)
        return True

    async def requeue(self) -> bool:
        """Return the message to the queue for any consumer; raises its delivery count."""
        if not self._start_settling():
            return False
        self._consumer.nack(self._raw.delivery_tag)
        return True

    async def dead_letter(self, reason: str) -> bool:
        """Move the message to its agent's dead letters.

        A crash in between leaves it in both queues.
        """
        if self._settled or self._consumer.lost:
            return False
        if await self._dead_letter(self.address, self._raw, self._content, reason):
            return await self.ack()
        if not self._start_settling():
            return False
        self._consumer.nack(self._raw.delivery_tag, requeue=False)
        return True

    def _start_settling(self) -> bool:
        if self._settled or self._consumer.lost:
            return False
        self._settled = True
        return True


class RabbitSubscription:
    """A `Subscription`. A background task keeps it attached to its queue."""

    def __init__(
        self,
        connection: Connection,
        queue: str,
        address: Address,
        on_delivery: OnDelivery,
        *,
        prefetch: int,
        timeout: float,
        ensure_declared: Callable[[bool], Awaitable[None]],
        dead_letter: _DeadLetter,
        delivery_limit: int,
    ) -> None:
        self._connection = connection
        self._queue = queue
        self.address = address
        self._on_delivery = on_delivery
        self._prefetch = prefetch
        self._timeout = timeout
        self._ensure_declared = ensure_declared
        self._dead_letter = dead_letter
        self._delivery_limit = delivery_limit
        self._private = is_private_queue(address)
        self._decode = from_dead_letter if is_dead_letter_queue(address) else to_message
        self._redelivery_counter = _RedeliveryCounter()
        self._wake = asyncio.Event()
        self._consumer: Consumer | None = None
        self._attach_task: asyncio.Task[None] | None = None
        self._dead_letter_tasks: set[asyncio.Task[None]] = set()
        self._adjustments: set[asyncio.Task[None]] = set()
        self._cancelled = False
        self._outage = OutageTracker(monotonic)

    async def start(self) -> None:
        """Attach to the queue.

        Raises:
            ConfigurationError: the queue does not exist.
            BrokerUnavailable: the broker does not answer.
        """
        try:
            await self._ensure_declared(False)
            await self._attach()
        except BaseException as error:
            if self._consumer is not None:  # nothing would settle its deliveries
                self._connection.close_in_background(self._consumer.channel)
            if isinstance(error, BrokerUnavailable) and isinstance(
                error.__cause__, ChannelNotFoundEntity
            ):
                raise ConfigurationError(
                    "mesh.broker_url",
                    f"there is no queue {self._queue!r}",
                    "declare its agent first",
                ) from error
            raise
        self._attach_task = asyncio.create_task(self._keep_attached())

    @property
    def attached(self) -> bool:
        """Whether it is attached to its queue, or cancelled and so need not be."""
        return self._cancelled or (self._consumer is not None and not self._consumer.lost)

    @property
    def is_consuming(self) -> bool:
        """Whether it is attached to its queue and not cancelled."""
        return self.attached and not self._cancelled

    @property
    def is_finished(self) -> bool:
        """Whether it is cancelled and all its deliveries are settled."""
        return self._attach_task is not None and self._attach_task.done()

    def holds(self, task_id: str) -> bool:
        """Whether it has an unacked delivery of the task."""
        return self._consumer is not None and self._consumer.holds(task_id)

    def count_consumers_since(self, instant: float) -> int:
        """The consumers that have returned nothing since `instant`; see `Consumer.count_since`."""
        return 0 if self._consumer is None else self._consumer.count_since(instant)

    async def resize(self, prefetch: int) -> None:
        """Set the maximum number of unacked deliveries; 0 stops deliveries."""
        if self._cancelled:
            return
        self._prefetch = prefetch
        await self._adjust_shielded()

    async def cancel(self) -> None:
        """Stop receiving deliveries.

        Unacked ones can still be settled; then the channel closes.
        """
        self._cancelled = True  # makes a later `resize` a no-op
        self._prefetch = 0
        try:
            await self._adjust_shielded()
        finally:
            self._wake.set()

    async def close(self) -> None:
        """Requeue unacked deliveries. Earlier acks have been sent when this returns."""
        self._cancelled = True
        for task in (self._attach_task, *self._dead_letter_tasks):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        if self._consumer is not None:
            await self._consumer.close()

    async def _keep_attached(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._cancelled and (
                self._consumer is None or self._consumer.lost or self._consumer.idle
            ):
                break
            # After an error, `_adjust` gives up the consumer, which wakes this loop again.
            with suppress(BrokerUnavailable):
                await (
                    self._reattach()
                    if self._consumer is None or self._consumer.lost
                    else self._adjust()
                )
        if self._consumer is not None:
            await self._consumer.close()

    async def _reattach(self) -> None:
        log.warning("lost the consumer of %s", self._queue)
        delays = backoff_delays()
        missing = self._consumer is not None and self._consumer.cancelled_by_broker
        while not self._cancelled:
            if self._consumer is not None:
                await self._consumer.close()
            try:
                await self._ensure_declared(missing)
                await self._attach()
            # Retry after any error: no longer consuming the queue would be worse.
            except Exception as error:
                if (seconds := self._outage.record_failure()) is not None:
                    log.warning(
                        "cannot consume %s yet, for %.0f s: %r", self._queue, seconds, error
                    )
                missing = isinstance(error.__cause__, ChannelNotFoundEntity)
                await asyncio.sleep(next(delays))
            else:
                seconds, _ = self._outage.record_success()
                log.info("consuming %s again after %.0f s", self._queue, seconds)
                return

    async def _attach(self) -> None:
        consumer = Consumer(
            await self._connection.open_channel(), self._queue, self._receive, self._wake.set
        )
        self._consumer = consumer
        await self._adjust()

    async def _adjust_shielded(self) -> None:
        """Adjust to the prefetch limit, even if the caller is cancelled.

        Returns at the latest when the connection is lost. The library closes the channel of a
        cancelled call, which would requeue the requests of all running tasks.
        """

        async def adjust() -> None:
            # The background task attaches again with the new limit, unless cancelled.
            with suppress(BrokerUnavailable):
                await self._adjust()

        adjustment = asyncio.create_task(adjust())
        self._adjustments.add(adjustment)
        adjustment.add_done_callback(self._adjustments.discard)
        await asyncio.shield(adjustment)

    async def _adjust(self) -> None:
        consumer = self._consumer
        if consumer is None or consumer.lost:
            return
        try:
            with translate_errors(f"consuming {self._queue}"):
                async with asyncio.timeout(self._timeout):
                    await consumer.adjust(self._prefetch)
        except BaseException:
            consumer.give_up()
            raise

    def _receive(self, raw: RawDelivery) -> None:
        consumer = self._consumer
        if consumer is None:
            return
        content = decode(raw.header)
        try:
            message = self._decode(raw, content)
            count = self._delivery_count(raw, content)
            if count > self._delivery_limit and self._private:
                raise PoisonMessage(f"delivery limit: this is delivery {count}")
        except PoisonMessage as error:
            self._start_dead_lettering(raw, content, consumer, str(error))
            return
        except Exception as error:  # a bug in this package
            self._start_dead_lettering(raw, content, consumer, f"internal error: {error!r}")
            return
        consumer.record_task(raw.delivery_tag, message.correlation_id)
        delivery = _RabbitDelivery(
            message, self.address, count, raw, content, consumer, self._dead_letter
        )
        try:
            self._on_delivery(delivery)
        # A bug in the receiver must not close the connection, which all agents share.
        except Exception as error:
            log.exception("message %s could not be passed to its consumer", message.message_id)
            self._start_dead_lettering(
                raw, content, consumer, f"internal error: {type(error).__name__}: {error}"
            )

    def _delivery_count(self, raw: RawDelivery, content: Content) -> int:
        if not raw.redelivered:  # the sender may have set a count in the headers
            return 1
        counted = None if self._private else quorum_delivery_count(content)
        return self._redelivery_counter.count(raw) if counted is None else counted

    def _start_dead_lettering(
        self, raw: RawDelivery, content: Content, consumer: Consumer, reason: str
    ) -> None:
        log.warning("unreadable message in %s: %s", self._queue, truncate_reason(reason))
        task = asyncio.create_task(self._dead_letter_unreadable(raw, content, consumer, reason))
        self._dead_letter_tasks.add(task)
        task.add_done_callback(self._dead_letter_tasks.discard)

    async def _dead_letter_unreadable(
        self, raw: RawDelivery, content: Content, consumer: Consumer, reason: str
    ) -> None:
        delays = backoff_delays()
        while not consumer.lost:
            try:
                copied = await self._dead_letter(self.address, raw, content, reason)
            except (BrokerUnavailable, ConfigurationError) as error:
                log.warning("cannot dead-letter a message of %s yet: %s", self._queue, error)
                await asyncio.sleep(next(delays))
                continue
            if copied:
                consumer.ack(raw.delivery_tag)
            else:
                consumer.nack(raw.delivery_tag, requeue=False)
            return


class _RedeliveryCounter:
    """Counts deliveries by message content, for the last 1,000 redelivered messages.

    Classic queues only flag a message as redelivered.
    """

    def __init__(self) -> None:
        self._counts: OrderedDict[tuple[int, int], int] = OrderedDict()

    def count(self, raw: RawDelivery) -> int:
        """The delivery count of a redelivered message, including this delivery."""
        key = hash(raw.header), hash(raw.body)
        count = self._counts.pop(key, 1) + 1
        self._counts[key] = count
        if len(self._counts) > _MAX_COUNTS:
            self._counts.popitem(last=False)
        return count
