"""`meshpoint db downgrade`: earlier tables, without losing what tasks need."""

from __future__ import annotations

import asyncio
from pathlib import Path

import asyncpg
import pytest
from test_migrations import differences, execute, fetch, open_store, upgrade

from meshpoint.adapters.sql import migrations
from meshpoint.adapters.sql.tables import REVISION, VERSION_TABLE
from meshpoint.errors import ConfigurationError, StoreUnavailable
from meshpoint.model.tasks import TaskFilter, TaskState
from meshpoint.model.transitions import Append, LogChange
from meshpoint.testing.conformance.build import (
    HERE,
    a_cancel,
    a_checkpoint,
    a_pause,
    an_end,
    begun,
    operating,
    paused,
    ready,
    resumed,
    revived,
    save,
    saved,
    write_end,
    write_pause,
)
from meshpoint.testing.conformance.store_logs import READER, logged_pause
from meshpoint.testing.conformance.store_records import (
    FETCHED,
    WEIGHED,
    WEIGHING,
    WRITTEN,
    sharing,
    write,
)

_FILES = migrations.migrations_folder().glob("versions/0*.py")
PREVIOUS, *_ = EARLIER = sorted((file.name[:4] for file in _FILES), reverse=True)[1:]


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.servers)])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A private database without tables: parametrized over SQLite and PostgreSQL."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/tasks.db"
    url: str = request.getfixturevalue("empty_postgres_url")
    return url


async def downgrade(
    url: str, target: str | None, *, lose_data: bool = False
) -> migrations.DowngradePlan:
    return await asyncio.to_thread(migrations.downgrade, url, target, lose_data=lose_data)


async def revision_of(url: str) -> str | None:
    return (await asyncio.to_thread(migrations.check, url))[0]


async def test_each_migration_can_be_undone_and_repeated(empty_url: str) -> None:
    await upgrade(empty_url)
    async with open_store(empty_url) as store:
        pause = await paused(store)
    for revision in EARLIER:
        plan = await downgrade(empty_url, None)
        assert (plan.target, plan.losses) == (revision, ())
        assert await revision_of(empty_url) == plan.target
    await upgrade(empty_url)
    assert await differences(empty_url) == []
    async with open_store(empty_url) as store:
        row = await store.task(pause.run.task_id)
        assert row is not None
        assert row[0].state is TaskState.WAITING


async def test_the_last_tables_go_only_with_the_last_task(empty_url: str) -> None:
    await upgrade(empty_url)
    async with open_store(empty_url) as store:
        await paused(store)
    with pytest.raises(ConfigurationError, match=r"tasks that have not ended \(1\)"):
        await downgrade(empty_url, "base")
    assert await revision_of(empty_url) == REVISION
    await downgrade(empty_url, "base", lose_data=True)
    assert await fetch(empty_url, f"SELECT * FROM {VERSION_TABLE}") == []


async def test_a_waiting_operation_keeps_its_tables(empty_url: str) -> None:
    await upgrade(empty_url)
    async with open_store(empty_url) as store:
        run = await operating(store)
        await saved(store, run)
    await downgrade(empty_url, "0003")
    with pytest.raises(ConfigurationError, match=r"operations that have not completed \(1\)"):
        await downgrade(empty_url, "0002")
    assert await revision_of(empty_url) == "0003"
    await upgrade(empty_url)
    async with open_store(empty_url) as store:
        assert await store.latest(run.task_id) is not None
        await store.end([an_end(run)])
    await downgrade(empty_url, "0002")
    assert await revision_of(empty_url) == "0002"


async def test_a_working_memory_keeps_its_column(empty_url: str) -> None:
    await upgrade(empty_url)
    async with open_store(empty_url) as store:
        run = await operating(store)
        await save(store, run, ["word"])
    with pytest.raises(ConfigurationError, match=r"working memories \(1\)"):
        await downgrade(empty_url, "0003")
    assert await revision_of(empty_url) == REVISION
    await downgrade(empty_url, "0003", lose_data=True)
    assert await revision_of(empty_url) == "0003"


async def test_suspended_tasks_are_not_resumed_silently(empty_url: str) -> None:
    await upgrade(empty_url)
    async with open_store(empty_url) as store:
        held, waiting, done = await ready(store), await paused(store), await resumed(store)
        task_ids = [held.run.task_id, waiting.run.task_id, done.run.task_id]
        await store.suspend(task_ids)
        await write_end(store, an_end(done.run))
    with pytest.raises(ConfigurationError, match=r"suspended tasks, which would run again \(2\)"):
        await downgrade(empty_url, "0010")
    assert await revision_of(empty_url) == REVISION
    await downgrade(empty_url, "0010", lose_data=True)
    await upgrade(empty_url)
    async with open_store(empty_url) as store:
        assert [task.run.task_id for task in await store.acquire(HERE, 10)] == [held.run.task_id]
        assert await store.tasks(where=TaskFilter(suspended=True)) == []


