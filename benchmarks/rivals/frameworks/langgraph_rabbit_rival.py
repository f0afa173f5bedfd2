"""LangGraph with its PostgreSQL saver: `python -m … DB_URL [AMQP_URL]`.

The client, the agent and the peer are processes, with a queue for each. The agent's tool calls
`interrupt`, so that a waiting task is out of memory. Its process then sends the call to the peer,
and resumes the graph when the answer comes back. A message is acked when the graph has been
checkpointed and what follows has been sent, and a repeated one sends that again: an answer names
its interrupt, and only a request that has not begun starts the graph. Queues are quorum queues,
messages persistent and confirmed. Without an AMQP_URL the answer is there at once, in the same
process.

The durability `sync` writes each answer of the model before the next step, so that a kill does not
repeat it. `exit` writes once for each pause.
"""

from __future__ import annotations

import asyncio
import json
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import aio_pika
from langchain_core.tools import tool
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.types import Command, interrupt
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool

from benchmarks.rivals import driver, job
from benchmarks.rivals.frameworks.langgraph_agent import make_agent
from benchmarks.rivals.frameworks.role_process import role_process, serve_role

_CONNECTIONS = 10
_PREFETCH = 64


@tool
def peer(request: str) -> str:
    """Ask the peer."""
    return str(interrupt({"request": request}))


@asynccontextmanager
async def _graph(db_url: str, durability: str) -> AsyncIterator[Graph]:
    options = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}
    pool: AsyncConnectionPool[Any]
    async with AsyncConnectionPool(
        db_url, max_size=_CONNECTIONS, kwargs=options, open=False
    ) as pool:
        saver = AsyncPostgresSaver(pool)
        await saver.setup()
        yield Graph(make_agent(tools=[peer], checkpointer=saver), durability)


class Graph:
    """The agent, with its threads."""

    def __init__(self, graph: Any, durability: str) -> None:
        self._graph, self._durability = graph, durability

    async def run(self, thread: str, argument: Any) -> tuple[Any, str]:
        """Run a thread until it ends or waits. Returns its interrupt, if any, or the result."""
        config = _config(thread)
        ended = await self._graph.ainvoke(argument, config, durability=self._durability)
        if waits := ended.get("__interrupt__"):
            return waits[0], ""
        return None, ended["messages"][-1].text

    async def has_begun(self, thread: str) -> bool:
        """Whether a thread has a checkpoint."""
        return bool(
            (await self._graph.aget_state(_config(thread)))
            .config["configurable"]
            .get("checkpoint_id")
        )


def _config(thread: str) -> Any:
    return {"configurable": {"thread_id": thread}}


def _prompt(pauses: int) -> Any:
    return {"messages": [("user", str(pauses))]}


@asynccontextmanager
async def _running_here(options: Namespace) -> AsyncIterator[driver.Ask]:
    async with _graph(options.db_url, options.durability) as graph:

        async def ask(pauses: int) -> object:
            thread, argument = str(uuid4()), _prompt(pauses)
            while True:
                wait, result = await graph.run(thread, argument)
                if wait is None:
                    return result
                argument = Command(resume={wait.id: job.answer()})

        yield ask


class Root:
    """Runs the graph for requests and answers."""

    def __init__(self, graph: Graph, channel: Any, prefix: str) -> None:
        self._graph, self._channel, self._prefix = graph, channel, prefix

    async def open(self) -> None:
        """Begin to take messages."""
        for name, take in (("requests", self._start), ("answers", self._resume)):
            queue = await declare(self._channel, f"{self._prefix}.{name}")
            await queue.consume(take)

    async def _start(self, message: Any) -> None:
        async with message.process():  # acked at the end of the block
            thread, argument = str(message.correlation_id), _prompt(int(message.body))
            if message.redelivered and await self._graph.has_begun(thread):
                argument = None
            await self._advance(thread, argument)

    async def _resume(self, message: Any) -> None:
        async with message.process():
            argument: Any = Command(resume={message.message_id: message.body.decode()})
            await self._advance(str(message.correlation_id), argument)

    async def _advance(self, thread: str, argument: Any) -> None:
        wait, result = await self._graph.run(thread, argument)
        if wait is None:
            await send(self._channel, f"{self._prefix}.replies", thread, result)
            return
        calls, request = f"{self._prefix}.calls", json.dumps(wait.value)
        await send(self._channel, calls, thread, request, message_id=wait.id)


