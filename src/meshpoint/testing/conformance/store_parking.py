"""Tasks that a version of their agent's code cannot continue, and tasks that only need an end."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from meshpoint.model.ids import TaskId
from meshpoint.model.tasks import DueCounts, KeepAlive, TaskState
from meshpoint.model.transitions import CancelRequested, EndCommitted, Overdue
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    AGENT,
    ELSEWHERE,
    FORMAT,
    HERE,
    HOUR,
    LEASE,
    NEWER,
    SECOND,
    STRANGER,
    THERE,
    TIMINGS,
    a_cancel,
    a_pause,
    a_release,
    a_replica,
    a_requester,
    a_revive,
    an_end,
    an_operation,
    begun,
    one,
    parked,
    paused,
    ready,
    resumed,
    row,
    state_of,
    task_ids,
    write_end,
)

MINUTE = timedelta(minutes=1)


class ParkingSuite:
    """Parked tasks: who tries them, what is kept, and when they end."""

    async def test_a_parked_task_waits_for_another_version(self, store: CheckpointStore) -> None:
        assert (await store.due(HERE, 10)).parked == 0
        run = await parked(store)
        assert await state_of(store, run.task_id) is TaskState.PARKED
        assert await store.due(HERE, 10) == DueCounts(parked=1)
        for replica in (HERE, THERE):
            assert await store.acquire(replica, 10) == []
            assert await store.acquire_parked(replica, 10) == []
        task = one(await store.acquire_parked(NEWER, 10))
        assert (task.run.task_id, task.run.generation, task.run.fence > run.fence) == (
            run.task_id,
            run.generation,
            True,
        )
        assert (task.attempt, task.rescues, task.state_format) == (1, 0, FORMAT)

    async def test_a_parked_task_keeps_everything(self, store: CheckpointStore) -> None:
        task = await resumed(store)
        await store.release([a_release(task.run, parked="call 1")])
        again = one(await store.acquire_parked(NEWER, 10))
        assert (again.state, again.context, again.outcomes, again.requester) == (
            task.state,
            task.context,
            task.outcomes,
            task.requester,
        )

    async def test_the_reason_and_the_versions_are_listed(self, store: CheckpointStore) -> None:
        run = await parked(store)
        summary, _ = await row(store, run.task_id)
        assert (summary.parked_reason, summary.tried_versions) == ("call 1", ("1.4",))
        assert (summary.state_format, summary.dead_reason) == (FORMAT, None)
        run = one(await store.acquire_parked(NEWER, 10)).run
        await store.release([a_release(run, parked="call 2", version=NEWER.version)])
        summary, _ = await row(store, run.task_id)
        assert (summary.parked_reason, summary.tried_versions) == ("call 2", ("1.4", "1.5"))

    async def test_each_version_tries_once(self, store: CheckpointStore) -> None:
        run = await parked(store, None, "1.4", "1.5")
        assert await store.acquire_parked(HERE, 10) == []
        assert await store.acquire_parked(NEWER, 10) == []
        fixed = a_replica("E", version="1.6")
        assert task_ids(await store.acquire_parked(fixed, 10)) == [run.task_id]

    async def test_versions_are_compared_as_a_whole(self, store: CheckpointStore) -> None:
        run = await parked(store, None, 'a "1" b')
        for version in ("1", '"1"', "", "a", 'a "1" b '):
            replica = a_replica(version=version)
            run = one(await store.acquire_parked(replica, 10)).run
            await store.release([a_release(run, parked="call 1", version=version)])
            assert await store.acquire_parked(replica, 10) == []
        assert await store.acquire_parked(a_replica(version='a "1" b'), 10) == []

    async def test_many_versions_are_bounded(self, store: CheckpointStore) -> None:
        run = (await resumed(store)).run
        for number in range(30):
            await store.release([a_release(run, parked="call 1", version=str(number))])
            run = one(await store.acquire_parked(NEWER, 10)).run
        summary, _ = await row(store, run.task_id)
        assert summary.tried_versions == tuple(map(str, range(10, 30)))

    async def test_only_readers_of_its_format_acquire_it(self, store: CheckpointStore) -> None:
        await parked(store)
        stranger = a_replica(formats=STRANGER.formats, version="2.0")
        assert await store.acquire_parked(stranger, 10) == []

    async def test_a_parked_suspect_needs_room(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = (await resumed(store)).run
        for _ in range(2):
            clock.advance(LEASE + SECOND)
            run = one(await store.rescue(HERE, 10, 10)).run
        await store.release([a_release(run, parked="call 1")])
        assert await store.acquire_parked(NEWER, 10) == []
        assert one(await store.acquire_parked(NEWER, 10, 1)).is_suspect

    async def test_a_task_without_a_pause_can_be_parked(self, store: CheckpointStore) -> None:
        run = await begun(store)
        await store.release([a_release(run, parked="no migration")])
        task = one(await store.acquire_parked(a_replica(formats=["x"], version="2"), 10))
        assert (task.run.task_id, task.request) == (run.task_id, b"request")

    async def test_a_repeated_parking_finds_itself(self, store: CheckpointStore) -> None:
        release = a_release((await resumed(store)).run, parked="call 1")
        assert await store.release([release]) == [True]
        before = await row(store, release.run.task_id)
        assert await store.release([release]) == [True]
        assert await row(store, release.run.task_id) == before

    async def test_a_cancelled_task_is_not_parked(self, store: CheckpointStore) -> None:
        run = (await resumed(store)).run
        assert await store.cancel([a_cancel(run.task_id)]) == [CancelRequested(HERE.id)]
        assert await store.release([a_release(run, parked="call 1")]) == [True]
        assert one(await store.acquire(HERE, 10)).cancel_requested

    async def test_an_owner_of_a_parked_task_may_release_it(self, store: CheckpointStore) -> None:
        await parked(store)
        run = one(await store.acquire_parked(NEWER, 10)).run
        await store.release([a_release(run)])
        assert await state_of(store, run.task_id) is TaskState.READY
        assert task_ids(await store.acquire(HERE, 10)) == [run.task_id]

    async def test_a_pause_forgets_the_parking(self, store: CheckpointStore) -> None:
        await parked(store)
        run = one(await store.acquire_parked(NEWER, 10)).run
        pause = await paused(store, run=run, requester=a_requester())
        summary, _ = await row(store, run.task_id)
        assert (summary.parked_reason, summary.tried_versions) == (None, ())
        run = (await resumed(store, pause, replica=NEWER)).run
        await store.release([a_release(run, parked="call 2", version=NEWER.version)])
        assert task_ids(await store.acquire_parked(HERE, 10)) == [run.task_id]

    async def test_unpark_offers_a_task_to_every_version(self, store: CheckpointStore) -> None:
        run, waiting = await parked(store), (await paused(store)).run
        unknown = TaskId("nobody")
        assert await store.unpark([waiting.task_id, run.task_id, unknown]) == [False, True, False]
        assert await store.unpark([run.task_id]) == [False]
        assert await store.acquire_parked(NEWER, 10) == []
        summary, _ = await row(store, run.task_id)
        assert (summary.state, summary.parked_reason) == (TaskState.READY, None)
        task = one(await store.acquire(HERE, 10))
        assert (task.run.task_id, task.run.generation) == (run.task_id, run.generation)
        await write_end(store, an_end(task.run))

    async def test_a_parked_task_ends_after_the_limit(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = await parked(store)
        clock.advance(TIMINGS.parked_limit - SECOND)
        assert await store.acquire_overdue(STRANGER, 10) == []
        clock.advance(SECOND)
        assert (await store.due(STRANGER, 10)).overdue == 1
        overdue = one(await store.acquire_overdue(STRANGER, 10))
        assert overdue == Overdue(overdue.task, past_deadline=False, parked_reason="call 1")
        assert overdue.task.run.task_id == run.task_id
        assert overdue.task == overdue.task.without_content()
        assert await store.acquire_overdue(STRANGER, 10) == []
        assert isinstance(one(await store.end([an_end(overdue.task.run)])), EndCommitted)

    async def test_the_limit_counts_from_the_first_parking(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        await parked(store)
        clock.advance(TIMINGS.parked_limit - HOUR)
        run = one(await store.acquire_parked(NEWER, 10)).run
        await store.release([a_release(run, parked="call 1", version=NEWER.version)])
        clock.advance(HOUR)
        assert len(await store.acquire_overdue(HERE, 10)) == 1

    async def test_a_parked_task_ends_at_its_deadline(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        requester = a_requester(deadline=clock.now() + HOUR)
        await parked(store, await paused(store, requester=requester))
        clock.advance(HOUR - SECOND)
        assert await store.acquire_overdue(HERE, 10) == []
        clock.advance(SECOND)
        overdue = one(await store.acquire_overdue(HERE, 10))
        assert (overdue.past_deadline, overdue.parked_reason) == (True, "call 1")
        assert overdue.task.requester == requester

    async def test_a_ready_task_ends_at_its_deadline(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        requester = a_requester(deadline=clock.now() + HOUR)
        late = await ready(store, await paused(store, requester=requester))
        await ready(store)  # has no deadline
        clock.advance(HOUR - SECOND)
        assert (await store.due(STRANGER, 10)).overdue == 0
        clock.advance(SECOND)
        assert await store.due(STRANGER, 10) == DueCounts(overdue=1)
        overdue = one(await store.acquire_overdue(STRANGER, 10))
        assert overdue.task.run.task_id == late.run.task_id
        assert (overdue.past_deadline, overdue.parked_reason) == (True, None)

    async def test_a_task_parked_after_its_limit_is_due_at_once(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        await parked(store)
        clock.advance(TIMINGS.parked_limit - SECOND)
        run = one(await store.acquire_parked(NEWER, 10)).run
        clock.advance(2 * SECOND)
        await store.release([a_release(run, parked="call 1", version=NEWER.version)])
        assert (await store.due(HERE, 10)).overdue == 1
        assert len(await store.acquire_overdue(HERE, 10)) == 1

    async def test_a_deadline_that_was_moved_ends_a_parked_task(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = await parked(store)
        requester = a_requester(deadline=clock.now() + HOUR)
        await store.revive(a_revive(run.task_id, requester=requester, adopt=True))
        clock.advance(HOUR)
        assert one(await store.acquire_overdue(HERE, 10)).past_deadline

    async def test_other_agents_are_left_alone(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        await parked(store)
        foreigner = a_replica(agent=ELSEWHERE, version="9")
        assert await store.acquire_parked(foreigner, 10) == []
        clock.advance(TIMINGS.parked_limit)
        assert await store.acquire_overdue(foreigner, 10) == []

    async def test_a_parked_task_keeps_its_requester_waiting(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        requester = a_requester(idle_timeout=30 * SECOND)
        run = await parked(store, await paused(store, requester=requester))
        clock.advance(11 * SECOND)
        assert await store.keep_alives(HERE, 10) == [KeepAlive(AGENT, run.task_id, requester)]

    async def test_ready_tasks_without_a_reader_are_counted(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        await ready(store)
        await ready(store)
        await paused(store)
        await begun(store)
        assert await store.unread(STRANGER, MINUTE) == {}
        clock.advance(MINUTE)
        assert await store.unread(STRANGER, MINUTE) == {FORMAT: 2}
        assert await store.unread(HERE, MINUTE) == {}
        assert await store.unread(a_replica(agent=ELSEWHERE, formats=["x"]), MINUTE) == {}

    async def test_a_lost_task_without_a_reader_becomes_ready(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        requester = a_requester(deadline=clock.now() + HOUR)
        task = await resumed(store, await paused(store, requester=requester))
        await begun(store)  # any replica can rescue it
        clock.advance(2 * LEASE - SECOND)
        assert (await store.due(STRANGER, 10)).lost_unread == 0
        assert await store.release_unread(STRANGER, 10) == []
        clock.advance(SECOND)
        assert await store.release_unread(HERE, 10) == []  # reads it, and rescues it
        assert (await store.due(STRANGER, 10)).lost_unread == 1
        assert await store.release_unread(STRANGER, 10) == [task.run.task_id]
        assert await store.release_unread(STRANGER, 10) == []
        assert (await store.due(STRANGER, 10)).lost_unread == 0
        assert await store.renew([task.run], HERE) == [task.run]
        assert await store.unread(STRANGER, timedelta()) == {FORMAT: 1}
        again = one(await store.acquire(HERE, 10))
        assert (again.run.task_id, again.rescues, again.attempt) == (task.run.task_id, 1, 2)
        assert again.run.fence > task.run.fence

    async def test_a_lost_task_without_a_reader_keeps_its_deadline(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        requester = a_requester(deadline=clock.now() + 3 * LEASE)
        run = (await resumed(store, await paused(store, requester=requester))).run
        clock.advance(2 * LEASE)
        await store.release_unread(STRANGER, 10)
        assert await store.acquire_overdue(STRANGER, 10) == []
        clock.advance(LEASE)
        overdue = one(await store.acquire_overdue(STRANGER, 10))
        assert (overdue.task.run.task_id, overdue.past_deadline) == (run.task_id, True)

    async def test_a_parked_task_that_is_lost_without_a_reader_is_parked_again(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = await parked(store)
        await store.acquire_parked(NEWER, 10)
        clock.advance(2 * LEASE)
        assert await store.release_unread(STRANGER, 10) == [run.task_id]
        summary, _ = await row(store, run.task_id)
        assert (summary.state, summary.parked_reason) == (TaskState.PARKED, "call 1")
        assert summary.owner is None
        clock.advance(TIMINGS.parked_limit - 2 * LEASE - SECOND)
        assert await store.acquire_overdue(STRANGER, 10) == []
        clock.advance(SECOND)
        overdue = one(await store.acquire_overdue(STRANGER, 10))
        assert (overdue.past_deadline, overdue.parked_reason) == (False, "call 1")

    async def test_a_lost_operation_to_fail_needs_no_reader(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        failing = replace(STRANGER, fails_lost=True)
        operation, other = (await resumed(store)).run, (await resumed(store)).run
        await store.track(operation, an_operation())
        clock.advance(LEASE - SECOND)
        assert await store.rescue(failing, 10) == []
        clock.advance(SECOND)
        assert (await store.due(STRANGER, 10)).lapsed == 0
        assert (await store.due(failing, 10)).lapsed == 1
        assert await store.rescue(STRANGER, 10) == []
        task = one(await store.rescue(failing, 10))
        assert (task.run.task_id, task.checkpoint) == (operation.task_id, 0)
        assert task.run.fence > operation.fence
        assert await state_of(store, other.task_id) is TaskState.RUNNING

    async def test_a_lost_operation_to_fail_is_not_released(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        failing = replace(STRANGER, fails_lost=True)
        operation, other = (await resumed(store)).run, (await resumed(store)).run
        await store.track(operation, an_operation())
        clock.advance(2 * LEASE)
        assert (await store.due(STRANGER, 10)).lost_unread == 2
        assert (await store.due(failing, 10)).lost_unread == 1
        assert await store.release_unread(failing, 10) == [other.task_id]
        assert await state_of(store, operation.task_id) is TaskState.RUNNING

    async def test_a_lost_operation_to_fail_needs_no_room_for_suspects(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        failing = replace(HERE, fails_lost=True)
        operation, other = (await resumed(store)).run, (await resumed(store)).run
        await store.track(operation, an_operation())
        clock.advance(LEASE)
        assert len(await store.rescue(HERE, 10)) == 2
        clock.advance(LEASE)
        task = one(await store.rescue(failing, 10, suspect_slots=0))
        assert (task.run.task_id, task.rescues) == (operation.task_id, 2)
        assert await state_of(store, other.task_id) is TaskState.READY

    async def test_a_cancelled_task_needs_no_reader(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = (await resumed(store)).run
        assert await store.cancel([a_cancel(run.task_id)]) == [CancelRequested(HERE.id)]
        clock.advance(LEASE)
        assert (await store.due(STRANGER, 10)).lapsed == 1
        task = one(await store.rescue(STRANGER, 10))
        assert (task.run.task_id, task.cancel_requested) == (run.task_id, True)
        await store.release([a_release(task.run)])
        assert one(await store.acquire(STRANGER, 10)).cancel_requested

    async def test_a_zombie_parks_nothing(self, store: CheckpointStore, clock: FakeClock) -> None:
        zombie = (await resumed(store)).run
        clock.advance(LEASE + SECOND)
        await store.rescue(THERE, 10)
        assert await store.release([a_release(zombie, parked="call 1")]) == [False]
        assert await state_of(store, zombie.task_id) is TaskState.RUNNING
        assert await store.pause([a_pause(run=zombie)]) != []
