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

from meshpoint.adapters.rabbitmq.confirming import OutboundMessage
from meshpoint.adapters.rabbitmq.connection import OpenChannel
from meshpoint.adapters.rabbitmq.consumer import Consumer
from meshpoint.adapters.rabbitmq.frames import RawDelivery
from meshpoint.adapters.rabbitmq.publisher import Publisher
from meshpoint.adapters.rabbitmq.wire import _BatchingWriter
from meshpoint.errors import BrokerUnavailable
from meshpoint.ports.broker import Published


class Transport(asyncio.WriteTransport):
    """Records every call made on it."""

    def __init__(self) -> None:
        super().__init__()
        self.did: list[object] = []
        self.closing = False

    def write(self, data: Any) -> None:
        self.did.append(bytes(data))

    def write_eof(self) -> None:
        self.did.append("eof")

    def close(self) -> None:
        self.did.append("close")
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing


@pytest.fixture
async def wire() -> AsyncIterator[tuple[_BatchingWriter, Transport]]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop)
    transport = Transport()
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    protocol.connection_made(transport)
    yield _BatchingWriter(transport, protocol, reader, loop), transport
    transport.closing = True


async def test_frames_of_one_turn_are_one_write(wire: tuple[_BatchingWriter, Transport]) -> None:
    writer, transport = wire
    for frame in (b"a", b"b", b"c"):
        writer.write(frame)
    assert transport.did == []
    await asyncio.sleep(0)
    assert transport.did == [b"abc"]
    writer.write(b"d")
    await asyncio.sleep(0)
    assert transport.did == [b"abc", b"d"]


@pytest.mark.parametrize(("end", "last"), [(_BatchingWriter.close, "close"), (_BatchingWriter.write_eof, "eof")])
async def test_what_was_written_leaves_before_the_end(
    wire: tuple[_BatchingWriter, Transport], end: Callable[[_BatchingWriter], None], last: str
) -> None:
    writer, transport = wire
    writer.write(b"a")
    end(writer)
    await asyncio.sleep(0)
    assert transport.did == [b"a", last]


async def test_a_drain_does_not_wait_for_the_turn(wire: tuple[_BatchingWriter, Transport]) -> None:
    writer, transport = wire
    writer.write(b"a")
    await writer.drain()
    assert transport.did[0] == b"a"


async def test_a_lost_connection_swallows_the_rest(wire: tuple[_BatchingWriter, Transport]) -> None:
    writer, transport = wire
    writer.write(b"a")
    transport.closing = True
    await asyncio.sleep(0)
    assert transport.did == []


class Channel:
    """Stub of the library's channel."""

    is_closed = False
    number = 7

    def __init__(self) -> None:
        self.on_consumer_cancel_callbacks: set[object] = set()
        self.closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def basic_qos(self, *, prefetch_count: int) -> None:
        pass

    async def basic_consume(self, queue: str, take: object, consumer_tag: str) -> None:
        self.tag = consumer_tag.encode()


class Acks:
    """Stub of the connection that decodes written acks."""

    def __init__(self) -> None:
        self.acks: list[tuple[int, bool]] = []
        self.handler: Any = None

    def route(self, channel: int, handler: object) -> None:
        self.handler = handler

    def write(self, frame: bytes) -> None:
        kind, channel, size, which, tag, bits, end = struct.unpack(">BHIIQBB", frame)
        assert (kind, channel, size, which, end) == (1, 7, 13, 60 << 16 | 80, 0xCE)
        self.acks.append((tag, bool(bits)))


async def taking(count: int, prefetch: int) -> tuple[Consumer, Acks]:
    """A consumer that took `count` deliveries, and the acks it writes."""
    channel: Any = Channel()
    wire: Any = Acks()
    intake = Consumer(OpenChannel(channel, wire), "queue", lambda arrived: None, lambda: None)
    await intake.adjust(prefetch)
    for tag in range(1, count + 1):
        intake._receive(RawDelivery(channel.tag, tag, False, b"key", b"", b""))
    return intake, wire


