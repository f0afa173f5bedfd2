"""A refused message affects no other message, and deleted broker objects are declared again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiormq
import pytest
from live import SLOW_BROKER_TIMEOUT

from meshpoint.adapters.rabbitmq import RabbitMqBroker
from meshpoint.adapters.rabbitmq import broker as broker_module
from meshpoint.adapters.rabbitmq.frames import short_string
from meshpoint.adapters.rabbitmq.publisher import OutboundMessage
from meshpoint.adapters.sql import migrations
from meshpoint.agents.function import agent
from meshpoint.errors import BrokerUnavailable
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.ids import AgentName, ReplicaId
from meshpoint.model.messages import (
    Address,
    Message,
    dead_letter_queue,
    private_queue,
    request_queue,
    response_queue,
)
from meshpoint.model.outcomes import Ok
from meshpoint.ports.broker import PublishResult
from meshpoint.settings import AgentSettings
from meshpoint.testing.conformance.broker import (
    AGENT,
    REQUESTS,
    STRANGER,
    Inbox,
    a_message,
    send,
    until_depth,
)
from meshpoint.wiring import build_worker
from plain_client import PlainClient
from recorded_events import RecordedEvents
from servers import Proxy, RabbitServer

REPLICA = ReplicaId("r1")
PRIVATE = private_queue(AGENT, REPLICA)
DEAD = dead_letter_queue(AGENT)
VALID_BODY, NO_INTERVAL, LATER = (
    PublishResult.ACCEPTED,
    PublishResult.REJECTED,
    PublishResult.OVERLOADED,
)

Open = Callable[..., Awaitable[RabbitMqBroker]]


@pytest.fixture
async def proxy(own_rabbit: RabbitServer) -> AsyncIterator[Proxy]:
    async with Proxy(own_rabbit.url) as proxy:
        yield proxy


@pytest.fixture
async def opened(proxy: Proxy, namespace: str) -> AsyncIterator[Open]:
    async with AsyncExitStack() as stack:

        async def opened(*declared: AgentName, **options: Any) -> RabbitMqBroker:
            broker = RabbitMqBroker(
                proxy.url,
                namespace=namespace,
                **{"publish_timeout": SLOW_BROKER_TIMEOUT, **options},
            )
            await broker.open()
            stack.push_async_callback(broker.close)
            for agent in declared or (AGENT,):
                await broker.declare(agent, REPLICA)
            return broker

        yield opened


@pytest.fixture
async def small_messages(own_rabbit: RabbitServer) -> AsyncIterator[None]:
    await own_rabbit.limit_messages(10_000)
    yield
    await own_rabbit.limit_messages()


@pytest.fixture
async def operator(own_rabbit: RabbitServer) -> AsyncIterator[aiormq.abc.AbstractChannel]:
    connection = await aiormq.connect(own_rabbit.url)
    yield await connection.channel()
    await connection.close()


@pytest.mark.usefixtures("small_messages")
async def test_a_body_beyond_the_limit_is_rejected_alone(opened: Open, proxy: Proxy) -> None:
    broker, inbox = await opened(), Inbox()
    await broker.consume(REQUESTS, 100, inbox)
    connections = proxy.connections
    assert broker.max_message_bytes is None
    sizes = [10, 10_001, 20, 50_000, 10_000, 30]
    messages = [(REQUESTS, a_message(b"x" * size)) for size in sizes]
    others = [
        asyncio.create_task(broker.publish([(REQUESTS, a_message(b"o"))])) for _ in range(20)
    ]
    assert await broker.publish(messages) == [
        VALID_BODY,
        NO_INTERVAL,
        VALID_BODY,
        NO_INTERVAL,
        VALID_BODY,
        VALID_BODY,
    ]
    assert await asyncio.gather(*others) == [[VALID_BODY]] * 20
    assert broker.max_message_bytes == 10_000
    assert await broker.publish(messages) == [
        VALID_BODY,
        NO_INTERVAL,
        VALID_BODY,
        NO_INTERVAL,
        VALID_BODY,
        VALID_BODY,
    ]
    assert proxy.connections == connections
    seen: set[str] = set()
    while messages[0][1].message_id not in seen or len(seen) < 24:
        delivery = await inbox.next()
        seen.add(delivery.message.message_id)
        await delivery.ack()
    assert {
        message.message_id for _, message in messages if len(message.body) > 10_000
    } & seen == set()


@pytest.mark.usefixtures("small_messages")
async def test_a_learned_size_limit_is_dropped_with_the_connection(
    opened: Open, own_rabbit: RabbitServer, proxy: Proxy
) -> None:
    broker, large = await opened(), a_message(b"x" * 10_001)
    assert await broker.publish([(REQUESTS, large)]) == [NO_INTERVAL]
    await own_rabbit.limit_messages()
    assert await broker.publish([(REQUESTS, large)]) == [NO_INTERVAL]
    proxy.refuse()
    while broker.connected:  # noqa: ASYNC110  a broker has no event for it
        await asyncio.sleep(0.01)
    await proxy.accept()
    await publish_until_accepted(broker, REQUESTS, large)
    assert broker.max_message_bytes is None


@pytest.mark.usefixtures("small_messages")
async def test_a_dead_letter_above_a_lowered_limit_is_kept_without_its_body(
    opened: Open, own_rabbit: RabbitServer
) -> None:
    await own_rabbit.limit_messages()
    broker, sender, inbox, dead_letters = await opened(), await opened(), Inbox(), Inbox()
    await broker.consume(REQUESTS, 1, inbox)
    await broker.consume(DEAD, 1, dead_letters)
    await send(sender, REQUESTS, a_message(b"x" * 10_001))
    delivery = await inbox.next()
    await own_rabbit.limit_messages(10_000)
    assert await delivery.dead_letter("why")
    assert (await dead_letters.next()).message.body == b""
    await until_depth(broker, REQUESTS, 0)


async def test_frames_the_broker_refuses_drop_the_connection_once(
    opened: Open, proxy: Proxy
) -> None:
    """Our code never produces such frames; if it ever does, they must not be retried forever."""
    broker, inbox = await opened(), Inbox()
    await broker.consume(REQUESTS, 100, inbox)
    key, valid_message = short_string(REQUESTS), a_message(b"fine")
    # a header of a type that does not exist
    broken = b"\x20\x00" + b"\x00\x00\x00\x03" + b"\x01x?"
    from meshpoint.adapters.rabbitmq.envelope import to_properties

    outbound = [
        OutboundMessage(
            key, valid_message.message_id, to_properties(valid_message, "guest"), b"fine"
        )
        for _ in range(5)
    ]
    outbound.insert(2, OutboundMessage(key, "bad", broken, b"bad"))
    results = await broker._publisher.publish(outbound)
    assert results == [VALID_BODY, VALID_BODY, NO_INTERVAL, VALID_BODY, VALID_BODY, VALID_BODY]
    assert await broker.publish([(REQUESTS, a_message())]) == [VALID_BODY]


async def publish_until_accepted(
    broker: RabbitMqBroker, address: Address, message: Message
) -> None:
    """Publish until the broker accepts it; it may be overloaded until then."""
    while True:
        try:
            (result,) = await broker.publish([(address, message)])
        except BrokerUnavailable:
            continue
        if result is VALID_BODY:
            return
        assert result is LATER
        await asyncio.sleep(0.01)


async def test_a_deleted_exchange_is_redeclared_by_the_next_publish(
    opened: Open, operator: aiormq.abc.AbstractChannel, namespace: str
) -> None:
    """All bindings are restored with it, other agents' bindings included."""
    broker, other, inbox, foreign = await opened(), await opened(STRANGER), Inbox(), Inbox()
    await broker.consume(REQUESTS, 10, inbox)
    await other.consume(request_queue(STRANGER), 10, foreign)
    await send(broker, request_queue(STRANGER), a_message())
    await foreign.next()
    await operator.exchange_delete(f"{namespace}.mesh")
    sent = [(REQUESTS, a_message(b"ours")), (request_queue(STRANGER), a_message(b"theirs"))]
    assert await broker.publish(sent) == [VALID_BODY, VALID_BODY]
    assert (await inbox.next()).message.body == b"ours"
    assert (await foreign.next()).message.body == b"theirs"


