"""Batching of writes on RabbitMQ connections, and what the broker's answers do."""

from __future__ import annotations

import asyncio
import gc
import struct
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import pytest
from aiormq.exceptions import AMQPConnectionError

from idle_loop import idle
from meshpoint.adapters.rabbitmq.connection import OpenChannel
from meshpoint.adapters.rabbitmq.consumer import Consumer
from meshpoint.adapters.rabbitmq.frames import RawDelivery, _BatchingWriter
from meshpoint.adapters.rabbitmq.publisher import OutboundMessage, Publisher
from meshpoint.errors import BrokerUnavailable
from meshpoint.ports.broker import PublishResult


class RecordingTransport(asyncio.WriteTransport):
    """Records every call made on it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[object] = []
        self.closing = False

    def write(self, data: Any) -> None:
        self.calls.append(bytes(data))

    def write_eof(self) -> None:
        self.calls.append("eof")

    def close(self) -> None:
        self.calls.append("close")
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing


@pytest.fixture
async def wire() -> AsyncIterator[tuple[_BatchingWriter, RecordingTransport]]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop)
    transport = RecordingTransport()
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    protocol.connection_made(transport)
    yield _BatchingWriter(transport, protocol, reader, loop), transport
    transport.closing = True


async def test_frames_of_one_loop_iteration_are_one_write(
    wire: tuple[_BatchingWriter, RecordingTransport],
) -> None:
    writer, transport = wire
    for frame in (b"a", b"b", b"c"):
        writer.write(frame)
    assert transport.calls == []
    await idle()
    assert transport.calls == [b"abc"]
    writer.write(b"d")
    await idle()
    assert transport.calls == [b"abc", b"d"]


@pytest.mark.parametrize(
    ("end", "last"), [(_BatchingWriter.close, "close"), (_BatchingWriter.write_eof, "eof")]
)
async def test_written_data_is_flushed_before_the_end(
    wire: tuple[_BatchingWriter, RecordingTransport],
    end: Callable[[_BatchingWriter], None],
    last: str,
) -> None:
    writer, transport = wire
    writer.write(b"a")
    end(writer)
    await idle()
    assert transport.calls == [b"a", last]


async def test_a_drain_flushes_immediately(
    wire: tuple[_BatchingWriter, RecordingTransport],
) -> None:
    writer, transport = wire
    writer.write(b"a")
    await writer.drain()
    assert transport.calls[0] == b"a"


async def test_writes_to_a_lost_connection_are_dropped(
    wire: tuple[_BatchingWriter, RecordingTransport],
) -> None:
    writer, transport = wire
    writer.write(b"a")
    transport.closing = True
    await idle()
    assert transport.calls == []


class FakeChannel:
    """Stub of the library's channel."""

    is_closed = False
    number = 7

    def __init__(self) -> None:
        self.on_consumer_cancel_callbacks: set[object] = set()
        self.closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        self.flowing = asyncio.Event()

    async def basic_qos(self, *, prefetch_count: int) -> None:
        pass

    async def flow(self, *, active: bool) -> None:
        await self.flowing.wait()
        self.flowing.clear()

    async def basic_consume(self, queue: str, take: object, consumer_tag: str) -> None:
        self.tag = consumer_tag.encode()


class AckRecorder:
    """Stub of the connection that decodes written acks."""

    def __init__(self) -> None:
        self.acks: list[tuple[int, bool]] = []
        self.handler: Any = None

    def route(self, channel: int, handler: object) -> None:
        self.handler = handler

    def write(self, frame: bytes) -> None:
        kind, channel, size, which, tag, bits, end = struct.unpack(">BHIIQBB", frame)
        if which == 60 << 16 | 120:  # a nack
            return
        assert (kind, channel, size, which, end) == (1, 7, 13, 60 << 16 | 80, 0xCE)
        self.acks.append((tag, bool(bits)))


async def consume_deliveries(count: int, prefetch: int) -> tuple[Consumer, AckRecorder]:
    """A consumer that took `count` deliveries, and the acks it writes."""
    channel: Any = FakeChannel()
    wire: Any = AckRecorder()
    consumer = Consumer(OpenChannel(channel, wire), "queue", lambda arrived: None, lambda: None)
    await consumer.adjust(prefetch)
    for tag in range(1, count + 1):
        consumer._receive(RawDelivery(channel.tag, tag, False, b"key", b"", b""))
    return consumer, wire


