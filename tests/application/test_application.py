"""A few seconds of kills in each test run, and restarts of the servers."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

import meshpoint
from chaos.replica_pool import ReplicaPool
from meshpoint import TaskHandle, TaskTimeout
from servers import PostgresServer, RabbitServer, RedisServer

from .processes import Backend
from .run import Application, RunConfig, Servers, open_application, run
from .update_order import UpdateOrder

SEED = int(
    os.environ.get("MESHPOINT_APPLICATION_SEED", random.SystemRandom().randrange(1_000_000))
)
RUN = "01a217c5-6c22-73ca-baf5-65643a979225"
LATER_RUN = "01a217c5-74a9-7641-9c47-682fcca9899b"


@pytest.fixture
def servers(
    own_rabbit: RabbitServer, own_postgres: PostgresServer, own_redis: RedisServer
) -> Servers:
    return Servers(own_rabbit, own_postgres, own_redis)


async def _kill_at_random(
    backend: Backend, seconds: float, servers: Servers | None, folder: Path
) -> None:
    print(f"seed {SEED}: MESHPOINT_APPLICATION_SEED={SEED} repeats the kills")
    config = RunConfig(
        seed=SEED, seconds=seconds, backend=backend, callers=8, history_folder=folder
    )
    state = await run(config, servers)
    assert state.failures == {}, (SEED, state.counts, state.histories)
    assert state.counts["with a result"] == state.counts["incidents"] >= 8
    assert state.counts["decided by HTTP"] >= 1
    assert state.counts["decided by CLI"] >= 1
    assert state.counts["replicas killed"] >= 1
    assert state.counts["services killed"] >= 1


@pytest.mark.slow
@pytest.mark.timeout(1800)  # the kills, plus the last results on a busy machine
async def test_kills_on_sqlite_lose_nothing(tmp_path: Path) -> None:
    await _kill_at_random("sqlite", 15, None, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_kills_on_servers_lose_nothing(servers: Servers, tmp_path: Path) -> None:
    await _kill_at_random("servers", 20, servers, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_three_days_and_a_week_pass_while_everything_restarts(
    servers: Servers, tmp_path: Path
) -> None:
    """In real time, with days of a few seconds: all servers, replicas and services restart."""
    day = 6.0
    config = RunConfig(seed=SEED, seconds=0, backend="servers", day_seconds=day)
    async with open_application(config, servers, tmp_path) as application:
        async with _connect(application) as mesh:
            # the first deadline must not pass, however long a busy machine takes to restart
            tasks = [await _send(mesh, 1, timeout=1000 * day), await _send(mesh, 2, 7 * day)]
            sent_at = time.time()
            await _wait_for_question(tasks[0])
        async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
            url = f"{application.addresses[0]}/incidents/1/decision"
            response = await client.post(url, json={"approved": True, "by": "ada"})
            approved_at = time.time()
        assert response.status_code == 204, response.text
        for server in (servers.rabbit, servers.postgres, servers.redis):
            await _restart_all(application, server)
        async with _connect(application) as mesh:
            tasks = [mesh.task("analyst", task.id) for task in tasks]
            report = await tasks[0].result()
            assert time.time() - approved_at >= 3 * day
            with pytest.raises(TaskTimeout):
                await tasks[1].result()
            assert time.time() - sent_at >= 7 * day - 1  # sent before the time was taken
    assert report["timeline"][-3:] == ["approved by ada", "rolled back", "followed up"]


def _connect(application: Application) -> Any:
    return meshpoint.connect(config=application.config_file, name="incidents")


async def _send(mesh: meshpoint.Mesh, number: int, timeout: float) -> TaskHandle[Any]:
    incident = {"id": str(number), "service": "login", "summary": "No login"}
    return await mesh.send("analyst", incident, task_id=f"incident-{number}", timeout=timeout)


async def _wait_for_question(task: TaskHandle[Any]) -> None:
    while "approval" not in [wait.name for wait in (await task.status()).waits]:  # noqa: ASYNC110
        await asyncio.sleep(0.1)


async def _restart_all(application: Application, server: Any) -> None:
    """Restart a server, and kill all processes meanwhile."""
    state = application.state
    await server.stop(immediate=True)
    for slot in (*state.replicas.slots, *state.services.slots):
        slot.signal(signal.SIGKILL)
    await server.start()
    await _wait_until_serving(state.replicas)
    await _wait_until_serving(state.services)


async def _wait_until_serving(pool: ReplicaPool) -> None:
    await asyncio.gather(*(slot.serving.wait() for slot in pool.slots))


def _update(update_id: str, *, reset: bool = False) -> dict[str, Any]:
    return {"id": update_id, "reset": reset}


@pytest.mark.parametrize(
    ("updates", "problems"),
    [
        ([_update(f"0.1.{RUN}.1"), _update(f"0.1.{RUN}.3")], 0),
        ([_update(f"0.1.{RUN}.3"), _update(f"0.1.{RUN}.1")], 1),
        ([_update(f"0.1.{RUN}.3"), _update(f"0.1.{RUN}.3")], 1),
        ([_update(f"0.1.{RUN}.3"), _update(f"1.2.{LATER_RUN}.1")], 0),
        ([_update(f"1.2.{RUN}.1"), _update(f"0.1.{LATER_RUN}.1", reset=True)], 1),
        ([_update(f"0.1.{RUN}.1"), _update(f"0.2.{LATER_RUN}.1")], 1),
        ([_update(f"0.1.{RUN}.1"), _update(f"0.2.{LATER_RUN}.1", reset=True)], 0),
        ([_update(f"0.1.{RUN}.3"), _update(f"peer.0.1.{RUN}.1")], 0),
        ([_update(f"0.1.{RUN}.3"), _update("9f86d081884c7d65"), _update(f"0.1.{RUN}.2")], 1),
    ],
)
def test_updates_out_of_order_are_found(updates: list[dict[str, Any]], problems: int) -> None:
    order = UpdateOrder()
    found = [problem for update in updates if (problem := order.find_problem(update))]
    assert len(found) == problems, json.dumps(found)


def test_a_stream_that_lost_its_place_may_begin_anywhere() -> None:
    order = UpdateOrder()
    assert order.find_problem(_update(f"0.1.{RUN}.3")) is None
    order.begin_stream()
    assert order.find_problem(_update(f"0.1.{RUN}.1", reset=True)) is None
    assert order.find_problem(_update(f"0.1.{RUN}.1")) is not None
