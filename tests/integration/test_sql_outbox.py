"""A pause's outbox is stored on its join: which requests are due, and when it is cleared."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from meshpoint.adapters.sql import SqlStore
from meshpoint.model.checkpoint import Committed, Dispatch, StillWaiting
from meshpoint.testing.conformance.build import AGENT, HERE, HOUR, a_call, a_claim, a_pause, ended, one, paused, sub


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[SqlStore]:
    """A store whose unsent messages and tombstones are due at once."""
    store = SqlStore(database_url, namespace="test", dispatch_lease=timedelta(), tombstone_ttl=timedelta())
    await store.open()
    yield store
    await store.close()


async def query(store: SqlStore, statement: str, **values: Any) -> list[tuple[Any, ...]]:
    async with store._database.engine.connect() as connection:
        result = await connection.execute(text(statement), values)
        return [tuple(row) for row in result] if result.returns_rows else []


async def due(store: SqlStore) -> int:
    """Number of joins with something to send."""
    ((count,),) = await query(store, "SELECT count(*) FROM agent_parallel_invocations WHERE send_due_at IS NOT NULL")
    return int(count)


async def committed(store: SqlStore, *calls: str) -> tuple[Any, list[Dispatch]]:
    """A pause whose calls have an hour, and its requests."""
    pause = a_pause(*(a_call(call, timeout=HOUR) for call in calls))
    result = one(await store.pause([pause]))
    assert isinstance(result, Committed)
    return pause, list(result.dispatches)


async def test_all_requests_of_a_pause_are_marked_on_one_row(store: SqlStore) -> None:
    _, requests = await committed(store, "a", "b", "c")
    assert await due(store) == 1
    await store.mark_sent(requests)
    assert await due(store) == 0
    assert await query(store, "SELECT dispatched_at FROM agent_peer_sub_tasks") == [(None,)] * 3


async def test_what_was_sent_of_a_pause_is_marked_and_the_rest_stays_due(store: SqlStore) -> None:
    _, requests = await committed(store, "a", "b", "c")
    await store.mark_sent(requests[1:2])
    assert await due(store) == 1
    assert [send.sub_task_id for send in await store.unsent(AGENT, 10) if isinstance(send, Dispatch)] == [
        requests[0].sub_task_id,
        requests[2].sub_task_id,
    ]
    await store.mark_sent([requests[0], requests[2]])
    assert await due(store) == 0


async def test_a_join_whose_unsent_calls_are_answered_is_due_for_nothing(store: SqlStore) -> None:
    pause, requests = await committed(store, "a", "b")
    await store.mark_sent(requests[:1])
    assert isinstance(one(await store.claim([a_claim(pause, "b")], HERE, 1)), StillWaiting)
    assert await store.unsent(AGENT, 10) == []
    assert await due(store) == 0


async def test_a_join_that_is_met_is_due_for_nothing(store: SqlStore) -> None:
    pause, _ = await committed(store, "a", "b")
    await store.claim([a_claim(pause, "a"), a_claim(pause, "b")], HERE, 1)
    assert await due(store) == 0


async def test_the_requests_of_one_pause_are_offered_together(store: SqlStore) -> None:
    for _ in range(2):
        await committed(store, "a", "b", "c")
    assert len(await store.unsent(AGENT, 2)) == 3


async def test_what_the_release_before_wrote_is_sent(store: SqlStore) -> None:
    pause, _ = await committed(store, "a", "b")
    await query(
        store, "UPDATE agent_parallel_invocations SET agent_name = NULL, send_due_at = NULL, send_attempts = 0"
    )
    await query(store, "UPDATE agent_peer_sub_tasks SET send_due_at = created_at")
    assert len(await store.unsent(AGENT, 1)) == 1
    again = one(await store.pause([pause]))
    assert isinstance(again, Committed)
    assert [send.sub_task_id for send in again.dispatches] == [sub(pause, "a"), sub(pause, "b")]
    await store.mark_sent(again.dispatches[:1])
    offered = await store.unsent(AGENT, 10)
    assert [send.sub_task_id for send in offered if isinstance(send, Dispatch)] == [sub(pause, "b")]
    await store.mark_sent(offered)
    assert await store.unsent(AGENT, 10) == []


async def test_whatever_is_left_of_a_task_is_purged_with_it(store: SqlStore) -> None:
    run, waiting = await ended(store), await paused(store, a_call("a", timeout=HOUR))
    for table in ("agent_peer_sub_tasks", "agent_parallel_invocations"):
        await query(store, f"UPDATE {table} SET logical_task_id = :id", id=run.task_id)
    await query(store, "UPDATE agent_peer_sub_tasks SET status = 'done'")
    await store.mark_sent(await store.unsent(AGENT, 10))
    assert await store.purge(AGENT, 10) == 1
    left = "SELECT logical_task_id FROM {}"
    assert await query(store, left.format("agent_paused_tasks")) == [(waiting.run.task_id,)]
    for table in ("agent_peer_sub_tasks", "agent_parallel_invocations"):
        assert await query(store, left.format(table)) == []
