"""The queues that the memory brokers of one process share.

Everything here is synchronous and runs on one event loop: a method is one atomic step.
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
    """A message in a queue. Given back, it returns to the place that `position` tells."""

    position: int
    message: Message = field(compare=False)
    count: int = field(default=0, compare=False)


@dataclass(slots=True, eq=False)
class Consumer:
    """One subscription. What it holds are the items it can settle; an item that left `unacked` is lost to it."""

    queue: Queue
    prefetch: int
    on_delivery: OnDelivery
    unacked: dict[int, QueuedMessage] = field(default_factory=dict)
    cancelled: bool = False

    @property
    def has_room(self) -> bool:
        """Whether it takes one more."""
        return len(self.unacked) < self.prefetch


@dataclass(slots=True, eq=False)
class Queue:
    """One queue. The consumer that was served last is asked last."""

    address: Address
    agent: AgentName
    private: bool = False
    ready: list[QueuedMessage] = field(default_factory=list)
    consumers: deque[Consumer] = field(default_factory=deque)
    users: set[object] = field(default_factory=set)

    def next_consumer(self) -> Consumer | None:
        """The next consumer in turn that has room."""
        for _ in range(len(self.consumers)):
            self.consumers.rotate(-1)
            if self.consumers[-1].has_room:
                return self.consumers[-1]
        return None


class InProcessExchange:
    """What a broker's server would hold; it lasts as long as the object.

    A message given back for the `delivery_limit`-th time goes to the dead letters. A private queue disappears
    `private_ttl` after the last broker that used it was closed, and holds at most `private_max_length` messages.
    A request queue holds at most `max_length`. Above `dead_letters_max_length`, the oldest dead letters are dropped.
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
        """Make the queues of `agent` exist; `user` is the broker that asks."""
        requests = [shard_of(agent, number) for number in range(shards)]
        for address in (*requests, nested_of(agent), responses_of(agent), dead_letters_of(agent)):
            self._queues.setdefault(address, Queue(address, agent))
        if replica is not None:
            address = private_of(agent, replica)
            self._queues.setdefault(address, Queue(address, agent, private=True)).users.add(user)

    def queue(self, address: Address) -> Queue | None:
        """The queue at `address`, if it was declared."""
        return self._queues.get(address)

    def private_queues(self, agent: AgentName) -> list[Queue]:
        """The private queues of `agent`."""
        return [queue for queue in self._queues.values() if queue.private and queue.agent == agent]

    def has_room(self, queue: Queue) -> bool:
        """Whether the queue has room for another message."""
        limit = self._private_max_length if queue.private else self._max_length
        return len(queue.ready) < limit or not (queue.private or takes_requests(queue.address))

    def put(self, queue: Queue, message: Message) -> None:
        """Append `message` and hand out what can be."""
        if queue.address == dead_letters_of(queue.agent) and len(queue.ready) >= self._dead_letters_max_length:
            dropped = heapq.heappop(queue.ready).message
            _log.warning("%s is full: dropped its oldest message %s", queue.address, dropped.message_id)
        copy = replace(message, headers=dict(message.headers))
        heapq.heappush(queue.ready, QueuedMessage(next(self._positions), copy))
        self.deliver_ready(queue)

    def deliver_ready(self, queue: Queue) -> None:
        """Give ready messages to consumers with room."""
        while queue.ready and (consumer := queue.next_consumer()):
            item = heapq.heappop(queue.ready)
            item.count += 1
            consumer.unacked[item.position] = item
            asyncio.get_running_loop().call_soon(self._deliver, consumer, item, item.count)

    def settle(self, consumer: Consumer, position: int, count: int) -> QueuedMessage | None:
        """Take the item out of the consumer's hands; None if it is not, or no longer, there."""
        item = consumer.unacked.get(position)
        if item is None or item.count != count:
            return None
        del consumer.unacked[position]
        self.deliver_ready(consumer.queue)
        return item

    def requeue(self, queue: Queue, item: QueuedMessage) -> None:
        """Put an item back in its place, or among the dead letters when it came too often."""
        if item.count >= self._delivery_limit:
            self.dead_letter(queue, item.message, "delivery limit")
        else:
            heapq.heappush(queue.ready, item)
            self.deliver_ready(queue)

    def dead_letter(self, queue: Queue, message: Message, reason: str) -> None:
        """Put `message` among the dead letters of the queue's agent."""
        headers = {**message.headers, Header.DEAD_REASON.value: bounded_reason(reason)}
        self.put(self._queues[dead_letters_of(queue.agent)], replace(message, headers=headers))

    def requeue_unacked(self, consumers: Sequence[Consumer]) -> None:
        """Take everything these consumers hold away from them, then give it back."""
        lost = [(consumer.queue, item) for consumer in consumers for item in consumer.unacked.values()]
        for consumer in consumers:
            consumer.unacked.clear()
        for queue, item in lost:
            self.requeue(queue, item)

    def detach(self, user: object) -> None:
        """A broker was closed: private queues that nobody else uses begin to expire."""
        for queue in self._queues.values():
            if user in queue.users:
                queue.users.discard(user)
                asyncio.get_running_loop().call_later(self._private_ttl.total_seconds(), self._expire, queue)

    def _expire(self, queue: Queue) -> None:
        if not queue.users and not queue.consumers and self._queues.get(queue.address) is queue:
            del self._queues[queue.address]

    def _deliver(self, consumer: Consumer, item: QueuedMessage, count: int) -> None:
        if consumer.unacked.get(item.position) is not item or item.count != count:
            return  # lost on the way
        if consumer.cancelled:
            del consumer.unacked[item.position]
            self.requeue(consumer.queue, item)
            return
        delivery = InProcessDelivery(self, consumer, item)
        try:
            consumer.on_delivery(delivery)
        except Exception:
            _log.exception("on_delivery failed; the message stays unsettled: %s", item.message.message_id)


class InProcessDelivery:
    """One message handed to one consumer."""

    def __init__(self, exchange: InProcessExchange, consumer: Consumer, item: QueuedMessage) -> None:
        self._exchange, self._consumer = exchange, consumer
        self._position = item.position
        self.message = replace(item.message, headers=dict(item.message.headers))
        self.address = consumer.queue.address
        self.count = item.count
        self._settled = False

    @property
    def lost(self) -> bool:
        """Whether its connection was lost, so the message was requeued."""
        unacked = self._consumer.unacked.get(self._position)
        return not self._settled and not (unacked is not None and unacked.count == self.count)

    async def ack(self) -> bool:
        """Settle it: done."""
        return self._settle() is not None

    async def requeue(self) -> bool:
        """Give it back for another consumer; raises its count."""
        item = self._settle()
        if item is not None:
            self._exchange.requeue(self._consumer.queue, item)
        return item is not None

    async def dead_letter(self, reason: str) -> bool:
        """Move it to its agent's dead letters."""
        item = self._settle()
        if item is not None:
            self._exchange.dead_letter(self._consumer.queue, item.message, reason)
        return item is not None

    def _settle(self) -> QueuedMessage | None:
        self._settled = True
        return self._exchange.settle(self._consumer, self._position, self.count)
