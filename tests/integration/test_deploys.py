"""Deploys of an agent while its tasks wait and new ones arrive, on both databases."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import text

from meshpoint import Mesh, TaskHandle
from meshpoint.adapters.sql import SqlStore
from meshpoint.agents.function import FunctionAgent, agent
from meshpoint.agents.peer import Peer
from meshpoint.agents.versions import AgentVersions
from meshpoint.local import local_mesh
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import new_id
from meshpoint.model.outcomes import Ok
from meshpoint.model.tasks import TaskState, TaskSummary
from meshpoint.ports.agent import DurableAgent
from meshpoint.settings import StoreSettings
from meshpoint.wiring import open_store
from recorded_events import RecordedEvents

_WAITING, _NEW = 30, 10
_DURATIONS = {
    "sweep_interval_seconds": 0.05,
    "settle_time_seconds": 0.05,
    "max_concurrency": 20,
    "lease_seconds": 5,
    "renew_interval_seconds": 1,
}


class Deployment:
    """A mesh whose agent `travel` is replaced while two peers stay.

    `flights` answers once `answers` is set. `asked` counts the requests of each peer by input.
    """

    def __init__(self, database_url: str) -> None:
        self.database_url, self.namespace = database_url, new_id()
        self.answers = asyncio.Event()
        self.asked: Counter[str] = Counter()
        self.ran: Counter[str] = Counter()
        self.events = RecordedEvents()
        self._client: Mesh | None = None
        self._handles: dict[str, TaskHandle[Any]] = {}
        self._asked_more = asyncio.Event()

    def _mesh(
        self, *agents: DurableAgent[Any, Any], **options: Any
    ) -> AbstractAsyncContextManager[Mesh]:
        return local_mesh(
            *agents,
            db_url=self.database_url,
            namespace=self.namespace,
            **{"observer": RecordedEvents(), **_DURATIONS, **options},
        )

    @asynccontextmanager
    async def peers(self) -> AsyncIterator[None]:
        """Serve the peers while the block runs."""

        @agent("flights", version="1")
        async def flights(ctx: TaskExecutionContext, city: str) -> str:
            self._record(f"flights {city}")
            await self.answers.wait()
            return f"flight to {city}"

        @agent("hotels", version="1")
        async def hotels(ctx: TaskExecutionContext, city: str) -> str:
            self._record(f"hotels {city}")
            return f"hotel in {city}"

        async with self._mesh(flights, hotels, max_concurrency=_WAITING + _NEW) as client:
            self._client = client
            yield

    @asynccontextmanager
    async def release(self, version: str, travel: DurableAgent[Any, Any]) -> AsyncIterator[None]:
        """Serve a version of the agent while the block runs."""
        self.events = RecordedEvents()
        async with self._mesh(travel, app_version=version, observer=self.events):
            yield

    def _record(self, request: str) -> None:
        self.asked[request] += 1
        self._asked_more.set()

    async def send(self, *cities: str) -> None:
        """Start a task for each city."""
        assert self._client is not None
        for city in cities:
            self._handles[city] = await self._client.send("travel", city)

    async def wait_for_requests(self, peer: str, count: int) -> None:
        """Wait until `peer` was asked `count` times."""
        while sum(n for request, n in self.asked.items() if request.startswith(peer)) < count:
            self._asked_more.clear()
            await self._asked_more.wait()

    async def results(self, cities: list[str]) -> list[Any]:
        """The results of these tasks."""
        outcomes = await asyncio.gather(*[self._handles[city].outcome() for city in cities])
        return [outcome.value if isinstance(outcome, Ok) else outcome for outcome in outcomes]

    async def tasks(self, state: TaskState) -> list[TaskSummary]:
        """The tasks of the agent in this state."""
        settings = StoreSettings.at(self.database_url, key="test")
        async with open_store(settings, self.namespace) as store:
            found = await store.tasks(states=[state])
        return [task for task in found if task.agent == "travel"]

    async def records(self) -> dict[str, list[tuple[Any, ...]]]:
        """All rows of operations, their checkpoints and records, and of the tasks' logs."""
        store = SqlStore(self.database_url, namespace=self.namespace)
        await store.open()
        try:
            async with store._database.engine.connect() as connection:
                return {
                    table: sorted(
                        map(tuple, await connection.execute(text(f"SELECT * FROM {table}"))),
                        key=str,
                    )
                    for table in _RECORD_TABLES
                }
        finally:
            await store.close()

    def assert_nothing_repeated(self) -> None:
        """No peer was asked twice, and no subtask ran twice."""
        assert {request: n for request, n in self.asked.items() if n > 1} == {}
        assert {subtask: n for subtask, n in self.ran.items() if n > 1} == {}


