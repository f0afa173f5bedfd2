"""Function agents: a pause must not be caught, hidden or delayed."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from agent_samples import answer_any, create_context, double_peer, shout_peer

from meshpoint import (
    AgentMisbehaved,
    Done,
    TaskExecutionContext,
    Waitable,
    agent,
)
from meshpoint.testing.conformance.agent import run_agent


async def test_finally_blocks_run_at_each_pause() -> None:
    closed: list[str] = []

    @agent("tidy")
    async def tidy(ctx: TaskExecutionContext, number: int) -> int:
        try:
            return (await double_peer(number)).price
        finally:
            closed.append("closed")

    assert await run_agent(tidy, 1, answer_any) == 2
    assert closed == ["closed", "closed"]


async def test_except_exception_does_not_see_a_pause() -> None:
    @agent("careful")
    async def careful(ctx: TaskExecutionContext, number: int) -> int:
        try:
            return (await double_peer(number)).price
        except Exception:
            return -1

    assert await run_agent(careful, 1, answer_any) == 2


async def test_a_swallowed_pause_is_reported() -> None:
    @agent("greedy")
    async def greedy(ctx: TaskExecutionContext, number: int) -> int:
        try:
            return (await double_peer(number)).price
        except BaseException:
            return -1

    with pytest.raises(AgentMisbehaved, match="this except swallowed a pause"):
        await greedy.start(create_context(), 1)


async def test_an_error_while_pausing_is_reported() -> None:
    @agent("clumsy")
    async def clumsy(ctx: TaskExecutionContext, number: int) -> int:
        try:
            return (await double_peer(number)).price
        finally:
            raise OSError("disk full")

    with pytest.raises(
        AgentMisbehaved, match="clumsy raised OSError: disk full while it was pausing"
    ):
        await clumsy.start(create_context(), 1)


async def test_a_call_while_pausing_is_reported() -> None:
    @agent("tenacious")
    async def tenacious(ctx: TaskExecutionContext, number: int) -> int:
        try:
            return (await double_peer(number)).price
        finally:
            with suppress(Exception):
                await shout_peer("clean up")

    with pytest.raises(AgentMisbehaved, match="called a peer while it was pausing"):
        await tenacious.start(create_context(), 1)


@pytest.mark.parametrize("given", [double_peer, 7], ids=["a peer without its input", "a number"])
async def test_a_value_that_is_not_a_call_is_refused(given: Any) -> None:
    @agent("hasty")
    async def hasty(ctx: TaskExecutionContext, number: int) -> None:
        await ctx.outcome(given)

    with pytest.raises(
        AgentMisbehaved,
        match=rf"ctx\.outcome: {type(given).__name__} is not a call; call a Peer with",
    ):
        await hasty.start(create_context(), 1)


async def wait_for(wait: Waitable[Any]) -> Any:
    return await wait


async def in_gather(ctx: TaskExecutionContext) -> None:
    await asyncio.gather(double_peer(1), shout_peer("x"))


async def in_gather_with_exceptions_as_values(ctx: TaskExecutionContext) -> None:
    await asyncio.gather(double_peer(1), shout_peer("x"), return_exceptions=True)


async def in_task_group(ctx: TaskExecutionContext) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(wait_for(double_peer(1)))


async def in_task(ctx: TaskExecutionContext) -> None:
    await asyncio.ensure_future(double_peer(1))


@pytest.mark.parametrize(
    "body", [in_gather, in_gather_with_exceptions_as_values, in_task_group, in_task]
)
async def test_calls_in_other_asyncio_tasks_are_refused(body: Any) -> None:
    @agent("parallel")
    async def parallel(ctx: TaskExecutionContext, number: int) -> str:
        await body(ctx)
        return "came to a result"

    with pytest.raises(
        AgentMisbehaved,
        match=r"^peer calls run in the agent's own task: await ctx\.gather\(double\(t\), …\); ",
    ):
        await parallel.start(create_context(), 1)


async def test_a_task_group_around_a_call_is_closed_at_the_pause() -> None:
    ends: list[str] = []

    async def sibling(started: asyncio.Event) -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            ends.append("cancelled")

    @agent("grouped")
    async def grouped(ctx: TaskExecutionContext, number: int) -> int:
        async with asyncio.TaskGroup() as group:
            started = asyncio.Event()
            task = group.create_task(sibling(started))
            await started.wait()
            price = (await double_peer(number)).price
            task.cancel()
        return price

    assert await run_agent(grouped, 1, answer_any) == 2
    assert ends == ["cancelled", "cancelled"]


async def test_a_task_that_fails_during_a_pause_is_reported() -> None:
    async def sibling(started: asyncio.Event) -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            raise OSError("disk full")

    @agent("grouped")
    async def grouped(ctx: TaskExecutionContext, number: int) -> int:
        async with asyncio.TaskGroup() as group:
            started = asyncio.Event()
            group.create_task(sibling(started))
            await started.wait()
            return (await double_peer(number)).price

    with pytest.raises(AgentMisbehaved, match=r"grouped raised .* while it was pausing"):
        await grouped.start(create_context(), 1)


async def test_a_leftover_asyncio_task_cannot_make_calls() -> None:
    leftover_tasks: list[asyncio.Task[Any]] = []
    resume = asyncio.Event()

    @agent("forgetful")
    async def forgetful(ctx: TaskExecutionContext, number: int) -> int:
        async def later() -> None:
            await resume.wait()
            await double_peer(1)

        leftover_tasks.append(asyncio.create_task(later()))
        return number

    assert await forgetful.start(create_context(), 1) == Done(1)
    resume.set()
    with pytest.raises(AgentMisbehaved, match="an asyncio task left behind by forgetful"):
        await leftover_tasks[0]


async def test_a_cancelled_segment_is_not_reported_as_misbehaviour() -> None:
    reached = asyncio.Event()

    @agent("slow")
    async def slow(ctx: TaskExecutionContext, number: int) -> int:
        try:
            return (await double_peer(number)).price
        finally:
            reached.set()
            await asyncio.Event().wait()

    segment = asyncio.create_task(slow.start(create_context(), 1))
    await reached.wait()
    segment.cancel()
    with pytest.raises(asyncio.CancelledError):
        await segment
