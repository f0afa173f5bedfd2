"""Full or missing reply queues delay no other requester."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiormq
import pytest
from aiormq.abc import AbstractChannel, DeliveredMessage
from live import Desk, Live, a_broker, serving

from meshpoint import TaskExecutionContext, agent
from meshpoint.model.checkpoint import TaskState
from meshpoint.model.events import Phase, Step
from meshpoint.model.options import AckPolicy
from meshpoint.model.outcomes import Ok
from servers import RabbitServer

HOMES = pytest.mark.parametrize("durable", [True, False], ids=["database", "memory"])


@agent("doubler")
async def doubler(ctx: TaskExecutionContext, number: int) -> int:
    """Answer in the first segment."""
    return 2 * number


@pytest.fixture
async def desk(rabbit_server: RabbitServer, namespace: str) -> AsyncIterator[Desk]:
    async with a_broker(rabbit_server.url, namespace) as broker:
        yield await Desk(broker, "desk").open()


@pytest.fixture
async def operator(rabbit_server: RabbitServer) -> AsyncIterator[AbstractChannel]:
    connection = await aiormq.connect(rabbit_server.url)
    yield await connection.channel()
    await connection.close()


async def full_queue(operator: AbstractChannel, namespace: str, address: str) -> str:
    """Declare a queue at `address` that refuses every message, and return its name."""
    name = f"{namespace}.{address}"
    await operator.queue_declare(name, arguments={"x-max-length": 0, "x-overflow": "reject-publish"})
    await operator.queue_bind(name, f"{namespace}.mesh", address)
    return name


def acked(live: Live) -> set[str]:
    return {task_id for event in live.events.of(Step.ACK, Phase.AFTER) for task_id in event.task_ids}


def steps(live: Live, step: Step) -> set[str]:
    return {task_id for event in live.events.of(step, Phase.NOTED) for task_id in event.task_ids}


@HOMES
async def test_sixty_missing_reply_queues_hold_up_nobody(
    desk: Desk, rabbit_server: RabbitServer, namespace: str, postgres_url: str, durable: bool
) -> None:
    database = postgres_url if durable else None
    async with serving(doubler, rabbit_server.url, namespace, database, max_concurrency=4) as live:
        bad = [await desk.ask("doubler", number, reply_to=f"desk.private.{number}") for number in range(60)]
        sane = await desk.ask("doubler", 21)
        assert await desk.reply(sane) == Ok(42)
        assert not steps(live, Step.REPLY_UNROUTABLE), "an address was given up before this reply"
        await live.events.until(lambda: acked(live) >= {*bad, sane})
        assert live.worker.site.slots.free == 4
        if live.store is not None:
            rows = await live.store.lookup(bad)
            assert {row.state for row in rows.values()} == {TaskState.COMPLETED}
            assert len(rows) == 60


@HOMES
async def test_refusals_to_missing_reply_queues_hold_up_nobody(
    desk: Desk, rabbit_server: RabbitServer, namespace: str, postgres_url: str, durable: bool
) -> None:
    database = postgres_url if durable else None
    async with serving(doubler, rabbit_server.url, namespace, database, max_concurrency=2) as live:
        bad = [await desk.ask("doubler", 1, reply_to=f"desk.private.{n}", call_depth=99) for n in range(20)]
        sane = await desk.ask("doubler", 21)
        assert await desk.reply(sane) == Ok(42)
        await live.events.until(lambda: acked(live) >= {*bad, sane})


@HOMES
async def test_a_full_reply_queue_holds_up_nobody_and_gets_its_replies_later(
    desk: Desk,
    operator: AbstractChannel,
    rabbit_server: RabbitServer,
    namespace: str,
    postgres_url: str,
    durable: bool,
) -> None:
    database = postgres_url if durable else None
    async with serving(doubler, rabbit_server.url, namespace, database, max_concurrency=2) as live:
        name = await full_queue(operator, namespace, "desk.private.full")
        full = [await desk.ask("doubler", number, reply_to="desk.private.full") for number in range(8)]
        sane = await desk.ask("doubler", 21)
        assert await desk.reply(sane) == Ok(42)
        await live.events.until(lambda: acked(live) >= ({*full, sane} if durable else {sane}))
        await operator.queue_delete(name)
        await operator.queue_declare(name)
        await operator.queue_bind(name, f"{namespace}.mesh", "desk.private.full")
        late: set[str] = set()
        arrived = asyncio.Event()

        async def take(message: DeliveredMessage) -> None:
            late.add(str(message.header.properties.correlation_id))
            if late >= {*full}:
                arrived.set()

        await operator.basic_consume(name, take, no_ack=True)
        await arrived.wait()


async def test_without_a_database_only_so_many_replies_wait(
    desk: Desk, operator: AbstractChannel, rabbit_server: RabbitServer, namespace: str
) -> None:
    async with serving(doubler, rabbit_server.url, namespace, None, max_in_memory=3) as live:
        await full_queue(operator, namespace, "desk.private.full")
        for number in range(5):
            await desk.ask("doubler", number, reply_to="desk.private.full")
        await live.events.until(lambda: len(steps(live, Step.REPLY_DROPPED)) == 2)
        await live.events.until(lambda: acked(live) == steps(live, Step.REPLY_DROPPED))
        sane = await desk.ask("doubler", 21)
        assert await desk.reply(sane) == Ok(42)
        assert acked(live) <= {*steps(live, Step.REPLY_DROPPED), sane}, (
            "acked a request whose only reply is in this process"
        )


async def test_a_request_that_comes_again_with_a_full_reply_queue_is_acked(
    desk: Desk, operator: AbstractChannel, rabbit_server: RabbitServer, namespace: str, postgres_url: str
) -> None:
    async with serving(doubler, rabbit_server.url, namespace, postgres_url, ack_policy=AckPolicy.ON_RECEIPT) as live:
        task_id = await desk.ask("doubler", 21)
        assert await desk.reply(task_id) == Ok(42)
        await full_queue(operator, namespace, "desk.private.full")
        await live.events.wait(Step.MARK, Phase.AFTER, task_id=task_id)
        # until it has left, because a new request is acked only once it has a row
        while task_id in live.worker.segments.live:
            await asyncio.sleep(0.01)
        before = len(live.events.of(Step.ACK, Phase.AFTER, task_id))
        await desk.ask("doubler", 21, reply_to="desk.private.full", task_id=task_id)
        await live.events.wait(Step.ACK, Phase.AFTER, before + 1, task_id)
