"""Odd content affects only its own message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiormq
import pytest
from aiormq.abc import DeliveredMessage
from live import SLOW_BROKER_TIMEOUT

from meshpoint.adapters.rabbitmq import RabbitMqBroker, connect
from meshpoint.model.ids import ReplicaId
from meshpoint.model.messages import Address, Header, dead_letter_queue, private_queue
from meshpoint.testing.conformance.broker import (
    AGENT,
    REQUESTS,
    Inbox,
    a_message,
    send,
    until_depth,
)
from servers import Proxy, RabbitServer
from unusual_content import (
    EXOTIC,
    EXOTIC_DECODED,
    UNDECODABLE,
    entry,
    long,
    properties,
    publish_raw,
)

REPLICA = ReplicaId("r1")
DEAD = dead_letter_queue(AGENT)
BROADCAST = Address(f"{AGENT}.broadcast")

Open = Callable[..., Awaitable[RabbitMqBroker]]


@pytest.fixture
async def proxy(rabbit_server: RabbitServer) -> AsyncIterator[Proxy]:
    async with Proxy(rabbit_server.url) as proxy:
        yield proxy


@pytest.fixture
async def opened(proxy: Proxy, namespace: str) -> AsyncIterator[Open]:
    async with AsyncExitStack() as stack:

        async def opened(**options: Any) -> RabbitMqBroker:
            broker = RabbitMqBroker(
                proxy.url,
                namespace=namespace,
                **{"publish_timeout": SLOW_BROKER_TIMEOUT, **options},
            )
            await broker.open()
            stack.push_async_callback(broker.close)
            await broker.declare(AGENT, REPLICA)
            return broker

        yield opened


async def read_dead_letters(url: str, queue: str, count: int) -> list[DeliveredMessage]:
    """The dead letters as seen by a client that uses the library's own decoder."""
    connection = await aiormq.connect(url)
    try:
        channel = await connection.channel()
        return [await channel.basic_get(queue, no_ack=True) for _ in range(count)]
    finally:
        await connection.close()


@pytest.mark.parametrize("key", [REQUESTS, private_queue(AGENT, REPLICA), BROADCAST])
@pytest.mark.parametrize("name", UNDECODABLE)
async def test_an_undecodable_message_is_dead_lettered_alone(
    opened: Open,
    proxy: Proxy,
    rabbit_server: RabbitServer,
    namespace: str,
    name: str,
    key: Address,
) -> None:
    broker, inbox = await opened(), Inbox()
    queue = REQUESTS if key == REQUESTS else private_queue(AGENT, REPLICA)
    await broker.consume(queue, 3, inbox)
    await send(broker, queue, a_message(b"first"))
    await (await inbox.next()).ack()
    connections = proxy.connections
    await publish_raw(
        rabbit_server.url, f"{namespace}.mesh", key, UNDECODABLE[name], name.encode()
    )
    await send(broker, queue, a_message(b"honest"))
    valid = await inbox.next()
    assert valid.message.body == b"honest"
    assert await valid.ack()
    await until_depth(broker, DEAD, 1)
    await until_depth(broker, queue, 0)
    assert proxy.connections == connections
    assert broker.connected
    (found,) = await read_dead_letters(rabbit_server.url, f"{namespace}.{DEAD}", 1)
    assert (found.body or b"").decode() == name
    headers = found.header.properties.headers or {}
    assert 0 < len(str(headers[Header.DEAD_REASON])) <= 500
    assert headers["x-dead-routing-key"] == key


async def test_undecodable_dead_letters_are_skipped_and_stay(
    opened: Open, rabbit_server: RabbitServer, namespace: str
) -> None:
    """They were moved there by the broker, or by an older release."""
    broker, inbox = await opened(), Inbox()
    for name, encoded in UNDECODABLE.items():
        await publish_raw(rabbit_server.url, f"{namespace}.mesh", DEAD, encoded, name.encode())
    await publish_raw(
        rabbit_server.url, f"{namespace}.mesh", DEAD, properties(kind=b"letter"), b"letter"
    )
    connection = await connect(rabbit_server.url)
    channel = (await connection.open_channel(5)).channel
    bodies = set()
    while (dead_letter := await channel.basic_get(f"{namespace}.{DEAD}")).delivery_tag:
        bodies.add(dead_letter.body.decode())
        if dead_letter.body != b"letter":
            headers = dead_letter.header.properties.headers or {}
            assert str(headers[Header.DEAD_REASON]).startswith("undecodable")
    await connection.close()
    assert bodies == {*UNDECODABLE, "letter"}

    subscription = await broker.consume(DEAD, 100, inbox)
    read = {delivery.message.body.decode(): delivery for delivery in await inbox.take(len(bodies))}
    assert set(read) == bodies
    assert read["letter"].message.headers == {"x-dead-type": "letter"}
    await subscription.cancel()
    for delivery in read.values():
        assert await delivery.requeue()
    await until_depth(broker, DEAD, len(bodies))


