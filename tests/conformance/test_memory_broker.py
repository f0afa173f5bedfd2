"""The in-process broker passes the broker suite."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from meshpoint.adapters.inprocess.broker import InProcessBroker
from meshpoint.adapters.inprocess.exchange import InProcessExchange
from meshpoint.model.ids import ReplicaId
from meshpoint.model.messages import Address, Header, dead_letters_of, nested_of, private_of, responses_of, shard_of
from meshpoint.ports.broker import Broker, Published
from meshpoint.testing.conformance.broker import AGENT, REQUESTS, BrokerSuite, Inbox, a_message, send, until_depth


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


async def test_a_message_that_always_comes_back_ends_among_the_dead_letters(exchange: InProcessExchange) -> None:
    broker, inbox, dead = InProcessBroker(exchange), Inbox(), Inbox()
    await broker.open()
    await broker.declare(AGENT)
    await broker.consume(REQUESTS, 1, inbox)
    await broker.consume(dead_letters_of(AGENT), 1, dead)
    await send(broker, REQUESTS, a_message())
    for delivery in range(1, 6):
        again = await inbox.next()
        assert again.count == delivery
        assert await again.requeue()
    assert (await dead.next()).message.headers[Header.DEAD_REASON] == "delivery limit"
    assert inbox.empty()
    await broker.close()


async def test_a_private_queue_disappears_after_its_broker(exchange: InProcessExchange) -> None:
    gone, broker = InProcessBroker(exchange), InProcessBroker(exchange)
    await broker.open()
    await gone.open()
    address = private_of(AGENT, ReplicaId("r1"))
    await gone.declare(AGENT, ReplicaId("r1"))
    assert await broker.depth(address) == 0
    await gone.close()
    await until_depth(broker, address, None)
    await broker.close()


async def test_what_is_lost_on_its_way_to_a_consumer_comes_once(exchange: InProcessExchange) -> None:
    broker, inbox = InProcessBroker(exchange), Inbox()
    await broker.open()
    await broker.declare(AGENT)
    await broker.consume(REQUESTS, 10, inbox)
    await send(broker, REQUESTS, a_message())
    broker.lose_connection()
    assert (await inbox.next()).count == 2
    assert inbox.empty()
    await broker.close()


async def test_what_is_on_its_way_to_a_cancelled_consumer_goes_back(exchange: InProcessExchange) -> None:
    broker, late, inbox = InProcessBroker(exchange), Inbox(), Inbox()
    await broker.open()
    await broker.declare(AGENT)
    subscription = await broker.consume(REQUESTS, 10, late)
    await send(broker, REQUESTS, a_message())
    await subscription.cancel()
    await broker.consume(REQUESTS, 10, inbox)
    assert (await inbox.next()).count == 2
    assert late.empty()
    await broker.close()


async def test_a_full_private_queue_refuses() -> None:
    broker = InProcessBroker(InProcessExchange(private_max_length=2))
    await broker.open()
    await broker.declare(AGENT, ReplicaId("r1"))
    private = private_of(AGENT, ReplicaId("r1"))
    words = [(await broker.publish([(private, a_message())]))[0] for _ in range(3)]
    assert words == [Published.ACCEPTED, Published.ACCEPTED, Published.OVERLOADED]
    await broker.broadcast(AGENT, a_message())
    assert await broker.depth(private) == 2


@pytest.mark.parametrize("address", [shard_of(AGENT, 0), shard_of(AGENT, 1), nested_of(AGENT)])
async def test_a_full_queue_of_requests_refuses(address: Address) -> None:
    broker = InProcessBroker(InProcessExchange(max_length=2))
    await broker.open()
    await broker.declare(AGENT, shards=2)
    words = [(await broker.publish([(address, a_message())]))[0] for _ in range(3)]
    assert words == [Published.ACCEPTED, Published.ACCEPTED, Published.OVERLOADED]
    assert await broker.publish([(responses_of(AGENT), a_message())] * 3) == [Published.ACCEPTED] * 3


async def test_the_oldest_dead_letters_go_first() -> None:
    broker, inbox, sent = (
        InProcessBroker(InProcessExchange(dead_letters_max_length=2)),
        Inbox(),
        [a_message(), a_message()],
    )
    await broker.open()
    await broker.declare(AGENT)
    dead = dead_letters_of(AGENT)
    assert await broker.publish([(dead, each) for each in (a_message(), *sent)]) == [Published.ACCEPTED] * 3
    await broker.consume(dead, 2, inbox)
    assert [each.message for each in await inbox.take(2)] == sent