@pytest.fixture
def endless_ack_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A delayed ack is sent only together with others, because its timer never fires."""
    monkeypatch.setattr("meshpoint.adapters.rabbitmq.consumer._ACK_DELAY", 3600)


@pytest.mark.usefixtures("endless_ack_delay")
async def test_acks_of_half_the_prefetch_are_sent_at_once_as_one() -> None:
    consumer, wire = await consume_deliveries(4, prefetch=8)
    for tag in (1, 3, 2):
        consumer.ack(tag)
        await idle()
    assert wire.acks == []
    consumer.ack(4)
    assert wire.acks == [(4, True)]
    assert consumer.idle


@pytest.mark.usefixtures("endless_ack_delay")
async def test_a_prefetch_of_one_is_acked_at_once() -> None:
    consumer, wire = await consume_deliveries(1, prefetch=1)
    consumer.ack(1)
    assert wire.acks == [(1, True)]


@pytest.mark.usefixtures("endless_ack_delay")
async def test_unacked_deliveries_do_not_delay_other_acks() -> None:
    consumer, wire = await consume_deliveries(
        10, prefetch=10
    )  # running segments hold eight of them
    consumer.ack(9)
    assert wire.acks == [(9, False)]


@pytest.mark.usefixtures("endless_ack_delay")
async def test_closing_does_not_wait_for_more_acks() -> None:
    consumer, wire = await consume_deliveries(3, prefetch=100)
    consumer.ack(2)
    consumer.ack(3)
    consumer.flush_acks()
    assert wire.acks == [(2, False), (3, False)]
    assert not consumer.idle


async def test_a_few_acks_are_sent_after_a_short_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshpoint.adapters.rabbitmq.consumer._ACK_DELAY", 0)
    consumer, wire = await consume_deliveries(2, prefetch=100)
    consumer.ack(1)
    assert wire.acks == []
    await idle()
    assert wire.acks == [(1, True)]


async def test_acks_are_not_written_to_a_channel_the_broker_closed() -> None:
    """The library replies itself, and any later frame would close the shared connection."""
    consumer, wire = await consume_deliveries(2, prefetch=2)
    assert not wire.handler(1, struct.pack(">HH", 20, 40))
    assert consumer.lost
    consumer.ack(1)
    consumer.nack(2)
    consumer.flush_acks()
    assert wire.acks == []


async def test_a_consumer_denies_nothing_until_the_broker_has_what_it_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until then, the request is in no queue and in no replica."""
    now = 0.0
    monkeypatch.setattr("meshpoint.adapters.rabbitmq.consumer.monotonic", lambda: now)
    consumer, _ = await consume_deliveries(3, prefetch=3)
    channel: Any = consumer.channel
    now = 100.0
    assert consumer.count_since(50.0) == 1
    consumer.nack(1)
    await idle()
    consumer.nack(2)  # after the first question
    for now in (200.0, 300.0):  # the network stalls
        assert consumer.count_since(now) == 0
        channel.flowing.set()
        await idle()
    assert (consumer.count_since(299.0), consumer.count_since(301.0)) == (0, 1)
    consumer.nack(3)
    now = 400.0
    assert consumer.count_since(now) == 0
    channel.flowing.set()
    await idle()
    assert consumer.count_since(now) == 1


class RecordingPublisher(Publisher):
    """A publisher whose message keys script the broker's answers; counts abandoned channels."""

    def __init__(self) -> None:
        self_as_any: Any = self
        super().__init__(self_as_any, self_as_any, timedelta(seconds=0.04), self_as_any)
        self.abandoned_count = 0
        self.opened = self.channel = self._channel = self.current = self_as_any
        self._late: list[asyncio.Future[PublishResult]] = []

    async def _ensure_channel(self) -> Any:
        return self

    def send(self, message: OutboundMessage) -> asyncio.Future[PublishResult]:
        result: asyncio.Future[PublishResult] = asyncio.get_running_loop().create_future()
        if message.routing_key == b"lost":
            result.set_exception(AMQPConnectionError("the channel is gone"))
        elif message.routing_key == b"late":
            self._late.append(result)
        elif message.routing_key != b"silent":
            result.set_result(PublishResult.ACCEPTED)
        return result

    async def _probe(self) -> bool:
        for result in self._late:
            asyncio.get_running_loop().call_soon(result.set_result, PublishResult.ACCEPTED)
        return True

    def stop_sending(self) -> None:
        pass

    def close_in_background(self, channel: object) -> None:
        self.abandoned_count += 1


def create_outbound(*keys: bytes) -> list[OutboundMessage]:
    return [OutboundMessage(key, None, b"", b"") for key in keys]


async def test_a_batch_lost_as_a_whole_is_reported_once() -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: complaints.append(context)
    )
    with pytest.raises(BrokerUnavailable):
        await RecordingPublisher().publish(create_outbound(b"lost", b"lost", b"lost"))
    gc.collect()
    assert complaints == []


@pytest.mark.parametrize("keys", [[b"silent"], [b"taken", b"silent", b"taken"]])
async def test_a_silent_channel_is_abandoned(keys: list[bytes]) -> None:
    publisher = RecordingPublisher()
    results = await publisher.publish(create_outbound(*keys))
    assert results == [
        PublishResult.OVERLOADED if key == b"silent" else PublishResult.ACCEPTED for key in keys
    ]
    assert publisher.abandoned_count == 1


async def test_a_message_that_a_slow_broker_confirms_late_is_accepted() -> None:
    assert (
        await RecordingPublisher().publish(create_outbound(b"late", b"late"))
        == [PublishResult.ACCEPTED] * 2
    )


async def test_a_silent_channel_is_abandoned_even_when_others_fail() -> None:
    publisher = RecordingPublisher()
    with pytest.raises(BrokerUnavailable):
        await publisher.publish(create_outbound(b"lost", b"silent"))
    assert publisher.abandoned_count == 1
