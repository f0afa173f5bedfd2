"""One message delivered to one consumer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from meshpoint.adapters.rabbitmq.consumer import Consumer
from meshpoint.adapters.rabbitmq.content import Content
from meshpoint.adapters.rabbitmq.frames import RawDelivery
from meshpoint.model.messages import Address, Message

DeadLetterMessage = Callable[[Address, RawDelivery, Content, str], Awaitable[bool]]
"""Copies a message to its agent's dead-letter queue; returns `False` if no copy can ever be made."""


class RabbitDelivery:
    """A `Delivery` that can be settled once, on the channel that delivered it."""

    __slots__ = ("_address", "_consumer", "_content", "_count", "_dead_letter", "_message", "_raw", "_settled")

    def __init__(
        self,
        message: Message,
        raw: RawDelivery,
        content: Content,
        address: Address,
        consumer: Consumer,
        dead_letter: DeadLetterMessage,
        count: int,
    ) -> None:
        self._message = message
        self._raw = raw
        self._content = content
        self._address = address
        self._consumer = consumer
        self._dead_letter = dead_letter
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
        if await self._dead_letter(self._address, self._raw, self._content, reason):
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
