"""Calls that fail and are retried: `insistent` calls `flaky` with several policies.

`flaky` fails at random, so two runs of one attempt may have different outcomes.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from random import random

from meshpoint.agents.function import FunctionAgent
from meshpoint.agents.peer import Peer, PeerCall
from meshpoint.errors import AgentFailed
from meshpoint.model.calls import ALL, AT_LEAST, FIRST
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome
from meshpoint.model.retry_policy import RetryPolicy

from .values import OnReturned, Think, leaf_value

RETRYABLE, FINAL = "try again", "never try again"
"""Messages of `flaky`'s failures."""
_SLOW_SECONDS, _TIMEOUT = 7.0, 5.0
_JOINS = (ALL, FIRST, AT_LEAST(2), ALL.within(timedelta(seconds=12)))
_POLICIES = (
    RetryPolicy(max_attempts=3, initial_interval=0.5, jitter=False),
    RetryPolicy(max_attempts=5, initial_interval=1, max_interval=2),
    RetryPolicy(max_attempts=4, initial_interval=0, retry_on=["timeout"]),
    RetryPolicy(max_attempts=4, initial_interval=1, max_elapsed=6),
)


class Flaky(FunctionAgent[int, int]):
    """Answers, fails, gives advice about retries, or takes longer than a call's timeout."""

    name = "flaky"

    def __init__(self, think: Think, on_returned: OnReturned) -> None:
        super().__init__(self._serve, "flaky")
        self._think = think

    async def _serve(self, ctx: TaskExecutionContext, number: int) -> int:
        await self._think()
        draw = random()  # seeded by the run
        if draw < 0.45:
            return leaf_value(number)
        if draw < 0.6:
            await asyncio.sleep(_SLOW_SECONDS)
            return leaf_value(number)
        if draw < 0.7:
            raise AgentFailed(FINAL, retryable=False)
        raise AgentFailed(RETRYABLE, retry_after=2 if draw < 0.8 else None)


class Insistent(FunctionAgent[int, int | None]):
    """Makes calls that are retried; returns null if one has no result."""

    name = "insistent"

    def __init__(self, think: Think, on_returned: OnReturned) -> None:
        super().__init__(self._serve, "insistent")
        self._think = think

    async def _serve(self, ctx: TaskExecutionContext, number: int) -> int | None:
        await self._think()
        calls = [_call(number + n) for n in range(3)]
        outcomes = await ctx.gather_outcomes(*calls, join=_JOINS[number % 4])
        succeeded = [_succeeded(number + n, outcome) for n, outcome in enumerate(outcomes)]
        await self._think()
        last = _succeeded(number, await ctx.outcome(_call(number)))
        return leaf_value(number) if any(succeeded) and last else None


def _call(number: int) -> PeerCall[int]:
    timeout = _TIMEOUT if number % 3 else None
    return Peer("flaky", int, int, timeout=timeout, retry=_POLICIES[number % 4])(number)


def _succeeded(number: int, outcome: Outcome) -> bool:
    match outcome:
        case Ok(value=value) if value == leaf_value(number):
            return True
        case Failed(kind=FailureKind.ERROR, message=message) if message in {RETRYABLE, FINAL}:
            return False
        case Failed(kind=FailureKind.TIMEOUT | FailureKind.CANCELLED):
            return False
        case _:
            raise AssertionError(f"flaky({number}) is {outcome}")