class Client:
    """Sends requests, and takes the replies."""

    def __init__(self, channel: Any, prefix: str) -> None:
        self._channel, self._prefix = channel, prefix
        self._results: dict[str, asyncio.Future[str]] = {}

    async def open(self) -> None:
        """Begin to take replies."""
        queue = await declare(self._channel, f"{self._prefix}.replies")
        await queue.consume(self._take)

    async def ask(self, pauses: int) -> object:
        """Run one job."""
        thread = str(uuid4())
        result = self._results[thread] = asyncio.get_running_loop().create_future()
        try:
            await send(self._channel, f"{self._prefix}.requests", thread, str(pauses))
            return await result
        finally:
            del self._results[thread]

    async def _take(self, message: Any) -> None:
        async with message.process():
            self._results[str(message.correlation_id)].set_result(message.body.decode())


async def declare(channel: Any, name: str) -> Any:
    """Declare a queue that survives the broker's restart."""
    return await channel.declare_queue(name, durable=True, arguments={"x-queue-type": "quorum"})


async def send(
    channel: Any, queue: str, thread: str, text: str, *, message_id: str | None = None
) -> None:
    """Send a message, and wait until the broker has confirmed it."""
    message = aio_pika.Message(
        text.encode(),
        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        correlation_id=thread,
        message_id=message_id,
    )
    await channel.default_exchange.publish(message, routing_key=queue)


@asynccontextmanager
async def _channel(amqp_url: str) -> AsyncIterator[Any]:
    connection = await aio_pika.connect(amqp_url)
    async with connection:
        channel = await connection.channel(publisher_confirms=True)
        await channel.set_qos(prefetch_count=_PREFETCH)
        yield channel


@asynccontextmanager
async def _peer(options: Namespace) -> AsyncIterator[None]:
    async with _channel(options.amqp_url) as channel:
        queue = await declare(channel, f"{options.prefix}.calls")

        async def answer(message: Any) -> None:
            async with message.process():
                await send(
                    channel,
                    f"{options.prefix}.answers",
                    message.correlation_id,
                    job.answer(),
                    message_id=message.message_id,
                )

        await queue.consume(answer)
        yield


@asynccontextmanager
async def _root(options: Namespace) -> AsyncIterator[None]:
    async with (
        _graph(options.db_url, options.durability) as graph,
        _channel(options.amqp_url) as channel,
    ):
        await Root(graph, channel, options.prefix).open()
        yield


@asynccontextmanager
async def _running(options: Namespace) -> AsyncIterator[driver.Ask]:
    servers = [options.db_url, options.amqp_url]
    more = ["--prefix", options.prefix, "--durability", options.durability]
    async with (
        role_process(__spec__.name, *servers, "--role", "peer", *more),
        role_process(__spec__.name, *servers, "--role", "root", *more),
        _channel(options.amqp_url) as channel,
    ):
        client = Client(channel, options.prefix)
        await client.open()
        yield client.ask


_ROLES = {"peer": _peer, "root": _root}


def main() -> None:
    """Serve the driver, the agent or the peer."""
    parser = ArgumentParser()
    parser.add_argument("db_url")
    parser.add_argument("amqp_url", nargs="?", help="without it, all is in this process")
    parser.add_argument("--durability", choices=["exit", "async", "sync"], default="sync")
    parser.add_argument("--role", choices=[*_ROLES])
    parser.add_argument("--prefix", default=f"langgraph-{uuid4()}")
    options = parser.parse_args()
    if options.role:
        asyncio.run(serve_role(_ROLES[options.role](options)))
    else:
        driver.serve((_running if options.amqp_url else _running_here)(options))


if __name__ == "__main__":
    main()
