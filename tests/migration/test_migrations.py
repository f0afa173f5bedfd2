"""The migrations create the tables that the code uses, on both databases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import asyncpg
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Connection, Identity, text
from sqlalchemy.ext.asyncio import create_async_engine

from meshpoint.adapters.sql import SqlStore, migrations
from meshpoint.adapters.sql.engine import async_url
from meshpoint.adapters.sql.tables import (
    POSTGRES_STORAGE,
    REVISION,
    VERSION_TABLE,
    checkpoints,
    metadata,
)
from meshpoint.errors import ConfigurationError
from meshpoint.model.tasks import Dispatch, TaskState
from meshpoint.testing.conformance.build import (
    AGENT,
    HERE,
    HOUR,
    a_call,
    a_record,
    a_run,
    an_end,
    an_operation,
    digest,
    memory_of,
    one,
    operating,
    paused,
    ready,
    save,
    saved,
)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/tasks.db"


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.servers)])
def empty_url(request: pytest.FixtureRequest) -> str:
    """A private database without tables: parametrized over SQLite and PostgreSQL."""
    url: str = request.getfixturevalue(
        "sqlite_url" if request.param == "sqlite" else "empty_postgres_url"
    )
    return url


async def upgrade(url: str) -> None:
    await asyncio.to_thread(migrations.upgrade, url)


async def differences(url: str) -> list[object]:
    """Differences between the database's tables and the code's."""

    def compare(connection: Connection) -> list[object]:
        def is_compared(item: object, name: str | None, kind: str, *rest: object) -> bool:
            return kind != "table" or name != VERSION_TABLE

        options = {
            "compare_type": True,
            "compare_server_default": True,
            "include_object": is_compared,
        }
        diffs: list[object] = compare_metadata(
            MigrationContext.configure(connection, opts=options), metadata
        )
        # SQLite numbers the rows of such a column by itself.
        return [each for each in diffs if not (is_sqlite and _is_identity(each))]

    is_sqlite = url.startswith("sqlite")
    engine = create_async_engine(async_url(url))
    async with engine.connect() as connection:
        diffs = await connection.run_sync(compare)
    await engine.dispose()
    return diffs


def _is_identity(difference: object) -> bool:
    return isinstance(difference, list) and isinstance(difference[0][-1], Identity)


async def execute(url: str, *statements: str) -> None:
    engine = create_async_engine(async_url(url))
    async with engine.begin() as connection:
        for statement in statements:
            await connection.execute(text(statement))
    await engine.dispose()


async def open_and_close_store(url: str) -> None:
    store = SqlStore(url, namespace="test")
    try:
        await store.open()
        await paused(store)
    finally:
        await store.close()


async def test_the_migrated_tables_match_the_code(empty_url: str) -> None:
    await upgrade(empty_url)
    assert await differences(empty_url) == []
    await open_and_close_store(empty_url)


async def test_a_file_created_by_the_store_matches_a_migrated_one(sqlite_url: str) -> None:
    await open_and_close_store(sqlite_url)
    assert await differences(sqlite_url) == []
    assert await asyncio.to_thread(migrations.check, sqlite_url) == (REVISION, REVISION)
    await upgrade(sqlite_url)
    await open_and_close_store(sqlite_url)


async def test_a_schema_difference_is_detected(empty_url: str) -> None:
    await upgrade(empty_url)
    await execute(empty_url, "ALTER TABLE agent_paused_tasks ADD COLUMN stranger INTEGER")
    assert len(await differences(empty_url)) == 1


def test_the_code_requires_the_newest_migration() -> None:
    assert migrations.newest_revision() == REVISION


async def test_an_upgrade_may_be_repeated(empty_url: str) -> None:
    assert await asyncio.to_thread(migrations.check, empty_url) == (None, REVISION)
    for _ in range(2):
        await upgrade(empty_url)
        assert await asyncio.to_thread(migrations.check, empty_url) == (REVISION, REVISION)


async def test_an_interrupted_upgrade_changes_nothing(
    empty_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite's driver would otherwise commit each schema change at once."""

    def raise_error(*arguments: object, **options: object) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(Operations, "drop_table", raise_error)
        patched.setattr(Operations, "drop_constraint", raise_error)
        with pytest.raises(RuntimeError):
            await upgrade(empty_url)
    await upgrade(empty_url)
    assert await differences(empty_url) == []


