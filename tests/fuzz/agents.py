"""The agents under fuzz: the chaos agents, in-process variants, and two that call a lying peer."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from chaos.agents import Answer, Piece, Work, draw_ticket, root
from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.outcomes import Ok
from meshpoint.model.questions import Question
from meshpoint.model.retry_policy import RetryPolicy
from meshpoint.model.signals import Signal

WIDTH = 5
EVIL = "evil"
"""Name of the peer that the fuzzer plays."""

spark_peer = Peer("spark", Piece, int)
evil_peer = Peer(EVIL, int, dict)
retried_peer = evil_peer.with_options(retry=RetryPolicy(max_attempts=2, initial_interval=0.1))
approval = Question("approval", bool)
chat = Signal("chat", int)


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
    peer = evil_peer if number % 2 else retried_peer
    return type(await ctx.outcome(peer(number))).__name__


@agent("asker", version="1")
async def asker(ctx: TaskExecutionContext, number: int) -> str:
    """Call the lying peer and wait in the database."""
    return await _call_evil(ctx, number)


@agent("doubter", version="1")
async def doubter(ctx: TaskExecutionContext, number: int) -> str:
    """Call the lying peer and wait in the process."""
    return await _call_evil(ctx, number)


@agent("clerk", version="1")
async def clerk(ctx: TaskExecutionContext, milliseconds: int) -> str:
    """Ask a question and receive a signal, in the database."""
    return await _ask_and_receive(ctx, milliseconds)


@agent("teller", version="1")
async def teller(ctx: TaskExecutionContext, milliseconds: int) -> str:
    """Like `clerk`, without a database."""
    return await _ask_and_receive(ctx, milliseconds)


async def _ask_and_receive(ctx: TaskExecutionContext, milliseconds: int) -> str:
    """Set a value if `milliseconds` is even, and pause for time if it is 2 modulo 3.

    The segment after that pause takes as long as the first one.
    """
    seconds = min(max(milliseconds, 0), 3000) / 1000
    await asyncio.sleep(seconds)
    if milliseconds % 2 == 0:  # otherwise the task has no row before its first pause
        await ctx.set_value("progress", milliseconds)
    if milliseconds % 3 == 2:
        await ctx.sleep(timedelta(seconds=3))
        await asyncio.sleep(seconds)
    question = ctx.wait_for(approval, prompt="Go on?", timeout=timedelta(seconds=8))
    answer = await ctx.outcome(question)
    signal = await ctx.outcome(ctx.receive(chat, timeout=timedelta(seconds=8)))
    return f"{type(answer).__name__}, {type(signal).__name__}"


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
    """Record a subtask, send a status, then run for a while, or fail."""
    return await _run_recorded(ctx, milliseconds)


async def _run_recorded(ctx: TaskExecutionContext, milliseconds: int) -> str:
    await ctx.subtask("draw", draw_ticket)
    if milliseconds < 0:
        raise ValueError("no time")
    await ctx.update_status("writing")
    await asyncio.sleep(min(milliseconds, 3000) / 1000)
    return "written"


__all__ = [
    "asker",
    "clerk",
    "diary",
    "doubter",
    "dozer",
    "light",
    "root",
    "sleeper",
    "solo",
    "spark",
    "teller",
]
