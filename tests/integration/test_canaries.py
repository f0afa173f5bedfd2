"""With encryption no canary is found by a byte search of any place; without it, all are found."""

from __future__ import annotations


import logging
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest
from canary_mesh import KEY, CanaryMesh, columns_with, files_with, new_canary

from dashboard.client import Browser
from meshpoint.dashboard import Dashboard, LocalAccess
from servers import PostgresServer, RabbitServer, RedisServer, own_database

TASKS = {
    "agent_checkpoints.error_details",
    "agent_checkpoints.failure_reason",
    "agent_checkpoints.l1_snapshot",
    "agent_checkpoints_archive.interim_results",
    "agent_checkpoints_archive.l1_snapshot",
    "agent_operations.parameters",
    "agent_operator_actions.details",
    "agent_operator_actions.target",
    "agent_paused_tasks.a2a_context",
    "agent_paused_tasks.effective_session_id",
    "agent_paused_tasks.flags",
    "agent_paused_tasks.produced_artifacts",
    "agent_paused_tasks.reply",
    "agent_paused_tasks.request",
    "agent_paused_tasks.state",
    "agent_paused_tasks.user_id",
    "agent_peer_sub_tasks.outcome",
    "agent_peer_sub_tasks.request",
    "agent_subtask_records.result",
    "agent_task_log.entry",
    "agent_task_questions.answer",
    "agent_task_questions.request",
    "agent_task_signals.value",
    "agent_task_values.value",
    "meshpoint_conversation_turns.context_id",
    "meshpoint_conversation_turns.messages",
    "meshpoint_conversation_turns.user_id",
}
"""Columns in which a mesh without keys has its canary, among others."""


@pytest.fixture(params=[False, True], ids=["clear", "encrypted"])
def keys(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return (KEY,) if request.param else ()


@pytest.fixture(autouse=True)
def _all_logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="meshpoint")


@pytest.fixture
async def postgres_database(own_postgres: PostgresServer) -> AsyncIterator[str]:
    async with own_database(own_postgres.url) as url:
        yield url


async def act(mesh: CanaryMesh, ids: dict[str, str]) -> None:
    """Do what people do in a dashboard: answer, reject, resume a group, replay a letter."""
    app = Dashboard(mesh.write_config(), access=LocalAccess("ada"))
    browser = Browser(app)
    try:
        await browser.answer_all(mesh.canary, ids)
    finally:
        await app.aclose()


def check(found: set[str], expected: set[str], keys: tuple[str, ...]) -> None:
    """Nothing is found with keys, and all that is expected without."""
    if keys:
        assert found == set()
    else:
        assert expected - found == set()


async def test_sqlite(
    tmp_path: Path, keys: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    url = f"sqlite:///{tmp_path}/mesh.db"
    mesh = CanaryMesh(tmp_path, url, url, keys, new_canary())
    ids = await mesh.live()
    print(ids)
    check(await columns_with(url, mesh.forms), TASKS | {"meshpoint_queue_content.body"}, keys)
    check(set(files_with(tmp_path, mesh.forms)), {"mesh.db"}, keys)
    print([r.getMessage() for r in caplog.records if mesh.canary in r.getMessage()])
    assert mesh.canary not in caplog.text


async def test_postgres(
    own_postgres: PostgresServer,
    postgres_database: str,
    tmp_path: Path,
    keys: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The tables of tasks and queues, and the bytes of data files, of the WAL and of the log."""
    mesh = CanaryMesh(tmp_path, postgres_database, postgres_database, keys, new_canary())
    await mesh.live()
    found = await columns_with(postgres_database, mesh.forms)
    check(found, TASKS | {"meshpoint_queue_message.body"}, keys)
    connection = await asyncpg.connect(postgres_database)
    await connection.execute("CHECKPOINT")
    await connection.close()
    files = files_with(own_postgres.folder.path, mesh.forms)
    kinds = {part for file in files for part in Path(file).parts[1:2]}
    print(files)
    check(kinds, {"base", "pg_wal"}, keys)
    assert mesh.canary not in caplog.text


async def test_rabbitmq(
    own_rabbit: RabbitServer,
    tmp_path: Path,
    keys: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What the node writes: segments of queues, and its log."""
    mesh = CanaryMesh(
        tmp_path, f"sqlite:///{tmp_path}/mesh.db", own_rabbit.url, keys, new_canary()
    )
    await mesh.live()
    await own_rabbit.stop()  # cleanly, so that it writes what is in memory
    files = files_with(own_rabbit.folder.path, mesh.forms)
    print(files)
    check({Path(file).parts[0] for file in files}, {"data"}, keys)
    assert mesh.canary not in caplog.text


async def test_redis(own_redis: RedisServer, tmp_path: Path, keys: tuple[str, ...]) -> None:
    """What the server appends to its file: copies of checkpoints and snapshots of memories."""
    url = f"sqlite:///{tmp_path}/mesh.db"
    options = {"checkpoint_cache_url": own_redis.url, "memory_snapshot_url": own_redis.url}
    mesh = CanaryMesh(tmp_path, url, url, keys, new_canary(), options)
    await mesh.live()
    await own_redis.stop()
    files = files_with(own_redis.folder.path, mesh.forms)
    print(files)
    check({Path(file).parts[0] for file in files}, {"appendonlydir"}, keys)
