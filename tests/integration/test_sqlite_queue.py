"""The SQLite broker's promises beyond the port: many processes on one file, and a failing file."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from meshpoint.adapters.sqlite_queue import SqliteBroker
from meshpoint.adapters.sqlite_queue.holders import HeartbeatMonitor
from meshpoint.adapters.sqlite_queue.jobs import Consumer, TransactionResult
from meshpoint.adapters.sqlite_queue.queues import Queues
from meshpoint.adapters.sqlite_queue.schema import connect, transaction
from meshpoint.adapters.sqlite_queue.session import QueueSession
from meshpoint.adapters.sqlite_queue.thread import QueueThread
from meshpoint.errors import BrokerUnavailable, ConfigurationError
from meshpoint.model.ids import ReplicaId
from meshpoint.model.messages import Header, dead_letters_of, private_of
from meshpoint.ports.broker import Published
from meshpoint.testing.conformance.broker import AGENT, PATIENCE, REQUESTS, Inbox, a_message, send, until_depth

PRIVATE = private_of(AGENT, ReplicaId("r1"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mesh.db"


@asynccontextmanager
async def opened(
    path: Path, *, namespace: str = "demo", delivery_limit: int = 20, **durations: timedelta
) -> AsyncIterator[SqliteBroker]:
    broker = SqliteBroker(
        path, namespace=namespace, delivery_limit=delivery_limit, **{"lease": timedelta(seconds=1), **durations}
    )
    await broker.open()
    try:
        yield broker
    finally:
        await broker.close()


@pytest.fixture
async def broker(path: Path) -> AsyncIterator[SqliteBroker]:
    async with opened(path) as broker:
        await broker.declare(AGENT)
        yield broker


@pytest.fixture
async def hasty(path: Path) -> AsyncIterator[SqliteBroker]:
    """A broker that soon gives up on a locked file; no other broker may use the file."""
    async with opened(path, busy_timeout=timedelta(milliseconds=50)) as broker:
        await broker.declare(AGENT)
        yield broker


@pytest.fixture
def bystander(path: Path) -> Iterator[sqlite3.Connection]:
    """Another connection to the same file."""
    with closing(connect(path, 5)) as db:
        yield db


def take_for_dead(db: sqlite3.Connection) -> None:
    """Remove the oldest holder, as another process does after a lease."""
    with transaction(db):
        (oldest,) = db.execute("SELECT min(id) FROM meshpoint_queue_holder").fetchone()
        Queues(db, "demo", 20).remove_holder(oldest)


async def test_many_may_create_the_file_at_once(path: Path) -> None:
    async with AsyncExitStack() as stack:
        brokers = await asyncio.gather(*(stack.enter_async_context(opened(path)) for _ in range(8)))
        await asyncio.gather(*(broker.declare(AGENT) for broker in brokers))
        for broker in brokers:
            assert await broker.publish([(REQUESTS, a_message())]) == [Published.ACCEPTED]
        assert await brokers[0].depth(REQUESTS) == 8


async def test_the_queues_may_share_a_file_with_other_tables(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE task (id TEXT)")
        db.execute("INSERT INTO task VALUES ('kept')")
        db.commit()
    async with opened(path) as broker:
        await broker.declare(AGENT)
    with closing(sqlite3.connect(path)) as db:
        names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        assert db.execute("SELECT id FROM task").fetchall() == [("kept",)]
    ours = {name for name in names if name not in {"task", "sqlite_sequence"}}
    assert ours
    assert all(name.startswith("meshpoint_queue") for name in ours)


async def test_messages_outlive_every_process(path: Path) -> None:
    message, inbox = a_message(b"kept"), Inbox()
    async with opened(path) as broker:
        await broker.declare(AGENT)
        await send(broker, REQUESTS, message)
    async with opened(path) as broker:
        await broker.consume(REQUESTS, 1, inbox)
        assert (await inbox.next()).message == message


async def test_namespaces_do_not_see_each_other(path: Path, broker: SqliteBroker) -> None:
    await broker.declare(AGENT, ReplicaId("r1"))
    await send(broker, REQUESTS, a_message())
    async with opened(path, namespace="other") as stranger:
        assert await stranger.depth(REQUESTS) is None
        await stranger.declare(AGENT, ReplicaId("r2"))
        assert await stranger.depth(REQUESTS) == 0
        await stranger.broadcast(AGENT, a_message())
        assert await broker.depth(PRIVATE) == 0


async def test_a_broker_can_be_opened_again(broker: SqliteBroker) -> None:
    await broker.close()
    await broker.open()
    await send(broker, REQUESTS, a_message())


async def test_consuming_from_nowhere_names_the_queue(broker: SqliteBroker) -> None:
    with pytest.raises(ConfigurationError, match="nowhere"):
        await broker.consume(private_of(AGENT, ReplicaId("nowhere")), 1, Inbox())


async def test_a_message_that_always_comes_back_ends_among_the_dead_letters(path: Path) -> None:
    async with opened(path, delivery_limit=3) as broker:
        inbox, dead, message = Inbox(), Inbox(), a_message(headers={"x-some": 1})
        await broker.declare(AGENT)
        await broker.consume(REQUESTS, 1, inbox)
        await broker.consume(dead_letters_of(AGENT), 1, dead)
        await send(broker, REQUESTS, message)
        for count in (1, 2, 3):
            delivery = await inbox.next()
            assert delivery.count == count
            assert await delivery.requeue()
        buried = await dead.next()
        assert buried.message == replace(message, headers={"x-some": 1, Header.DEAD_REASON: "delivery limit"})
        assert buried.count == 1
        assert inbox.empty()


async def test_a_message_that_kills_its_processes_ends_among_the_dead_letters(path: Path) -> None:
    inbox = Inbox()
    for _ in range(3):
        async with opened(path, delivery_limit=3) as broker:
            await broker.declare(AGENT)
            if inbox.empty() and await broker.depth(REQUESTS) == 0:
                await send(broker, REQUESTS, a_message())
            await broker.consume(REQUESTS, 1, inbox)
            await inbox.next()
    async with opened(path) as broker:
        assert await broker.depth(REQUESTS) == 0
        assert await broker.depth(dead_letters_of(AGENT)) == 1


async def test_a_dead_letter_keeps_its_first_reason(path: Path) -> None:
    async with opened(path, delivery_limit=1) as broker:
        inbox, dead = Inbox(), Inbox()
        await broker.declare(AGENT)
        await broker.consume(REQUESTS, 1, inbox)
        await broker.consume(dead_letters_of(AGENT), 1, dead)
        await send(broker, REQUESTS, a_message())
        assert await (await inbox.next()).dead_letter("unreadable")
        assert await (await dead.next()).requeue()
        assert (await dead.next()).message.headers[Header.DEAD_REASON] == "unreadable"


async def test_what_is_claimed_while_its_consumer_is_cancelled_goes_back(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, claiming, transact = asyncio.get_running_loop(), asyncio.Event(), QueueSession.transact

    def tell(session: QueueSession, *arguments: Any, **options: Any) -> TransactionResult:
        loop.call_soon_threadsafe(claiming.set)
        return transact(session, *arguments, **options)

    async with opened(path, lease=timedelta(days=1), busy_timeout=timedelta(seconds=PATIENCE)) as broker:
        late, inbox = Inbox(), Inbox()
        await broker.declare(AGENT)
        subscription = await broker.consume(REQUESTS, 1, late)
        with closing(connect(path, 5)) as bystander, transaction(bystander):
            monkeypatch.setattr(QueueSession, "transact", tell)
            sent = asyncio.ensure_future(send(broker, REQUESTS, a_message()))
            await claiming.wait()  # it waits for the file
            cancelled = asyncio.ensure_future(subscription.cancel())
            await asyncio.sleep(0)
        await sent
        await cancelled
        await broker.consume(REQUESTS, 1, inbox)
        assert (await inbox.next()).count == 2
        assert late.empty()


async def test_a_consumer_given_up_while_it_begins_takes_nothing(
    broker: SqliteBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its deliveries would stay unsettled until the broker closes."""
    attach = QueueThread.attach
    inbox = Inbox()

    async def given_up(thread: QueueThread, consumer: Consumer) -> None:
        beginning.cancel()  # takes effect at the next await, after the request to the thread
        await attach(thread, consumer)

    with monkeypatch.context() as patch:
        patch.setattr(QueueThread, "attach", given_up)
        beginning = asyncio.ensure_future(broker.consume(REQUESTS, 1, Inbox()))
        await asyncio.gather(beginning, return_exceptions=True)
    assert beginning.cancelled()

    await broker.consume(REQUESTS, 10, inbox)
    await send(broker, REQUESTS, a_message(), a_message())
    await inbox.take(2)


