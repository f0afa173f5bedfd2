"""Memory used by a replica for ten thousand paused tasks."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from benchmarks.patient import mute, patient
from benchmarks.report import Cell, Lines, Report, Table
from benchmarks.resident import Held, Resident
from benchmarks.stage import Stage
from meshpoint import wiring
from meshpoint.client import Client
from meshpoint.model.ids import AgentName, TaskId, new_id
from meshpoint.model.messages import nested_of
from meshpoint.ports.broker import Broker
from meshpoint.settings import MeshSettings

STATE_BYTES = 64 * 1024
_MB = 1024 * 1024
_TARGET = 2  # MB
_WARM_UP = 500
_WARM_UP_IN_MEMORY = 20  # few, because memory freed by the warm-up hides later growth
_STEPS = 10
_MUTE, _PATIENT = AgentName(mute.name), AgentName(patient.name)


@dataclass(frozen=True, slots=True)
class Weighed:
    """Memory of the process by number of paused tasks, and after trimming at the end."""

    points: Sequence[tuple[int, Held]]
    trimmed: Held

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


async def run(stage: Stage, *, quick: bool) -> Report:
    """Measure a replica with tasks in the database, and one with tasks in memory."""
    durable = await _weigh(stage, 2_000 if quick else 10_000, stateless=True)
    in_memory = await _weigh(stage, 200 if quick else 1_000, stateless=False)
    weighed = {"in the database": durable, "in memory": in_memory}
    return Report(
        "memory",
        await stage.about(),
        [_table(weighed), _course(durable)],
        _figures(weighed),
        {"resident": _plot(weighed)},
    )


async def _weigh(stage: Stage, tasks: int, *, stateless: bool) -> Weighed:
    url, namespace = (await stage.rabbit()).url, new_id()
    mesh = {"namespace": namespace, "broker_url": url}
    agent: dict[str, Any] = {"name": _PATIENT, "entrypoint": "benchmarks.patient:patient", "max_in_memory": 100_000}
    if stateless:
        database = await stage.database()
        agent |= {"stateless_checkpointing": True, "session_service": "sql", "session_db_url": database}
    broker = wiring.make_broker(MeshSettings(namespace=namespace, broker_url=url))
    with tempfile.TemporaryDirectory() as folder:
        async with Client(broker) as client, Resident(Path(folder), {"mesh": mesh, "agent": agent}) as replica:
            await broker.declare(_MUTE)
            await broker.declare(_PATIENT)
            await _warm_up(client, broker, _WARM_UP if stateless else _WARM_UP_IN_MEMORY)
            return await _fill(client, broker, replica, tasks)


async def _warm_up(client: Client, broker: Broker, tasks: int) -> None:
    """Run tasks and cancel them, twice, so that all lasting allocations have happened."""
    for _ in range(2):
        task_ids = [TaskId(new_id()) for _ in range(tasks)]
        replies = await asyncio.gather(*[client.send(_PATIENT, STATE_BYTES, task_id=each) for each in task_ids])
        await _paused(broker, tasks)
        await asyncio.gather(*[client.cancel(_PATIENT, each) for each in task_ids])
        await asyncio.gather(*replies)
        await _forget(broker)


async def _fill(client: Client, broker: Broker, replica: Resident, tasks: int) -> Weighed:
    points: list[tuple[int, Held]] = []
    for paused in range(0, tasks + 1, tasks // _STEPS):
        missing = paused - (points[-1][0] if points else 0)
        await asyncio.gather(*[client.send(_PATIENT, STATE_BYTES) for _ in range(missing)])
        await _paused(broker, paused)
        await replica.at_rest()
        points.append((paused, await replica.held()))
    return Weighed(points, await replica.held(trimmed=True))


async def _paused(broker: Broker, count: int) -> None:
    """Wait until `count` tasks have called their peer."""
    async with asyncio.timeout(600):
        while (await broker.depth(nested_of(_MUTE)) or 0) < count:
            await asyncio.sleep(0.1)


async def _forget(broker: Broker) -> None:
    """Empty the peer's queue."""
    emptied = asyncio.Event()
    left = await broker.depth(nested_of(_MUTE)) or 0

    def swallow(delivery: Any) -> None:
        nonlocal left
        left -= 1
        settling.append(asyncio.ensure_future(delivery.ack()))
        if left <= 0:
            emptied.set()

    settling: list[asyncio.Future[bool]] = []
    subscription = await broker.consume(nested_of(_MUTE), 1000, swallow)
    await emptied.wait()
    await asyncio.gather(*settling)
    await subscription.cancel()


def _table(weighed: dict[str, Weighed]) -> Table:
    rows: list[list[Cell]] = [
        [
            where,
            each.tasks,
            each.points[0][1].resident / _MB,
            each.resident / _MB,
            each.unique / _MB,
            (each.trimmed.resident - each.points[0][1].resident) / _MB,
            each.resident / each.tasks,
            each.objects / each.tasks,
        ]
        for where, each in weighed.items()
    ]
    extrapolated = weighed["in memory"].resident / weighed["in memory"].tasks * weighed["in the database"].tasks
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
        f"Target: less than {_TARGET} MB more in the database. {STATE_BYTES // 1024} KB of state each: base64 of "
        "random bytes, which zstd shrinks by a quarter. Before it, "
        f"{_WARM_UP} tasks ({_WARM_UP_IN_MEMORY} in memory) "
        "came and were cancelled, twice. Garbage is collected before each measurement; trimmed: after malloc_trim, "
        "also compared with before. At the rate per task in memory, "
        f"{weighed['in the database'].tasks:,} tasks would take {extrapolated / _MB:,.0f} MB there (extrapolated).",
    )


def _course(durable: Weighed) -> Table:
    rows: list[list[Cell]] = [
        [paused, held.resident / _MB, held.unique / _MB, held.objects] for paused, held in durable.points
    ]
    return Table(
        "As tasks come to wait in the database", ("paused tasks", "resident MB", "unique MB", "objects"), rows
    )


def _figures(weighed: dict[str, Weighed]) -> dict[str, JsonValue]:
    figures: dict[str, JsonValue] = {"state bytes": STATE_BYTES}
    for where, each in weighed.items():
        figures[f"paused tasks {where}"] = each.tasks
        figures[f"MB more {where}"] = round(each.resident / _MB, 2)
        figures[f"bytes per task {where}"] = round(each.resident / each.tasks)
    return figures


def _plot(weighed: dict[str, Weighed]) -> Lines:
    series = {
        where: [(float(paused), held.resident / _MB) for paused, held in each.points]
        for where, each in weighed.items()
    }
    return Lines("Memory of a replica", "paused tasks", "resident MB", series)
