"""Replicas that save, rescue and revive operations concurrently, on a network that fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta

import asyncpg
import pytest

from faults import CommitCutter, Lost
from meshpoint.adapters.sql import SqlStore
from meshpoint.errors import CommitInDoubt
from meshpoint.model.checkpoint import Begun, Committed, Fenced, Save, TaskState
from meshpoint.model.operations import NotRevived, Refusal, Revived, ReviveResult
from meshpoint.model.subtasks import Saved
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
    one,
    operating,
    saved,
)
from meshpoint.testing.conformance.build_memory import memory_of, remembering, remembering_pause, save

_TRIALS = 50
_IMPATIENT = replace(HERE, lease=timedelta())
"""A replica whose leases expire at once."""


@pytest.fixture
async def stores(database_url: str) -> AsyncIterator[tuple[SqlStore, SqlStore]]:
    """Two stores on one database, as two replicas open them."""
    first, second = (SqlStore(database_url, namespace="test") for _ in range(2))
    await first.open()
    await second.open()
    yield first, second
    await first.close()
    await second.close()


Stores = tuple[SqlStore, SqlStore]


def _refused(results: list[ReviveResult]) -> Refusal:
    """The refusal; exactly one replica must have won."""
    winner = one(result for result in results if isinstance(result, Revived))
    assert not winner.again
    return one(result.refusal for result in results if isinstance(result, NotRevived))


async def test_of_two_who_revive_an_operation_one_does(stores: Stores) -> None:
    for _ in range(_TRIALS):
        run = await failed(stores[0])
        wishes = [a_revive(run.task_id) for _ in stores]
        results = await asyncio.gather(*(store.revive(wish) for store, wish in zip(stores, wishes, strict=True)))
        assert _refused(results) is Refusal.RUNNING
        operation = await stores[0].operation(run.task_id)
        assert operation is not None
        assert operation.retry_count == 1


async def test_the_same_wish_from_two_sides_revives_once(stores: Stores) -> None:
    for _ in range(_TRIALS // 5):
        wish = a_revive((await failed(stores[0])).task_id)
        results = await asyncio.gather(*(store.revive(wish) for store in stores))
        assert sorted(result.again for result in results if isinstance(result, Revived)) == [False, True]


async def test_of_two_operations_of_an_exclusive_agent_one_is_revived(stores: Stores) -> None:
    for _ in range(_TRIALS):
        over = [await failed(store, exclusive=True) for store in stores]
        results = await asyncio.gather(
            *(store.revive(a_revive(run.task_id)) for store, run in zip(stores, over, strict=True))
        )
        assert _refused(results) is Refusal.OTHER_ACTIVE
        await stores[0].end([an_end(one(await stores[0].take(HERE, 10)).run, TaskState.FAILED)])


async def test_a_checkpoint_is_there_before_the_next_owner_or_never(stores: Stores) -> None:
    first, second = stores
    for trial in range(_TRIALS):
        begun = one(await first.begin([replace(a_begin(operation=an_operation()), replica=_IMPATIENT)]))
        assert isinstance(begun, Begun)
        saving = first.save(Save(begun.run, a_checkpoint(begun.run, 1, subject="old")))
        taking = second.take_over(THERE, 1)
        if trial % 2:
            result, taken = await asyncio.gather(saving, taking)
        else:
            taken, result = await asyncio.gather(taking, saving)
        owner = one(taken or await second.take_over(THERE, 1))
        assert owner.checkpoint == (1 if result == Saved() else 0)
        new = a_checkpoint(owner.run, owner.checkpoint + 1, subject="new")
        assert await second.save(Save(owner.run, new)) == Saved()
        assert await first.save(Save(begun.run, a_checkpoint(begun.run, 9, subject="zombie"))) == Fenced()
        subjects = [each.subject for each in await first.history(begun.run.task_id)]
        assert subjects == (["old", "new"] if result == Saved() else ["new"])


async def test_a_memory_is_there_with_its_pause_or_never(stores: Stores) -> None:
    first, second = stores
    for trial in range(_TRIALS):
        begun = one(await first.begin([replace(a_begin(operation=an_operation()), replica=_IMPATIENT)]))
        assert isinstance(begun, Begun)
        await save(first, begun.run, ["old"])
        pausing = first.pause([remembering_pause(begun.run, 2, "new")])
        taking = second.take_over(THERE, 1)
        if trial % 2:
            (result,), taken = await asyncio.gather(pausing, taking)
        else:
            taken, (result,) = await asyncio.gather(taking, pausing)
        assert isinstance(result, Fenced if taken else Committed)
        assert [task.checkpoint for task in taken] in ([], [1])
        assert await memory_of(second, begun.run.task_id) == ((1, "old") if taken else (2, "new"))


@pytest.fixture
async def cutter(postgres_url: str) -> AsyncIterator[CommitCutter]:
    async with CommitCutter(postgres_url) as cutter:
        yield cutter


@pytest.fixture
async def far_store(cutter: CommitCutter) -> AsyncIterator[SqlStore]:
    """A store behind the cutter, whose connection has committed before."""
    store = SqlStore(cutter.url, namespace="test", pool_size=1)
    await store.open()
    await failed(store)
    yield store
    await store.close()


@pytest.mark.servers
@pytest.mark.parametrize("cuts", [1, 2])
@pytest.mark.parametrize("lost", Lost)
async def test_a_save_whose_commit_is_in_doubt_is_repeated(
    far_store: SqlStore, cutter: CommitCutter, lost: Lost, cuts: int
) -> None:
    run = await operating(far_store)
    await saved(far_store, run)
    save = Save(run, a_checkpoint(run, 2))
    cutter.cut_next(*[lost] * cuts)
    if cuts > 1:
        with pytest.raises(CommitInDoubt):
            await far_store.save(save)
    assert await far_store.save(save) == Saved()
    assert [each.seq for each in await far_store.history(run.task_id)] == [1, 2]
    assert cutter.cuts == cuts


@pytest.mark.servers
@pytest.mark.parametrize("lost", Lost)
async def test_a_pause_with_a_memory_whose_commit_is_in_doubt_is_repeated(
    far_store: SqlStore, cutter: CommitCutter, lost: Lost
) -> None:
    run = await operating(far_store)
    await save(far_store, run, ["old"])
    pause = remembering_pause(run, 2, "new")
    cutter.cut_next(lost)
    with pytest.raises(CommitInDoubt):
        await far_store.pause([pause])
    assert await memory_of(far_store, run.task_id) == ((2, "new") if lost is Lost.ANSWER else (1, "old"))
    again = replace(pause, checkpoint=remembering(run, 3, "again"))
    assert isinstance(one(await far_store.pause([again])), Committed)
    assert await memory_of(far_store, run.task_id) == ((2, "new") if lost is Lost.ANSWER else (3, "again"))


@pytest.mark.servers
@pytest.mark.parametrize("lost", Lost)
async def test_a_revival_whose_commit_is_in_doubt_is_repeated(
    far_store: SqlStore, cutter: CommitCutter, lost: Lost
) -> None:
    run = await failed(far_store)
    wish = a_revive(run.task_id)
    cutter.cut_next(lost)
    with pytest.raises(CommitInDoubt):
        await far_store.revive(wish)
    assert await far_store.revive(wish) == Revived(run.task_id, AGENT, 1, again=lost is Lost.ANSWER)


@pytest.mark.servers
async def test_an_operation_that_somebody_holds_keeps_no_other_from_saving(postgres_url: str) -> None:
    store = SqlStore(postgres_url, namespace="test")
    await store.open()
    stuck, free = await operating(store), await operating(store)
    holder = await asyncpg.connect(postgres_url)
    lock = holder.transaction()
    await lock.start()
    await holder.execute(
        "SELECT 1 FROM agent_paused_tasks WHERE logical_task_id = $1 FOR NO KEY UPDATE", stuck.task_id
    )
    saving = asyncio.create_task(store.save(Save(stuck, a_checkpoint(stuck))))
    await saved(store, free)
    assert not saving.done()
    await lock.rollback()
    assert await saving == Saved()
    await holder.close()
    await store.close()
