"""Scripted agents, gates and subtasks shared by the engine tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pydantic import JsonValue

from meshpoint.agents.function import FunctionAgent, agent
from meshpoint.agents.peer import Peer
from meshpoint.model.calls import ALL, Call, Done, Join, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.outcomes import Ok, Outcomes
from run_log import RunLog

doubler_peer = Peer("doubler", int, int)


@agent("doubler", version="1")
async def doubler(ctx: TaskExecutionContext, number: int) -> int:
    return number * 2


@agent("summer", version="1")
async def summer(ctx: TaskExecutionContext, numbers: list[int]) -> int:
    doubled = await ctx.gather(*[doubler_peer(number) for number in numbers])
    return sum(doubled)


class ScriptedAgent:
    """An agent whose `start` and `resume` are functions given by the test."""

    def __init__(
        self,
        name: str,
        start: Callable[[TaskExecutionContext, Any], Awaitable[Any]],
        resume: Callable[[TaskExecutionContext, bytes, Outcomes], Awaitable[Any]] | None = None,
        *,
        state_format: str = "scripted/1",
        readable_formats: frozenset[str] | None = None,
    ) -> None:
        self.name, self.state_format = name, state_format
        self.readable_formats = readable_formats or frozenset({state_format})
        self._start, self._resume = start, resume

    async def start(self, ctx: TaskExecutionContext, request: Any) -> Any:
        return await self._start(ctx, request)

    async def resume(self, ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes) -> Any:
        assert self._resume is not None
        return await self._resume(ctx, state, outcomes)


def outcome_values(outcomes: Outcomes) -> JsonValue:
    """Outcomes as JSON: the value of each success, the kind of each failure."""
    return {
        key: outcome.value if isinstance(outcome, Ok) else outcome.kind.value
        for key, outcome in outcomes.items()
    }


def asker(name: str, *peers: str, join: Join = ALL, **call: Any) -> ScriptedAgent:
    """An agent that passes its input to each of `peers` and returns their outcomes by peer."""

    async def start(ctx: TaskExecutionContext, request: Any) -> Paused:
        return Paused([Call(peer, peer, request, **call) for peer in peers], b"state", join)

    return ScriptedAgent(name, start, _answer)


def caller(name: str, calls: Callable[[Any], Sequence[Call]], join: Join = ALL) -> ScriptedAgent:
    """An agent that makes `calls(input)` and returns their outcomes by call name."""

    async def start(ctx: TaskExecutionContext, request: Any) -> Paused:
        return Paused(list(calls(request)), b"state", join)

    return ScriptedAgent(name, start, _answer)


async def _answer(ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes) -> Done[JsonValue]:
    return Done(outcome_values(outcomes))


class Gate:
    """A point where agent code waits until the test opens it; counts visits and cancellations."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()
        self.visits = 0
        self.cancelled = 0

    async def __call__(self) -> None:
        self.visits += 1
        self.reached.set()
        try:
            await self.opened.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def wait_reached(self, visits: int = 1) -> None:
        while self.visits < visits:
            self.reached.clear()
            await self.reached.wait()


def gated(name: str, gate: Gate, output: JsonValue = "done") -> ScriptedAgent:
    """An agent with a single segment, which waits at `gate`."""

    async def start(ctx: TaskExecutionContext, request: Any) -> Done[JsonValue]:
        await gate()
        return Done(output)

    return ScriptedAgent(name, start)


def gated_after(name: str, peer: str, gate: Gate) -> ScriptedAgent:
    """An agent that calls `peer` and waits at `gate` in its second segment."""

    async def start(ctx: TaskExecutionContext, request: Any) -> Paused:
        return Paused([Call(peer, peer, request)], b"state")

    async def resume(
        ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes
    ) -> Done[JsonValue]:
        await gate()
        return Done(outcome_values(outcomes))

    return ScriptedAgent(name, start, resume)


class Steps:
    """Subtasks for agents: `await steps(ctx, "a", 1)` records "a" in `started` and returns 2.

    It first waits at the gate of "a", if that gate was created.
    """

    def __init__(self) -> None:
        self.started, self.ended = RunLog(), RunLog()
        self.gates: dict[str, Gate] = {}

    def gate(self, name: str) -> Gate:
        """The gate inside subtask `name`, created on first use."""
        return self.gates.setdefault(name, Gate())

    async def step(self, name: str, number: int) -> int:
        self.started(name)
        if name in self.gates:
            await self.gates[name]()
        self.ended(name)
        return number + 1

    async def __call__(self, ctx: TaskExecutionContext, name: str, number: int) -> int:
        return await ctx.subtask(name, self.step, name, number)


def sequential_agent(
    steps: Steps, *names: str, name: str = "agent", **options: Any
) -> FunctionAgent[int, int]:
    """An agent with a subtask for each name, adding one to its input; the name "fail" raises."""

    @agent(name, **{"version": "1", **options})
    async def run_in_sequence(ctx: TaskExecutionContext, number: int) -> int:
        for subtask in names:
            if subtask == "fail":
                raise ValueError("it failed; password=hunter2")
            number = await steps(ctx, subtask, number)
        return number

    return run_in_sequence
