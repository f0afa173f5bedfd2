"""Function agents: the context in replayed code."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
from agent_samples import answer_any, create_context, double_peer

from meshpoint import (
    AgentMisbehaved,
    Ok,
    Paused,
    TaskExecutionContext,
    Tokens,
    TokenUsage,
    agent,
)
from meshpoint.model.ids import TaskId
from meshpoint.testing.conformance.agent import answered, restored, run_agent


async def test_context_changes_of_a_replayed_part_are_not_duplicated() -> None:
    seen: list[tuple[str, bool]] = []

    @agent("writer")
    async def writer(ctx: TaskExecutionContext, number: int) -> str:
        for _ in range(number):
            ctx.response_buffer += "x"
            ctx.produced_artifacts.append({"name": "page"})
            ctx.flags["pages"] = len(ctx.produced_artifacts)
            ctx.token_usage.record(Tokens(output=5), model="m")
            seen.append((ctx.response_buffer, ctx.replaying))
            await double_peer(1)
        usage = ctx.token_usage
        return (
            f"{ctx.response_buffer} {ctx.flags['pages']} {usage.total.output} "
            f"{usage.by_source['double'].output}"
        )

    peer_usage = TokenUsage(total=Tokens(output=100))
    output = await run_agent(writer, 3, lambda call: Ok({"price": 1}, usage=peer_usage))
    assert output == "xxx 3 315 300"
    assert seen == [
        ("x", False),
        ("x", True), ("xx", False),
        ("x", True), ("xx", True), ("xxx", False),
        ("x", True), ("xx", True), ("xxx", True),
    ]  # fmt: skip


async def test_a_decision_on_token_usage_is_the_same_in_a_replay() -> None:
    @agent("thrifty")
    async def thrifty(ctx: TaskExecutionContext, budget: int) -> int:
        rounds = 0
        while ctx.token_usage.total.input < budget:
            ctx.token_usage.record(Tokens(input=1), model="m")
            await double_peer(ctx.token_usage.total.input)
            rounds += 1
        return rounds

    usage = TokenUsage(total=Tokens(input=10))
    assert await run_agent(thrifty, 30, lambda call: Ok({"price": 1}, usage=usage)) == 3


async def test_a_flag_set_by_the_request_is_seen_in_each_run() -> None:
    @agent("flagged")
    async def flagged(ctx: TaskExecutionContext, number: int) -> str:
        first_time = ctx.flags.pop("new", False)
        await double_peer(1 if first_time else 2)
        return f"{first_time} {'new' in ctx.flags}"

    ctx = TaskExecutionContext(TaskId("t"), flags={"new": True})
    assert await run_agent(flagged, 1, answer_any, ctx=ctx) == "True False"


async def test_a_flag_set_before_a_pause_is_unset_when_that_part_is_replayed() -> None:
    @agent("once")
    async def once(ctx: TaskExecutionContext, number: int) -> str:
        before = "begun" in ctx.flags
        ctx.flags["begun"] = True
        await double_peer(number)
        return f"{before} {ctx.flags['begun']}"

    assert await run_agent(once, 1, answer_any) == "False True"


async def test_an_exception_in_a_replayed_part_does_not_lose_token_usage() -> None:
    runs: list[int] = []

    @agent("unlucky")
    async def unlucky(ctx: TaskExecutionContext, number: int) -> int:
        runs.append(1)
        if len(runs) > 1:
            raise OSError("no network")
        ctx.token_usage.record(Tokens(input=8), model="m")
        return (await double_peer(number)).price

    ctx = create_context()
    pause = await unlucky.start(ctx, 1)
    assert isinstance(pause, Paused)
    outcomes = answered(pause, answer_any)
    ctx = restored(ctx, pause, outcomes)
    with pytest.raises(OSError, match="no network"):
        await unlucky.resume(ctx, pause.state, outcomes)
    assert ctx.token_usage.total.input == 8


async def test_only_function_agents_can_call_peers_from_their_context() -> None:
    for name, asking in (
        ("ctx.outcome", create_context().outcome(double_peer(1))),
        ("ctx.gather", create_context().gather(double_peer(1))),
        ("ctx.first", create_context().first(double_peer(1))),
        ("ctx.gather_outcomes", create_context().gather_outcomes(double_peer(1))),
    ):
        with pytest.raises(
            AgentMisbehaved, match=f"{name} is for function agents.*self.ask.*Paused"
        ):
            await asking


async def test_a_segment_leaves_nothing_to_the_garbage_collector() -> None:
    @agent("brief")
    async def brief(ctx: TaskExecutionContext, number: int) -> int:
        return number

    gc.disable()
    try:
        ctx = create_context()
        context_ref = weakref.ref(ctx)
        await asyncio.create_task(brief.start(ctx, 1))
        del ctx
        assert context_ref() is None
    finally:
        gc.enable()
