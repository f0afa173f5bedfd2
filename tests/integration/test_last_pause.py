"""A failed operation is resumed at its last pause: on both databases, through the public API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from meshpoint import Failed, Mesh, Ok, Peer, TaskExecutionContext, agent
from meshpoint.local import local_mesh
from meshpoint.model.ids import TaskId, new_id
from meshpoint.operations import Operations
from run_log import RunLog

NAMESPACE = "resumes"
OPTIONS: dict[str, Any] = {"sweep_interval_seconds": 0.05}


class Team:
    """A boss with four peers: two never pause, `slow` pauses, and `shaky` fails at first."""

    def __init__(self) -> None:
        self.ran, self.shaky_ids, self.is_fixed = RunLog(), list[str](), False

    def agents(self) -> list[Any]:
        ran = self.ran
        quick_peer, slow_peer = Peer("quick", int, int), Peer("slow", int, int)
        shaky_peer, leaf_peer = Peer("shaky", int, int), Peer("leaf", int, int)

        @agent("quick")
        async def quick(ctx: TaskExecutionContext, number: int) -> int:
            ran(f"quick {number}")
            return number

        @agent("leaf")
        async def leaf(ctx: TaskExecutionContext, number: int) -> int:
            ran(f"leaf {number}")
            return number

        @agent("slow")
        async def slow(ctx: TaskExecutionContext, number: int) -> int:
            return await leaf_peer(number)

        @agent("shaky")
        async def shaky(ctx: TaskExecutionContext, number: int) -> int:
            self.shaky_ids.append(ctx.task_id)
            if not self.is_fixed:
                raise ValueError("not fixed yet")
            return number

        def note(what: str) -> str:
            ran(what)
            return what

        @agent("boss", resume_from="last-pause")
        async def boss(ctx: TaskExecutionContext, number: int) -> list[int]:
            await ctx.subtask("plan", note, "subtask")
            await ctx.step("before", note, "step before")
            outcomes = await ctx.gather_outcomes(
                quick_peer(1), quick_peer(2), slow_peer(3), shaky_peer(4)
            )
            await ctx.step("after", note, "step after")
            await ctx.subtask("check", note, "subtask after")
            if any(isinstance(each, Failed) for each in outcomes):
                raise ValueError("a peer has failed")
            return [each.value for each in outcomes if isinstance(each, Ok)]

        return [boss, quick, slow, shaky, leaf]


@pytest.fixture
async def mesh(database_url: str) -> AsyncIterator[tuple[Team, Mesh, Operations]]:
    team = Team()
    async with (
        local_mesh(*team.agents(), db_url=database_url, namespace=NAMESPACE, **OPTIONS) as client,
        Operations(database_url, namespace=NAMESPACE) as operations,
    ):
        yield team, client, operations


async def test_only_the_failed_peer_is_asked_again(
    mesh: tuple[Team, Mesh, Operations],
) -> None:
    team, client, operations = mesh
    task_id = TaskId(new_id())
    first = await (await client.send("boss", 7, task_id=task_id)).outcome()
    assert isinstance(first, Failed)
    once = ["subtask", "step before", "quick 1", "quick 2", "leaf 3", "step after"]
    assert sorted(team.ran.names) == sorted([*once, "subtask after"])
    team.is_fixed = True
    revived = await operations.resume(task_id)
    assert revived.retry_count == 1
    assert await operations.wait(task_id) == Ok([1, 2, 3, 4])
    assert sorted(team.ran.names) == sorted([*once, "subtask after"])
    assert len(team.shaky_ids) == len(set(team.shaky_ids)) == 2
    # The same request finds the new result.
    again = await (await client.send("boss", 7, task_id=task_id)).outcome()
    assert again == Ok([1, 2, 3, 4])
    assert (await operations.get(task_id)).retry_count == 1


async def test_from_the_start_every_step_runs_again(
    mesh: tuple[Team, Mesh, Operations],
) -> None:
    team, client, operations = mesh
    task_id = TaskId(new_id())
    assert isinstance(await (await client.send("boss", 7, task_id=task_id)).outcome(), Failed)
    team.ran.take_new()
    team.is_fixed = True
    await operations.resume(task_id, resume_from="start")
    assert await operations.wait(task_id) == Ok([1, 2, 3, 4])
    ran = team.ran.take_new()
    assert [each for each in ran if "s" in each] == ["step before", "step after"]