async def test_idle_replicas_redeclare_deleted_queues(
    opened: Open,
    operator: aiormq.abc.AbstractChannel,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broker_module, "_REDECLARE_INTERVAL", 0.05)
    broker, private = await opened(), Inbox()
    await broker.consume(PRIVATE, 1, private)
    await operator.exchange_delete(f"{namespace}.mesh")
    while True:  # an outside sender that knows only the names
        channel = await operator.connection.channel()
        try:
            for key in (f"{AGENT}.broadcast", DEAD):
                await channel.basic_publish(
                    b"{}", exchange=f"{namespace}.mesh", routing_key=key, mandatory=True
                )
            break
        except (aiormq.exceptions.ChannelNotFoundEntity, aiormq.exceptions.PublishError):
            await asyncio.sleep(0.01)
        finally:
            await channel.close()
    await until_depth(broker, DEAD, 2)


@pytest.mark.parametrize("address", [REQUESTS, response_queue(AGENT), PRIVATE])
async def test_a_deleted_queue_is_redeclared_without_unroutable_errors(
    opened: Open, operator: aiormq.abc.AbstractChannel, namespace: str, address: Address
) -> None:
    broker, caller, inbox = await opened(), await opened(STRANGER), Inbox()
    await broker.consume(address, 10, inbox)
    await send(caller, address, a_message(b"before"))
    await (await inbox.next()).ack()
    for body in (b"once", b"twice"):
        await operator.queue_delete(f"{namespace}.{address}")
        await publish_until_accepted(caller, address, a_message(body))
        assert (await inbox.next()).message.body == body
    if address == PRIVATE:
        await caller.broadcast(AGENT, a_message(b"to all"))
        assert (await inbox.next()).message.body == b"to all"


