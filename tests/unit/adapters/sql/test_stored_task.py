"""A task that changes while it is read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from meshpoint.adapters.sql import SqlStore, catalog_statements
from meshpoint.errors import StoreUnavailable
from meshpoint.testing.conformance.build import a_pause, paused, resumed, write_pause


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlStore]:
    opened = SqlStore(f"sqlite:///{tmp_path}/tasks.db", namespace="test")
    await opened.open()
    yield opened
    await opened.close()


def pause_between_reads(store: SqlStore, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Pause the task again after its row is read and before its calls are."""
    fetch, left = store._database.fetch, times

    async def fetch_later(template: str, **values: Any) -> Sequence[Any]:
        nonlocal left
        if template is catalog_statements.READ_CALLS and left > 0:
            left -= 1
            stored = (await fetch("SELECT * FROM agent_paused_tasks"))[0]
            task = await resumed(store, last[stored.logical_task_id])
            again = a_pause("b", run=task.run, state=b"later")
            await write_pause(store, again)
            last[again.run.task_id] = again
        return await fetch(template, **values)

    monkeypatch.setattr(store._database, "fetch", fetch_later)


last: dict[str, Any] = {}


async def test_the_parts_of_a_task_belong_together(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause = await paused(store, "a")
    last[pause.run.task_id] = pause
    pause_between_reads(store, monkeypatch, 1)
    stored = await store.stored_task(pause.run.task_id)
    assert stored is not None
    assert (stored.resumable.run.generation, stored.resumable.state) == (2, b"later")
    assert [call.call_id for call in stored.calls] == ["b"]


async def test_a_task_that_changes_during_every_read_is_unavailable(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause = await paused(store, "a")
    last[pause.run.task_id] = pause
    pause_between_reads(store, monkeypatch, 100)
    with pytest.raises(StoreUnavailable, match="changes faster than it can be read"):
        await store.stored_task(pause.run.task_id)
