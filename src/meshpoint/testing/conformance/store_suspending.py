"""Tasks that a person has suspended: no replica acquires them, and nothing else stops."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeAlias

import pytest

from meshpoint.model.calls import FIRST, Join
from meshpoint.model.ids import TaskId
from meshpoint.model.outcomes import Failed
from meshpoint.model.tasks import DueCounts, Run, TaskState, TaskSummary
from meshpoint.model.transitions import (
    EndCommitted,
    Fenced,
    JoinCompleted,
    Pause,
    PauseCommitted,
    StillWaiting,
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
    NEWER,
    SECOND,
    STRANGER,
    THERE,
    TIMINGS,
    a_begin,
    a_call,
    a_cancel,
    a_claim,
    a_pause,
    a_release,
    a_run,
    an_end,
    answered,
    begun,
    cancels_to_send,
    error,
    kinds,
    one,
    outcomes,
    parked,
    paused,
    ready,
    reply_of,
    resumed,
    row,
    state_of,
    task_ids,
    write_cancel,
    write_end,
    write_pause,
)

Arranged: TypeAlias = Callable[[CheckpointStore], Awaitable[TaskId]]


async def suspend(store: CheckpointStore, task_id: TaskId) -> TaskState:
    """Suspend a task, which must succeed, and return its state."""
    result = one(await store.suspend([task_id]))
    assert isinstance(result, TaskSuspended)
    return result.state


async def suspended(store: CheckpointStore, *calls: str, **values: object) -> Pause:
    """Suspend a new task that waits for `calls`."""
    pause = await paused(store, *calls, **values)
    await suspend(store, pause.run.task_id)
    return pause


async def suspended_ready(store: CheckpointStore, **values: object) -> Pause:
    """Suspend a new task, then record outcomes for all its calls."""
    pause = await suspended(store, **values)
    assert isinstance(await answered(store, pause), TaskReady)
    return pause


async def suspending(store: CheckpointStore, pause: Pause | None = None) -> Run:
    """Suspend a running task that has its outcomes."""
    run = (await resumed(store, pause)).run
    assert await suspend(store, run.task_id) is TaskState.RUNNING
    return run


async def summary_of_task(store: CheckpointStore, task_id: TaskId) -> TaskSummary:
    """The summary of a task."""
    return (await row(store, task_id))[0]


async def nothing_is_acquired(store: CheckpointStore, clock: FakeClock) -> None:
    """Assert that no replica acquires a task, even after a long time."""
    for wait in (SECOND, 100 * LEASE):
        clock.advance(wait)
        assert (await store.due(HERE, 10)).ready == 0
        for replica in (HERE, THERE, NEWER):
            assert await store.acquire(replica, 10, 10) == []
            assert await store.acquire_parked(replica, 10, 10) == []
            assert await store.rescue(replica, 10, 10) == []


async def _waiting(store: CheckpointStore) -> TaskId:
    return (await paused(store)).run.task_id


async def _ready(store: CheckpointStore) -> TaskId:
    return (await ready(store)).run.task_id


async def _running(store: CheckpointStore) -> TaskId:
    return (await resumed(store)).run.task_id


async def _begun(store: CheckpointStore) -> TaskId:
    return (await begun(store)).task_id


async def _queued(store: CheckpointStore) -> TaskId:
    run = a_run()
    await store.begin([replace(a_begin(run), queued=True)])
    return run.task_id


SUSPENDABLE = pytest.mark.parametrize("arrange", [_waiting, _ready, _running, _begun, _queued])
"""Tasks in each state in which they can be suspended."""


class SuspendingSuite:
    """Suspended tasks: how they wait, become ready, run to their pause, and are resumed."""

    @SUSPENDABLE
    async def test_a_suspended_task_shows_since_when(
        self, store: CheckpointStore, clock: FakeClock, arrange: Arranged
    ) -> None:
        task_id = await arrange(store)
        before = await summary_of_task(store, task_id)
        assert before.suspended_at is None
        assert await suspend(store, task_id) is before.state
        since = clock.now()
        clock.advance(SECOND)
        assert await store.suspend([task_id]) == [TaskSuspended(before.state, repeated=True)]
        after = await summary_of_task(store, task_id)
        assert (after.state, after.suspended_at) == (before.state, since)
        assert (after.fence, after.generation, after.owner, after.attempt) == (
            before.fence,
            before.generation,
            before.owner,
            before.attempt,
        )

    @SUSPENDABLE
    async def test_resuming_restores_a_task(
        self, store: CheckpointStore, arrange: Arranged
    ) -> None:
        task_id = await arrange(store)
        before = await row(store, task_id)
        await suspend(store, task_id)
        assert await store.unsuspend([task_id]) == [True]
        assert await row(store, task_id) == before
        assert await store.unsuspend([task_id]) == [False]
        assert await row(store, task_id) == before

    async def test_a_waiting_task_becomes_ready_and_stays(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await suspended(store, "a", "b")
        task_id = pause.run.task_id
        assert isinstance(await answered(store, pause, "a"), StillWaiting)
        assert (await summary_of_task(store, task_id)).completed == 1
        assert isinstance(await answered(store, pause, "b"), TaskReady)
        assert await state_of(store, task_id) is TaskState.READY
        await nothing_is_acquired(store, clock)
        assert await store.unread(STRANGER, SECOND) == {}
        assert await store.unsuspend([task_id]) == [True]
        assert (await store.due(HERE, 10)).ready == 1
        task = one(await store.acquire(THERE, 10))
        assert (task.run.task_id, task.attempt, kinds(task)) == (task_id, 1, ["ok", "ok"])
        assert outcomes(task).keys() == {"a", "b"}
        await write_end(store, an_end(task.run))

    async def test_its_calls_are_sent(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await suspended(store)
        clock.advance(TIMINGS.dispatch_lease + SECOND)
        sent = one(await store.unsent(AGENT, 10))
        assert sent.task_id == pause.run.task_id

    async def test_many_responses_in_one_batch(self, store: CheckpointStore) -> None:
        held, free = await suspended(store, "a", "b"), await paused(store, "a", "b")
        claims = [a_claim(each, name) for name in "ab" for each in (held, free)]
        results = await store.claim(claims, HERE, 10)
        assert [type(each) for each in results] == [
            StillWaiting,
            StillWaiting,
            TaskReady,
            JoinCompleted,
        ]

    @pytest.mark.parametrize("join", [FIRST, Join(2)])
    async def test_calls_that_are_not_needed_are_cancelled(
        self, store: CheckpointStore, clock: FakeClock, join: Join
    ) -> None:
        pause = await suspended(store, "a", "b", "c", join=join)
        names = "ab"[: join.needed]
        result = await answered(store, pause, *names)
        assert isinstance(result, TaskReady)
        assert len(result.cancels) == 3 - len(names)
        assert len(await cancels_to_send(store, clock)) == 3 - len(names)
        assert await store.acquire(HERE, 10) == []

    async def test_a_repeated_response_finds_itself(self, store: CheckpointStore) -> None:
        pause = await suspended(store)
        claim = a_claim(pause)
        first = await store.claim([claim], HERE, 1)
        assert await store.claim([claim], HERE, 1) == first
        await store.unsuspend([pause.run.task_id])
        assert await store.claim([claim], HERE, 1) == first
        other = one(await store.claim([a_claim(pause, outcome=error())], HERE, 1))
        assert not isinstance(other, TaskReady | JoinCompleted)

    async def test_a_response_that_ran_the_task_first_finds_itself(
        self, store: CheckpointStore
    ) -> None:
        pause = await paused(store)
        claim = a_claim(pause)
        assert isinstance(one(await store.claim([claim], HERE, 1)), JoinCompleted)
        await suspend(store, pause.run.task_id)
        assert isinstance(one(await store.claim([claim], HERE, 1)), JoinCompleted)

    async def test_deadlines_of_calls_count(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        calls = [a_call(name, timeout=wait * SECOND) for name, wait in (("a", 30), ("b", 60))]
        pause = await paused(store, *calls)
        await suspend(store, pause.run.task_id)
        clock.advance(31 * SECOND)
        assert isinstance(one(await store.expire(HERE, 10, 10)).join_result, StillWaiting)
        clock.advance(30 * SECOND)
        assert (await store.due(HERE, 10)).expired == 1
        assert isinstance(one(await store.expire(HERE, 10, 10)).join_result, TaskReady)
        await nothing_is_acquired(store, clock)
        await store.unsuspend([pause.run.task_id])
        assert kinds(one(await store.acquire(HERE, 10))) == ["timeout", "timeout"]

    async def test_a_join_deadline_counts(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await suspended(store, "a", "b", join=Join(deadline=30 * SECOND))
        await answered(store, pause, "a")
        clock.advance(31 * SECOND)
        assert isinstance(one(await store.expire(HERE, 10, 10)).join_result, TaskReady)
        await nothing_is_acquired(store, clock)
        await store.unsuspend([pause.run.task_id])
        assert kinds(one(await store.acquire(HERE, 10))) == ["ok", "timeout"]

    async def test_a_ready_task_is_held(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause, free = await ready(store), await ready(store)
        await suspend(store, pause.run.task_id)
        assert task_ids(await store.acquire(HERE, 10)) == [free.run.task_id]
        clock.advance(HOUR)
        assert await store.acquire(THERE, 10) == []

    async def test_a_delayed_task_is_due_when_it_is_resumed(self, store: CheckpointStore) -> None:
        run = (await resumed(store)).run
        await store.release([a_release(run, not_before=HOUR)])
        await suspend(store, run.task_id)
        await store.unsuspend([run.task_id])
        assert task_ids(await store.acquire(HERE, 10)) == [run.task_id]

    async def test_a_running_task_continues_to_its_pause(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = await suspending(store)
        clock.advance(LEASE - SECOND)
        assert await store.renew([run], HERE) == []
        pause = a_pause(run=run)
        result = await write_pause(store, pause)
        assert (result.state, len(result.dispatches)) == (TaskState.WAITING, 1)
        summary = await summary_of_task(store, run.task_id)
        assert (summary.state, summary.suspended_at is None) == (TaskState.WAITING, False)
        assert one(await store.pause([pause])) == result
        assert isinstance(await answered(store, pause), TaskReady)
        await nothing_is_acquired(store, clock)

    async def test_a_running_task_that_pauses_without_a_call_to_send_is_held(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = await suspending(store)
        pause = a_pause(a_call("a", outcome=error()), run=run)
        assert await store.pause([pause]) == [PauseCommitted(TaskState.READY, ())]
        assert await store.pause([pause]) == [PauseCommitted(TaskState.READY, ())]
        await nothing_is_acquired(store, clock)
        await store.unsuspend([run.task_id])
        assert len(await store.acquire(HERE, 10)) == 1

    async def test_a_running_task_that_ends_just_ends(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = await suspending(store)
        assert isinstance(one(await store.end([an_end(run)])), EndCommitted)
        summary = await summary_of_task(store, run.task_id)
        assert (summary.state, summary.suspended_at) == (TaskState.COMPLETED, None)
        assert await store.suspend([run.task_id]) == [SuspendRefused(TaskState.COMPLETED)]
        assert await store.unsuspend([run.task_id]) == [False]
        await store.confirm_sent([await reply_of(store, run.task_id)])
        clock.advance(2 * TIMINGS.tombstone_ttl)
        assert await store.purge(AGENT, 10) == 1

    async def test_suspending_can_be_taken_back(self, store: CheckpointStore) -> None:
        run = await suspending(store)
        assert await store.unsuspend([run.task_id]) == [True]
        pause = a_pause(run=run)
        await write_pause(store, pause)
        assert isinstance(await answered(store, pause), JoinCompleted)

    async def test_a_released_task_is_held(self, store: CheckpointStore, clock: FakeClock) -> None:
        run = await suspending(store)
        release = a_release(run, not_before=SECOND)
        assert await store.release([release]) == [True]
        assert await store.release([release]) == [True]
        assert await state_of(store, run.task_id) is TaskState.READY
        await nothing_is_acquired(store, clock)
        await store.unsuspend([run.task_id])
        task = one(await store.acquire(THERE, 10))
        assert (task.run.generation, task.rescues, kinds(task)) == (run.generation, 0, ["ok"])

    async def test_a_task_without_a_pause_is_held_when_it_is_released(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = await begun(store)
        await suspend(store, run.task_id)
        await store.release([a_release(run)])
        await nothing_is_acquired(store, clock)
        await store.unsuspend([run.task_id])
        assert one(await store.acquire(STRANGER, 10)).request == b"request"

    async def test_a_lost_task_is_not_run_again(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = await suspending(store)
        clock.advance(LEASE + SECOND)
        assert (await store.due(HERE, 10)).lapsed == 1
        assert await store.rescue(THERE, 10, 10) == []
        summary = await summary_of_task(store, run.task_id)
        assert (summary.state, summary.owner, summary.rescues) == (TaskState.READY, None, 1)
        assert await store.due(THERE, 10) == DueCounts()
        assert await store.renew([run], HERE) == [run]
        await nothing_is_acquired(store, clock)
        for zombie in (
            await store.pause([a_pause(run=run)]),
            await store.end([an_end(run)]),
        ):
            assert zombie == [Fenced()]
        assert await store.release([a_release(run)]) == [False]
        await store.unsuspend([run.task_id])
        task = one(await store.acquire(THERE, 10))
        assert (task.run.task_id, task.attempt, task.rescues) == (run.task_id, 2, 1)
        assert task.run.fence > run.fence

    async def test_a_lost_task_without_a_reader_is_held(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = await suspending(store)
        clock.advance(2 * LEASE)
        assert await store.release_unread(STRANGER, 10) == [run.task_id]
        await nothing_is_acquired(store, clock)
        assert (await summary_of_task(store, run.task_id)).suspended_at is not None

    async def test_a_zombie_does_not_lift_it(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        zombie = (await resumed(store)).run
        clock.advance(LEASE + SECOND)
        run = one(await store.rescue(THERE, 10, 10)).run
        await suspend(store, run.task_id)
        assert await store.pause([a_pause(run=zombie)]) == [Fenced()]
        assert await store.end([an_end(zombie)]) == [Fenced()]
        assert (await summary_of_task(store, run.task_id)).suspended_at is not None

    async def test_a_task_that_is_parked_while_suspended_waits_for_a_person(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = await suspending(store)
        await store.release([a_release(run, parked="call 1")])
        assert await store.suspend([run.task_id]) == [
            TaskSuspended(TaskState.PARKED, repeated=True)
        ]
        clock.advance(SECOND)
        assert await store.acquire_parked(NEWER, 10) == []
        assert await store.unsuspend([run.task_id]) == [True]
        task = one(await store.acquire_parked(NEWER, 10))
        assert task.run.task_id == run.task_id

    async def test_an_offered_task_is_not_suspended_any_more(self, store: CheckpointStore) -> None:
        run = await suspending(store)
        await store.release([a_release(run, parked="call 1")])
        assert await store.unpark([run.task_id]) == [True]
        assert (await summary_of_task(store, run.task_id)).suspended_at is None
        assert task_ids(await store.acquire(HERE, 10)) == [run.task_id]

    async def test_a_task_that_was_parked_is_parked_again_when_it_is_lost(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        await parked(store)
        run = one(await store.acquire_parked(NEWER, 10)).run
        await suspend(store, run.task_id)
        clock.advance(LEASE + SECOND)
        assert await store.rescue(NEWER, 10, 10) == []
        assert await state_of(store, run.task_id) is TaskState.PARKED
        assert await store.acquire_parked(NEWER, 10) == []
        clock.advance(TIMINGS.parked_limit)
        overdue = one(await store.acquire_overdue(HERE, 10))
        assert (overdue.parked_reason, overdue.is_suspended) == ("call 1", True)

    async def test_other_tasks_are_refused(self, store: CheckpointStore) -> None:
        done, dead = (await resumed(store)).run, (await resumed(store)).run
        await write_end(store, an_end(done))
        await write_end(store, an_end(dead, TaskState.FAILED))
        cancelled, waiting = await _waiting(store), await _waiting(store)
        await write_cancel(store, a_cancel(cancelled))
        kept = (await parked(store)).task_id
        ids = [done.task_id, dead.task_id, cancelled, kept, TaskId("nobody"), waiting]
        before = [await row(store, task_id) for task_id in ids if task_id != "nobody"][:-1]
        assert await store.suspend(ids) == [
            SuspendRefused(TaskState.COMPLETED),
            SuspendRefused(TaskState.FAILED),
            SuspendRefused(TaskState.CANCELLED),
            SuspendRefused(TaskState.PARKED),
            SuspendRefused(None),
            TaskSuspended(TaskState.WAITING),
        ]
        assert [await row(store, task_id) for task_id in ids[:4]] == before
        assert await store.unsuspend(ids) == [False] * 5 + [True]
        assert await store.suspend([]) == []
        assert await store.unsuspend([]) == []

    async def test_one_task_twice(self, store: CheckpointStore) -> None:
        task_id = await _waiting(store)
        assert await store.suspend([task_id, task_id]) == [
            TaskSuspended(TaskState.WAITING),
            TaskSuspended(TaskState.WAITING, repeated=True),
        ]
        assert await store.unsuspend([task_id, task_id]) == [True, False]

    async def test_failures_meet_the_join_too(self, store: CheckpointStore) -> None:
        pause = await suspended(store)
        await store.claim([a_claim(pause, outcome=error())], HERE, 1)
        await store.unsuspend([pause.run.task_id])
        (outcome,) = outcomes(one(await store.acquire(HERE, 10))).values()
        assert isinstance(outcome, Failed)
