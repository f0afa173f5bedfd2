"""The benchmarks measure what they claim.

The store benchmark compares equal work: its floor leaves the same rows as Meshpoint at every step.
The restore benchmark reads each checkpoint from the intended source.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest
import zstandard

from benchmarks.contenders import job
from benchmarks.contenders.floor import Floor
from benchmarks.contenders.job import Contender, Job
from benchmarks.contenders.mesh import Mesh, mesh_job
from benchmarks.ordeal import ordeal
from benchmarks.restoring import COPY, FLUSHED, SAVE, SAVE_COPIED, SQL, Restorer
from benchmarks.since import NOW, ROOT, Version
from benchmarks.working import Remembered, Size
from meshpoint.adapters.sql import SqlStore
from meshpoint.model.agent_memory import MemorySource
from meshpoint.model.checkpoint import AllArrived
from servers import RedisServer

Row = dict[str, Any]

_TABLES = {
    "agent_paused_tasks": "logical_task_id",
    "agent_peer_sub_tasks": "sub_task_id",
    "agent_parallel_invocations": "logical_task_id",
}
_COARSE = 600.0
"""Times are rounded to this many seconds, because a busy machine may take minutes."""


@pytest.fixture
async def mesh(postgres_url: str) -> AsyncIterator[Mesh]:
    mesh = Mesh()
    await mesh.open(postgres_url)
    yield mesh
    await mesh.close()


@pytest.fixture
async def floor(postgres_url: str) -> AsyncIterator[Floor]:
    floor = Floor()
    await floor.open(postgres_url)
    yield floor
    await floor.close()


@pytest.fixture(params=[1, 3])
def jobs(request: pytest.FixtureRequest) -> list[Job]:
    """Tasks with one or three calls, the same for both contenders, which share the tables in turn."""
    return job.jobs(request.param, 2)


async def of_mesh(mesh: Mesh, jobs: list[Job], url: str) -> AsyncIterator[dict[str, list[Row]]]:
    """The tables after each step."""
    tasks = [mesh_job(each) for each in jobs]
    for task in tasks:
        await mesh.pause(task)
    await mesh.marks_written()
    yield await tables(url)
    first = await mesh.claim([task.claims[0] for task in tasks])
    yield await tables(url)
    arrivals = first + await mesh.claim([claim for task in tasks for claim in task.claims[1:]])
    resumed = {arrival.task_id: arrival.task for arrival in arrivals if isinstance(arrival, AllArrived)}
    yield await tables(url)
    ended = [await mesh.bury(task, resumed[task.pause.run.task_id]) for task in tasks]
    yield await tables(url)
    for each in ended:
        await mesh.mark_replied(each)
    await mesh.marks_written()
    yield await tables(url)


async def of_floor(floor: Floor, jobs: list[Job], url: str) -> AsyncIterator[dict[str, list[Row]]]:
    """The tables after each step."""
    for each in jobs:
        await floor.pause(each)
    yield await tables(url)
    first = await floor.claim([(each, 0) for each in jobs])
    yield await tables(url)
    rest = [(each, place) for each in jobs for place in range(1, len(each.calls))]
    resumed = {one.task_id: one for one in first + (await floor.claim(rest) if rest else [])}
    yield await tables(url)
    for each in jobs:
        await floor.bury(each, resumed[each.task_id])
    yield await tables(url)
    for each in jobs:
        await floor.mark_replied(each)
    yield await tables(url)


async def test_the_floor_writes_the_rows_that_meshpoint_writes(
    mesh: Mesh, floor: Floor, jobs: list[Job], postgres_url: str
) -> None:
    wanted = [rows async for rows in of_mesh(mesh, jobs, postgres_url)]
    await wipe(postgres_url)
    found = [rows async for rows in of_floor(floor, jobs, postgres_url)]

    assert [len(step["agent_paused_tasks"]) for step in wanted] == [2] * 5
    for step, (expected, actual) in enumerate(zip(wanted, found, strict=True)):
        assert actual == expected, f"step {step}"


async def test_all_do_a_round_to_its_end(mesh: Mesh, floor: Floor, postgres_url: str) -> None:
    alone = Mesh(claim_together=False)
    await alone.open(postgres_url)
    contenders: list[Contender] = [mesh, alone, floor]
    for contender in contenders:
        await contender.run(contender.prepared(job.jobs(3, 20)), 8)
    await alone.close()

    rows = await tables(postgres_url)
    assert [row["status"] for row in rows["agent_paused_tasks"]] == ["completed"] * 60
    assert all(row["reply_sent"] for row in rows["agent_paused_tasks"])
    assert rows["agent_peer_sub_tasks"] == rows["agent_parallel_invocations"] == []


@pytest.fixture
async def restorer(postgres_url: str, own_redis: RedisServer) -> AsyncIterator[Restorer]:
    restorer = Restorer(postgres_url, own_redis.url, 5_000)
    await restorer.open(3)
    yield restorer
    await restorer.close()


async def test_each_way_to_restore_is_timed_and_counted(restorer: Restorer) -> None:
    for name in (COPY, SQL, FLUSHED, SAVE, SAVE_COPIED):
        assert (await restorer.round(name)).count == 3
        assert restorer.percentile(name, 50) > 0
    await restorer.count_requests()
    asked = {name: requests.redis for name, requests in restorer.requests.items()}
    assert asked == {COPY: 1, SQL: 0, FLUSHED: 2, SAVE: 0, SAVE_COPIED: 1}


async def test_no_checkpoint_is_lost_whatever_becomes_of_redis(restorer: Restorer, own_redis: RedisServer) -> None:
    phases = await ordeal(restorer, own_redis)
    assert {(phase.restores, phase.differing, phase.lost) for phase in phases} == {(3, 0, 0)}
    assert [phase.why for phase in phases] == ["", "miss 3", "", "garbage 3", "stale 3", "away 3", "", "away 3", ""]
    assert [phase.redis for phase in phases] == [3, 0, 3, 0, 0, 0, 3, 0, 3]
    assert [phase.sql for phase in phases] == [0, 3, 0, 3, 3, 3, 0, 3, 0]


async def tables(url: str) -> dict[str, list[Row]]:
    """Contents of the tables, apart from exact times and white space in JSON."""
    connection = await asyncpg.connect(url)
    try:
        return {
            table: [plain(dict(row)) for row in await connection.fetch(f"SELECT * FROM {table} ORDER BY {key}")]
            for table, key in _TABLES.items()
        }
    finally:
        await connection.close()


def plain(row: Row) -> Row:
    """Times in tens of minutes since the row's first one, bytes decompressed, JSON parsed."""
    began = row.get("checkpointed_at") or row.get("created_at") or 0.0
    return {column: _plain(value, began) for column, value in row.items()}


