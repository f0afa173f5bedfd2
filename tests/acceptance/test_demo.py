"""`meshpoint demo` with real processes: two are killed, and its ledger must add up."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import asyncpg
import psutil
import pytest

from meshpoint.adapters.rabbitmq import RabbitMqBroker
from meshpoint.demo.environment import delete_queues
from meshpoint.demo.replica import ReplicaProcess
from meshpoint.model.ids import AgentName
from meshpoint.model.messages import request_queue
from meshpoint.settings import AgentSettings, MeshSettings, Settings

pytestmark = pytest.mark.slow

DEMO = [sys.executable, "-m", "meshpoint.cli", "demo", "--seed", "1", "--requests"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Environment whose temporary files go to the test's folder."""
    return {**os.environ, "TMPDIR": str(tmp_path)}


def run_demo(
    environment: dict[str, str], requests: int, *arguments: str
) -> tuple[dict[str, Any], str]:
    """The ledger and standard error. The exit code must be 0."""
    command = [*DEMO, str(requests), "--json", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    ledger: dict[str, Any] = json.loads(done.stdout)
    assert (done.returncode, ledger["ok"], ledger["wrong"]) == (0, True, []), done.stderr
    return ledger, done.stderr


def check_ledger(ledger: dict[str, Any], requests: int) -> None:
    counts = ("requests", "answers", "lost", "duplicated", "failed")
    assert [ledger[name] for name in counts] == [requests, requests, 0, 0, 0]
    for name in ("paused_in_killed", "running_in_killed", "resumed_elsewhere", "rescued"):
        assert ledger[name] > 0, name


def test_without_servers_every_request_is_answered_once(
    environment: dict[str, str], tmp_path: Path
) -> None:
    ledger, said = run_demo(environment, 20)
    check_ledger(ledger, 20)
    assert [line.split("SIGKILL")[0][-2:] for line in said.splitlines() if "SIGKILL" in line] == [
        "✗ ",
        "✗ ",
    ]
    assert not list(tmp_path.iterdir()), "the demo left files behind"


def test_a_single_request_survives_both_kills(environment: dict[str, str]) -> None:
    check_ledger(run_demo(environment, 1)[0], 1)


@pytest.mark.servers
async def test_demo_on_servers_creates_the_tables_and_leaves_no_rows_or_queues(
    environment: dict[str, str], amqp_url: str, empty_postgres_url: str
) -> None:
    ledger, said = run_demo(environment, 20, "--broker", amqp_url, "--db", empty_postgres_url)
    check_ledger(ledger, 20)
    assert "created them" in said
    connection = await asyncpg.connect(empty_postgres_url)
    try:
        assert await connection.fetchval("SELECT count(*) FROM agent_paused_tasks") == 0
        assert await connection.fetchval("SELECT count(*) FROM agent_peer_sub_tasks") == 0
    finally:
        await connection.close()


@pytest.mark.servers
async def test_postgres_is_the_only_server(
    environment: dict[str, str], empty_postgres_url: str
) -> None:
    ledger, _ = run_demo(environment, 20, "--db", empty_postgres_url)
    check_ledger(ledger, 20)
    connection = await asyncpg.connect(empty_postgres_url)
    try:
        for table in ("meshpoint_queue", "meshpoint_queue_message", "agent_paused_tasks"):
            assert await connection.fetchval(f"SELECT count(*) FROM {table}") == 0, table
    finally:
        await connection.close()


@pytest.mark.servers
async def test_the_demo_deletes_its_queues(amqp_url: str, namespace: str) -> None:
    mesh = MeshSettings(namespace=namespace, broker_url=amqp_url)
    broker = RabbitMqBroker(amqp_url, namespace=mesh.namespace, private_ttl=mesh.private_queue_ttl)
    await broker.open()
    try:
        await broker.declare(AgentName("travel"))
        assert await broker.depth(request_queue(AgentName("travel"))) == 0
        await delete_queues(mesh)
        assert await broker.depth(request_queue(AgentName("travel"))) is None
    finally:
        await broker.close()


def test_unavailable_servers_are_reported_in_one_line(environment: dict[str, str]) -> None:
    command = [*DEMO, "20", "--broker", "amqp://127.0.0.1:1/"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (3, "", 1)
    assert done.stderr.startswith("error: ")


async def test_a_replica_that_cannot_start_reports_the_reason_in_one_line() -> None:
    agent = AgentSettings(name="travel", entrypoint="meshpoint.demo.agents:nobody")
    process = await ReplicaProcess.start("A", Settings(mesh=MeshSettings(), agents=(agent,)))
    assert [message async for message in process.read_events()] == []
    await process.close()
    reason = str(process.startup_error())
    assert reason.startswith("replica A did not start: ")
    assert "nobody" in reason
    assert "\n" not in reason


@pytest.mark.parametrize(
    ("number", "sigint"),
    [
        (signal.SIGINT, signal.SIG_DFL),
        (signal.SIGTERM, signal.SIG_DFL),
        (signal.SIGTERM, signal.SIG_IGN),  # as a shell does for background jobs
    ],
)
def test_an_interrupted_demo_leaves_no_process_and_no_file(
    number: signal.Signals, sigint: signal.Handlers, environment: dict[str, str], tmp_path: Path
) -> None:
    reader = signal.signal(signal.SIGINT, sigint)  # the child inherits it
    try:
        demo = subprocess.Popen(
            [*DEMO, "500"],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, reader)
    assert demo.stderr is not None
    with demo:
        try:
            next(line for line in demo.stderr if "SIGKILL" in line)
            replicas = psutil.Process(demo.pid).children(recursive=True)
            assert len(replicas) >= 3
            demo.send_signal(number)
            assert demo.wait() == 130
        finally:
            demo.kill()
    assert not [replica for replica in replicas if replica.is_running()]
    assert not list(tmp_path.iterdir())


def test_the_demo_draws_the_replicas_on_a_terminal(environment: dict[str, str]) -> None:
    controller, terminal = pty.openpty()
    environment |= {"TERM": "xterm", "COLUMNS": "80", "LINES": "30"}
    demo = subprocess.Popen(
        [*DEMO, "9"], env=environment, stdout=terminal, stderr=subprocess.PIPE, text=True
    )
    os.close(terminal)
    output = b"".join(_read_chunks(controller)).decode()
    os.close(controller)
    assert demo.communicate()[1] == ""
    assert demo.returncode == 0
    for part in (
        "Meshpoint demo",
        "✗ killed",
        "resumed",
        "9 of 9",
        "every request was answered once",
    ):
        assert part in output


def _read_chunks(descriptor: int) -> Iterator[bytes]:
    with suppress(OSError):  # the other end was closed
        while chunk := os.read(descriptor, 1 << 16):
            yield chunk
