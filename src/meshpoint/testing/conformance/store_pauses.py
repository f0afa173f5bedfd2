"""Checkpoints, and the deadlines of the calls that a pause waits for."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from meshpoint.model.calls import ALL, AT_LEAST, FIRST, Join
from meshpoint.model.ids import TaskId, new_id
from meshpoint.model.tasks import NO_DEADLINE, Dispatch, Resumable, TaskState
from meshpoint.model.transitions import (
    DuplicateOutcome,
    ExpiryResult,
    Fenced,
    JoinCompleted,
    PastDeadline,
    PauseCommitted,
    ProgressRecorded,
    StillWaiting,
    TaskReady,
    UnknownCall,
)
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    AGENT,
    FOREIGNER,
    HERE,
    HOUR,
    PEER,
    SECOND,
    STRANGER,
    TIMEOUT,
    TIMINGS,
    a_call,
    a_cancel,
    a_claim,
    a_pause,
    a_progress,
    a_requester,
    a_run,
    an_end,
    answered,
    begun,
    cancels_to_send,
    ended,
    error,
    kinds,
    ok,
    one,
    outcomes,
    paused,
    ready,
    resumed,
    row,
    state_of,
    sub,
    taken_over,
    write_end,
    write_pause,
)

SOON = 5 * SECOND


def taken(expired: ExpiryResult) -> Resumable:
    """The task that `expired` resumed."""
    assert isinstance(expired.join_result, JoinCompleted)
    return expired.join_result.task


def cancelled_calls(expired: ExpiryResult) -> list[TaskId]:
    """The calls whose peers are sent a cancel."""
    return [notice.sub_task_id for notice in expired.cancels]


class PauseSuite:
    """Pauses, expired calls and joins, and status updates that extend idle deadlines."""

    async def test_call_ids_may_have_any_characters(self, store: CheckpointStore) -> None:
        ids = ("a\x1fb", "\x1e", "{}", '","', "\\", "NULL", "é\n")
        pause, other = a_pause(*ids), a_pause()
        assert all(
            isinstance(result, PauseCommitted) for result in await store.pause([other, pause])
        )
        task = await resumed(store, pause)
        assert outcomes(task) == {call_id: ok(call_id) for call_id in ids}
        assert outcomes(await resumed(store, other)) == {"a": ok("a")}

    async def test_first_pause_dispatches(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = a_pause("b", "a")
        deadline = clock.now() + TIMEOUT
        dispatches = tuple(
            Dispatch(
                AGENT,
                pause.run.task_id,
                1,
                call.sub_task_id,
                PEER,
                call.body,
                dict(call.headers),
                deadline,
                attempt=1,
            )
            for call in pause.calls
        )
        assert await store.pause([pause]) == [PauseCommitted(TaskState.WAITING, dispatches)]
        summary, calls = await row(store, pause.run.task_id)
        assert (summary.generation, summary.fence, summary.attempt, summary.owner) == (
            1,
            1,
            0,
            None,
        )
        assert (summary.completed, summary.expected) == (0, 2)
        assert [call.call_id for call in calls] == ["b", "a"]

    async def test_a_repeated_pause_finds_itself(self, store: CheckpointStore) -> None:
        first_pause = a_pause("a", "b")
        first = await store.pause([first_pause])
        before = await row(store, first_pause.run.task_id)
        assert await store.pause([first_pause]) == first
        assert await row(store, first_pause.run.task_id) == before

    async def test_repeated_later_pause_finds_itself(self, store: CheckpointStore) -> None:
        again = a_pause("c", run=(await resumed(store)).run)
        first = await store.pause([again])
        assert await store.pause([again]) == first
        assert (await row(store, again.run.task_id))[0].generation == 2

    async def test_late_pause_finds_itself(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store, requester=a_requester(deadline=clock.now() + SECOND))
        clock.advance(2 * SECOND)
        await write_pause(store, pause)

    async def test_first_pause_over_other_run_is_fenced(self, store: CheckpointStore) -> None:
        for run in (
            await begun(store),
            (await paused(store)).run,
            (await resumed(store)).run,
            await ended(store),
        ):
            before = await row(store, run.task_id)
            assert await store.pause([a_pause(run=a_run(run.task_id))]) == [Fenced()]
            assert await row(store, run.task_id) == before

    async def test_a_later_pause_without_a_row_is_fenced(self, store: CheckpointStore) -> None:
        run = replace(a_run(), fence=1, generation=1)
        assert await store.pause([a_pause(run=run)]) == [Fenced()]
        assert await store.task(run.task_id) is None

    async def test_of_two_runs_of_one_new_task_one_commits(self, store: CheckpointStore) -> None:
        task_id = TaskId(new_id())
        results = await store.pause([a_pause(run=a_run(task_id)), a_pause(run=a_run(task_id))])
        assert sorted(type(result).__name__ for result in results) == ["Fenced", "PauseCommitted"]

    async def test_a_pause_keeps_the_fence_of_its_run(self, store: CheckpointStore) -> None:
        run = await begun(store)
        await store.pause([a_pause(run=run)])
        summary, _ = await row(store, run.task_id)
        assert (summary.fence, summary.generation, summary.state) == (
            run.fence,
            1,
            TaskState.WAITING,
        )

    async def test_zombie_pause_is_fenced(self, store: CheckpointStore, clock: FakeClock) -> None:
        zombie = (await resumed(store)).run
        await taken_over(store, clock)
        before = await row(store, zombie.task_id)
        assert await store.pause([a_pause("z", run=zombie)]) == [Fenced()]
        assert await row(store, zombie.task_id) == before

    async def test_pause_after_own_end_is_fenced(self, store: CheckpointStore) -> None:
        run = await ended(store)
        before = await row(store, run.task_id)
        assert await store.pause([a_pause(run=run)]) == [Fenced()]
        assert await row(store, run.task_id) == before

    async def test_zombie_after_next_pause(self, store: CheckpointStore, clock: FakeClock) -> None:
        zombie = (await resumed(store)).run
        await paused(store, "b", run=(await taken_over(store, clock)).run)
        before = await row(store, zombie.task_id)
        assert await store.pause([a_pause("z", run=zombie)]) == [Fenced()]
        assert await row(store, zombie.task_id) == before

    async def test_pause_past_deadline(self, store: CheckpointStore, clock: FakeClock) -> None:
        requester = a_requester(deadline=clock.now() + SECOND)
        fresh = a_pause(requester=requester)
        run = (await resumed(store, await paused(store, requester=requester))).run
        before = await row(store, run.task_id)
        clock.advance(2 * SECOND)
        assert await store.pause([fresh, a_pause(run=run, requester=requester)]) == [
            PastDeadline(),
            PastDeadline(),
        ]
        assert await store.task(fresh.run.task_id) is None
        assert await row(store, run.task_id) == before
        await write_end(store, an_end(run, TaskState.FAILED))

    async def test_task_deadline_caps_call(self, store: CheckpointStore, clock: FakeClock) -> None:
        deadline = clock.now() + 20 * SECOND
        pause = a_pause(
            a_call("long", timeout=HOUR),
            a_call("short", timeout=SECOND),
            requester=a_requester(deadline=deadline),
        )
        committed = await write_pause(store, pause)
        assert [dispatch.deadline for dispatch in committed.dispatches] == [
            deadline,
            clock.now() + SECOND,
        ]

    async def test_what_was_checkpointed_comes_back(self, store: CheckpointStore) -> None:
        context = {
            "flags": {"ünï": [1, 2.5, None, True]},
            "response_buffer": "so far",
            "big": 2**60,
        }
        state = bytes(range(256)) * 300
        task = await resumed(
            store, await paused(store, context=copy.deepcopy(context), state=state)
        )
        assert (task.context, task.state, task.state_format, task.requester) == (
            context,
            state,
            "travel/1",
            a_requester(),
        )
        assert not task.cancel_requested

    async def test_checkpoint_is_a_copy(self, store: CheckpointStore, clock: FakeClock) -> None:
        context = {"flags": {"list": [1]}}
        pause = await paused(store, context=context)
        context["flags"]["list"].append(2)
        pause.calls[0].headers["late"] = 1
        clock.advance(TIMINGS.dispatch_lease + SECOND)
        dispatch = one(await store.unsent(AGENT, 10))
        assert isinstance(dispatch, Dispatch)
        assert "late" not in dispatch.headers
        assert (await resumed(store, pause)).context == {"flags": {"list": [1]}}

    async def test_call_failed_before_send_is_not_dispatched(self, store: CheckpointStore) -> None:
        pause = a_pause(a_call("deep", outcome=error()), "b")
        committed = await write_pause(store, pause)
        assert [dispatch.sub_task_id for dispatch in committed.dispatches] == [sub(pause, "b")]
        assert (await row(store, pause.run.task_id))[0].completed == 1
        assert kinds(await resumed(store, pause, "b")) == ["error", "ok"]

    @pytest.mark.parametrize("join", [ALL, FIRST], ids=["all", "first"])
    async def test_join_met_at_once_makes_ready(self, store: CheckpointStore, join: Join) -> None:
        pause = a_pause(
            a_call("a", outcome=error("a")), a_call("b", outcome=error("b")), join=join
        )
        assert await store.pause([pause]) == [PauseCommitted(TaskState.READY, ())]
        assert await store.pause([pause]) == [PauseCommitted(TaskState.READY, ())]
        assert outcomes(one(await store.acquire(HERE, 10))) == {"a": error("a"), "b": error("b")}

    async def test_failure_before_send_leaves_first_open(self, store: CheckpointStore) -> None:
        pause = await paused(store, a_call("a", outcome=error()), "b", join=FIRST)
        assert kinds(await resumed(store, pause, "b")) == ["error", "ok"]

    async def test_every_pause_opens_a_new_generation(self, store: CheckpointStore) -> None:
        first = await paused(store, "a", "b")
        second = await paused(store, "c", run=(await resumed(store, first)).run, state=b"second")
        task = await resumed(store, second)
        assert (task.run.generation, task.run.fence, task.state) == (2, 3, b"second")
        assert list(outcomes(task)) == ["c"]

    async def test_response_of_earlier_pause_is_ignored(self, store: CheckpointStore) -> None:
        first = await paused(store, "a", "b", join=FIRST)
        task = await resumed(store, first, "a")
        second = await paused(store, "a", run=task.run)
        before = await row(store, first.run.task_id)
        late = await store.claim([a_claim(first, "a"), a_claim(first, "b")], HERE, 1)
        assert all(isinstance(arrival, UnknownCall | DuplicateOutcome) for arrival in late)
        assert await row(store, first.run.task_id) == before
        assert outcomes(await resumed(store, second)) == {"a": ok("a")}

    async def test_a_pause_deletes_the_calls_that_are_done(self, store: CheckpointStore) -> None:
        second = await paused(
            store, "c", run=(await resumed(store, await paused(store, "a", "b"))).run
        )
        assert [call.call_id for call in (await row(store, second.run.task_id))[1]] == ["c"]

    async def test_cancel_survives_pause(self, store: CheckpointStore, clock: FakeClock) -> None:
        first = await paused(store, "a", "b", join=FIRST)
        await paused(store, "c", run=(await resumed(store, first, "a")).run)
        assert sub(first, "b") in await cancels_to_send(store, clock)

    async def test_pause_resets_attempt(self, store: CheckpointStore, clock: FakeClock) -> None:
        await resumed(store)
        task = await taken_over(store, clock)
        assert task.attempt == 2
        pause = await paused(store, run=task.run)
        assert (await row(store, task.run.task_id))[0].attempt == 0
        assert (await resumed(store, pause)).attempt == 1

    async def test_no_early_expiry(self, store: CheckpointStore, clock: FakeClock) -> None:
        await paused(store, "a", join=Join(deadline=TIMEOUT))
        clock.advance(TIMEOUT - SECOND)
        assert await store.expire(HERE, 10, 1) == []

    async def test_expired_call_times_out(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store, a_call("a", timeout=SOON), "b")
        clock.advance(SOON + SECOND)
        expired = one(await store.expire(HERE, 10, 1))
        assert (expired.task_id, expired.timed_out) == (pause.run.task_id, (sub(pause, "a"),))
        assert isinstance(expired.join_result, StillWaiting)
        assert cancelled_calls(expired) == [sub(pause, "a")]
        assert await cancels_to_send(store, clock) == [sub(pause, "a")]
        assert await store.expire(HERE, 10, 1) == []
        assert kinds(await resumed(store, pause, "b")) == ["timeout", "ok"]

    async def test_last_timeout_resumes(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store, "a", "b")
        await answered(store, pause, "a")
        clock.advance(TIMEOUT + SECOND)
        task = taken(one(await store.expire(HERE, 10, 1)))
        assert kinds(task) == ["ok", "timeout"]
        assert (task.run.fence, task.run.generation, task.attempt) == (2, 1, 1)
        assert await store.renew([task.run], HERE) == []
        assert (await row(store, task.run.task_id))[0].owner == HERE.id

    async def test_expire_without_slot(self, store: CheckpointStore, clock: FakeClock) -> None:
        await paused(store)
        clock.advance(TIMEOUT + SECOND)
        assert isinstance(one(await store.expire(HERE, 10, 0)).join_result, TaskReady)
        assert kinds(one(await store.acquire(HERE, 10))) == ["timeout"]

    async def test_expire_slot_limit(self, store: CheckpointStore, clock: FakeClock) -> None:
        for _ in range(3):
            await paused(store)
        clock.advance(TIMEOUT + SECOND)
        thens = [type(expired.join_result).__name__ for expired in await store.expire(HERE, 10, 2)]
        assert sorted(thens) == ["JoinCompleted", "JoinCompleted", "TaskReady"]

    async def test_expire_unknown_format(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store)
        clock.advance(TIMEOUT + SECOND)
        for expired in await store.expire(STRANGER, 10, 1):
            assert isinstance(expired.join_result, TaskReady)
        assert await state_of(store, pause.run.task_id) in {TaskState.WAITING, TaskState.READY}

    async def test_expire_limit(self, store: CheckpointStore, clock: FakeClock) -> None:
        tasks = {(await paused(store)).run.task_id for _ in range(3)}
        clock.advance(TIMEOUT + SECOND)
        first, second = await store.expire(HERE, 2, 9), await store.expire(HERE, 2, 9)
        assert (len(first), len(second)) == (2, 1)
        assert {expired.task_id for expired in first + second} == tasks

    async def test_expire_own_agent_only(self, store: CheckpointStore, clock: FakeClock) -> None:
        await paused(store)
        clock.advance(TIMEOUT + SECOND)
        assert await store.expire(FOREIGNER, 10, 1) == []

    async def test_timeout_is_no_result(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store, a_call("a", timeout=SOON), "b", "c", join=FIRST)
        clock.advance(SOON + SECOND)
        assert isinstance(one(await store.expire(HERE, 10, 1)).join_result, StillWaiting)
        assert kinds(await resumed(store, pause, "c")) == ["timeout", "cancelled", "ok"]

    async def test_join_no_longer_possible(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store, "a", "b", join=AT_LEAST(2))
        await answered(store, pause, "a")
        clock.advance(TIMEOUT + SECOND)
        assert kinds(taken(one(await store.expire(HERE, 10, 1)))) == ["ok", "timeout"]

    async def test_join_deadline_resumes(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store, "a", "b", "c", join=Join(deadline=SOON))
        await store.claim([a_claim(pause, "b", error())], HERE, 1)
        clock.advance(SOON + SECOND)
        expired = one(await store.expire(HERE, 10, 1))
        assert kinds(taken(expired)) == ["timeout", "error", "timeout"]
        assert set(expired.timed_out) == {sub(pause, "a"), sub(pause, "c")}
        assert set(cancelled_calls(expired)) == {sub(pause, "a"), sub(pause, "c")}

    async def test_join_deadline_no_slot(self, store: CheckpointStore, clock: FakeClock) -> None:
        await paused(store, "a", "b", join=AT_LEAST(2).within(SOON))
        clock.advance(SOON + SECOND)
        assert isinstance(one(await store.expire(HERE, 10, 0)).join_result, TaskReady)
        assert kinds(one(await store.acquire(HERE, 10))) == ["timeout", "timeout"]

    async def test_join_deadline_per_pause(self, store: CheckpointStore, clock: FakeClock) -> None:
        first = await paused(store, join=Join(deadline=SOON))
        await paused(store, "b", run=(await resumed(store, first)).run)
        clock.advance(SOON + SECOND)
        assert await store.expire(HERE, 10, 1) == []

    async def test_response_after_timeout(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store, a_call("a", timeout=SOON), "b")
        clock.advance(SOON + SECOND)
        await store.expire(HERE, 10, 1)
        before = await row(store, pause.run.task_id)
        assert isinstance(
            one(await store.claim([a_claim(pause, "a")], HERE, 1)), DuplicateOutcome | UnknownCall
        )
        assert await row(store, pause.run.task_id) == before

    async def test_response_before_sweep(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store)
        clock.advance(TIMEOUT + SECOND)
        assert kinds(await resumed(store, pause)) == ["ok"]
        assert await store.expire(HERE, 10, 1) == []

    async def test_expire_waiting_only(self, store: CheckpointStore, clock: FakeClock) -> None:
        await ready(store)
        await resumed(store)
        await ended(store)
        await store.cancel([a_cancel((await paused(store)).run.task_id)])
        clock.advance(TIMEOUT + SECOND)
        assert await store.expire(HERE, 10, 9) == []

    async def test_progress_tells_whom_to_forward_to(self, store: CheckpointStore) -> None:
        pause = await paused(store, "a", a_call("b", idle_timeout=SOON))
        recorded = ProgressRecorded(pause.run.task_id, a_requester())
        assert await store.record_progress([a_progress(pause, "a"), a_progress(pause, "b")]) == [
            recorded,
            recorded,
        ]

    async def test_silent_peer_times_out(self, store: CheckpointStore, clock: FakeClock) -> None:
        await paused(store, a_call("a", idle_timeout=SOON))
        clock.advance(SOON + SECOND)
        assert kinds(taken(one(await store.expire(HERE, 10, 1)))) == ["timeout"]

    async def test_a_peer_has_more_time_after_a_gap(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        """Its caller's replicas were stopped, or the broker was."""
        limited = await paused(store, a_call("a", timeout=HOUR, idle_timeout=SOON))
        await paused(store, a_call("a", timeout=None, idle_timeout=SOON))
        clock.advance(HOUR)
        (expired,) = await store.expire(HERE, 10, 2)
        assert expired.task_id == limited.run.task_id
        assert (await store.due(HERE, 10)).expired == 0
        clock.advance(SOON)
        assert kinds(taken(one(await store.expire(HERE, 10, 1)))) == ["timeout"]

    async def test_progress_until_deadline(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store, a_call("a", timeout=12 * SECOND, idle_timeout=SOON))
        for _ in range(3):
            clock.advance(4 * SECOND - SECOND / 4)
            assert await store.expire(HERE, 10, 1) == []
            await store.record_progress([a_progress(pause)])
        clock.advance(SECOND)
        assert kinds(taken(one(await store.expire(HERE, 10, 1)))) == ["timeout"]

    async def test_progress_without_deadline(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await paused(store, a_call("a", timeout=None, idle_timeout=SOON))
        (dispatch,) = await store.find_dispatches([(pause.run.task_id, sub(pause, "a"))])
        assert dispatch is not None
        assert dispatch.deadline == NO_DEADLINE
        for _ in range(100):
            clock.advance(SOON - SECOND / 2)
            assert await store.expire(HERE, 10, 1) == []
            await store.record_progress([a_progress(pause)])
        (call,) = (await row(store, pause.run.task_id))[1]
        assert (call.deadline, call.absolute_deadline) == (clock.now() + SOON, None)
        clock.advance(SOON)
        assert kinds(taken(one(await store.expire(HERE, 10, 1)))) == ["timeout"]

    async def test_a_deadline_of_the_task_limits_calls_without_their_own(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        deadline = clock.now() + 2 * SOON
        call = a_call("a", timeout=None, idle_timeout=SOON)
        pause = await paused(store, call, requester=a_requester(deadline=deadline))
        clock.advance(SOON - SECOND / 2)
        await store.record_progress([a_progress(pause)])
        (shown,) = (await row(store, pause.run.task_id))[1]
        assert (shown.absolute_deadline, shown.deadline) == (deadline, clock.now() + SOON)
        clock.advance(SOON - SECOND)
        await store.record_progress([a_progress(pause)])
        (shown,) = (await row(store, pause.run.task_id))[1]
        assert shown.deadline == deadline

    async def test_progress_keeps_timeout(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store)
        clock.advance(TIMEOUT - SECOND)
        await store.record_progress([a_progress(pause)])
        clock.advance(2 * SECOND)
        assert len(await store.expire(HERE, 10, 1)) == 1

    async def test_small_extension_skipped(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store, a_call("a", idle_timeout=10 * SECOND))
        clock.advance(SECOND / 2)
        assert one(await store.record_progress([a_progress(pause)])) is not None
        clock.advance(9.75 * SECOND)
        assert len(await store.expire(HERE, 10, 1)) == 1

    async def test_stray_progress_ignored(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store, a_call("a", idle_timeout=SOON))
        done = await paused(store, "a", "b")
        await answered(store, done, "a")
        clock.advance(4 * SECOND)
        updates = [
            a_progress(pause, sender="mallory"),
            a_progress(done, "a"),
            replace(a_progress(pause), sub_task_id=TaskId("nobody")),
            replace(a_progress(pause), task_id=TaskId("nobody")),
            a_progress(done, "b"),
        ]
        recorded = ProgressRecorded(done.run.task_id, a_requester())
        assert await store.record_progress(updates) == [None, None, None, None, recorded]
        clock.advance(2 * SECOND)
        assert [expired.task_id for expired in await store.expire(HERE, 10, 1)] == [
            pause.run.task_id
        ]
