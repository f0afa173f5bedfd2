"""The SQLite broker's promises beyond the port: many processes on one file, and a failing file."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from meshpoint.adapters.sqlite_queue import SqliteBroker
from meshpoint.adapters.sqlite_queue.dead_letters import SqliteDeadLetters
from meshpoint.adapters.sqlite_queue.queues import Queues, delete_queues
from meshpoint.adapters.sqlite_queue.schema import connect, transaction
from meshpoint.adapters.sqlite_queue.session import (
    Consumer,
    HeartbeatMonitor,
    QueueSession,
    TransactionResult,
)
from meshpoint.adapters.sqlite_queue.thread import QueueThread
from meshpoint.errors import BrokerUnavailable, ConfigurationError
from meshpoint.model.dead_letters import LetterFilter
from meshpoint.model.ids import ReplicaId
from meshpoint.model.messages import Header, dead_letter_queue, private_queue
from meshpoint.ports.broker import PublishResult
from meshpoint.testing.conformance.broker import (
    AGENT,
    REQUESTS,
    STRANGER,
    TEST_TIMEOUT,
    Inbox,
    a_message,
    send,
    until_depth,
)

PRIVATE = private_queue(AGENT, ReplicaId("r1"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mesh.db"


async def test_a_file_of_an_earlier_release_gets_the_column_for_dead_letters(path: Path) -> None:
    async with open_broker(path) as broker:
        await broker.declare(AGENT)
    with closing(sqlite3.connect(path)) as db:
        db.execute("ALTER TABLE meshpoint_queue_message DROP COLUMN dead_from")
    letters = SqliteDeadLetters(path, namespace="demo", timeout=timedelta(seconds=10))
    await letters.open()
    inbox = Inbox()
    async with open_broker(path) as broker:
        await broker.consume(REQUESTS, 1, inbox)
        await send(broker, REQUESTS, a_message())
        assert await (await inbox.next()).dead_letter("unwanted")
    async with aclosing(letters.read(LetterFilter())) as pages:
        assert [letter.queue async for page in pages for letter in page] == [REQUESTS]


@asynccontextmanager
async def open_broker(
    path: Path, *, namespace: str = "demo", delivery_limit: int = 20, **durations: Any
) -> AsyncIterator[SqliteBroker]:
    broker = SqliteBroker(
        path,
        namespace=namespace,
        delivery_limit=delivery_limit,
        **{"lease": timedelta(seconds=1), **durations},
    )
    await broker.open()
    try:
        yield broker
    finally:
        await broker.close()


@pytest.fixture
async def broker(path: Path) -> AsyncIterator[SqliteBroker]:
    async with open_broker(path) as broker:
        await broker.declare(AGENT)
        yield broker


@pytest.fixture
async def short_timeout_broker(path: Path) -> AsyncIterator[SqliteBroker]:
    """A broker that soon gives up on a locked file; no other broker may use the file."""
    async with open_broker(path, busy_timeout=timedelta(milliseconds=50)) as broker:
        await broker.declare(AGENT)
        yield broker


@pytest.fixture
def other_connection(path: Path) -> Iterator[sqlite3.Connection]:
    """Another connection to the same file."""
    with closing(connect(path, 5)) as db:
        yield db


def mark_as_dead(db: sqlite3.Connection) -> None:
    """Remove the oldest holder, as another process does after a lease."""
    with transaction(db):
        (oldest,) = db.execute("SELECT min(id) FROM meshpoint_queue_holder").fetchone()
        Queues(db, "demo", 20).remove_holder(oldest)


async def test_the_file_can_be_created_concurrently(path: Path) -> None:
    async with AsyncExitStack() as stack:
        brokers = await asyncio.gather(
            *(stack.enter_async_context(open_broker(path)) for _ in range(8))
        )
        await asyncio.gather(*(broker.declare(AGENT) for broker in brokers))
        for broker in brokers:
            assert await broker.publish([(REQUESTS, a_message())]) == [PublishResult.ACCEPTED]
        assert await brokers[0].depth(REQUESTS) == 8


async def test_the_queues_can_share_a_file_with_other_tables(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE task (id TEXT)")
        db.execute("INSERT INTO task VALUES ('kept')")
        db.commit()
    async with open_broker(path) as broker:
        await broker.declare(AGENT)
    with closing(sqlite3.connect(path)) as db:
        names = [
            name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]
        assert db.execute("SELECT id FROM task").fetchall() == [("kept",)]
    queue_tables = {name for name in names if name not in {"task", "sqlite_sequence"}}
    assert queue_tables
    assert all(name.startswith("meshpoint_queue") for name in queue_tables)


async def test_messages_outlive_every_process(path: Path) -> None:
    message, inbox = a_message(b"kept"), Inbox()
    async with open_broker(path) as broker:
        await broker.declare(AGENT)
        await send(broker, REQUESTS, message)
    async with open_broker(path) as broker:
        await broker.consume(REQUESTS, 1, inbox)
        assert (await inbox.next()).message == message


async def test_files_of_earlier_releases_get_markers(path: Path) -> None:
    with closing(connect(path, 5)) as db:
        db.execute("DROP TABLE meshpoint_queue_marker")
    async with open_broker(path) as broker:
        assert await broker.mark_database(AGENT)
        assert await broker.has_database_marker(AGENT)


async def test_markers_are_deleted_with_their_namespace(path: Path) -> None:
    async with open_broker(path) as broker, open_broker(path, namespace="other") as other:
        for agent in (AGENT, STRANGER):
            await broker.declare(agent, ReplicaId("r1"))
            await broker.mark_database(agent)
        await other.mark_database(AGENT)
        assert not await other.has_database_marker(STRANGER)
        await asyncio.to_thread(delete_queues, path, "demo", keep={AGENT})
        assert await broker.has_database_marker(AGENT)
        assert not await broker.has_database_marker(STRANGER)
        await asyncio.to_thread(delete_queues, path, "demo")
        assert not await broker.has_database_marker(AGENT)
        assert await other.has_database_marker(AGENT)


async def test_a_file_without_markers_can_be_cleared(path: Path) -> None:
    async with open_broker(path) as broker:
        await broker.declare(AGENT)
    with closing(connect(path, 5)) as db:
        db.execute("DROP TABLE meshpoint_queue_marker")
    await asyncio.to_thread(delete_queues, path, "demo")
    async with open_broker(path) as broker:
        assert await broker.depth(REQUESTS) is None


async def test_namespaces_are_isolated(path: Path, broker: SqliteBroker) -> None:
    await broker.declare(AGENT, ReplicaId("r1"))
    await send(broker, REQUESTS, a_message())
    async with open_broker(path, namespace="other") as stranger:
        assert await stranger.depth(REQUESTS) is None
        await stranger.declare(AGENT, ReplicaId("r2"))
        assert await stranger.depth(REQUESTS) == 0
        await stranger.broadcast(AGENT, a_message())
        assert await broker.depth(PRIVATE) == 0


async def test_a_broker_can_be_reopened(broker: SqliteBroker) -> None:
    await broker.close()
    await broker.open()
    await send(broker, REQUESTS, a_message())


async def test_consuming_an_undeclared_queue_names_it(broker: SqliteBroker) -> None:
    with pytest.raises(ConfigurationError, match="nowhere"):
        await broker.consume(private_queue(AGENT, ReplicaId("nowhere")), 1, Inbox())


async def test_a_message_requeued_too_often_is_dead_lettered(path: Path) -> None:
    async with open_broker(path, delivery_limit=3) as broker:
        inbox, dead_letters, message = Inbox(), Inbox(), a_message(headers={"x-some": 1})
        await broker.declare(AGENT)
        await broker.consume(REQUESTS, 1, inbox)
        await broker.consume(dead_letter_queue(AGENT), 1, dead_letters)
        await send(broker, REQUESTS, message)
        for count in (1, 2, 3):
            delivery = await inbox.next()
            assert delivery.delivery_count == count
            assert await delivery.requeue()
        dead_letter = await dead_letters.next()
        assert dead_letter.message == replace(
            message, headers={"x-some": 1, Header.DEAD_REASON: "delivery limit"}
        )
        assert dead_letter.delivery_count == 1
        assert inbox.empty()


async def test_a_message_that_kills_its_processes_is_dead_lettered(path: Path) -> None:
    inbox = Inbox()
    for _ in range(3):
        async with open_broker(path, delivery_limit=3) as broker:
            await broker.declare(AGENT)
            if inbox.empty() and await broker.depth(REQUESTS) == 0:
                await send(broker, REQUESTS, a_message())
            await broker.consume(REQUESTS, 1, inbox)
            await inbox.next()
    async with open_broker(path) as broker:
        assert await broker.depth(REQUESTS) == 0
        assert await broker.depth(dead_letter_queue(AGENT)) == 1


async def test_a_dead_letter_keeps_its_first_reason(path: Path) -> None:
    async with open_broker(path, delivery_limit=1) as broker:
        inbox, dead_letters = Inbox(), Inbox()
        await broker.declare(AGENT)
        await broker.consume(REQUESTS, 1, inbox)
        await broker.consume(dead_letter_queue(AGENT), 1, dead_letters)
        await send(broker, REQUESTS, a_message())
        assert await (await inbox.next()).dead_letter("unreadable")
        assert await (await dead_letters.next()).requeue()
        assert (await dead_letters.next()).message.headers[Header.DEAD_REASON] == "unreadable"


async def test_a_message_claimed_during_a_cancel_is_requeued(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, claiming, transact = asyncio.get_running_loop(), asyncio.Event(), QueueSession.transact

    def report(session: QueueSession, *arguments: Any, **options: Any) -> TransactionResult:
        loop.call_soon_threadsafe(claiming.set)
        return transact(session, *arguments, **options)

    async with open_broker(
        path, lease=timedelta(days=1), busy_timeout=timedelta(seconds=TEST_TIMEOUT)
    ) as broker:
        late, inbox = Inbox(), Inbox()
        await broker.declare(AGENT)
        subscription = await broker.consume(REQUESTS, 1, late)
        with closing(connect(path, 5)) as other_connection, transaction(other_connection):
            monkeypatch.setattr(QueueSession, "transact", report)
            sent = asyncio.ensure_future(send(broker, REQUESTS, a_message()))
            await claiming.wait()  # it waits for the file
            cancelled = asyncio.ensure_future(subscription.cancel())
            await asyncio.sleep(0)
        await sent
        await cancelled
        await broker.consume(REQUESTS, 1, inbox)
        assert (await inbox.next()).delivery_count == 2
        assert late.empty()


async def test_a_consumer_abandoned_while_starting_takes_nothing(
    broker: SqliteBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its deliveries would stay unsettled until the broker closes."""
    attach = QueueThread.attach
    inbox = Inbox()

    async def abandon(thread: QueueThread, consumer: Consumer) -> None:
        beginning.cancel()  # takes effect at the next await, after the request to the thread
        await attach(thread, consumer)

    with monkeypatch.context() as patch:
        patch.setattr(QueueThread, "attach", abandon)
        beginning = asyncio.ensure_future(broker.consume(REQUESTS, 1, Inbox()))
        await asyncio.gather(beginning, return_exceptions=True)
    assert beginning.cancelled()

    await broker.consume(REQUESTS, 10, inbox)
    await send(broker, REQUESTS, a_message(), a_message())
    await inbox.take(2)


