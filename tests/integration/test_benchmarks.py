"""The benchmarks measure what they claim.

The store benchmark compares equal work: its floor leaves the same rows as Meshpoint at every step.
The restore benchmark reads each checkpoint from the intended source.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest
import zstandard

from benchmarks import page
from benchmarks.contenders import job
from benchmarks.contenders.job import Contender, Job
from benchmarks.contenders.mesh import Mesh, mesh_job
from benchmarks.contenders.plain_sql import PlainSql
from benchmarks.measure import Medians, Sample
from benchmarks.redis_failures import restore_through_failures
from benchmarks.restorer import (
    AFTER_FLUSH,
    FROM_POSTGRESQL,
    FROM_REDIS,
    SAVE,
    SAVE_AND_CACHE,
    Restorer,
)
from benchmarks.since import NOW, ROOT, Version, log_ratios, mean_and_error
from benchmarks.working import MeasuredMemory, Size
from meshpoint.adapters.sql import SqlStore
from meshpoint.model.memory import MemorySource
from meshpoint.model.transitions import JoinCompleted
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
async def plain_sql(postgres_url: str) -> AsyncIterator[PlainSql]:
    plain_sql = PlainSql()
    await plain_sql.open(postgres_url)
    yield plain_sql
    await plain_sql.close()


@pytest.fixture(params=[1, 3])
def jobs(request: pytest.FixtureRequest) -> list[Job]:
    """Tasks with one or three calls, the same for both contenders, which take turns."""
    return job.jobs(request.param, 2)


async def mesh_rows(mesh: Mesh, jobs: list[Job], url: str) -> AsyncIterator[dict[str, list[Row]]]:
    """The tables after each step."""
    tasks = [mesh_job(job_) for job_ in jobs]
    for task in tasks:
        await mesh.pause(task)
    await mesh.wait_for_background_writes()
    yield await table_rows(url)
    first = await mesh.claim([task.claims[0] for task in tasks])
    yield await table_rows(url)
    arrivals = first + await mesh.claim([claim for task in tasks for claim in task.claims[1:]])
    resumed = {
        arrival.task_id: arrival.task for arrival in arrivals if isinstance(arrival, JoinCompleted)
    }
    yield await table_rows(url)
    ended = [await mesh.commit_end(task, resumed[task.pause.run.task_id]) for task in tasks]
    yield await table_rows(url)
    for each in ended:
        await mesh.mark_replied(each)
    await mesh.wait_for_background_writes()
    yield await table_rows(url)


async def floor_rows(
    plain_sql: PlainSql, jobs: list[Job], url: str
) -> AsyncIterator[dict[str, list[Row]]]:
    """The tables after each step."""
    for job_ in jobs:
        await plain_sql.pause(job_)
    yield await table_rows(url)
    first = await plain_sql.claim([(each, 0) for each in jobs])
    yield await table_rows(url)
    later_calls = [(each, index) for each in jobs for index in range(1, len(each.calls))]
    resumed = {
        one.task_id: one
        for one in first + (await plain_sql.claim(later_calls) if later_calls else [])
    }
    yield await table_rows(url)
    for job_ in jobs:
        await plain_sql.commit_end(job_, resumed[job_.task_id])
    yield await table_rows(url)
    for job_ in jobs:
        await plain_sql.mark_replied(job_)
    yield await table_rows(url)


def test_the_page_of_tables_has_the_saved_figures() -> None:
    saved = json.loads(page.RESULT.read_text())
    assert page.PAGE.read_text() == page.to_markdown(saved)
    assert all(f"## {table['title']}" in page.PAGE.read_text() for table in saved["tables"])


async def test_the_baseline_writes_the_same_rows_as_meshpoint(
    mesh: Mesh, plain_sql: PlainSql, jobs: list[Job], postgres_url: str
) -> None:
    expected_rows = [rows async for rows in mesh_rows(mesh, jobs, postgres_url)]
    await empty_tables(postgres_url)
    found = [rows async for rows in floor_rows(plain_sql, jobs, postgres_url)]

    assert [len(step["agent_paused_tasks"]) for step in expected_rows] == [2] * 5
    for step, (expected, actual) in enumerate(zip(expected_rows, found, strict=True)):
        assert actual == expected, f"step {step}"


async def test_every_contender_completes_a_round(
    mesh: Mesh, plain_sql: PlainSql, postgres_url: str
) -> None:
    unbatched = Mesh(claim_together=False)
    await unbatched.open(postgres_url)
    contenders: list[Contender] = [mesh, unbatched, plain_sql]
    for contender in contenders:
        await contender.run(contender.prepared(job.jobs(3, 20)), 8)
    await unbatched.close()

    rows = await table_rows(postgres_url)
    assert [row["status"] for row in rows["agent_paused_tasks"]] == ["completed"] * 60
    assert all(row["reply_sent"] for row in rows["agent_paused_tasks"])
    assert rows["agent_peer_sub_tasks"] == rows["agent_parallel_invocations"] == []


@pytest.fixture
async def restorer(postgres_url: str, own_redis: RedisServer) -> AsyncIterator[Restorer]:
    restorer = Restorer(postgres_url, own_redis.url, 5_000)
    await restorer.open(3)
    yield restorer
    await restorer.close()


async def test_each_restore_method_is_timed_and_counted(restorer: Restorer) -> None:
    for name in (FROM_REDIS, FROM_POSTGRESQL, AFTER_FLUSH, SAVE, SAVE_AND_CACHE):
        assert (await restorer.run_round(name)).count == 3
        assert restorer.percentile(name, 50) > 0
    await restorer.count_requests()
    redis_requests = {name: requests.redis for name, requests in restorer.requests.items()}
    assert redis_requests == {
        FROM_REDIS: 1,
        FROM_POSTGRESQL: 0,
        AFTER_FLUSH: 2,
        SAVE: 0,
        SAVE_AND_CACHE: 1,
    }


async def test_no_checkpoint_is_lost_whatever_happens_to_redis(
    restorer: Restorer, own_redis: RedisServer
) -> None:
    phases = await restore_through_failures(restorer, own_redis)
    assert {(phase.restores, phase.different, phase.lost) for phase in phases} == {(3, 0, 0)}
    assert [phase.reason for phase in phases] == [
        "",
        "miss 3",
        "",
        "garbage 3",
        "stale 3",
        "unavailable 3",
        "",
        "unavailable 3",
        "",
    ]
    assert [phase.redis for phase in phases] == [3, 0, 3, 0, 0, 0, 3, 0, 3]
    assert [phase.sql for phase in phases] == [0, 3, 0, 3, 3, 3, 0, 3, 0]


async def table_rows(url: str) -> dict[str, list[Row]]:
    """Contents of the tables, apart from exact times and white space in JSON."""
    connection = await asyncpg.connect(url)
    try:
        return {
            table: [
                normalize_row(dict(row))
                for row in await connection.fetch(f"SELECT * FROM {table} ORDER BY {key}")
            ]
            for table, key in _TABLES.items()
        }
    finally:
        await connection.close()


def normalize_row(row: Row) -> Row:
    """Times in tens of minutes since the row's first one, bytes decompressed, JSON parsed."""
    started_at = row.get("checkpointed_at") or row.get("created_at") or 0.0
    return {column: _normalize_value(value, started_at) for column, value in row.items()}


