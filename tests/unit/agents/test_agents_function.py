"""Function agents: what each run of the function can rely on."""

from __future__ import annotations

import json
from datetime import timedelta

from agent_samples import answer_any, create_context, resume_agent, start_and_pause, travel
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