async def test_a_private_queue_is_deleted_with_its_messages(
    path: Path, broker: SqliteBroker
) -> None:
    async with open_broker(path, private_ttl=timedelta()) as sweeping:
        async with open_broker(path) as departed:
            await departed.declare(AGENT, ReplicaId("r1"))
            await send(broker, PRIVATE, a_message())
        await until_depth(sweeping, PRIVATE, None)
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*) FROM meshpoint_queue_message").fetchone() == (0,)
        assert db.execute("SELECT count(*) FROM meshpoint_queue_content").fetchone() == (0,)


async def test_a_private_queue_stays_while_its_broker_lives(
    path: Path, broker: SqliteBroker, other_connection: sqlite3.Connection
) -> None:
    """A broker declared dead meanwhile acquires its queue again."""
    inbox, message = Inbox(), a_message()
    await broker.declare(AGENT, ReplicaId("r1"))
    mark_as_dead(other_connection)
    await send(broker, PRIVATE, message)  # its first transaction as a new holder
    async with open_broker(path, private_ttl=timedelta()) as sweeping:
        await sweeping.declare(AGENT, ReplicaId("r2"))
        async with open_broker(path) as departed:
            await departed.declare(AGENT, ReplicaId("r3"))
        # which proves that it has swept
        await until_depth(sweeping, private_queue(AGENT, ReplicaId("r3")), None)
        assert await sweeping.depth(PRIVATE) == 1
    await broker.consume(PRIVATE, 1, inbox)
    assert (await inbox.next()).message == message


