"""Due work with a damaged row is postponed and logged, and other due work proceeds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event, text

from meshpoint.adapters.inprocess.rows import TaskRow
from meshpoint.adapters.inprocess.store import InProcessStore
from meshpoint.adapters.sql import SqlStore
from meshpoint.model.ids import TaskId
from meshpoint.model.tasks import CallState, Requester, Resumable, TaskState, logged_format
from meshpoint.model.transitions import CancelRequested, EndCommitted
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    AGENT,
    FORMAT,
    HERE,
    HOUR,
    REQUESTER,
    SECOND,
    THERE,
    TIMINGS,
    a_call,
    a_cancel,
    a_replica,
    a_requester,
    an_end,
    begun,
    ended,
    one,
    parked,
    paused,
    ready,
    resumed,
    state_of,
)

Search = Callable[[SqlStore], Awaitable[list[TaskId]]]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def store(database_url: str, clock: FakeClock) -> AsyncIterator[SqlStore]:
    store = SqlStore(
        database_url, namespace="test", clock=clock, tombstone_ttl=timedelta(seconds=5)
    )
    await store.open()
    yield store
    await store.close()


async def execute(store: SqlStore, statement: str, **values: Any) -> None:
    async with store._database.engine.begin() as connection:
        await connection.execute(text(statement), values)


async def make_waiting(store: SqlStore) -> TaskId:
    requester = a_requester(idle_timeout=timedelta(seconds=9))
    return (await paused(store, a_call("a", timeout=5 * SECOND), requester=requester)).run.task_id


async def make_calling(store: SqlStore) -> TaskId:
    return (await paused(store, a_call("a", timeout=HOUR))).run.task_id


async def make_ready(store: SqlStore) -> TaskId:
    return (await ready(store)).run.task_id


async def make_running(store: SqlStore) -> TaskId:
    return (await begun(store)).task_id


async def make_ended(store: SqlStore) -> TaskId:
    return (await ended(store)).task_id


async def expire_calls(store: SqlStore) -> list[TaskId]:
    return [item.task_id for item in await store.expire(HERE, 10, 5)]


async def acquire_tasks(store: SqlStore) -> list[TaskId]:
    return [item.run.task_id for item in await store.acquire(HERE, 10, 5)]


async def rescue_tasks(store: SqlStore) -> list[TaskId]:
    return [item.run.task_id for item in await store.rescue(THERE, 10, 5)]


async def find_keep_alives(store: SqlStore) -> list[TaskId]:
    return [item.task_id for item in await store.keep_alives(HERE, 10)]


async def find_unsent(store: SqlStore) -> list[TaskId]:
    return [item.task_id for item in await store.unsent(AGENT, 10)]


TASK, CALL, JOIN = (
    "UPDATE agent_paused_tasks SET",
    "UPDATE agent_peer_sub_tasks SET",
    "UPDATE agent_parallel_invocations SET",
)
NO_TEXT = "CAST(X'ff' AS TEXT)"
LIMIT = {"sqlite": 2**63 - 1, "postgresql": 2**31 - 1}

ON_BOTH = [
    (make_waiting, expire_calls, "DELETE FROM agent_parallel_invocations"),
    (make_waiting, expire_calls, f"{TASK} generation = generation + 1"),
    (make_waiting, expire_calls, f"{CALL} status = 'done'"),
    (make_waiting, expire_calls, f"{CALL} status = 'done'; {JOIN} completed_count = 1"),
    (make_waiting, expire_calls, f"{JOIN} needed = 0"),
    (make_waiting, expire_calls, f"{TASK} fence = {{most}}"),
    (make_waiting, find_keep_alives, f"{TASK} idle_timeout = 1e300"),
    (make_waiting, find_keep_alives, f"{TASK} idle_timeout = NULL"),
    (make_calling, find_unsent, f"{JOIN} send_attempts = {{most}}"),
    (
        make_calling,
        find_unsent,
        f"{JOIN} send_due_at = NULL; {CALL} send_due_at = 1, send_attempts = {{most}}",
    ),
    (make_ready, acquire_tasks, f"{TASK} fence = {{most}}"),
    (make_running, rescue_tasks, f"{TASK} fence = {{most}}"),
    (make_running, rescue_tasks, f"{TASK} attempt = {{most}}"),
    (make_ended, find_unsent, f"{TASK} reply_attempts = {{most}}"),
]
ON_SQLITE = [
    (make_waiting, expire_calls, f"{TASK} run_id = {NO_TEXT}"),
    (make_waiting, expire_calls, f"{TASK} fence = 'x'"),
    (make_waiting, expire_calls, f"{CALL} timeout_deadline = 'soon'"),
    (make_waiting, expire_calls, f"{CALL} peer_agent = {NO_TEXT}"),
    (make_waiting, expire_calls, f"{CALL} agent_name = X'ff'"),
    (make_waiting, expire_calls, f"{JOIN} completed_count = X'ff'"),
    (make_waiting, find_keep_alives, f"{TASK} reply_to = {NO_TEXT}"),
    (make_calling, find_unsent, f"{CALL} peer_agent = {NO_TEXT}"),
    (make_calling, find_unsent, f"{JOIN} send_attempts = 'x'"),
    (make_ready, acquire_tasks, f"{TASK} framework = {NO_TEXT}"),
    (make_ready, acquire_tasks, f"{TASK} rescues = {NO_TEXT}"),
    (make_running, rescue_tasks, f"{TASK} attempt = 'x'"),
    (make_ended, find_unsent, f"{TASK} reply_to = {NO_TEXT}"),
    (make_ended, find_unsent, f"{TASK} ended_at = 'then', reply_attempts = X'ff'"),
]


async def check_damage(
    store: SqlStore, clock: FakeClock, make_task: Any, search: Search, damage: str, caplog: Any
) -> None:
    bad, good = await make_task(store), await make_task(store)
    for statement in damage.format(most=LIMIT[store._database.dialect.name]).split(";"):
        await execute(store, f"{statement} WHERE logical_task_id = :task_id", task_id=bad)
    clock.advance(20 * SECOND)
    assert await search(store) == [good]
    assert f"task {bad}: a row is damaged" in caplog.text
    caplog.clear()
    await search(store)
    clock.advance(59 * SECOND)
    await search(store)
    assert "is damaged" not in caplog.text
    clock.advance(2 * SECOND)
    await search(store)
    assert f"task {bad}: a row is damaged" in caplog.text


@pytest.mark.parametrize(("make_task", "search", "damage"), ON_BOTH)
async def test_one_damaged_row_stops_no_other(
    store: SqlStore,
    clock: FakeClock,
    make_task: Any,
    search: Search,
    damage: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await check_damage(store, clock, make_task, search, damage, caplog)


class TestOnSqlite:
    @pytest.fixture
    def database_url(self, sqlite_url: str) -> str:
        return sqlite_url

    @pytest.mark.parametrize(("make_task", "search", "damage"), ON_SQLITE)
    async def test_one_value_of_a_wrong_type_stops_no_other(
        self,
        store: SqlStore,
        clock: FakeClock,
        make_task: Any,
        search: Search,
        damage: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        await check_damage(store, clock, make_task, search, damage, caplog)

    async def test_a_tombstone_that_cannot_be_deleted_does_not_stop_the_others(
        self, store: SqlStore, clock: FakeClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        bad, good = await make_ended(store), await make_ended(store)
        await execute(store, f"{TASK} reply_sent = true")
        fail = f"WHEN OLD.logical_task_id = '{bad}' BEGIN SELECT RAISE(ABORT, 'no'); END"
        await execute(store, f"CREATE TRIGGER stop BEFORE DELETE ON agent_paused_tasks {fail}")
        clock.advance(timedelta(days=2))
        assert await store.purge(AGENT, 10) == 1
        assert await store.task(good) is None
        assert f"task {bad}: a row is damaged" in caplog.text
        await execute(store, "DROP TRIGGER stop")
        clock.advance(61 * SECOND)
        assert await store.purge(AGENT, 10) == 1


READS_LOGS = a_replica("B", formats=[FORMAT, logged_format(FORMAT)])
CONTENT = [
    f"{TASK} state = :bytes",
    f"{TASK} context_rest = '['",
    f"{TASK} security_context = :bytes",
    f"{TASK} log_seq = 7, state_format = '{logged_format(FORMAT)}'",
]


async def damage_content(store: SqlStore, task_id: TaskId, damage: str) -> None:
    values = {"bytes": b"\x7fsealed"} if ":bytes" in damage else {}
    await execute(store, f"{damage} WHERE logical_task_id = :task_id", task_id=task_id, **values)


async def check_end(store: SqlStore, task: Resumable, caplog: pytest.LogCaptureFixture) -> None:
    """Check that the task has no content, was not reported as unreadable, and can be ended."""
    assert task == task.without_content()
    assert "cannot decode" not in caplog.text
    assert isinstance(one(await store.end([an_end(task.run)])), EndCommitted)
    assert await state_of(store, task.run.task_id) is TaskState.COMPLETED


@pytest.mark.parametrize("damage", CONTENT)
async def test_a_parked_task_with_damaged_content_ends_after_the_limit(
    store: SqlStore, clock: FakeClock, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = await parked(store)
    await damage_content(store, run.task_id, damage)
    clock.advance(timedelta(days=30))
    await check_end(store, one(await store.acquire_overdue(HERE, 10)).task, caplog)


@pytest.mark.parametrize("damage", CONTENT)
async def test_a_ready_task_with_damaged_content_ends_at_its_deadline(
    store: SqlStore, clock: FakeClock, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    requester = a_requester(deadline=clock.now() + HOUR)
    late = await ready(store, await paused(store, requester=requester))
    await damage_content(store, late.run.task_id, damage)
    clock.advance(HOUR)
    task = one(await store.acquire_overdue(HERE, 10)).task
    assert task.requester == requester
    await check_end(store, task, caplog)


@pytest.mark.parametrize("damage", CONTENT)
async def test_a_cancelled_task_with_damaged_content_is_given_to_be_ended(
    store: SqlStore, clock: FakeClock, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    task_id = (await resumed(store)).run.task_id
    assert isinstance(one(await store.cancel([a_cancel(task_id)])), CancelRequested)
    await damage_content(store, task_id, damage)
    clock.advance(HOUR)
    task = one(await store.rescue(READS_LOGS, 10, 5))
    assert task.cancel_requested
    await check_end(store, task, caplog)


async def test_an_overdue_task_with_a_damaged_requester_ends_without_a_reply(
    store: SqlStore, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = await parked(store), await parked(store)
    await execute(
        store, f"{TASK} idle_timeout = 1e300 WHERE logical_task_id = :id", id=bad.task_id
    )
    clock.advance(timedelta(days=30))
    overdue = {each.task.run.task_id: each for each in await store.acquire_overdue(HERE, 10)}
    assert overdue.keys() == {bad.task_id, good.task_id}
    assert f"task {bad.task_id}: it ends without a reply" in caplog.text
    unanswered = overdue[bad.task_id]
    assert unanswered.parked_reason == "call 1"
    assert unanswered.task.requester == Requester(app_id=REQUESTER, parent_task_id="parent")
    for each in overdue.values():
        result = one(await store.end([an_end(each.task.run, TaskState.FAILED)]))
        assert isinstance(result, EndCommitted)
        assert result.reply.requester == each.task.requester


async def test_a_repaired_row_is_processed(store: SqlStore, clock: FakeClock) -> None:
    bad = await make_waiting(store)
    await execute(store, f"{TASK} generation = generation + 1")
    clock.advance(20 * SECOND)
    assert await expire_calls(store) == []
    await execute(store, f"{TASK} generation = generation - 1")
    clock.advance(61 * SECOND)
    assert await expire_calls(store) == [bad]


async def test_slots_are_counted_over_all_transactions(store: SqlStore, clock: FakeClock) -> None:
    tasks = [await make_waiting(store) for _ in range(4)]
    await execute(
        store, f"{TASK} generation = generation + 1 WHERE logical_task_id = :id", id=tasks[0]
    )
    clock.advance(20 * SECOND)
    expired = await store.expire(HERE, 10, 2)
    assert sorted(type(item.join_result).__name__ for item in expired) == [
        "JoinCompleted",
        "JoinCompleted",
        "TaskReady",
    ]


async def test_rows_are_unlocked_before_each_is_processed_alone(
    store: SqlStore, clock: FakeClock, executed: list[str]
) -> None:
    bad, _ = await make_waiting(store), await make_waiting(store)
    await execute(store, f"{TASK} generation = generation + 1 WHERE logical_task_id = :id", id=bad)
    clock.advance(20 * SECOND)
    executed.clear()
    await store.expire(HERE, 10, 2)
    transactions = [
        statement.split()[0]
        for statement in executed
        if statement.startswith(("BEGIN", "COMMIT", "ROLLBACK"))
    ]
    first, ids, single, postponed, other = (
        transactions[offset : offset + 2] for offset in range(0, 10, 2)
    )
    assert first == single == ["BEGIN", "ROLLBACK"]
    assert ids == postponed == other == ["BEGIN", "COMMIT"]


@pytest.fixture
def executed(store: SqlStore) -> Iterator[list[str]]:
    """Collect every statement of a transaction, in order."""
    statements: list[str] = []
    engine = store._database.writing_engine

    def note(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    yield statements
    event.remove(engine, "before_cursor_execute", note)


IN_MEMORY: dict[str, tuple[Any, Search, Callable[[TaskRow], object]]] = {
    "without calls": (make_waiting, expire_calls, lambda row: row.calls.clear()),
    "ready with an odd context": (
        make_ready,
        acquire_tasks,
        lambda row: setattr(row, "context", "{"),
    ),
    "running with an odd context": (
        make_running,
        rescue_tasks,
        lambda row: setattr(row, "context", "{"),
    ),
    "with an odd requester": (
        make_waiting,
        find_keep_alives,
        lambda row: setattr(row, "requester", a_requester(idle_timeout=timedelta.max)),
    ),
    "with an odd answer": (
        make_waiting,
        expire_calls,
        lambda row: row.calls.update(
            {TaskId("a"): replace(one(row.calls.values()), state=CallState.DONE, outcome=b"{")}
        ),
    ),
}


@pytest.mark.parametrize(("make_task", "search", "damage"), IN_MEMORY.values(), ids=IN_MEMORY)
async def test_one_damaged_in_process_row_stops_no_other(
    clock: FakeClock,
    make_task: Any,
    search: Any,
    damage: Callable[[TaskRow], object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = InProcessStore(clock, timings=TIMINGS)
    bad, good = await make_task(store), await make_task(store)
    damage(store._tables.tasks[bad])
    clock.advance(20 * SECOND)
    assert await search(store) == [good]
    assert f"task {bad}: a row is damaged" in caplog.text
