"""The commands, the reply and the listing report the tokens that a resumed operation has used."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from command_result import run_main
from meshpoint import Failed, Mesh, Ok, Peer, Tokens, agent
from meshpoint.local import local_mesh
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.ids import TaskId
from meshpoint.operations import Operations

NAMESPACE, TASK_ID = "test", TaskId("report-1")


class Spending:
    """A report that fails twice, with a peer; it counts every token that they use."""

    def __init__(self) -> None:
        self.failures = ["no paper", "no ink"]
        self.spent: dict[tuple[int, str], int] = {}

    def spend(self, ctx: TaskExecutionContext, what: str, tokens: int) -> None:
        """Code that runs again after a pause spends nothing more."""
        self.spent[len(self.failures), what] = tokens
        ctx.token_usage.record(Tokens(input=tokens), model="small")

    @property
    def total(self) -> int:
        return sum(self.spent.values())

    @property
    def agents(self) -> list[Any]:
        prices = Peer("prices", str, int)

        @agent("prices")
        async def look_up(ctx: TaskExecutionContext, city: str) -> int:
            async def ask() -> int:
                self.spend(ctx, f"price of {city}", 1_000)
                return len(city)

            return await ctx.subtask("ask", ask)  # so that its reply is stored

        @agent("report")
        async def report(ctx: TaskExecutionContext, city: str) -> int:
            async def fetch() -> int:
                self.spend(ctx, "question", 100)
                price = await prices(city)
                self.spend(ctx, "summary", 50)
                return price

            price = await ctx.subtask("fetch", fetch)
            self.spend(ctx, "plan", 7)
            price += await prices("Bern")  # answers again in each attempt
            price += await prices("x" * len(self.failures))  # works in each attempt
            self.spend(ctx, "report", 5)
            if self.failures:
                raise ValueError(self.failures.pop(0))
            return price

        return [look_up, report]


async def run_three_attempts(spending: Spending, url: str) -> tuple[Failed, int]:
    """Returns the failure of the first attempt, and what it had spent."""
    async with (
        local_mesh(
            *spending.agents, db_url=url, namespace=NAMESPACE, sweep_interval_seconds=0.01
        ) as mesh,
        Operations(url, namespace=NAMESPACE) as operations,
    ):
        first = await ask(mesh)
        assert isinstance(first, Failed)
        spent_by_first = spending.total
        for _ in range(2):
            await operations.resume(TASK_ID)
            outcome = await operations.wait(TASK_ID)
        assert isinstance(outcome, Ok)
        assert outcome.value == 8
        (listed,) = await operations.find(agent="report")
        assert listed.usage == outcome.usage
        assert outcome.usage.total.input == spending.total
    return first, spent_by_first


async def ask(mesh: Mesh) -> Ok[Any] | Failed:
    task = await mesh.send("report", "Rome", task_id=TASK_ID)
    return await task.outcome()


def test_two_failed_attempts_and_a_successful_one_add_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, spending = f"sqlite:///{tmp_path}/tasks.db", Spending()
    first, spent_by_first = asyncio.run(run_three_attempts(spending, url))
    assert first.usage.total.input == spent_by_first
    place = ("--db", url, "--namespace", NAMESPACE)
    shown = run_main(["tasks", "show", TASK_ID, *place, "--json"], capsys).json
    assert shown["usage"]["total"]["input"] == spending.total
    assert shown["usage"]["by_source"]["prices"]["input"] == 5 * 1_000
    for command in (["show", TASK_ID], ["list", "--agent", "report"]):
        answer = run_main(["checkpoints", *command, *place, "--json"], capsys).json
        operation = answer[0] if isinstance(answer, list) else answer
        assert operation["usage"] == shown["usage"]
        table = run_main(["checkpoints", *command, *place], capsys).out
        assert f"{spending.total} in, 0 out" in " ".join(table.split())
