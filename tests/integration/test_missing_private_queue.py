"""A replica without its private queue still serves all work from the shared queues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import aiormq
import pytest
from aiormq.abc import AbstractConnection
from live import open_broker, serve_agent

from fake_peer import FakePeer
from meshpoint import TaskExecutionContext, agent
from meshpoint.agents.peer import Peer
from meshpoint.errors import PeerFailed, Unavailable
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import AgentName, ReplicaId
from meshpoint.model.messages import private_queue
from meshpoint.model.outcomes import Ok
from servers import Proxy, RabbitServer

REPLICA = ReplicaId("r1")
PRIVATE = private_queue(AgentName("asker"), REPLICA)
silent_peer = Peer("silent", int, int, timeout=timedelta(seconds=2))


@agent("asker")
async def call_silent_peer(ctx: TaskExecutionContext, number: int) -> str:
    """Call a peer that never answers."""
    try:
        await silent_peer(number)
    except PeerFailed as error:
        return str(error.outcome.kind)
    return "answered"


@pytest.fixture
async def client(rabbit_server: RabbitServer, namespace: str) -> AsyncIterator[FakePeer]:
    async with open_broker(rabbit_server.url, namespace) as broker:
        await broker.declare(AgentName("silent"))
        yield await FakePeer(broker, "client").open()


@pytest.fixture
async def other_connection(rabbit_server: RabbitServer) -> AsyncIterator[AbstractConnection]:
    """A connection that takes a queue's name for itself."""
    connection = await aiormq.connect(rabbit_server.url)
    yield connection
    await connection.close()


async def lock_queue(other_connection: AbstractConnection, name: str) -> None:
    """Replace the queue with an exclusive queue of the same name."""
    channel = await other_connection.channel()
    await channel.queue_delete(name)
    await channel.queue_declare(name, exclusive=True)


async def test_a_replica_starts_and_enforces_deadlines_without_its_private_queue(
    client: FakePeer,
    other_connection: AbstractConnection,
    rabbit_server: RabbitServer,
    namespace: str,
    postgres_url: str,
) -> None:
    await lock_queue(other_connection, f"{namespace}.{PRIVATE}")
    async with serve_agent(
        call_silent_peer, rabbit_server.url, namespace, postgres_url, REPLICA
    ) as running_worker:
        assert not running_worker.broker.is_consuming(PRIVATE)
        assert await client.reply(await client.ask("asker", 1)) == Ok("timeout")
        assert not running_worker.broker.is_consuming(PRIVATE)


async def test_deadlines_are_enforced_after_the_private_queue_was_lost(
    client: FakePeer,
    other_connection: AbstractConnection,
    rabbit_server: RabbitServer,
    namespace: str,
    postgres_url: str,
) -> None:
    async with (
        Proxy(rabbit_server.url) as proxy,
        serve_agent(
            call_silent_peer, proxy.url, namespace, postgres_url, REPLICA
        ) as running_worker,
    ):
        waiting = await client.ask("asker", 1)
        await running_worker.events.wait(Step.DISPATCH, Phase.AFTER)
        assert running_worker.broker.is_consuming(PRIVATE)
        proxy.refuse()
        await lock_queue(other_connection, f"{namespace}.{PRIVATE}")
        await proxy.accept()
        assert await client.reply(waiting) == Ok("timeout")
        assert await client.reply(await client.ask("asker", 2)) == Ok("timeout")
        assert not running_worker.broker.is_consuming(PRIVATE)
        assert not running_worker.broker.connected
        await other_connection.close()  # frees the name
        while not running_worker.broker.connected:  # noqa: ASYNC110  a broker has no event for it
            await asyncio.sleep(0.01)


async def test_a_replica_without_a_database_does_not_start_without_its_private_queue(
    other_connection: AbstractConnection, rabbit_server: RabbitServer, namespace: str
) -> None:
    await lock_queue(other_connection, f"{namespace}.{PRIVATE}")
    with pytest.raises(Unavailable):
        async with serve_agent(
            call_silent_peer,
            rabbit_server.url,
            namespace,
            None,
            REPLICA,
            startup_timeout=timedelta(seconds=0.5),
        ):
            pass
