"""The cast: `root` pauses twice for five calls each, `nested` pauses once, between subtasks, `leaf` answers.

Every result follows from the request's number alone, whatever answers first, so that a wrong one shows. Only what
subtasks return is another thing each time their code runs: so it shows when one ran again that was recorded.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

from pydantic import JsonValue

from meshpoint.model.calls import ALL, AT_LEAST, FIRST, Call, Done, Join, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.ids import new_id
from meshpoint.model.outcomes import Failed, Ok, Outcomes

FAN_OUT = 5
JOINS = (ALL, FIRST, AT_LEAST(3))
Think = Callable[[], Awaitable[None]]
"""Takes an agent's time: a moment, or more than a lease."""
Returned = Callable[[str, str, str], None]
"""Hears of each deliverable that a subtask returned: of which task, of which subtask, and what."""


def leaf_value(number: int) -> int:
    """What `leaf` answers."""
    return 2 * number


def nested_value(number: int) -> int:
    """What `nested` answers."""
    return leaf_value(number) + leaf_value(number + 1)


VALUES = {"leaf": leaf_value, "nested": nested_value}


def joins_of(number: int) -> tuple[Join, Join]:
    """The joins of the two pauses of request `number`: all nine pairs take their turn."""
    return JOINS[number % 3], JOINS[number // 3 % 3]


class _Agent:
    """What the three have in common."""

    name: str
    state_format = "simulated/1"

    def __init__(self, think: Think, returned: Returned) -> None:
        self._think, self._returned = think, returned

    async def resume(self, ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes) -> Any:
        raise AssertionError("it never pauses")


class Leaf(_Agent):
    """Answers in its first segment."""

    name = "leaf"

    async def start(self, ctx: TaskExecutionContext, request: Any) -> Any:
        """Twice the number."""
        await self._think()
        return Done(leaf_value(request))


class Nested(_Agent):
    """Asks two leaves between its subtasks; answers null if one of them has no result."""

    name = "nested"

    async def start(self, ctx: TaskExecutionContext, request: Any) -> Any:
        """Ask."""
        await self._think()
        await self._subtask(ctx, "before", request)
        return Paused([Call(str(n), "leaf", request + n) for n in range(2)], json.dumps(request).encode())

    async def resume(self, ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes) -> Any:
        """Add up."""
        await self._think()
        number = json.loads(state)
        await asyncio.gather(self._subtask(ctx, "left", number), self._subtask(ctx, "right", number))
        await self._subtask(ctx, "after", number)
        wrong, late = judge(outcomes, [("leaf", number + n) for n in range(2)], ALL)
        if wrong:
            raise AssertionError(wrong)
        return Done(None if late else nested_value(number))

    async def _subtask(self, ctx: TaskExecutionContext, name: str, number: int) -> None:
        self._returned(ctx.task_id, name, await ctx.subtask(name, self._step, number))

    async def _step(self, number: int) -> str:
        await self._think()
        return new_id()


class Root(_Agent):
    """Pauses twice; answers with its number and all that was not as it should be."""

    name = "root"

    async def start(self, ctx: TaskExecutionContext, request: Any) -> Any:
        """The first pause. A `tight` request gives its calls little time."""
        await self._think()
        return _ask({**request, "pauses": 1, "wrong": [], "late": 0})

    async def resume(self, ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes) -> Any:
        """The second pause, then the end."""
        await self._think()
        kept = json.loads(state)
        pauses, number = kept["pauses"], kept["number"]
        wrong, late = judge(outcomes, _asked(number, pauses), joins_of(number)[pauses - 1])
        kept = {**kept, "wrong": kept["wrong"] + wrong, "late": kept["late"] + late}
        return _ask({**kept, "pauses": 2}) if pauses == 1 else Done(kept)


def judge(outcomes: Outcomes, asked: list[tuple[str, int]], join: Join) -> tuple[list[str], int]:
    """What is wrong with the outcomes of a pause, and how many results are missing from its join."""
    wrong, good = [], 0
    if list(outcomes) != [str(n) for n in range(len(asked))]:
        wrong.append(f"the calls are {list(outcomes)}")
    for (peer, number), outcome in zip(asked, outcomes.values(), strict=False):
        match outcome:
            case Ok(value=None) if peer == "nested":
                pass
            case Ok(value=value) if value == VALUES[peer](number):
                good += 1
            case Failed(kind=kind) if kind in {"timeout", "cancelled"}:
                pass
            case _:
                wrong.append(f"{peer}({number}) is {outcome}")
    return wrong, max((join.needed or len(asked)) - good, 0)


def _asked(number: int, pauses: int) -> list[tuple[str, int]]:
    first = 10 * number + 100 * pauses
    return [("nested" if n % 2 else "leaf", first + n) for n in range(FAN_OUT)]


def _ask(state: dict[str, JsonValue]) -> Paused:
    number, pauses = state["number"], state["pauses"]
    assert isinstance(number, int)
    assert isinstance(pauses, int)
    timeout = timedelta(seconds=8) if state["tight"] else None
    calls = [Call(str(n), peer, each, timeout) for n, (peer, each) in enumerate(_asked(number, pauses))]
    return Paused(calls, json.dumps(state).encode(), joins_of(number)[pauses - 1])


async def moment(seconds: float) -> None:
    """Take so long."""
    await asyncio.sleep(seconds)
