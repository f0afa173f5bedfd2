"""The broker on PostgreSQL: maintenance, prefetch and recreated queues, on a real server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

from meshpoint.adapters.postgres_queue import PostgresBroker
from meshpoint.adapters.postgres_queue.consumers import Claim, Consumer
from meshpoint.adapters.postgres_queue.session import QueueSession
from meshpoint.model.ids import ReplicaId
from meshpoint.model.messages import dead_letter_queue, private_queue
from meshpoint.testing.conformance.broker import (
    AGENT,
    REQUESTS,
    Inbox,
    a_message,
    send,
    until_depth,
)

pytestmark = pytest.mark.servers

REPLICA = ReplicaId("replica")


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
