"""Deadlines of calls and joins, and how progress extends them."""

from __future__ import annotations

from dataclasses import replace

from meshpoint.adapters.inprocess.clock import FakeClock
from meshpoint.model.calls import AT_LEAST, FIRST, Join
from meshpoint.model.checkpoint import (
    AllArrived,
    Duplicate,
    Expired,
    MadeReady,
    ProgressNoted,
    Resumable,
    StillWaiting,
    TaskState,
    Unknown,
)
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.conformance.build import (
    HERE,
    SECOND,
    STRANGER,
    TIMEOUT,
    a_call,
    a_cancel,
    a_claim,
    a_progress,
    a_replica,
    a_requester,
    answered,
    cancels_to_send,
    ended,
    error,
    kinds,
    one,
    paused,
    ready,
    resumed,
    row,
    state_of,
    sub,
)

SOON = 5 * SECOND
FOREIGNER = a_replica(agent=AgentName("hotels"))


def taken(expired: Expired) -> Resumable:
    """The task that `expired` resumed."""
    assert isinstance(expired.then, AllArrived)
    return expired.then.task


def told(expired: Expired) -> list[TaskId]:
    """The calls whose peers are sent a cancel."""
    return [notice.sub_task_id for notice in expired.cancels]


class ExpireSuite:
    """Calls and joins past their deadline."""

    async def test_before_its_deadline_nothing_expires(self, store: CheckpointStore, clock: FakeClock) -> None:
        await paused(store, "a", join=Join(deadline=TIMEOUT))
        clock.advance(TIMEOUT - SECOND)
        assert await store.expire(HERE, 10, 1) == []

    async def test_an_expired_call_ends_as_a_timeout(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store, a_call("a", timeout=SOON), "b")
        clock.advance(SOON + SECOND)
        expired = one(await store.expire(HERE, 10, 1))
        assert (expired.task_id, expired.timed_out) == (pause.run.task_id, (sub(pause, "a"),))
        assert isinstance(expired.then, StillWaiting)
        assert told(expired) == [sub(pause, "a")]
        assert await cancels_to_send(store, clock) == [sub(pause, "a")]
        assert await store.expire(HERE, 10, 1) == []
        assert kinds(await resumed(store, pause, "b")) == ["timeout", "ok"]

    async def test_the_last_expired_call_resumes_the_task(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store, "a", "b")
        await answered(store, pause, "a")
        clock.advance(TIMEOUT + SECOND)
        task = taken(one(await store.expire(HERE, 10, 1)))
        assert kinds(task) == ["ok", "timeout"]
        assert (task.run.fence, task.run.generation, task.attempt) == (2, 1, 1)
        assert await store.renew([task.run], HERE) == []
        assert (await row(store, task.run.task_id))[0].owner == HERE.id

    async def test_without_a_slot_an_expired_task_is_ready(self, store: CheckpointStore, clock: FakeClock) -> None:
        await paused(store)
        clock.advance(TIMEOUT + SECOND)
        assert isinstance(one(await store.expire(HERE, 10, 0)).then, MadeReady)
        assert kinds(one(await store.take(HERE, 10))) == ["timeout"]

    async def test_no_more_expired_tasks_are_taken_than_there_are_slots(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        for _ in range(3):
            await paused(store)
        clock.advance(TIMEOUT + SECOND)
        thens = [type(expired.then).__name__ for expired in await store.expire(HERE, 10, 2)]
        assert sorted(thens) == ["AllArrived", "AllArrived", "MadeReady"]

    async def test_an_expired_task_of_an_unknown_format_is_left_to_another(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await paused(store)
        clock.advance(TIMEOUT + SECOND)
        for expired in await store.expire(STRANGER, 10, 1):
            assert isinstance(expired.then, MadeReady)
        assert await state_of(store, pause.run.task_id) in {TaskState.WAITING, TaskState.READY}

    async def test_at_most_so_many_tasks_expire_at_a_time(self, store: CheckpointStore, clock: FakeClock) -> None:
        tasks = {(await paused(store)).run.task_id for _ in range(3)}
        clock.advance(TIMEOUT + SECOND)
        first, second = await store.expire(HERE, 2, 9), await store.expire(HERE, 2, 9)
        assert (len(first), len(second)) == (2, 1)
        assert {expired.task_id for expired in first + second} == tasks

    async def test_only_its_own_agents_tasks(self, store: CheckpointStore, clock: FakeClock) -> None:
        await paused(store)
        clock.advance(TIMEOUT + SECOND)
        assert await store.expire(FOREIGNER, 10, 1) == []

    async def test_a_timeout_counts_against_first(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store, a_call("a", timeout=SOON), "b", "c", join=FIRST)
        clock.advance(SOON + SECOND)
        assert isinstance(one(await store.expire(HERE, 10, 1)).then, StillWaiting)
        assert kinds(await resumed(store, pause, "c")) == ["timeout", "cancelled", "ok"]

    async def test_timeouts_meet_a_join_that_no_longer_can_be(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store, "a", "b", join=AT_LEAST(2))
        await answered(store, pause, "a")
        clock.advance(TIMEOUT + SECOND)
        assert kinds(taken(one(await store.expire(HERE, 10, 1)))) == ["ok", "timeout"]

    async def test_a_join_deadline_resumes_with_what_is_there(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store, "a", "b", "c", join=Join(deadline=SOON))
        await store.claim([a_claim(pause, "b", error())], HERE, 1)
        clock.advance(SOON + SECOND)
        expired = one(await store.expire(HERE, 10, 1))
        assert kinds(taken(expired)) == ["timeout", "error", "timeout"]
        assert set(expired.timed_out) == {sub(pause, "a"), sub(pause, "c")}
        assert set(told(expired)) == {sub(pause, "a"), sub(pause, "c")}

    async def test_a_join_deadline_without_a_slot(self, store: CheckpointStore, clock: FakeClock) -> None:
        await paused(store, "a", "b", join=AT_LEAST(2).within(SOON))
        clock.advance(SOON + SECOND)
        assert isinstance(one(await store.expire(HERE, 10, 0)).then, MadeReady)
        assert kinds(one(await store.take(HERE, 10))) == ["timeout", "timeout"]

    async def test_a_join_deadline_ends_with_its_pause(self, store: CheckpointStore, clock: FakeClock) -> None:
        first = await paused(store, join=Join(deadline=SOON))
        await paused(store, "b", run=(await resumed(store, first)).run)
        clock.advance(SOON + SECOND)
        assert await store.expire(HERE, 10, 1) == []

    async def test_a_response_after_the_timeout_changes_nothing(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await paused(store, a_call("a", timeout=SOON), "b")
        clock.advance(SOON + SECOND)
        await store.expire(HERE, 10, 1)
        before = await row(store, pause.run.task_id)
        assert isinstance(one(await store.claim([a_claim(pause, "a")], HERE, 1)), Duplicate | Unknown)
        assert await row(store, pause.run.task_id) == before

    async def test_a_response_before_the_sweep_counts_though_late(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await paused(store)
        clock.advance(TIMEOUT + SECOND)
        assert kinds(await resumed(store, pause)) == ["ok"]
        assert await store.expire(HERE, 10, 1) == []

    async def test_only_waiting_tasks_expire(self, store: CheckpointStore, clock: FakeClock) -> None:
        await ready(store)
        await resumed(store)
        await ended(store)
        await store.cancel([a_cancel((await paused(store)).run.task_id)])
        clock.advance(TIMEOUT + SECOND)
        assert await store.expire(HERE, 10, 9) == []


class ProgressSuite:
    """Status updates extend idle deadlines."""

    async def test_progress_tells_whom_to_forward_to(self, store: CheckpointStore) -> None:
        pause = await paused(store, "a", a_call("b", idle_timeout=SOON))
        noted = ProgressNoted(pause.run.task_id, a_requester())
        assert await store.progress([a_progress(pause, "a"), a_progress(pause, "b")]) == [noted, noted]

    async def test_a_silent_peer_times_out_early(self, store: CheckpointStore, clock: FakeClock) -> None:
        await paused(store, a_call("a", idle_timeout=SOON))
        clock.advance(SOON + SECOND)
        assert kinds(taken(one(await store.expire(HERE, 10, 1)))) == ["timeout"]

    async def test_progress_extends_the_idle_deadline_but_never_past_the_absolute_one(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await paused(store, a_call("a", timeout=12 * SECOND, idle_timeout=SOON))
        for _ in range(3):
            clock.advance(4 * SECOND - SECOND / 4)
            assert await store.expire(HERE, 10, 1) == []
            await store.progress([a_progress(pause)])
        clock.advance(SECOND)
        assert kinds(taken(one(await store.expire(HERE, 10, 1)))) == ["timeout"]

    async def test_progress_does_not_extend_a_call_without_an_idle_timeout(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await paused(store)
        clock.advance(TIMEOUT - SECOND)
        await store.progress([a_progress(pause)])
        clock.advance(2 * SECOND)
        assert len(await store.expire(HERE, 10, 1)) == 1

    async def test_a_small_extension_is_not_written(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store, a_call("a", idle_timeout=10 * SECOND))
        clock.advance(SECOND / 2)
        assert one(await store.progress([a_progress(pause)])) is not None
        clock.advance(9.75 * SECOND)
        assert len(await store.expire(HERE, 10, 1)) == 1

    async def test_progress_of_nobody_or_of_a_stranger_is_ignored(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause, done = await paused(store, a_call("a", idle_timeout=SOON)), await paused(store, "a", "b")
        await answered(store, done, "a")
        clock.advance(4 * SECOND)
        updates = [
            a_progress(pause, sender="mallory"),
            a_progress(done, "a"),
            replace(a_progress(pause), sub_task_id=TaskId("nobody")),
            replace(a_progress(pause), task_id=TaskId("nobody")),
            a_progress(done, "b"),
        ]
        noted = ProgressNoted(done.run.task_id, a_requester())
        assert await store.progress(updates) == [None, None, None, None, noted]
        clock.advance(2 * SECOND)
        assert [expired.task_id for expired in await store.expire(HERE, 10, 1)] == [pause.run.task_id]