async def test_code_that_blocks_the_loop_loses_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched_for_two_leases, search_count = threading.Event(), 0
    find_dead = HeartbeatMonitor.find_dead

    def count_polls(pulse: HeartbeatMonitor, beats: dict[int, int], now: float) -> list[int]:
        nonlocal search_count
        search_count += pulse is observer
        if search_count >= 10:
            searched_for_two_leases.set()
        return find_dead(pulse, beats, now)

    async with open_broker(path) as broker, open_broker(path) as other:
        inbox, others = Inbox(), Inbox()
        await broker.declare(AGENT)
        await broker.consume(REQUESTS, 1, inbox)
        await send(broker, REQUESTS, a_message())
        delivery = await inbox.next()
        await other.consume(REQUESTS, 1, others)
        assert other._session is not None
        observer = other._session._heartbeat_monitor
        monkeypatch.setattr(HeartbeatMonitor, "find_dead", count_polls)
        assert searched_for_two_leases.wait()  # blocks the loop
        assert await delivery.ack()
        assert others.empty()


async def test_a_message_of_a_stalled_broker_is_redelivered(
    path: Path, broker: SqliteBroker, other_connection: sqlite3.Connection
) -> None:
    """A holder whose heartbeat stops loses its messages; this holder's row has no process."""
    with transaction(other_connection):
        other_connection.execute("INSERT INTO meshpoint_queue_holder (id) VALUES (1000)")
        dead_letters = Queues(other_connection, "demo", 20)
    await send(broker, REQUESTS, a_message())
    with transaction(other_connection):
        assert len(dead_letters.claim_messages(REQUESTS, 1000, 1)) == 1
    inbox = Inbox()
    await broker.consume(REQUESTS, 1, inbox)
    assert (await inbox.next()).delivery_count == 2
    assert (
        other_connection.execute("SELECT 1 FROM meshpoint_queue_holder WHERE id = 1000").fetchone()
        is None
    )


