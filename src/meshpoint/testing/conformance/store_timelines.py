"""Timelines: each change of a task's state leaves its entries, and a refused one leaves none."""

from __future__ import annotations

from dataclasses import replace

from meshpoint.model.calls import FIRST
from meshpoint.model.ids import TaskId, new_id
from meshpoint.model.operations import Adopted, Revived
from meshpoint.model.tasks import TaskState
from meshpoint.model.timeline import Change, TimelineEntry
from meshpoint.model.transitions import BeginCommitted, Fenced
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    AGENT,
    ELSEWHERE,
    HERE,
    HOUR,
    LEASE,
    PEER,
    SECOND,
    THERE,
    a_begin,
    a_cancel,
    a_claim,
    a_pause,
    a_release,
    a_requester,
    a_revive,
    a_run,
    an_end,
    an_undelivered_reply,
    answered,
    begun,
    ended,
    error,
    failed,
    one,
    operating,
    parked,
    paused,
    ready,
    resumed,
    revived,
    saved,
    sub,
    taken_over,
    write_cancel,
    write_end,
    write_pause,
)
from meshpoint.testing.conformance.store_logs import (
    an_append,
    appended,
    logged_pause,
    with_log,
)
from meshpoint.testing.conformance.store_mailbox import a_question, a_signal, an_answer
from meshpoint.testing.conformance.store_retries import a_retried_call, attempts, fail
from meshpoint.testing.conformance.store_sleeps import a_sleep

WRITER = HERE.id
"""The replica whose changes `store` records. It keeps entries for an hour."""


async def changes(store: CheckpointStore, task_id: TaskId) -> list[Change]:
    """The changes in a task's timeline."""
    return [entry.change for entry in await store.timeline(task_id)]


async def last(store: CheckpointStore, task_id: TaskId) -> TimelineEntry:
    """The last entry of a task's timeline."""
    return (await store.timeline(task_id))[-1]