_RECORD_TABLES = (
    "agent_operations",
    "agent_checkpoints",
    "agent_subtask_records",
    "agent_task_log",
)
_flights, _hotels = Peer("flights", str, str), Peer("hotels", str, str)
_OLD = [f"old {number}" for number in range(_WAITING)]
_LATER = [f"new {number}" for number in range(_NEW)]


def planner(deployment: Deployment, edit: Callable[[str], str]) -> FunctionAgent[str, list[str]]:
    """Calls a peer with the result of a subtask, whose body is `edit`."""

    @agent("travel", version="1")
    async def travel(ctx: TaskExecutionContext, city: str) -> list[str]:
        def draft(city: str) -> str:
            deployment.ran[city] += 1
            return edit(city)

        plan = await ctx.subtask("draft", draft, city)
        return [plan, await _flights(plan)]

    return travel


def noting(deployment: Deployment, *tools: str, peer: Peer[str, str]) -> FunctionAgent[str, Any]:
    """Asks `peer` between recorded work. Before that, a framework runs `tools` as subtasks."""

    @agent("travel", version="1")
    async def travel(ctx: TaskExecutionContext, city: str) -> list[str]:
        def note(what: str) -> str:
            deployment.ran[f"{what} {city}"] += 1
            return what

        await ctx.memory.incr("starts")
        first = await ctx.step("first", note, "first")
        plan = await ctx.subtask("plan", note, "plan")
        async with asyncio.TaskGroup() as group:
            for tool in tools:
                group.create_task(ctx.subtask(tool, note, tool))
        answer = await peer(city)
        last = await ctx.step("last", note, "last")
        starts = await ctx.memory.get("starts") or b""
        return [first, plan, answer, last, starts.decode()]

    return travel


def caller(*peers: Peer[str, str], version: str = "1") -> FunctionAgent[str, list[str]]:
    """Asks `peers` one after the other."""

    @agent("travel", version=version)
    async def travel(ctx: TaskExecutionContext, city: str) -> list[str]:
        return [await peer(city) for peer in peers]

    return travel


@asynccontextmanager
async def waiting_tasks(
    database_url: str, first: Callable[[Deployment], DurableAgent[Any, Any]]
) -> AsyncIterator[Deployment]:
    """Tasks of a first release that all wait for `flights`."""
    deployment = Deployment(database_url)
    async with deployment.peers():
        async with deployment.release("1.0", first(deployment)):
            await deployment.send(*_OLD)
            await deployment.wait_for_requests("flights", _WAITING)
        yield deployment


async def test_an_edited_subtask_repeats_nothing_and_parks_nothing(database_url: str) -> None:
    def upper_draft(city: str) -> str:
        return city.upper()

    async with (
        waiting_tasks(database_url, lambda of: planner(of, str)) as deployment,
        deployment.release("1.1", planner(deployment, upper_draft)),
    ):
        deployment.answers.set()
        await deployment.send(*_LATER)
        assert await deployment.results(_OLD) == [[c, f"flight to {c}"] for c in _OLD]
        upper = [city.upper() for city in _LATER]
        assert await deployment.results(_LATER) == [[c, f"flight to {c}"] for c in upper]
        assert deployment.events.matching(Step.PARKED) == []
    deployment.assert_nothing_repeated()