async def test_a_private_queue_disappears_with_what_is_in_it(path: Path, broker: SqliteBroker) -> None:
    async with opened(path, private_ttl=timedelta()) as sweeping:
        async with opened(path) as gone:
            await gone.declare(AGENT, ReplicaId("r1"))
            await send(broker, PRIVATE, a_message())
        await until_depth(sweeping, PRIVATE, None)
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*) FROM meshpoint_queue_message").fetchone() == (0,)
        assert db.execute("SELECT count(*) FROM meshpoint_queue_content").fetchone() == (0,)


async def test_a_private_queue_stays_while_its_broker_lives(
    path: Path, broker: SqliteBroker, bystander: sqlite3.Connection
) -> None:
    """A broker declared dead meanwhile acquires its queue again."""
    inbox, message = Inbox(), a_message()
    await broker.declare(AGENT, ReplicaId("r1"))
    take_for_dead(bystander)
    await send(broker, PRIVATE, message)  # its first transaction as a new holder
    async with opened(path, private_ttl=timedelta()) as sweeping:
        await sweeping.declare(AGENT, ReplicaId("r2"))
        async with opened(path) as gone:
            await gone.declare(AGENT, ReplicaId("r3"))
        # which proves that it has swept
        await until_depth(sweeping, private_of(AGENT, ReplicaId("r3")), None)
        assert await sweeping.depth(PRIVATE) == 1
    await broker.consume(PRIVATE, 1, inbox)
    assert (await inbox.next()).message == message


