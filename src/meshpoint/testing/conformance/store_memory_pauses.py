"""Working memories and checkpoints written with a pause."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from meshpoint.adapters.inprocess.clock import FakeClock
from meshpoint.model.checkpoint import CancelFound, Committed, Fenced, PastDeadline, TaskState
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.conformance.build import (
    SECOND,
    a_call,
    a_cancel,
    a_checkpoint,
    a_pause,
    a_release,
    a_requester,
    a_run,
    begun,
    error,
    one,
    operating,
    paused,
    resumed,
    row,
    taken_over,
)
from meshpoint.testing.conformance.build_memory import (
    digest,
    kept,
    memory_of,
    nothing_new,
    remembering,
    remembering_pause,
    save,
)
from meshpoint.testing.conformance.store_operations import a_child, latest_of


class MemoryAtPausesSuite:
    """Checkpoints written with a pause."""

    async def test_a_pause_writes_its_checkpoint(
        self, store: CheckpointStore, other: CheckpointStore, clock: FakeClock
    ) -> None:
        run = await operating(store)
        await save(store, run, ["first"])
        clock.advance(SECOND)
        pause = remembering_pause(run, 2, "second")
        committed = one(await store.pause([pause]))
        assert isinstance(committed, Committed)
        assert [send.sub_task_id for send in committed.dispatches] == [call.sub_task_id for call in pause.calls]
        assert pause.checkpoint is not None
        read = {"l1_snapshot": None, "checkpoint_time": clock.now()}
        assert await other.latest(run.task_id) == pause.checkpoint.model_copy(update=read)
        assert await memory_of(other, run.task_id) == (2, "second")

    async def test_whoever_goes_on_knows_of_it(self, store: CheckpointStore) -> None:
        run = await operating(store)
        pause = remembering_pause(run, 1, "first")
        await store.pause([pause])
        assert (await row(store, run.task_id))[0].attempt == 0
        task = await resumed(store, pause)
        assert (task.checkpoint, task.attempt, task.retry_count) == (1, 1, 0)
        await save(store, task.run, [None], first=2)
        assert await memory_of(store, run.task_id) == (1, "first")

    async def test_it_may_bring_no_memory(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await save(store, run, ["first"])
        pause = replace(a_pause(run=run), checkpoint=a_checkpoint(run, 2, l1_snapshot_hash=digest("second")))
        await store.pause([pause])
        assert (await latest_of(store, run.task_id)).l1_snapshot_hash == digest("second")
        assert await memory_of(store, run.task_id) == (1, "first")

    async def test_it_prunes_the_history(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await save(store, run, ["first", None, None])
        await store.pause([remembering_pause(run, 4, "second")])
        assert await kept(store, run.task_id) == [2, 3, 4]

    async def test_a_pause_without_one_leaves_what_is_there(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await save(store, run, ["first", None])
        task = await resumed(store, await paused(store, run=run))
        assert task.checkpoint == 2
        assert await memory_of(store, run.task_id) == (1, "first")

    async def test_a_repeated_pause_writes_nothing_twice(self, store: CheckpointStore, clock: FakeClock) -> None:
        run = await operating(store)
        pause = remembering_pause(run, 1, "first")
        first = await store.pause([pause])
        before = await row(store, run.task_id), await store.history(run.task_id)
        clock.advance(SECOND)
        again = replace(pause, checkpoint=remembering(run, 2, "again"))
        assert await store.pause([pause, again]) == first * 2
        assert (await row(store, run.task_id), await store.history(run.task_id)) == before
        assert await memory_of(store, run.task_id) == (1, "first")
        assert (await resumed(store, pause)).checkpoint == 1

    async def test_a_pause_repeated_after_the_task_went_on_is_fenced(self, store: CheckpointStore) -> None:
        run = await operating(store)
        pause = remembering_pause(run, 1, "first")
        await store.pause([pause])
        task = await resumed(store, pause)
        late = replace(pause, checkpoint=remembering(run, 2, "late"))
        assert await store.pause([pause, late]) == [Fenced(), Fenced()]
        await save(store, task.run, ["second"], first=2)
        assert await store.pause([late]) == [Fenced()]
        assert await memory_of(store, run.task_id) == (2, "second")
        assert await kept(store, run.task_id) == [1, 2]

    async def test_a_checkpoint_that_stands_there_is_not_written_over(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await save(store, run, [None, "first"])
        before = await store.history(run.task_id)
        assert isinstance(one(await store.pause([remembering_pause(run, 2, "again")])), Committed)
        assert await store.history(run.task_id) == before
        assert await memory_of(store, run.task_id) == (2, "first")

    async def test_a_task_that_is_no_operation_pauses_without(self, store: CheckpointStore) -> None:
        fresh, known = a_run(), await begun(store)
        before = await row(store, known.task_id)
        for run in (fresh, known):
            assert await store.pause([remembering_pause(run, 1, "first")]) == [Fenced()]
            assert await store.l1_snapshot(run.task_id) is None
        assert await store.task(fresh.task_id) is None
        assert await row(store, known.task_id) == before
        assert isinstance(one(await store.pause([a_pause(run=known)])), Committed)

    async def test_a_zombies_pause_writes_none(self, store: CheckpointStore, clock: FakeClock) -> None:
        zombie = await operating(store)
        await save(store, zombie, ["first"])
        await taken_over(store, clock)
        assert await store.pause([remembering_pause(zombie, 2, "zombie")]) == [Fenced()]
        await nothing_new(store, zombie)

    async def test_a_pause_that_finds_a_cancel_writes_none(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await save(store, run, ["first"])
        await store.cancel([a_cancel(run.task_id)])
        assert await store.pause([remembering_pause(run, 2, "second")]) == [CancelFound(run)]
        await nothing_new(store, run)

    async def test_a_pause_past_the_deadline_writes_none(self, store: CheckpointStore, clock: FakeClock) -> None:
        run = await operating(store)
        await save(store, run, ["first"])
        late = replace(
            remembering_pause(run, 2, "second"), requester=a_requester(deadline=clock.now() - timedelta(seconds=1))
        )
        assert await store.pause([late]) == [PastDeadline()]
        await nothing_new(store, run)

    async def test_a_pause_that_none_of_its_calls_left_writes_it_too(self, store: CheckpointStore) -> None:
        run = await operating(store)
        unsent = a_pause(a_call("a", outcome=error()), run=run)
        pause = replace(unsent, checkpoint=remembering(run, 1, "first"), children=(a_child(),))
        assert await store.pause([pause]) == [Committed(TaskState.READY, ())]
        assert await memory_of(store, run.task_id) == (1, "first")
        summary = await store.operation(run.task_id)
        assert summary is not None
        assert summary.children == pause.children

    async def test_pauses_of_all_kinds_go_together(self, store: CheckpointStore) -> None:
        zombie, run, other = [await operating(store) for _ in range(3)]
        await save(store, zombie, ["first"])
        await store.release([a_release(zombie)])
        await save(store, other, ["first", None, None])
        pauses = [
            remembering_pause(zombie, 2, "zombie"),
            remembering_pause(run, 1, "one"),
            a_pause(),
            remembering_pause(other, 4, "other"),
        ]
        results = await store.pause([*pauses, pauses[1]])
        assert [type(result) for result in results] == [Fenced, Committed, Committed, Committed, Committed]
        assert results[4] == results[1]
        assert await memory_of(store, zombie.task_id) == (1, "first")
        assert await memory_of(store, run.task_id) == (1, "one")
        assert await memory_of(store, other.task_id) == (4, "other")
        assert await kept(store, other.task_id) == [2, 3, 4]
