"""Tasks that change their state while they are listed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from meshpoint.adapters.sql import SqlStore
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import a_pause, paused, resumed, write_pause


@pytest.mark.parametrize("change", ["resumes", "pauses"])
async def test_a_listing_has_a_task_once_that_changes_its_state_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    store = SqlStore(f"sqlite:///{tmp_path}/tasks.db", namespace="meshpoint", clock=FakeClock())
    await store.open()
    pause = await paused(store)
    task = await resumed(store, pause) if change == "pauses" else None
    fetch, is_changed = store._database.fetch, False

    async def fetch_and_change(template: str, **values: Any) -> Sequence[Any]:
        nonlocal is_changed
        rows = await fetch(template, **values)
        if "ORDER BY t.checkpointed_at" in template and not is_changed:
            is_changed = True
            if task is None:
                await resumed(store, pause)
            else:
                await write_pause(store, a_pause("b", run=task.run))
        return rows

    monkeypatch.setattr(store._database, "fetch", fetch_and_change)
    listed = await store.tasks()
    await store.close()
    assert [each.task_id for each in listed] == [pause.run.task_id]
