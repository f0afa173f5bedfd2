"""A cancel is recorded as sent while its task ends; both lock the task, one after the other."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import asyncpg
import pytest

from concurrent_answer import wait_for_lock_waiter
from meshpoint.adapters.sql import SqlStore
from meshpoint.model.calls import FIRST
from meshpoint.model.transitions import EndCommitted
from meshpoint.testing.conformance.build import an_end, one, paused, resumed, row, sub


@pytest.mark.servers
async def test_a_call_whose_cancel_is_confirmed_before_the_end_is_deleted_with_it(
    postgres_url: str,
) -> None:
    store = SqlStore(
        postgres_url,
        namespace="test",
        command_timeout=timedelta(seconds=30),
        lock_timeout=timedelta(seconds=30),
    )
    await store.open()
    confirmer, observer = await asyncpg.connect(postgres_url), await asyncpg.connect(postgres_url)
    try:
        pause = await paused(store, "a", "b", join=FIRST)
        task = await resumed(store, pause, "a")
        confirm_statement = confirmer.transaction()
        await (
            confirm_statement.start()
        )  # as `confirm_sent` does for the cancel of b, up to its commit
        task_id, call_id = pause.run.task_id, sub(pause, "b")
        await confirmer.execute(
            "SELECT 1 FROM agent_paused_tasks WHERE logical_task_id = $1 FOR NO KEY UPDATE",
            task_id,
        )
        await confirmer.execute(
            "UPDATE agent_peer_sub_tasks SET status = 'done', send_due_at = NULL "
            "WHERE sub_task_id = $1",
            call_id,
        )
        ending = asyncio.create_task(store.end([an_end(task.run)]))
        await wait_for_lock_waiter(observer)
        await confirm_statement.commit()
        assert isinstance(one(await ending), EndCommitted)
        _, calls = await row(store, task_id)
        assert calls == []
    finally:
        await confirmer.close()
        await observer.close()
        await store.close()