async def test_code_that_blocks_the_loop_loses_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_for_two_leases, looks = threading.Event(), 0
    look = HeartbeatMonitor.find_dead

    def count_looks(pulse: HeartbeatMonitor, beats: dict[int, int], now: float) -> list[int]:
        nonlocal looks
        looks += pulse is observer
        if looks >= 10:
            looked_for_two_leases.set()
        return look(pulse, beats, now)

    async with opened(path) as broker, opened(path) as other:
        inbox, others = Inbox(), Inbox()
        await broker.declare(AGENT)
        await broker.consume(REQUESTS, 1, inbox)
        await send(broker, REQUESTS, a_message())
        delivery = await inbox.next()
        await other.consume(REQUESTS, 1, others)
        assert other._session is not None
        observer = other._session._heartbeat_monitor
        monkeypatch.setattr(HeartbeatMonitor, "find_dead", count_looks)
        assert looked_for_two_leases.wait()  # blocks the loop
        assert await delivery.ack()
        assert others.empty()


async def test_a_message_of_a_broker_that_stood_still_comes_again(
    path: Path, broker: SqliteBroker, bystander: sqlite3.Connection
) -> None:
    """A holder whose heartbeat stops loses its messages; this holder's row has no process."""
    with transaction(bystander):
        bystander.execute("INSERT INTO meshpoint_queue_holder (id) VALUES (1000)")
        dead = Queues(bystander, "demo", 20)
    await send(broker, REQUESTS, a_message())
    with transaction(bystander):
        assert len(dead.claim_messages(REQUESTS, 1000, 1)) == 1
    inbox = Inbox()
    await broker.consume(REQUESTS, 1, inbox)
    assert (await inbox.next()).count == 2
    assert bystander.execute("SELECT 1 FROM meshpoint_queue_holder WHERE id = 1000").fetchone() is None


async def test_prefetch_counts_only_what_is_still_held(broker: SqliteBroker, bystander: sqlite3.Connection) -> None:
    inbox = Inbox()
    await broker.consume(REQUESTS, 2, inbox)
    await send(broker, REQUESTS, a_message(), a_message())
    lost = await inbox.take(2)
    take_for_dead(bystander)
    again = await inbox.take(2)
    assert [delivery.count for delivery in again] == [2, 2]
    assert [await delivery.ack() for delivery in lost] == [False, False]
    await send(broker, REQUESTS, a_message())
    await until_depth(broker, REQUESTS, 1)  # both places are taken
    assert inbox.empty()


async def test_a_locked_file_is_unavailable_until_it_is_free(
    hasty: SqliteBroker, bystander: sqlite3.Connection
) -> None:
    with transaction(bystander):
        with pytest.raises(BrokerUnavailable, match="locked"):
            await hasty.publish([(REQUESTS, a_message())])
        assert not hasty.connected
    await send(hasty, REQUESTS, a_message())
    assert hasty.connected
    assert await hasty.depth(REQUESTS) == 1


async def test_settling_waits_for_a_locked_file(hasty: SqliteBroker, bystander: sqlite3.Connection) -> None:
    inbox = Inbox()
    await hasty.consume(REQUESTS, 1, inbox)
    await send(hasty, REQUESTS, a_message())
    delivery = await inbox.next()
    with transaction(bystander):
        settled = asyncio.ensure_future(delivery.ack())
        with pytest.raises(BrokerUnavailable):
            await hasty.publish([(REQUESTS, a_message())])
        assert not settled.done()
    assert await settled