async def test_a_deleted_binding_is_recreated(
    opened: Open, operator: aiormq.abc.AbstractChannel, namespace: str
) -> None:
    broker, caller, inbox = await opened(), await opened(STRANGER), Inbox()
    await broker.consume(REQUESTS, 10, inbox)
    await operator.queue_unbind(f"{namespace}.{REQUESTS}", f"{namespace}.mesh", REQUESTS)
    await send(caller, REQUESTS, a_message(b"theirs"))
    assert (await inbox.next()).message.body == b"theirs"


async def test_a_queue_that_never_existed_is_unroutable_at_once(opened: Open) -> None:
    broker = await opened()
    unknown_addresses = [
        request_queue(STRANGER),
        Address("x" * 300),
        Address("\ud800.req"),
        Address("n.private.x"),
    ]
    results = await broker.publish([(address, a_message()) for address in unknown_addresses])
    assert results == [PublishResult.UNROUTABLE] * 4
    assert await broker.depth(Address("x" * 300)) is None


@pytest.mark.parametrize("name", ["stranger.a b", "stranger.\u00e9", "stranger.\0"])
async def test_a_name_that_the_library_refuses_is_unroutable(opened: Open, name: str) -> None:
    broker = await opened()
    assert await broker.publish([(Address(name), a_message()), (REQUESTS, a_message())]) == [
        PublishResult.UNROUTABLE,
        VALID_BODY,
    ]


