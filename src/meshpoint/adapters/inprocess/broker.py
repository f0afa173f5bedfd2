"""An in-process broker. Brokers that share an exchange can reach each other."""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import count, starmap

from meshpoint.errors import BrokerUnavailable, ConfigurationError
from meshpoint.model.ids import AgentName, ReplicaId, TaskId
from meshpoint.model.messages import (
    Address,
    Header,
    Message,
    Topic,
    dead_letter_queue,
    is_request_queue,
    is_sendable,
    nested_queue,
    private_queue,
    request_shard,
    response_queue,
    truncate_reason,
)
from meshpoint.ports.broker import OnDelivery, PublishResult, RequestSearch

_log = logging.getLogger(__name__)


@dataclass(slots=True, order=True)
class QueuedMessage:
    """A message in a queue. `position` is its place, which it returns to when requeued."""

    position: int
    message: Message = field(compare=False)
    count: int = field(default=0, compare=False)


@dataclass(eq=False)
class InProcessSubscription:
    """A running consumer. It can settle only deliveries in `unacked`; it has lost any other."""

    exchange: InProcessExchange
    queue: Queue
    prefetch: int
    on_delivery: OnDelivery
    unacked: dict[int, QueuedMessage] = field(default_factory=dict)
    cancelled: bool = False

    async def resize(self, prefetch: int) -> None:
        """Set the maximum number of unacked deliveries."""
        self.prefetch = prefetch
        self.exchange.deliver_ready(self.queue)

    async def cancel(self) -> None:
        """Stop receiving deliveries. Unacked ones can still be settled."""
        self.stop()

    def stop(self) -> None:
        """Like `cancel`, but synchronous."""
        if not self.cancelled:
            self.cancelled = True
            self.queue.consumers.remove(self)


@dataclass(slots=True, eq=False)
class Queue:
    """One queue, which serves its consumers in turn. `max_length` is `None` if unlimited.

    `task_ids` counts the correlation ids of its messages, including unacked ones.
    """

    address: Address
    agent: AgentName
    max_length: int | None
    private: bool = False
    ready: list[QueuedMessage] = field(default_factory=list)
    task_ids: Counter[str] = field(default_factory=Counter)
    consumers: deque[InProcessSubscription] = field(default_factory=deque)
    users: set[object] = field(default_factory=set)
    topics: set[Topic] = field(default_factory=set)


