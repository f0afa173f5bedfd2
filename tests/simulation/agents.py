"""The agents: `root` pauses twice, `nested` pauses once between subtasks, `leaf` answers.

`patient` is a function that sleeps and asks a person. The others are in `retrying_agents` and
`listener`.

`impatient` is a function, which cancels some of its steps and calls a leaf after each group of
them. What it calls depends on which steps it has cancelled, so a replay that cancels others fails.

`root` makes five calls per pause. Results depend only on the request's number, not on the order of
responses, so a wrong one is detected. Only subtasks return a new value at each run of their code,
which reveals a recorded subtask that ran again.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from datetime import timedelta
from typing import Any

from pydantic import JsonValue

from meshpoint.agents.function import FunctionAgent
from meshpoint.agents.peer import Peer
from meshpoint.model.calls import ALL, AT_LEAST, FIRST, Call, Done, Join, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.ids import new_id
from meshpoint.model.outcomes import Failed, Ok, Outcomes
from meshpoint.model.questions import Question

from .values import OnReturned, Think, leaf_value, nested_value

JOINS = (ALL, FIRST, AT_LEAST(3))
VALUES = {
    "leaf": leaf_value,
    "nested": nested_value,
    "impatient": leaf_value,
    "patient": leaf_value,
    "insistent": leaf_value,
    "listener": leaf_value,
}
MAY_LACK_RESULTS = ("nested", "impatient", "patient")
"""Agents that return null if a call has no result, or a question no answer."""
_MAY_RETURN_NULL = ("insistent", "listener")
"""Agents whose null is a result: all attempts at a call have failed, or no signal came."""
_PEERS = (
    ("leaf", "nested", "impatient", "patient", "insistent"),
    ("listener", "nested", "impatient", "patient", "leaf"),
    ("insistent", "nested", "listener", "patient", "leaf"),
)


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


class Impatient(FunctionAgent[int, int | None]):
    """Cancels steps that take too long, and the siblings of a step that fails."""

    name = "impatient"

    def __init__(self, think: Think, on_returned: OnReturned) -> None:
        super().__init__(self._serve, "impatient")
        self._think, self._on_returned = think, on_returned

    async def _serve(self, ctx: TaskExecutionContext, number: int) -> int | None:
        await self._think()
        limited = [self._limit(ctx, f"limited {n}", 0.1 * 4**n) for n in range(4)]
        done = await self._ask_leaf(ctx, number, await asyncio.gather(*limited))
        await self._think()
        return await self._ask_leaf(ctx, number, await self._fail_together(ctx)) and done

    async def _limit(self, ctx: TaskExecutionContext, name: str, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._record(ctx, name)
        except TimeoutError:
            return False
        return True

    async def _fail_together(self, ctx: TaskExecutionContext) -> list[bool]:
        siblings: list[asyncio.Task[None]] = []
        with suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                names = [f"sibling {n}" for n in range(3)]
                siblings += [group.create_task(self._record(ctx, name)) for name in names]
                group.create_task(ctx.step("failing", self._fail))
        return [not each.cancelled() for each in siblings]

    async def _ask_leaf(
        self, ctx: TaskExecutionContext, number: int, ended: list[bool]
    ) -> int | None:
        """Ask with an input that shows which steps have ended."""
        shift = 10_000 * sum(2**n for n, has_ended in enumerate(ended) if has_ended)
        outcome = await ctx.outcome(Peer("leaf", int, int)(number + shift))
        return outcome.value - leaf_value(shift) if isinstance(outcome, Ok) else None

    async def _record(self, ctx: TaskExecutionContext, name: str) -> None:
        self._on_returned(ctx.task_id, name, await ctx.step(name, self._step))

    async def _step(self) -> str:
        await self._think()
        return new_id()

    async def _fail(self) -> None:
        await self._think()
        raise ValueError("as planned")


class Patient(FunctionAgent[int, int | None]):
    """Sleeps, and asks a person twice. A question without an answer is asked up to three times."""

    name = "patient"

    def __init__(self, think: Think, on_returned: OnReturned) -> None:
        super().__init__(self._serve, "patient")
        self._think = think

    async def _serve(self, ctx: TaskExecutionContext, number: int) -> int | None:
        await self._think()
        began, duration = ctx.now(), timedelta(seconds=(0, 0.3, 2, 10)[number % 4])
        await ctx.sleep(duration)
        slept = ctx.now() - began
        if slept < duration - _MAX_SKEW:
            raise AssertionError(f"slept for {slept} instead of {duration}")
        await self._think()
        confirmed = await self._ask(ctx, number)
        if confirmed is None:
            return None
        first, _ = await ctx.gather_outcomes(ctx.sleep(1), ctx.sleep(3600), join=FIRST)
        if not isinstance(first, Ok):
            raise AssertionError(f"the shorter sleep is {first}")
        return confirmed and await self._ask(ctx, number + 1) and leaf_value(number)

    async def _ask(self, ctx: TaskExecutionContext, number: int) -> bool | None:
        """Ask for `number + 1`, which is never 0. `None` if the question gets no answer."""
        for _ in range(3):
            try:
                answer = await ctx.wait_for(
                    _CONFIRM, prompt=str(number + 1), timeout=(2, 10, 30)[number % 3]
                )
            except TimeoutError:
                await ctx.sleep(4)  # an answer is kept meanwhile
                continue
            if answer != number + 1:
                raise AssertionError(f"question {number + 1} has the answer {answer}")
            return True
        return None


_CONFIRM = Question("confirm", int)
_MAX_SKEW = timedelta(seconds=0.5)
"""Maximum difference of two replicas' clocks."""


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
            case Ok(value=None) if peer in MAY_LACK_RESULTS:
                pass
            case Ok(value=None) if peer in _MAY_RETURN_NULL:
                result_count += 1
            case Ok(value=value) if value == VALUES[peer](number):
                result_count += 1
            case Failed(kind=kind) if kind in {"timeout", "cancelled"}:
                pass
            case _:
                wrong.append(f"{peer}({number}) is {outcome}")
    return wrong, max((join.needed or len(calls)) - result_count, 0)


def _calls_of(number: int, pauses: int) -> list[tuple[str, int]]:
    first = 10 * number + 100 * pauses
    return [(peer, first + n) for n, peer in enumerate(_PEERS[(number + pauses) % len(_PEERS)])]


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
