"""Messages that the broker can never accept are not sent: long texts, requests or replies."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from live import open_broker, serve_agent

from fake_peer import FakePeer
from meshpoint import TaskExecutionContext, agent
from meshpoint.agents.peer import Peer
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import AgentName
from meshpoint.model.messages import Header, dead_letter_queue, request_queue
from meshpoint.model.options import AckPolicy
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from servers import RabbitServer
from unusual_content import OVERSIZED, publish_raw

LIMIT = 10_000


@agent("writer")
async def write_text(ctx: TaskExecutionContext, size: int) -> str:
    """Return `size` bytes."""
    return "x" * size


@agent("caller")
async def call_writer(ctx: TaskExecutionContext, size: int) -> int:
    """Send a peer a request of `size` bytes."""
    return len(await Peer("writer", str, str)("y" * size))


@agent("writer")
async def asking(ctx: TaskExecutionContext, number: int) -> int:
    """Call `client`."""
    return await Peer("client", int, int)(number)


@pytest.fixture
async def small(own_rabbit: RabbitServer) -> AsyncIterator[RabbitServer]:
    """A server that accepts messages of at most `LIMIT` bytes."""
    await own_rabbit.limit_messages(LIMIT)
    yield own_rabbit
    await own_rabbit.limit_messages()


@pytest.mark.parametrize("policy", ["at_checkpoint", "on_receipt"])
async def test_a_reply_above_the_brokers_limit_becomes_a_failure(
    small: RabbitServer, namespace: str, postgres_url: str, policy: AckPolicy
) -> None:
    async with (
        open_broker(small.url, namespace) as broker,
        serve_agent(
            write_text, small.url, namespace, postgres_url, ack_policy=policy
        ) as running_worker,
    ):
        client = await FakePeer(broker, "client").open()
        for _ in range(3):
            large_id, small_id = (
                await client.ask("writer", 3 * LIMIT),
                await client.ask("writer", 10),
            )
            assert await client.reply(small_id) == Ok("x" * 10)
            failed = await client.reply(large_id)
            assert isinstance(failed, Failed)
            assert f"the broker accepts at most {LIMIT}" in failed.message
        # the row has the large reply; a repeated request gets the same failure
        if policy == "on_receipt":
            acks = len(running_worker.events.matching(Step.ACK, Phase.AFTER, large_id))
            await client.ask("writer", 3 * LIMIT, task_id=large_id)
            await client.wait_until(lambda: len(client.replies(large_id)) == 2)
            assert client.replies(large_id)[0] == client.replies(large_id)[1] == failed
            await running_worker.events.wait(Step.ACK, Phase.AFTER, acks + 1, large_id)
            assert running_worker.store is not None
            await running_worker.store.flush_confirms()
            assert await running_worker.store.unsent(AgentName("writer"), 10) == []
        assert not running_worker.task.done()


async def test_a_request_above_the_brokers_limit_fails_its_call(
    small: RabbitServer, namespace: str, postgres_url: str
) -> None:
    async with (
        open_broker(small.url, namespace) as broker,
        serve_agent(
            call_writer, small.url, namespace, postgres_url, max_message_bytes=10 * LIMIT
        ) as running_worker,
    ):
        client = await FakePeer(broker, "client").open()
        await broker.declare(AgentName("writer"))
        failed = await client.reply(await client.ask("caller", 3 * LIMIT))
        assert isinstance(failed, Failed)
        assert FailureKind.UNDELIVERABLE in failed.message
        assert f"the broker accepts at most {LIMIT}" in failed.message
        assert not running_worker.task.done()


@pytest.mark.parametrize("name", OVERSIZED)
async def test_a_text_too_long_to_quote_fails_only_its_own_message(
    amqp_url: str, namespace: str, postgres_url: str, name: str
) -> None:
    """A dead letter or an error reply would quote or forward it."""
    async with (
        open_broker(amqp_url, namespace) as broker,
        serve_agent(write_text, amqp_url, namespace, postgres_url) as running_worker,
    ):
        client = await FakePeer(broker, "client").open()
        properties, body = OVERSIZED[name]
        await publish_raw(
            amqp_url, f"{namespace}.mesh", request_queue(AgentName("writer")), properties, body
        )
        assert await client.reply(await client.ask("writer", 10)) == Ok("x" * 10)
        (event,) = await running_worker.events.wait(Step.DEAD_LETTER, Phase.INFO)
        assert len(str(event.detail["reason"])) <= 500
        assert await client.depth(dead_letter_queue(AgentName("writer"))) == 1
        assert running_worker.events.matching(Step.BROKER_UNAVAILABLE, Phase.INFO) == []


async def test_a_trace_context_too_long_to_forward_is_dropped(
    amqp_url: str, namespace: str, postgres_url: str
) -> None:
    async with (
        open_broker(amqp_url, namespace) as broker,
        serve_agent(asking, amqp_url, namespace, postgres_url) as running_worker,
    ):
        client = await FakePeer(broker, "client").open()
        task_id = await client.ask("writer", 1, traceparent="x" * 130_000)
        call = await client.wait_for_request()
        assert Header.TRACEPARENT not in call.headers
        await client.respond(call, 2)
        assert await client.reply(task_id) == Ok(2)
        assert running_worker.events.matching(Step.BROKER_UNAVAILABLE, Phase.INFO) == []
