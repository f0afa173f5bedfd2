"""Hand-written content headers: equal to the library's, and parsed without exceptions."""

from __future__ import annotations

import asyncio
import struct
import sys
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pamqp.frame
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.header import ContentHeader
from pamqp.heartbeat import Heartbeat

from meshpoint.adapters.rabbitmq.content import decode
from meshpoint.adapters.rabbitmq.envelope import (
    UnencodableMessage,
    from_dead_letter,
    to_dead_letter,
    to_message,
    to_properties,
)
from meshpoint.adapters.rabbitmq.frames import (
    ConfirmHandler,
    DeliveryHandler,
    FrameReader,
    RawDelivery,
    ReturnedMessage,
    encode_ack,
    encode_nack,
    encode_publish,
    make_decodable,
    short_string,
)
from meshpoint.errors import PoisonMessage
from meshpoint.model.messages import Address, Message, MessageType
from unusual_content import entry, nested
from unusual_content import properties as raw_properties

FIXED = struct.pack(">HHQ", 60, 0, 2)
SIZE_LIMIT = 131_064

texts = st.text(max_size=60)
scalars = st.one_of(
    texts, st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False)
)
messages = st.builds(
    Message,
    type=st.sampled_from(MessageType),
    body=st.just(b"{}"),
    message_id=texts.filter(bool),
    correlation_id=texts.filter(bool),
    app_id=texts.filter(bool),
    reply_to=st.one_of(st.none(), texts.filter(bool).map(Address)),
    headers=st.dictionaries(
        st.text(max_size=60).map(lambda text: f"y{text}"), scalars, max_size=5
    ),
    timestamp=st.one_of(
        st.none(),
        st.integers(0, 4_000_000_000).map(lambda seconds: datetime.fromtimestamp(seconds, UTC)),
    ),
)


def to_delivery(header: bytes, body: bytes = b"{}") -> RawDelivery:
    return RawDelivery(b"tag", 1, False, b"travel.req", header, body)


@given(messages)
def test_encoded_messages_are_decoded_by_us_and_by_the_library(message: Message) -> None:
    encoded = FIXED + to_properties(message, "guest")
    decoded = to_message(to_delivery(encoded), decode(encoded))
    reference = ContentHeader()
    reference.unmarshal(encoded)
    assert (decoded.message_id, decoded.correlation_id, decoded.reply_to) == (
        message.message_id,
        message.correlation_id,
        message.reply_to,
    )
    assert decoded.headers == message.headers == reference.properties.headers
    assert decoded.timestamp == message.timestamp == reference.properties.timestamp
    assert reference.properties.message_type == message.type


library = st.builds(
    Basic.Properties,
    content_type=st.one_of(st.none(), texts),
    content_encoding=st.one_of(st.none(), texts),
    headers=st.dictionaries(
        texts,
        st.one_of(
            texts,
            st.integers(-(2**63), 2**63 - 1),
            st.booleans(),
            st.lists(st.integers(0, 9)),
            st.none(),
        ),
        max_size=4,
    ),
    delivery_mode=st.sampled_from([1, 2]),
    priority=st.one_of(st.none(), st.integers(0, 9)),
    correlation_id=st.one_of(st.none(), texts),
    reply_to=st.one_of(st.none(), texts),
    expiration=st.one_of(st.none(), texts),
    message_id=st.one_of(st.none(), texts),
    message_type=st.one_of(st.none(), texts),
    user_id=st.one_of(st.none(), texts),
    app_id=st.one_of(st.none(), texts),
)


@given(library)
def test_messages_encoded_by_the_library_are_decoded_identically(
    properties: Basic.Properties,
) -> None:
    encoded = FIXED + properties.marshal()
    reference = ContentHeader()
    reference.unmarshal(encoded)
    decoded = decode(encoded)
    assert decoded.defect is None
    for name in (
        "content_type",
        "priority",
        "correlation_id",
        "reply_to",
        "expiration",
        "message_id",
        "user_id",
    ):
        assert getattr(decoded, name) == getattr(reference.properties, name)
    expected_headers = {
        k: v
        for k, v in (reference.properties.headers or {}).items()
        if isinstance(v, str | int | float)
    }
    assert decoded.headers == expected_headers


