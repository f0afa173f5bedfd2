"""Queues on PostgreSQL under churn: a million messages, a held snapshot, and neighbour queues.

One process publishes and acks, over two brokers as two processes would. Ratios compare phases of
one run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Self

from pydantic import JsonValue
from rich.progress import Progress

from benchmarks.environment import BenchmarkServers, connect
from benchmarks.measure import make_progress
from benchmarks.paused_tasks import PausedTasks
from benchmarks.report import Cell, Lines, Report, Table
from meshpoint.adapters.postgres_queue import PostgresBroker
from meshpoint.model.ids import AgentName, ReplicaId, new_id
from meshpoint.model.messages import (
    Address,
    Message,
    MessageType,
    private_queue,
    request_queue,
    response_queue,
)
from meshpoint.ports.broker import Delivery

_AGENTS = [AgentName(f"agent-{number}") for number in range(100)]
_IDLE = AgentName("idle")
_MANY = AgentName("many")
_BODY = bytes(500)
_BATCH = 50
_PUBLISHERS = 8
_MAX_IN_FLIGHT = 2000
_PREFETCH = 64
_SAMPLE_SECONDS = 1.0
_MB = 1024 * 1024
_SIZE = "SELECT pg_total_relation_size('meshpoint_queue_message')"
_FILL = """
INSERT INTO meshpoint_queue_message (queue, properties, body)
SELECT id, '{}', $3 FROM meshpoint_queue, generate_series(1, $2::integer) WHERE name = $1"""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure."""

    messages: int
    paused_tasks: int
    phase_seconds: float  # of a comparison
    snapshot_seconds: float  # for which another session holds a snapshot
    waiting: int  # messages in a queue without a consumer
    queues: int  # of replicas


_FULL = Sizes(1_000_000, 1_000_000, 30, 300, 1_000_000, 10_000)
_QUICK = Sizes(50_000, 10_000, 5, 20, 50_000, 1_000)


@dataclass(frozen=True, slots=True)
class Sample:
    """Messages acked so far, and the size of their table, after some seconds."""

    seconds: float
    acked: int
    bytes: int


class Traffic:
    """Publishes to the queues of 100 agents as fast as their messages are acked."""

    def __init__(self, url: str) -> None:
        self.url, self.namespace = url, f"bench-{new_id()}"
        self.publisher = PostgresBroker(url, namespace=self.namespace)
        self._consumer = PostgresBroker(url, namespace=self.namespace)
        self._random = Random(1)
        self._acks: set[asyncio.Task[None]] = set()
        self._room = asyncio.Event()
        self._sent = self._acked = 0

    async def __aenter__(self) -> Self:
        await self.publisher.open()
        await self._consumer.open()
        for agent in _AGENTS:
            await self._consumer.declare(agent)
            await self._consumer.consume(request_queue(agent), _PREFETCH, self._receive)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.publisher.close()
        await self._consumer.close()

    def _receive(self, delivery: Delivery) -> None:
        task = asyncio.create_task(self._ack(delivery))
        self._acks.add(task)
        task.add_done_callback(self._acks.discard)

    async def _ack(self, delivery: Delivery) -> None:
        await delivery.ack()
        self._acked += 1
        self._room.set()

    async def run(
        self, *, messages: int | None = None, seconds: float = float("inf")
    ) -> list[Sample]:
        """Send until so many messages are acked, or for so long. Returns a sample per second."""
        start, acked = time.monotonic(), self._acked
        samples = [Sample(0.0, 0, await self._table_bytes())]
        senders = [asyncio.create_task(self._send_forever()) for _ in range(_PUBLISHERS)]
        while samples[-1].seconds < seconds and not samples[-1].acked >= (
            messages or float("inf")
        ):
            await asyncio.sleep(_SAMPLE_SECONDS)
            size = await self._table_bytes()
            samples.append(Sample(time.monotonic() - start, self._acked - acked, size))
            for sender in senders:
                if sender.done():
                    sender.result()
        for sender in senders:
            sender.cancel()
        await asyncio.wait(senders)
        return samples

    async def _send_forever(self) -> None:
        while True:
            while self._sent - self._acked > _MAX_IN_FLIGHT:
                self._room.clear()
                await self._room.wait()
            self._sent += _BATCH
            agents = self._random.choices(_AGENTS, k=_BATCH)
            await self.publisher.publish(
                [(request_queue(agent), make_message(MessageType.REQUEST)) for agent in agents]
            )

    async def _table_bytes(self) -> int:
        async with connect(self.url) as connection:
            return int(await connection.fetchval(_SIZE))


def make_message(kind: MessageType) -> Message:
    """A message with a small body."""
    return Message(
        type=kind, body=_BODY, message_id=new_id(), correlation_id=new_id(), app_id="bench"
    )


