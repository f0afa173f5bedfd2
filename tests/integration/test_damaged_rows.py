"""Due work with a damaged row is postponed and logged, and other due work proceeds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event, text

from meshpoint.adapters.inprocess.clock import FakeClock
from meshpoint.adapters.inprocess.rows import TaskRow
from meshpoint.adapters.inprocess.store import InProcessStore
from meshpoint.adapters.sql import SqlStore
from meshpoint.model.checkpoint import CallState
from meshpoint.model.ids import TaskId
from meshpoint.testing.conformance.build import (
    AGENT,
    HERE,
    HOUR,
    SECOND,
    THERE,
    TIMINGS,
    a_call,
    a_requester,
    begun,
    ended,
    one,
    paused,
    ready,
)

Look = Callable[[SqlStore], Awaitable[list[TaskId]]]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def store(database_url: str, clock: FakeClock) -> AsyncIterator[SqlStore]:
    store = SqlStore(database_url, namespace="test", clock=clock, tombstone_ttl=timedelta(seconds=5))
    await store.open()
    yield store
    await store.close()


async def execute(store: SqlStore, statement: str, **values: Any) -> None:
    async with store._database.engine.begin() as connection:
        await connection.execute(text(statement), values)


async def waiting(store: SqlStore) -> TaskId:
    requester = a_requester(idle_timeout=timedelta(seconds=9))
    return (await paused(store, a_call("a", timeout=5 * SECOND), requester=requester)).run.task_id


async def calling(store: SqlStore) -> TaskId:
    return (await paused(store, a_call("a", timeout=HOUR))).run.task_id


async def ready_task(store: SqlStore) -> TaskId:
    return (await ready(store)).run.task_id


async def running(store: SqlStore) -> TaskId:
    return (await begun(store)).task_id


async def over(store: SqlStore) -> TaskId:
    return (await ended(store)).task_id


async def expire(store: SqlStore) -> list[TaskId]:
    return [each.task_id for each in await store.expire(HERE, 10, 5)]


async def take(store: SqlStore) -> list[TaskId]:
    return [each.run.task_id for each in await store.take(HERE, 10, 5)]


async def take_over(store: SqlStore) -> list[TaskId]:
    return [each.run.task_id for each in await store.take_over(THERE, 10, 5)]


async def keep_alives(store: SqlStore) -> list[TaskId]:
    return [each.task_id for each in await store.keep_alives(HERE, 10)]


async def unsent(store: SqlStore) -> list[TaskId]:
    return [each.task_id for each in await store.unsent(AGENT, 10)]


TASK, CALL, JOIN = (
    "UPDATE agent_paused_tasks SET",
    "UPDATE agent_peer_sub_tasks SET",
    "UPDATE agent_parallel_invocations SET",
)
NO_TEXT = "CAST(X'ff' AS TEXT)"
MOST = {"sqlite": 2**63 - 1, "postgresql": 2**31 - 1}

ON_BOTH = [
    (waiting, expire, "DELETE FROM agent_parallel_invocations"),
    (waiting, expire, f"{TASK} generation = generation + 1"),
    (waiting, expire, f"{CALL} status = 'done'"),
    (waiting, expire, f"{CALL} status = 'done'; {JOIN} completed_count = 1"),
    (waiting, expire, f"{JOIN} needed = 0"),
    (waiting, expire, f"{TASK} fence = {{most}}"),
    (waiting, keep_alives, f"{TASK} idle_timeout = 1e300"),
    (waiting, keep_alives, f"{TASK} idle_timeout = NULL"),
    (calling, unsent, f"{JOIN} send_attempts = {{most}}"),
    (calling, unsent, f"{JOIN} send_due_at = NULL; {CALL} send_due_at = 1, send_attempts = {{most}}"),
    (ready_task, take, f"{TASK} fence = {{most}}"),
    (running, take_over, f"{TASK} fence = {{most}}"),
    (running, take_over, f"{TASK} attempt = {{most}}"),
    (over, unsent, f"{TASK} reply_attempts = {{most}}"),
]
ON_SQLITE = [
    (waiting, expire, f"{TASK} run_id = {NO_TEXT}"),
    (waiting, expire, f"{TASK} fence = 'x'"),
    (waiting, expire, f"{CALL} timeout_deadline = 'soon'"),
    (waiting, expire, f"{CALL} peer_agent = {NO_TEXT}"),
    (waiting, expire, f"{CALL} agent_name = X'ff'"),
    (waiting, expire, f"{JOIN} completed_count = X'ff'"),
    (waiting, keep_alives, f"{TASK} reply_to = {NO_TEXT}"),
    (calling, unsent, f"{CALL} peer_agent = {NO_TEXT}"),
    (calling, unsent, f"{JOIN} send_attempts = 'x'"),
    (ready_task, take, f"{TASK} framework = {NO_TEXT}"),
    (ready_task, take, f"{TASK} rescues = {NO_TEXT}"),
    (running, take_over, f"{TASK} attempt = 'x'"),
    (over, unsent, f"{TASK} reply_to = {NO_TEXT}"),
    (over, unsent, f"{TASK} ended_at = 'then', reply_attempts = X'ff'"),
]


async def check(store: SqlStore, clock: FakeClock, made: Any, look: Look, damage: str, caplog: Any) -> None:
    bad, good = await made(store), await made(store)
    for statement in damage.format(most=MOST[store._database.dialect.name]).split(";"):
        await execute(store, f"{statement} WHERE logical_task_id = :task_id", task_id=bad)
    clock.advance(20 * SECOND)
    assert await look(store) == [good]
    assert f"task {bad}: a row is damaged" in caplog.text
    caplog.clear()
    await look(store)
    clock.advance(59 * SECOND)
    await look(store)
    assert "is damaged" not in caplog.text
    clock.advance(2 * SECOND)
    await look(store)
    assert f"task {bad}: a row is damaged" in caplog.text


@pytest.mark.parametrize(("made", "look", "damage"), ON_BOTH)
async def test_one_damaged_row_stops_no_other(
    store: SqlStore, clock: FakeClock, made: Any, look: Look, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    await check(store, clock, made, look, damage, caplog)


class TestOnSqlite:
    @pytest.fixture
    def database_url(self, tmp_path: Any) -> str:
        return f"sqlite:///{tmp_path}/tasks.db"

    @pytest.mark.parametrize(("made", "look", "damage"), ON_SQLITE)
    async def test_one_value_of_a_wrong_type_stops_no_other(
        self,
        store: SqlStore,
        clock: FakeClock,
        made: Any,
        look: Look,
        damage: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        await check(store, clock, made, look, damage, caplog)

    async def test_a_tombstone_that_cannot_be_deleted_keeps_no_other(
        self, store: SqlStore, clock: FakeClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        bad, good = await over(store), await over(store)
        await execute(store, f"{TASK} reply_sent = true")
        stop = f"WHEN OLD.logical_task_id = '{bad}' BEGIN SELECT RAISE(ABORT, 'no'); END"
        await execute(store, f"CREATE TRIGGER stop BEFORE DELETE ON agent_paused_tasks {stop}")
        clock.advance(timedelta(days=2))
        assert await store.purge(AGENT, 10) == 1
        assert await store.task(good) is None
        assert f"task {bad}: a row is damaged" in caplog.text
        await execute(store, "DROP TRIGGER stop")
        clock.advance(61 * SECOND)
        assert await store.purge(AGENT, 10) == 1


async def test_a_row_that_is_mended_goes_on(store: SqlStore, clock: FakeClock) -> None:
    bad = await waiting(store)
    await execute(store, f"{TASK} generation = generation + 1")
    clock.advance(20 * SECOND)
    assert await expire(store) == []
    await execute(store, f"{TASK} generation = generation - 1")
    clock.advance(61 * SECOND)
    assert await expire(store) == [bad]


async def test_slots_are_counted_over_all_transactions(store: SqlStore, clock: FakeClock) -> None:
    tasks = [await waiting(store) for _ in range(4)]
    await execute(store, f"{TASK} generation = generation + 1 WHERE logical_task_id = :id", id=tasks[0])
    clock.advance(20 * SECOND)
    expired = await store.expire(HERE, 10, 2)
    assert [type(each.then).__name__ for each in expired] == ["MadeReady", "AllArrived", "AllArrived"]


async def test_rows_are_free_again_before_each_is_worked_on_alone(
    store: SqlStore, clock: FakeClock, said: list[str]
) -> None:
    bad, _ = await waiting(store), await waiting(store)
    await execute(store, f"{TASK} generation = generation + 1 WHERE logical_task_id = :id", id=bad)
    clock.advance(20 * SECOND)
    said.clear()
    await store.expire(HERE, 10, 2)
    transactions = [each.split()[0] for each in said if each.startswith(("BEGIN", "COMMIT", "ROLLBACK"))]
    first, ids, alone, put_off, other = (transactions[at : at + 2] for at in range(0, 10, 2))
    assert first == alone == ["BEGIN", "ROLLBACK"]
    assert ids == put_off == other == ["BEGIN", "COMMIT"]


@pytest.fixture
def said(store: SqlStore) -> Iterator[list[str]]:
    """Collect every statement of a transaction, in order."""
    statements: list[str] = []
    engine = store._database.writing_engine

    def note(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    yield statements
    event.remove(engine, "before_cursor_execute", note)


IN_MEMORY: dict[str, tuple[Any, Look, Callable[[TaskRow], object]]] = {
    "without calls": (waiting, expire, lambda row: row.calls.clear()),
    "ready with an odd context": (ready_task, take, lambda row: setattr(row, "context", "{")),
    "running with an odd context": (running, take_over, lambda row: setattr(row, "context", "{")),
    "with an odd requester": (
        waiting,
        keep_alives,
        lambda row: setattr(row, "requester", a_requester(idle_timeout=timedelta.max)),
    ),
    "with an odd answer": (
        waiting,
        expire,
        lambda row: row.calls.update(a=replace(one(row.calls.values()), state=CallState.DONE, outcome=b"{")),
    ),
}


@pytest.mark.parametrize(("made", "look", "damage"), IN_MEMORY.values(), ids=IN_MEMORY)
async def test_one_damaged_row_in_memory_stops_no_other(
    clock: FakeClock,
    made: Any,
    look: Any,
    damage: Callable[[TaskRow], object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = InProcessStore(clock, timings=TIMINGS)
    bad, good = await made(store), await made(store)
    damage(store._tables.tasks[bad])
    clock.advance(20 * SECOND)
    assert await look(store) == [good]
    assert f"task {bad}: a row of it is damaged" in caplog.text