def _normalize_value(value: object, started_at: float) -> object:
    match value:
        case float():
            return round((value - started_at) / _COARSE)
        case bytes():
            opened = zstandard.decompress(value[1:]) if value[:1] == b"\x01" else value[1:]
            return value[:1], _normalize_value(opened.decode(), started_at)
        case str():
            try:
                return json.loads(value)
            except ValueError:
                return value
        case _:
            return value


async def empty_tables(url: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        for table in _TABLES:
            await connection.execute(f"DELETE FROM {table}")
    finally:
        await connection.close()


async def test_each_memory_store_saves_and_restores_a_memory(
    postgres_url: str, own_redis: RedisServer
) -> None:
    store = SqlStore(postgres_url, namespace="working")
    await store.open()
    remembered = MeasuredMemory(Size("30 keys", 30, 50, 1, 1), own_redis.url, store)
    await remembered.open()
    restored_items = (await remembered.l1.read(remembered.owner.agent_id)).items
    assert len(restored_items) == 30
    for source in (MemorySource.SNAPSHOT, MemorySource.SQL):
        await remembered.lose_l1()
        await remembered.restore(source)
        assert sorted(
            (await remembered.l1.read(remembered.owner.agent_id)).items, key=str
        ) == sorted(restored_items, key=str)
    for item in restored_items:
        assert await remembered.redis.getdel(f"L1:seed:working:{item.key}") == item.content
    await remembered.seed_restore()
    for item in restored_items:
        assert await remembered.redis.get(f"L1:seed:working:{item.key}") == item.content
    await remembered.close()
    await store.close()


def test_copies_of_two_versions_are_compared_by_round() -> None:
    rates = {"a": (2, 8), "b": (8, 8), "c": (1, 4), "d": (4, 4)}
    medians = Medians(
        {name: [Sample(rate, seconds=1) for rate in each] for name, each in rates.items()}
    )
    ratio, error = mean_and_error(log_ratios(medians, ("a", "b"), ("c", "d")))
    assert ratio == pytest.approx(2)
    assert error == pytest.approx(0, abs=1e-9)
    ratio, error = mean_and_error(log_ratios(medians, ("a",), ("b",)))
    assert ratio == pytest.approx(0.5)
    assert error == pytest.approx(0.5 * math.log(2))


async def test_a_version_completes_rounds_in_its_own_process(empty_postgres_url: str) -> None:
    version = Version(NOW, ROOT, empty_postgres_url)
    try:
        assert await version.tasks_for(1, 0.01) > 0
        sample = await version.run_round(3, 20)
        assert (sample.count, sample.seconds > 0, sample.extras["wal_kib"] > 0) == (20, True, True)
    finally:
        version.close()
