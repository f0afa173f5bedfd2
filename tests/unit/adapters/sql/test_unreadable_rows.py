"""A task whose row cannot be decoded is parked, for a masked and short reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshpoint.adapters.sql import SqlStore, due
from meshpoint.model.tasks import TaskState
from meshpoint.testing.conformance.build import HERE, ready


async def test_the_reason_is_masked_and_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def decode(*_: object) -> None:
        raise ValueError("password=hunter2 \0" + "x" * 5_000)

    monkeypatch.setattr(due, "resumable_from_row", decode)
    store = SqlStore(f"sqlite:///{tmp_path}/tasks.db", namespace="test")
    await store.open()
    try:
        pause = await ready(store)
        assert await store.acquire(HERE, 10) == []
        found = await store.task(pause.run.task_id)
    finally:
        await store.close()
    assert found is not None
    assert found[0].state is TaskState.PARKED
    reason = found[0].parked_reason or ""
    assert reason.startswith("the row cannot be read: password=*** ")
    assert "\0" not in reason
    assert len(reason) == 2_001
