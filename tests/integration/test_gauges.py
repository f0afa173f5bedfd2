"""What `meshpoint metrics` reads of a database, on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta

import asyncpg
import pytest

from meshpoint.adapters.sql import SqlStore, gauges
from meshpoint.adapters.sql.gauges import SqlGauges
from meshpoint.errors import ConfigurationError, StoreUnavailable
from meshpoint.model.calls import FIRST
from meshpoint.model.ids import AgentName
from meshpoint.model.replicas import ReplicaState
from meshpoint.model.tasks import TaskState
from meshpoint.ports.gauges import AgentGauges
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    AGENT,
    ELSEWHERE,
    FAILED,
    FOREIGNER,
    HERE,
    HOUR,
    LEASED,
    OTHER_FORMAT,
    SECOND,
    THERE,
    a_begin,
    a_call,
    a_cancel,
    a_claim,
    a_pause,
    a_run,
    an_end,
    answered,
    begun,
    ended,
    parked,
    paused,
    ready,
)
from meshpoint.testing.conformance.store_fleet import a_registration
from meshpoint.testing.conformance.store_mailbox import a_question, an_answer, answer
from meshpoint.testing.conformance.store_suspending import suspend

TIMEOUT = timedelta(seconds=30)
AGED = pytest.approx(60, abs=1e-3)


@pytest.fixture
async def reader(database_url: str, clock: FakeClock) -> AsyncIterator[SqlGauges]:
    reader = SqlGauges(
        database_url, namespace="test", timeout=TIMEOUT, agents=[AGENT], clock=clock
    )
    yield reader
    await reader.close()


async def read(reader: SqlGauges) -> AgentGauges:
    return (await reader.read()).agents[AGENT]


async def test_an_agent_without_tasks_has_zeros(store: SqlStore, reader: SqlGauges) -> None:
    found = await reader.read()
    assert found.agents == {
        AGENT: AgentGauges(dict.fromkeys(TaskState, 0), replicas=dict.fromkeys(ReplicaState, 0))
    }
    assert found.size > 0


async def test_tasks_are_counted_by_state(store: SqlStore, reader: SqlGauges) -> None:
    for _ in range(2):
        await paused(store)
    await begun(store)
    await ready(store)
    await parked(store)
    await ended(store)
    assert (await read(reader)).tasks == {
        TaskState.WAITING: 2,
        TaskState.RUNNING: 1,
        TaskState.READY: 1,
        TaskState.PARKED: 1,
        TaskState.COMPLETED: 1,
        TaskState.FAILED: 0,
        TaskState.CANCELLED: 0,
    }


async def test_counts_end_at_a_limit(
    store: SqlStore, reader: SqlGauges, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gauges, "MAX_COUNT", 2)
    monkeypatch.setattr(gauges, "MAX_ENDED_COUNT", 1)
    for _ in range(3):
        await paused(store)
        await ended(store)
    counts = (await read(reader)).tasks
    assert (counts[TaskState.WAITING], counts[TaskState.COMPLETED]) == (2, 1)


async def test_agents_of_other_namespaces_are_left_out(
    store: SqlStore, reader: SqlGauges, database_url: str, clock: FakeClock
) -> None:
    await paused(store)
    other = SqlGauges(database_url, namespace="other", timeout=TIMEOUT, clock=clock)
    assert (await other.read()).agents == {}
    await other.close()


async def test_a_ready_task_ages_from_when_it_was_due(
    store: SqlStore, reader: SqlGauges, clock: FakeClock
) -> None:
    await ready(store)
    clock.advance(60 * SECOND)
    assert (await read(reader)).ready_age == AGED
    await store.acquire(HERE, 1)
    assert (await read(reader)).ready_age == 0


async def test_a_suspended_task_is_not_late(
    store: SqlStore, reader: SqlGauges, clock: FakeClock
) -> None:
    task_id = (await ready(store)).run.task_id
    await suspend(store, task_id)
    clock.advance(60 * SECOND)
    found = await read(reader)
    assert (found.ready_age, found.suspended) == (0, 1)
    await store.cancel([a_cancel(task_id)])
    assert (await read(reader)).suspended == 0


async def test_the_oldest_waiting_task_counts(
    store: SqlStore, reader: SqlGauges, clock: FakeClock
) -> None:
    first = await paused(store, a_call("a", timeout=HOUR))
    clock.advance(40 * SECOND)
    await paused(store, a_call("a", timeout=HOUR))
    clock.advance(20 * SECOND)
    assert (await read(reader)).waiting_age == AGED
    await store.claim([a_claim(first)], HERE, 1)
    assert (await read(reader)).waiting_age == pytest.approx(20, abs=1e-3)


async def test_an_unsent_request_ages_from_the_pause(
    store: SqlStore, reader: SqlGauges, clock: FakeClock
) -> None:
    (result,) = await store.pause([a_pause(a_call("a", timeout=HOUR))])
    clock.advance(LEASED)
    assert await store.unsent(AGENT, 10)  # postpones the next attempt
    clock.advance(60 * SECOND - LEASED)
    assert (await read(reader)).outbox_age == AGED
    await store.confirm_sent(result.dispatches)  # type: ignore[union-attr]
    await store.flush_confirms()
    assert (await read(reader)).outbox_age == 0


async def test_an_unsent_reply_ages_from_the_end(
    store: SqlStore, reader: SqlGauges, clock: FakeClock
) -> None:
    run = await begun(store)
    (result,) = await store.end([an_end(run)])
    clock.advance(60 * SECOND)
    assert (await read(reader)).outbox_age == AGED
    await store.confirm_sent([result.reply])  # type: ignore[union-attr]
    await store.flush_confirms()
    assert (await read(reader)).outbox_age == 0


async def test_an_unsent_cancel_ages_from_when_it_is_due(
    store: SqlStore, reader: SqlGauges, clock: FakeClock
) -> None:
    pause = await paused(store, a_call("a", timeout=HOUR))
    (cancelled,) = await store.cancel([a_cancel(pause.run.task_id)])
    await store.confirm_sent([cancelled.reply])  # type: ignore[union-attr]
    await store.flush_confirms()
    clock.advance(LEASED + 60 * SECOND)
    assert (await read(reader)).outbox_age > 50


async def test_questions_are_open_until_they_are_answered(
    store: SqlStore, reader: SqlGauges
) -> None:
    pause = await paused(store, a_question(), a_call("a"))
    await paused(store, "a")
    assert (await read(reader)).open_questions == 1
    await answer(store, an_answer(pause.run.task_id))
    assert (await read(reader)).open_questions == 0


async def test_a_question_closes_with_its_pause(store: SqlStore, reader: SqlGauges) -> None:
    pause = await paused(store, a_question(), a_call("a"), join=FIRST)
    assert (await read(reader)).open_questions == 1
    await answered(store, pause, "a")
    assert (await read(reader)).open_questions == 0


async def test_dead_tasks_are_counted(store: SqlStore, reader: SqlGauges) -> None:
    await store.end([an_end(await begun(store), FAILED, reason="broken")])
    assert (await read(reader)).dead == 0
    await store.end([an_end(await begun(store), FAILED, dead_reason="died 5 times")])
    assert (await read(reader)).dead == 1


async def test_an_agent_with_tasks_is_found(store: SqlStore, reader: SqlGauges) -> None:
    await store.begin([a_begin(replace(a_run(), agent=ELSEWHERE), FOREIGNER)])
    found = (await reader.read()).agents
    assert found.keys() == {AGENT, ELSEWHERE}
    assert found[ELSEWHERE].tasks[TaskState.RUNNING] == 1


async def test_a_file_without_tables_is_no_failure(tmp_path: object) -> None:
    reader = SqlGauges(f"sqlite:///{tmp_path}/none.db", namespace="test", timeout=TIMEOUT)
    with pytest.raises(StoreUnavailable, match=r"^the file does not exist"):
        await reader.read()
    await reader.close()


async def test_a_file_is_only_read(sqlite_url: str) -> None:
    reader = SqlGauges(sqlite_url, namespace="test", timeout=TIMEOUT)
    await reader.read()
    with pytest.raises(StoreUnavailable, match="readonly"):
        await reader._connection.fetch("DELETE FROM agent_paused_tasks RETURNING 1")
    await reader.close()


@pytest.mark.servers
async def test_postgres_shows_its_sessions(postgres_url: str) -> None:
    reader = SqlGauges(postgres_url, namespace="test", timeout=TIMEOUT, agents=[AgentName("a")])
    holder, waiter = await asyncpg.connect(postgres_url), await asyncpg.connect(postgres_url)
    try:
        idle = (await reader.read()).sessions
        assert idle is not None
        assert (idle.query_age, idle.lock_wait) == (0, 0)
        lock = holder.transaction()
        await lock.start()
        await holder.execute("LOCK TABLE agent_mesh_secrets IN ACCESS EXCLUSIVE MODE")
        waiting = asyncio.create_task(waiter.execute("SELECT * FROM agent_mesh_secrets"))
        while True:
            found = await reader.read()
            assert found.sessions is not None
            if found.sessions.lock_wait:
                break
        assert found.sessions.snapshot_age > 0
        assert found.sessions.query_age > 0
        assert found.now is not None
        gap = await holder.fetchval(
            "SELECT CAST(extract(epoch FROM query_start - now()) AS double precision)"
            " FROM pg_stat_activity WHERE pid = $1",
            waiter.get_server_pid(),
        )
        assert gap > 0
        earlier = found.sessions.lock_wait - found.sessions.query_age
        assert earlier > gap / 2, "a wait counts from the beginning of the other transaction"
        await lock.rollback()
        await waiting
    finally:
        await asyncio.gather(holder.close(), waiter.close(), reader.close())


@pytest.mark.servers
async def test_a_login_that_is_refused_is_a_configuration_error(postgres_url: str) -> None:
    reader = SqlGauges(f"{postgres_url}_missing", namespace="test", timeout=TIMEOUT)
    with pytest.raises(ConfigurationError):
        await reader.read()
    await reader.close()


@pytest.mark.servers
async def test_a_reader_connects_again(postgres_url: str) -> None:
    reader = SqlGauges(postgres_url, namespace="test", timeout=TIMEOUT)
    await reader.read()
    connection = await asyncpg.connect(postgres_url)
    await connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    await connection.close()
    with pytest.raises(StoreUnavailable):
        await reader.read()
    await reader.read()
    await reader.close()


async def test_a_ready_task_is_stranded_if_no_live_replica_reads_its_format(
    store: SqlStore, reader: SqlGauges, clock: FakeClock
) -> None:
    await ready(store)
    clock.advance(2 * 60 * SECOND)
    assert (await read(reader)).stranded == 0  # earlier releases do not register
    other = replace(a_registration(), formats=frozenset({OTHER_FORMAT}))
    await store.register(other)
    found = await read(reader)
    assert (found.stranded, found.replicas[ReplicaState.LIVE]) == (1, 1)
    await store.register(a_registration(THERE.id))
    assert (await read(reader)).stranded == 0
    clock.advance(other.valid_for)
    assert (await read(reader)).replicas == {
        ReplicaState.LIVE: 0,
        ReplicaState.DRAINING: 0,
        ReplicaState.LOST: 2,
    }
