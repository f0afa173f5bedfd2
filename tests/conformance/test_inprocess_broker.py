"""The in-process broker passes the broker suite."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from meshpoint.adapters.inprocess.broker import InProcessBroker, InProcessExchange
from meshpoint.model.ids import ReplicaId
from meshpoint.model.messages import (
    Address,
    Header,
    dead_letter_queue,
    nested_queue,
    private_queue,
    request_shard,
    response_queue,
)
from meshpoint.ports.broker import Broker, PublishResult
from meshpoint.testing.conformance.broker import (
    AGENT,
    REQUESTS,
    BrokerSuite,
    Inbox,
    a_message,
    send,
    until_depth,
)


@pytest.fixture
def exchange() -> InProcessExchange:
    return InProcessExchange(delivery_limit=5, private_ttl=timedelta())


class TestMemoryBroker(BrokerSuite):
    @pytest.fixture
    async def broker(self, exchange: InProcessExchange) -> AsyncIterator[Broker]:
        broker = InProcessBroker(exchange)
        await broker.open()
        yield broker
        await broker.close()

    @pytest.fixture
    async def other(self, broker: Broker, exchange: InProcessExchange) -> AsyncIterator[Broker]:
        other = InProcessBroker(exchange)
        await other.open()
        yield other
        await other.close()

    async def break_connection(self, broker: Broker) -> None:
        assert isinstance(broker, InProcessBroker)
        broker.lose_connection()


async def test_a_message_requeued_too_often_is_dead_lettered(exchange: InProcessExchange) -> None:
    broker, inbox, dead_letters = InProcessBroker(exchange), Inbox(), Inbox()
    await broker.open()
    await broker.declare(AGENT)
    await broker.consume(REQUESTS, 1, inbox)
    await broker.consume(dead_letter_queue(AGENT), 1, dead_letters)
    await send(broker, REQUESTS, a_message())
    for delivery in range(1, 6):
        redelivered = await inbox.next()
        assert redelivered.delivery_count == delivery
        assert await redelivered.requeue()
    assert (await dead_letters.next()).message.headers[Header.DEAD_REASON] == "delivery limit"
    assert inbox.empty()
    await broker.close()


async def test_a_private_queue_disappears_after_its_broker(exchange: InProcessExchange) -> None:
    departed, broker = InProcessBroker(exchange), InProcessBroker(exchange)
    await broker.open()
    await departed.open()
    address = private_queue(AGENT, ReplicaId("r1"))
    await departed.declare(AGENT, ReplicaId("r1"))
    assert await broker.depth(address) == 0
    await departed.close()
    await until_depth(broker, address, None)
    await broker.close()


async def test_a_delivery_lost_on_its_way_to_a_consumer_arrives_once(
    exchange: InProcessExchange,
) -> None:
    broker, inbox = InProcessBroker(exchange), Inbox()
    await broker.open()
    await broker.declare(AGENT)
    await broker.consume(REQUESTS, 10, inbox)
    await send(broker, REQUESTS, a_message())
    broker.lose_connection()
    assert (await inbox.next()).delivery_count == 2
    assert inbox.empty()
    await broker.close()


async def test_a_delivery_to_a_cancelled_consumer_is_requeued(exchange: InProcessExchange) -> None:
    broker, late, inbox = InProcessBroker(exchange), Inbox(), Inbox()
    await broker.open()
    await broker.declare(AGENT)
    subscription = await broker.consume(REQUESTS, 10, late)
    await send(broker, REQUESTS, a_message())
    await subscription.cancel()
    await broker.consume(REQUESTS, 10, inbox)
    assert (await inbox.next()).delivery_count == 2
    assert late.empty()
    await broker.close()


async def test_a_full_private_queue_rejects_messages() -> None:
    broker = InProcessBroker(InProcessExchange(private_max_length=2))
    await broker.open()
    await broker.declare(AGENT, ReplicaId("r1"))
    private = private_queue(AGENT, ReplicaId("r1"))
    results = [(await broker.publish([(private, a_message())]))[0] for _ in range(3)]
    assert results == [PublishResult.ACCEPTED, PublishResult.ACCEPTED, PublishResult.OVERLOADED]
    await broker.broadcast(AGENT, a_message())
    assert await broker.depth(private) == 2


@pytest.mark.parametrize(
    "address", [request_shard(AGENT, 0), request_shard(AGENT, 1), nested_queue(AGENT)]
)
async def test_a_full_request_queue_rejects_messages(address: Address) -> None:
    broker = InProcessBroker(InProcessExchange(max_length=2))
    await broker.open()
    await broker.declare(AGENT, shards=2)
    results = [(await broker.publish([(address, a_message())]))[0] for _ in range(3)]
    assert results == [PublishResult.ACCEPTED, PublishResult.ACCEPTED, PublishResult.OVERLOADED]
    assert (
        await broker.publish([(response_queue(AGENT), a_message())] * 3)
        == [PublishResult.ACCEPTED] * 3
    )


async def test_the_oldest_dead_letters_are_dropped_first() -> None:
    broker, inbox, sent = (
        InProcessBroker(InProcessExchange(dead_letters_max_length=2)),
        Inbox(),
        [a_message(), a_message()],
    )
    await broker.open()
    await broker.declare(AGENT)
    dead_letters = dead_letter_queue(AGENT)
    assert (
        await broker.publish([(dead_letters, message) for message in (a_message(), *sent)])
        == [PublishResult.ACCEPTED] * 3
    )
    await broker.consume(dead_letters, 2, inbox)
    assert [each.message for each in await inbox.take(2)] == sent
