"""One message in the hands of one consumer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiormq.abc import DeliveredMessage

from meshpoint.adapters.rabbitmq.envelope import delivery_count
from meshpoint.adapters.rabbitmq.intake import Intake
from meshpoint.errors import BrokerUnavailable
from meshpoint.model.messages import Address, Message

Bury = Callable[[Address, DeliveredMessage, str], Awaitable[None]]


class RabbitDelivery:
    """A `Delivery` that can be settled once, on the channel that brought it."""

    __slots__ = ("_address", "_bury", "_delivered", "_intake", "_message", "_settled")

    def __init__(
        self, message: Message, delivered: DeliveredMessage, address: Address, intake: Intake, bury: Bury
    ) -> None:
        self._message = message
        self._delivered = delivered
        self._address = address
        self._intake = intake
        self._bury = bury
        self._settled = False

    @property
    def message(self) -> Message:
        return self._message

    @property
    def address(self) -> Address:
        return self._address

    @property
    def count(self) -> int:
        """The how-manieth delivery this is; 1 is the first."""
        return delivery_count(self._delivered)

    async def ack(self) -> bool:
        """Settle it: done. The word is on the wire a moment later."""
        if not self._begin_to_settle():
            return False
        self._intake.ack(self._delivered.delivery_tag or 0)
        return True

    async def requeue(self) -> bool:
        """Give it back for another consumer; raises its count."""
        if not self._begin_to_settle():
            return False
        try:
            await self._intake.requeue(self._delivered.delivery_tag or 0)
        except BrokerUnavailable:
            return False
        return True

    async def dead_letter(self, reason: str) -> bool:
        """Move it to its agent's dead letters. A crash between copy and ack leaves it in both places."""
        if self._settled or self._intake.lost:
            return False
        await self._bury(self._address, self._delivered, reason)
        return await self.ack()

    def _begin_to_settle(self) -> bool:
        if self._settled or self._intake.lost:
            return False
        self._settled = True
        return True
