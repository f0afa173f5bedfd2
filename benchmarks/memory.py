"""Memory used by a replica for ten thousand paused tasks."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from benchmarks.environment import BenchmarkServers
from benchmarks.replica_memory import MeasuredReplica, ProcessMemory
from benchmarks.report import Cell, Lines, Report, Table
from benchmarks.waiting_agent import patient, silent_peer
from meshpoint import wiring
from meshpoint.client.mesh import Mesh
from meshpoint.client.transport import Transport
from meshpoint.model.ids import AgentName, new_id
from meshpoint.model.messages import nested_queue
from meshpoint.ports.broker import Broker
from meshpoint.settings import MeshSettings

STATE_BYTES = 64 * 1024
_MB = 1024 * 1024
_TARGET_KB = 2  # MB
_WARM_UP = 500
_WARM_UP_IN_PROCESS = 20  # few, because memory freed by the warm-up hides later growth
_MEASUREMENTS = 10
_SILENT_PEER, _WAITING_AGENT = AgentName(silent_peer.name), AgentName(patient.name)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of the process by number of paused tasks, and after trimming at the end."""

    points: Sequence[tuple[int, ProcessMemory]]
    trimmed: ProcessMemory

    @property
    def tasks(self) -> int:
        return self.points[-1][0]

    @property
    def resident(self) -> int:
        """Growth of resident bytes since before the first task."""
        return self.points[-1][1].resident - self.points[0][1].resident

    @property
    def unique(self) -> int:
        """Growth of bytes not shared with other processes."""
        return self.points[-1][1].unique - self.points[0][1].unique

    @property
    def objects(self) -> int:
        """Growth of the number of Python objects."""
        return self.points[-1][1].objects - self.points[0][1].objects


async def run(stage: BenchmarkServers, *, quick: bool) -> Report:
    """Measure a replica with tasks in the database, and one with tasks in memory."""
    durable = await _measure_memory(stage, 2_000 if quick else 10_000, stateless=True)
    in_process = await _measure_memory(stage, 200 if quick else 1_000, stateless=False)
    measured = {"in the database": durable, "in memory": in_process}
    return Report(
        "memory",
        await stage.describe(),
        [_table(measured), _growth_table(durable)],
        _figures(measured),
        {"resident": _plot(measured)},
    )


async def _measure_memory(stage: BenchmarkServers, tasks: int, *, stateless: bool) -> MemoryUse:
    url, namespace = (await stage.rabbit()).url, new_id()
    mesh = {"namespace": namespace, "broker_url": url}
    agent: dict[str, Any] = {
        "name": _WAITING_AGENT,
        "entrypoint": "benchmarks.waiting_agent:patient",
        "max_in_memory": 100_000,
    }
    if stateless:
        database = await stage.database()
        agent |= {
            "stateless_checkpointing": True,
            "session_service": "sql",
            "session_db_url": database,
        }
    broker = wiring.make_broker(MeshSettings(namespace=namespace, broker_url=url))
    with tempfile.TemporaryDirectory() as folder:
        async with (
            Transport(broker) as transport,
            MeasuredReplica(Path(folder), {"mesh": mesh, "agent": agent}) as replica,
        ):
            await broker.declare(_SILENT_PEER)
            await broker.declare(_WAITING_AGENT)
            client = Mesh(transport)
            await _warm_up(client, broker, _WARM_UP if stateless else _WARM_UP_IN_PROCESS)
            return await _pause_tasks(client, broker, replica, tasks)


async def _warm_up(client: Mesh, broker: Broker, tasks: int) -> None:
    """Run tasks and cancel them, twice, so that all lasting allocations have happened."""
    for _ in range(2):
        started = await asyncio.gather(
            *[client.send(_WAITING_AGENT, STATE_BYTES) for _ in range(tasks)]
        )
        await _wait_until_paused(broker, tasks)
        await asyncio.gather(*[task.cancel() for task in started])
        await asyncio.gather(*[task.outcome() for task in started])
        await _empty_peer_queue(broker)