@pytest.fixture
def no_delay_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A delayed ack is sent only together with others, because its timer never fires."""
    monkeypatch.setattr("meshpoint.adapters.rabbitmq.consumer._ACK_DELAY", 3600)


@pytest.mark.usefixtures("no_delay_ends")
async def test_acks_of_half_the_prefetch_leave_at_once_as_one() -> None:
    intake, wire = await taking(4, prefetch=8)
    for tag in (1, 3, 2):
        intake.ack(tag)
        await asyncio.sleep(0)
    assert wire.acks == []
    intake.ack(4)
    assert wire.acks == [(4, True)]
    assert intake.idle


@pytest.mark.usefixtures("no_delay_ends")
async def test_one_at_a_time_is_acked_at_once() -> None:
    intake, wire = await taking(1, prefetch=1)
    intake.ack(1)
    assert wire.acks == [(1, True)]


@pytest.mark.usefixtures("no_delay_ends")
async def test_deliveries_that_are_held_keep_no_ack_waiting() -> None:
    intake, wire = await taking(10, prefetch=10)  # running segments hold eight of them
    intake.ack(9)
    assert wire.acks == [(9, False)]


@pytest.mark.usefixtures("no_delay_ends")
async def test_the_end_does_not_wait_for_more_acks() -> None:
    intake, wire = await taking(3, prefetch=100)
    intake.ack(2)
    intake.ack(3)
    intake.flush_acks()
    assert wire.acks == [(2, False), (3, False)]
    assert not intake.idle


async def test_few_acks_leave_after_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshpoint.adapters.rabbitmq.consumer._ACK_DELAY", 0)
    intake, wire = await taking(2, prefetch=100)
    intake.ack(1)
    assert wire.acks == []
    while not wire.acks:
        await asyncio.sleep(0)
    assert wire.acks == [(1, True)]


async def test_nothing_is_written_to_a_channel_that_the_broker_has_closed() -> None:
    """The library replies itself, and any later frame would close the shared connection."""
    intake, wire = await taking(2, prefetch=2)
    assert not wire.handler(1, struct.pack(">HH", 20, 40))
    assert intake.lost
    intake.ack(1)
    intake.nack(2)
    intake.flush_acks()
    assert wire.acks == []


class Wanting(Publisher):
    """A publisher whose message keys script the broker's answers; counts abandoned channels."""

    def __init__(self) -> None:
        link: Any = self
        super().__init__(link, link, timedelta(seconds=0.04), link)
        self.left = 0
        self.opened = self.channel = self._channel = self.current = link
        self._late: list[asyncio.Future[Published]] = []

    async def _ensure_channel(self) -> Any:
        return self

    def send(self, parcel: OutboundMessage) -> asyncio.Future[Published]:
        word: asyncio.Future[Published] = asyncio.get_running_loop().create_future()
        if parcel.routing_key == b"lost":
            word.set_exception(AMQPConnectionError("the channel is gone"))
        elif parcel.routing_key == b"late":
            self._late.append(word)
        elif parcel.routing_key != b"silent":
            word.set_result(Published.ACCEPTED)
        return word

    async def _probe(self) -> bool:
        for word in self._late:
            asyncio.get_running_loop().call_soon(word.set_result, Published.ACCEPTED)
        return True

    def stop_sending(self) -> None:
        pass

    def close_in_background(self, channel: object) -> None:
        self.left += 1


def parcels(*keys: bytes) -> list[OutboundMessage]:
    return [OutboundMessage(key, None, b"", b"") for key in keys]


async def test_a_batch_that_is_lost_as_a_whole_says_so_once() -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    with pytest.raises(BrokerUnavailable):
        await Wanting().publish(parcels(b"lost", b"lost", b"lost"))
    gc.collect()
    assert complaints == []


@pytest.mark.parametrize("keys", [[b"silent"], [b"taken", b"silent", b"taken"]])
async def test_a_channel_that_is_silent_is_left(keys: list[bytes]) -> None:
    publisher = Wanting()
    words = await publisher.publish(parcels(*keys))
    assert words == [Published.OVERLOADED if key == b"silent" else Published.ACCEPTED for key in keys]
    assert publisher.left == 1


async def test_a_message_that_a_slow_broker_confirms_late_is_accepted() -> None:
    assert await Wanting().publish(parcels(b"late", b"late")) == [Published.ACCEPTED] * 2


async def test_a_channel_that_is_silent_is_left_also_when_others_fail() -> None:
    publisher = Wanting()
    with pytest.raises(BrokerUnavailable):
        await publisher.publish(parcels(b"lost", b"silent"))
    assert publisher.left == 1
