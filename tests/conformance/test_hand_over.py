"""The SQL store and the PostgreSQL broker pass the suite of hand-overs."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from meshpoint.adapters.encryption import KeyRing, RingKey
from meshpoint.adapters.postgres_queue import PostgresBroker
from meshpoint.adapters.sealed_broker import SealedBroker
from meshpoint.adapters.sql import SqlStore
from meshpoint.model.ids import new_id
from meshpoint.model.timeline import TimelineOptions
from meshpoint.ports.broker import Broker
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import TIMINGS
from meshpoint.testing.conformance.hand_over import HandOverSuite

RING = KeyRing([RingKey(b"k" * 32)], setting="mesh.encryption_keys", scope="mesh")

pytestmark = pytest.mark.servers


class TestOnPostgres(HandOverSuite):
    @pytest.fixture
    def namespace(self) -> str:
        return new_id()

    @pytest.fixture(params=[None, TimelineOptions()], ids=["plain", "with timelines"])
    async def store(
        self,
        request: pytest.FixtureRequest,
        clock: FakeClock,
        module_postgres_url: str,
        namespace: str,
    ) -> AsyncIterator[CheckpointStore]:
        store = SqlStore(
            module_postgres_url,
            namespace=namespace,
            dispatch_lease=TIMINGS.dispatch_lease,
            tombstone_ttl=TIMINGS.tombstone_ttl,
            clock=clock,
            timeline=request.param,
        )
        await store.open()
        yield store
        await store.close()

    @pytest.fixture(params=[None, RING], ids=["clear", "sealed"])
    async def broker(
        self, request: pytest.FixtureRequest, module_postgres_url: str, namespace: str
    ) -> AsyncIterator[Broker]:
        clear = PostgresBroker(module_postgres_url, namespace=namespace)
        broker = SealedBroker(clear, request.param, namespace)
        await broker.open()
        yield broker
        await broker.close()

    @pytest.fixture
    async def elsewhere(self, empty_postgres_url: str, namespace: str) -> AsyncIterator[Broker]:
        broker = PostgresBroker(empty_postgres_url, namespace=namespace)
        await broker.open()
        yield broker
        await broker.close()
