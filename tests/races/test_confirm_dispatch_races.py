"""A pause's requests are recorded as sent while a response is claimed; both write the join."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import asyncpg
import pytest

from concurrent_answer import wait_for_lock_waiter
from meshpoint.adapters.sql import SqlStore
from meshpoint.model.tasks import Dispatch
from meshpoint.model.transitions import PauseCommitted
from meshpoint.testing.conformance.build import AGENT, a_call, a_pause, one, row

_CLAIM_STATEMENTS = (  # as a claim does, up to its commit
    "SELECT 1 FROM agent_paused_tasks WHERE logical_task_id = $1 FOR NO KEY UPDATE",
    "UPDATE agent_peer_sub_tasks SET status = 'done' WHERE logical_task_id = $1 AND seq = 0",
    "UPDATE agent_parallel_invocations SET completed_count = 1 WHERE logical_task_id = $1",
)


@pytest.mark.servers
async def test_a_dispatch_confirmation_concurrent_with_a_claim_is_not_lost(
    postgres_url: str,
) -> None:
    store = SqlStore(
        postgres_url,
        namespace="test",
        dispatch_lease=timedelta(),
        lock_timeout=timedelta(seconds=30),
    )
    await store.open()
    claimer, observer = await asyncpg.connect(postgres_url), await asyncpg.connect(postgres_url)
    try:
        pause = a_pause("a", "b")
        committed = one(await store.pause([pause]))
        assert isinstance(committed, PauseCommitted)
        claim = claimer.transaction()
        await claim.start()
        for statement in _CLAIM_STATEMENTS:
            await claimer.execute(statement, pause.run.task_id)
        confirm_task = asyncio.create_task(store.confirm_sent(committed.dispatches))
        lock_wait = asyncio.create_task(wait_for_lock_waiter(observer))
        await asyncio.wait({confirm_task, lock_wait}, return_when=asyncio.FIRST_COMPLETED)
        assert not confirm_task.done(), "the confirmation must wait for the claim"
        await claim.commit()
        await confirm_task
        assert (await row(store, pause.run.task_id))[1][1].dispatched_at is not None
        assert await store.unsent(AGENT, 10) == []
    finally:
        await claimer.close()
        await observer.close()
        await store.close()


@pytest.mark.servers
async def test_a_background_confirmation_is_retried_after_a_concurrent_claim(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqlStore(
        postgres_url,
        namespace="test",
        dispatch_lease=timedelta(),
        confirm_linger=timedelta(milliseconds=1),
    )
    await store.open()
    assert store._fast_path is not None
    claimer, claim_met, original_confirm = (
        await asyncpg.connect(postgres_url),
        asyncio.Event(),
        store._fast_path.confirm_dispatched,
    )

    async def watched_confirm(sent: Sequence[Dispatch]) -> tuple[list[Dispatch], list[Dispatch]]:
        unconfirmed, locked = await original_confirm(sent)
        if locked:
            claim_met.set()
        return unconfirmed, locked

    monkeypatch.setattr(store._fast_path, "confirm_dispatched", watched_confirm)
    try:
        pause = a_pause("a", "b")
        committed = one(await store.pause([pause]))
        assert isinstance(committed, PauseCommitted)
        async with claimer.transaction():
            for statement in _CLAIM_STATEMENTS:
                await claimer.execute(statement, pause.run.task_id)
            await store.confirm_sent(committed.dispatches)
            await claim_met.wait()
        await store.flush_confirms()
        assert (await row(store, pause.run.task_id))[1][1].dispatched_at is not None
        assert await store.unsent(AGENT, 10) == []
    finally:
        await claimer.close()
        await store.close()


@pytest.mark.servers
async def test_dispatches_of_a_locked_join_are_offered_once_it_is_unlocked(
    postgres_url: str,
) -> None:
    store = SqlStore(postgres_url, namespace="test", dispatch_lease=timedelta())
    await store.open()
    claimer = await asyncpg.connect(postgres_url)
    try:
        pause = a_pause(
            a_call("a", timeout=timedelta(hours=1)), a_call("b", timeout=timedelta(hours=1))
        )
        await store.pause([pause])
        async with claimer.transaction():
            for statement in _CLAIM_STATEMENTS:
                await claimer.execute(statement, pause.run.task_id)
            assert await store.unsent(AGENT, 10) == []
        offered = one(await store.unsent(AGENT, 10))
        assert isinstance(offered, Dispatch)
        assert offered.sub_task_id == pause.calls[1].sub_task_id
    finally:
        await claimer.close()
        await store.close()


@pytest.mark.servers
async def test_a_confirmation_for_a_join_that_stays_locked_is_not_retried_every_turn(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqlStore(
        postgres_url,
        namespace="test",
        dispatch_lease=timedelta(),
        confirm_linger=timedelta(hours=1),
    )
    await store.open()
    assert store._fast_path is not None
    claimer, statements, claim_met = await asyncpg.connect(postgres_url), 0, asyncio.Event()
    original_confirm = store._fast_path.confirm_dispatched

    async def counted_confirm(sent: Sequence[Dispatch]) -> tuple[list[Dispatch], list[Dispatch]]:
        nonlocal statements
        unconfirmed, locked = await original_confirm(sent)
        statements += 1
        if statements == 1:
            hurried.cancel()
            await asyncio.wait({hurried})
        claim_met.set()
        return unconfirmed, locked

    monkeypatch.setattr(store._fast_path, "confirm_dispatched", counted_confirm)
    try:
        pause = a_pause("a", "b")
        committed = one(await store.pause([pause]))
        assert isinstance(committed, PauseCommitted)
        async with claimer.transaction():
            for statement in _CLAIM_STATEMENTS:
                await claimer.execute(statement, pause.run.task_id)
            await store.confirm_sent(committed.dispatches)
            hurried = asyncio.create_task(store.flush_confirms())
            await claim_met.wait()
            for _ in range(20):  # round trips to the same server: enough time for as many writes
                await claimer.fetchval("SELECT 1")
            assert statements == 1
        await store.flush_confirms()
        assert statements == 2
        assert (await row(store, pause.run.task_id))[1][1].dispatched_at is not None
    finally:
        await claimer.close()
        await store.close()
