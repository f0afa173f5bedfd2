"""Conformance tests for a store and a broker that share a database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from meshpoint.model.hand_over import HandOver
from meshpoint.model.ids import TaskId, new_id
from meshpoint.model.messages import (
    Address,
    Header,
    HeaderValue,
    Message,
    request_queue,
    response_queue,
)
from meshpoint.model.subtasks import Child
from meshpoint.model.tasks import Reply, TaskState
from meshpoint.model.transitions import (
    Attach,
    EndCommitted,
    Fenced,
    JoinCompleted,
    Pause,
    PauseCommitted,
)
from meshpoint.ports.broker import Broker, Delivery, PublishResult
from meshpoint.ports.hand_over import AckingPublisher, HandOverBroker, HandOverStore
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.broker import Inbox, a_message, send
from meshpoint.testing.conformance.build import (
    AGENT,
    HERE,
    LEASED,
    PEER,
    REQUESTER,
    TIMEOUT,
    a_claim,
    a_pause,
    a_requester,
    an_end,
    operating,
    paused,
    resumed,
)

_REPLY_TO = response_queue(REQUESTER)


class HandOverSuite:
    """Conformance tests for hand-overs. Subclass it in a test module, where pytest collects it.

    It needs the fixtures `clock`, `store`, `broker` and `elsewhere`: an open store with `TIMINGS`
    and this clock, an open broker in its database, and an open broker in another database.
    """

    @pytest.fixture(autouse=True)
    async def _declared(self, broker: Broker) -> None:
        for agent in (AGENT, PEER, REQUESTER):
            await broker.declare(agent)

    async def test_the_store_finds_the_queues_of_its_database_only(
        self, store: CheckpointStore, broker: Broker, elsewhere: Broker
    ) -> None:
        assert isinstance(store, HandOverStore)
        assert isinstance(broker, HandOverBroker)
        assert isinstance(elsewhere, HandOverBroker)
        assert broker.lease_id is not None
        assert elsewhere.lease_id is not None
        assert await store.finds_lease(broker.lease_id)
        assert not await store.finds_lease(elsewhere.lease_id)

    async def test_a_pause_publishes_its_requests_and_acks_its_own(
        self, store: CheckpointStore, broker: Broker, clock: FakeClock
    ) -> None:
        delivery, request = await deliver(broker, request_queue(AGENT)), a_message()
        pause = a_pause("a", "b")
        hand_over = await prepared(broker, [(request_queue(PEER), request)], [delivery])
        pause = replace(pause, hand_over=hand_over, planned_at=clock.now())
        assert isinstance((await store.pause([pause]))[0], PauseCommitted)
        assert hand_over.is_done
        assert await received(broker, request_queue(PEER)) == request
        assert await delivery.ack()
        assert await broker.depth(request_queue(AGENT)) == 0
        await self._assert_sent(store, pause, clock)

    async def test_a_later_pause_publishes_too(
        self, store: CheckpointStore, broker: Broker, clock: FakeClock
    ) -> None:
        task = await resumed(store, await paused(store))
        hand_over = await prepared(broker, [(request_queue(PEER), a_message())])
        pause = a_pause("b", run=task.run)
        pause = replace(pause, hand_over=hand_over, planned_at=clock.now())
        assert isinstance((await store.pause([pause]))[0], PauseCommitted)
        assert hand_over.is_done
        assert await broker.depth(request_queue(PEER)) == 1
        await self._assert_sent(store, pause, clock)

    async def test_the_pause_of_an_operation_publishes_too(
        self, store: CheckpointStore, broker: Broker, clock: FakeClock
    ) -> None:
        hand_over = await prepared(broker, [(request_queue(PEER), a_message())])
        child = Child(id=TaskId(new_id()), peer=PEER, digest="d")
        pause = replace(a_pause(run=await operating(store)), children=(child,))
        pause = replace(pause, hand_over=hand_over, planned_at=clock.now())
        assert isinstance((await store.pause([pause]))[0], PauseCommitted)
        assert hand_over.is_done
        assert await broker.depth(request_queue(PEER)) == 1
        summary = await store.operation(pause.run.task_id)
        assert summary is not None
        assert summary.children == (child,)
        await self._assert_sent(store, pause, clock)

    async def _assert_sent(self, store: CheckpointStore, pause: Pause, clock: FakeClock) -> None:
        """The requests of `pause` are not due, and its timeouts begin when it was planned."""
        calls = [(pause.run.task_id, call.sub_task_id) for call in pause.calls]
        assert pause.planned_at is not None
        for dispatch in await store.find_dispatches(calls):
            assert dispatch is not None
            assert dispatch.deadline == pause.planned_at + TIMEOUT
        clock.advance(LEASED)
        assert await store.unsent(AGENT, 10) == []
        found = await store.task(pause.run.task_id)
        assert found is not None
        assert all(call.dispatched_at is not None for call in found[1])

    async def test_a_repeated_pause_publishes_once(
        self, store: CheckpointStore, broker: Broker, clock: FakeClock
    ) -> None:
        pauses = [a_pause() for _ in range(3)]
        pauses = [
            replace(
                pause,
                hand_over=await prepared(broker, [(request_queue(PEER), a_message())]),
                planned_at=clock.now(),
            )
            for pause in pauses
        ]
        await store.pause(pauses)
        assert await store.pause(pauses) == [PauseCommitted(TaskState.WAITING, ())] * 3
        assert await broker.depth(request_queue(PEER)) == 3

    async def test_a_fenced_pause_neither_publishes_nor_acks(
        self, store: CheckpointStore, broker: Broker
    ) -> None:
        delivery = await deliver(broker, request_queue(AGENT))
        task = await resumed(store, await paused(store))
        hand_over = await prepared(broker, [(request_queue(PEER), a_message())], [delivery])
        zombie = replace(task.run, fence=task.run.fence - 1)
        assert await store.pause([a_handed_over(a_pause(run=zombie), hand_over)]) == [Fenced()]
        assert not hand_over.is_done
        assert await broker.depth(request_queue(PEER)) == 0
        assert await delivery.requeue()
        assert await broker.depth(request_queue(AGENT)) == 1

    async def test_messages_for_another_database_stay_due(
        self, store: CheckpointStore, elsewhere: Broker, clock: FakeClock
    ) -> None:
        for agent in (AGENT, PEER):
            await elsewhere.declare(agent)
        delivery = await deliver(elsewhere, request_queue(AGENT))
        hand_over = await prepared(elsewhere, [(request_queue(PEER), a_message())], [delivery])
        pause = a_handed_over(a_pause(), hand_over)
        (result,) = await store.pause([pause])
        assert isinstance(result, PauseCommitted)
        assert len(result.dispatches) == 1
        assert not hand_over.is_done
        assert await delivery.ack()
        clock.advance(LEASED)
        assert len(await store.unsent(AGENT, 10)) == 1

    async def test_requests_that_name_an_outdated_deadline_stay_due(
        self, store: CheckpointStore, broker: Broker, clock: FakeClock
    ) -> None:
        task = await resumed(store, await paused(store))
        hand_over = await prepared(broker, [(request_queue(PEER), a_message())])
        # The row has no deadline.
        requester = replace(a_requester(), deadline=clock.now() + TIMEOUT)
        pause = a_handed_over(a_pause(run=task.run, requester=requester), hand_over)
        (result,) = await store.pause([pause])
        assert isinstance(result, PauseCommitted)
        assert len(result.dispatches) == 1
        assert not hand_over.is_done

    async def test_timeouts_that_began_long_ago_are_not_handed_over(
        self, store: CheckpointStore, broker: Broker, clock: FakeClock
    ) -> None:
        hand_over = await prepared(broker, [(request_queue(PEER), a_message())])
        pause = replace(a_pause(), hand_over=hand_over, planned_at=clock.now())
        clock.advance(LEASED)
        (result,) = await store.pause([pause])
        assert isinstance(result, PauseCommitted)
        (dispatch,) = result.dispatches
        assert dispatch.deadline == clock.now() + TIMEOUT
        assert not hand_over.is_done

    async def test_claims_ack_their_responses(
        self, store: CheckpointStore, broker: Broker
    ) -> None:
        pause = await paused(store, "a", "b")
        responses = [await deliver(broker, response_queue(AGENT)) for _ in range(3)]
        acks = [await prepared(broker, [], [delivery]) for delivery in responses]
        claims = [
            replace(a_claim(pause, call_id), hand_over=ack)
            for call_id, ack in zip(("a", "b", "b"), acks, strict=True)
        ]
        results = await store.claim(claims, HERE, 1)
        assert sum(isinstance(result, JoinCompleted) for result in results) == 1
        assert [ack.is_done for ack in acks] == [True, True, False]
        assert [await delivery.ack() for delivery in responses] == [True] * 3
        await broker.close()  # requeues what is unacked
        await broker.open()
        assert await broker.depth(response_queue(AGENT)) == 0

    async def test_an_end_publishes_its_reply(
        self, store: CheckpointStore, broker: Broker, clock: FakeClock
    ) -> None:
        requester = a_requester(reply_to=_REPLY_TO, parent_task_id=None)
        runs = [
            (await resumed(store, await paused(store, requester=requester))).run for _ in range(2)
        ]
        envelope = (_REPLY_TO, a_message())
        hand_overs = [await prepared(broker, [envelope]) for _ in runs]
        ends = [
            replace(an_end(run), hand_over=hand_over)
            for run, hand_over in zip(runs, hand_overs, strict=True)
        ]
        results = await store.end(ends)
        assert all(isinstance(result, EndCommitted) for result in results)
        assert all(hand_over.is_done for hand_over in hand_overs)
        assert await broker.depth(_REPLY_TO) == 2
        clock.advance(LEASED)
        assert await store.unsent(AGENT, 10) == []
        assert (await store.lookup([runs[0].task_id]))[runs[0].task_id].is_reply_discarded is False

    @pytest.mark.parametrize("parent", [None, "parent"])
    async def test_replies_to_several_addresses_stay_due(
        self, parent: str | None, store: CheckpointStore, broker: Broker, clock: FakeClock
    ) -> None:
        """The task of a peer call keeps its first address as the first, and others do not."""
        requester = a_requester(reply_to=_REPLY_TO, parent_task_id=parent)
        task = await resumed(store, await paused(store, requester=requester))
        await store.attach([Attach(task.run.task_id, AGENT, REQUESTER, Address("client.other"))])
        headers: dict[str, HeaderValue] = {Header.PARENT_TASK.value: parent} if parent else {}
        hand_over = await prepared(broker, [(_REPLY_TO, replace(a_message(), headers=headers))])
        await store.end([replace(an_end(task.run), hand_over=hand_over)])
        assert not hand_over.is_done
        assert await broker.depth(_REPLY_TO) == 0
        clock.advance(LEASED)
        (reply,) = await store.unsent(AGENT, 10)
        assert isinstance(reply, Reply)
        assert reply.requester.reply_to == (_REPLY_TO if parent else "client.other")

    async def test_messages_without_a_queue_are_not_prepared(self, broker: Broker) -> None:
        assert isinstance(broker, HandOverBroker)
        envelopes = [(request_queue(PEER), a_message()), (Address("nobody"), a_message())]
        assert await broker.prepare_hand_over(envelopes, ()) is None

    async def test_a_reply_is_published_with_the_ack_of_its_request(self, broker: Broker) -> None:
        assert isinstance(broker, AckingPublisher)
        requests = [await deliver(broker, request_queue(AGENT)) for _ in range(2)]
        reply = a_message()
        result = await broker.publish_acking((_REPLY_TO, reply), requests)
        assert result is PublishResult.ACCEPTED
        assert not any(request.lost for request in requests)
        assert all([await request.ack() for request in requests])
        assert await received(broker, _REPLY_TO) == reply
        assert await broker.depth(request_queue(AGENT)) == 0

    async def test_only_an_accepted_reply_acks(self, broker: Broker) -> None:
        assert isinstance(broker, AckingPublisher)
        request = await deliver(broker, request_queue(AGENT))
        result = await broker.publish_acking((Address("nobody"), a_message()), [request])
        assert result is PublishResult.UNROUTABLE
        assert await request.requeue()
        assert await broker.depth(request_queue(AGENT)) == 1

    async def test_a_request_held_elsewhere_is_not_acked(self, broker: Broker) -> None:
        """Its new holder answers it too."""
        assert isinstance(broker, AckingPublisher)
        request = await deliver(broker, request_queue(AGENT))
        assert await request.requeue()
        result = await broker.publish_acking((_REPLY_TO, a_message()), [request])
        assert result is PublishResult.ACCEPTED
        assert await broker.depth(_REPLY_TO) == 1
        assert await broker.depth(request_queue(AGENT)) == 1


async def prepared(
    broker: Broker,
    envelopes: Sequence[tuple[Address, Message]],
    deliveries: Sequence[Delivery] = (),
) -> HandOver:
    """A hand-over of these messages and deliveries."""
    assert isinstance(broker, HandOverBroker)
    hand_over = await broker.prepare_hand_over(envelopes, deliveries)
    assert hand_over is not None
    return hand_over


def a_handed_over(pause: Pause, hand_over: HandOver) -> Pause:
    """`pause` with calls that have no timeout."""
    calls = tuple(replace(call, timeout=None, idle_timeout=TIMEOUT) for call in pause.calls)
    return replace(pause, calls=calls, hand_over=hand_over)


async def deliver(broker: Broker, address: Address) -> Delivery:
    """Publish a message and receive it, unacked."""
    await send(broker, address, a_message())
    inbox = Inbox()
    subscription = await broker.consume(address, 1, inbox)
    (delivery,) = await inbox.take(1)
    await subscription.cancel()
    return delivery


async def received(broker: Broker, address: Address) -> Message:
    """The next message of a queue, which is acked."""
    inbox = Inbox()
    subscription = await broker.consume(address, 1, inbox)
    (delivery,) = await inbox.take(1)
    await subscription.cancel()
    await delivery.ack()
    return delivery.message