async def test_headers_of_all_types_are_read_or_ignored(
    opened: Open, rabbit_server: RabbitServer, namespace: str
) -> None:
    broker, inbox, dead_letters = await opened(), Inbox(), Inbox()
    await broker.consume(REQUESTS, 1, inbox)
    await broker.consume(DEAD, 1, dead_letters)
    encoded = properties(headers=EXOTIC, timestamp=1_700_000_000_000)
    await publish_raw(rabbit_server.url, f"{namespace}.mesh", REQUESTS, encoded)
    delivery = await inbox.next()
    assert delivery.message.headers == EXOTIC_DECODED
    assert [type(value) for value in delivery.message.headers.values()] == [
        type(v) for v in EXOTIC_DECODED.values()
    ]
    assert delivery.message.timestamp is not None
    assert delivery.message.timestamp.year == 2023
    assert await delivery.dead_letter("whatever it is")
    dead_letter = (await dead_letters.next()).message
    assert dead_letter.headers == {
        **EXOTIC_DECODED,
        Header.DEAD_REASON: "whatever it is",
        Header.DEAD_FROM: REQUESTS,
    }


@pytest.mark.parametrize("headers", [1, 1000], ids=["one large", "many small"])
@pytest.mark.parametrize("readable", [True, False])
async def test_the_largest_header_frame_can_be_dead_lettered(
    opened: Open, rabbit_server: RabbitServer, namespace: str, headers: int, readable: bool
) -> None:
    broker, inbox, dead_letters = await opened(), Inbox(), Inbox()
    await broker.consume(REQUESTS, 1, inbox)
    await broker.consume(DEAD, 1, dead_letters)
    space = 130_850 // headers
    table = b"".join(
        entry(f"x{n:03}".encode(), b"S", long(b"y" * (space - 10))) for n in range(headers)
    )
    encoded = properties(headers=table, correlation_id=b"c" if readable else b"\xff")
    await publish_raw(rabbit_server.url, f"{namespace}.mesh", REQUESTS, encoded, b"body")
    if readable:
        assert await (await inbox.next()).dead_letter("r" * 10_000)
    dead_letter = (await dead_letters.next()).message
    assert (dead_letter.body, dead_letter.message_id) == (b"body", "m")
    assert len(str(dead_letter.headers[Header.DEAD_REASON])) <= 500
    assert dead_letter.headers["x-dead-headers-dropped"] >= 1  # type: ignore[operator]  # a number
    assert broker.connected
    await until_depth(broker, REQUESTS, 0)


async def test_a_message_redelivered_too_often_to_a_private_queue_is_dead_lettered(
    opened: Open,
) -> None:
    """Classic queues have no delivery limit of their own."""
    broker, inbox, dead_letters, queue = (
        await opened(delivery_limit=10),
        Inbox(),
        Inbox(),
        private_queue(AGENT, REPLICA),
    )
    await broker.consume(queue, 2, inbox)
    await broker.consume(DEAD, 1, dead_letters)
    await send(broker, queue, a_message(b"again"))
    for count in range(1, 11):
        delivery = await inbox.next()
        assert delivery.delivery_count == count
        assert await delivery.requeue()
    dead_letter = await dead_letters.next()
    assert dead_letter.message.body == b"again"
    assert "delivery limit" in str(dead_letter.message.headers[Header.DEAD_REASON])
    await send(broker, queue, a_message(b"honest"))
    assert (await inbox.next()).message.body == b"honest"


async def test_a_forged_delivery_count_is_ignored(opened: Open) -> None:
    broker, inbox = await opened(), Inbox()
    for queue in (REQUESTS, private_queue(AGENT, REPLICA)):
        await broker.consume(queue, 2, inbox)
        await send(broker, queue, a_message(headers={"x-delivery-count": 1_000}))
        delivery = await inbox.next()
        assert delivery.delivery_count == 1
        assert await delivery.requeue()
        redelivered = await inbox.next()
        assert redelivered.delivery_count == 2
        assert await redelivered.ack()


async def test_a_failing_receiver_loses_only_that_message(opened: Open) -> None:
    broker, dead_letters, seen = await opened(), Inbox(), asyncio.Queue[bytes]()

    def on_delivery(delivery: Any) -> None:
        body = delivery.message.body
        if body == b"bad":
            raise RuntimeError("a defect")
        seen.put_nowait(body)

    await broker.consume(REQUESTS, 1, on_delivery)
    await broker.consume(DEAD, 1, dead_letters)
    await send(broker, REQUESTS, a_message(b"bad"), a_message(b"good"))
    assert (await dead_letters.next()).message.headers[
        Header.DEAD_REASON
    ] == "internal error: RuntimeError: a defect"
    assert await seen.get() == b"good"
