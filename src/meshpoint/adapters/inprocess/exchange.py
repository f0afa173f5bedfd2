"""The queues shared by the in-process brokers of one process.

All methods are synchronous and run on one event loop, so each is atomic.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import count

from meshpoint.model.ids import AgentName, ReplicaId
from meshpoint.model.messages import (
    Address,
    Header,
    Message,
    bounded_reason,
    dead_letters_of,
    nested_of,
    private_of,
    responses_of,
    shard_of,
    takes_requests,
)
from meshpoint.ports.broker import OnDelivery

_log = logging.getLogger(__name__)


@dataclass(slots=True, order=True)
class QueuedMessage:
    """A message in a queue. `position` is its place, which it returns to when requeued."""

    position: int
    message: Message = field(compare=False)
    count: int = field(default=0, compare=False)


@dataclass(slots=True, eq=False)
class Consumer:
    """One subscription. It can settle only deliveries in `unacked`; it has lost any other."""

    queue: Queue
    prefetch: int
    on_delivery: OnDelivery
    unacked: dict[int, QueuedMessage] = field(default_factory=dict)
    cancelled: bool = False

    @property
    def has_room(self) -> bool:
        """Whether it has fewer unacked deliveries than its prefetch limit."""
        return len(self.unacked) < self.prefetch


@dataclass(slots=True, eq=False)
class Queue:
    """One queue, which serves its consumers in turn."""

    address: Address
    agent: AgentName
    private: bool = False
    ready: list[QueuedMessage] = field(default_factory=list)
    consumers: deque[Consumer] = field(default_factory=deque)
    users: set[object] = field(default_factory=set)

    def next_consumer(self) -> Consumer | None:
        """The next consumer in turn that has room, or `None`."""
        for _ in range(len(self.consumers)):
            self.consumers.rotate(-1)
            if self.consumers[-1].has_room:
                return self.consumers[-1]
        return None


class InProcessExchange:
    """Queues and messages, as a broker's server would hold them; they last as long as this object.

    A message requeued for the `delivery_limit`-th time becomes a dead letter. A private queue
    holds at most `private_max_length` messages and disappears `private_ttl` after the last broker
    that used it was closed. A request queue holds at most `max_length` messages. A queue of dead
    letters holds at most `dead_letters_max_length`; beyond that, its oldest is dropped.
    """

    def __init__(
        self,
        *,
        delivery_limit: int = 20,
        private_ttl: timedelta = timedelta(minutes=30),
        max_length: int = 100_000,
        private_max_length: int = 100_000,
        dead_letters_max_length: int = 10_000,
    ) -> None:
        self._delivery_limit = delivery_limit
        self._private_ttl = private_ttl
        self._max_length = max_length
        self._private_max_length = private_max_length
        self._dead_letters_max_length = dead_letters_max_length
        self._queues: dict[Address, Queue] = {}
        self._positions = count()

    def declare(self, agent: AgentName, replica: ReplicaId | None, user: object, shards: int = 1) -> None:
        """Declare the queues of `agent`.

        `user`, the calling broker, keeps the private queue alive.
        """
        requests = [shard_of(agent, number) for number in range(shards)]
        for address in (*requests, nested_of(agent), responses_of(agent), dead_letters_of(agent)):
            self._queues.setdefault(address, Queue(address, agent))
        if replica is not None:
            address = private_of(agent, replica)
            self._queues.setdefault(address, Queue(address, agent, private=True)).users.add(user)

    def queue(self, address: Address) -> Queue | None:
        """The queue at `address`, or `None` if it is not declared."""
        return self._queues.get(address)

    def private_queues(self, agent: AgentName) -> list[Queue]:
        """The private queues of all replicas of `agent`."""
        return [queue for queue in self._queues.values() if queue.private and queue.agent == agent]

    def has_room(self, queue: Queue) -> bool:
        """Whether `queue` accepts another message. Only request and private queues are limited."""
        limit = self._private_max_length if queue.private else self._max_length
        return len(queue.ready) < limit or not (queue.private or takes_requests(queue.address))

    def put(self, queue: Queue, message: Message) -> None:
        """Append `message` and deliver it if a consumer has room.

        A full dead-letter queue drops its oldest message.
        """
        if queue.address == dead_letters_of(queue.agent) and len(queue.ready) >= self._dead_letters_max_length:
            dropped = heapq.heappop(queue.ready).message
            _log.warning("%s is full: dropped its oldest message %s", queue.address, dropped.message_id)
        copy = replace(message, headers=dict(message.headers))
        heapq.heappush(queue.ready, QueuedMessage(next(self._positions), copy))
        self.deliver_ready(queue)

    def deliver_ready(self, queue: Queue) -> None:
        """Deliver ready messages to the consumers that have room."""
        while queue.ready and (consumer := queue.next_consumer()):
            item = heapq.heappop(queue.ready)
            item.count += 1
            consumer.unacked[item.position] = item
            asyncio.get_running_loop().call_soon(self._deliver, consumer, item, item.count)

    def settle(self, consumer: Consumer, position: int, count: int) -> QueuedMessage | None:
        """Remove a delivery from `consumer`. Returns `None` if the consumer no longer has it.

        Args:
            count: the item's delivery count, which distinguishes this delivery from a later one.
        """
        item = consumer.unacked.get(position)
        if item is None or item.count != count:
            return None
        del consumer.unacked[position]
        self.deliver_ready(consumer.queue)
        return item

    def requeue(self, queue: Queue, item: QueuedMessage) -> None:
        """Return `item` to its place in the queue, or dead-letter it at the delivery limit."""
        if item.count >= self._delivery_limit:
            self.dead_letter(queue, item.message, "delivery limit")
        else:
            heapq.heappush(queue.ready, item)
            self.deliver_ready(queue)

    def dead_letter(self, queue: Queue, message: Message, reason: str) -> None:
        """Move `message` to the dead letters of the queue's agent."""
        headers = {**message.headers, Header.DEAD_REASON.value: bounded_reason(reason)}
        self.put(self._queues[dead_letters_of(queue.agent)], replace(message, headers=headers))

    def requeue_unacked(self, consumers: Sequence[Consumer]) -> None:
        """Requeue all unacked deliveries of `consumers`."""
        lost = [(consumer.queue, item) for consumer in consumers for item in consumer.unacked.values()]
        for consumer in consumers:
            consumer.unacked.clear()
        for queue, item in lost:
            self.requeue(queue, item)

    def detach(self, user: object) -> None:
        """Forget a closed broker. Private queues that no other broker uses start to expire."""
        for queue in self._queues.values():
            if user in queue.users:
                queue.users.discard(user)
                asyncio.get_running_loop().call_later(self._private_ttl.total_seconds(), self._expire, queue)

    def _expire(self, queue: Queue) -> None:
        if not queue.users and not queue.consumers and self._queues.get(queue.address) is queue:
            del self._queues[queue.address]

    def _deliver(self, consumer: Consumer, item: QueuedMessage, count: int) -> None:
        if consumer.unacked.get(item.position) is not item or item.count != count:
            return  # lost before it was delivered
        if consumer.cancelled:
            del consumer.unacked[item.position]
            self.requeue(consumer.queue, item)
            return
        delivery = InProcessDelivery(self, consumer, item)
        try:
            consumer.on_delivery(delivery)
        except Exception:
            _log.exception("on_delivery failed; the message stays unacked: %s", item.message.message_id)


