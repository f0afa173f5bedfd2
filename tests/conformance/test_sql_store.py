"""The SQL store passes the store suite on SQLite and PostgreSQL, in the clear and sealed."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest

from meshpoint.adapters.encryption import KeyRing, RingKey
from meshpoint.adapters.sql import SqlStore
from meshpoint.ports.sealer import Sealer
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import TIMINGS
from meshpoint.testing.conformance.store import CheckpointStoreSuite


@asynccontextmanager
async def open_store(
    url: str, clock: FakeClock, sealer: Sealer | None = None
) -> AsyncIterator[SqlStore]:
    store = SqlStore(
        url,
        namespace="test",
        dispatch_lease=TIMINGS.dispatch_lease,
        tombstone_ttl=TIMINGS.tombstone_ttl,
        parked_limit=TIMINGS.parked_limit,
        checkpoint_ttl=TIMINGS.checkpoint_ttl,
        checkpoint_history=TIMINGS.checkpoint_history,
        checkpoint_archive=TIMINGS.checkpoint_archive,
        keep_security_context=TIMINGS.keep_security_context,
        clock=clock,
        lock_timeout=timedelta(seconds=30),  # on a busy machine another replica holds rows longer
        sealer=sealer,
    )
    await store.open()
    yield store
    await store.close()


class SqlStoreSuite(CheckpointStoreSuite):
    sealer: Sealer | None = None

    @pytest.fixture
    async def store(self, clock: FakeClock, database_url: str) -> AsyncIterator[CheckpointStore]:
        async with open_store(database_url, clock, self.sealer) as store:
            yield store

    @pytest.fixture
    async def other(
        self, clock: FakeClock, database_url: str, store: CheckpointStore
    ) -> AsyncIterator[CheckpointStore]:
        async with open_store(database_url, clock, self.sealer) as other:
            yield other


class TestOnPostgres(SqlStoreSuite):
    @pytest.fixture
    def database_url(self, postgres_url: str) -> str:
        return postgres_url


class TestOnSqlite(SqlStoreSuite):
    @pytest.fixture
    def database_url(self, sqlite_url: str) -> str:
        return sqlite_url


RING = KeyRing([RingKey(b"k" * 32)], setting="encryption_keys", scope="store")

if "MESHPOINT_SEALED" in os.environ:  # `make sealed`

    class TestSealedOnPostgres(TestOnPostgres):
        sealer = RING

        async def test_what_is_known_of_a_waiting_task(self) -> None:  # type: ignore[override]
            """Users and sessions are digests: see `test_encryption_at_rest`."""

    class TestSealedOnSqlite(TestOnSqlite):
        sealer = RING

        async def test_what_is_known_of_a_waiting_task(self) -> None:  # type: ignore[override]
            """Users and sessions are digests: see `test_encryption_at_rest`."""