async def _pause_tasks(
    client: Mesh, broker: Broker, replica: MeasuredReplica, tasks: int
) -> MemoryUse:
    points: list[tuple[int, ProcessMemory]] = []
    for paused in range(0, tasks + 1, tasks // _MEASUREMENTS):
        additional = paused - (points[-1][0] if points else 0)
        await asyncio.gather(
            *[client.send(_WAITING_AGENT, STATE_BYTES) for _ in range(additional)]
        )
        await _wait_until_paused(broker, paused)
        await replica.wait_until_idle()
        points.append((paused, await replica.measure_memory()))
    return MemoryUse(points, await replica.measure_memory(trimmed=True))


async def _wait_until_paused(broker: Broker, count: int) -> None:
    """Wait until `count` tasks have called their peer."""
    async with asyncio.timeout(600):
        while (await broker.depth(nested_queue(_SILENT_PEER)) or 0) < count:
            await asyncio.sleep(0.1)


async def _empty_peer_queue(broker: Broker) -> None:
    """Empty the peer's queue."""
    is_empty = asyncio.Event()
    remaining = await broker.depth(nested_queue(_SILENT_PEER)) or 0

    def discard(delivery: Any) -> None:
        nonlocal remaining
        remaining -= 1
        acks.append(asyncio.ensure_future(delivery.ack()))
        if remaining <= 0:
            is_empty.set()

    acks: list[asyncio.Future[bool]] = []
    subscription = await broker.consume(nested_queue(_SILENT_PEER), 1000, discard)
    await is_empty.wait()
    await asyncio.gather(*acks)
    await subscription.cancel()


def _table(measured: dict[str, MemoryUse]) -> Table:
    rows: list[list[Cell]] = [
        [
            where,
            memory_use.tasks,
            memory_use.points[0][1].resident / _MB,
            memory_use.resident / _MB,
            memory_use.unique / _MB,
            (memory_use.trimmed.resident - memory_use.points[0][1].resident) / _MB,
            memory_use.resident / memory_use.tasks,
            memory_use.objects / memory_use.tasks,
        ]
        for where, memory_use in measured.items()
    ]
    extrapolated = (
        measured["in memory"].resident
        / measured["in memory"].tasks
        * measured["in the database"].tasks
    )
    return Table(
        "Memory of a replica whose tasks wait",
        (
            "kept",
            "paused",
            "MB before",
            "MB more",
            "unique MB more",
            "trimmed MB more",
            "bytes/task",
            "objects/task",
        ),
        rows,
        f"Target: less than {_TARGET_KB} MB more in the database. {STATE_BYTES // 1024} KB of "
        "state each: base64 of random bytes, which zstd shrinks by a quarter. Before it, "
        f"{_WARM_UP} tasks ({_WARM_UP_IN_PROCESS} in memory) came and were cancelled, twice. "
        "Garbage is collected before each measurement; "
        "trimmed: after malloc_trim, also compared with before. At the rate per task in memory, "
        f"{measured['in the database'].tasks:,} tasks would take {extrapolated / _MB:,.0f} MB "
        "there (extrapolated).",
    )


def _growth_table(durable: MemoryUse) -> Table:
    rows: list[list[Cell]] = [
        [paused, memory_at.resident / _MB, memory_at.unique / _MB, memory_at.objects]
        for paused, memory_at in durable.points
    ]
    return Table(
        "As tasks pause in the database",
        ("paused tasks", "resident MB", "unique MB", "objects"),
        rows,
    )


def _figures(measured: dict[str, MemoryUse]) -> dict[str, JsonValue]:
    figures: dict[str, JsonValue] = {"state bytes": STATE_BYTES}
    for where, memory_use in measured.items():
        figures[f"paused tasks {where}"] = memory_use.tasks
        figures[f"MB more {where}"] = round(memory_use.resident / _MB, 2)
        figures[f"bytes per task {where}"] = round(memory_use.resident / memory_use.tasks)
    return figures


def _plot(measured: dict[str, MemoryUse]) -> Lines:
    series = {
        where: [
            (float(paused), memory_at.resident / _MB) for paused, memory_at in memory_use.points
        ]
        for where, memory_use in measured.items()
    }
    return Lines("Memory of a replica", "paused tasks", "resident MB", series)
