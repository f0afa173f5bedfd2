"""Agents for these tests."""

from __future__ import annotations

from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.model.context import TaskExecutionContext

doubler_peer = Peer("doubler", int, int)


@agent("doubler", version="1")
async def doubler(ctx: TaskExecutionContext, number: int) -> int:
    return number * 2


@agent("summer", version="1")
async def summer(ctx: TaskExecutionContext, numbers: list[int]) -> int:
    doubled = await ctx.gather(*[doubler_peer(number) for number in numbers])
    return sum(doubled)
