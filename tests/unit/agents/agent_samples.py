"""Peers and contexts for the agent tests."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from pydantic import BaseModel

from meshpoint import (
    Call,
    Failed,
    FailureKind,
    FunctionAgent,
    Ok,
    Outcome,
    Paused,
    Peer,
    TaskExecutionContext,
    agent,
)
from meshpoint.model.ids import TaskId
from meshpoint.testing.conformance.agent import answered


class Quote(BaseModel):
    price: int


double_peer = Peer("double", int, Quote, timeout=timedelta(seconds=30))
shout_peer = Peer("shout", str, str)


def answer_any(call: Call) -> Outcome:
    """Outcomes of peers that answer every call."""
    match call.peer, call.input:
        case "double", int() as number:
            return Ok({"price": 2 * number})
        case "shout", str() as text:
            return Ok(text.upper())
    raise AssertionError(f"unexpected {call}")


def failing_answers(
    kind: FailureKind = FailureKind.ERROR, peer: str | None = None
) -> Callable[[Call], Outcome]:
    """Outcomes of peers of which one (`peer`), or each, fails."""
    return lambda call: Failed(kind, "sorry") if peer in (None, call.peer) else answer_any(call)


def create_context() -> TaskExecutionContext:
    return TaskExecutionContext(TaskId("t"))


async def start_and_pause(function_agent: FunctionAgent[Any, Any], request: Any = 1) -> Paused:
    result = await function_agent.start(create_context(), request)
    assert isinstance(result, Paused)
    return result


async def resume_agent(
    function_agent: FunctionAgent[Any, Any], state: Paused, answer: Any = answer_any
) -> Any:
    return await function_agent.resume(create_context(), state.state, answered(state, answer))


@agent("travel", version="3")
async def travel(ctx: TaskExecutionContext, days: int) -> str:
    """Several pauses: in a loop, in a branch, and for two peers at once."""
    total = 0
    for day in range(days):
        total += (await double_peer(day)).price
    if total > 2:
        quote, text = await ctx.gather(double_peer(total), shout_peer("dear"))
        return f"{text} {quote.price}"
    return await shout_peer("cheap")
