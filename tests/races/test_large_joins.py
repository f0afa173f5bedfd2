"""Outcomes too large for one read or write: a PostgreSQL statement is limited to 1 GiB."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from meshpoint.adapters.sql import SqlStore, batcher, fast_path, owning
from meshpoint.adapters.sql.database import Database
from meshpoint.errors import AgentMisbehaved
from meshpoint.model.outcomes import Ok
from meshpoint.model.tasks import Replica, Resumable, Run
from meshpoint.model.transitions import (
    JoinCompleted,
    Pause,
    PauseCommitted,
    StillWaiting,
    TaskReady,
)
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    AGENT,
    HERE,
    LEASE,
    SECOND,
    THERE,
    a_call,
    a_claim,
    a_pause,
    one,
    paused,
    ready,
)
from servers import Proxy

SIZE = 300_000
CALLS = "abcdefgh"


def large_outcome(size: int = SIZE) -> Ok[str]:
    """An incompressible outcome."""
    return Ok(base64.b85encode(os.urandom(size)).decode())


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (batcher, fast_path, owning):
        monkeypatch.setattr(module, "PART_BYTES", 2 * SIZE)
    monkeypatch.setattr(batcher.split_by_size, "__defaults__", (2 * SIZE,))


@pytest.fixture
async def store(database_url: str, clock: FakeClock, small_parts: None) -> AsyncIterator[SqlStore]:
    store = SqlStore(database_url, namespace="test", clock=clock, max_join_bytes=20 * SIZE)
    await store.open()
    yield store
    await store.close()


class MeteredProxy(Proxy):
    """Proxy that records the largest message from the server: the largest returned row."""

    largest_message = 0

    async def _pump(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        is_flowing: asyncio.Event,
        writers: set[asyncio.StreamWriter],
    ) -> None:
        if sink.get_extra_info("sockname")[1] != self._port:
            return await super()._pump(source, sink, is_flowing, writers)
        try:
            sink.write(await source.readexactly(1))  # the server declines encryption
            while True:
                head = await source.readexactly(5)
                size = int.from_bytes(head[1:]) - 4
                self.largest_message = max(self.largest_message, size)
                sink.write(head + await source.readexactly(size))
                await sink.drain()
        except (OSError, asyncio.IncompleteReadError):
            for writer in writers:
                writer.close()


@pytest.fixture
async def wire(postgres_url: str) -> AsyncIterator[MeteredProxy]:
    wire = MeteredProxy(postgres_url)
    async with wire:
        yield wire


@pytest.fixture
async def metered_store(
    wire: MeteredProxy, clock: FakeClock, small_parts: None
) -> AsyncIterator[SqlStore]:
    """A store on PostgreSQL behind `wire`."""
    store = SqlStore(wire.url, namespace="test", clock=clock)
    await store.open()
    yield store
    await store.close()


def results(task: Resumable) -> dict[str, object]:
    return {
        call_id: outcome.value for call_id, _, outcome in task.outcomes if isinstance(outcome, Ok)
    }


async def test_large_outcomes_can_be_claimed_in_one_batch(store: SqlStore) -> None:
    pause = await paused(store, *CALLS)
    answers = {call_id: large_outcome() for call_id in CALLS}
    arrivals = await store.claim([a_claim(pause, each, answers[each]) for each in CALLS], HERE, 1)
    assert [type(each) for each in arrivals] == [StillWaiting] * 7 + [JoinCompleted]
    assert isinstance(arrivals[-1], JoinCompleted)
    assert results(arrivals[-1].task) == {call_id: answers[call_id].value for call_id in CALLS}


async def test_large_outcomes_can_be_claimed_one_by_one_and_the_last_one_twice(
    store: SqlStore,
) -> None:
    pause = await paused(store, *CALLS)
    answers = {call_id: large_outcome() for call_id in CALLS}
    claims = [a_claim(pause, each, answers[each]) for each in CALLS]
    for claim in claims[:-1]:
        assert isinstance(one(await store.claim([claim], HERE, 1)), StillWaiting)
    for _ in range(2):
        arrival = one(await store.claim(claims[-1:], HERE, 1))
        assert isinstance(arrival, JoinCompleted)
        assert list(results(arrival.task)) == list(CALLS)
        assert results(arrival.task) == {call_id: answers[call_id].value for call_id in CALLS}


async def _ready_task(store: SqlStore) -> Pause:
    pause = await paused(store, *CALLS)
    for call_id in CALLS:
        await store.claim([a_claim(pause, call_id, large_outcome())], HERE, 0)
    return pause


async def test_large_outcomes_are_read_when_a_task_is_acquired_and_when_rescued(
    store: SqlStore, clock: FakeClock
) -> None:
    pause, small = await _ready_task(store), await ready(store)
    acquired = {task.run.task_id: task for task in await store.acquire(HERE, 10)}
    assert acquired.keys() == {pause.run.task_id, small.run.task_id}
    assert list(results(acquired[pause.run.task_id])) == list(CALLS)
    assert list(results(acquired[small.run.task_id])) == ["a"]
    clock.advance(LEASE + SECOND)
    rescued = {task.run.task_id: task for task in await store.rescue(THERE, 10)}
    assert results(rescued[pause.run.task_id]) == results(acquired[pause.run.task_id])


async def test_large_outcomes_are_read_when_a_join_expires(
    store: SqlStore, clock: FakeClock
) -> None:
    pause = await paused(store, *CALLS, a_call("last", timeout=SECOND))
    for call_id in CALLS:
        await store.claim([a_claim(pause, call_id, large_outcome())], HERE, 1)
    clock.advance(2 * SECOND)
    expired = one(await store.expire(HERE, 10, 1))
    assert isinstance(expired.join_result, JoinCompleted)
    assert list(results(expired.join_result.task)) == list(CALLS)


async def test_a_join_above_the_size_limit_is_returned_as_refused(store: SqlStore) -> None:
    pause, other = await paused(store, *CALLS), await paused(store)
    for call_id in CALLS[:-1]:
        await store.claim([a_claim(pause, call_id, large_outcome(3 * SIZE))], HERE, 1)
    arrivals = await store.claim([a_claim(pause, CALLS[-1]), a_claim(other)], HERE, 2)
    too_large, within_limit = (each.task for each in arrivals if isinstance(each, JoinCompleted))
    assert "max_join_bytes is 6000000" in str(too_large.refusal_reason)
    assert too_large.outcomes == ()
    assert within_limit.refusal_reason is None


async def test_compressed_outcomes_count_with_their_uncompressed_size(store: SqlStore) -> None:
    pause = await paused(store, *CALLS)
    claims = [a_claim(pause, call_id, Ok("a" * 10_000_000)) for call_id in CALLS]
    arrival = (await store.claim(claims[:-1], HERE, 1))[-1]
    assert isinstance(arrival, StillWaiting)
    assert isinstance(one(await store.claim(claims[-1:], HERE, 0)), TaskReady)
    assert "max_join_bytes" in str(one(await store.acquire(HERE, 1)).refusal_reason)


async def test_the_lease_is_renewed_while_outcomes_are_read(
    store: SqlStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _ready_task(store)
    read, renew, renewed = owning._read_outcomes_in_parts, store.renew, asyncio.Event()

    async def watched_renew(runs: Sequence[Run], replica: Replica) -> list[Run]:
        lost = await renew(runs, replica)
        renewed.set()
        return lost

    async def slow_read(database: Database, row: Any) -> Any:
        clock.advance(SECOND)
        await renewed.wait()
        return await read(database, row)

    monkeypatch.setattr(store, "renew", watched_renew)
    monkeypatch.setattr(owning, "_read_outcomes_in_parts", slow_read)
    short_lease = replace(HERE, lease=timedelta(milliseconds=50))  # renewed after a third of it
    assert len(await store.acquire(short_lease, 1)) == 1
    assert await store.rescue(THERE, 1) == []


async def _by_claim(store: SqlStore, clock: FakeClock) -> object:
    pause = await paused(store, *CALLS)
    await store.claim([a_claim(pause, each, large_outcome()) for each in CALLS[:-1]], HERE, 1)
    return one(await store.claim([a_claim(pause, CALLS[-1], large_outcome())], HERE, 1))


async def _by_acquire(store: SqlStore, clock: FakeClock) -> object:
    await _ready_task(store)
    return one(await store.acquire(HERE, 1))


async def _by_rescue(store: SqlStore, clock: FakeClock) -> object:
    await _by_acquire(store, clock)
    clock.advance(LEASE + SECOND)
    return one(await store.rescue(THERE, 1))


async def _by_expiry(store: SqlStore, clock: FakeClock) -> object:
    pause = await paused(store, *CALLS, a_call("last", timeout=SECOND))
    await store.claim([a_claim(pause, each, large_outcome()) for each in CALLS], HERE, 1)
    clock.advance(2 * SECOND)
    return one(await store.expire(HERE, 10, 1)).join_result


@pytest.mark.parametrize("resume", [_by_claim, _by_acquire, _by_rescue, _by_expiry])
async def test_no_row_holds_all_outcomes_of_a_join(
    metered_store: SqlStore,
    wire: MeteredProxy,
    clock: FakeClock,
    resume: Callable[[SqlStore, FakeClock], Awaitable[Any]],
) -> None:
    """PostgreSQL cannot build a row above 1 GiB."""
    result = await resume(metered_store, clock)
    assert list(results(result.task if isinstance(result, JoinCompleted) else result)) == list(
        CALLS
    )
    assert wire.largest_message < 3 * SIZE, f"of {len(CALLS) * SIZE} bytes"


async def test_a_pause_can_have_large_requests(store: SqlStore, clock: FakeClock) -> None:
    bodies = {call_id: os.urandom(SIZE) for call_id in CALLS}
    pause = a_pause(*(replace(a_call(call_id), body=body) for call_id, body in bodies.items()))
    assert isinstance(one(await store.pause([pause])), PauseCommitted)
    clock.advance(10 * SECOND)
    sent = await store.unsent(AGENT, 100)
    assert [send.body for send in sent] == list(bodies.values())  # type: ignore[union-attr]  # all are sends


async def test_a_state_too_large_to_be_read_back_is_rejected(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshpoint.adapters.sql.checkpointing.MAX_ROW_BYTES", 1_000_000)
    pause, other = a_pause(state=os.urandom(2_000_000)), a_pause()
    with pytest.raises(AgentMisbehaved, match="bytes"):
        await store.pause([pause])
    assert isinstance(one(await store.pause([other])), PauseCommitted)