class InProcessExchange:
    """Queues and messages, as a broker's server would hold them; they last as long as this object.

    A message requeued for the `delivery_limit`-th time becomes a dead letter. A private queue
    holds at most `private_max_length` messages and disappears `private_ttl` after the last broker
    that used it was closed. A request queue holds at most `max_length` messages. A queue of dead
    letters holds at most `dead_letters_max_length`; beyond that, its oldest is dropped.

    All methods are synchronous and run on one event loop, so each is atomic.
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
        self.queues: dict[Address, Queue] = {}
        self.database_markers: set[AgentName] = set()
        self._positions = count()

    def declare(
        self, agent: AgentName, replica: ReplicaId | None, user: object, shards: int = 1
    ) -> None:
        """Declare the queues of `agent`.

        `user`, the calling broker, keeps the private queue alive.
        """
        limits = {
            **{request_shard(agent, number): self._max_length for number in range(shards)},
            nested_queue(agent): self._max_length,
            response_queue(agent): None,
            dead_letter_queue(agent): self._dead_letters_max_length,
        }
        for address, limit in limits.items():
            self.queues.setdefault(address, Queue(address, agent, limit))
        if replica is not None:
            address = private_queue(agent, replica)
            private = Queue(address, agent, self._private_max_length, private=True)
            self.queues.setdefault(address, private).users.add(user)

    def subscribe(
        self, agent: AgentName, replica: ReplicaId, user: object, topics: Iterable[Topic]
    ) -> None:
        """Declare the private queue of `replica`, and also append messages of `topics` to it."""
        self.declare(agent, replica, user)
        self.queues[private_queue(agent, replica)].topics.update(topics)

    def announce(self, topic: Topic, message: Message) -> None:
        """Append `message` to every queue that is subscribed to `topic` and has room."""
        for queue in self.subscribers(topic):
            self.put(queue, message)

    def publish(self, address: Address, message: Message) -> PublishResult:
        """Append `message` to the queue at `address`, if that exists and has room."""
        if not is_sendable(message):
            return PublishResult.REJECTED
        queue = self.queues.get(address)
        if queue is None:
            return PublishResult.UNROUTABLE
        return PublishResult.ACCEPTED if self.put(queue, message) else PublishResult.OVERLOADED

    def consume(
        self, address: Address, prefetch: int, on_delivery: OnDelivery
    ) -> InProcessSubscription:
        """Deliver messages from `address` until cancelled; see `InProcessBroker.consume`."""
        queue = self.queues.get(address)
        if queue is None:
            raise ConfigurationError(
                "broker", f"there is no queue {address!r}", "declare its agent first"
            )
        consumer = InProcessSubscription(self, queue, prefetch, on_delivery)
        queue.consumers.append(consumer)
        self.deliver_ready(queue)
        return consumer

    def private_queues(self, agent: AgentName) -> list[Queue]:
        """The private queues of all replicas of `agent`."""
        return [queue for queue in self.queues.values() if queue.private and queue.agent == agent]

    def subscribers(self, topic: Topic) -> list[Queue]:
        """The private queues that are subscribed to `topic`."""
        return [queue for queue in self.queues.values() if topic in queue.topics]

    def put(self, queue: Queue, message: Message) -> bool:
        """Append `message` and deliver it if a consumer has room. Returns `False` if it is full.

        A full dead-letter queue drops its oldest message instead.
        """
        if queue.max_length is not None and len(queue.ready) >= queue.max_length:
            if queue.address != dead_letter_queue(queue.agent):
                return False
            dropped = heapq.heappop(queue.ready).message
            self.forget(queue, dropped)
            _log.warning(
                "%s is full: dropped its oldest message %s", queue.address, dropped.message_id
            )
        copy = replace(message, headers=dict(message.headers))
        heapq.heappush(queue.ready, QueuedMessage(next(self._positions), copy))
        queue.task_ids[message.correlation_id] += 1
        self.deliver_ready(queue)
        return True

    def forget(self, queue: Queue, message: Message) -> None:
        """Record that `message` has left the queue."""
        queue.task_ids[message.correlation_id] -= 1
        if not queue.task_ids[message.correlation_id]:
            del queue.task_ids[message.correlation_id]

    def deliver_ready(self, queue: Queue) -> None:
        """Deliver ready messages to the consumers that have room, in turn."""
        full = 0  # consecutive consumers without room
        while queue.ready and full < len(queue.consumers):
            queue.consumers.rotate(-1)
            consumer = queue.consumers[-1]
            if len(consumer.unacked) >= consumer.prefetch:
                full += 1
                continue
            full = 0
            item = heapq.heappop(queue.ready)
            item.count += 1
            consumer.unacked[item.position] = item
            asyncio.get_running_loop().call_soon(self._deliver, consumer, item, item.count)

    def requeue(self, queue: Queue, item: QueuedMessage) -> None:
        """Return `item` to its place in the queue, or dead-letter it at the delivery limit."""
        if item.count >= self._delivery_limit:
            self.dead_letter(queue, item.message, "delivery limit")
        else:
            heapq.heappush(queue.ready, item)
            self.deliver_ready(queue)

    def dead_letter(self, queue: Queue, message: Message, reason: str) -> None:
        """Move `message` to the dead letters of the queue's agent."""
        self.forget(queue, message)
        headers = {**message.headers, Header.DEAD_REASON.value: truncate_reason(reason)}
        self.put(self.queues[dead_letter_queue(queue.agent)], replace(message, headers=headers))

    def requeue_unacked(self, consumers: Sequence[InProcessSubscription]) -> None:
        """Requeue all unacked deliveries of `consumers`."""
        lost = [
            (consumer.queue, item) for consumer in consumers for item in consumer.unacked.values()
        ]
        for consumer in consumers:
            consumer.unacked.clear()
        for queue, item in lost:
            self.requeue(queue, item)

    def detach(self, user: object) -> None:
        """Forget a closed broker. Private queues that no other broker uses start to expire."""
        for queue in self.queues.values():
            if user in queue.users:
                queue.users.discard(user)
                asyncio.get_running_loop().call_later(
                    self._private_ttl.total_seconds(), self._expire, queue
                )

    def _expire(self, queue: Queue) -> None:
        if not queue.users and not queue.consumers and self.queues.get(queue.address) is queue:
            del self.queues[queue.address]

    def _deliver(self, consumer: InProcessSubscription, item: QueuedMessage, count: int) -> None:
        if item.position not in consumer.unacked or item.count != count:
            return  # lost before it was delivered
        if consumer.cancelled:
            del consumer.unacked[item.position]
            self.requeue(consumer.queue, item)
            return
        message = replace(item.message, headers=dict(item.message.headers))
        delivery = InProcessDelivery(
            message, consumer.queue.address, count, _exchange=self, _consumer=consumer, _item=item
        )
        try:
            consumer.on_delivery(delivery)
        except Exception:
            _log.exception(
                "on_delivery failed; the message stays unacked: %s", item.message.message_id
            )


@dataclass(eq=False)
class InProcessDelivery:
    """One message delivered to one consumer."""

    message: Message
    address: Address
    delivery_count: int
    _exchange: InProcessExchange
    _consumer: InProcessSubscription
    _item: QueuedMessage
    _settled: bool = False

    @property
    def lost(self) -> bool:
        """Whether the consumer has lost it, so another consumer may receive it."""
        unacked = self._item.position in self._consumer.unacked
        return not self._settled and not (unacked and self._item.count == self.delivery_count)

    async def ack(self) -> bool:
        """Remove the message. Returns `False` if the delivery was lost or already settled."""
        if not self._settle():
            return False
        self._exchange.forget(self._consumer.queue, self._item.message)
        return True

    async def requeue(self) -> bool:
        """Return the message to the queue for any consumer; raises its delivery count."""
        if not self._settle():
            return False
        self._exchange.requeue(self._consumer.queue, self._item)
        return True

    async def dead_letter(self, reason: str) -> bool:
        """Move the message to its agent's dead letters."""
        if not self._settle():
            return False
        self._exchange.dead_letter(self._consumer.queue, self._item.message, reason)
        return True

    def _settle(self) -> bool:
        """Take the delivery from its consumer, unless the consumer no longer has it."""
        self._settled = True
        if self._item.count != self.delivery_count:  # delivered again since
            return False
        if self._consumer.unacked.pop(self._item.position, None) is None:
            return False
        self._exchange.deliver_ready(self._consumer.queue)
        return True


