"""Odd content affects only its own message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import aiormq
import pytest
from aiormq.abc import DeliveredMessage
from live import BUSY

from meshpoint.adapters.rabbitmq import RabbitMqBroker, connect
from meshpoint.model.ids import ReplicaId
from meshpoint.model.messages import Address, Header, dead_letters_of, private_of
from meshpoint.testing.conformance.broker import AGENT, REQUESTS, Inbox, a_message, send, until_depth
from odd_content import EXOTIC, EXOTIC_READ, UNDECODABLE, entry, long, properties, publish_raw
from servers import Proxy, RabbitServer

REPLICA = ReplicaId("r1")
DEAD = dead_letters_of(AGENT)
BROADCAST = Address(f"{AGENT}.broadcast")

Open = Callable[..., Awaitable[RabbitMqBroker]]


@pytest.fixture
async def proxy(rabbit_server: RabbitServer) -> AsyncIterator[Proxy]:
    async with Proxy(rabbit_server.url) as proxy:
        yield proxy


@pytest.fixture
async def opened(proxy: Proxy, namespace: str) -> AsyncIterator[Open]:
    async with AsyncExitStack() as stack:

        async def opened(**options: object) -> RabbitMqBroker:
            broker = RabbitMqBroker(proxy.url, namespace=namespace, **{"publish_timeout": BUSY, **options})  # type: ignore[arg-type]
            await broker.open()
            stack.push_async_callback(broker.close)
            await broker.declare(AGENT, REPLICA)
            return broker

        yield opened


async def the_dead(url: str, queue: str, count: int) -> list[DeliveredMessage]:
    """The dead letters as seen by a client that uses the library's own decoder."""
    connection = await aiormq.connect(url)
    try:
        channel = await connection.channel()
        return [await channel.basic_get(queue, no_ack=True) for _ in range(count)]
    finally:
        await connection.close()


@pytest.mark.parametrize("key", [REQUESTS, private_of(AGENT, REPLICA), BROADCAST])
@pytest.mark.parametrize("name", UNDECODABLE)
async def test_what_cannot_be_decoded_ends_alone_among_the_dead_letters(
    opened: Open, proxy: Proxy, rabbit_server: RabbitServer, namespace: str, name: str, key: Address
) -> None:
    broker, inbox = await opened(), Inbox()
    queue = REQUESTS if key == REQUESTS else private_of(AGENT, REPLICA)
    await broker.consume(queue, 3, inbox)
    await send(broker, queue, a_message(b"first"))
    await (await inbox.next()).ack()
    connections = proxy.connections
    await publish_raw(rabbit_server.url, f"{namespace}.mesh", key, UNDECODABLE[name], name.encode())
    await send(broker, queue, a_message(b"honest"))
    honest = await inbox.next()
    assert honest.message.body == b"honest"
    assert await honest.ack()
    await until_depth(broker, DEAD, 1)
    await until_depth(broker, queue, 0)
    assert proxy.connections == connections
    assert broker.connected
    (found,) = await the_dead(rabbit_server.url, f"{namespace}.{DEAD}", 1)
    assert (found.body or b"").decode() == name
    headers = found.header.properties.headers or {}
    assert 0 < len(str(headers[Header.DEAD_REASON])) <= 500
    assert headers["x-dead-routing-key"] == key


async def test_dead_letters_that_cannot_be_decoded_are_read_and_stay(
    opened: Open, rabbit_server: RabbitServer, namespace: str
) -> None:
    """They were moved there by the broker, or by an older release."""
    broker, inbox = await opened(), Inbox()
    for name, encoded in UNDECODABLE.items():
        await publish_raw(rabbit_server.url, f"{namespace}.mesh", DEAD, encoded, name.encode())
    await publish_raw(rabbit_server.url, f"{namespace}.mesh", DEAD, properties(kind=b"letter"), b"letter")
    wired = await connect(rabbit_server.url)
    channel = (await wired.open_channel(5)).channel
    bodies = set()
    while (letter := await channel.basic_get(f"{namespace}.{DEAD}")).delivery_tag:
        bodies.add(letter.body.decode())
        if letter.body != b"letter":
            headers = letter.header.properties.headers or {}
            assert str(headers[Header.DEAD_REASON]).startswith("undecodable")
    await wired.close()
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
    broker, inbox, dead = await opened(), Inbox(), Inbox()
    await broker.consume(REQUESTS, 1, inbox)
    await broker.consume(DEAD, 1, dead)
    encoded = properties(headers=EXOTIC, timestamp=1_700_000_000_000)
    await publish_raw(rabbit_server.url, f"{namespace}.mesh", REQUESTS, encoded)
    delivery = await inbox.next()
    assert delivery.message.headers == EXOTIC_READ
    assert [type(value) for value in delivery.message.headers.values()] == [type(v) for v in EXOTIC_READ.values()]
    assert delivery.message.timestamp is not None
    assert delivery.message.timestamp.year == 2023
    assert await delivery.dead_letter("whatever it is")
    buried = (await dead.next()).message
    assert buried.headers == {**EXOTIC_READ, Header.DEAD_REASON: "whatever it is"}


