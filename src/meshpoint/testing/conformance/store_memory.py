"""Working memories written with checkpoints: which are kept, and which are dropped."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from meshpoint.model.ids import TaskId
from meshpoint.model.subtasks import MemoryWrite, SaveCommitted
from meshpoint.model.tasks import L1Snapshot, TaskState
from meshpoint.model.transitions import (
    BeginCommitted,
    CancelFound,
    Fenced,
    PastDeadline,
    PauseCommitted,
    Save,
)
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    AGENT,
    CANCELLED,
    ELSEWHERE,
    FAILED,
    SECOND,
    TIMINGS,
    a_begin,
    a_call,
    a_cancel,
    a_checkpoint,
    a_pause,
    a_release,
    a_requester,
    a_run,
    an_end,
    an_operation,
    begun,
    content,
    digest,
    error,
    failed,
    kept,
    memory_of,
    nothing_new,
    operating,
    paused,
    remembering,
    remembering_pause,
    resumed,
    revived,
    row,
    save,
    summary_of,
    taken_over,
    write_pause,
)
from meshpoint.testing.conformance.store_leases import sent
from meshpoint.testing.conformance.store_operations import a_child, latest_of


class MemorySuite:
    """An operation keeps the latest working memory that its checkpoints contained."""

    async def test_save_with_memory(self, store: CheckpointStore, other: CheckpointStore) -> None:
        run = await operating(store)
        checkpoint = remembering(run, 1, "first")
        assert await store.save(Save(run, checkpoint)) == SaveCommitted()
        memory = L1Snapshot(1, digest("first"), content("first"))
        assert await other.l1_snapshot(run.task_id) == memory
        assert await store.l1_snapshot(run.task_id, AGENT) == memory
        assert await store.l1_snapshot(run.task_id, ELSEWHERE) is None

    async def test_reads_omit_memory(self, store: CheckpointStore, clock: FakeClock) -> None:
        run = await operating(store)
        checkpoint = remembering(run, 1, "first")
        await store.save(Save(run, checkpoint))
        read = checkpoint.model_copy(update={"l1_snapshot": None, "checkpoint_time": clock.now()})
        assert read.l1_snapshot_hash == digest("first")
        assert await store.latest(run.task_id) == read
        assert await store.history(run.task_id) == [read]

    async def test_there_is_none_without_one(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await save(store, run, [None])
        for task_id in (run.task_id, (await begun(store)).task_id, TaskId("nobody")):
            assert await store.l1_snapshot(task_id) is None
        assert (await latest_of(store, run.task_id)).l1_snapshot_hash is None

    async def test_what_else_is_said_of_a_memory_is_kept(self, store: CheckpointStore) -> None:
        run = await operating(store)
        writes = (
            MemoryWrite(digest="d", calls=1, subtasks=2, seq=1, answers=[1, "text\0", None]),
            MemoryWrite(digest="e", calls=1, subtasks=2, seq=1),
        )
        for seq, hash_ in enumerate([None, digest("first")], 1):
            said = {"l1_in_sql": "older", "memory_writes": writes, "l1_snapshot_hash": hash_}
            await store.save(Save(run, a_checkpoint(run, seq).model_copy(update=said)))
            latest = await latest_of(store, run.task_id)
            assert {name: getattr(latest, name) for name in said} == said

    async def test_any_bytes_come_back(self, store: CheckpointStore) -> None:
        run = await operating(store)
        for seq, each in enumerate((bytes(range(256)), b"\0" * 3000, b""), 1):
            update = {"l1_snapshot": each, "l1_snapshot_hash": str(seq)}
            await store.save(Save(run, a_checkpoint(run, seq).model_copy(update=update)))
            assert await store.l1_snapshot(run.task_id) == L1Snapshot(seq, str(seq), each)
        await save(store, run, [None, None, None], first=4)
        assert await kept(store, run.task_id) == [3, 4, 5, 6]

    async def test_the_newest_is_read(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await save(store, run, ["first", None, "second"])
        assert await memory_of(store, run.task_id) == (3, "second")

    async def test_it_stays_until_a_newer_one_is_written(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await save(store, run, ["first", None])
        assert await memory_of(store, run.task_id) == (1, "first")
        assert (await latest_of(store, run.task_id)).l1_snapshot_hash is None

    async def test_history_keeps_checkpoint_of_memory(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await save(store, run, [None, "first", None, None, None, None])
        assert await memory_of(store, run.task_id) == (2, "first")
        assert await kept(store, run.task_id) == [2, 4, 5, 6]

    async def test_until_a_newer_one_is_written(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await save(store, run, ["first", None, None, None, "second"])
        assert await kept(store, run.task_id) == [3, 4, 5]
        assert await memory_of(store, run.task_id) == (5, "second")

    async def test_only_the_newest_is_kept(self, store: CheckpointStore) -> None:
        """The superseded memories no longer protect their checkpoints from deletion."""
        run = await operating(store)
        await save(store, run, ["first", "second", "third", None, None, None])
        assert await kept(store, run.task_id) == [3, 4, 5, 6]
        assert await memory_of(store, run.task_id) == (3, "third")

    async def test_repeated_save_writes_no_memory(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await save(store, run, ["first", None])
        for seq in (1, 2):
            assert await store.save(Save(run, remembering(run, seq, "again"))) == SaveCommitted()
        assert await memory_of(store, run.task_id) == (1, "first")

    async def test_a_zombie_brings_none(self, store: CheckpointStore, clock: FakeClock) -> None:
        zombie = await operating(store)
        await save(store, zombie, ["first"])
        await taken_over(store, clock)
        assert await store.save(Save(zombie, remembering(zombie, 2, "zombie"))) == Fenced()
        assert await memory_of(store, zombie.task_id) == (1, "first")

    async def test_one_of_many_megabytes(self, store: CheckpointStore) -> None:
        large = random.Random(0).randbytes(20 * 2**20)
        run = await operating(store)
        bring = {"l1_snapshot": large, "l1_snapshot_hash": "large"}
        await store.save(Save(run, a_checkpoint(run, 1).model_copy(update=bring)))
        assert await store.l1_snapshot(run.task_id) == L1Snapshot(1, "large", large)
        pause = replace(a_pause(run=run), checkpoint=a_checkpoint(run, 2).model_copy(update=bring))
        await write_pause(store, pause)
        assert await store.l1_snapshot(run.task_id) == L1Snapshot(2, "large", large)

    async def test_operations_have_their_own(self, store: CheckpointStore) -> None:
        first, second = await operating(store), await operating(store)
        await save(store, first, ["first", None, None, None, None])
        await save(store, second, ["second", "third"])
        assert await memory_of(store, first.task_id) == (1, "first")
        assert await memory_of(store, second.task_id) == (2, "third")

    @pytest.fixture
    def archiving(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let stores opened after this archive checkpoints."""
        monkeypatch.setattr(TIMINGS, "checkpoint_archive", True)

    async def test_completed_operations_have_none(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await save(store, run, ["first"])
        await store.end([an_end(run)])
        assert await store.l1_snapshot(run.task_id) is None

    @pytest.mark.usefixtures("archiving")
    async def test_l1_snapshot_ignores_archive(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await save(store, run, ["first", None])
        before = await store.history(run.task_id)
        await store.end([an_end(run)])
        assert await store.history(run.task_id) == before
        assert before[0].l1_snapshot_hash == digest("first")
        assert await store.l1_snapshot(run.task_id) is None

    async def test_preserved_ones_stay(self, store: CheckpointStore) -> None:
        run = await operating(store, preserve=True)
        await save(store, run, ["first"])
        await store.end([an_end(run)])
        assert await memory_of(store, run.task_id) == (1, "first")

    @pytest.mark.parametrize("state", [FAILED, CANCELLED])
    async def test_end_writes_memory(self, store: CheckpointStore, state: TaskState) -> None:
        run = await operating(store)
        await save(store, run, ["first", None, None])
        await store.end(
            [an_end(run, state, checkpoint=remembering(run, 4, "last", failure_reason="broken"))]
        )
        assert await memory_of(store, run.task_id) == (4, "last")
        assert await kept(store, run.task_id) == [2, 3, 4]
        assert (await latest_of(store, run.task_id)).failure_reason == "broken"

    @pytest.mark.parametrize("state", [FAILED, CANCELLED])
    async def test_end_keeps_memory(self, store: CheckpointStore, state: TaskState) -> None:
        run = await operating(store)
        await save(store, run, ["first", None, None])
        await store.end([an_end(run, state, checkpoint=a_checkpoint(run, 4))])
        assert await memory_of(store, run.task_id) == (1, "first")
        assert await kept(store, run.task_id) == [1, 2, 3, 4]

    async def test_one_that_was_saved_unheard_is_replaced(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await save(store, run, ["first"])
        await store.end([an_end(run, FAILED, checkpoint=remembering(run, 1, "last"))])
        assert await memory_of(store, run.task_id) == (2, "last")

    @pytest.mark.parametrize("words", [{"reason": "broken"}, {"dead_reason": "broken"}])
    async def test_end_repeats_hash(self, store: CheckpointStore, words: dict[str, str]) -> None:
        run = await operating(store)
        await save(store, run, [None, "first"])
        await store.end([an_end(run, FAILED, **words)])  # type: ignore[arg-type]
        latest = await latest_of(store, run.task_id)
        assert (latest.seq, latest.l1_snapshot_hash) == (3, digest("first"))
        assert await memory_of(store, run.task_id) == (2, "first")

    async def test_cancel_of_waiting_task_keeps_memory(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await store.pause([remembering_pause(run, 1, "first")])
        await store.cancel([a_cancel(run.task_id)])
        latest = await latest_of(store, run.task_id)
        assert (latest.seq, latest.l1_snapshot_hash) == (2, digest("first"))
        assert await memory_of(store, run.task_id) == (1, "first")

    async def test_end_keeps_checkpoint_of_memory(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await save(store, run, ["first", None, None])
        await store.end([an_end(run, FAILED, reason="broken")])
        assert await kept(store, run.task_id) == [1, 2, 3, 4]
        assert await memory_of(store, run.task_id) == (1, "first")

    async def test_fenced_end_no_memory(self, store: CheckpointStore, clock: FakeClock) -> None:
        zombie = await operating(store)
        await save(store, zombie, ["first"])
        await taken_over(store, clock)
        assert await store.end(
            [an_end(zombie, FAILED, checkpoint=remembering(zombie, 2, "zombie"))]
        ) == [Fenced()]
        await nothing_new(store, zombie)

    async def test_who_revives_it_finds_it(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await store.pause([remembering_pause(run, 1, "first")])
        await store.cancel([a_cancel(run.task_id)])
        again = await revived(store, run.task_id)
        assert await memory_of(store, run.task_id) == (1, "first")
        await save(store, again, [None, "second"], first=3)
        assert await memory_of(store, run.task_id) == (4, "second")
        await store.end([an_end(again, FAILED, checkpoint=remembering(again, 5, "third"))])
        assert await memory_of(store, run.task_id) == (5, "third")
        await revived(store, run.task_id)
        assert await memory_of(store, run.task_id) == (5, "third")

    async def test_purge_removes_memory(self, store: CheckpointStore, clock: FakeClock) -> None:
        run = await failed(store)
        again = await revived(store, run.task_id)
        await save(store, again, ["first", None], first=3)
        await store.end([an_end(again, FAILED)])
        await sent(store, run.task_id)
        clock.advance(TIMINGS.checkpoint_ttl + SECOND)
        assert await store.purge(AGENT, 10) == 1
        assert await store.l1_snapshot(run.task_id) is None
        new = await operating(store, a_run(run.task_id))
        await save(store, new, [None, None, None, None])
        assert await store.l1_snapshot(run.task_id) is None
        assert await kept(store, run.task_id) == [2, 3, 4]

    async def test_pause_writes_checkpoint(
        self, store: CheckpointStore, other: CheckpointStore, clock: FakeClock
    ) -> None:
        run = await operating(store)
        await save(store, run, ["first"])
        clock.advance(SECOND)
        pause = remembering_pause(run, 2, "second")
        committed = await write_pause(store, pause)
        assert [send.sub_task_id for send in committed.dispatches] == [
            call.sub_task_id for call in pause.calls
        ]
        assert pause.checkpoint is not None
        read = {"l1_snapshot": None, "checkpoint_time": clock.now()}
        assert await other.latest(run.task_id) == pause.checkpoint.model_copy(update=read)
        assert await memory_of(other, run.task_id) == (2, "second")

    async def test_the_next_run_knows_of_it(self, store: CheckpointStore) -> None:
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
        pause = replace(
            a_pause(run=run), checkpoint=a_checkpoint(run, 2, l1_snapshot_hash=digest("second"))
        )
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

    async def test_repeated_pause_is_noop(self, store: CheckpointStore, clock: FakeClock) -> None:
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

    async def test_pause_repeated_after_resume_is_fenced(self, store: CheckpointStore) -> None:
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

    async def test_pause_keeps_existing_checkpoint(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await save(store, run, [None, "first"])
        before = await store.history(run.task_id)
        await write_pause(store, remembering_pause(run, 2, "again"))
        assert await store.history(run.task_id) == before
        assert await memory_of(store, run.task_id) == (2, "first")

    async def test_only_operations_pause_with_checkpoint(self, store: CheckpointStore) -> None:
        fresh, known = a_run(), await begun(store)
        before = await row(store, known.task_id)
        for run in (fresh, known):
            assert await store.pause([remembering_pause(run, 1, "first")]) == [Fenced()]
            assert await store.l1_snapshot(run.task_id) is None
        assert await store.task(fresh.task_id) is None
        assert await row(store, known.task_id) == before
        await write_pause(store, a_pause(run=known))

    async def test_fenced_pause_no_memory(self, store: CheckpointStore, clock: FakeClock) -> None:
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

    async def test_late_pause_no_memory(self, store: CheckpointStore, clock: FakeClock) -> None:
        requester = a_requester(deadline=clock.now())
        begin = a_begin(requester=requester, operation=an_operation())
        run = replace(begin.run, fence=1)
        assert await store.begin([begin]) == [BeginCommitted(run)]
        await save(store, run, ["first"])
        assert await store.pause([remembering_pause(run, 2, "second")]) == [PastDeadline()]
        await nothing_new(store, run)

    async def test_pause_without_sends_writes_checkpoint(self, store: CheckpointStore) -> None:
        run = await operating(store)
        unsent = a_pause(a_call("a", outcome=error()), run=run)
        pause = replace(unsent, checkpoint=remembering(run, 1, "first"), children=(a_child(),))
        assert await store.pause([pause]) == [PauseCommitted(TaskState.READY, ())]
        assert await memory_of(store, run.task_id) == (1, "first")
        summary = await summary_of(store, run.task_id)
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
        assert [type(result) for result in results] == [
            Fenced,
            PauseCommitted,
            PauseCommitted,
            PauseCommitted,
            PauseCommitted,
        ]
        assert results[4] == results[1]
        assert await memory_of(store, zombie.task_id) == (1, "first")
        assert await memory_of(store, run.task_id) == (1, "one")
        assert await memory_of(store, other.task_id) == (4, "other")
        assert await kept(store, other.task_id) == [2, 3, 4]
