"""Tests that every broker must pass: one per sentence of `meshpoint.ports.broker`.

To test a broker of your own with pytest (and pytest-asyncio, with `asyncio_mode = auto`):

    from meshpoint.testing.conformance.broker import BrokerSuite

    class TestMyBroker(BrokerSuite):
        @pytest.fixture
        async def broker(self, tmp_path: Path) -> AsyncIterator[Broker]:
            broker = MyBroker(tmp_path)
            await broker.open()
            yield broker
            await broker.close()

        @pytest.fixture
        async def other(self, broker: Broker, tmp_path: Path) -> AsyncIterator[Broker]:
            ...  # a second open broker on the same data, as another process would have

        async def break_connection(self, broker: Broker) -> None:
            ...  # make `broker` lose its connection, or its equivalent

Every test needs empty queues, so give each its own file, namespace or exchange. If the broker
itself puts the login on messages, set `verified_user` to the login of `broker`.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from meshpoint.errors import BrokerUnavailable
from meshpoint.model.ids import ReplicaId, TaskId, new_id
from meshpoint.model.messages import (
    Address,
    Header,
    dead_letter_queue,
    nested_queue,
    private_queue,
    response_queue,
)
from meshpoint.ports.broker import Broker, PublishResult
from meshpoint.testing.conformance.broker_messages import (
    AGENT,
    REQUESTS,
    STRANGER,
    TEST_TIMEOUT,
    Inbox,
    MessageSuite,
    a_message,
    consume,
    consume_all,
    is_denied,
    send,
    until_denied,
    until_depth,
)

__all__ = [
    "AGENT",
    "REQUESTS",
    "STRANGER",
    "TEST_TIMEOUT",
    "BrokerSuite",
    "Inbox",
    "a_message",
    "send",
    "until_depth",
]


class BrokerSuite(MessageSuite):
    """Conformance tests for a `Broker`. Subclass it in a test module, where pytest collects it."""

    async def test_each_message_to_one_consumer(self, broker: Broker, other: Broker) -> None:
        inbox, sent = Inbox(), [a_message() for _ in range(40)]
        await broker.consume(REQUESTS, 5, inbox)
        await other.consume(REQUESTS, 5, inbox)
        await send(broker, REQUESTS, *sent)
        seen = []
        for _ in sent:
            delivery = await inbox.next()
            seen.append(delivery.message.message_id)
            assert delivery.delivery_count == 1
            assert await delivery.ack()
        assert sorted(seen) == sorted(message.message_id for message in sent)
        await self.nothing_is_left(broker, inbox)

    async def test_consumers_share_the_work(self, broker: Broker, other: Broker) -> None:
        one = await consume(broker, REQUESTS, 1)
        two = await consume(other, REQUESTS, 1)
        await send(broker, REQUESTS, a_message(), a_message())
        first, second = await one.next(), await two.next()
        assert first.message.message_id != second.message.message_id

    async def test_a_request_exists_until_it_is_acked(self, broker: Broker, other: Broker) -> None:
        inbox, message = Inbox(), a_message()
        await consume_all(broker, inbox)
        await consume_all(other, inbox)
        task_id = TaskId(message.correlation_id)
        assert await is_denied(task_id, broker, other)
        for address in (REQUESTS, nested_queue(AGENT)):
            await send(broker, address, message)
            delivery = await inbox.next()
            for brokers in ([broker, other], [other, broker]):
                assert not await is_denied(task_id, *brokers)
            assert await delivery.requeue()
            redelivered = await inbox.next()
            assert not await is_denied(task_id, broker, other)
            assert await redelivered.ack()
            await until_denied(task_id, broker, other)
        await send(broker, REQUESTS, message)
        assert await (await inbox.next()).dead_letter("unreadable")
        await until_denied(task_id, broker, other)

    async def test_a_ready_request_exists(self, broker: Broker, other: Broker) -> None:
        ready, held = a_message(), a_message()
        inbox = Inbox()
        subscription = await broker.consume(REQUESTS, 1, inbox)
        await broker.consume(nested_queue(AGENT), 1, inbox)
        await send(broker, REQUESTS, held, ready)
        delivery = await inbox.next()
        for message in (ready, held):
            assert not await is_denied(TaskId(message.correlation_id), broker)
        await subscription.cancel()
        assert await delivery.ack()

    async def test_a_request_exists_while_a_cancelled_consumer_holds_it(
        self, broker: Broker, other: Broker
    ) -> None:
        inbox, message = Inbox(), a_message()
        subscription = await broker.consume(REQUESTS, 5, inbox)
        await send(broker, REQUESTS, message)
        delivery = await inbox.next()
        await subscription.cancel()
        await consume_all(other, Inbox())
        task_id = TaskId(message.correlation_id)
        assert not await is_denied(task_id, other), "nobody counts the cancelled consumer"
        assert not await is_denied(task_id, other, broker)
        assert await delivery.ack()
        await until_denied(task_id, other)

    async def test_acked_means_gone(self, broker: Broker, other: Broker) -> None:
        inbox = await consume(broker, REQUESTS, 10)
        await send(broker, REQUESTS, a_message())
        assert await (await inbox.next()).ack()
        await broker.close()
        again = await consume(other, REQUESTS, 10)
        await self.nothing_is_left(other, again)

    async def test_many_acks_at_once(self, broker: Broker) -> None:
        inbox = await consume(broker, REQUESTS, 50)
        await send(broker, REQUESTS, *(a_message() for _ in range(50)))
        deliveries = await inbox.take(50)
        assert all(await asyncio.gather(*(delivery.ack() for delivery in reversed(deliveries))))
        await self.nothing_is_left(broker, inbox)

    async def test_requeue_raises_delivery_count(self, broker: Broker, other: Broker) -> None:
        one, message = Inbox(), a_message(headers={"x-some": "value"})
        subscription = await broker.consume(REQUESTS, 1, one)
        await send(broker, REQUESTS, message)
        first = await one.next()
        await subscription.cancel()
        two = await consume(other, REQUESTS, 1)
        assert await first.requeue()
        second = await two.next()
        assert (first.delivery_count, second.delivery_count) == (1, 2)
        assert second.message == self.received(message)
        assert await second.ack()

    async def test_the_count_rises_each_time(self, broker: Broker) -> None:
        inbox = await consume(broker, REQUESTS, 1)
        await send(broker, REQUESTS, a_message())
        for count in (1, 2, 3, 4):
            delivery = await inbox.next()
            assert delivery.delivery_count == count
            assert await delivery.requeue()

    async def test_dead_letters_carry_their_reason(self, broker: Broker, other: Broker) -> None:
        message = a_message(b"not JSON", headers={"x-call-depth": 2})
        inbox = await consume(broker, REQUESTS, 1)
        await send(broker, REQUESTS, message)
        assert await (await inbox.next()).dead_letter("body: not JSON")
        dead = await consume(other, dead_letter_queue(AGENT), 1)
        delivery = await dead.next()
        headers = {**delivery.message.headers}
        assert headers.pop(Header.DEAD_FROM, REQUESTS) == REQUESTS
        assert headers == {**message.headers, Header.DEAD_REASON: "body: not JSON"}
        received = replace(delivery.message, headers=message.headers)
        assert received == self.received(message)
        assert delivery.address == dead_letter_queue(AGENT)
        assert await delivery.ack()
        await self.nothing_is_left(broker, inbox)

    @pytest.mark.parametrize(
        "reason", ["r" * 501, "é" * 100_000, "\ud800" * 501], ids=["long", "huge", "no UTF-8"]
    )
    async def test_long_reason_truncated(self, broker: Broker, other: Broker, reason: str) -> None:
        inbox = await consume(broker, REQUESTS, 1)
        await send(broker, REQUESTS, a_message())
        assert await (await inbox.next()).dead_letter(reason)
        dead = await consume(other, dead_letter_queue(AGENT), 1)
        reason_sent = str((await dead.next()).message.headers[Header.DEAD_REASON])
        assert len(reason_sent) == 500
        assert reason_sent.endswith("…")
        await self.nothing_is_left(broker, inbox)

    async def test_a_reason_of_500_characters_is_whole(self, broker: Broker) -> None:
        inbox = await consume(broker, REQUESTS, 1)
        dead = await consume(broker, dead_letter_queue(AGENT), 1)
        await send(broker, REQUESTS, a_message())
        assert await (await inbox.next()).dead_letter("é" * 500)
        assert (await dead.next()).message.headers[Header.DEAD_REASON] == "é" * 500

    async def test_a_message_that_just_fits_can_be_dead_lettered(self, broker: Broker) -> None:
        message = a_message(b"body", headers={"x-some": "x" * 119_000})
        inbox = await consume(broker, REQUESTS, 1)
        dead = await consume(broker, dead_letter_queue(AGENT), 1)
        await send(broker, REQUESTS, message)
        assert await (await inbox.next()).dead_letter("é" * 1000)
        dead_lettered = (await dead.next()).message
        assert (dead_lettered.body, dead_lettered.correlation_id) == (
            b"body",
            message.correlation_id,
        )
        assert str(dead_lettered.headers[Header.DEAD_REASON]).startswith("éé")
        await self.nothing_is_left(broker, inbox)

    async def test_private_queue_dead_letters_to_its_agent(self, broker: Broker) -> None:
        replica, message = ReplicaId(new_id()), a_message()
        await broker.declare(AGENT, replica)
        inbox = await consume(broker, private_queue(AGENT, replica), 1)
        dead = await consume(broker, dead_letter_queue(AGENT), 1)
        await send(broker, private_queue(AGENT, replica), message)
        assert await (await inbox.next()).dead_letter("who knows")
        assert (await dead.next()).message.message_id == message.message_id

    async def test_prefetch_bounds_unacked_deliveries(self, broker: Broker, other: Broker) -> None:
        await send(broker, REQUESTS, *(a_message() for _ in range(5)))
        one = await consume(broker, REQUESTS, 2)
        await one.take(2)
        await send(broker, REQUESTS, a_message(), a_message())
        two = await consume(other, REQUESTS, 10)
        await two.take(5)
        assert one.empty()

    async def test_settling_makes_room(self, broker: Broker) -> None:
        await send(broker, REQUESTS, *(a_message() for _ in range(4)))
        inbox = await consume(broker, REQUESTS, 1)
        assert await (await inbox.next()).ack()
        assert await (await inbox.next()).dead_letter("no")
        assert await (await inbox.next()).ack()
        await inbox.next()

    async def test_resize_up_takes_more(self, broker: Broker) -> None:
        inbox = Inbox()
        await send(broker, REQUESTS, *(a_message() for _ in range(3)))
        subscription = await broker.consume(REQUESTS, 1, inbox)
        first = await inbox.next()
        await subscription.resize(3)
        rest = await inbox.take(2)
        assert all([await delivery.ack() for delivery in (first, *rest)])
        await self.nothing_is_left(broker, inbox)

    async def test_resize_down_takes_fewer(self, broker: Broker, other: Broker) -> None:
        one = Inbox()
        subscription = await broker.consume(REQUESTS, 3, one)
        await send(broker, REQUESTS, *(a_message() for _ in range(3)))
        assert all([await delivery.ack() for delivery in await one.take(3)])
        await subscription.resize(1)
        await send(broker, REQUESTS, *(a_message() for _ in range(3)))
        await one.next()
        two = await consume(other, REQUESTS, 10)
        await two.take(2)
        assert one.empty()

    @pytest.mark.parametrize("taken", ["before", "after"])
    async def test_resize_up_with_unacked_takes_more(self, broker: Broker, taken: str) -> None:
        """Raise, lower and raise the prefetch while all deliveries stay unacked."""
        inbox = Inbox()
        subscription = await broker.consume(REQUESTS, 3, inbox)
        await send(broker, REQUESTS, *(a_message() for _ in range(2)))
        await inbox.take(2)
        await subscription.resize(6)
        await send(broker, REQUESTS, *(a_message() for _ in range(4)))
        await inbox.take(4)
        await subscription.resize(3)
        if taken == "before":
            await subscription.resize(7)
            await send(broker, REQUESTS, a_message())
            await inbox.take(1)
        else:
            await subscription.resize(8)
            await send(broker, REQUESTS, a_message())
            await inbox.take(1)
            await send(broker, REQUESTS, a_message())
            await inbox.take(1)

    async def test_what_was_taken_before_a_resize_can_be_settled(self, broker: Broker) -> None:
        inbox = Inbox()
        subscription = await broker.consume(REQUESTS, 2, inbox)
        await send(broker, REQUESTS, a_message(), a_message())
        deliveries = await inbox.take(2)
        await subscription.resize(1)
        assert all([await delivery.ack() for delivery in deliveries])
        await self.nothing_is_left(broker, inbox)

    async def test_cancelled_consumer_may_only_settle(self, broker: Broker, other: Broker) -> None:
        one, late = Inbox(), a_message()
        subscription = await broker.consume(REQUESTS, 10, one)
        await send(broker, REQUESTS, a_message())
        first = await one.next()
        await subscription.cancel()
        await send(broker, REQUESTS, late)
        two = await consume(other, REQUESTS, 10)
        delivery = await two.next()
        assert (delivery.message.message_id, delivery.delivery_count) == (late.message_id, 1)
        assert one.empty()
        assert await first.ack()
        assert await delivery.ack()
        await self.nothing_is_left(broker, two)

    async def test_resize_during_cancel_takes_nothing(self, broker: Broker, other: Broker) -> None:
        one, late = Inbox(), a_message()
        subscription = await broker.consume(REQUESTS, 10, one)
        await send(broker, REQUESTS, a_message())
        first = await one.next()
        await asyncio.gather(subscription.cancel(), subscription.resize(20))
        await send(broker, REQUESTS, late)
        two = await consume(other, REQUESTS, 10)
        delivery = await two.next()
        assert delivery.message.message_id == late.message_id
        assert one.empty()
        assert await first.ack()
        assert await delivery.ack()
        await self.nothing_is_left(broker, two)

    @pytest.mark.parametrize("step", ["resize", "cancel"])
    async def test_cancelled_step_finishes(self, broker: Broker, other: Broker, step: str) -> None:
        """A draining replica cancels a pending resize.

        Meanwhile, agent code still runs for unacked deliveries.
        """
        one, late = Inbox(), a_message()
        subscription = await broker.consume(REQUESTS, 2, one)
        await send(broker, REQUESTS, a_message())
        unacked = await one.next()
        under_way = asyncio.ensure_future(
            subscription.resize(0) if step == "resize" else subscription.cancel()
        )
        await asyncio.sleep(0)
        under_way.cancel()
        await asyncio.wait({under_way})
        await subscription.cancel()
        await send(broker, REQUESTS, late)
        two = await consume(other, REQUESTS, 10)
        delivery = await two.next()
        assert (delivery.message.message_id, delivery.delivery_count) == (late.message_id, 1)
        assert not unacked.lost
        assert await unacked.ack()
        assert await delivery.ack()
        await self.nothing_is_left(broker, two)

    async def test_cancelling_twice_is_harmless(self, broker: Broker) -> None:
        subscription = await broker.consume(REQUESTS, 1, Inbox())
        await subscription.cancel()
        await subscription.cancel()

    async def test_one_broker_consumes_several_queues(self, broker: Broker) -> None:
        requests = await consume(broker, REQUESTS, 1)
        responses = await consume(broker, response_queue(AGENT), 1)
        await broker.publish(
            [(REQUESTS, a_message(b"q")), (response_queue(AGENT), a_message(b"r"))]
        )
        assert (await requests.next()).message.body == b"q"
        assert (await responses.next()).message.body == b"r"

    async def test_a_full_consumer_does_not_hold_up_another(self, broker: Broker) -> None:
        requests = await consume(broker, REQUESTS, 1)
        responses = await consume(broker, response_queue(AGENT), 1)
        await send(broker, REQUESTS, a_message(), a_message())
        unacked = await requests.next()
        for _ in range(3):
            await send(broker, response_queue(AGENT), a_message())
            assert await (await responses.next()).ack()
        assert await unacked.ack()
        await requests.next()

    async def test_close_requeues_unacked_deliveries(self, broker: Broker, other: Broker) -> None:
        message = a_message()
        one = await consume(broker, REQUESTS, 10)
        await send(broker, REQUESTS, message)
        lost = await one.next()
        await broker.close()
        two = await consume(other, REQUESTS, 10)
        again = await two.next()
        assert again.message == self.received(message)
        assert again.delivery_count == 2
        assert not await lost.ack()
        assert await again.ack()

    async def test_closing_twice_is_harmless(self, broker: Broker) -> None:
        await broker.close()
        await broker.close()

    async def test_a_closed_broker_is_unavailable(self, broker: Broker) -> None:
        await broker.consume(REQUESTS, 1, Inbox())
        assert broker.connected
        assert broker.can_publish
        assert broker.is_consuming(REQUESTS)
        await broker.close()
        assert not broker.connected
        assert not broker.can_publish
        assert not broker.is_consuming(REQUESTS)
        with pytest.raises(BrokerUnavailable):
            await broker.publish([(REQUESTS, a_message())])

    async def test_only_an_attached_consumer_is_consuming(self, broker: Broker) -> None:
        assert not broker.is_consuming(REQUESTS)
        first, second = [await broker.consume(REQUESTS, 1, Inbox()) for _ in range(2)]
        assert broker.is_consuming(REQUESTS)
        assert not broker.is_consuming(response_queue(AGENT))
        await first.cancel()
        assert broker.is_consuming(REQUESTS)
        await second.cancel()
        assert not broker.is_consuming(REQUESTS)
        assert broker.connected

    async def test_after_a_lost_connection_the_message_comes_again(self, broker: Broker) -> None:
        message = a_message()
        inbox = await consume(broker, REQUESTS, 1)
        await send(broker, REQUESTS, message)
        lost = await inbox.next()
        assert not lost.lost
        await self.break_connection(broker)
        again = await inbox.next()
        assert again.message == self.received(message)
        assert again.delivery_count == 2
        assert lost.lost
        assert not again.lost
        assert not await lost.ack()
        assert await again.ack()
        assert not again.lost
        await self.nothing_is_left(broker, inbox)

    @pytest.mark.parametrize("settle", ["ack", "requeue", "dead_letter"])
    async def test_late_settle_ignored(self, broker: Broker, other: Broker, settle: str) -> None:
        one = Inbox()
        subscription = await broker.consume(REQUESTS, 1, one)
        await send(broker, REQUESTS, a_message())
        lost = await one.next()
        await subscription.cancel()
        await self.break_connection(broker)
        two = await consume(other, REQUESTS, 1)
        again = await two.next()
        assert not await (
            lost.dead_letter("late") if settle == "dead_letter" else getattr(lost, settle)()
        )
        assert await again.ack()
        await self.nothing_is_left(other, two)
        assert await other.depth(dead_letter_queue(AGENT)) == 0

    async def test_a_database_marker_is_seen(self, broker: Broker, other: Broker) -> None:
        assert not await other.has_database_marker(AGENT)
        assert await broker.mark_database(AGENT)
        assert await other.has_database_marker(AGENT)
        assert not await other.has_database_marker(STRANGER)
        assert not await other.mark_database(AGENT)

    async def test_a_database_marker_outlives_its_broker(
        self, broker: Broker, other: Broker
    ) -> None:
        await broker.mark_database(AGENT)
        await broker.close()
        assert await other.has_database_marker(AGENT)

    async def test_a_database_marker_can_be_removed(self, broker: Broker, other: Broker) -> None:
        await broker.mark_database(AGENT)
        for _ in range(2):  # the second time without effect
            await other.remove_database_marker(AGENT)
            assert not await broker.has_database_marker(AGENT)
        assert await broker.mark_database(AGENT)

    async def test_a_database_marker_receives_nothing(self, broker: Broker, other: Broker) -> None:
        await broker.mark_database(AGENT)
        assert await other.publish([(Address(f"{AGENT}.database"), a_message())]) == [
            PublishResult.UNROUTABLE
        ]

    async def test_marking_at_the_same_time(self, broker: Broker, other: Broker) -> None:
        await asyncio.gather(*(each.mark_database(AGENT) for each in (broker, other) * 3))
        assert await other.has_database_marker(AGENT)
