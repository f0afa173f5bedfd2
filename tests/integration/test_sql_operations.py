"""The cost of operations in the database: leftover rows, statements and bytes read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text

from meshpoint.adapters.sql import SqlStore
from meshpoint.adapters.sql.prepared import PreparedConnection
from meshpoint.adapters.sql.tables import metadata
from meshpoint.model.ids import TaskId
from meshpoint.model.tasks import TaskState
from meshpoint.model.transitions import Begin, PauseCommitted, Save
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
    content,
    failed,
    memory_of,
    one,
    operating,
    paused,
    remembering,
    remembering_pause,
    resumed,
    save,
    saved,
)
from meshpoint.testing.conformance.store_records import (
    FETCHED,
    WEIGHED,
    WEIGHING,
    WRITTEN,
    sharing,
    write,
)


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


async def test_a_purged_operation_leaves_no_rows(store: SqlStore) -> None:
    ended = await operating(store)
    await saved(store, ended)
    await store.end([an_end(ended)])
    runs = [ended, await failed(store), await begun(store)]
    await store.end([an_end(runs[-1])])
    replies = [
        existing.reply for existing in (await store.lookup([run.task_id for run in runs])).values()
    ]
    await store.confirm_sent([reply for reply in replies if reply is not None])
    assert await store.purge(AGENT, 10) == 3
    async with store._database.engine.connect() as connection:
        for table in metadata.tables:
            assert (await connection.execute(text(f"SELECT count(*) FROM {table}"))).scalar() == 0


@pytest.fixture(
    params=[
        "sqlite",
        *(
            pytest.param(write_path, marks=pytest.mark.servers)
            for write_path in ("hot", "general")
        ),
    ]
)
def write_path(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, bool]:
    """Each way a checkpoint is written: the database, and whether the fast path is used."""
    on_sqlite = request.param == "sqlite"
    url = (
        f"sqlite:///{tmp_path}/tasks.db" if on_sqlite else request.getfixturevalue("postgres_url")
    )
    return url, request.param == "hot"


@pytest.fixture
async def archiving_store(write_path: tuple[str, bool]) -> AsyncIterator[SqlStore]:
    """A store with an archive."""
    url, fast_path = write_path
    store = SqlStore(
        url, namespace="test", checkpoint_history=3, checkpoint_archive=True, fast_path=fast_path
    )
    await store.open()
    yield store
    await store.close()


async def _snapshot_rows(store: SqlStore, table: str, task_id: TaskId) -> dict[int, bytes | None]:
    """The stored working memories of an operation, by checkpoint."""
    query = text(f"SELECT seq, l1_snapshot FROM {table} WHERE analysis_id = :id ORDER BY seq")
    async with store._database.engine.connect() as connection:
        return {
            row.seq: row.l1_snapshot for row in await connection.execute(query, {"id": task_id})
        }


async def test_one_working_memory_of_an_operation_is_stored(archiving_store: SqlStore) -> None:
    run, other = await operating(archiving_store), await operating(archiving_store)
    await save(archiving_store, other, ["other"])
    await save(archiving_store, run, ["first", "second"])
    assert await _snapshot_rows(archiving_store, "agent_checkpoints", run.task_id) == {
        1: None,
        2: content("second"),
    }
    await save(archiving_store, run, [None, None, None, None], first=3)
    rows = {2: content("second"), 4: None, 5: None, 6: None}
    assert await _snapshot_rows(archiving_store, "agent_checkpoints", run.task_id) == rows
    pause = remembering_pause(run, 7, "third")
    assert isinstance(one(await archiving_store.pause([pause])), PauseCommitted)
    task = await resumed(archiving_store, pause)
    rows = {5: None, 6: None, 7: content("third")}
    assert await _snapshot_rows(archiving_store, "agent_checkpoints", run.task_id) == rows
    await archiving_store.end([an_end(task.run, TaskState.FAILED, reason="broken")])
    rows = {6: None, 7: content("third"), 8: None}
    assert await _snapshot_rows(archiving_store, "agent_checkpoints", run.task_id) == rows
    assert await memory_of(archiving_store, other.task_id) == (1, "other")


async def test_the_newest_of_two_stored_memories_is_used_until_both_are_deleted(
    archiving_store: SqlStore,
) -> None:
    """Two memories remain if a save missed the previous save of the same run."""
    run = await operating(archiving_store)
    await save(archiving_store, run, ["first", "second"])
    async with archiving_store._database.engine.begin() as connection:
        memory = {"memory": content("first")}
        await connection.execute(
            text("UPDATE agent_checkpoints SET l1_snapshot = :memory WHERE seq = 1"), memory
        )
    assert await memory_of(archiving_store, run.task_id) == (2, "second")
    await save(archiving_store, run, [None, "third"], first=3)
    rows = {2: None, 3: None, 4: content("third")}
    assert await _snapshot_rows(archiving_store, "agent_checkpoints", run.task_id) == rows


async def test_the_final_checkpoint_of_a_failure_stores_its_memory(
    archiving_store: SqlStore,
) -> None:
    run = await operating(archiving_store)
    await save(archiving_store, run, ["first"])
    await archiving_store.end(
        [an_end(run, TaskState.FAILED, checkpoint=remembering(run, 2, "last"))]
    )
    assert await _snapshot_rows(archiving_store, "agent_checkpoints", run.task_id) == {
        1: None,
        2: content("last"),
    }


async def test_the_archive_contains_the_memory_and_its_hash(archiving_store: SqlStore) -> None:
    run = await operating(archiving_store)
    await save(archiving_store, run, ["first", None])
    before = await archiving_store.history(run.task_id)
    await archiving_store.end([an_end(run)])
    assert await _snapshot_rows(archiving_store, "agent_checkpoints", run.task_id) == {}
    assert await _snapshot_rows(archiving_store, "agent_checkpoints_archive", run.task_id) == {
        1: content("first"),
        2: None,
    }
    assert await archiving_store.history(run.task_id) == before
    assert before[0].l1_snapshot_hash is not None


async def test_leftover_rows_of_an_earlier_task_are_replaced(archiving_store: SqlStore) -> None:
    run = await operating(archiving_store)
    await save(archiving_store, run, [None, "first"])
    async with archiving_store._database.engine.begin() as connection:
        await connection.execute(text("DELETE FROM agent_paused_tasks"))
    second_run = await operating(archiving_store, a_run(run.task_id))
    await save(archiving_store, second_run, [None])
    assert await archiving_store.l1_snapshot(run.task_id) is None
    await save(archiving_store, second_run, [None], first=2)
    assert await _snapshot_rows(archiving_store, "agent_checkpoints", run.task_id) == {
        1: None,
        2: None,
    }


async def _fetch(store: SqlStore, query: str, task_id: TaskId) -> list[tuple[Any, ...]]:
    async with store._database.engine.connect() as connection:
        rows = await connection.execute(text(query), {"id": task_id})
        return [tuple(row) for row in rows]


_VERSIONS = "SELECT seq, name FROM agent_subtask_records WHERE analysis_id = :id ORDER BY 1, 2"


async def test_a_checkpoint_writes_the_changed_records(archiving_store: SqlStore) -> None:
    run = await operating(archiving_store)
    await write(
        archiving_store,
        run,
        a_checkpoint(run, 1, FETCHED, WEIGHING),
        sharing(run, 2, FETCHED, WEIGHED, changed=["weigh"]),
        sharing(run, 3, FETCHED, WEIGHED),
    )
    versions = [(1, "fetch"), (1, "weigh"), (2, "weigh")]
    assert await _fetch(archiving_store, _VERSIONS, run.task_id) == versions
    await archiving_store.end([an_end(run)])
    assert await _fetch(archiving_store, _VERSIONS, run.task_id) == []


async def test_the_previous_release_takes_shared_records_for_another_version(
    archiving_store: SqlStore,
) -> None:
    """It reads no records, and would run all subtasks again."""
    run = await operating(archiving_store)
    await write(
        archiving_store,
        run,
        a_checkpoint(run, 1, FETCHED),
        a_checkpoint(run, 2, FETCHED, records_from=None),
    )
    query = "SELECT agent_version FROM agent_checkpoints WHERE analysis_id = :id ORDER BY seq"
    assert await _fetch(archiving_store, query, run.task_id) == [("7+records",), ("7",)]
    history = await archiving_store.history(run.task_id)
    assert [each.agent_version for each in history] == ["7", "7"]


async def test_archived_checkpoints_have_their_records(archiving_store: SqlStore) -> None:
    run = await operating(archiving_store)
    await write(
        archiving_store,
        run,
        a_checkpoint(run, 1, FETCHED, WEIGHING, records_from=None),
        a_checkpoint(run, 2, FETCHED, WEIGHING),
        sharing(run, 3, FETCHED, WEIGHED, changed=["weigh"], since=2),
    )
    before = await archiving_store.history(run.task_id)
    await archiving_store.end([an_end(run)])
    assert await archiving_store.history(run.task_id) == before
    query = """
    SELECT CAST(interim_results AS text) FROM agent_checkpoints_archive
     WHERE analysis_id = :id ORDER BY seq"""
    results = [json.loads(found) for (found,) in await _fetch(archiving_store, query, run.task_id)]
    assert results == [{"fetch": '"x"'}, {"fetch": '"x"'}, {"fetch": '"x"', "weigh": "7"}]


async def test_leftover_records_of_an_earlier_task_are_deleted(archiving_store: SqlStore) -> None:
    run = await operating(archiving_store)
    await write(
        archiving_store,
        run,
        a_checkpoint(run, 1, FETCHED, WEIGHED),
        sharing(run, 2, FETCHED, WEIGHED, WRITTEN, changed=["fetch", "write"]),
    )
    async with archiving_store._database.engine.begin() as connection:
        await connection.execute(text("DELETE FROM agent_paused_tasks"))
    run = await operating(archiving_store, a_run(run.task_id))
    await write(archiving_store, run, a_checkpoint(run, 1, WEIGHING))
    assert await _fetch(archiving_store, _VERSIONS, run.task_id) == [(1, "weigh")]
    await write(archiving_store, run, sharing(run, 2, WEIGHING))
    latest = await archiving_store.latest(run.task_id)
    assert latest is not None
    assert latest.subtasks == (WEIGHING,)


async def test_reading_checkpoints_does_not_load_the_memory(archiving_store: SqlStore) -> None:
    columns: set[str] = set()

    def count_statement(connection: object, cursor: Any, *rest: object) -> None:
        columns.update(name for name, *_ in cursor.description or ())

    run = await operating(archiving_store)
    await save(archiving_store, run, ["first"])
    engine = archiving_store._database.reading_engine
    event.listen(engine, "after_cursor_execute", count_statement)
    await archiving_store.latest(run.task_id)
    await archiving_store.history(run.task_id)
    await archiving_store.operation(run.task_id)
    await archiving_store.operations()
    await archiving_store.end([an_end(run)])
    assert len(await archiving_store.history(run.task_id)) == 1  # in the archive
    assert "l1_snapshot_hash" in columns
    assert "l1_snapshot" not in columns
    await archiving_store.l1_snapshot(run.task_id)
    assert "l1_snapshot" in columns


async def test_an_operation_of_another_namespace_is_not_found(
    archiving_store: SqlStore, write_path: tuple[str, bool]
) -> None:
    run = await operating(archiving_store)
    await save(archiving_store, run, ["first"])
    stranger = SqlStore(write_path[0], namespace="tes")
    await stranger.open()
    assert await stranger.l1_snapshot(run.task_id) is None
    assert await stranger.l1_snapshot(run.task_id, AGENT) is None
    assert await stranger.latest(run.task_id) is None
    await stranger.close()
    assert await memory_of(archiving_store, run.task_id) == (1, "first")


@pytest.fixture
async def postgres(postgres_url: str) -> AsyncIterator[SqlStore]:
    store = SqlStore(postgres_url, namespace="test")
    await store.open()
    yield store
    await store.close()


async def _count_statements(
    store: SqlStore, step: Awaitable[Any], monkeypatch: pytest.MonkeyPatch
) -> int:
    """Number of statements that `step` sends, including BEGIN and COMMIT."""
    count, write = 0, PreparedConnection.write

    def count_statement(*of_event: object) -> None:
        nonlocal count
        count += 1

    async def counting(connection: PreparedConnection, statement: str, *values: Any) -> Any:
        count_statement()
        return await write(connection, statement, *values)

    event.listen(store._database.engine.sync_engine, "before_cursor_execute", count_statement)
    with monkeypatch.context() as patched:
        patched.setattr(PreparedConnection, "write", counting)
        await step
    event.remove(store._database.engine.sync_engine, "before_cursor_execute", count_statement)
    return count


@pytest.mark.servers
async def test_each_step_of_an_operation_sends_a_fixed_number_of_statements(
    postgres: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, tracked = a_run(), (await resumed(postgres)).run
    steps = {
        "begin": postgres.begin([a_begin(run, operation=an_operation())]),
        "track": postgres.track(tracked, an_operation()),
    }
    sent = {
        name: await _count_statements(postgres, step, monkeypatch) for name, step in steps.items()
    }
    run = await operating(postgres)
    sent["save"] = await _count_statements(
        postgres, postgres.save(Save(run, a_checkpoint(run))), monkeypatch
    )
    sent["save with memory"] = await _count_statements(
        postgres, postgres.save(Save(run, remembering(run, 2, "m"))), monkeypatch
    )
    sent["memory"] = await _count_statements(
        postgres, postgres.l1_snapshot(run.task_id), monkeypatch
    )
    sent["latest"] = await _count_statements(postgres, postgres.latest(run.task_id), monkeypatch)
    sent["fail"] = await _count_statements(
        postgres, postgres.end([an_end(run, TaskState.FAILED)]), monkeypatch
    )
    sent["revive"] = await _count_statements(
        postgres, postgres.revive(a_revive(run.task_id)), monkeypatch
    )
    run = await operating(postgres)
    await saved(postgres, run)
    waiting = await operating(postgres)
    sent["pause"] = await _count_statements(
        postgres, postgres.pause([a_pause(run=waiting)]), monkeypatch
    )
    for name, seq in (("pause with memory", 1), ("pause with memory that prunes", 6)):
        waiting = await operating(postgres)
        sent[name] = await _count_statements(
            postgres, postgres.pause([remembering_pause(waiting, seq, "m")]), monkeypatch
        )
    sent["complete"] = await _count_statements(postgres, postgres.end([an_end(run)]), monkeypatch)
    assert sent == {
        "begin": 5,
        "track": 5,
        "save": 1,
        "save with memory": 1,
        "memory": 1,
        "latest": 1,
        "fail": 10,
        "revive": 8,
        "pause": 1,
        "pause with memory": 13,
        "pause with memory that prunes": 14,
        "complete": 10,
    }


@pytest.mark.servers
async def test_a_task_that_is_not_an_operation_sends_no_extra_statements(
    postgres: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin: Begin = a_begin()
    assert await _count_statements(postgres, postgres.begin([begin]), monkeypatch) == 4
    pause = await paused(postgres)
    assert await _count_statements(postgres, resumed(postgres, pause), monkeypatch) == 1
    task = await resumed(postgres)
    assert await _count_statements(postgres, postgres.end([an_end(task.run)]), monkeypatch) == 1


async def test_each_mesh_has_its_own_cache_key(database_url: str) -> None:
    one, same, other = (SqlStore(database_url, namespace=name) for name in ("one", "one", "other"))
    try:
        for store in (one, same, other):
            await store.open()
        keys = await asyncio.gather(one.copy_key(), same.copy_key(), other.copy_key())
        assert keys[0] == keys[1] != keys[2]
    finally:
        for store in (one, same, other):
            await store.close()
