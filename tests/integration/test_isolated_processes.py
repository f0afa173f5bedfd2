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
from meshpoint.model.checkpoint import Run
from meshpoint.model.events import Event
from meshpoint.model.ids import AgentName, RunId, TaskId, new_id
from meshpoint.ports.isolation import Ending, Exit
from meshpoint.settings import Settings
from servers.process import until_gone

pytestmark = pytest.mark.skipif(not Template().is_supported, reason="needs pidfds")

AGENT = """
import json, os, random, signal, sys
from pathlib import Path
from meshpoint.model.ids import new_id

folder = Path(__file__).parent
facts = {
    "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "ids": [new_id(), random.random()],
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


class Nobody:
    def emit(self, event: Event) -> None:
        """Ignore it."""


@dataclass
class Stage:
    """Starts isolated runs of an agent whose behaviour is set by the file `how`."""

    folder: Path
    processes: ChildProcesses
    template: Template
    told: asyncio.StreamReader

    async def start(self, how: str = "") -> tuple[ChildProcess, dict[str, Any]]:
        """Start a process. Returns it with the facts its agent reported."""
        (self.folder / "how").write_text(how)
        run = Run(TaskId(new_id()), AgentName("ward"), RunId(new_id()))
        process = await self.processes.start(run, lambda: None)
        return process, json.loads(await self.told.readline())


@pytest.fixture
async def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    (tmp_path / "isolated_ward.py").write_text(AGENT)
    monkeypatch.syspath_prepend(tmp_path)
    os.mkfifo(tmp_path / "facts")
    pipe = open(tmp_path / "facts", "r+b", buffering=0)  # noqa: ASYNC230, SIM115  # also a writer, so never at EOF
    told = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(told), pipe
    )
    given = {
        "name": "ward",
        "entrypoint": "isolated_ward:ward",
        "stateless_checkpointing": True,
        "session_service": "sql",
        "session_db_url": f"sqlite:///{tmp_path}/tasks.db",
    }
    mesh = {"namespace": "test", "broker_url": f"sqlite:///{tmp_path}/broker.db"}
    settings = Settings.model_validate({"mesh": mesh, "agents": [given]})
    template = Template()
    processes = ChildProcesses(settings.model_dump(mode="json"), Nobody(), timedelta(minutes=5), template)
    yield Stage(tmp_path, processes, template, told)
    await processes.close()
    transport.close()


async def test_each_run_has_a_process_of_its_own_from_one_template(stage: Stage) -> None:
    first, found = await stage.start()
    assert (await first.exit()).ending is Ending.IMPOSSIBLE  # the module defines no agent
    second, found_again = await stage.start()
    assert (await second.exit()).ending is Ending.IMPOSSIBLE
    assert found["parent"] == found_again["parent"] == stage.template.pid
    assert len({found["pid"], found_again["pid"], stage.template.pid}) == 3
    assert not set(found["ids"]) & set(found_again["ids"])


async def test_it_is_like_a_process_that_was_started_anew(stage: Stage) -> None:
    forked, found = await stage.start()
    await forked.exit()
    stage.template.is_supported = False
    anew, expected = await stage.start()
    await anew.exit()
    assert expected["parent"] == os.getpid()
    for each in (found, expected):
        assert each["session"] == each["pid"]
    for name in ("here", "says", "score", "term", "int", "path"):
        assert found[name] == expected[name]
    assert len(found["open"]) == len(expected["open"])


async def test_the_template_runs_no_agent_code_and_no_threads(stage: Stage) -> None:
    process, found = await stage.start("wait")
    template = Path(f"/proc/{stage.template.pid}")
    assert "Threads:\t1\n" in (template / "status").read_text()
    assert (template / "oom_score_adj").read_text() == Path("/proc/self/oom_score_adj").read_text()
    assert found["pid"] != stage.template.pid
    process.kill()
    await process.exit()


@pytest.mark.parametrize(("how", "reason"), [("exit", "ended with exit code 3"), ("kill", "was killed by SIGKILL")])
async def test_deaths_are_described(stage: Stage, how: str, reason: str) -> None:
    process, _ = await stage.start(how)
    assert await process.exit() == Exit(Ending.DIED, reason)


async def test_a_process_is_killed_even_if_its_template_is_frozen(stage: Stage) -> None:
    process, found = await stage.start("wait")
    os.kill(found["parent"], signal.SIGSTOP)
    process.kill()
    assert await process.exit() == Exit(Ending.DIED, "ended with an unknown exit code")
    with pytest.raises(TimeoutError):
        await stage.template.fork("late", 0, 1, timeout=0)
    await until_gone(found["parent"])


async def test_a_template_that_was_killed_is_replaced(stage: Stage) -> None:
    process, found = await stage.start("exit")
    await process.exit()
    assert stage.template._process is not None
    os.kill(found["parent"], signal.SIGKILL)
    await stage.template._process.wait()
    process, later = await stage.start("exit")
    assert await process.exit() == Exit(Ending.DIED, "ended with exit code 3")
    assert later["parent"] == stage.template.pid != found["parent"]


@pytest.mark.parametrize("how", ["kill parent", "wait"])
async def test_a_process_ends_with_its_template(stage: Stage, how: str) -> None:
    process, found = await stage.start(how)
    if how == "wait":
        os.kill(found["parent"], signal.SIGKILL)
    assert await process.exit() == Exit(Ending.DIED, "ended with an unknown exit code")
    await until_gone(found["pid"])


async def test_a_template_that_cannot_start_is_done_without(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshpoint.adapters.template_process._BOOTSTRAP", "raise SystemExit")
    process, found = await stage.start("exit")
    assert found["parent"] == os.getpid()
    assert await process.exit() == Exit(Ending.DIED, "ended with exit code 3")


async def test_a_template_that_inherited_something_else_is_replaced(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, found = await stage.start()
    await process.exit()
    monkeypatch.setenv("SAYS", "hello")
    monkeypatch.chdir(stage.folder)
    process, later = await stage.start()
    await process.exit()
    assert (later["says"], later["here"]) == ("hello", str(stage.folder))
    assert later["parent"] == stage.template.pid != found["parent"]
    await until_gone(found["parent"])


async def test_an_idle_template_ends(stage: Stage) -> None:
    stage.template._idle_timeout = 0.001
    process, found = await stage.start("exit")
    assert await process.exit() == Exit(Ending.DIED, "ended with exit code 3")
    await until_gone(found["parent"])


async def test_a_signal_to_every_process_of_a_service_spares_the_template(stage: Stage) -> None:
    process, found = await stage.start("exit")
    await process.exit()
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(found["parent"], number)
    process, later = await stage.start("exit")
    await process.exit()
    assert later["parent"] == found["parent"]
