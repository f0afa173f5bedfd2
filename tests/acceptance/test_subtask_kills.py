"""A replica is killed inside each subtask of the stock analysis; a second replica continues.

Analysts record what their code did in a diary. On every backend, a subtask completed before the
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

import pytest
import pytest_asyncio
import yaml
from pydantic import JsonValue

from meshpoint.model.ids import TaskId, new_id
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome

from .concurrent_cases import ConcurrentCases, make_backends, selected_parameters, server_urls
from .fork_server import ForkServer
from .mesh import Mesh, Process, output_of

SUBTASKS = {
    "financial_analyst": (
        "10k_parsing",
        "ratio_calculation",
        "peer_comparison",
        "red_flag_detection",
    ),
    "strategy_analyst": (
        "historical_roi",
        "ma_review",
        "mgmt_compensation",
        "capital_allocation_scoring",
    ),
    "valuation_agent": (
        "dcf_assumptions",
        "cash_flow_projection",
        "wacc_calculation",
        "terminal_value",
        "sensitivity_analysis",
    ),
}
PAUSING_SUBTASK = "peer_comparison"
"""Its code begins twice because it pauses for its peers."""
FAST_OPTIONS: Mapping[str, JsonValue] = {
    "lease_seconds": 4,
    "renew_interval_seconds": 0.5,
    "settle_time_seconds": 0.3,
    "db_pool_size": 1,
}


@dataclass(frozen=True)
class Kill:
    """Kill when `subtask` begins for the `occurrence`-th time; without a subtask, never."""

    agent: str
    subtask: str | None = None
    occurrence: int = 1

    def __str__(self) -> str:
        again = " (with its peers' answers)" if self.occurrence > 1 else ""
        return f"{self.agent}: {self.subtask or 'unharmed'}{again}"


KILLS = [Kill(agent, subtask) for agent, subtasks in SUBTASKS.items() for subtask in subtasks]
KILLS.append(Kill("financial_analyst", PAUSING_SUBTASK, occurrence=2))
REPAIRED_ON_SERVERS = [KILLS[0], KILLS[-1], Kill("valuation_agent", "terminal_value")]
UNHARMED_CASES = [Kill(agent) for agent in SUBTASKS]


@dataclass(frozen=True)
class Case:
    """`on_lost_owner`: what happens to an operation whose replica died."""

    backends: str
    on_lost_owner: str
    kill: Kill

    def __str__(self) -> str:
        return f"{self.backends}, {self.on_lost_owner}, {self.kill}"


def cases() -> Iterator[Case]:
    """Every kill in every way; on servers only some of the kills that need the command line."""
    for on_lost_owner in ("rescue", "fail"):
        yield from (Case("embedded", on_lost_owner, kill) for kill in KILLS)
    for servers in ("production", "postgresql"):
        yield from (Case(servers, "rescue", kill) for kill in KILLS)
    yield from (Case("production", "fail", kill) for kill in REPAIRED_ON_SERVERS)


CASES = [
    pytest.param(
        case, id=str(case), marks=[] if case.backends == "embedded" else [pytest.mark.servers]
    )
    for case in cases()
]


@dataclass
class CaseResult:
    """Result of a case. `diary` has process id, subtask, and "began" or "completed"."""

    outcome: Outcome
    diary: list[tuple[int, str, str]]
    killed: int | None = None

    def count_by_subtask(self, event: str) -> Counter[str]:
        return Counter(subtask for _, subtask, entry in self.diary if entry == event)


class AnalystPair:
    """Two replicas that serve one analyst and the agent it calls."""

    def __init__(self, mesh: Mesh, case: Case) -> None:
        self._mesh, self._case = mesh, case
        self._agents = [case.kill.agent, "company_data"]
        self.config = mesh.backends.config(
            *self._agents, **FAST_OPTIONS, on_lost_owner=case.on_lost_owner
        )
        config = yaml.safe_load(self.config.read_text())
        for agent in config["agents"]:
            agent["entrypoint"] = f"dying_analysts:{agent['name']}"
        self.config.write_text(yaml.safe_dump(config))
        self._diary = mesh.backends.folder / "diary"

    async def open(self) -> None:
        self.client = await self._mesh.client()
        starting = [self._mesh.replica(self.config, started=len(self._agents)) for _ in range(2)]
        self.replicas = await asyncio.gather(*starting)

    async def ask(self, task_id: TaskId) -> Outcome:
        kill = self._case.kill
        request = {"diary": str(self._diary), "at": kill.subtask, "time": kill.occurrence}
        request_json: JsonValue = {"analysis": {"ticker": "HLDN"}, **request}
        return (await (await self.client.send(kill.agent, request_json, task_id=task_id))).outcome

    async def wait_for_death(self) -> Process:
        """Wait for the replica that dies."""
        exit_tasks = {
            asyncio.create_task(replica.wait_ended()): replica for replica in self.replicas
        }
        done, pending = await asyncio.wait(exit_tasks, return_when=asyncio.FIRST_COMPLETED)
        for each in pending:
            each.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        (dead,) = (exit_tasks[each] for each in done)
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


async def run_case(case: Case, mesh: Mesh) -> CaseResult:
    """Request an analysis and follow it to its end."""
    analysts, task_id = AnalystPair(mesh, case), TaskId(new_id())
    await analysts.open()
    outcome = await analysts.ask(task_id)
    if case.kill.subtask is None:
        return CaseResult(outcome, analysts.diary())
    if case.on_lost_owner == "fail":
        outcome = await follow_advice(analysts, case, task_id, outcome)
    return CaseResult(outcome, analysts.diary(), (await analysts.wait_for_death()).process.pid)


async def follow_advice(
    analysts: AnalystPair, case: Case, task_id: TaskId, failed: Outcome
) -> Outcome:
    """Follow the failure's advice: resume the operation or, without a checkpoint, ask anew."""
    assert isinstance(failed, Failed)
    assert failed.kind is FailureKind.ERROR
    starts = analysts.diary()
    if case.kill.subtask == SUBTASKS[case.kill.agent][0]:
        assert failed.message == "the replica that ran it is gone; no checkpoint"
        code, out, err = await analysts.resume(task_id)
        assert (code, out) == (13, "")
        assert err == (
            f"error: operation {task_id} has no checkpoint to resume from; "
            "send its request again\n"
        )
        assert analysts.diary() == starts
        return await analysts.ask(TaskId(new_id()))
    advice = f"checkpoint available: resume with `meshpoint tasks resume {task_id}`"
    assert failed.message == f"the replica that ran it is gone; {advice}"
    code, out, err = await analysts.resume(task_id)
    assert (code, err) == (0, "")
    return Ok(json.loads(out)["value"])


