"""The agents under chaos: `root` asks five peers at once, `middle` asks `leaf`, `leaf` has an effect and answers.

What each must answer follows from its input, so that a wrong answer is seen.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import zlib

from pydantic import BaseModel

from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.model.calls import ALL, Join
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome

WIDTH = 5
"""Peers that `root` asks at once."""
WORKS, IGNORES = 9.0, 60.0
"""Seconds that `stubborn` takes, longer than a drain waits, and those for which it ignores a cancel."""
EFFECTS = "CHAOS_EFFECTS"
"""The environment variable that names the file of effects."""


class Work(BaseModel):
    """What one request wants of `root`: `nested` asks by way of `middle`; `needed` results meet its joins.

    With `recorded`, each round begins and ends with a subtask. With `remembered`, each round counts itself and its
    answers in the working memory, which must have all of them in the end, each once.
    """

    number: int
    rounds: int = 1
    nested: bool = False
    needed: int | None = None
    recorded: bool = False
    remembered: bool = False


class Piece(BaseModel):
    """What `root` asks of one peer."""

    number: int
    round: int
    index: int

    def value(self) -> int:
        """What `leaf` answers."""
        return zlib.crc32(f"{self.number} {self.round} {self.index}".encode())

    def seconds(self) -> float:
        """How long `leaf` takes: some milliseconds, so that a fault finds work under way."""
        return 0.005 + self.value() % 40 / 1000


Answer = list[list[int | None]]
"""For each round, each peer's value; None where the join closed the call."""

leaf_peer = Peer("leaf", Piece, int)
middle_peer = Peer("middle", Piece, int)


def right(agent_name: str, work: Work, outcome: Outcome) -> bool:
    """Whether `outcome` is allowed for the agent."""
    match agent_name:
        case "viper":
            return isinstance(outcome, Failed) and outcome.kind is FailureKind.ERROR
        case "stubborn":
            return isinstance(outcome, Ok) and outcome.value == work.number
        case _:
            return isinstance(outcome, Ok) and _all_right(work, outcome.value)


def _all_right(work: Work, answer: object) -> bool:
    if not isinstance(answer, list) or len(answer) != work.rounds:
        return False
    return all(_right(work, number, values) for number, values in enumerate(answer))


def _right(work: Work, number: int, values: object) -> bool:
    if not isinstance(values, list) or len(values) != WIDTH:
        return False
    expected = [Piece(number=work.number, round=number, index=index).value() for index in range(WIDTH)]
    given = [value for value in values if value is not None]
    fitting = all(value in {None, wanted} for value, wanted in zip(values, expected, strict=True))
    return fitting and len(given) >= (work.needed or WIDTH)


@agent("root", version="1")
async def root(ctx: TaskExecutionContext, work: Work) -> Answer:
    """The peers' values, round by round."""
    _note("root", ctx.task_id, work.number)
    peer, join = middle_peer if work.nested else leaf_peer, Join(work.needed) if work.needed else ALL
    answer: Answer = []
    for number in range(work.rounds):
        if work.remembered and (count := await ctx.memory.incr("rounds")) != number + 1:
            raise AssertionError(f"round {number} is number {count} in the memory")
        ticket = await ctx.subtask(f"draw-{number}", draw) if work.recorded else None
        pieces = [Piece(number=work.number, round=number, index=index) for index in range(WIDTH)]
        values = await ctx.gather(*[peer(piece) for piece in pieces], join=join, return_errors=True)
        answer.append([None if isinstance(value, Failed) else value for value in values])
        if work.remembered:
            await ctx.memory.rpush("answers", json.dumps(answer[-1]))
        await asyncio.sleep(0.01)
        if ticket is not None and (kept := await ctx.subtask(f"keep-{number}", keep, ticket)) != ticket:
            raise AssertionError(f"ticket {number} was drawn twice: {kept}, then {ticket}")
    if work.remembered and (kept := await ctx.memory.lrange("answers")) != [
        json.dumps(each).encode() for each in answer
    ]:
        raise AssertionError(f"the memory has {kept}, the answers are {answer}")
    return answer


@agent("viper", version="1")
async def viper(ctx: TaskExecutionContext, work: Work) -> None:
    """Kills its process: no neighbour may lose its process to it more than twice, and it must fail."""
    _note("viper", ctx.task_id, work.number)
    os.kill(os.getpid(), signal.SIGKILL)


@agent("stubborn", version="1")
async def stubborn(ctx: TaskExecutionContext, work: Work) -> int:
    """Works for a while, and for a minute more when it is cancelled."""
    _note("stubborn", ctx.task_id, work.number)
    end, ignored = time.monotonic() + WORKS, False
    while (left := end - time.monotonic()) > 0:
        try:
            await asyncio.sleep(left)
        except asyncio.CancelledError:
            end, ignored = end if ignored else time.monotonic() + IGNORES, True
    return work.number


async def draw() -> str:
    """Something else each time it runs: whoever goes on with the task must find the first that was recorded."""
    await asyncio.sleep(0.005)
    return os.urandom(8).hex()


async def keep(ticket: str) -> str:
    """The ticket. One that differs from the recorded one is refused as an input, which fails the task."""
    return ticket


@agent("middle", version="1")
async def middle(ctx: TaskExecutionContext, piece: Piece) -> int:
    """What `leaf` answers."""
    _note("middle", ctx.task_id, piece.number, piece.round, piece.index)
    return await ctx.call(leaf_peer(piece))


@agent("leaf", version="1")
async def leaf(ctx: TaskExecutionContext, piece: Piece) -> int:
    """Has an effect outside the mesh, then answers."""
    await asyncio.sleep(piece.seconds())
    _note("leaf", ctx.task_id, piece.number, piece.round, piece.index)
    return piece.value()


def _note(*what: object) -> None:
    """One line in the file of effects, in one write: whole, whoever dies next."""
    file = os.open(os.environ[EFFECTS], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, (" ".join(str(each) for each in what) + "\n").encode())
    finally:
        os.close(file)
