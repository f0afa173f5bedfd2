"""The RabbitMQ broker passes the broker suite."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from time import monotonic

import pytest

from meshpoint.adapters.rabbitmq import RabbitMqBroker
from meshpoint.adapters.rabbitmq import broker as broker_module
from meshpoint.errors import BrokerUnavailable
from meshpoint.model.ids import TaskId
from meshpoint.model.messages import nested_queue, request_shard
from meshpoint.ports.broker import Broker
from meshpoint.testing.conformance.broker import (
    AGENT,
    REQUESTS,
    BrokerSuite,
    Inbox,
    a_message,
    send,
)
from meshpoint.testing.conformance.broker_messages import consume_all
from servers import Proxy

_BUSY = timedelta(minutes=1)
"""Time that the broker of a busy machine may take to respond."""


class TestRabbitMqBroker(BrokerSuite):
    verified_user = "guest"

    @pytest.fixture(autouse=True)
    def consumers_deny_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(broker_module, "_DENIAL_SECONDS", 0.0)

    @pytest.fixture
    async def proxy(self, amqp_url: str) -> AsyncIterator[Proxy]:
        async with Proxy(amqp_url) as proxy:
            yield proxy

    @pytest.fixture
    async def broker(self, proxy: Proxy, namespace: str) -> AsyncIterator[Broker]:
        broker = RabbitMqBroker(proxy.url, namespace=namespace, publish_timeout=_BUSY)
        await broker.open()
        self.proxy_of_broker = proxy
        yield broker
        await broker.close()

    @pytest.fixture
    async def other(self, broker: Broker, amqp_url: str, namespace: str) -> AsyncIterator[Broker]:
        other = RabbitMqBroker(amqp_url, namespace=namespace, publish_timeout=_BUSY)
        await other.open()
        yield other
        await other.close()

    async def test_only_consumers_that_had_nothing_lately_deny(
        self, broker: Broker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A message may have moved to another consumer since a search began."""
        task_id, inbox, later = TaskId("order-17"), Inbox(), 0.0
        monkeypatch.setattr(broker_module, "_DENIAL_SECONDS", 60.0)
        monkeypatch.setattr(broker_module, "monotonic", lambda: monotonic() + later)
        subscription = await broker.consume(REQUESTS, 1, inbox)
        assert broker.deny_request(AGENT, task_id) == {REQUESTS: 0}, "it has just begun"
        later = 61.0
        assert broker.deny_request(AGENT, task_id) == {REQUESTS: 1}
        await send(broker, REQUESTS, a_message())
        assert await (await inbox.next()).requeue()
        await inbox.next()
        later = 30.0
        assert broker.deny_request(AGENT, task_id) == {REQUESTS: 0}, "it has returned a message"
        await subscription.resize(0)  # the broker replies in order
        later = 61.0
        assert broker.deny_request(AGENT, task_id) == {REQUESTS: 1}

    async def test_a_queue_without_a_leader_does_not_show_that_a_request_is_missing(
        self, broker: Broker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """RabbitMQ then reports no messages and no consumers."""
        inbox = Inbox()
        await consume_all(broker, inbox)
        await send(broker, REQUESTS, a_message())
        await inbox.next()

        async def look_up(*_: object) -> tuple[int, int]:
            return 0, 0

        monkeypatch.setattr(RabbitMqBroker, "_lookup_queue", look_up)
        with pytest.raises(BrokerUnavailable):
            await broker.find_request(AGENT, TaskId("order-17"))

    @pytest.mark.parametrize("started", ["requests", "nested"])
    async def test_a_replica_that_starts_or_drains_does_not_search(
        self, broker: Broker, started: str
    ) -> None:
        address = REQUESTS if started == "requests" else nested_queue(AGENT)
        await broker.consume(address, 1, Inbox())
        with pytest.raises(BrokerUnavailable):
            await broker.find_request(AGENT, TaskId("order-17"))

    async def test_a_queue_that_this_replica_does_not_consume_may_have_the_request(
        self, broker: Broker, other: Broker
    ) -> None:
        """A replica with more queues has just died, and the others look for them rarely."""
        await consume_all(broker, Inbox())
        await other.declare(AGENT, shards=2)
        await send(other, request_shard(AGENT, 1), a_message())
        with pytest.raises(BrokerUnavailable):
            await broker.find_request(AGENT, TaskId("order-17"))

    async def break_connection(self, broker: Broker) -> None:
        self.proxy_of_broker.cut()
