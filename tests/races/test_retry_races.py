"""A sweeper takes the next attempt at a call to send it, while another replica closes the call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import asyncpg
import pytest

from concurrent_answer import wait_for_lock_waiter
from meshpoint.adapters.sql import SqlStore
from meshpoint.model.calls import Join
from meshpoint.model.ids import TaskId
from meshpoint.model.tasks import CallState
from meshpoint.model.transitions import Pause, TaskReady
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import HERE, HOUR, TIMEOUT, ok, one, sub
from meshpoint.testing.conformance.store_retries import WAIT, answer, attempts, open_retry

pytestmark = pytest.mark.servers


@pytest.fixture
async def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def store(postgres_url: str, clock: FakeClock) -> AsyncIterator[SqlStore]:
    store = SqlStore(
        postgres_url,
        namespace="test",
        clock=clock,
        command_timeout=timedelta(seconds=30),
        lock_timeout=timedelta(seconds=30),
    )
    await store.open()
    yield store
    await store.close()


@asynccontextmanager
async def leased_by_another(url: str, sub_task_id: TaskId) -> AsyncIterator[None]:
    """The call is leased to be sent, as the sweeper does, and commits when something waits."""
    sweeper, observer = await asyncpg.connect(url), await asyncpg.connect(url)
    try:
        lease = sweeper.transaction()
        await lease.start()
        await sweeper.execute(
            "UPDATE agent_peer_sub_tasks SET send_due_at = send_due_at + 5, send_attempts = 1 "
            "WHERE sub_task_id = $1",
            sub_task_id,
        )
        yield
        await wait_for_lock_waiter(observer)
        await lease.commit()
    finally:
        await sweeper.close()
        await observer.close()


async def last_state(store: SqlStore, pause: Pause, sub_task_id: TaskId) -> CallState:
    """The state of one attempt."""
    return {each.sub_task_id: each.state for each in await attempts(store, pause)}[sub_task_id]


async def test_an_attempt_that_an_earlier_one_replaces_is_cancelled(
    store: SqlStore, postgres_url: str
) -> None:
    pause = await open_retry(store)
    _, following = await attempts(store, pause)
    late = answer(pause, sub(pause, "a"), ok("late"))
    async with leased_by_another(postgres_url, following.sub_task_id):
        claim = asyncio.create_task(store.claim([late], HERE, 0))
    assert isinstance(one(await claim), TaskReady)
    assert await last_state(store, pause, following.sub_task_id) is CallState.CANCELLING


async def test_an_attempt_that_a_deadline_closes_is_cancelled(
    store: SqlStore, postgres_url: str, clock: FakeClock
) -> None:
    pause = await open_retry(store, join=Join(deadline=HOUR))
    _, following = await attempts(store, pause)
    clock.advance(HOUR)
    async with leased_by_another(postgres_url, following.sub_task_id):
        expiry = asyncio.create_task(store.expire(HERE, 10, 0))
    assert isinstance(one(await expiry).join_result, TaskReady)
    assert await last_state(store, pause, following.sub_task_id) is CallState.CANCELLING


async def test_a_late_attempt_is_cancelled_before_it_is_retried(
    store: SqlStore, postgres_url: str, clock: FakeClock
) -> None:
    pause = await open_retry(store)
    _, following = await attempts(store, pause)
    clock.advance(WAIT + TIMEOUT)
    async with leased_by_another(postgres_url, following.sub_task_id):
        expiry = asyncio.create_task(store.expire(HERE, 10, 0))
    assert one(one(await expiry).retried).number == 3
    assert await last_state(store, pause, following.sub_task_id) is CallState.CANCELLING
