"""A replica is killed inside each subtask of the stock analysis; a second replica continues.

The analysts record what their code did in a diary. On both rungs, a subtask completed before the
kill must not run again, however the dead replica's operation is handled: rescued, or failed and
resumed by hand. Cases run concurrently because they mostly wait for leases; each is reported as a
test of its own.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import pytest
import pytest_asyncio
import yaml
from pydantic import JsonValue

from meshpoint.model.ids import TaskId, new_id
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome

from .kit import Mesh, Process, Rung, output_of
from .nursery import Nursery

AT_A_TIME = 4
SUBTASKS = {
    "financial_analyst": ("10k_parsing", "ratio_calculation", "peer_comparison", "red_flag_detection"),
    "strategy_analyst": ("historical_roi", "ma_review", "mgmt_compensation", "capital_allocation_scoring"),
    "valuation_agent": (
        "dcf_assumptions",
        "cash_flow_projection",
        "wacc_calculation",
        "terminal_value",
        "sensitivity_analysis",
    ),
}
PAUSES = "peer_comparison"
"""Its code begins twice because it pauses for its peers."""
QUICK: Mapping[str, JsonValue] = {
    "lease_seconds": 4,
    "renew_interval_seconds": 0.5,
    "settle_time_seconds": 0.3,
    "db_pool_size": 1,
}


@dataclass(frozen=True)
class Kill:
    """Kill when `subtask` of `agent` begins for the `time`-th time; without a subtask, never."""

    agent: str
    subtask: str | None = None
    time: int = 1

    def __str__(self) -> str:
        again = " (with its peers' answers)" if self.time > 1 else ""
        return f"{self.agent}: {self.subtask or 'unharmed'}{again}"


KILLS = [Kill(agent, subtask) for agent, subtasks in SUBTASKS.items() for subtask in subtasks]
KILLS.append(Kill("financial_analyst", PAUSES, time=2))
REPAIRED_ON_SERVERS = [KILLS[0], KILLS[-1], Kill("valuation_agent", "terminal_value")]
UNHARMED = [Kill(agent) for agent in SUBTASKS]


@dataclass(frozen=True)
class Case:
    """`way` is the value of `on_lost_owner`: what happens to an operation whose replica died."""

    rung: str
    way: str
    kill: Kill

    def __str__(self) -> str:
        return f"{self.rung}, {self.way}, {self.kill}"


def cases() -> Iterator[Case]:
    """Every kill in every way; on servers only some of the kills that need the command line."""
    for way in ("take_over", "fail"):
        yield from (Case("embedded", way, kill) for kill in KILLS)
    yield from (Case("production", "take_over", kill) for kill in KILLS)
    yield from (Case("production", "fail", kill) for kill in REPAIRED_ON_SERVERS)


CASES = [
    pytest.param(case, id=str(case), marks=[pytest.mark.servers] if case.rung == "production" else [])
    for case in cases()
]


@dataclass
class Course:
    """Result of a case. `diary` has process id, subtask, and "began" or "completed"."""

    outcome: Outcome
    diary: list[tuple[int, str, str]]
    killed: int | None = None

    def count(self, what: str) -> Counter[str]:
        return Counter(subtask for _, subtask, noted in self.diary if noted == what)


class Desk:
    """Two replicas that serve one analyst and the agent it calls."""

    def __init__(self, mesh: Mesh, case: Case) -> None:
        self._mesh, self._case = mesh, case
        self._agents = [case.kill.agent, "company_data"]
        self.config = mesh.rung.config(*self._agents, **QUICK, on_lost_owner=case.way)
        config = yaml.safe_load(self.config.read_text())
        for agent in config["agents"]:
            agent["entrypoint"] = f"doomed_analysts:{agent['name']}"
        self.config.write_text(yaml.safe_dump(config))
        self._diary = mesh.rung.folder / "diary"

    async def open(self) -> None:
        self.client = await self._mesh.client()
        starting = [self._mesh.replica(self.config, started=len(self._agents)) for _ in range(2)]
        self.replicas = await asyncio.gather(*starting)

    async def ask(self, task_id: TaskId) -> Outcome:
        kill = self._case.kill
        doom = {"diary": str(self._diary), "at": kill.subtask, "time": kill.time}
        order: JsonValue = {"analysis": {"ticker": "HLDN"}, **doom}
        return (await (await self.client.send(kill.agent, order, task_id=task_id))).outcome

    async def killed(self) -> Process:
        """Wait for the replica that dies."""
        ending = {asyncio.create_task(replica.ended()): replica for replica in self.replicas}
        done, pending = await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
        for each in pending:
            each.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        (dead,) = (ending[each] for each in done)
        assert dead.process.returncode == -signal.SIGKILL
        return dead

    async def resume(self, task_id: TaskId) -> tuple[int, str, str]:
        """Run `meshpoint tasks resume ID`; return its exit code, output and errors."""
        command = [
            "-m",
            "meshpoint.cli",
            "tasks",
            "resume",
            task_id,
            "--wait",
            "--json",
            "--config",
            str(self.config),
        ]
        code, out, err = await output_of(sys.executable, *command)
        return code, out.decode(), err.decode()

    def diary(self) -> list[tuple[int, str, str]]:
        lines = [line.split() for line in self._diary.read_text().splitlines()]
        return [(int(pid), subtask, what) for pid, subtask, what in lines]


async def course_of(case: Case, mesh: Mesh) -> Course:
    """Request an analysis and follow it to its end."""
    desk, task_id = Desk(mesh, case), TaskId(new_id())
    await desk.open()
    outcome = await desk.ask(task_id)
    if case.kill.subtask is None:
        return Course(outcome, desk.diary())
    if case.way == "fail":
        outcome = await repaired(desk, case, task_id, outcome)
    return Course(outcome, desk.diary(), (await desk.killed()).process.pid)


async def repaired(desk: Desk, case: Case, task_id: TaskId, failed: Outcome) -> Outcome:
    """Follow the failure's advice: resume the operation or, without a checkpoint, ask anew."""
    assert isinstance(failed, Failed)
    assert failed.kind is FailureKind.ERROR
    began = desk.diary()
    if case.kill.subtask == SUBTASKS[case.kill.agent][0]:
        assert failed.message == "the replica that ran it is gone; no checkpoint"
        code, out, err = await desk.resume(task_id)
        assert (code, out) == (13, "")
        assert err == f"error: operation {task_id} has no checkpoint to resume from; send its request again\n"
        assert desk.diary() == began
        return await desk.ask(TaskId(new_id()))
    advice = f"checkpoint available: resume with `meshpoint tasks resume {task_id}`"
    assert failed.message == f"the replica that ran it is gone; {advice}"
    code, out, err = await desk.resume(task_id)
    assert (code, err) == (0, "")
    return Ok(json.loads(out)["value"])


