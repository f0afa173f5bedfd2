"""Sleeps: calls of a pause that time answers."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from meshpoint.model.calls import FIRST, Join
from meshpoint.model.ids import AgentName, TaskId, new_id
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.tasks import CallState, PlannedCall, TaskState
from meshpoint.model.transitions import CancelCommitted, JoinCompleted, PauseCommitted, TaskReady
from meshpoint.model.waits import INTERRUPTED, SLEEP_PEER, Sleep
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    AGENT,
    HERE,
    HOUR,
    LEASE,
    SECOND,
    THERE,
    a_cancel,
    a_claim,
    a_pause,
    a_requester,
    one,
    row,
)


def a_sleep(call_id: str, duration: timedelta, outcome: Ok[None] | None = None) -> PlannedCall:
    """A sleep as part of a pause."""
    headers = Sleep(call_id, duration).to_headers()
    return PlannedCall(
        TaskId(new_id()),
        call_id,
        AgentName(SLEEP_PEER),
        b"{}",
        None,
        headers=headers,
        outcome=outcome,
    )


class SleepSuite:
    """A sleep ends with a result when its time has come. No peer gets a message."""

    async def test_a_sleep_ends_with_a_result(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = a_pause(a_sleep("nap", HOUR))
        assert await store.pause([pause]) == [PauseCommitted(TaskState.WAITING, ())]
        summary, (nap,) = await row(store, pause.run.task_id)
        assert (summary.wake_at, summary.waiting_for) == (clock.now() + HOUR, ("sleep",))
        assert nap.state is CallState.PENDING
        clock.advance(HOUR - SECOND)
        assert await store.expire(HERE, 10, 1) == []
        clock.advance(SECOND)
        assert (await store.due(HERE, 10)).expired == 1
        expired = one(await store.expire(HERE, 10, 1))
        assert isinstance(expired.join_result, JoinCompleted)
        assert expired.join_result.task.outcomes == (("nap", AgentName(SLEEP_PEER), Ok(None)),)
        assert expired.cancels == ()
        assert await store.expire(THERE, 10, 1) == []

    async def test_nothing_is_sent_for_a_sleep(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = a_pause(a_sleep("nap", HOUR), "a")
        committed = one(await store.pause([pause]))
        assert isinstance(committed, PauseCommitted)
        assert [send.peer for send in committed.dispatches] == [pause.calls[1].peer]
        assert one(await store.pause([pause])) == committed
        await store.confirm_sent(committed.dispatches)
        clock.advance(10 * LEASE)
        assert await store.unsent(AGENT, 10) == []

    async def test_a_sleep_counts_as_a_result_of_a_join(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = a_pause(a_sleep("nap", SECOND), "a", join=FIRST)
        await store.pause([pause])
        clock.advance(SECOND)
        expired = one(await store.expire(HERE, 10, 0))
        assert isinstance(expired.join_result, TaskReady)
        assert [notice.sub_task_id for notice in expired.cancels] == [pause.calls[1].sub_task_id]

    async def test_an_answer_closes_a_sleep_without_a_cancel(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = a_pause(a_sleep("nap", HOUR), "a", join=FIRST)
        await store.pause([pause])
        arrival = one(await store.claim([a_claim(pause, "a")], HERE, 1))
        assert isinstance(arrival, JoinCompleted)
        assert arrival.cancels == ()
        closed = arrival.task.outcomes[0][2]
        assert isinstance(closed, Failed)
        assert closed.kind is FailureKind.CANCELLED
        clock.advance(10 * LEASE)
        assert await store.unsent(AGENT, 10) == []

    async def test_a_cancelled_task_cancels_no_sleep(self, store: CheckpointStore) -> None:
        pause = a_pause(a_sleep("nap", HOUR))
        await store.pause([pause])
        cancelled = one(await store.cancel([a_cancel(pause.run.task_id)]))
        assert isinstance(cancelled, CancelCommitted)
        assert cancelled.cancels == ()

    async def test_the_deadlines_of_a_task_and_a_join_interrupt_a_sleep(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        requester = a_requester(deadline=clock.now() + SECOND)
        late = a_pause(a_sleep("nap", HOUR), requester=requester)
        joined = a_pause(a_sleep("nap", HOUR), join=Join(deadline=SECOND))
        await store.pause([late, joined])
        clock.advance(SECOND)
        for expired in await store.expire(HERE, 10, 2):
            assert isinstance(expired.join_result, JoinCompleted)
            assert [each[2] for each in expired.join_result.task.outcomes] == [INTERRUPTED]

    async def test_a_sleep_that_has_passed_needs_no_time(self, store: CheckpointStore) -> None:
        pause = a_pause(a_sleep("nap", timedelta(), Ok(None)))
        assert await store.pause([pause]) == [PauseCommitted(TaskState.READY, ())]
        task = one(await store.acquire(HERE, 10))
        assert task.outcomes == (("nap", AgentName(SLEEP_PEER), Ok(None)),)

    async def test_a_repeated_pause_keeps_the_end_of_its_sleep(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = a_pause(a_sleep("nap", HOUR))
        await store.pause([pause])
        clock.advance(SECOND)
        assert one(await store.pause([replace(pause)])) == PauseCommitted(TaskState.WAITING, ())
        summary, _ = await row(store, pause.run.task_id)
        assert summary.wake_at == clock.now() - SECOND + HOUR

    async def test_a_sleep_that_has_passed_wins_the_race_before_anything_is_sent(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = a_pause(a_sleep("nap", timedelta(), Ok(None)), "a", join=FIRST)
        assert await store.pause([pause]) == [PauseCommitted(TaskState.READY, ())]
        clock.advance(10 * LEASE)
        assert await store.unsent(AGENT, 10) == []
        task = one(await store.acquire(HERE, 10))
        (_, _, slept), (_, _, closed) = task.outcomes
        assert slept == Ok(None)
        assert isinstance(closed, Failed)
        assert closed.kind is FailureKind.CANCELLED