class TimelineSuite:
    """Conformance tests for a store that records timelines, for the replica `WRITER`."""

    async def test_a_task_records_its_pause_answers_owner_and_end(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await paused(store, "a", "b", "c")
        clock.advance(SECOND)
        await answered(store, pause, "a")
        task = await resumed(store, pause, "b", "c")
        await store.end([an_end(task.run)])
        task_id = pause.run.task_id
        entries = await store.timeline(task_id)
        assert [(each.change, each.fence, each.attempt) for each in entries] == [
            (Change.PAUSED, 1, 0),
            (Change.ANSWERED, None, None),
            (Change.ANSWERED, None, None),
            (Change.ACQUIRED, 2, 1),
            (Change.COMPLETED, 2, 1),
        ]
        assert [(each.calls, each.completed, each.total) for each in entries] == [
            (None, 0, 3),
            (1, 1, 3),
            (2, 3, 3),
            (None, None, None),
            (None, None, None),
        ]
        assert [(each.peer, each.ref) for each in entries] == [
            (None, None),
            (PEER, sub(pause, "a")),
            *[(None, None)] * 3,
        ]
        assert {each.generation for each in entries} == {1}
        assert {(each.task_id, each.agent, each.replica) for each in entries} == {
            (task_id, AGENT, WRITER)
        }
        assert [clock.now() - each.at for each in entries] == [SECOND, *[0 * SECOND] * 4]

    async def test_a_begun_task_records_each_pause(self, store: CheckpointStore) -> None:
        run = await begun(store)
        await write_pause(store, pause := a_pause("a", "b", run=run))
        task = await resumed(store, pause)
        await write_pause(store, a_pause("c", run=task.run))
        entries = await store.timeline(run.task_id)
        assert [(each.change, each.generation, each.fence) for each in entries] == [
            (Change.BEGUN, 0, 1),
            (Change.PAUSED, 1, 1),
            (Change.ANSWERED, 1, None),
            (Change.ACQUIRED, 1, 2),
            (Change.PAUSED, 2, 2),
        ]

    async def test_pauses_with_logs_are_recorded(self, store: CheckpointStore) -> None:
        task = await with_log(store, b"a")
        await write_pause(store, logged_pause(b"b", run=task.run, after=1))
        assert await changes(store, task.run.task_id) == [
            Change.PAUSED,
            Change.ANSWERED,
            Change.ACQUIRED,
            Change.PAUSED,
        ]

    async def test_a_batch_leaves_the_entries_of_each_task(self, store: CheckpointStore) -> None:
        pauses = [a_pause("a") for _ in range(3)]
        await store.pause(pauses)
        await store.claim([a_claim(pause) for pause in pauses], HERE, 2)
        acquired = [await changes(store, pause.run.task_id) for pause in pauses]
        assert sorted(acquired) == [
            [Change.PAUSED, Change.ANSWERED, Change.ACQUIRED],
            [Change.PAUSED, Change.ANSWERED, Change.ACQUIRED],
            [Change.PAUSED, Change.ANSWERED, Change.READY],
        ]

    async def test_a_queued_task_is_acquired(self, store: CheckpointStore) -> None:
        begin = replace(a_begin(), queued=True)
        assert isinstance(one(await store.begin([begin])), BeginCommitted)
        await store.acquire(HERE, 1)
        assert await changes(store, begin.run.task_id) == [Change.QUEUED, Change.ACQUIRED]

    async def test_a_task_without_a_slot_becomes_ready(self, store: CheckpointStore) -> None:
        pause = await ready(store)
        await store.acquire(HERE, 1)
        assert await changes(store, pause.run.task_id) == [
            Change.PAUSED,
            Change.ANSWERED,
            Change.READY,
            Change.ACQUIRED,
        ]

    async def test_a_pause_whose_join_is_met_is_ready(self, store: CheckpointStore) -> None:
        met = replace(a_pause("a"), calls=(replace(a_pause("a").calls[0], outcome=error()),))
        await store.pause([met])
        first, _ = entries = await store.timeline(met.run.task_id)
        assert [each.change for each in entries] == [Change.PAUSED, Change.READY]
        assert (first.completed, first.total) == (1, 1)

    async def test_the_first_of_several_answers_meets_the_join(
        self, store: CheckpointStore
    ) -> None:
        pause = await paused(store, "a", "b", join=FIRST)
        await resumed(store, pause, "b")
        entries = await store.timeline(pause.run.task_id)
        assert [each.change for each in entries] == [
            Change.PAUSED,
            Change.ANSWERED,
            Change.ACQUIRED,
        ]
        assert entries[1].ref == sub(pause, "b")

    async def test_repetitions_leave_no_entries(self, store: CheckpointStore) -> None:
        begin = a_begin()
        for _ in range(2):
            result = one(await store.begin([begin]))
        assert isinstance(result, BeginCommitted)
        pause = a_pause("a", run=result.run)
        for _ in range(2):
            await store.pause([pause])
        claim = a_claim(pause)
        for _ in range(2):
            await store.claim([claim, a_claim(pause)], HERE, 1)
        run = replace(result.run, id=claim.id, fence=2, generation=1)
        for _ in range(2):
            await store.end([an_end(run)])
        assert await changes(store, pause.run.task_id) == [
            Change.BEGUN,
            Change.PAUSED,
            Change.ANSWERED,
            Change.ACQUIRED,
            Change.COMPLETED,
        ]

    async def test_what_is_fenced_out_leaves_no_entry(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await paused(store)
        lost = (await resumed(store, pause)).run
        await taken_over(store, clock)
        before = await store.timeline(lost.task_id)
        assert before[-1].change is Change.RESCUED
        assert before[-1].fence == lost.fence + 1
        assert one(await store.pause([a_pause("b", run=lost)])) == Fenced()
        assert one(await store.end([an_end(lost)])) == Fenced()
        assert one(await store.release([a_release(lost)])) is False
        await store.claim([a_claim(pause)], HERE, 1)
        assert await store.timeline(lost.task_id) == before

    async def test_a_release_and_parking_are_recorded(self, store: CheckpointStore) -> None:
        run = await parked(store)
        assert await store.unpark([run.task_id]) == [True]
        assert await store.unpark([run.task_id]) == [False]
        again = one(await store.acquire(HERE, 1)).run
        await store.release([a_release(again)])
        await store.release([a_release(again)])
        assert (await changes(store, run.task_id))[3:] == [
            Change.PARKED,
            Change.UNPARKED,
            Change.ACQUIRED,
            Change.RELEASED,
        ]

    async def test_a_suspension_is_recorded_once(self, store: CheckpointStore) -> None:
        pause = await paused(store)
        for _ in range(2):
            await store.suspend([pause.run.task_id])
        await answered(store, pause)
        for _ in range(2):
            await store.unsuspend([pause.run.task_id])
        assert await changes(store, pause.run.task_id) == [
            Change.PAUSED,
            Change.SUSPENDED,
            Change.ANSWERED,
            Change.READY,
            Change.UNSUSPENDED,
        ]

    async def test_a_cancel_is_requested_once(self, store: CheckpointStore) -> None:
        run = (await resumed(store)).run
        for _ in range(2):
            await store.cancel([a_cancel(run.task_id)])
        await write_end(store, an_end(run, TaskState.CANCELLED))
        await store.cancel([a_cancel(run.task_id)])
        assert (await changes(store, run.task_id))[3:] == [
            Change.CANCEL_REQUESTED,
            Change.CANCELLED,
        ]

    async def test_a_cancelled_waiting_task_ends(self, store: CheckpointStore) -> None:
        pause = await paused(store)
        await write_cancel(store, a_cancel(pause.run.task_id))
        assert await changes(store, pause.run.task_id) == [Change.PAUSED, Change.CANCELLED]

    async def test_a_cancel_before_its_request_is_recorded(self, store: CheckpointStore) -> None:
        run = a_run()
        await store.cancel([a_cancel(run.task_id)])
        entry = one(await store.timeline(run.task_id))
        assert (entry.change, entry.fence, entry.generation) == (Change.CANCELLED, 0, 0)

    async def test_a_timeout_is_recorded(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store, "a", a_sleep("nap", HOUR))
        clock.advance(61 * SECOND)
        await store.expire(HERE, 1, 1)
        clock.advance(HOUR)
        await store.expire(HERE, 1, 1)
        entries = (await store.timeline(pause.run.task_id))[1:]
        assert [(each.change, each.calls, each.completed) for each in entries] == [
            (Change.TIMED_OUT, 1, 1),
            (Change.TIMED_OUT, 1, 2),
            (Change.ACQUIRED, None, None),
        ]
        assert entries[0].ref == sub(pause, "a")

    async def test_calls_that_time_out_together_leave_one_entry(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await paused(store, "a", "b", a_sleep("nap", SECOND))
        clock.advance(HOUR)
        await store.expire(HERE, 1, 1)
        entry = (await store.timeline(pause.run.task_id))[1]
        assert (entry.calls, entry.completed, entry.total, entry.ref) == (3, 3, 3, None)

    async def test_a_rescue_is_recorded(self, store: CheckpointStore, clock: FakeClock) -> None:
        run = await begun(store)
        for _ in range(2):
            await taken_over(store, clock)
        clock.advance(LEASE + SECOND)
        assert await store.rescue(THERE, 1, suspect_slots=0) == []
        assert await changes(store, run.task_id) == [
            Change.BEGUN,
            Change.RESCUED,
            Change.RESCUED,
            Change.LOST,
        ]

    async def test_a_retry_is_recorded(self, store: CheckpointStore) -> None:
        pause = await paused(store, a_retried_call("a"))
        await fail(store, pause)
        entry = await last(store, pause.run.task_id)
        newest = (await attempts(store, pause))[-1]
        assert (entry.change, entry.calls, entry.ref) == (Change.RETRIED, 1, newest.sub_task_id)

    async def test_a_signal_and_an_answer_are_recorded(self, store: CheckpointStore) -> None:
        pause = await paused(store, a_question())
        signal = a_signal(pause.run.task_id)
        for _ in range(2):
            await store.signal([signal])
            await store.answer([an_answer(pause.run.task_id)])
        entries = (await store.timeline(pause.run.task_id))[1:]
        assert [each.change for each in entries] == [
            Change.SIGNALLED,
            Change.ANSWERED,
            Change.READY,
        ]
        assert entries[0].ref == signal.id

    async def test_an_early_answer_is_kept(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store, a_question(timeout=SECOND))
        clock.advance(HOUR)
        await store.expire(HERE, 1, 1)
        await store.answer([an_answer(pause.run.task_id)])
        assert (await last(store, pause.run.task_id)).change is Change.ANSWER_KEPT

    async def test_a_new_attempt_is_recorded(self, store: CheckpointStore) -> None:
        run = await failed(store)
        await revived(store, run.task_id)
        assert await changes(store, run.task_id) == [
            Change.BEGUN,
            Change.FAILED,
            Change.REVIVED,
            Change.ACQUIRED,
        ]

    async def test_a_repeated_resume_leaves_no_entry(self, store: CheckpointStore) -> None:
        run = await failed(store)
        revive = a_revive(run.task_id)
        for _ in range(2):
            assert isinstance(await store.revive(revive), Revived)
        assert (await changes(store, run.task_id))[2:] == [Change.REVIVED]

    async def test_another_requester_is_recorded(self, store: CheckpointStore) -> None:
        run = await begun(store)
        adopt = a_revive(run.task_id, requester=a_requester(), order="01", adopt=True)
        assert await store.revive(adopt) == Adopted()
        assert await changes(store, run.task_id) == [Change.BEGUN, Change.ADOPTED]

    async def test_a_stored_reply_is_recorded(self, store: CheckpointStore) -> None:
        reply = an_undelivered_reply()
        for _ in range(2):
            await store.store_replies([reply])
        assert await changes(store, reply.reply.task_id) == [Change.COMPLETED]

    async def test_work_within_a_segment_leaves_no_entry(self, store: CheckpointStore) -> None:
        run = await operating(store)
        before = await store.timeline(run.task_id)
        await store.renew([run], HERE)
        await saved(store, run)
        await appended(store, an_append(run, b"a"))
        assert await store.timeline(run.task_id) == before

    async def test_a_timeline_is_read_in_parts(self, store: CheckpointStore) -> None:
        run = await ended(store)
        entries = await store.timeline(run.task_id)
        assert await store.timeline(run.task_id, limit=2) == entries[:2]
        assert await store.timeline(run.task_id, after=entries[1].id) == entries[2:]
        assert await store.timeline(TaskId(new_id())) == []

    async def test_old_entries_are_pruned(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store)
        clock.advance(HOUR / 2)
        await answered(store, pause)
        clock.advance(HOUR / 2)
        assert await store.prune_timelines(AGENT, 10) == 0
        clock.advance(SECOND)
        assert await store.prune_timelines(ELSEWHERE, 10) == 0
        assert await store.prune_timelines(AGENT, 10) == 1
        assert await changes(store, pause.run.task_id) == [Change.ANSWERED, Change.ACQUIRED]
        clock.advance(HOUR)
        assert await store.prune_timelines(AGENT, 1) == 1
        assert await store.prune_timelines(AGENT, 10) == 1
        assert await store.timeline(pause.run.task_id) == []
