"""Undeliverable replies of tasks without a row, and the count of due work."""

from __future__ import annotations

from dataclasses import replace

from meshpoint.adapters.inprocess.clock import FakeClock
from meshpoint.model.checkpoint import (
    CancelTooLate,
    Due,
    Fenced,
    KeepReply,
    Reply,
    TaskState,
)
from meshpoint.model.ids import AgentName
from meshpoint.model.messages import Address
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.conformance.build import (
    AGENT,
    HERE,
    HOUR,
    LEASE,
    PEER,
    SECOND,
    TIMEOUT,
    TIMINGS,
    a_begin,
    a_call,
    a_cancel,
    a_kept_reply,
    a_pause,
    a_replica,
    a_requester,
    a_run,
    begun,
    ended,
    one,
    paused,
    ready,
    state_of,
)

LEASED = TIMINGS.dispatch_lease + SECOND


class RepliesSuite:
    """A reply that could not be delivered is kept in a row of its own."""

    async def test_a_kept_reply_is_offered_after_its_lease(self, store: CheckpointStore, clock: FakeClock) -> None:
        wish = a_kept_reply()
        assert await store.keep_replies([wish]) == [True]
        assert await state_of(store, wish.reply.task_id) is TaskState.COMPLETED
        assert await store.unsent(AGENT, 10) == []
        clock.advance(LEASED)
        assert await store.unsent(AGENT, 10) == [replace(wish.reply, age=LEASED)]
        assert await store.unsent(AGENT, 10) == []

    async def test_a_kept_reply_goes_with_its_time_once_it_is_sent(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        wish = a_kept_reply(keep=30 * SECOND)
        await store.keep_replies([wish])
        clock.advance(31 * SECOND)
        assert await store.purge(AGENT, 10) == 0
        await store.mark_sent([wish.reply])
        assert await store.unsent(AGENT, 10) == []
        assert await store.purge(AGENT, 10) == 1

    async def test_a_kept_reply_stays_as_long_as_others_if_nothing_is_said(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        wish = a_kept_reply(keep=None)
        await store.keep_replies([wish])
        await store.mark_sent([wish.reply])
        clock.advance(TIMINGS.tombstone_ttl - SECOND)
        assert await store.purge(AGENT, 10) == 0
        clock.advance(2 * SECOND)
        assert await store.purge(AGENT, 10) == 1

    async def test_keeping_a_reply_twice_finds_the_first(self, store: CheckpointStore) -> None:
        wish = a_kept_reply()
        assert await store.keep_replies([wish]) == [True]
        assert await store.keep_replies([wish, wish]) == [True, True]

    async def test_many_replies_are_kept_together(self, store: CheckpointStore, clock: FakeClock) -> None:
        wishes = [a_kept_reply() for _ in range(5)]
        taken = a_kept_reply(await begun(store))
        results = await store.keep_replies([*wishes[:2], replace(taken, run_id=a_run().id), *wishes[2:]])
        assert results == [True, True, False, True, True, True]
        clock.advance(LEASED)
        assert len(await store.unsent(AGENT, 10)) == 5

    async def test_a_row_of_another_run_is_left_alone(self, store: CheckpointStore) -> None:
        pause = await paused(store, "a")
        for again in (False, True):
            wish = replace(a_kept_reply(a_run(pause.run.task_id), again=again))
            assert await store.keep_replies([wish]) == [False]
            assert await state_of(store, pause.run.task_id) is TaskState.WAITING

    async def test_a_kept_reply_is_found_by_its_request_and_fences_other_runs(self, store: CheckpointStore) -> None:
        wish = a_kept_reply()
        task_id = wish.reply.task_id
        await store.keep_replies([wish])
        known = (await store.lookup([task_id]))[task_id]
        assert known.reply is not None
        assert known.reply.body == b"the reply"
        assert one(await store.begin([a_begin(a_run(task_id))])) == Fenced()
        assert one(await store.pause([a_pause("a", run=a_run(task_id))])) == Fenced()
        assert isinstance(one(await store.cancel([a_cancel(task_id)])), CancelTooLate)

    async def test_a_reply_that_was_sent_is_due_again_for_who_asks_again(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = await ended(store)
        (reply,) = [known.reply for known in (await store.lookup([run.task_id])).values()]
        assert reply is not None
        await store.mark_sent([reply])
        moved = replace(reply, requester=replace(reply.requester, reply_to=Address("desk.private.2")))
        assert await store.keep_replies([KeepReply(a_run().id, moved, again=False)]) == [False]
        assert await store.keep_replies([KeepReply(a_run().id, moved, again=True)]) == [True]
        clock.advance(LEASED)
        offered = one(await store.unsent(AGENT, 10))
        assert isinstance(offered, Reply)
        assert (offered.body, offered.requester.reply_to) == (reply.body, "desk.private.2")

    async def test_a_late_mark_is_not_one_of_the_reply_to_another_address(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = await ended(store)
        (reply,) = [known.reply for known in (await store.lookup([run.task_id])).values()]
        assert reply is not None
        moved = replace(reply, requester=replace(reply.requester, reply_to=Address("desk.private.2")))
        assert await store.keep_replies([KeepReply(a_run().id, moved, again=True)]) == [True]
        await store.mark_sent([reply])  # to the previous address
        clock.advance(LEASED)
        assert one(await store.unsent(AGENT, 10)).task_id == run.task_id
        await store.mark_sent([moved])
        clock.advance(LEASED * 4)
        assert await store.unsent(AGENT, 10) == []

    async def test_a_reply_that_is_still_due_keeps_its_turn(self, store: CheckpointStore, clock: FakeClock) -> None:
        wish = a_kept_reply()
        await store.keep_replies([wish])
        clock.advance(LEASED)
        await store.unsent(AGENT, 10)  # this doubles the lease
        assert await store.keep_replies([replace(wish, run_id=a_run().id, again=True)]) == [True]
        clock.advance(LEASED)
        assert await store.unsent(AGENT, 10) == []

    async def test_a_kept_reply_takes_the_place_of_a_cancel_that_came_before_its_request(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        """The cancel's row must not displace the reply of a task that runs without a row."""
        wishes = [a_kept_reply(), a_kept_reply()]
        mine, theirs = (wish.reply.task_id for wish in wishes)
        await store.cancel([a_cancel(mine, sender="desk"), a_cancel(theirs, sender="stranger")])
        for _ in range(2):
            assert await store.keep_replies(wishes) == [True, True]
        clock.advance(LEASED)
        offered = {each.task_id: each for each in await store.unsent(AGENT, 10)}
        assert offered == {wish.reply.task_id: replace(wish.reply, age=LEASED) for wish in wishes}

    async def test_a_kept_reply_knows_the_input_of_its_request(self, store: CheckpointStore) -> None:
        wish = replace(a_kept_reply(), digest="of the input")
        await store.keep_replies([wish])
        assert (await store.lookup([wish.reply.task_id]))[wish.reply.task_id].digest == "of the input"

    async def test_another_agents_row_is_left_alone(self, store: CheckpointStore) -> None:
        wish = a_kept_reply()
        await store.keep_replies([wish])
        theirs = replace(wish, run_id=a_run().id, reply=replace(wish.reply, agent=AgentName("other")), again=True)
        assert await store.keep_replies([theirs]) == [False]


class DueSuite:
    """Counts due work without changing anything."""

    async def test_nothing_is_due_of_nothing(self, store: CheckpointStore) -> None:
        assert await store.due(HERE, 10) == Due()

    async def test_what_is_due_is_counted_by_kind(self, store: CheckpointStore, clock: FakeClock) -> None:
        await begun(store)
        await store.keep_replies([a_kept_reply()])
        await paused(store, a_call("a", timeout=TIMEOUT))
        await paused(store, a_call("a", timeout=HOUR), requester=a_requester(idle_timeout=30 * SECOND))
        assert await store.due(HERE, 10) == Due()
        clock.advance(max(LEASE, TIMEOUT) + SECOND)
        await ready(store)
        for _ in range(2):  # counting does not lease
            due = await store.due(HERE, 10)
            assert (due.ready, due.lapsed, due.expired, due.keep_alives) == (1, 1, 1, 1)
            assert due.unsent >= 2  # the reply, and the call that has an hour

    async def test_counting_ends_at_the_limit(self, store: CheckpointStore) -> None:
        for _ in range(3):
            await ready(store)
        assert (await store.due(HERE, 2)).ready == 2
        assert (await store.due(HERE, 5)).ready == 3

    async def test_tasks_that_others_run_are_not_counted(self, store: CheckpointStore, clock: FakeClock) -> None:
        await begun(store)
        await ready(store)
        await paused(store, a_call("a", timeout=TIMEOUT))
        clock.advance(TIMEOUT + SECOND)
        assert await store.due(a_replica(agent=PEER), 10) == Due()
        assert (await store.due(a_replica(formats=["another/1"]), 10)).ready == 0