async def test_what_no_transaction_could_settle_is_not_settled_at_close(
    hasty: SqliteBroker, bystander: sqlite3.Connection
) -> None:
    inbox = Inbox()
    await hasty.consume(REQUESTS, 1, inbox)
    await send(hasty, REQUESTS, a_message())
    delivery = await inbox.next()
    with transaction(bystander):
        settled = asyncio.ensure_future(delivery.ack())
        with pytest.raises(BrokerUnavailable):
            await hasty.publish([(REQUESTS, a_message())])
        await hasty.close()
        assert not await settled


async def test_after_a_commit_in_doubt_the_message_comes_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is unknown whether that transaction's claims hold, so the broker drops its holder."""
    async with opened(path, lease=timedelta(days=1)) as broker:
        inbox = Inbox()
        await broker.declare(AGENT)
        await broker.consume(REQUESTS, 1, inbox)
        await send(broker, REQUESTS, a_message())
        lost = await inbox.next()
        fail_next_commit(monkeypatch)
        with pytest.raises(BrokerUnavailable, match="disk I/O error"):
            await broker.publish([(dead_letters_of(AGENT), a_message())])
        again = await inbox.next()
        assert again.count == 2
        assert not await lost.ack()
        assert await again.ack()


def fail_next_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next transaction commits, but its session gets an error."""
    commit = QueueSession._commit

    class Deaf:
        def __init__(self, db: sqlite3.Connection) -> None:
            self._db = db
            self.in_transaction = False

        def execute(self, statement: str) -> None:
            self._db.execute(statement)
            raise sqlite3.OperationalError("disk I/O error")

    def fail(session: QueueSession) -> None:
        monkeypatch.setattr(QueueSession, "_commit", commit)
        db = session._db
        session._db = Deaf(db)  # type: ignore[assignment]
        try:
            commit(session)
        finally:
            session._db = db

    monkeypatch.setattr(QueueSession, "_commit", fail)


async def test_a_message_that_cannot_be_stored_does_not_fail_its_neighbours(broker: SqliteBroker) -> None:
    good, bad = a_message(), a_message(correlation_id="\ud800")
    results = await asyncio.gather(
        *(broker.publish([(REQUESTS, message)]) for message in (good, bad, a_message())), return_exceptions=True
    )
    assert [results[0], results[2]] == [[Published.ACCEPTED]] * 2
    assert results[1] == [Published.REJECTED]
    assert await broker.depth(REQUESTS) == 2


def another_version(path: Path) -> None:
    with closing(connect(path, 5)) as db:
        db.execute("UPDATE meshpoint_queue_schema SET version = 99")


def no_database(path: Path) -> None:
    path.write_bytes(b"something else " * 100)


def no_folder(path: Path) -> None:
    path.parent.rmdir()


def a_torn_page(path: Path) -> None:
    with closing(connect(path, 5)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + b"\xff" * 4000 + whole[4100:])


def no_table(path: Path) -> None:
    with closing(connect(path, 5)) as db:
        db.execute("DROP TABLE meshpoint_queue_content")


def no_version(path: Path) -> None:
    with closing(connect(path, 5)) as db:
        db.execute("DELETE FROM meshpoint_queue_schema")


def a_link_to_nothing(path: Path) -> None:
    path.symlink_to(path.parent / "elsewhere.db")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (another_version, "version 99"),
        (no_database, "not a database"),
        (no_folder, "no folder"),
        (a_torn_page, "malformed"),
        (no_table, "no usable table meshpoint_queue_content"),
        (no_version, "version None"),
        (a_link_to_nothing, "dangling symbolic link"),
    ],
)
async def test_a_file_that_can_never_work_is_refused(path: Path, spoil: Callable[[Path], None], words: str) -> None:
    spoil(path)
    with pytest.raises(ConfigurationError, match=words):
        await SqliteBroker(path, namespace="demo").open()


async def test_a_path_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="File name too long"):
        await SqliteBroker(tmp_path / ("a" * 300) / "mesh.db", namespace="demo").open()


async def test_a_file_that_cannot_be_opened_now_is_unavailable(path: Path) -> None:
    with closing(connect(path, 5)) as db, transaction(db):
        broker = SqliteBroker(path, namespace="demo", busy_timeout=timedelta(milliseconds=50))
        with pytest.raises(BrokerUnavailable, match="locked"):
            await broker.open()
        assert not broker.connected
    await broker.open()
    await broker.close()
