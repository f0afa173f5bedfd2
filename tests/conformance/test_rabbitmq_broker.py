"""The RabbitMQ broker passes the broker suite."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from meshpoint.adapters.rabbitmq import RabbitMqBroker
from meshpoint.ports.broker import Broker
from meshpoint.testing.conformance.broker import BrokerSuite
from servers import Proxy

_BUSY = timedelta(minutes=1)
"""Time that the broker of a busy machine may take to respond."""


class TestRabbitMqBroker(BrokerSuite):
    verified_user = "guest"

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

    async def break_connection(self, broker: Broker) -> None:
        self.proxy_of_broker.cut()
