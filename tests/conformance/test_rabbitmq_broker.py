"""The RabbitMQ broker passes the broker suite."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from time import monotonic

import pytest

from meshpoint.adapters.rabbitmq import RabbitMqBroker
from meshpoint.adapters.rabbitmq import broker as broker_module
from meshpoint.model.ids import TaskId
from meshpoint.ports.broker import Broker
from meshpoint.testing.conformance.broker import (
    AGENT,
    REQUESTS,
    BrokerSuite,
    Inbox,
    a_message,
    send,
)
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
        await broker.consume(REQUESTS, 1, inbox)
        assert broker.deny_request(AGENT, task_id) == {REQUESTS: 0}, "it has just begun"
        later = 61.0
        assert broker.deny_request(AGENT, task_id) == {REQUESTS: 1}
        await send(broker, REQUESTS, a_message())
        assert await (await inbox.next()).requeue()
        await inbox.next()
        later = 30.0
        assert broker.deny_request(AGENT, task_id) == {REQUESTS: 0}, "it has returned a message"
        later = 61.0
        assert broker.deny_request(AGENT, task_id) == {REQUESTS: 1}

    async def break_connection(self, broker: Broker) -> None:
        self.proxy_of_broker.cut()
