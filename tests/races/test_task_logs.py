"""Logs in the SQL store: foreign keys, damaged and large logs, and rows of other releases."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from meshpoint.adapters.sql import (
    SqlStore,
    batch_statements,
    batcher,
    checkpointing,
    fast_path,
    owning,
)
from meshpoint.adapters.sql.prepared import PreparedConnection
from meshpoint.errors import AgentMisbehaved, StoreUnavailable
from meshpoint.model.ids import TaskId
from meshpoint.model.subtasks import SaveCommitted
from meshpoint.model.tasks import Resumable, TaskState
from meshpoint.model.transitions import Append, Fenced, LogChange, Pause, TaskReady
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    FORMAT,
    HERE,
    HOUR,
    LEASE,
    SECOND,
    a_claim,
    a_pause,
    a_revive,
    a_run,
    an_end,
    answered,
    one,
    operating,
    ready,
    resumed,
    row,
    state_of,
    write_end,
    write_pause,
)
from meshpoint.testing.conformance.store_logs import (
    LOGGED,
    READER,
    continued,
    logged_pause,
    with_log,
)

SIZE = 100_000


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=[True, False], ids=["fast path", "transactions"])
async def store(
    database_url: str, clock: FakeClock, request: pytest.FixtureRequest
) -> AsyncIterator[SqlStore]:
    store = SqlStore(database_url, namespace="test", clock=clock, fast_path=request.param)
    await store.open()
    yield store
    await store.close()


async def execute(store: SqlStore, statement: str, **values: Any) -> None:
    async with store._database.engine.connect() as connection:
        await connection.execute(text(statement), values)


async def stored_entries(store: SqlStore, task_id: TaskId) -> list[tuple[int, str]]:
    """The number and the run of each stored entry."""
    statement = "SELECT seq, run_id FROM agent_task_log WHERE logical_task_id = :id ORDER BY seq"
    async with store._database.engine.connect() as connection:
        return [tuple(each) for each in await connection.execute(text(statement), {"id": task_id})]


async def test_an_entry_names_its_run(store: SqlStore) -> None:
    first = await with_log(store, b"a", b"b")
    task = await continued(store, logged_pause(b"c", run=first.run, after=2))
    entries = await stored_entries(store, task.run.task_id)
    assert [seq for seq, _ in entries] == [1, 2, 3]
    assert entries[2][1] == first.run.id
    assert entries[0][1] == entries[1][1] != first.run.id


@pytest.mark.parametrize("state", [TaskState.COMPLETED, TaskState.FAILED, TaskState.CANCELLED])
async def test_the_end_deletes_the_log(store: SqlStore, state: TaskState) -> None:
    run = (await with_log(store, b"a")).run
    await write_end(store, an_end(run, state))
    assert await stored_entries(store, run.task_id) == []


async def test_a_replaced_log_is_deleted(store: SqlStore) -> None:
    run = (await with_log(store, b"a", b"b")).run
    await write_pause(store, logged_pause(b"c", run=run, after=2, replaces=True))
    assert [seq for seq, _ in await stored_entries(store, run.task_id)] == [3]


async def test_the_log_of_a_completed_operation_is_deleted(store: SqlStore) -> None:
    run = (await continued(store, logged_pause(b"a", run=await operating(store)))).run
    await write_end(store, an_end(run))
    assert await stored_entries(store, run.task_id) == []


async def test_a_deleted_task_takes_its_log_along(store: SqlStore, clock: FakeClock) -> None:
    run = (await continued(store, logged_pause(b"a", run=await operating(store)))).run
    end = await write_end(store, an_end(run, TaskState.FAILED, reason="no answer"))
    await store.confirm_sent([end.reply])
    await store.flush_confirms()
    assert len(await stored_entries(store, run.task_id)) == 1
    clock.advance(10_000 * HOUR)
    assert await store.purge(run.agent, 10) == 1
    assert await stored_entries(store, run.task_id) == []


async def test_foreign_keys_are_enforced_on_every_connection_to_sqlite(tmp_path: Path) -> None:
    store = SqlStore(f"sqlite:///{tmp_path}/tasks.db", namespace="test")
    await store.open()
    try:
        for read in (store._database.read, store._database.write):
            enforced = one(await read(lambda tx: tx.fetch("PRAGMA foreign_keys")))
            assert enforced.foreign_keys == 1
    finally:
        await store.close()


async def test_entries_of_an_unknown_run_fence_a_pause(store: SqlStore) -> None:
    run = (await with_log(store, b"a")).run
    unknown = "INSERT INTO agent_task_log VALUES (:id, 2, 'unknown', :entry)"
    await execute(store, unknown, id=run.task_id, entry=b"\x00?")
    before = await row(store, run.task_id)
    for replaces in (False, True):
        pause = logged_pause(b"b", run=run, after=1, replaces=replaces)
        assert await store.pause([pause]) == [Fenced()]
    assert await row(store, run.task_id) == before
    assert len(await stored_entries(store, run.task_id)) == 2


@pytest.mark.parametrize("change", ["first pause", "second pause", "append"])
async def test_the_log_of_an_earlier_task_with_the_same_id_is_deleted(
    tmp_path: Path, change: str
) -> None:
    """The previous release enforces no foreign keys in SQLite, and purges tasks without logs."""
    store = SqlStore(f"sqlite:///{tmp_path}/tasks.db", namespace="test")
    await store.open()
    try:
        task_id = (await with_log(store, b"old", b"older")).run.task_id
        with closing(sqlite3.connect(tmp_path / "tasks.db")) as connection, connection:
            for table in ("peer_sub_tasks", "parallel_invocations", "paused_tasks"):
                connection.execute(f"DELETE FROM agent_{table}")
        assert len(await stored_entries(store, task_id)) == 2
        run = a_run(task_id)
        if change != "first pause":
            run = (await continued(store, a_pause(run=run))).run
        if change == "append":
            assert one(await store.append([Append(run, LogChange((b"new",)))])) == SaveCommitted()
        else:
            task = await continued(store, logged_pause(b"new", run=run))
            assert (task.log, task.log_seq) == ((b"new",), 1)
        assert len(await stored_entries(store, task_id)) == 1
    finally:
        await store.close()


async def test_a_reader_ignores_entries_after_the_last_one_in_the_row(store: SqlStore) -> None:
    pause = logged_pause(b"a")
    await write_pause(store, pause)
    await ready(store, pause)
    unknown = "INSERT INTO agent_task_log VALUES (:id, 2, 'unknown', :entry)"
    await execute(store, unknown, id=pause.run.task_id, entry=b"\x00?")
    assert one(await store.acquire(READER, 10)).log == (b"a",)


@pytest.fixture(params=[fast_path.INLINE_LOG_BYTES, 0], ids=["in the claim", "apart"])
def inline_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger logs are not read by the statement of the claim."""
    monkeypatch.setattr(fast_path, "INLINE_LOG_BYTES", request.param)