async def test_prefetch_counts_only_unsettled_messages(
    broker: SqliteBroker, other_connection: sqlite3.Connection
) -> None:
    inbox = Inbox()
    await broker.consume(REQUESTS, 2, inbox)
    await send(broker, REQUESTS, a_message(), a_message())
    lost = await inbox.take(2)
    mark_as_dead(other_connection)
    redelivered = await inbox.take(2)
    assert [delivery.delivery_count for delivery in redelivered] == [2, 2]
    assert [await delivery.ack() for delivery in lost] == [False, False]
    await send(broker, REQUESTS, a_message())
    await until_depth(broker, REQUESTS, 1)  # both places are taken
    assert inbox.empty()


async def test_a_locked_file_is_unavailable_until_it_is_free(
    short_timeout_broker: SqliteBroker, other_connection: sqlite3.Connection
) -> None:
    with transaction(other_connection):
        with pytest.raises(BrokerUnavailable, match="locked"):
            await short_timeout_broker.publish([(REQUESTS, a_message())])
        assert not short_timeout_broker.connected
    await send(short_timeout_broker, REQUESTS, a_message())
    assert short_timeout_broker.connected
    assert await short_timeout_broker.depth(REQUESTS) == 1


async def test_settlement_waits_for_a_locked_file(
    short_timeout_broker: SqliteBroker, other_connection: sqlite3.Connection
) -> None:
    inbox = Inbox()
    await short_timeout_broker.consume(REQUESTS, 1, inbox)
    await send(short_timeout_broker, REQUESTS, a_message())
    delivery = await inbox.next()
    with transaction(other_connection):
        settled = asyncio.ensure_future(delivery.ack())
        with pytest.raises(BrokerUnavailable):
            await short_timeout_broker.publish([(REQUESTS, a_message())])
        assert not settled.done()
    assert await settled


async def test_an_unsettled_message_stays_unsettled_at_close(
    short_timeout_broker: SqliteBroker, other_connection: sqlite3.Connection
) -> None:
    inbox = Inbox()
    await short_timeout_broker.consume(REQUESTS, 1, inbox)
    await send(short_timeout_broker, REQUESTS, a_message())
    delivery = await inbox.next()
    with transaction(other_connection):
        settled = asyncio.ensure_future(delivery.ack())
        with pytest.raises(BrokerUnavailable):
            await short_timeout_broker.publish([(REQUESTS, a_message())])
        await short_timeout_broker.close()
        assert not await settled


