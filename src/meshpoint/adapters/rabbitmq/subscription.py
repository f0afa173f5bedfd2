"""A consumer that comes back: through lost channels, lost connections and restarted brokers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import monotonic

from aiormq.exceptions import ChannelNotFoundEntity

from meshpoint.adapters.rabbitmq.connection import Link, growing_pauses, translated
from meshpoint.adapters.rabbitmq.consumer import Intake
from meshpoint.adapters.rabbitmq.content import Content, decode
from meshpoint.adapters.rabbitmq.delivery import Bury, RabbitDelivery
from meshpoint.adapters.rabbitmq.envelope import quorum_count, to_dead_message, to_message
from meshpoint.adapters.rabbitmq.frames import Arrived
from meshpoint.adapters.rabbitmq.redelivered import Redelivered
from meshpoint.errors import BrokerUnavailable, ConfigurationError, PoisonMessage
from meshpoint.model.messages import Address, bounded_reason, is_dead_letters, is_private
from meshpoint.model.outage import Outage
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
        delivery_limit: int,
    ) -> None:
        self._link = link
        self._queue = queue
        self.address = address
        self._on_delivery = on_delivery
        self._limit = prefetch
        self._timeout = timeout
        self._restore = restore
        self._bury = bury
        self._delivery_limit = delivery_limit
        self._private = is_private(address)
        self._read = to_dead_message if is_dead_letters(address) else to_message
        self._redelivered = Redelivered()
        self._wake = asyncio.Event()
        self._intake: Intake | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._buryings: set[asyncio.Task[None]] = set()
        self._adjustments: set[asyncio.Task[None]] = set()
        self._cancelled = False
        self._outage = Outage(monotonic)

    async def start(self) -> None:
        """Attach for the first time.

        Raises:
            ConfigurationError: there is no such queue.
            BrokerUnavailable: the broker does not answer.
        """
        try:
            await self._restore(False)
            await self._attach()
        except BaseException as error:
            if self._intake is not None:  # its deliveries would never be settled
                self._link.leave(self._intake.channel)
            if isinstance(error, BrokerUnavailable) and isinstance(error.__cause__, ChannelNotFoundEntity):
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
        """Whether it is attached to its queue and has not been cancelled."""
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
        await self._adjust_apart()

    async def cancel(self) -> None:
        """Take no more deliveries; those unsettled can still be settled, then the channel closes."""
        self._cancelled = True  # from here on, a resize changes nothing
        self._limit = 0
        try:
            await self._adjust_apart()
        finally:
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
            await self._intake.close()

    async def _keep(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._cancelled and (self._intake is None or self._intake.lost or self._intake.idle):
                break
            with suppress(BrokerUnavailable):  # gives the intake up, which wakes this loop
                await (self._reattach() if self._intake is None or self._intake.lost else self._adjust())
        if self._intake is not None:
            await self._intake.close()

    async def _reattach(self) -> None:
        log.warning("lost the consumer of %s", self._queue)
        pauses = growing_pauses()
        missing = self._intake is not None and self._intake.cancelled_by_broker
        while not self._cancelled:
            if self._intake is not None:
                await self._intake.close()
            try:
                await self._restore(missing)
                await self._attach()
            except Exception as error:  # whatever it is, a consumer that stays away is worse
                if (seconds := self._outage.failed()) is not None:
                    log.warning("cannot consume %s yet, for %.0f s: %r", self._queue, seconds, error)
                missing = isinstance(error.__cause__, ChannelNotFoundEntity)
                await asyncio.sleep(next(pauses))
            else:
                seconds, _ = self._outage.over()
                log.info("consuming %s again after %.0f s", self._queue, seconds)
                return

    async def _attach(self) -> None:
        intake = Intake(await self._link.open_channel(), self._queue, self._receive, self._wake.set)
        self._intake = intake
        await self._adjust()

    async def _adjust_apart(self) -> None:
        """Adjust to the limit, also if the caller is cancelled meanwhile. Ends with the connection at the latest.

        The library closes the channel of a cancelled call, which would requeue the requests of all running code.
        """
        adjustment = asyncio.create_task(self._adjust())
        self._adjustments.add(adjustment)
        adjustment.add_done_callback(self._adjustments.discard)
        with suppress(BrokerUnavailable):  # the keeper attaches with the new limit, if it still wants to consume
            await asyncio.shield(adjustment)

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

    def _receive(self, arrived: Arrived) -> None:
        intake = self._intake
        if intake is None:
            return
        content = decode(arrived.header)
        try:
            message = self._read(arrived, content)
            count = self._count(arrived, content)
            if count > self._delivery_limit and self._private:
                raise PoisonMessage(f"delivery limit: this is delivery {count}")
        except PoisonMessage as error:
            self._set_aside(arrived, content, intake, str(error))
            return
        except Exception as error:  # our own defect
            self._set_aside(arrived, content, intake, f"internal error: {error!r}")
            return
        delivery = RabbitDelivery(message, arrived, content, self.address, intake, self._bury, count)
        try:
            self._on_delivery(delivery)
        except Exception as error:  # a defect in the receiver must not close the connection that all agents share
            log.exception("message %s could not be passed to its consumer", message.message_id)
            self._set_aside(arrived, content, intake, f"internal error: {type(error).__name__}: {error}")

    def _count(self, arrived: Arrived, content: Content) -> int:
        if not arrived.redelivered:  # on a first delivery, any count in the headers comes from the sender
            return 1
        counted = None if self._private else quorum_count(content)
        return self._redelivered.count(arrived) if counted is None else counted

    def _set_aside(self, arrived: Arrived, content: Content, intake: Intake, reason: str) -> None:
        log.warning("unreadable message in %s: %s", self._queue, bounded_reason(reason))
        burying = asyncio.create_task(self._bury_unreadable(arrived, content, intake, reason))
        self._buryings.add(burying)
        burying.add_done_callback(self._buryings.discard)

    async def _bury_unreadable(self, arrived: Arrived, content: Content, intake: Intake, reason: str) -> None:
        pauses = growing_pauses()
        while not intake.lost:
            try:
                copied = await self._bury(self.address, arrived, content, reason)
            except (BrokerUnavailable, ConfigurationError) as error:
                log.warning("cannot dead-letter a message of %s yet: %s", self._queue, error)
                await asyncio.sleep(next(pauses))
                continue
            if copied:
                intake.ack(arrived.delivery_tag)
            else:
                intake.give_back(arrived.delivery_tag, requeue=False)
            return