@pytest.mark.usefixtures("inline_bytes")
async def test_a_claim_returns_the_log(store: SqlStore) -> None:
    task = await with_log(store, b"a", b"b")
    task = await continued(store, logged_pause(b"c", run=task.run, after=2))
    assert (task.log, task.log_seq) == ((b"a", b"b", b"c"), 3)
    task = await continued(store, logged_pause(b"d", run=task.run, after=3, replaces=True))
    assert (task.log, task.log_seq) == ((b"d",), 4)


async def test_a_log_whose_statement_fails_is_read_again(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, failures = PreparedConnection.read, list[str]()

    async def failing(connection: PreparedConnection, statement: str, *values: Any) -> Any:
        if statement != batch_statements.READ_OWNED_LOG:
            return await read(connection, statement, *values)
        failures.append(statement)
        raise StoreUnavailable("the connection was closed")

    monkeypatch.setattr(fast_path, "INLINE_LOG_BYTES", 0)
    monkeypatch.setattr(PreparedConnection, "read", failing)
    assert (await with_log(store, b"a", b"b")).log == (b"a", b"b")
    assert len(failures) == (store._fast_path is not None)


@pytest.mark.usefixtures("inline_bytes")
@pytest.mark.parametrize("lost", [1, 2])
async def test_a_task_with_a_damaged_log_is_parked(store: SqlStore, lost: int) -> None:
    pause = logged_pause(b"a", b"b")
    await write_pause(store, pause)
    statement = "DELETE FROM agent_task_log WHERE logical_task_id = :id AND seq >= :lost"
    await execute(store, statement, id=pause.run.task_id, lost=lost)
    arrival = one(await store.claim([a_claim(pause)], READER, 1))
    assert isinstance(arrival, TaskReady)
    assert await state_of(store, pause.run.task_id) is TaskState.PARKED


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (batcher, checkpointing, fast_path, owning):
        monkeypatch.setattr(module, "PART_BYTES", 2 * SIZE)
    monkeypatch.setattr(batcher.split_by_size, "__defaults__", (2 * SIZE,))


async def _by_claim(store: SqlStore, pause: Pause, clock: FakeClock) -> Resumable:
    return await resumed(store, pause, replica=READER)


async def _by_acquire(store: SqlStore, pause: Pause, clock: FakeClock) -> Resumable:
    await answered(store, pause, slots=0)
    return one(await store.acquire(READER, 10))


async def _by_rescue(store: SqlStore, pause: Pause, clock: FakeClock) -> Resumable:
    await resumed(store, pause, replica=READER)
    clock.advance(LEASE + SECOND)
    return one(await store.rescue(READER, 10, 10))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("resume", [_by_claim, _by_acquire, _by_rescue])
async def test_a_large_log_is_read_in_parts(
    store: SqlStore, clock: FakeClock, resume: Any
) -> None:
    entries = tuple(os.urandom(SIZE) for _ in range(5))
    task = await with_log(store, entries[0])
    for number, entry in enumerate(entries[1:-1], 1):
        task = await continued(store, logged_pause(entry, run=task.run, after=number))
    pause = logged_pause(entries[-1], run=task.run, after=4)
    await write_pause(store, pause)
    assert (await resume(store, pause, clock)).log == entries


async def test_a_log_counts_for_the_size_limit(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointing, "MAX_ROW_BYTES", 10_000)
    run = (await with_log(store, b"a" * 5000)).run
    change = LogChange((b"b" * 6000,), after=1, kept_bytes=5000)
    pause = replace(a_pause(run=run, state_format=LOGGED), log=change)
    with pytest.raises(AgentMisbehaved, match="bytes"):
        await store.pause([pause])
    assert await store.pause([replace(pause, log=replace(change, replaces=True, kept_bytes=0))])


async def test_a_log_from_before_a_revival_is_replaced(store: SqlStore) -> None:
    run = (await continued(store, logged_pause(b"old", run=await operating(store)))).run
    await write_end(store, an_end(run, TaskState.FAILED, reason="no answer"))
    await store.revive(a_revive(run.task_id, without_checkpoint=True))
    pause = a_pause(run=one(await store.acquire(HERE, 10)).run)
    task = await resumed(store, await _written(store, pause))
    assert (task.log, task.log_seq, task.state_format) == ((b"old",), 1, FORMAT)
    pause = logged_pause(b"new", run=task.run, after=1, replaces=True)
    assert (await continued(store, pause)).log == (b"new",)


async def _written(store: SqlStore, pause: Pause) -> Pause:
    await write_pause(store, pause)
    return pause
