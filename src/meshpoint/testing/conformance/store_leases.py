"""Leases, keep-alives and tombstones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshpoint.model.calls import FIRST
from meshpoint.model.ids import AgentName, RunId, TaskId
from meshpoint.model.tasks import KeepAlive, Resumable, TaskState
from meshpoint.model.transitions import BeginCommitted, EndCommitted, Release
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    AGENT,
    FOREIGNER,
    HERE,
    HOUR,
    LEASE,
    SECOND,
    THERE,
    TIMINGS,
    a_begin,
    a_cancel,
    a_release,
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
    reply_of,
    resumed,
    row,
    saved,
    taken_over,
    task_ids,
)

ISOLATING = replace(HERE, isolates=True)


class LeaseSuite:
    """Leases, rescues, suspects, keep-alives and purges."""

    async def test_acquire_oldest_first(self, store: CheckpointStore, clock: FakeClock) -> None:
        tasks = []
        for _ in range(3):
            tasks.append((await ready(store)).run.task_id)
            clock.advance(SECOND)
        assert task_ids(await store.acquire(HERE, 2)) == tasks[:2]
        assert task_ids(await store.acquire(THERE, 2)) == tasks[2:]
        assert await store.acquire(HERE, 2) == []

    async def test_pause_resets_ready_age(self, store: CheckpointStore, clock: FakeClock) -> None:
        first, second = await paused(store), await paused(store)
        run = (await resumed(store, first)).run
        await ready(store, second)
        clock.advance(SECOND)
        await ready(store, await paused(store, run=run))
        assert task_ids(await store.acquire(HERE, 1)) == [second.run.task_id]

    async def test_only_ready_tasks_are_taken(self, store: CheckpointStore) -> None:
        await paused(store)
        await resumed(store)
        await begun(store)
        await ended(store)
        assert await store.acquire(HERE, 10) == []

    async def test_acquired_task_has_lease(self, store: CheckpointStore, clock: FakeClock) -> None:
        await ready(store)
        task = one(await store.acquire(THERE, 1))
        assert (await row(store, task.run.task_id))[0].owner == THERE.id
        clock.advance(LEASE - SECOND)
        assert await store.rescue(HERE, 10) == []
        assert await store.renew([task.run], THERE) == []

    async def test_rescue_fences_old_owner(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store)
        zombie = await resumed(store, pause)
        task = await taken_over(store, clock)
        assert (task.run.fence, task.run.generation) == (
            zombie.run.fence + 1,
            zombie.run.generation,
        )
        assert (task.attempt, task.rescues, task.is_suspect, task.cancel_requested) == (
            2,
            1,
            False,
            False,
        )
        assert (task.state, task.context, task.outcomes) == (
            zombie.state,
            zombie.context,
            zombie.outcomes,
        )
        assert await store.renew([zombie.run, task.run], HERE) == [zombie.run]
        again = await taken_over(store, clock)
        assert (again.attempt, again.rescues, again.is_suspect) == (3, 2, True)

    async def test_renew_prevents_rescue(self, store: CheckpointStore, clock: FakeClock) -> None:
        runs = [(await resumed(store)).run, await begun(store)]
        for _ in range(3):
            clock.advance(LEASE - SECOND)
            assert await store.renew(runs, HERE) == []
        assert await store.rescue(THERE, 10) == []

    async def test_expired_lease_renewed(self, store: CheckpointStore, clock: FakeClock) -> None:
        run = (await resumed(store)).run
        clock.advance(LEASE + SECOND)
        assert await store.renew([run], HERE) == []
        assert await store.rescue(THERE, 10) == []

    async def test_renew_returns_runs_that_lost_lease(self, store: CheckpointStore) -> None:
        gone = replace(a_run(), fence=1)
        leased = (await resumed(store)).run
        over = await ended(store)
        stale = replace(leased, fence=leased.fence - 1)
        waiting = replace((await paused(store)).run, fence=1, generation=1)
        assert await store.renew([gone, leased, over, stale, waiting], HERE) == [
            gone,
            over,
            stale,
            waiting,
        ]
        assert await store.renew([], HERE) == []

    async def test_rescue_keeps_outcomes(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store, "a", "b", join=FIRST)
        await answered(store, pause, "a")
        clock.advance(TIMINGS.dispatch_lease + SECOND)
        await store.confirm_sent(await store.unsent(AGENT, 10))
        assert kinds(await taken_over(store, clock)) == ["ok", "cancelled"]

    async def test_rescue_limit(self, store: CheckpointStore, clock: FakeClock) -> None:
        for _ in range(3):
            await begun(store)
        clock.advance(LEASE + SECOND)
        assert [len(await store.rescue(THERE, 2)), len(await store.rescue(THERE, 2))] == [2, 1]

    async def test_no_attempt_if_isolating(self, store: CheckpointStore, clock: FakeClock) -> None:
        await begun(store)
        for rescues in (1, 2, 3):
            clock.advance(LEASE + SECOND)
            task = one(await store.rescue(ISOLATING, 10, 1))
            assert (task.attempt, task.rescues) == (1, rescues)

    async def test_checkpoint_caps_rescues(self, store: CheckpointStore, clock: FakeClock) -> None:
        await operating(store)
        for rescues in (1, 2, 3, 3):
            task = await taken_over(store, clock)
            assert task.rescues == rescues
            await saved(store, task.run)
            assert (await row(store, task.run.task_id))[0].rescues == min(rescues, 2)

    async def test_pause_resets_rescues(self, store: CheckpointStore, clock: FakeClock) -> None:
        await begun(store)
        await taken_over(store, clock)
        task = await taken_over(store, clock)
        pause = await paused(store, run=task.run)
        assert (await row(store, pause.run.task_id))[0].rescues == 0
        assert (await resumed(store, pause)).rescues == 0

    async def test_suspect_waits_for_slot(self, store: CheckpointStore, clock: FakeClock) -> None:
        zombies = [task.run for task in await suspects(store, clock, 2)]
        once = await begun(store)
        clock.advance(LEASE + SECOND)
        assert task_ids(await store.rescue(ISOLATING, 10, 0)) == [once.task_id]
        for zombie in zombies:
            summary = (await row(store, zombie.task_id))[0]
            assert (summary.state, summary.owner, summary.rescues) == (TaskState.READY, None, 3)
            assert kind_of(one(await store.end([an_end(zombie)]))) == "Fenced"
            assert await store.release([a_release(zombie)]) == [False]
        assert await store.acquire(THERE, 10, 0) == []
        first = one(await store.acquire(THERE, 10, 1))
        assert (first.run.fence, first.attempt, first.rescues) == (4, 1, 3)
        assert len(await store.acquire(HERE, 10, 1)) == 1

    async def test_suspect_limit(self, store: CheckpointStore, clock: FakeClock) -> None:
        for _ in range(3):
            await begun(store)
        for expected in (3, 1):
            clock.advance(LEASE + SECOND)
            assert len(await store.rescue(ISOLATING, 10, 1)) == expected
        assert len(await store.acquire(HERE, 10, 1)) == 1

    async def test_acquire_skips_suspects(self, store: CheckpointStore, clock: FakeClock) -> None:
        for _ in range(3):
            task = one(await suspects(store, clock, 1))
            assert await store.release([a_release(task.run)]) == [True]
            clock.advance(SECOND)
        other = await ready(store)
        assert task_ids(await store.acquire(HERE, 2, 0)) == [other.run.task_id]

    async def test_crash_counts_attempt(self, store: CheckpointStore, clock: FakeClock) -> None:
        task = one(await suspects(store, clock, 1))
        death = Release(task.run, SECOND, counts_as_attempt=True, crash_reason="killed by SIGKILL")
        assert await store.release([death]) == await store.release([death]) == [True]
        assert await store.acquire(HERE, 10, 1) == []  # not due yet
        clock.advance(SECOND)
        again = one(await store.acquire(HERE, 10, 1))
        assert (again.attempt, again.rescues, again.crash_reason) == (2, 2, "killed by SIGKILL")
        await store.release([a_release(again.run)])
        last = one(await store.acquire(HERE, 10, 1))
        assert (last.attempt, last.crash_reason) == (2, "killed by SIGKILL")
        await paused(store, run=last.run)
        assert (await row(store, last.run.task_id))[0].dead_reason is None

    async def test_zombie_crash_is_ignored(self, store: CheckpointStore, clock: FakeClock) -> None:
        zombie = one(await suspects(store, clock, 1))
        task = await rescued(store, clock)
        assert await store.release(
            [Release(zombie.run, counts_as_attempt=True, crash_reason="killed by SIGKILL")]
        ) == [False]
        assert (await row(store, task.run.task_id))[0].attempt == 1

    async def test_owner_rereads_its_task(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store, "a", "b")
        await answered(store, pause, "a")
        task = await resumed(store, pause)
        assert await store.find_owned(task.run) == task
        for other in (
            replace(task.run, fence=task.run.fence + 1),
            replace(task.run, id=RunId("other")),
            replace(task.run, task_id=TaskId("never")),
        ):
            assert await store.find_owned(other) is None
        await taken_over(store, clock)
        assert await store.find_owned(task.run) is None

    async def test_a_queued_task_is_ready_for_any_replica(self, store: CheckpointStore) -> None:
        command = replace(a_begin(), queued=True)
        assert await store.begin([command]) == await store.begin([command])
        summary = (await row(store, command.run.task_id))[0]
        assert (summary.state, summary.owner, summary.attempt, summary.fence) == (
            TaskState.READY,
            None,
            0,
            1,
        )
        task = one(await store.acquire(THERE, 1))
        assert (task.request, task.run.generation, task.run.fence, task.attempt) == (
            b"request",
            0,
            2,
            1,
        )
        assert kind_of(one(await store.begin([command]))) == "Fenced"

    async def test_repeated_begin_returns_first_result(self, store: CheckpointStore) -> None:
        """The number of free slots may have changed in between."""
        for queued in (True, False):
            command = replace(a_begin(), queued=queued)
            first = one(await store.begin([command]))
            assert isinstance(first, BeginCommitted)
            assert first.queued is queued
            assert await store.begin([replace(command, queued=not queued)]) == [first]

    async def test_keep_alive_interval(self, store: CheckpointStore, clock: FakeClock) -> None:
        requester = a_requester(idle_timeout=10 * SECOND)
        pause = await paused(store, requester=requester)
        note = KeepAlive(AGENT, pause.run.task_id, requester)
        assert await store.keep_alives(HERE, 10) == []
        for _ in range(2):
            clock.advance(8 * SECOND)
            assert await store.keep_alives(HERE, 10) == [note]
            assert await store.keep_alives(HERE, 10) == []

    async def test_ready_task_keep_alive(self, store: CheckpointStore, clock: FakeClock) -> None:
        await ready(store, await paused(store, requester=a_requester(idle_timeout=10 * SECOND)))
        clock.advance(8 * SECOND)
        assert len(await store.keep_alives(HERE, 10)) == 1

    @pytest.mark.parametrize("queued", [False, True])
    async def test_keep_alives_of_a_task_that_never_paused(
        self, store: CheckpointStore, clock: FakeClock, queued: bool
    ) -> None:
        """It is running or queued, is rescued or acquired, and then waits to run again."""
        requester = a_requester(idle_timeout=60 * SECOND)
        begin = a_begin(requester=requester)
        await store.begin([replace(begin, queued=queued)])
        note = KeepAlive(AGENT, begin.run.task_id, requester)
        clock.advance(LEASE)
        assert await store.keep_alives(HERE, 10) == []
        run = one(await (store.acquire(HERE, 10) if queued else store.rescue(HERE, 10))).run
        clock.advance(LEASE)
        assert await store.keep_alives(HERE, 10) == [note]
        await store.release([a_release(run)])
        clock.advance(20 * SECOND)
        assert await store.keep_alives(THERE, 10) == [note]
        assert await store.keep_alives(THERE, 10) == []

    async def test_keep_alives_of_a_running_task(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        requester = a_requester(idle_timeout=10 * SECOND)
        run = (await resumed(store, await paused(store, requester=requester))).run
        for _ in range(2):
            clock.advance(4 * SECOND)
            assert await store.keep_alives(HERE, 10) == [KeepAlive(AGENT, run.task_id, requester)]
        assert await store.renew([run], HERE) == []
        assert isinstance(one(await store.end([an_end(run)])), EndCommitted)

    async def test_no_other_keep_alives(self, store: CheckpointStore, clock: FakeClock) -> None:
        impatient = a_requester(idle_timeout=10 * SECOND)
        await paused(store)
        await begun(store)
        await store.end(
            [an_end((await resumed(store, await paused(store, requester=impatient))).run)]
        )
        clock.advance(8 * SECOND)
        assert await store.keep_alives(HERE, 10) == []
        await paused(store, requester=impatient)
        clock.advance(8 * SECOND)
        assert await store.keep_alives(FOREIGNER, 10) == []

    async def test_keep_alives_limit(self, store: CheckpointStore, clock: FakeClock) -> None:
        for _ in range(3):
            await paused(store, requester=a_requester(idle_timeout=10 * SECOND))
        clock.advance(8 * SECOND)
        assert [len(await store.keep_alives(HERE, 2)), len(await store.keep_alives(HERE, 2))] == [
            2,
            1,
        ]

    async def test_purge_expired_tombstone(self, store: CheckpointStore, clock: FakeClock) -> None:
        run = await ended(store)
        await sent(store, run.task_id)
        clock.advance(TIMINGS.tombstone_ttl - SECOND)
        assert await store.purge(AGENT, 10) == 0
        clock.advance(2 * SECOND)
        assert await store.purge(AgentName("hotels"), 10) == 0
        assert await store.purge(AGENT, 10) == 1
        assert await store.task(run.task_id) is None
        assert await store.purge(AGENT, 10) == 0

    async def test_purge_after_deadline(self, store: CheckpointStore, clock: FakeClock) -> None:
        late = clock.now() + 3 * TIMINGS.tombstone_ttl
        run = (await resumed(store, await paused(store, requester=a_requester(deadline=late)))).run
        await store.end([an_end(run)])
        await sent(store, run.task_id)
        clock.advance(late - clock.now() - SECOND)
        assert await store.purge(AGENT, 10) == 0
        clock.advance(TIMINGS.tombstone_ttl + 2 * SECOND)
        assert await store.purge(AGENT, 10) == 1

    async def test_purge_waits_for_reply(self, store: CheckpointStore, clock: FakeClock) -> None:
        run = await ended(store)
        clock.advance(TIMINGS.tombstone_ttl + SECOND)
        assert await store.purge(AGENT, 10) == 0
        await sent(store, run.task_id)
        assert await store.purge(AGENT, 10) == 1

    async def test_purge_waits_for_cancel(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store)
        await store.cancel([a_cancel(pause.run.task_id)])
        await sent(store, pause.run.task_id)
        clock.advance(TIMINGS.tombstone_ttl + SECOND)
        assert await store.purge(AGENT, 10) == 0
        await store.confirm_sent(await store.unsent(AGENT, 10))
        assert await store.purge(AGENT, 10) == 1

    async def test_purge_early_cancel(self, store: CheckpointStore, clock: FakeClock) -> None:
        await store.cancel([a_cancel(TaskId("never"))])
        clock.advance(TIMINGS.tombstone_ttl + SECOND)
        await store.confirm_sent(await store.unsent(AGENT, 10))
        assert await store.purge(AGENT, 10) == 1

    async def test_live_tasks_stay(self, store: CheckpointStore, clock: FakeClock) -> None:
        await paused(store)
        await ready(store)
        await begun(store)
        clock.advance(100 * HOUR)
        assert await store.purge(AGENT, 10) == 0
        assert len(await store.tasks()) == 3

    async def test_purge_limit(self, store: CheckpointStore, clock: FakeClock) -> None:
        for _ in range(3):
            await sent(store, (await ended(store)).task_id)
        clock.advance(TIMINGS.tombstone_ttl + SECOND)
        assert [await store.purge(AGENT, 2), await store.purge(AGENT, 2)] == [2, 1]


async def rescued(store: CheckpointStore, clock: FakeClock) -> Resumable:
    """Expire the lease of the only running task, and rescue it for `ISOLATING`."""
    clock.advance(LEASE + SECOND)
    return one(await store.rescue(ISOLATING, 10, 10))


async def suspects(store: CheckpointStore, clock: FakeClock, count: int) -> list[Resumable]:
    """Begin `count` tasks and rescue each twice, so that `ISOLATING` owns them as suspects."""
    for _ in range(count):
        await begun(store)
    for _ in range(2):
        clock.advance(LEASE + SECOND)
        tasks = await store.rescue(ISOLATING, 10, 10)
    return tasks


def kind_of(result: object) -> str:
    """The class name of a result."""
    return type(result).__name__


async def sent(store: CheckpointStore, task_id: TaskId) -> None:
    """Confirm the reply of an ended task as sent."""
    reply = await reply_of(store, task_id)
    await store.confirm_sent([reply])
