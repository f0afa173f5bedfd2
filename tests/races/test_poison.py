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
from meshpoint.model.checkpoint import AllArrived, MadeReady, TaskState
from meshpoint.model.ids import TaskId
from meshpoint.testing.conformance.build import (
    AGENT,
    HERE,
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


async def seal(store: SqlStore, task_id: TaskId) -> None:
    """Replace the state as a later release would, in a form that this release cannot read."""
    statement = text("UPDATE agent_paused_tasks SET state = :sealed WHERE logical_task_id = :task_id")
    async with store._database.engine.connect() as connection:
        await connection.execute(statement, {"sealed": b"\x7fsealed", "task_id": task_id})


async def test_ready_tasks_are_taken_beside_one_that_cannot_be_read(store: SqlStore) -> None:
    sealed, good = await ready(store), await ready(store)
    await seal(store, sealed.run.task_id)
    assert task_ids(await store.take(HERE, 10)) == [good.run.task_id]
    assert (await store.task(sealed.run.task_id))[0].state is TaskState.READY  # type: ignore[index]
    assert await store.take(THERE, 10) == []  # only later


async def test_a_task_that_cannot_be_read_is_left_for_another_replica(store: SqlStore) -> None:
    pause, other = await paused(store), await paused(store)
    await seal(store, pause.run.task_id)
    first, second = await store.claim([a_claim(pause), a_claim(other)], HERE, 2)
    assert isinstance(first, MadeReady)
    assert isinstance(second, AllArrived)
    assert (await store.task(pause.run.task_id))[0].state is TaskState.READY  # type: ignore[index]


async def test_an_expired_task_that_cannot_be_read_is_left_for_another_replica(store: SqlStore) -> None:
    soon = a_pause()
    call = one(soon.calls)
    object.__setattr__(call, "timeout", timedelta(microseconds=1))
    await store.pause([soon])
    await seal(store, soon.run.task_id)
    expired = one(await store.expire(HERE, 10, 1))
    assert isinstance(expired.then, MadeReady)
    assert (await store.task(soon.run.task_id))[0].state is TaskState.READY  # type: ignore[index]


async def test_what_is_due_is_sent_beside_what_cannot_be_read(database_url: str) -> None:
    store = SqlStore(database_url, namespace="test", dispatch_lease=timedelta())
    await store.open()
    sealed, good = await paused(store), await paused(store)
    statement = text("UPDATE agent_peer_sub_tasks SET request = :sealed WHERE logical_task_id = :task_id")
    async with store._database.engine.connect() as connection:
        await connection.execute(statement, {"sealed": b"\x7fsealed", "task_id": sealed.run.task_id})
    assert [send.task_id for send in await store.unsent(AGENT, 10)] == [good.run.task_id]
    await store.close()


@pytest.mark.servers
@pytest.mark.parametrize(
    "statement",
    ["ALTER TABLE agent_peer_sub_tasks RENAME TO away", "ALTER TABLE agent_peer_sub_tasks RENAME outcome TO away"],
)
async def test_a_schema_that_is_being_changed_is_an_outage(postgres_url: str, statement: str) -> None:
    store = SqlStore(postgres_url, namespace="test")
    pause = await paused(store)
    async with store._database.engine.connect() as connection:
        await connection.exec_driver_sql(statement)
    with pytest.raises(StoreUnavailable):
        await store.claim([a_claim(pause)], HERE, 1)
    await store.close()


@pytest.mark.servers
async def test_a_login_that_is_refused_is_an_outage_once_the_store_is_in_use(postgres_url: str) -> None:
    stranger = postgres_url.replace("://postgres", "://nobody_knows_me")
    store = SqlStore(stranger, namespace="test")
    with pytest.raises(ConfigurationError):
        await store.open()
    with pytest.raises(StoreUnavailable):
        await store.take(HERE, 1)
    await store.close()


async def test_writes_that_are_cancelled_keep_nobody_from_writing(database_url: str) -> None:
    store, dice = SqlStore(database_url, namespace="test"), random.Random(1)
    await store.open()
    for _ in range(200):
        other = SqlStore(database_url, namespace="test")
        writing = [asyncio.create_task(other.pause([a_pause()])) for _ in range(3)]
        await asyncio.sleep(0.02 * dice.random())  # in the middle of the writes
        for each in writing:
            each.cancel()
        await asyncio.gather(*writing, return_exceptions=True)
        await other.close()
        await paused(store)
    await store.close()


async def test_an_instant_that_no_calendar_has_hurts_no_other_task(store: SqlStore) -> None:
    far, other = await paused(store), await paused(store)
    statement = text(
        "UPDATE agent_paused_tasks SET wake_at = 1e15, task_deadline = 1e15, checkpointed_at = 1e15 "
        "WHERE logical_task_id = :task_id"
    )
    async with store._database.engine.connect() as connection:
        await connection.execute(statement, {"task_id": far.run.task_id})
    assert {each.task_id for each in await store.tasks()} == {far.run.task_id, other.run.task_id}
    assert (await store.lookup([far.run.task_id, other.run.task_id])).keys() == {far.run.task_id, other.run.task_id}
    first, second = await store.claim([a_claim(far), a_claim(other)], HERE, 2)
    assert isinstance(first, AllArrived)
    assert isinstance(second, AllArrived)


async def test_the_databases_time_is_known_from_the_start(store: SqlStore) -> None:
    if store._database.dialect.is_sqlite:
        assert store.present is None  # a file uses its host's clock
        return
    asked = text("SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS double precision)")
    async with store._database.engine.connect() as connection:
        await store.lookup([TaskId("none")])
        first = store.present
        later = (await connection.execute(asked)).scalar_one()
        assert first is not None
        assert first.timestamp() <= later + 0.001
        await store.lookup([TaskId("none")])
        second = store.present
        assert second is not None
        assert second >= first
