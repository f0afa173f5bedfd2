"""In-process tasks that call agents of their own process group, through a real RabbitMQ."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from live import BUSY

from meshpoint.adapters.rabbitmq import RabbitMqBroker
from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.client import Client
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Event, Step
from meshpoint.model.ids import AgentName, TaskId, new_id
from meshpoint.model.messages import Header, nested_of, requests_of
from meshpoint.model.outcomes import Ok
from meshpoint.ports.broker import Delivery, Published
from meshpoint.settings import AgentSettings
from meshpoint.wiring import build_worker
from servers import Proxy, RabbitServer

down = Peer("down", int, int)
ping, pong = Peer("ping", int, int), Peer("pong", int, int)
tree = Peer("tree", list, int)
asks = Peer("asks", str, str)


@agent("down", version="1")
async def counts_down(ctx: TaskExecutionContext, depth: int) -> int:
    return 0 if depth == 0 else 1 + await ctx.call(down(depth - 1))


@agent("ping", version="1")
async def pings(ctx: TaskExecutionContext, depth: int) -> int:
    return 0 if depth == 0 else 1 + await ctx.call(pong(depth - 1))


@agent("pong", version="1")
async def pongs(ctx: TaskExecutionContext, depth: int) -> int:
    return 0 if depth == 0 else 1 + await ctx.call(ping(depth - 1))


@agent("tree", version="1")
async def branches(ctx: TaskExecutionContext, shape: list[int]) -> int:
    """Number of leaves of a tree that branches `shape[0]` times, then `shape[1]` times, and so on."""
    if not shape:
        return 1
    return sum(await ctx.gather(*[tree(shape[1:]) for _ in range(shape[0])]))


@agent("asks", version="1")
async def asks_older(ctx: TaskExecutionContext, text: str) -> str:
    return await ctx.call(Peer("older", str, str)(text))


class Events:
    """Collects events."""

    def __init__(self) -> None:
        self.all: list[Event] = []

    def emit(self, event: Event) -> None:
        self.all.append(event)

    def of(self, step: Step) -> list[Event]:
        return [event for event in self.all if event.step is step]


class Group:
    """The agents of one process, without a database."""

    def __init__(
        self,
        url: str,
        namespace: str,
        *agents: Any,
        publish_timeout: timedelta = BUSY,
        **options: Any,
    ) -> None:
        self.broker = RabbitMqBroker(url, namespace=namespace, publish_timeout=publish_timeout)
        self.events = Events()
        self.stop = asyncio.Event()
        self._namespace, self._agents, self._options = namespace, agents, options

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        await self.broker.open()
        try:
            for each in self._agents:
                await self.broker.declare(AgentName(each.name))
            async with asyncio.TaskGroup() as tasks:
                for each in self._agents:
                    tasks.create_task(self._worker(each).run(self.stop))
                yield
                self.stop.set()
        finally:
            await self.broker.close()

    def _worker(self, served: Any) -> Any:
        settings = AgentSettings(name=served.name, entrypoint="any:thing")
        options = replace(settings.options(), **self._options)
        return build_worker(served, settings, self._namespace, self.broker, self.events, options)


async def answers(client: Client, asked: str, inputs: Sequence[Any]) -> list[Any]:
    """Outcomes of concurrent requests."""
    waiting = await asyncio.gather(*[client.send(asked, each) for each in inputs])
    return [(await each).outcome for each in waiting]


@asynccontextmanager
async def mesh(url: str, namespace: str, *agents: Any, **options: Any) -> AsyncIterator[tuple[Client, Group]]:
    patient = {"drain_timeout": timedelta(seconds=1), "peer_timeout": timedelta(hours=1)}
    group = Group(url, namespace, *agents, **{**patient, **options})
    async with group.serving(), Client(RabbitMqBroker(url, namespace=namespace, publish_timeout=BUSY)) as client:
        yield client, group


@pytest.mark.parametrize(
    ("agents", "input_", "result"),
    [
        pytest.param([counts_down], 3, 3, id="calls itself"),
        pytest.param([pings, pongs], 4, 4, id="call each other"),
        pytest.param([branches], [3, 2], 6, id="fans out to itself"),
    ],
)
async def test_many_tasks_that_call_their_own_group_all_end(
    amqp_url: str, namespace: str, agents: list[Any], input_: Any, result: int
) -> None:
    """With more tasks than fit into the process, root requests wait but nested requests do not."""
    async with mesh(amqp_url, namespace, *agents) as (client, _):
        outcomes = await answers(client, agents[0].name, [input_] * 200)
    assert outcomes == [Ok(result)] * 200


@pytest.mark.parametrize("fault", ["silence", "hold_answers"])
async def test_tasks_in_memory_outlast_a_broker_that_stands_still(
    own_rabbit: RabbitServer, namespace: str, fault: str
) -> None:
    hour, second = timedelta(hours=1), timedelta(seconds=1)
    async with Proxy(own_rabbit.url) as proxy:
        client_broker = RabbitMqBroker(own_rabbit.url, namespace=namespace, publish_timeout=BUSY)
        group = Group(proxy.url, namespace, branches, publish_timeout=second, peer_timeout=hour, drain_timeout=second)
        async with group.serving(), Client(client_broker) as client:
            waiting = await asyncio.gather(*[client.send("tree", [3, 2]) for _ in range(150)])
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            getattr(proxy, fault)()
            while not group.events.of(Step.BROKER_AWAY):
                await asyncio.sleep(0.01)
            proxy.resume()
            assert [(await each).outcome for each in waiting] == [Ok(6)] * 150
    assert group.events.of(Step.REPLY_DROPPED) == []


async def test_more_roots_than_fit_in_memory_make_progress(amqp_url: str, namespace: str) -> None:
    limits = {"max_in_memory": 3, "max_concurrency": 2}
    async with mesh(amqp_url, namespace, counts_down, **limits) as (client, group):
        assert await answers(client, "down", [4] * 6) == [Ok(4)] * 6
    (told,) = group.events.of(Step.MEMORY_FULL)
    assert told.detail["max_in_memory"] == 3


@pytest.mark.parametrize("roots", [1, 8])
async def test_a_deep_recursion_needs_one_slot_only(amqp_url: str, namespace: str, roots: int) -> None:
    limits = {"max_in_memory": 1, "max_concurrency": 1}
    async with mesh(amqp_url, namespace, counts_down, **limits) as (client, _):
        assert await answers(client, "down", [10] * roots) == [Ok(10)] * roots


async def test_a_peer_of_an_older_release_is_asked_where_it_listens(amqp_url: str, namespace: str) -> None:
    """An older release declares no queue of nested requests."""
    async with mesh(amqp_url, namespace, asks_older) as (client, group):
        older = AgentName("older")
        its_own = RabbitMqBroker(amqp_url, namespace=namespace, publish_timeout=BUSY)
        await its_own.open()
        await its_own.declare(older)
        await its_own.close()
        await delete(group.broker, nested_of(older))
        arrived: asyncio.Queue[Delivery] = asyncio.Queue()
        await group.broker.consume(requests_of(older), 10, arrived.put_nowait)
        for _ in range(2):
            await client.send("asks", "hello")
            delivery = await arrived.get()
            assert delivery.message.headers[Header.CALL_DEPTH.value] == 1
            await delivery.ack()


async def test_nested_requests_on_the_queue_of_all_requests_make_their_own_room(
    amqp_url: str, namespace: str
) -> None:
    """Callers of an older release send nested requests there."""
    limits = {"max_in_memory": 2, "max_concurrency": 1}
    async with mesh(amqp_url, namespace, counts_down, **limits) as (client, group):
        waiting = []
        for _ in range(12):
            task_id = TaskId(new_id())
            waiting.append(client.expect("down", task_id))
            request = client.request(3, task_id)
            request = replace(request, headers={**request.headers, Header.CALL_DEPTH.value: 1})
            assert await group.broker.publish([(requests_of(AgentName("down")), request)]) == [Published.ACCEPTED]
        assert [(await each).outcome for each in waiting] == [Ok(3)] * 12
    assert group.events.of(Step.MEMORY_FULL) == []


async def delete(broker: RabbitMqBroker, address: str) -> None:
    async with broker._consume_connection.channel() as channel:
        await channel.queue_delete(broker._topology.queue_name(address))  # type: ignore[arg-type]
