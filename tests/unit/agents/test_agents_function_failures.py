"""Function agents: how failed calls reach the function."""

from __future__ import annotations

from datetime import timedelta

import pytest
from agent_samples import (
    Quote,
    answer_any,
    create_context,
    double_peer,
    failing_answers,
    shout_peer,
    start_and_pause,
    travel,
)
from pydantic import JsonValue

from meshpoint import (
    AT_LEAST,
    FIRST,
    AgentMisbehaved,
    Done,
    Failed,
    FailureKind,
    Ok,
    Outcome,
    Outcomes,
    PeerFailed,
    TaskExecutionContext,
    Tokens,
    TokenUsage,
    agent,
)
from meshpoint.testing.conformance.agent import run_agent


async def test_an_uncaught_failure_of_a_call_fails_the_agent() -> None:
    with pytest.raises(PeerFailed, match="peer 'double': timeout: sorry") as caught:
        await run_agent(travel, 1, failing_answers(FailureKind.TIMEOUT))
    assert caught.value.outcome == Failed(FailureKind.TIMEOUT, "sorry")


async def test_a_failed_call_can_be_caught_and_another_peer_asked() -> None:
    @agent("patient")
    async def patient(ctx: TaskExecutionContext, number: int) -> str:
        try:
            return str((await double_peer(number)).price)
        except PeerFailed as failed:
            return await shout_peer(failed.outcome.kind)

    assert await run_agent(patient, 1, failing_answers(peer="double")) == "ERROR"
    assert await run_agent(patient, 1, answer_any) == "2"


async def test_outcomes_are_values_even_if_a_call_fails() -> None:
    @agent("calm")
    async def calm(ctx: TaskExecutionContext, number: int) -> list[str]:
        one = await ctx.outcome(double_peer(number))
        two, three = await ctx.gather_outcomes(double_peer(number), shout_peer("x"))
        return [str(one), str(two), str(three)]

    failed = str(Failed(FailureKind.ERROR, "sorry"))
    assert await run_agent(calm, 1, failing_answers(peer="double")) == [
        failed,
        failed,
        str(Ok("X")),
    ]
    ok = str(Ok(Quote(price=2)))
    assert await run_agent(calm, 1, answer_any) == [ok, ok, str(Ok("X"))]


async def test_gather_raises_when_one_call_has_failed() -> None:
    @agent("all")
    async def everything(ctx: TaskExecutionContext, number: int) -> str:
        return str(await ctx.gather(shout_peer("x"), double_peer(number)))

    with pytest.raises(PeerFailed, match="double"):
        await run_agent(everything, 1, failing_answers(peer="double"))


async def test_a_smaller_join_returns_outcomes_in_order() -> None:
    @agent("first")
    async def first(ctx: TaskExecutionContext, number: int) -> list[str]:
        outcomes = await ctx.gather_outcomes(
            double_peer(number), shout_peer("x"), shout_peer("y"), join=FIRST
        )
        return [str(each.value) if isinstance(each, Ok) else each.kind for each in outcomes]

    pause = await start_and_pause(first)
    assert pause.join == FIRST
    assert await run_agent(first, 1, answer_any) == ["price=2", "cancelled", "cancelled"]
    assert await run_agent(first, 1, failing_answers(peer="double")) == ["error", "X", "cancelled"]


async def test_gather_names_the_first_failed_call_but_cancelled_ones_last() -> None:
    @agent("two")
    async def two(ctx: TaskExecutionContext, number: int) -> str:
        return str(await ctx.gather(shout_peer("x"), shout_peer("y"), double_peer(number)))

    pause = await start_and_pause(two)
    outcomes = Outcomes(
        {
            "shout.0": Failed(FailureKind.CANCELLED),
            "shout.1": Ok("Y"),
            "double.2": Failed(FailureKind.TIMEOUT),
        }
    )
    with pytest.raises(PeerFailed, match="'double': timeout"):
        await two.resume(create_context(), pause.state, outcomes)


async def test_first_returns_the_first_result_and_raises_only_if_all_fail() -> None:
    @agent("racing")
    async def racing(ctx: TaskExecutionContext, number: int) -> str:
        return str(await ctx.first(shout_peer("x"), double_peer(number)))

    pause = await start_and_pause(racing)
    assert pause.join == FIRST
    cancelled, failed = Failed(FailureKind.CANCELLED), Failed(FailureKind.TIMEOUT)
    quote: Outcome = Ok({"price": 2})
    for first, second, expected in (
        (Ok("X"), cancelled, "X"),
        (failed, quote, "price=2"),
        (Ok("X"), quote, "X"),
    ):
        outcomes = Outcomes({"shout.0": first, "double.1": second})
        assert await racing.resume(create_context(), pause.state, outcomes) == Done(expected)
    outcomes = Outcomes({"shout.0": cancelled, "double.1": failed})
    with pytest.raises(PeerFailed, match="'double': timeout"):
        await racing.resume(create_context(), pause.state, outcomes)


async def test_outcomes_do_not_raise_when_the_join_cannot_be_met() -> None:
    @agent("two")
    async def two(ctx: TaskExecutionContext, number: int) -> list[str]:
        outcomes = await ctx.gather_outcomes(
            shout_peer("x"), double_peer(number), join=AT_LEAST(2).within(timedelta(minutes=1))
        )
        return [type(each).__name__ for each in outcomes]

    assert await run_agent(two, 1, failing_answers(peer="double")) == ["Ok", "Failed"]


async def test_a_join_of_more_results_than_calls_is_refused_at_the_call() -> None:
    @agent("greedy")
    async def greedy(ctx: TaskExecutionContext, number: int) -> str:
        with pytest.raises(AgentMisbehaved, match="needs 2 results but there is only 1 call"):
            await ctx.gather_outcomes(double_peer(number), join=AT_LEAST(2))
        return "refused"

    assert await greedy.start(create_context(), 1) == Done("refused")


async def test_an_answer_of_another_type_than_declared_is_an_invalid_outcome() -> None:
    with pytest.raises(
        PeerFailed, match=r"invalid: output of peer 'double': Quote: price: "
    ) as caught:
        await run_agent(travel, 1, lambda call: Ok({"price": "much"}))
    assert caught.value.outcome.kind is FailureKind.INVALID


async def test_artifacts_and_usage_of_an_answer_are_available() -> None:
    outcome = Ok[JsonValue]({"price": 4}, ({"name": "ticket"},), TokenUsage(total=Tokens(input=7)))

    @agent("curious")
    async def curious(ctx: TaskExecutionContext, number: int) -> str:
        answer, text = await ctx.gather(double_peer(number).with_artifacts(), shout_peer("x"))
        return f"{answer.value.price} {answer.artifacts} {answer.usage.total.input} {text}"

    output = await run_agent(
        curious, 1, lambda call: outcome if call.peer == "double" else Ok("X")
    )
    assert output == "4 ({'name': 'ticket'},) 7 X"
    with pytest.raises(PeerFailed):
        await run_agent(curious, 1, failing_answers(peer="double"))