async def test_an_edited_path_changes_no_record_before_it_is_noticed(database_url: str) -> None:
    def old(deployment: Deployment) -> FunctionAgent[str, Any]:
        return noting(deployment, peer=_flights)

    async with waiting_tasks(database_url, old) as deployment:
        before = await deployment.records()
        assert min(map(len, before.values())) >= _WAITING
        new = noting(deployment, "left", "right", peer=_hotels)
        async with deployment.release("1.1", new):
            deployment.answers.set()
            await deployment.events.wait(Step.PARKED, count=_WAITING)
        assert {tool: deployment.ran[f"{tool} old 0"] for tool in ("left", "right")} == {
            "left": 1,
            "right": 1,
        }
        assert await deployment.records() == before
        async with deployment.release("1.0", old(deployment)):
            assert await deployment.results(_OLD) == [
                ["first", "plan", f"flight to {c}", "last", "1"] for c in _OLD
            ]
            assert deployment.events.matching(Step.PARKED) == []
    deployment.assert_nothing_repeated()


@pytest.mark.parametrize("then", ["rolled back", "fixed"])
async def test_an_edited_path_parks_what_a_roll_back_or_a_fix_continues(
    database_url: str, then: str
) -> None:
    async with waiting_tasks(database_url, lambda of: caller(_flights)) as deployment:
        async with deployment.release("1.1", caller(_hotels, _flights)):
            deployment.answers.set()
            await deployment.send(*_LATER)
            expected = [[f"hotel in {c}", f"flight to {c}"] for c in _LATER]
            assert await deployment.results(_LATER) == expected
            await deployment.events.wait(Step.PARKED, count=_WAITING)
        parked = await deployment.tasks(TaskState.PARKED)
        reason = "call 1: expected hotels, recorded flights"
        assert {task.parked_reason for task in parked} == {reason}
        [tried] = {task.tried_versions for task in parked}
        assert [version.partition("+")[0] for version in tried] == ["1.1"]
        assert len(parked) == _WAITING
        version, travel = (
            ("1.0", caller(_flights))
            if then == "rolled back"
            else ("1.2", caller(_flights, _hotels))
        )
        async with deployment.release(version, travel):
            tails = [[f"hotel in {c}"] if then == "fixed" else [] for c in _OLD]
            assert await deployment.results(_OLD) == [
                [f"flight to {c}", *tail] for c, tail in zip(_OLD, tails, strict=True)
            ]
            assert deployment.events.matching(Step.PARKED) == []
    deployment.assert_nothing_repeated()


async def test_two_versions_in_one_process_serve_old_and_new_tasks(database_url: str) -> None:
    old, new = caller(_flights), caller(_hotels, _flights, version="2")
    async with (
        waiting_tasks(database_url, lambda of: old) as deployment,
        deployment.release("2.0", AgentVersions([new, old])),
    ):
        deployment.answers.set()
        await deployment.send(*_LATER)
        assert await deployment.results(_OLD) == [[f"flight to {c}"] for c in _OLD]
        expected = [[f"hotel in {c}", f"flight to {c}"] for c in _LATER]
        assert await deployment.results(_LATER) == expected
        assert deployment.events.matching(Step.PARKED) == []
    deployment.assert_nothing_repeated()


async def test_a_new_version_alone_leaves_old_tasks_to_the_roll_back(database_url: str) -> None:
    old, new = caller(_flights), caller(_hotels, version="2")
    async with waiting_tasks(database_url, lambda of: old) as deployment:
        async with deployment.release("2.0", new):
            deployment.answers.set()
            await deployment.send(*_LATER)
            assert await deployment.results(_LATER) == [[f"hotel in {c}"] for c in _LATER]
            await deployment.events.wait_until(lambda: _claimed(deployment) >= _WAITING + _NEW)
            assert len(await deployment.tasks(TaskState.READY)) == _WAITING
        async with deployment.release("1.0", old):
            assert await deployment.results(_OLD) == [[f"flight to {c}"] for c in _OLD]
            assert deployment.events.matching(Step.PARKED) == []
    deployment.assert_nothing_repeated()


def _claimed(deployment: Deployment) -> int:
    claims = deployment.events.matching(Step.CLAIM, Phase.AFTER)
    return sum(len(event.task_ids) for event in claims)
