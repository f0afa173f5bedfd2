"""Function agents: what each run of the function can rely on."""

from __future__ import annotations

import json
from datetime import timedelta

from agent_samples import a_context, obliging, paused, resumed, travel
from pydantic import JsonValue

from meshpoint import (
    ALL,
    Call,
    Done,
    FunctionAgent,
    Outcome,
    TaskExecutionContext,
    agent,
)
from meshpoint.testing.conformance.agent import DurableAgentSuite, run_agent


class TestFunctionAgentContract(DurableAgentSuite):
    def agent(self) -> FunctionAgent[int, str]:
        return travel

    def request(self) -> JsonValue:
        return 3

    def answer(self, call: Call) -> Outcome:
        return obliging(call)


async def test_finished_calls_return_their_recorded_answers() -> None:
    asked: list[Call] = []

    def answer(call: Call) -> Outcome:
        asked.append(call)
        return obliging(call)

    assert await run_agent(travel, 3, answer) == "DEAR 12"
    assert [(call.peer, call.input) for call in asked] == [
        ("double", 0), ("double", 1), ("double", 2), ("double", 6), ("shout", "dear"),
    ]  # fmt: skip
    assert await run_agent(travel, 1, obliging) == "CHEAP"


async def test_a_call_carries_what_its_peer_declares() -> None:
    pause = await paused(travel, 1)
    assert pause.calls == (Call("double.0", "double", 0, timedelta(seconds=30)),)
    assert pause.join == ALL


async def test_the_journal_grows_by_one_entry_per_pause() -> None:
    first = await paused(travel, 2)
    second = await resumed(travel, first)
    assert [len(json.loads(pause.state)["entries"]) for pause in (first, second)] == [1, 2]


async def test_a_function_that_calls_nobody_is_done_at_once() -> None:
    @agent("alone")
    async def alone(ctx: TaskExecutionContext, number: int) -> int:
        assert await ctx.gather() == ()
        return number + 1

    assert await alone.start(a_context(), 1) == Done(2)
