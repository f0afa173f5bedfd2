"""The broker on PostgreSQL: maintenance, prefetch and recreated queues, on a real server."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Collection, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest
from sqlalchemy import event

from command_result import CommandResult
from meshpoint.adapters.postgres_queue import PostgresBroker, notifications
from meshpoint.adapters.postgres_queue import broker as broker_module
from meshpoint.adapters.postgres_queue import session as session_module
from meshpoint.adapters.postgres_queue.consumers import LOWEST_ID, Claim, Consumer
from meshpoint.adapters.postgres_queue.content import to_content
from meshpoint.adapters.postgres_queue.dead_letters import PostgresDeadLetters
from meshpoint.adapters.postgres_queue.notifications import Listener
from meshpoint.adapters.postgres_queue.session import Entry, QueueSession
from meshpoint.adapters.sql import migrations
from meshpoint.adapters.sql.engine import engine_for
from meshpoint.adapters.sql.tables import REVISION
from meshpoint.errors import ConfigurationError
from meshpoint.model.ids import ReplicaId, new_id
from meshpoint.model.messages import dead_letter_queue, private_queue
from meshpoint.settings.urls import redact_url
from meshpoint.testing.conformance.broker import (
    AGENT,
    REQUESTS,
    Inbox,
    a_message,
    send,
    until_depth,
)
from servers import Proxy

pytestmark = pytest.mark.servers

REPLICA = ReplicaId("replica")
NEWEST = "id = (SELECT max(id) FROM meshpoint_queue_message)"


def with_property(name: str, value: object) -> str:
    """An assignment that replaces a property of a message."""
    text = json.dumps({name: value})
    assert "'" not in text
    return f"properties = regexp_replace(properties, '}}$', ', {text[1:-1]}}}')"


@pytest.fixture
async def broker(empty_postgres_url: str) -> AsyncIterator[PostgresBroker]:
    broker = PostgresBroker(
        empty_postgres_url,
        namespace="demo",
        lease=timedelta(seconds=3),
        private_ttl=timedelta(0),
        dead_letters_max_length=2,
    )
    await broker.open()
    await broker.declare(AGENT)
    yield broker
    await broker.close()


async def test_maintenance_drops_unused_queues_and_old_dead_letters(
    broker: PostgresBroker, empty_postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    other = PostgresBroker(empty_postgres_url, namespace="demo")
    await other.open()
    await other.declare(AGENT, REPLICA)
    await send(broker, private_queue(AGENT, REPLICA), a_message())
    letters = [a_message() for _ in range(4)]
    await send(broker, dead_letter_queue(AGENT), *letters)
    await other.close()
    await until_depth(broker, private_queue(AGENT, REPLICA), None)
    await until_depth(broker, dead_letter_queue(AGENT), 2)
    inbox = Inbox()
    await broker.consume(dead_letter_queue(AGENT), 2, inbox)
    kept = [delivery.message.message_id for delivery in await inbox.take(2)]
    assert kept == [letter.message_id for letter in letters[2:]]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_snapshot_that_another_session_keeps_is_reported_once(
    empty_postgres_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_module, "_OLD_SNAPSHOT", timedelta(0))
    monkeypatch.setattr(broker_module, "_BEATS_PER_SWEEP", 1)
    broker = PostgresBroker(empty_postgres_url, namespace="demo", lease=timedelta(seconds=0.5))
    connection = await asyncpg.connect(empty_postgres_url)
    sweeps, sweep = asyncio.Semaphore(0), PostgresBroker._redeclare

    async def count_sweeps(self: PostgresBroker, session: QueueSession) -> None:
        sweeps.release()
        await sweep(self, session)

    monkeypatch.setattr(PostgresBroker, "_redeclare", count_sweeps)
    try:
        async with connection.transaction(isolation="repeatable_read"):
            await connection.execute("SELECT 1")
            await broker.open()
            for _ in range(4):
                await sweeps.acquire()
    finally:
        await broker.close()
        await connection.close()
    (warning,) = [each for each in caplog.messages if "transaction open" in each]
    assert warning.startswith("session ")


async def test_a_smaller_prefetch_waits_for_the_claim_in_progress(
    broker: PostgresBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    claiming, go_on = asyncio.Event(), asyncio.Event()
    original = QueueSession.claim

    async def claim(self: QueueSession, consumers: Sequence[Consumer]) -> list[tuple[Claim, Any]]:
        claiming.set()
        await go_on.wait()
        return await original(self, consumers)

    monkeypatch.setattr(QueueSession, "claim", claim)
    subscription = await broker.consume(REQUESTS, 3, Inbox())
    await claiming.wait()
    resizing = asyncio.ensure_future(subscription.resize(1))
    done, _ = await asyncio.wait({resizing}, timeout=0)
    assert not done
    go_on.set()
    await resizing


async def test_all_consumers_of_a_recreated_queue_receive(
    broker: PostgresBroker, empty_postgres_url: str
) -> None:
    inboxes = [Inbox(), Inbox()]
    for inbox in inboxes:
        await broker.consume(REQUESTS, 1, inbox)
    connection = await asyncpg.connect(empty_postgres_url)
    try:
        await connection.execute("DELETE FROM meshpoint_queue")
        await connection.execute("DELETE FROM meshpoint_queue_holder")
    finally:
        await connection.close()
    await until_depth(broker, REQUESTS, 0)
    await send(broker, REQUESTS, a_message(), a_message())
    for inbox in inboxes:
        assert await (await inbox.next()).ack()


@pytest.fixture
async def plain_role_url(empty_postgres_url: str) -> AsyncIterator[str]:
    """The URL of a role that may not create tables."""
    role = f"plain_{new_id()[-12:]}"
    connection = await asyncpg.connect(empty_postgres_url)
    try:
        await connection.execute(f"CREATE ROLE {role} LOGIN")
        await connection.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
        address = urlsplit(empty_postgres_url)
        yield address._replace(netloc=f"{role}@{address.hostname}:{address.port}").geturl()
        await connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
    finally:
        await connection.close()


async def test_a_role_that_may_not_create_tables_uses_those_of_an_administrator(
    empty_postgres_url: str, plain_role_url: str
) -> None:
    broker = PostgresBroker(plain_role_url, namespace="demo")
    with pytest.raises(
        ConfigurationError, match=r"^mesh.broker_url: .*may not create.*db upgrade"
    ):
        await broker.open()
    await asyncio.to_thread(migrations.upgrade, empty_postgres_url, migrations.QUEUES)
    with pytest.raises(ConfigurationError, match=r"^mesh.broker_url: .*may not .*; run: GRANT"):
        await broker.open()
    connection = await asyncpg.connect(empty_postgres_url)
    role = urlsplit(plain_role_url).username
    await connection.execute(
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role}"
    )
    await connection.close()
    await broker.open()
    try:
        await broker.declare(AGENT)
        inbox = Inbox()
        await broker.consume(REQUESTS, 2, inbox)
        await send(broker, REQUESTS, a_message(), a_message())
        first, second = await inbox.take(2)
        assert await first.ack()
        assert await second.dead_letter("unwanted")
        await until_depth(broker, dead_letter_queue(AGENT), 1)
    finally:
        await broker.close()


async def test_a_login_that_the_database_refuses_is_a_configuration_error(
    empty_postgres_url: str,
) -> None:
    address = urlsplit(empty_postgres_url)
    url = address._replace(netloc=f"nobody@{address.hostname}:{address.port}").geturl()
    with pytest.raises(ConfigurationError, match=r"^mesh.broker_url: .*nobody"):
        await PostgresBroker(url, namespace="demo").open()


async def test_the_commands_for_databases_create_the_tables_of_the_queues_too(
    empty_postgres_url: str, tmp_path: Path
) -> None:
    config = tmp_path / "mesh.yaml"
    config.write_text(f"mesh: {{broker_url: '{empty_postgres_url}'}}\n")
    shown = redact_url(empty_postgres_url)
    checked = await _run_db("check", config)
    assert checked.code == 2
    assert checked.err.startswith(f"{shown} (queues): has no tables, needs 0002; run: meshpoint ")
    assert (
        "CREATE TABLE IF NOT EXISTS meshpoint_queue_message" in (await _run_db("sql", config)).out
    )
    upgraded = [await _run_db("upgrade", config) for _ in range(2)]
    assert [each.out for each in upgraded] == [
        f"{shown} (queues): upgraded to revision 0002\n",
        f"{shown} (queues): already at revision 0002\n",
    ]
    assert (await _run_db("check", config, "--json")).json == {
        "database": shown,
        "tables": "queues",
        "status": "up to date",
        "revision": "0002",
        "newest": "0002",
    }
    with config.open("a") as file:
        file.write(
            f"agents: [{{name: a, entrypoint: 'a:b', database_url: '{empty_postgres_url}'}}]"
        )
    upgraded = [await _run_db("upgrade", config)]
    assert upgraded[0].out.splitlines() == [
        f"{shown}: upgraded to revision {REVISION}",
        f"{shown} (queues): already at revision 0002",
    ]


async def _run_db(command: str, config: Path, *options: str) -> CommandResult:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "meshpoint.cli", "db", command, "--config", str(config)),
        *options,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return CommandResult(process.returncode or 0, out.decode(), err.decode())


async def test_brokers_that_open_at_once_create_the_tables_once(empty_postgres_url: str) -> None:
    brokers = [PostgresBroker(empty_postgres_url, namespace="demo") for _ in range(4)]
    await asyncio.gather(*(broker.open() for broker in brokers))
    for broker in brokers:
        await broker.close()
    assert await asyncio.to_thread(migrations.check, empty_postgres_url, migrations.QUEUES) == (
        "0002",
        "0002",
    )


async def test_tables_of_the_previous_release_are_upgraded(empty_postgres_url: str) -> None:
    broker = PostgresBroker(empty_postgres_url, namespace="demo")
    await broker.open()
    await broker.close()
    connection = await asyncpg.connect(empty_postgres_url)
    await connection.execute("ALTER TABLE meshpoint_queue_message DROP COLUMN dead_from")
    await connection.execute("UPDATE meshpoint_queue_version SET version_num = '0001'")
    await connection.close()
    letters = PostgresDeadLetters(
        empty_postgres_url, namespace="demo", timeout=timedelta(seconds=10)
    )
    with pytest.raises(ConfigurationError, match=r"older than this release.*meshpoint db upgrade"):
        await letters.open()
    await letters.close()
    await broker.open()
    await broker.close()
    await letters.open()
    await letters.close()


@pytest.mark.parametrize(
    ("assignment", "reason"),
    [
        ("properties = 'no json'", "properties: not JSON"),
        ("properties = '[]'", "properties: must be a JSON object"),
        ("properties = repeat('[', 50000)", "properties: not JSON"),
        ("properties = repeat('x', 1048577)", "properties: are too large to load"),
        (with_property("type", "telepathy"), "type: 'telepathy' is not known"),
        (with_property("message_id", ""), "message_id: is missing"),
        (with_property("app_id", 5), "app_id: must be text"),
        (with_property("correlation_id", "\ud800"), "correlation_id: is not UTF-8"),
        (with_property("headers", []), "headers: must be a JSON object"),
        (with_property("headers", {"x": "\ud800"}), "headers.x: is not UTF-8"),
        (with_property("headers", {"\ud800": 1}), "headers: is not UTF-8"),
        ("body = convert_to(repeat('x', 134217729), 'UTF8')", "body: is too large to load"),
    ],
)
async def test_an_unreadable_row_is_dead_lettered_and_others_arrive(
    broker: PostgresBroker, empty_postgres_url: str, assignment: str, reason: str
) -> None:
    inbox, good = Inbox(), [a_message(), a_message()]
    connection = await asyncpg.connect(empty_postgres_url)
    try:
        await send(broker, REQUESTS, good[0], a_message())
        await connection.execute(f"UPDATE meshpoint_queue_message SET {assignment} WHERE {NEWEST}")
        await send(broker, REQUESTS, good[1])
        await broker.consume(REQUESTS, 1, inbox)
        for message in good:
            delivery = await inbox.next()
            assert delivery.message == message
            assert await delivery.ack()
        await until_depth(broker, dead_letter_queue(AGENT), 1)
        row = await connection.fetchrow("SELECT holder, dead_reason FROM meshpoint_queue_message")
        assert row["holder"] == 0
        assert row["dead_reason"].startswith(reason)
    finally:
        await connection.close()


@pytest.mark.parametrize("deliveries", [-(2**31), -1, 2**31 - 1])
@pytest.mark.parametrize("row_id", ["id", "-id", "9223372036854775807 - id"])
async def test_a_row_with_an_odd_count_or_id_is_delivered(
    broker: PostgresBroker, empty_postgres_url: str, deliveries: int, row_id: str
) -> None:
    inbox, messages = Inbox(), [a_message() for _ in range(3)]
    connection = await asyncpg.connect(empty_postgres_url)
    try:
        await send(broker, REQUESTS, *messages[:2])
        await connection.execute(
            f"UPDATE meshpoint_queue_message SET deliveries = {deliveries}, id = {row_id} "
            f"WHERE {NEWEST}"
        )
        await send(broker, REQUESTS, messages[2])
        await broker.consume(REQUESTS, 1, inbox)
        seen = []
        for _ in messages:
            delivery = await inbox.next()
            seen.append(delivery.message.message_id)
            assert delivery.delivery_count >= 1
            assert await delivery.ack()
        assert sorted(seen) == sorted(message.message_id for message in messages)
    finally:
        await connection.close()


BLOCKED_CLAIMS = """
CREATE FUNCTION block_claim() RETURNS trigger LANGUAGE plpgsql SET lock_timeout = 0 AS $$
BEGIN PERFORM pg_advisory_xact_lock(1); RETURN NEW; END $$;
CREATE TRIGGER block_claim BEFORE UPDATE ON meshpoint_queue_message
   FOR EACH ROW WHEN (OLD.holder IS NULL) EXECUTE FUNCTION block_claim()"""
"""Claims wait for an advisory lock while they hold their rows."""


async def test_a_lost_claim_that_commits_late_is_requeued(
    empty_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server finishes a claim whose client is gone, after the other messages were requeued."""
    monkeypatch.setattr(session_module, "_LATE_CLAIM_SECONDS", [n / 20 for n in range(1, 200)])
    released, release = asyncio.Event(), QueueSession.release_unknown

    async def release_unknown(self: QueueSession, known: Collection[int]) -> None:
        await release(self, known)
        released.set()

    monkeypatch.setattr(QueueSession, "release_unknown", release_unknown)
    connection = await asyncpg.connect(empty_postgres_url)
    async with Proxy(empty_postgres_url) as proxy:
        broker = PostgresBroker(
            proxy.url, namespace="demo", poll_interval=timedelta(milliseconds=50)
        )
        await broker.open()
        try:
            await broker.declare(AGENT)
            await connection.execute(BLOCKED_CLAIMS)
            await connection.execute("SELECT pg_advisory_lock(1)")
            inbox = Inbox()
            await broker.consume(REQUESTS, 1, inbox)
            await send(broker, REQUESTS, a_message())
            waiting = False
            while not waiting:
                waiting = await connection.fetchval(
                    "SELECT EXISTS (SELECT FROM pg_locks "
                    "WHERE locktype = 'advisory' AND NOT granted)"
                )
            proxy.cut()
            await released.wait()
            await connection.execute("SELECT pg_advisory_unlock(1)")
            delivery = await inbox.next()
            assert delivery.delivery_count == 2
            assert await delivery.ack()
        finally:
            await broker.close()
            await connection.close()


