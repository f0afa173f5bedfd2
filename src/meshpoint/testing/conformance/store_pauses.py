"""What a pause writes, and when it must not write."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from meshpoint.adapters.inprocess.clock import FakeClock
from meshpoint.model.calls import ALL, FIRST
from meshpoint.model.checkpoint import (
    Committed,
    Dispatch,
    Duplicate,
    Ended,
    Fenced,
    PastDeadline,
    TaskState,
    Unknown,
)
from meshpoint.model.ids import TaskId, new_id
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.conformance.build import (
    AGENT,
    HERE,
    HOUR,
    PEER,
    SECOND,
    TIMEOUT,
    TIMINGS,
    a_call,
    a_claim,
    a_pause,
    a_requester,
    a_run,
    an_end,
    begun,
    cancels_to_send,
    ended,
    error,
    kinds,
    ok,
    one,
    outcomes,
    paused,
    resumed,
    row,
    sub,
    taken_over,
)


class PauseSuite:
    """Writing of checkpoints."""

    async def test_a_first_pause_waits_and_hands_out_its_dispatches_in_call_order(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
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
        assert await store.pause([pause]) == [Committed(TaskState.WAITING, dispatches)]
        summary, calls = await row(store, pause.run.task_id)
        assert (summary.generation, summary.fence, summary.attempt, summary.owner) == (1, 1, 0, None)
        assert (summary.completed, summary.expected) == (0, 2)
        assert [call.call_id for call in calls] == ["b", "a"]

    async def test_a_repeated_pause_finds_itself(self, store: CheckpointStore) -> None:
        first_pause = a_pause("a", "b")
        first = await store.pause([first_pause])
        before = await row(store, first_pause.run.task_id)
        assert await store.pause([first_pause]) == first
        assert await row(store, first_pause.run.task_id) == before

    async def test_a_repeated_pause_of_a_resumed_task_finds_itself(self, store: CheckpointStore) -> None:
        again = a_pause("c", run=(await resumed(store)).run)
        first = await store.pause([again])
        assert await store.pause([again]) == first
        assert (await row(store, again.run.task_id))[0].generation == 2

    async def test_a_repeated_pause_finds_itself_even_past_the_deadline(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await paused(store, requester=a_requester(deadline=clock.now() + SECOND))
        clock.advance(2 * SECOND)
        assert isinstance(one(await store.pause([pause])), Committed)

    async def test_a_first_pause_over_the_row_of_another_run_is_fenced(self, store: CheckpointStore) -> None:
        for run in (await begun(store), (await paused(store)).run, (await resumed(store)).run, await ended(store)):
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
        assert sorted(type(result).__name__ for result in results) == ["Committed", "Fenced"]

    async def test_a_pause_keeps_the_fence_of_its_run(self, store: CheckpointStore) -> None:
        run = await begun(store)
        await store.pause([a_pause(run=run)])
        summary, _ = await row(store, run.task_id)
        assert (summary.fence, summary.generation, summary.state) == (run.fence, 1, TaskState.WAITING)

    async def test_a_zombies_pause_changes_nothing(self, store: CheckpointStore, clock: FakeClock) -> None:
        zombie = (await resumed(store)).run
        await taken_over(store, clock)
        before = await row(store, zombie.task_id)
        assert await store.pause([a_pause("z", run=zombie)]) == [Fenced()]
        assert await row(store, zombie.task_id) == before

    async def test_a_pause_after_the_end_of_its_own_run_is_fenced(self, store: CheckpointStore) -> None:
        run = await ended(store)
        before = await row(store, run.task_id)
        assert await store.pause([a_pause(run=run)]) == [Fenced()]
        assert await row(store, run.task_id) == before

    async def test_a_zombies_pause_after_its_successors_pause_changes_nothing(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        zombie = (await resumed(store)).run
        await paused(store, "b", run=(await taken_over(store, clock)).run)
        before = await row(store, zombie.task_id)
        assert await store.pause([a_pause("z", run=zombie)]) == [Fenced()]
        assert await row(store, zombie.task_id) == before

    async def test_a_pause_past_the_tasks_deadline_writes_nothing(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        requester = a_requester(deadline=clock.now() + SECOND)
        fresh, run = a_pause(requester=requester), (await resumed(store)).run
        before = await row(store, run.task_id)
        clock.advance(2 * SECOND)
        assert await store.pause([fresh, a_pause(run=run, requester=requester)]) == [PastDeadline(), PastDeadline()]
        assert await store.task(fresh.run.task_id) is None
        assert await row(store, run.task_id) == before
        assert isinstance(one(await store.end([an_end(run, TaskState.FAILED)])), Ended)

    async def test_a_calls_deadline_is_never_later_than_its_tasks(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        deadline = clock.now() + 20 * SECOND
        pause = a_pause(
            a_call("long", timeout=HOUR), a_call("short", timeout=SECOND), requester=a_requester(deadline=deadline)
        )
        committed = one(await store.pause([pause]))
        assert isinstance(committed, Committed)
        assert [dispatch.deadline for dispatch in committed.dispatches] == [deadline, clock.now() + SECOND]

    async def test_what_was_checkpointed_comes_back(self, store: CheckpointStore) -> None:
        context = {"flags": {"ünï": [1, 2.5, None, True]}, "response_buffer": "so far", "big": 2**60}
        state = bytes(range(256)) * 300
        task = await resumed(store, await paused(store, context=copy.deepcopy(context), state=state))
        assert (task.context, task.state, task.state_format, task.requester) == (
            context,
            state,
            "travel/1",
            a_requester(),
        )
        assert not task.cancel_requested

    async def test_later_mutation_of_the_live_values_does_not_reach_the_checkpoint(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        context = {"flags": {"list": [1]}}
        pause = await paused(store, context=context)
        context["flags"]["list"].append(2)
        pause.calls[0].headers["late"] = 1
        clock.advance(TIMINGS.dispatch_lease + SECOND)
        dispatch = one(await store.unsent(AGENT, 10))
        assert isinstance(dispatch, Dispatch)
        assert "late" not in dispatch.headers
        assert (await resumed(store, pause)).context == {"flags": {"list": [1]}}

    async def test_a_call_that_failed_before_it_was_sent_is_not_dispatched(self, store: CheckpointStore) -> None:
        pause = a_pause(a_call("deep", outcome=error()), "b")
        committed = one(await store.pause([pause]))
        assert isinstance(committed, Committed)
        assert [dispatch.sub_task_id for dispatch in committed.dispatches] == [sub(pause, "b")]
        assert (await row(store, pause.run.task_id))[0].completed == 1
        assert kinds(await resumed(store, pause, "b")) == ["error", "ok"]

    @pytest.mark.parametrize("join", [ALL, FIRST], ids=["all", "first"])
    async def test_a_join_met_at_once_makes_the_task_ready(self, store: CheckpointStore, join: object) -> None:
        pause = a_pause(a_call("a", outcome=error("a")), a_call("b", outcome=error("b")), join=join)  # type: ignore[arg-type]
        assert await store.pause([pause]) == [Committed(TaskState.READY, ())]
        assert await store.pause([pause]) == [Committed(TaskState.READY, ())]
        assert outcomes(one(await store.take(HERE, 10))) == {"a": error("a"), "b": error("b")}

    async def test_a_failure_before_sending_leaves_a_first_join_open(self, store: CheckpointStore) -> None:
        pause = await paused(store, a_call("a", outcome=error()), "b", join=FIRST)
        assert kinds(await resumed(store, pause, "b")) == ["error", "ok"]

    async def test_every_pause_opens_a_new_generation(self, store: CheckpointStore) -> None:
        first = await paused(store, "a", "b")
        second = await paused(store, "c", run=(await resumed(store, first)).run, state=b"second")
        task = await resumed(store, second)
        assert (task.run.generation, task.run.fence, task.state) == (2, 3, b"second")
        assert list(outcomes(task)) == ["c"]

    async def test_a_late_response_of_an_earlier_generation_changes_nothing(self, store: CheckpointStore) -> None:
        first = await paused(store, "a", "b", join=FIRST)
        task = await resumed(store, first, "a")
        second = await paused(store, "a", run=task.run)
        before = await row(store, first.run.task_id)
        late = await store.claim([a_claim(first, "a"), a_claim(first, "b")], HERE, 1)
        assert all(isinstance(arrival, Unknown | Duplicate) for arrival in late)
        assert await row(store, first.run.task_id) == before
        assert outcomes(await resumed(store, second)) == {"a": ok("a")}

    async def test_a_pause_deletes_the_calls_that_are_done(self, store: CheckpointStore) -> None:
        second = await paused(store, "c", run=(await resumed(store, await paused(store, "a", "b"))).run)
        assert [call.call_id for call in (await row(store, second.run.task_id))[1]] == ["c"]

    async def test_a_cancel_still_to_be_sent_survives_later_pauses(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        first = await paused(store, "a", "b", join=FIRST)
        await paused(store, "c", run=(await resumed(store, first, "a")).run)
        assert sub(first, "b") in await cancels_to_send(store, clock)

    async def test_a_pause_resets_the_attempt(self, store: CheckpointStore, clock: FakeClock) -> None:
        await resumed(store)
        task = await taken_over(store, clock)
        assert task.attempt == 2
        pause = await paused(store, run=task.run)
        assert (await row(store, task.run.task_id))[0].attempt == 0
        assert (await resumed(store, pause)).attempt == 1
