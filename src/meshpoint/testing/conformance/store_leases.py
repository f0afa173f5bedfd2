"""Leases, keep-alives and tombstones."""

from __future__ import annotations

from dataclasses import replace

from meshpoint.adapters.inprocess.clock import FakeClock
from meshpoint.model.calls import FIRST
from meshpoint.model.checkpoint import (
    Begun,
    KeepAlive,
    Release,
    Resumable,
    TaskState,
)
from meshpoint.model.ids import AgentName, RunId, TaskId
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.conformance.build import (
    AGENT,
    HERE,
    HOUR,
    LEASE,
    SECOND,
    THERE,
    TIMINGS,
    a_begin,
    a_cancel,
    a_release,
    a_replica,
    a_requester,
    a_run,
    an_end,
    answered,
    begun,
    ended,
    kinds,
    one,
    operating,
    paused,
    ready,
    resumed,
    row,
    saved,
    taken_over,
    task_ids,
)

ISOLATING = replace(HERE, isolates=True)
FOREIGNER = a_replica(agent=AgentName("hotels"))


class LeaseSuite:
    """Ownership of running tasks: acquiring, rescuing and renewing."""

    async def test_ready_tasks_are_taken_oldest_first(self, store: CheckpointStore, clock: FakeClock) -> None:
        tasks = []
        for _ in range(3):
            tasks.append((await ready(store)).run.task_id)
            clock.advance(SECOND)
        assert task_ids(await store.take(HERE, 2)) == tasks[:2]
        assert task_ids(await store.take(THERE, 2)) == tasks[2:]
        assert await store.take(HERE, 2) == []

    async def test_the_age_of_a_ready_task_is_that_of_its_latest_pause(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        first, second = await paused(store), await paused(store)
        run = (await resumed(store, first)).run
        await ready(store, second)
        clock.advance(SECOND)
        await ready(store, await paused(store, run=run))
        assert task_ids(await store.take(HERE, 1)) == [second.run.task_id]

    async def test_only_ready_tasks_are_taken(self, store: CheckpointStore) -> None:
        await paused(store)
        await resumed(store)
        await begun(store)
        await ended(store)
        assert await store.take(HERE, 10) == []

    async def test_a_taken_task_has_an_owner_and_a_lease(self, store: CheckpointStore, clock: FakeClock) -> None:
        await ready(store)
        task = one(await store.take(THERE, 1))
        assert (await row(store, task.run.task_id))[0].owner == THERE.id
        clock.advance(LEASE - SECOND)
        assert await store.take_over(HERE, 10) == []
        assert await store.renew([task.run], THERE) == []

    async def test_a_take_over_fences_the_old_owner_and_counts_an_attempt(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await paused(store)
        zombie = await resumed(store, pause)
        task = await taken_over(store, clock)
        assert (task.run.fence, task.run.generation) == (zombie.run.fence + 1, zombie.run.generation)
        assert (task.attempt, task.rescues, task.suspect, task.cancel_requested) == (2, 1, False, False)
        assert (task.state, task.context, task.outcomes) == (zombie.state, zombie.context, zombie.outcomes)
        assert await store.renew([zombie.run, task.run], HERE) == [zombie.run]
        again = await taken_over(store, clock)
        assert (again.attempt, again.rescues, again.suspect) == (3, 2, True)

    async def test_a_renewed_lease_is_not_taken_over(self, store: CheckpointStore, clock: FakeClock) -> None:
        runs = [(await resumed(store)).run, await begun(store)]
        for _ in range(3):
            clock.advance(LEASE - SECOND)
            assert await store.renew(runs, HERE) == []
        assert await store.take_over(THERE, 10) == []

    async def test_an_expired_lease_that_nobody_took_is_renewed(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = (await resumed(store)).run
        clock.advance(LEASE + SECOND)
        assert await store.renew([run], HERE) == []
        assert await store.take_over(THERE, 10) == []

    async def test_renew_names_the_runs_that_lost_their_lease(self, store: CheckpointStore) -> None:
        gone, held, over = replace(a_run(), fence=1), (await resumed(store)).run, await ended(store)
        stale, waiting = (
            replace(held, fence=held.fence - 1),
            replace((await paused(store)).run, fence=1, generation=1),
        )
        assert await store.renew([gone, held, over, stale, waiting], HERE) == [gone, over, stale, waiting]
        assert await store.renew([], HERE) == []

    async def test_the_calls_a_join_closed_stay_closed_after_a_take_over(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await paused(store, "a", "b", join=FIRST)
        await answered(store, pause, "a")
        clock.advance(TIMINGS.dispatch_lease + SECOND)
        await store.mark_sent(await store.unsent(AGENT, 10))
        assert kinds(await taken_over(store, clock)) == ["ok", "cancelled"]

    async def test_at_most_so_many_leases_are_taken_at_a_time(self, store: CheckpointStore, clock: FakeClock) -> None:
        for _ in range(3):
            await begun(store)
        clock.advance(LEASE + SECOND)
        assert [len(await store.take_over(THERE, 2)), len(await store.take_over(THERE, 2))] == [2, 1]


class RescueSuite:
    """Tasks that have repeatedly lost their owner, and may have killed it."""

    async def test_a_rescue_is_no_attempt_where_suspects_are_isolated(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        await begun(store)
        for rescues in (1, 2, 3):
            clock.advance(LEASE + SECOND)
            task = one(await store.take_over(ISOLATING, 10, 1))
            assert (task.attempt, task.rescues) == (1, rescues)

    async def test_a_checkpoint_leaves_no_more_rescues_than_make_a_suspect(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        await operating(store)
        for rescues in (1, 2, 3, 3):
            task = await taken_over(store, clock)
            assert task.rescues == rescues
            await saved(store, task.run)
            assert (await row(store, task.run.task_id))[0].rescues == min(rescues, 2)

    async def test_a_pause_resets_the_rescues(self, store: CheckpointStore, clock: FakeClock) -> None:
        await begun(store)
        await taken_over(store, clock)
        task = await taken_over(store, clock)
        pause = await paused(store, run=task.run)
        assert (await row(store, pause.run.task_id))[0].rescues == 0
        assert (await resumed(store, pause)).rescues == 0

    async def test_a_suspect_that_cannot_run_apart_is_owned_by_nobody(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        zombies = [task.run for task in await suspects(store, clock, 2)]
        once = await begun(store)
        clock.advance(LEASE + SECOND)
        assert task_ids(await store.take_over(ISOLATING, 10, 0)) == [once.task_id]
        for zombie in zombies:
            summary = (await row(store, zombie.task_id))[0]
            assert (summary.state, summary.owner, summary.rescues) == (TaskState.READY, None, 3)
            assert kind_of(one(await store.end([an_end(zombie)]))) == "Fenced"
            assert await store.release([a_release(zombie)]) == [False]
        assert await store.take(THERE, 10, 0) == []
        first = one(await store.take(THERE, 10, 1))
        assert (first.run.fence, first.attempt, first.rescues) == (4, 1, 3)
        assert len(await store.take(HERE, 10, 1)) == 1

    async def test_so_many_suspects_as_can_run_apart_are_owned(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        for _ in range(3):
            await begun(store)
        for expected in (3, 1):
            clock.advance(LEASE + SECOND)
            assert len(await store.take_over(ISOLATING, 10, 1)) == expected
        assert len(await store.take(HERE, 10, 1)) == 1

    async def test_suspects_do_not_keep_the_others_from_running(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        for _ in range(3):
            task = one(await suspects(store, clock, 1))
            assert await store.release([a_release(task.run)]) == [True]
            clock.advance(SECOND)
        other = await ready(store)
        assert task_ids(await store.take(HERE, 2, 0)) == [other.run.task_id]

    async def test_a_death_counts_an_attempt_and_is_known_to_the_next_owner(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        task = one(await suspects(store, clock, 1))
        death = Release(task.run, SECOND, counted=True, death="killed by SIGKILL")
        assert await store.release([death]) == await store.release([death]) == [True]
        assert await store.take(HERE, 10, 1) == []  # not due yet
        clock.advance(SECOND)
        again = one(await store.take(HERE, 10, 1))
        assert (again.attempt, again.rescues, again.death) == (2, 2, "killed by SIGKILL")
        await store.release([a_release(again.run)])
        last = one(await store.take(HERE, 10, 1))
        assert (last.attempt, last.death) == (2, "killed by SIGKILL")
        await paused(store, run=last.run)
        assert (await row(store, last.run.task_id))[0].dead_reason is None

    async def test_a_death_under_a_lost_lease_counts_nothing(self, store: CheckpointStore, clock: FakeClock) -> None:
        zombie = one(await suspects(store, clock, 1))
        task = await rescued(store, clock)
        assert await store.release([Release(zombie.run, counted=True, death="killed by SIGKILL")]) == [False]
        assert (await row(store, task.run.task_id))[0].attempt == 1

    async def test_the_owner_may_read_its_task_again(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store, "a", "b")
        await answered(store, pause, "a")
        task = await resumed(store, pause)
        assert await store.owned(task.run) == task
        for other in (
            replace(task.run, fence=task.run.fence + 1),
            replace(task.run, id=RunId("other")),
            replace(task.run, task_id=TaskId("never")),
        ):
            assert await store.owned(other) is None
        await taken_over(store, clock)
        assert await store.owned(task.run) is None

    async def test_a_queued_task_is_ready_for_any_replica(self, store: CheckpointStore) -> None:
        wish = replace(a_begin(), queued=True)
        assert await store.begin([wish]) == await store.begin([wish])
        summary = (await row(store, wish.run.task_id))[0]
        assert (summary.state, summary.owner, summary.attempt, summary.fence) == (TaskState.READY, None, 0, 1)
        task = one(await store.take(THERE, 1))
        assert (task.request, task.run.generation, task.run.fence, task.attempt) == (b"request", 0, 2, 1)
        assert kind_of(one(await store.begin([wish]))) == "Fenced"

    async def test_a_repeated_begin_tells_what_the_first_one_wrote(self, store: CheckpointStore) -> None:
        """The number of free slots may have changed in between."""
        for queued in (True, False):
            wish = replace(a_begin(), queued=queued)
            first = one(await store.begin([wish]))
            assert isinstance(first, Begun)
            assert first.queued is queued
            assert await store.begin([replace(wish, queued=not queued)]) == [first]


async def rescued(store: CheckpointStore, clock: FakeClock) -> Resumable:
    """Expire the lease of the only running task, and rescue it for `ISOLATING`."""
    clock.advance(LEASE + SECOND)
    return one(await store.take_over(ISOLATING, 10, 10))


async def suspects(store: CheckpointStore, clock: FakeClock, count: int) -> list[Resumable]:
    """Begin `count` tasks and rescue each twice, so that `ISOLATING` owns them as suspects."""
    for _ in range(count):
        await begun(store)
    for _ in range(2):
        clock.advance(LEASE + SECOND)
        tasks = await store.take_over(ISOLATING, 10, 10)
    return tasks


def kind_of(result: object) -> str:
    """The class name of a result."""
    return type(result).__name__


class KeepAliveSuite:
    """Keep-alives to the requesters of waiting tasks."""

    async def test_an_impatient_requester_hears_within_its_idle_timeout(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        requester = a_requester(idle_timeout=10 * SECOND)
        pause = await paused(store, requester=requester)
        note = KeepAlive(AGENT, pause.run.task_id, requester)
        assert await store.keep_alives(HERE, 10) == []
        for _ in range(2):
            clock.advance(8 * SECOND)
            assert await store.keep_alives(HERE, 10) == [note]
            assert await store.keep_alives(HERE, 10) == []

    async def test_ready_tasks_are_alive_too(self, store: CheckpointStore, clock: FakeClock) -> None:
        await ready(store, await paused(store, requester=a_requester(idle_timeout=10 * SECOND)))
        clock.advance(8 * SECOND)
        assert len(await store.keep_alives(HERE, 10)) == 1

    async def test_nobody_else_hears_anything(self, store: CheckpointStore, clock: FakeClock) -> None:
        impatient = a_requester(idle_timeout=10 * SECOND)
        await paused(store)
        run = (await resumed(store, await paused(store, requester=impatient))).run
        await store.end([an_end((await resumed(store, await paused(store, requester=impatient))).run)])
        clock.advance(8 * SECOND)
        assert await store.keep_alives(HERE, 10) == []
        await store.release([a_release(run)])
        assert await store.keep_alives(FOREIGNER, 10) == []

    async def test_at_most_so_many_keep_alives_at_a_time(self, store: CheckpointStore, clock: FakeClock) -> None:
        for _ in range(3):
            await paused(store, requester=a_requester(idle_timeout=10 * SECOND))
        clock.advance(8 * SECOND)
        assert [len(await store.keep_alives(HERE, 2)), len(await store.keep_alives(HERE, 2))] == [2, 1]


class PurgeSuite:
    """Deletion of expired tombstones."""

    async def test_a_tombstone_goes_when_it_expires_and_its_reply_is_sent(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = await ended(store)
        await sent(store, run.task_id)
        clock.advance(TIMINGS.tombstone_ttl - SECOND)
        assert await store.purge(AGENT, 10) == 0
        clock.advance(2 * SECOND)
        assert await store.purge(AgentName("hotels"), 10) == 0
        assert await store.purge(AGENT, 10) == 1
        assert await store.task(run.task_id) is None
        assert await store.purge(AGENT, 10) == 0

    async def test_a_tombstone_outlives_the_deadline_of_its_task(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        late = clock.now() + 3 * TIMINGS.tombstone_ttl
        run = (await resumed(store, await paused(store, requester=a_requester(deadline=late)))).run
        await store.end([an_end(run)])
        await sent(store, run.task_id)
        clock.advance(late - clock.now() - SECOND)
        assert await store.purge(AGENT, 10) == 0
        clock.advance(TIMINGS.tombstone_ttl + 2 * SECOND)
        assert await store.purge(AGENT, 10) == 1

    async def test_a_reply_still_to_be_sent_keeps_its_tombstone(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = await ended(store)
        clock.advance(TIMINGS.tombstone_ttl + SECOND)
        assert await store.purge(AGENT, 10) == 0
        await sent(store, run.task_id)
        assert await store.purge(AGENT, 10) == 1

    async def test_a_cancel_still_to_be_sent_keeps_its_tombstone(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await paused(store)
        await store.cancel([a_cancel(pause.run.task_id)])
        await sent(store, pause.run.task_id)
        clock.advance(TIMINGS.tombstone_ttl + SECOND)
        assert await store.purge(AGENT, 10) == 0
        await store.mark_sent(await store.unsent(AGENT, 10))
        assert await store.purge(AGENT, 10) == 1

    async def test_the_tombstone_of_a_request_that_never_came_goes_too(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        await store.cancel([a_cancel(TaskId("never"))])
        clock.advance(TIMINGS.tombstone_ttl + SECOND)
        await store.mark_sent(await store.unsent(AGENT, 10))
        assert await store.purge(AGENT, 10) == 1

    async def test_live_tasks_stay(self, store: CheckpointStore, clock: FakeClock) -> None:
        await paused(store)
        await ready(store)
        await begun(store)
        clock.advance(100 * HOUR)
        assert await store.purge(AGENT, 10) == 0
        assert len(await store.tasks()) == 3

    async def test_at_most_so_many_tombstones_at_a_time(self, store: CheckpointStore, clock: FakeClock) -> None:
        for _ in range(3):
            await sent(store, (await ended(store)).task_id)
        clock.advance(TIMINGS.tombstone_ttl + SECOND)
        assert [await store.purge(AGENT, 2), await store.purge(AGENT, 2)] == [2, 1]


async def sent(store: CheckpointStore, task_id: TaskId) -> None:
    """Confirm the reply of an ended task as sent."""
    reply = (await store.lookup([task_id]))[task_id].reply
    assert reply is not None
    await store.mark_sent([reply])
