"""`meshpoint run` as a process: signals, and the loss of its supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PROGRAM = """
import asyncio, sys
from meshpoint import wiring

async def serve(settings, *, observer=None, stop=None, metrics=None):
    print("serving", flush=True)
    await stop.wait()
    print("draining", flush=True)
    if "--stuck" in sys.argv:
        await asyncio.Event().wait()

wiring.serve = serve

from meshpoint.cli import main
main([a for a in sys.argv[1:] if a != "--stuck"])
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    (tmp_path / "mesh.yaml").write_text("agent: {name: a, entrypoint: 'm:a'}", encoding="utf-8")
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "run", "mesh.yaml", *arguments],
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "serving\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(start: Start, number: signal.Signals) -> None:
    process = start()
    process.send_signal(number)
    output, logged = process.communicate()
    assert output == "draining\n"
    assert f"{number.name} received: draining" in logged
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)]
)
def test_a_second_signal_ends_the_drain(start: Start, number: signal.Signals, code: int) -> None:
    process = start("--stuck")
    process.send_signal(number)
    assert process.stdout is not None
    assert process.stdout.readline() == "draining\n"
    process.send_signal(number)
    _, output = process.communicate()
    assert process.returncode == code
    assert "Traceback" not in output


def test_a_replica_drains_when_its_supervisor_has_died(start: Start) -> None:
    process = start("--supervised")
    assert process.stdin is not None
    output, logged = process.communicate()  # closes standard input
    assert output == "draining\n"
    assert "the supervisor has ended: draining" in logged
    assert process.returncode == 0


def test_standard_input_is_left_alone_without_a_supervisor(start: Start) -> None:
    process = start()
    assert process.stdin is not None
    process.stdin.close()
    process.stdin = None
    os.kill(process.pid, signal.SIGTERM)
    assert process.communicate()[0] == "draining\n"
