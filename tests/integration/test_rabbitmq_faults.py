"""When RabbitMQ or the network fails, no message is lost and consumers reconnect."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any, cast

import aio_pika
import aiormq
import pytest
from aiormq.abc import DeliveredMessage
from yarl import URL

from idle_loop import idle
from meshpoint.adapters.rabbitmq import RabbitMqBroker, connection
from meshpoint.adapters.rabbitmq.connection import translate_errors
from meshpoint.adapters.rabbitmq.consumer import Consumer
from meshpoint.adapters.rabbitmq.subscription import RabbitSubscription
from meshpoint.errors import BrokerUnavailable, ConfigurationError
from meshpoint.model.ids import ReplicaId
from meshpoint.model.messages import Header, dead_letter_queue, private_queue, request_queue
from meshpoint.ports.broker import PublishResult
from meshpoint.testing.conformance.broker import (
    AGENT,
    REQUESTS,
    STRANGER,
    Inbox,
    a_message,
    send,
    until_depth,
)
from servers import Proxy, RabbitServer

Connect = Callable[..., Awaitable[RabbitMqBroker]]


@pytest.fixture
async def connect(own_rabbit: RabbitServer, namespace: str) -> AsyncIterator[Connect]:
    async with AsyncExitStack() as stack:

        async def connect(url: str = own_rabbit.url, **options: Any) -> RabbitMqBroker:
            broker = RabbitMqBroker(url, namespace=namespace, **options)
            await broker.open()
            stack.push_async_callback(broker.close)
            await broker.declare(AGENT)
            return broker

        yield connect


async def wait_until_up(broker: RabbitMqBroker, up: bool = True) -> None:
    while broker.connected is not up:  # noqa: ASYNC110  a broker has no event for it
        await asyncio.sleep(0.01)


async def test_consumers_and_messages_survive_a_broker_restart(
    own_rabbit: RabbitServer, connect: Connect
) -> None:
    broker, inbox, private, replica = await connect(), Inbox(), Inbox(), ReplicaId("r1")
    await broker.declare(AGENT, replica)
    await broker.consume(REQUESTS, 2, inbox)
    await broker.consume(private_queue(AGENT, replica), 2, private)
    # Kill only in the second round: RabbitMQ loses a quorum queue declared just before a kill.
    for end in (own_rabbit.stop, own_rabbit.kill):
        await send(
            broker, REQUESTS, a_message(b"held"), a_message(b"held too"), a_message(b"waiting")
        )
        lost = await inbox.take(2)

        await end()
        with pytest.raises(BrokerUnavailable):
            await broker.publish([(REQUESTS, a_message())])
        assert not broker.connected
        await own_rabbit.start()
        await wait_until_up(broker)

        assert [await item.ack() for item in lost] == [False, False]
        await send(broker, REQUESTS, a_message(b"after"))
        await broker.broadcast(AGENT, a_message(b"to all"))
        seen = {}
        for _ in range(4):
            delivery = await inbox.next()
            seen[delivery.message.body] = delivery.delivery_count
            assert await delivery.ack()
        assert seen == {b"held": 2, b"held too": 2, b"waiting": 1, b"after": 1}
        notice = await private.next()
        assert notice.message.body == b"to all"
        assert await notice.ack()


async def test_consumers_reconnect_when_the_network_returns(
    connect: Connect, own_rabbit: RabbitServer
) -> None:
    async with Proxy(own_rabbit.url) as proxy:
        broker, inbox = await connect(proxy.url), Inbox()
        await broker.consume(REQUESTS, 1, inbox)
        proxy.refuse()
        with pytest.raises(BrokerUnavailable):
            await broker.publish([(REQUESTS, a_message())])
        assert not broker.connected
        await proxy.accept()
        await wait_until_up(broker)
        await send(broker, REQUESTS, a_message())
        assert await (await inbox.next()).ack()
        await broker.close()


async def test_connections_are_reestablished_without_use(
    connect: Connect, own_rabbit: RabbitServer
) -> None:
    async with Proxy(own_rabbit.url) as proxy:
        broker = await connect(proxy.url)
        proxy.refuse()
        await wait_until_up(broker, False)
        await proxy.accept()
        await wait_until_up(broker)
        await broker.close()


async def test_a_silent_network_is_detected_by_publishing(
    connect: Connect, own_rabbit: RabbitServer
) -> None:
    async with Proxy(own_rabbit.url) as proxy:
        broker = await connect(proxy.url, publish_timeout=timedelta(seconds=1))
        await send(broker, REQUESTS, a_message())
        before = proxy.connections
        proxy.silence()
        with pytest.raises(BrokerUnavailable):
            await broker.publish([(REQUESTS, a_message())])
        proxy.resume()
        await send(broker, REQUESTS, a_message())
        assert proxy.connections > before
        await broker.close()


async def test_a_late_channel_close_does_not_drop_the_connection(
    connect: Connect, own_rabbit: RabbitServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_CLOSE_TIMEOUT", 0.05)
    async with Proxy(own_rabbit.url) as proxy:
        broker = await connect(proxy.url)
        opened = await broker._publish_connection.open_channel()
        connection_count, before = (
            await broker._publish_connection.ensure_connected(),
            proxy.connections,
        )
        proxy.hold_responses()
        await connection.close_quietly(opened.channel)
        proxy.resume()
        await asyncio.wait({opened.channel.closing})  # the broker has responded
        await send(broker, REQUESTS, a_message())
        assert await broker._publish_connection.ensure_connected() is connection_count
        assert proxy.connections == before
        await broker.close()


async def test_deliveries_to_an_abandoned_consumer_do_not_block_the_connection(
    connect: Connect, own_rabbit: RabbitServer
) -> None:
    """More deliveries arrive than the library queues for a channel that nothing reads any more."""
    async with Proxy(own_rabbit.url) as proxy:
        broker, inbox = await connect(proxy.url, publish_timeout=timedelta(seconds=1)), Inbox()
        subscription = await broker.consume(REQUESTS, 40, inbox)
        before, abandoned = proxy.connections, subscription._consumer
        assert abandoned is not None
        proxy.hold_responses()
        await send(await connect(), REQUESTS, *[a_message() for _ in range(40)])
        # gives up the consumer, because the broker does not respond in time
        await subscription.resize(80)
        await asyncio.wait({abandoned.channel.closing})
        proxy.resume()
        for _ in range(40):
            assert await (await inbox.next()).ack()
        await until_depth(broker, REQUESTS, 0)
        assert proxy.connections == before
        await broker.close()


@pytest.mark.parametrize("step", ["resize", "cancel"])
async def test_a_caller_cancelled_before_the_response_loses_no_delivery(
    connect: Connect, own_rabbit: RabbitServer, step: str
) -> None:
    """The library closes a cancelled call's channel, which would requeue its unacked messages."""
    async with Proxy(own_rabbit.url) as proxy:
        broker, inbox = await connect(proxy.url), Inbox()
        subscription = await broker.consume(REQUESTS, 2, inbox)
        await send(broker, REQUESTS, a_message())
        deliveries = await inbox.next()
        proxy.hold_responses()
        pending = asyncio.ensure_future(
            subscription.resize(1) if step == "resize" else subscription.cancel()
        )
        await _wait_until_sent(subscription)
        pending.cancel()
        await asyncio.wait({pending})
        assert pending.cancelled()
        proxy.resume()
        await subscription.cancel()
        assert not deliveries.lost
        assert await deliveries.ack()
        await broker.close()


