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

from concurrent_answer import concurrent_answer
from faults import CommitCuttingProxy, LostPart
from meshpoint.adapters.sql import SqlStore
from meshpoint.adapters.sql.database import Database, Transaction
from meshpoint.adapters.sql.locking import lock_tasks
from meshpoint.errors import CommitInDoubt, StoreUnavailable
from meshpoint.model.calls import FIRST
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.outcomes import Failed, FailureKind
from meshpoint.model.tasks import PlannedCall, TaskState
from meshpoint.model.transitions import (
    CancelBeforeRequest,
    EndCommitted,
    Fenced,
    JoinCompleted,
    Pause,
    PauseCommitted,
    TaskReady,
)
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

_CLAIM_PROCESS = Path(__file__).with_name("claim_process.py")


def make_store(
    url: str,
    *,
    command_timeout: timedelta = timedelta(seconds=30),
    dispatch_lease: timedelta = timedelta(seconds=5),
) -> SqlStore:
    """A store that waits a long time for locks, so that a busy machine causes no timeouts."""
    return SqlStore(
        url,
        namespace="test",
        command_timeout=command_timeout,
        dispatch_lease=dispatch_lease,
        lock_timeout=timedelta(seconds=30),
    )


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[SqlStore]:
    store = make_store(database_url)
    await store.open()
    yield store
    await store.close()


class ClaimProcess:
    """A process that claims."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout

    @classmethod
    async def start(cls, url: str, name: str) -> ClaimProcess:
        """Start one, and wait until it is connected."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(_CLAIM_PROCESS), url, name, stdin=pipe, stdout=pipe
        )
        process_ = cls(process)
        assert await process_._stdout.readline() == b"ready\n"
        return process_

    async def claim(self, calls: list[tuple[str, str]]) -> list[tuple[str, str, int]]:
        """Claim, and return for each result: kind, task, number of outcomes."""
        printed, _ = await self._process.communicate(json.dumps(calls).encode() + b"\n")
        return [
            (kind, task_id, count)
            for kind, task_id, count in map(json.loads, printed.splitlines())
        ]


async def test_concurrent_claims_from_four_processes_complete_each_join_once(
    store: SqlStore, database_url: str
) -> None:
    pauses = [await paused(store, "a", "b", "c", "d") for _ in range(4)]
    calls = [
        (str(pause.run.task_id), str(call.sub_task_id)) for pause in pauses for call in pause.calls
    ]
    claimants = await asyncio.gather(
        *(ClaimProcess.start(database_url, f"replica-{n}") for n in range(4))
    )
    results = [calls[4 * n :] + calls[: 4 * n] for n in range(4)]
    arrivals = [
        arrival
        for each in await asyncio.gather(
            *(
                process_number.claim(part)
                for process_number, part in zip(claimants, results, strict=True)
            )
        )
        for arrival in each
    ]
    assert Counter(kind for kind, _, _ in arrivals) == {
        "DuplicateOutcome": 48,
        "StillWaiting": 12,
        "JoinCompleted": 4,
    }
    last = [(task_id, count) for kind, task_id, count in arrivals if kind == "JoinCompleted"]
    assert sorted(last) == sorted((pause.run.task_id, 4) for pause in pauses)


