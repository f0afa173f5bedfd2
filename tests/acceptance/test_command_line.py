"""The real command line: replicas in separate processes that share one SQLite file."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

AGENT = """
from meshpoint import agent

@agent("shout", version="1")
async def shout(ctx, text: str) -> str:
    return text.upper()
"""
CONFIG = "agent: {name: shout, entrypoint: 'my_agents:shout'}\n"
MESHPOINT = [sys.executable, "-m", "meshpoint.cli"]


class Supervisor:
    """`meshpoint run --replicas 2` and its log."""

    def __init__(self, folder: Path) -> None:
        command = [*MESHPOINT, "run", "mesh.yaml", "--replicas", "2"]
        self.process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
        self.pids: list[int] = []

    def wait_started(self, count: int) -> None:
        """Return when `count` more replicas consume."""
        assert self.process.stderr is not None
        while count:
            line: dict[str, Any] = json.loads(self.process.stderr.readline())
            self.pids += [
                int(pid)
                for pid in re.findall(r"is running as process (\d+)", line.get("message", ""))
            ]
            count -= line.get("step") == "started"

    def remaining_lines(self) -> list[dict[str, Any]]:
        """The rest of the log, which ends when the last process that writes it has ended."""
        assert self.process.stderr is not None
        return [json.loads(line) for line in self.process.stderr.read().splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mesh.yaml").write_text(CONFIG, encoding="utf-8")
    (tmp_path / "my_agents.py").write_text(AGENT, encoding="utf-8")
    return tmp_path


@pytest.fixture
def replicas(folder: Path) -> Iterator[Supervisor]:
    replicas = Supervisor(folder)
    yield replicas
    replicas.process.kill()
    replicas.remaining_lines()  # replicas end on their own when their supervisor is gone
    replicas.process.communicate()


def send(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*MESHPOINT, "send", *arguments, "--config", "mesh.yaml"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_killed_replica_is_replaced_and_a_signal_drains_all_replicas(
    folder: Path, replicas: Supervisor, number: signal.Signals
) -> None:
    replicas.wait_started(2)
    answered = send(folder, "shout", "hello")
    assert (answered.returncode, answered.stdout) == (0, "HELLO\n")
    os.kill(replicas.pids[0], signal.SIGKILL)
    replicas.wait_started(1)
    assert len(set(replicas.pids)) == 3
    replicas.process.send_signal(number)
    assert replicas.process.wait() == 0
    records = sorted(line["step"] for line in replicas.remaining_lines() if "step" in line)
    assert records == ["drained", "drained", "draining", "draining"]


def test_replicas_drain_when_their_supervisor_is_killed(replicas: Supervisor) -> None:
    replicas.wait_started(2)
    replicas.process.kill()
    records = sorted(line["step"] for line in replicas.remaining_lines() if "step" in line)
    assert records == ["drained", "drained", "draining", "draining"]


def test_an_agent_that_cannot_be_imported_stops_all_replicas_with_one_error(folder: Path) -> None:
    (folder / "other.yaml").write_text(CONFIG.replace("my_agents", "no_agents"), encoding="utf-8")
    command = [*MESHPOINT, "run", "other.yaml", "--replicas", "2", "--log-level", "error"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert {line.partition(":")[0] for line in done.stderr.splitlines()} == {"error"}
    assert "no_agents" in done.stderr


def test_failures_are_reported_by_exit_codes(folder: Path, replicas: Supervisor) -> None:
    replicas.wait_started(2)
    invalid = send(folder, "shout", '{"not": "text"}')
    assert (invalid.returncode, "failed (invalid)" in invalid.stderr) == (4, True)
    unknown = send(folder, "nobody", "hello")
    assert (unknown.returncode, unknown.stderr.count("\n")) == (1, 1)
    assert "nobody" in unknown.stderr


def test_an_unavailable_broker_is_reported_in_one_line(folder: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound but not listening
        broker = f"amqp://u:secret@127.0.0.1:{closed.getsockname()[1]}/"
        completed = send(folder, "shout", "hello", "--broker", broker)
    assert (completed.returncode, completed.stderr.count("\n")) == (3, 1)
    assert completed.stderr.startswith("error: ")
    assert "secret" not in completed.stderr