@pytest.fixture(scope="module")
def selected(request: pytest.FixtureRequest) -> list[Case]:
    """This session's cases, plus an unharmed analysis per agent on each of their backends."""
    cases: list[Case] = [each["case"] for each in selected_parameters(request)]
    unharmed = [
        Case(backends, "rescue", kill)
        for backends in {case.backends: None for case in cases}
        for kill in UNHARMED_CASES
    ]
    return [*unharmed, *cases]


@pytest.fixture(scope="module")
def urls(request: pytest.FixtureRequest, selected: list[Case]) -> Mapping[str, tuple[str, str]]:
    return server_urls(request, {case.backends for case in selected})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def concurrent_cases(
    selected: list[Case],
    urls: Mapping[str, tuple[str, str]],
    fork_server: ForkServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[ConcurrentCases[Case, CaseResult]]:
    async def run(case: Case) -> CaseResult:
        folder = tmp_path_factory.mktemp("case")
        backends = make_backends(urls.get(case.backends), folder)
        mesh = Mesh(backends, fork_server)
        try:
            return await run_case(case, mesh)
        finally:
            await mesh.close()

    cases = ConcurrentCases(selected, run)
    yield cases
    await cases.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("case", CASES)
async def test_an_operation_continues_after_a_kill_in_any_subtask(
    concurrent_cases: ConcurrentCases[Case, CaseResult], case: Case
) -> None:
    kill = case.kill
    unharmed, result = (
        await concurrent_cases.result(Case(case.backends, "rescue", Kill(kill.agent))),
        await concurrent_cases.result(case),
    )
    assert isinstance(unharmed.outcome, Ok)
    assert result.outcome == unharmed.outcome

    subtasks = SUBTASKS[kill.agent]
    assert [subtask for _, subtask, what in result.diary if what == "completed"] == list(subtasks)
    assert unharmed.count_by_subtask("began") == {
        subtask: 1 + (subtask == PAUSING_SUBTASK) for subtask in subtasks
    }
    reruns = (
        kill.occurrence if case.on_lost_owner == "fail" else 1
    )  # a resumed operation calls its peers again, a rescued one does not
    assert result.count_by_subtask("began") == unharmed.count_by_subtask("began") + Counter(
        {kill.subtask: reruns}
    )

    starts = [
        pid for pid, subtask, what in result.diary if (subtask, what) == (kill.subtask, "began")
    ]
    assert starts[kill.occurrence - 1] == result.killed
    last = list(takewhile(lambda line: line[0] != result.killed, reversed(result.diary)))
    assert {subtask for _, subtask, _ in last} == set(
        subtasks[subtasks.index(str(kill.subtask)) :]
    )
