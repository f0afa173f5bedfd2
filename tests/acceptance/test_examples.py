"""Each example runs unmodified and prints what its README or docstring shows."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from code_blocks import code_blocks

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
MESHPOINT = [sys.executable, "-m", "meshpoint.cli"]

EXPECTED_OUTPUT = {
    "two_agents.py": "Buongiorno, God morgen, Buenos días, Ada!\n",
    "trip_planner.py": """\
Rome:
  - flight to Rome, 120 EUR
  - 3 nights at the Albergo Sole, 270 EUR
  ! no answer from weather: timeout
""",
    "nested_mesh.py": "The Waiting Mesh: 45 pages reviewed, 90 mistakes\n",
}
WITH_README = ("stock_analysis", "strategy_research", "market_screen")
"""Folders whose script of the same name prints what their README shows."""
RUN_ON_REPLICAS = ("replicas",)
TESTED_ELSEWHERE = ("incident_analyst", "travel_assistant")
"""`tests/application` and `tests/frameworks` run them and kill their processes."""


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(EXPECTED_OUTPUT)
    assert {path.parent.name for path in EXAMPLES.glob("*/*.py")} == {
        *WITH_README,
        *RUN_ON_REPLICAS,
        *TESTED_ELSEWHERE,
    }


@pytest.mark.parametrize("name", EXPECTED_OUTPUT)
def test_an_example_prints_its_documented_output(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLES / name)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, EXPECTED_OUTPUT[name]), done.stderr
    assert not list(tmp_path.iterdir()), "the example left files behind"


@pytest.mark.parametrize("name", WITH_README)
def test_an_example_verifies_its_claims_and_prints_what_its_readme_shows(
    name: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name / f"{name}.py")],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "80", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    (shown,) = code_blocks((EXAMPLES / name / "README.md").read_text(), "text")
    printed = "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())
    assert (done.returncode, printed, done.stderr) == (0, shown, "")
    assert not list(tmp_path.iterdir()), "the example left files behind"


@pytest.mark.servers
def test_an_expired_memory_in_redis_is_recovered_from_its_snapshot(
    redis_url: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            str(EXAMPLES / "market_screen" / "market_screen.py"),
            "--redis",
            redis_url,
        ],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "80", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    # the values, the head and the index
    assert "The memory in Redis expires too: 206 keys are gone." in done.stdout
    assert "✓ It was verified, and came from snapshot." in done.stdout
    assert not list(tmp_path.iterdir()), "the example left files behind"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("foo", "is no URL of a Redis; write redis://127.0.0.1:6379/0\n"),
        (
            "redis://:secret@h/0?colour=red",
            "is no URL of a Redis; write redis://127.0.0.1:6379/0\n",
        ),
        (
            "redis://:secret@127.0.0.1:{closed}/0",
            "Connect call failed ('127.0.0.1', {closed}); start a Redis there, or",
        ),
        ("redis://:secret@127.0.0.1:{silent}/0", "no answer within 2 s; start a Redis there, or"),
    ],
    ids=["no URL", "an unknown option", "nothing there", "no answer"],
)
def test_an_unusable_redis_is_reported_in_one_line(url: str, said: str, tmp_path: Path) -> None:
    with socket.socket() as closed, socket.create_server(("127.0.0.1", 0)) as silent:
        # bound but not listening, so that no other process can listen there
        closed.bind(("127.0.0.1", 0))
        ports = {"closed": closed.getsockname()[1], "silent": silent.getsockname()[1]}
        done = subprocess.run(
            [
                *(
                    sys.executable,
                    "-W",
                    "error",
                    str(EXAMPLES / "market_screen" / "market_screen.py"),
                ),
                *("--redis", url.format(**ports)),
            ],
            cwd=tmp_path,
            env={**os.environ, "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --redis: ")
    assert said.format(**ports) in done.stderr
    assert done.stderr.count("\n") == 1
    assert "secret" not in done.stderr
    assert not list(tmp_path.iterdir()), "the example left files behind"


def test_the_replicas_example_runs_on_one_file(tmp_path: Path) -> None:
    for name in ("agents.py", "travel.yaml"):
        (tmp_path / name).write_text((EXAMPLES / "replicas" / name).read_text())
    asyncio.run(_send_to_replicas(tmp_path, {}))


@pytest.mark.servers
def test_the_replicas_example_runs_on_servers(
    amqp_url: str, empty_postgres_url: str, namespace: str
) -> None:
    folder = EXAMPLES / "replicas"
    servers = {
        "BROKER_URL": amqp_url,
        "DATABASE_URL": empty_postgres_url,
        "MESH_NAMESPACE": namespace,
    }
    upgrade = [*MESHPOINT, "db", "upgrade", "--config", "travel.yaml"]
    subprocess.run(upgrade, cwd=folder, env={**os.environ, **servers}, check=True)
    asyncio.run(_send_to_replicas(folder, servers))
    assert not list(folder.glob("*.db"))


async def _send_to_replicas(folder: Path, variables: dict[str, str]) -> None:
    environment = {**os.environ, **variables}
    async with _run_replicas(folder, environment):
        send = [*MESHPOINT, "send", "travel", '{"city": "Rome"}', "--config", "travel.yaml"]
        sent = await asyncio.create_subprocess_exec(
            *send,
            cwd=folder,
            env=environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await sent.communicate()
    assert sent.returncode == 0, err.decode()
    assert json.loads(out) == {
        "city": "Rome",
        "flight": "MP101 to Rome, 120 EUR",
        "forecast": "3 days of sun",
    }


@asynccontextmanager
async def _run_replicas(folder: Path, environment: dict[str, str]) -> AsyncIterator[None]:
    """`meshpoint run` with two replicas that serve all three agents."""
    command = [*MESHPOINT, "run", "travel.yaml", "--replicas", "2"]
    supervisor = await asyncio.create_subprocess_exec(
        *command, cwd=folder, env=environment, stderr=asyncio.subprocess.PIPE
    )
    assert supervisor.stderr is not None
    try:
        started = 0
        while started < 2 * 3:
            started += json.loads(await supervisor.stderr.readline()).get("step") == "started"
        reading = asyncio.create_task(supervisor.stderr.read())
        yield
        supervisor.terminate()
        assert await supervisor.wait() == 0
        await reading
    finally:
        if supervisor.returncode is None:
            supervisor.kill()
            await supervisor.wait()
