"""What operations cost the database: rows that are left, and statements that are sent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event, text

from meshpoint.adapters.sql import SqlCheckpointStore
from meshpoint.adapters.sql.lane import Lane
from meshpoint.adapters.sql.tables import metadata
from meshpoint.conformance.build import (
    AGENT,
    a_begin,
    a_checkpoint,
    a_revive,
    a_run,
    an_end,
    an_operation,
    begun,
    failed,
    operating,
    paused,
    resumed,
    saved,
)
from meshpoint.model.checkpoint import Begin, Save, TaskState, Track


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[SqlCheckpointStore]:
    """A store that forgets what has ended at once."""
    store = SqlCheckpointStore(
        database_url, namespace="test", tombstone_ttl=timedelta(), checkpoint_ttl=timedelta(), mark_within=timedelta()
    )
    await store.open()
    yield store
    await store.close()


async def test_nothing_is_left_of_a_purged_operation(store: SqlCheckpointStore) -> None:
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


# ── round trips ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def postgres(postgres_url: str) -> AsyncIterator[SqlCheckpointStore]:
    store = SqlCheckpointStore(postgres_url, namespace="test")
    await store.open()
    yield store
    await store.close()


async def _sent(store: SqlCheckpointStore, step: Awaitable[Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """How many statements `step` sends, those that begin and commit included."""
    count, write = 0, Lane.write

    def hear(*of_event: object) -> None:
        nonlocal count
        count += 1

    async def heard(lane: Lane, statement: str, *values: Any) -> Any:
        hear()
        return await write(lane, statement, *values)

    event.listen(store._database.engine.sync_engine, "before_cursor_execute", hear)
    with monkeypatch.context() as patched:
        patched.setattr(Lane, "write", heard)
        await step
    event.remove(store._database.engine.sync_engine, "before_cursor_execute", hear)
    return count


@pytest.mark.servers
async def test_each_step_of_an_operation_sends_so_many_statements(
    postgres: SqlCheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, tracked = a_run(), (await resumed(postgres)).run
    steps = {
        "begin": postgres.begin([a_begin(run, operation=an_operation())]),
        "track": postgres.track(Track(tracked, an_operation())),
    }
    sent = {name: await _sent(postgres, step, monkeypatch) for name, step in steps.items()}
    run = await operating(postgres)
    sent["save"] = await _sent(postgres, postgres.save(Save(run, a_checkpoint(run))), monkeypatch)
    sent["latest"] = await _sent(postgres, postgres.latest(run.task_id), monkeypatch)
    sent["fail"] = await _sent(postgres, postgres.end([an_end(run, TaskState.FAILED)]), monkeypatch)
    sent["revive"] = await _sent(postgres, postgres.revive(a_revive(run.task_id)), monkeypatch)
    run = await operating(postgres)
    await saved(postgres, run)
    sent["complete"] = await _sent(postgres, postgres.end([an_end(run)]), monkeypatch)
    assert sent == {
        "begin": 5,
        "track": 5,
        "save": 1,
        "latest": 1,
        "fail": 9,
        "revive": 8,
        "complete": 9,
    }


@pytest.mark.servers
async def test_a_task_that_is_no_operation_sends_nothing_more(
    postgres: SqlCheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin: Begin = a_begin()
    assert await _sent(postgres, postgres.begin([begin]), monkeypatch) == 4
    pause = await paused(postgres)
    assert await _sent(postgres, resumed(postgres, pause), monkeypatch) == 1
    task = await resumed(postgres)
    assert await _sent(postgres, postgres.end([an_end(task.run)]), monkeypatch) == 1