def _plain(value: object, began: float) -> object:
    match value:
        case float():
            return round((value - began) / _COARSE)
        case bytes():
            opened = zstandard.decompress(value[1:]) if value[:1] == b"\x01" else value[1:]
            return value[:1], _plain(opened.decode(), began)
        case str():
            try:
                return json.loads(value)
            except ValueError:
                return value
        case _:
            return value


async def wipe(url: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        for table in _TABLES:
            await connection.execute(f"DELETE FROM {table}")
    finally:
        await connection.close()


async def test_each_way_to_keep_a_memory_keeps_it_and_brings_it_back(
    postgres_url: str, own_redis: RedisServer
) -> None:
    store = SqlStore(postgres_url, namespace="working")
    await store.open()
    remembered = Remembered(Size("30 keys", 30, 50, 1, 1), own_redis.url, store)
    await remembered.open()
    held = (await remembered.l1.read(remembered.owner.agent_id)).items
    assert len(held) == 30
    for source in (MemorySource.SNAPSHOT, MemorySource.SQL):
        await remembered.lose()
        await remembered.restore(source)
        assert sorted((await remembered.l1.read(remembered.owner.agent_id)).items, key=str) == sorted(held, key=str)
    for item in held:
        assert await remembered.redis.getdel(f"L1:seed:working:{item.key}") == item.content
    await remembered.seed_restore()
    for item in held:
        assert await remembered.redis.get(f"L1:seed:working:{item.key}") == item.content
    await remembered.close()
    await store.close()


async def test_a_version_in_a_process_of_its_own_does_rounds(empty_postgres_url: str) -> None:
    version = Version(NOW, ROOT, empty_postgres_url)
    try:
        assert await version.tasks_for(1, 0.01) > 0
        sample = await version.round(3, 20)
        assert (sample.count, sample.seconds > 0, sample.extras["wal_kib"] > 0) == (20, True, True)
    finally:
        version.close()
