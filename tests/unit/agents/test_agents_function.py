"""Function agents: what each run of the function can rely on."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from agent_samples import (
    answer_any,
    create_context,
    double_peer,
    resume_agent,
    start_and_pause,
    travel,
)
from pydantic import JsonValue

from meshpoint import (
    ALL,
    AgentMisbehaved,
    Call,
    Done,
    FunctionAgent,
    Outcome,
    TaskExecutionContext,
    agent,
    current_context,
)
from meshpoint.testing.conformance.agent import DurableAgentSuite, run_agent


class TestFunctionAgentContract(DurableAgentSuite):
    def agent(self) -> FunctionAgent[int, str]:
        return travel

    def request(self) -> JsonValue:
        return 3

    def answer(self, call: Call) -> Outcome:
        return answer_any(call)


async def test_finished_calls_return_their_recorded_answers() -> None:
    answered_calls: list[Call] = []

    def answer(call: Call) -> Outcome:
        answered_calls.append(call)
        return answer_any(call)

    assert await run_agent(travel, 3, answer) == "DEAR 12"
    assert [(call.peer, call.input) for call in answered_calls] == [
        ("double", 0), ("double", 1), ("double", 2), ("double", 6), ("shout", "dear"),
    ]  # fmt: skip
    assert await run_agent(travel, 1, answer_any) == "CHEAP"


async def test_a_call_carries_what_its_peer_declares() -> None:
    pause = await start_and_pause(travel, 1)
    assert pause.calls == (Call("double.0", "double", 0, timedelta(seconds=30)),)
    assert pause.join == ALL


async def test_the_journal_grows_by_one_entry_per_pause() -> None:
    first = await start_and_pause(travel, 2)
    second = await resume_agent(travel, first)
    assert [len(json.loads(pause.state)["entries"]) for pause in (first, second)] == [1, 2]


async def test_a_function_without_calls_completes_at_once() -> None:
    @agent("alone")
    async def return_number(ctx: TaskExecutionContext, number: int) -> int:
        assert await ctx.gather() == ()
        assert await ctx.gather_outcomes() == ()
        return number + 1

    assert await return_number.start(create_context(), 1) == Done(2)


async def test_a_function_that_is_called_with_a_context_runs_in_that_task() -> None:
    @agent("inner")
    async def inner(ctx: TaskExecutionContext, number: int) -> int:
        """Doubles a number."""
        assert current_context() is ctx
        return (await double_peer(number)).price

    @agent("outer")
    async def outer(ctx: TaskExecutionContext, number: int) -> int:
        return await inner(ctx, number) + await inner(ctx, number + 1)

    assert await run_agent(outer, 1, answer_any) == 6
    assert inner.peer.description == "Doubles a number."


async def test_a_function_runs_in_a_context_without_a_replica() -> None:
    @agent("inner")
    async def inner(ctx: TaskExecutionContext, number: int) -> int:
        assert current_context() is ctx
        return await ctx.step("double", lambda: 2 * number)

    assert await inner(create_context(), 2) == 4
    with pytest.raises(AgentMisbehaved, match="current_context"):
        current_context()
