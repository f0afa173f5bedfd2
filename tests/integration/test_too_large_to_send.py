"""Messages that the broker can never accept are not sent: long texts, large replies or requests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from live import Desk, a_broker, serving

from meshpoint import TaskExecutionContext, agent
from meshpoint.agents.peer import Peer
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import AgentName
from meshpoint.model.messages import Header, MessageType, dead_letters_of, requests_of
from meshpoint.model.options import AckPolicy
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from odd_content import OVERSIZED, publish_raw
from servers import RabbitServer

LIMIT = 10_000


@agent("writer")
async def writer(ctx: TaskExecutionContext, size: int) -> str:
    """Return `size` bytes."""
    return "x" * size


@agent("caller")
async def caller(ctx: TaskExecutionContext, size: int) -> int:
    """Send a peer a request of `size` bytes."""
    return len(await ctx.call(Peer("writer", str, str)("y" * size)))


@agent("writer")
async def asking(ctx: TaskExecutionContext, number: int) -> int:
    """Call `desk`."""
    return await ctx.call(Peer("desk", int, int)(number))


@pytest.fixture
async def small(own_rabbit: RabbitServer) -> AsyncIterator[RabbitServer]:
    """A server that accepts messages of at most `LIMIT` bytes."""
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
        # the row has the large reply; a repeated request gets the same failure
        if policy == "on_receipt":
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


@pytest.mark.parametrize("name", OVERSIZED)
async def test_a_text_too_long_to_quote_costs_its_own_message_alone(
    amqp_url: str, namespace: str, postgres_url: str, name: str
) -> None:
    """A dead letter or an error reply would quote or forward it."""
    async with (
        a_broker(amqp_url, namespace) as broker,
        serving(writer, amqp_url, namespace, postgres_url) as live,
    ):
        desk = await Desk(broker, "desk").open()
        properties, body = OVERSIZED[name]
        await publish_raw(amqp_url, f"{namespace}.mesh", requests_of(AgentName("writer")), properties, body)
        assert await desk.reply(await desk.ask("writer", 10)) == Ok("x" * 10)
        (dead,) = await live.events.wait(Step.DEAD_LETTER, Phase.NOTED)
        assert len(str(dead.detail["reason"])) <= 500
        assert await desk.depth(dead_letters_of(AgentName("writer"))) == 1
        assert live.events.of(Step.BROKER_AWAY, Phase.NOTED) == []


async def test_a_trace_context_too_long_to_hand_on_is_dropped(
    amqp_url: str, namespace: str, postgres_url: str
) -> None:
    async with (
        a_broker(amqp_url, namespace) as broker,
        serving(asking, amqp_url, namespace, postgres_url) as live,
    ):
        desk = await Desk(broker, "desk").open()
        task_id = await desk.ask("writer", 1, traceparent="x" * 130_000)
        await desk.until(lambda: any(each.type is MessageType.REQUEST for each in desk.letters))
        (call,) = (each for each in desk.letters if each.type is MessageType.REQUEST)
        assert Header.TRACEPARENT not in call.headers
        await desk.answer(call, 2)
        assert await desk.reply(task_id) == Ok(2)
        assert live.events.of(Step.BROKER_AWAY, Phase.NOTED) == []
