"""Working memories written with checkpoints: which are kept, and which are dropped."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from meshpoint.adapters.inprocess.clock import FakeClock
from meshpoint.model.checkpoint import (
    Committed,
    Fenced,
    L1Snapshot,
    Save,
    TaskState,
)
from meshpoint.model.ids import TaskId
from meshpoint.model.subtasks import MemoryWrite, Saved
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.conformance.build import (
    AGENT,
    SECOND,
    TIMINGS,
    a_cancel,
    a_checkpoint,
    a_pause,
    a_run,
    an_end,
    begun,
    failed,
    one,
    operating,
    revived,
    taken_over,
)
from meshpoint.testing.conformance.build_memory import (
    content,
    digest,
    kept,
    memory_of,
    nothing_new,
    remembering,
    remembering_pause,
    save,
)
from meshpoint.testing.conformance.store_leases import sent
from meshpoint.testing.conformance.store_operations import ELSEWHERE, latest_of

FAILED, CANCELLED = TaskState.FAILED, TaskState.CANCELLED


class MemoryInCheckpointsSuite:
    """Checkpoints within a segment, with a working memory or only its hash."""

    async def test_a_memory_is_kept_with_its_checkpoint(self, store: CheckpointStore, other: CheckpointStore) -> None:
        run = await operating(store)
        checkpoint = remembering(run, 1, "first")
        assert await store.save(Save(run, checkpoint)) == Saved()
        memory = L1Snapshot(1, digest("first"), content("first"))
        assert await other.l1_snapshot(run.task_id) == memory
        assert await store.l1_snapshot(run.task_id, AGENT) == memory
        assert await store.l1_snapshot(run.task_id, ELSEWHERE) is None

    async def test_what_reads_checkpoints_reads_no_memory(self, store: CheckpointStore, clock: FakeClock) -> None:
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

    async def test_its_checkpoint_is_never_too_old_for_the_history(self, store: CheckpointStore) -> None:
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

    async def test_a_checkpoint_that_stands_there_brings_none(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await save(store, run, ["first", None])
        for seq in (1, 2):
            assert await store.save(Save(run, remembering(run, seq, "again"))) == Saved()
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
        assert isinstance(one(await store.pause([pause])), Committed)
        assert await store.l1_snapshot(run.task_id) == L1Snapshot(2, "large", large)

    async def test_operations_have_their_own(self, store: CheckpointStore) -> None:
        first, second = await operating(store), await operating(store)
        await save(store, first, ["first", None, None, None, None])
        await save(store, second, ["second", "third"])
        assert await memory_of(store, first.task_id) == (1, "first")
        assert await memory_of(store, second.task_id) == (2, "third")


class MemoryAtTheEndSuite:
    """An ended operation's memory, and what a resumed attempt finds."""

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
    async def test_an_archived_one_is_not_taken_for_a_tasks_own(self, store: CheckpointStore) -> None:
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
    async def test_a_last_checkpoint_brings_its_own(self, store: CheckpointStore, state: TaskState) -> None:
        run = await operating(store)
        await save(store, run, ["first", None, None])
        await store.end([an_end(run, state, checkpoint=remembering(run, 4, "last", failure_reason="broken"))])
        assert await memory_of(store, run.task_id) == (4, "last")
        assert await kept(store, run.task_id) == [2, 3, 4]
        assert (await latest_of(store, run.task_id)).failure_reason == "broken"

    @pytest.mark.parametrize("state", [FAILED, CANCELLED])
    async def test_or_leaves_the_one_that_is_there(self, store: CheckpointStore, state: TaskState) -> None:
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
    async def test_a_last_checkpoint_written_once_more_repeats_the_hash_only(
        self, store: CheckpointStore, words: dict[str, str]
    ) -> None:
        run = await operating(store)
        await save(store, run, [None, "first"])
        await store.end([an_end(run, FAILED, **words)])  # type: ignore[arg-type]
        latest = await latest_of(store, run.task_id)
        assert (latest.seq, latest.l1_snapshot_hash) == (3, digest("first"))
        assert await memory_of(store, run.task_id) == (2, "first")

    async def test_one_that_waits_keeps_it_when_it_is_cancelled(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await store.pause([remembering_pause(run, 1, "first")])
        await store.cancel([a_cancel(run.task_id)])
        latest = await latest_of(store, run.task_id)
        assert (latest.seq, latest.l1_snapshot_hash) == (2, digest("first"))
        assert await memory_of(store, run.task_id) == (1, "first")

    async def test_writing_it_once_more_leaves_it_in_the_history(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await save(store, run, ["first", None, None])
        await store.end([an_end(run, FAILED, reason="broken")])
        assert await kept(store, run.task_id) == [1, 2, 3, 4]
        assert await memory_of(store, run.task_id) == (1, "first")

    async def test_a_zombies_end_brings_none(self, store: CheckpointStore, clock: FakeClock) -> None:
        zombie = await operating(store)
        await save(store, zombie, ["first"])
        await taken_over(store, clock)
        assert await store.end([an_end(zombie, FAILED, checkpoint=remembering(zombie, 2, "zombie"))]) == [Fenced()]
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

    async def test_nothing_is_left_of_one_that_is_purged(self, store: CheckpointStore, clock: FakeClock) -> None:
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
