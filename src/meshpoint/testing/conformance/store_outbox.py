"""The outbox, replies in rows of their own, counts of due work, and the task catalog."""

from __future__ import annotations

from dataclasses import replace

from meshpoint.model.calls import FIRST
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.messages import Address
from meshpoint.model.tasks import (
    CallState,
    CancelNotice,
    Dispatch,
    DueCounts,
    OutboxItem,
    Reply,
    TaskState,
)
from meshpoint.model.transitions import CancelTooLate, Fenced, StoreReply
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    AGENT,
    HERE,
    HOUR,
    LEASE,
    LEASED,
    PEER,
    SECOND,
    TIMEOUT,
    TIMINGS,
    a_begin,
    a_call,
    a_cancel,
    a_claim,
    a_pause,
    a_replica,
    a_requester,
    a_run,
    an_end,
    an_undelivered_reply,
    answered,
    begun,
    ended,
    existing,
    failed,
    one,
    paused,
    ready,
    reply_of,
    resumed,
    revived,
    row,
    state_of,
    sub,
    write_end,
    write_pause,
)


class OutboxSuite:
    """Every committed message is sent at least once."""

    async def test_dispatch_offered_again(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = a_pause("a", requester=a_requester())
        committed = await write_pause(store, pause)
        assert await store.unsent(AGENT, 10) == []
        clock.advance(LEASED)
        again = one(await store.unsent(AGENT, 10))
        first = one(committed.dispatches)
        assert isinstance(again, Dispatch)
        assert again == Dispatch(
            first.agent,
            first.task_id,
            1,
            first.sub_task_id,
            PEER,
            first.body,
            first.headers,
            first.deadline,
            attempt=2,
        )
        assert await store.unsent(AGENT, 10) == []

    async def test_offer_lease_grows(self, store: CheckpointStore, clock: FakeClock) -> None:
        await paused(store, a_call("a", timeout=100 * TIMEOUT))
        clock.advance(LEASED)
        assert len(await store.unsent(AGENT, 10)) == 1
        clock.advance(LEASED)
        assert await store.unsent(AGENT, 10) == []
        clock.advance(10 * LEASED)
        assert len(await store.unsent(AGENT, 10)) == 1

    async def test_sent_call_not_offered(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = a_pause("a", "b")
        committed = await write_pause(store, pause)
        await store.confirm_sent(committed.dispatches[:1])
        clock.advance(LEASED)
        assert [ids(send) for send in await store.unsent(AGENT, 10)] == [
            (pause.run.task_id, sub(pause, "b"))
        ]
        a, b = (await row(store, pause.run.task_id))[1]
        assert (a.dispatched_at is not None, b.dispatched_at) == (True, None)

    async def test_done_call_not_offered(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store, "a", "b")
        await answered(store, pause, "a")
        clock.advance(LEASED)
        assert [ids(send) for send in await store.unsent(AGENT, 10)] == [
            (pause.run.task_id, sub(pause, "b"))
        ]

    async def test_repeated_pause_keeps_sent_dispatches(self, store: CheckpointStore) -> None:
        pause = a_pause("a", "b")
        committed = await write_pause(store, pause)
        await store.confirm_sent(committed.dispatches[:1])
        again = await write_pause(store, pause)
        assert sub(pause, "b") in [dispatch.sub_task_id for dispatch in again.dispatches]
        assert (await row(store, pause.run.task_id))[1][0].dispatched_at is not None

    async def test_unsent_reply_is_offered(self, store: CheckpointStore, clock: FakeClock) -> None:
        run = (await resumed(store)).run
        await write_end(store, an_end(run, reply=b"answer"))
        clock.advance(LEASED)
        reply = Reply(
            AGENT,
            run.task_id,
            TaskState.COMPLETED,
            b"answer",
            a_requester(),
            LEASED,
            fence=run.fence,
        )
        assert await store.unsent(AGENT, 10) == [reply]
        assert await store.unsent(AGENT, 10) == []
        await store.confirm_sent([reply])
        clock.advance(100 * LEASED)
        assert await store.unsent(AGENT, 10) == []
        assert run.task_id in await store.lookup([run.task_id])

    async def test_cancelled_task_sends(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store)
        await store.cancel([a_cancel(pause.run.task_id)])
        clock.advance(LEASED)
        sends = await store.unsent(AGENT, 10)
        assert sorted(type(send).__name__ for send in sends) == ["CancelNotice", "Reply"]
        await store.confirm_sent(sends)
        clock.advance(100 * LEASED)
        assert await store.unsent(AGENT, 10) == []
        assert (await row(store, pause.run.task_id))[1] == []

    async def test_sent_cancel_keeps_call(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store, "a", "b", join=FIRST)
        await answered(store, pause, "a")
        clock.advance(LEASED)
        notice = CancelNotice(AGENT, pause.run.task_id, sub(pause, "b"), PEER)
        assert await store.unsent(AGENT, 10) == [notice]
        await store.confirm_sent([notice])
        await store.confirm_sent([notice])
        assert [call.state for call in (await row(store, pause.run.task_id))[1]] == [
            CallState.DONE,
            CallState.DONE,
        ]
        clock.advance(100 * LEASED)
        assert await store.unsent(AGENT, 10) == []

    async def test_late_cancel_drops_call(self, store: CheckpointStore, clock: FakeClock) -> None:
        first = await paused(store, "a", "b", join=FIRST)
        second = await paused(store, "c", run=(await resumed(store, first, "a")).run)
        await store.confirm_sent([CancelNotice(AGENT, first.run.task_id, sub(first, "b"), PEER)])
        assert [call.call_id for call in (await row(store, second.run.task_id))[1]] == ["c"]

    async def test_confirm_keeps_cancel(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = a_pause("a", "b", join=FIRST)
        committed = await write_pause(store, pause)
        await answered(store, pause, "a")
        await store.confirm_sent(committed.dispatches)
        clock.advance(LEASED)
        assert [ids(send) for send in await store.unsent(AGENT, 10)] == [
            (pause.run.task_id, sub(pause, "b"))
        ]

    async def test_confirm_keeps_new_reply(self, store: CheckpointStore, clock: FakeClock) -> None:
        task_id = (await failed(store)).task_id
        clock.advance(LEASED)
        earlier = one(await store.unsent(AGENT, 10))
        end = await write_end(store, an_end(await revived(store, task_id), reply=b"at last"))
        await store.confirm_sent([earlier])
        clock.advance(LEASED)
        again = one(await store.unsent(AGENT, 10))
        assert again == replace(end.reply, age=LEASED)
        await store.confirm_sent([earlier, again])
        clock.advance(100 * LEASED)
        assert await store.unsent(AGENT, 10) == []

    async def test_confirm_early_cancel(self, store: CheckpointStore, clock: FakeClock) -> None:
        cancel = a_cancel(TaskId("to come"))
        await store.cancel([cancel])
        late = one(await store.cancel([a_cancel(cancel.task_id)]))
        assert isinstance(late, CancelTooLate)
        await store.confirm_sent([late.reply])
        clock.advance(TIMINGS.tombstone_ttl + SECOND)
        assert await store.unsent(AGENT, 10) == []
        assert await store.purge(AGENT, 10) == 1

    async def test_marking_what_is_gone_does_nothing(self, store: CheckpointStore) -> None:
        await store.confirm_sent([CancelNotice(AGENT, TaskId("nobody"), TaskId("nobody"), PEER)])
        await store.confirm_sent([])
        assert await store.tasks() == []

    async def test_unsent_own_agent_only(self, store: CheckpointStore, clock: FakeClock) -> None:
        await paused(store)
        await ended(store)
        clock.advance(LEASED)
        assert await store.unsent(AgentName("hotels"), 10) == []
        assert len(await store.unsent(AGENT, 10)) == 2

    async def test_unsent_limit(self, store: CheckpointStore, clock: FakeClock) -> None:
        first, second = await paused(store, "a", "b"), await paused(store, "a")
        clock.advance(LEASED)
        offers = [await store.unsent(AGENT, 2), await store.unsent(AGENT, 2)]
        assert [len(offer) for offer in offers] == [2, 1]
        expected = {sub(first, "a"), sub(first, "b"), sub(second, "a")}
        assert {ids(send)[1] for offer in offers for send in offer} == expected

    async def test_tasks_newest_first(self, store: CheckpointStore, clock: FakeClock) -> None:
        tasks = []
        for _ in range(3):
            tasks.append((await paused(store)).run.task_id)
            clock.advance(SECOND)
        assert [summary.task_id for summary in await store.tasks()] == tasks[::-1]
        assert [summary.task_id for summary in await store.tasks(limit=2)] == tasks[:0:-1]

    async def test_tasks_are_listed_by_agent_and_state(self, store: CheckpointStore) -> None:
        running, waiting, over = await begun(store), (await paused(store)).run, await ended(store)
        await ready(store)
        listed = await store.tasks(agent=AGENT, states=[TaskState.RUNNING, TaskState.COMPLETED])
        assert {summary.task_id for summary in listed} == {running.task_id, over.task_id}
        assert waiting.task_id in {
            summary.task_id for summary in await store.tasks(states=[TaskState.WAITING])
        }
        assert await store.tasks(agent=AgentName("hotels")) == []

    async def test_waiting_task_details(self, store: CheckpointStore, clock: FakeClock) -> None:
        now = clock.now()
        pause = await paused(
            store, a_call("slow", timeout=9 * SECOND), a_call("fast", timeout=SECOND), "done"
        )
        await store.claim([a_claim(pause, "done")], HERE, 1)
        summary, calls = await row(store, pause.run.task_id)
        assert (summary.agent, summary.state, summary.completed, summary.expected) == (
            AGENT,
            TaskState.WAITING,
            1,
            3,
        )
        assert (summary.checkpointed_at, summary.wake_at) == (now, now + SECOND)
        assert [(call.call_id, call.peer, call.generation) for call in calls] == [
            ("slow", PEER, 1),
            ("fast", PEER, 1),
            ("done", PEER, 1),
        ]
        assert [call.deadline - now for call in calls] == [9 * SECOND, SECOND, TIMEOUT]
        assert [call.outcome is None for call in calls] == [True, True, False]

    async def test_nobody_is_not_there(self, store: CheckpointStore) -> None:
        assert await store.task(TaskId("nobody")) is None
        assert await store.tasks() == []

    async def test_offer_undelivered_reply(self, store: CheckpointStore, clock: FakeClock) -> None:
        command = an_undelivered_reply()
        assert await store.store_replies([command]) == [True]
        assert await state_of(store, command.reply.task_id) is TaskState.COMPLETED
        assert await store.unsent(AGENT, 10) == []
        clock.advance(LEASED)
        assert await store.unsent(AGENT, 10) == [replace(command.reply, age=LEASED)]
        assert await store.unsent(AGENT, 10) == []

    async def test_purge_undelivered_reply(self, store: CheckpointStore, clock: FakeClock) -> None:
        command = an_undelivered_reply(keep=30 * SECOND)
        await store.store_replies([command])
        clock.advance(31 * SECOND)
        assert await store.purge(AGENT, 10) == 0
        await store.confirm_sent([command.reply])
        assert await store.unsent(AGENT, 10) == []
        assert await store.purge(AGENT, 10) == 1

    async def test_undelivered_reply_ttl(self, store: CheckpointStore, clock: FakeClock) -> None:
        command = an_undelivered_reply(keep=None)
        await store.store_replies([command])
        await store.confirm_sent([command.reply])
        clock.advance(TIMINGS.tombstone_ttl - SECOND)
        assert await store.purge(AGENT, 10) == 0
        clock.advance(2 * SECOND)
        assert await store.purge(AGENT, 10) == 1

    async def test_repeated_undelivered_reply_finds_first(self, store: CheckpointStore) -> None:
        command = an_undelivered_reply()
        assert await store.store_replies([command]) == [True]
        assert await store.store_replies([command, command]) == [True, True]

    async def test_store_replies_in_batch(self, store: CheckpointStore, clock: FakeClock) -> None:
        commands = [an_undelivered_reply() for _ in range(5)]
        taken = an_undelivered_reply(await begun(store))
        results = await store.store_replies(
            [*commands[:2], replace(taken, run_id=a_run().id), *commands[2:]]
        )
        assert results == [True, True, False, True, True, True]
        clock.advance(LEASED)
        assert len(await store.unsent(AGENT, 10)) == 5

    async def test_a_row_of_another_run_is_left_alone(self, store: CheckpointStore) -> None:
        pause = await paused(store, "a")
        for again in (False, True):
            command = replace(an_undelivered_reply(a_run(pause.run.task_id), again=again))
            assert await store.store_replies([command]) == [False]
            assert await state_of(store, pause.run.task_id) is TaskState.WAITING

    async def test_undelivered_reply_fences_other_runs(self, store: CheckpointStore) -> None:
        command = an_undelivered_reply()
        task_id = command.reply.task_id
        await store.store_replies([command])
        known = await existing(store, task_id)
        assert known.reply is not None
        assert known.reply.body == b"the reply"
        assert one(await store.begin([a_begin(a_run(task_id))])) == Fenced()
        assert one(await store.pause([a_pause("a", run=a_run(task_id))])) == Fenced()
        assert isinstance(one(await store.cancel([a_cancel(task_id)])), CancelTooLate)

    async def test_sent_reply_is_due_again(self, store: CheckpointStore, clock: FakeClock) -> None:
        run = await ended(store)
        reply = await reply_of(store, run.task_id)
        await store.confirm_sent([reply])
        moved = replace(
            reply, requester=replace(reply.requester, reply_to=Address("client.private.2"))
        )
        assert await store.store_replies([StoreReply(a_run().id, moved, is_redelivery=False)]) == [
            False
        ]
        assert await store.store_replies([StoreReply(a_run().id, moved, is_redelivery=True)]) == [
            True
        ]
        clock.advance(LEASED)
        offered = one(await store.unsent(AGENT, 10))
        assert isinstance(offered, Reply)
        assert (offered.body, offered.requester.reply_to) == (reply.body, "client.private.2")

    async def test_confirm_checks_address(self, store: CheckpointStore, clock: FakeClock) -> None:
        run = await ended(store)
        reply = await reply_of(store, run.task_id)
        moved = replace(
            reply, requester=replace(reply.requester, reply_to=Address("client.private.2"))
        )
        assert await store.store_replies([StoreReply(a_run().id, moved, is_redelivery=True)]) == [
            True
        ]
        await store.confirm_sent([reply])  # to the previous address
        clock.advance(LEASED)
        assert one(await store.unsent(AGENT, 10)).task_id == run.task_id
        await store.confirm_sent([moved])
        clock.advance(LEASED * 4)
        assert await store.unsent(AGENT, 10) == []

    async def test_due_reply_keeps_lease(self, store: CheckpointStore, clock: FakeClock) -> None:
        command = an_undelivered_reply()
        await store.store_replies([command])
        clock.advance(LEASED)
        await store.unsent(AGENT, 10)  # this doubles the lease
        assert await store.store_replies(
            [replace(command, run_id=a_run().id, is_redelivery=True)]
        ) == [True]
        clock.advance(LEASED)
        assert await store.unsent(AGENT, 10) == []

    async def test_reply_over_early_cancel(self, store: CheckpointStore, clock: FakeClock) -> None:
        """The cancel's row must not displace the reply of a task that runs without a row."""
        commands = [an_undelivered_reply(), an_undelivered_reply()]
        mine, theirs = (command.reply.task_id for command in commands)
        await store.cancel([a_cancel(mine, sender="client"), a_cancel(theirs, sender="stranger")])
        for _ in range(2):
            assert await store.store_replies(commands) == [True, True]
        clock.advance(LEASED)
        offered = {each.task_id: each for each in await store.unsent(AGENT, 10)}
        assert offered == {
            command.reply.task_id: replace(command.reply, age=LEASED) for command in commands
        }

    async def test_undelivered_reply_keeps_input_digest(self, store: CheckpointStore) -> None:
        command = replace(an_undelivered_reply(), digest="of the input")
        await store.store_replies([command])
        assert (await existing(store, command.reply.task_id)).digest == "of the input"

    async def test_another_agents_row_is_left_alone(self, store: CheckpointStore) -> None:
        command = an_undelivered_reply()
        await store.store_replies([command])
        theirs = replace(
            command,
            run_id=a_run().id,
            reply=replace(command.reply, agent=AgentName("other")),
            is_redelivery=True,
        )
        assert await store.store_replies([theirs]) == [False]

    async def test_nothing_is_due_of_nothing(self, store: CheckpointStore) -> None:
        assert await store.due(HERE, 10) == DueCounts()

    async def test_due_counts_by_kind(self, store: CheckpointStore, clock: FakeClock) -> None:
        await begun(store)
        await store.store_replies([an_undelivered_reply()])
        await paused(store, a_call("a", timeout=TIMEOUT))
        await paused(
            store, a_call("a", timeout=HOUR), requester=a_requester(idle_timeout=30 * SECOND)
        )
        assert await store.due(HERE, 10) == DueCounts()
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

    async def test_due_of_runnable_tasks(self, store: CheckpointStore, clock: FakeClock) -> None:
        await begun(store)
        await ready(store)
        await paused(store, a_call("a", timeout=TIMEOUT))
        clock.advance(TIMEOUT + SECOND)
        assert await store.due(a_replica(agent=PEER), 10) == DueCounts()
        assert (await store.due(a_replica(formats=["another/1"]), 10)).ready == 0


def ids(send: OutboxItem) -> tuple[TaskId, TaskId | None]:
    """The ids of the task and of the call; the latter is `None` for a reply."""
    return send.task_id, None if isinstance(send, Reply) else send.sub_task_id
