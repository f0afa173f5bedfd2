"""A cancel is recorded as sent while its task ends; both lock the task, one after the other."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import asyncpg
import pytest

from beside import WAITING
from meshpoint.adapters.sql import SqlStore
from meshpoint.model.calls import FIRST
from meshpoint.model.checkpoint import Ended
from meshpoint.testing.conformance.build import an_end, one, paused, resumed, row, sub


@pytest.mark.servers
async def test_a_call_whose_cancel_is_marked_just_before_the_end_is_deleted_with_it(postgres_url: str) -> None:
    store = SqlStore(postgres_url, namespace="test", command_timeout=timedelta(seconds=30))
    await store.open()
    marking, looking = await asyncpg.connect(postgres_url), await asyncpg.connect(postgres_url)
    try:
        pause = await paused(store, "a", "b", join=FIRST)
        task = await resumed(store, pause, "a")
        mark = marking.transaction()
        await mark.start()  # as `mark_sent` does for the cancel of b, up to its commit
        task_id, call_id = pause.run.task_id, sub(pause, "b")
        await marking.execute(
            "SELECT 1 FROM agent_paused_tasks WHERE logical_task_id = $1 FOR NO KEY UPDATE", task_id
        )
        await marking.execute(
            "UPDATE agent_peer_sub_tasks SET status = 'done', send_due_at = NULL WHERE sub_task_id = $1", call_id
        )
        ending = asyncio.create_task(store.end([an_end(task.run)]))
        while not await looking.fetchval(WAITING):
            await asyncio.sleep(0.01)
        await mark.commit()
        assert isinstance(one(await ending), Ended)
        _, calls = await row(store, task_id)
        assert calls == []
    finally:
        await marking.close()
        await looking.close()
        await store.close()