async def test_a_permanently_deleted_queue_eventually_becomes_unroutable(
    opened: Open,
    operator: aiormq.abc.AbstractChannel,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner, caller = await opened(STRANGER), await opened()
    await send(caller, request_queue(STRANGER), a_message())
    await owner.close()
    await operator.queue_delete(f"{namespace}.{request_queue(STRANGER)}")
    assert await caller.publish([(request_queue(STRANGER), a_message())]) == [LATER]
    monkeypatch.setattr(broker_module, "_REDECLARE_GRACE", 0.0)
    assert await caller.publish([(request_queue(STRANGER), a_message())]) == [
        PublishResult.UNROUTABLE
    ]


@pytest.mark.parametrize("address", [REQUESTS, PRIVATE])
async def test_new_queues_reject_messages_above_their_limit(
    opened: Open, address: Address
) -> None:
    broker = await opened(max_length=3)
    results = [(await broker.publish([(address, a_message())]))[0] for _ in range(10)]
    assert results[:3] == [VALID_BODY] * 3
    assert results[-1] is LATER
    assert await broker.publish([(DEAD, a_message())]) == [VALID_BODY]


async def test_the_oldest_dead_letters_are_dropped(opened: Open) -> None:
    broker, inbox = await opened(max_length=3), Inbox()
    await send(broker, DEAD, *(a_message(str(number).encode()) for number in range(10)))
    await until_depth(broker, DEAD, 3)
    await broker.consume(DEAD, 10, inbox)
    assert [delivery.message.body for delivery in await inbox.take(3)] == [b"7", b"8", b"9"]


async def test_dead_letters_that_are_refused_are_left_to_the_broker(
    opened: Open, operator: aiormq.abc.AbstractChannel, namespace: str
) -> None:
    """A full queue that belongs to an operator must not delay consumers."""
    arguments: dict[str, Any] = {
        "x-queue-type": "quorum",
        "x-max-length": 1,
        "x-overflow": "reject-publish",
    }
    await operator.queue_declare(f"{namespace}.{DEAD}", durable=True, arguments=arguments)
    broker, inbox = await opened(publish_timeout=timedelta(seconds=5)), Inbox()
    while (await broker.publish([(DEAD, a_message())]))[0] is VALID_BODY:
        pass
    await broker.consume(REQUESTS, 1, inbox)
    await send(broker, REQUESTS, a_message(b"bad"), a_message(b"good"))
    assert await (await inbox.next()).dead_letter("no")
    assert (await inbox.next()).message.body == b"good"


@agent("echo", version="1")
async def echo(ctx: TaskExecutionContext, size: int) -> str:
    return "x" * size


@pytest.mark.usefixtures("small_messages")
@pytest.mark.parametrize("durable", [False, True])
async def test_a_result_above_the_broker_limit_is_answered_with_a_failure(
    opened: Open, own_rabbit: RabbitServer, namespace: str, tmp_path: Path, durable: bool
) -> None:
    """Each request for it fails with an answer, and other results still arrive."""
    url = f"sqlite:///{tmp_path / 'tasks.db'}"
    settings = AgentSettings(
        name="echo",
        entrypoint="any:thing",
        stateless_checkpointing=durable,
        session_service="sql" if durable else "memory",
        session_db_url=url,
    )
    if durable:
        await asyncio.to_thread(migrations.upgrade, url)
    broker = await opened(AgentName("echo"))
    worker = build_worker(echo, settings, namespace, broker, RecordedEvents(), settings.options())
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(worker.run(stop))
        async with PlainClient(
            RabbitMqBroker(
                own_rabbit.url, namespace=namespace, publish_timeout=SLOW_BROKER_TIMEOUT
            )
        ) as client:
            for _ in range(2):
                replies = [
                    await client.send("echo", size) for size in (1, 50_000, 2, 60_000, 70_000, 3)
                ]
                outcomes = [(await reply).outcome for reply in replies]
                assert [isinstance(outcome, Ok) for outcome in outcomes] == [
                    True,
                    False,
                    True,
                    False,
                    False,
                    True,
                ]
        stop.set()
        await running
