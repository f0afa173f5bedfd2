"""The seed design on RabbitMQ: `python -m benchmarks.rivals.seed_rival AMQP_URL DB_URL`.

A bare loop on Meshpoint's driver, with quorum queues, persistent messages and confirms as in
Meshpoint. Its transactions block the event loop, as in the source document, or run in `--threads`
threads, which is faster. Calls are sent after the checkpoint instead of before it, so that no
answer arrives too early. It never re-sends, has no deadlines, and loses the task if its process
dies between two transactions.
"""

from __future__ import annotations

import asyncio
import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeAlias
from uuid import uuid4

import aiormq
from aiormq.abc import AbstractChannel, AbstractConnection, DeliveredMessage

from benchmarks.rivals import driver, job
from benchmarks.rivals.seed_store import SeedStore

_PREFETCH = 64
Handle: TypeAlias = Callable[[str, str, Any], Awaitable[None]]
"""Called with a message's id, its reply queue and its content."""


class _BrokerChannel:
    """One connection: a channel for confirmed publishing, and consumers."""

    def __init__(
        self, connection: AbstractConnection, channel: AbstractChannel, prefix: str
    ) -> None:
        self._connection, self._channel, self._prefix = connection, channel, prefix
        self._handler_tasks: set[asyncio.Task[None]] = set()

    async def send(self, queue: str, id_: str, content: Any, reply_to: str = "") -> None:
        """Publish, and wait for the broker's confirmation."""
        properties = aiormq.spec.Basic.Properties(
            correlation_id=id_,
            reply_to=reply_to or None,
            delivery_mode=2,
            content_type="application/json",
        )
        body = json.dumps(content).encode()
        await self._channel.basic_publish(
            body, routing_key=self._prefix + queue, properties=properties, mandatory=True
        )

    async def consume(self, queue: str, handle: Handle) -> None:
        """Handle each message of `queue` in its own task, then ack it."""
        channel, name = await self._connection.channel(), self._prefix + queue
        await channel.basic_qos(prefetch_count=_PREFETCH)
        await channel.queue_declare(
            name, durable=True, arguments={"x-queue-type": "quorum", "x-expires": 60_000}
        )

        async def handle_and_ack(message: DeliveredMessage) -> None:
            properties = message.header.properties
            await handle(
                str(properties.correlation_id), properties.reply_to or "", json.loads(message.body)
            )
            assert message.delivery_tag is not None
            await channel.basic_ack(message.delivery_tag)

        async def on_message(message: DeliveredMessage) -> None:
            handler_task = asyncio.create_task(handle_and_ack(message))
            self._handler_tasks.add(handler_task)
            handler_task.add_done_callback(self._handler_tasks.discard)

        await channel.basic_consume(name, on_message)


@asynccontextmanager
async def _open_channel(options: Namespace) -> AsyncIterator[_BrokerChannel]:
    connection = await aiormq.connect(options.amqp_url)
    try:
        yield _BrokerChannel(
            connection, await connection.channel(publisher_confirms=True), options.prefix
        )
    finally:
        await connection.close()


async def _serve_peer(channel_: _BrokerChannel) -> None:
    async def on_request(id_: str, reply_to: str, question: Any) -> None:
        await channel_.send(reply_to, id_, job.answer())

    await channel_.consume("peer", on_request)


async def _serve_root(channel_: _BrokerChannel, store: SeedStore, threads: int) -> None:
    pool, loop = ThreadPoolExecutor(max(threads, 1)), asyncio.get_running_loop()

    async def run_step(step: Callable[..., Any], *arguments: Any) -> Any:
        return await loop.run_in_executor(pool, step, *arguments) if threads else step(*arguments)

    async def on_request(id_: str, reply_to: str, fan_out: Any) -> None:
        calls = [str(uuid4()) for _ in range(fan_out)]
        await run_step(store.checkpoint, id_, reply_to, calls)
        await asyncio.gather(
            *[channel_.send("peer", call, job.QUESTION, "root.resp") for call in calls]
        )

    async def on_answer(id_: str, reply_to: str, answer: Any) -> None:
        task_id = await run_step(store.record_answer, id_, answer)
        if task_id is not None:
            requester, answers = await run_step(store.restore, task_id)
            await channel_.send(requester, task_id, job.summary(answers))

    await channel_.consume("root.resp", on_answer)
    await channel_.consume("root", on_request)


async def _replica(options: Namespace) -> None:
    """Serve one role until standard input closes."""
    closed, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(0, closed.set)  # nothing is ever sent, so stdin is readable only when closed
    async with _open_channel(options) as channel_:
        if options.role == "root":
            await _serve_root(
                channel_, SeedStore(options.db_url, options.threads), options.threads
            )
        else:
            await _serve_peer(channel_)
        print("ready", flush=True)
        await closed.wait()
        loop.remove_reader(0)


@asynccontextmanager
async def _process(options: Namespace, role: str) -> AsyncIterator[None]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.rivals.seed_rival",
        options.amqp_url,
        options.db_url,
    ]
    process = await asyncio.create_subprocess_exec(
        *command,
        *("--role", role, "--prefix", options.prefix, "--threads", str(options.threads)),
        stdin=-1,
        stdout=-1,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if await process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"{role} did not start; see above")
        yield
    finally:
        process.stdin.close()
        await process.wait()


@asynccontextmanager
async def running(options: Namespace) -> AsyncIterator[driver.Ask]:
    """Start a root and a peer, and yield a function that runs one job."""
    reply_futures: dict[str, asyncio.Future[object]] = {}

    async def on_reply(id_: str, reply_to: str, result: Any) -> None:
        reply_futures.pop(id_).set_result(result)

    async with (
        _process(options, "root"),
        _process(options, "peer"),
        _open_channel(options) as channel_,
    ):
        await channel_.consume("client", on_reply)

        async def ask(fan_out: int) -> object:
            id_ = str(uuid4())
            reply = reply_futures[id_] = asyncio.get_running_loop().create_future()
            await channel_.send("root", id_, fan_out, "client")
            return await reply

        yield ask


def main() -> None:
    """Serve the driver, or one role."""
    parser = ArgumentParser()
    parser.add_argument("amqp_url")
    parser.add_argument("db_url")
    parser.add_argument("--role", choices=["root", "peer"])
    parser.add_argument(
        "--threads", type=int, default=0, help="threads for transactions; 0 uses the event loop"
    )
    parser.add_argument("--prefix", default=f"seed-{uuid4()}.")
    options = parser.parse_args()
    if options.role:
        asyncio.run(_replica(options))
    else:
        driver.serve(running(options))


if __name__ == "__main__":
    main()
