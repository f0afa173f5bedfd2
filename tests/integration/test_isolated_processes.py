"""Processes of isolated runs, and the template that forks them.

The test agent acts at import time.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from meshpoint.adapters.child_process import ChildProcess, ChildProcesses
from meshpoint.adapters.template_process import Template
from meshpoint.model.ids import AgentName, RunId, TaskId, new_id
from meshpoint.model.tasks import Run
from meshpoint.ports.isolation import Exit, ExitKind
from meshpoint.settings import Settings
from recorded_events import RecordedEvents
from servers.process import wait_until_exited

pytestmark = pytest.mark.skipif(not Template().is_supported, reason="needs pidfds")

AGENT = """
import json, os, random, signal, sys
from pathlib import Path
from meshpoint.model.ids import new_id

folder = Path(__file__).parent
facts = {
    "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0),
    "ids": [new_id(), random.random()],
    "open": sorted(int(each) for each in os.listdir("/proc/self/fd")), "here": os.getcwd(),
    "says": os.environ.get("SAYS"), "score": Path("/proc/self/oom_score_adj").read_text().strip(),
    "term": signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN,
    "int": signal.getsignal(signal.SIGINT) is not signal.SIG_IGN, "path": sys.path,
}
with open(folder / "facts", "w") as pipe:
    pipe.write(json.dumps(facts) + "\\n")
match (folder / "how").read_text():
    case "exit":
        os._exit(3)
    case "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    case "kill parent":
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    case "wait":
        signal.pause()