async def test_a_defect_in_one_claim_stops_no_consumer(
    broker: PostgresBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures, original = [RuntimeError("unexpected")], QueueSession.claim

    async def claim(self: QueueSession, consumers: Sequence[Consumer]) -> list[tuple[Claim, Any]]:
        if failures:
            raise failures.pop()
        return await original(self, consumers)

    monkeypatch.setattr(QueueSession, "claim", claim)
    inbox = Inbox()
    await broker.consume(REQUESTS, 1, inbox)
    await send(broker, REQUESTS, a_message())
    assert await (await inbox.next()).ack()
    assert not failures
    assert "messages could not be claimed" in caplog.text


async def test_maintenance_holds_up_no_publisher(broker: PostgresBroker) -> None:
    session = broker._session
    assert session is not None
    async with session._other._lock:  # as during a slow VACUUM
        assert await session.reserve([Entry(f"demo.{REQUESTS}", to_content(a_message()))])
        await send(broker, REQUESTS, a_message())


async def test_a_silent_connection_for_notifications_is_replaced(
    empty_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host of a server may disappear without closing its connections."""
    monkeypatch.setattr(notifications, "_PROBE_SECONDS", 0.01)
    monkeypatch.setattr(notifications, "_RETRY_SECONDS", 0.01)
    listening, given_up = asyncio.Semaphore(0), asyncio.Event()
    async with Proxy(empty_postgres_url) as proxy:
        engine = engine_for(proxy.url, command_timeout=timedelta(seconds=0.5), pool_size=1)
        event.listen(engine.sync_engine, "invalidate", lambda *_: given_up.set())
        listener = Listener(engine, "demo", lambda _: listening.release())
        await listening.acquire()
        proxy.silence()
        await given_up.wait()
        proxy.resume()
        await listening.acquire()
        await listener.close()
        await engine.dispose()


async def test_after_a_slow_sweep_claims_stay_above_earlier_messages(
    broker: PostgresBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of acked messages stay while a session holds a snapshot; each sweep passes them all."""
    monkeypatch.setattr(broker_module, "_PAUSE_RATIO", 10**9)
    broker._poll_seconds = 0.01
    lows, claims, original = list[int](), asyncio.Semaphore(0), QueueSession.claim

    async def claim(self: QueueSession, consumers: Sequence[Consumer]) -> list[tuple[Claim, Any]]:
        claimed = await original(self, consumers)
        lows.append(min(consumer.low for consumer in consumers))
        claims.release()
        return claimed

    inbox = Inbox()
    await broker.consume(REQUESTS, 1, inbox)
    await broker.consume(dead_letter_queue(AGENT), 1, Inbox())
    await send(broker, REQUESTS, a_message())
    assert await (await inbox.next()).ack()
    broker._next_sweep = 0.0
    monkeypatch.setattr(QueueSession, "claim", claim)
    for _ in range(5):
        await claims.acquire()
    swept = lows.index(LOWEST_ID)
    assert LOWEST_ID not in lows[swept + 1 :]