async def test_an_upgrade_is_repeated_after_a_deadlock_with_a_replica(
    empty_postgres_url: str,
) -> None:
    """A replica locks tasks before calls, and migration 0006 changes calls first."""
    await upgrade(empty_postgres_url)
    await asyncio.to_thread(migrations.downgrade, empty_postgres_url, "0005")
    replica = await asyncpg.connect(empty_postgres_url)
    observer = await asyncpg.connect(empty_postgres_url)
    await replica.execute("SET deadlock_timeout = '1min'")  # the migration notices it first
    await replica.execute("BEGIN; SELECT FROM agent_paused_tasks")
    upgrading = asyncio.create_task(upgrade(empty_postgres_url))
    waiting = (
        "SELECT FROM pg_locks WHERE NOT granted AND relation = 'agent_paused_tasks'::regclass"
    )
    while not await observer.fetch(waiting):
        assert not upgrading.done()
    await replica.execute("SELECT FROM agent_peer_sub_tasks; COMMIT")
    await upgrading
    await replica.close()
    await observer.close()
    assert await differences(empty_postgres_url) == []


async def test_an_upgrade_leaves_the_users_own_migrations_untouched(empty_url: str) -> None:
    await execute(
        empty_url,
        "CREATE TABLE alembic_version (version_num TEXT)",
        "INSERT INTO alembic_version VALUES ('theirs')",
    )
    await upgrade(empty_url)
    await open_and_close_store(empty_url)


@pytest.mark.servers
async def test_the_printed_statements_create_the_same_tables(empty_postgres_url: str) -> None:
    printed = await asyncio.to_thread(migrations.upgrade_sql, empty_postgres_url)
    connection = await asyncpg.connect(empty_postgres_url)
    await connection.execute(printed)
    await connection.close()
    assert await differences(empty_postgres_url) == []
    await open_and_close_store(empty_postgres_url)


@pytest.mark.servers
async def test_large_values_are_not_compressed_twice(postgres_url: str) -> None:
    connection = await asyncpg.connect(postgres_url)
    external = await connection.fetch(
        "SELECT attrelid::regclass::text AS tab, attname FROM pg_attribute WHERE attstorage = 'e' "
        "AND attnum > 0 AND attrelid IN (SELECT oid FROM pg_class WHERE relname LIKE 'agent\\_%' "
        "AND relkind = 'r')"
    )
    await connection.close()
    expected = [statement.split() for statement in POSTGRES_STORAGE if "EXTERNAL" in statement]
    assert sorted((row["tab"], row["attname"]) for row in external) == sorted(
        (word[2], word[5]) for word in expected
    )


@pytest.mark.servers
async def test_the_error_about_missing_tables_names_the_upgrade_command(
    empty_postgres_url: str,
) -> None:
    with pytest.raises(ConfigurationError, match="meshpoint db upgrade"):
        await open_and_close_store(empty_postgres_url)


async def test_the_error_about_an_outdated_database_names_the_upgrade_command(
    empty_url: str,
) -> None:
    await upgrade(empty_url)
    await execute(empty_url, f"UPDATE {VERSION_TABLE} SET version_num = '0000'")
    with pytest.raises(
        ConfigurationError, match="revision 0000; run: meshpoint db upgrade --db URL"
    ):
        await open_and_close_store(empty_url)


