"""Replicas that save, rescue and revive operations concurrently, on a network that fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta

import asyncpg
import pytest

from faults import CommitCuttingProxy, LostPart
from meshpoint.adapters.sql import SqlStore
from meshpoint.errors import CommitInDoubt
from meshpoint.model.operations import NotRevived, Refusal, Revived, ReviveResult
from meshpoint.model.subtasks import SaveCommitted
from meshpoint.model.tasks import TaskState
from meshpoint.model.transitions import BeginCommitted, Fenced, PauseCommitted, Save
from meshpoint.testing.conformance.build import (
    AGENT,
    HERE,
    THERE,
    a_begin,
    a_checkpoint,
    a_revive,
    an_end,
    an_operation,
    failed,
    memory_of,
    one,
    operating,
    remembering,
    remembering_pause,
    save,
    saved,
)

_TRIALS = 50
_WITHOUT_LEASE = replace(HERE, lease=-timedelta(minutes=1))
"""A replica whose leases have expired from the start, even if the clock is set back a little."""


@pytest.fixture
async def stores(database_url: str) -> AsyncIterator[tuple[SqlStore, SqlStore]]:
    """Two stores on one database, as two replicas open them.

    They wait a long time for each other's locks, because after a lock timeout a caller would only
    retry.
    """
    first, second = (
        SqlStore(database_url, namespace="test", lock_timeout=timedelta(seconds=30))
        for _ in range(2)
    )
    await first.open()
    await second.open()
    yield first, second
    await first.close()
    await second.close()


Stores = tuple[SqlStore, SqlStore]


def _single_refusal(results: list[ReviveResult]) -> Refusal:
    """The refusal; exactly one replica must have won."""
    winner = one(result for result in results if isinstance(result, Revived))
    assert not winner.repeated
    return one(result.refusal for result in results if isinstance(result, NotRevived))


async def test_only_one_of_two_replicas_revives_an_operation(stores: Stores) -> None:
    for _ in range(_TRIALS):
        run = await failed(stores[0])
        revivals = [a_revive(run.task_id) for _ in stores]
        results = await asyncio.gather(
            *(store.revive(revival) for store, revival in zip(stores, revivals, strict=True))
        )
        assert _single_refusal(results) is Refusal.RUNNING
        operation = await stores[0].operation(run.task_id)
        assert operation is not None
        assert operation.retry_count == 1


async def test_the_same_request_from_two_replicas_revives_an_operation_once(
    stores: Stores,
) -> None:
    for _ in range(_TRIALS // 5):
        revival = a_revive((await failed(stores[0])).task_id)
        results = await asyncio.gather(*(store.revive(revival) for store in stores))
        assert sorted(result.repeated for result in results if isinstance(result, Revived)) == [
            False,
            True,
        ]


async def test_only_one_of_two_operations_of_an_exclusive_agent_is_revived(stores: Stores) -> None:
    for _ in range(_TRIALS):
        ended = [await failed(store, exclusive=True) for store in stores]
        results = await asyncio.gather(
            *(
                store.revive(a_revive(run.task_id))
                for store, run in zip(stores, ended, strict=True)
            )
        )
        assert _single_refusal(results) is Refusal.OTHER_ACTIVE
        await stores[0].end([an_end(one(await stores[0].acquire(HERE, 10)).run, TaskState.FAILED)])


async def test_a_checkpoint_is_stored_before_the_next_owner_reads_it_or_never(
    stores: Stores,
) -> None:
    first, second = stores
    for trial in range(_TRIALS):
        first_run = one(
            await first.begin([replace(a_begin(operation=an_operation()), replica=_WITHOUT_LEASE)])
        )
        assert isinstance(first_run, BeginCommitted)
        saving = first.save(Save(first_run.run, a_checkpoint(first_run.run, 1, subject="old")))
        rescue_task = second.rescue(THERE, 1)
        if trial % 2:
            result, rescued = await asyncio.gather(saving, rescue_task)
        else:
            rescued, result = await asyncio.gather(rescue_task, saving)
        owner = one(rescued or await second.rescue(THERE, 1))
        assert owner.checkpoint == (1 if result == SaveCommitted() else 0)
        new = a_checkpoint(owner.run, owner.checkpoint + 1, subject="new")
        assert await second.save(Save(owner.run, new)) == SaveCommitted()
        assert (
            await first.save(Save(first_run.run, a_checkpoint(first_run.run, 9, subject="zombie")))
            == Fenced()
        )
        subjects = [each.subject for each in await first.history(first_run.run.task_id)]
        assert subjects == (["old", "new"] if result == SaveCommitted() else ["new"])


async def test_a_memory_is_stored_together_with_its_pause_or_not_at_all(stores: Stores) -> None:
    first, second = stores
    for trial in range(_TRIALS):
        first_run = one(
            await first.begin([replace(a_begin(operation=an_operation()), replica=_WITHOUT_LEASE)])
        )
        assert isinstance(first_run, BeginCommitted)
        await save(first, first_run.run, ["old"])
        pausing = first.pause([remembering_pause(first_run.run, 2, "new")])
        rescue_task = second.rescue(THERE, 1)
        if trial % 2:
            (result,), rescued = await asyncio.gather(pausing, rescue_task)
        else:
            rescued, (result,) = await asyncio.gather(rescue_task, pausing)
        assert isinstance(result, Fenced if rescued else PauseCommitted)
        assert [task.checkpoint for task in rescued] in ([], [1])
        assert await memory_of(second, first_run.run.task_id) == (
            (1, "old") if rescued else (2, "new")
        )


@pytest.fixture
async def cutter(postgres_url: str) -> AsyncIterator[CommitCuttingProxy]:
    async with CommitCuttingProxy(postgres_url) as cutter:
        yield cutter


@pytest.fixture
async def far_store(cutter: CommitCuttingProxy) -> AsyncIterator[SqlStore]:
    """A store behind the cutter, whose connection has committed before."""
    store = SqlStore(cutter.url, namespace="test", pool_size=1)
    await store.open()
    await failed(store)
    yield store
    await store.close()


@pytest.mark.servers
@pytest.mark.parametrize("cuts", [1, 2])
@pytest.mark.parametrize("lost", LostPart)
async def test_a_save_whose_commit_is_in_doubt_is_repeated(
    far_store: SqlStore, cutter: CommitCuttingProxy, lost: LostPart, cuts: int
) -> None:
    run = await operating(far_store)
    await saved(far_store, run)
    save = Save(run, a_checkpoint(run, 2))
    cutter.cut_next(*[lost] * cuts)
    if cuts > 1:
        with pytest.raises(CommitInDoubt):
            await far_store.save(save)
    assert await far_store.save(save) == SaveCommitted()
    assert [each.seq for each in await far_store.history(run.task_id)] == [1, 2]
    assert cutter.cuts == cuts


@pytest.mark.servers
@pytest.mark.parametrize("lost", LostPart)
async def test_a_pause_with_a_memory_whose_commit_is_in_doubt_is_repeated(
    far_store: SqlStore, cutter: CommitCuttingProxy, lost: LostPart
) -> None:
    run = await operating(far_store)
    await save(far_store, run, ["old"])
    pause = remembering_pause(run, 2, "new")
    cutter.cut_next(lost)
    with pytest.raises(CommitInDoubt):
        await far_store.pause([pause])
    assert await memory_of(far_store, run.task_id) == (
        (2, "new") if lost is LostPart.RESPONSE else (1, "old")
    )
    repeated = replace(pause, checkpoint=remembering(run, 3, "again"))
    assert isinstance(one(await far_store.pause([repeated])), PauseCommitted)
    assert await memory_of(far_store, run.task_id) == (
        (2, "new") if lost is LostPart.RESPONSE else (3, "again")
    )


@pytest.mark.servers
@pytest.mark.parametrize("lost", LostPart)
async def test_a_revival_whose_commit_is_in_doubt_is_repeated(
    far_store: SqlStore, cutter: CommitCuttingProxy, lost: LostPart
) -> None:
    run = await failed(far_store)
    revival = a_revive(run.task_id)
    cutter.cut_next(lost)
    with pytest.raises(CommitInDoubt):
        await far_store.revive(revival)
    assert await far_store.revive(revival) == Revived(
        run.task_id, AGENT, 1, repeated=lost is LostPart.RESPONSE
    )


@pytest.mark.servers
async def test_a_locked_operation_does_not_block_saves_of_another(postgres_url: str) -> None:
    store = SqlStore(postgres_url, namespace="test")
    await store.open()
    locked, free = await operating(store), await operating(store)
    holder = await asyncpg.connect(postgres_url)
    lock = holder.transaction()
    await lock.start()
    await holder.execute(
        "SELECT 1 FROM agent_paused_tasks WHERE logical_task_id = $1 FOR NO KEY UPDATE",
        locked.task_id,
    )
    saving = asyncio.create_task(store.save(Save(locked, a_checkpoint(locked))))
    await saved(store, free)
    assert not saving.done()
    await lock.rollback()
    assert await saving == SaveCommitted()
    await holder.close()
    await store.close()
