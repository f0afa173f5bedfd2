"""The SQL store passes the store suite on SQLite and PostgreSQL, in the clear and sealed."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import asyncpg
import pytest
from sqlalchemy.exc import IntegrityError

from meshpoint.adapters.encryption import KeyRing, RingKey
from meshpoint.adapters.sql import SqlStore
from meshpoint.model.tasks import Run, TaskState
from meshpoint.model.timeline import Change, TimelineOptions
from meshpoint.ports.sealer import Sealer
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    HOUR,
    TIMINGS,
    a_pause,
    an_end,
    begun,
    resumed,
    row,
)
from meshpoint.testing.conformance.store import CheckpointStoreSuite
from meshpoint.testing.conformance.store_timelines import WRITER, TimelineSuite, changes


@asynccontextmanager
async def open_store(url: str, clock: FakeClock, **options: Any) -> AsyncIterator[SqlStore]:
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
        **options,
    )
    await store.open()
    yield store
    await store.close()


class SqlStoreSuite(CheckpointStoreSuite):
    sealer: Sealer | None = None

    @pytest.fixture
    async def store(self, clock: FakeClock, database_url: str) -> AsyncIterator[CheckpointStore]:
        async with open_store(database_url, clock, sealer=self.sealer) as store:
            yield store

    @pytest.fixture
    async def other(
        self, clock: FakeClock, database_url: str, store: CheckpointStore
    ) -> AsyncIterator[CheckpointStore]:
        async with open_store(database_url, clock, sealer=self.sealer) as other:
            yield other


async def _pause_resume_and_end(store: CheckpointStore, run: Run) -> None:
    pause = a_pause(run=run)
    await store.pause([pause])
    await store.end([an_end((await resumed(store, pause)).run)])


class TimelineStoreSuite(TimelineSuite):
    fast_path = True

    @pytest.fixture
    def clock(self) -> FakeClock:
        return FakeClock()

    @pytest.fixture
    async def store(self, clock: FakeClock, database_url: str) -> AsyncIterator[CheckpointStore]:
        timeline = TimelineOptions(WRITER, HOUR)
        async with open_store(
            database_url, clock, timeline=timeline, fast_path=self.fast_path
        ) as store:
            yield store


class TestTimelinesOnSqlite(TimelineStoreSuite):
    @pytest.fixture
    def database_url(self, sqlite_url: str) -> str:
        return sqlite_url


class TestTimelinesOnPostgres(TimelineStoreSuite):
    @pytest.fixture
    def database_url(self, postgres_url: str) -> str:
        return postgres_url

    @pytest.mark.parametrize(
        ("change", "state"),
        [
            (Change.PAUSED, TaskState.RUNNING),
            (Change.ANSWERED, TaskState.WAITING),
            (Change.ACQUIRED, TaskState.WAITING),
            (Change.COMPLETED, TaskState.RUNNING),
        ],
    )
    async def test_a_change_is_undone_if_its_entry_cannot_be_written(
        self, store: CheckpointStore, database_url: str, change: Change, state: TaskState
    ) -> None:
        run = await begun(store)
        connection = await asyncpg.connect(database_url)
        await connection.execute(
            f"ALTER TABLE agent_task_timelines ADD CHECK (change <> '{change}')"
        )
        await connection.close()
        with pytest.raises((asyncpg.CheckViolationError, IntegrityError)):
            await _pause_resume_and_end(store, run)
        assert (await row(store, run.task_id))[0].state is state
        assert change not in await changes(store, run.task_id)


class TestTimelinesWithoutFastPath(TestTimelinesOnPostgres):
    fast_path = False


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