class InProcessDelivery:
    """One message delivered to one consumer."""

    def __init__(self, exchange: InProcessExchange, consumer: Consumer, item: QueuedMessage) -> None:
        self._exchange, self._consumer = exchange, consumer
        self._position = item.position
        self.message = replace(item.message, headers=dict(item.message.headers))
        self.address = consumer.queue.address
        self.count = item.count
        self._settled = False

    @property
    def lost(self) -> bool:
        """Whether the consumer has lost it, so another consumer may receive it."""
        unacked = self._consumer.unacked.get(self._position)
        return not self._settled and not (unacked is not None and unacked.count == self.count)

    async def ack(self) -> bool:
        """Remove the message. Returns `False` if the delivery was lost or already settled."""
        return self._settle() is not None

    async def requeue(self) -> bool:
        """Return the message to the queue for any consumer; raises its delivery count."""
        item = self._settle()
        if item is not None:
            self._exchange.requeue(self._consumer.queue, item)
        return item is not None

    async def dead_letter(self, reason: str) -> bool:
        """Move the message to its agent's dead letters."""
        item = self._settle()
        if item is not None:
            self._exchange.dead_letter(self._consumer.queue, item.message, reason)
        return item is not None

    def _settle(self) -> QueuedMessage | None:
        self._settled = True
        return self._exchange.settle(self._consumer, self._position, self.count)
