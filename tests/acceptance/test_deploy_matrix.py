"""Deploys under steady load, with replicas as real processes: nothing is lost, nothing is wrong.

Each deploy replaces two replicas, one after the other. `meshpoint doctor` says before each what
will happen. The suite runs several cases in one mesh. `make deploys` runs each alone, under full
load, with drained and with killed replicas, and prints the counts.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from meshpoint.adapters.sql import SqlStore
from meshpoint.adapters.sql.database import Transaction
from meshpoint.adapters.sql.tables import REVISION, VERSION_TABLE
from meshpoint.cli.exits import ExitCode

from .deploy_load import HELD, LONG, Load, Release, run_doctor, steady_load
from .mesh import HERE, EventRecord, Mesh, Process

ON, OFF = Release(), Release(options={"stateless_checkpointing": False})
MEMORY = Release(options={"stateless_checkpointing": False, "session_service": "memory"})
TUNED = Release(
    options={
        "lease_seconds": 5,
        "renew_interval_seconds": 1,
        "max_concurrency": 3,
        "response_prefetch": 7,
        "request_shards": 3,
    },
    mesh={"max_queue_length": 5000, "delivery_limit": 30},
)
MARKED = "agent.session_service: other replicas of 'root' store their tasks in a database"
"""How the error of a replica without a database begins, while the marker is set."""


@dataclass(frozen=True)
class Deploy:
    """Two replicas that replace those before them.

    Attributes:
        exit_code: of the doctor before it.
        problems: the checks of the doctor's warnings and errors.
        notes: checks that must be among its notes.
        parks: whether all tasks that wait across the deploy are parked by it.
        refused: whether its replicas refuse to start, so that those before keep serving.
        ousts: whether its first replica makes those before it exit.
        unmarks: whether those before it are stopped, and the database marker is removed.
        revision: what the tables say of themselves from now on, as after an upgrade by a later
            release.
    """

    releases: tuple[Release, Release]
    exit_code: ExitCode = ExitCode.OK
    problems: frozenset[str] = frozenset()
    notes: frozenset[str] = frozenset()
    parks: bool = False
    refused: bool = False
    ousts: bool = False
    unmarks: bool = False
    revision: str | None = None

    @property
    def strands(self) -> bool:
        """Whether tasks that wait across the deploy continue only after a later one."""
        return self.parks or "tasks.unread" in self.problems

    def is_like(self, running: Deploy) -> bool:
        """Whether it changes nothing if the replicas of `running` run."""
        is_plain = not (self.refused or self.unmarks or self.revision)
        return is_plain and self.releases == running.releases

    def different_releases(self) -> Sequence[Release]:
        """One release, or two if they differ."""
        first, second = self.releases
        return [first] if first == second else [first, second]

    @property
    def codes(self) -> frozenset[str]:
        """The code of its replicas."""
        return frozenset(code for release in self.releases for code in release.code)


def deploy(*releases: Release, warn: str = "", notes: str = "", **values: Any) -> Deploy:
    """A deploy of one release, or of two different ones."""
    code = ExitCode.WARNINGS if warn else ExitCode.OK
    both = (releases[0], releases[-1])
    return Deploy(both, code, frozenset(warn.split()), frozenset(notes.split()), **values)


FIRST = deploy(ON)
V2, BOTH = Release(("second",)), Release(("first", "second"))
PARKING = deploy(Release(("edited_path",)), notes="tasks.other_code", parks=True)
REFUSED = Deploy(
    (MEMORY, MEMORY), ExitCode.UNDEPLOYABLE, frozenset({"marker.refuses"}), refused=True
)
CASES: dict[str, list[Deploy]] = {
    "checkpointing switched on": [deploy(OFF), deploy(ON)],
    "checkpointing switched off": [FIRST, deploy(OFF)],
    "checkpointing mixed": [deploy(ON, OFF), deploy(OFF, ON), deploy(ON, OFF)],
    "session_service from memory to sql": [
        deploy(MEMORY),
        deploy(ON, warn="marker.new", ousts=True),
    ],
    "session_service from sql to memory": [
        FIRST,
        REFUSED,
        deploy(OFF),
        deploy(MEMORY, unmarks=True),
    ],
    "lease, prefetch and queues": [FIRST, deploy(TUNED), FIRST],
    "subtask edited": [
        FIRST,
        deploy(Release(("edited_subtask",)), notes="tasks.other_code"),
    ],
    "path edited and rolled back": [FIRST, PARKING, deploy(ON, notes="tasks.retried")],
    "path edited and fixed": [
        FIRST,
        PARKING,
        deploy(Release(("fixed_path",)), notes="tasks.retried"),
    ],
    "version raised, rolled back, both": [
        FIRST,
        deploy(V2, warn="tasks.unread"),
        deploy(ON, warn="tasks.unread"),
        deploy(BOTH, notes="tasks.older"),
    ],
    "version raised next to the old one": [
        FIRST,
        deploy(Release(("second", "first")), notes="tasks.older"),
    ],
    "tables upgraded and downgraded": [
        FIRST,
        deploy(ON, notes="schema.newer", revision="9999"),
        deploy(ON, revision=REVISION),
    ],
}
TOURS = {
    "where tasks are stored": [
        "session_service from memory to sql",
        "checkpointing switched off",
        "checkpointing switched on",
        "checkpointing mixed",
        "session_service from sql to memory",
    ],
    "code": [
        "subtask edited",
        "version raised, rolled back, both",
        "path edited and rolled back",
        "path edited and fixed",
    ],
    "settings and tables": [
        "lease, prefetch and queues",
        "tables upgraded and downgraded",
        "version raised next to the old one",
    ],
}
"""Cases one after the other, so that a case seldom needs its first deploy."""
RUNS = (
    CASES
    if LONG
    else {tour: [each for case in cases for each in CASES[case]] for tour, cases in TOURS.items()}
)


class Rollout:
    """Replaces the replicas of an agent under load, one deploy after the other.

    Args:
        mesh: runs the replicas.
        load: the requests.
        number: ends replicas that are replaced.

    Attributes:
        running: the replicas.
        parking: number of tasks that must have been parked.
        replaced: number of replicas that were replaced.
    """

    def __init__(self, mesh: Mesh, load: Load, number: signal.Signals) -> None:
        self._mesh, self._load, self._number = mesh, load, number
        self._last: Deploy | None = None
        self._pause = AsyncExitStack()
        self.running: list[Process] = []
        self.parking = self.replaced = 0

    async def carry_out(self, deploys: Sequence[Deploy]) -> None:
        """Deploy each of `deploys`, unless its replicas run already."""
        async with self._pause:
            for planned in deploys:
                if self._last is None or not planned.is_like(self._last):
                    await self._carry_out(planned)

    async def stop(self) -> None:
        """Let all replicas drain."""
        await self._stop_running(signal.SIGTERM)

    async def _carry_out(self, planned: Deploy) -> None:
        if planned.revision is not None:
            await change_tables(self._mesh, planned.revision)
        if planned.unmarks:
            await self._stop_and_unmark(planned.releases[0])
        for release in planned.different_releases():
            await self._check_doctor(planned, release)
        if planned.refused:
            await self._see_refused(planned.releases[0])
            return
        if planned.parks:  # a roll-back would park tasks that the edited code began
            await self._pause.enter_async_context(self._load.paused())
        self._load.serving.append(self._load.serving[-1] | planned.codes)
        await self._replace(planned)
        self._load.serving.append(planned.codes)
        self._last = planned
        await self._load.release()
        if planned.parks:
            await self._see_parked()
            return
        await self._pause.aclose()
        if not planned.strands:
            await self._load.settle()
        await self._load.hold(planned.releases[0].code[0])

    async def _check_doctor(self, planned: Deploy, release: Release) -> None:
        """Compare what the doctor says of a release of a deploy."""
        report = await self._run_doctor(release)
        found: dict[str, dict[str, int]] = {"note": {}, "problem": {}}
        for finding in report["findings"]:
            tasks = found["note" if finding["severity"] == "note" else "problem"]
            counted = finding["data"].get("tasks") or 0
            tasks[finding["check"]] = tasks.get(finding["check"], 0) + counted
        problems, notes = found["problem"], found["note"]
        assert report["exit_code"] == planned.exit_code, report
        assert problems.keys() == planned.problems, report
        assert planned.notes | self._notes_of(release) <= notes.keys(), report
        for check in planned.problems | planned.notes:
            if check.startswith("tasks."):
                assert (problems | notes)[check] >= HELD, report

    def _notes_of(self, release: Release) -> set[str]:
        """What the doctor says of a release after any other."""
        notes = {"replicas"}
        if not release.is_checkpointing:
            notes.add("checkpointing.off")
        if release.mesh and self._mesh.backends.broker_url.startswith("amqp"):
            notes.add("broker.arguments")  # SQLite queues store no limits
        return notes

    async def _run_doctor(self, release: Release, *arguments: str) -> Any:
        config = release.config(self._mesh)
        return await asyncio.to_thread(run_doctor, config, *arguments)

    async def _replace(self, planned: Deploy) -> None:
        """Start each new replica, then end an old one."""
        started = []
        for release in planned.releases:
            started.append(await self._mesh.replica(release.config(self._mesh)))
            if planned.ousts:
                self.replaced += len(self.running)
                await asyncio.gather(*[see_refusal(each) for each in self.running])
                self.running.clear()
            elif self.running:
                await self._end([self.running.pop()], self._number)
        self.running = started

    async def _stop_running(self, number: signal.Signals) -> None:
        ending, self.running = self.running, []
        await self._end(ending, number)

    async def _end(self, replicas: Sequence[Process], number: signal.Signals) -> None:
        self.replaced += len(replicas)
        for replica in replicas:
            replica.signal(number)
        codes = await asyncio.gather(*[replica.wait_ended() for replica in replicas])
        assert set(codes) <= {0 if number is signal.SIGTERM else -number}

    async def _see_refused(self, release: Release) -> None:
        replica = await self._mesh.replica(release.config(self._mesh), started=0)
        await see_refusal(replica)
        assert replica.matching_events("started") == []

    async def _see_parked(self) -> None:
        """Wait until the held tasks are parked and other tasks have ended."""
        self.parking += HELD
        await wait_parked(self.running, HELD)
        await asyncio.gather(*[self._load.send() for _ in range(HELD)])
        if LONG:
            await asyncio.gather(*[wait_sweeps(each, 12) for each in self.running])
        # The same version does not try them again.
        assert sum(len(event["task_ids"]) for event in parked_events(self.running)) == HELD

    async def _stop_and_unmark(self, release: Release) -> None:
        """Follow the documentation from a database to memory, once checkpointing is off."""
        remove = partial(
            self._run_doctor,
            release,
            "--db",
            self._mesh.backends.db_url,
            "--remove-marker",
            "root",
        )
        assert "serving the agent" in kept_marker(await remove())
        await self._load.settle_steady()  # then no task is left in the database
        await self._stop_running(self._number)
        await self._see_refused(release)
        report = await remove()
        while "serving the agent" in kept_marker(report):  # the broker has not noticed a kill yet
            report = await remove()
        assert report["exit_code"] == ExitCode.OK, report


def kept_marker(report: Any) -> str:
    """Why the doctor has not removed the marker, or the empty string."""
    kept = [each["problem"] for each in report["findings"] if each["check"] == "marker.kept"]
    return "".join(kept)


async def see_refusal(replica: Process) -> None:
    """Wait until a replica ends because others have a database."""
    assert await replica.wait_ended() > 0
    (stopped,) = replica.matching_events("stopped:failed")
    assert stopped["detail"]["error"].startswith(MARKED)
    assert len(stopped["detail"]["error"].splitlines()) == 1


async def change_tables(mesh: Mesh, revision: str) -> None:
    """Upgrade the tables as a later release would, or undo it."""
    change = "DROP COLUMN later" if revision == REVISION else "ADD COLUMN later INT"
    async with mesh.store() as store:
        assert isinstance(store, SqlStore)
        for statement in (
            f"ALTER TABLE agent_paused_tasks {change}",
            f"UPDATE {VERSION_TABLE} SET version_num = '{revision}'",
        ):
            await store._database.transact(partial(_execute, statement))


async def _execute(statement: str, tx: Transaction) -> None:
    await tx.execute(statement)


async def wait_parked(replicas: list[Process], number: int) -> None:
    """Wait until these replicas have parked so many tasks."""
    while len(parked_tasks(replicas)) < number:
        changes = [asyncio.create_task(replica.wait_changed()) for replica in replicas]
        await asyncio.wait(changes, return_when=asyncio.FIRST_COMPLETED)
        for change in changes:
            change.cancel()
        await asyncio.wait(changes)


async def wait_sweeps(replica: Process, number: int) -> None:
    """Wait for so many further sweeps."""
    await replica.wait("sweep:after", len(replica.matching_events("sweep:after")) + number)


def parked_events(replicas: list[Process]) -> list[EventRecord]:
    """The events of tasks that replicas have parked because of their path.

    A task with a recorded subtask whose replica dies before its first pause is another matter:
    another version of the agent, which has no migration for its checkpoint, parks it too.
    """
    return [
        event
        for replica in replicas
        for event in replica.matching_events("parked")
        if "no migration leads from" not in event["detail"]["reason"]
    ]


def parked_tasks(replicas: list[Process]) -> set[str]:
    """The tasks that these replicas have parked.

    While a roll-back is in progress, the edited code may park a task again.
    """
    return {task for event in parked_events(replicas) for task in event["task_ids"]}


@pytest.mark.parametrize("number", [signal.SIGTERM, *([signal.SIGKILL] if LONG else [])])
@pytest.mark.parametrize("name", RUNS)
async def test_nothing_is_lost_or_wrong(
    mesh: Mesh,
    name: str,
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    await mesh.declare("root")
    async with steady_load(mesh) as load:
        rollout = Rollout(mesh, load, number)
        await rollout.carry_out(RUNS[name])
        await load.finish()
    await rollout.stop()
    parked = len(parked_tasks(mesh.processes))
    if LONG:
        with capsys.disabled():
            print(
                f"\n{name}, {number.name}, {mesh.backends.broker_url.partition(':')[0]}: "
                f"{len(load.requests)} requests, {len(load.lost())} lost, "
                f"{len(load.wrong())} wrong, {parked} parked, "
                f"{rollout.replaced} replicas replaced"
            )
    assert (load.lost(), load.wrong(), parked) == ([], [], rollout.parking)
    for process in mesh.processes:
        assert process.matching_events("dead_letter:info") == []
        assert process.matching_events("defect") == []
    assert (await mesh.row_counts())["open"] == 0
