"""Replicas that write to one database concurrently, and a network that fails in between."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import asyncpg
import pytest

from beside import answered_beside
from faults import CommitCutter, Lost
from meshpoint.adapters.sql import SqlStore
from meshpoint.adapters.sql.database import Database, Transaction
from meshpoint.adapters.sql.locking import lock_tasks
from meshpoint.errors import CommitInDoubt, StoreUnavailable
from meshpoint.model.calls import FIRST
from meshpoint.model.checkpoint import (
    AllArrived,
    CancelBeforeRequest,
    Committed,
    Ended,
    Fenced,
    MadeReady,
    Pause,
    PlannedCall,
    TaskState,
)
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.outcomes import Failed, FailureKind
from meshpoint.testing.conformance.build import (
    AGENT,
    HERE,
    PEER,
    THERE,
    a_cancel,
    a_claim,
    a_pause,
    a_release,
    an_end,
    one,
    outcomes,
    paused,
    resumed,
)
from servers import Proxy

_CLAIMANT = Path(__file__).with_name("claimant.py")


def a_store(
    url: str,
    *,
    command_timeout: timedelta = timedelta(seconds=30),
    dispatch_lease: timedelta = timedelta(seconds=5),
) -> SqlStore:
    return SqlStore(url, namespace="test", command_timeout=command_timeout, dispatch_lease=dispatch_lease)


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[SqlStore]:
    store = a_store(database_url)
    await store.open()
    yield store
    await store.close()


class Claimant:
    """A process that claims."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout

    @classmethod
    async def start(cls, url: str, name: str) -> Claimant:
        """Start one, and wait until it is connected."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(_CLAIMANT), url, name, stdin=pipe, stdout=pipe
        )
        claimant = cls(process)
        assert await claimant._stdout.readline() == b"ready\n"
        return claimant

    async def claim(self, calls: list[tuple[str, str]]) -> list[tuple[str, str, int]]:
        """Claim, and return for each result: kind, task, number of outcomes."""
        printed, _ = await self._process.communicate(json.dumps(calls).encode() + b"\n")
        return [(kind, task_id, count) for kind, task_id, count in map(json.loads, printed.splitlines())]


async def test_sixty_four_claims_from_four_processes_have_sixteen_winners(store: SqlStore, database_url: str) -> None:
    pauses = [await paused(store, "a", "b", "c", "d") for _ in range(4)]
    calls = [(str(pause.run.task_id), str(call.sub_task_id)) for pause in pauses for call in pause.calls]
    claimants = await asyncio.gather(*(Claimant.start(database_url, f"replica-{n}") for n in range(4)))
    told = [calls[4 * n :] + calls[: 4 * n] for n in range(4)]
    arrivals = [
        arrival
        for each in await asyncio.gather(*(who.claim(part) for who, part in zip(claimants, told, strict=True)))
        for arrival in each
    ]
    assert Counter(kind for kind, _, _ in arrivals) == {"Duplicate": 48, "StillWaiting": 12, "AllArrived": 4}
    last = [(task_id, count) for kind, task_id, count in arrivals if kind == "AllArrived"]
    assert sorted(last) == sorted((pause.run.task_id, 4) for pause in pauses)


async def test_four_processes_may_open_a_file_that_does_not_exist_yet(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/new.db"
    claimants = await asyncio.gather(*(Claimant.start(url, f"replica-{n}") for n in range(4)))
    assert await asyncio.gather(*(claimant.claim([]) for claimant in claimants)) == [[], [], [], []]


async def test_a_cancel_for_another_agent_touches_nothing(store: SqlStore) -> None:
    pause = await paused(store)
    cancel = replace(a_cancel(pause.run.task_id), agent=AgentName("stranger"))
    assert await store.cancel([cancel]) == [CancelBeforeRequest()]
    shown = await store.task(pause.run.task_id)
    assert shown is not None
    assert shown[0].state is TaskState.WAITING


async def _work_through(store: SqlStore, pauses: list[Pause], call_ids: str) -> int:
    """Make every kind of write to calls, in batches; return the number of joins met here."""
    met = 0
    for call_id in call_ids:
        arrivals = await store.claim([a_claim(pause, call_id) for pause in pauses], HERE, len(pauses))
        met += sum(isinstance(arrival, AllArrived) for arrival in arrivals)
        committed = [
            send
            for result in await store.pause(pauses)
            if isinstance(result, Committed)
            for send in result.dispatches
        ]
        await store.mark_sent(committed)
        # some of what others are sending now
        await store.mark_sent((await store.unsent(AGENT, 100))[:7])
        await store.mark_sent(
            [notice for arrival in arrivals if isinstance(arrival, AllArrived) for notice in arrival.cancels]
        )
    return met


@pytest.mark.servers
async def test_batches_that_overlap_in_any_order_never_deadlock(postgres_url: str) -> None:
    stores = [a_store(postgres_url, dispatch_lease=timedelta()) for _ in range(4)]
    pauses = [a_pause("a", "b", "c", "d", join=FIRST if n % 2 else a_pause().join) for n in range(20)]
    assert all(isinstance(result, Committed) for result in await stores[0].pause(pauses))
    backwards = pauses[::-1]
    met = await asyncio.gather(
        _work_through(stores[0], pauses, "abcd"),
        _work_through(stores[1], backwards, "dcba"),
        _work_through(stores[2], pauses[10:] + pauses[:10], "bdac"),
        _work_through(stores[3], backwards[10:] + backwards[:10], "cadb"),
    )
    assert sum(met) == len(pauses)
    await asyncio.gather(*(store.close() for store in stores))
    assert await _deadlocks(postgres_url) == 0


async def _deadlocks(url: str) -> int:
    connection = await asyncpg.connect(url)
    try:
        count: int = await connection.fetchval(
            "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        )
        return count
    finally:
        await connection.close()


@pytest.fixture
async def cutter(postgres_url: str) -> AsyncIterator[CommitCutter]:
    async with CommitCutter(postgres_url) as cutter:
        yield cutter


@pytest.fixture
async def far_store(cutter: CommitCutter) -> AsyncIterator[SqlStore]:
    """A store behind the cutter, whose connection has committed before."""
    store = SqlStore(cutter.url, namespace="test", pool_size=1)
    await store.open()
    await paused(store)
    yield store
    await store.close()


@pytest.mark.servers
@pytest.mark.parametrize("lost", Lost)
async def test_a_pause_whose_commit_is_in_doubt_finds_out(
    far_store: SqlStore, cutter: CommitCutter, lost: Lost
) -> None:
    pause = a_pause("a", "b")
    cutter.cut_next(lost)
    committed = one(await far_store.pause([pause]))
    assert isinstance(committed, Committed)
    assert [send.sub_task_id for send in committed.dispatches] == [call.sub_task_id for call in pause.calls]
    assert cutter.cuts == 1


@pytest.mark.servers
@pytest.mark.parametrize("lost", Lost)
async def test_a_pause_that_cannot_find_out_is_repeated(
    far_store: SqlStore, cutter: CommitCutter, lost: Lost
) -> None:
    pause = a_pause("a", "b")
    cutter.cut_next(lost, lost)
    with pytest.raises(CommitInDoubt):
        await far_store.pause([pause])
    assert await _is_there(far_store, pause) is (lost is Lost.ANSWER)
    again = one(await far_store.pause([pause]))
    assert isinstance(again, Committed)
    assert [send.sub_task_id for send in again.dispatches] == [call.sub_task_id for call in pause.calls]
    assert cutter.cuts == 2


@pytest.mark.servers
@pytest.mark.parametrize("cuts", [1, 2])
@pytest.mark.parametrize("lost", Lost)
async def test_a_claim_whose_commit_is_in_doubt_is_repeated(
    far_store: SqlStore, cutter: CommitCutter, lost: Lost, cuts: int
) -> None:
    pause = await paused(far_store, "a", "b")
    claims = [a_claim(pause, "b"), a_claim(pause, "a")]
    cutter.cut_next(*[lost] * cuts)
    if cuts > 1:
        with pytest.raises(CommitInDoubt):
            await far_store.claim(claims, HERE, 1)
    arrival = (await far_store.claim(claims, HERE, 1))[-1]
    assert isinstance(arrival, AllArrived)
    assert arrival.task.run.fence == 2
    assert list(outcomes(arrival.task)) == ["a", "b"]
    assert cutter.cuts == cuts


@pytest.mark.servers
@pytest.mark.parametrize("cuts", [1, 2])
@pytest.mark.parametrize("lost", Lost)
async def test_an_end_whose_commit_is_in_doubt_is_repeated(
    far_store: SqlStore, cutter: CommitCutter, lost: Lost, cuts: int
) -> None:
    end = an_end((await resumed(far_store)).run)
    cutter.cut_next(*[lost] * cuts)
    if cuts > 1:
        with pytest.raises(CommitInDoubt):
            await far_store.end([end])
    assert isinstance(one(await far_store.end([end])), Ended)
    assert cutter.cuts == cuts


@pytest.mark.servers
async def test_a_pause_in_doubt_stays_in_doubt_when_nobody_can_find_out(
    far_store: SqlStore, cutter: CommitCutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pause that committed but cannot be confirmed must not be reported as failed.

    Its repetition finds nothing to do, and then the database is unavailable. If the pause were
    reported as certain to have failed, the task would also continue in the process.
    """
    pause = a_pause("a")

    async def away(body: object) -> None:
        raise StoreUnavailable("no connection is left")

    cutter.cut_next(Lost.ANSWER)
    with monkeypatch.context() as patched:
        patched.setattr(far_store._database, "write", away)
        with pytest.raises(CommitInDoubt):
            await far_store.pause([pause])
    assert await _is_there(far_store, pause)


