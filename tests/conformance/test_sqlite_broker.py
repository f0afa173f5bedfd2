"""The SQLite broker passes the broker suite, in the clear and sealed."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from meshpoint.adapters.encryption import KeyRing, RingKey
from meshpoint.adapters.sealed_broker import SealedBroker
from meshpoint.adapters.sqlite_queue import SqliteBroker
from meshpoint.adapters.sqlite_queue.queues import Queues
from meshpoint.adapters.sqlite_queue.schema import connect, transaction
from meshpoint.ports.broker import Broker
from meshpoint.testing.conformance.broker import BrokerSuite


class TestSqliteBroker(BrokerSuite):
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "mesh.db"

    @pytest.fixture
    async def broker(self, path: Path) -> AsyncIterator[Broker]:
        broker = SqliteBroker(path, namespace="demo", lease=timedelta(seconds=1))
        await broker.open()
        yield broker
        await broker.close()

    @pytest.fixture
    async def other(self, path: Path, broker: Broker) -> AsyncIterator[Broker]:
        other = SqliteBroker(path, namespace="demo", lease=timedelta(seconds=1))
        await other.open()
        yield other
        await other.close()

    async def break_connection(self, broker: Broker) -> None:
        """Declare the connection dead, as another process does when its lease expires."""
        assert isinstance(broker, SqliteBroker)
        db = connect(broker.path, 5)
        try:
            with transaction(db):
                (oldest,) = db.execute("SELECT min(id) FROM meshpoint_queue_holder").fetchone()
                Queues(db, "demo", 20).remove_holder(oldest)
        finally:
            db.close()


@asynccontextmanager
async def open_sealed(path: Path) -> AsyncIterator[Broker]:
    sealer = KeyRing([RingKey(b"k" * 32)], setting="mesh.encryption_keys", scope="mesh")
    clear = SqliteBroker(path, namespace="demo", lease=timedelta(seconds=1))
    broker = SealedBroker(clear, sealer, "demo")
    await broker.open()
    yield broker
    await broker.close()


if "MESHPOINT_SEALED" in os.environ:  # `make sealed`

    class TestSealedSqliteBroker(TestSqliteBroker):
        """With sealed bodies. Messages in the clear are read as well."""

        @pytest.fixture
        async def broker(self, path: Path) -> AsyncIterator[Broker]:
            async with open_sealed(path) as broker:
                yield broker

        @pytest.fixture
        async def other(self, path: Path, broker: Broker) -> AsyncIterator[Broker]:
            async with open_sealed(path) as other:
                yield other

        async def break_connection(self, broker: Broker) -> None:
            assert isinstance(broker, SealedBroker)
            await super().break_connection(broker._broker)