async def test_a_message_is_redelivered_after_a_commit_in_doubt(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is unknown whether that transaction's claims hold, so the broker drops its holder."""
    async with open_broker(path, lease=timedelta(days=1)) as broker:
        inbox = Inbox()
        await broker.declare(AGENT)
        await broker.consume(REQUESTS, 1, inbox)
        await send(broker, REQUESTS, a_message())
        lost = await inbox.next()
        fail_next_commit(monkeypatch)
        with pytest.raises(BrokerUnavailable, match="disk I/O error"):
            await broker.publish([(dead_letter_queue(AGENT), a_message())])
        redelivered = await inbox.next()
        assert redelivered.delivery_count == 2
        assert not await lost.ack()
        assert await redelivered.ack()


def fail_next_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next transaction commits, but its session gets an error."""
    commit = QueueSession._commit

    class FailingConnection:
        def __init__(self, db: sqlite3.Connection) -> None:
            self._db = db
            self.in_transaction = False

        def execute(self, statement: str) -> None:
            self._db.execute(statement)
            raise sqlite3.OperationalError("disk I/O error")

    def fail(session: QueueSession) -> None:
        monkeypatch.setattr(QueueSession, "_commit", commit)
        db = session._db
        session._db = FailingConnection(db)  # type: ignore[assignment]  # a fake
        try:
            commit(session)
        finally:
            session._db = db

    monkeypatch.setattr(QueueSession, "_commit", fail)


async def test_a_message_that_cannot_be_stored_does_not_fail_the_others(
    broker: SqliteBroker,
) -> None:
    good, bad = a_message(), a_message(correlation_id="\ud800")
    results = await asyncio.gather(
        *(broker.publish([(REQUESTS, message)]) for message in (good, bad, a_message())),
        return_exceptions=True,
    )
    assert [results[0], results[2]] == [[PublishResult.ACCEPTED]] * 2
    assert results[1] == [PublishResult.REJECTED]
    assert await broker.depth(REQUESTS) == 2


def write_other_version(path: Path) -> None:
    with closing(connect(path, 5)) as db:
        db.execute("UPDATE meshpoint_queue_schema SET version = 99")


def write_garbage(path: Path) -> None:
    path.write_bytes(b"something else " * 100)


def use_missing_folder(path: Path) -> None:
    path.parent.rmdir()


def tear_page(path: Path) -> None:
    with closing(connect(path, 5)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = path.read_bytes()
    path.write_bytes(content[:100] + b"\xff" * 4000 + content[4100:])


def drop_table(path: Path) -> None:
    with closing(connect(path, 5)) as db:
        db.execute("DROP TABLE meshpoint_queue_content")


def drop_version(path: Path) -> None:
    with closing(connect(path, 5)) as db:
        db.execute("DELETE FROM meshpoint_queue_schema")


def link_to_nothing(path: Path) -> None:
    path.symlink_to(path.parent / "elsewhere.db")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (write_other_version, "version 99"),
        (write_garbage, "not a database"),
        (use_missing_folder, "no folder"),
        (tear_page, "malformed"),
        (drop_table, "no usable table meshpoint_queue_content"),
        (drop_version, "version None"),
        (link_to_nothing, "dangling symbolic link"),
    ],
)
async def test_an_unusable_file_is_refused(
    path: Path, spoil: Callable[[Path], None], words: str
) -> None:
    spoil(path)
    with pytest.raises(ConfigurationError, match=words):
        await SqliteBroker(path, namespace="demo").open()


async def test_an_invalid_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="File name too long"):
        await SqliteBroker(tmp_path / ("a" * 300) / "mesh.db", namespace="demo").open()


async def test_a_file_that_cannot_currently_be_opened_is_unavailable(path: Path) -> None:
    with closing(connect(path, 5)) as db, transaction(db):
        broker = SqliteBroker(path, namespace="demo", busy_timeout=timedelta(milliseconds=50))
        with pytest.raises(BrokerUnavailable, match="locked"):
            await broker.open()
        assert not broker.connected
    await broker.open()
    await broker.close()