@pytest.mark.servers
async def test_a_locked_task_holds_up_no_other(postgres_url: str) -> None:
    store = a_store(postgres_url)
    await store.open()
    stuck, free = (await resumed(store)).run, (await resumed(store)).run
    holder = await asyncpg.connect(postgres_url)
    lock = holder.transaction()
    await lock.start()
    await holder.execute(
        "SELECT 1 FROM agent_paused_tasks WHERE logical_task_id = $1 FOR NO KEY UPDATE", stuck.task_id
    )
    ending = asyncio.create_task(store.end([an_end(stuck)]))
    assert isinstance(one(await store.end([an_end(free)])), Ended)
    assert not ending.done()
    await lock.rollback()
    assert isinstance(one(await ending), Ended)
    await holder.close()
    await store.close()


@pytest.mark.servers
async def test_a_task_that_was_taken_over_while_its_claim_was_read_is_not_this_runs(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = a_store(postgres_url), a_store(postgres_url)
    await store.open()
    pause = await paused(store, "a", "b")
    assert store._fast_path is not None
    read = store._fast_path._reads.read

    async def late(statement: str, *values: object) -> object:
        await holder.execute(
            "UPDATE agent_paused_tasks SET wake_at = 0 WHERE logical_task_id = $1", pause.run.task_id
        )
        assert len(await other.take_over(HERE, 1)) == 1  # by the same replica's sweeper
        return await read(statement, *values)

    holder = await asyncpg.connect(postgres_url)
    monkeypatch.setattr(store._fast_path._reads, "read", late)
    async with answered_beside(postgres_url, pause, "a"):  # so that there is an outcome to read
        claiming = asyncio.create_task(store.claim([a_claim(pause, "b")], HERE, 1))
    assert isinstance(one(await claiming), MadeReady)
    await holder.close()
    await other.close()
    await store.close()


@pytest.mark.servers
async def test_an_outcome_that_another_recorded_while_the_claim_waited_is_not_missed(postgres_url: str) -> None:
    store = a_store(postgres_url)
    await store.open()
    pause = await paused(store, "a", "b", "c")
    await store.claim([a_claim(pause, "c")], HERE, 1)
    async with answered_beside(postgres_url, pause, "a"):
        claiming = asyncio.create_task(store.claim([a_claim(pause, "b")], HERE, 1))
    arrival = one(await claiming)
    assert isinstance(arrival, AllArrived)
    assert [call_id for call_id, _, _ in arrival.task.outcomes] == ["a", "b", "c"]
    await store.close()


async def _is_there(store: SqlStore, pause: Pause) -> bool:
    return pause.run.task_id in await store.lookup([pause.run.task_id])


@pytest.mark.servers
async def test_connections_that_broke_while_idle_are_replaced_unseen(postgres_url: str) -> None:
    async with Proxy(postgres_url) as proxy:
        store = a_store(proxy.url)
        await asyncio.gather(*(paused(store) for _ in range(5)))
        proxy.cut()
        await paused(store)
        await store.close()


@pytest.mark.servers
async def test_a_database_that_refuses_is_away_and_then_back(postgres_url: str) -> None:
    async with Proxy(postgres_url) as proxy:
        store = a_store(proxy.url)
        await paused(store)
        proxy.refuse()
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await store.pause([a_pause()])
        await proxy.accept()
        await paused(store)
        await store.close()


@pytest.mark.servers
async def test_a_pause_with_a_refused_call_is_not_in_doubt_when_nothing_was_sent(postgres_url: str) -> None:
    refused = PlannedCall(
        TaskId("refused"), "b", PEER, b"{}", timedelta(minutes=1), outcome=Failed(FailureKind.ERROR, "too deep")
    )
    async with Proxy(postgres_url) as proxy:
        store = a_store(proxy.url)
        await paused(store)
        proxy.refuse()
        pause = a_pause()
        with pytest.raises(StoreUnavailable) as raised:
            await store.pause([replace(pause, calls=(*pause.calls, refused))])
        assert not isinstance(raised.value, CommitInDoubt)
        await proxy.accept()
        await store.close()


@pytest.mark.servers
async def test_a_database_that_falls_silent_is_noticed(postgres_url: str) -> None:
    async with Proxy(postgres_url) as proxy:
        store = a_store(proxy.url, command_timeout=timedelta(seconds=0.2))
        await until_paused(store)
        proxy.silence()
        with pytest.raises(StoreUnavailable):
            await store.pause([a_pause()])
        proxy.cut()
        proxy.resume()
        await until_paused(store)
        await store.close()


async def until_paused(store: SqlStore) -> None:
    """Pause a task, repeatedly if a busy machine takes longer than the store's timeout."""
    while True:
        with suppress(StoreUnavailable):
            await paused(store)
            return


@pytest.mark.servers
async def test_a_process_that_is_frozen_inside_a_transaction_keeps_nobody_from_its_task(postgres_url: str) -> None:
    store, still = a_store(postgres_url), asyncio.Event()
    locked = asyncio.Event()
    pause = await paused(store)
    database = Database(
        postgres_url,
        command_timeout=timedelta(seconds=30),
        transaction_timeout=timedelta(milliseconds=200),
        pool_size=1,
        clock=None,
    )

    async def stand_still(tx: Transaction) -> None:
        await lock_tasks(tx, [pause.run.task_id])
        locked.set()
        await still.wait()

    frozen = asyncio.create_task(database.write(stand_still))
    await locked.wait()
    assert isinstance(one(await store.claim([a_claim(pause)], HERE, 1)), AllArrived)
    still.set()
    with pytest.raises(StoreUnavailable):
        await frozen
    await database.close()
    await store.close()


async def test_a_zombie_in_the_middle_of_a_batch_changes_only_nothing(store: SqlStore, database_url: str) -> None:
    other = a_store(database_url)
    zombie, alive = (await resumed(store)).run, (await resumed(store)).run
    await store.release([a_release(zombie)])
    owner = one(await other.take(THERE, 1)).run
    assert owner.task_id == zombie.task_id
    ends = await asyncio.gather(
        store.end([an_end(zombie, TaskState.FAILED), an_end(alive)]), other.end([an_end(owner)])
    )
    assert [type(end) for batch in ends for end in batch] == [Fenced, Ended, Ended]
    shown = await store.task(zombie.task_id)
    assert shown is not None
    assert shown[0].state is TaskState.COMPLETED
    await other.close()
