"""Unreadable rows are settled one by one, and other messages arrive."""

from __future__ import annotations

import os
import sqlite3
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from meshpoint.adapters.sqlite_queue import SqliteBroker, content, queues
from meshpoint.adapters.sqlite_queue.queues import Queues
from meshpoint.adapters.sqlite_queue.schema import connect, transaction
from meshpoint.adapters.sqlite_queue.session import QueueOptions, QueueSession
from meshpoint.adapters.stored_messages import MAX_BODY_BYTES, QueueLimits
from meshpoint.errors import BrokerUnavailable
from meshpoint.model.ids import ReplicaId
from meshpoint.model.messages import (
    Address,
    dead_letter_queue,
    nested_queue,
    private_queue,
    request_shard,
    response_queue,
)
from meshpoint.ports.broker import PublishResult
from meshpoint.testing.conformance.broker import (
    AGENT,
    REQUESTS,
    Inbox,
    a_message,
    send,
    until_depth,
)

DEAD = dead_letter_queue(AGENT)
PRIVATE = private_queue(AGENT, ReplicaId("r1"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mesh.db"


@pytest.fixture
async def broker(path: Path) -> AsyncIterator[SqliteBroker]:
    broker = SqliteBroker(
        path,
        namespace="demo",
        lease=timedelta(seconds=1),
        private_max_length=8,
        dead_letters_max_length=8,
    )
    await broker.open()
    await broker.declare(AGENT, ReplicaId("r1"))
    yield broker
    await broker.close()


@pytest.fixture
def other_connection(path: Path, broker: SqliteBroker) -> Iterator[sqlite3.Connection]:
    """Another connection to the same file."""
    with closing(connect(path, 5)) as db:
        yield db


def damage_row(db: sqlite3.Connection, assignment: str) -> None:
    """Change the newest message through another connection."""
    with transaction(db):
        newest = "(SELECT max(id) FROM meshpoint_queue_message)"
        table = "message" if assignment.startswith(("deliveries", "holder")) else "content"
        db.execute(f"UPDATE meshpoint_queue_{table} SET {assignment} WHERE id = {newest}")


DEEP = "'{\"x\": ' || replace(hex(zeroblob(50000)), '0', '[') || '}'"
LONG = "replace(hex(zeroblob(600000)), '0', 'x')"


@pytest.mark.parametrize(
    ("assignment", "reason"),
    [
        ("type = 'telepathy'", "type: 'telepathy' is not known"),
        ("type = X'00ff'", "type: "),
        ("message_id = X'6d31'", "message_id: must be text, not bytes"),
        ("message_id = ''", "message_id: is missing"),
        ("correlation_id = CAST(X'c328' AS TEXT)", "correlation_id: is not UTF-8"),
        (f"app_id = {LONG}", "app_id: must be text"),
        ("reply_to = X'00'", "reply_to: must be text"),
        ("user_id = CAST(X'ff' AS TEXT)", "user_id: is not UTF-8"),
        ("headers = 'no json'", "headers: not JSON"),
        ("headers = '[]'", "headers: must be a JSON object"),
        (f"headers = {DEEP}", "headers: not JSON"),
        ('headers = \'{"x": "\\ud800"}\'', "headers.x: is not UTF-8"),
        (
            "headers = '{\"x\": ' || replace(hex(zeroblob(5000)), '0', '9') || '}'",
            "headers: not JSON",
        ),
        (f"headers = {LONG}", "headers: must be text"),
        ("body = 'text'", "body: must be a blob"),
        ("body = 12", "body: must be a blob"),
        ("body = zeroblob(134217729)", "body: must be a blob small enough"),
        (f"message_id = 'x' || char(0) || {LONG}", "message_id: must be text, not bytes"),
        ("deliveries = 'many'", "deliveries: is not a count"),
        ("deliveries = 9223372036854775807", "deliveries: is not a count"),
    ],
)
async def test_an_unreadable_row_is_dead_lettered_unchanged(
    broker: SqliteBroker, other_connection: sqlite3.Connection, assignment: str, reason: str
) -> None:
    inbox, good = Inbox(), [a_message(), a_message()]
    await send(broker, REQUESTS, good[0], a_message())
    damage_row(other_connection, assignment)
    before_it_is_read = _raw_rows(other_connection)
    await send(broker, REQUESTS, good[1])
    await broker.consume(REQUESTS, 1, inbox)
    for message in good:
        delivery = await inbox.next()
        assert delivery.message == message
        assert await delivery.ack()
    assert await broker.depth(REQUESTS) == 0
    assert await broker.depth(DEAD) == 1
    (dead_reason,) = other_connection.execute(
        "SELECT dead_reason FROM meshpoint_queue_message"
    ).fetchone()
    assert dead_reason.startswith(reason)
    assert _raw_rows(other_connection) == before_it_is_read


def _raw_rows(db: sqlite3.Connection) -> list[object]:
    """Contents of the newest row, value by value."""
    columns = ", ".join(
        f"typeof({name}), length({name}), hex(substr({name}, 1, 100))" for name in _NAMES
    )
    return db.execute(
        f"SELECT {columns} FROM meshpoint_queue_content ORDER BY id DESC LIMIT 1"
    ).fetchall()


_NAMES = content.COLUMNS.split(", ")


async def test_a_dead_letter_consumer_receives_the_readable_ones(
    broker: SqliteBroker, other_connection: sqlite3.Connection
) -> None:
    dead_letters, good = Inbox(), a_message()
    await send(broker, DEAD, a_message())
    damage_row(other_connection, "headers = ''")
    await send(broker, DEAD, good)
    await broker.consume(DEAD, 1, dead_letters)
    assert (await dead_letters.next()).message == good
    assert await broker.depth(DEAD) == 1


async def test_a_row_without_content_is_dropped_with_a_log(
    broker: SqliteBroker, other_connection: sqlite3.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    inbox, good = Inbox(), a_message()
    with transaction(other_connection):
        other_connection.execute(
            "INSERT INTO meshpoint_queue_message (queue) VALUES ('demo.travel.req')"
        )
    await send(broker, REQUESTS, good)
    await broker.consume(REQUESTS, 1, inbox)
    assert (await inbox.next()).message == good
    assert await broker.depth(REQUESTS) == 0
    assert "the row has no content" in caplog.text


async def test_content_without_a_row_stops_no_publisher(
    broker: SqliteBroker, other_connection: sqlite3.Connection
) -> None:
    inbox, good = Inbox(), a_message()
    with transaction(other_connection):
        other_connection.execute(
            "INSERT INTO meshpoint_queue_content "
            "VALUES (1, 'request', 'm', 'c', 'a', NULL, NULL, '{}', NULL, X'00')"
        )
    await send(broker, REQUESTS, good)
    await broker.consume(REQUESTS, 1, inbox)
    assert (await inbox.next()).message == good


async def test_more_unreadable_rows_than_the_prefetch_do_not_block_a_consumer(
    broker: SqliteBroker, other_connection: sqlite3.Connection
) -> None:
    inbox, good = Inbox(), a_message()
    await send(broker, REQUESTS, *[a_message() for _ in range(7)])
    with transaction(other_connection):
        other_connection.execute("UPDATE meshpoint_queue_content SET type = 'telepathy'")
    await send(broker, REQUESTS, good)
    await broker.consume(REQUESTS, 2, inbox)
    assert (await inbox.next()).message == good
    await until_depth(broker, DEAD, 7)


async def test_a_message_held_by_no_process_is_redelivered(
    broker: SqliteBroker, other_connection: sqlite3.Connection
) -> None:
    inbox, good = Inbox(), a_message()
    await send(broker, REQUESTS, good)
    damage_row(other_connection, "holder = 12345")
    await broker.consume(REQUESTS, 1, inbox)
    assert (await inbox.next()).message == good


async def test_an_unreadable_timestamp_is_left_out(
    broker: SqliteBroker, other_connection: sqlite3.Connection
) -> None:
    inbox, good = Inbox(), a_message()
    await send(broker, REQUESTS, good)
    damage_row(other_connection, "timestamp = '99999-12-12'")
    await broker.consume(REQUESTS, 1, inbox)
    assert (await inbox.next()).message == replace(good, timestamp=None)


async def test_large_messages_are_claimed_a_few_at_a_time(
    broker: SqliteBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "_BATCH_BYTES", 1000)
    inbox, sent = Inbox(), [a_message(bytes([number]) * 600) for number in range(5)]
    await send(broker, REQUESTS, *sent)
    await broker.consume(REQUESTS, 10, inbox)
    assert [(await inbox.next()).message for _ in sent] == sent


@pytest.mark.parametrize(
    "changes",
    [
        {"body": b"x" * (MAX_BODY_BYTES + 1)},
        {"headers": {"x": "\ud800"}},
        {"app_id": "x" * 2**20 + "x"},
    ],
    ids=["body", "header", "property"],
)
async def test_an_unreadable_message_is_rejected(
    broker: SqliteBroker, changes: dict[str, Any]
) -> None:
    sent = [(REQUESTS, a_message()), (REQUESTS, a_message(**changes)), (PRIVATE, a_message())]
    assert await broker.publish(sent) == [
        PublishResult.ACCEPTED,
        PublishResult.REJECTED,
        PublishResult.ACCEPTED,
    ]
    await broker.broadcast(AGENT, a_message(**changes))
    assert await broker.depth(PRIVATE) == 1


async def test_a_body_of_the_reported_limit_is_accepted(broker: SqliteBroker) -> None:
    limit = broker.max_message_bytes
    assert [
        *await broker.publish([(REQUESTS, a_message(b"x" * limit))]),
        *await broker.publish([(REQUESTS, a_message(b"x" * (limit + 1)))]),
    ] == [PublishResult.ACCEPTED, PublishResult.REJECTED]


async def test_a_full_private_queue_rejects_messages(broker: SqliteBroker) -> None:
    results = [(await broker.publish([(PRIVATE, a_message())]))[0] for _ in range(12)]
    assert results == [PublishResult.ACCEPTED] * 8 + [PublishResult.OVERLOADED] * 4
    await broker.broadcast(AGENT, a_message())
    assert await broker.depth(PRIVATE) == 8


@pytest.mark.parametrize(
    "address", [request_shard(AGENT, 0), request_shard(AGENT, 1), nested_queue(AGENT)]
)
async def test_a_full_request_queue_rejects_messages(path: Path, address: Address) -> None:
    broker = SqliteBroker(path, namespace="full", max_length=2)
    await broker.open()
    await broker.declare(AGENT, shards=2)
    results = [(await broker.publish([(address, a_message())]))[0] for _ in range(3)]
    assert results == [PublishResult.ACCEPTED, PublishResult.ACCEPTED, PublishResult.OVERLOADED]
    assert (
        await broker.publish([(response_queue(AGENT), a_message())] * 3)
        == [PublishResult.ACCEPTED] * 3
    )
    await broker.close()


async def test_the_oldest_dead_letters_are_dropped_first(
    broker: SqliteBroker, other_connection: sqlite3.Connection
) -> None:
    dead_letters, sent = Inbox(), [a_message() for _ in range(20)]
    await send(broker, DEAD, *sent)
    await until_depth(broker, DEAD, 8)
    assert other_connection.execute("SELECT count(*) FROM meshpoint_queue_content").fetchone() == (
        8,
    )
    await broker.consume(DEAD, 8, dead_letters)
    assert [(await dead_letters.next()).message for _ in range(8)] == sent[-8:]


async def test_only_the_owner_can_read_the_file(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        broker = SqliteBroker(tmp_path / "new.db", namespace="demo")
        await broker.open()
        await broker.declare(AGENT)
        modes = {file.name: oct(file.stat().st_mode & 0o777) for file in tmp_path.iterdir()}
        await broker.close()
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(("new.db", "new.db-wal", "new.db-shm"), "0o600")


HUGE = f"'x' || char(0) || {LONG} || {LONG} || {LONG} || {LONG}"


@pytest.mark.parametrize("column", ["body", "app_id", "dead_reason", "deliveries"])
async def test_a_value_that_hides_its_length_is_not_loaded(
    broker: SqliteBroker, other_connection: sqlite3.Connection, column: str
) -> None:
    """SQLite counts the characters of a text only up to its first NUL."""
    inbox, good = Inbox(), a_message()
    await send(broker, REQUESTS, a_message())
    with transaction(other_connection):
        table = "content" if column in {"body", "app_id"} else "message"
        other_connection.execute(f"UPDATE meshpoint_queue_{table} SET {column} = {HUGE}")
    await send(broker, REQUESTS, good)
    tracemalloc.start()
    try:
        await broker.consume(REQUESTS, 2, inbox)
        while (delivery := await inbox.next()).message.message_id != good.message_id:
            assert await delivery.ack()
        assert tracemalloc.get_traced_memory()[1] < 3_000_000
    finally:
        tracemalloc.stop()


LAST_ID = 2**63 - 1
NO_TEXT = "CAST(X'ff' AS TEXT)"
QUEUE = "INSERT INTO meshpoint_queue (name, agent, dead_letters, private, left_at) VALUES"


@pytest.mark.parametrize(
    "statement",
    [
        f"INSERT INTO meshpoint_queue_message (id, queue) VALUES ({LAST_ID}, 'demo.nowhere')",
        f"INSERT INTO meshpoint_queue_message (id, queue) VALUES ({LAST_ID}, 'demo.travel.req')",
        f"INSERT INTO meshpoint_queue_message (queue) VALUES ({NO_TEXT})",
        f"INSERT INTO meshpoint_queue_message (queue, holder) VALUES ('demo.nowhere', {NO_TEXT})",
        f"INSERT INTO meshpoint_queue_holder (id) VALUES ({LAST_ID})",
        f"INSERT INTO meshpoint_queue_holder (id, beat) VALUES (-1, {NO_TEXT})",
        f"UPDATE meshpoint_queue_holder SET beat = {NO_TEXT}",
        f"UPDATE meshpoint_queue_holder SET beat = {LAST_ID}",
        "UPDATE meshpoint_queue_holder SET beat = zeroblob(9)",
        f"UPDATE sqlite_sequence SET seq = {LAST_ID}",
        f"UPDATE sqlite_sequence SET seq = {NO_TEXT}",
        "UPDATE sqlite_sequence SET seq = 1e300",
        "DELETE FROM sqlite_sequence",
        f"{QUEUE} ('demo.x.req', 'demo.x', {NO_TEXT}, 0, NULL)",
        f"{QUEUE} ('demo.x.req', 'demo.x', {HUGE}, 0, NULL)",
        f"{QUEUE} ('demo.' || {NO_TEXT}, 'demo.x', 'demo.x.dead', 0, NULL)",
        f"{QUEUE} ({NO_TEXT}, 'demo.x', 'demo.x.dead', 1, 0)",
        f"{QUEUE} ({NO_TEXT}, 'demo.travel', 'demo.x.dead', 1, NULL)",
        f"{QUEUE} (X'ff', 'demo.travel', X'ff', 1, {NO_TEXT})",
        f"UPDATE meshpoint_queue SET private = {NO_TEXT} WHERE name = 'demo.travel.req'",
    ],
)
async def test_a_useless_row_stops_neither_messages_nor_housekeeping(
    path: Path,
    broker: SqliteBroker,
    other_connection: sqlite3.Connection,
    statement: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    inbox, sent = Inbox(), [a_message(), a_message()]
    await broker.consume(REQUESTS, 1, inbox)
    with transaction(other_connection):
        other_connection.execute(statement)
    for message in sent:
        await send(broker, REQUESTS, message)
        delivery = await inbox.next()
        assert delivery.message == message
        assert await delivery.ack()
    await broker.broadcast(AGENT, a_message())
    assert await broker.depth(PRIVATE) == 1
    with closing(QueueSession(path, "demo", TUNING)) as session:
        for _ in range(2):
            session.transact([], [], heartbeat=True)
    assert "queue maintenance failed" not in caplog.text


TUNING = QueueOptions(
    lease=1,
    private_ttl=60,
    poll_interval=1,
    busy_timeout=5,
    delivery_limit=20,
    limits=QueueLimits(dead_letters=8),
)


async def test_new_ids_are_higher_than_all_remaining_ones(
    path: Path, broker: SqliteBroker, other_connection: sqlite3.Connection
) -> None:
    await send(broker, REQUESTS, a_message(), a_message())
    with transaction(other_connection):
        other_connection.execute(
            f"INSERT INTO meshpoint_queue_message (id, queue) VALUES ({LAST_ID}, 'demo.nowhere')"
        )
        other_connection.execute(
            f"INSERT INTO meshpoint_queue_content SELECT {LAST_ID}, {content.COLUMNS} "
            "FROM meshpoint_queue_content WHERE id = 1"
        )
    await send(broker, REQUESTS, a_message())
    for table in ("message", "content"):
        ids = other_connection.execute(
            f"SELECT id FROM meshpoint_queue_{table} ORDER BY id"
        ).fetchall()
        assert ids == [(1,), (2,), (2 + 2**20 + 1,)]


@pytest.mark.parametrize(
    "maintenance_job", ["requeue_orphans", "drop_unused", "trim_dead_letters"]
)
def test_failed_housekeeping_does_not_skip_a_heartbeat(
    path: Path,
    maintenance_job: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(queues: Queues, *_: object) -> None:
        queues._db.execute("DELETE FROM meshpoint_queue_holder")
        raise sqlite3.OperationalError("Could not decode to UTF-8")

    monkeypatch.setattr(Queues, maintenance_job, fails)
    with closing(QueueSession(path, "demo", TUNING)) as session, closing(connect(path, 5)) as db:
        session.transact([], [], heartbeat=True)
        assert db.execute("SELECT beat FROM meshpoint_queue_holder").fetchall() == [(1,)]
    assert "queue maintenance failed: Could not decode" in caplog.text


async def test_a_full_disk_is_reported_as_unavailable(
    broker: SqliteBroker, other_connection: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL

    def publish(*_: object) -> list[PublishResult]:
        raise full

    monkeypatch.setattr(Queues, "publish", publish)
    with pytest.raises(BrokerUnavailable, match="full"):
        await broker.publish([(REQUESTS, a_message())])


async def test_a_dead_letter_with_an_unreadable_reason_can_be_forwarded(
    broker: SqliteBroker, other_connection: sqlite3.Connection
) -> None:
    dead_letters = Inbox()
    await send(broker, DEAD, a_message())
    with transaction(other_connection):
        other_connection.execute(f"UPDATE meshpoint_queue_message SET dead_reason = {NO_TEXT}")
    await broker.consume(DEAD, 1, dead_letters)
    message = (await dead_letters.next()).message
    assert await broker.publish([(REQUESTS, message)]) == [PublishResult.ACCEPTED]