@pytest.mark.parametrize("headers", [1, 1000], ids=["one large", "many small"])
@pytest.mark.parametrize("readable", [True, False])
async def test_the_largest_header_frame_can_be_dead_lettered(
    opened: Open, rabbit_server: RabbitServer, namespace: str, headers: int, readable: bool
) -> None:
    broker, inbox, dead = await opened(), Inbox(), Inbox()
    await broker.consume(REQUESTS, 1, inbox)
    await broker.consume(DEAD, 1, dead)
    space = 130_850 // headers
    table = b"".join(entry(f"x{n:03}".encode(), b"S", long(b"y" * (space - 10))) for n in range(headers))
    encoded = properties(headers=table, correlation_id=b"c" if readable else b"\xff")
    await publish_raw(rabbit_server.url, f"{namespace}.mesh", REQUESTS, encoded, b"body")
    if readable:
        assert await (await inbox.next()).dead_letter("r" * 10_000)
    buried = (await dead.next()).message
    assert (buried.body, buried.message_id) == (b"body", "m")
    assert len(str(buried.headers[Header.DEAD_REASON])) <= 500
    assert buried.headers["x-dead-headers-dropped"] >= 1  # type: ignore[operator]
    assert broker.connected
    await until_depth(broker, REQUESTS, 0)


async def test_a_message_that_comes_again_and_again_to_a_private_queue_ends(opened: Open) -> None:
    """Classic queues have no delivery limit of their own."""
    broker, inbox, dead, queue = await opened(delivery_limit=10), Inbox(), Inbox(), private_of(AGENT, REPLICA)
    await broker.consume(queue, 2, inbox)
    await broker.consume(DEAD, 1, dead)
    await send(broker, queue, a_message(b"again"))
    for count in range(1, 11):
        delivery = await inbox.next()
        assert delivery.count == count
        assert await delivery.requeue()
    buried = await dead.next()
    assert buried.message.body == b"again"
    assert "delivery limit" in str(buried.message.headers[Header.DEAD_REASON])
    await send(broker, queue, a_message(b"honest"))
    assert (await inbox.next()).message.body == b"honest"


async def test_a_forged_count_is_not_believed(opened: Open) -> None:
    broker, inbox = await opened(), Inbox()
    for queue in (REQUESTS, private_of(AGENT, REPLICA)):
        await broker.consume(queue, 2, inbox)
        await send(broker, queue, a_message(headers={"x-delivery-count": 1_000}))
        delivery = await inbox.next()
        assert delivery.count == 1
        assert await delivery.requeue()
        again = await inbox.next()
        assert again.count == 2
        assert await again.ack()


async def test_a_receiver_that_fails_costs_that_message_alone(opened: Open) -> None:
    broker, dead, seen = await opened(), Inbox(), asyncio.Queue[bytes]()

    def on_delivery(delivery: object) -> None:
        body = delivery.message.body  # type: ignore[attr-defined]
        if body == b"bad":
            raise RuntimeError("a defect")
        seen.put_nowait(body)

    await broker.consume(REQUESTS, 1, on_delivery)
    await broker.consume(DEAD, 1, dead)
    await send(broker, REQUESTS, a_message(b"bad"), a_message(b"good"))
    assert (await dead.next()).message.headers[Header.DEAD_REASON] == "internal error: RuntimeError: a defect"
    assert await seen.get() == b"good"
