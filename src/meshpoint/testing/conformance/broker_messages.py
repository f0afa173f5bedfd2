"""Publishing, declaring, message content and broadcasts."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest

from meshpoint.model.ids import ReplicaId, new_id
from meshpoint.model.messages import (
    Header,
    Message,
    MessageType,
    dead_letters_of,
    nested_of,
    private_of,
    requests_of,
    responses_of,
    shard_of,
)
from meshpoint.ports.broker import Broker, Published
from meshpoint.testing.conformance.broker_case import (
    AGENT,
    REQUESTS,
    STRANGER,
    BrokerCase,
    Inbox,
    a_message,
    send,
    until_depth,
)

NEVER_SENT: dict[str, dict[str, object]] = {
    "long id": {"correlation_id": "é" * 128},
    "long address": {"reply_to": "x" * 256},
    "no UTF-8": {"app_id": "\ud800"},
    "no UTF-8 in a header": {"headers": {"x-some": "\ud800"}},
    "long header": {"headers": {"x-some": "x" * 140_000}},
    "many headers": {"headers": {f"x-{place}": "x" * 1000 for place in range(140)}},
    "long name of a header": {"headers": {"x" * 256: 1}},
    "other value": {"headers": {"x-some": b"bytes"}},
}
"""Changes that make a message impossible to send, by test id."""


class PublishSuite(BrokerCase):
    """Each message has its own result, in the order of the arguments."""

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

    @pytest.mark.parametrize("changes", list(NEVER_SENT.values()), ids=list(NEVER_SENT))
    async def test_what_can_never_be_sent_is_rejected_alone(self, broker: Broker, changes: dict[str, object]) -> None:
        bad, good, inbox = a_message(b"{}", **changes), a_message(), Inbox()
        words = await broker.publish([(REQUESTS, bad), (REQUESTS, good), (requests_of(STRANGER), a_message())])
        assert words == [Published.REJECTED, Published.ACCEPTED, Published.UNROUTABLE]
        assert await broker.publish([(REQUESTS, bad)]) == [Published.REJECTED]
        await broker.consume(REQUESTS, 10, inbox)
        assert (await inbox.next()).message == self.received(good)
        assert broker.connected

    async def test_texts_of_the_greatest_length_are_sent(self, broker: Broker) -> None:
        message, inbox = a_message(correlation_id="é" * 127, headers={"x-some": "x" * 100_000}), Inbox()
        await broker.consume(REQUESTS, 1, inbox)
        await send(broker, REQUESTS, message)
        assert (await inbox.next()).message == self.received(message)

    async def test_concurrent_publishes_each_get_their_own_results(self, broker: Broker) -> None:
        addresses = [REQUESTS, requests_of(STRANGER)] * 10
        results = await asyncio.gather(*(broker.publish([(address, a_message())]) for address in addresses))
        assert results == [[Published.ACCEPTED], [Published.UNROUTABLE]] * 10


class DeclareSuite(BrokerCase):
    """Declared queues exist permanently."""

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

    async def test_nested_requests_have_a_queue(self, broker: Broker, other: Broker) -> None:
        message, inbox = a_message(), Inbox()
        await send(other, nested_of(AGENT), message)
        await broker.consume(nested_of(AGENT), 1, inbox)
        delivery = await inbox.next()
        assert (delivery.message, delivery.address) == (self.received(message), nested_of(AGENT))
        assert await delivery.dead_letter("unreadable")
        await until_depth(broker, dead_letters_of(AGENT), 1)

    async def test_requests_can_have_several_queues(self, broker: Broker, other: Broker) -> None:
        """A larger number adds queues; a smaller one removes none."""
        for asked, there in ((1, 1), (3, 3), (2, 3)):
            await broker.declare(AGENT, shards=asked)
            depths = [await other.depth(shard_of(AGENT, number)) for number in range(5)]
            assert depths == [0] * there + [None] * (5 - there)
        message, inbox = a_message(), Inbox()
        await send(other, shard_of(AGENT, 2), message)
        await broker.consume(shard_of(AGENT, 2), 1, inbox)
        delivery = await inbox.next()
        assert delivery.address == shard_of(AGENT, 2)
        assert await delivery.dead_letter("unreadable")
        await until_depth(broker, dead_letters_of(AGENT), 1)


class ContentSuite(BrokerCase):
    """Messages arrive unchanged."""

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


class BroadcastSuite(BrokerCase):
    """Broadcasts and queue lengths."""

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
