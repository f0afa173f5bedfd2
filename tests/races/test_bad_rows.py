"""Values that a database refuses, rows that this release cannot read, and unexpected errors."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from sqlalchemy import text

from meshpoint.adapters.sql import SqlStore
from meshpoint.errors import ConfigurationError, StoreUnavailable
from meshpoint.model.ids import TaskId
from meshpoint.model.tasks import TaskState
from meshpoint.model.transitions import JoinCompleted, TaskReady
from meshpoint.testing.conformance.build import (
    AGENT,
    HERE,
    NEWER,
    THERE,
    a_claim,
    a_pause,
    one,
    paused,
    ready,
    task_ids,
)


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[SqlStore]:
    store = SqlStore(database_url, namespace="test")
    await store.open()
    yield store
    await store.close()


async def make_unreadable(store: SqlStore, task_id: TaskId) -> None:
    """Replace the state as a later release would, in a form that this release cannot read."""
    statement = text(
        "UPDATE agent_paused_tasks SET state = :sealed WHERE logical_task_id = :task_id"
    )
    async with store._database.engine.connect() as connection:
        await connection.execute(statement, {"sealed": b"\x7fsealed", "task_id": task_id})


async def assert_parked(store: SqlStore, task_id: TaskId) -> None:
    """Check that a task with an unreadable row waits for another version, with the reason."""
    found = await store.task(task_id)
    assert found is not None
    summary, _ = found
    assert (summary.state, summary.tried_versions) == (TaskState.PARKED, (HERE.version,))
    assert (summary.parked_reason or "").startswith("the row cannot be read: ")


async def test_ready_tasks_are_acquired_despite_an_unreadable_one(store: SqlStore) -> None:
    unreadable, good = await ready(store), await ready(store)
    await make_unreadable(store, unreadable.run.task_id)
    assert task_ids(await store.acquire(HERE, 10)) == [good.run.task_id]
    await assert_parked(store, unreadable.run.task_id)
    assert await store.acquire(THERE, 10) == []


async def test_another_version_continues_a_task_that_one_cannot_read(store: SqlStore) -> None:
    task_id = (await ready(store)).run.task_id
    await make_unreadable(store, task_id)
    assert await store.acquire(HERE, 10) == []
    statement = text("UPDATE agent_paused_tasks SET state = NULL WHERE logical_task_id = :task_id")
    async with store._database.engine.connect() as connection:
        await connection.execute(statement, {"task_id": task_id})  # in a form that can be read
    assert await store.acquire_parked(HERE, 10) == []
    assert task_ids(await store.acquire_parked(NEWER, 10)) == [task_id]


async def test_an_unreadable_task_is_parked_when_its_join_is_met(store: SqlStore) -> None:
    pause, other = await paused(store), await paused(store)
    await make_unreadable(store, pause.run.task_id)
    first, second = await store.claim([a_claim(pause), a_claim(other)], HERE, 2)
    assert isinstance(first, TaskReady)
    assert isinstance(second, JoinCompleted)
    await assert_parked(store, pause.run.task_id)


async def test_an_unreadable_task_is_parked_when_its_call_expires(store: SqlStore) -> None:
    soon_due = a_pause()
    call = one(soon_due.calls)
    object.__setattr__(call, "timeout", timedelta(microseconds=1))
    await store.pause([soon_due])
    await make_unreadable(store, soon_due.run.task_id)
    expired = one(await store.expire(HERE, 10, 1))
    assert isinstance(expired.join_result, TaskReady)
    await assert_parked(store, soon_due.run.task_id)


async def test_due_messages_are_sent_despite_an_unreadable_one(database_url: str) -> None:
    store = SqlStore(database_url, namespace="test", dispatch_lease=timedelta())
    await store.open()
    unreadable, good = await paused(store), await paused(store)
    statement = text(
        "UPDATE agent_peer_sub_tasks SET request = :sealed WHERE logical_task_id = :task_id"
    )
    async with store._database.engine.connect() as connection:
        await connection.execute(
            statement, {"sealed": b"\x7fsealed", "task_id": unreadable.run.task_id}
        )
    assert [send.task_id for send in await store.unsent(AGENT, 10)] == [good.run.task_id]
    await store.close()


@pytest.mark.servers
@pytest.mark.parametrize(
    "statement",
    [
        "ALTER TABLE agent_peer_sub_tasks RENAME TO away",
        "ALTER TABLE agent_peer_sub_tasks RENAME outcome TO away",
    ],
)
async def test_a_schema_change_in_progress_counts_as_an_outage(
    postgres_url: str, statement: str
) -> None:
    store = SqlStore(postgres_url, namespace="test")
    pause = await paused(store)
    async with store._database.engine.connect() as connection:
        await connection.exec_driver_sql(statement)
    with pytest.raises(StoreUnavailable):
        await store.claim([a_claim(pause)], HERE, 1)
    await store.close()


@pytest.mark.servers
async def test_a_refused_login_counts_as_an_outage_once_the_store_is_in_use(
    postgres_url: str,
) -> None:
    unauthorized_url = postgres_url.replace("://postgres", "://nobody_knows_me")
    store = SqlStore(unauthorized_url, namespace="test")
    with pytest.raises(ConfigurationError):
        await store.open()
    with pytest.raises(StoreUnavailable):
        await store.acquire(HERE, 1)
    await store.close()


async def test_cancelled_writes_do_not_block_other_writes(database_url: str) -> None:
    store, rng = SqlStore(database_url, namespace="test"), random.Random(1)
    await store.open()
    for _ in range(200):
        other = SqlStore(database_url, namespace="test")
        write_task = [asyncio.create_task(other.pause([a_pause()])) for _ in range(3)]
        await asyncio.sleep(0.02 * rng.random())  # in the middle of the writes
        for each in write_task:
            each.cancel()
        await asyncio.gather(*write_task, return_exceptions=True)
        await other.close()
        await paused(store)
    await store.close()


async def test_a_timestamp_out_of_range_does_not_affect_other_tasks(store: SqlStore) -> None:
    corrupt, other = await paused(store), await paused(store)
    statement = text(
        "UPDATE agent_paused_tasks SET wake_at = 1e15, task_deadline = 1e15, checkpointed_at "
        "= 1e15 WHERE logical_task_id = :task_id"
    )
    async with store._database.engine.connect() as connection:
        await connection.execute(statement, {"task_id": corrupt.run.task_id})
    assert {each.task_id for each in await store.tasks()} == {
        corrupt.run.task_id,
        other.run.task_id,
    }
    assert (await store.lookup([corrupt.run.task_id, other.run.task_id])).keys() == {
        corrupt.run.task_id,
        other.run.task_id,
    }
    first, second = await store.claim([a_claim(corrupt), a_claim(other)], HERE, 2)
    assert isinstance(first, JoinCompleted)
    assert isinstance(second, JoinCompleted)


async def test_the_database_time_is_known_from_the_start(store: SqlStore) -> None:
    if store._database.dialect.is_sqlite:
        assert store.current_time is None  # a file uses its host's clock
        return
    query_count = text("SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS double precision)")
    async with store._database.engine.connect() as connection:
        await store.lookup([TaskId("none")])
        first = store.current_time
        later = (await connection.execute(query_count)).scalar_one()
        assert first is not None
        assert first.timestamp() <= later + 0.001
        await store.lookup([TaskId("none")])
        second = store.current_time
        assert second is not None
        assert second >= first
