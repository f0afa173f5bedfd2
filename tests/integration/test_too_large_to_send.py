"""Messages the broker can never accept are not retried: a reply becomes a failure, a request ends its call."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from live import Desk, a_broker, serving

from meshpoint import TaskExecutionContext, agent
from meshpoint.agents.peer import Peer
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import AgentName
from meshpoint.model.options import AckPolicy
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from servers import RabbitServer

LIMIT = 10_000


@agent("writer")
async def writer(ctx: TaskExecutionContext, size: int) -> str:
    """Answers with as many bytes as it was asked for."""
    return "x" * size


@agent("caller")
async def caller(ctx: TaskExecutionContext, size: int) -> int:
    """Sends a request of that size to a peer, and asks it for a little."""
    return len(await ctx.call(Peer("writer", str, str)("y" * size)))


@pytest.fixture
async def small(own_rabbit: RabbitServer) -> AsyncIterator[RabbitServer]:
    """A server that takes messages of at most `LIMIT` bytes."""
    await own_rabbit.control("eval", f"application:set_env(rabbit, max_message_size, {LIMIT}).")
    yield own_rabbit
    await own_rabbit.control("eval", "application:set_env(rabbit, max_message_size, 134217728).")


@pytest.mark.parametrize("policy", ["at_checkpoint", "on_receipt"])
async def test_a_reply_above_the_brokers_limit_becomes_a_failure(
    small: RabbitServer, namespace: str, postgres_url: str, policy: str
) -> None:
    async with (
        a_broker(small.url, namespace) as broker,
        serving(writer, small.url, namespace, postgres_url, ack_policy=AckPolicy(policy)) as live,
    ):
        desk = await Desk(broker, "desk").open()
        for _ in range(3):
            large, little = await desk.ask("writer", 3 * LIMIT), await desk.ask("writer", 10)
            assert await desk.reply(little) == Ok("x" * 10)
            failed = await desk.reply(large)
            assert isinstance(failed, Failed)
            assert f"the broker accepts at most {LIMIT}" in failed.message
        if policy == "on_receipt":  # the row has the large reply; a repeated request gets the same failure
            acks = len(live.events.of(Step.ACK, Phase.AFTER, large))
            await desk.ask("writer", 3 * LIMIT, task_id=large)
            await desk.until(lambda: len(desk.replies(large)) == 2)
            assert desk.replies(large)[0] == desk.replies(large)[1] == failed
            await live.events.wait(Step.ACK, Phase.AFTER, acks + 1, large)
            assert live.store is not None
            await live.store.marks_written()
            assert await live.store.unsent(AgentName("writer"), 10) == []
        assert not live.task.done()


async def test_a_request_above_the_brokers_limit_ends_its_call(
    small: RabbitServer, namespace: str, postgres_url: str
) -> None:
    async with (
        a_broker(small.url, namespace) as broker,
        serving(caller, small.url, namespace, postgres_url, max_message_bytes=10 * LIMIT) as live,
    ):
        desk = await Desk(broker, "desk").open()
        await broker.declare(AgentName("writer"))
        failed = await desk.reply(await desk.ask("caller", 3 * LIMIT))
        assert isinstance(failed, Failed)
        assert FailureKind.UNDELIVERABLE in failed.message
        assert f"the broker accepts at most {LIMIT}" in failed.message
        assert not live.task.done()