@given(messages, st.data())
def test_damaged_content_never_raises_and_can_be_dead_lettered(
    message: Message, data: st.DataObject
) -> None:
    encoded = bytearray(FIXED + to_properties(message, "guest"))
    for _ in range(data.draw(st.integers(1, 6))):
        encoded[data.draw(st.integers(12, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(encoded[: data.draw(st.integers(12, len(encoded)))])
    content, one = decode(cut), to_delivery(cut)
    copy = FIXED + to_dead_letter(one, content, "why", "guest", SIZE_LIMIT)
    ContentHeader().unmarshal(copy)
    assert decode(copy).defect is None
    assert decode(copy).headers["x-dead-reason"] == "why"
    from_dead_letter(one, content)
    with suppress(PoisonMessage):
        to_message(one, content)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_never_raise(encoded: bytes) -> None:
    content = decode(FIXED + encoded)
    copy = FIXED + to_dead_letter(to_delivery(FIXED + encoded), content, "why", None, SIZE_LIMIT)
    assert decode(copy).headers["x-dead-reason"] == "why"


@pytest.mark.parametrize(
    "changes",
    [
        {"message_id": "x" * 256},
        {"correlation_id": "\ud800"},
        {"headers": {"x": 2**63}},
        {"headers": {"x" * 256: 1}},
        {"headers": {"x": b"bytes"}},
        {"headers": {"x": float("nan")}},
        {"headers": {"x": float("-inf")}},
        {"timestamp": datetime(1960, 1, 1, tzinfo=UTC)},
    ],
)
def test_a_field_that_cannot_be_encoded_is_named(changes: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"message_id": "m", "correlation_id": "c", "app_id": "a", **changes}
    with pytest.raises(UnencodableMessage):
        to_properties(Message(MessageType.REQUEST, b"{}", **fields), "guest")


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 250])
def test_frames_match_those_of_the_library(size: int) -> None:
    body, properties = b"x" * size, Basic.Properties(message_id="m")
    frames: list[Any] = [
        Basic.Publish(exchange="e", routing_key="k", mandatory=True),
        ContentHeader(0, size, properties),
        *(ContentBody(body[offset : offset + 100]) for offset in range(0, size, 100)),
    ]
    reference = b"".join(pamqp.frame.marshal(frame, 3) for frame in frames)
    assert (
        encode_publish(3, short_string("e"), short_string("k"), properties.marshal(), body, 100)
        == reference
    )
    assert encode_ack(3, 7, multiple=True) == pamqp.frame.marshal(Basic.Ack(7, True), 3)
    assert encode_nack(3, 7, requeue=True) == pamqp.frame.marshal(Basic.Nack(7, False, True), 3)
    assert encode_nack(3, 7, requeue=False) == pamqp.frame.marshal(Basic.Nack(7, False, False), 3)


@pytest.mark.parametrize("piece", [1, 3, 7, 8, 64, 10_000])
async def test_frames_can_be_split_anywhere(piece: int) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop)
    frames = FrameReader(reader, loop)
    frames._last_fed_at = loop.time()
    deliveries: list[RawDelivery] = []
    results: list[object] = []
    returned: list[ReturnedMessage] = []
    frames.route(1, DeliveryHandler(deliveries.append))
    frames.route(2, ConfirmHandler(lambda *word: results.append(word), returned.append))
    header = ContentHeader(0, 6, Basic.Properties(message_id="m"))
    stream: list[tuple[Any, int]] = [
        (Basic.ConsumeOk("tag"), 1),
        (Basic.Deliver("tag", 9, True, "e", "key"), 1),
        (header, 1),
        (Basic.Ack(1, True), 2),
        (ContentBody(b"abc"), 1),
        (Heartbeat(), 0),
        (ContentBody(b"def"), 1),
        (Basic.Deliver("tag", 10, False, "e", "key"), 1),
        (ContentHeader(0, 0, Basic.Properties()), 1),
        (Basic.Return(312, "NO_ROUTE", "e", "key"), 2),
        (header, 2),
        (ContentBody(b"abcdef"), 2),
        (Basic.Nack(2), 2),
        (Basic.Deliver("other", 1, False, "e", "key"), 5),
    ]
    raw = b"".join(pamqp.frame.marshal(frame, channel) for frame, channel in stream)
    for offset in range(0, len(raw), piece):
        frames.data_received(raw[offset : offset + piece])
    assert [
        (one.delivery_tag, one.redelivered, one.routing_key, one.body) for one in deliveries
    ] == [
        (9, True, b"key", b"abcdef"),
        (10, False, b"key", b""),
    ]
    assert results == [(1, True, True), (2, False, False)]
    assert [(one.routing_key, decode(one.header).message_id) for one in returned] == [
        (b"key", "m")
    ]
    unhandled = [stream[0], stream[5], stream[-1]]
    reader.feed_eof()
    assert await reader.read() == b"".join(
        pamqp.frame.marshal(frame, channel) for frame, channel in unhandled
    )


async def test_the_library_sees_a_heartbeat_for_frames_we_handle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The library considers a connection lost if it reads nothing."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop)
    frames = FrameReader(reader, loop)
    frames.route(2, ConfirmHandler(lambda *word: None, lambda returned: None))
    frames._time = lambda: 100.0
    frames.data_received(pamqp.frame.marshal(Basic.Ack(1), 2))
    frames.data_received(pamqp.frame.marshal(Basic.Ack(2), 2))
    reader.feed_eof()
    assert await reader.read() == pamqp.frame.marshal(Heartbeat(), 0)


def test_deeply_nested_headers_never_reach_the_library() -> None:
    payload = FIXED + raw_properties(headers=entry(b"t", b"F", nested(900)))
    frame = struct.pack(">BHI", 2, 1, len(payload)) + payload + b"\xce"
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        _, _, header = pamqp.frame.unmarshal(make_decodable(frame))
        assert isinstance(header, ContentHeader)
        reason = (header.properties.headers or {})["x-dead-reason"]
    finally:
        sys.setrecursionlimit(limit)
    assert str(reason).startswith("undecodable: headers: are nested")
