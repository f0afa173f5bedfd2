"""What agent code logs: with its task, wherever the code runs, and once per recorded call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint import LogContextFilter
from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.model.calls import Done
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.outcomes import Ok

from .agents import Gate, ScriptedAgent
from .mesh import Mesh

BACKENDS = pytest.mark.parametrize("durable", [True, False])

log = logging.getLogger("my_agents")
peer_agent = Peer("peer", int, int)


class Records(logging.Handler):
    """Keeps what passes the filter as (message, task, agent, generation)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []
        self.addFilter(LogContextFilter())

    def emit(self, record: logging.LogRecord) -> None:
        values = vars(record)
        names = ("task_id", "agent", "generation")
        self.seen.append((record.getMessage(), *(values[name] for name in names)))


@pytest.fixture
def records() -> Iterator[Records]:
    handler, level = Records(), log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler
    log.removeHandler(handler)
    log.setLevel(level)


@BACKENDS
async def test_each_line_of_a_function_agent_is_logged_once(
    mesh: Mesh, client: FakePeer, peer: FakePeer, records: Records, durable: bool
) -> None:
    def price(number: int) -> int:
        log.info("subtask")
        return number

    @agent("caller")
    async def caller(ctx: TaskExecutionContext, number: int) -> int:
        log.info("start")
        priced = await ctx.subtask("price", price, number)
        first = await peer_agent(priced)
        log.info("first")
        second = await peer_agent(first)
        log.info("second")
        return second

    await mesh.replica(caller, durable=durable)
    task_id = await client.ask("caller", 1)
    for count in (1, 2):
        await peer.respond(await peer.wait_for_request(count), Ok(count))
    assert await client.reply(task_id) == Ok(2)
    assert records.seen == [
        ("start", task_id, "caller", 0),
        ("subtask", task_id, "caller", 0),
        ("first", task_id, "caller", 1),
        ("second", task_id, "caller", 2),
    ]


async def test_threads_and_asyncio_tasks_know_their_task(
    mesh: Mesh, client: FakePeer, records: Records
) -> None:
    async def in_task() -> None:
        log.info("task")

    async def start(ctx: TaskExecutionContext, request: Any) -> Done[int]:
        await asyncio.to_thread(log.info, "thread")
        await asyncio.create_task(in_task())
        return Done(1)

    await mesh.replica(ScriptedAgent("agent", start))
    task_id = await client.ask("agent", 1)
    await client.reply(task_id)
    assert [record[:2] for record in records.seen] == [("thread", task_id), ("task", task_id)]
    log.info("outside")
    assert records.seen[-1] == ("outside", "-", "-", "-")


async def test_concurrent_tasks_do_not_mix(mesh: Mesh, client: FakePeer, records: Records) -> None:
    gate = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Done[int]:
        await gate()
        log.info(ctx.task_id)
        return Done(1)

    await mesh.replica(ScriptedAgent("agent", start))
    tasks = [await client.ask("agent", number) for number in range(3)]
    await gate.wait_reached(3)
    gate.opened.set()
    for task_id in tasks:
        await client.reply(task_id)
    assert sorted(records.seen) == sorted((task, task, "agent", 0) for task in tasks)
