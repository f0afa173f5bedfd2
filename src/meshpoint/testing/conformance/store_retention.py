"""What remains of an ended operation, and for how long."""

from __future__ import annotations

import pytest

from meshpoint.model.ids import TaskId
from meshpoint.model.operations import OperationStatus
from meshpoint.model.tasks import TaskState
from meshpoint.model.transitions import CancelTooLate, EndCommitted, Fenced, Save
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    AGENT,
    CANCELLED,
    DONE,
    FAILED,
    SECOND,
    TIMINGS,
    a_cancel,
    a_checkpoint,
    a_release,
    a_run,
    an_end,
    begun,
    failed,
    memory_of,
    one,
    operating,
    paused,
    remembering,
    revived,
    saved,
    summary_of,
    write_cancel,
    write_end,
)
from meshpoint.testing.conformance.store_leases import sent
from meshpoint.testing.conformance.store_operations import latest_of


class RetentionSuite:
    """Ended operations keep their checkpoints until they expire."""

    @pytest.fixture
    def archiving(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let stores opened after this archive checkpoints."""
        monkeypatch.setattr(TIMINGS, "checkpoint_archive", True)

    async def test_completion_deletes_checkpoints(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await saved(store, run)
        end = an_end(run)
        first = await write_end(store, end)
        assert await store.end([end]) == [first]
        assert await store.latest(run.task_id) is None
        assert await store.history(run.task_id) == []
        summary = await summary_of(store, run.task_id)
        assert (summary.progress_pct, summary.phase, summary.checkpoint) == (100.0, None, None)

    @pytest.mark.usefixtures("archiving")
    async def test_a_store_with_an_archive_keeps_them_there(self, store: CheckpointStore) -> None:
        run = await operating(store)
        for _ in range(2):
            await saved(store, run)
        before = await store.history(run.task_id)
        await store.end([an_end(run)])
        assert await store.latest(run.task_id) is None
        assert await store.history(run.task_id) == before

    @pytest.mark.usefixtures("archiving")
    async def test_archive_same_task_twice(self, store: CheckpointStore, clock: FakeClock) -> None:
        task_id = a_run().task_id
        for subject in ("first", "second"):
            run = await operating(store, a_run(task_id))
            await saved(store, run, subject=subject)
            await store.end([an_end(run)])
            await sent(store, task_id)
            clock.advance(TIMINGS.tombstone_ttl + SECOND)
            assert await store.purge(AGENT, 10) == 1
        assert [each.subject for each in await store.history(task_id)] == ["second"]

    async def test_preserved_never_purged(self, store: CheckpointStore, clock: FakeClock) -> None:
        run = await operating(store, preserve=True)
        await saved(store, run)
        before = await store.history(run.task_id)
        await store.end([an_end(run)])
        await sent(store, run.task_id)
        clock.advance(TIMINGS.checkpoint_ttl * 1000)
        assert await store.purge(AGENT, 10) == 0
        assert await store.history(run.task_id) == before
        summary = await summary_of(store, run.task_id)
        assert (summary.status, summary.checkpoint, summary.preserve) == (
            OperationStatus.COMPLETED,
            1,
            True,
        )

    @pytest.mark.parametrize("state", [FAILED, CANCELLED])
    async def test_end_writes_checkpoint(self, store: CheckpointStore, state: TaskState) -> None:
        run = await operating(store)
        first = await saved(store, run)
        last = a_checkpoint(run, 2, failure_reason="broken", error_details={"type": "ValueError"})
        await store.end([an_end(run, state, reason="not this", checkpoint=last)])
        latest = await latest_of(store, run.task_id)
        assert latest.model_copy(update={"checkpoint_time": None}) == last
        assert [each.seq for each in await store.history(run.task_id)] == [first.seq, last.seq]
        summary = await summary_of(store, run.task_id)
        assert (summary.failure_reason, summary.phase, summary.checkpoint) == (
            "broken",
            "weigh",
            2,
        )

    async def test_final_checkpoint_gets_next_seq(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await saved(store, run)
        await store.end(
            [an_end(run, FAILED, checkpoint=a_checkpoint(run, 1, failure_reason="broken"))]
        )
        latest = await latest_of(store, run.task_id)
        assert (latest.seq, latest.failure_reason) == (2, "broken")

    @pytest.mark.parametrize("words", [{"reason": "broken"}, {"dead_reason": "broken"}])
    async def test_end_repeats_last_checkpoint(
        self, store: CheckpointStore, clock: FakeClock, words: dict[str, str]
    ) -> None:
        run = await operating(store)
        for _ in range(TIMINGS.checkpoint_history):
            last = await saved(store, run, error_details={"of": "the attempt before"})
        clock.advance(SECOND)
        await store.end([an_end(run, FAILED, **words)])  # type: ignore[arg-type]
        why = {
            "failure_reason": "broken",
            "error_details": None,
            "seq": last.seq + 1,
            "checkpoint_time": clock.now(),
        }
        assert await latest_of(store, run.task_id) == last.model_copy(update=why)
        assert len(await store.history(run.task_id)) == TIMINGS.checkpoint_history

    async def test_without_any_checkpoint_none_is_written(self, store: CheckpointStore) -> None:
        run = await failed(store, checkpoints=0)
        assert await store.history(run.task_id) == []

    async def test_a_zombies_end_writes_no_checkpoint(self, store: CheckpointStore) -> None:
        zombie = await operating(store)
        await saved(store, zombie)
        await store.release([a_release(zombie)])
        before = await store.history(zombie.task_id)
        end = an_end(zombie, FAILED, checkpoint=a_checkpoint(zombie, 2, failure_reason="stale"))
        assert await store.end([end]) == [Fenced()]
        assert await store.history(zombie.task_id) == before

    async def test_ends_of_all_kinds_go_together(self, store: CheckpointStore) -> None:
        runs = [
            await operating(store),
            await begun(store),
            await operating(store),
            await operating(store),
        ]
        for run in (runs[0], runs[2]):
            await saved(store, run)
        states = (DONE, FAILED, FAILED, CANCELLED)
        results = await store.end(
            [an_end(run, state) for run, state in zip(runs, states, strict=True)]
        )
        assert [
            result.reply.task_id for result in results if isinstance(result, EndCommitted)
        ] == [run.task_id for run in runs]
        assert [len(await store.history(run.task_id)) for run in runs] == [0, 0, 2, 0]

    async def test_cancel_repeats_last_checkpoint(self, store: CheckpointStore) -> None:
        run = await operating(store)
        last = await saved(store, run)
        pause = await paused(store, run=run)
        await write_cancel(store, a_cancel(run.task_id))
        latest = await latest_of(store, run.task_id)
        assert (latest.seq, latest.failure_reason, latest.subtasks) == (
            2,
            "cancelled on request",
            last.subtasks,
        )
        assert isinstance(one(await store.cancel([a_cancel(run.task_id)])), CancelTooLate)
        assert len(await store.history(run.task_id)) == 2
        await revived(store, pause.run.task_id)

    async def test_early_cancel_is_no_operation(self, store: CheckpointStore) -> None:
        await store.cancel([a_cancel(TaskId("never"))])
        assert await store.operation(TaskId("never")) is None

    async def test_failed_is_retained(self, store: CheckpointStore, clock: FakeClock) -> None:
        run = await failed(store)
        await sent(store, run.task_id)
        clock.advance(TIMINGS.checkpoint_ttl - SECOND)
        assert await store.purge(AGENT, 10) == 0
        assert len(await store.history(run.task_id)) == 2
        clock.advance(2 * SECOND)
        assert await store.purge(AGENT, 10) == 1
        await nothing_is_left(store, run.task_id)

    async def test_cancelled_is_retained(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store, run=await operating(store))
        await store.cancel([a_cancel(pause.run.task_id)])
        await sent(store, pause.run.task_id)
        clock.advance(TIMINGS.checkpoint_ttl - SECOND)
        await store.confirm_sent(await store.unsent(AGENT, 10))
        assert await store.purge(AGENT, 10) == 0
        clock.advance(2 * SECOND)
        assert await store.purge(AGENT, 10) == 1

    async def test_completed_is_purged(self, store: CheckpointStore, clock: FakeClock) -> None:
        run, other = await operating(store), await begun(store)
        await store.end([an_end(run), an_end(other, FAILED)])
        await sent(store, run.task_id)
        await sent(store, other.task_id)
        clock.advance(TIMINGS.tombstone_ttl + SECOND)
        assert await store.purge(AGENT, 10) == 2
        await nothing_is_left(store, run.task_id)

    @pytest.mark.parametrize("reply_sent_first", [True, False])
    async def test_preserve_after_end(
        self, store: CheckpointStore, clock: FakeClock, reply_sent_first: bool
    ) -> None:
        run = await failed(store)
        if reply_sent_first:
            await sent(store, run.task_id)
        assert await store.preserve(run.task_id)
        if not reply_sent_first:
            await sent(store, run.task_id)
        clock.advance(TIMINGS.checkpoint_ttl * 1000)
        assert await store.purge(AGENT, 10) == 0
        assert len(await store.history(run.task_id)) == 2
        assert await store.preserve(run.task_id, preserve=False)
        assert await store.purge(AGENT, 10) == 1
        await nothing_is_left(store, run.task_id)

    async def test_preserve_while_running_keeps_history(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await saved(store, run)
        assert await store.preserve(run.task_id)
        await store.end([an_end(run)])
        assert len(await store.history(run.task_id)) == 1

    async def test_preserve_keeps_reply(self, store: CheckpointStore, clock: FakeClock) -> None:
        run = await failed(store)
        await store.preserve(run.task_id)
        clock.advance(TIMINGS.dispatch_lease + SECOND)
        assert [send.task_id for send in await store.unsent(AGENT, 10)] == [run.task_id]

    async def test_only_operations_are_preserved(self, store: CheckpointStore) -> None:
        for task_id in ((await begun(store)).task_id, TaskId("nobody")):
            assert not await store.preserve(task_id)

    async def test_each_attempt_keeps_its_last_checkpoint(self, store: CheckpointStore) -> None:
        """So the history has every failure."""
        run = await operating(store)
        for retry_count in range(3):
            for _ in range(TIMINGS.checkpoint_history + 1):
                await saved(store, run, retry_count=retry_count)
            latest = await latest_of(store, run.task_id)
            reason = f"failure {retry_count}"
            final = a_checkpoint(
                run, latest.seq + 1, retry_count=retry_count, failure_reason=reason
            )
            await store.end([an_end(run, FAILED, checkpoint=final)])
            run = await revived(store, run.task_id)
        for _ in range(TIMINGS.checkpoint_history + 1):
            await saved(store, run, retry_count=3)
        history = await store.history(run.task_id)
        assert [each.failure_reason for each in history] == [
            *("failure 0", "failure 1", "failure 2"),
            *[None] * TIMINGS.checkpoint_history,
        ]

    async def test_a_kept_checkpoint_loses_its_memory_to_a_newer_one(
        self, store: CheckpointStore
    ) -> None:
        run = await operating(store)
        await store.save(Save(run, remembering(run, 1, "old")))
        await store.end([an_end(run, FAILED, reason="broken")])
        run = await revived(store, run.task_id)
        for seq in range(3, 4 + TIMINGS.checkpoint_history):
            await store.save(Save(run, remembering(run, seq, f"new {seq}", retry_count=1)))
        history = await store.history(run.task_id)
        assert [each.retry_count for each in history] == [0, *[1] * TIMINGS.checkpoint_history]
        assert (await memory_of(store, run.task_id))[0] == seq


async def nothing_is_left(store: CheckpointStore, task_id: TaskId) -> None:
    """Assert that an operation was deleted completely."""
    assert await store.task(task_id) is None
    assert await store.operation(task_id) is None
    assert await store.history(task_id) == []
