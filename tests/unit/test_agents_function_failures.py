"""Function agents: how failed calls reach the function."""

from __future__ import annotations

from datetime import timedelta

import pytest
from agent_samples import a_context, double, obliging, paused, refusing, shout, travel
from pydantic import JsonValue

from meshpoint import (
    ALL,
    AT_LEAST,
    FIRST,
    AgentMisbehaved,
    Done,
    Failed,
    FailureKind,
    Join,
    Ok,
    Outcomes,
    PeerFailed,
    TaskExecutionContext,
    Tokens,
    TokenUsage,
    agent,
)
from meshpoint.testing.conformance.agent import run_agent


async def test_a_failed_call_raises_and_an_uncaught_failure_is_the_agents() -> None:
    with pytest.raises(PeerFailed, match="peer 'double': timeout: sorry") as caught:
        await run_agent(travel, 1, refusing(FailureKind.TIMEOUT))
    assert caught.value.outcome == Failed(FailureKind.TIMEOUT, "sorry")


async def test_a_failed_call_can_be_caught_and_another_peer_asked() -> None:
    @agent("patient")
    async def patient(ctx: TaskExecutionContext, number: int) -> str:
        try:
            return str((await ctx.call(double(number))).price)
        except PeerFailed as failed:
            return await ctx.call(shout(failed.outcome.kind))

    assert await run_agent(patient, 1, refusing(peer="double")) == "ERROR"
    assert await run_agent(patient, 1, obliging) == "2"


async def test_errors_can_be_had_as_values() -> None:
    @agent("calm")
    async def calm(ctx: TaskExecutionContext, number: int) -> list[str]:
        one = await ctx.call(double(number), return_errors=True)
        two, three = await ctx.gather(double(number), shout("x"), return_errors=True)
        return [str(one), str(two), str(three)]

    failed = str(Failed(FailureKind.ERROR, "sorry"))
    assert await run_agent(calm, 1, refusing(peer="double")) == [failed, failed, "X"]
    assert await run_agent(calm, 1, obliging) == ["price=2", "price=2", "X"]


@pytest.mark.parametrize("join", [ALL, ALL.within(timedelta(minutes=1))])
async def test_gather_with_all_raises_when_one_has_failed(join: Join) -> None:
    @agent("all")
    async def everything(ctx: TaskExecutionContext, number: int) -> str:
        return str(await ctx.gather(shout("x"), double(number), join=join))

    with pytest.raises(PeerFailed, match="double"):
        await run_agent(everything, 1, refusing(peer="double"))


async def test_gather_with_a_smaller_join_leaves_failures_in_their_places() -> None:
    @agent("first")
    async def first(ctx: TaskExecutionContext, number: int) -> list[str]:
        answers = await ctx.gather(double(number), shout("x"), shout("y"), join=FIRST)
        return ["failed" if isinstance(answer, Failed) else str(answer) for answer in answers]

    pause = await paused(first)
    assert pause.join == FIRST
    assert await run_agent(first, 1, obliging) == ["price=2", "failed", "failed"]
    assert await run_agent(first, 1, refusing(peer="double")) == ["failed", "X", "failed"]


async def test_gather_raises_when_fewer_succeed_than_the_join_needs_and_names_a_culprit() -> None:
    @agent("two")
    async def two(ctx: TaskExecutionContext, number: int) -> str:
        return str(await ctx.gather(shout("x"), shout("y"), double(number), join=AT_LEAST(2)))

    pause = await paused(two)
    outcomes = Outcomes({
        "shout.0": Failed(FailureKind.CANCELLED), "shout.1": Ok("Y"), "double.2": Failed(FailureKind.TIMEOUT),
    })  # fmt: skip
    with pytest.raises(PeerFailed, match="'double': timeout"):
        await two.resume(a_context(), pause.state, outcomes)


async def test_a_join_of_more_results_than_calls_is_refused_where_it_is_asked_for() -> None:
    @agent("greedy")
    async def greedy(ctx: TaskExecutionContext, number: int) -> str:
        with pytest.raises(AgentMisbehaved, match="needs 2 results but has 1"):
            await ctx.gather(double(number), join=AT_LEAST(2))
        return "refused"

    assert await greedy.start(a_context(), 1) == Done("refused")


async def test_an_answer_of_another_type_than_declared_is_an_invalid_outcome() -> None:
    with pytest.raises(PeerFailed, match=r"invalid: output of peer 'double': Quote: price: ") as caught:
        await run_agent(travel, 1, lambda call: Ok({"price": "much"}))
    assert caught.value.outcome.kind is FailureKind.INVALID


async def test_artifacts_and_usage_of_an_answer_can_be_had() -> None:
    whole = Ok[JsonValue]({"price": 4}, ({"name": "ticket"},), TokenUsage(total=Tokens(input=7)))

    @agent("curious")
    async def curious(ctx: TaskExecutionContext, number: int) -> str:
        answer, text = await ctx.gather(double(number).with_artifacts(), shout("x"))
        return f"{answer.value.price} {answer.artifacts} {answer.usage.total.input} {text}"

    output = await run_agent(curious, 1, lambda call: whole if call.peer == "double" else Ok("X"))
    assert output == "4 ({'name': 'ticket'},) 7 X"
    with pytest.raises(PeerFailed):
        await run_agent(curious, 1, refusing(peer="double"))
