"""Fixtures and helpers of the broker suite, and its tests of publishing and content."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from meshpoint.model.ids import AgentName, ReplicaId, TaskId, new_id
from meshpoint.model.messages import (
    Address,
    Header,
    Message,
    MessageType,
    Topic,
    dead_letter_queue,
    nested_queue,
    private_queue,
    request_queue,
    request_shard,
    response_queue,
)
from meshpoint.ports.broker import Broker, Delivery, PublishResult

TEST_TIMEOUT = 30.0
"""Seconds to wait for an expected event. Only a failing test waits this long."""
AGENT = AgentName("travel")
STRANGER = AgentName("flights")
REQUESTS = request_queue(AGENT)
NEVER_SENT: dict[str, dict[str, object]] = {
    "long id": {"correlation_id": "é" * 128},
    "long address": {"reply_to": "x" * 256},
    "no UTF-8": {"app_id": "\ud800"},
    "no UTF-8 in a header": {"headers": {"x-some": "\ud800"}},
    "long header": {"headers": {"x-some": "x" * 140_000}},
    "many headers": {"headers": {f"x-{place}": "x" * 1000 for place in range(140)}},
    "long name of a header": {"headers": {"x" * 256: 1}},
    "other value": {"headers": {"x-some": b"bytes"}},
}
"""Changes that make a message impossible to send, by test id."""


def a_message(body: bytes = b"{}", **changes: object) -> Message:
    """A request with a new `message_id` and `correlation_id`."""
    message = Message(
        MessageType.REQUEST, body, message_id=new_id(), correlation_id=new_id(), app_id="planner"
    )
    return replace(message, **changes)  # type: ignore[arg-type]


async def is_denied(task_id: TaskId, *brokers: Broker) -> bool:
    """Whether no queue has the task's request, and all consumers that count deny to hold it.

    The first of `brokers` searches, and all of them deny.
    """
    search = await brokers[0].find_request(AGENT, task_id)
    denied = Counter[Address]()
    for broker in brokers:
        denied.update(broker.deny_request(AGENT, task_id))
    missing = [address for address, count in search.consumers.items() if denied[address] < count]
    return not (search.may_be_queued or missing)


async def until_denied(task_id: TaskId, *brokers: Broker) -> None:
    """Wait until `is_denied`."""
    async with asyncio.timeout(TEST_TIMEOUT):
        while not await is_denied(task_id, *brokers):
            pass


async def consume_all(broker: Broker, on_delivery: Callable[[Delivery], None]) -> None:
    """Consume all request queues, as a replica does."""
    await broker.declare(AGENT)
    for address in (REQUESTS, nested_queue(AGENT)):
        await broker.consume(address, 5, on_delivery)


class Inbox:
    """Collects deliveries in order. Pass it as the `on_delivery` callback."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Delivery] = asyncio.Queue()
        self._thread = threading.get_ident()

    def __call__(self, delivery: Delivery) -> None:
        if threading.get_ident() != self._thread or not asyncio.get_running_loop().is_running():
            raise AssertionError("on_delivery must be called on the event loop")
        self._queue.put_nowait(delivery)

    async def next(self) -> Delivery:
        """Wait for the next delivery and return it."""
        async with asyncio.timeout(TEST_TIMEOUT):
            return await self._queue.get()

    async def take(self, count: int) -> list[Delivery]:
        """Wait for the next `count` deliveries and return them."""
        return [await self.next() for _ in range(count)]

    def empty(self) -> bool:
        """Whether no delivery is waiting in the inbox."""
        return self._queue.empty()


