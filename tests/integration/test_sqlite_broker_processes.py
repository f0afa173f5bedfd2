"""Real processes on one queue file: killed, stopped and competing."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from datetime import timedelta
from pathlib import Path

import pytest

from meshpoint.adapters.sqlite_queue import SqliteBroker
from meshpoint.adapters.sqlite_queue.schema import connect, transaction
from meshpoint.testing.conformance.broker import (
    AGENT,
    REQUESTS,
    TEST_TIMEOUT,
    Inbox,
    a_message,
    send,
    until_depth,
)

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("sqlite_consumer.py")


class Consumer:
    """A consuming process; see `sqlite_consumer.py`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def line(self) -> str:
        """The next line that it prints."""
        assert self.process.stdout is not None
        return (await self.process.stdout.readline()).decode().strip()

    async def ack(self) -> str:
        """Have it ack its oldest delivery, and return the outcome."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"ack\n")
        return await self.line()

    async def stop(self, path: Path) -> None:
        """Stop it outside a transaction, whose lock would block everyone."""
        with closing(connect(path, TEST_TIMEOUT)) as db, transaction(db):
            self.process.send_signal(signal.SIGSTOP)
            await asyncio.to_thread(os.waitid, os.P_PID, self.process.pid, os.WSTOPPED)

    async def end(self) -> None:
        """Kill it if it still runs."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def start_consumer(path: Path, prefetch: int = 1) -> AsyncIterator[Consumer]:
    pipe = asyncio.subprocess.PIPE
    arguments = (sys.executable, PROGRAM, path, str(prefetch))
    child = Consumer(await asyncio.create_subprocess_exec(*arguments, stdin=pipe, stdout=pipe))
    try:
        yield child
    finally:
        await child.end()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mesh.db"


@pytest.fixture
async def broker(path: Path) -> AsyncIterator[SqliteBroker]:
    broker = SqliteBroker(path, namespace="demo", lease=timedelta(seconds=1))
    await broker.open()
    await broker.declare(AGENT)
    yield broker
    await broker.close()


async def test_a_message_held_by_a_killed_process_is_redelivered(
    path: Path, broker: SqliteBroker
) -> None:
    message, inbox = a_message(), Inbox()
    async with start_consumer(path) as child:
        await send(broker, REQUESTS, message)
        assert await child.line() == f"1 {message.message_id}"
        child.process.send_signal(signal.SIGKILL)
        await child.process.wait()
        await broker.consume(REQUESTS, 1, inbox)
        redelivered = await inbox.next()
    assert (redelivered.message, redelivered.delivery_count) == (message, 2)
    assert await redelivered.ack()


async def test_a_suspended_process_settles_nothing_and_continues_when_resumed(
    path: Path, broker: SqliteBroker
) -> None:
    message, later, inbox = a_message(), a_message(), Inbox()
    async with start_consumer(path) as child:
        await send(broker, REQUESTS, message)
        assert await child.line() == f"1 {message.message_id}"
        await child.stop(path)
        subscription = await broker.consume(REQUESTS, 1, inbox)
        redelivered = await inbox.next()
        await subscription.cancel()
        child.process.send_signal(signal.SIGCONT)
        assert await child.ack() == "False"
        assert redelivered.delivery_count == 2
        assert await redelivered.ack()
        await send(broker, REQUESTS, later)
        assert await child.line() == f"1 {later.message_id}"
        assert await child.ack() == "True"
    await until_depth(broker, REQUESTS, 0)


async def test_a_process_that_exits_cleanly_requeues_at_once(path: Path) -> None:
    """The lease is a day, so it plays no part."""
    broker = SqliteBroker(path, namespace="demo", lease=timedelta(days=1))
    await broker.open()
    await broker.declare(AGENT)
    message, inbox = a_message(), Inbox()
    async with start_consumer(path, prefetch=2) as child:
        await send(broker, REQUESTS, message)
        assert await child.line() == f"1 {message.message_id}"
        await broker.consume(REQUESTS, 1, inbox)
        assert child.process.stdin is not None
        child.process.stdin.close()
        assert (await inbox.next()).delivery_count == 2
    await broker.close()


async def test_competing_processes_each_receive_different_messages(
    path: Path, broker: SqliteBroker
) -> None:
    sent = [a_message() for _ in range(60)]
    async with AsyncExitStack() as stack:
        children = await asyncio.gather(
            *(stack.enter_async_context(start_consumer(path, 5)) for _ in range(3))
        )
        await asyncio.gather(*(send(broker, REQUESTS, message) for message in sent))
        lines: list[str] = []
        all_received = asyncio.Event()

        async def work(child: Consumer) -> None:
            while True:
                line = await child.line()
                if line[:2] == "1 ":
                    lines.append(line)
                    assert child.process.stdin is not None
                    child.process.stdin.write(b"ack\n")
                    if len(lines) == len(sent):
                        all_received.set()
                else:
                    assert line == "True"

        async with asyncio.TaskGroup() as group:
            workers = [group.create_task(work(child)) for child in children]
            await all_received.wait()
            for worker in workers:
                worker.cancel()
    assert sorted(lines) == sorted(f"1 {message.message_id}" for message in sent)
