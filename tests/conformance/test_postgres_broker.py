"""The PostgreSQL broker passes the broker suite."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import asyncpg
import pytest

from meshpoint.adapters.postgres_queue import PostgresBroker
from meshpoint.adapters.postgres_queue.statements import FREE
from meshpoint.ports.broker import Broker
from meshpoint.testing.conformance.broker import BrokerSuite


class TestPostgresBroker(BrokerSuite):
    @pytest.fixture
    async def broker(self, empty_postgres_url: str) -> AsyncIterator[Broker]:
        broker = PostgresBroker(empty_postgres_url, namespace="demo", lease=timedelta(seconds=3))
        await broker.open()
        yield broker
        await broker.close()

    @pytest.fixture
    async def other(self, empty_postgres_url: str, broker: Broker) -> AsyncIterator[Broker]:
        other = PostgresBroker(empty_postgres_url, namespace="demo", lease=timedelta(seconds=3))
        await other.open()
        yield other
        await other.close()

    @pytest.fixture(autouse=True)
    def _url(self, empty_postgres_url: str) -> None:
        self.url = empty_postgres_url

    async def break_connection(self, broker: Broker) -> None:
        """Declare the connection dead, as another process does when its lease lapses."""
        connection = await asyncpg.connect(self.url.replace("postgresql+asyncpg", "postgresql"))
        try:
            assert isinstance(broker, PostgresBroker)
            await connection.execute(
                "DELETE FROM meshpoint_queue_holder WHERE id = $1", broker.lease_id
            )
            await connection.fetch(FREE, 20)
        finally:
            await connection.close()