async def test_a_newer_database_still_serves_older_replicas(empty_url: str) -> None:
    await upgrade(empty_url)
    await execute(empty_url, f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    await open_and_close_store(empty_url)


@pytest.mark.servers
async def test_a_nonexistent_database_is_reported_as_a_wrong_url(empty_postgres_url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"database: .*does not exist"):
        await open_and_close_store(empty_postgres_url + "_elsewhere")


@pytest.mark.parametrize("url", ["mysql://host/name", "sqlite://", "sqlite:///:memory:", "no url"])
def test_unsupported_databases_are_rejected(url: str) -> None:
    with pytest.raises(ConfigurationError, match="database"):
        SqlStore(url, namespace="test")


async def test_a_file_that_is_not_a_database_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a database, " * 100)
    store = SqlStore(f"sqlite:///{tmp_path}/notes.txt", namespace="test")
    with pytest.raises(ConfigurationError, match=r"database: .*not a SQLite database"):
        await store.open()
    await store.close()


async def downgrade(url: str, revision: str) -> None:
    def run(connection: Connection) -> None:
        command.downgrade(migrations._config(migrations.TASKS, connection), revision)

    await asyncio.to_thread(migrations._run, url, run)


async def fetch(url: str, statement: str) -> list[tuple[object, ...]]:
    engine = create_async_engine(async_url(url))
    async with engine.connect() as connection:
        rows = [tuple(row) for row in await connection.execute(text(statement))]
    await engine.dispose()
    return rows


@asynccontextmanager
async def open_store(url: str) -> AsyncIterator[SqlStore]:
    """A store whose unsent messages are due at once."""
    store = SqlStore(url, namespace="test", dispatch_lease=timedelta())
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def test_requests_are_due_before_and_after_each_migration(empty_url: str) -> None:
    await upgrade(empty_url)
    async with open_store(empty_url) as store:
        pauses = [
            await paused(store, a_call("a", timeout=HOUR), a_call("b", timeout=HOUR))
            for _ in range(2)
        ]
        expected = {call.sub_task_id for pause in pauses for call in pause.calls}
        sent = [send for send in await store.unsent(AGENT, 10) if isinstance(send, Dispatch)][:1]
        await store.confirm_sent(sent)
        expected -= {send.sub_task_id for send in sent}
    await downgrade(empty_url, "0001")
    due = (
        "SELECT sub_task_id FROM agent_peer_sub_tasks WHERE send_due_at IS NOT NULL "
        "AND send_attempts = 2"
    )
    assert {sub_task_id for (sub_task_id,) in await fetch(empty_url, due)} == expected
    await upgrade(empty_url)
    assert await differences(empty_url) == []
    async with open_store(empty_url) as store:
        assert {
            send.sub_task_id
            for send in await store.unsent(AGENT, 10)
            if isinstance(send, Dispatch)
        } == expected


async def test_a_downgrade_restores_the_previous_tables(empty_url: str) -> None:
    await upgrade(empty_url)
    await open_and_close_store(empty_url)
    for _ in range(2):
        await downgrade(empty_url, "0001")
        await upgrade(empty_url)
    assert await differences(empty_url) == []
    await open_and_close_store(empty_url)
    await downgrade(empty_url, "base")
    assert await fetch(empty_url, f"SELECT * FROM {VERSION_TABLE}") == []


@pytest.mark.servers
async def test_the_tables_have_the_storage_options_that_the_code_declares(
    postgres_url: str,
) -> None:
    options = (
        "SELECT relname::text, unnest(reloptions) FROM pg_class WHERE relname LIKE 'agent\\_%' "
        "AND relkind = 'r'"
    )
    expected = [statement.split() for statement in POSTGRES_STORAGE if "SET (" in statement]
    assert sorted(await fetch(postgres_url, options)) == sorted(
        (parts[2], f"{parts[4].strip('(')}={parts[6].strip(')')}") for parts in expected
    )


async def test_a_task_of_the_previous_release_can_become_an_operation(empty_url: str) -> None:
    await upgrade(empty_url)
    task_id = a_run().task_id
    await execute(
        empty_url,
        "INSERT INTO agent_paused_tasks (logical_task_id, agent_name, status, generation, fence, "
        "run_id, attempt, wake_at, checkpointed_at) "
        f"VALUES ('{task_id}', 'test/{AGENT}', 'running', 0, 1, 'before', 1, 0, 0)",
    )
    async with open_store(empty_url) as store:
        task = one(await store.rescue(HERE, 10))
        assert (task.run.task_id, task.checkpoint, task.retry_count) == (task_id, None, 0)
        await store.track(task.run, an_operation())
        assert (await saved(store, task.run)).seq == 1


async def test_tasks_survive_a_downgrade_and_upgrade_but_checkpoints_do_not(
    empty_url: str,
) -> None:
    await upgrade(empty_url)
    async with open_store(empty_url) as store:
        pause, run = await paused(store), await operating(store)
        await saved(store, run)
    await downgrade(empty_url, "0002")
    await upgrade(empty_url)
    assert await differences(empty_url) == []
    async with open_store(empty_url) as store:
        assert await store.operation(run.task_id) is None
        assert await store.history(run.task_id) == []
        await store.end([an_end(run, TaskState.FAILED)])
        await ready(store, pause)
        assert [task.checkpoint for task in await store.acquire(HERE, 10)] == [None]


async def test_an_operation_orphaned_by_the_previous_release_does_no_harm(empty_url: str) -> None:
    """The previous release deletes a task without its operation; the id may then be used again."""
    await upgrade(empty_url)
    async with open_store(empty_url) as store:
        run = await operating(store)
        for _ in range(2):
            await saved(store, run)
        await execute(empty_url, "DELETE FROM agent_paused_tasks")
        second_run = await operating(store, a_run(run.task_id))
        assert await store.latest(run.task_id) is None
        assert (await saved(store, second_run)).seq == 1
        assert [each.seq for each in await store.history(run.task_id)] == [1]


async def test_only_checkpoints_written_after_the_upgrade_can_have_a_memory(
    empty_url: str,
) -> None:
    await upgrade(empty_url)
    async with open_store(empty_url) as store:
        run = await operating(store)
        await save(store, run, [None, "first"])
    await downgrade(empty_url, "0003")
    await upgrade(empty_url)
    assert await differences(empty_url) == []
    async with open_store(empty_url) as store:
        assert [each.l1_snapshot_hash for each in await store.history(run.task_id)] == [None, None]
        assert await store.l1_snapshot(run.task_id) is None
        await save(store, run, ["second"], first=3)
        assert await memory_of(store, run.task_id) == (3, "second")


async def test_the_previous_release_can_still_write_checkpoints_without_a_memory(
    empty_url: str,
) -> None:
    """It names the columns that it knows and ignores newer ones."""
    await upgrade(empty_url)
    async with open_store(empty_url) as store:
        run = await operating(store)
        await save(store, run, ["first"])
        known_columns = [
            column.name
            for column in checkpoints.columns
            if not column.name.startswith("l1_snapshot")
        ]
        values = ", ".join("2" if name == "seq" else name for name in known_columns)
        await execute(
            empty_url,
            f"INSERT INTO agent_checkpoints ({', '.join(known_columns)}) SELECT {values} "
            "FROM agent_checkpoints",
            "UPDATE agent_paused_tasks SET checkpoint_seq = 2",
        )
        history = await store.history(run.task_id)
        assert [each.l1_snapshot_hash for each in history] == [digest("first"), None]
        assert [each.subtasks for each in history] == 2 * [(a_record("fetch", '"first"'),)]
        assert await memory_of(store, run.task_id) == (1, "first")


FOREIGN_VERSION_TABLES = {
    "columns": (["CREATE TABLE {} (id INTEGER)"], "it has no text column version_num"),
    "numbers": (["CREATE TABLE {} (version_num INTEGER)"], "it has no text column version_num"),
    "nothing": (
        ["CREATE TABLE {} (version_num VARCHAR(32))", "INSERT INTO {} VALUES (NULL)"],
        "is not text",
    ),
    "rows": (
        ["CREATE TABLE {} (version_num VARCHAR(32))", "INSERT INTO {} VALUES ('1'), ('2')"],
        "than one row",
    ),
}


async def execute_all(url: str, statements: list[str]) -> None:
    def run(connection: Connection) -> None:
        for statement in statements:
            connection.execute(text(statement.format(VERSION_TABLE)))

    await migrations.run_in_transaction(async_url(url), run)


@pytest.mark.parametrize("shape", FOREIGN_VERSION_TABLES)
async def test_a_foreign_version_table_is_reported_in_one_line(empty_url: str, shape: str) -> None:
    statements, problem = FOREIGN_VERSION_TABLES[shape]
    await execute_all(empty_url, statements)
    error = f"database: cannot use table {VERSION_TABLE}: .*{problem}; use another database.*$"
    for ask in (migrations.check, migrations.upgrade):
        with pytest.raises(ConfigurationError, match=error):
            await asyncio.to_thread(ask, empty_url)
    store = SqlStore(empty_url, namespace="mesh")
    with pytest.raises(ConfigurationError, match=error):
        await store.open()
    await store.close()


async def test_an_upgrade_by_a_later_release_is_not_undone(empty_url: str) -> None:
    await upgrade(empty_url)
    await execute_all(empty_url, ["UPDATE {} SET version_num = '9999'"])
    with pytest.raises(
        ConfigurationError, match="is at revision 9999, which this release does not know; run the"
    ):
        await upgrade(empty_url)


async def test_the_upgrade_names_a_foreign_table(empty_url: str) -> None:
    await execute_all(empty_url, [f"CREATE TABLE {checkpoints.name} (id INTEGER)"])
    with pytest.raises(
        ConfigurationError,
        match=f"an existing object: .*{checkpoints.name}.*; use an empty database",
    ):
        await upgrade(empty_url)


async def test_parked_tasks_get_a_reason_and_an_end(empty_url: str) -> None:
    await upgrade(empty_url)
    await downgrade(empty_url, "0007")
    columns = "logical_task_id, agent_name, status, generation, fence, run_id, attempt, wake_at"
    rows = [("without", "NULL", 2_592_100), ("with", "500", 500), ("late", "9e9", 2_592_100)]
    await execute(
        empty_url,
        *(
            f"INSERT INTO agent_paused_tasks ({columns}, checkpointed_at, incompatible_since, "
            f"dead_reason, task_deadline) VALUES ('{name}', 'test/{AGENT}', 'parked', 0, 1, 'x', "
            f"0, 2e11, 0, 100, 'no migration', {deadline})"
            for name, deadline, _ in rows
        ),
    )
    await upgrade(empty_url)
    read = "SELECT logical_task_id, parked_reason, dead_reason, wake_at FROM agent_paused_tasks"
    assert sorted(await fetch(empty_url, read)) == sorted(
        (name, "no migration", None, wake_at) for name, _, wake_at in rows
    )
    async with open_store(empty_url) as store:
        assert len(await store.acquire_parked(HERE, 1)) == 1
    await downgrade(empty_url, "0007")
    read = "SELECT dead_reason FROM agent_paused_tasks WHERE status = 'parked' AND wake_at > 1e11"
    assert await fetch(empty_url, read) == [("no migration",)] * 2
