"""The cost of operations in the database: leftover rows, statements and bytes read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text

from meshpoint.adapters.sql import SqlStore
from meshpoint.adapters.sql.prepared import PreparedConnection
from meshpoint.adapters.sql.tables import metadata
from meshpoint.model.checkpoint import Begin, Committed, Save, TaskState, Track
from meshpoint.model.ids import TaskId
from meshpoint.testing.conformance.build import (
    AGENT,
    a_begin,
    a_checkpoint,
    a_pause,
    a_revive,
    a_run,
    an_end,
    an_operation,
    begun,
    failed,
    one,
    operating,
    paused,
    resumed,
    saved,
)
from meshpoint.testing.conformance.build_memory import content, memory_of, remembering, remembering_pause, save


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[SqlStore]:
    """A store that purges ended tasks at once."""
    store = SqlStore(
        database_url,
        namespace="test",
        tombstone_ttl=timedelta(),
        checkpoint_ttl=timedelta(),
        confirm_linger=timedelta(),
    )
    await store.open()
    yield store
    await store.close()


async def test_nothing_is_left_of_a_purged_operation(store: SqlStore) -> None:
    over = await operating(store)
    await saved(store, over)
    await store.end([an_end(over)])
    runs = [over, await failed(store), await begun(store)]
    await store.end([an_end(runs[-1])])
    replies = [known.reply for known in (await store.lookup([run.task_id for run in runs])).values()]
    await store.mark_sent([reply for reply in replies if reply is not None])
    assert await store.purge(AGENT, 10) == 3
    async with store._database.engine.connect() as connection:
        for table in metadata.tables:
            assert (await connection.execute(text(f"SELECT count(*) FROM {table}"))).scalar() == 0


@pytest.fixture(params=["sqlite", *(pytest.param(way, marks=pytest.mark.servers) for way in ("hot", "general"))])
def way(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, bool]:
    """Each way a checkpoint is written: the database, and whether the fast path is used."""
    on_sqlite = request.param == "sqlite"
    url = f"sqlite:///{tmp_path}/tasks.db" if on_sqlite else request.getfixturevalue("postgres_url")
    return url, request.param == "hot"


@pytest.fixture
async def keeping(way: tuple[str, bool]) -> AsyncIterator[SqlStore]:
    """A store with an archive."""
    url, hot_path = way
    store = SqlStore(url, namespace="test", checkpoint_history=3, checkpoint_archive=True, fast_path=hot_path)
    await store.open()
    yield store
    await store.close()


async def _rest(store: SqlStore, table: str, task_id: TaskId) -> dict[int, bytes | None]:
    """The stored working memories of an operation, by checkpoint."""
    rest = text(f"SELECT seq, l1_snapshot FROM {table} WHERE analysis_id = :id ORDER BY seq")
    async with store._database.engine.connect() as connection:
        return {row.seq: row.l1_snapshot for row in await connection.execute(rest, {"id": task_id})}


async def test_one_working_memory_of_an_operation_rests(keeping: SqlStore) -> None:
    run, other = await operating(keeping), await operating(keeping)
    await save(keeping, other, ["other"])
    await save(keeping, run, ["first", "second"])
    assert await _rest(keeping, "agent_checkpoints", run.task_id) == {1: None, 2: content("second")}
    await save(keeping, run, [None, None, None, None], first=3)
    rows = {2: content("second"), 4: None, 5: None, 6: None}
    assert await _rest(keeping, "agent_checkpoints", run.task_id) == rows
    pause = remembering_pause(run, 7, "third")
    assert isinstance(one(await keeping.pause([pause])), Committed)
    task = await resumed(keeping, pause)
    rows = {5: None, 6: None, 7: content("third")}
    assert await _rest(keeping, "agent_checkpoints", run.task_id) == rows
    await keeping.end([an_end(task.run, TaskState.FAILED, reason="broken")])
    rows = {6: None, 7: content("third"), 8: None}
    assert await _rest(keeping, "agent_checkpoints", run.task_id) == rows
    assert await memory_of(keeping, other.task_id) == (1, "other")


async def test_of_two_that_rest_the_newest_counts_until_both_go(keeping: SqlStore) -> None:
    """Two memories remain if a save missed the previous save of the same run."""
    run = await operating(keeping)
    await save(keeping, run, ["first", "second"])
    async with keeping._database.engine.begin() as connection:
        memory = {"memory": content("first")}
        await connection.execute(text("UPDATE agent_checkpoints SET l1_snapshot = :memory WHERE seq = 1"), memory)
    assert await memory_of(keeping, run.task_id) == (2, "second")
    await save(keeping, run, [None, "third"], first=3)
    rows = {2: None, 3: None, 4: content("third")}
    assert await _rest(keeping, "agent_checkpoints", run.task_id) == rows


async def test_the_last_checkpoint_of_a_failure_takes_it_too(keeping: SqlStore) -> None:
    run = await operating(keeping)
    await save(keeping, run, ["first"])
    await keeping.end([an_end(run, TaskState.FAILED, checkpoint=remembering(run, 2, "last"))])
    assert await _rest(keeping, "agent_checkpoints", run.task_id) == {1: None, 2: content("last")}


async def test_the_archive_has_it_with_its_hash(keeping: SqlStore) -> None:
    run = await operating(keeping)
    await save(keeping, run, ["first", None])
    before = await keeping.history(run.task_id)
    await keeping.end([an_end(run)])
    assert await _rest(keeping, "agent_checkpoints", run.task_id) == {}
    assert await _rest(keeping, "agent_checkpoints_archive", run.task_id) == {1: content("first"), 2: None}
    assert await keeping.history(run.task_id) == before
    assert before[0].l1_snapshot_hash is not None


async def test_what_an_earlier_task_left_behind_is_replaced_with_its_row(keeping: SqlStore) -> None:
    run = await operating(keeping)
    await save(keeping, run, [None, "first"])
    async with keeping._database.engine.begin() as connection:
        await connection.execute(text("DELETE FROM agent_paused_tasks"))
    again = await operating(keeping, a_run(run.task_id))
    await save(keeping, again, [None])
    assert await keeping.l1_snapshot(run.task_id) is None
    await save(keeping, again, [None], first=2)
    assert await _rest(keeping, "agent_checkpoints", run.task_id) == {1: None, 2: None}


async def test_what_reads_checkpoints_does_not_load_it(keeping: SqlStore) -> None:
    columns: set[str] = set()

    def hear(connection: object, cursor: Any, *rest: object) -> None:
        columns.update(name for name, *_ in cursor.description or ())

    run = await operating(keeping)
    await save(keeping, run, ["first"])
    event.listen(keeping._database.engine.sync_engine, "after_cursor_execute", hear)
    await keeping.latest(run.task_id)
    await keeping.history(run.task_id)
    await keeping.operation(run.task_id)
    await keeping.operations()
    await keeping.end([an_end(run)])
    assert len(await keeping.history(run.task_id)) == 1  # in the archive
    assert "l1_snapshot_hash" in columns
    assert "l1_snapshot" not in columns
    await keeping.l1_snapshot(run.task_id)
    assert "l1_snapshot" in columns


async def test_one_of_another_namespace_is_not_found(keeping: SqlStore, way: tuple[str, bool]) -> None:
    run = await operating(keeping)
    await save(keeping, run, ["first"])
    stranger = SqlStore(way[0], namespace="tes")
    await stranger.open()
    assert await stranger.l1_snapshot(run.task_id) is None
    assert await stranger.l1_snapshot(run.task_id, AGENT) is None
    assert await stranger.latest(run.task_id) is None
    await stranger.close()
    assert await memory_of(keeping, run.task_id) == (1, "first")


@pytest.fixture
async def postgres(postgres_url: str) -> AsyncIterator[SqlStore]:
    store = SqlStore(postgres_url, namespace="test")
    await store.open()
    yield store
    await store.close()


async def _sent(store: SqlStore, step: Awaitable[Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """Number of statements that `step` sends, including BEGIN and COMMIT."""
    count, write = 0, PreparedConnection.write

    def hear(*of_event: object) -> None:
        nonlocal count
        count += 1

    async def heard(lane: PreparedConnection, statement: str, *values: Any) -> Any:
        hear()
        return await write(lane, statement, *values)

    event.listen(store._database.engine.sync_engine, "before_cursor_execute", hear)
    with monkeypatch.context() as patched:
        patched.setattr(PreparedConnection, "write", heard)
        await step
    event.remove(store._database.engine.sync_engine, "before_cursor_execute", hear)
    return count


@pytest.mark.servers
async def test_each_step_of_an_operation_sends_so_many_statements(
    postgres: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, tracked = a_run(), (await resumed(postgres)).run
    steps = {
        "begin": postgres.begin([a_begin(run, operation=an_operation())]),
        "track": postgres.track(Track(tracked, an_operation())),
    }
    sent = {name: await _sent(postgres, step, monkeypatch) for name, step in steps.items()}
    run = await operating(postgres)
    sent["save"] = await _sent(postgres, postgres.save(Save(run, a_checkpoint(run))), monkeypatch)
    sent["save with memory"] = await _sent(postgres, postgres.save(Save(run, remembering(run, 2, "m"))), monkeypatch)
    sent["memory"] = await _sent(postgres, postgres.l1_snapshot(run.task_id), monkeypatch)
    sent["latest"] = await _sent(postgres, postgres.latest(run.task_id), monkeypatch)
    sent["fail"] = await _sent(postgres, postgres.end([an_end(run, TaskState.FAILED)]), monkeypatch)
    sent["revive"] = await _sent(postgres, postgres.revive(a_revive(run.task_id)), monkeypatch)
    run = await operating(postgres)
    await saved(postgres, run)
    waiting = await operating(postgres)
    sent["pause"] = await _sent(postgres, postgres.pause([a_pause(run=waiting)]), monkeypatch)
    for name, seq in (("pause with memory", 1), ("pause with memory that prunes", 6)):
        waiting = await operating(postgres)
        sent[name] = await _sent(postgres, postgres.pause([remembering_pause(waiting, seq, "m")]), monkeypatch)
    sent["complete"] = await _sent(postgres, postgres.end([an_end(run)]), monkeypatch)
    assert sent == {
        "begin": 5,
        "track": 5,
        "save": 1,
        "save with memory": 1,
        "memory": 1,
        "latest": 1,
        "fail": 9,
        "revive": 8,
        "pause": 1,
        "pause with memory": 11,
        "pause with memory that prunes": 12,
        "complete": 9,
    }


@pytest.mark.servers
async def test_a_task_that_is_no_operation_sends_nothing_more(
    postgres: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin: Begin = a_begin()
    assert await _sent(postgres, postgres.begin([begin]), monkeypatch) == 4
    pause = await paused(postgres)
    assert await _sent(postgres, resumed(postgres, pause), monkeypatch) == 1
    task = await resumed(postgres)
    assert await _sent(postgres, postgres.end([an_end(task.run)]), monkeypatch) == 1


async def test_each_mesh_has_its_own_key_for_copies(database_url: str) -> None:
    one, same, other = (SqlStore(database_url, namespace=name) for name in ("one", "one", "other"))
    try:
        for store in (one, same, other):
            await store.open()
        keys = await asyncio.gather(one.copy_key(), same.copy_key(), other.copy_key())
        assert keys[0] == keys[1] != keys[2]
    finally:
        for store in (one, same, other):
            await store.close()
