"""Agent code that resists or would force its replica's exit: `meshpoint run` on real servers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from meshpoint.cli.exits import ExitCode
from meshpoint.model.outcomes import Failed, Ok

from .mesh import HERE, SHORT_LEASE, Mesh

pytestmark = pytest.mark.slow


class RunCommand:
    """`meshpoint run CONFIG` and its log."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []

    async def wait_for_line(self, step: str, key: str = "step") -> dict[str, Any]:
        """The next log line whose `key` starts with `step`."""
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            self.lines.append(json.loads(line))
            if str(self.lines[-1].get(key)).startswith(step):
                return self.lines[-1]
        raise AssertionError(f"the command ended before {step}")

    async def wait_ended(self) -> int:
        """Read the rest of the log and return the exit code."""
        assert self.process.stderr is not None
        rest = await self.process.stderr.read()
        self.lines += [json.loads(line) for line in rest.splitlines()]
        return await self.process.wait()


@asynccontextmanager
async def run_command(config: Path, *arguments: str, agents: int = 1) -> AsyncIterator[RunCommand]:
    command = [
        sys.executable,
        "-m",
        "meshpoint.cli",
        "run",
        "--log-json",
        "--log-level",
        "debug",
        *arguments,
    ]
    process = await asyncio.create_subprocess_exec(
        *command,
        str(config),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(HERE)},
        limit=1 << 24,
    )
    try:
        started = RunCommand(process)
        for _ in range(agents):
            await started.wait_for_line("started")
        yield started
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


RESISTING = {"swallows": ExitCode.ABANDONED, "blocks": ExitCode.ABANDONED}
LEAVING = dict.fromkeys(["leaves a thread", "waits for a thread", "leaves a task"], ExitCode.OK)
FAST_OPTIONS = {
    **SHORT_LEASE,
    "drain_timeout_seconds": 0.5,
    "release_timeout_seconds": 2,
    "ack_policy": "on_receipt",
}


@pytest.mark.parametrize(("how", "code"), [*RESISTING.items(), *LEAVING.items()])
async def test_the_process_ends_despite_code_that_resists_shutdown(
    mesh: Mesh, how: str, code: ExitCode, tmp_path: Path
) -> None:
    config = mesh.backends.config("stubborn", **FAST_OPTIONS)
    async with run_command(config) as replica:
        client = await mesh.client()
        asked = await client.send("stubborn", {"how": how, "trace": str(tmp_path / "trace")})
        await replica.wait_for_line("segment")
        replica.process.send_signal(signal.SIGTERM)
        assert await replica.wait_ended() == code
        assert (
            any(line["step"] == "draining" for line in replica.lines if "step" in line)
            or how == "blocks"
        )
    await mesh.replica(config)
    assert (await asked).outcome == Ok("elsewhere")


@pytest.mark.parametrize("how", RESISTING)
async def test_no_other_replica_runs_the_task_until_the_process_ends(
    mesh: Mesh, how: str, tmp_path: Path
) -> None:
    """The lease is renewed until the process ends, long after the lease would have expired."""
    trace = tmp_path / "trace"
    slow = {
        **FAST_OPTIONS,
        "lease_seconds": 3,
        "renew_interval_seconds": 0.5,
        "release_timeout_seconds": 7,
    }
    config = mesh.backends.config("stubborn", **slow)
    async with run_command(config) as replica:
        client = await mesh.client()
        asked = await client.send("stubborn", {"how": how, "trace": str(trace)})
        await replica.wait_for_line("segment")
        await mesh.replica(config)
        replica.process.send_signal(signal.SIGTERM)
        assert await replica.wait_ended() == ExitCode.ABANDONED
        assert (await asked).outcome == Ok("elsewhere")
    pids = [line.split()[0] for line in trace.read_text().splitlines()]
    assert len(set(pids)) == 2
    assert set(pids[: pids.index(pids[-1])]) == {pids[0]}, (
        "the second process began before the first had ended"
    )
    assert pids.count(pids[-1]) == 1


async def test_a_second_signal_ends_the_process_at_once(mesh: Mesh, tmp_path: Path) -> None:
    config = mesh.backends.config("stubborn", drain_timeout_seconds=3600)
    async with run_command(config) as replica:
        client = await mesh.client()
        await client.send("stubborn", {"how": "blocks", "trace": str(tmp_path / "trace")})
        await replica.wait_for_line("segment")
        replica.process.send_signal(signal.SIGINT)
        await replica.wait_for_line("SIGINT received", "message")
        replica.process.send_signal(signal.SIGINT)
        assert await replica.wait_ended() in {ExitCode.INTERRUPTED, 128 + signal.SIGINT}


RAISE_SITES = ["at once", "at once after a pause", "in a task", "in a task after a pause"]
CALLBACK_SITES = ["in a callback", "in a callback after a pause"]
RAISED_EXCEPTIONS = [
    f"{kind} {where}"
    for kind in ("KeyboardInterrupt", "SystemExit")
    for where in [*RAISE_SITES, *CALLBACK_SITES]
]
RAISED_EXCEPTIONS += ["GeneratorExit at once", "GeneratorExit at once after a pause"]


async def test_an_exit_in_agent_code_fails_only_its_own_task(mesh: Mesh) -> None:
    async with run_command(mesh.backends.config("outrageous", "root"), agents=2) as replica:
        client, peer = await mesh.client(), await mesh.peer()
        answering = asyncio.create_task(peer.answer_all())
        honest = [
            await client.send("root", {"numbers": [number], "rounds": 3}) for number in range(20)
        ]
        asked = {what: await client.send("outrageous", what) for what in RAISED_EXCEPTIONS}
        for what, each in asked.items():
            outcome = (await each).outcome
            if "callback" in what:
                assert outcome == Ok("lived on")
            else:
                assert isinstance(outcome, Failed)
                assert outcome.message == f"{what.split()[0]}: {what}"
        for number, each in enumerate(honest):
            assert (await each).outcome == Ok([10 * number])
        answering.cancel()
        replica.process.send_signal(signal.SIGTERM)
        assert await replica.wait_ended() == ExitCode.OK
