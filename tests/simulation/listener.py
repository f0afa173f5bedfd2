"""`listener` receives signals one by one, two at once, and in races with a sleep."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from meshpoint.agents.function import FunctionAgent
from meshpoint.model.calls import ALL, FIRST
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.outcomes import Ok
from meshpoint.model.signals import Signal
from meshpoint.model.waitable import Waitable

from .values import OnReceived, Think, leaf_value

RECEIVED = "received"
"""Key of the value that says how many signals the task has received."""
_MAX_ROUNDS = 8


class Line(BaseModel):
    """A signal. `text` is `id`, unless it was sent under a used id."""

    id: str
    text: str
    is_last: bool = False


CHAT, STOP = Signal("chat", Line), Signal("stop", Line)


class Listener(FunctionAgent[int, int | None]):
    """Receives signals until the last one; returns null if it does not come."""

    name = "listener"

    def __init__(self, think: Think, on_received: OnReceived) -> None:
        super().__init__(self._serve, "listener")
        self._think, self._on_received = think, on_received

    async def _serve(self, ctx: TaskExecutionContext, number: int) -> int | None:
        received = list[tuple[str, Line]]()
        timeout = (2, 5, 15)[number % 3]
        for round_ in range(number, number + _MAX_ROUNDS):
            await self._think()
            lines = await self._listen(ctx, round_, timeout)
            received += lines
            self._on_received(ctx.task_id, [(name, line.id) for name, line in received])
            for _, line in lines:
                if line.text != line.id:
                    raise AssertionError(f"received {line}, whose id was used for another value")
            await ctx.set_value(RECEIVED, len(received))
            if any(line.is_last for _, line in lines):
                return leaf_value(number)
        return None

    async def _listen(
        self, ctx: TaskExecutionContext, round_: int, timeout: float
    ) -> list[tuple[str, Line]]:
        signals, waits, join = [CHAT], list[Waitable[Any]](), ALL
        if round_ % 3 == 2:
            signals, waits, join = [STOP, CHAT, CHAT], [ctx.sleep(timeout)], FIRST
        elif round_ % 3 == 1:
            signals = [CHAT, STOP, CHAT]
        limit = None if waits else timeout
        waits = [*(ctx.receive(each, timeout=limit) for each in signals), *waits]
        outcomes = await ctx.gather_outcomes(*waits, join=join)
        if join == FIRST and sum(isinstance(each, Ok) for each in outcomes) > 1:
            raise AssertionError(f"the race has the results {outcomes}")
        return [
            (signal.name, outcome.value)
            for signal, outcome in zip(signals, outcomes, strict=False)
            if isinstance(outcome, Ok)
        ]
