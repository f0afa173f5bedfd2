"""A group of many dead letters is replayed while replicas run, and one is killed meanwhile.

`make letters` runs it with 10,000 letters on every broker and prints figures.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from typing import Any

import pytest

from meshpoint.model.ids import AgentName, TaskId, new_id
from meshpoint.model.messages import Message, request_queue
from meshpoint.model.tasks import TaskState
from meshpoint.model.timeline import Change, TimelineEntry
from meshpoint.ports.broker import Broker, Delivery
from meshpoint.ports.task_store import CheckpointStore
from plain_client import PlainClient

from .mesh import SHORT_LEASE, Mesh, output_of

LETTERS = int(os.environ.get("MESHPOINT_LETTERS", "300"))
CAUSES = [f"cause {number}: the agent was not ready" for number in range(5)]
REPLAYED = CAUSES[3]
_AGENT = "root"
_BATCH = 100


class Undertaker:
    """A consumer that dead-letters each request, with the reason that the test has planned."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.reasons: dict[str, str] = {}
        self._buried = asyncio.Semaphore(0)
        self._tasks: set[asyncio.Task[None]] = set()

    async def bury(self, messages: list[Message]) -> None:
        """Send requests, and return when all of them are dead letters."""
        queue = request_queue(AgentName(_AGENT))
        subscription = await self._broker.consume(queue, _BATCH, self._on_delivery)
        for start in range(0, len(messages), _BATCH):
            batch = messages[start : start + _BATCH]
            await self._broker.publish([(queue, message) for message in batch])
            for _ in batch:
                await self._buried.acquire()
        await subscription.cancel()

    def _on_delivery(self, delivery: Delivery) -> None:
        task = asyncio.create_task(self._dead_letter(delivery))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _dead_letter(self, delivery: Delivery) -> None:
        assert await delivery.dead_letter(self.reasons[delivery.message.correlation_id])
        self._buried.release()


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_one_cause_of_many_letters_is_replayed_exactly_once(mesh: Mesh) -> None:
    await mesh.declare(_AGENT)
    config = mesh.backends.config(_AGENT, history=True, **SHORT_LEASE)
    client = await mesh.client()
    planned = await _bury(mesh, client)
    group = {task_id for task_id, reason in planned.items() if reason == REPLAYED}
    options = ["--broker", mesh.backends.broker_url, "--namespace", mesh.backends.namespace]
    command = [sys.executable, "-m", "meshpoint.cli", "dead"]
    listed = await _run(*command, "list", "--agent", _AGENT, "--json", *options)
    assert {(each["reason"], each["count"]) for each in listed} == {
        (cause, LETTERS // 5) for cause in CAUSES
    }

    replies = {task_id: client.expect(_AGENT, TaskId(task_id)) for task_id in group}
    replicas = [await mesh.replica(config) for _ in range(3)]
    started_at = time.monotonic()
    replay = asyncio.create_task(
        _run(
            *(*command, "replay", "--agent", _AGENT, "--reason", REPLAYED, "--yes", "--json"),
            *options,
        )
    )
    await replicas[0].wait("end:after", count=max(LETTERS // 100, 1))
    await replicas[0].kill()
    result = await replay
    replayed_at = time.monotonic()
    for reply in replies.values():
        assert (await reply).outcome.value == []  # type: ignore[union-attr]
    ended_at = time.monotonic()

    assert result["replayed"] == len(group)
    async with mesh.store() as store:
        ends = await _count_ends(store, group)
        assert ends == dict.fromkeys(group, 1)
        tasks = await store.tasks(agent=AgentName(_AGENT), limit=LETTERS)
        assert {task.task_id for task in tasks} == group
        assert {task.state for task in tasks} == {TaskState.COMPLETED}
    left = await _run(*command, "list", "--agent", _AGENT, "--json", *options)
    assert {each["reason"]: each["count"] for each in left} == {
        cause: LETTERS // 5 for cause in CAUSES if cause != REPLAYED
    }
    assert client.conflicts == 0
    print(
        f"{LETTERS:,} letters: {len(group):,} replayed in {replayed_at - started_at:.1f} s, "
        f"all completed after {ended_at - started_at:.1f} s; "
        f"{client.duplicates} repeated replies, which callers ignore"
    )


async def _bury(mesh: Mesh, client: PlainClient) -> dict[str, str]:
    """Make dead letters of five causes in turn. Returns the reason of each task."""
    broker = mesh.broker()
    await broker.open()
    try:
        undertaker = Undertaker(broker)
        messages = [
            client.request({"numbers": [], "rounds": 0, "recorded": 1}, task_id, agent=_AGENT)
            for task_id in (TaskId(new_id()) for _ in range(LETTERS))
        ]
        undertaker.reasons = {
            message.correlation_id: CAUSES[number % 5] for number, message in enumerate(messages)
        }
        await undertaker.bury(messages)
        return undertaker.reasons
    finally:
        await broker.close()


async def _run(*command: str) -> Any:
    code, out, err = await output_of(*command)
    assert code == 0, err.decode()
    return json.loads(out)


async def _count_ends(store: CheckpointStore, tasks: set[str]) -> dict[str, int]:
    """How often each task has ended: the timeline has an entry in the commit of each end."""
    ends: Counter[str] = Counter()
    for task_id in tasks:
        entries: list[TimelineEntry] = await store.timeline(TaskId(task_id), after=0, limit=1000)
        ends[task_id] = sum(entry.change is Change.COMPLETED for entry in entries)
    return dict(ends)