async def run(stage: BenchmarkServers, *, quick: bool) -> Report:
    """Measure churn, then the effect of a held snapshot, a long queue and many queues."""
    sizes = _QUICK if quick else _FULL
    with make_progress() as progress:
        churn = await _measure_churn(stage, sizes, progress)
        snapshot = await _compare_snapshot(stage, sizes)
        waiting = await _compare_long_queue(stage, sizes)
        queues = await _compare_many_queues(stage, sizes)
    tenths = _rates_by_tenth(churn)
    rows: list[list[Cell]] = [
        [f"{number}", rate, size / _MB] for number, (rate, size) in enumerate(tenths, start=1)
    ]
    last, largest = tenths[-1][0] / tenths[0][0], max(size for _, size in tenths) / _MB
    table = Table(
        f"{sizes.messages:,} messages on 100 queues, next to {sizes.paused_tasks:,} paused tasks",
        ("tenth", "messages/s", "table MB"),
        rows,
        f"The last tenth ran at {last:.2f} of the first.",
    )
    ratios = {
        f"a snapshot held for {sizes.snapshot_seconds:g} s": snapshot,
        f"{sizes.waiting:,} messages waiting in another queue": waiting,
        f"{sizes.queues:,} queues of replicas": queues,
    }
    compared = Table(
        "Messages per second, in phases of one run",
        ("next to", "before", "with it", "ratio"),
        [[name, before, after, after / before] for name, (before, after) in ratios.items()],
        "With the snapshot: in its last part.",
    )
    figures: dict[str, JsonValue] = {
        "last tenth to first": round(last, 3),
        "largest table MB": round(largest, 1),
        **{name: round(after / before, 3) for name, (before, after) in ratios.items()},
    }
    plot = Lines(
        "Messages acked per second",
        "messages",
        "messages/s",
        {"churn": [(sizes.messages / 10 * (n + 1), rate) for n, (rate, _) in enumerate(tenths)]},
    )
    about = await stage.describe()
    return Report("queues", about, [table, compared], figures, {"churn": plot})


async def _measure_churn(
    stage: BenchmarkServers, sizes: Sizes, progress: Progress
) -> Sequence[Sample]:
    url = await stage.database()
    tasks = PausedTasks(url, sizes.paused_tasks)
    await tasks.create(1)
    await tasks.close()
    async with Traffic(url) as traffic:
        bar = progress.add_task("messages", total=sizes.messages)
        samples: list[Sample] = []
        part = sizes.messages // 10
        for _ in range(10):
            earlier = samples[-1] if samples else Sample(0.0, 0, 0)
            samples += [
                Sample(each.seconds + earlier.seconds, each.acked + earlier.acked, each.bytes)
                for each in await traffic.run(messages=part)
            ]
            progress.advance(bar, part)
        return samples


def _rates_by_tenth(samples: Sequence[Sample]) -> list[tuple[float, int]]:
    """Messages per second and the largest size of the table, in each tenth of the messages."""
    total, tenths = samples[-1].acked, []
    for number in range(10):
        part = [
            each
            for each in samples
            if total * number / 10 <= each.acked <= total * (number + 1) / 10
        ]
        tenths.append((_rate(part), max(each.bytes for each in part)))
    return tenths


def _rate(samples: Sequence[Sample]) -> float:
    first, last = samples[0], samples[-1]
    return (last.acked - first.acked) / (last.seconds - first.seconds)


async def _compare_snapshot(stage: BenchmarkServers, sizes: Sizes) -> tuple[float, float]:
    """Rates before a snapshot, and in the last part of the time for which it is held."""
    url = await stage.empty_database()
    async with Traffic(url) as traffic, connect(url) as holder:
        await traffic.run(seconds=sizes.phase_seconds)  # warm up
        before = _rate(await traffic.run(seconds=sizes.phase_seconds))
        async with holder.transaction(isolation="repeatable_read"):
            await holder.fetchval("SELECT count(*) FROM meshpoint_queue")
            await traffic.run(seconds=sizes.snapshot_seconds - sizes.phase_seconds)
            return before, _rate(await traffic.run(seconds=sizes.phase_seconds))


async def _compare_long_queue(stage: BenchmarkServers, sizes: Sizes) -> tuple[float, float]:
    """Rates before and after a queue without consumers gets its messages."""
    url = await stage.empty_database()
    async with Traffic(url) as traffic, connect(url) as filler:
        await traffic.publisher.declare(_IDLE)
        await traffic.run(seconds=sizes.phase_seconds)
        before = _rate(await traffic.run(seconds=sizes.phase_seconds))
        name = f"{traffic.namespace}.{response_queue(_IDLE)}"
        await filler.execute(_FILL, name, sizes.waiting, _BODY)
        await filler.execute("CHECKPOINT")
        return before, _rate(await traffic.run(seconds=sizes.phase_seconds))


async def _compare_many_queues(stage: BenchmarkServers, sizes: Sizes) -> tuple[float, float]:
    """Rates before and after the queues of many replicas exist, each with one message."""
    url = await stage.empty_database()
    async with Traffic(url) as traffic:
        await traffic.run(seconds=sizes.phase_seconds)
        before = _rate(await traffic.run(seconds=sizes.phase_seconds))
        replicas = [ReplicaId(new_id()) for _ in range(sizes.queues)]
        for replica in replicas:
            await traffic.publisher.declare(_MANY, replica)
        addresses: list[Address] = [private_queue(_MANY, replica) for replica in replicas]
        for start in range(0, len(addresses), _BATCH):
            await traffic.publisher.publish(
                [
                    (address, make_message(MessageType.RESPONSE))
                    for address in addresses[start : start + _BATCH]
                ]
            )
        return before, _rate(await traffic.run(seconds=sizes.phase_seconds))
