"""What ends a suspension or a suspended task, and what happens at the same time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from meshpoint.model.tasks import DueCounts, KeepAlive, Replica, TaskFilter, TaskState
from meshpoint.model.transitions import (
    CancelFound,
    CancelRequested,
    EndCommitted,
    JoinCompleted,
    SuspendRefused,
    TaskReady,
    TaskSuspended,
)
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    AGENT,
    HERE,
    HOUR,
    LEASE,
    SECOND,
    STRANGER,
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
    cancels_to_send,
    failed,
    one,
    operating,
    paused,
    ready,
    resumed,
    saved,
    task_ids,
    write_cancel,
    write_end,
)
from meshpoint.testing.conformance.store_suspending import (
    SUSPENDABLE,
    Arranged,
    nothing_is_acquired,
    summary_of_task,
    suspend,
    suspended,
    suspended_ready,
    suspending,
)


class SuspensionEndSuite:
    """Suspended tasks: cancels, deadlines, keep-alives, new attempts, and listings."""

    async def test_a_suspended_task_is_cancelled_at_once(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        waiting, held = await suspended(store, "a", "b"), await suspended_ready(store)
        for pause, calls in ((waiting, 2), (held, 0)):
            result = await write_cancel(store, a_cancel(pause.run.task_id))
            assert (result.reply.state, len(result.cancels)) == (TaskState.CANCELLED, calls)
            summary = await summary_of_task(store, pause.run.task_id)
            assert summary.suspended_at is None
        assert len(await cancels_to_send(store, clock)) == 2

    async def test_a_cancel_lifts_it_from_a_running_task(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = await suspending(store)
        assert await store.cancel([a_cancel(run.task_id)]) == [CancelRequested(HERE.id)]
        assert await store.suspend([run.task_id]) == [
            SuspendRefused(TaskState.RUNNING, is_cancelled=True)
        ]
        assert await store.unsuspend([run.task_id]) == [False]
        assert await store.pause([a_pause(run=run)]) == [CancelFound(run)]
        clock.advance(LEASE + SECOND)
        assert one(await store.rescue(THERE, 10)).cancel_requested

    async def test_a_cancelled_task_that_is_released_cannot_be_suspended(
        self, store: CheckpointStore
    ) -> None:
        run = await suspending(store)
        await store.cancel([a_cancel(run.task_id)])
        await store.release([a_release(run)])
        assert await store.suspend([run.task_id]) == [
            SuspendRefused(TaskState.READY, is_cancelled=True)
        ]
        assert one(await store.acquire(HERE, 10)).cancel_requested

    @pytest.mark.parametrize("replica", [HERE, STRANGER])
    async def test_a_deadline_ends_a_ready_task(
        self, store: CheckpointStore, clock: FakeClock, replica: Replica
    ) -> None:
        requester = a_requester(deadline=clock.now() + HOUR)
        pause = await suspended_ready(store, requester=requester)
        clock.advance(HOUR - SECOND)
        assert await store.acquire_overdue(replica, 10) == []
        clock.advance(SECOND)
        assert await store.due(replica, 10) == DueCounts(overdue=1)
        overdue = one(await store.acquire_overdue(replica, 10))
        assert overdue.task.run.task_id == pause.run.task_id
        assert (overdue.past_deadline, overdue.is_suspended) == (True, True)
        end = one(await store.end([an_end(overdue.task.run, TaskState.FAILED)]))
        assert isinstance(end, EndCommitted)
        assert end.reply.requester == requester

    async def test_a_deadline_ends_a_waiting_task(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        requester = a_requester(deadline=clock.now() + HOUR)
        pause = await suspended(store, "a", requester=requester)
        pause_id = pause.run.task_id
        clock.advance(HOUR)
        assert isinstance(one(await store.expire(STRANGER, 10, 10)).join_result, TaskReady)
        overdue = one(await store.acquire_overdue(STRANGER, 10))
        assert (overdue.task.run.task_id, overdue.is_suspended) == (pause_id, True)

    async def test_a_crash_while_ending_an_overdue_task(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        requester = a_requester(deadline=clock.now() + HOUR)
        pause = await suspended_ready(store, requester=requester)
        clock.advance(HOUR)
        await store.acquire_overdue(HERE, 10)
        clock.advance(LEASE + SECOND)
        assert await store.rescue(THERE, 10) == []
        overdue = one(await store.acquire_overdue(THERE, 10))
        assert overdue.task.run.task_id == pause.run.task_id

    @SUSPENDABLE
    async def test_its_requester_gets_keep_alives(
        self, store: CheckpointStore, clock: FakeClock, arrange: Arranged
    ) -> None:
        task_id = await arrange(store)
        requester = a_requester(idle_timeout=30 * SECOND)
        await store.revive(a_revive(task_id, requester=requester, adopt=True))
        await suspend(store, task_id)
        for _ in range(2):
            clock.advance(11 * SECOND)
            assert await store.keep_alives(HERE, 10) == [KeepAlive(AGENT, task_id, requester)]

    async def test_an_adopted_task_stays_suspended(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await suspended_ready(store)
        requester = a_requester(app_id="client", deadline=clock.now() + 200 * LEASE)
        await store.revive(a_revive(pause.run.task_id, requester=requester, adopt=True))
        await nothing_is_acquired(store, clock)

    async def test_a_new_attempt_is_not_suspended(self, store: CheckpointStore) -> None:
        run = await failed(store)
        await store.revive(a_revive(run.task_id))
        again = one(await store.acquire(HERE, 10)).run
        await suspend(store, again.task_id)
        await write_end(store, an_end(again, TaskState.FAILED, reason="no answer"))
        await store.revive(a_revive(run.task_id))
        summary = await summary_of_task(store, run.task_id)
        assert (summary.state, summary.suspended_at) == (TaskState.READY, None)
        assert task_ids(await store.acquire(HERE, 10)) == [run.task_id]

    async def test_a_new_attempt_in_place_of_a_lost_one_is_not_suspended(
        self, store: CheckpointStore
    ) -> None:
        run = await operating(store)
        await saved(store, run)
        await suspend(store, run.task_id)
        await store.revive(a_revive(run.task_id, abandoned=True))
        summary = await summary_of_task(store, run.task_id)
        assert (summary.state, summary.suspended_at) == (TaskState.READY, None)
        assert task_ids(await store.acquire(HERE, 10)) == [run.task_id]

    async def test_a_repeated_request_changes_nothing(self, store: CheckpointStore) -> None:
        run, queued = a_run(), a_run()
        begins = [a_begin(run), replace(a_begin(queued), queued=True)]
        first = await store.begin(begins)
        await store.suspend([run.task_id, queued.task_id])
        assert await store.begin(begins) == first
        for task_id in (run.task_id, queued.task_id):
            assert (await summary_of_task(store, task_id)).suspended_at is not None
        assert await store.acquire(HERE, 10) == []

    async def test_suspended_tasks_are_listed(self, store: CheckpointStore) -> None:
        waiting, held = await suspended(store), await suspended_ready(store)
        run, free = await suspending(store), await paused(store)
        ended = await suspending(store)
        await write_end(store, an_end(ended))
        found = await store.tasks(where=TaskFilter(suspended=True))
        expected = {waiting.run.task_id, held.run.task_id, run.task_id}
        assert {task.task_id for task in found} == expected
        assert all(task.suspended_at is not None for task in found)
        others = await store.tasks(where=TaskFilter(suspended=False))
        assert {task.task_id for task in others} == {free.run.task_id, ended.task_id}
        states = [TaskState.READY]
        listed = await store.tasks(agent=AGENT, states=states, where=TaskFilter(suspended=True))
        assert [task.task_id for task in listed] == [held.run.task_id]


class SuspendingRacesSuite:
    """Transitions at the same time as a suspension."""

    async def test_two_people_at_once(
        self, store: CheckpointStore, other: CheckpointStore
    ) -> None:
        task_id = (await paused(store)).run.task_id
        results = await asyncio.gather(store.suspend([task_id]), other.suspend([task_id]))
        repeated = [getattr(one(each), "repeated", None) for each in results]
        assert sorted(map(str, repeated)) == ["False", "True"]
        lifted = await asyncio.gather(store.unsuspend([task_id]), other.unsuspend([task_id]))
        assert sorted(map(one, lifted)) == [False, True]

    async def test_suspending_races_with_the_response_that_completes_the_join(
        self, store: CheckpointStore, other: CheckpointStore
    ) -> None:
        """The task is either running and stops at its next pause, or it is held."""
        for _ in range(10):
            pause = await paused(store)
            claimed, [result] = await asyncio.gather(
                store.claim([a_claim(pause)], HERE, 1), other.suspend([pause.run.task_id])
            )
            assert isinstance(result, TaskSuspended)
            if result.state is TaskState.WAITING:
                assert isinstance(one(claimed), TaskReady)
            else:
                assert isinstance(one(claimed), JoinCompleted)
            assert await store.acquire(HERE, 10) == []

    async def test_suspending_races_with_acquiring(
        self, store: CheckpointStore, other: CheckpointStore
    ) -> None:
        for _ in range(10):
            pause = await ready(store)
            acquired, [result] = await asyncio.gather(
                store.acquire(HERE, 10), other.suspend([pause.run.task_id])
            )
            assert isinstance(result, TaskSuspended)
            assert (result.state is TaskState.RUNNING) == bool(acquired)
            assert await store.acquire(HERE, 10) == []

    async def test_suspending_races_with_the_end(
        self, store: CheckpointStore, other: CheckpointStore
    ) -> None:
        for _ in range(10):
            run = (await resumed(store)).run
            ended, [result] = await asyncio.gather(
                store.end([an_end(run)]), other.suspend([run.task_id])
            )
            assert isinstance(one(ended), EndCommitted)
            assert isinstance(result, TaskSuspended | SuspendRefused)
            summary = await summary_of_task(store, run.task_id)
            assert (summary.state, summary.suspended_at) == (TaskState.COMPLETED, None)

    async def test_resuming_races_with_the_response_that_completes_the_join(
        self, store: CheckpointStore, other: CheckpointStore
    ) -> None:
        for _ in range(10):
            pause = await suspended(store)
            claimed, lifted = await asyncio.gather(
                store.claim([a_claim(pause)], HERE, 1), other.unsuspend([pause.run.task_id])
            )
            assert lifted == [True]
            acquired = await store.acquire(HERE, 10)
            assert isinstance(one(claimed), JoinCompleted) != bool(acquired)
