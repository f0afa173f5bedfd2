"""A pause's requests are recorded as sent while a response is claimed; both write the join."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import asyncpg
import pytest

from beside import WAITING
from meshpoint.adapters.sql import SqlStore
from meshpoint.model.checkpoint import Committed, Dispatch
from meshpoint.testing.conformance.build import AGENT, a_call, a_pause, one, row

_CLAIM = (  # as a claim does, up to its commit
    "SELECT 1 FROM agent_paused_tasks WHERE logical_task_id = $1 FOR NO KEY UPDATE",
    "UPDATE agent_peer_sub_tasks SET status = 'done' WHERE logical_task_id = $1 AND seq = 0",
    "UPDATE agent_parallel_invocations SET completed_count = 1 WHERE logical_task_id = $1",
)


@pytest.mark.servers
async def test_a_mark_that_meets_a_claim_is_not_lost(postgres_url: str) -> None:
    store = SqlStore(postgres_url, namespace="test", dispatch_lease=timedelta())
    await store.open()
    claiming, looking = await asyncpg.connect(postgres_url), await asyncpg.connect(postgres_url)
    try:
        pause = a_pause("a", "b")
        committed = one(await store.pause([pause]))
        assert isinstance(committed, Committed)
        claim = claiming.transaction()
        await claim.start()
        for statement in _CLAIM:
            await claiming.execute(statement, pause.run.task_id)
        marking = asyncio.create_task(store.mark_sent(committed.dispatches))
        while not marking.done() and not await looking.fetchval(WAITING):
            await asyncio.sleep(0.01)
        await claim.commit()
        await marking
        assert (await row(store, pause.run.task_id))[1][1].dispatched_at is not None
        assert await store.unsent(AGENT, 10) == []
    finally:
        await claiming.close()
        await looking.close()
        await store.close()


@pytest.mark.servers
async def test_a_mark_in_the_background_that_meets_a_claim_is_made_after_it(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqlStore(
        postgres_url, namespace="test", dispatch_lease=timedelta(), confirm_linger=timedelta(milliseconds=1)
    )
    await store.open()
    assert store._fast_path is not None
    claiming, met, mark = await asyncpg.connect(postgres_url), asyncio.Event(), store._fast_path.confirm_dispatched

    async def watched(sent: Sequence[Dispatch]) -> tuple[list[Dispatch], list[Dispatch]]:
        left, held = await mark(sent)
        if held:
            met.set()
        return left, held

    monkeypatch.setattr(store._fast_path, "confirm_dispatched", watched)
    try:
        pause = a_pause("a", "b")
        committed = one(await store.pause([pause]))
        assert isinstance(committed, Committed)
        async with claiming.transaction():
            for statement in _CLAIM:
                await claiming.execute(statement, pause.run.task_id)
            await store.mark_sent(committed.dispatches)
            await met.wait()
        await store.marks_written()
        assert (await row(store, pause.run.task_id))[1][1].dispatched_at is not None
        assert await store.unsent(AGENT, 10) == []
    finally:
        await claiming.close()
        await store.close()


@pytest.mark.servers
async def test_a_join_that_somebody_holds_is_offered_when_it_is_free_again(postgres_url: str) -> None:
    store = SqlStore(postgres_url, namespace="test", dispatch_lease=timedelta())
    await store.open()
    claiming = await asyncpg.connect(postgres_url)
    try:
        pause = a_pause(a_call("a", timeout=timedelta(hours=1)), a_call("b", timeout=timedelta(hours=1)))
        await store.pause([pause])
        async with claiming.transaction():
            for statement in _CLAIM:
                await claiming.execute(statement, pause.run.task_id)
            assert await store.unsent(AGENT, 10) == []
        offered = one(await store.unsent(AGENT, 10))
        assert isinstance(offered, Dispatch)
        assert offered.sub_task_id == pause.calls[1].sub_task_id
    finally:
        await claiming.close()
        await store.close()


@pytest.mark.servers
async def test_a_mark_whose_join_stays_held_is_not_sent_turn_after_turn(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqlStore(postgres_url, namespace="test", dispatch_lease=timedelta(), confirm_linger=timedelta(hours=1))
    await store.open()
    assert store._fast_path is not None
    claiming, statements, met = await asyncpg.connect(postgres_url), 0, asyncio.Event()
    mark = store._fast_path.confirm_dispatched

    async def counted(sent: Sequence[Dispatch]) -> tuple[list[Dispatch], list[Dispatch]]:
        nonlocal statements
        left, held = await mark(sent)
        statements += 1
        if statements == 1:
            hurried.cancel()
            await asyncio.wait({hurried})
        met.set()
        return left, held

    monkeypatch.setattr(store._fast_path, "confirm_dispatched", counted)
    try:
        pause = a_pause("a", "b")
        committed = one(await store.pause([pause]))
        assert isinstance(committed, Committed)
        async with claiming.transaction():
            for statement in _CLAIM:
                await claiming.execute(statement, pause.run.task_id)
            await store.mark_sent(committed.dispatches)
            hurried = asyncio.create_task(store.marks_written())
            await met.wait()
            for _ in range(20):  # round trips to the same server: enough time for as many writes
                await claiming.fetchval("SELECT 1")
            assert statements == 1
        await store.marks_written()
        assert statements == 2
        assert (await row(store, pause.run.task_id))[1][1].dispatched_at is not None
    finally:
        await claiming.close()
        await store.close()
