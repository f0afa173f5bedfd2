"""A session that locks one row of PostgreSQL delays only that row."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

from concurrent_answer import wait_for_lock_waiter
from meshpoint.adapters.sql import SqlStore
from meshpoint.errors import RowLocked, StoreUnavailable
from meshpoint.model.ids import TaskId
from meshpoint.model.mailbox import MailAccepted
from meshpoint.model.tasks import Run, TaskState
from meshpoint.model.transitions import (
    CancelCommitted,
    DuplicateOutcome,
    EndCommitted,
    JoinCompleted,
    Pause,
    PauseCommitted,
    StillWaiting,
    TaskLocked,
)
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    AGENT,
    HERE,
    LEASE,
    SECOND,
    THERE,
    a_begin,
    a_call,
    a_cancel,
    a_claim,
    a_pause,
    a_progress,
    a_release,
    a_run,
    an_end,
    begun,
    one,
    operating,
    outcomes,
    paused,
    resumed,
    saved,
    state_of,
    sub,
    task_ids,
)
from meshpoint.testing.conformance.store_mailbox import a_receive, a_signal

HOUR = timedelta(hours=1)

_LOCK_STATEMENTS = {
    "task": "SELECT 1 FROM agent_paused_tasks WHERE logical_task_id = $1 FOR UPDATE",
    "call": "SELECT 1 FROM agent_peer_sub_tasks WHERE logical_task_id = $1 LIMIT 1 FOR UPDATE",
    "join": "SELECT 1 FROM agent_parallel_invocations WHERE logical_task_id = $1 FOR UPDATE",
}
_LOCK_SIGNALS = "SELECT 1 FROM agent_task_signals WHERE logical_task_id = $1 FOR UPDATE"
_RENEWED_QUERY = """
SELECT count(*) FROM agent_paused_tasks WHERE logical_task_id = $1 AND wake_at > $2
"""


@pytest.fixture
async def store(postgres_url: str, clock: FakeClock) -> AsyncIterator[SqlStore]:
    # A statement that waits for another session's lock fails here deterministically, long before
    # the command timeout.
    store = SqlStore(
        postgres_url,
        namespace="test",
        clock=clock,
        command_timeout=timedelta(seconds=60),
        lock_timeout=timedelta(milliseconds=200),
    )
    await store.open()
    yield store
    await store.close()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@asynccontextmanager
async def lock_row(
    url: str, task_id: TaskId, row: str = "task"
) -> AsyncIterator[asyncpg.Connection]:
    """Lock a row of the task in another session."""
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction():
            statement = _LOCK_STATEMENTS.get(row, _LOCK_SIGNALS)
            assert await connection.fetch(statement, task_id)
            yield connection
    finally:
        await connection.close()


async def begin_runs(store: SqlStore, count: int) -> list[Run]:
    return [await begun(store) for _ in range(count)]


async def test_other_leases_are_renewed_while_one_row_is_locked(
    store: SqlStore, postgres_url: str, clock: FakeClock
) -> None:
    runs = await begin_runs(store, 10)
    async with lock_row(postgres_url, runs[3].task_id):
        for _ in range(4):
            clock.advance(LEASE / 2)
            assert await store.renew(runs, HERE) == []
            assert await store.rescue(THERE, 10) == []


async def test_the_lease_on_a_locked_row_is_renewed_once_it_is_unlocked(
    store: SqlStore, postgres_url: str, clock: FakeClock
) -> None:
    runs = await begin_runs(store, 2)
    async with lock_row(postgres_url, runs[0].task_id) as other:
        clock.advance(2 * LEASE)
        assert await store.renew(runs, HERE) == []
        assert await store.rescue(THERE, 10) == []
        await wait_for_lock_waiter(other)
    observer = await asyncpg.connect(postgres_url)
    try:
        now = clock.now().timestamp()
        while not await observer.fetchval(_RENEWED_QUERY, runs[0].task_id, now):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    finally:
        await observer.close()
    assert await store.rescue(THERE, 10) == []
    assert await store.renew(runs, HERE) == []


async def test_a_lost_lease_is_reported_while_another_row_is_locked(
    store: SqlStore, postgres_url: str, clock: FakeClock
) -> None:
    lost, renewed = await begin_runs(store, 2)
    clock.advance(LEASE + SECOND)
    await store.renew([renewed], HERE)
    assert task_ids(await store.rescue(THERE, 10)) == [lost.task_id]
    async with lock_row(postgres_url, renewed.task_id):
        assert await store.renew([lost, renewed], HERE) == [lost]


async def test_more_rows_can_be_locked_than_the_store_waits_for(
    store: SqlStore, postgres_url: str, clock: FakeClock
) -> None:
    runs = await begin_runs(store, 12)
    other = await asyncpg.connect(postgres_url)
    try:
        async with other.transaction():
            for run in runs[:10]:
                await other.fetch(_LOCK_STATEMENTS["task"], run.task_id)
            clock.advance(LEASE / 2)
            assert await store.renew(runs, HERE) == []
            clock.advance(LEASE / 2 + SECOND)
            assert await store.rescue(THERE, 20) == []
        assert await store.renew(runs, HERE) == []
        assert await store.rescue(THERE, 20) == []
    finally:
        await other.close()


@pytest.mark.parametrize("row", _LOCK_STATEMENTS)
async def test_a_claim_does_not_wait_for_another_claims_locked_row(
    store: SqlStore, postgres_url: str, row: str
) -> None:
    locked, other = await paused(store), await paused(store)
    claims = [a_claim(locked), a_claim(other)]
    async with lock_row(postgres_url, locked.run.task_id, row):
        for _ in range(3):
            first, second = await store.claim(claims, HERE, 2)
            assert first == TaskLocked(locked.run.task_id, sub(locked, "a"))
            assert isinstance(second, JoinCompleted)
    first, second = await store.claim(claims, HERE, 2)
    assert isinstance(first, JoinCompleted)
    assert isinstance(second, JoinCompleted)  # it found itself
    assert outcomes(first.task).keys() == {"a"}


async def test_a_batch_of_claims_loses_no_outcome_because_of_a_locked_row(
    store: SqlStore, postgres_url: str
) -> None:
    pauses = [await paused(store, "a", "b") for _ in range(8)]
    claims = [a_claim(pause, call_id) for pause in pauses for call_id in "ab"]
    async with lock_row(postgres_url, pauses[5].run.task_id):
        arrivals = await store.claim(claims, HERE, 8)
    assert [type(each) for each in arrivals] == [
        TaskLocked if each in (10, 11) else (StillWaiting, JoinCompleted)[each % 2]
        for each in range(16)
    ]
    repeated = await store.claim(claims[10:12], HERE, 1)
    assert [type(each) for each in repeated] == [StillWaiting, JoinCompleted]


async def test_a_repeated_claim_in_a_batch_is_not_recorded_while_its_row_is_locked(
    store: SqlStore, postgres_url: str
) -> None:
    pause = await paused(store)
    claim = a_claim(pause)
    async with lock_row(postgres_url, pause.run.task_id):
        assert (
            await store.claim([claim, claim], HERE, 1)
            == [TaskLocked(pause.run.task_id, sub(pause, "a"))] * 2
        )
    first, second = await store.claim([claim, claim], HERE, 1)
    assert isinstance(first, JoinCompleted)
    assert second == DuplicateOutcome(pause.run.task_id, sub(pause, "a"))


@pytest.mark.parametrize("row", _LOCK_STATEMENTS)
async def test_an_end_and_a_pause_do_not_wait_for_anothers_locked_row(
    store: SqlStore, postgres_url: str, row: str
) -> None:
    waiting = [await paused(store, "a", "b") for _ in range(4)]
    # one call each stays to be cancelled, so that rows are left below the task
    for pause in waiting:
        await store.claim([a_claim(pause, "a"), a_claim(pause, "b")], HERE, 4)
    locked_end, other_end, locked_pause, other_pause = [
        Run(pause_.run.task_id, AGENT, a_run().id, fence=2, generation=1) for pause_ in waiting
    ]
    async with (
        lock_row(postgres_url, locked_end.task_id, row),
        lock_row(postgres_url, locked_pause.task_id, row),
    ):
        steps = await asyncio.gather(
            store.end([an_end(locked_end)]),
            store.end([an_end(other_end)]),
            store.pause([a_pause(run=locked_pause)]),
            store.pause([a_pause(run=other_pause)]),
            return_exceptions=True,
        )
    kinds = [type(step) if isinstance(step, BaseException) else type(one(step)) for step in steps]
    assert kinds == [RowLocked, EndCommitted, RowLocked, PauseCommitted]
    assert isinstance(one(await store.end([an_end(locked_end)])), EndCommitted)
    assert isinstance(one(await store.pause([a_pause(run=locked_pause)])), PauseCommitted)


async def test_a_release_a_cancel_and_a_begin_wait_only_for_their_own_rows(
    store: SqlStore, postgres_url: str
) -> None:
    run, waiting, other = (await resumed(store)).run, await paused(store), await paused(store)
    async with lock_row(postgres_url, run.task_id), lock_row(postgres_url, waiting.run.task_id):
        with pytest.raises(RowLocked):
            await store.release([a_release(run)])
        with pytest.raises(RowLocked):
            await store.begin([a_begin(a_run(run.task_id))])
        first, second = await store.cancel(
            [a_cancel(waiting.run.task_id), a_cancel(other.run.task_id)]
        )
        assert first == TaskLocked(waiting.run.task_id)
        assert isinstance(second, CancelCommitted)
    assert await store.release([a_release(run)]) == [True]
    assert isinstance(one(await store.cancel([a_cancel(waiting.run.task_id)])), CancelCommitted)


@pytest.mark.parametrize("table", ["agent_checkpoints", "agent_subtask_records"])
async def test_a_checkpoint_waits_only_for_its_own_rows(
    store: SqlStore, postgres_url: str, table: str
) -> None:
    locked, other = await operating(store), await operating(store)
    await saved(store, locked)
    holder = await asyncpg.connect(postgres_url)
    try:
        async with holder.transaction():
            await holder.fetch(
                f"SELECT 1 FROM {table} WHERE analysis_id = $1 FOR UPDATE", locked.task_id
            )
            with pytest.raises(RowLocked):
                await store.end([an_end(locked)])
            await saved(store, other)
            assert isinstance(one(await store.end([an_end(other)])), EndCommitted)
    finally:
        await holder.close()
    assert isinstance(one(await store.end([an_end(locked)])), EndCommitted)


@pytest.mark.parametrize("row", ["task", "signal"])
async def test_signals_and_pauses_wait_only_for_their_own_rows(
    store: SqlStore, postgres_url: str, row: str
) -> None:
    locked, other = await begin_runs(store, 2)
    for run in (locked, other):
        await store.signal([a_signal(run.task_id)])
    async with lock_row(postgres_url, locked.task_id, row):
        results = await store.signal([a_signal(locked.task_id), a_signal(other.task_id)])
        if row == "task":
            assert results[0] == TaskLocked(locked.task_id)
        assert results[1] == MailAccepted()
        pauses = [a_pause(a_receive(), run=run) for run in (locked, other)]
        with pytest.raises(RowLocked):
            await store.pause(pauses)
        assert task_ids(await store.acquire(HERE, 10)) == [other.task_id]
    repeated = await store.pause(pauses[:1])
    assert repeated == [PauseCommitted(TaskState.READY, ())]
    assert task_ids(await store.acquire(HERE, 10)) == [locked.task_id]


@pytest.mark.parametrize("row", _LOCK_STATEMENTS)
async def test_expired_calls_are_handled_while_another_row_is_locked(
    store: SqlStore, postgres_url: str, clock: FakeClock, row: str
) -> None:
    calls = [a_call("a", timeout=SECOND)]
    locked, other = await paused(store, *calls), await paused(store, *calls)
    clock.advance(2 * SECOND)
    async with lock_row(postgres_url, locked.run.task_id, row):
        expired = await store.expire(HERE, 10, 10)
        assert [each.task_id for each in expired] == [other.run.task_id]
    expired = await store.expire(HERE, 10, 10)
    assert [each.task_id for each in expired] == [locked.run.task_id]


@pytest.mark.parametrize("table", ["agent_checkpoints", "agent_subtask_records"])
async def test_tombstones_are_purged_while_the_row_of_one_is_locked(
    store: SqlStore, postgres_url: str, clock: FakeClock, table: str
) -> None:
    locked, other = await operating(store), await operating(store)
    for run in (locked, other):
        await saved(store, run)
        await store.end([an_end(run, TaskState.FAILED, reason="broken")])
    clock.advance(SECOND * 10)
    await store.confirm_sent(await store.unsent(AGENT, 10))
    clock.advance(60 * 24 * HOUR)
    holder = await asyncpg.connect(postgres_url)
    try:
        async with holder.transaction():
            await holder.fetch(
                f"SELECT 1 FROM {table} WHERE analysis_id = $1 FOR UPDATE", locked.task_id
            )
            assert await store.purge(AGENT, 10) == 1
    finally:
        await holder.close()
    assert await store.purge(AGENT, 10) == 1


async def test_a_locked_task_does_not_make_its_calls_time_out(
    store: SqlStore, postgres_url: str, clock: FakeClock
) -> None:
    pause = await paused(store, a_call("a", timeout=HOUR, idle_timeout=10 * SECOND))
    async with lock_row(postgres_url, pause.run.task_id):
        for _ in range(3):
            clock.advance(8 * SECOND)
            assert one(await store.record_progress([a_progress(pause)])) is not None
    assert await store.expire(HERE, 10, 10) == []


async def test_confirmations_do_not_wait_for_a_locked_row(
    store: SqlStore, postgres_url: str, clock: FakeClock
) -> None:
    pauses: list[Pause] = [a_pause("a", "b") for _ in range(2)]
    sent = [
        send
        for each in await store.pause(pauses)
        if isinstance(each, PauseCommitted)
        for send in each.dispatches
    ]
    runs = [(await resumed(store)).run for _ in range(2)]
    replies = [
        each.reply
        for each in await store.end([an_end(run) for run in runs])
        if isinstance(each, EndCommitted)
    ]
    async with (
        lock_row(postgres_url, pauses[0].run.task_id),
        lock_row(postgres_url, runs[0].task_id),
    ):
        await store.confirm_sent([*sent, *replies])
        clock.advance(HOUR)
        assert await store.unsent(AGENT, 10) == []
    assert {send.task_id for send in await store.unsent(AGENT, 10)} <= {
        pauses[0].run.task_id,
        runs[0].task_id,
    }


async def test_a_lock_on_the_whole_table_counts_as_an_outage(
    store: SqlStore, postgres_url: str
) -> None:
    run = await begun(store)
    holder = await asyncpg.connect(postgres_url)
    try:
        async with holder.transaction():
            await holder.execute("LOCK TABLE agent_paused_tasks IN ACCESS EXCLUSIVE MODE")
            for step in (
                store.renew([run], HERE),
                store.lookup([run.task_id]),
                store.claim([a_claim(a_pause())], HERE, 1),
                store.expire(HERE, 1, 1),
            ):
                with pytest.raises(StoreUnavailable) as outage:
                    await step
                assert not isinstance(outage.value, RowLocked)
    finally:
        await holder.close()
    assert await store.renew([run], HERE) == []


async def test_general_transactions_of_a_batch_wait_for_no_locked_task(
    postgres_url: str, clock: FakeClock
) -> None:
    minute = timedelta(minutes=1)
    store = SqlStore(
        postgres_url,
        namespace="test",
        clock=clock,
        command_timeout=2 * minute,
        lock_timeout=minute,
    )
    await store.open()
    locked, free = [await operating(store) for _ in range(2)]  # the fast path leaves them out
    async with lock_row(postgres_url, locked.task_id):
        ends = [asyncio.create_task(store.end([an_end(run)])) for run in (locked, free)]
        assert isinstance(one(await ends[1]), EndCommitted)
        assert not ends[0].done()
        assert not store._locked_rows.skip_locked  # no statement has waited for the lock in vain
    assert isinstance(one(await ends[0]), EndCommitted)
    await store.close()


async def test_concurrent_steps_share_a_general_transaction(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    transactions, original = list[object](), store._database.transact

    async def transact(*given: Any) -> Any:
        transactions.append(given)
        return await original(*given)

    monkeypatch.setattr(store._database, "transact", transact)
    runs = await asyncio.gather(*(operating(store) for _ in range(10)))
    assert len(transactions) == 1
    await asyncio.gather(*(store.end([an_end(run)]) for run in runs))
    assert len(transactions) == 2


async def test_writes_waiting_for_a_locked_row_do_not_use_up_the_connections(
    store: SqlStore, postgres_url: str
) -> None:
    """More steps wait for locked rows than there are connections; another task still proceeds."""
    locked = [(await resumed(store)).run for _ in range(30)]
    other = (await resumed(store)).run
    holder = await asyncpg.connect(postgres_url)
    try:
        async with holder.transaction():
            for run in locked:
                await holder.fetch(_LOCK_STATEMENTS["task"], run.task_id)
            ends = [asyncio.create_task(store.end([an_end(run)])) for run in locked]
            assert isinstance(one(await store.end([an_end(other)])), EndCommitted)
            results = await asyncio.gather(*ends, return_exceptions=True)
            assert {type(result) for result in results} == {RowLocked}
    finally:
        await holder.close()
    assert await state_of(store, other.task_id) is TaskState.COMPLETED
