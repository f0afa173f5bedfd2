"""An in-process broker. Brokers that share an exchange can reach each other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from meshpoint.adapters.inprocess.exchange import Consumer, InProcessExchange, Queue
from meshpoint.errors import BrokerUnavailable, ConfigurationError
from meshpoint.model.ids import AgentName, ReplicaId
from meshpoint.model.messages import Address, Message, is_sendable
from meshpoint.ports.broker import OnDelivery, Published


class InProcessBroker:
    """A `Broker` on an `InProcessExchange`.

    Each call yields to the event loop, like a network call.
    """

    def __init__(self, exchange: InProcessExchange) -> None:
        self._exchange = exchange
        self._consumers: list[Consumer] = []
        self._open = False

    @property
    def connected(self) -> bool:
        """Whether the broker is open."""
        return self._open

    @property
    def can_publish(self) -> bool:
        """Whether the broker is open."""
        return self.connected

    def consuming(self, address: Address) -> bool:
        """Whether this broker is open and has an active consumer of `address`."""
        attached = any(each.queue.address == address and not each.cancelled for each in self._consumers)
        return self.connected and attached

    @property
    def max_message_bytes(self) -> int | None:
        """`None`: message size is not limited."""
        return None

    async def open(self) -> None:
        """Open the broker."""
        self._open = True
        await asyncio.sleep(0)

    async def close(self) -> None:
        """Cancel the consumers and requeue their unacked deliveries."""
        if not self._open:
            return
        self._open = False
        for consumer in self._consumers:
            _cancel(consumer)
        self.lose_connection()
        self._consumers.clear()
        self._exchange.detach(self)
        await asyncio.sleep(0)

    def lose_connection(self) -> None:
        """Requeue all unacked deliveries, as if the connection had broken and come back.

        For tests.
        """
        self._exchange.requeue_unacked(self._consumers)

    async def declare(self, agent: AgentName, replica: ReplicaId | None = None, *, shards: int = 1) -> None:
        """Declare the permanent queues of `agent`, and the private queue of `replica` if given."""
        await self._require_open()
        self._exchange.declare(agent, replica, self, shards)

    async def publish(self, messages: Sequence[tuple[Address, Message]]) -> list[Published]:
        """Append each message to its queue, if that queue exists and has room."""
        await self._require_open()
        return [self._publish(address, message) for address, message in messages]

    async def broadcast(self, agent: AgentName, message: Message) -> None:
        """Append `message` to every private queue of `agent` that has room."""
        await self._require_open()
        for queue in self._exchange.private_queues(agent):
            if self._exchange.has_room(queue):
                self._exchange.put(queue, message)

    async def consume(self, address: Address, prefetch: int, on_delivery: OnDelivery) -> InProcessSubscription:
        """Deliver messages from `address` until cancelled.

        Raises:
            ConfigurationError: no queue is declared at `address`.
        """
        await self._require_open()
        consumer = Consumer(self._queue(address), prefetch, on_delivery)
        self._consumers = [each for each in self._consumers if each.unacked or not each.cancelled]
        self._consumers.append(consumer)
        consumer.queue.consumers.append(consumer)
        self._exchange.deliver_ready(consumer.queue)
        return InProcessSubscription(self._exchange, consumer)

    async def depth(self, address: Address) -> int | None:
        """Number of ready messages in the queue, or `None` if it is not declared."""
        await self._require_open()
        queue = self._exchange.queue(address)
        return None if queue is None else len(queue.ready)

    def _publish(self, address: Address, message: Message) -> Published:
        queue = self._exchange.queue(address)
        if not is_sendable(message):
            return Published.REJECTED
        if queue is None:
            return Published.UNROUTABLE
        if not self._exchange.has_room(queue):
            return Published.OVERLOADED
        self._exchange.put(queue, message)
        return Published.ACCEPTED

    def _queue(self, address: Address) -> Queue:
        queue = self._exchange.queue(address)
        if queue is None:
            raise ConfigurationError("broker", f"there is no queue {address!r}", "declare its agent first")
        return queue

    async def _require_open(self) -> None:
        if not self._open:
            raise BrokerUnavailable("the in-process broker is not open")
        await asyncio.sleep(0)


class InProcessSubscription:
    """A running consumer."""

    def __init__(self, exchange: InProcessExchange, consumer: Consumer) -> None:
        self._exchange, self._consumer = exchange, consumer

    async def resize(self, prefetch: int) -> None:
        """Set the maximum number of unacked deliveries."""
        self._consumer.prefetch = prefetch
        self._exchange.deliver_ready(self._consumer.queue)

    async def cancel(self) -> None:
        """Stop receiving deliveries. Unacked ones can still be settled."""
        _cancel(self._consumer)


def _cancel(consumer: Consumer) -> None:
    if not consumer.cancelled:
        consumer.cancelled = True
        consumer.queue.consumers.remove(consumer)
