"""Memory of a caller over a hundred thousand asks."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.environment import BenchmarkServers
from benchmarks.measure import make_progress
from benchmarks.replica_memory import MeasuredReplica, ProcessMemory, measure_own_memory
from benchmarks.report import Report, Table
from benchmarks.waiting_agent import echo_peer
from meshpoint import wiring
from meshpoint.client.mesh import Mesh
from meshpoint.client.transport import Transport
from meshpoint.model.ids import AgentName, new_id
from meshpoint.settings import MeshSettings

MAX_GROWTH_MB = 10
IN_FLIGHT = 64
_TENTHS = 10
_MB = 1024 * 1024


async def run(stage: BenchmarkServers, *, quick: bool) -> Report:
    """Measure this process after each tenth of the asks, all sent through one client."""
    asks = 10_000 if quick else 100_000
    points = await _measure(stage, asks)
    growth = (points[-1].resident - points[0].resident) / _MB
    objects = points[-1].objects - points[0].objects
    table = Table(
        "Memory of a caller",
        ("asks", "resident MB", "unique MB", "objects"),
        [
            [asks // _TENTHS * tenth, each.resident / _MB, each.unique / _MB, each.objects]
            for tenth, each in enumerate(points, start=1)
        ],
        f"{IN_FLIGHT} at a time, from one client to one agent on RabbitMQ. Target: at most "
        f"{MAX_GROWTH_MB} MB more after the last tenth than after the first. It is {growth:.2f} "
        "MB. Garbage is collected before each measurement.",
    )
    return Report(
        "asks",
        await stage.describe(),
        [table],
        {
            "asks": asks,
            "MB more after the last tenth than after the first": round(growth, 2),
            "objects more after the last tenth than after the first": objects,
        },
        {},
    )


async def _measure(stage: BenchmarkServers, asks: int) -> Sequence[ProcessMemory]:
    url, namespace = (await stage.rabbit()).url, new_id()
    config = {
        "mesh": {"namespace": namespace, "broker_url": url},
        "agent": {
            "name": echo_peer.name,
            "entrypoint": "benchmarks.waiting_agent:echo",
            "max_concurrency": IN_FLIGHT,
        },
    }
    broker = wiring.make_broker(MeshSettings(namespace=namespace, broker_url=url))
    points: list[ProcessMemory] = []
    with tempfile.TemporaryDirectory() as folder, make_progress() as progress:
        async with Transport(broker) as transport, MeasuredReplica(Path(folder), config):
            await broker.declare(AgentName(echo_peer.name))
            client, bar = Mesh(transport), progress.add_task("asks", total=asks)

            async def ask(numbers: range) -> None:
                for number in numbers:
                    assert await client.call(echo_peer, number) == number
                    progress.advance(bar)

            for first, last in itertools.pairwise(range(0, asks + 1, asks // _TENTHS)):
                async with asyncio.TaskGroup() as callers:
                    for caller in range(IN_FLIGHT):
                        callers.create_task(ask(range(first + caller, last, IN_FLIGHT)))
                points.append(measure_own_memory())
    return points