class MessageSuite(ABC):
    """Queues are declared, and each message arrives unchanged or gets its own result.

    An adapter's test class provides the fixtures and hooks; see the module `broker`.
    """

    verified_user: str | None = None
    """The `user_id` that the broker itself puts on messages; `None` if it keeps the sender's."""

    @pytest.fixture
    @abstractmethod
    def broker(self) -> AsyncIterator[Broker]:
        """An open broker without queues or messages."""

    @pytest.fixture
    @abstractmethod
    def other(self, broker: Broker) -> AsyncIterator[Broker]:
        """A second open broker on the same data as `broker`."""

    @abstractmethod
    async def break_connection(self, broker: Broker) -> None:
        """Break the connection of `broker`, which must reconnect by itself."""

    @pytest.fixture(autouse=True)
    async def _declared(self, broker: Broker) -> None:
        await broker.declare(AGENT)

    def received(self, message: Message) -> Message:
        """The message that a consumer receives when `message` is sent."""
        return replace(message, user_id=self.verified_user or message.user_id)

    async def nothing_is_left(self, broker: Broker, inbox: Inbox) -> None:
        """Assert that the request queue is empty and that no delivery was duplicated.

        The next delivery in `inbox` must be a message that is sent here.
        """
        await until_depth(broker, REQUESTS, 0)
        last = a_message()
        await send(broker, REQUESTS, last)
        delivery = await inbox.next()
        assert delivery.message.message_id == last.message_id
        assert delivery.delivery_count == 1
        assert await delivery.ack()

    async def test_a_declared_queue_accepts_though_nobody_consumes(self, broker: Broker) -> None:
        for address in (REQUESTS, response_queue(AGENT), dead_letter_queue(AGENT)):
            assert await broker.publish([(address, a_message())]) == [PublishResult.ACCEPTED]

    async def test_an_undeclared_queue_is_unroutable(self, broker: Broker) -> None:
        assert await broker.publish([(request_queue(STRANGER), a_message())]) == [
            PublishResult.UNROUTABLE
        ]

    async def test_results_come_in_the_order_of_the_arguments(self, broker: Broker) -> None:
        addresses = [
            REQUESTS,
            request_queue(STRANGER),
            REQUESTS,
            response_queue(STRANGER),
            response_queue(AGENT),
        ]
        results = await broker.publish([(address, a_message()) for address in addresses])
        good, bad = PublishResult.ACCEPTED, PublishResult.UNROUTABLE
        assert results == [good, bad, good, bad, good]

    async def test_unroutable_message_does_not_block_others(self, broker: Broker) -> None:
        first, second = a_message(), a_message()
        await broker.publish(
            [(REQUESTS, first), (request_queue(STRANGER), a_message()), (REQUESTS, second)]
        )
        inbox = await consume(broker, REQUESTS, 10)
        assert [d.message.message_id for d in await inbox.take(2)] == [
            first.message_id,
            second.message_id,
        ]

    async def test_nothing_to_publish(self, broker: Broker) -> None:
        assert await broker.publish([]) == []

    @pytest.mark.parametrize("changes", list(NEVER_SENT.values()), ids=list(NEVER_SENT))
    async def test_unsendable_rejected(self, broker: Broker, changes: dict[str, object]) -> None:
        bad, good = a_message(b"{}", **changes), a_message()
        words = await broker.publish(
            [(REQUESTS, bad), (REQUESTS, good), (request_queue(STRANGER), a_message())]
        )
        assert words == [PublishResult.REJECTED, PublishResult.ACCEPTED, PublishResult.UNROUTABLE]
        assert await broker.publish([(REQUESTS, bad)]) == [PublishResult.REJECTED]
        inbox = await consume(broker, REQUESTS, 10)
        assert (await inbox.next()).message == self.received(good)
        assert broker.connected

    async def test_texts_of_the_greatest_length_are_sent(self, broker: Broker) -> None:
        message = a_message(correlation_id="é" * 127, headers={"x-some": "x" * 100_000})
        inbox = await consume(broker, REQUESTS, 1)
        await send(broker, REQUESTS, message)
        assert (await inbox.next()).message == self.received(message)

    async def test_concurrent_publishes_each_get_their_own_results(self, broker: Broker) -> None:
        addresses = [REQUESTS, request_queue(STRANGER)] * 10
        results = await asyncio.gather(
            *(broker.publish([(address, a_message())]) for address in addresses)
        )
        assert results == [[PublishResult.ACCEPTED], [PublishResult.UNROUTABLE]] * 10

    async def test_redeclare_keeps_messages(self, broker: Broker, other: Broker) -> None:
        message = a_message()
        await send(broker, REQUESTS, message)
        await broker.declare(AGENT)
        await other.declare(AGENT)
        inbox = await consume(other, REQUESTS, 1)
        assert (await inbox.next()).message == self.received(message)

    async def test_queues_outlive_declaring_broker(self, broker: Broker, other: Broker) -> None:
        message = a_message()
        await send(broker, REQUESTS, message)
        await broker.close()
        inbox = await consume(other, REQUESTS, 1)
        assert (await inbox.next()).message == self.received(message)
        assert await other.publish([(response_queue(AGENT), a_message())]) == [
            PublishResult.ACCEPTED
        ]

    async def test_declaring_at_the_same_time(self, broker: Broker, other: Broker) -> None:
        await asyncio.gather(*(each.declare(STRANGER) for each in (broker, other) * 3))
        assert await broker.publish([(request_queue(STRANGER), a_message())]) == [
            PublishResult.ACCEPTED
        ]

    async def test_without_a_replica_there_is_no_private_queue(self, broker: Broker) -> None:
        address = private_queue(AGENT, ReplicaId("r1"))
        assert await broker.publish([(address, a_message())]) == [PublishResult.UNROUTABLE]

    async def test_a_replica_has_a_private_queue(self, broker: Broker, other: Broker) -> None:
        replica, message = ReplicaId(new_id()), a_message()
        await broker.declare(AGENT, replica)
        await send(other, private_queue(AGENT, replica), message)
        inbox = await consume(broker, private_queue(AGENT, replica), 1)
        delivery = await inbox.next()
        assert delivery.message == self.received(message)
        assert delivery.address == private_queue(AGENT, replica)
        assert await delivery.ack()

    async def test_nested_requests_have_a_queue(self, broker: Broker, other: Broker) -> None:
        message = a_message()
        await send(other, nested_queue(AGENT), message)
        inbox = await consume(broker, nested_queue(AGENT), 1)
        delivery = await inbox.next()
        assert (delivery.message, delivery.address) == (
            self.received(message),
            nested_queue(AGENT),
        )
        assert await delivery.dead_letter("unreadable")
        await until_depth(broker, dead_letter_queue(AGENT), 1)

    async def test_requests_can_have_several_queues(self, broker: Broker, other: Broker) -> None:
        """A larger number adds queues; a smaller one removes none."""
        for asked, there in ((1, 1), (3, 3), (2, 3)):
            await broker.declare(AGENT, shards=asked)
            depths = [await other.depth(request_shard(AGENT, number)) for number in range(5)]
            assert depths == [0] * there + [None] * (5 - there)
        message = a_message()
        await send(other, request_shard(AGENT, 2), message)
        inbox = await consume(broker, request_shard(AGENT, 2), 1)
        delivery = await inbox.next()
        assert delivery.address == request_shard(AGENT, 2)
        assert await delivery.dead_letter("unreadable")
        await until_depth(broker, dead_letter_queue(AGENT), 1)

    async def test_every_field_arrives(self, broker: Broker, other: Broker) -> None:
        message = Message(
            MessageType.RESPONSE,
            body='{"città": "Zürich"}'.encode(),
            message_id=new_id(),
            correlation_id=new_id(),
            app_id="flights",
            reply_to=private_queue(STRANGER, ReplicaId(new_id())),
            user_id=self.verified_user or "alice",
            headers={"text": "Zürich", "empty": "", Header.CALL_DEPTH: 3, Header.DEADLINE: 1.75},
            timestamp=datetime(2026, 2, 3, 4, 5, 6, tzinfo=UTC),
        )
        await send(broker, REQUESTS, message)
        inbox = await consume(other, REQUESTS, 1)
        delivery = await inbox.next()
        assert delivery.message == message
        assert delivery.address == REQUESTS
        assert delivery.delivery_count == 1

    async def test_absent_fields_stay_absent(self, broker: Broker) -> None:
        message = a_message()
        await send(broker, REQUESTS, message)
        inbox = await consume(broker, REQUESTS, 1)
        assert (await inbox.next()).message == self.received(message)

    @pytest.mark.parametrize("kind", list(MessageType))
    async def test_every_type_arrives(self, broker: Broker, kind: MessageType) -> None:
        await send(broker, REQUESTS, a_message(type=kind))
        inbox = await consume(broker, REQUESTS, 1)
        assert (await inbox.next()).message.type is kind

    @pytest.mark.parametrize(
        "value", ["", "x" * 1000, "0", 0, -1, 2**40, -(2**40), 0.0, 1.0, -2.5, 1.7e300]
    )
    async def test_header_type_preserved(self, broker: Broker, value: str | int | float) -> None:
        await send(broker, REQUESTS, a_message(headers={"x-some": value}))
        inbox = await consume(broker, REQUESTS, 1)
        headers = (await inbox.next()).message.headers
        assert headers == {"x-some": value}
        assert type(headers["x-some"]) is type(value)

    @pytest.mark.parametrize(
        "body", [b"", b"\x00\xff" * 3, b"m" * 1_000_000], ids=["empty", "binary", "1 MB"]
    )
    async def test_any_body_arrives(self, broker: Broker, body: bytes) -> None:
        await send(broker, REQUESTS, a_message(body))
        inbox = await consume(broker, REQUESTS, 1)
        assert (await inbox.next()).message.body == body

    async def test_one_consumer_sees_the_order_of_publishing(self, broker: Broker) -> None:
        messages = [a_message() for _ in range(50)]
        inbox = await consume(broker, REQUESTS, 5)
        await send(broker, REQUESTS, *messages[:25])
        await send(broker, REQUESTS, *messages[25:])
        for message in messages:
            delivery = await inbox.next()
            assert delivery.message.message_id == message.message_id
            assert await delivery.ack()

    async def test_broadcast_once_to_each_replica(self, broker: Broker, other: Broker) -> None:
        replicas = [ReplicaId(new_id()) for _ in range(3)]
        addresses = [
            private_queue(AGENT, replicas[0]),
            private_queue(AGENT, replicas[1]),
            private_queue(STRANGER, replicas[2]),
        ]
        await broker.declare(AGENT, replicas[0])
        await other.declare(AGENT, replicas[1])
        await other.declare(STRANGER, replicas[2])
        notice, end = a_message(type=MessageType.CANCEL), a_message()
        await broker.broadcast(AGENT, notice)
        for address in addresses:
            await send(broker, address, end)
        inboxes = [Inbox() for _ in addresses]
        for consumer, address, inbox in zip(
            (broker, other, other), addresses, inboxes, strict=True
        ):
            await consumer.consume(address, 10, inbox)
        for inbox in inboxes[:2]:
            assert [d.message for d in await inbox.take(2)] == [
                self.received(notice),
                self.received(end),
            ]
        assert (await inboxes[2].next()).message == self.received(end)

    async def test_a_broadcast_leaves_the_shared_queues_alone(self, broker: Broker) -> None:
        await broker.declare(AGENT, ReplicaId(new_id()))
        await broker.broadcast(AGENT, a_message())
        assert await broker.depth(REQUESTS) == 0
        assert await broker.depth(response_queue(AGENT)) == 0

    async def test_a_broadcast_to_nobody_is_no_error(self, broker: Broker) -> None:
        await broker.broadcast(AGENT, a_message())
        await broker.broadcast(STRANGER, a_message())

    async def test_an_announcement_reaches_each_subscriber_once(
        self, broker: Broker, other: Broker
    ) -> None:
        replicas = [ReplicaId(new_id()) for _ in range(3)]
        agents = [AGENT, STRANGER, AGENT]
        brokers = [broker, other, other]
        inboxes = [Inbox() for _ in replicas]
        topic, wider = Topic("travel.describe"), Topic("*.describe")
        for holder, agent, replica, inbox in zip(brokers, agents, replicas, inboxes, strict=True):
            await holder.declare(agent, replica)
            await holder.consume(private_queue(agent, replica), 10, inbox)
        await broker.subscribe(AGENT, replicas[0], [topic, wider])
        await other.subscribe(STRANGER, replicas[1], [wider])
        await other.subscribe(STRANGER, replicas[1], [wider])  # again changes nothing
        first, second, end = a_message(), a_message(), a_message()
        await broker.announce(wider, first)
        await other.announce(topic, second)
        for agent, replica in zip(agents, replicas, strict=True):
            await send(broker, private_queue(agent, replica), end)
        expected = [[first, second, end], [first, end], [end]]
        for inbox, messages in zip(inboxes, expected, strict=True):
            deliveries = await inbox.take(len(messages))
            assert [each.message for each in deliveries] == list(map(self.received, messages))

    async def test_a_subscription_leaves_broadcasts_and_shared_queues_alone(
        self, broker: Broker
    ) -> None:
        replica, topic = ReplicaId(new_id()), Topic("travel.describe")
        await broker.declare(AGENT, replica)
        await broker.subscribe(AGENT, replica, [topic])
        notice = a_message(type=MessageType.CANCEL)
        await broker.broadcast(AGENT, notice)
        await broker.announce(topic, a_message())
        assert await broker.depth(REQUESTS) == 0
        assert await broker.depth(private_queue(AGENT, replica)) == 2

    async def test_an_announcement_to_nobody_is_no_error(self, broker: Broker) -> None:
        await broker.announce(Topic("*.card"), a_message())

    async def test_depth_counts_what_no_consumer_holds(self, broker: Broker) -> None:
        await send(broker, REQUESTS, a_message(), a_message(), a_message())
        await until_depth(broker, REQUESTS, 3)
        inbox = await consume(broker, REQUESTS, 2)
        await inbox.take(2)
        await until_depth(broker, REQUESTS, 1)

    async def test_no_such_queue_has_no_depth(self, broker: Broker) -> None:
        assert await broker.depth(request_queue(STRANGER)) is None
        assert await broker.depth(REQUESTS) == 0


async def consume(broker: Broker, address: Address, prefetch: int) -> Inbox:
    """Consume `address` until the broker is closed, and return the inbox of its deliveries."""
    inbox = Inbox()
    await broker.consume(address, prefetch, inbox)
    return inbox


async def send(broker: Broker, address: Address, *messages: Message) -> None:
    """Publish `messages` and assert that the broker accepts all of them."""
    results = await broker.publish([(address, message) for message in messages])
    assert results == [PublishResult.ACCEPTED] * len(messages)


async def until_depth(broker: Broker, address: Address, depth: int | None) -> None:
    """Wait until `address` holds `depth` messages, since a broker may count with a delay."""
    async with asyncio.timeout(TEST_TIMEOUT):
        while await broker.depth(address) != depth:  # noqa: ASYNC110  a broker has no event for it
            await asyncio.sleep(0)