class InProcessBroker:
    """A `Broker` on an `InProcessExchange`.

    Each call yields to the event loop, like a network call.
    """

    def __init__(self, exchange: InProcessExchange) -> None:
        self._exchange = exchange
        self._consumers: list[InProcessSubscription] = []
        self._open = False

    @property
    def connected(self) -> bool:
        """Whether the broker is open."""
        return self._open

    @property
    def can_publish(self) -> bool:
        """Whether the broker is open."""
        return self.connected

    def is_consuming(self, address: Address) -> bool:
        """Whether this broker is open and has an active consumer of `address`."""
        attached = any(
            each.queue.address == address and not each.cancelled for each in self._consumers
        )
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
        self.abort()
        await asyncio.sleep(0)

    def abort(self) -> None:
        """Like `close`, but synchronous."""
        if not self._open:
            return
        self._open = False
        for consumer in self._consumers:
            consumer.stop()
        self.lose_connection()
        self._consumers.clear()
        self._exchange.detach(self)

    def lose_connection(self) -> None:
        """Requeue all unacked deliveries, as if the connection had broken and come back.

        For tests.
        """
        self._exchange.requeue_unacked(self._consumers)

    async def declare(
        self, agent: AgentName, replica: ReplicaId | None = None, *, shards: int = 1
    ) -> None:
        """Declare the permanent queues of `agent`, and the private queue of `replica` if given."""
        await self._require_open()
        self._exchange.declare(agent, replica, self, shards)

    async def mark_database(self, agent: AgentName) -> bool:
        """Set the marker of `agent`. Returns `True` if it was not set before."""
        await self._require_open()
        is_new = agent not in self._exchange.database_markers
        self._exchange.database_markers.add(agent)
        return is_new

    async def has_database_marker(self, agent: AgentName) -> bool:
        """Whether the marker of `agent` is set."""
        await self._require_open()
        return agent in self._exchange.database_markers

    async def remove_database_marker(self, agent: AgentName) -> None:
        """Remove the marker of `agent`, if it is set."""
        await self._require_open()
        self._exchange.database_markers.discard(agent)

    async def publish(self, messages: Sequence[tuple[Address, Message]]) -> list[PublishResult]:
        """Append each message to its queue, if that queue exists and has room."""
        await self._require_open()
        return list(starmap(self._exchange.publish, messages))

    async def broadcast(self, agent: AgentName, message: Message) -> None:
        """Append `message` to every private queue of `agent` that has room."""
        await self._require_open()
        for queue in self._exchange.private_queues(agent):
            self._exchange.put(queue, message)

    async def subscribe(
        self, agent: AgentName, replica: ReplicaId, topics: Sequence[Topic]
    ) -> None:
        """Also deliver `topics` to the private queue of `replica`."""
        await self._require_open()
        self._exchange.subscribe(agent, replica, self, topics)

    async def announce(self, topic: Topic, message: Message) -> None:
        """Append `message` to every subscribed queue that has room."""
        await self._require_open()
        self._exchange.announce(topic, message)

    async def consume(
        self, address: Address, prefetch: int, on_delivery: OnDelivery
    ) -> InProcessSubscription:
        """Deliver messages from `address` until cancelled.

        Raises:
            ConfigurationError: no queue is declared at `address`.
        """
        await self._require_open()
        consumer = self._exchange.consume(address, prefetch, on_delivery)
        self._consumers = [each for each in self._consumers if each.unacked or not each.cancelled]
        self._consumers.append(consumer)
        return consumer

    async def depth(self, address: Address) -> int | None:
        """Number of ready messages in the queue, or `None` if it is not declared."""
        await self._require_open()
        queue = self._exchange.queues.get(address)
        return None if queue is None else len(queue.ready)

    async def find_request(self, agent: AgentName, task_id: TaskId) -> RequestSearch:
        """Whether a request queue of `agent` has a message of the task, unacked or not."""
        await self._require_open()
        return RequestSearch(
            any(
                queue.agent == agent and task_id in queue.task_ids
                for address, queue in self._exchange.queues.items()
                if is_request_queue(address)
            )
        )

    def deny_request(self, agent: AgentName, task_id: TaskId) -> Mapping[Address, int]:
        """Empty: `find_request` sees unacked messages too."""
        return {}

    async def _require_open(self) -> None:
        if not self._open:
            raise BrokerUnavailable("the in-process broker is not open")
        await asyncio.sleep(0)
