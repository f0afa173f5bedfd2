"""Memory and slots of a replica with ten thousand open questions."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
from pydantic import JsonValue
from rich.progress import Progress

from benchmarks.environment import BenchmarkServers, connect
from benchmarks.measure import make_progress
from benchmarks.replica_memory import MeasuredReplica, ProcessMemory
from benchmarks.report import Report, Table
from benchmarks.waiting_agent import asker
from meshpoint import wiring
from meshpoint.client.mesh import Mesh
from meshpoint.client.transport import Transport
from meshpoint.model.ids import AgentName, new_id
from meshpoint.settings import MeshSettings

MAX_GROWTH_MB = 10
SLOTS = 64
_MB = 1024 * 1024
_WARM_UP = 500
_MEASUREMENTS = 10
_BATCH = 100
_POLL_SECONDS = 0.2
_TIMEOUT_SECONDS = 1800
_ASKER = AgentName(asker.name)


@dataclass(frozen=True, slots=True)
class Measured:
    """Memory of the replica by number of open questions, and its free slots at the end."""

    points: list[tuple[int, ProcessMemory]]
    free_slots: int


async def run(stage: BenchmarkServers, *, quick: bool) -> Report:
    """Open questions in one replica on PostgreSQL, then let tasks use all its slots at once."""
    questions = 1_000 if quick else 10_000
    measured = await _measure(stage, questions)
    before, after = measured.points[0][1], measured.points[-1][1]
    growth = (after.resident - before.resident) / _MB
    table = Table(
        "Memory of a replica with open questions",
        ("questions", "resident MB", "unique MB", "objects"),
        [
            [number, each.resident / _MB, each.unique / _MB, each.objects]
            for number, each in measured.points
        ],
        f"Target: at most {MAX_GROWTH_MB} MB more. It is {growth:.2f} MB. At the end, "
        f"{measured.free_slots} of {SLOTS} slots ran tasks at the same time. Before it, "
        f"{_WARM_UP} tasks asked and were cancelled, twice.",
    )
    figures: dict[str, JsonValue] = {
        "questions": questions,
        "MB more": round(growth, 2),
        "objects more": after.objects - before.objects,
        "slots": SLOTS,
        "free slots": measured.free_slots,
    }
    return Report("questions", await stage.describe(), [table], figures, {})


async def _measure(stage: BenchmarkServers, questions: int) -> Measured:
    url, namespace, database = (await stage.rabbit()).url, new_id(), await stage.database()
    agent: dict[str, Any] = {
        "name": _ASKER,
        "entrypoint": "benchmarks.waiting_agent:asker",
        "max_concurrency": SLOTS,
        "database_url": database,
    }
    config = {"mesh": {"namespace": namespace, "broker_url": url}, "agent": agent}
    broker = wiring.make_broker(MeshSettings(namespace=namespace, broker_url=url))
    with tempfile.TemporaryDirectory() as folder, make_progress() as progress:
        async with (
            Transport(broker) as transport,
            MeasuredReplica(Path(folder), config) as replica,
            connect(database) as connection,
        ):
            await broker.declare(_ASKER)
            client = Mesh(transport)
            for _ in range(2):
                await _warm_up(client, connection)
            points = await _open_questions(client, connection, replica, questions, progress)
            return Measured(points, await _use_all_slots(client))


async def _warm_up(client: Mesh, connection: asyncpg.Connection) -> None:
    started = [await client.send(_ASKER, 0) for _ in range(_WARM_UP)]
    await _wait_until_open(connection, _WARM_UP)
    await asyncio.gather(*[task.cancel() for task in started])
    await asyncio.gather(*[task.outcome() for task in started])


async def _open_questions(
    client: Mesh,
    connection: asyncpg.Connection,
    replica: MeasuredReplica,
    questions: int,
    progress: Progress,
) -> list[tuple[int, ProcessMemory]]:
    bar = progress.add_task("questions", total=questions)
    await replica.wait_until_idle()
    points = [(0, await replica.measure_memory())]
    for number in range(_BATCH, questions + 1, _BATCH):
        await asyncio.gather(*[client.send(_ASKER, 0) for _ in range(_BATCH)])
        await _wait_until_open(connection, number)
        progress.advance(bar, _BATCH)
        if number % (questions // _MEASUREMENTS) == 0:
            await replica.wait_until_idle()
            points.append((number, await replica.measure_memory()))
    return points


async def _use_all_slots(client: Mesh) -> int:
    """Run one task per slot. None ends before all of them run."""
    async with asyncio.timeout(_TIMEOUT_SECONDS):
        tasks = [await client.send(_ASKER, SLOTS) for _ in range(SLOTS)]
        return len(await asyncio.gather(*[task.result() for task in tasks]))


async def _wait_until_open(connection: asyncpg.Connection, count: int) -> None:
    """Wait until `count` questions are open."""
    async with asyncio.timeout(_TIMEOUT_SECONDS):
        while await connection.fetchval(_OPEN_QUESTIONS) < count:
            await asyncio.sleep(_POLL_SECONDS)


_OPEN_QUESTIONS = "SELECT count(*) FROM agent_paused_tasks WHERE status = 'waiting'"
