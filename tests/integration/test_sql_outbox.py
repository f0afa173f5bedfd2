"""A pause's outbox is stored on its join: which requests are due, and when it is cleared."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from meshpoint.adapters.sql import SqlStore
from meshpoint.model.tasks import Dispatch
from meshpoint.model.transitions import PauseCommitted, StillWaiting
from meshpoint.testing.conformance.build import (
    AGENT,
    HERE,
    HOUR,
    a_call,
    a_claim,
    a_pause,
    ended,
    one,
    paused,
    sub,
)


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[SqlStore]:
    """A store whose unsent messages and tombstones are due at once."""
    store = SqlStore(
        database_url, namespace="test", dispatch_lease=timedelta(), tombstone_ttl=timedelta()
    )
    await store.open()
    yield store
    await store.close()


async def fetch_rows(store: SqlStore, statement: str, **values: Any) -> list[tuple[Any, ...]]:
    async with store._database.engine.connect() as connection:
        result = await connection.execute(text(statement), values)
        return [tuple(row) for row in result] if result.returns_rows else []


async def due_count(store: SqlStore) -> int:
    """Number of joins with something to send."""
    ((count,),) = await fetch_rows(
        store, "SELECT count(*) FROM agent_parallel_invocations WHERE send_due_at IS NOT NULL"
    )
    return int(count)


async def commit_pause(store: SqlStore, *calls: str) -> tuple[Any, list[Dispatch]]:
    """A pause whose calls have an hour, and its requests."""
    pause = a_pause(*(a_call(call, timeout=HOUR) for call in calls))
    result = one(await store.pause([pause]))
    assert isinstance(result, PauseCommitted)
    return pause, list(result.dispatches)


async def test_all_requests_of_a_pause_are_confirmed_on_one_row(store: SqlStore) -> None:
    _, requests = await commit_pause(store, "a", "b", "c")
    assert await due_count(store) == 1
    await store.confirm_sent(requests)
    assert await due_count(store) == 0
    assert (
        await fetch_rows(store, "SELECT dispatched_at FROM agent_peer_sub_tasks") == [(None,)] * 3
    )


async def test_sent_requests_of_a_pause_are_confirmed_and_the_rest_stay_due(
    store: SqlStore,
) -> None:
    _, requests = await commit_pause(store, "a", "b", "c")
    await store.confirm_sent(requests[1:2])
    assert await due_count(store) == 1
    assert [
        send.sub_task_id for send in await store.unsent(AGENT, 10) if isinstance(send, Dispatch)
    ] == [
        requests[0].sub_task_id,
        requests[2].sub_task_id,
    ]
    await store.confirm_sent([requests[0], requests[2]])
    assert await due_count(store) == 0


async def test_a_join_whose_unsent_calls_are_answered_has_nothing_due(store: SqlStore) -> None:
    pause, requests = await commit_pause(store, "a", "b")
    await store.confirm_sent(requests[:1])
    assert isinstance(one(await store.claim([a_claim(pause, "b")], HERE, 1)), StillWaiting)
    assert await store.unsent(AGENT, 10) == []
    assert await due_count(store) == 0


async def test_a_completed_join_has_nothing_due(store: SqlStore) -> None:
    pause, _ = await commit_pause(store, "a", "b")
    await store.claim([a_claim(pause, "a"), a_claim(pause, "b")], HERE, 1)
    assert await due_count(store) == 0


async def test_the_requests_of_one_pause_are_offered_together(store: SqlStore) -> None:
    for _ in range(2):
        await commit_pause(store, "a", "b", "c")
    assert len(await store.unsent(AGENT, 2)) == 3


async def test_requests_written_by_the_previous_release_are_sent(store: SqlStore) -> None:
    pause, _ = await commit_pause(store, "a", "b")
    await fetch_rows(
        store,
        "UPDATE agent_parallel_invocations "
        "SET agent_name = NULL, send_due_at = NULL, send_attempts = 0",
    )
    await fetch_rows(store, "UPDATE agent_peer_sub_tasks SET send_due_at = created_at")
    assert len(await store.unsent(AGENT, 1)) == 1
    second_pause = one(await store.pause([pause]))
    assert isinstance(second_pause, PauseCommitted)
    assert [send.sub_task_id for send in second_pause.dispatches] == [
        sub(pause, "a"),
        sub(pause, "b"),
    ]
    await store.confirm_sent(second_pause.dispatches[:1])
    offered_ids = await store.unsent(AGENT, 10)
    assert [send.sub_task_id for send in offered_ids if isinstance(send, Dispatch)] == [
        sub(pause, "b")
    ]
    await store.confirm_sent(offered_ids)
    assert await store.unsent(AGENT, 10) == []


async def test_leftover_rows_are_purged_with_their_task(store: SqlStore) -> None:
    run, waiting = await ended(store), await paused(store, a_call("a", timeout=HOUR))
    for table in ("agent_peer_sub_tasks", "agent_parallel_invocations"):
        await fetch_rows(store, f"UPDATE {table} SET logical_task_id = :id", id=run.task_id)
    await fetch_rows(store, "UPDATE agent_peer_sub_tasks SET status = 'done'")
    await store.confirm_sent(await store.unsent(AGENT, 10))
    assert await store.purge(AGENT, 10) == 1
    remaining_query = "SELECT logical_task_id FROM {}"
    assert await fetch_rows(store, remaining_query.format("agent_paused_tasks")) == [
        (waiting.run.task_id,)
    ]
    for table in ("agent_peer_sub_tasks", "agent_parallel_invocations"):
        assert await fetch_rows(store, remaining_query.format(table)) == []