"""


@dataclass
class ProcessHarness:
    """Starts isolated runs of an agent whose behaviour is set by the file `how`."""

    folder: Path
    processes: ChildProcesses
    template: Template
    output: asyncio.StreamReader

    async def start(self, behavior: str = "") -> tuple[ChildProcess, dict[str, Any]]:
        """Start a process. Returns it with the facts its agent reported."""
        (self.folder / "how").write_text(behavior)
        run = Run(TaskId(new_id()), AgentName("ward"), RunId(new_id()))
        process = await self.processes.start(run, lambda: None)
        return process, json.loads(await self.output.readline())


@pytest.fixture
async def harness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ProcessHarness]:
    (tmp_path / "isolated_ward.py").write_text(AGENT)
    monkeypatch.syspath_prepend(tmp_path)
    os.mkfifo(tmp_path / "facts")
    pipe = open(tmp_path / "facts", "r+b", buffering=0)  # noqa: ASYNC230, SIM115  # also a writer, so never at EOF
    output = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(output), pipe
    )
    environment = {
        "name": "ward",
        "entrypoint": "isolated_ward:ward",
        "stateless_checkpointing": True,
        "session_service": "sql",
        "session_db_url": f"sqlite:///{tmp_path}/tasks.db",
    }
    mesh = {"namespace": "test", "broker_url": f"sqlite:///{tmp_path}/broker.db"}
    settings = Settings.model_validate({"mesh": mesh, "agents": [environment]})
    template = Template()
    processes = ChildProcesses(
        settings.model_dump(mode="json"), RecordedEvents(), timedelta(minutes=5), template
    )
    yield ProcessHarness(tmp_path, processes, template, output)
    await processes.close()
    transport.close()


async def test_each_run_has_its_own_process_forked_from_one_template(
    harness: ProcessHarness,
) -> None:
    first, state = await harness.start()
    assert (await first.wait()).kind is ExitKind.IMPOSSIBLE  # the module defines no agent
    second, second_state = await harness.start()
    assert (await second.wait()).kind is ExitKind.IMPOSSIBLE
    assert state["parent"] == second_state["parent"] == harness.template.pid
    assert len({state["pid"], second_state["pid"], harness.template.pid}) == 3
    assert not set(state["ids"]) & set(second_state["ids"])


async def test_a_forked_process_is_like_a_fresh_one(harness: ProcessHarness) -> None:
    forked_process, state = await harness.start()
    await forked_process.wait()
    harness.template.is_supported = False
    fresh_process, expected = await harness.start()
    await fresh_process.wait()
    assert expected["parent"] == os.getpid()
    for state_dict in (state, expected):
        assert state_dict["session"] == state_dict["pid"]
    for name in ("here", "says", "score", "term", "int", "path"):
        assert state[name] == expected[name]
    assert len(state["open"]) == len(expected["open"])


async def test_the_template_runs_no_agent_code_and_no_threads(harness: ProcessHarness) -> None:
    process, state = await harness.start("wait")
    template = Path(f"/proc/{harness.template.pid}")
    assert "Threads:\t1\n" in (template / "status").read_text()
    assert (template / "oom_score_adj").read_text() == Path("/proc/self/oom_score_adj").read_text()
    assert state["pid"] != harness.template.pid
    process.kill()
    await process.wait()


@pytest.mark.parametrize(
    ("behavior", "reason"), [("exit", "ended with exit code 3"), ("kill", "was killed by SIGKILL")]
)
async def test_deaths_are_described(harness: ProcessHarness, behavior: str, reason: str) -> None:
    process, _ = await harness.start(behavior)
    assert await process.wait() == Exit(ExitKind.DIED, reason)


async def test_a_process_is_killed_even_if_its_template_is_frozen(harness: ProcessHarness) -> None:
    process, state = await harness.start("wait")
    os.kill(state["parent"], signal.SIGSTOP)
    process.kill()
    assert await process.wait() == Exit(ExitKind.DIED, "ended with an unknown exit code")
    with pytest.raises(TimeoutError):
        await harness.template.fork("late", 0, 1, timeout=0)
    await wait_until_exited(state["parent"])


async def test_a_template_that_was_killed_is_replaced(harness: ProcessHarness) -> None:
    process, state = await harness.start("exit")
    await process.wait()
    assert harness.template._process is not None
    os.kill(state["parent"], signal.SIGKILL)
    await harness.template._process.wait()
    process, later = await harness.start("exit")
    assert await process.wait() == Exit(ExitKind.DIED, "ended with exit code 3")
    assert later["parent"] == harness.template.pid != state["parent"]


@pytest.mark.parametrize("behavior", ["kill parent", "wait"])
async def test_a_process_ends_with_its_template(harness: ProcessHarness, behavior: str) -> None:
    process, state = await harness.start(behavior)
    if behavior == "wait":
        os.kill(state["parent"], signal.SIGKILL)
    assert await process.wait() == Exit(ExitKind.DIED, "ended with an unknown exit code")
    await wait_until_exited(state["pid"])


async def test_a_run_works_without_a_template_that_cannot_start(
    harness: ProcessHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshpoint.adapters.template_process._BOOTSTRAP", "raise SystemExit")
    process, state = await harness.start("exit")
    assert state["parent"] == os.getpid()
    assert await process.wait() == Exit(ExitKind.DIED, "ended with exit code 3")


async def test_a_template_with_an_outdated_environment_is_replaced(
    harness: ProcessHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, state = await harness.start()
    await process.wait()
    monkeypatch.setenv("SAYS", "hello")
    monkeypatch.chdir(harness.folder)
    process, later = await harness.start()
    await process.wait()
    assert (later["says"], later["here"]) == ("hello", str(harness.folder))
    assert later["parent"] == harness.template.pid != state["parent"]
    await wait_until_exited(state["parent"])


async def test_an_idle_template_ends(harness: ProcessHarness) -> None:
    harness.template._idle_timeout = 0.001
    process, state = await harness.start("exit")
    assert await process.wait() == Exit(ExitKind.DIED, "ended with exit code 3")
    await wait_until_exited(state["parent"])


async def test_a_signal_to_every_process_of_a_service_spares_the_template(
    harness: ProcessHarness,
) -> None:
    process, state = await harness.start("exit")
    await process.wait()
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(state["parent"], number)
    process, later = await harness.start("exit")
    await process.wait()
    assert later["parent"] == state["parent"]
