"""The outbox, and the catalog of tasks."""

from __future__ import annotations

from dataclasses import replace

from meshpoint.adapters.inprocess.clock import FakeClock
from meshpoint.model.calls import FIRST
from meshpoint.model.checkpoint import (
    CallState,
    CancelNotice,
    CancelTooLate,
    Committed,
    Dispatch,
    Ended,
    Reply,
    Send,
    TaskState,
)
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.conformance.build import (
    AGENT,
    HERE,
    PEER,
    SECOND,
    TIMEOUT,
    TIMINGS,
    a_call,
    a_cancel,
    a_claim,
    a_pause,
    a_requester,
    an_end,
    answered,
    begun,
    ended,
    failed,
    one,
    paused,
    ready,
    resumed,
    revived,
    row,
    sub,
)

LEASED = TIMINGS.dispatch_lease + SECOND


class OutboxSuite:
    """Every committed message is sent at least once."""

    async def test_a_dispatch_is_offered_again_after_its_lease(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = a_pause("a", requester=a_requester())
        committed = one(await store.pause([pause]))
        assert isinstance(committed, Committed)
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

    async def test_each_offer_is_leased_for_longer(self, store: CheckpointStore, clock: FakeClock) -> None:
        await paused(store, a_call("a", timeout=100 * TIMEOUT))
        clock.advance(LEASED)
        assert len(await store.unsent(AGENT, 10)) == 1
        clock.advance(LEASED)
        assert await store.unsent(AGENT, 10) == []
        clock.advance(10 * LEASED)
        assert len(await store.unsent(AGENT, 10)) == 1

    async def test_what_was_dispatched_is_not_offered_again(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = a_pause("a", "b")
        committed = one(await store.pause([pause]))
        assert isinstance(committed, Committed)
        await store.mark_sent(committed.dispatches[:1])
        clock.advance(LEASED)
        assert [ids(send) for send in await store.unsent(AGENT, 10)] == [(pause.run.task_id, sub(pause, "b"))]
        a, b = (await row(store, pause.run.task_id))[1]
        assert (a.dispatched_at is not None, b.dispatched_at) == (True, None)

    async def test_a_call_with_an_outcome_is_not_dispatched(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(store, "a", "b")
        await answered(store, pause, "a")
        clock.advance(LEASED)
        assert [ids(send) for send in await store.unsent(AGENT, 10)] == [(pause.run.task_id, sub(pause, "b"))]

    async def test_a_repeated_pause_does_not_dispatch_what_was_sent(self, store: CheckpointStore) -> None:
        pause = a_pause("a", "b")
        committed = one(await store.pause([pause]))
        assert isinstance(committed, Committed)
        await store.mark_sent(committed.dispatches[:1])
        again = one(await store.pause([pause]))
        assert isinstance(again, Committed)
        assert sub(pause, "b") in [dispatch.sub_task_id for dispatch in again.dispatches]
        assert (await row(store, pause.run.task_id))[1][0].dispatched_at is not None

    async def test_a_reply_is_offered_until_it_is_sent(self, store: CheckpointStore, clock: FakeClock) -> None:
        run = (await resumed(store)).run
        end = one(await store.end([an_end(run, reply=b"answer")]))
        assert isinstance(end, Ended)
        clock.advance(LEASED)
        reply = Reply(AGENT, run.task_id, TaskState.COMPLETED, b"answer", a_requester(), LEASED, fence=run.fence)
        assert await store.unsent(AGENT, 10) == [reply]
        assert await store.unsent(AGENT, 10) == []
        await store.mark_sent([reply])
        clock.advance(100 * LEASED)
        assert await store.unsent(AGENT, 10) == []
        assert run.task_id in await store.lookup([run.task_id])

    async def test_a_cancelled_tasks_reply_and_cancels_are_offered(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await paused(store)
        await store.cancel([a_cancel(pause.run.task_id)])
        clock.advance(LEASED)
        sends = await store.unsent(AGENT, 10)
        assert sorted(type(send).__name__ for send in sends) == ["CancelNotice", "Reply"]
        await store.mark_sent(sends)
        clock.advance(100 * LEASED)
        assert await store.unsent(AGENT, 10) == []
        assert (await row(store, pause.run.task_id))[1] == []

    async def test_a_cancel_sent_while_its_task_runs_keeps_the_outcome(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = await paused(store, "a", "b", join=FIRST)
        await answered(store, pause, "a")
        clock.advance(LEASED)
        notice = CancelNotice(AGENT, pause.run.task_id, sub(pause, "b"), PEER)
        assert await store.unsent(AGENT, 10) == [notice]
        await store.mark_sent([notice])
        await store.mark_sent([notice])
        assert [call.state for call in (await row(store, pause.run.task_id))[1]] == [CallState.DONE, CallState.DONE]
        clock.advance(100 * LEASED)
        assert await store.unsent(AGENT, 10) == []

    async def test_a_cancel_sent_after_its_task_went_on_leaves_nothing(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        first = await paused(store, "a", "b", join=FIRST)
        second = await paused(store, "c", run=(await resumed(store, first, "a")).run)
        await store.mark_sent([CancelNotice(AGENT, first.run.task_id, sub(first, "b"), PEER)])
        assert [call.call_id for call in (await row(store, second.run.task_id))[1]] == ["c"]

    async def test_a_late_mark_of_a_dispatch_leaves_its_cancel_to_be_sent(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        pause = a_pause("a", "b", join=FIRST)
        committed = one(await store.pause([pause]))
        assert isinstance(committed, Committed)
        await answered(store, pause, "a")
        await store.mark_sent(committed.dispatches)
        clock.advance(LEASED)
        assert [ids(send) for send in await store.unsent(AGENT, 10)] == [(pause.run.task_id, sub(pause, "b"))]

    async def test_a_late_mark_of_an_earlier_reply_leaves_the_next_one_to_be_sent(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        task_id = (await failed(store)).task_id
        clock.advance(LEASED)
        earlier = one(await store.unsent(AGENT, 10))
        end = one(await store.end([an_end(await revived(store, task_id), reply=b"at last")]))
        assert isinstance(end, Ended)
        await store.mark_sent([earlier])
        clock.advance(LEASED)
        again = one(await store.unsent(AGENT, 10))
        assert again == replace(end.reply, age=LEASED)
        await store.mark_sent([earlier, again])
        clock.advance(100 * LEASED)
        assert await store.unsent(AGENT, 10) == []

    async def test_the_reply_of_an_early_cancel_may_be_marked(self, store: CheckpointStore, clock: FakeClock) -> None:
        cancel = a_cancel(TaskId("to come"))
        await store.cancel([cancel])
        late = one(await store.cancel([a_cancel(cancel.task_id)]))
        assert isinstance(late, CancelTooLate)
        await store.mark_sent([late.reply])
        clock.advance(TIMINGS.tombstone_ttl + SECOND)
        assert await store.unsent(AGENT, 10) == []
        assert await store.purge(AGENT, 10) == 1

    async def test_marking_what_is_gone_does_nothing(self, store: CheckpointStore) -> None:
        await store.mark_sent([CancelNotice(AGENT, TaskId("nobody"), TaskId("nobody"), PEER)])
        await store.mark_sent([])
        assert await store.tasks() == []

    async def test_only_its_own_agents_sends(self, store: CheckpointStore, clock: FakeClock) -> None:
        await paused(store)
        await ended(store)
        clock.advance(LEASED)
        assert await store.unsent(AgentName("hotels"), 10) == []
        assert len(await store.unsent(AGENT, 10)) == 2

    async def test_at_most_so_many_sends_at_a_time(self, store: CheckpointStore, clock: FakeClock) -> None:
        first, second = await paused(store, "a", "b"), await paused(store, "a")
        clock.advance(LEASED)
        offers = [await store.unsent(AGENT, 2), await store.unsent(AGENT, 2)]
        assert [len(offer) for offer in offers] == [2, 1]
        expected = {sub(first, "a"), sub(first, "b"), sub(second, "a")}
        assert {ids(send)[1] for offer in offers for send in offer} == expected


class CatalogSuite:
    """Tasks and their calls, as summaries."""

    async def test_tasks_are_listed_newest_first(self, store: CheckpointStore, clock: FakeClock) -> None:
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
        assert waiting.task_id in {summary.task_id for summary in await store.tasks(states=[TaskState.WAITING])}
        assert await store.tasks(agent=AgentName("hotels")) == []

    async def test_a_waiting_task_shows_what_it_waits_for(self, store: CheckpointStore, clock: FakeClock) -> None:
        now = clock.now()
        pause = await paused(store, a_call("slow", timeout=9 * SECOND), a_call("fast", timeout=SECOND), "done")
        await store.claim([a_claim(pause, "done")], HERE, 1)
        summary, calls = await row(store, pause.run.task_id)
        assert (summary.agent, summary.state, summary.completed, summary.expected) == (AGENT, TaskState.WAITING, 1, 3)
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


def ids(send: Send) -> tuple[TaskId, TaskId | None]:
    """The ids of the task and of the call; the latter is `None` for a reply."""
    return send.task_id, None if isinstance(send, Reply) else send.sub_task_id