async def test_checkpoints_get_their_records_back(empty_url: str) -> None:
    await upgrade(empty_url)
    async with open_store(empty_url) as store:
        run = await operating(store)
        changes = {"function": "src:1 uses RATE=2", "reused_in": 1}
        reused = WEIGHED.model_copy(update=changes)
        checkpoints = [
            a_checkpoint(run, 1, FETCHED, WEIGHING, records_from=None),
            a_checkpoint(run, 2, WRITTEN, WEIGHING, FETCHED),
            sharing(run, 3, WRITTEN, reused, FETCHED, changed=["weigh"], since=2),
        ]
        await write(store, run, *checkpoints)
    await downgrade(empty_url, "0009")
    query = "SELECT agent_version, CAST(subtasks AS text) FROM agent_checkpoints"
    for version, records in await fetch(empty_url, query):
        assert version == "7"
        assert "reused_in" not in str(records)
    await upgrade(empty_url)
    async with open_store(empty_url) as store:
        history = await store.history(run.task_id)
    known_earlier = reused.model_copy(update={"function": "src:1", "reused_in": None})
    assert [each.subtasks for each in history] == [
        (FETCHED, WEIGHING),
        (WRITTEN, WEIGHING, FETCHED),
        (WRITTEN, known_earlier, FETCHED),
    ]
    assert [each.records_from for each in history] == 3 * [None]


async def log_losses(url: str) -> tuple[str, ...]:
    """What a downgrade of the migration that added logs would lose."""
    return (await asyncio.to_thread(migrations.plan_downgrade, url, "0008")).losses


async def test_a_log_keeps_its_table_while_a_task_needs_it(empty_url: str) -> None:
    await upgrade(empty_url)
    async with open_store(empty_url) as store:
        waiting = logged_pause(b"a", b"b")
        await write_pause(store, waiting)
        assert await log_losses(empty_url) == ("tasks that need their log (1)",)
        run = (await resumed(store, waiting, replica=READER)).run
        await write_pause(store, a_pause(run=run))  # its state stands alone
        assert await log_losses(empty_url) == ()
        first = await begun(store)
        await store.append([Append(first, LogChange((b"step",)))])
        assert await log_losses(empty_url) == ("tasks that need their log (1)",)
        await write_end(store, an_end(first))
        assert await log_losses(empty_url) == ()
        operation = logged_pause(b"a", run=await operating(store))
        await write_pause(store, operation)
        await store.cancel([a_cancel(operation.run.task_id)])
        assert await log_losses(empty_url) == ("tasks that need their log (1)",)
        await revived(store, operation.run.task_id, without_checkpoint=True)
        assert await log_losses(empty_url) == ("tasks that need their log (1)",)
    with pytest.raises(ConfigurationError, match=r"tasks that need their log \(1\)"):
        await downgrade(empty_url, "0008")


@pytest.mark.parametrize("target", ["9999", REVISION, "nonsense"])
async def test_only_an_earlier_revision_is_accepted(empty_url: str, target: str) -> None:
    await upgrade(empty_url)
    with pytest.raises(ConfigurationError, match="is not before the database's revision"):
        await downgrade(empty_url, target)
    assert await revision_of(empty_url) == REVISION


async def test_sealed_values_stay_where_they_can_be_read(empty_url: str) -> None:
    await upgrade(empty_url)
    key = "INSERT INTO agent_mesh_keys VALUES ('mesh/travel', '0a0b0c0d', 0)"
    await execute(empty_url, key)
    with pytest.raises(ConfigurationError, match="run meshpoint db reseal --clear"):
        await downgrade(empty_url, "0016")
    await execute(empty_url, "DELETE FROM agent_mesh_keys")
    await downgrade(empty_url, "0016")
    assert await revision_of(empty_url) == "0016"


async def test_a_revision_of_a_later_release_is_left_alone(empty_url: str) -> None:
    await upgrade(empty_url)
    await execute(empty_url, f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    with pytest.raises(ConfigurationError, match="which this release does not know"):
        await downgrade(empty_url, None)


async def test_a_database_without_tables_is_refused(empty_url: str) -> None:
    with pytest.raises(ConfigurationError, match="has no tables"):
        await downgrade(empty_url, None)


async def test_the_printed_statements_do_the_same(empty_url: str) -> None:
    await upgrade(empty_url)
    printed = await asyncio.to_thread(migrations.downgrade_sql, empty_url, None)
    assert await revision_of(empty_url) == REVISION
    statements = [part for part in printed.split(";") if part.strip()]
    await execute(
        empty_url, *(part for part in statements if part.split()[0] not in {"BEGIN", "COMMIT"})
    )
    assert await revision_of(empty_url) == PREVIOUS
    await upgrade(empty_url)
    assert await differences(empty_url) == []


@pytest.mark.servers
async def test_a_table_in_use_is_not_waited_for(empty_postgres_url: str) -> None:
    await upgrade(empty_postgres_url)
    connection = await asyncpg.connect(empty_postgres_url)
    try:
        async with connection.transaction():
            await connection.execute("LOCK TABLE agent_peer_sub_tasks IN ROW SHARE MODE")
            with pytest.raises(StoreUnavailable, match="lock timeout"):
                await downgrade(empty_postgres_url, None)
    finally:
        await connection.close()
    assert await revision_of(empty_postgres_url) == REVISION
