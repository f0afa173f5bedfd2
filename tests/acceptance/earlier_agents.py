"""Agents that a release without retries and signals can also run, without those features."""

from __future__ import annotations

from typing import Any

import meshpoint
from meshpoint import Peer, TaskExecutionContext, agent

_IS_EARLIER = not hasattr(meshpoint, "Signal")
_RETRY: Any = (
    {} if _IS_EARLIER else {"retry": meshpoint.RetryPolicy(max_attempts=3, initial_interval=0.1)}
)
peer = Peer("peer", int, int, **_RETRY)


async def _call(ctx: Any, number: int) -> int:
    answer: int = await (ctx.call(peer(number)) if _IS_EARLIER else peer(number))
    return answer


@agent("root")
async def retrying(ctx: TaskExecutionContext, number: int) -> int:
    """Call the peer, with retries."""
    return await _call(ctx, number)


@agent("root")
async def listening(ctx: TaskExecutionContext, number: int) -> int:
    """Receive a signal. The code of the earlier release calls the peer instead."""
    if _IS_EARLIER:
        return await _call(ctx, number)
    return await ctx.receive(meshpoint.Signal("chat", int))
