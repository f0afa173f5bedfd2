"""What every broker must do: one test per sentence of `meshpoint.ports.broker`."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from meshpoint.errors import BrokerUnavailable
from meshpoint.model.ids import AgentName, ReplicaId, new_id
from meshpoint.model.messages import (
    Address,
    Header,
    Message,
    MessageType,
    dead_letters_of,
    private_of,
    requests_of,
    responses_of,
)
from meshpoint.ports.broker import Broker, Delivery, Published

PATIENCE = 30.0
"""Seconds to wait for what must come. Only a failing test waits that long."""

AGENT = AgentName("travel")
STRANGER = AgentName("flights")
REQUESTS = requests_of(AGENT)


def a_message(body: bytes = b"{}", **changes: object) -> Message:
    """A request that differs from every other by its `message_id`."""
    message = Message(MessageType.REQUEST, body, message_id=new_id(), correlation_id=new_id(), app_id="planner")
    return replace(message, **changes)  # type: ignore[arg-type]


class Inbox:
    """Collects deliveries in order; itself the `on_delivery` callback."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Delivery] = asyncio.Queue()
        self._thread = threading.get_ident()

    def __call__(self, delivery: Delivery) -> None:
        if threading.get_ident() != self._thread or not asyncio.get_running_loop().is_running():
            raise AssertionError("on_delivery must be called on the event loop")
        self._queue.put_nowait(delivery)

    async def next(self) -> Delivery:
        """The next delivery."""
        async with asyncio.timeout(PATIENCE):
            return await self._queue.get()

    async def take(self, count: int) -> list[Delivery]:
        """The next `count` deliveries."""
        return [await self.next() for _ in range(count)]

    def empty(self) -> bool:
        """Whether nothing waits here."""
        return self._queue.empty()


async def send(broker: Broker, address: Address, *messages: Message) -> None:
    """Publish `messages`, all of which must be accepted."""
    results = await broker.publish([(address, message) for message in messages])
    assert results == [Published.ACCEPTED] * len(messages)


async def until_depth(broker: Broker, address: Address, depth: int | None) -> None:
    """Return when `depth` messages lie in the queue: a broker may count with some delay."""
    async with asyncio.timeout(PATIENCE):
        while await broker.depth(address) != depth:  # noqa: ASYNC110  a broker has no event for it
            await asyncio.sleep(0)


