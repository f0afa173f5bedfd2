"""The agents under fuzz: the chaos agents, in-process variants, and two that call a lying peer."""

from __future__ import annotations

import asyncio

from chaos.agents import Answer, Piece, Work, draw_ticket, root
from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.outcomes import Ok

WIDTH = 5
EVIL = "evil"
"""Name of the peer that the fuzzer plays."""

spark_peer = Peer("spark", Piece, int)
evil_peer = Peer(EVIL, int, dict)


@agent("light", version="1")
async def light(ctx: TaskExecutionContext, work: Work) -> Answer:
    """Like `root`, without a database."""
    answer: Answer = []
    for number in range(work.rounds):
        pieces = [Piece(number=work.number, round=number, index=index) for index in range(WIDTH)]
        outcomes = await ctx.gather_outcomes(*[spark_peer(piece) for piece in pieces])
        answer.append([each.value if isinstance(each, Ok) else None for each in outcomes])
    return answer


@agent("spark", version="1")
async def spark(ctx: TaskExecutionContext, piece: Piece) -> int:
    """Like `leaf`, without a database."""
    await asyncio.sleep(0.001)
    return piece.value()


async def _call_evil(ctx: TaskExecutionContext, number: int) -> str:
    return type(await ctx.outcome(evil_peer(number))).__name__


@agent("asker", version="1")
async def asker(ctx: TaskExecutionContext, number: int) -> str:
    """Call the lying peer and wait in the database."""
    return await _call_evil(ctx, number)


@agent("doubter", version="1")
async def doubter(ctx: TaskExecutionContext, number: int) -> str:
    """Call the lying peer and wait in the process."""
    return await _call_evil(ctx, number)


@agent("sleeper", version="1")
async def sleeper(ctx: TaskExecutionContext, milliseconds: int) -> str:
    """Run for a while, so that a cancel meets running code."""
    await asyncio.sleep(min(max(milliseconds, 0), 3000) / 1000)
    return "rested"


@agent("dozer", version="1")
async def dozer(ctx: TaskExecutionContext, milliseconds: int) -> str:
    """Like `sleeper`, but new tasks no longer pause in its database."""
    await asyncio.sleep(min(max(milliseconds, 0), 3000) / 1000)
    return "rested"


@agent("solo", version="1", exclusive=True)
async def solo(ctx: TaskExecutionContext, milliseconds: int) -> str:
    """Like `diary`, but the agent is exclusive: none of its operations is resumed meanwhile."""
    return await _run_recorded(ctx, milliseconds)


@agent("diary", version="1")
async def diary(ctx: TaskExecutionContext, milliseconds: int) -> str:
    """Record a subtask, then run for a while, or fail."""
    return await _run_recorded(ctx, milliseconds)


async def _run_recorded(ctx: TaskExecutionContext, milliseconds: int) -> str:
    await ctx.subtask("draw", draw_ticket)
    if milliseconds < 0:
        raise ValueError("no time")
    await asyncio.sleep(min(milliseconds, 3000) / 1000)
    return "written"


__all__ = ["asker", "diary", "doubter", "dozer", "light", "root", "sleeper", "solo", "spark"]
