"""A consumer that comes back: through lost channels, lost connections and restarted brokers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from aiormq.abc import DeliveredMessage
from aiormq.exceptions import ChannelNotFoundEntity

from meshpoint.adapters.rabbitmq.delivery import Bury, RabbitDelivery
from meshpoint.adapters.rabbitmq.envelope import to_message
from meshpoint.adapters.rabbitmq.intake import Intake
from meshpoint.adapters.rabbitmq.link import Link, close_quietly, growing_pauses, translated
from meshpoint.errors import BrokerUnavailable, ConfigurationError, PoisonMessage
from meshpoint.model.messages import Address
from meshpoint.ports.broker import OnDelivery

log = logging.getLogger(__name__)


class RabbitSubscription:
    """A `Subscription`. One task keeps it attached to its queue."""

    def __init__(
        self,
        link: Link,
        queue: str,
        address: Address,
        on_delivery: OnDelivery,
        *,
        prefetch: int,
        timeout: float,
        restore: Callable[[bool], Awaitable[None]],
        bury: Bury,
    ) -> None:
        self._link = link
        self._queue = queue
        self.address = address
        self._on_delivery = on_delivery
        self._limit = prefetch
        self._timeout = timeout
        self._restore = restore
        self._bury = bury
        self._wake = asyncio.Event()
        self._intake: Intake | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._buryings: set[asyncio.Task[None]] = set()
        self._cancelled = False

    async def start(self) -> None:
        """Attach for the first time.

        Raises:
            ConfigurationError: there is no such queue.
            BrokerUnavailable: the broker does not answer.
        """
        try:
            await self._attach()
        except BrokerUnavailable as error:
            if isinstance(error.__cause__, ChannelNotFoundEntity):
                raise ConfigurationError(
                    "mesh.broker_url", f"there is no queue {self._queue!r}", "declare its agent first"
                ) from error
            raise
        self._keeper = asyncio.create_task(self._keep())

    @property
    def attached(self) -> bool:
        """Whether it takes what it should: attached to its queue, or cancelled."""
        return self._cancelled or (self._intake is not None and not self._intake.lost)

    @property
    def taking(self) -> bool:
        """Whether it is attached to its queue and not cancelled."""
        return self.attached and not self._cancelled

    @property
    def over(self) -> bool:
        """Whether it is cancelled and all it took is settled."""
        return self._keeper is not None and self._keeper.done()

    async def resize(self, prefetch: int) -> None:
        """Let up to `prefetch` deliveries be unsettled at a time; 0 takes none."""
        if self._cancelled:
            return
        self._limit = prefetch
        with suppress(BrokerUnavailable):  # the keeper attaches with the new limit
            await self._adjust()

    async def cancel(self) -> None:
        """Take no more deliveries; those unsettled can still be settled, then the channel closes."""
        await self.resize(0)
        self._cancelled = True
        self._wake.set()

    async def close(self) -> None:
        """Give unsettled deliveries back. What was settled before is on the wire when this returns."""
        self._cancelled = True
        for task in (self._keeper, *self._buryings):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        if self._intake is not None:
            await self._intake.acks_sent()
            await close_quietly(self._intake.channel)

    async def _keep(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._cancelled and (self._intake is None or self._intake.lost or self._intake.idle):
                break
            with suppress(BrokerUnavailable):  # gives the intake up, which wakes this loop
                await (self._reattach() if self._intake is None or self._intake.lost else self._adjust())
        if self._intake is not None:
            await close_quietly(self._intake.channel)

    async def _reattach(self) -> None:
        log.warning("lost the consumer of %s", self._queue)
        pauses = growing_pauses()
        while not self._cancelled:
            if self._intake is not None:
                await close_quietly(self._intake.channel)
            try:
                await self._attach()
            except Exception as error:  # whatever it is, a consumer that stays away is worse
                log.warning("cannot consume %s yet: %r", self._queue, error)
                if isinstance(error.__cause__, ChannelNotFoundEntity):
                    with suppress(BrokerUnavailable, ConfigurationError):
                        await self._restore(True)
                await asyncio.sleep(next(pauses))
            else:
                log.info("consuming %s again", self._queue)
                return

    async def _attach(self) -> None:
        await self._restore(False)
        channel = await self._link.open_channel()
        intake = Intake(channel, self._queue, self._receive, self._wake.set)
        self._intake = intake
        await self._adjust()

    async def _adjust(self) -> None:
        intake = self._intake
        if intake is None or intake.lost:
            return
        try:
            with translated(f"consuming {self._queue}"):
                async with asyncio.timeout(self._timeout):
                    await intake.adjust(self._limit)
        except BaseException:
            intake.give_up()
            raise

    def _receive(self, delivered: DeliveredMessage) -> None:
        intake = self._intake
        if intake is None or delivered.channel is not intake.channel:
            return  # of a channel given up meanwhile; the broker has it back
        try:
            message = to_message(delivered)
        except PoisonMessage as error:
            burying = asyncio.create_task(self._bury_unreadable(delivered, intake, str(error)))
            self._buryings.add(burying)
            burying.add_done_callback(self._buryings.discard)
            return
        self._on_delivery(RabbitDelivery(message, delivered, self.address, intake, self._bury))

    async def _bury_unreadable(self, delivered: DeliveredMessage, intake: Intake, reason: str) -> None:
        log.warning("unreadable message in %s: %s", self._queue, reason)
        tag = delivered.delivery_tag or 0
        try:
            await self._bury(self.address, delivered, reason)
            intake.ack(tag)
        except BrokerUnavailable:
            with suppress(BrokerUnavailable):
                await intake.requeue(tag)
