"""Several replicas on the same data, at the same time."""

from __future__ import annotations

import asyncio
from collections import Counter

from meshpoint.model.ids import TaskId, new_id
from meshpoint.model.tasks import TaskState
from meshpoint.model.transitions import (
    CancelCommitted,
    CancelRequested,
    CancelTooLate,
    DuplicateOutcome,
    EndCommitted,
    Fenced,
    JoinCompleted,
    PauseCommitted,
    StillWaiting,
    UnknownCall,
)
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    AGENT,
    HERE,
    LEASE,
    SECOND,
    THERE,
    TIMEOUT,
    TIMINGS,
    a_cancel,
    a_claim,
    a_pause,
    a_release,
    a_run,
    an_end,
    begun,
    one,
    outcomes,
    paused,
    ready,
    resumed,
    row,
    state_of,
    task_ids,
)


class ReplicasSuite:
    """Two replicas use `store` and `other`, which are the same for a store in one process."""

    async def test_resume_elsewhere(self, store: CheckpointStore, other: CheckpointStore) -> None:
        pause = await paused(store, "a", "b")
        await store.claim([a_claim(pause, "a")], HERE, 1)
        task = await resumed(other, pause, "b", replica=THERE)
        assert (task.state, list(outcomes(task))) == (pause.state, ["a", "b"])

    async def test_racing_responses(self, store: CheckpointStore, other: CheckpointStore) -> None:
        for _ in range(5):
            pause = await paused(store, "a", "b", "c", "d")
            arrivals = await asyncio.gather(
                *(
                    (store if number % 2 else other).claim([a_claim(pause, call_id)], HERE, 1)
                    for number, call_id in enumerate("abcd")
                )
            )
            assert Counter(type(one(arrival)) for arrival in arrivals) == {
                StillWaiting: 3,
                JoinCompleted: 1,
            }
            last = one(
                one(arrival) for arrival in arrivals if isinstance(one(arrival), JoinCompleted)
            )
            assert isinstance(last, JoinCompleted)
            assert list(outcomes(last.task)) == ["a", "b", "c", "d"]

    async def test_racing_duplicates(self, store: CheckpointStore, other: CheckpointStore) -> None:
        pause = await paused(store)
        arrivals = await asyncio.gather(
            store.claim([a_claim(pause)], HERE, 1), other.claim([a_claim(pause)], THERE, 1)
        )
        assert Counter(type(one(arrival)) for arrival in arrivals) == {
            JoinCompleted: 1,
            DuplicateOutcome: 1,
        }

    async def test_no_claim_deadlock(self, store: CheckpointStore, other: CheckpointStore) -> None:
        pauses = [await paused(store, "a", "b") for _ in range(10)]
        forth = [a_claim(pause, "a") for pause in pauses]
        back = [a_claim(pause, "b") for pause in reversed(pauses)]
        arrivals = await asyncio.gather(store.claim(forth, HERE, 10), other.claim(back, THERE, 10))
        assert Counter(type(arrival) for batch in arrivals for arrival in batch) == {
            StillWaiting: 10,
            JoinCompleted: 10,
        }

    async def test_racing_first_runs(self, store: CheckpointStore, other: CheckpointStore) -> None:
        task_id = TaskId(new_id())
        results = await asyncio.gather(
            store.pause([a_pause(run=a_run(task_id))]), other.pause([a_pause(run=a_run(task_id))])
        )
        assert Counter(type(one(result)) for result in results) == {PauseCommitted: 1, Fenced: 1}

    async def test_racing_acquire(self, store: CheckpointStore, other: CheckpointStore) -> None:
        tasks = [(await ready(store)).run.task_id for _ in range(6)]
        taken = await asyncio.gather(store.acquire(HERE, 6), other.acquire(THERE, 6))
        # One replica may have skipped a row that the other had locked but did not acquire.
        rest = await store.acquire(HERE, 6)
        assert sorted(task_ids([*taken[0], *taken[1], *rest])) == sorted(tasks)

    async def test_racing_expire(
        self, store: CheckpointStore, other: CheckpointStore, clock: FakeClock
    ) -> None:
        tasks = [(await paused(store)).run.task_id for _ in range(6)]
        clock.advance(TIMEOUT + SECOND)
        swept = await asyncio.gather(store.expire(HERE, 6, 6), other.expire(THERE, 6, 6))
        rest = await store.expire(HERE, 6, 6)
        assert sorted(expired.task_id for expired in [*swept[0], *swept[1], *rest]) == sorted(
            tasks
        )

    async def test_racing_rescue(
        self, store: CheckpointStore, other: CheckpointStore, clock: FakeClock
    ) -> None:
        tasks = [(await begun(store)).task_id for _ in range(6)]
        clock.advance(LEASE + SECOND)
        taken = await asyncio.gather(store.rescue(HERE, 6), other.rescue(THERE, 6))
        rest = await store.rescue(HERE, 6)
        assert sorted(task_ids([*taken[0], *taken[1], *rest])) == sorted(tasks)

    async def test_racing_unsent(
        self, store: CheckpointStore, other: CheckpointStore, clock: FakeClock
    ) -> None:
        tasks = [(await paused(store)).run.task_id for _ in range(6)]
        clock.advance(TIMINGS.dispatch_lease + SECOND)
        offers = await asyncio.gather(store.unsent(AGENT, 6), other.unsent(AGENT, 6))
        rest = await store.unsent(AGENT, 6)
        assert sorted(send.task_id for send in [*offers[0], *offers[1], *rest]) == sorted(tasks)

    async def test_zombie_is_fenced(
        self, store: CheckpointStore, other: CheckpointStore, clock: FakeClock
    ) -> None:
        zombie = (await resumed(store)).run
        clock.advance(LEASE + SECOND)
        owner = one(await other.rescue(THERE, 1)).run
        before = await row(other, owner.task_id)
        assert await store.renew([zombie], HERE) == [zombie]
        assert await store.pause([a_pause("z", run=zombie)]) == [Fenced()]
        assert await store.end([an_end(zombie)]) == [Fenced()]
        assert await store.release([a_release(zombie)]) == [False]
        assert await row(other, owner.task_id) == before
        assert isinstance(one(await other.end([an_end(owner)])), EndCommitted)

    async def test_cancel_vs_claim(self, store: CheckpointStore, other: CheckpointStore) -> None:
        pause = await paused(store)
        [arrival], [cancel] = await asyncio.gather(
            store.claim([a_claim(pause)], HERE, 1), other.cancel([a_cancel(pause.run.task_id)])
        )
        if isinstance(arrival, JoinCompleted):
            assert cancel == CancelRequested(HERE.id)
        else:
            assert isinstance(arrival, UnknownCall | DuplicateOutcome)
            assert isinstance(cancel, CancelCommitted)

    async def test_cancel_vs_end(self, store: CheckpointStore, other: CheckpointStore) -> None:
        run = (await resumed(store)).run
        [end], [cancel] = await asyncio.gather(
            store.end([an_end(run)]), other.cancel([a_cancel(run.task_id)])
        )
        assert isinstance(end, EndCommitted)
        assert isinstance(cancel, CancelTooLate | CancelRequested)
        assert await state_of(store, run.task_id) is TaskState.COMPLETED
