"""Full or missing reply queues delay no other requester."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiormq
import pytest
from aiormq.abc import AbstractChannel, DeliveredMessage
from live import RunningWorker, open_broker, serve_agent

from fake_peer import FakePeer
from meshpoint import TaskExecutionContext, agent
from meshpoint.model.events import Phase, Step
from meshpoint.model.outcomes import Ok
from meshpoint.model.tasks import TaskState
from servers import RabbitServer

BACKENDS = pytest.mark.parametrize("durable", [True, False], ids=["database", "memory"])


@agent("doubler")
async def doubler(ctx: TaskExecutionContext, number: int) -> int:
    """Answer in the first segment."""
    return 2 * number


@pytest.fixture
async def client(rabbit_server: RabbitServer, namespace: str) -> AsyncIterator[FakePeer]:
    async with open_broker(rabbit_server.url, namespace) as broker:
        yield await FakePeer(broker, "client").open()


@pytest.fixture
async def operator(rabbit_server: RabbitServer) -> AsyncIterator[AbstractChannel]:
    connection = await aiormq.connect(rabbit_server.url)
    yield await connection.channel()
    await connection.close()


async def fill_queue(operator: AbstractChannel, namespace: str, address: str) -> str:
    """Declare a queue at `address` that refuses every message, and return its name."""
    name = f"{namespace}.{address}"
    await operator.queue_declare(
        name, arguments={"x-max-length": 0, "x-overflow": "reject-publish"}
    )
    await operator.queue_bind(name, f"{namespace}.mesh", address)
    return name


def acked_ids(running_worker: RunningWorker) -> set[str]:
    return {
        task_id
        for event in running_worker.events.matching(Step.ACK, Phase.AFTER)
        for task_id in event.task_ids
    }


def task_ids_of(running_worker: RunningWorker, step: Step) -> set[str]:
    return {
        task_id
        for event in running_worker.events.matching(step, Phase.INFO)
        for task_id in event.task_ids
    }


@BACKENDS
async def test_sixty_missing_reply_queues_delay_no_other_reply(
    client: FakePeer,
    rabbit_server: RabbitServer,
    namespace: str,
    postgres_url: str,
    durable: bool,
) -> None:
    database = postgres_url if durable else None
    async with serve_agent(
        doubler, rabbit_server.url, namespace, database, max_concurrency=4
    ) as running_worker:
        missing_ids = [
            await client.ask("doubler", number, reply_to=f"client.private.{number}")
            for number in range(60)
        ]
        healthy_id = await client.ask("doubler", 21)
        assert await client.reply(healthy_id) == Ok(42)
        assert not task_ids_of(running_worker, Step.REPLY_UNROUTABLE), (
            "an address was given up before this reply"
        )
        await running_worker.events.wait_until(
            lambda: acked_ids(running_worker) >= {*missing_ids, healthy_id}
        )
        assert running_worker.worker.runtime.slots.free == 4
        if running_worker.store is not None:
            rows = await running_worker.store.lookup(missing_ids)
            assert {row.state for row in rows.values()} == {TaskState.COMPLETED}
            assert len(rows) == 60


@BACKENDS
async def test_refusals_to_missing_reply_queues_delay_no_other_reply(
    client: FakePeer,
    rabbit_server: RabbitServer,
    namespace: str,
    postgres_url: str,
    durable: bool,
) -> None:
    database = postgres_url if durable else None
    async with serve_agent(
        doubler, rabbit_server.url, namespace, database, max_concurrency=2
    ) as running_worker:
        missing_ids = [
            await client.ask("doubler", 1, reply_to=f"client.private.{index}", call_depth=99)
            for index in range(20)
        ]
        healthy_id = await client.ask("doubler", 21)
        assert await client.reply(healthy_id) == Ok(42)
        await running_worker.events.wait_until(
            lambda: acked_ids(running_worker) >= {*missing_ids, healthy_id}
        )


@BACKENDS
async def test_a_full_reply_queue_delays_no_one_and_gets_its_replies_later(
    client: FakePeer,
    operator: AbstractChannel,
    rabbit_server: RabbitServer,
    namespace: str,
    postgres_url: str,
    durable: bool,
) -> None:
    database = postgres_url if durable else None
    async with serve_agent(
        doubler, rabbit_server.url, namespace, database, max_concurrency=2
    ) as running_worker:
        name = await fill_queue(operator, namespace, "client.private.full")
        full = [
            await client.ask("doubler", number, reply_to="client.private.full")
            for number in range(8)
        ]
        healthy_id = await client.ask("doubler", 21)
        assert await client.reply(healthy_id) == Ok(42)
        await running_worker.events.wait_until(
            lambda: acked_ids(running_worker) >= ({*full, healthy_id} if durable else {healthy_id})
        )
        await operator.queue_delete(name)
        await operator.queue_declare(name)
        await operator.queue_bind(name, f"{namespace}.mesh", "client.private.full")
        late: set[str] = set()
        arrived = asyncio.Event()

        async def receive(message: DeliveredMessage) -> None:
            late.add(str(message.header.properties.correlation_id))
            if late >= {*full}:
                arrived.set()

        await operator.basic_consume(name, receive, no_ack=True)
        await arrived.wait()


async def test_without_a_database_a_limited_number_of_replies_wait(
    client: FakePeer, operator: AbstractChannel, rabbit_server: RabbitServer, namespace: str
) -> None:
    async with serve_agent(
        doubler, rabbit_server.url, namespace, None, max_in_memory=3
    ) as running_worker:
        await fill_queue(operator, namespace, "client.private.full")
        for number in range(5):
            await client.ask("doubler", number, reply_to="client.private.full")
        await running_worker.events.wait_until(
            lambda: len(task_ids_of(running_worker, Step.REPLY_DROPPED)) == 2
        )
        await running_worker.events.wait_until(
            lambda: acked_ids(running_worker) == task_ids_of(running_worker, Step.REPLY_DROPPED)
        )
        healthy_id = await client.ask("doubler", 21)
        assert await client.reply(healthy_id) == Ok(42)
        assert acked_ids(running_worker) <= {
            *task_ids_of(running_worker, Step.REPLY_DROPPED),
            healthy_id,
        }, "acked a request whose only reply is in this process"


async def test_a_redelivered_request_with_a_full_reply_queue_is_acked(
    client: FakePeer,
    operator: AbstractChannel,
    rabbit_server: RabbitServer,
    namespace: str,
    postgres_url: str,
) -> None:
    async with serve_agent(
        doubler, rabbit_server.url, namespace, postgres_url, ack_policy="on_receipt"
    ) as running_worker:
        task_id = await client.ask("doubler", 21)
        assert await client.reply(task_id) == Ok(42)
        await fill_queue(operator, namespace, "client.private.full")
        await running_worker.events.wait(Step.CONFIRM_SENT, Phase.AFTER, task_id=task_id)
        # a new request is acked only once it has a row
        if segment := running_worker.worker.tasks.segments.get(task_id):
            await segment.removed.wait()
        before = len(running_worker.events.matching(Step.ACK, Phase.AFTER, task_id))
        await client.ask("doubler", 21, reply_to="client.private.full", task_id=task_id)
        await running_worker.events.wait(Step.ACK, Phase.AFTER, before + 1, task_id)