async def test_pending_broker_calls_end_with_the_connection(
    connect: Connect,
    own_rabbit: RabbitServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(connection, "_CLOSE_TIMEOUT", 0.05)
    async with Proxy(own_rabbit.url) as proxy:
        broker = await connect(proxy.url)
        subscription = await broker.consume(REQUESTS, 2, Inbox())
        proxy.hold_responses()
        pending = asyncio.ensure_future(subscription.resize(1))
        await _wait_until_sent(subscription)
        pending.cancel()
        await broker.close()
        await asyncio.gather(*subscription._adjustments, return_exceptions=True)
        proxy.resume()
    del pending  # its traceback refers to the adjustment
    gc.collect()
    assert "never retrieved" not in caplog.text


async def _wait_until_sent(subscription: RabbitSubscription) -> None:
    """Wait until a request to the broker is in progress."""
    await idle()
    assert subscription._consumer is not None
    assert subscription._consumer._adjust_lock.locked()


async def test_a_consumer_abandoned_while_starting_takes_nothing(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its deliveries would stay unsettled until the connection closes."""
    broker, inbox, adjust = await connect(), Inbox(), Consumer.adjust

    async def abandoned(consumer: Consumer, limit: int) -> None:
        await adjust(consumer, limit)
        consuming.cancel()  # just as the broker's response arrives
        await asyncio.sleep(0)

    with monkeypatch.context() as patch:
        patch.setattr(Consumer, "adjust", abandoned)
        consuming = asyncio.ensure_future(broker.consume(REQUESTS, 1, Inbox()))
        await asyncio.gather(consuming, return_exceptions=True)
    assert consuming.cancelled()

    await send(broker, REQUESTS, a_message(), a_message())
    await broker.consume(REQUESTS, 10, inbox)
    await inbox.take(2)


async def test_a_connection_lost_during_confirms_decides_every_message(
    connect: Connect, own_rabbit: RabbitServer
) -> None:
    async with Proxy(own_rabbit.url) as proxy:
        broker, sent = await connect(proxy.url), [a_message() for _ in range(300)]
        await send(broker, REQUESTS, a_message())
        proxy.silence()
        publishing = asyncio.create_task(broker.publish([(REQUESTS, message) for message in sent]))
        await asyncio.sleep(0)
        proxy.cut()
        proxy.resume()
        with pytest.raises(BrokerUnavailable):
            await publishing
        assert (
            await broker.publish([(REQUESTS, message) for message in sent])
            == [PublishResult.ACCEPTED] * 300
        )
        await broker.close()


async def test_closing_leaves_no_task_when_the_broker_stops_reading(
    own_rabbit: RabbitServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_CLOSE_TIMEOUT", 0.05)
    before = asyncio.all_tasks()
    async with Proxy(own_rabbit.url) as proxy:
        connection_count = await connection.connect(proxy.url)
        proxy.silence()
        connection_count.transport.write(bytes(50_000_000))  # more than the socket buffers hold

        await connection_count.close()

        assert connection_count.underlay.is_closed
    assert asyncio.all_tasks() == before


async def test_a_cancelled_close_leaves_no_task(own_rabbit: RabbitServer) -> None:
    before = asyncio.all_tasks()
    async with Proxy(own_rabbit.url) as proxy:
        connection_count = await connection.connect(proxy.url)
        proxy.silence()
        closing = asyncio.create_task(connection_count.close())
        await asyncio.sleep(0)

        closing.cancel()
        await asyncio.wait({closing})

        assert closing.cancelled()
        assert connection_count.underlay.is_closed
    assert asyncio.all_tasks() == before


async def test_an_open_that_is_cancelled_between_its_connections_leaves_none(
    own_rabbit: RabbitServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, original, opened = (
        asyncio.all_tasks(),
        connection.Connection.open,
        list[connection.Connection](),
    )

    async def cancel_after_open(self: connection.Connection) -> None:
        await original(self)
        opened.append(self)
        opening.cancel()

    monkeypatch.setattr(connection.Connection, "open", cancel_after_open)
    broker = RabbitMqBroker(own_rabbit.url, namespace=namespace)
    opening = asyncio.create_task(broker.open())
    await asyncio.wait({opening})

    assert opening.cancelled()
    assert not any(link.up for link in opened)
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("turns", range(5))
def test_an_event_loop_can_end_while_a_connection_closes(
    own_rabbit: RabbitServer, turns: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def close_halfway() -> None:
        connection_count = await connection.connect(own_rabbit.url)
        closing = asyncio.create_task(connection_count.close())
        reader_task = cast(asyncio.Task[Any], connection_count.underlay._reader_task)
        await asyncio.wait({reader_task})
        for _ in range(turns):
            await asyncio.sleep(0)
        assert not closing.done()

    asyncio.run(close_halfway())

    gc.collect()
    assert caplog.messages == []


async def test_an_attempt_cancelled_after_the_handshake_leaves_no_connection(
    own_rabbit: RabbitServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, opened = asyncio.all_tasks(), list[aiormq.Connection]()
    original = aiormq.Connection.connect

    async def cancel_after_open(self: aiormq.Connection, *args: Any) -> bool:
        await original(self, *args)
        opened.append(self)
        attempt.cancel()
        return True

    monkeypatch.setattr(aiormq.Connection, "connect", cancel_after_open)
    attempt = asyncio.create_task(connection.connect(own_rabbit.url))
    await asyncio.wait({attempt})
    assert attempt.cancelled()
    await asyncio.wait({opened[0].closing})
    if closing := asyncio.all_tasks() - before:
        await asyncio.wait(closing)
    assert asyncio.all_tasks() == before


async def test_a_poison_message_is_dead_lettered(connect: Connect) -> None:
    broker, inbox, dead_letters = await connect(delivery_limit=3), Inbox(), Inbox()
    poison = a_message(b"poison")
    await broker.consume(REQUESTS, 1, inbox)
    await broker.consume(dead_letter_queue(AGENT), 1, dead_letters)
    await send(broker, REQUESTS, poison)
    for count in (1, 2, 3, 4):
        delivery = await inbox.next()
        assert delivery.delivery_count == count
        assert await delivery.requeue()
    dead_letter = await dead_letters.next()
    assert dead_letter.message.body == b"poison"
    assert dead_letter.message.message_id == poison.message_id
    assert dead_letter.message.headers == {Header.DEAD_REASON: "broker: delivery_limit"}


async def test_an_unreadable_message_is_dead_lettered(
    connect: Connect, own_rabbit: RabbitServer, namespace: str
) -> None:
    broker, inbox = await connect(), Inbox()
    await broker.consume(REQUESTS, 1, inbox)
    stranger = await aiormq.connect(own_rabbit.url)
    channel = await stranger.channel()
    properties = aiormq.spec.Basic.Properties(
        message_id="m", correlation_id="c", app_id="a", message_type="letter"
    )
    await channel.basic_publish(
        b"?", exchange=f"{namespace}.mesh", routing_key=REQUESTS, properties=properties
    )
    await stranger.close()
    await send(broker, REQUESTS, a_message(b"readable"))
    assert (await inbox.next()).message.body == b"readable"
    await until_depth(broker, dead_letter_queue(AGENT), 1)
    found = await _get_message(own_rabbit.url, f"{namespace}.{dead_letter_queue(AGENT)}")
    assert found.body == b"?"
    assert (found.header.properties.headers or {})[
        Header.DEAD_REASON
    ] == "property type: 'letter' is not known"


async def test_a_raised_limit_takes_only_the_difference(connect: Connect) -> None:
    broker, inbox = await connect(), Inbox()
    subscription = await broker.consume(REQUESTS, 3, inbox)
    await send(broker, REQUESTS, *(a_message() for _ in range(10)))
    deliveries = await inbox.take(3)
    await subscription.resize(4)
    await inbox.next()
    await until_depth(broker, REQUESTS, 6)
    await subscription.resize(1)
    assert [await delivery.ack() for delivery in deliveries] == [True] * 3
    await until_depth(broker, REQUESTS, 6)
    assert inbox.empty()


async def test_a_lowered_limit_waits_until_enough_is_settled(connect: Connect) -> None:
    broker, inbox = await connect(), Inbox()
    subscription = await broker.consume(REQUESTS, 4, inbox)
    await send(broker, REQUESTS, *(a_message() for _ in range(10)))
    deliveries = await inbox.take(4)
    await subscription.resize(2)
    for item in deliveries[:2]:
        assert await item.ack()
    await until_depth(broker, REQUESTS, 6)
    assert await deliveries[2].ack()
    await inbox.next()
    await until_depth(broker, REQUESTS, 5)
    assert await deliveries[3].ack()
    await inbox.next()
    assert inbox.empty()


async def test_a_limit_of_zero_takes_nothing(connect: Connect) -> None:
    broker, inbox = await connect(), Inbox()
    subscription = await broker.consume(REQUESTS, 0, inbox)
    await send(broker, REQUESTS, a_message())
    await until_depth(broker, REQUESTS, 1)
    assert inbox.empty()
    await subscription.resize(1)
    await inbox.next()


async def test_one_message_to_two_addresses_gets_two_results(connect: Connect) -> None:
    broker, message = await connect(), a_message()
    results = await broker.publish([(request_queue(STRANGER), message), (REQUESTS, message)])
    assert results == [PublishResult.UNROUTABLE, PublishResult.ACCEPTED]


async def test_a_message_is_not_unroutable_while_its_queue_is_there(
    connect: Connect, own_rabbit: RabbitServer, namespace: str
) -> None:
    """A broker that is shutting down loses its routes before its queues."""
    broker = await connect()
    operator = await aiormq.connect(own_rabbit.url)
    await (await operator.channel()).queue_unbind(
        f"{namespace}.{REQUESTS}", f"{namespace}.mesh", REQUESTS
    )
    await operator.close()
    assert await broker.publish([(REQUESTS, a_message())]) == [PublishResult.OVERLOADED]


async def test_an_abandoned_depth_query_ends_no_connection(
    connect: Connect, own_rabbit: RabbitServer
) -> None:
    """The broker closes the channel of a lookup for a missing queue.

    A cancelled call must not close it too.
    """
    async with Proxy(own_rabbit.url) as proxy:
        broker, inbox = await connect(proxy.url), Inbox()
        await broker.declare(AGENT)
        await broker.consume(REQUESTS, 1, inbox)
        before = proxy.connections
        for yield_count in range(300):
            depth_call = asyncio.ensure_future(
                broker.depth(private_queue(AGENT, ReplicaId(f"gone-{yield_count}")))
            )
            for _ in range(yield_count):
                await asyncio.sleep(0)
            depth_call.cancel()
        assert await broker.depth(private_queue(AGENT, ReplicaId("gone"))) is None
        await send(broker, REQUESTS, a_message())
        assert (await inbox.next()).delivery_count == 1
        assert proxy.connections == before


async def test_a_broker_that_drops_the_connection_is_unavailable() -> None:
    """aiormq then fails to connect with `StopAsyncIteration`."""
    with pytest.raises(BrokerUnavailable), translate_errors("connecting"):
        raise StopAsyncIteration


async def test_a_full_queue_rejects_messages(connect: Connect) -> None:
    broker = await connect(max_length=2)
    results = [(await broker.publish([(REQUESTS, a_message())]))[0] for _ in range(8)]
    assert results[:2] == [PublishResult.ACCEPTED] * 2
    assert results[-1] is PublishResult.OVERLOADED


async def test_a_deleted_queue_is_declared_and_consumed_again(
    connect: Connect, own_rabbit: RabbitServer, namespace: str
) -> None:
    broker, inbox = await connect(), Inbox()
    await broker.consume(REQUESTS, 1, inbox)
    operator = await aiormq.connect(own_rabbit.url)
    await (await operator.channel()).queue_delete(f"{namespace}.{REQUESTS}")
    await operator.close()
    await wait_until_up(broker, False)
    await wait_until_up(broker)
    await send(broker, REQUESTS, a_message())
    await inbox.next()


async def test_a_queue_with_other_arguments_is_used_unchanged(
    connect: Connect, caplog: pytest.LogCaptureFixture, namespace: str
) -> None:
    """An upgrade must never stop at a queue with other arguments."""
    await connect(delivery_limit=20)
    broker, inbox = await connect(delivery_limit=30, max_length=7), Inbox()
    await broker.declare(AGENT)
    await broker.consume(REQUESTS, 1, inbox)
    await send(broker, REQUESTS, a_message())
    await inbox.next()
    warnings_ = [
        record.getMessage()
        for record in caplog.records
        if "keeps its existing arguments" in record.getMessage()
    ]
    assert sum(f"{namespace}.travel.resp" in line for line in warnings_) == 1


async def test_a_refused_login_is_a_configuration_error(
    own_rabbit: RabbitServer, namespace: str
) -> None:
    broker = RabbitMqBroker(
        own_rabbit.url.replace("guest:guest", "guest:wrong"), namespace=namespace
    )
    with pytest.raises(ConfigurationError, match="refuses the login"):
        await broker.open()


async def test_a_missing_virtual_host_is_named(own_rabbit: RabbitServer, namespace: str) -> None:
    broker = RabbitMqBroker(own_rabbit.url + "nowhere", namespace=namespace)
    with pytest.raises(BrokerUnavailable, match="NOT_ALLOWED - vhost nowhere not found"):
        await broker.open()


async def test_a_limit_of_the_broker_on_queues_is_named(
    own_rabbit: RabbitServer, namespace: str
) -> None:
    await own_rabbit.control("add_vhost", "small")
    try:
        await own_rabbit.control("set_permissions", "-p", "small", "guest", ".*", ".*", ".*")
        await own_rabbit.control("set_vhost_limits", "-p", "small", '{"max-queues": 1}')
        broker = RabbitMqBroker(own_rabbit.url + "small", namespace=namespace)
        await broker.open()
        with pytest.raises(ConfigurationError, match=r"refuses the queue .* queue limit"):
            await broker.declare(AGENT, None)
        await broker.close()
    finally:
        await own_rabbit.control("delete_vhost", "small")


async def test_a_lost_database_marker_is_set_again(connect: Connect) -> None:
    broker, other = await connect(), await connect()
    await broker.mark_database(AGENT)
    await other.remove_database_marker(AGENT)
    await broker._redeclare_all()
    assert await other.has_database_marker(AGENT)
    await broker.remove_database_marker(AGENT)
    await broker._redeclare_all()
    assert not await other.has_database_marker(AGENT)


async def test_a_database_marker_survives_the_server(
    connect: Connect, own_rabbit: RabbitServer
) -> None:
    broker = await connect()
    await broker.mark_database(AGENT)
    await broker.close()
    await own_rabbit.stop()
    await own_rabbit.start()
    assert await (await connect()).has_database_marker(AGENT)


async def test_a_login_that_may_not_set_the_marker_is_warned(
    connect: Connect, own_rabbit: RabbitServer, caplog: pytest.LogCaptureFixture
) -> None:
    await own_rabbit.add_user("reader", "secret", configure="^$")
    try:
        guest = await connect()
        broker = await connect(own_rabbit.url.replace("guest:guest", "reader:secret"))
        assert await broker.mark_database(AGENT)
        assert not await broker.has_database_marker(AGENT)
        assert "grant configure on that name" in caplog.text
        await guest.mark_database(AGENT)
        assert await broker.has_database_marker(AGENT)
        assert not await broker.mark_database(AGENT)
        with pytest.raises(ConfigurationError, match="may not delete"):
            await broker.remove_database_marker(AGENT)
    finally:
        await own_rabbit.delete_user("reader")


async def test_a_silent_server_is_named_in_the_error(namespace: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url, timeout = f"amqp://127.0.0.1:{silent.getsockname()[1]}/", timedelta(seconds=0.1)
        with pytest.raises(BrokerUnavailable, match="no answer in time"):
            await RabbitMqBroker(url, namespace=namespace, publish_timeout=timeout).open()


async def test_a_closed_port_is_reported_as_unavailable(namespace: str) -> None:
    broker = RabbitMqBroker("amqp://127.0.0.1:1/", namespace=namespace)
    with pytest.raises(BrokerUnavailable):
        await broker.open()
    assert not broker.connected


async def test_a_sender_name_other_than_the_login_is_refused(connect: Connect) -> None:
    broker = await connect(user_id="mallory")
    with pytest.raises(ConfigurationError, match="login"):
        await broker.publish([(REQUESTS, a_message())])


async def test_consuming_an_undeclared_queue_is_a_configuration_error(connect: Connect) -> None:
    broker = await connect()
    with pytest.raises(ConfigurationError, match=r"flights\.req"):
        await broker.consume(request_queue(STRANGER), 1, Inbox())


async def test_users_can_create_the_aio_pika_connections(connect: Connect) -> None:
    """Users do so to instrument connections, or to set options that a URL cannot express."""
    connections: list[aio_pika.Connection] = []

    class Instrumented(aio_pika.Connection):
        pass

    def make(url: URL) -> aio_pika.Connection:
        connections.append(Instrumented(url, client_properties={"product": "mine"}))
        return connections[-1]

    broker, inbox = await connect(make_connection=make), Inbox()
    await broker.consume(REQUESTS, 1, inbox)
    await send(broker, REQUESTS, a_message())
    assert await (await inbox.next()).ack()
    assert len(connections) == 2
    assert not any(connection.is_closed for connection in connections)
    await broker.close()
    assert all(connection.is_closed for connection in connections)


async def test_a_killed_broker_is_detected_through_aio_pika(own_rabbit: RabbitServer) -> None:
    connection, closed = await aio_pika.connect(own_rabbit.url), asyncio.Event()
    connection.close_callbacks.add(lambda *_: closed.set())
    await own_rabbit.kill()
    await closed.wait()
    await connection.close()
    await own_rabbit.start()


async def test_a_blocked_queue_delays_no_other(
    connect: Connect, own_rabbit: RabbitServer, namespace: str
) -> None:
    broker = await connect(publish_timeout=timedelta(seconds=2))
    await broker.declare(STRANGER)
    queue = f"erlang:whereis('%2F_{namespace}.{request_queue(STRANGER)}')"
    await own_rabbit.evaluate(f"sys:suspend({queue}).")
    assert await broker.publish([(request_queue(STRANGER), a_message())]) == [
        PublishResult.OVERLOADED
    ]
    assert broker.connected
    await send(broker, REQUESTS, a_message())
    await own_rabbit.evaluate(f"sys:resume({queue}).")
    await send(broker, request_queue(STRANGER), a_message())


async def _get_message(url: str, queue: str) -> DeliveredMessage:
    connection = await aiormq.connect(url)
    try:
        return await (await connection.channel()).basic_get(queue, no_ack=True)
    finally:
        await connection.close()
