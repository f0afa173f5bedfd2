"""A replica without its private queue still serves everything that needs only the shared queues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import aiormq
import pytest
from aiormq.abc import AbstractConnection
from live import Desk, a_broker, serving

from meshpoint import TaskExecutionContext, agent
from meshpoint.agents.peer import Peer
from meshpoint.errors import PeerFailed, Unavailable
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import AgentName, ReplicaId
from meshpoint.model.messages import private_of, responses_of
from meshpoint.model.outcomes import Ok
from servers import Proxy, RabbitServer

REPLICA = ReplicaId("r1")
PRIVATE = private_of(AgentName("asker"), REPLICA)
silent = Peer("silent", int, int, timeout=timedelta(seconds=2))


@agent("asker")
async def asker(ctx: TaskExecutionContext, number: int) -> str:
    """Call a peer that never answers."""
    try:
        await ctx.call(silent(number))
    except PeerFailed as error:
        return str(error.outcome.kind)
    return "answered"


@pytest.fixture
async def desk(rabbit_server: RabbitServer, namespace: str) -> AsyncIterator[Desk]:
    async with a_broker(rabbit_server.url, namespace) as broker:
        await broker.declare(AgentName("silent"))
        yield await Desk(broker, "desk").open()


@pytest.fixture
async def thief(rabbit_server: RabbitServer) -> AsyncIterator[AbstractConnection]:
    """A connection that takes a queue's name for itself."""
    connection = await aiormq.connect(rabbit_server.url)
    yield connection
    await connection.close()


async def lock(thief: AbstractConnection, name: str) -> None:
    """Replace the queue with an exclusive queue of the same name."""
    channel = await thief.channel()
    await channel.queue_delete(name)
    await channel.queue_declare(name, exclusive=True)


async def test_a_replica_starts_and_enforces_deadlines_without_its_private_queue(
    desk: Desk, thief: AbstractConnection, rabbit_server: RabbitServer, namespace: str, postgres_url: str
) -> None:
    await lock(thief, f"{namespace}.{PRIVATE}")
    async with serving(asker, rabbit_server.url, namespace, postgres_url, REPLICA) as live:
        assert not live.broker.consuming(PRIVATE)
        assert await desk.reply(await desk.ask("asker", 1)) == Ok("timeout")
        assert not live.broker.consuming(PRIVATE)


async def test_deadlines_are_enforced_after_the_private_queue_was_lost(
    desk: Desk, thief: AbstractConnection, rabbit_server: RabbitServer, namespace: str, postgres_url: str
) -> None:
    async with (
        Proxy(rabbit_server.url) as proxy,
        serving(asker, proxy.url, namespace, postgres_url, REPLICA) as live,
    ):
        waiting = await desk.ask("asker", 1)
        await live.events.wait(Step.DISPATCH, Phase.AFTER)
        assert live.broker.consuming(PRIVATE)
        proxy.refuse()
        await lock(thief, f"{namespace}.{PRIVATE}")
        await proxy.accept()
        while not live.broker.consuming(responses_of(AgentName("asker"))):
            await asyncio.sleep(0.01)
        assert await desk.reply(waiting) == Ok("timeout")
        assert await desk.reply(await desk.ask("asker", 2)) == Ok("timeout")
        assert not live.broker.consuming(PRIVATE)
        assert not live.broker.connected
        await thief.close()  # frees the name
        while not live.broker.connected:
            await asyncio.sleep(0.01)


async def test_a_replica_without_a_database_does_not_start_without_its_private_queue(
    thief: AbstractConnection, rabbit_server: RabbitServer, namespace: str
) -> None:
    await lock(thief, f"{namespace}.{PRIVATE}")
    with pytest.raises(Unavailable):
        async with serving(
            asker, rabbit_server.url, namespace, None, REPLICA, startup_timeout=timedelta(seconds=0.5)
        ):
            pass