@pytest.fixture(scope="module")
def selected(request: pytest.FixtureRequest) -> list[Case]:
    """This session's cases, plus an unharmed analysis per agent on each of their rungs."""
    told = [getattr(item, "callspec", None) for item in request.session.items if item.parent is request.node]
    cases: list[Case] = [each.params["case"] for each in told if each is not None]
    whole = [Case(rung, "take_over", kill) for rung in {case.rung: None for case in cases} for kill in UNHARMED]
    return [*whole, *cases]


@pytest.fixture(scope="module")
def urls(request: pytest.FixtureRequest, selected: list[Case]) -> tuple[str, str] | None:
    """RabbitMQ and one database for all cases that need them, each case in its own namespace."""
    if all(case.rung != "production" for case in selected):
        return None
    return request.getfixturevalue("rabbit_server").url, request.getfixturevalue("module_postgres_url")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def courses(
    selected: list[Case],
    urls: tuple[str, str] | None,
    nursery: Nursery,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Mapping[Case, asyncio.Task[Course]]]:
    """A task per case, running or waiting for its turn."""
    turns = asyncio.Semaphore(AT_A_TIME)

    async def run(case: Case) -> Course:
        async with turns:
            mesh = Mesh(_rung(urls if case.rung == "production" else None, tmp_path_factory.mktemp("case")), nursery)
            try:
                return await course_of(case, mesh)
            finally:
                await mesh.close()

    tasks = {case: asyncio.create_task(run(case)) for case in selected}
    yield tasks
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)


def _rung(urls: tuple[str, str] | None, folder: Path) -> Rung:
    urls = urls or (f"sqlite:///{folder}/broker.db", f"sqlite:///{folder}/tasks.db")
    return Rung(*urls, f"test-{new_id()}", folder)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("case", CASES)
async def test_killed_in(courses: Mapping[Case, asyncio.Task[Course]], case: Case) -> None:
    kill = case.kill
    whole, course = await courses[Case(case.rung, "take_over", Kill(kill.agent))], await courses[case]
    assert isinstance(whole.outcome, Ok)
    assert course.outcome == whole.outcome

    subtasks = SUBTASKS[kill.agent]
    assert [subtask for _, subtask, what in course.diary if what == "completed"] == list(subtasks)
    assert whole.count("began") == {subtask: 1 + (subtask == PAUSES) for subtask in subtasks}
    again = (
        kill.time if case.way == "fail" else 1
    )  # a resumed operation calls its peers again, a rescued one does not
    assert course.count("began") == whole.count("began") + Counter({kill.subtask: again})

    begun = [pid for pid, subtask, what in course.diary if (subtask, what) == (kill.subtask, "began")]
    assert begun[kill.time - 1] == course.killed
    last = list(takewhile(lambda line: line[0] != course.killed, reversed(course.diary)))
    assert {subtask for _, subtask, _ in last} == set(subtasks[subtasks.index(str(kill.subtask)) :])
