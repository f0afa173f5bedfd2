"""Several replicas on the same data, at the same time."""

from __future__ import annotations

import asyncio
from collections import Counter

from meshpoint.adapters.inprocess.clock import FakeClock
from meshpoint.model.checkpoint import (
    AllArrived,
    CancelledNow,
    CancelRequested,
    CancelTooLate,
    Committed,
    Duplicate,
    Ended,
    Fenced,
    StillWaiting,
    TaskState,
    Unknown,
)
from meshpoint.model.ids import TaskId, new_id
from meshpoint.ports.task_store import CheckpointStore
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

    async def test_what_one_replica_pauses_another_resumes(
        self, store: CheckpointStore, other: CheckpointStore
    ) -> None:
        pause = await paused(store, "a", "b")
        await store.claim([a_claim(pause, "a")], HERE, 1)
        task = await resumed(other, pause, "b", replica=THERE)
        assert (task.state, list(outcomes(task))) == (pause.state, ["a", "b"])

    async def test_of_responses_that_race_exactly_one_is_the_last(
        self, store: CheckpointStore, other: CheckpointStore
    ) -> None:
        for _ in range(5):
            pause = await paused(store, "a", "b", "c", "d")
            arrivals = await asyncio.gather(
                *(
                    (store if number % 2 else other).claim([a_claim(pause, call_id)], HERE, 1)
                    for number, call_id in enumerate("abcd")
                )
            )
            assert Counter(type(one(arrival)) for arrival in arrivals) == {StillWaiting: 3, AllArrived: 1}
            last = one(one(arrival) for arrival in arrivals if isinstance(one(arrival), AllArrived))
            assert isinstance(last, AllArrived)
            assert list(outcomes(last.task)) == ["a", "b", "c", "d"]

    async def test_of_duplicates_that_race_one_wins(self, store: CheckpointStore, other: CheckpointStore) -> None:
        pause = await paused(store)
        arrivals = await asyncio.gather(
            store.claim([a_claim(pause)], HERE, 1), other.claim([a_claim(pause)], THERE, 1)
        )
        assert Counter(type(one(arrival)) for arrival in arrivals) == {AllArrived: 1, Duplicate: 1}

    async def test_batches_that_overlap_in_opposite_order_do_not_deadlock(
        self, store: CheckpointStore, other: CheckpointStore
    ) -> None:
        pauses = [await paused(store, "a", "b") for _ in range(10)]
        forth = [a_claim(pause, "a") for pause in pauses]
        back = [a_claim(pause, "b") for pause in reversed(pauses)]
        arrivals = await asyncio.gather(store.claim(forth, HERE, 10), other.claim(back, THERE, 10))
        assert Counter(type(arrival) for batch in arrivals for arrival in batch) == {StillWaiting: 10, AllArrived: 10}

    async def test_of_two_first_segments_of_one_task_one_commits(
        self, store: CheckpointStore, other: CheckpointStore
    ) -> None:
        task_id = TaskId(new_id())
        results = await asyncio.gather(
            store.pause([a_pause(run=a_run(task_id))]), other.pause([a_pause(run=a_run(task_id))])
        )
        assert Counter(type(one(result)) for result in results) == {Committed: 1, Fenced: 1}

    async def test_each_ready_task_is_taken_once(self, store: CheckpointStore, other: CheckpointStore) -> None:
        tasks = [(await ready(store)).run.task_id for _ in range(6)]
        taken = await asyncio.gather(store.take(HERE, 6), other.take(THERE, 6))
        # One replica may have skipped a row that the other had locked but did not acquire.
        rest = await store.take(HERE, 6)
        assert sorted(task_ids([*taken[0], *taken[1], *rest])) == sorted(tasks)

    async def test_each_expired_task_goes_on_once(
        self, store: CheckpointStore, other: CheckpointStore, clock: FakeClock
    ) -> None:
        tasks = [(await paused(store)).run.task_id for _ in range(6)]
        clock.advance(TIMEOUT + SECOND)
        swept = await asyncio.gather(store.expire(HERE, 6, 6), other.expire(THERE, 6, 6))
        rest = await store.expire(HERE, 6, 6)
        assert sorted(expired.task_id for expired in [*swept[0], *swept[1], *rest]) == sorted(tasks)

    async def test_each_expired_lease_is_taken_once(
        self, store: CheckpointStore, other: CheckpointStore, clock: FakeClock
    ) -> None:
        tasks = [(await begun(store)).task_id for _ in range(6)]
        clock.advance(LEASE + SECOND)
        taken = await asyncio.gather(store.take_over(HERE, 6), other.take_over(THERE, 6))
        rest = await store.take_over(HERE, 6)
        assert sorted(task_ids([*taken[0], *taken[1], *rest])) == sorted(tasks)

    async def test_each_send_is_offered_once(
        self, store: CheckpointStore, other: CheckpointStore, clock: FakeClock
    ) -> None:
        tasks = [(await paused(store)).run.task_id for _ in range(6)]
        clock.advance(TIMINGS.dispatch_lease + SECOND)
        offers = await asyncio.gather(store.unsent(AGENT, 6), other.unsent(AGENT, 6))
        rest = await store.unsent(AGENT, 6)
        assert sorted(send.task_id for send in [*offers[0], *offers[1], *rest]) == sorted(tasks)

    async def test_a_zombie_changes_nothing(
        self, store: CheckpointStore, other: CheckpointStore, clock: FakeClock
    ) -> None:
        zombie = (await resumed(store)).run
        clock.advance(LEASE + SECOND)
        owner = one(await other.take_over(THERE, 1)).run
        before = await row(other, owner.task_id)
        assert await store.renew([zombie], HERE) == [zombie]
        assert await store.pause([a_pause("z", run=zombie)]) == [Fenced()]
        assert await store.end([an_end(zombie)]) == [Fenced()]
        assert await store.release([a_release(zombie)]) == [False]
        assert await row(other, owner.task_id) == before
        assert isinstance(one(await other.end([an_end(owner)])), Ended)

    async def test_a_cancel_and_the_last_response_race_to_one_end(
        self, store: CheckpointStore, other: CheckpointStore
    ) -> None:
        pause = await paused(store)
        [arrival], [cancel] = await asyncio.gather(
            store.claim([a_claim(pause)], HERE, 1), other.cancel([a_cancel(pause.run.task_id)])
        )
        if isinstance(arrival, AllArrived):
            assert cancel == CancelRequested(HERE.id)
        else:
            assert isinstance(arrival, Unknown | Duplicate)
            assert isinstance(cancel, CancelledNow)

    async def test_a_cancel_and_an_end_race_to_one_end(self, store: CheckpointStore, other: CheckpointStore) -> None:
        run = (await resumed(store)).run
        [end], [cancel] = await asyncio.gather(store.end([an_end(run)]), other.cancel([a_cancel(run.task_id)]))
        assert isinstance(end, Ended)
        assert isinstance(cancel, CancelTooLate | CancelRequested)
        assert await state_of(store, run.task_id) is TaskState.COMPLETED
