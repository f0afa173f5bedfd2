"""One message in the hands of one consumer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from meshpoint.adapters.rabbitmq.consumer import Intake
from meshpoint.adapters.rabbitmq.content import Content
from meshpoint.adapters.rabbitmq.frames import Arrived
from meshpoint.model.messages import Address, Message

Bury = Callable[[Address, Arrived, Content, str], Awaitable[bool]]
"""Copies a message to its agent's dead-letter queue; returns `False` if no copy can ever be made."""


class RabbitDelivery:
    """A `Delivery` that can be settled once, on the channel that brought it."""

    __slots__ = ("_address", "_arrived", "_bury", "_content", "_count", "_intake", "_message", "_settled")

    def __init__(
        self,
        message: Message,
        arrived: Arrived,
        content: Content,
        address: Address,
        intake: Intake,
        bury: Bury,
        count: int,
    ) -> None:
        self._message = message
        self._arrived = arrived
        self._content = content
        self._address = address
        self._intake = intake
        self._bury = bury
        self._count = count
        self._settled = False

    @property
    def message(self) -> Message:
        return self._message

    @property
    def address(self) -> Address:
        return self._address

    @property
    def count(self) -> int:
        """Delivery count, starting at 1."""
        return self._count

    @property
    def lost(self) -> bool:
        """Whether its channel was lost, so the broker requeued the message."""
        return self._intake.lost and not self._settled

    async def ack(self) -> bool:
        """Settle it: done. The word is on the wire a moment later."""
        if not self._begin_to_settle():
            return False
        self._intake.ack(self._arrived.delivery_tag)
        return True

    async def requeue(self) -> bool:
        """Give it back for another consumer; raises its count."""
        if not self._begin_to_settle():
            return False
        self._intake.give_back(self._arrived.delivery_tag)
        return True

    async def dead_letter(self, reason: str) -> bool:
        """Move it to its agent's dead letters. A crash between copy and ack leaves it in both places."""
        if self._settled or self._intake.lost:
            return False
        if await self._bury(self._address, self._arrived, self._content, reason):
            return await self.ack()
        if not self._begin_to_settle():
            return False
        self._intake.give_back(self._arrived.delivery_tag, requeue=False)
        return True

    def _begin_to_settle(self) -> bool:
        if self._settled or self._intake.lost:
            return False
        self._settled = True
        return True