class BrokerSuite(ABC):
    """Conformance of a `Broker`. Subclass it in a test module; pytest finds the tests.

        class TestMyBroker(BrokerSuite):
            @pytest.fixture
            async def broker(self, tmp_path) -> AsyncIterator[Broker]:
                broker = MyBroker(tmp_path)
                await broker.open()
                yield broker
                await broker.close()

            @pytest.fixture
            async def other(self, broker, tmp_path) -> AsyncIterator[Broker]:
                ...  # a second open broker on the same data, as another process would have

            async def break_connection(self, broker: Broker) -> None:
                ...  # make `broker` lose its connection, or what stands for one

    Every test needs empty queues: give each its own file, namespace or exchange. Needs pytest-asyncio in
    auto mode.
    """

    verified_user: str | None = None
    """The `user_id` that the broker itself puts on messages from `broker`; None: it carries the sender's."""

    @pytest.fixture
    @abstractmethod
    def broker(self) -> AsyncIterator[Broker]:
        """An open broker on empty data."""

    @pytest.fixture
    @abstractmethod
    def other(self, broker: Broker) -> AsyncIterator[Broker]:
        """A second open broker on the data of `broker`."""

    @abstractmethod
    async def break_connection(self, broker: Broker) -> None:
        """Make `broker` lose its connection; it must come back by itself."""

    @pytest.fixture(autouse=True)
    async def _declared(self, broker: Broker) -> None:
        await broker.declare(AGENT)

    def received(self, message: Message) -> Message:
        """What a consumer sees of `message`."""
        return replace(message, user_id=self.verified_user or message.user_id)

    # Publish: the broker's word on each message, in the order of the arguments.

    async def test_a_declared_queue_accepts_though_nobody_consumes(self, broker: Broker) -> None:
        for address in (REQUESTS, responses_of(AGENT), dead_letters_of(AGENT)):
            assert await broker.publish([(address, a_message())]) == [Published.ACCEPTED]

    async def test_an_undeclared_queue_is_unroutable(self, broker: Broker) -> None:
        assert await broker.publish([(requests_of(STRANGER), a_message())]) == [Published.UNROUTABLE]

    async def test_results_come_in_the_order_of_the_arguments(self, broker: Broker) -> None:
        addresses = [REQUESTS, requests_of(STRANGER), REQUESTS, responses_of(STRANGER), responses_of(AGENT)]
        results = await broker.publish([(address, a_message()) for address in addresses])
        good, bad = Published.ACCEPTED, Published.UNROUTABLE
        assert results == [good, bad, good, bad, good]

    async def test_an_unroutable_message_does_not_hold_up_its_neighbours(self, broker: Broker) -> None:
        first, second = a_message(), a_message()
        await broker.publish([(REQUESTS, first), (requests_of(STRANGER), a_message()), (REQUESTS, second)])
        inbox = Inbox()
        await broker.consume(REQUESTS, 10, inbox)
        assert [d.message.message_id for d in await inbox.take(2)] == [first.message_id, second.message_id]

    async def test_nothing_to_publish(self, broker: Broker) -> None:
        assert await broker.publish([]) == []

    async def test_concurrent_publishes_each_get_their_own_results(self, broker: Broker) -> None:
        addresses = [REQUESTS, requests_of(STRANGER)] * 10
        results = await asyncio.gather(*(broker.publish([(address, a_message())]) for address in addresses))
        assert results == [[Published.ACCEPTED], [Published.UNROUTABLE]] * 10

    # Declare.

    async def test_declaring_again_keeps_what_is_there(self, broker: Broker, other: Broker) -> None:
        message = a_message()
        await send(broker, REQUESTS, message)
        await broker.declare(AGENT)
        await other.declare(AGENT)
        inbox = Inbox()
        await other.consume(REQUESTS, 1, inbox)
        assert (await inbox.next()).message == self.received(message)

    async def test_queues_outlive_the_broker_that_declared_them(self, broker: Broker, other: Broker) -> None:
        message = a_message()
        await send(broker, REQUESTS, message)
        await broker.close()
        inbox = Inbox()
        await other.consume(REQUESTS, 1, inbox)
        assert (await inbox.next()).message == self.received(message)
        assert await other.publish([(responses_of(AGENT), a_message())]) == [Published.ACCEPTED]

    async def test_declaring_at_the_same_time(self, broker: Broker, other: Broker) -> None:
        await asyncio.gather(*(each.declare(STRANGER) for each in (broker, other) * 3))
        assert await broker.publish([(requests_of(STRANGER), a_message())]) == [Published.ACCEPTED]

    async def test_without_a_replica_there_is_no_private_queue(self, broker: Broker) -> None:
        address = private_of(AGENT, ReplicaId("r1"))
        assert await broker.publish([(address, a_message())]) == [Published.UNROUTABLE]

    async def test_a_replica_has_a_private_queue(self, broker: Broker, other: Broker) -> None:
        replica, message, inbox = ReplicaId(new_id()), a_message(), Inbox()
        await broker.declare(AGENT, replica)
        await send(other, private_of(AGENT, replica), message)
        await broker.consume(private_of(AGENT, replica), 1, inbox)
        delivery = await inbox.next()
        assert delivery.message == self.received(message)
        assert delivery.address == private_of(AGENT, replica)
        assert await delivery.ack()

    # What a message carries.

    async def test_every_field_arrives(self, broker: Broker, other: Broker) -> None:
        message = Message(
            MessageType.RESPONSE,
            body='{"città": "Zürich"}'.encode(),
            message_id=new_id(),
            correlation_id=new_id(),
            app_id="flights",
            reply_to=private_of(STRANGER, ReplicaId(new_id())),
            user_id=self.verified_user or "alice",
            headers={"text": "Zürich", "empty": "", Header.CALL_DEPTH: 3, Header.DEADLINE: 1.75},
            timestamp=datetime(2026, 2, 3, 4, 5, 6, tzinfo=UTC),
        )
        await send(broker, REQUESTS, message)
        inbox = Inbox()
        await other.consume(REQUESTS, 1, inbox)
        delivery = await inbox.next()
        assert delivery.message == message
        assert delivery.address == REQUESTS
        assert delivery.count == 1

    async def test_absent_fields_stay_absent(self, broker: Broker) -> None:
        message = a_message()
        await send(broker, REQUESTS, message)
        inbox = Inbox()
        await broker.consume(REQUESTS, 1, inbox)
        assert (await inbox.next()).message == self.received(message)

    @pytest.mark.parametrize("kind", list(MessageType))
    async def test_every_type_arrives(self, broker: Broker, kind: MessageType) -> None:
        await send(broker, REQUESTS, a_message(type=kind))
        inbox = Inbox()
        await broker.consume(REQUESTS, 1, inbox)
        assert (await inbox.next()).message.type is kind

    @pytest.mark.parametrize("value", ["", "x" * 1000, "0", 0, -1, 2**40, -(2**40), 0.0, 1.0, -2.5, 1.7e300])
    async def test_a_header_keeps_value_and_type(self, broker: Broker, value: str | int | float) -> None:
        await send(broker, REQUESTS, a_message(headers={"x-some": value}))
        inbox = Inbox()
        await broker.consume(REQUESTS, 1, inbox)
        headers = (await inbox.next()).message.headers
        assert headers == {"x-some": value}
        assert type(headers["x-some"]) is type(value)

    @pytest.mark.parametrize("body", [b"", b"\x00\xff" * 3, b"m" * 1_000_000], ids=["empty", "binary", "1 MB"])
    async def test_any_body_arrives(self, broker: Broker, body: bytes) -> None:
        await send(broker, REQUESTS, a_message(body))
        inbox = Inbox()
        await broker.consume(REQUESTS, 1, inbox)
        assert (await inbox.next()).message.body == body

    async def test_one_consumer_sees_the_order_of_publishing(self, broker: Broker) -> None:
        messages, inbox = [a_message() for _ in range(50)], Inbox()
        await broker.consume(REQUESTS, 5, inbox)
        await send(broker, REQUESTS, *messages[:25])
        await send(broker, REQUESTS, *messages[25:])
        for message in messages:
            delivery = await inbox.next()
            assert delivery.message.message_id == message.message_id
            assert await delivery.ack()

    # Competing consumers and settling.

    async def test_each_message_goes_to_one_of_the_competing_consumers(self, broker: Broker, other: Broker) -> None:
        inbox, sent = Inbox(), [a_message() for _ in range(40)]
        await broker.consume(REQUESTS, 5, inbox)
        await other.consume(REQUESTS, 5, inbox)
        await send(broker, REQUESTS, *sent)
        seen = []
        for _ in sent:
            delivery = await inbox.next()
            seen.append(delivery.message.message_id)
            assert delivery.count == 1
            assert await delivery.ack()
        assert sorted(seen) == sorted(message.message_id for message in sent)
        await self._nothing_is_left(broker, inbox)

    async def test_consumers_share_the_work(self, broker: Broker, other: Broker) -> None:
        one, two = Inbox(), Inbox()
        await broker.consume(REQUESTS, 1, one)
        await other.consume(REQUESTS, 1, two)
        await send(broker, REQUESTS, a_message(), a_message())
        first, second = await one.next(), await two.next()
        assert first.message.message_id != second.message.message_id

    async def test_acked_means_gone(self, broker: Broker, other: Broker) -> None:
        inbox = Inbox()
        await broker.consume(REQUESTS, 10, inbox)
        await send(broker, REQUESTS, a_message())
        assert await (await inbox.next()).ack()
        await broker.close()
        again = Inbox()
        await other.consume(REQUESTS, 10, again)
        await self._nothing_is_left(other, again)

    async def test_many_acks_at_once(self, broker: Broker) -> None:
        inbox = Inbox()
        await broker.consume(REQUESTS, 50, inbox)
        await send(broker, REQUESTS, *(a_message() for _ in range(50)))
        deliveries = await inbox.take(50)
        assert all(await asyncio.gather(*(delivery.ack() for delivery in reversed(deliveries))))
        await self._nothing_is_left(broker, inbox)

    async def test_requeued_goes_to_another_consumer_with_a_higher_count(self, broker: Broker, other: Broker) -> None:
        one, two, message = Inbox(), Inbox(), a_message(headers={"x-some": "value"})
        subscription = await broker.consume(REQUESTS, 1, one)
        await send(broker, REQUESTS, message)
        first = await one.next()
        await subscription.cancel()
        await other.consume(REQUESTS, 1, two)
        assert await first.requeue()
        second = await two.next()
        assert (first.count, second.count) == (1, 2)
        assert second.message == self.received(message)
        assert await second.ack()

    async def test_the_count_rises_each_time(self, broker: Broker) -> None:
        inbox = Inbox()
        await broker.consume(REQUESTS, 1, inbox)
        await send(broker, REQUESTS, a_message())
        for count in (1, 2, 3, 4):
            delivery = await inbox.next()
            assert delivery.count == count
            assert await delivery.requeue()

    async def test_dead_letters_carry_their_reason(self, broker: Broker, other: Broker) -> None:
        message, inbox, dead = a_message(b"not JSON", headers={"x-call-depth": 2}), Inbox(), Inbox()
        await broker.consume(REQUESTS, 1, inbox)
        await send(broker, REQUESTS, message)
        assert await (await inbox.next()).dead_letter("body: not JSON")
        await other.consume(dead_letters_of(AGENT), 1, dead)
        delivery = await dead.next()
        headers = {**message.headers, Header.DEAD_REASON: "body: not JSON"}
        assert delivery.message == self.received(replace(message, headers=headers))
        assert delivery.address == dead_letters_of(AGENT)
        assert await delivery.ack()
        await self._nothing_is_left(broker, inbox)

    async def test_dead_letters_of_a_private_queue_are_those_of_its_agent(self, broker: Broker) -> None:
        replica, message, inbox, dead = ReplicaId(new_id()), a_message(), Inbox(), Inbox()
        await broker.declare(AGENT, replica)
        await broker.consume(private_of(AGENT, replica), 1, inbox)
        await broker.consume(dead_letters_of(AGENT), 1, dead)
        await send(broker, private_of(AGENT, replica), message)
        assert await (await inbox.next()).dead_letter("who knows")
        assert (await dead.next()).message.message_id == message.message_id

    # Prefetch, resize, cancel.

    async def test_prefetch_bounds_unsettled_deliveries(self, broker: Broker, other: Broker) -> None:
        one, two = Inbox(), Inbox()
        await send(broker, REQUESTS, *(a_message() for _ in range(5)))
        await broker.consume(REQUESTS, 2, one)
        await one.take(2)
        await other.consume(REQUESTS, 10, two)
        await two.take(3)
        assert one.empty()

    async def test_settling_makes_room(self, broker: Broker) -> None:
        inbox = Inbox()
        await send(broker, REQUESTS, *(a_message() for _ in range(4)))
        await broker.consume(REQUESTS, 1, inbox)
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
        await self._nothing_is_left(broker, inbox)

    async def test_resize_down_takes_fewer(self, broker: Broker, other: Broker) -> None:
        one, two = Inbox(), Inbox()
        subscription = await broker.consume(REQUESTS, 3, one)
        await send(broker, REQUESTS, *(a_message() for _ in range(3)))
        assert all([await delivery.ack() for delivery in await one.take(3)])
        await subscription.resize(1)
        await send(broker, REQUESTS, *(a_message() for _ in range(3)))
        await one.next()
        await other.consume(REQUESTS, 10, two)
        await two.take(2)
        assert one.empty()

    async def test_what_was_taken_before_a_resize_can_be_settled(self, broker: Broker) -> None:
        inbox = Inbox()
        subscription = await broker.consume(REQUESTS, 2, inbox)
        await send(broker, REQUESTS, a_message(), a_message())
        deliveries = await inbox.take(2)
        await subscription.resize(1)
        assert all([await delivery.ack() for delivery in deliveries])
        await self._nothing_is_left(broker, inbox)

    async def test_a_cancelled_consumer_takes_nothing_and_can_still_settle(
        self, broker: Broker, other: Broker
    ) -> None:
        one, two, late = Inbox(), Inbox(), a_message()
        subscription = await broker.consume(REQUESTS, 10, one)
        await send(broker, REQUESTS, a_message())
        first = await one.next()
        await subscription.cancel()
        await send(broker, REQUESTS, late)
        await other.consume(REQUESTS, 10, two)
        delivery = await two.next()
        assert (delivery.message.message_id, delivery.count) == (late.message_id, 1)
        assert one.empty()
        assert await first.ack()
        assert await delivery.ack()
        await self._nothing_is_left(broker, two)

    async def test_cancelling_twice_is_harmless(self, broker: Broker) -> None:
        subscription = await broker.consume(REQUESTS, 1, Inbox())
        await subscription.cancel()
        await subscription.cancel()

    async def test_one_broker_consumes_several_queues(self, broker: Broker) -> None:
        requests, responses = Inbox(), Inbox()
        await broker.consume(REQUESTS, 1, requests)
        await broker.consume(responses_of(AGENT), 1, responses)
        await broker.publish([(REQUESTS, a_message(b"q")), (responses_of(AGENT), a_message(b"r"))])
        assert (await requests.next()).message.body == b"q"
        assert (await responses.next()).message.body == b"r"

    async def test_a_full_consumer_does_not_hold_up_another(self, broker: Broker) -> None:
        requests, responses = Inbox(), Inbox()
        await broker.consume(REQUESTS, 1, requests)
        await broker.consume(responses_of(AGENT), 1, responses)
        await send(broker, REQUESTS, a_message(), a_message())
        held = await requests.next()
        for _ in range(3):
            await send(broker, responses_of(AGENT), a_message())
            assert await (await responses.next()).ack()
        assert await held.ack()
        await requests.next()

    # Loss and close.

    async def test_closing_gives_unsettled_deliveries_back(self, broker: Broker, other: Broker) -> None:
        one, two, message = Inbox(), Inbox(), a_message()
        await broker.consume(REQUESTS, 10, one)
        await send(broker, REQUESTS, message)
        lost = await one.next()
        await broker.close()
        await other.consume(REQUESTS, 10, two)
        again = await two.next()
        assert again.message == self.received(message)
        assert again.count == 2
        assert not await lost.ack()
        assert await again.ack()

    async def test_closing_twice_is_harmless(self, broker: Broker) -> None:
        await broker.close()
        await broker.close()

    async def test_a_closed_broker_is_unavailable(self, broker: Broker) -> None:
        assert broker.connected
        await broker.close()
        assert not broker.connected
        with pytest.raises(BrokerUnavailable):
            await broker.publish([(REQUESTS, a_message())])

    async def test_after_a_lost_connection_the_message_comes_again(self, broker: Broker) -> None:
        inbox, message = Inbox(), a_message()
        await broker.consume(REQUESTS, 1, inbox)
        await send(broker, REQUESTS, message)
        lost = await inbox.next()
        await self.break_connection(broker)
        again = await inbox.next()
        assert again.message == self.received(message)
        assert again.count == 2
        assert not await lost.ack()
        assert await again.ack()
        await self._nothing_is_left(broker, inbox)

    @pytest.mark.parametrize("settle", ["ack", "requeue", "dead_letter"])
    async def test_settling_after_the_loss_changes_nothing(self, broker: Broker, other: Broker, settle: str) -> None:
        one, two = Inbox(), Inbox()
        subscription = await broker.consume(REQUESTS, 1, one)
        await send(broker, REQUESTS, a_message())
        lost = await one.next()
        await subscription.cancel()
        await self.break_connection(broker)
        await other.consume(REQUESTS, 1, two)
        again = await two.next()
        assert not await (lost.dead_letter("late") if settle == "dead_letter" else getattr(lost, settle)())
        assert await again.ack()
        await self._nothing_is_left(other, two)
        assert await other.depth(dead_letters_of(AGENT)) == 0

    # Broadcast and depth.

    async def test_a_broadcast_reaches_each_replica_of_its_agent_once(self, broker: Broker, other: Broker) -> None:
        replicas = [ReplicaId(new_id()) for _ in range(3)]
        addresses = [
            private_of(AGENT, replicas[0]),
            private_of(AGENT, replicas[1]),
            private_of(STRANGER, replicas[2]),
        ]
        await broker.declare(AGENT, replicas[0])
        await other.declare(AGENT, replicas[1])
        await other.declare(STRANGER, replicas[2])
        notice, end = a_message(type=MessageType.CANCEL), a_message()
        await broker.broadcast(AGENT, notice)
        for address in addresses:
            await send(broker, address, end)
        inboxes = [Inbox() for _ in addresses]
        for consumer, address, inbox in zip((broker, other, other), addresses, inboxes, strict=True):
            await consumer.consume(address, 10, inbox)
        for inbox in inboxes[:2]:
            assert [d.message for d in await inbox.take(2)] == [self.received(notice), self.received(end)]
        assert (await inboxes[2].next()).message == self.received(end)

    async def test_a_broadcast_leaves_the_shared_queues_alone(self, broker: Broker) -> None:
        await broker.declare(AGENT, ReplicaId(new_id()))
        await broker.broadcast(AGENT, a_message())
        assert await broker.depth(REQUESTS) == 0
        assert await broker.depth(responses_of(AGENT)) == 0

    async def test_a_broadcast_to_nobody_is_no_error(self, broker: Broker) -> None:
        await broker.broadcast(AGENT, a_message())
        await broker.broadcast(STRANGER, a_message())

    async def test_depth_counts_what_no_consumer_holds(self, broker: Broker) -> None:
        await send(broker, REQUESTS, a_message(), a_message(), a_message())
        await until_depth(broker, REQUESTS, 3)
        inbox = Inbox()
        await broker.consume(REQUESTS, 2, inbox)
        await inbox.take(2)
        await until_depth(broker, REQUESTS, 1)

    async def test_no_such_queue_has_no_depth(self, broker: Broker) -> None:
        assert await broker.depth(requests_of(STRANGER)) is None
        assert await broker.depth(REQUESTS) == 0

    async def _nothing_is_left(self, broker: Broker, inbox: Inbox) -> None:
        """Nothing lies in the request queue and nothing came twice: what comes next is what is sent next."""
        await until_depth(broker, REQUESTS, 0)
        last = a_message()
        await send(broker, REQUESTS, last)
        delivery = await inbox.next()
        assert delivery.message.message_id == last.message_id
        assert delivery.count == 1
        assert await delivery.ack()
