"""The agents: `root` pauses twice, `nested` pauses once between subtasks, `leaf` answers.

`root` makes five calls per pause. Results depend only on the request's number, not on the order of
responses, so a wrong one is detected. Only subtasks return a new value at each run of their code,
which reveals a recorded subtask that ran again.
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
"""Spends an agent's time: a moment, or more than a lease."""
OnReturned = Callable[[str, str, str], None]
"""Called with task, subtask or step, and result when it returns."""


def leaf_value(number: int) -> int:
    """Result of `leaf`."""
    return 2 * number


def nested_value(number: int) -> int:
    """Result of `nested`."""
    return leaf_value(number) + leaf_value(number + 1)


VALUES = {"leaf": leaf_value, "nested": nested_value}


def joins_of(number: int) -> tuple[Join, Join]:
    """Joins of the two pauses of request `number`; all nine pairs take turns."""
    return JOINS[number % 3], JOINS[number // 3 % 3]


class _Agent:
    """Common base of the three agents."""

    name: str
    state_format = "simulated/1"

    def __init__(self, think: Think, on_returned: OnReturned) -> None:
        self._think, self._on_returned = think, on_returned

    async def resume(self, ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes) -> Any:
        raise AssertionError("this agent never pauses")


class Leaf(_Agent):
    """Answers in its first segment."""

    name = "leaf"

    async def start(self, ctx: TaskExecutionContext, request: Any) -> Any:
        """Return twice the number."""
        await self._think()
        return Done(leaf_value(request))


class Nested(_Agent):
    """Calls two leaves between its subtasks; returns null if either has no result."""

    name = "nested"

    async def start(self, ctx: TaskExecutionContext, request: Any) -> Any:
        """Call the leaves."""
        await self._think()
        await asyncio.gather(self._record(ctx, "step a"), self._record(ctx, "step b"))
        await self._subtask(ctx, "before", request)
        return Paused(
            [Call(str(n), "leaf", request + n) for n in range(2)], json.dumps(request).encode()
        )

    async def resume(self, ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes) -> Any:
        """Add up the results."""
        await self._think()
        number = json.loads(state)
        await asyncio.gather(
            self._subtask(ctx, "left", number), self._subtask(ctx, "right", number)
        )
        await self._record(ctx, "step a")
        await self._subtask(ctx, "after", number)
        wrong, late = check_outcomes(outcomes, [("leaf", number + n) for n in range(2)], ALL)
        if wrong:
            raise AssertionError(wrong)
        return Done(None if late else nested_value(number))

    async def _subtask(self, ctx: TaskExecutionContext, name: str, number: int) -> None:
        self._on_returned(ctx.task_id, name, await ctx.subtask(name, self._step, number))

    async def _record(self, ctx: TaskExecutionContext, name: str) -> None:
        self._on_returned(ctx.task_id, name, await ctx.step(name, self._step, 0))

    async def _step(self, number: int) -> str:
        await self._think()
        return new_id()


class Root(_Agent):
    """Pauses twice; returns its number and every wrong outcome it has seen."""

    name = "root"

    async def start(self, ctx: TaskExecutionContext, request: Any) -> Any:
        """First pause. A `tight` request gives its calls little time."""
        await self._think()
        return _pause_for_calls({**request, "pauses": 1, "wrong": [], "late": 0})

    async def resume(self, ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes) -> Any:
        """Second pause, then the end."""
        await self._think()
        state_data = json.loads(state)
        pauses, number = state_data["pauses"], state_data["number"]
        wrong, late = check_outcomes(
            outcomes, _calls_of(number, pauses), joins_of(number)[pauses - 1]
        )
        state_data = {
            **state_data,
            "wrong": state_data["wrong"] + wrong,
            "late": state_data["late"] + late,
        }
        return _pause_for_calls({**state_data, "pauses": 2}) if pauses == 1 else Done(state_data)


def check_outcomes(
    outcomes: Outcomes, calls: list[tuple[str, int]], join: Join
) -> tuple[list[str], int]:
    """Wrong outcomes of a pause, and the number of results missing from its join."""
    wrong, result_count = [], 0
    if list(outcomes) != [str(n) for n in range(len(calls))]:
        wrong.append(f"the calls are {list(outcomes)}")
    for (peer, number), outcome in zip(calls, outcomes.values(), strict=False):
        match outcome:
            case Ok(value=None) if peer == "nested":
                pass
            case Ok(value=value) if value == VALUES[peer](number):
                result_count += 1
            case Failed(kind=kind) if kind in {"timeout", "cancelled"}:
                pass
            case _:
                wrong.append(f"{peer}({number}) is {outcome}")
    return wrong, max((join.needed or len(calls)) - result_count, 0)


def _calls_of(number: int, pauses: int) -> list[tuple[str, int]]:
    first = 10 * number + 100 * pauses
    return [("nested" if n % 2 else "leaf", first + n) for n in range(FAN_OUT)]


def _pause_for_calls(state: dict[str, JsonValue]) -> Paused:
    number, pauses = state["number"], state["pauses"]
    assert isinstance(number, int)
    assert isinstance(pauses, int)
    timeout = timedelta(seconds=8) if state["tight"] else None
    calls = [
        Call(str(n), peer, each, timeout)
        for n, (peer, each) in enumerate(_calls_of(number, pauses))
    ]
    return Paused(calls, json.dumps(state).encode(), joins_of(number)[pauses - 1])


async def short_sleep(seconds: float) -> None:
    await asyncio.sleep(seconds)
