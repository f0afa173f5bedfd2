"""An operations handle lists each task once, and leaves nothing behind if it fails to open."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from meshpoint import operations
from meshpoint.adapters.sql import SqlStore
from meshpoint.errors import MeshpointError
from meshpoint.model.ids import TaskId
from meshpoint.model.tasks import TaskSummary
from meshpoint.model.transitions import Pause
from meshpoint.operations import Operations
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    AGENT,
    SECOND,
    a_pause,
    an_end,
    paused,
    resumed,
    write_end,
    write_pause,
)


async def test_a_database_that_cannot_be_opened_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = list[SqlStore]()
    original = SqlStore.close

    async def close(self: SqlStore) -> None:
        closed.append(self)
        await original(self)

    monkeypatch.setattr(SqlStore, "close", close)
    (tmp_path / "tasks.db").write_bytes(b"no database" * 100)
    with pytest.raises(MeshpointError):
        await operations.Operations(f"sqlite:///{tmp_path}/tasks.db").__aenter__()
    assert len(closed) == 1


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def store(tmp_path: Path, clock: FakeClock) -> AsyncIterator[SqlStore]:
    store = SqlStore(f"sqlite:///{tmp_path}/tasks.db", namespace="meshpoint", clock=clock)
    await store.open()
    yield store
    await store.close()


@pytest.fixture
async def pauses(
    store: SqlStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> list[Pause]:
    """Waiting tasks, newest first. A page has two of them."""
    monkeypatch.setattr(operations, "_PAGE", 2)
    pauses: list[Pause] = []
    for _ in range(7):
        pauses.insert(0, await paused(store))
        clock.advance(SECOND)
    return pauses


def ids(tasks: list[TaskSummary]) -> list[TaskId]:
    return [task.task_id for task in tasks]


async def pause_again(store: CheckpointStore, pause: Pause) -> None:
    """Run a task to its next pause, which moves it to the beginning of listings."""
    await write_pause(store, a_pause("b", run=(await resumed(store, pause)).run))


async def delete(store: CheckpointStore, pause: Pause, clock: FakeClock) -> None:
    """End a task, and delete its row."""
    committed = await write_end(store, an_end((await resumed(store, pause)).run))
    await store.confirm_sent([committed.reply])
    clock.advance(timedelta(days=2))
    assert await store.purge(AGENT, 10) == 1


@pytest.mark.parametrize(
    "change", ["none", "listed task", "last listed task", "other task", "late commit", "gone"]
)
async def test_a_listing_has_each_task_once_if_tasks_pause_or_end_meanwhile(
    store: SqlStore, tmp_path: Path, clock: FakeClock, pauses: list[Pause], change: str
) -> None:
    listed: list[TaskId] = []
    async with Operations(f"sqlite:///{tmp_path}/tasks.db") as listing:
        pages = listing.suspendable()
        async for page in pages:
            if not listed:
                match change:
                    case "listed task":
                        await pause_again(store, pauses[0])
                    case "last listed task":
                        await pause_again(store, pauses[1])
                    case "other task":
                        await pause_again(store, pauses[4])
                    case "late commit":  # of a pause that began before the last listed one
                        clock.advance(-1.5 * SECOND)
                        await pause_again(store, pauses[4])
                        clock.advance(1.5 * SECOND)
                    case "gone":
                        await delete(store, pauses[1], clock)
            listed += ids(page)
    assert len(listed) == len(set(listed))
    assert set(listed) == {pause.run.task_id for pause in pauses}


@pytest.mark.parametrize(("moved", "times"), [(1, 1), (3, 2)])
async def test_a_listing_remembers_only_the_newest_tasks(
    store: SqlStore,
    tmp_path: Path,
    pauses: list[Pause],
    monkeypatch: pytest.MonkeyPatch,
    moved: int,
    times: int,
) -> None:
    monkeypatch.setattr(operations, "_MAX_SEEN", 3)
    listed: list[TaskId] = []
    async with Operations(f"sqlite:///{tmp_path}/tasks.db") as listing:
        async for page in listing.suspendable():
            listed += ids(page)
            if len(listed) == 4:
                await pause_again(store, pauses[moved])
    task_ids = [pause.run.task_id for pause in pauses]
    assert {each: listed.count(each) for each in task_ids} == {
        each: times if number == moved else 1 for number, each in enumerate(task_ids)
    }
