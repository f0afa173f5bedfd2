"""Looking up, beginning, ending and releasing tasks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshpoint.model.calls import FIRST
from meshpoint.model.ids import TaskId
from meshpoint.model.operations import Revived
from meshpoint.model.tasks import Reply, TaskState
from meshpoint.model.transitions import (
    BeginCommitted,
    DuplicateOutcome,
    EndCommitted,
    ExistingTask,
    Fenced,
    UnknownCall,
)
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    AGENT,
    HERE,
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
    begun,
    cancels_to_send,
    ended,
    existing,
    one,
    paused,
    resumed,
    row,
    state_of,
    sub,
    taken_over,
    task_ids,
    write_end,
)


class RunSuite:
    """Tasks that are looked up, begun, ended and released."""

    async def test_lookup_finds_the_rows_that_exist(self, store: CheckpointStore) -> None:
        waiting, running = (await paused(store)).run.task_id, (await begun(store)).task_id
        assert await store.lookup([waiting, TaskId("nobody"), running]) == {
            waiting: ExistingTask(waiting, AGENT, TaskState.WAITING),
            running: ExistingTask(running, AGENT, TaskState.RUNNING),
        }

    async def test_lookup_finds_the_order_of_a_request(self, store: CheckpointStore) -> None:
        begin = replace(a_begin(), order="!token")
        await store.begin([begin])
        await write_end(store, an_end(replace(begin.run, fence=1)))
        found = await store.lookup([begin.run.task_id])
        assert found[begin.run.task_id].order == "!token"

    async def test_lookup_of_nothing_finds_nothing(self, store: CheckpointStore) -> None:
        assert await store.lookup([]) == {}

    async def test_lookup_reply_and_age(self, store: CheckpointStore, clock: FakeClock) -> None:
        run = await ended(store, reply=b"answer")
        clock.advance(5 * SECOND)
        known = await existing(store, run.task_id)
        reply = Reply(
            AGENT,
            run.task_id,
            TaskState.COMPLETED,
            b"answer",
            a_requester(),
            5 * SECOND,
            fence=run.fence,
        )
        assert known == ExistingTask(run.task_id, AGENT, TaskState.COMPLETED, reply)

    async def test_begin_writes_a_running_row(self, store: CheckpointStore) -> None:
        run = a_run()
        assert await store.begin([a_begin(run)]) == [
            BeginCommitted(replace(run, fence=1, generation=0))
        ]
        summary, calls = await row(store, run.task_id)
        assert (
            summary.state,
            summary.generation,
            summary.fence,
            summary.attempt,
            summary.owner,
            calls,
        ) == (TaskState.RUNNING, 0, 1, 1, HERE.id, [])

    async def test_begin_keeps_request(self, store: CheckpointStore, clock: FakeClock) -> None:
        run = await begun(store)
        clock.advance(LEASE + SECOND)
        task = one(await store.rescue(STRANGER, 10))  # any format: there is no state yet
        assert (task.run.task_id, task.run.generation, task.run.fence) == (run.task_id, 0, 2)
        assert (task.request, task.outcomes, task.attempt, task.requester) == (
            b"request",
            (),
            2,
            a_requester(),
        )

    async def test_a_repeated_begin_finds_itself(self, store: CheckpointStore) -> None:
        begin = a_begin()
        first = await store.begin([begin])
        before = await row(store, begin.run.task_id)
        assert await store.begin([begin]) == first
        assert await row(store, begin.run.task_id) == before

    async def test_begin_records_order(self, store: CheckpointStore) -> None:
        begin = replace(a_begin(), order="02")
        await store.begin([begin])
        command = a_revive(begin.run.task_id, order="02", requester=a_requester(), adopt=True)
        assert await store.revive(command) == Revived(begin.run.task_id, AGENT, 0, repeated=True)

    async def test_begin_over_other_run_is_fenced(self, store: CheckpointStore) -> None:
        running, waiting, over = await begun(store), (await paused(store)).run, await ended(store)
        before = [await row(store, run.task_id) for run in (running, waiting, over)]
        begins = [a_begin(a_run(run.task_id)) for run in (running, waiting, over)]
        assert await store.begin(begins) == [Fenced(), Fenced(), Fenced()]
        assert [await row(store, run.task_id) for run in (running, waiting, over)] == before

    async def test_zombie_begin_is_fenced(self, store: CheckpointStore, clock: FakeClock) -> None:
        begin = a_begin()
        await store.begin([begin])
        await taken_over(store, clock)
        assert await store.begin([begin]) == [Fenced()]

    async def test_begin_results_in_argument_order(self, store: CheckpointStore) -> None:
        there = await begun(store)
        runs = [a_run(), a_run(there.task_id), a_run()]
        first, second, third = await store.begin([a_begin(run) for run in runs])
        assert isinstance(first, BeginCommitted)
        assert isinstance(third, BeginCommitted)
        assert (first.run.task_id, second, third.run.task_id) == (
            runs[0].task_id,
            Fenced(),
            runs[2].task_id,
        )

    @pytest.mark.parametrize("state", [TaskState.COMPLETED, TaskState.FAILED, TaskState.CANCELLED])
    async def test_an_end_keeps_the_reply(self, store: CheckpointStore, state: TaskState) -> None:
        run = (await resumed(store)).run
        reply = Reply(AGENT, run.task_id, state, b"answer", a_requester(), fence=run.fence)
        assert await store.end([an_end(run, state, reply=b"answer")]) == [EndCommitted(reply)]
        assert await store.lookup([run.task_id]) == {
            run.task_id: ExistingTask(run.task_id, AGENT, state, reply)
        }

    async def test_a_begun_task_ends_without_a_pause(self, store: CheckpointStore) -> None:
        await write_end(store, an_end(await begun(store)))

    async def test_a_repeated_end_finds_itself(self, store: CheckpointStore) -> None:
        end = an_end((await resumed(store)).run)
        first = await store.end([end])
        before = await row(store, end.run.task_id)
        assert await store.end([end]) == first
        assert await row(store, end.run.task_id) == before

    async def test_zombie_end_is_fenced(self, store: CheckpointStore, clock: FakeClock) -> None:
        zombie = (await resumed(store)).run
        owner = (await taken_over(store, clock)).run
        before = await row(store, zombie.task_id)
        assert await store.end([an_end(zombie, reply=b"stale")]) == [Fenced()]
        assert await row(store, zombie.task_id) == before
        result = one(await store.end([an_end(owner, reply=b"fresh")]))
        assert await store.end([an_end(zombie, reply=b"stale")]) == [Fenced()]
        assert isinstance(result, EndCommitted)
        assert (await existing(store, zombie.task_id)).reply == result.reply

    async def test_only_running_tasks_end(self, store: CheckpointStore) -> None:
        waiting = (await paused(store)).run
        parked_run = replace(waiting, fence=1, generation=1)
        assert await store.end([an_end(parked_run), an_end(replace(a_run(), fence=1))]) == [
            Fenced(),
            Fenced(),
        ]
        assert await state_of(store, waiting.task_id) is TaskState.WAITING

    async def test_an_end_drops_the_calls(self, store: CheckpointStore) -> None:
        run = await ended(store)
        assert (await row(store, run.task_id))[1] == []

    async def test_cancel_survives_end(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store, "a", "b", join=FIRST)
        await store.end([an_end((await resumed(store, pause, "a")).run)])
        assert sub(pause, "b") in await cancels_to_send(store, clock)

    async def test_end_wins_over_unnoticed_cancel(self, store: CheckpointStore) -> None:
        run = (await resumed(store)).run
        await store.cancel([a_cancel(run.task_id)])
        await write_end(store, an_end(run))
        assert await state_of(store, run.task_id) is TaskState.COMPLETED

    async def test_a_dead_task_is_listed_with_its_reason(self, store: CheckpointStore) -> None:
        run = await ended(store, state=TaskState.FAILED, dead_reason="five attempts")
        assert (await row(store, run.task_id))[0].dead_reason == "five attempts"

    async def test_responses_to_an_ended_task_change_nothing(self, store: CheckpointStore) -> None:
        pause = await paused(store, "a", "b", join=FIRST)
        run = (await resumed(store, pause, "a")).run
        await store.end([an_end(run)])
        before = await row(store, run.task_id)
        late = await store.claim([a_claim(pause, "a"), a_claim(pause, "b")], HERE, 1)
        assert all(isinstance(arrival, UnknownCall | DuplicateOutcome) for arrival in late)
        assert await row(store, run.task_id) == before

    async def test_a_released_task_is_ready_for_any_replica(self, store: CheckpointStore) -> None:
        task = await resumed(store)
        assert await store.release([a_release(task.run)]) == [True]
        assert await state_of(store, task.run.task_id) is TaskState.READY
        again = one(await store.acquire(THERE, 10))
        assert (again.state, again.outcomes, again.context) == (
            task.state,
            task.outcomes,
            task.context,
        )
        assert (again.run.generation, again.run.fence > task.run.fence) == (
            task.run.generation,
            True,
        )

    async def test_a_release_does_not_count_as_an_attempt(self, store: CheckpointStore) -> None:
        await store.release([a_release((await resumed(store)).run)])
        assert one(await store.acquire(THERE, 10)).attempt == 1

    async def test_a_repeated_release_finds_itself(self, store: CheckpointStore) -> None:
        release = a_release((await resumed(store)).run, not_before=SECOND)
        assert await store.release([release]) == [True]
        before = await row(store, release.run.task_id)
        assert await store.release([release]) == [True]
        assert await row(store, release.run.task_id) == before

    async def test_zombie_release_refused(self, store: CheckpointStore, clock: FakeClock) -> None:
        zombie = (await resumed(store)).run
        await taken_over(store, clock)
        before = await row(store, zombie.task_id)
        assert await store.release([a_release(zombie)]) == [False]
        assert await row(store, zombie.task_id) == before

    async def test_only_running_tasks_are_released(self, store: CheckpointStore) -> None:
        run, over = (await resumed(store)).run, await ended(store)
        await paused(store, run=run)
        before = await row(store, run.task_id)
        assert await store.release([a_release(run), a_release(over), a_release(a_run())]) == [
            False,
            False,
            False,
        ]
        assert await row(store, run.task_id) == before

    async def test_old_owner_after_release_is_fenced(self, store: CheckpointStore) -> None:
        run = (await resumed(store)).run
        await store.release([a_release(run)])
        await store.acquire(THERE, 10)
        assert await store.pause([a_pause(run=run)]) == [Fenced()]
        assert await store.end([an_end(run)]) == [Fenced()]
        assert await store.release([a_release(run)]) == [False]

    async def test_release_with_delay(self, store: CheckpointStore, clock: FakeClock) -> None:
        run = (await resumed(store)).run
        await store.release([a_release(run, not_before=30 * SECOND)])
        assert await store.acquire(HERE, 10) == []
        clock.advance(31 * SECOND)
        assert task_ids(await store.acquire(HERE, 10)) == [run.task_id]

    async def test_a_begun_task_is_released_with_its_request(self, store: CheckpointStore) -> None:
        run = await begun(store)
        await store.release([a_release(run)])
        task = one(await store.acquire(STRANGER, 10))  # any format: there is no state yet
        assert (task.run.task_id, task.run.generation, task.request, task.outcomes) == (
            run.task_id,
            0,
            b"request",
            (),
        )
