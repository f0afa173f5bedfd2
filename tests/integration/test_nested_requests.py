"""In-process tasks that call agents of their own process group, through a real RabbitMQ."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from live import SLOW_BROKER_TIMEOUT

from meshpoint.adapters.rabbitmq import RabbitMqBroker
from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Step
from meshpoint.model.ids import AgentName, TaskId, new_id
from meshpoint.model.messages import Address, Header, nested_queue, request_queue
from meshpoint.model.outcomes import Ok
from meshpoint.ports.broker import Delivery, PublishResult
from meshpoint.settings import AgentSettings
from meshpoint.wiring import build_worker
from plain_client import PlainClient
from recorded_events import RecordedEvents
from servers import Proxy, RabbitServer

down_peer = Peer("down", int, int)
ping_peer, pong_peer = Peer("ping", int, int), Peer("pong", int, int)
tree_peer = Peer("tree", list, int)
older_peer = Peer("asks", str, str)


@agent("down", version="1")
async def count_down(ctx: TaskExecutionContext, depth: int) -> int:
    return 0 if depth == 0 else 1 + await down_peer(depth - 1)


@agent("ping", version="1")
async def call_pong(ctx: TaskExecutionContext, depth: int) -> int:
    return 0 if depth == 0 else 1 + await pong_peer(depth - 1)


@agent("pong", version="1")
async def call_ping(ctx: TaskExecutionContext, depth: int) -> int:
    return 0 if depth == 0 else 1 + await ping_peer(depth - 1)


@agent("tree", version="1")
async def call_branches(ctx: TaskExecutionContext, shape: list[int]) -> int:
    """Number of leaves of a tree that branches `shape[0]` times, then `shape[1]` times, etc."""
    if not shape:
        return 1
    return sum(await ctx.gather(*[tree_peer(shape[1:]) for _ in range(shape[0])]))


@agent("asks", version="1")
async def call_older(ctx: TaskExecutionContext, text: str) -> str:
    return await Peer("older", str, str)(text)


class AgentGroup:
    """The agents of one process, without a database."""

    def __init__(
        self,
        url: str,
        namespace: str,
        *agents: Any,
        publish_timeout: timedelta = SLOW_BROKER_TIMEOUT,
        **options: Any,
    ) -> None:
        self.broker = RabbitMqBroker(url, namespace=namespace, publish_timeout=publish_timeout)
        self.events = RecordedEvents()
        self.stop = asyncio.Event()
        self._namespace, self._agents, self._options = namespace, agents, options

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        await self.broker.open()
        try:
            for served_agent in self._agents:
                await self.broker.declare(AgentName(served_agent.name))
            async with asyncio.TaskGroup() as tasks:
                for served_agent in self._agents:
                    tasks.create_task(self._worker(served_agent).run(self.stop))
                yield
                self.stop.set()
        finally:
            await self.broker.close()

    def _worker(self, served: Any) -> Any:
        settings = AgentSettings(name=served.name, entrypoint="any:thing")
        options = replace(settings.options(), **self._options)
        return build_worker(served, settings, self._namespace, self.broker, self.events, options)


async def ask_all(client: PlainClient, agent_name: str, inputs: Sequence[Any]) -> list[Any]:
    """Outcomes of concurrent requests."""
    waiting = await asyncio.gather(
        *[client.send(agent_name, input_value) for input_value in inputs]
    )
    return [(await each).outcome for each in waiting]


@asynccontextmanager
async def running_group(
    url: str, namespace: str, *agents: Any, **options: Any
) -> AsyncIterator[tuple[PlainClient, AgentGroup]]:
    options_ = {"drain_timeout": timedelta(seconds=1), "peer_timeout": timedelta(hours=1)}
    group = AgentGroup(url, namespace, *agents, **{**options_, **options})
    async with (
        group.serving(),
        PlainClient(
            RabbitMqBroker(url, namespace=namespace, publish_timeout=SLOW_BROKER_TIMEOUT)
        ) as client,
    ):
        yield client, group


@pytest.mark.parametrize(
    ("agents", "input_", "result"),
    [
        pytest.param([count_down], 3, 3, id="calls itself"),
        pytest.param([call_pong, call_ping], 4, 4, id="call each other"),
        pytest.param([call_branches], [3, 2], 6, id="fans out to itself"),
    ],
)
async def test_tasks_that_call_their_own_group_all_complete(
    amqp_url: str, namespace: str, agents: list[Any], input_: Any, result: int
) -> None:
    """With more tasks than fit into the process, root requests wait but nested requests do not."""
    async with running_group(amqp_url, namespace, *agents, max_in_memory=30) as (client, _):
        outcomes = await ask_all(client, agents[0].name, [input_] * 60)
    assert outcomes == [Ok(result)] * 60


@pytest.mark.parametrize("fault", ["silence", "hold_responses"])
async def test_in_process_tasks_survive_a_stalled_broker(
    own_rabbit: RabbitServer, namespace: str, fault: str
) -> None:
    hour = timedelta(hours=1)
    async with Proxy(own_rabbit.url) as proxy:
        client_broker = RabbitMqBroker(
            own_rabbit.url, namespace=namespace, publish_timeout=SLOW_BROKER_TIMEOUT
        )
        # A reply that the broker confirmed too late is sent again, and the drain waits for that.
        group = AgentGroup(
            proxy.url,
            namespace,
            call_branches,
            publish_timeout=timedelta(seconds=5),  # a busy machine may start slowly
            peer_timeout=hour,
            drain_timeout=SLOW_BROKER_TIMEOUT,
            max_in_memory=40,
        )
        async with group.serving(), PlainClient(client_broker) as client:
            waiting = await asyncio.gather(*[client.send("tree", [3, 2]) for _ in range(60)])
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            getattr(proxy, fault)()
            await group.events.wait(Step.BROKER_UNAVAILABLE)
            proxy.resume()
            assert [(await reply).outcome for reply in waiting] == [Ok(6)] * 60
    assert group.events.matching(Step.REPLY_DROPPED) == []


async def test_more_roots_than_fit_in_memory_make_progress(amqp_url: str, namespace: str) -> None:
    limits = {"max_in_memory": 3, "max_concurrency": 2}
    async with running_group(amqp_url, namespace, count_down, **limits) as (client, group):
        assert await ask_all(client, "down", [4] * 6) == [Ok(4)] * 6
    (event,) = group.events.matching(Step.MEMORY_FULL)
    assert event.detail["max_in_memory"] == 3


@pytest.mark.parametrize("roots", [1, 8])
async def test_a_deep_recursion_needs_only_one_slot(
    amqp_url: str, namespace: str, roots: int
) -> None:
    limits = {"max_in_memory": 1, "max_concurrency": 1}
    async with running_group(amqp_url, namespace, count_down, **limits) as (client, _):
        assert await ask_all(client, "down", [10] * roots) == [Ok(10)] * roots


async def test_a_peer_of_an_older_release_is_called_on_its_own_queue(
    amqp_url: str, namespace: str
) -> None:
    """An older release declares no queue of nested requests."""
    async with running_group(amqp_url, namespace, call_older) as (client, group):
        older = AgentName("older")
        own_queue = RabbitMqBroker(
            amqp_url, namespace=namespace, publish_timeout=SLOW_BROKER_TIMEOUT
        )
        await own_queue.open()
        await own_queue.declare(older)
        await own_queue.close()
        await delete_queue(group.broker, nested_queue(older))
        arrived: asyncio.Queue[Delivery] = asyncio.Queue()
        await group.broker.consume(request_queue(older), 10, arrived.put_nowait)
        for _ in range(2):
            await client.send("asks", "hello")
            delivery = await arrived.get()
            assert delivery.message.headers[Header.CALL_DEPTH.value] == 1
            await delivery.ack()


async def test_nested_requests_on_the_shared_queue_do_not_deadlock(
    amqp_url: str, namespace: str
) -> None:
    """Callers of an older release send nested requests there."""
    limits = {"max_in_memory": 2, "max_concurrency": 1}
    async with running_group(amqp_url, namespace, count_down, **limits) as (client, group):
        waiting = []
        for _ in range(12):
            task_id = TaskId(new_id())
            waiting.append(client.expect("down", task_id))
            request = client.request(3, task_id, agent="down")
            request = replace(request, headers={**request.headers, Header.CALL_DEPTH.value: 1})
            assert await group.broker.publish([(request_queue(AgentName("down")), request)]) == [
                PublishResult.ACCEPTED
            ]
        assert [(await reply).outcome for reply in waiting] == [Ok(3)] * 12
    assert group.events.matching(Step.MEMORY_FULL) == []


async def delete_queue(broker: RabbitMqBroker, address: Address) -> None:
    async with broker._consume_connection.channel() as channel:
        await channel.queue_delete(broker._topology.queue_name(address))
