"""LangGraph with its PostgreSQL saver: `python -m … DB_URL [AMQP_URL]`.

The agent's tool calls `interrupt`, so that a waiting task is out of memory. Its process then sends
the call to a queue, which another process serves, and resumes the graph when the answer comes back
on a second queue; the answer is acked when the graph has been checkpointed again. Queues are
quorum queues, messages persistent and confirmed. Without an AMQP_URL the answer is there at once,
in the same process. Durability is `exit`, which writes once for each pause.
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
async def _graph(db_url: str) -> AsyncIterator[Any]:
    options = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}
    pool: AsyncConnectionPool[Any]
    async with AsyncConnectionPool(
        db_url, max_size=_CONNECTIONS, kwargs=options, open=False
    ) as pool:
        saver = AsyncPostgresSaver(pool)
        await saver.setup()
        yield make_agent(tools=[peer], checkpointer=saver)


async def _run(graph: Any, thread: str, argument: Any) -> tuple[Any, str]:
    """Run the graph until it ends or waits. Returns the peer's request, if any, or the result."""
    config = {"configurable": {"thread_id": thread}}
    ended = await graph.ainvoke(argument, config, durability="exit")
    if waits := ended.get("__interrupt__"):
        return waits[0].value, ""
    return None, ended["messages"][-1].text


def _prompt(pauses: int) -> Any:
    return {"messages": [("user", str(pauses))]}


@asynccontextmanager
async def _running_here(options: Namespace) -> AsyncIterator[driver.Ask]:
    async with _graph(options.db_url) as graph:

        async def ask(pauses: int) -> object:
            thread, argument = str(uuid4()), _prompt(pauses)
            while True:
                request, result = await _run(graph, thread, argument)
                if request is None:
                    return result
                argument = Command(resume=job.answer())

        yield ask


class Courier:
    """Sends calls to the peer, and takes its answers."""

    def __init__(self, graph: Any, channel: Any, prefix: str) -> None:
        self._graph, self._channel = graph, channel
        self._calls, self._answers = f"{prefix}.calls", f"{prefix}.answers"
        self._results: dict[str, asyncio.Future[str]] = {}

    async def open(self) -> None:
        """Begin to take answers."""
        queue = await declare(self._channel, self._answers)
        await queue.consume(self._take)

    async def ask(self, pauses: int) -> object:
        """Run one job."""
        thread = str(uuid4())
        result = self._results[thread] = asyncio.get_running_loop().create_future()
        try:
            await self._advance(thread, _prompt(pauses))
            return await result
        finally:
            del self._results[thread]

    async def _take(self, message: Any) -> None:
        async with message.process():  # acked at the end of the block
            await self._advance(str(message.correlation_id), Command(resume=message.body.decode()))

    async def _advance(self, thread: str, argument: Any) -> None:
        try:
            request, result = await _run(self._graph, thread, argument)
            if request is None:
                self._results[thread].set_result(result)
            else:
                await send(self._channel, self._calls, thread, json.dumps(request), self._answers)
        except Exception as error:
            self._results[thread].set_exception(error)
            raise


async def declare(channel: Any, name: str) -> Any:
    """Declare a queue that survives the broker's restart."""
    return await channel.declare_queue(name, durable=True, arguments={"x-queue-type": "quorum"})


async def send(channel: Any, queue: str, thread: str, text: str, answers: str = "") -> None:
    """Send a message, and wait until the broker has confirmed it."""
    message = aio_pika.Message(
        text.encode(),
        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        correlation_id=thread,
        reply_to=answers or None,
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
                await send(channel, message.reply_to, message.correlation_id, job.answer())

        await queue.consume(answer)
        yield


@asynccontextmanager
async def _running(options: Namespace) -> AsyncIterator[driver.Ask]:
    role = ["--role", "peer", "--prefix", options.prefix]
    async with (
        role_process(__spec__.name, options.db_url, options.amqp_url, *role),
        _graph(options.db_url) as graph,
        _channel(options.amqp_url) as channel,
    ):
        courier = Courier(graph, channel, options.prefix)
        await courier.open()
        yield courier.ask


def main() -> None:
    """Serve the driver, or the peer."""
    parser = ArgumentParser()
    parser.add_argument("db_url")
    parser.add_argument("amqp_url", nargs="?", help="without it, the peer is in this process")
    parser.add_argument("--role", choices=["peer"])
    parser.add_argument("--prefix", default=f"langgraph-{uuid4()}")
    options = parser.parse_args()
    if options.role:
        asyncio.run(serve_role(_peer(options)))
    else:
        driver.serve((_running if options.amqp_url else _running_here)(options))


if __name__ == "__main__":
    main()