async def test_four_processes_may_open_a_file_that_does_not_exist_yet(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/new.db"
    claimants = await asyncio.gather(*(ClaimProcess.start(url, f"replica-{n}") for n in range(4)))
    assert await asyncio.gather(*(process_.claim([]) for process_ in claimants)) == [
        [],
        [],
        [],
        [],
    ]


async def test_a_cancel_for_another_agent_changes_nothing(store: SqlStore) -> None:
    pause = await paused(store)
    cancel = replace(a_cancel(pause.run.task_id), agent=AgentName("stranger"))
    assert await store.cancel([cancel]) == [CancelBeforeRequest()]
    shown = await store.task(pause.run.task_id)
    assert shown is not None
    assert shown[0].state is TaskState.WAITING


async def _write_all_kinds(store: SqlStore, pauses: list[Pause], call_ids: str) -> int:
    """Make every kind of write to calls, in batches; return the number of joins met here."""
    joins_met = 0
    for call_id in call_ids:
        arrivals = await store.claim(
            [a_claim(pause, call_id) for pause in pauses], HERE, len(pauses)
        )
        joins_met += sum(isinstance(arrival, JoinCompleted) for arrival in arrivals)
        committed = [
            send
            for result in await store.pause(pauses)
            if isinstance(result, PauseCommitted)
            for send in result.dispatches
        ]
        await store.confirm_sent(committed)
        # some of what others are sending now
        await store.confirm_sent((await store.unsent(AGENT, 100))[:7])
        await store.confirm_sent(
            [
                notice
                for arrival in arrivals
                if isinstance(arrival, JoinCompleted)
                for notice in arrival.cancels
            ]
        )
    return joins_met


@pytest.mark.servers
async def test_overlapping_batches_never_deadlock(postgres_url: str) -> None:
    stores = [make_store(postgres_url, dispatch_lease=timedelta()) for _ in range(4)]
    pauses = [
        a_pause("a", "b", "c", "d", join=FIRST if n % 2 else a_pause().join) for n in range(20)
    ]
    assert all(isinstance(result, PauseCommitted) for result in await stores[0].pause(pauses))
    reversed_ = pauses[::-1]
    joins_met = await asyncio.gather(
        _write_all_kinds(stores[0], pauses, "abcd"),
        _write_all_kinds(stores[1], reversed_, "dcba"),
        _write_all_kinds(stores[2], pauses[10:] + pauses[:10], "bdac"),
        _write_all_kinds(stores[3], reversed_[10:] + reversed_[:10], "cadb"),
    )
    assert sum(joins_met) == len(pauses)
    await asyncio.gather(*(store.close() for store in stores))
    assert await _deadlock_count(postgres_url) == 0


async def _deadlock_count(url: str) -> int:
    connection = await asyncpg.connect(url)
    try:
        count: int = await connection.fetchval(
            "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        )
        return count
    finally:
        await connection.close()


@pytest.fixture
async def cutter(postgres_url: str) -> AsyncIterator[CommitCuttingProxy]:
    async with CommitCuttingProxy(postgres_url) as cutter:
        yield cutter


@pytest.fixture
async def far_store(cutter: CommitCuttingProxy) -> AsyncIterator[SqlStore]:
    """A store behind the cutter, whose connection has committed before."""
    store = SqlStore(cutter.url, namespace="test", pool_size=1)
    await store.open()
    await paused(store)
    yield store
    await store.close()


@pytest.mark.servers
@pytest.mark.parametrize("lost", LostPart)
async def test_a_pause_whose_commit_is_in_doubt_finds_out_whether_it_committed(
    far_store: SqlStore, cutter: CommitCuttingProxy, lost: LostPart
) -> None:
    pause = a_pause("a", "b")
    cutter.cut_next(lost)
    committed = one(await far_store.pause([pause]))
    assert isinstance(committed, PauseCommitted)
    assert [send.sub_task_id for send in committed.dispatches] == [
        call.sub_task_id for call in pause.calls
    ]
    assert cutter.cuts == 1


@pytest.mark.servers
@pytest.mark.parametrize("lost", LostPart)
async def test_a_pause_that_cannot_find_out_whether_it_committed_can_be_repeated(
    far_store: SqlStore, cutter: CommitCuttingProxy, lost: LostPart
) -> None:
    pause = a_pause("a", "b")
    cutter.cut_next(lost, lost)
    with pytest.raises(CommitInDoubt):
        await far_store.pause([pause])
    assert await _is_paused(far_store, pause) is (lost is LostPart.RESPONSE)
    repeated = one(await far_store.pause([pause]))
    assert isinstance(repeated, PauseCommitted)
    assert [send.sub_task_id for send in repeated.dispatches] == [
        call.sub_task_id for call in pause.calls
    ]
    assert cutter.cuts == 2


@pytest.mark.servers
@pytest.mark.parametrize("cuts", [1, 2])
@pytest.mark.parametrize("lost", LostPart)
async def test_a_claim_whose_commit_is_in_doubt_is_repeated(
    far_store: SqlStore, cutter: CommitCuttingProxy, lost: LostPart, cuts: int
) -> None:
    pause = await paused(far_store, "a", "b")
    claims = [a_claim(pause, "b"), a_claim(pause, "a")]
    cutter.cut_next(*[lost] * cuts)
    if cuts > 1:
        with pytest.raises(CommitInDoubt):
            await far_store.claim(claims, HERE, 1)
    arrival = (await far_store.claim(claims, HERE, 1))[-1]
    assert isinstance(arrival, JoinCompleted)
    assert arrival.task.run.fence == 2
    assert list(outcomes(arrival.task)) == ["a", "b"]
    assert cutter.cuts == cuts


@pytest.mark.servers
@pytest.mark.parametrize("cuts", [1, 2])
@pytest.mark.parametrize("lost", LostPart)
async def test_an_end_whose_commit_is_in_doubt_is_repeated(
    far_store: SqlStore, cutter: CommitCuttingProxy, lost: LostPart, cuts: int
) -> None:
    end = an_end((await resumed(far_store)).run)
    cutter.cut_next(*[lost] * cuts)
    if cuts > 1:
        with pytest.raises(CommitInDoubt):
            await far_store.end([end])
    assert isinstance(one(await far_store.end([end])), EndCommitted)
    assert cutter.cuts == cuts


@pytest.mark.servers
async def test_a_pause_in_doubt_stays_in_doubt_while_the_database_is_unavailable(
    far_store: SqlStore, cutter: CommitCuttingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pause that committed but cannot be confirmed must not be reported as failed.

    Its repetition finds nothing to do, and then the database is unavailable. If the pause were
    reported as certain to have failed, the task would also continue in the process.
    """
    pause = a_pause("a")

    async def unavailable(body: object, on_lock: object) -> None:
        raise StoreUnavailable("no connection is left")

    cutter.cut_next(LostPart.RESPONSE)
    with monkeypatch.context() as patched:
        patched.setattr(far_store._database, "transact", unavailable)
        with pytest.raises(CommitInDoubt):
            await far_store.pause([pause])
    assert await _is_paused(far_store, pause)


@pytest.mark.servers
async def test_a_locked_task_does_not_block_others(postgres_url: str) -> None:
    store = make_store(postgres_url)
    await store.open()
    locked, free = (await resumed(store)).run, (await resumed(store)).run
    holder = await asyncpg.connect(postgres_url)
    lock = holder.transaction()
    await lock.start()
    await holder.execute(
        "SELECT 1 FROM agent_paused_tasks WHERE logical_task_id = $1 FOR NO KEY UPDATE",
        locked.task_id,
    )
    ending = asyncio.create_task(store.end([an_end(locked)]))
    assert isinstance(one(await store.end([an_end(free)])), EndCommitted)
    assert not ending.done()
    await lock.rollback()
    assert isinstance(one(await ending), EndCommitted)
    await holder.close()
    await store.close()


@pytest.mark.servers
async def test_a_task_rescued_while_its_claim_was_read_does_not_belong_to_the_claim(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = make_store(postgres_url), make_store(postgres_url)
    await store.open()
    pause = await paused(store, "a", "b")
    assert store._fast_path is not None
    read = store._fast_path._reads.read

    async def delayed_read(statement: str, *values: object) -> object:
        await holder.execute(
            "UPDATE agent_paused_tasks SET wake_at = 0 WHERE logical_task_id = $1",
            pause.run.task_id,
        )
        assert len(await other.rescue(HERE, 1)) == 1  # by the same replica's sweeper
        return await read(statement, *values)

    holder = await asyncpg.connect(postgres_url)
    monkeypatch.setattr(store._fast_path._reads, "read", delayed_read)
    async with concurrent_answer(postgres_url, pause, "a"):  # so that there is an outcome to read
        claiming = asyncio.create_task(store.claim([a_claim(pause, "b")], HERE, 1))
    assert isinstance(one(await claiming), TaskReady)
    await holder.close()
    await other.close()
    await store.close()


@pytest.mark.servers
async def test_a_claim_sees_an_outcome_that_was_recorded_while_it_waited(
    postgres_url: str,
) -> None:
    store = make_store(postgres_url)
    await store.open()
    pause = await paused(store, "a", "b", "c")
    await store.claim([a_claim(pause, "c")], HERE, 1)
    async with concurrent_answer(postgres_url, pause, "a"):
        claiming = asyncio.create_task(store.claim([a_claim(pause, "b")], HERE, 1))
    arrival = one(await claiming)
    assert isinstance(arrival, JoinCompleted)
    assert [call_id for call_id, _, _ in arrival.task.outcomes] == ["a", "b", "c"]
    await store.close()


async def _is_paused(store: SqlStore, pause: Pause) -> bool:
    return pause.run.task_id in await store.lookup([pause.run.task_id])


@pytest.mark.servers
async def test_connections_that_broke_while_idle_are_replaced_silently(postgres_url: str) -> None:
    async with Proxy(postgres_url) as proxy:
        store = make_store(proxy.url)
        await asyncio.gather(*(paused(store) for _ in range(5)))
        proxy.cut()
        await paused(store)
        await store.close()


@pytest.mark.servers
async def test_a_database_that_refuses_connections_is_unavailable_then_recovers(
    postgres_url: str,
) -> None:
    async with Proxy(postgres_url) as proxy:
        store = make_store(proxy.url)
        await paused(store)
        proxy.refuse()
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await store.pause([a_pause()])
        await proxy.accept()
        await paused(store)
        await store.close()


@pytest.mark.servers
async def test_a_pause_is_not_in_doubt_when_no_statement_was_sent(postgres_url: str) -> None:
    refused = PlannedCall(
        TaskId("refused"),
        "b",
        PEER,
        b"{}",
        timedelta(minutes=1),
        outcome=Failed(FailureKind.ERROR, "too deep"),
    )
    async with Proxy(postgres_url) as proxy:
        store = make_store(proxy.url)
        await paused(store)
        proxy.refuse()
        pause = a_pause()
        with pytest.raises(StoreUnavailable) as error_info:
            await store.pause([replace(pause, calls=(*pause.calls, refused))])
        assert not isinstance(error_info.value, CommitInDoubt)
        await proxy.accept()
        await store.close()


@pytest.mark.servers
async def test_a_database_that_stops_responding_is_detected(postgres_url: str) -> None:
    async with Proxy(postgres_url) as proxy:
        store = make_store(proxy.url, command_timeout=timedelta(seconds=0.2))
        await pause_until_success(store)
        proxy.silence()
        with pytest.raises(StoreUnavailable):
            await store.pause([a_pause()])
        proxy.cut()
        proxy.resume()
        await pause_until_success(store)
        await store.close()


async def pause_until_success(store: SqlStore) -> None:
    """Pause a task, repeatedly if a busy machine takes longer than the store's timeout."""
    while True:
        with suppress(StoreUnavailable):
            await paused(store)
            return


@pytest.mark.servers
async def test_a_process_frozen_inside_a_transaction_does_not_block_its_task(
    postgres_url: str,
) -> None:
    store, unfreeze = make_store(postgres_url), asyncio.Event()
    locked = asyncio.Event()
    pause = await paused(store)
    database = Database(
        postgres_url,
        options=store._database.options,
        command_timeout=timedelta(seconds=30),
        transaction_timeout=timedelta(milliseconds=200),
        pool_size=1,
        clock=None,
    )

    async def block_forever(tx: Transaction) -> None:
        await lock_tasks(tx, [pause.run.task_id])
        locked.set()
        await unfreeze.wait()

    frozen = asyncio.create_task(database.write(block_forever))
    await locked.wait()
    assert isinstance(one(await store.claim([a_claim(pause)], HERE, 1)), JoinCompleted)
    unfreeze.set()
    with pytest.raises(StoreUnavailable):
        await frozen
    await database.close()
    await store.close()


async def test_a_zombie_in_a_batch_changes_nothing_and_does_not_affect_the_others(
    store: SqlStore, database_url: str
) -> None:
    other = make_store(database_url)
    zombie, alive = (await resumed(store)).run, (await resumed(store)).run
    await store.release([a_release(zombie)])
    owner = one(await other.acquire(THERE, 1)).run
    assert owner.task_id == zombie.task_id
    ends = await asyncio.gather(
        store.end([an_end(zombie, TaskState.FAILED), an_end(alive)]), other.end([an_end(owner)])
    )
    assert [type(end) for batch in ends for end in batch] == [Fenced, EndCommitted, EndCommitted]
    shown = await store.task(zombie.task_id)
    assert shown is not None
    assert shown[0].state is TaskState.COMPLETED
    await other.close()
